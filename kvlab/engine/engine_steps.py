"""What lab 13 has a student write, in the small: a draw in three functions, whose draws a step makes, its worst batch.

    weights --keep--> which tokens may be drawn --pick--> the one that is             sample does both, from logits
    draws          which rows of a step's logits are sampled, with which number
    worst_batch    the step with which an engine measures how much memory a step can take (PAV 3.1)
    careful_execute  a forward that fails, tried one request at a time

The engine's own sampler does the first three for many rows at once (`sampler.py`), the runner the fourth
(`ModelRunner.prepare`), EngineCore the last. Plain Python.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import exp
from typing import Any, NamedTuple

from kvlab.schedule import SchedulerOutput


def pick(weights: Sequence[float], uniform: float) -> int:
    """The first index at which the running sum of `weights` exceeds uniform * their sum.

    weights: 0 or more each, and not all 0. uniform: in [0, 1). So index i is drawn for a share weights[i] / sum of
    all uniforms, and one of weight 0 never.
    """
    sums = list(accumulate(weights))
    target = uniform * sums[-1]
    return next(i for i, total in enumerate(sums) if total > target)


def keep(weights: Sequence[float], top_k: int, top_p: float) -> list[int]:
    """The indices that top-k and then top-p leave, ascending.

    Rank is by weight; of equals the lower index goes first. top_k: the first so many ranks; 0 for all. top_p: of
    these the shortest run of first ranks whose sum reaches top_p times the sum of what top-k left; 1 for all.
    """
    ranks = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k:
        ranks = ranks[:top_k]
    if top_p < 1:
        wanted = top_p * sum(weights[i] for i in ranks)
        sums = accumulate(weights[i] for i in ranks)
        ranks = ranks[: 1 + next(n for n, total in enumerate(sums) if total >= wanted)]
    return sorted(ranks)


def sample(logits: Sequence[float], temperature: float, top_k: int, top_p: float, uniform: float) -> int:
    """The token drawn from one row: the part `sampler`.

    logits: [vocab], -inf for what is banned, never NaN and not all -inf; not to be changed. temperature: 0 is
    greedy (the highest logit, of equals the lowest id), else weights are exp(logit / temperature), up to a factor.
    """
    values = [float(x) for x in logits]
    highest = max(values)
    if temperature == 0:
        return values.index(highest)
    weights = [exp((x - highest) / temperature) for x in values]
    kept = keep(weights, top_k, top_p)
    return kept[pick([weights[i] for i in kept], uniform)]


class Entry(NamedTuple):
    """One scheduled request, in numbers. num_to_fork: children that its prompt's end will bring, 0 once they are there.

    num_tokens: of the prompt and all outputs so far. num_computed: of these, how many have K and V before the step.
    num_scheduled: how many the step computes.
    """

    seed: int
    num_prompt_tokens: int
    num_tokens: int
    num_computed: int
    num_scheduled: int
    num_to_fork: int = 0


def draws(scheduled: Sequence[Entry]) -> list[tuple[int, int, int]]:
    """(row, seed, position) of every token that a step draws: its uniform is uniform(seed, position).

    The entries' tokens lie one after the other in the batch, a row each. A request is sampled in the step that computes
    its last known token, from that token's row. position: outputs that it has already. A child c = 1, 2, ... draws
    from the same row with seed + c.
    """
    found, end = [], 0
    for entry in scheduled:
        end += entry.num_scheduled
        if entry.num_computed + entry.num_scheduled == entry.num_tokens:
            position = entry.num_tokens - entry.num_prompt_tokens
            found += [(end - 1, entry.seed + child, position) for child in range(1 + entry.num_to_fork)]
    return found


def worst_batch(max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int) -> list[int]:
    """Tokens of each request in the largest step that these limits allow, longest first (PAV 3.1).

    As many tokens as possible; with these as many requests as possible, since each may have a row of logits; and with
    these the longest as long as possible, for the sake of its attention. A request computes 1 to max_model_len tokens.
    """
    num_seqs = min(max_num_seqs, max_num_batched_tokens)
    left, counts = max_num_batched_tokens, []
    for after in reversed(range(num_seqs)):
        counts.append(min(max_model_len, left - after))  # one token is left for each of those that follow
        left -= counts[-1]
    return counts


def alone(output: SchedulerOutput, i: int) -> SchedulerOutput:
    """A step of entry i of `output` alone, whose copies have been made."""
    return replace(output, scheduled=[output.scheduled[i]], block_tables=[output.block_tables[i]], block_ops=[],
                   block_ops_done=True)  # fmt: skip


def careful_execute(runner: Any, output: SchedulerOutput) -> tuple[dict[str, list[int]], dict[str, str]]:
    """(sampled, failed): what runner.execute(output) samples, and whoever cannot be computed, with the error's words.

    If the forward fails, each entry is tried alone, in order. If the copies before it failed (`block_ops`, and
    not `block_ops_done`), nothing may be tried again: the exception is raised.
    """
    try:
        return runner.execute(output), {}
    except Exception:
        if output.block_ops and not output.block_ops_done:
            raise
    sampled, failed = {}, {}
    for i, (request, _) in enumerate(output.scheduled):
        try:
            sampled.update(runner.execute(alone(output, i)))
        except Exception as error:
            failed[request.request_id] = str(error)
    return sampled, failed
