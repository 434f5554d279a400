"""RMSNorm, RoPE with the cache write, SwiGLU: each equals kvlab.model.layers, rounding for rounding."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, far_apart

from kvlab.model import layers
from kvlab.model.config import ModelConfig
from kvlab_kernels import interpreter, launch
from kvlab_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm
from kvlab_kernels.rope_cache import rope_and_cache, rope_and_cache_reference
from kvlab_kernels.swiglu import swiglu

needs_bf16 = pytest.mark.skipif(
    launch.INTERPRETED and not interpreter.BF16_IS_RIGHT, reason="Triton's interpreter is wrong on bf16 here"
)
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_bf16)]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def close(got, want, share=0.02):
    """fp32: a few steps of the numbers that were computed with, which are about 1. 16 bits: at most `share` of the
    numbers differ, and by two steps at most: those that lay so near the middle that the order of a sum decided."""
    exact = want.dtype == torch.float32
    size = want.double().abs().clamp(min=1.0 if exact else 1e-3)
    error = (got.double() - want.double()).abs()
    assert (error <= (8 if exact else 2) * torch.finfo(want.dtype).eps * size).all(), error.max()
    if not exact and want.numel():
        assert (got != want).double().mean() <= share


def inside(x, before=3, behind=2):
    """x as a slice of wider rows full of NaN."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + before + behind), torch.nan, dtype=x.dtype, device=x.device)
    wide[..., before:-behind] = x
    return wide[..., before:-behind]


# ---- RMSNorm


@every_dtype
@pytest.mark.parametrize("dim", [1, 24, 896, 3584])
def test_rms_norm(dim, dtype):
    x, weight = inside(randn(3, dim, dtype=dtype)), randn(dim, dtype=dtype, seed=1)
    close(rms_norm(x, weight, 1e-6), layers.rms_norm(x, weight, 1e-6))


@every_dtype
def test_rms_norm_of_heads(dtype):
    """As Qwen3 has it: a slice of the projection, one weight for all heads or one each."""
    qk = randn(5, 9, 24, dtype=dtype)[:, 1:7]
    for weight in (randn(24, dtype=dtype, seed=1), randn(6, 24, dtype=dtype, seed=1)):
        got = rms_norm(qk, weight, 1e-6)
        assert got.is_contiguous()
        close(got, layers.rms_norm(qk, weight, 1e-6))


@every_dtype
@pytest.mark.parametrize("dim", [24, 896])
def test_add_rms_norm(dim, dtype):
    x, residual = inside(randn(3, dim, dtype=dtype)), inside(randn(3, dim, dtype=dtype, seed=1) * 9)
    weight, before = randn(dim, dtype=dtype, seed=2), x.clone()
    expected_residual = residual.clone()
    want = add_rms_norm_reference(x, expected_residual, weight, 1e-6)
    close(add_rms_norm(x, residual, weight, 1e-6), want)
    assert torch.equal(residual, expected_residual) and torch.equal(x, before)
    base = residual._base
    assert base[:, :3].isnan().all() and base[:, -2:].isnan().all()


def test_the_row_is_rounded_before_the_weight():
    """In fp16 with a weight of many digits the two orders differ, and ours is that of transformers."""
    x, weight = randn(20, 64, dtype=torch.float16), randn(64, dtype=torch.float16, seed=1) * 3.1416
    wide = x.float()
    other = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * weight.float()).half()
    want = layers.rms_norm(x, weight, 1e-6)
    got = rms_norm(x, weight, 1e-6)
    assert (got != want).sum() < 20 < (other != want).sum()


def test_eps_and_zeros():
    x = torch.zeros(2, 8, device=DEVICE)
    x[1, 0] = 1e-4
    weight = torch.ones(8, device=DEVICE)
    close(rms_norm(x, weight, 1e-6), layers.rms_norm(x, weight, 1e-6))
    assert (rms_norm(x, weight, 1e-6)[0] == 0).all()


def test_squares_that_fp16_does_not_hold():
    x = torch.full((1, 16), 60_000.0, dtype=torch.float16, device=DEVICE)
    assert (rms_norm(x, torch.ones(16, dtype=torch.float16, device=DEVICE), 1e-6) == 1).all()


def test_no_rows():
    assert rms_norm(randn(0, 8), randn(8), 1e-6).shape == (0, 8)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 70), st.integers(0, 99))
def test_any_shape_of_rms_norm(tokens, heads, dim, seed):
    x, weight = inside(randn(tokens, heads, dim, seed=seed)), randn(heads, dim, seed=seed + 1)
    close(rms_norm(x, weight, 1e-5), layers.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(8), torch.zeros(8)), "x is float32"),
        ((torch.zeros(2, 8).double(), torch.zeros(8).double()), "give float32, float16 or bfloat16"),
        ((torch.zeros(2, 8), torch.zeros(7)), r"give contiguous torch.float32 \[8\]"),
        ((torch.zeros(2, 8), torch.zeros(8).half()), "weight is float16"),
        ((torch.zeros(2, 8), torch.zeros(1, 8)), "weight is float32"),
        ((torch.zeros(2, 3, 8), torch.zeros(2, 8)), "weight is float32"),
        ((torch.zeros(8, 2).T, torch.zeros(8)), "make its last dimension contiguous"),
    ],
)
def test_a_bad_norm_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(*(x.to(DEVICE) for x in args), 1e-6)


