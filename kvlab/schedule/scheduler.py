"""The scheduler: one token budget a step, for chunks of prompts and decodes alike (L33 4.3, 4.4).

    schedule()             1. running requests, decodes first; who finds no block preempts, or steps back
                           2. if nobody was preempted: waiting requests, in order, while budget, seats and room last;
                              one of higher priority may preempt running ones of lower
    -> SchedulerOutput     copies, then one forward (somebody else's work)
    update_from_output()   only here do num_computed_tokens advance, tokens appear, and blocks become findable

If the forward fails, nothing has been published and the same step can be scheduled again.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import gt
from typing import NamedTuple

from kvlab.blocks import BlockPool, FreeKVCacheBlockQueue, cdiv
from kvlab.config import EngineConfig
from kvlab.contiguous import ContiguousKVCacheManager
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.prefix import HashChainIndex
from kvlab.schedule import group as whole
from kvlab.schedule.beam import BeamGroup
from kvlab.schedule.group import Scheduled
from kvlab.schedule.outcome import StepOutcome
from kvlab.schedule.output import SchedulerOutput
from kvlab.schedule.policies import Policies, Room, admit_static
from kvlab.schedule.request import Request, RequestStatus


class Load(NamedTuple):
    """What running requests take: seats (children to come included), blocks for tokens they already have, and how
    many of them may need another block soon."""

    seats: int
    promised: int
    growing: int

    def __add__(self, other: "Load") -> "Load":
        return Load(*(a + b for a, b in zip(self, other, strict=True)))


def make_manager(config: EngineConfig, recorder: Recorder | None = None, *, free_queue: Callable | None = None,
                 block_pool: Callable | None = None, prefix_index: Callable | None = None, fork: Callable | None = None,
                 ensure_writable: Callable | None = None, arena: Callable | None = None) -> KVCacheManager:  # fmt: skip
    """The manager that `config` asks for. ValueError if it leaves open how many blocks there are.

    free_queue, block_pool, prefix_index, fork, ensure_writable, arena: what is not ours (kvlab.parts).
    """
    if config.num_gpu_blocks_override is None:
        raise ValueError("num_gpu_blocks_override is None: set it, or pass a manager")
    if config.num_cpu_blocks_override is None and config.swap_space > 0:
        raise ValueError(
            f"swap_space is {config.swap_space} GiB, and without a model nobody knows the size of a block: set "
            f"num_cpu_blocks_override instead"
        )
    num_blocks, size = config.num_gpu_blocks_override, config.block_size
    contiguous = config.reservation == "contiguous"
    index = None
    if config.enable_prefix_caching and not contiguous:
        index = (prefix_index or HashChainIndex)(size)
    pool = (block_pool or BlockPool)(num_blocks, prefix_index=index, recorder=recorder,
                                     free_queue=free_queue or FreeKVCacheBlockQueue)  # fmt: skip
    if contiguous:
        if config.max_model_len is None:
            raise ValueError("contiguous reservation needs max_model_len: it is what each request reserves")
        placed = arena and arena(num_blocks - 1, start=1)
        return ContiguousKVCacheManager(num_blocks, size, config.max_model_len, placed, recorder, pool)
    return KVCacheManager(num_blocks, size, num_cpu_blocks=config.num_cpu_blocks_override or 0, block_pool=pool,
                          recorder=recorder, fork=fork, ensure_writable=ensure_writable)  # fmt: skip


class Scheduler(StepOutcome):
    """Owns all unfinished requests and decides every step.

    config: max_num_seqs, max_num_batched_tokens and the other settings of scheduling.
    manager: who holds the blocks; made by `make_manager` if not given.
    """

    def __init__(self, config: EngineConfig, manager: KVCacheManager | None = None, policies: Policies | None = None,
                 recorder: Recorder | None = None):  # fmt: skip
        super().__init__(config, manager or make_manager(config, recorder), recorder)
        policies = policies or Policies()
        if config.batching == "static" and policies.admit is Policies.admit:
            policies = replace(policies, admit=admit_static)
        self.policies = policies
        self._chunk_limit = config.max_num_batched_tokens
        if config.enable_chunked_prefill and config.long_prefill_token_threshold:
            self._chunk_limit = config.long_prefill_token_threshold
        self._batch_is_forming = True
        self._batch_size = 0

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: allocate, preempt, admit. Nothing is advanced or published."""
        self.stats.num_steps += 1
        if self.recorder is not None:
            self.recorder.step = self.stats.num_steps
            self.recorder.emit("step_begin")
        output = SchedulerOutput(step=self.stats.num_steps)
        if not self.running:
            self._batch_is_forming, self._batch_size = True, 0
        scheduled = self._schedule_running(output)
        if output.preempted:
            self._batch_is_forming = False  # nobody enters in the step in which somebody had to leave
        else:
            self._schedule_waiting(scheduled, output)
        self._batch_size = max(len(self.running), self._batch_size)

        tables = self.manager.req_to_blocks
        output.scheduled = list(scheduled.values())
        output.block_tables = [tables[request_id] for request_id in scheduled]
        output.block_ops = self.manager.take_block_ops()
        output.finished, self._finished_ids = self._finished_ids, []
        self._count(output)
        return output

    def _schedule_running(self, output: SchedulerOutput) -> Scheduled:
        """Give running requests their tokens and slots; preempt until every planned request has them."""
        scheduled: Scheduled = {}
        allocate_slots = self.manager.allocate_slots
        todo = whole.side_by_side(self.running) if self.groups else list(self.running)
        while todo:
            budget = self._budget_left(scheduled)
            if self.groups:
                pending = whole.pending_tokens(todo)
            else:
                pending = [len(request.all_token_ids) - request.num_computed_tokens for request in todo]
            plan = self.policies.plan_tokens(pending, budget, self._chunk_limit)
            if len(plan) != len(todo) or sum(plan) > budget or min(plan) < 0 or any(map(gt, plan, pending)):
                raise ValueError(f"plan_tokens gave {plan} of a budget of {budget} to requests with {pending} pending")
            if self.groups:
                plan = whole.keep_whole(todo, plan, scheduled)
            for request, num_tokens in zip(todo, plan, strict=True):
                if num_tokens <= 0:
                    continue
                # The first call is all that nearly every decode needs; the second asks idle branches for their blocks.
                if allocate_slots(request, num_tokens) is None and not self._allocate(request, num_tokens):
                    self._preempt_whole(self._choose_victim(request), scheduled, output)
                    # A victim gives its tokens back, so the rest of the step is planned anew.
                    todo = [r for r in todo[todo.index(request) :] if r.status is RequestStatus.RUNNING]
                    break
                scheduled[request.request_id] = (request, num_tokens)
            else:
                break
        return scheduled

    def _choose_victim(self, needy: Request) -> Request:
        idle = self._reclaimable(needy)  # what only they share with the victim is as good as free
        gain = lambda request: self.manager.num_blocks_freed_by([*whole.companions(request), *idle])  # noqa: E731
        victim = self.policies.choose_victim(self.running, needy, gain)
        if victim not in self.running:
            raise ValueError(f"choose_victim returned {victim!r}, which is not running: return one of those given")
        return victim

    def _preempt_whole(self, victim: Request, scheduled: Scheduled, output: SchedulerOutput) -> None:
        """Preempt `victim`, and with a beam its whole group."""
        for request in whole.companions(victim):
            self._preempt(request, scheduled, output)

    def _preempt(self, victim: Request, scheduled: Scheduled, output: SchedulerOutput) -> None:
        """Take `victim` off the GPU and out of the step; it waits at its own place in the queue (L33 5)."""
        self.running.remove(victim)
        scheduled.pop(victim.request_id, None)
        num_blocks = cdiv(victim.num_computed_tokens, self.config.block_size)
        choice = self.policies.swap_or_recompute(victim, num_blocks, self.manager.swap_space.num_free_blocks)
        if choice == "swap" and self.manager.swap_out(victim):
            victim.status = RequestStatus.SWAPPED
            self.stats.num_preemptions_swap += 1
        else:
            self._drop(victim)
            self.stats.num_preemptions_recompute += 1
        victim.num_preemptions += 1
        self.waiting.add(victim)
        output.preempted.append(victim.request_id)
        if self.recorder is not None:
            self.recorder.emit("preempt", victim.request_id, (victim.status.value,))

    def _drop(self, request: Request) -> None:
        """Forget the K/V of `request`; all its tokens, outputs too, will be computed again (L33 5.3)."""
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0

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

    def _load(self, running: list[Request]) -> "Load":
        tables, size = self.manager.req_to_blocks, self.config.block_size
        # Tokens without a block, or less than none: some only where chunks of a prompt are still to come.
        missing = [len(request.all_token_ids) - len(tables[request.request_id]) * size for request in running]
        return Load(
            seats=len(running) + sum([request.num_to_fork for request in running]),
            promised=sum([cdiv(num_tokens, size) for num_tokens in missing if num_tokens > 0]),
            growing=len(running) if self.manager.tables_grow else 0,
        )

    def _has_seat(self, request: Request, load: "Load") -> bool:
        """Seats for the request and its children to come; one with more children than seats needs them all."""
        seats = self.config.max_num_seqs
        if load.seats + min(request.num_seats, seats) > seats:
            return False
        return self.policies.admit(load.seats, seats, self._batch_is_forming)

    def _has_room(self, request: Request, hits: list, load: "Load", num_free: int) -> bool:
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
        self._preempt_whole(max(lower, key=lambda other: other.sort_key), scheduled, output)
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

    def _count(self, output: SchedulerOutput) -> None:
        stats = self.stats
        stats.num_scheduled_tokens += output.total_num_scheduled_tokens
        for kind, _, _ in output.block_ops:
            stats.num_copy_on_writes += kind == "copy"
            stats.num_swapped_out_blocks += kind == "swap_out"
            stats.num_swapped_in_blocks += kind == "swap_in"
        stats.peak_running = max(stats.peak_running, len(self.running))
        stats.peak_usage = max(stats.peak_usage, self.manager.usage)
        if self.config.batching == "static":
            stats.num_idle_seats += self._batch_size - len(self.running)
