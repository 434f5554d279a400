"""Batches of requests (lab 07): lengths from a seed, a GPU on the virtual clock, lives of requests in an engine.

    draw_lengths   answers of one mean and several shapes
    Machine        a GPU and a model: how many blocks fit, workloads run under a policy, arithmetic counted
    record_lives   the engine on a tight pool, with aborts and a failure: its events
    lives          those events, in the words of kvlab.schedule.lifecycle

All is made from a seed: the same numbers at every run.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from kvlab.config import EngineConfig
from kvlab.costs import GPUCost, StepWork
from kvlab.events import Event, Recorder
from kvlab.parts import Parts
from kvlab.primer import flops_per_logits, flops_per_pair, flops_per_token
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request
from kvlab.schedule.output import SchedulerOutput
from kvlab.sim import SimResult, Simulator, SlotEchoRunner, Workload
from kvlab.sizing import GB, num_gpu_blocks

MEAN = 64
SHAPES: dict[str, Callable[[random.Random], int]] = {
    "all equal": lambda rng: MEAN,
    "48 to 80": lambda rng: rng.randint(48, 80),
    "8 to 120": lambda rng: rng.randint(8, 120),
    "exponential": lambda rng: 1 + int(rng.expovariate(1 / (MEAN - 0.5))),
    "one in ten is long": lambda rng: 334 if rng.random() < 0.1 else 34,
}


def draw_lengths(shape: str, number: int, seed: int = 0) -> list[int]:
    """`number` lengths, 64 tokens on average, of one of SHAPES."""
    rng = random.Random(f"{seed} {shape}")
    return [SHAPES[shape](rng) for _ in range(number)]


class Run(NamedTuple):
    """A workload's run. mfu: the share of the chip's peak arithmetic that it used from first arrival to last token."""

    result: SimResult
    mfu: float


class Machine:
    """A GPU that serves a model, on the virtual clock. options: of GPUCost."""

    def __init__(self, gpu: str, model: str, **options: Any):
        self.cost = GPUCost.of(gpu, model, **options)

    @property
    def num_blocks(self) -> int:
        """Blocks of 16 tokens that fit: 90% of the memory, less weights, 2 GB of activations and 1 GB of graphs."""
        shape = self.cost.shape
        return num_gpu_blocks(int(self.cost.gpu.memory), 0.9, shape.weight_bytes(), 2 * GB, GB,
                              16 * shape.kv_bytes_per_token())  # fmt: skip

    def run(self, workload: Workload, admit: Callable, reserve: int | None = None, **options: Any) -> Run:
        """Serve `workload`. admit: who may enter. reserve: tokens that each request reserves in one piece; None: pages.

        options: of EngineConfig.
        """
        if reserve is not None:
            options |= {"reservation": "contiguous", "max_model_len": reserve}
        config = EngineConfig(num_gpu_blocks_override=self.num_blocks, enable_prefix_caching=False, **options)
        meter = _Meter(self.cost)
        result = Simulator(config, meter, Parts(admit=admit)).run(workload)
        return Run(result, meter.flops / (self.cost.gpu.peak_flops * result.makespan_s))


class _Meter:
    """Counts the arithmetic of all steps on their way to a cost."""

    def __init__(self, cost: GPUCost):
        self.cost, self.flops = cost, 0

    def step_seconds(self, work: StepWork) -> float:
        shape = self.cost.shape
        self.flops += (flops_per_token(shape) * work.num_tokens + flops_per_pair(shape) * work.attention_pairs
                       + flops_per_logits(shape) * work.num_logits)  # fmt: skip
        return self.cost.step_seconds(work)


# ---- the lives of requests


class _OneFails:
    """A runner that cannot compute one request's fourth output."""

    def __init__(self, inner: SlotEchoRunner, request_id: str):
        self.inner, self.request_id = inner, request_id

    def execute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        sampled = self.inner.execute(output)
        for request, _ in output.scheduled:
            if request.request_id == self.request_id and request.num_output_tokens == 3:
                raise RuntimeError("a row of this request is not a number")
        return sampled


def record_lives(admit: Callable, num_requests: int = 24, seed: int = 0) -> list[Event]:
    """The events of an engine whose pool and swap space are both too small; two users leave, one request fails."""
    config = EngineConfig(block_size=2, num_gpu_blocks_override=14, num_cpu_blocks_override=4, max_num_seqs=4,
                          enable_prefix_caching=False)  # fmt: skip
    recorder, rng = Recorder(), random.Random(seed)
    runner = _OneFails(SlotEchoRunner(14, 2, 4), "7")
    core = Parts(admit=admit).make_engine(config, runner, recorder)
    for number in range(num_requests):
        params = SamplingParams(temperature=0, seed=0, max_tokens=rng.randint(3, 16), stop_token_ids=tuple(range(5)))
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 5))]
        core.add_request(Request(str(number), prompt, params))
    while core.has_unfinished_requests():
        core.step()
        if core.scheduler.stats.num_steps == 12:
            core.abort_request(core.scheduler.running[-1].request_id)
            core.abort_request(str(num_requests - 1))  # still waiting
    return recorder.events()


def lives(events: Iterable[Event]) -> Iterator[tuple[str, str]]:
    """(request id, event) for all that happened to requests after they were added, in order."""
    for event in events:
        if event.kind == "schedule":
            yield event.request_id, "schedule"
        elif event.kind == "preempt":
            yield event.request_id, "swap" if event.values == ("swapped",) else "recompute"
        elif event.kind == "finish":
            yield event.request_id, event.values[0]
