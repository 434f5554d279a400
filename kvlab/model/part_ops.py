"""RMSNorm and RoPE by somebody's own functions, such as those of lab 12; what is not given stays in PyTorch."""

from collections.abc import Callable

from torch import Tensor

from kvlab.model.config import ModelConfig
from kvlab.model.ops import Ops, Step


class PartOps(Ops):
    """`rms_norm(x, weight, eps)` for every norm and `rope(x, positions, theta)` in the place of ours; None is ours.

    ValueError for `rope` and a model that stretches its positions: theta does not say how.
    """

    def __init__(self, config: ModelConfig, rms_norm: Callable | None = None, rope: Callable | None = None):
        if rope is not None and config.rope_scaling is not None:
            raise ValueError(
                f"the part `rope` knows theta alone, and this model scales its positions by {config.rope_scaling}: "
                f"leave `rope` out, or use a model without rope_scaling"
            )
        self._rms_norm, self._rope, self._theta = rms_norm, rope, config.rope_theta

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if self._rms_norm is None:
            return super().rms_norm(x, weight, eps)
        return self._rms_norm(x, weight, eps)

    def rope(self, qk: Tensor, step: Step) -> Tensor:
        if self._rope is None:
            return super().rope(qk, step)
        return self._rope(qk, step.batch.positions, self._theta)
