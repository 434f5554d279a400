"""The sampler: logits and one uniform number -> a token, and nothing else decides.

    logits -> adjust -> / temperature -> min-p -> top-k -> top-p -> running sum of weights in token-id order
              -> token: the first id whose sum exceeds uniform * total

The uniform is drawn on the host, a pure function of (seed, output position), so that preemption, batching and
devices cannot shift what a request draws. A row's token does not depend on the other rows. Everything that
decides is computed in float64.

A token's rank is by logit; equal logits rank by token id, lowest first. Top-k keeps the first k ranks. Top-p
keeps the shortest run of first ranks whose share of what top-k left reaches p: a top-k whose k the
distribution chooses.

On a GPU the host must not wait between these operations, so all that it knows beforehand is in arrays (`SamplePlan`)
that went up with the step's inputs, and what it cannot know is a flag that comes back with the tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvlab.engine.logits import Adjustment, apply_changes, changes_of
from kvlab.sampling_params import SAMPLED_AT_ONCE

FIRST_LOOK = 128  # ranks sorted at first for top-p; eight times more while that does not settle it
LOST, UNSETTLED = -1, -2  # in the place of a token: there is none; more ranks must be looked at


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


class SamplePlan:
    """What the host knows of a step's samples before the forward, as arrays for the device (`arrays`, by name).

    free, ranked: which of `rows` draw from all tokens, and which from the first ranks; the others are greedy.
    """

    def __init__(self, rows: Sequence[SampleRow], vocab: int, dtype: torch.dtype):
        self.rows = rows
        self.free = [i for i, r in enumerate(rows) if r.temperature > 0 and not r.ranked]
        self.ranked = [i for i, r in enumerate(rows) if r.temperature > 0 and r.ranked]
        self.has_min_p = any([r.min_p > 0 for r in rows])
        self.in_order = all([r.row == i for i, r in enumerate(rows)])
        arrays = self.arrays = {}
        if not self.in_order:
            arrays["chosen"] = np.array([r.row for r in rows], dtype=np.int64)
        self.changes = {}
        if any([r.adjustment is not None for r in rows]):
            self.changes = changes_of([r.adjustment for r in rows], vocab, dtype)
            arrays |= self.changes
        for name, group in (("free", self.free), ("ranked", self.ranked)):
            if group:
                drawing = [rows[i] for i in group]
                arrays[name] = np.array(group, dtype=np.int64)
                numbers = [[r.temperature, r.top_p, r.min_p, r.uniform] for r in drawing]
                arrays[name + "_numbers"] = np.array(numbers, dtype=np.float64).T
        if self.ranked:
            top_k = [min(r.top_k, vocab) if r.top_k > 0 else vocab for r in drawing]
            arrays["top_k"] = np.array(top_k, dtype=np.int64)
            if unlimited := [i for i, k in enumerate(top_k) if k == vocab]:
                arrays["unlimited"] = np.array(unlimited, dtype=np.int64)
            # Twice the ranks that top-k keeps: where its boundary runs between equals, all of them should be seen.
            self.look = min(vocab, max([FIRST_LOOK] + [2 * r.top_k for r in drawing]))


class Columns:
    """The numbers of R rows that draw, float64 [4, R] -> each [R, 1], on the device."""

    def __init__(self, numbers: Tensor, has_min_p: bool):
        self.numbers, self.has_min_p = numbers, has_min_p
        self.temperature, self.top_p, self.min_p, self.uniform = numbers[:, :, None]

    def of(self, rows: Tensor | slice) -> "Columns":
        return Columns(self.numbers[:, rows], self.has_min_p)


class Sampler:
    """`sampler(logits [R, V], rows)` -> one token id for each of `rows`, in order.

    It has two halves, for who has more to enqueue: `enqueue` never waits for the device, `Draws.tokens` does once. Only
    rows that the first look could not settle are drawn again then, with as many waits as it takes.

    Raises ValueError when a row has no finite highest logit: the model computed NaN, or every token is
    banned.
    """

    def __call__(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
        if not rows:
            return []
        plan = SamplePlan(rows, logits.shape[1], logits.dtype)
        arrays = {name: torch.from_numpy(array).to(logits.device) for name, array in plan.arrays.items()}
        return self.enqueue(logits, plan, arrays).tokens()

    @torch.inference_mode()
    def enqueue(self, logits: Tensor, plan: SamplePlan, arrays: Mapping[str, Tensor]) -> "Draws":
        """Draw for plan.rows, of which there is at least one. `arrays`: plan.arrays on the logits' device."""
        logits = logits[: len(plan.rows)] if plan.in_order else logits[arrays["chosen"]]
        if plan.changes:
            logits = logits.clone() if plan.in_order else logits
            apply_changes(logits, {name: arrays[name] for name in plan.changes})
        highest, tokens = logits.max(dim=-1)  # of equals, the first

        def of_group(name: str, group: list[int]) -> tuple[Tensor, Tensor, Columns, Tensor | slice]:
            everybody = len(group) == len(plan.rows)
            at = slice(None) if everybody else arrays[name]
            return logits[at], highest[at][:, None], Columns(arrays[name + "_numbers"], plan.has_min_p), at

        if plan.free:
            some, top, columns, at = of_group("free", plan.free)
            tokens[at] = in_parts(draw_from_all, some.shape[1], some, top, columns)
        ranked = ()
        if plan.ranked:
            some, top, columns, at = of_group("ranked", plan.ranked)
            total = torch.zeros_like(top, dtype=torch.float64)
            if (unlimited := arrays.get("unlimited")) is not None:  # the share is then of the whole vocabulary
                rows = some[unlimited], top[unlimited], columns.of(unlimited)
                total.index_copy_(0, unlimited, in_parts(total_weight, some.shape[1], *rows))
            ranked = some, top, columns, arrays["top_k"][:, None], total
            tokens[at] = look_at_ranks(ranked, plan.look)
        return Draws(plan, highest, torch.where(highest.isfinite(), tokens, LOST), ranked)


