"""The sampler: logits and one uniform number -> a token, and nothing else decides.

    logits -> adjust -> / temperature -> min-p -> top-k -> top-p -> running sum of weights in token-id order
              -> token: the first id whose sum exceeds uniform * total

The uniform is drawn on the host, a pure function of (seed, output position), so that preemption, batching and
devices cannot shift what a request draws. A row's token does not depend on the other rows. Everything that
decides is computed in float64.

A token's rank is by logit; equal logits rank by token id, lowest first. Top-k keeps the first k ranks. Top-p
keeps the shortest run of first ranks whose share of what top-k left reaches p: a top-k whose k the
distribution chooses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.engine.logits import Adjustment, adjust

FIRST_LOOK = 128  # ranks sorted at first for top-p; eight times more while their share does not reach p


@dataclass(slots=True)  # not frozen: one is made for every token, and freezing makes that three times as slow
class SampleRow:
    """One token to sample from row `row` of the logits; several may name the same row (n > 1).

    `temperature` 0 is greedy: the highest logit, of equals the lowest id. `top_k` 0 or -1, `top_p` 1 and `min_p` 0
    are off. `uniform` is in [0, 1). `adjustment` changes the row first.
    """

    row: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.0
    adjustment: Adjustment | None = None

    @property
    def ranked(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


class Sampler:
    """`sampler(logits [R, V], rows)` -> one token id for each of `rows`, in order.

    Raises ValueError when a row has no finite highest logit: the model computed NaN, or every token is
    banned.
    """

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        if not rows:
            return []
        logits = self._select(logits, rows)
        highest, greedy = logits.max(dim=-1)  # of equals, the first
        finite = highest.isfinite().tolist()
        if not all(finite):
            i = finite.index(False)
            raise ValueError(
                f"row {rows[i].row} of the logits has {highest[i].item()} as its highest value: either the "
                "model computed it (float16 overflows, try dtype='float32'), or all tokens are banned"
            )
        tokens = greedy.tolist()
        for ranked, draw in ((False, draw_from_all), (True, draw_from_first_ranks)):
            group = [i for i, r in enumerate(rows) if r.temperature > 0 and r.ranked == ranked]
            if group:
                index = slice(None) if len(group) == len(rows) else torch.tensor(group, device=logits.device)
                drawn = draw(logits[index], highest[index, None], [rows[i] for i in group])
                for i, token in zip(group, drawn, strict=True):
                    tokens[i] = token
        return tokens

    @staticmethod
    def _select(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
        """The rows' logits [len(rows), V]; a copy if anything must change."""
        indices = [r.row for r in rows]
        changes = [(i, r.adjustment) for i, r in enumerate(rows) if r.adjustment is not None]
        if not changes and indices == list(range(len(logits))):
            return logits
        chosen = logits[torch.tensor(indices, device=logits.device)]
        for i, change in changes:
            adjust(chosen[i], change)
        return chosen


def draw_from_all(logits: Tensor, highest: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Tokens drawn from softmax(logits / temperature). logits [R, V], their maxima [R, 1], one row each."""
    return pick(weigh(logits, highest, rows), rows)[:, 0].tolist()


def draw_from_first_ranks(logits: Tensor, highest: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """The same after top-k and top-p. Only the candidates are sorted and summed, not the vocabulary."""
    vocab = logits.shape[1]
    top_k = _column([min(r.top_k, vocab) if r.top_k > 0 else vocab for r in rows], logits, torch.int64)
    top_p = _column([r.top_p for r in rows], logits)
    unlimited = (top_k == vocab)[:, 0]
    total = torch.zeros_like(top_p)
    if unlimited.any():  # the share is then of the whole vocabulary
        some = [r for r, u in zip(rows, unlimited.tolist(), strict=True) if u]
        total[unlimited] = weigh(logits[unlimited], highest[unlimited], some).sum(-1, keepdim=True)

    # One rank more than top-k keeps, to see whether the boundary runs between equals.
    look = min(vocab, max([FIRST_LOOK] + [r.top_k + 1 for r in rows]))
    while True:
        values, ids = logits.topk(look)
        weights = weigh(values, highest, rows)
        sums = weights.cumsum(-1)
        total = torch.where(unlimited[:, None], total, sums.gather(1, top_k.clamp(max=look) - 1))
        short = (sums < top_p * total).sum(-1, keepdim=True)  # ranks before the one that reaches p
        kept = torch.where(top_p < 1, torch.minimum(short + 1, top_k), top_k)
        if look == vocab or (kept < look).all():
            break
        look = min(8 * look, vocab)

    last = values.gather(1, kept - 1)
    next_value = values.gather(1, kept.clamp(max=look - 1))
    for i in ((last == next_value) & (kept < look)).nonzero()[:, 0].tolist():
        # topk breaks ties as it likes: of the equals at the boundary, take the lowest ids.
        first_equal, end = int((values[i] > last[i]).sum()), int(kept[i])
        ids[i, first_equal:end] = (logits[i] == last[i]).nonzero()[: end - first_equal, 0]
    weights = torch.where(torch.arange(look, device=logits.device) < kept, weights, 0.0)
    ids, order = ids.sort(-1)
    return ids.gather(1, pick(weights.gather(1, order), rows))[:, 0].tolist()


def weigh(logits: Tensor, highest: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """exp((logits - highest) / temperature), float64 [R, C]: probabilities up to a factor, at most 1.

    As the likeliest token weighs 1, min-p is a threshold on the weight itself.
    """
    weights = logits.to(torch.float64, copy=True)
    weights.sub_(highest).div_(_column([r.temperature for r in rows], logits)).exp_()
    if any(r.min_p > 0 for r in rows):
        weights[weights < _column([r.min_p for r in rows], logits)] = 0.0
    return weights


def pick(weights: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The index, int64 [R, 1], where the running sum of weights [R, C] first exceeds uniform * total."""
    sums = weights.cumsum(-1)
    # uniform <= 1 - 2^-53, and no float64 times that rounds up to itself: the target stays below the last.
    target = _column([r.uniform for r in rows], weights) * sums[:, -1:]
    return torch.searchsorted(sums, target, right=True)


def _column(values: list, like: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
