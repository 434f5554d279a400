"""Admission: who of the waiting comes in, in order, while budget, seats and room last (L33 3.2, 3.3; lab 07).

    waiting --seat? (admit)--room? (may_resume)--slots--> running, with its first chunk in this step

A request of higher priority may make running ones of lower give way.
"""

from typing import NamedTuple

from kvlab.blocks import cdiv
from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.schedule import group as whole
from kvlab.schedule.beam import BeamGroup
from kvlab.schedule.group import Scheduled
from kvlab.schedule.output import SchedulerOutput
from kvlab.schedule.policies import Policies, Room
from kvlab.schedule.pressure import Pressure
from kvlab.schedule.request import Request, RequestStatus


class Load(NamedTuple):
    """What running requests take: seats (children to come included), blocks for tokens they already have, and how
    many of them may need another block soon."""

    seats: int
    promised: int
    growing: int

    def __add__(self, other: "Load") -> "Load":
        return Load(*(a + b for a, b in zip(self, other, strict=True)))


class Admission(Pressure):
    """Lets waiting requests in."""

    def __init__(self, config: EngineConfig, manager: KVCacheManager, policies: Policies, recorder: Recorder | None):
        super().__init__(config, manager, policies, recorder)
        self._chunk_limit = config.max_num_batched_tokens
        if config.enable_chunked_prefill and config.long_prefill_token_threshold:
            self._chunk_limit = config.long_prefill_token_threshold
        self._batch_is_forming = True

    def _schedule_waiting(self, scheduled: Scheduled, output: SchedulerOutput) -> None:
        """Let waiting requests in, in order, until the first that cannot come in."""
        if not self.waiting:
            self._batch_is_forming = False
            return
        config, manager = self.config, self.manager
        # Of those who run; whoever enters now is never lower than who comes after it, for the queue is in that order.
        lowest = max([request.priority for request in self.running], default=0)
        if len(self.running) >= config.max_num_seqs and lowest <= self.waiting.peek().priority:
            self._batch_is_forming = False  # no seat, and nobody who would make way: most steps under load
            return
        aside: list[Request] = []  # those who wait a step for a block that somebody computes in this one
        budget, load, blocked = self._budget_left(scheduled), self._load(self.running), False
        try:
            while self.waiting and budget > 0 and len(aside) < config.max_num_seqs:
                request = self.waiting.peek()
                if request.request_id in output.preempted:
                    break  # it has just made way and does not come back in the same step
                has_seat = self._has_seat(request, load)
                lower = []
                if lowest > request.priority:
                    lower = [other for other in self.running if other.priority > request.priority]
                if not has_seat and not lower:
                    blocked = True
                    break
                hits, num_hit_tokens = [], 0
                if request.group is not None and request.group.is_branched:
                    fits = has_seat and self._has_room(request, hits, load, self._num_available(request))
                    if fits:
                        self._enter_group(request.group, scheduled, budget)
                        budget, load = self._budget_left(scheduled), self._load(self.running)
                        continue
                else:
                    if not request.needs_prompt_logprobs:
                        hits, num_hit_tokens = manager.get_computed_blocks(request)
                        if self._is_computed_this_step(request, len(hits), scheduled):
                            aside.append(self.waiting.pop())
                            continue
                    if request.held is not None:
                        hits = self._own_or_hits(request, hits)
                        num_hit_tokens = len(hits) * config.block_size
                    computed = max(request.num_computed_tokens, num_hit_tokens)
                    num_tokens = min(request.num_tokens - computed, self._chunk_limit, budget)
                    if not config.enable_chunked_prefill and num_tokens < request.num_tokens - computed:
                        break
                    fits = has_seat and self._has_room(request, hits, load, self._num_available(request, hits))
                    fits = fits and self._allocate(request, num_tokens, hits)
                if not fits:
                    if lower and self._make_way(request, lower, scheduled, output):
                        budget, load = self._budget_left(scheduled), self._load(self.running)
                        continue
                    if not self.running and request.request_id in manager.req_to_blocks:
                        self._take_blocks(request)  # its own K/V leaves no block for a copy: it begins anew
                        continue
                    blocked = True
                    break
                self.waiting.pop()
                self._enter(request, computed, num_hit_tokens)
                scheduled[request.request_id] = (request, num_tokens)
                budget -= num_tokens
                load += self._load([request])
        finally:
            for request in aside:
                self.waiting.add(request)
        self._batch_is_forming = self._batch_is_forming and not blocked and bool(self.waiting)

    def _budget_left(self, scheduled: Scheduled) -> int:
        return self.config.max_num_batched_tokens - sum([num_tokens for _, num_tokens in scheduled.values()])

    def _load(self, running: list[Request]) -> Load:
        tables, size = self.manager.req_to_blocks, self.config.block_size
        promised = to_come = 0
        for request in running:
            missing = len(request.all_token_ids) - len(tables[request.request_id]) * size
            if missing > 0:  # tokens without a block: chunks of its prompt are still to come
                promised += cdiv(missing, size)
            to_come += request.num_to_fork
        return Load(
            seats=len(running) + to_come,
            promised=promised,
            growing=len(running) if self.manager.tables_grow else 0,
        )

    def _has_seat(self, request: Request, load: Load) -> bool:
        """Seats for the request and its children to come; one with more children than seats needs them all."""
        seats = self.config.max_num_seqs
        if load.seats + min(request.num_seats, seats) > seats:
            return False
        return self.policies.admit(load.seats, seats, self._batch_is_forming)

    def _has_room(self, request: Request, hits: list, load: Load, num_free: int) -> bool:
        if request.group is not None and request.group.is_branched:
            needed = whole.blocks_to_start(request.group, self.config.block_size)
            if needed > num_free:
                return False  # whatever the policy says: it comes in whole
        else:
            needed = self.manager.num_blocks_to_start(request, request.num_tokens, hits)
        return self.policies.may_resume(request, Room(needed, num_free, load.promised, load.growing))

    def _make_way(self, request: Request, lower: list[Request], scheduled: Scheduled, output: SchedulerOutput) -> bool:
        """Preempt one of `lower`, running requests of strictly lower priority, if doing so to all lets `request` in.

        Equals never give way to each other here, and who was preempted cannot come back over the head of
        whom it made way for: no ping-pong.
        """
        load = self._load([other for other in self.running if other.priority <= request.priority])
        num_free = self._num_available(request, lower=lower)
        if not (self._has_seat(request, load) and self._has_room(request, [], load, num_free)):
            return False
        self._preempt_whole(max(lower, key=lambda other: other.sort_key), request, scheduled, output)
        return True

    def _enter(self, request: Request, computed: int, num_hit_tokens: int) -> None:
        """`request` takes a seat, with K/V for its first `computed` tokens."""
        self.stats.num_recomputed_tokens += max(0, request.num_lost_tokens - computed)
        request.num_lost_tokens = 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(computed, request.num_prompt_tokens)
            if computed == num_hit_tokens:  # else a branch has brought its own
                self.stats.num_prefix_queried_tokens += request.num_prompt_tokens
                self.stats.num_prefix_hit_tokens += request.num_cached_tokens
        request.num_computed_tokens = computed
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self.recorder is not None:
            self.recorder.emit("schedule", request.request_id, (computed,))

    def _enter_group(self, group: BeamGroup, scheduled: Scheduled, budget: int) -> None:
        """All members take their seats; `_has_room` has seen to it that each gets its slots, if not its tokens."""
        for member in group.members:
            hits, num_hit_tokens = self.manager.get_computed_blocks(member)  # now: the one before may have evicted some
            computed = max(member.num_computed_tokens, num_hit_tokens)
            num_tokens = min(member.num_tokens - computed - 1, self._chunk_limit, budget)
            self._allocate(member, max(1, num_tokens), hits)
            self.waiting.remove(member)
            self._enter(member, computed, num_hit_tokens)
            if num_tokens:
                scheduled[member.request_id] = (member, num_tokens)
                budget -= num_tokens
        if group.is_ready and budget >= group.width:
            scheduled.update((member.request_id, (member, 1)) for member in group.members)

    def _is_computed_this_step(self, request: Request, num_hits: int, scheduled: dict) -> bool:
        """True if somebody in this step computes the very block that `request` misses next.

        It then waits a step and shares that block instead of computing it a second time.
        """
        size = self.config.block_size
        start, stop = num_hits * size, (num_hits + 1) * size
        if not self.manager.enable_caching or stop >= request.num_tokens or request.num_computed_tokens > start:
            return False
        for other, num_tokens in scheduled.values():
            computed = other.num_computed_tokens
            if (
                computed < stop
                and computed + num_tokens > start
                and other.num_tokens >= stop
                and other.cache_salt == request.cache_salt
                and other.all_token_ids[start:stop] == request.all_token_ids[start:stop]
                and other.all_token_ids[:start] == request.all_token_ids[:start]
            ):
                return True
        return False