@dataclass
class Draws:
    """A step's draws on the device, before the host has seen them."""

    plan: SamplePlan
    highest: Tensor  # [R]
    result: Tensor  # int64 [R]: the token, LOST or UNSETTLED
    ranked: tuple  # what draw_from_first_ranks was given

    @torch.inference_mode()
    def tokens(self) -> list[int]:
        """Wait for the device; the token ids."""
        tokens = self.result.tolist()
        if LOST in tokens:
            i = tokens.index(LOST)
            raise ValueError(
                f"row {self.plan.rows[i].row} of the logits has {self.highest[i].item()} as its highest value: either "
                "the model computed it (float16 overflows, try dtype='float32'), or all tokens are banned"
            )
        if UNSETTLED in tokens:
            group = [k for k, i in enumerate(self.plan.ranked) if tokens[i] == UNSETTLED]
            for k, token in zip(group, self._look_further(group), strict=True):
                tokens[self.plan.ranked[k]] = token
        return tokens

    def _look_further(self, group: list[int]) -> list[int]:
        """Tokens for these of the ranked rows, from as many ranks as it takes."""
        logits, highest, columns, top_k, total = self.ranked
        at = torch.tensor(group, device=logits.device)
        rows = logits[at], highest[at], columns.of(at), top_k[at], total[at]
        look, vocab = self.plan.look, logits.shape[1]
        while True:
            look = min(8 * look, vocab)
            tokens = look_at_ranks(rows, look).tolist()
            if UNSETTLED not in tokens:
                return tokens


