"""INT8 and FP8 K and V: writing is `quantize` to the bit; attention is attention over what the numbers stand for."""

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, Paged, close, far_apart, in_8_bits, paged, sheltered

from kvlab_kernels import interpreter, launch
from kvlab_kernels.configs import DecodeConfig, VarlenConfig
from kvlab_kernels.gather import decode_reference, gather_pages
from kvlab_kernels.gqa_packed import gqa_packed_attention
from kvlab_kernels.naive import naive_attention
from kvlab_kernels.quantized import dequantized, error_bound, quantize_and_cache, quantize_and_cache_reference
from kvlab_kernels.split_kv import split_kv_attention
from kvlab_kernels.varlen import varlen_attention, varlen_reference

SMALL = DecodeConfig(16, 4, 2)
FP8 = torch.float8_e4m3fn
ATTENTIONS = {
    "gqa_packed": partial(gqa_packed_attention, config=SMALL),
    "1 split": partial(split_kv_attention, num_splits=1, config=SMALL),
    "3 splits": partial(split_kv_attention, num_splits=3, config=SMALL),
    "splits of 24": partial(split_kv_attention, split_tokens=24, config=SMALL),
}
every = pytest.mark.parametrize("attention", ATTENTIONS.values(), ids=ATTENTIONS.keys())
needs_bf16 = pytest.mark.skipif(
    launch.INTERPRETED and not interpreter.BF16_IS_RIGHT, reason="Triton's interpreter is wrong on bf16 here"
)
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_bf16)]


def decode(attention, case: Paged, scales, **options):
    out, wide = sheltered(case.q)
    assert attention(case.q, case.kv, case.block_tables, case.seq_lens, scales=scales, out=out, **options) is out
    kv = dequantized(case.kv, scales)
    close(out, decode_reference(case.q, kv, case.block_tables, case.seq_lens, scale=options.get("scale")))
    result = out.clone()
    out.fill_(7.0)
    assert (wide == 7.0).all(), "wrote outside of out"
    return result


@every
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8], ids=str)
def test_decodes(attention, dtype, kv_dtype):
    """Lengths around a block and a tile, an empty sequence, and one with three tiles in one program.

    Nobody owns block 0, which is what a masked entry of the table says.
    """
    case, scales = in_8_bits(paged([1, 0, 4, 5, 16, 17, 55], dtype=dtype, spare=15), kv_dtype)
    assert scales[:, 0].isnan().all()
    decode(attention, case, scales)


@every
@pytest.mark.parametrize("shape", [dict(group=7, head_dim=80), dict(num_kv_heads=3, block_size=3), dict(block_size=1)])
def test_shapes(attention, shape):
    decode(attention, *in_8_bits(paged([9, 30], **shape)))


@every
def test_scale_and_shared_blocks(attention):
    decode(attention, *in_8_bits(paged([19, 30], shared=2)), scale=0.5)


@every
def test_one_hot_scales_tell_whose_scale_was_used(attention):
    """K is 0, so all weights are equal; V is 1 for every number, so the result is the mean of V's scales, by head."""
    case, scales = in_8_bits(paged([13, 6]))
    case.kv[0] = torch.where(scales[0].isnan()[..., None], case.kv[0], 0)
    case.kv[1] = torch.where(scales[1].isnan()[..., None], case.kv[1], 1)
    count = torch.arange(scales[1].numel(), device=DEVICE).view_as(scales[1])
    scales[1] = torch.where(scales[1].isnan(), scales[1], count)
    out = decode(attention, case, scales)
    blocks = case.block_tables[1, :2].long()
    close(out[1, :, 0], scales[1, blocks].flatten(0, 1)[:6].mean(0).repeat_interleave(2))


@every
def test_zeros_of_scale_0(attention):
    case = paged([9])
    case.kv[0] = torch.where(case.kv[0].isnan(), case.kv[0], 0.0)
    decode(attention, *in_8_bits(case))


