"""The decode kernels of the ladder: each equals its oracle, whatever the lengths, shapes and garbage around."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, Paged, close, decode, far_apart, paged

from kvlab_kernels import interpreter, launch
from kvlab_kernels.configs import DecodeConfig
from kvlab_kernels.gather import decode_reference, gather_attention
from kvlab_kernels.gqa_packed import gqa_packed_attention
from kvlab_kernels.naive import naive_attention
from kvlab_kernels.online_softmax import online_softmax_attention, online_softmax_reference
from kvlab_kernels.split_kv import split_kv_attention

TILE = 16  # the smallest, so that short sequences have several
SMALL = DecodeConfig(TILE, 4, 2)


def gathered(q, kv, block_tables, seq_lens, *, out=None, scale=None):
    longest = max(seq_lens.tolist(), default=0) or 1
    out = torch.empty_like(q) if out is None else out
    return out.copy_(gather_attention(q, kv, block_tables, seq_lens, max_seq_len=longest, scale=scale))


ATTENTIONS = {
    "gather": gathered,
    "naive": naive_attention,
    "online_softmax": online_softmax_attention,
    "gqa_packed": partial(gqa_packed_attention, config=SMALL),
    "1 split": partial(split_kv_attention, num_splits=1, config=SMALL),
    "3 splits": partial(split_kv_attention, num_splits=3, config=SMALL),
    "20 splits": partial(split_kv_attention, num_splits=20, config=SMALL),
    "splits of 24": partial(split_kv_attention, split_tokens=24, config=SMALL),
}
every = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS.keys())
needs_bf16 = pytest.mark.skipif(
    launch.INTERPRETED and not interpreter.BF16_IS_RIGHT,
    reason="Triton's interpreter is wrong on bf16 in this version, and kvlab_kernels.interpreter does not know it",
)
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_bf16)]


@every
def test_lengths_around_a_block_and_a_tile(attention):
    decode(attention, paged([1, 3, 4, 5, TILE - 1, TILE, TILE + 1, 55]))


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(attention, dtype):
    decode(attention, paged([7, 50], dtype=dtype))


@every
@pytest.mark.parametrize("block_size", [1, 3, 16, 24, 256])
def test_block_sizes(attention, block_size):
    decode(attention, paged([1, 40], block_size=block_size, num_kv_heads=1))


@every
@pytest.mark.parametrize("group", [1, 4, 7, 8, 28])
def test_groups(attention, group):
    decode(attention, paged([9], group=group))


@every
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128])
def test_head_dims(attention, head_dim):
    decode(attention, paged([5, 18], head_dim=head_dim))


@every
def test_sequences_share_blocks(attention):
    case = paged([19, 30, 9], shared=2)
    assert torch.equal(case.block_tables[0, :2], case.block_tables[2, :2])
    decode(attention, case)


@every
def test_a_sequence_of_length_0_gives_zeros(attention):
    out = decode(attention, paged([0, 5]))
    assert (out[0] == 0).all()


@every
def test_large_scores_do_not_overflow(attention):
    decode(attention, paged([3, 37], scale=80.0))
    decode(attention, paged([3, 37], scale=-80.0))


@every
def test_the_scale_is_used(attention):
    decode(attention, paged([9]), scale=0.5)


@every
def test_equal_keys_average_the_values(attention):
    case = paged([37])
    case.kv[0] = torch.where(case.kv[0].isnan(), case.kv[0], 0.25)
    out = decode(attention, case)
    blocks = case.block_tables[0].long()
    values = case.kv[1, blocks].flatten(0, 1)[:37]  # [37, Hkv, D]
    close(out[0], values.mean(0).repeat_interleave(2, 0))


@every
def test_one_hot_values_tell_which_slots_were_read(attention):
    """V at position p is 1 in dimension p: the output is the weights themselves."""
    case = paged([30, 13])
    for row, seq_len in enumerate((30, 13)):
        for p in range(seq_len):
            case.kv[1, case.block_tables[row, p // 4], p % 4] = torch.eye(32, device=DEVICE)[p]
    out = decode(attention, case)
    for row, seq_len in enumerate((30, 13)):
        close(out[row].sum(-1), torch.ones(4, device=DEVICE))
        assert (out[row, :, :seq_len] > 0).all() and (out[row, :, seq_len:] == 0).all()


@every
def test_twice_the_same_bits(attention):
    case = paged([50, 7])
    assert torch.equal(decode(attention, case), decode(attention, case))


@every
def test_offsets_beyond_31_bits(attention):
    case = far_apart([4, 3, 2], block_size=4, num_kv_heads=1, head_dim=16)
    out = torch.empty_like(case.q)
    attention(case.q, case.kv, case.block_tables, case.seq_lens, out=out)
    close(out, decode_reference(case.q, case.kv, case.block_tables, case.seq_lens))


@every
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape(attention, data):
    draw = data.draw
    case = paged(
        draw(st.lists(st.integers(0, 40), min_size=1, max_size=3)),
        group=draw(st.integers(1, 9)),
        num_kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.integers(1, 40)),
        block_size=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 99)),
    )
    decode(attention, case)


@every
def test_no_sequences(attention):
    case = paged([5])
    out = attention(case.q[:0], case.kv, case.block_tables[:0], case.seq_lens[:0])
    assert out.shape == (0, 4, 32)


def test_online_softmax_in_plain_python():
    result, alphas = online_softmax_reference([2.0, 5.0, 7.0, 1.0], [1.0, -1.0, 3.0, 2.0])
    weights = torch.tensor([2.0, 5.0, 7.0, 1.0], dtype=torch.float64).softmax(0)
    assert result == pytest.approx(float(weights @ torch.tensor([1.0, -1.0, 3.0, 2.0], dtype=torch.float64)))
    assert alphas[0] == 0.0 and alphas[3] == 1.0 and 0 < alphas[1] < 1


BAD = [
    ({"kv": lambda c: c.kv[0]}, "kv has shape"),
    ({"kv": lambda c: c.kv.double()}, "float64"),
    ({"kv": lambda c: c.kv.transpose(3, 4)}, "the last dimension of kv has stride"),
    ({"kv": lambda c: c.kv[..., :16]}, "q is float32"),
    ({"kv": lambda c: c.kv.new_zeros(2, 2, 257, 2, 32)}, "block size is 257"),
    ({"kv": lambda c: c.kv.new_zeros(2, 2, 4, 2, 300)}, "head dim is 300"),
    ({"kv": lambda c: c.kv.half()}, "convert q"),
    ({"q": lambda c: c.q[:, :3]}, "multiple of the 2 KV heads"),
    ({"q": lambda c: c.q[:1]}, "1 rows for 2 block tables"),
    ({"q": lambda c: c.q.transpose(1, 2).contiguous().transpose(1, 2)}, "last dimension contiguous"),
    ({"block_tables": lambda c: c.block_tables.long()}, "block_tables is int64"),
    ({"block_tables": lambda c: c.block_tables[:, :1].contiguous()}, "widen block_tables"),
    ({"seq_lens": lambda c: c.seq_lens - 6}, "from -1 to 3"),
    ({"seq_lens": lambda c: c.seq_lens.long()}, "seq_lens is int64"),
    ({"seq_lens": lambda c: c.seq_lens[:1]}, r"contiguous int32 \[2\]"),
    ({"kv": lambda c: c.kv.to("meta")}, "move them to one device"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
@pytest.mark.parametrize("attention", [naive_attention, gqa_packed_attention, split_kv_attention])
def test_what_does_not_fit_is_refused(attention, change, message):
    case = Paged(*(x.cpu() for x in paged([5, 9])))  # where values are checked too
    args = {name: getattr(case, name) for name in ("q", "kv", "block_tables", "seq_lens")}
    args |= {name: make(case) for name, make in change.items()}
    with pytest.raises(ValueError, match=message):
        attention(**args)


def test_an_output_that_does_not_fit_is_refused():
    case = paged([5, 9])
    with pytest.raises(ValueError, match=r"give \[2, 4, 32\] of torch.float32"):
        naive_attention(case.q, case.kv, case.block_tables, case.seq_lens, out=case.q[:1])
