"""INT8 and FP8 K and V: near what was given, zero for zero, and never a plausible number for infinity or NaN."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.model.quantize import dequantize, quantize

NUMBERS = st.floats(-1e30, 1e30)


@given(st.lists(NUMBERS, min_size=1, max_size=40))
def test_every_number_is_within_half_a_step(numbers):
    x = torch.tensor(numbers, dtype=torch.float64)
    stored, scale = quantize(x)
    assert stored.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == ()
    assert stored.min() >= -127
    back = dequantize(stored, scale, torch.float64)
    # Half a step, and what rounding the scale to fp32 (subnormal at the least) moves the largest number by.
    assert (back - x).abs().max() <= x.abs().max() / 254 + x.abs().max() * 2**-24 + 127 * 2**-150
    largest = x.abs().argmax()
    if scale > 1e-30:
        assert abs(int(stored[largest])) == 127


def test_by_hand():
    stored, scale = quantize(torch.tensor([0.30, -1.27, 0.02, 0.004, -0.005]))
    assert scale.item() == pytest.approx(0.01)
    assert stored.tolist()[:4] == [30, -127, 2, 0]
    assert dequantize(stored, scale, torch.float32)[1].item() == pytest.approx(-1.27)


def test_a_half_is_rounded_up():
    stored, _ = quantize(torch.tensor([127.0, 0.5, -0.5, 1.5, -1.5]))
    assert stored.tolist() == [127, 1, 0, 2, -1]


def test_each_vector_has_its_own_scale():
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    stored, scales = quantize(x)
    x[1, 0] *= 1000
    again, scaled = quantize(x)
    assert scales.shape == (3, 2)
    assert torch.equal(stored, again)
    changed = scaled != scales
    assert changed.nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_zeros_stay_zeros(dtype):
    stored, scales = quantize(torch.zeros(2, 4), dtype)
    assert scales.tolist() == [0, 0]
    assert dequantize(stored, scales, torch.float32).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_read_as_nan(bad, dtype):
    x = torch.ones(2, 4)
    x[0, 2] = bad
    back = dequantize(*quantize(x, dtype), torch.float32)
    assert back[0].isnan().all()
    assert back[1].tolist() == [1] * 4


@pytest.mark.parametrize("tiny", [1e-45, 3e-43, 2.66e-43])
def test_subnormal_scales_saturate(tiny):
    """The scale of 190 x 2^-149 is 2^-149, for there is nothing between: 190 would not fit into int8."""
    stored, scale = quantize(torch.tensor([tiny, -tiny]))
    assert 0 <= scale.item() <= 1e-44
    assert stored[0] == -stored[1] and 0 <= stored[0] <= 127


def test_fp8_keeps_small_numbers_of_a_vector_better_than_int8():
    x = torch.tensor([448.0, 1.0, 0.25, 300.0])
    for dtype, expected in ((torch.float8_e4m3fn, [448, 1, 0.25, 288]), (torch.int8, [448, 0, 0, 300])):
        back = dequantize(*quantize(x, dtype), torch.float32)
        torch.testing.assert_close(back, torch.tensor(expected, dtype=torch.float32), atol=2, rtol=0)
    assert dequantize(*quantize(x, torch.float8_e4m3fn), torch.float32)[2] == 0.25


def test_bf16_is_widened_before_it_is_multiplied():
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored, scales = quantize(x)
    assert all(torch.equal(a, b) for a, b in zip((stored, scales), quantize(x.float()), strict=True))
    back = dequantize(stored, scales, torch.bfloat16)
    assert torch.equal(back, dequantize(stored, scales, torch.float32).bfloat16())
