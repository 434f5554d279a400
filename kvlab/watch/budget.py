"""View 7, the token budget (令牌预算, L33 4.1 to 4.4): what a step computes, how long it takes, and who waits for it.

A column for each step of the real scheduler, as wide as the step is long: a cell for each decode, and above them the
chunk of a prompt, to the scale of the budget. Below, a lane for each request: a dot for each token, on the same time
axis. Steps are priced by `kvlab.costs.GPUCost`; the figures agree with those of `kvlab.sim` under that cost.

Scenarios: three decode, and one comes with a long prompt. "whole": the budget has room for all of it. "chunks": 512 a
step, as in L33 4.2. "half": 64, where 128 was. "starved": as small as the number of decodes. A student's plan_tokens
divides the budget among those who run; the first chunk of who enters is what the others leave.
"""

from collections.abc import Callable, Sequence

from kvlab.config import EngineConfig
from kvlab.events import Event, Recorder
from kvlab.parts import PartError, Parts
from kvlab.sim import Arrival, SimResult, Simulator, Workload
from kvlab.watch.budget_picture import draw
from kvlab.watch.pace import COST, Pace, after, alt, say
from kvlab.watch.view import RECORD_A_RUN, Question, Scenario, View

# ---- scenarios

BEFORE, AFTER = 5, 4  # steps before D comes; tokens of D
LONG = (4000, 3500, 3000)  # D's prompt, by seed


def simulate(budget: int, long: int, outputs: Sequence[int], parts: Parts | None = None,
             recorder: Recorder | None = None) -> SimResult:  # fmt: skip
    """A, B and C decode; D comes with `long` tokens when they have had BEFORE steps. outputs: of A, B and C."""
    config = EngineConfig(num_gpu_blocks_override=1024, max_num_seqs=4, max_num_batched_tokens=budget,
                          enable_prefix_caching=False)  # fmt: skip
    three = [Arrival(0, 1, number, name) for name, number in zip("ABC", outputs, strict=True)]
    ends: list[int] = []
    Simulator(config, COST).run(Workload("alone", three), lambda scheduler, now_ns: ends.append(now_ns))
    comes = Arrival(ends[BEFORE - 1], long, AFTER, "D")
    return Simulator(config, COST, parts, recorder).run(Workload("budget", [*three, comes]))


def _figures_of(result: SimResult) -> tuple[str, str]:
    """(longest gap, D's time to first token), ms."""
    return f"{max(one.longest_gap for one in result.records) / 1e6:.1f}", f"{result.records[3].ttft_ns / 1e6:.0f}"


