"""Too little memory (lab 09): a run of the simulator that writes down who did what, step by step.

    job_and_chats()   a long job of low priority among short chats that go before it (L33 9.3-1)
    crowd()           independent users, short answers and long ones
    play(workload)    the real scheduler, with whatever policies -> Played: lanes, blocks, log, and the result

A lane has one letter a step: p computes a prompt, d decodes, r computes again what it had, - runs without a token in
this step, w waits, x waits with its K/V dropped, s waits with its K/V on the CPU, ! is thrown out; a space is neither.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvlab.config import EngineConfig
from kvlab.costs import GPUCost, StepCost
from kvlab.parts import Parts
from kvlab.schedule import RequestStatus, Scheduler, SchedulerOutput
from kvlab.sim import Arrival, Lognormal, Poisson, RequestRecord, SimResult, Simulator, Uniform, Workload, make_workload
from kvlab.sim.workload import NS

JOB = "job"
WAITING = {RequestStatus.WAITING: "w", RequestStatus.PREEMPTED: "x", RequestStatus.SWAPPED: "s"}


def job_and_chats(num_chats: int = 150, seed: int = 1, gap_s: float = 0.35, answer: int = 200) -> Workload:
    """One job at time 0, 1,280 tokens and `answer` more, of priority 1; chats of priority 0, `gap_s` seconds apart.

    A chat has 50 to 300 tokens and an answer of 10 to 60; chats come at random (Poisson).
    """
    rng = random.Random(seed)
    arrivals, at = [Arrival(0, 1280, answer, JOB, 1)], 0.0
    for i in range(num_chats):
        at += rng.expovariate(1 / gap_s)
        arrivals.append(Arrival(int(at * NS), rng.randint(50, 300), rng.randint(10, 60), f"c{i}", 0))
    return Workload("a job among chats", arrivals)


def crowd(seed: int = 1, number: int = 200, rate: float = 1.0) -> Workload:
    """`number` users at random times; prompts of 50 to 400 tokens, answers of 200 on average and up to 1,500."""
    return make_workload(number, Uniform(50, 400), Lognormal(200, 1.0, most=1500), Poisson(rate), seed=seed)


@dataclass
class Played:
    """What a run wrote down. lanes: request id -> a letter a step. blocks: request id -> blocks it owns, each step.

    log: (request id, first position, number of tokens) of all that was computed, in order. starts: of each step, s.
    """

    workload: Workload
    lanes: dict[str, str] = field(default_factory=dict)
    blocks: dict[str, list[int]] = field(default_factory=dict)
    log: list[tuple[str, int, int]] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    result: SimResult | None = None

    def record(self, request_id: str) -> RequestRecord:
        return next(record for record in self.result.records if record.request_id == request_id)

    @property
    def most(self) -> int:
        """How often the one that was thrown out most was thrown out."""
        return max(record.num_preemptions for record in self.result.records)

    @property
    def useful(self) -> int:
        """Tokens that must be computed at least: all but the last of each request."""
        return sum(arrival.prompt_tokens + arrival.output_tokens - 1 for arrival in self.workload.arrivals)

    @property
    def computed(self) -> int:
        return sum(num_tokens for _, _, num_tokens in self.log)

    def waits(self, quantile: float, chats_only: bool = False) -> float:
        """Seconds from arrival to the last token that this share of the requests did not exceed."""
        took = sorted(r.e2e_ns for r in self.result.records if not (chats_only and r.request_id == JOB))
        return took[min(len(took) - 1, int(quantile * len(took)))] / NS


def play(workload: Workload, num_blocks: int, *, cpu_blocks: int = 0, block_size: int = 16, budget: int = 512,
         seats: int = 64, costs: StepCost | None = None, **policies: Callable) -> Played:  # fmt: skip
    """Run `workload` in a pool of `num_blocks` usable blocks, without a prefix cache.

    policies: choose_victim, swap_or_recompute, may_resume; ours for those that are not given. costs: by default an L4
    that serves Qwen2.5-7B, from first principles.
    """
    config = EngineConfig(block_size=block_size, num_gpu_blocks_override=num_blocks + 1, max_num_seqs=seats,
                          max_num_batched_tokens=budget, num_cpu_blocks_override=cpu_blocks,
                          enable_prefix_caching=False)  # fmt: skip
    costs = costs or GPUCost.of("L4", "Qwen2.5-7B", block_size=block_size)
    simulator = _Watched(config, costs, Parts(**policies))
    played = simulator.played = Played(workload)
    played.result = simulator.run(workload)
    played.starts = [start / NS for start in played.result.step_columns["start_ns"]]
    for name, lane in played.lanes.items():
        played.lanes[name] = lane.ljust(len(played.starts))
    for row in played.blocks.values():
        row += [0] * (len(played.starts) - len(row))
    return played


class _Watched(Simulator):
    """A simulator whose scheduler is looked at after each decision, before anything is computed."""

    played: Played

    def make_scheduler(self) -> Scheduler:
        scheduler = super().make_scheduler()
        decide, known, step = scheduler.schedule, {}, 0

        def schedule() -> SchedulerOutput:
            nonlocal step
            output = decide()
            self._write(scheduler, output, known, step)
            step += 1
            return output

        scheduler.schedule = schedule
        return scheduler

    def _write(self, scheduler: Scheduler, output: SchedulerOutput, known: dict[str, int], step: int) -> None:
        letters: dict[str, str] = {request.request_id: "-" for request in scheduler.running}
        letters |= {request.request_id: WAITING[request.status] for request in scheduler.waiting}
        for request, num_tokens in output.scheduled:
            name, first = request.request_id, request.num_computed_tokens
            before = known.get(name, 0)
            letters[name] = "r" if first < before else "p" if first < request.num_prompt_tokens else "d"
            known[name] = max(before, first + num_tokens)
            self.played.log.append((name, first, num_tokens))
        letters |= dict.fromkeys(output.preempted, "!")
        tables = scheduler.manager.req_to_blocks
        for name, letter in letters.items():
            self.played.lanes[name] = self.played.lanes.get(name, "").ljust(step) + letter
            row = self.played.blocks.setdefault(name, [])
            row += [0] * (step - len(row)) + [len(tables.get(name, ()))]


def summary(played: Played) -> dict[str, Any]:
    """The figures of a run that the lab compares."""
    stats = played.result.stats
    return {
        "preemptions": stats.num_preemptions_recompute + stats.num_preemptions_swap,
        "most of one": played.most,
        "computed again": played.computed - played.useful,
        "blocks swapped": stats.num_swapped_out_blocks + stats.num_swapped_in_blocks,
        "p50 s": played.waits(0.5),
        "p99 s": played.waits(0.99),
        "worst s": played.waits(1),
    }
