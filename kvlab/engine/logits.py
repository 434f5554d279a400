"""What a request may do to its logits before the draw, and what they say afterwards.

    logits -> ban, bias -> repetition, then frequency and presence penalty -> Sampler's draw      adjust
    logits -> log_softmax -> the token's and the k best log-probabilities                         top_logprobs

Penalties are functions of the tokens that stand before, never of a state that is kept beside them: preemption
and forks cannot change what they do. Order and signs are vLLM's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Adjustment:
    """Changes to one row of logits. The token lists may be long; they are read, never copied or kept.

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


def adjust(row: Tensor, change: Adjustment) -> None:
    """Apply `change` to one row of logits [V], in place. Token ids outside the vocabulary are passed over."""
    vocab = row.shape[0]

    def ids(tokens: Sequence[int]) -> Tensor:
        return torch.tensor([t for t in tokens if 0 <= t < vocab], dtype=torch.int64, device=row.device)

    if change.banned:
        row[ids(change.banned)] = -torch.inf
    for token, bias in change.bias:
        if token < vocab:
            row[token] += bias
    if change.repetition != 1:
        seen = ids([*change.prompt, *change.output]).unique()
        row[seen] = torch.where(row[seen] > 0, row[seen] / change.repetition, row[seen] * change.repetition)
    if (change.presence or change.frequency) and change.output:
        tokens, counts = ids(change.output).unique(return_counts=True)
        row[tokens] -= change.frequency * counts.to(row.dtype) + change.presence


@dataclass(frozen=True)
class Logprob:
    """How likely the model found a token: natural logarithm, rank (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


def top_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[dict[int, Logprob]]:
    """For each row of logits [R, V]: the log-probability of its token, and of the `counts[i]` likeliest ones.

    Of the distribution as the model gave it, in float32 at least. The token comes first in its dict.
    """
    logprobs = logits.log_softmax(-1)
    tokens = torch.tensor(token_ids, device=logits.device)[:, None]
    chosen = logprobs.gather(1, tokens)
    ranks = (logprobs > chosen).sum(-1) + 1
    best = logprobs.topk(min(max(counts), logits.shape[1]))
    result = []
    for i, (token, count) in enumerate(zip(token_ids, counts, strict=True)):
        entry = {token: Logprob(float(chosen[i]), int(ranks[i]))}
        for rank in range(min(count, logits.shape[1])):
            entry.setdefault(int(best.indices[i, rank]), Logprob(float(best.values[i, rank]), rank + 1))
        result.append(entry)
    return result
