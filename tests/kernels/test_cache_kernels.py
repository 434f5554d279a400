"""Writing to slots, and gathering from pages."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, bits, far_apart, paged

from kvlab_kernels.cache_write import reshape_and_cache, reshape_and_cache_reference
from kvlab_kernels.gather import gather_attention, gather_pages, gather_pages_reference


def cache(num_blocks=6, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32):
    return torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=DEVICE)


def written(kv, slots, dtype=torch.float32):
    """k and v as slices of one projection, as the model has them, written to a copy each by kernel and oracle."""
    generator = torch.Generator().manual_seed(0)
    num_kv_heads, head_dim = kv.shape[3:]
    qkv = torch.randn(len(slots), 4 + 2 * num_kv_heads, head_dim, generator=generator).to(dtype).to(DEVICE)
    _, k, v = qkv.split((4, num_kv_heads, num_kv_heads), dim=1)
    slots = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    got, want = kv.clone(), kv.clone()
    reshape_and_cache(k, v, got, slots)
    reshape_and_cache_reference(k, v, want, slots)
    assert torch.equal(bits(got), bits(want))
    return got


def test_slots_and_nothing_else_are_written():
    kv = written(cache(), [3, 17, 16, 0, 23])
    assert (~kv.isnan()).all(-1).all(-1).flatten(1).nonzero()[:, 1].tolist() == 2 * [0, 3, 16, 17, 23]


def test_a_slot_of_minus_1_is_skipped():
    kv = written(cache(), [-1, 5, -1])
    assert int((~kv.isnan()).sum()) == 2 * 2 * 8


def test_written_again_it_is_the_same():
    kv = written(cache(), [3, 9])
    assert torch.equal(bits(written(kv, [3, 9])), bits(kv))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_it_converts_to_the_caches_dtype(dtype):
    written(cache(dtype=dtype), [3, 9, 4])
    written(cache(dtype=dtype), [3, 9, 4], dtype=dtype)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 80), (4, 128), (16, 96)])
def test_rows_of_any_width(num_kv_heads, head_dim):
    """16 heads of 96 are more than one program's share."""
    written(cache(num_kv_heads=num_kv_heads, head_dim=head_dim), [3, 9])


def test_no_tokens():
    written(cache(), [])


def test_slots_beyond_31_bits():
    kv = far_apart([4, 3, 2], head_dim=8).kv
    k, v = torch.full((1, 2, 8), 1.0, device=DEVICE), torch.full((1, 2, 8), 2.0, device=DEVICE)
    reshape_and_cache(k, v, kv, torch.tensor([10], device=DEVICE))
    assert (kv[0, 2, 2] == 1).all() and (kv[1, 2, 2] == 2).all()


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 20), st.integers(1, 3), st.integers(1, 20), st.lists(st.integers(-1, 39), max_size=6, unique=True)
)
def test_any_shape(block_size, num_kv_heads, head_dim, slots):
    num_blocks = -(-40 // block_size)
    written(cache(num_blocks, block_size, num_kv_heads, head_dim), slots)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(3, 2, 9)}, r"give floating point \['T', 2, 8\]"),
        ({"v": torch.zeros(2, 2, 8)}, "v is float32"),
        ({"k": torch.zeros(3, 2, 8, dtype=torch.int64)}, "k is int64"),
        ({"k": torch.zeros(3, 8, 2).transpose(1, 2)}, "the heads of one token must lie together"),
        ({"kv": torch.zeros(2, 6, 2, 4, 8).transpose(2, 3)}, "the heads of one slot must lie together"),
        ({"slot_mapping": torch.zeros(3, dtype=torch.int32)}, "slot_mapping is int32"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, r"contiguous int64 \[3\]"),
        ({"slot_mapping": torch.tensor([0, 24, 1])}, "slot 24, but the cache has 24 slots"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    args = {"k": torch.zeros(3, 2, 8), "v": torch.zeros(3, 2, 8), "kv": torch.zeros(2, 6, 4, 2, 8)}
    args["slot_mapping"] = torch.arange(3)
    with pytest.raises(ValueError, match=message):
        reshape_and_cache(**args | change)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_seq_len", [1, 30, 33, 70])
def test_gathered_pages(dtype, max_seq_len):
    """Longer sequences are cut, shorter ones are followed by zeros, whatever lies in their pages."""
    case = paged([33, 1, 0, 9], dtype=dtype, block_size=3, head_dim=20)
    got = gather_pages(case.kv, case.block_tables, case.seq_lens, max_seq_len)
    want = gather_pages_reference(case.kv, case.block_tables, case.seq_lens, max_seq_len)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[0].is_contiguous() and not got[1].isnan().any()
    if max_seq_len > 9:
        assert (got[0][3, 9:] == 0).all() and (got[1][1, 1:] == 0).all() and (got[0][2] == 0).all()


def test_pages_beyond_31_bits():
    case = far_apart([4, 3, 2], block_size=4, num_kv_heads=1, head_dim=16)
    got = gather_pages(case.kv, case.block_tables, case.seq_lens, 4)
    want = gather_pages_reference(case.kv, case.block_tables, case.seq_lens, 4)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_gather_attention_wants_a_width():
    case = paged([5])
    with pytest.raises(ValueError, match="max_seq_len is 0"):
        gather_attention(*case[:4], max_seq_len=0)
