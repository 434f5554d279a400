"""One seeded stream of requests through any arena, and where each slot is after every step (L33 1; lab 02).

    make_jobs(50, 450, seed) -> [Job] --> run_contiguous(arena, jobs, reserve) --+--> [Moment]: Waste, who runs and
                                          run_paged(arena, jobs) ----------------'    waits, spans for drawing

First come, first served. A step: enter while the next one fits; everybody writes one more token; who is complete
leaves. Times are steps, sizes are slots. Only memory limits here: no seats, no token budget.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.arena.contiguous import ArenaBase
from kvlab.arena.paged import PagedBase, measure_paged
from kvlab.arena.waste import Waste
from kvlab.arena.waste import measure as our_measure


class Job(NamedTuple):
    """A request: `prompt` tokens at its start, `final` tokens when it ends."""

    name: str
    prompt: int
    final: int


class Span(NamedTuple):
    """`size` slots from `start` on, held by `owner`: `used` have a token, `final` will have one before it ends."""

    start: int
    size: int
    owner: str
    used: int
    final: int


@dataclass(frozen=True)
class Moment:
    """What stands in memory after a step."""

    step: int
    waste: Waste
    spans: Sequence[Span]  # empty unless asked for
    running: int
    waiting: int
    finished: int
    preempted: int  # so far
    blocked: bool  # somebody waits although more slots are free than it asks for


@dataclass
class _Run:
    waiting: deque[Job]
    used: dict[str, int] = field(default_factory=dict)  # running or preempted -> tokens written
    running: dict[str, Job] = field(default_factory=dict)  # in order of admission
    finished: int = 0
    preempted: int = 0

    def enter(self) -> None:
        job = self.waiting.popleft()
        self.running[job.name] = job
        self.used.setdefault(job.name, job.prompt)

    def write(self) -> None:
        """One more token for everybody."""
        if not self.running:
            raise RuntimeError(f"the arena is empty and refuses {self.waiting[0]}: has it lost memory?")
        for name in self.running:
            self.used[name] += 1

    def complete(self) -> list[Job]:
        done = [job for job in self.running.values() if self.used[job.name] >= job.final]
        for job in done:
            del self.running[job.name], self.used[job.name]
        self.finished += len(done)
        return done

    @property
    def progress(self) -> dict[str, tuple[int, int]]:
        return {name: (self.used[name], job.final) for name, job in self.running.items()}


def make_jobs(low: int, high: int, seed: int, prompt: int = 0) -> list[Job]:
    """One request for each number of outputs low .. high, after `prompt` tokens, in random order; named r0, r1, ...

    Every length once, so that averages over requests are what the uniform distribution says, without noise.
    """
    outputs = list(range(low, high + 1))
    random.Random(seed).shuffle(outputs)
    return [Job(f"r{i}", prompt, prompt + n) for i, n in enumerate(outputs)]


def run_contiguous(arena: ArenaBase, jobs: Sequence[Job], reserve: Callable[[Job], int],
                   measure: Callable[..., Waste] = our_measure, with_spans: bool = False) -> list[Moment]:  # fmt: skip
    """Every request reserves `reserve(job)` slots from admission to its end. The arena must have allocate and free.

    measure: where each slot is; lab 02 hands in the student's.

    ValueError if a request reserves less than it will write, or can never be placed.
    """
    for job in jobs:
        if not job.final <= reserve(job) <= arena.capacity:
            raise ValueError(f"{job} reserves {reserve(job)} of {arena.capacity} slots: it needs {job.final}")
    run, moments = _Run(deque(jobs)), []
    while run.waiting or run.running:
        while run.waiting and arena.allocate(run.waiting[0].name, reserve(run.waiting[0])) is not None:
            run.enter()
        run.write()
        progress = run.progress
        need = reserve(run.waiting[0]) if run.waiting else 1
        spans = []
        if with_spans:
            spans = [Span(r.start - arena.start, r.size, r.owner, *progress[r.owner]) for r in arena.regions]
        blocked = bool(run.waiting) and arena.free_total >= need
        moments.append(Moment(len(moments), measure(arena, progress, need), spans, len(run.running), len(run.waiting),
                              run.finished, 0, blocked))  # fmt: skip
        for job in run.complete():
            arena.free(job.name)
    return moments


def run_paged(arena: PagedBase, jobs: Sequence[Job], with_spans: bool = False) -> list[Moment]:
    """Blocks come as tokens do. When they run out the youngest gives its blocks back and waits, first in the line;
    its tokens are computed again, all in one step, when it comes back.

    The arena must have grow and free. ValueError if a request can never fit.
    """
    for job in jobs:
        if job.final > arena.capacity:
            raise ValueError(f"{job} needs {job.final} of {arena.capacity} slots: give the arena more blocks")
    run, moments = _Run(deque(jobs)), []
    while run.waiting or run.running:
        for name in list(run.running):
            while name in run.running and not arena.grow(name, run.used[name] + 1):
                youngest = run.running.pop(next(reversed(run.running)))
                arena.free(youngest.name)
                run.waiting.appendleft(youngest)
                run.preempted += 1
        while run.waiting and _enters(arena, run):
            run.enter()
        run.write()
        progress = run.progress
        spans = _block_spans(arena, progress) if with_spans else []
        moments.append(Moment(len(moments), measure_paged(arena, progress), spans, len(run.running),
                              len(run.waiting), run.finished, run.preempted, False))  # fmt: skip
        for job in run.complete():
            arena.free(job.name)
    return moments


def _block_spans(arena: PagedBase, progress: dict[str, tuple[int, int]]) -> list[Span]:
    """A Span for every block that somebody owns."""
    spans, size = [], arena.block_size
    for owner, table in arena.tables.items():
        for index, block in enumerate(table):
            used, final = (min(max(n - index * size, 0), size) for n in progress[owner])
            spans.append(Span(block * size, size, owner, used, final))
    return spans


def _enters(arena: PagedBase, run: _Run) -> bool:
    """Give the first that waits its blocks, if that leaves one for each that runs; somebody must run."""
    job = run.waiting[0]
    tokens = run.used.get(job.name, job.prompt) + 1
    spare = len(arena.free_blocks) - -(-tokens // arena.block_size)
    return spare >= len(run.running) and arena.grow(job.name, tokens)
