"""Calibrating the cost model: this machine's engine, timed step by step, and a FittedCost that says it again.

    workloads --LLM.generate--> [(StepWork, seconds), ...] --fit--> FittedCost --> JSON for the simulator
                 '-- Stopwatch stands before the runner and notes each step's work and when it began

A step lasts from the beginning of one forward to that of the next: forward, update, delivery of the outputs and the
next schedule(), so that the steps of a run add up to it. The same workload is run several times, always with the
same steps, and of each step the mean counts: means of steps add up to the mean of a run, medians do not. A pause of
the machine, three times the median or more, is left out.

On a CPU with one thread the clock is the process's CPU time: on a quiet machine that is the time on the wall, and on
a busy one it leaves out the waiting for a core. Elsewhere it is the wall's.
"""

import gc
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from kvlab import LLM, SamplingParams
from kvlab.costs import FittedCost, StepWork, fit, work_of
from kvlab.schedule import SampledTokens, SchedulerOutput

Load = list[tuple[int, int]]  # (tokens of the prompt, outputs) of each request; all arrive at once


DEFAULTS = dict(max_num_seqs=64, max_num_batched_tokens=512, enable_prefix_caching=False, num_cpu_blocks_override=64)


class TimedStep(NamedTuple):
    """One engine step. sampled: ids of the requests that got a token."""

    work: StepWork
    seconds: float
    sampled: tuple[str, ...]


class Stopwatch:
    """A runner before the runner: notes what each step has to do, and when it begins."""

    def __init__(self, runner, clock: Callable[[], float]):
        self.runner, self.clock = runner, clock
        self.noted: list[tuple[StepWork, float, tuple[str, ...]]] = []

    def execute(self, output: SchedulerOutput) -> SampledTokens:
        work, begin = work_of(output), self.clock()
        sampled = self.runner.execute(output)
        self.noted.append((work, begin, tuple(sampled)))
        return sampled


def clock_for(llm: LLM) -> Callable[[], float]:
    """CPU time where one thread does all the work, else the time on the wall."""
    return process_time if llm.config.device == "cpu" and torch.get_num_threads() == 1 else perf_counter


def timed_steps(llm: LLM, load: Load, seed: int = 0, clock: Callable[[], float] | None = None) -> list[TimedStep]:
    """Generate for every request of `load`, with made-up prompts and no early end; the steps that it took."""
    clock = clock or clock_for(llm)
    rng = random.Random(seed)
    vocab_size = llm.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(prompt)] for prompt, _ in load]
    params = [SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True) for _, outputs in load]
    runner = llm.engine.runner
    stopwatch = llm.engine.runner = Stopwatch(runner, clock)
    gc.collect()
    gc.freeze()  # a look through all that torch has made takes 0.1 s, and would fall upon one step or another
    try:
        llm.generate(prompts, params)
    finally:
        llm.engine.runner = runner
        gc.unfreeze()
    begins = [begin for _, begin, _ in stopwatch.noted] + [clock()]
    return [
        TimedStep(work, after - begin, sampled)
        for (work, begin, sampled), after in zip(stopwatch.noted, begins[1:], strict=True)
    ]


def mean_steps(runs: Sequence[list[TimedStep]]) -> list[TimedStep]:
    """Of runs with the same steps, each step with its mean time without pauses. ValueError if they are not the same."""
    steps = []
    for same in zip(*runs, strict=True):
        if len({step.work for step in same}) != 1:
            raise ValueError(f"runs of one workload took different steps: {same[0].work} and others")
        limit = 3 * statistics.median(step.seconds for step in same)
        steps.append(same[0]._replace(seconds=statistics.mean(s.seconds for s in same if s.seconds <= limit)))
    return steps


def workloads(longest: int, budget: int, seats: int) -> Iterator[tuple[str, Load]]:
    """(name, load): decode batches of several sizes and contexts, prompts in one and in several chunks, mixtures.

    longest: tokens of a sequence at most. budget, seats: max_num_batched_tokens and max_num_seqs.
    """
    outputs = 6
    for batch in (1, 2, 4, 8, 16, 32, 64):
        for context in (8, 64, 256, 700):
            if batch <= seats and context + outputs <= longest and batch * context <= 16_384:
                yield f"decode {batch} x {context}", [(context, outputs)] * batch
    for chunk in (16, 32, 64, 128, 256, 512):
        if chunk <= budget and chunk < longest:
            yield f"prefill {chunk}", [(chunk, 1)]
    yield "chunks", [(min(3 * budget, longest - 2), 2)]
    rng = random.Random(0)
    half = longest // 2
    yield "mixed", [(rng.randint(1, min(400, half)), rng.randint(1, min(30, half))) for _ in range(2 * seats)]


@dataclass
class Calibration:
    """The cost, and the steps it was fitted to: (workload, work, measured seconds)."""

    cost: FittedCost
    steps: list[tuple[str, StepWork, float]]

    def errors(self) -> list[float]:
        """(modelled - measured) / measured of each step."""
        return [self.cost.step_seconds(work) / seconds - 1 for _, work, seconds in self.steps]

    def table(self) -> list[tuple[str, int, float, float]]:
        """(workload, steps, measured seconds, modelled seconds), summed over the steps of each workload."""
        rows: dict[str, list[float]] = {}
        for name, work, seconds in self.steps:
            row = rows.setdefault(name, [0, 0.0, 0.0])
            row[0], row[1], row[2] = row[0] + 1, row[1] + seconds, row[2] + self.cost.step_seconds(work)
        return [(name, *row) for name, row in rows.items()]