def test_a_bad_residual_is_refused():
    with pytest.raises(ValueError, match="residual is float16"):
        add_rms_norm(randn(2, 8), randn(2, 8, dtype=torch.float16), randn(8), 1e-6)
    with pytest.raises(ValueError, match="give one like x"):
        add_rms_norm(randn(2, 8), randn(1, 8), randn(8), 1e-6)


# ---- SwiGLU


@every_dtype
@pytest.mark.parametrize("dim", [1, 33, 1024, 2500])
def test_swiglu(dim, dtype):
    gate, up = (randn(3, 2 * dim, dtype=dtype) * 4).chunk(2, dim=1)
    got = swiglu(gate, up)
    assert got.is_contiguous()
    close(got, layers.swiglu(gate, up))


def test_swiglu_of_large_numbers():
    """exp(-gate) overflows on the way to 0, and must not bring a NaN."""
    gate = torch.tensor([[-100.0, -1e4, 100.0, 0.0, 1e4, torch.nan]], device=DEVICE)
    got = swiglu(gate, torch.ones_like(gate))
    assert got[0, :5].tolist() == pytest.approx([-3.72e-42, 0, 100, 0, 1e4], abs=1e-40)
    assert math.isnan(got[0, 5])


def test_swiglu_of_no_rows():
    assert swiglu(randn(0, 8), randn(0, 8)).shape == (0, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((torch.zeros(2, 8), torch.zeros(2, 9)), "of one shape"),
        ((torch.zeros(2, 8), torch.zeros(2, 8).half()), "of one shape and dtype"),
        ((torch.zeros(2, 8).double(), torch.zeros(2, 8)), "gate is float64"),
        ((torch.zeros(2, 8), torch.zeros(8, 2).T), "up is float32.*rows contiguous"),
    ],
)
def test_a_bad_swiglu_is_refused(args, message):
    with pytest.raises(ValueError, match=message):
        swiglu(*(x.to(DEVICE) for x in args))


# ---- RoPE and the cache write


def projection(num_tokens, heads, kv_heads, head_dim, dtype, seed=0):
    qkv = randn(num_tokens, heads + 2 * kv_heads, head_dim, dtype=dtype, seed=seed)
    return qkv.split((heads, kv_heads, kv_heads), dim=1)


def tables(head_dim, dtype, heads=4, positions=512):
    config = ModelConfig("qwen2", 8, 8, 1, heads, 1, head_dim, 16, positions)
    rotary = layers.RotaryEmbedding(config, dtype, DEVICE)
    return rotary.cos, rotary.sin


