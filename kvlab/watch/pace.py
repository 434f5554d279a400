"""The state of the view budget, and its words: which step computed what, how long it took, who got a token when.

Times are modelled: each step is priced by COST from what it computed, whatever engine ran it. Copies of blocks are left
out. A request is there from the end of the step in which it was added.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.costs import GPUCost, work_of_step
from kvlab.events import Event
from kvlab.watch.books import listed, tokens

GPU, MODEL = "A100", "Llama-3-8B"
COST = GPUCost.of(GPU, MODEL)
RATES = f"{COST.flops_rate / 1e12:.0f} TFLOP/s, {COST.memory_rate / 1e12:.1f} TB/s"
BOUND = {"memory": "mostly to read the weights", "compute": "mostly for arithmetic"}


class Step(NamedTuple):
    """start, ms: in ms. decodes: who computed one token. chunks: (request, tokens of its prompt, or computed again).

    came: (request, when its token before came; None: this is its first). bound: what most of the time went on.
    """

    start: float
    ms: float
    decodes: tuple[str, ...]
    chunks: tuple[tuple[str, int], ...]
    came: tuple[tuple[str, float | None], ...]
    bound: str

    @property
    def end(self) -> float:
        return self.start + self.ms

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(number for _, number in self.chunks)


class Gap(NamedTuple):
    """From one token of a request to its next, in ms."""

    name: str
    start: float
    end: float

    @property
    def ms(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Pace:
    """order: requests as they came. prompts, known: tokens of the prompt, and all of which K and V are wanted so far.

    arrived, first, last: when each came, got its first token, its latest one. ready: tokens computed of each. done: who
    has ended. gap: the longest. reference: of another run: (its budget, longest gap, time to first token), in ms.
    """

    order: tuple[str, ...] = ()
    prompts: Mapping[str, int] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    ready: Mapping[str, int] = field(default_factory=dict)
    arrived: Mapping[str, float] = field(default_factory=dict)
    first: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    done: frozenset[str] = frozenset()
    steps: tuple[Step, ...] = ()
    gap: Gap | None = None
    budget: int = 0
    reference: tuple = ()
    error: str = ""

    @property
    def now(self) -> float:
        """ms since the first step began."""
        return self.steps[-1].end if self.steps else 0.0

    @property
    def newest(self) -> str:
        return self.order[-1] if self.order else ""

    @property
    def ttft(self) -> float | None:
        """Time to first token of who came last, in ms; None: not yet."""
        name = self.newest
        return self.first[name] - self.arrived[name] if name in self.first else None

    @property
    def left_out(self) -> list[str]:
        """Who is there, has not ended, and computed nothing in this step."""
        there = {*self.steps[-1].decodes, *dict(self.steps[-1].chunks)} if self.steps else set()
        return [name for name in self.order if name not in there | self.done and self.arrived[name] < self.now]


def after(old: Pace, events: Sequence[Event]) -> Pace:
    """The pace once `events`, those of one step, have happened."""
    order, prompts, known, ready = list(old.order), dict(old.prompts), dict(old.known), dict(old.ready)
    arrived, first, last = dict(old.arrived), dict(old.first), dict(old.last)
    steps, gap, budget, reference, error = old.steps, old.gap, old.budget, old.reference, ""
    done = set(old.done)
    for kind, name, values in (event[1:] for event in events):
        now = steps[-1].end if steps else 0.0
        if kind == "add":
            order.append(name)
            prompts[name] = known[name] = values[0]
            arrived[name] = now
        elif kind == "step_begin" and values:
            budget = values[0]
        elif kind == "budget":
            budget, *reference = values
        elif kind == "compute":
            decodes, chunks, came, pairs, num_logits = [], [], [], [], 0
            for one, start, number in zip(values[::3], values[1::3], values[2::3], strict=True):
                if one not in known:  # a fork of another, or added before the recording began
                    order.append(one)
                    prompts[one], known[one], arrived[one] = start, start + number, now
                pairs.append((number, start))
                ready[one] = start + number
                samples = start + number == known[one]
                if number == 1 and samples and start >= prompts[one]:
                    decodes.append(one)
                else:
                    chunks.append((one, number))
                if samples:
                    came.append((one, last.get(one)))
                    known[one] += 1
                    num_logits += 1
            work = work_of_step(pairs)._replace(num_logits=num_logits)
            cost = COST.explain(work)
            bound = cost.bound if pairs else ""
            step = Step(now, 1e3 * cost.seconds, tuple(decodes), tuple(chunks), tuple(came), bound)
            steps = (*steps, step)
            for one, before in came:
                if before is not None and (gap is None or step.end - before > gap.ms + 1e-9):
                    gap = Gap(one, before, step.end)
                first.setdefault(one, step.end)
                last[one] = step.end
        elif kind == "finish":
            done.add(name)
        elif kind == "error":
            [error] = values
    return Pace(tuple(order), prompts, known, ready, arrived, first, last, frozenset(done), steps, gap,
                budget, tuple(reference), error)  # fmt: skip


# ---- in words


def _some(names: Sequence[str]) -> str:
    return listed(names) if len(names) < 5 else f"{len(names)} requests"


def say(pace: Pace) -> str:
    if pace.error:
        return f"The run ends here: {pace.error}"[:140]
    if not pace.steps:
        most = f"A step computes {tokens(pace.budget)} at most" if pace.budget else "Nothing is computed yet"
        return f"{_some(pace.order)} wait. {most}; the width of a step is its time, by a model."
    step, number = pace.steps[-1], len(pace.steps)
    took = f"{step.ms:.1f} ms, {BOUND.get(step.bound, 'mostly ' + step.bound)}"
    if set(pace.order) == pace.done:
        return f"All are done after {number} steps and {pace.now:.0f} ms."
    new = [name for name, before in step.came if before is None]
    if pace.newest in new and pace.arrived[pace.newest] > 0:
        return f"Step {number}: {pace.newest} has its first token, {pace.ttft:.0f} ms after it came. It took {took}."
    if pace.left_out and not step.chunks:
        left = _some(pace.left_out)
        return f"Step {number}: {_some(step.decodes)} take the whole budget; nothing is left for {left}."
    said = [f"{_some(step.decodes)} get a token"] if len(step.decodes) > 1 else [
        f"{name} gets a token" for name in step.decodes]  # fmt: skip
    for name, num_tokens in step.chunks[:1]:
        ready, whole = pace.ready[name], pace.prompts[name]
        said.append(f"{name} computes {num_tokens:,}, so {ready:,} of {whole:,}" if ready < whole
                    else f"{name} computes {num_tokens:,}")  # fmt: skip
    if len(step.chunks) > 1:
        said[-1] = f"{_some([name for name, _ in step.chunks])} compute {sum(n for _, n in step.chunks):,} tokens"
    come = [name for name in pace.order if pace.arrived[name] == pace.now]
    comes = f" {come[0]} comes with {pace.prompts[come[0]]:,} tokens." if len(come) == 1 else f" {len(come)} come."
    return f"Step {number}: {'; '.join(said) or 'nobody computes'}. It takes {took}.{comes * bool(come)}"[:140]


def alt(pace: Pace) -> str:
    if not pace.steps:
        return f"Token budget {pace.budget}. Waiting: {_some(pace.order)}."
    step = pace.steps[-1]
    chunks = "".join(f" {name} computes {number} tokens." for name, number in step.chunks)
    gap = f" Longest gap {pace.gap.ms:.1f} ms, of {pace.gap.name}." if pace.gap else ""
    ttft = "not yet" if pace.ttft is None else f"after {pace.ttft:.0f} ms"
    decodes = f" Decodes: {_some(step.decodes) or 'none'}."
    times = f"from {step.start:.1f} to {step.end:.1f} ms by a model"
    return (f"Token budget {pace.budget}, step {len(pace.steps)}, {times}."
            f"{decodes}{chunks}{gap} First token of {pace.newest}: {ttft}.")  # fmt: skip