class Calibrator:
    """An engine and the workloads to time it with, round by round, so that a busy minute does not hit one alone.

    model: as for LLM. seconds: workloads that would take longer, each, are left out. engine_options: LLM's; the cost
    holds for engines like this one.
    """

    def __init__(self, model: str = "tiny", *, seconds: float = 5.0, **engine_options):
        self.llm = LLM(model, **DEFAULTS | engine_options)
        config = self.llm.config
        longest = min(config.max_model_len, (config.num_gpu_blocks_override - 1) * config.block_size)
        probe = [(min(64, longest - 2), 2)]
        timed_steps(self.llm, probe)  # the first call pays for what is set up lazily
        per_token = timed_steps(self.llm, probe)[0].seconds / probe[0][0]
        self.loads = {
            name: load for name, load in workloads(longest, config.max_num_batched_tokens, config.max_num_seqs)
            if sum(prompt + outputs for prompt, outputs in load) * per_token <= seconds
        }  # fmt: skip
        if not self.loads:
            raise ValueError(f"no workload of this model takes less than {seconds} seconds: raise `seconds`")
        self.runs: dict[str, list[list[TimedStep]]] = {name: [] for name in self.loads}

    def run(self) -> None:
        """One round: every workload once."""
        for name, load in self.loads.items():
            self.runs[name].append(timed_steps(self.llm, load))

    def result(self, about: dict[str, Any] | None = None) -> Calibration:
        """The cost fitted to all rounds so far."""
        steps = [(name, step.work, step.seconds) for name, runs in self.runs.items() for step in mean_steps(runs)]
        cost = fit([work for _, work, _ in steps], [seconds for _, _, seconds in steps])
        return Calibration(FittedCost(cost.seconds_per | block_costs(self.llm), about or {}), steps)


def block_costs(llm: LLM, rounds: int = 7) -> dict[str, float]:
    """Seconds to copy, swap out and swap in one block, by StepWork's terms; no request may be running.

    What lies in the blocks is overwritten: call it where no prefix cache will read them again.
    """
    kv_cache, clock, found = llm.engine.runner.kv_cache, clock_for(llm), {}
    kinds = (("copy", "blocks_copied"), ("swap_out", "blocks_swapped_out"), ("swap_in", "blocks_swapped_in"))
    for kind, term in kinds:
        usable = kv_cache.num_blocks - 1
        most = usable // 2 if kind == "copy" else min(usable, kv_cache.num_cpu_blocks)
        works, times = [], []
        for n in [n for n in (1, 4, 16, 64) if n <= most]:
            gpu, cpu = range(1, n + 1), range(n)
            pairs = {"copy": (gpu, range(n + 1, 2 * n + 1)), "swap_out": (gpu, cpu), "swap_in": (cpu, gpu)}
            sources, targets = pairs[kind]
            ops = [(kind, src, dst) for src, dst in zip(sources, targets, strict=True)]
            took = []
            for _ in range(rounds):
                start = clock()
                kv_cache.apply(ops)
                if kv_cache.device.type == "cuda":
                    torch.cuda.synchronize()
                took.append(clock() - start)
            works.append(StepWork()._replace(**{term: n}))
            times.append(max(statistics.median(took), 1e-9))  # the clock may not have moved
        if works:
            found[term] = fit(works, times, [term]).seconds_per[term]
    return found


def spread(errors: Sequence[float]) -> tuple[float, float]:
    """Median and 90th percentile of absolute errors."""
    sizes = sorted(abs(error) for error in errors)
    return statistics.median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]


def main(model: str, json_path: Path | None, *, rounds: int, threads: int, seconds: float) -> None:
    """`kvlab calibrate`: print measured against modelled, and write the cost."""
    for name, value in (("threads", threads), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    torch.set_num_threads(threads)
    about = {"model": model, "threads": threads, "rounds": rounds, "torch": torch.__version__,
             "machine": platform.machine(), "cores": os.cpu_count(), **DEFAULTS}  # fmt: skip
    calibrator = Calibrator(model, seconds=seconds)
    for _ in range(rounds):
        calibrator.run()
    found = calibrator.result(about)
    print(f"{'workload':18} {'steps':>5} {'measured':>10} {'modelled':>10}   difference")
    for name, steps, measured, modelled in found.table():
        difference = modelled / measured - 1
        print(f"{name:18} {steps:5} {measured * 1e3:7.2f} ms {modelled * 1e3:7.2f} ms {difference:+10.1%}")
    print("\na step costs, for each:")
    for term, value in found.cost.seconds_per.items():
        print(f"  {term:20} {value * 1e6:12.4f} us")
    median, high = spread(found.errors())
    print(f"\n{len(found.steps)} steps; off by {median:.1%} in the median, by up to {high:.1%} in nine of ten")
    if json_path is not None:
        found.cost.save(json_path)
        print(f"written to {json_path}")
