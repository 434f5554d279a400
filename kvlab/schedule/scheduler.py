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

from kvlab.blocks import BlockPool, FreeKVCacheBlockQueue
from kvlab.config import EngineConfig
from kvlab.contiguous import ContiguousKVCacheManager
from kvlab.events import Recorder
from kvlab.manager import KVCacheManager
from kvlab.prefix import HashChainIndex
from kvlab.schedule import group as whole
from kvlab.schedule.admission import Admission
from kvlab.schedule.group import Scheduled
from kvlab.schedule.output import SchedulerOutput
from kvlab.schedule.policies import Policies, admit_static
from kvlab.schedule.request import RequestStatus


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


class Scheduler(Admission):
    """Owns all unfinished requests and decides every step.

    config: max_num_seqs, max_num_batched_tokens and the other settings of scheduling.
    manager: who holds the blocks; made by `make_manager` if not given.
    """

    def __init__(self, config: EngineConfig, manager: KVCacheManager | None = None, policies: Policies | None = None,
                 recorder: Recorder | None = None):  # fmt: skip
        policies = policies or Policies()
        if config.batching == "static" and policies.admit is Policies.admit:
            policies = replace(policies, admit=admit_static)
        super().__init__(config, manager or make_manager(config, recorder), policies, recorder)
        self._batch_size = 0

    # ---- one step

    def schedule(self) -> SchedulerOutput:
        """Decide the next step: allocate, preempt, admit. Nothing is advanced or published."""
        self.stats.num_steps += 1
        if self.recorder is not None:
            self.recorder.step = self.stats.num_steps
            self.recorder.emit("step_begin", None, (self.config.max_num_batched_tokens, self.config.max_num_seqs))
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
        if self.recorder is not None:
            rows = [(request.request_id, request.num_computed_tokens, n) for request, n in output.scheduled]
            self.recorder.emit("compute", None, [value for row in rows for value in row])
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
                    self._preempt_whole(self._choose_victim(request), request, scheduled, output)
                    # A victim gives its tokens back, so the rest of the step is planned anew.
                    todo = [r for r in todo[todo.index(request) :] if r.status is RequestStatus.RUNNING]
                    break
                scheduled[request.request_id] = (request, num_tokens)
            else:
                break
        return scheduled

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