def roped(heads=4, kv_heads=2, head_dim=32, dtype=torch.float32, kv_dtype=None, block_size=4, slots=(3, 17, -1, 0, 9)):
    """Run kernel and oracle on caches full of sentinels; compare all that is written."""
    slots = list(slots)
    q, k, v = projection(len(slots), heads, kv_heads, head_dim, dtype)
    cos, sin = tables(head_dim, dtype)
    positions = (torch.arange(len(slots), device=DEVICE) * 77) % 512
    shape = (2, -(-24 // block_size), block_size, kv_heads, head_dim)
    kv = torch.full(shape, 99, dtype=kv_dtype or dtype, device=DEVICE)
    scales = torch.full(kv.shape[:4], -1.0, device=DEVICE) if kv_dtype == torch.int8 else None
    expected = kv.clone(), None if scales is None else scales.clone()
    slots = torch.tensor(slots, dtype=torch.int64, device=DEVICE)
    before = k.clone()
    got = rope_and_cache(q, k, v, cos, sin, positions, kv, slots, scales=scales)
    want = rope_and_cache_reference(q, k, v, cos, sin, positions, expected[0], slots, scales=expected[1])
    real = slots >= 0
    assert got.is_contiguous() and torch.equal(k, before)
    close(got[real], want[real], share=0)
    if scales is None:
        close(kv, expected[0], share=0 if dtype == kv.dtype else 0.02)
        assert torch.equal(kv[1], expected[0][1])
    else:
        # In 16 bits the rotated k is the same to the bit, so the numbers are.
        assert (kv.int() - expected[0].int()).abs().max() <= (1 if dtype == torch.float32 else 0)
        close(scales, expected[1])
    return kv


@every_dtype
@pytest.mark.parametrize("head_dim", [2, 32, 80, 96, 128])
def test_rope_and_write(head_dim, dtype):
    roped(head_dim=head_dim, dtype=dtype)


@every_dtype
def test_rope_and_write_int8(dtype):
    roped(dtype=dtype, kv_dtype=torch.int8)
    roped(dtype=dtype, kv_dtype=torch.int8, head_dim=80, heads=7, kv_heads=1)


@pytest.mark.parametrize("heads", [(1, 1), (28, 4), (14, 2), (3, 3)], ids=str)
def test_numbers_of_heads(heads):
    roped(*heads, head_dim=16)


def test_another_dtype_in_the_cache():
    roped(dtype=torch.float32, kv_dtype=torch.float16)


def test_block_sizes_and_no_tokens():
    roped(block_size=1)
    roped(block_size=24)
    roped(slots=[])


def test_padding_is_written_nowhere():
    kv = roped(slots=[-1, 5, -1])
    assert int((kv != 99).sum()) == 2 * 2 * 32


def test_a_rotated_pair_by_hand():
    """Position 1, one pair: (a, b) becomes (a cos 1 - b sin 1, b cos 1 + a sin 1)."""
    q = torch.tensor([[[3.0, 4.0]]], device=DEVICE)
    cos, sin = tables(2, torch.float32)
    kv = torch.zeros(2, 1, 1, 1, 2, device=DEVICE)
    one, slot = torch.tensor([1], device=DEVICE), torch.tensor([0], device=DEVICE)
    got = rope_and_cache(q, q.clone(), q.clone(), cos, sin, one, kv, slot)
    by_hand = [3 * math.cos(1) - 4 * math.sin(1), 4 * math.cos(1) + 3 * math.sin(1)]
    assert got[0, 0].tolist() == pytest.approx(by_hand) == kv[0, 0, 0, 0].tolist()
    assert kv[1, 0, 0, 0].tolist() == [3, 4]


def test_slots_beyond_31_bits():
    near = far_apart([4, 3, 2], head_dim=8)
    q, k, v = projection(1, 4, 2, 8, torch.float16)
    cos, sin = tables(8, torch.float16)
    zero, slot = torch.tensor([0], device=DEVICE), torch.tensor([10], device=DEVICE)
    rope_and_cache(q, k, v, cos, sin, zero, near.kv, slot)
    assert torch.equal(near.kv[0, 2, 2], k[0]) and torch.equal(near.kv[1, 2, 2], v[0])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 5), st.integers(1, 3), st.integers(1, 20), st.integers(1, 24), st.booleans(),
    st.lists(st.integers(-1, 23), max_size=4, unique=True),
)  # fmt: skip
def test_any_shape_of_rope(group, kv_heads, pairs, block_size, quantised, slots):
    roped(group * kv_heads, kv_heads, 2 * pairs, kv_dtype=torch.int8 if quantised else None, block_size=block_size,
          slots=slots)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda a: a["q"][:1]}, r"q is float32.*give \[2, heads, 8\]"),
        ({"q": lambda a: a["q"].half()}, "of k's dtype"),
        ({"q": lambda a: a["q"].transpose(1, 2).contiguous().transpose(1, 2)}, "the heads of one token"),
        ({"cos": lambda a: a["cos"].half()}, "cos is float16"),
        ({"sin": lambda a: a["sin"][..., :4]}, "sin is float32"),
        ({"sin": lambda a: a["sin"][:9]}, "two tables of one shape"),
        ({"positions": lambda a: a["positions"].int()}, "positions is int32"),
        ({"positions": lambda a: a["positions"] + 511}, "from 511 to 512, but cos and sin have 512 rows"),
        ({"positions": lambda a: a["positions"] - 1}, "from -1 to 0"),
        ({"slot_mapping": lambda a: a["slot_mapping"] + 7}, "slot 8, but the cache has 8 slots"),
        ({"scales": lambda a: torch.zeros(2, 2, 4, 2)}, "only int8"),
    ],
)
def test_a_bad_rope_is_refused(change, message):
    if launch.INTERPRETED is False and "from" in message:
        pytest.skip("values on a GPU are not looked at")
    q, k, v = projection(2, 4, 2, 8, torch.float32)
    cos, sin = tables(8, torch.float32)
    two = torch.arange(2, device=DEVICE)
    args = dict(q=q, k=k, v=v, cos=cos, sin=sin, positions=two, kv=torch.zeros(2, 2, 4, 2, 8, device=DEVICE),
                slot_mapping=two)  # fmt: skip
    with pytest.raises(ValueError, match=message):
        rope_and_cache(**args | {name: make(args) for name, make in change.items()})


def test_an_odd_head_dim_is_refused():
    q, k, v = projection(1, 2, 1, 7, torch.float32)
    table = torch.zeros(4, 1, 7, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="head dim is 7.*must be even"):
        rope_and_cache(q, k, v, table, table, zero, torch.zeros(2, 1, 1, 1, 7, device=DEVICE), zero)
