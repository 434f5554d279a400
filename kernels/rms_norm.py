"""Rung 10, first part: RMSNorm (均方根归一化), with the residual addition (残差相加) in the same launch.

    apart     x = x + y           reads x, y        writes x
              h = norm(x) * w     reads x           writes h       5 passes over [T, hidden] of memory, 2 launches
    fused     both                reads x, y        writes x, h    4 passes, 1 launch

In a decode of a few tokens these kernels move next to nothing: what they cost is their launches, and a layer has two of
them. In PyTorch's own operations the norm alone is five or six launches.

The order of roundings is `transformers`': the sum is rounded to x's dtype before it is normalised, and the normalised
row before it is multiplied by the weight. To keep more digits would be more exact, and give other tokens.
"""

import torch
from torch import Tensor

from kvlab.model import layers
from kvlab_kernels.checks import DTYPES, shown
from kvlab_kernels.launch import check_device, tl, triton

MAX_DIM = 1 << 16  # a row is one tile


@triton.jit
def rms_norm_kernel(
    x,  # [T, heads, dim], stride_x from token to token, stride_x_head from head to head
    residual,  # like x: becomes residual + x, and that is normalised. None: x is
    weight,  # [dim] for all heads, or [heads, dim]
    out,  # [T, heads, dim], contiguous
    eps,
    stride_x,
    stride_x_head,
    stride_residual,
    stride_residual_head,
    stride_weight,  # from head to head; 0 for [dim]
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = row // HEADS
    head = row % HEADS
    d = tl.arange(0, DIM_PADDED)
    dims = d < DIM
    value = tl.load(x + token * stride_x + head * stride_x_head + d, mask=dims, other=0.0)
    if residual is not None:
        at = residual + token * stride_residual + head * stride_residual_head + d
        value = (tl.load(at, mask=dims, other=0.0).to(tl.float32) + value.to(tl.float32)).to(value.dtype)
        tl.store(at, value, mask=dims)
    wide = value.to(tl.float32)  # the squares' sum needs fp32; padding is 0 and adds nothing
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / DIM + eps)).to(value.dtype)
    factor = tl.load(weight + head * stride_weight + d, mask=dims, other=0.0).to(tl.float32)
    tl.store(out + row * DIM + d, (normed.to(tl.float32) * factor).to(value.dtype), mask=dims)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019), equal to `kvlab.model.layers.rms_norm`.

    x [T, D] with weight [D], or x [T, heads, D] with weight [D] or [heads, D] -> like x, contiguous. The last dimension
    of x must be contiguous; x may be a slice of a wider tensor. Raises ValueError for what does not fit.
    """
    return _launch(x, None, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += x, in place, then `rms_norm` of it -> [T, D]. Equal to `add_rms_norm_reference`."""
    if residual.shape != x.shape or residual.dtype != x.dtype or (residual.numel() and residual.stride(-1) != 1):
        raise ValueError(f"residual is {shown(residual)}: give one like x, which is {shown(x)}")
    return _launch(x, residual, weight, eps)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same in two steps."""
    residual += x
    return layers.rms_norm(residual, weight, eps)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if x.dim() not in (2, 3) or x.dtype not in DTYPES or not 1 <= x.shape[-1] <= MAX_DIM:
        raise ValueError(f"x is {shown(x)}: give float32, float16 or bfloat16 [T, D] or [T, heads, D], D <= {MAX_DIM}")
    if x.numel() and x.stride(-1) != 1:
        raise ValueError(f"x is {shown(x)}: make its last dimension contiguous")
    heads, dim = (1, x.shape[1]) if x.dim() == 2 else x.shape[1:]
    fits = list(weight.shape) == [dim] or (x.dim() == 3 and list(weight.shape) == [heads, dim])
    if not fits or weight.dtype != x.dtype or not weight.is_contiguous():
        raise ValueError(f"weight is {shown(weight)}: give contiguous {x.dtype} [{dim}], or [heads, D] for x of heads")
    check_device(x, weight, *(() if residual is None else (residual,)))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        residual_strides = (0, 0) if residual is None else (residual.stride(0), residual.stride(-2))
        padded = triton.next_power_of_2(dim)
        rms_norm_kernel[(x.shape[0] * heads,)](
            x, residual, weight, out, eps, x.stride(0), x.stride(-2), *residual_strides,
            dim if weight.dim() == 2 else 0,
            HEADS=heads, DIM=dim, DIM_PADDED=padded,
            num_warps=min(max(padded // 512, 1), 16),
        )  # fmt: skip
    return out
