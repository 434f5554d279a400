"""The simulator: the real scheduler and block manager, with a clock in the place of the forward pass.

    Workload --arrivals due--> Scheduler.schedule() --work_of--> costs.step_seconds() -> the clock moves on
                                     ^                                                        |
                                     '------- update_from_output(made-up tokens) <------------'  -> SimResult

Nothing about scheduling is modelled here: who runs, waits, is preempted or finds a prefix is decided by the code that
serves a model, a student's parts included. Only the duration of a step is, and the clock is a whole number of
nanoseconds, so the same workload gives the same result to the last digit.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from math import isfinite
from typing import Any

from kvlab.config import EngineConfig
from kvlab.costs import Breakdown, Part, StepCost, StepWork, work_of
from kvlab.events import Recorder
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler
from kvlab.schedule.output import SchedulerOutput
from kvlab.sim.result import STEP_COLUMNS, RequestRecord, SimResult
from kvlab.sim.speculation import Drafts, Speculation
from kvlab.sim.workload import NS, OWN_TOKENS, Arrival, Workload


class ConstantCost:
    """Every step takes as long, whatever it does: schedules that one can follow by hand."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def step_seconds(self, work: StepWork) -> float:
        return self.seconds

    def explain(self, work: StepWork) -> Breakdown:
        return Breakdown((Part("step", self.seconds, "measured"),))


class SimRequest(Request):
    """A request that writes down when things happen to it; times in ns. `sampled` is what each step brings it."""

    def __init__(self, arrival: Arrival, number: int, prompt: list[int], params: SamplingParams):
        super().__init__(arrival.request_id, prompt, params, priority=arrival.priority)
        self.number = number
        self.arrived_at = arrival.at_ns
        self.admitted_at: int | None = None
        self.first_token_at: int | None = None
        self.last_token_at = -1  # no step begins then
        self.longest_gap = 0
        # Its outputs are its own too: two requests with one prompt do not say the same.
        self.sampled = [OWN_TOKENS + number]

    def check(self) -> None:
        """Made here, and well-formed: no need to look at every token of a hundred thousand prompts."""

    def record(self, finish_reason: str, error: str | None = None) -> RequestRecord:
        return RequestRecord(
            self.request_id, self.arrived_at, self.num_prompt_tokens, self.num_output_tokens,
            self.num_cached_tokens or 0, self.admitted_at, self.first_token_at,
            self.last_token_at if self.first_token_at is not None else None, self.longest_gap,
            self.num_preemptions, finish_reason, error,
        )  # fmt: skip


class Simulator:
    """Runs workloads through a scheduler made of `config` and `parts`.

    config: num_gpu_blocks_override must be set, for there is no memory to measure.
    costs: what a step takes, an object with step_seconds(StepWork) -> seconds (kvlab.costs has some).
    parts: a kvlab.parts.Parts, whose replacements decide in the place of ours.
    recorder: sees the events of every run.
    speculation: decodes are verifications of drafted tokens; there are no drafts without it.
    """

    def __init__(self, config: EngineConfig, costs: StepCost, parts: Any = None, recorder: Recorder | None = None,
                 speculation: Speculation | None = None):  # fmt: skip
        self.config = config
        self.costs = costs
        self.parts = parts
        self.recorder = recorder
        self.speculation = speculation

    def make_scheduler(self) -> Scheduler:
        """A new scheduler over an empty pool. ValueError if `config` leaves open how many blocks there are."""
        if self.parts is None:
            return Scheduler(self.config, recorder=self.recorder)
        manager = self.parts.make_manager(self.config, self.recorder)
        return Scheduler(self.config, manager, self.parts.policies, self.recorder)

    def run(self, workload: Workload, after_step: Callable[[Scheduler, int], None] | None = None) -> SimResult:
        """Simulate `workload` on an empty engine until its last request has ended.

        after_step(scheduler, now_ns): called after each step, for those who look inside.
        A request that can never be served is recorded as refused, and the others go on. RuntimeError if requests
        wait and a step does nothing; what a part raises comes through.
        """
        scheduler = self.make_scheduler()
        drafts = self.speculation and Drafts(self.speculation)
        run = _Run(self.costs, workload, scheduler, drafts)
        arrivals, following, now = workload.arrivals, 0, 0
        while True:
            while following < len(arrivals) and arrivals[following].at_ns <= now:
                run.add(following)
                following += 1
            if not scheduler.has_unfinished_requests():
                if following == len(arrivals):
                    break
                now = arrivals[following].at_ns  # nobody is here: go to the next arrival
                continue
            now = run.step(now)
            if after_step is not None:
                after_step(scheduler, now)
        return SimResult(workload, self.config, scheduler.stats, run.num_usable, run.records, run.steps, run.gaps,
                         drafts and drafts.stats)  # fmt: skip


