"""What stands between the matrix products: RMSNorm, the residual addition, RoPE, the write of K and V, SwiGLU.

    Ops          PyTorch, by kvlab.model.layers; on any device, in any dtype
    TritonOps    the kernels of rung 10, each one launch (kvlab.model.triton_ops); goes with attention backend "triton"
    PartOps      somebody's own functions in their place, as lab 12 has them (kvlab.model.part_ops)

The decoder calls these methods and never the functions, so that it is written once. Each method is as large as what one
kernel can do: RoPE and the write are one, because a rotated key is read nowhere but in its slot.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvlab.model import layers
from kvlab.model.attention import AttentionBackend
from kvlab.model.batch import FlatBatch
from kvlab.model.kv_cache import KVCache


@dataclass
class Step:
    """What all layers of one forward share. metadata: the backend's plan."""

    batch: FlatBatch
    kv_cache: KVCache
    rotary: layers.RotaryEmbedding
    backend: AttentionBackend
    metadata: Any

    @cached_property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [T, 1, D], of the step's positions: looked up once, not once a layer."""
        return self.rotary(self.batch.positions)


class Ops:
    """The operations in PyTorch. T tokens, H query heads, Hkv KV heads of D numbers each."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight -> like x. x [T, hidden] and weight [hidden], or [T, heads, D] and [heads, D]."""
        return layers.rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(x + y, its norm), each [T, hidden]. y None: nothing is added. x may be overwritten by the sum."""
        x = x if y is None else x + y
        return x, self.rms_norm(x, weight, eps)

    def rope(self, qk: Tensor, step: Step) -> Tensor:
        """qk [T, H + Hkv, D] -> the same, rotated by the step's positions."""
        return layers.rope(qk, *step.rotation)

    def rope_and_write(self, qk: Tensor, v: Tensor, layer_index: int, step: Step) -> Tensor:
        """Rotated q [T, H, D] of qk [T, H + Hkv, D]; its rotated k, and v [T, Hkv, D], go to their slots."""
        num_kv_heads = v.shape[1]
        q, k = self.rope(qk, step).split((qk.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        step.backend.write(k, v, layer_index, step.metadata)
        return q

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of gate_up [T, 2 * I] -> [T, I]."""
        return layers.swiglu(*gate_up.chunk(2, dim=-1))


def ops_beside(backend: AttentionBackend, dtype: torch.dtype) -> Ops:
    """The operations that go with `backend` in a model of `dtype`: its own if it has some, else PyTorch's."""
    make = getattr(backend, "ops_for", None)
    return Ops() if make is None else make(dtype)
