"""Triton's interpreter, put right for bf16 and made quicker. Installed by launch.py, in interpreted mode only.

The interpreter keeps a bf16 tensor as its 16 bits, uint16. Two things go wrong with that, without any error:

    tl.dot of bf16       multiplies the bit patterns as if they were integers: results of 1e10 and more
    fp32 -> bf16         cuts the lower bits off, where a GPU rounds to the nearest: half of all values differ

Adding or multiplying bf16 tensors goes wrong too, and is not mended: our kernels compute in fp32 alone.

Time goes to replacing the functions of triton.language by NumPy ones, again for each call of tl.sum or tl.max. Once a
launch is enough. And Triton 3.6 cannot make a Python integer of a loop bound with NumPy 2.4.

All this replaces private functions of Triton. So it is done for the versions that it was tried on, and a small kernel
then shows whether bf16 is right: `BF16_IS_RIGHT`. Where it is not, use fp16 or fp32.
"""

from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as inner

TRIED = ("3.6.", "3.7.")
BF16_IS_RIGHT = False


def install() -> None:
    """Replace what needs replacing, then find out whether bf16 is right. A second call does nothing more."""
    global BF16_IS_RIGHT
    if triton.__version__.startswith(TRIED) and not hasattr(inner, "_kvlab_originals"):
        inner._kvlab_originals = (inner.InterpreterBuilder.create_dot, inner._convert_float, inner._patch_lang)
        inner.InterpreterBuilder.create_dot = create_dot
        inner._convert_float = convert_float
        inner._patch_lang = patch_once_a_launch
    BF16_IS_RIGHT = try_bf16()


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16, as uint16, to fp32: a bf16 number is the upper half of an fp32 number."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 to bf16, as uint16: to the nearest, and of two equally near to the even one, as a GPU does."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)  # a NaN's bits, rounded, could become infinity


def create_dot(self, a, b, d, *rest):
    """tl.dot: bf16 operands are multiplied as the fp32 numbers that they are."""
    original = inner._kvlab_originals[0]
    a, b = (inner.TensorHandle(widen(x.data), tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b))
    return original(self, a, b, d, *rest)


def convert_float(data, from_dtype, to_dtype, rounding_mode):
    """Conversions between fp32 and bf16 are ours; all others stay Triton's."""
    if from_dtype == tl.float32 and to_dtype == tl.bfloat16:
        return round_to_bf16(data)
    if from_dtype == tl.bfloat16 and to_dtype == tl.float32:
        return widen(data).view(np.uint32)
    return inner._kvlab_originals[1](data, from_dtype, to_dtype, rounding_mode)


class Patched:
    """What a launch has replaced in triton.language, until it ends."""

    now: "Patched | None" = None

    def __init__(self, scope):
        self.scope, Patched.now = scope, self
        # A loop bound is an array of one element; Triton 3.6 calls int() on it, which NumPy 2.4 refuses.
        scope.set_attr(tl.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))

    def restore(self) -> None:
        Patched.now = None
        self.scope.restore()


def patch_once_a_launch(fn) -> Patched:
    """Stands in for Triton's _patch_lang, which runs at every launch and again at each call of a helper.

    The launch asks first, and restores when it ends. Helpers that ask meanwhile find everything replaced, in
    triton.language and in triton.language.core, which is what Triton's own helpers use.
    """
    if Patched.now is None:
        both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        return Patched(inner._kvlab_originals[2](both))
    return Patched.now


@triton.jit
def bf16_kernel(a, b, product, rounded, SIDE: tl.constexpr):
    i = tl.arange(0, SIDE)
    at = i[:, None] * SIDE + i[None, :]
    result = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(product + at, result)
    tl.store(rounded + at, result.to(rounded.dtype.element_ty))


def try_bf16() -> bool:
    """Whether a kernel multiplies bf16 matrices and rounds to bf16 as PyTorch does."""
    side = 16
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(side, side, generator=generator).bfloat16() for _ in range(2))
    product = torch.zeros(side, side)
    rounded = torch.zeros(side, side, dtype=torch.bfloat16)
    bf16_kernel[(1,)](a, b, product, rounded, SIDE=side)
    right = torch.allclose(product, a.float() @ b.float(), atol=1e-4)
    return right and torch.equal(rounded, product.bfloat16())