class _Run:
    """One run: what has been written down so far. The lines of `step` that run once a token are kept few."""

    def __init__(self, costs: StepCost, workload: Workload, scheduler: Scheduler, drafts: Drafts | None):
        self.step_seconds = costs.step_seconds
        self.drafts = drafts
        self.workload = workload
        self.scheduler = scheduler
        self.pool = scheduler.manager.block_pool
        self.num_usable = self.pool.num_usable_blocks
        self.records: list[RequestRecord | None] = [None] * len(workload)
        self.steps = {name: array("q") for name in STEP_COLUMNS}
        self.gaps: Counter[int] = Counter()  # ns between two tokens of a request -> how often
        self.tokens: dict[str, list[int]] = {}  # what a step brings each unfinished request, by id
        self.params: dict[int, SamplingParams] = {}  # by output length; checked once each

    def add(self, number: int) -> None:
        """Arrival `number` of the workload comes in, or is refused."""
        arrival = self.workload.arrivals[number]
        length = arrival.output_tokens
        if length not in self.params:
            self.params[length] = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0, seed=0)
        request = SimRequest(arrival, number, self.workload.prompt_of(number), self.params[length])
        try:
            self.scheduler.add_request(request)
        except ValueError as error:
            self.records[number] = request.record("refused", str(error))
        else:
            self.tokens[request.request_id] = request.sampled

    def step(self, now: int) -> int:
        """Schedule, let the step's time pass, take in its tokens. Returns when it ended."""
        scheduler, drafts = self.scheduler, self.drafts
        num_waited = len(scheduler.waiting)
        if drafts is not None:
            drafts.propose(scheduler.running)
        output = scheduler.schedule()
        if not output.scheduled and not output.preempted:
            raise RuntimeError(
                f"stuck at {now / NS} s: {len(scheduler.waiting)} requests wait, {len(scheduler.running)} run, and the "
                f"step is empty; a replaced policy or block layer may never say yes"
            )
        num_drafts = drafts.keep_scheduled(output) if drafts is not None else 0
        work = work_of(output)
        all_sample = work.num_logits == work.num_sequences
        entered = num_waited - len(scheduler.waiting) + len(output.preempted)
        for request, _ in output.scheduled[-entered:] if entered else ():  # who enters stands last
            if request.admitted_at is None:
                request.admitted_at = now
        if num_drafts:
            work = work._replace(num_logits=work.num_logits + num_drafts)
        duration = self._duration(work, output, num_drafts)
        end = now + duration
        num_rejected = self._verify(output) if num_drafts else 0
        self._write_step(now, duration, work, output, num_rejected)
        sampled = self.tokens
        if not all_sample:  # chunks with more of the prompt to come bring no token
            sampled = {
                request.request_id: request.sampled
                for request, num_tokens in output.scheduled
                if request.num_computed_tokens + num_tokens == len(request.all_token_ids)
            }
        num_steady = 0
        for result in scheduler.update_from_output(output, sampled):
            request = result.request
            if request.last_token_at == now:  # its token before came at the end of the last step, as it mostly does
                num_steady += 1
                if duration > request.longest_gap:
                    request.longest_gap = duration
            else:
                self._break_pause(request, end)
            request.last_token_at = end
            if result.finish_reason is not None:
                self.records[request.number] = request.record(result.finish_reason)
                del self.tokens[request.request_id]
        if num_steady:
            self.gaps[duration] += num_steady
        return end

    def _verify(self, output: SchedulerOutput) -> int:
        """Drafts that hold come with the step's own token, without a gap; how many do not hold."""
        num_accepted, num_rejected = self.drafts.verify(output)
        if num_accepted:
            self.gaps[0] += num_accepted
        return num_rejected

    def _break_pause(self, request: SimRequest, now: int) -> None:
        """The first token of `request`, or one after a step without one: it was preempted, or out of budget."""
        if request.first_token_at is None:
            request.first_token_at = now
            return
        gap = now - request.last_token_at
        self.gaps[gap] += 1
        request.longest_gap = max(request.longest_gap, gap)

    def _duration(self, work: StepWork, output: SchedulerOutput, num_drafts: int) -> int:
        seconds = self.step_seconds(work) + (self.drafts.speculation.draft_seconds if num_drafts else 0)
        if not isfinite(seconds) or seconds < 0:
            raise ValueError(f"step {output.step} takes {seconds!r} seconds: costs must give 0 or more for {work}")
        return round(seconds * NS)

    def _write_step(self, now: int, duration: int, work: StepWork, output: SchedulerOutput, num_rejected: int) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        held = work.kv_tokens_read  # by those who compute something: nearly always all who run
        if work.num_sequences < len(running):
            held = work.num_tokens + sum([request.num_computed_tokens for request in running])
        held -= num_rejected
        used = self.num_usable - self.pool.get_num_free_blocks()
        row = (now, duration, work.num_tokens, work.num_sequences, work.num_chunks, len(running), len(waiting),
               len(output.preempted), used, held)  # fmt: skip
        for column, value in zip(self.steps.values(), row, strict=True):
            column.append(value)
