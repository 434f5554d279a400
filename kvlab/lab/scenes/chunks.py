"""Long prompts among readers (lab 08): steps as the simulator takes them, with what each request computed in each.

    watch(workload, config, costs, parts)   -> [Step, ...]     every step of a run
    on_paper(requests, budget, limit)       -> rows, came      the simulator's steps in the form of a timetable
    beside(budget, costs)                   -> Scene           one long prompt arrives beside readers
    mixed(seed)                             -> Workload        chats and documents
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from kvlab.config import EngineConfig
from kvlab.costs import StepCost
from kvlab.schedule import Scheduler
from kvlab.sim import ConstantCost, Lognormal, Poisson, Simulator, Workload, make_workload
from kvlab.sim.workload import NS, Arrival

MS = NS // 1000
NEWCOMER = "newcomer"


class Step(NamedTuple):
    """One step: from `start` to `end` in ms; tokens by request id; who got a token at its end."""

    start: float
    end: float
    tokens: dict[str, int]
    sampled: list[str]


class _Watched(Simulator):
    """Writes down what its scheduler decides."""

    def make_scheduler(self) -> Scheduler:
        scheduler = super().make_scheduler()
        decide, self.outputs = scheduler.schedule, []

        def schedule():
            output = decide()
            tokens = {request.request_id: num for request, num in output.scheduled}
            sampled = [r.request_id for r, num in output.scheduled if r.num_computed_tokens + num == r.num_tokens]
            self.outputs.append((tokens, sampled))
            return output

        scheduler.schedule = schedule
        return scheduler


def watch(workload: Workload, config: EngineConfig, costs: StepCost, parts: Any = None) -> list[Step]:
    """Every step of a simulation."""
    simulator = _Watched(config, costs, parts)
    columns = simulator.run(workload).step_columns
    spans = zip(columns["start_ns"], columns["duration_ns"], simulator.outputs, strict=True)
    return [Step(start / MS, (start + took) / MS, *output) for start, took, output in spans]


def config_of(budget: int, limit: int | None = None, **options: Any) -> EngineConfig:
    """Ample memory and seats, no prefix cache: only the budget counts. limit: tokens of one prompt in a step."""
    limit = 0 if limit is None or limit >= budget else limit
    return EngineConfig(num_gpu_blocks_override=50_000, enable_prefix_caching=False, max_num_batched_tokens=budget,
                        long_prefill_token_threshold=limit, **options)  # fmt: skip


def whole(longest: int) -> EngineConfig:
    """No chunked prefill: a prompt is computed in one step, for which the budget must be large enough."""
    return config_of(longest, enable_chunked_prefill=False)


def on_paper(requests: Sequence[tuple[int, int, int]], budget: int, limit: int,
             parts: Any = None) -> tuple[list[list[int]], list[list[int]]]:  # fmt: skip
    """What the simulator makes of (arrival, prompt, output), a second a step: rows, and who got tokens when."""
    workload = Workload("paper", [Arrival(a * NS, p, o, str(i)) for i, (a, p, o) in enumerate(requests)])
    config = config_of(budget, limit)
    config.num_gpu_blocks_override = 1000  # making a pool takes longer than such a run
    steps = watch(workload, config, ConstantCost(1.0), parts)
    rows: list[list[int]] = [[0] * len(requests) for _ in range(round(steps[-1].end / 1000))]
    came: list[list[int]] = [[] for _ in requests]
    for step in steps:
        number = round(step.start / 1000)
        for name, tokens in step.tokens.items():
            rows[number][int(name)] = tokens
        for name in step.sampled:
            came[int(name)].append(number)
    return rows, came


@dataclass(frozen=True)
class Scene:
    """A long prompt among readers. steps: from a little before it arrives until a little after its first token.

    arrival, first_token: ms.
    """

    budget: int
    steps: list[Step]
    arrival: float
    first_token: float

    @property
    def ttft(self) -> float:
        """ms from the newcomer's arrival to its first token."""
        return self.first_token - self.arrival

    @property
    def during(self) -> list[Step]:
        """The steps in which the newcomer's prompt is computed."""
        return [step for step in self.steps if self.arrival <= step.start and step.end <= self.first_token]

    @property
    def worst_gap(self) -> float:
        """The longest time between two tokens of a reader, in ms, that begins before the newcomer's first token."""
        return max(longest_gaps(self.steps, self.first_token).values())

    def read(self, until: float) -> int:
        """Tokens that the reader who got fewest got within `until` ms after the newcomer's arrival."""
        window = [step for step in self.steps if self.arrival < step.end <= self.arrival + until]
        counts = Counter(name for step in window for name in step.sampled)
        return min(counts[name] for name in self.steps[0].sampled)


def longest_gaps(steps: Sequence[Step], until: float = inf) -> dict[str, float]:
    """By request, the longest time in ms between two of its tokens within `steps`, the first of them before `until`."""
    last: dict[str, float] = {}
    longest: dict[str, float] = {}
    for step in steps:
        for name in step.sampled:
            if last.get(name, until) < until:
                longest[name] = max(longest.get(name, 0.0), step.end - last[name])
            last[name] = step.end
    return longest


def beside(budget: int, costs: StepCost, *, prompt: int = 8000, num_readers: int = 32, context: int = 1000,
           chunked: bool = True, parts: Any = None, around: float = 120.0) -> Scene:  # fmt: skip
    """`num_readers` requests decode, each behind about `context` tokens, when a prompt of `prompt` tokens arrives.

    It arrives in the moment in which a step begins. around: ms shown before it and after its first token. The readers
    read one document, whose K/V they share: so they soon decode, whatever the budget, and each reads all of it.
    """
    if budget <= num_readers:
        raise ValueError(f"a budget of {budget} tokens is used up by {num_readers} readers: give a larger one")
    config = config_of(budget) if chunked else whole(prompt + num_readers + 100)
    config.enable_prefix_caching = True
    steps_needed = prompt // (budget - num_readers) + 200
    arrivals = [Arrival(0, context + 1, steps_needed, f"reader {i + 1}", 0, (0,)) for i in range(num_readers)]
    alone = watch(Workload("readers", arrivals, context), config, costs, parts)
    settled = next(step.end for step in alone if len(step.sampled) == num_readers)
    arrival = next(step.start for step in alone if step.start >= settled + around)
    newcomer = Arrival(round(arrival * MS), prompt, 50, NEWCOMER)
    steps = watch(Workload("beside", [*arrivals, newcomer], context), config, costs, parts)
    first = next(step.end for step in steps if NEWCOMER in step.sampled)
    shown = [step for step in steps if step.end > arrival - around and step.start < first + around]
    return Scene(budget, shown, arrival, first)


def mixed(seed: int = 8, num_requests: int = 160, rate: float = 2.5) -> Workload:
    """Chats and documents, mixed: prompts of 2,000 tokens on average and of up to 30,000, answers of 150."""
    return make_workload(num_requests, Lognormal(2000, 1.2, 30_000), Lognormal(150, 0.8, 1000), Poisson(rate),
                         seed=seed, name="chats and documents")  # fmt: skip
