"""Rung 10, third part: SwiGLU (Shazeer 2020), silu(gate) * up in one launch.

    gate_up_proj -> [ gate | up ]  [T, 2 I]       the two halves of one product, read where they lie
    out = gate / (1 + exp(-gate)) * up            apart: silu writes [T, I] and the product reads it again

What is saved is one write and one read of [T, I], and a launch. silu is rounded to the dtype before it is multiplied,
as PyTorch's two operations do.
"""

import torch
from torch import Tensor

from kvlab_kernels.checks import DTYPES, shown
from kvlab_kernels.launch import check_device, tl, triton

TILE = 1024


@triton.jit
def swiglu_kernel(
    gate,  # [T, dim], rows stride_gate apart
    up,
    out,  # [T, dim], contiguous
    stride_gate,
    stride_up,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * TILE + tl.arange(0, TILE)
    dims = d < DIM
    g = tl.load(gate + token * stride_gate + d, mask=dims, other=0.0)
    wide = g.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(g.dtype)  # exp may be infinite: then silu is 0, as it should
    u = tl.load(up + token * stride_up + d, mask=dims, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + d, (silu.to(tl.float32) * u).to(g.dtype), mask=dims)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for gate, up [T, I] -> [T, I]. Equal to `kvlab.model.layers.swiglu`.

    Rows must be contiguous; gate and up may be slices of one tensor. Raises ValueError for what does not fit.
    """
    for name, x in (("gate", gate), ("up", up)):
        if x.dim() != 2 or x.dtype not in DTYPES or (x.numel() and x.stride(1) != 1):
            raise ValueError(f"{name} is {shown(x)}: give float32, float16 or bfloat16 [T, I], rows contiguous")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {shown(gate)} and up is {shown(up)}: give two of one shape and dtype")
    check_device(gate, up)
    num_tokens, dim = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        swiglu_kernel[(num_tokens, triton.cdiv(dim, TILE))](
            gate, up, out, gate.stride(0), up.stride(0), DIM=dim, TILE=TILE, num_warps=4
        )
    return out
