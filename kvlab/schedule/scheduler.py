"""The scheduler: one token budget a step, for chunks of prompts and decodes alike (L33 4.3, 4.4).

    schedule()             1. running requests, decodes first; who finds no block preempts, or steps back
                           2. if nobody was preempted: waiting requests, in order, while budget, seats and room last
    -> SchedulerOutput     copies, then one forward (somebody else's work)
    update_from_output()   only here do num_computed_tokens advance, tokens appear, and blocks become findable

If the forward fails, nothing has been published and the same step can be scheduled again.
"""

from collections.abc import Iterable
from dataclasses import replace

from kvlab.blocks import cdiv
from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.sampling_params import uniform
from kvlab.schedule.output import EngineCoreOutput, SchedulerOutput, SchedulerStats
from kvlab.schedule.policies import Policies, Room, admit_static
from kvlab.schedule.queue import RequestQueue
from kvlab.schedule.request import Request, RequestStatus


class Scheduler:
    """Owns all unfinished requests and decides every step.

    config: max_num_seqs, max_num_batched_tokens and the other settings of scheduling.
    manager: who holds the blocks; made from the config (num_gpu_blocks_override must be set then) if not given.
    """

    def __init__(self, config: EngineConfig, manager: KVCacheManager | None = None, policies: Policies | None = None,
                 recorder: Recorder | None = None):  # fmt: skip
        if manager is None:
            if config.num_gpu_blocks_override is None:
                raise ValueError("num_gpu_blocks_override is None: set it, or pass a manager")
            manager = KVCacheManager(config.num_gpu_blocks_override, config.block_size, config.enable_prefix_caching,
                                     num_cpu_blocks=config.num_cpu_blocks_override or 0, recorder=recorder)  # fmt: skip
        policies = policies or Policies()
        if config.batching == "static" and policies.admit is Policies.admit:
            policies = replace(policies, admit=admit_static)
        self.config = config
        self.manager = manager
        self.policies = policies
        self.recorder = recorder
        self.stats = SchedulerStats()
        self.requests: dict[str, Request] = {}  # every unfinished sequence by id, children included
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self._families: dict[str, list[Request]] = {}  # parent id -> its unfinished sequences
        self._num_arrived = 0
        self._chunk_limit = config.max_num_batched_tokens
        if config.enable_chunked_prefill and config.long_prefill_token_threshold:
            self._chunk_limit = config.long_prefill_token_threshold
        self._batch_size = 0
        self._finished_ids: list[str] = []

    # ---- requests come and go

    def add_request(self, request: Request) -> None:
        """Queue `request`. ValueError, and nothing changed, if it is malformed or could never be served."""
        name = f"request {request.request_id!r}"
        if request.request_id in self.requests or request.request_id in self._families:
            raise ValueError(f"{name}: this id is in use; give each unfinished request an id of its own")
        if "#" in request.request_id:
            raise ValueError(f"{name}: '#' is kept for the ids of children (n > 1); use another character")
        request.check()
        request.max_num_tokens = self._longest(request, name)
        if request.seed is None:  # a request without a seed draws from a stream of its own, the same in every run
            request.seed = int(uniform(self.config.seed, self._num_arrived) * 2**53)
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        self._families[request.parent_id] = [request]
        self.waiting.add(request)
        if self.recorder is not None:
            self.recorder.emit("add", request.request_id, (request.num_prompt_tokens,))

    def _longest(self, request: Request, name: str) -> int:
        """How many tokens, prompt and outputs, `request` may grow to. ValueError if that can never fit."""
        prompt, max_tokens = request.num_prompt_tokens, request.sampling_params.max_tokens
        in_pool = self.manager.max_tokens_per_request + 1  # the last output is never computed, so needs no slot
        in_model = self.config.max_model_len or max(in_pool, prompt + (max_tokens or 1))
        if prompt >= in_model:
            raise ValueError(
                f"{name}: the prompt has {prompt} tokens and max_model_len is {in_model}, which must also hold an "
                f"output; shorten the prompt to {in_model - 1} or raise max_model_len"
            )
        longest = min(in_model, in_pool) if max_tokens is None else min(in_model, prompt + max_tokens)
        if max(longest, prompt + 1) > in_pool:
            room = f"lower max_tokens to {in_pool - prompt}" if prompt < in_pool else "shorten the prompt"
            raise ValueError(
                f"{name}: {prompt} prompt tokens and {max_tokens} outputs need more than the "
                f"{self.manager.block_pool.num_usable_blocks} KV blocks of {self.config.block_size} tokens that there "
                f"are; {room}, or give the engine more blocks"
            )
        budget = self.config.max_num_batched_tokens
        if not self.config.enable_chunked_prefill and longest - 1 > budget:
            raise ValueError(
                f"{name}: it may grow to {longest - 1} computed tokens, which without chunked prefill must fit the "
                f"{budget} of one step (it may be preempted and recomputed); enable chunked prefill or raise "
                f"max_num_batched_tokens"
            )
        return longest

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def is_unfinished(self, request_id: str) -> bool:
        """True while the request, or any child of it, has not ended."""
        return request_id in self._families

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def finish_requests(self, request_ids: str | Iterable[str], status: RequestStatus = RequestStatus.FINISHED_ABORTED,
                        error: str | None = None) -> list[Request]:  # fmt: skip
        """End requests early, in whatever state they are. An id of a request with n > 1 ends all its children.

        Unknown and finished ids are ignored. Returns the sequences that ended.
        """
        ended = []
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            family = self._families.get(request_id)
            if family is None and request_id in self.requests:
                family = [self.requests[request_id]]
            ended += self.finish_sequences(family or (), status, error)
        return ended

    def fail_requests(self, requests: Iterable[Request], error: str) -> list[Request]:
        """End exactly these sequences with an error; their siblings go on. Returns those that were unfinished."""
        return self.finish_sequences(requests, RequestStatus.FINISHED_ERROR, error)

    def finish_sequences(self, requests: Iterable[Request], status: RequestStatus,
                         error: str | None = None) -> list[Request]:  # fmt: skip
        """End exactly these sequences; their siblings go on. Returns those that were unfinished."""
        ended = [request for request in requests if not request.is_finished()]
        for request in ended:
            request.error = error
            self._finish(request, status)
        self.running = [request for request in self.running if not request.is_finished()]
        return ended

    def _finish(self, request: Request, status: RequestStatus) -> None:
        """The one way out. The caller takes it from `running`."""
        request.status = status
        if request in self.waiting:
            self.waiting.remove(request)
        self.manager.free(request)
        del self.requests[request.request_id]
        family = self._families[request.parent_id]
        family.remove(request)
        if not family:
            del self._families[request.parent_id]
        self._finished_ids.append(request.request_id)
        self.stats.num_finished += 1
        if self.recorder is not None:
            self.recorder.emit("finish", request.request_id, (status.value, request.num_output_tokens))

    def fail_step(self, output: SchedulerOutput, error: str) -> list[Request]:
        """The copies of `output` could not all be made: end every request whose K/V they leave in doubt.

        Victims of this step whose way to swap space is in doubt lose their K/V and will recompute it.
        """
        for request in [self.requests[i] for i in output.preempted if i in self.requests]:
            if request.status is RequestStatus.SWAPPED:
                self._drop(request)
        return self.fail_requests([request for request, _ in output.scheduled], error)

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: allocate, preempt, admit. Nothing is advanced or published."""
        self.stats.num_steps += 1
        if self.recorder is not None:
            self.recorder.step = self.stats.num_steps
            self.recorder.emit("step_begin")
        output = SchedulerOutput(step=self.stats.num_steps)
        batch_was_empty = not self.running
        scheduled = self._schedule_running(output)
        if not output.preempted:
            self._schedule_waiting(scheduled, batch_was_empty)
        self._batch_size = max(len(self.running), 0 if batch_was_empty else self._batch_size)

        tables = self.manager.req_to_blocks
        output.scheduled = list(scheduled.values())
        output.block_tables = [tables[request_id] for request_id in scheduled]
        output.block_ops = self.manager.take_block_ops()
        output.finished, self._finished_ids = self._finished_ids, []
        self._count(output)
        return output

    def _schedule_running(self, output: SchedulerOutput) -> dict[str, tuple[Request, int]]:
        """Give running requests their tokens and slots; preempt until every planned request has them."""
        scheduled: dict[str, tuple[Request, int]] = {}
        todo = list(self.running)
        while todo:
            budget = self.config.max_num_batched_tokens - sum(n for _, n in scheduled.values())
            pending = [request.num_tokens - request.num_computed_tokens for request in todo]
            plan = self.policies.plan_tokens(pending, budget, self._chunk_limit)
            if sum(plan) > budget or any(not 0 <= n <= most for n, most in zip(plan, pending, strict=True)):
                raise ValueError(f"plan_tokens gave {plan} of a budget of {budget} to requests with {pending} pending")
            for position, (request, num_tokens) in enumerate(zip(todo, plan, strict=True)):
                if num_tokens <= 0:
                    continue
                if self.manager.allocate_slots(request, num_tokens) is None:
                    victim = self._preempt_one(request, output)
                    # A victim gives its tokens back, so the rest of the step is planned anew.
                    scheduled.pop(victim.request_id, None)
                    todo = [r for r in todo[position:] if r.status is RequestStatus.RUNNING]
                    break
                scheduled[request.request_id] = (request, num_tokens)
            else:
                break
        return scheduled

    def _preempt_one(self, needy: Request, output: SchedulerOutput) -> Request:
        """Take one running request off the GPU so that `needy` may find a block."""
        victim = self.policies.choose_victim(self.running, needy, self.manager.num_unshared_blocks)
        if victim not in self.running:
            raise ValueError(f"choose_victim returned {victim!r}, which is not running: return one of those given")
        self.running.remove(victim)
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
        return victim

    def _drop(self, request: Request) -> None:
        """Forget the K/V of `request`; all its tokens, outputs too, will be computed again (L33 5.3)."""
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_lost_tokens = request.num_computed_tokens
        request.num_computed_tokens = 0

    def _schedule_waiting(self, scheduled: dict[str, tuple[Request, int]], batch_was_empty: bool) -> None:
        """Let waiting requests in, in order, until the first that cannot come in."""
        config, manager = self.config, self.manager
        budget = config.max_num_batched_tokens - sum(n for _, n in scheduled.values())
        promised = None
        aside = []
        num_taken = len(self.running) + sum(r.num_to_fork for r in self.running)  # unborn children have seats too
        while self.waiting and budget > 0:
            request = self.waiting.peek()
            # A request with more children than there are seats takes all; the last children will wait.
            num_before = num_taken + min(request.num_to_fork, config.max_num_seqs - 1)
            if not self.policies.admit(num_before, config.max_num_seqs, batch_was_empty):
                break
            hits, num_hit_tokens = ([], 0) if request.needs_prompt_logprobs else manager.get_computed_blocks(request)
            if self._is_computed_this_step(request, len(hits), scheduled):
                aside.append(self.waiting.pop())
                continue
            computed = max(request.num_computed_tokens, num_hit_tokens)
            num_tokens = min(request.num_tokens - computed, self._chunk_limit, budget)
            if not config.enable_chunked_prefill and num_tokens < request.num_tokens - computed:
                break
            if promised is None:
                promised = sum(self._missing_blocks(r) for r in self.running)
            needed = manager.num_blocks_to_start(request, request.num_tokens, hits)
            room = Room(needed, manager.block_pool.get_num_free_blocks(), promised, len(self.running))
            if not self.policies.may_resume(request, room):
                break
            if manager.allocate_slots(request, num_tokens, hits) is None:
                break
            self.waiting.pop()
            self._enter(request, computed, num_hit_tokens)
            scheduled[request.request_id] = (request, num_tokens)
            budget -= num_tokens
            num_taken = num_before + 1
            promised += self._missing_blocks(request)
        for request in aside:
            self.waiting.add(request)

    def _enter(self, request: Request, computed: int, num_hit_tokens: int) -> None:
        """`request` takes a seat, with K/V for its first `computed` tokens."""
        self.stats.num_recomputed_tokens += max(0, request.num_lost_tokens - computed)
        request.num_lost_tokens = 0
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(num_hit_tokens, request.num_prompt_tokens)
            self.stats.num_prefix_queried_tokens += request.num_prompt_tokens
            self.stats.num_prefix_hit_tokens += request.num_cached_tokens
        request.num_computed_tokens = computed
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        if self.recorder is not None:
            self.recorder.emit("schedule", request.request_id, (computed,))

    def _missing_blocks(self, request: Request) -> int:
        """Blocks that a running request still needs for the tokens it has."""
        held = len(self.manager.req_to_blocks[request.request_id])
        return max(0, cdiv(request.num_tokens, self.config.block_size) - held)

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

    # ---- after the step

    def update_from_output(self, output: SchedulerOutput, sampled: dict[str, list[int]]) -> list[EngineCoreOutput]:
        """Take in what the step computed: advance, publish full blocks, append tokens, fork, finish.

        sampled: token ids by request id, for those whose last known token was computed; n of them where the
        prompt of a request with n > 1 was. Requests that ended meanwhile are passed over.
        """
        results = []
        block_size = self.config.block_size
        any_finished = False
        for request, num_tokens in output.scheduled:
            if request.status is not RequestStatus.RUNNING:
                continue
            before = request.num_computed_tokens
            request.num_computed_tokens = computed = before + num_tokens
            if computed // block_size > before // block_size:
                self.manager.cache_blocks(request, computed)
            tokens = sampled.get(request.request_id)
            if tokens is None:
                continue
            sequences = [request, *self._fork_children(request)] if request.num_to_fork else [request]
            for sequence, token in zip(sequences, tokens, strict=True):
                any_finished |= self._append(sequence, token, results)
        if any_finished:
            self.running = [request for request in self.running if not request.is_finished()]
        if self.recorder is not None:
            self.recorder.emit("step_end", None, (output.total_num_scheduled_tokens,))
        return results

    def _append(self, request: Request, token: int, results: list[EngineCoreOutput]) -> bool:
        finished = request.append_output_token(token)
        if finished:
            self._finish(request, request.status)
        results.append(EngineCoreOutput(request, [token]))
        return finished

    def _fork_children(self, request: Request) -> list[Request]:
        """The prompt of a request with n > 1 has been computed: its siblings appear and share its blocks.

        A child that finds no seat waits without blocks, and computes (or finds cached) its prompt later.
        """
        children = [request.make_child(i) for i in range(1, request.num_to_fork + 1)]
        request.num_to_fork = 0
        for child in children:
            self.requests[child.request_id] = child
            self._families[child.parent_id].append(child)
            if len(self.running) < self.config.max_num_seqs and self.manager.fork(request, child):
                child.status = RequestStatus.RUNNING
                self.running.append(child)
            else:
                self.waiting.add(child)
        return children

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