def in_parts(work: Callable[..., Tensor], width: int, *columns: Any) -> Tensor:
    """work(*columns), a few rows at a time. width: numbers of a row that it works on. A row's result is its own.

    columns: tensors [R, ...], or Columns. Whole, the weights of 256 rows of a large vocabulary would take 2 GiB.
    """
    at_once = max(1, SAMPLED_AT_ONCE // width)
    num_rows = len(columns[0])
    if num_rows <= at_once:
        return work(*columns)
    rows = [slice(first, first + at_once) for first in range(0, num_rows, at_once)]
    return torch.cat([work(*(c.of(r) if isinstance(c, Columns) else c[r] for c in columns)) for r in rows])


def draw_from_all(logits: Tensor, highest: Tensor, columns: Columns) -> Tensor:
    """Tokens int64 [R] from all of logits [R, V]."""
    return pick(weigh(logits, highest, columns), columns)[:, 0]


def total_weight(logits: Tensor, highest: Tensor, columns: Columns) -> Tensor:
    """float64 [R, 1]."""
    return weigh(logits, highest, columns).sum(-1, keepdim=True)


def look_at_ranks(rows: tuple, look: int) -> Tensor:
    """`draw_from_first_ranks` for rows, its arguments behind the first, in parts."""
    return in_parts(partial(draw_from_first_ranks, look), look, *rows)


def draw_from_first_ranks(
    look: int, logits: Tensor, highest: Tensor, columns: Columns, top_k: Tensor, total: Tensor
) -> Tensor:
    """Tokens int64 [R] from the first `look` ranks of logits [R, V]; UNSETTLED where these are too few to tell.

    total, float64 [R, 1]: the weight of the whole vocabulary, read where top_k [R, 1] is V. Only the candidates are
    sorted and summed, not the vocabulary.
    """
    vocab = logits.shape[1]
    values, ids = logits.topk(look)
    weights = weigh(values, highest, columns)
    sums = weights.cumsum(-1)
    total = torch.where(top_k == vocab, total, sums.gather(1, top_k.clamp(max=look) - 1))
    short = (sums < columns.top_p * total).sum(-1, keepdim=True)  # ranks before the one that reaches p
    kept = torch.where(columns.top_p < 1, torch.minimum(short + 1, top_k), top_k).clamp(max=look)
    last = values.gather(1, kept - 1)
    # Settled if all equals of the last rank were seen, so that there are no more ranks to keep either. What weighs
    # nothing is never drawn, so it does not matter which of those are kept.
    unsettled = (values[:, -1:] == last) & (weights.gather(1, kept - 1) > 0)

    # In the order of ids. topk breaks ties as it likes: of the equals at the boundary, keep the lowest ids.
    ids, order = ids.sort(-1)
    values, weights = values.gather(1, order), weights.gather(1, order)
    above, equal = values > last, values == last
    keep = above | (equal & (equal.cumsum(-1) <= kept - above.sum(-1, keepdim=True)))
    tokens = ids.gather(1, pick(torch.where(keep, weights, 0.0), columns))
    return (tokens if look == vocab else torch.where(unsettled, UNSETTLED, tokens))[:, 0]


def weigh(logits: Tensor, highest: Tensor, columns: Columns) -> Tensor:
    """exp((logits - highest) / temperature), float64 [R, C]: probabilities up to a factor, at most 1.

    As the likeliest token weighs 1, min-p is a threshold on the weight itself.
    """
    weights = logits.to(torch.float64, copy=True)
    weights.sub_(highest).div_(columns.temperature).exp_()
    if columns.has_min_p:
        weights.masked_fill_(weights < columns.min_p, 0.0)
    return weights


def pick(weights: Tensor, columns: Columns) -> Tensor:
    """The index, int64 [R, 1], where the running sum of weights [R, C] first exceeds uniform * total."""
    sums = weights.cumsum(-1)
    # uniform <= 1 - 2^-53, and no float64 times that rounds up to itself: the target stays below the last.
    target = columns.uniform * sums[:, -1:]
    # Behind the last only where NaN was summed, in a row that has no token: no index on a device may be out of range.
    return torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
