"""The work of a step, in counts that any model and machine can be priced with, and the form of a price.

A cost is any object with `step_seconds(work)`.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from kvlab.schedule import SchedulerOutput


class StepWork(NamedTuple):
    """What one step has to do, in counts that any model and machine can be priced with.

    num_sequences: sequences in the step; num_chunks: those among them that compute more than one token.
    num_tokens: tokens computed, rows through the linears. num_logits: rows through the head, one for each sequence that
    samples (those for prompt log-probabilities are left out).
    attention_pairs: query x key pairs, summed over sequences, causal: a token sees all before it and itself.
    kv_tokens_read: tokens whose K and V attention reads, summed over sequences, those of this step included.
    blocks_copied, blocks_swapped_out, blocks_swapped_in: the copies that come before the forward.
    """

    num_sequences: int = 0
    num_chunks: int = 0
    num_tokens: int = 0
    num_logits: int = 0
    attention_pairs: int = 0
    kv_tokens_read: int = 0
    blocks_copied: int = 0
    blocks_swapped_out: int = 0
    blocks_swapped_in: int = 0


class Part(NamedTuple):
    """One part of a step. bound: what its seconds are spent on: "memory", "compute", "launch", "pcie", "host",
    or "measured" where nobody knows."""

    name: str
    seconds: float
    bound: str


class Breakdown(NamedTuple):
    """A step's seconds, part by part."""

    parts: tuple[Part, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def bound(self) -> str:
        """What most of the time is spent on."""
        seconds: dict[str, float] = {}
        for part in self.parts:
            seconds[part.bound] = seconds.get(part.bound, 0.0) + part.seconds
        return max(seconds, key=seconds.__getitem__)

    def __str__(self) -> str:
        lines = [f"{part.name:12} {part.seconds * 1e3:10.3f} ms  {part.bound}" for part in self.parts]
        return "\n".join([*lines, f"{'step':12} {self.seconds * 1e3:10.3f} ms  mostly {self.bound}"])


class StepCost(Protocol):
    """Prices a step. GPUCost and FittedCost also `explain` it: a Breakdown whose parts add up to step_seconds."""

    def step_seconds(self, work: StepWork) -> float: ...


def work_of(output: SchedulerOutput) -> StepWork:
    """The work of a scheduler's output; to be asked before update_from_output, which moves the requests on."""
    num_chunks = num_tokens = num_logits = extra_pairs = kv_tokens = 0
    for request, new in output.scheduled:
        there = request.num_computed_tokens + new
        num_tokens += new
        kv_tokens += there
        if new > 1:  # a decode has as many pairs as it reads tokens
            num_chunks += 1
            extra_pairs += (new - 1) * (there - new) + new * (new - 1) // 2
        if there == len(request.all_token_ids):
            num_logits += 1
    copied = swapped_out = swapped_in = 0
    for kind, _, _ in output.block_ops:
        if kind == "copy":
            copied += 1
        elif kind == "swap_out":
            swapped_out += 1
        else:
            swapped_in += 1
    return StepWork(len(output.scheduled), num_chunks, num_tokens, num_logits, kv_tokens + extra_pairs, kv_tokens,
                    copied, swapped_out, swapped_in)  # fmt: skip


def work_of_step(step: Iterable[tuple[int, int]]) -> StepWork:
    """The work of [(new tokens, tokens computed before), ...], one pair a sequence, each with one row of logits."""
    step = list(step)
    return StepWork(
        num_sequences=len(step),
        num_chunks=sum(new > 1 for new, _ in step),
        num_tokens=sum(new for new, _ in step),
        num_logits=len(step),
        attention_pairs=sum(new * computed + new * (new + 1) // 2 for new, computed in step),
        kv_tokens_read=sum(computed + new for new, computed in step),
    )
