"""What stands between the matrix products by the kernels of rung 10: four launches a layer, five in Qwen3.

    add_norm          x += y, and its norm                                         two of them
    rope_and_write    q and k rotated, k and v to their slots (quantised on the way where the cache is INT8)
    swiglu
    rms_norm          of q and k: Qwen3 only

The first `add_norm` of a step has nothing to add; one more stands before the head.
"""

from torch import Tensor

from kvlab.model.ops import Ops, Step
from kvlab_kernels import rms_norm, rope_cache, swiglu


class TritonOps(Ops):
    """The fused kernels, for models in fp32, fp16 and bf16. They round where PyTorch's operations do."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm.rms_norm(x, weight, eps)

    def add_norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if y is None:
            return x, rms_norm.rms_norm(x, weight, eps)
        return x, rms_norm.add_rms_norm(y, x, weight, eps)  # x in place

    def rope_and_write(self, qk: Tensor, v: Tensor, layer_index: int, step: Step) -> Tensor:
        kv_cache, num_kv_heads = step.kv_cache, v.shape[1]
        q, k = qk.split((qk.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        return rope_cache.rope_and_cache(
            q, k, v, step.rotary.cos, step.rotary.sin, step.batch.positions,
            kv_cache.layers[layer_index], step.batch.slot_mapping,
            scales=kv_cache.scales[layer_index] if kv_cache.quantized else None,
        )  # fmt: skip

    def swiglu(self, gate_up: Tensor) -> Tensor:
        return swiglu.swiglu(*gate_up.chunk(2, dim=-1))
