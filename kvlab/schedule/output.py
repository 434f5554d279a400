"""What the scheduler hands down for one step, and what it hands up after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.blocks import BlockTable
from kvlab.schedule.request import Request
from kvlab.swap import BlockOp


@dataclass
class SchedulerOutput:
    """One step of work. The runner first makes the copies, in order, then one forward over `scheduled`.

    scheduled: (request, num_tokens): compute K/V of its next num_tokens tokens. The step samples for a
        request exactly when num_computed_tokens + num_tokens == request.num_tokens.
    block_tables: the table of each scheduled request, same order; live objects, to be read in this step.
    block_ops: (kind, src, dst) with kind "copy" (GPU to GPU), "swap_out" (GPU to CPU) or "swap_in".
    preempted: ids of requests that lost their place; finished: ids that ended since the last output.
    block_ops_done: the runner sets it once the copies are made, so that a failed forward can be tried again.
    """

    step: int
    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    block_tables: list[BlockTable] = field(default_factory=list)
    block_ops: list[BlockOp] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    block_ops_done: bool = False

    @property
    def total_num_scheduled_tokens(self) -> int:
        return sum([num_tokens for _, num_tokens in self.scheduled])


class SampledTokens(dict[str, list[int]]):
    """What a runner returns: token ids by request id, and the log-probabilities of those who asked, same order.

    A plain dict does as well where nobody asks.
    """

    def __init__(self):
        super().__init__()
        self.logprobs: dict[str, list[dict]] = {}


@dataclass(slots=True)
class EngineCoreOutput:
    """What one step, or an abort, brought for one continuation of one request.

    finish_reason: set in its last output only. (`request` lives on: asked later, it may have ended since.)
    """

    request: Request
    new_token_ids: list[int]
    finish_reason: str | None = None
    logprobs: Sequence[dict] = ()  # one a token, where asked for

    @classmethod
    def ended(cls, request: Request) -> "EngineCoreOutput":
        """For one that ended without a token: aborted or failed."""
        return cls(request, [], request.finish_reason)


@dataclass
class SchedulerStats:
    """Counters since the scheduler was made.

    num_scheduled_tokens counts every computed token, num_recomputed_tokens those among them that had K/V before
    a preemption dropped it. Prefix counters count each request once, at its first admission.
    num_reclaimed_branches: times that a held branch gave its blocks back because somebody needed one.
    num_idle_seats adds up, over steps, the seats of a static batch whose request has finished (L33 3.1).
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_preemptions_recompute: int = 0
    num_preemptions_swap: int = 0
    num_copy_on_writes: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_idle_seats: int = 0
    num_reclaimed_branches: int = 0
    num_finished: int = 0
    peak_running: int = 0
    peak_usage: float = 0.0
