"""View 6, the schedule (调度, L33 3.1, 3.2): who sits in which seat in which step, static and continuous batching.

The same requests through two runs of the real scheduler, `batching="static"` and `"continuous"`; every step takes as
long, whatever it does, and the pool is ample. The first step of a request computes its prompt and brings its first
token, each later step one more.

Scenarios: "mixed": answers of 2 to 10 tokens: how many steps? "equal": answers of one length. "alone": the batch of
L33 3.1. "long_last": the longest comes last. "late": one after another. A student's `admit` is the lower run alone.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from random import Random

from kvlab.config import EngineConfig
from kvlab.events import Event, Recorder
from kvlab.parts import PartError, Parts
from kvlab.schedule.policies import admit_static
from kvlab.sim import Arrival, ConstantCost, Simulator, Workload
from kvlab.sim.workload import NS
from kvlab.watch.seats import Schedule, Side, after, alt, say
from kvlab.watch.style import INK, PAPER, QUIET, SHARED_FILL, owner
from kvlab.watch.svg import Svg
from kvlab.watch.view import RECORD_A_RUN, Question, Scenario, View

SEATS, PROMPT, MOST_STEPS = 4, 4, 200

# ---- the picture

X0, COLUMN, COLUMNS = 140, 37, 20  # of the charts: left edge, width of a step, how many
ROW, PANEL = 28, 900  # height of a seat; left edge of the figures
TOPS = {"static": 50, "continuous": 190, "": 50}
CHINESE = {"static": "静态批处理", "continuous": "连续批处理", "": ""}


def draw(state: Schedule, pen: Svg) -> None:
    if state.lengths:
        pen.text(8, 27, "answers, tokens")
        for i, (name, number) in enumerate(state.lengths):
            with pen.linked(name):
                pen.box(190 + 82 * i, 4, 74, 32, owner(name).hue)
                pen.text(202 + 82 * i, 28, name, 24, bold=True)
                pen.text(254 + 82 * i, 27, number, anchor="end")
    first = max(0, state.num_steps - COLUMNS)  # the oldest step that still has a column
    for name, side in state.sides.items():
        _chart(state, pen, name, side, first)
    bottom = max(TOPS[name] for name in state.sides) + ROW * state.num_rows
    for step in range(first, first + COLUMNS):
        if (step + 1) % 2 == 0 or step + 1 == state.num_steps:
            pen.text(X0 + COLUMN * (step - first + 0.5), bottom + 26, step + 1, anchor="middle",
                     bold=step + 1 == state.num_steps)  # fmt: skip
    pen.text(X0 - 12, bottom + 26, "step", anchor="end")


def _chart(state: Schedule, pen: Svg, name: str, side: Side, first: int) -> None:
    top, rows, right = TOPS[name], state.num_rows, X0 + COLUMN * COLUMNS
    pen.text(8, top + 24, name or "seats", bold=True)
    pen.text(8, top + 50, CHINESE[name])
    for row in range(rows + 1):
        pen.path(f"M{X0} {top + ROW * row}H{right}", 1, QUIET)
    for step, column in enumerate(side.columns[first:], first):
        for row in range(rows):
            one, letter = column[row] if row < len(column) else ("", "")
            x, y = X0 + COLUMN * (step - first), top + ROW * row
            if not one:
                pen.box(x + 3, y + 3, COLUMN - 6, ROW - 6, dash=True, width=1)
                if side.wanted[step]:
                    pen.path(f"M{x + COLUMN / 2 - 4} {y + ROW / 2}h8", 8)
                continue
            new = step == 0 or row >= len(side.columns[step - 1]) or side.columns[step - 1][row][0] != one
            with pen.linked(one):
                _cell(pen, x, y, one, letter, new or step == first)
    end = X0 + COLUMN * (side.num_steps - first)
    if side.is_done:
        pen.path(f"M{end} {top - 8}v{ROW * rows + 16}", 7)
    elif side.num_steps > first:
        pen.box(end - COLUMN, top, COLUMN, ROW * rows, "none", 5)
    _figures(state, pen, side, top)


def _cell(pen: Svg, x: float, y: float, name: str, letter: str, tagged: bool) -> None:
    look = owner(name) if len(name) == 1 else owner("")
    pen.box(x, y, COLUMN, ROW, PAPER if letter == "-" else INK if letter == "r" else look.hue, 1)
    if letter == "p":
        pen.texture(x + 1, y + 1, COLUMN - 2, ROW - 2, look.texture if look.texture != "plain" else "rising")
    if tagged:
        pen.box(x + 7, y + 3, COLUMN - 14, ROW - 6, PAPER, 1)
        pen.text(x + COLUMN / 2, y + 22, name[-2:], 22 if len(name) == 1 else 20, "middle", bold=True)
    elif letter == "d" and len(name) == 1:
        pen.text(x + COLUMN / 2, y + 21, name, anchor="middle")


def _figures(state: Schedule, pen: Svg, side: Side, top: float) -> None:
    cells, x = side.num_cells(state.num_rows), PANEL
    share = side.busy / cells if cells else 1
    steps = f"{side.num_steps} step{'s' * (side.num_steps != 1)}" + ", all done" * side.is_done
    pen.text(x, top + 24, steps, 26, bold=True)
    if cells:
        pen.box(x, top + 34, 288, 20, PAPER, 1, dash=True)
        pen.box(x, top + 34, 288 * share, 20, SHARED_FILL, 2)
        pen.text(x, top + 78, f"idle: {cells - side.busy} of {cells} cells, {100 * (1 - share):.0f}%")
    pen.text(x, top + 106, "waiting:" if side.waiting else "nobody waits")
    for i, name in enumerate(side.waiting[:6]):
        with pen.linked(name):
            pen.box(x + 92 + 33 * i, top + 86, 29, 26, owner(name).hue if len(name) == 1 else PAPER)
            pen.text(x + 106.5 + 33 * i, top + 106, name[-2:], anchor="middle", bold=True)


# ---- scenarios


def _simulate(batching: str, arrivals: Sequence[Arrival], parts: Parts) -> list[Event]:
    config = EngineConfig(num_gpu_blocks_override=256, max_num_seqs=SEATS, batching=batching)
    recorder = Recorder()

    def look(scheduler, now_ns: int) -> None:
        if scheduler.stats.num_steps == MOST_STEPS:
            raise RuntimeError(f"{MOST_STEPS} steps, and no end of it")

    try:
        Simulator(config, ConstantCost(1.0), parts, recorder).run(Workload("schedule", arrivals), look)
    except (PartError, RuntimeError, ValueError) as error:  # of a student's part: the last frame says it
        recorder.emit("error", None, [str(error)])
    return recorder.events()


def _run(lengths: Callable[[Random, int], Sequence[int]], come: Callable[[Random], Sequence[int]] | None = None):
    """lengths(random, seed): of the answers. come(random): after how many steps each request comes; None: at once."""

    def play(seed: int, parts: Parts) -> list[Event]:
        random = Random(seed)
        drawn = lengths(random, seed)
        when = come(random) if come else [0] * len(drawn)
        arrivals = [Arrival(step * NS, PROMPT, length, name)
                    for name, step, length in zip("ABCDEFGH", when, drawn, strict=False)]  # fmt: skip
        runs = (_simulate("static", arrivals, parts | Parts(admit=admit_static)),
                _simulate("continuous", arrivals, parts))  # fmt: skip
        told = [value for arrival in arrivals for value in (arrival.request_id, arrival.output_tokens)]
        events = [Event(0, "seats", None, (SEATS, runs[0][-1].step, *told))]
        numbered = [(event.step, side, event) for side, run in enumerate(runs) for event in run]
        for (step, side), group in groupby(sorted(numbered, key=lambda each: each[:2]), key=lambda each: each[:2]):
            events.append(Event(step, "side", None, (("static", "continuous")[side],)))
            events += [event for *_, event in group]
        return events

    return play


def _shuffled(*batches: Sequence[int]) -> Callable[[Random, int], list[int]]:
    return lambda random, seed: [length for batch in batches for length in random.sample(batch, len(batch))]


def _steps(state: Schedule) -> tuple[int, int]:
    return state.sides["static"].num_steps, state.sides["continuous"].num_steps


def _ask_mixed(state: Schedule) -> tuple[str, Sequence[str]]:
    total = sum(number for _, number in state.lengths)
    least = -(-total // state.seats)
    return f"Static batching will take {state.reference} steps for these {total} tokens. And continuous batching?", (
        f"{state.reference}: the tokens are the same", f"{least + 4} to {state.reference - 1}",
        f"{least + 1} to {least + 3}", f"{least}: {total} tokens, {state.seats} seats, none ever idle")  # fmt: skip


def _answer_mixed(states: Sequence[Schedule]) -> int:
    static, other = _steps(states[-1])
    least = -(-sum(number for _, number in states[-1].lengths) // SEATS)
    return 0 if other >= static else 3 if other <= least else 2 if other <= least + 3 else 1


def _why_mixed(states: Sequence[Schedule]) -> str:
    static, other = _steps(states[-1])
    idle = states[-1].sides["continuous"].num_idle_wanted(SEATS)
    when = f"{idle} cells are idle while some wait" if idle else "Seats are idle only when nobody waits any more"
    return f"{other}, not {static}: who waits follows who ends. {when}."


def _saved(step: int, said: str, reason: str) -> Question:
    """How many of the steps of static batching are saved? Asked on frame `step`; reason: why none."""

    def ask(state: Schedule) -> tuple[str, Sequence[str]]:
        return f"{said} Static batching will take {state.reference} steps. How many does continuous batching save?", (
            f"{state.reference * 4 // 10} or more", "1 or 2", "none")  # fmt: skip

    def answer(states: Sequence[Schedule]) -> int:
        static, other = _steps(states[-1])
        return 2 if other >= static else 1 if static - other < 3 else 0

    def why(states: Sequence[Schedule]) -> str:
        static, other = _steps(states[-1])
        same = f"None: it takes {other} steps as well. {reason}"
        return same if static == other else f"{static - other}: it takes {other} steps."

    return Question(step, -1, ask, answer, why)


def _ask_late(state: Schedule) -> tuple[str, Sequence[str]]:
    length = state.lengths[0][1]
    free = state.seats - 1
    steps = ((2, 2), (length + 1, 2), (length + 1, length + 1))
    return f"A runs, B has just come, and {free} seats are free. In which step does B get its first token?", [
        f"static {one}, continuous {other}" for one, other in steps]  # fmt: skip


def _answer_late(states: Sequence[Schedule]) -> int:
    static, other = (states[-1].sides[name].first_step("B") for name in ("static", "continuous"))
    return {(2, 2): 0, (5, 2): 1, (5, 5): 2}.get((static, other), -1)


def _why_late(states: Sequence[Schedule]) -> str:
    static, other = (states[LATE].sides[name].first_step("B") for name in ("static", "continuous"))
    return f"Static in step {static}, when A has ended; continuous in step {other}. Here arrivals differ, not lengths."


LATE = 5  # the step in which the second static batch begins

VIEW = View(
    name="schedule",
    title="Static and continuous batching (静态与连续批处理)",
    begin=Schedule(),
    after=after,
    draw=draw,
    say=say,
    alt=alt,
    kinds=frozenset({"compute"}),
    remedy=RECORD_A_RUN,
    legend="a row: a seat; textured: its prompt; plain: one more token; dashed: idle, with a dot if somebody waits",
    scenarios={
        "mixed": Scenario(
            _run(_shuffled((2, 10, 3, 4), (2, 8, 3, 2))), Question(2, -1, _ask_mixed, _answer_mixed, _why_mixed)
        ),
        "equal": Scenario(
            _run(lambda _, seed: [4 + seed % 3] * 8),
            _saved(2, "All answers are equally long.", "Who enters together ends together: no seat is idle in either."),
        ),
        "alone": Scenario(
            _run(_shuffled((1, 10, 2, 3))),
            _saved(1, "Four answers, four seats.", "A free seat gains nothing if nobody waits for it."),
        ),
        "long_last": Scenario(
            _run(_shuffled((2, 3, 2, 3, 2, 3, 2), (10,))),
            _saved(2, "The longest answer is the last in the line.",
                   "Who enters last has the longest way, in both; some others are ready earlier."),
        ),  # fmt: skip
        "late": Scenario(
            _run(lambda *_: [4] * 6, lambda random: [0, 1, *sorted(random.choices(range(2, 8), k=4))]),
            Question(1, LATE, _ask_late, _answer_late, _why_late),
        ),
    },
)
