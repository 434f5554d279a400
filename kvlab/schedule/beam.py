"""Beam search (束搜索) by fork: the rules of the search, and the memory that sharing saves (L33 2.4).

    members [A B C], each at its last known token    one step of the engine computes all of them
      -> the likeliest next tokens of each           BeamGroup.report
      -> A+x  A+y  C+z live on, B does not           BeamGroup.advance
      -> B gives its blocks back, becomes a fork of A; then x, y and z are appended

So a group is `width` ordinary sequences, which keep their seats from the first fork to the end (group.py says how
they move). No K/V moves when beams change places: tables are forked, and a block is copied only where two of them
write into it. A finished hypothesis is a list of tokens; it holds no blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvlab.blocks import BlockTable
from kvlab.sampling_params import BeamSearchParams, SamplingParams
from kvlab.schedule.request import Request, RequestStatus
from kvlab.swap import BlockOp


@dataclass
class Hypothesis:
    """A finished continuation. score: cumulative_logprob / len(token_ids) ** length_penalty."""

    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass
class BeamMemory:
    """Blocks that a group held, beside those that `width` private copies would have held (L33 2.4).

    The peaks are of the step in which copies would hold most; the sums are over all steps of the group.
    num_copies: blocks that really were copied, before a write into a shared one.
    """

    peak_blocks: int = 0
    peak_blocks_copying: int = 0
    sum_blocks: int = 0
    sum_blocks_copying: int = 0
    num_copies: int = 0

    def measure(self, tables: Sequence[BlockTable], block_ops: Sequence[BlockOp]) -> None:
        held = {block.block_id for table in tables for block in table}
        copying = sum(map(len, tables))
        self.peak_blocks_copying, self.peak_blocks = max(
            (self.peak_blocks_copying, self.peak_blocks), (copying, len(held))
        )
        self.sum_blocks += len(held)
        self.sum_blocks_copying += copying
        self.num_copies += sum(kind == "copy" and dst in held for kind, _, dst in block_ops)

    @property
    def saved_at_peak(self) -> float:
        """Share of blocks saved against copying, 0 to 1, where copies would hold most."""
        return 1 - self.peak_blocks / max(1, self.peak_blocks_copying)

    @property
    def saved_on_average(self) -> float:
        """The same over all steps."""
        return 1 - self.sum_blocks / max(1, self.sum_blocks_copying)


class BeamGroup:
    """The `width` best unfinished continuations of one prompt, the members, and the best finished ones.

    leader: the request that was added; it computes the prompt, and the others are forked from it.
    members, scores: best first; scores are summed log-probabilities. finished: best first, at most `width`.
    parents: for each step so far, whom each living member went on from, as positions among the members before.
    """

    def __init__(self, leader: Request, params: BeamSearchParams):
        self.leader = leader
        self.params = params
        self.width = params.beam_width
        self.enders = frozenset() if params.ignore_eos else leader.eos_token_ids
        self.members = [leader]
        self.scores = [0.0]
        self.finished: list[Hypothesis] = []
        self.parents: list[list[int]] = []
        self.is_over = False
        self.memory = BeamMemory()
        self.reports: dict[str, dict[int, float]] = {}  # of this step: member's id -> {token: log-probability}

    @property
    def num_candidates(self) -> int:
        """How many next tokens of each member must be known: `width` that go on, whatever ends beside them."""
        return self.width + len(self.enders)

    @property
    def is_branched(self) -> bool:
        """True from the first fork on: then there are `width` members."""
        return not self.leader.num_to_fork

    @property
    def is_ready(self) -> bool:
        """True if a step may sample: all members run, each with only its last known token to compute."""
        return len(self.members) == 1 or all(
            member.status is RequestStatus.RUNNING and member.num_tokens - member.num_computed_tokens == 1
            for member in self.members
        )

    def report(self, member: Request, logprobs: dict[int, object]) -> None:
        """What the runner found likeliest after `member`: `num_candidates` tokens or more."""
        self.reports[member.request_id] = {token: entry.logprob for token, entry in logprobs.items()}

    def advance(self) -> list[tuple[int, int]]:
        """Take the reports of all members: who lives on, as (position of the parent, token), best first.

        The rules are those of `transformers`. All continuations are ranked by summed log-probability. One that ends
        is kept if its rank is within the width; the best `width` that do not end live on. The search is over at
        the length limit, or when `width` are finished and the best living one, at its present length, scores no
        better than the worst of them (with early_stopping: at once). Then the list is empty.
        """
        reports = [self.reports[member.request_id] for member in self.members]
        self.reports = {}
        ranked = [
            (score + logprob, parent, token)
            for parent, (score, report) in enumerate(zip(self.scores, reports, strict=True))
            for token, logprob in report.items()
        ]
        ranked.sort(key=lambda candidate: (-candidate[0], candidate[1], candidate[2]))
        length = self.leader.num_output_tokens + 1
        norm = length**self.params.length_penalty
        is_last = self.leader.num_tokens + 1 >= self.leader.max_num_tokens
        living = []
        for rank, candidate in enumerate(ranked):
            total, parent, token = candidate
            if is_last or token in self.enders:
                if rank < self.width:
                    reason = "stop" if token in self.enders else "length"
                    tokens = [*self.members[parent].output_token_ids, token]
                    self.finished.append(Hypothesis(tokens, total, total / norm, reason))
            elif len(living) < self.width:
                living.append(candidate)
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[self.width :]
        is_full = len(self.finished) == self.width
        if not is_last and len(living) < self.width:
            raise ValueError(
                f"request {self.leader.request_id!r}: {len(living)} tokens can follow, too few for {self.width} beams: "
                f"the runner must report the {self.num_candidates} likeliest tokens of each, or lower beam_width"
            )
        if is_last or (is_full and (self.params.early_stopping or living[0][0] / norm <= self.finished[-1].score)):
            self.is_over = True
            return []
        self.scores = [total for total, _, _ in living]
        self.parents.append([parent for _, parent, _ in living])
        return [(parent, token) for _, parent, token in living]

    def place(self, living: Sequence[tuple[int, int]]) -> list[tuple[Request, Request]]:
        """Seat those who live on: the (parent, child) forks to make. Call it with `width` members, newborn ones last.

        The first continuation of a parent stays in its place; each further one takes the place of a member that
        does not live on. `members` is by rank afterwards.
        """
        parents = {parent for parent, _ in living}
        spare = iter([member for i, member in enumerate(self.members) if i not in parents])
        forks, members, placed = [], [], set()
        for parent, _ in living:
            member = self.members[parent]
            if parent in placed:
                child = next(spare)
                forks.append((member, child))
                member = child
            placed.add(parent)
            members.append(member)
        self.members = members
        return forks


def beam_request(request_id: str, prompt_token_ids: Sequence[int], params: BeamSearchParams, *,
                 eos_token_ids: Sequence[int] = (), priority: int = 0,
                 cache_salt: str | None = None) -> Request:  # fmt: skip
    """A request whose `group` searches; it ends once, and the hypotheses are in request.group.finished."""
    sampling = SamplingParams(n=params.beam_width, temperature=0, max_tokens=params.max_tokens,
                              ignore_eos=params.ignore_eos)  # fmt: skip
    request = Request(request_id, prompt_token_ids, sampling, eos_token_ids=eos_token_ids, priority=priority,
                      cache_salt=cache_salt)  # fmt: skip
    request.group = BeamGroup(request, params)
    request.num_logprobs = request.group.num_candidates
    return request