@every
def test_a_token_that_was_not_finite_makes_its_sequence_nan_and_no_other(attention):
    case = paged([9, 9])
    case.kv[0, case.block_tables[0, 1], 2, 0, 3] = torch.inf  # key of token 6, KV head 0
    case, scales = in_8_bits(case)
    assert scales[0].isinf().sum() == 1
    out = attention(case.q, case.kv, case.block_tables, case.seq_lens, scales=scales)
    assert out[0, :2].isnan().all() and not out[0, 2:].isnan().any() and not out[1].isnan().any()


@every
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 99), st.lists(st.integers(0, 40), min_size=1, max_size=3))
def test_the_error_bound_holds(attention, seed, seq_lens):
    case = paged(seq_lens, seed=seed)
    eight, scales = in_8_bits(case)
    out = attention(eight.q, eight.kv, eight.block_tables, eight.seq_lens, scales=scales)
    exact = decode_reference(case.q, case.kv, case.block_tables, case.seq_lens)
    keys, values = gather_pages(case.kv, case.block_tables, case.seq_lens, max(max(seq_lens), 1))
    for row, seq_len in enumerate(seq_lens):
        for head in range(case.q.shape[1] if seq_len else 0):
            of = row, slice(seq_len), head // 2
            bound = error_bound(case.q[row, head], keys[of], values[of])
            error = (out[row, head] - exact[row, head]).abs().max()
            assert 0 < error <= bound + 2e-5
            assert bound < values[of].abs().max(), "a bound as large as the values says nothing"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kv_dtype", [torch.int8, FP8], ids=str)
def test_varlen(dtype, kv_dtype):
    """Decodes, a whole prompt, a chunk behind a context that is not a multiple of anything, and padding."""
    case, scales = in_8_bits(paged([1, 33, 20, 37], [1, 1, 20, 11], padding=3, dtype=dtype), kv_dtype)
    out, wide = sheltered(case.q)
    args = (case.q, case.kv, case.block_tables, case.seq_lens, case.query_start_loc)
    varlen_attention(*args, scales=scales, out=out, config=VarlenConfig(16, 16, 4, 2))
    close(out[:33], varlen_reference(case.q, dequantized(case.kv, scales), *args[2:])[:33])
    out[:33].fill_(7.0)
    assert (wide == 7.0).all()


def test_offsets_beyond_31_bits():
    """The numbers lie far apart, the scales close together; then the other way round."""
    near = far_apart([4, 3, 2], block_size=4, num_kv_heads=1, head_dim=16)
    eight, scales = in_8_bits(near)
    stride = -(-(1 << 31) // (near.kv.shape[1] - 1))
    memory = torch.empty(near.kv.shape[1] * stride + (1 << 20), dtype=torch.int8, device=DEVICE)
    kv = memory.as_strided(near.kv.shape, (64, stride, *near.kv.stride()[2:])).copy_(eight.kv)
    decode(gqa_packed_attention, eight._replace(kv=kv), scales)
    k, v = torch.randn(2, 1, 1, 16, device=DEVICE)
    slots = torch.tensor([2 * 4 + 1], device=DEVICE)
    want = eight.kv.clone(), scales.clone()
    quantize_and_cache(k, v, kv, scales, slots)
    quantize_and_cache_reference(k, v, *want, slots)
    assert torch.equal(kv, want[0]) and torch.equal(scales.nan_to_num(), want[1].nan_to_num())


def written(k, v, slots, num_blocks=6, block_size=4):
    """k and v as slices of a projection, written by kernel and by oracle to caches full of sentinels, are equal."""
    num_tokens, num_kv_heads, head_dim = k.shape
    qkv = torch.cat((k.new_zeros(num_tokens, 3, head_dim), k, v), 1).to(DEVICE)
    _, k, v = qkv.split((3, num_kv_heads, num_kv_heads), dim=1)
    kv = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), 99, dtype=torch.int8, device=DEVICE)
    scales = torch.full(kv.shape[:4], -1.0, device=DEVICE)
    slots = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    got, want = (kv.clone(), scales.clone()), (kv, scales)
    quantize_and_cache(k, v, *got, slots)
    quantize_and_cache_reference(k, v, *want, slots)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    return got


