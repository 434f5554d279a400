"""View 1, the memory strip (内存条, L33 1.1-1.4 and 2.2): one list of requests in regions and in pages, and the waste.

Both rows are runs of kvlab.arena on the same jobs: `run_contiguous` above, `run_paged` below. Each slot counts once:
used, reserved (预留浪费), internal (内部碎片), external (外部碎片) or placeable.

Scenarios: "longest": every request reserves the longest it may become. How many run at once in pages?
           "exact": an oracle reserves just what each will write. Two leave: does the next one fit?
What the model leaves out: token budgets, seats and prefix sharing. Only memory limits here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from kvlab.arena import ContiguousArena, Job, Moment, PagedArena, run_contiguous, run_paged
from kvlab.events import Event, Recorder
from kvlab.parts import Parts
from kvlab.watch.books import listed
from kvlab.watch.style import PAPER, SHARED_FILL, owner
from kvlab.watch.svg import Svg
from kvlab.watch.view import Question, Scenario, View

SLOTS, SIZE, LONGEST = 48, 4, 16
SIDES = ("regions", "pages")
WASTES = ("reserved", "internal", "external")


@dataclass(frozen=True)
class Side:
    """One memory after a step. spans: (owner, start, size, used, final). wastes: by WASTES. past: of each step."""

    spans: tuple[tuple[str, int, int, int, int], ...] = ()
    used: int = 0
    wastes: tuple[int, ...] = (0, 0, 0)
    placeable: int = SLOTS
    running: int = 0
    waiting: int = 0
    preempted: int = 0
    blocked: bool = False
    past: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Strip:
    """jobs: name -> (prompt, final, reserved) in order of arrival. sides: by SIDES. time: the step of the runs."""

    time: int = 0
    slots: int = SLOTS
    size: int = SIZE
    jobs: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    sides: tuple[Side, Side] = (Side(), Side())


def _record(jobs: Sequence[Job], reserve) -> list[Event]:
    recorder = Recorder()
    recorder.emit("strip", None, [SLOTS, SIZE])
    for job in jobs:
        recorder.emit("job", job.name, [job.prompt, job.final, reserve(job)])
    runs = (run_contiguous(ContiguousArena(SLOTS), jobs, reserve, with_spans=True),
            run_paged(PagedArena(SLOTS // SIZE, SIZE), jobs, with_spans=True))  # fmt: skip
    for time in range(max(map(len, runs))):
        recorder.step = time + 1
        recorder.emit("time", None, [time + 1])
        for which, run in zip(SIDES, runs, strict=True):
            if time < len(run):
                _moment(recorder, which, run[time])
    return recorder.events()


def _moment(recorder: Recorder, which: str, now: Moment) -> None:
    waste = now.waste
    recorder.emit("moment", which, [waste.used, waste.reservation, waste.internal, waste.external, waste.placeable,
                                    now.running, now.waiting, now.preempted, int(now.blocked)])  # fmt: skip
    for span in now.spans:
        recorder.emit("span", which, [span.owner, span.start, span.size, span.used, span.final])


def _longest(seed: int, parts: Parts) -> list[Event]:
    """Six requests of at most 16 tokens, with a prompt of 3 each; their lengths in an order that the seed says."""
    finals = [5, 6, 7, 8, 9, 10]
    Random(seed).shuffle(finals)
    return _record([Job(name, 3, final) for name, final in zip("ABCDEF", finals, strict=True)], lambda job: LONGEST)


LEAVE = 4  # the step of "exact" on which two requests write their last token


def _exact(seed: int, parts: Parts) -> list[Event]:
    """Four requests of 12 slots fill the memory; A and C leave, B and D stay longer, as the seed says; E waits."""
    stay = LEAVE + Random(seed).choice([2, 3])
    jobs = [Job(name, 12 - (LEAVE if name in "AC" else stay), 12) for name in "ABCD"]
    return _record([*jobs, Job("E", 6, 20)], lambda job: job.final)


def after(strip: Strip, events: Sequence[Event]) -> Strip:
    """The state once `events`, those of one step, have happened. A side that reports nothing is empty: it is done."""
    jobs, time, slots, size = dict(strip.jobs), strip.time, strip.slots, strip.size
    sides = {which: Side(placeable=slots, preempted=old.preempted, past=old.past)
             for which, old in zip(SIDES, strip.sides, strict=True)}  # fmt: skip
    for event in events:
        values = event.values
        if event.kind == "strip":
            slots, size = values
            sides = {which: Side(placeable=slots) for which in SIDES}
        elif event.kind == "job":
            jobs[event.request_id] = tuple(values)
        elif event.kind == "time":
            [time] = values
        elif event.kind == "moment":
            used, *wastes, placeable, running, waiting, preempted, blocked = values
            old = sides[event.request_id]
            sides[event.request_id] = Side((), used, tuple(wastes), placeable, running, waiting, preempted,
                                           bool(blocked), (*old.past, tuple(wastes)))  # fmt: skip
        elif event.kind == "span":
            old = sides[event.request_id]
            sides[event.request_id] = replace(old, spans=(*old.spans, tuple(values)))
    if time == 0:
        sides = {which: replace(side, waiting=len(jobs)) for which, side in sides.items()}
    return Strip(time, slots, size, jobs, (sides["regions"], sides["pages"]))


def _ask_longest(strip: Strip) -> tuple[str, Sequence[str]]:
    regions = strip.slots // LONGEST
    return (f"In regions, {regions} requests of {LONGEST} reserved slots fill the {strip.slots}. "
            f"How many run at once in pages of {strip.size}?", ["2", "3", "4", "6"])  # fmt: skip


def _answer_longest(states: Sequence[Strip]) -> int:
    return ["2", "3", "4", "6"].index(str(states[1].sides[1].running))


def _why_longest(states: Sequence[Strip]) -> str:
    regions, pages = states[1].sides
    return (f"{pages.running} in pages, {regions.running} in regions: a page is taken when a token needs it, "
            "a region for what may never come.")  # fmt: skip


def _ask_exact(strip: Strip) -> tuple[str, Sequence[str]]:
    going = [name for name, _, _, used, final in strip.sides[0].spans if used == final]
    free = strip.slots - sum(size for name, _, size, _, _ in strip.sides[0].spans if name not in going)
    need = strip.jobs["E"][2]
    return (f"Regions: {listed(going)} are complete and leave: {free} slots will be free. E asks for {need}. Is it in?",
            ["yes, at once", "no, it waits", "yes, the others are moved"])  # fmt: skip


def _why_exact(states: Sequence[Strip]) -> str:
    side, need = states[LEAVE + 1].sides[0], states[0].jobs["E"][2]
    if side.blocked:
        where = "in pages E runs" if "E" in str(states[LEAVE + 1].sides[1].spans) else "nobody is moved"
        return f"E waits: {side.wastes[2]} slots are free, but no hole has {need} side by side; {where}."
    return f"E gets in: a hole has {need} slots side by side."


def say(strip: Strip) -> str:
    regions, pages = strip.sides
    if strip.time == 0:
        return f"{len(strip.jobs)} requests come to two memories of {strip.slots} slots: regions above, pages below."
    if regions.blocked:
        return f"Step {strip.time}: in regions one waits with {regions.wastes[2]} slots free: no hole is long enough."
    if not pages.running:
        return f"Step {strip.time}: in pages all are done; in regions {regions.running} run, {regions.waiting} wait."
    return (f"Step {strip.time}: regions run {regions.running} and waste {sum(regions.wastes)} slots; "
            f"pages run {pages.running} and waste {sum(pages.wastes)}.")  # fmt: skip


def alt(strip: Strip) -> str:
    words = [f"Memory strip, step {strip.time}, {strip.slots} slots in each of two memories."]
    for which, side in zip(SIDES, strip.sides, strict=True):
        wastes = ", ".join(f"{kind} {n}" for kind, n in zip(WASTES, side.wastes, strict=True))
        held = "; ".join(f"{name} {used} of {size} from {start}" for name, start, size, used, _ in side.spans)
        words.append(f"In {which}: used {side.used}, {wastes}, {side.running} run, {side.waiting} wait. {held}.")
    return " ".join(words)


LEFT, SLOT, TALL = 8, 17, 52
MARK = {"reserved": "plain", "internal": "crossed", "external": "level"}


def draw(strip: Strip, pen: Svg) -> None:
    for row, side in enumerate(strip.sides):
        y = 4 + 170 * row
        title = "regions (连续)" if row == 0 else f"pages of {strip.size} (分页)"
        pen.text(LEFT, y + 20, title, 22, bold=True)
        lost = f", {side.preempted} preempted" if side.preempted else ""
        line = list(strip.jobs)[-side.waiting :] if side.waiting else []  # first come, first served
        who = f": {', '.join(line)}" if line else ""
        pen.text(LEFT + 230, y + 20, f"{side.running} run, {side.waiting} wait{who}{lost}")
        _memory(strip, side, pen, y + 30)
        _past(strip, side, pen, y + 92)
        _numbers(side, pen, y)


def _memory(strip: Strip, side: Side, pen: Svg, y: float) -> None:
    pen.box(LEFT, y, SLOT * strip.slots, TALL, dash=True)
    if side.wastes[2] and not side.placeable:  # every hole is too short for the next one
        ends = [0, *(edge for _, start, size, _, _ in side.spans for edge in (start, start + size)), strip.slots]
        for left, right in zip(ends[::2], ends[1::2], strict=True):
            if right > left:
                pen.texture(LEFT + SLOT * left, y, SLOT * (right - left), TALL, MARK["external"])
    for name, start, size, used, final in side.spans:
        x, look = LEFT + SLOT * start, owner(name)
        with pen.linked(name):
            if size > final:
                pen.box(x + SLOT * final, y, SLOT * (size - final), TALL, PAPER, 1)
                pen.texture(x + SLOT * final, y, SLOT * (size - final), TALL, MARK["internal"])
            if final > used:
                pen.box(x + SLOT * used, y, SLOT * (final - used), TALL, SHARED_FILL, 1)
            if used:
                pen.box(x, y, SLOT * used, TALL, look.hue, 1)
                pen.text(x + SLOT, y + 26, name, 22, "middle", bold=True)
                pen.texture(x + 1, y + TALL - 18, SLOT * used - 2, 16, look.texture)
            pen.box(x, y, SLOT * size, TALL, "none", 3)


def _past(strip: Strip, side: Side, pen: Svg, y: float) -> None:
    """A column a step: the wasted slots of all kinds, on an axis as high as the memory."""
    high, wide = 66, 24
    pen.path(f"M{LEFT} {y}V{y + high}H{LEFT + SLOT * strip.slots}", 2)
    pen.text(LEFT + SLOT * strip.slots - 4, y + 20, f"waste, step by step; top: {strip.slots}", anchor="end")
    for i, wastes in enumerate(side.past[-(SLOT * strip.slots // wide) :]):
        base = y + high
        for kind, number in zip(WASTES, wastes, strict=True):
            if number:
                tall = high * number / strip.slots
                base -= tall
                fill = SHARED_FILL if kind == "reserved" else PAPER
                pen.box(LEFT + 4 + wide * i, base, wide - 4, tall, fill, 1)
                pen.texture(LEFT + 4 + wide * i, base, wide - 4, tall, MARK[kind])


def _numbers(side: Side, pen: Svg, y: float) -> None:
    rows = [("used", side.used, ""), *zip(("reserved, to come", "internal, never", "external, holes"), side.wastes,
                                          WASTES, strict=True), ("free, placeable", side.placeable, "")]  # fmt: skip
    for i, (words, number, kind) in enumerate(rows):
        at = y + 20 + 32 * i
        if kind:
            pen.box(850, at - 18, 34, 22, SHARED_FILL if kind == "reserved" else PAPER, 1)
            pen.texture(850, at - 18, 34, 22, MARK[kind])
        pen.text(898, at, words)
        pen.text(1180, at, number, 24, "end", bold=True)


VIEW = View(
    "strip", "The memory strip (内存条)", Strip(), after, draw, say, alt,
    kinds=frozenset({"strip", "moment"}),
    legend="letter and hue: used; grey: reserved, to come; crossed: never written; level lines: holes too short",
    scenarios={
        "longest": Scenario(_longest, Question(0, 1, _ask_longest, _answer_longest, _why_longest)),
        "exact": Scenario(_exact, Question(LEAVE, LEAVE + 1, _ask_exact,
                                           lambda states: int(states[LEAVE + 1].sides[0].blocked), _why_exact)),
    },
    takes_parts=False,
    remedy="views.strip shows two runs of kvlab.arena, and an engine keeps only one: take a trace from its scenarios",
)  # fmt: skip