def _enough(budget: int, long: int) -> list[int]:
    """Answers of A, B and C, so long that they decode until D has its tokens."""
    return [BEFORE + -(-long // (budget - 3)) + AFTER] * 3


def _run(budget: int, than: int | None = None, starved: bool = False) -> Callable[[int, Parts], list[Event]]:
    """than: the budget to compare with. starved: short answers, and a short prompt."""

    def play(seed: int, parts: Parts) -> list[Event]:
        recorder, long = Recorder(), 24 + 6 * (seed % 3) if starved else LONG[seed % 3]
        other = () if than is None else (f"{than:,}", *_figures_of(simulate(than, long, _enough(than, long))))
        recorder.emit("budget", None, [budget, *other])
        try:
            simulate(budget, long, (12, 16, 20) if starved else _enough(budget, long), parts, recorder)
        except (PartError, RuntimeError, ValueError) as error:  # of a student's part: the last frame says it
            recorder.emit("error", None, [str(error)])
        return recorder.events()

    return play


def _ask_whole(pace: Pace) -> tuple[str, Sequence[str]]:
    step = pace.steps[-1].ms
    long = pace.prompts["D"]
    return f"D has come with {long:,} tokens, and the budget has room for them. When does A get its next token?", (
        f"in {step:.0f} ms: decodes are served first", f"in {2 * step:.0f} ms", "in over 200 ms")  # fmt: skip


def _answer_whole(states: Sequence[Pace]) -> int:
    before, now = states[BEFORE], states[BEFORE + 1]
    gap = now.last["A"] - before.last["A"]
    return 2 if gap > 200 else 0 if gap < 1.5 * before.steps[-1].ms else 1


def _why_whole(states: Sequence[Pace]) -> str:
    gap = states[BEFORE + 1].now - states[BEFORE].now
    if gap < 200:
        return f"In {gap:.0f} ms: D's prompt is not in this step, or only a little of it."
    first = "decodes are first in the budget, but a step is one forward, and all its tokens come at its end"
    return f"In {gap:.0f} ms: {first}."


def _ask_other(pace: Pace) -> tuple[str, Sequence[str]]:
    name, gap, ttft = pace.reference
    other = f"Budget {name}: longest gap {gap} ms, D's first token after {ttft}"
    return f"{other}. Now it is {pace.budget}. What changes?", (
        "gap half or less, first token about as before", "gap half or less, first token far later",
        "gap hardly shorter, first token far later", "both hardly change")  # fmt: skip


def _answer_other(states: Sequence[Pace]) -> int:
    _, gap, ttft = states[-1].reference
    shorter, later = states[-1].gap.ms / float(gap) < 0.6, states[-1].ttft / float(ttft) > 1.3
    return {(True, False): 0, (True, True): 1, (False, True): 2, (False, False): 3}[shorter, later]


def _why_other(states: Sequence[Pace]) -> str:
    end, right, name = states[-1], _answer_other(states), states[-1].reference[0]
    figures = f"Gap {end.gap.ms:.1f} ms, first token after {end.ttft:.0f}."
    step = max(end.steps[BEFORE:], key=lambda step: step.ms)
    if right == 2:
        reading = f"A step reads all weights, be it for {step.num_tokens} tokens or {name}"
        return f"{figures} {reading}, and now D needs twice the steps."
    if right == 0:
        return f"{figures} The same arithmetic in slices; in each it still takes longer than reading the weights."
    return figures


def _ask_starved(pace: Pace) -> tuple[str, Sequence[str]]:
    long = pace.prompts["D"]
    return f"The budget is {pace.budget}, and three decode. D has come with {long} tokens. When does it begin?", (
        "in the next step: each gets a share", "when it is its turn: in three steps", "when one of them ends")


def _begins(states: Sequence[Pace]) -> int:
    """The step in which D first computes a token."""
    return next(i for i, pace in enumerate(states) if pace.ready.get("D"))


def _answer_starved(states: Sequence[Pace]) -> int:
    begins = _begins(states)
    return 0 if begins <= BEFORE + 2 else 2 if states[begins - 1].done else 1


def _why_starved(states: Sequence[Pace]) -> str:
    begins = _begins(states)
    ended = sorted(states[begins - 1].done)
    why = f"after {ended[0]} has ended; until then decodes leave nothing" if ended else "the plan leaves it some"
    return f"In step {begins}, {why}. Its first token comes {states[-1].ttft:.0f} ms after it came."


VIEW = View(
    name="budget",
    title="The token budget (令牌预算)",
    begin=Pace(),
    after=after,
    draw=draw,
    say=say,
    alt=alt,
    kinds=frozenset({"compute"}),
    remedy=RECORD_A_RUN,
    legend="a column: a step, as wide as it is long; a cell: a decode, drawn large; textured: a chunk; a dot: a token",
    scenarios={
        "whole": Scenario(_run(8192), Question(BEFORE, BEFORE + 1, _ask_whole, _answer_whole, _why_whole)),
        "chunks": Scenario(_run(512, 8192), Question(BEFORE, -1, _ask_other, _answer_other, _why_other)),
        "half": Scenario(_run(64, 128), Question(BEFORE, -1, _ask_other, _answer_other, _why_other)),
        "starved": Scenario(
            _run(3, starved=True), Question(BEFORE, -1, _ask_starved, _answer_starved, _why_starved)
        ),
    },
)