def random_kv(num_tokens, num_kv_heads=2, head_dim=8, dtype=torch.float32, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator) * size).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_and_nothing_else_are_written(dtype):
    kv, scales = written(*random_kv(5, dtype=dtype), [3, 17, -1, 0, 23])
    assert (scales != -1).all(-1).flatten(1).nonzero()[:, 1].tolist() == 2 * [0, 3, 17, 23]
    assert (kv != 99).any(-1).any(-1).flatten(1).nonzero()[:, 1].tolist() == 2 * [0, 3, 17, 23]
    assert kv[scales != -1].abs().amax(-1).eq(127).all()  # each head uses its whole range


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 20), st.integers(1, 3), st.integers(1, 20), st.lists(st.integers(-1, 39), max_size=6, unique=True),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
)  # fmt: skip
def test_any_shape_and_size(block_size, num_kv_heads, head_dim, slots, size):
    k, v = random_kv(len(slots), num_kv_heads, head_dim, size=size)
    written(k, v, slots, -(-40 // block_size), block_size)


def test_zeros_halves_saturation_and_what_is_not_finite():
    k = torch.zeros(7, 1, 4)
    k[1] = torch.tensor([127.0, 0.5, -0.5, 1.5])
    k[2] = torch.tensor([1.0, torch.inf, 0, 0])
    k[3] = torch.tensor([1.0, torch.nan, 0, 0])
    k[4] = torch.tensor([-torch.inf, torch.nan, 0, 0])
    k[5] = 3e38
    k[6] = -1e-38
    kv, scales = written(k, k.flip(0), [*range(7)])
    keys, factors = kv[0].flatten(0, 1)[:7, 0].tolist(), scales[0].flatten()[:7].tolist()
    assert keys[0] == [0] * 4 and factors[0] == 0
    assert keys[1] == [127, 1, 0, 2]
    assert keys[2] == keys[3] == keys[4] == [0] * 4 and factors[2:5] == [torch.inf] * 3
    assert keys[5] == [127] * 4 and keys[6] == [-127] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "int8 without scales"),
        ({"scales": lambda s: s.half()}, r"scales is float16.*give float32 \[2, 3, 4, 2\]"),
        ({"scales": lambda s: s[:, :1]}, "scales is float32"),
        ({"scales": lambda s: s.transpose(2, 3).contiguous().transpose(2, 3)}, "each half contiguous"),
        ({"kv": lambda kv: kv.float()}, "only int8 and float8_e4m3fn have scales"),
        ({"q": lambda q: q.double()}, "q is torch.float64"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    case, scales = in_8_bits(paged([5], spare=1))
    args = case._asdict() | {"scales": scales}
    del args["query_start_loc"]
    args |= {name: make and make(args[name]) for name, make in change.items()}
    for attention in (gqa_packed_attention, split_kv_attention):
        with pytest.raises(ValueError, match=message):
            attention(**args)


def test_rungs_without_scales_say_so():
    case, scales = in_8_bits(paged([5]))
    with pytest.raises(ValueError, match="without scales: give them to gqa_packed, split_kv or varlen"):
        naive_attention(*case[:4])
    k, v = random_kv(1, head_dim=32)
    with pytest.raises(ValueError, match="only int8"):
        quantize_and_cache(k, v, case.kv.half(), scales, torch.tensor([0]))


@pytest.mark.skipif(not launch.INTERPRETED, reason="a GPU can")
def test_the_interpreter_does_not_write_fp8():
    case, scales = in_8_bits(paged([5]), FP8)
    k, v = random_kv(1, head_dim=32)
    with pytest.raises(ValueError, match="rounds to float8_e4m3fn wrongly"):
        quantize_and_cache(k, v, case.kv, scales, torch.tensor([0]))
