"""What a request may do to its logits before the draw, and what they say afterwards.

    logits -> ban, bias -> repetition, then frequency and presence penalty -> Sampler's draw      apply_changes
    logits -> log_softmax -> the token's and the k best log-probabilities                         top_logprobs

Penalties are functions of the tokens that stand before, never of a state that is kept beside them: preemption
and forks cannot change what they do. Order and signs are vLLM's.

The host makes arrays of what is to change in all rows (`changes_of`); they go to the device with the step's other
inputs, and `apply_changes` enqueues a few operations for the whole batch. Nothing there waits for the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Adjustment:
    """Changes to one row of logits. The token lists may be long; they are read, never kept.

    banned: cannot come out. bias: (token id, number) pairs to add. repetition: divides positive and multiplies
    negative logits of all `prompt` and `output` tokens. presence, frequency: subtracted for tokens in `output`,
    once and for each time.
    """

    banned: Sequence[int] = ()
    bias: Sequence[tuple[int, float]] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()


def changes_of(adjustments: Sequence[Adjustment | None], vocab: int, dtype: torch.dtype) -> dict[str, np.ndarray]:
    """What `adjustments`, one a row, do to logits [R, vocab] of `dtype`, as arrays for `apply_changes`; {} if nothing.

    "banned", "biased", "repeated", "counted": int64, places in the flattened logits. "bias", "repetition", "penalty":
    a number for each place. Token ids outside the vocabulary are passed over.
    """
    places: dict[str, list[np.ndarray]] = {"banned": [], "biased": [], "repeated": [], "counted": []}
    numbers: dict[str, list[np.ndarray]] = {"bias": [], "repetition": [], "penalty": []}
    exact = np.float64 if dtype == torch.float64 else np.float32

    def ids(tokens: Sequence[int]) -> np.ndarray:
        tokens = np.array(tokens, dtype=np.int64)
        return tokens[(tokens >= 0) & (tokens < vocab)]

    for row, change in enumerate(adjustments):
        if change is None:
            continue
        if change.banned:
            places["banned"].append(row * vocab + ids(change.banned))
        if bias := [(token, number) for token, number in change.bias if token < vocab]:
            tokens, values = zip(*bias, strict=True)
            places["biased"].append(row * vocab + np.array(tokens, dtype=np.int64))
            numbers["bias"].append(np.array(values))
        if change.repetition != 1:  # a token may stand there several times: each makes the same of the same logit
            tokens = ids([*change.prompt, *change.output])
            places["repeated"].append(row * vocab + tokens)
            numbers["repetition"].append(np.full(len(tokens), change.repetition))
        if (change.presence or change.frequency) and change.output:
            tokens, counts = np.unique(ids(change.output), return_counts=True)
            places["counted"].append(row * vocab + tokens)
            numbers["penalty"].append(exact(change.frequency) * counts.astype(exact) + exact(change.presence))
    arrays = {name: np.concatenate(parts) for name, parts in (places | numbers).items() if parts}
    return {name: array.astype(np.float64) if name in numbers else array for name, array in arrays.items()}


def apply_changes(logits: Tensor, arrays: Mapping[str, Tensor]) -> None:
    """Change logits [R, V], contiguous, in place, by `changes_of`'s arrays on the logits' device."""
    flat = logits.view(-1)
    if (places := arrays.get("banned")) is not None:
        flat.index_fill_(0, places, -torch.inf)
    if (places := arrays.get("biased")) is not None:
        flat.index_copy_(0, places, flat[places] + arrays["bias"].to(flat.dtype))
    if (places := arrays.get("repeated")) is not None:
        x, repetition = flat[places], arrays["repetition"].to(flat.dtype)
        flat.index_copy_(0, places, torch.where(x > 0, x / repetition, x * repetition))
    if (places := arrays.get("counted")) is not None:
        flat.index_copy_(0, places, flat[places] - arrays["penalty"].to(flat.dtype))


def adjust(row: Tensor, change: Adjustment) -> None:
    """Apply `change` to one row of logits [V], in place. Token ids outside the vocabulary are passed over."""
    arrays = changes_of([change], len(row), row.dtype)
    apply_changes(row, {name: torch.from_numpy(array).to(row.device) for name, array in arrays.items()})


@dataclass(frozen=True)
class Logprob:
    """How likely the model found a token: natural logarithm, rank (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@torch.inference_mode()
def top_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """For each row of logits [R, V]: the log-probability of its token, and of the `counts[i]` likeliest ones.

    Of the distribution as the model gave it, in float32 at least. The token comes first in its dict. One transfer from
    the device, whatever R.
    """
    most = min(max(counts), logits.shape[1])
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1, keepdim=True) + 1
    best = logprobs.topk(most)
    # One matrix of float64, which holds ranks and ids exactly.
    table = torch.cat([x.to(torch.float64) for x in (chosen, ranks, best.values, best.indices)], dim=1).tolist()
    result = []
    for (logprob, rank, *likeliest), token, count in zip(table, token_ids, counts, strict=True):
        entry = {token: Logprob(logprob, int(rank))}
        for i in range(min(count, most)):
            entry.setdefault(int(likeliest[most + i]), Logprob(likeliest[i], i + 1))
        result.append(entry)
    return result
