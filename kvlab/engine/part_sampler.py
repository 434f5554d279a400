"""Sampling by somebody's own function, such as a student's of lab 13: one row at a time, on the host.

    logits [R, V] -> adjust, min-p (ours) -> function(logits [V], temperature, top_k, top_p, uniform) -> token id
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvlab.engine.logits import adjust
from kvlab.engine.sampler import Sampler, SampleRow


class PartSampler:
    """`sampler(logits [R, V], rows)` as kvlab.engine.Sampler, each token drawn by `function`.

    The function gets a NumPy array of its own; top_k 0 and top_p 1 are off, temperature 0 is greedy. What min-p
    and bans rule out is -inf in it. ValueError as our sampler's where a row has no finite highest logit.
    """

    def __init__(self, function: Callable[..., int]):
        self.function = function

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        if not rows:
            return []
        chosen = logits[torch.tensor([r.row for r in rows], device=logits.device)]  # a copy
        for own, r in zip(chosen, rows, strict=True):
            if r.adjustment is not None:
                adjust(own, r.adjustment)
        if not chosen.amax(-1).isfinite().all():
            return Sampler()(logits, rows)  # which says what is wrong with it
        values = chosen.to(torch.float64).cpu().numpy()
        return [self._draw(own, r) for own, r in zip(values, rows, strict=True)]

    def _draw(self, logits: np.ndarray, row: SampleRow) -> int:
        if row.temperature > 0 and row.min_p > 0:
            logits[np.exp((logits - logits.max()) / row.temperature) < row.min_p] = -np.inf
        return self.function(logits, row.temperature, max(row.top_k, 0), row.top_p, row.uniform)
