"""Speculative decoding (投机解码) in the simulator: what its verification asks of a step, and what it brings (L33 4.3).

    known tokens, the last without K/V      ... t      propose: k drafts behind it      ... t d1 d2 d3 d4
    Scheduler.schedule()                    1 + k tokens of the budget, like any chunk; a smaller chunk checks fewer
    verify: d1 and d2 hold, d3 does not     ... t d1 d2 | the model's own token x       ... t d1 d2 x

The scheduler knows nothing of it: to it, a verification is a request with 1 + k tokens to compute. Rejected drafts are
cut off before update_from_output, so num_computed_tokens never counts them and no block with one gets a name. The
blocks that they lay in stay with the request; the next tokens overwrite the slots.

The expected number of tokens a verification brings is that of Leviathan et al. 2023 (arXiv 2211.17192, eq. 1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.sampling_params import uniform
from kvlab.schedule import Request
from kvlab.schedule.output import SchedulerOutput


def expected_tokens(acceptance: float, num_drafts: int) -> float:
    """Tokens that a verification of k drafts brings on average, for 1 + k of the budget: 1 + a + a^2 + ... + a^k."""
    return sum(acceptance**accepted for accepted in range(num_drafts + 1))


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """num_drafts: tokens that are guessed for a decoding request in each step, k (fewer before its last token).

    acceptance: the probability that a draft holds, if all before it in the step do. It is drawn from `seed` for each
    place of each request, whatever the schedule does.
    draft_seconds: what guessing adds to a step with drafts; 0 is about right for n-gram lookup, a draft model takes
    its k forward passes.
    """

    num_drafts: int = 4
    acceptance: float = 0.8
    seed: int = 0
    draft_seconds: float = 0.0

    def __post_init__(self):
        if not isinstance(self.num_drafts, int) or isinstance(self.num_drafts, bool) or self.num_drafts < 1:
            raise ValueError(f"num_drafts is {self.num_drafts!r}: use a whole number >= 1, or no speculation at all")
        if not isinstance(self.acceptance, int | float) or not 0 <= self.acceptance <= 1:
            raise ValueError(f"acceptance is {self.acceptance!r}: use a probability from 0 to 1")
        if not isinstance(self.draft_seconds, int | float) or not 0 <= self.draft_seconds < float("inf"):
            raise ValueError(f"draft_seconds is {self.draft_seconds!r}: use seconds, 0 or more")

    @property
    def expected_tokens(self) -> float:
        """Tokens that a verification of all k drafts brings on average."""
        return expected_tokens(self.acceptance, self.num_drafts)

    def holds(self, number: int, position: int) -> bool:
        """Whether a draft for token `position` of request `number` of the workload is what the model says."""
        return uniform(self.seed * 2**32 + number, position) < self.acceptance


class SpeculationStats(NamedTuple):
    """Counted over a run. num_verifications: sequences with at least one draft in a step, summed over steps."""

    num_verifications: int
    num_draft_tokens: int  # that were checked
    num_accepted_tokens: int


class Drafts:
    """The drafts of one run. In each step: propose, schedule, keep_scheduled, (the step's time), verify.

    Requests have a `number` in the workload, and `sampled`, [their token id].
    """

    def __init__(self, speculation: Speculation):
        self.speculation = speculation
        self.num_verifications = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._known: dict[str, tuple[Request, int]] = {}  # by id: the request, and its tokens without drafts

    def propose(self, running: Sequence[Request]) -> None:
        """Drafts behind the last token of each request that has only that one to compute, and has been answered."""
        self._known.clear()
        for request in running:
            known = len(request.all_token_ids)
            if known - request.num_computed_tokens != 1 or known == request.num_prompt_tokens:
                continue
            num_drafts = min(self.speculation.num_drafts, request.max_num_tokens - known - 1)  # the last is sampled
            if num_drafts > 0:
                self._known[request.request_id] = request, known
                request.all_token_ids += request.sampled * num_drafts

    def keep_scheduled(self, output: SchedulerOutput) -> int:
        """Drop the drafts that got no place in the step; how many are left: rows through the head besides the usual."""
        scheduled = {request.request_id: num_tokens for request, num_tokens in output.scheduled}
        left = 0
        for request_id, (request, known) in list(self._known.items()):
            num_drafts = max(0, scheduled.get(request_id, 0) - 1)
            del request.all_token_ids[known + num_drafts :]
            left += num_drafts
            if not num_drafts:
                del self._known[request_id]
        return left

    def verify(self, output: SchedulerOutput) -> tuple[int, int]:
        """Cut off what does not hold, in the requests and in `output`; (drafts accepted, rejected)."""
        proposed = accepted = 0
        for i, (request, num_tokens) in enumerate(output.scheduled):
            if request.request_id not in self._known:
                continue
            _, known = self._known[request.request_id]
            end = known + num_tokens - 1
            first_wrong = next((p for p in range(known, end) if not self.speculation.holds(request.number, p)), end)
            del request.all_token_ids[first_wrong:]
            output.scheduled[i] = request, first_wrong - known + 1
            proposed += end - known
            accepted += first_wrong - known
        self.num_verifications += len(self._known)
        self.num_draft_tokens += proposed
        self.num_accepted_tokens += accepted
        return accepted, proposed - accepted

    @property
    def stats(self) -> SpeculationStats:
        return SpeculationStats(self.num_verifications, self.num_draft_tokens, self.num_accepted_tokens)
