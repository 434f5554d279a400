"""The state of views that show requests by step: who computed what, who waited, who gave way and why, blocks held.

A lane has one letter a step: p computes a prompt, d decodes, r computes again what it had, - runs without a token in
this step, w waits, x waits with its K/V dropped, s waits with its K/V on the CPU, ! gives way; a space: not there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

from kvlab.events import Event
from kvlab.watch.books import listed, tokens
from kvlab.watch.style import INK, NOBODY, PAPER, SHARED_FILL, owner
from kvlab.watch.svg import Svg

KINDS = frozenset({"compute", "refs"})
WAITS = {"waiting": "w", "preempted": "x", "swapped": "s"}


class Victim(NamedTuple):
    """name gave way so that `needy` got blocks. lost: tokens whose K and V were dropped; None: they were swapped out.

    reason: "last" of those who ran; "least", if it also had the fewest tokens to lose; "itself"; "priority", if needy
    came in over its head; "" for any other.
    """

    name: str
    needy: str
    reason: str
    lost: int | None


@dataclass(frozen=True)
class Lanes:
    """order: requests as they came. lanes: request -> its letters. status: request -> running, waiting, preempted,
    swapped or finished. computed: request -> tokens with K and V. known: request -> tokens that ever had.

    held: blocks held in each step, while it computed. useful, again: tokens computed so far, for the first time and
    once more. victims, entered, finished: of this step; entered: (request, tokens that it computes again; None if new).
    setting, reference: what a scenario says of itself, and another run to compare with.
    """

    order: tuple[str, ...] = ()
    prompts: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[str, str] = field(default_factory=dict)
    computed: Mapping[str, int] = field(default_factory=dict)
    known: Mapping[str, int] = field(default_factory=dict)
    held: tuple[int, ...] = ()
    num_blocks: int = 0
    num_steps: int = 0
    useful: int = 0
    again: int = 0
    num_preemptions: int = 0
    victims: tuple[Victim, ...] = ()
    entered: tuple[tuple[str, int | None], ...] = ()
    finished: tuple[str, ...] = ()
    setting: tuple = ()
    reference: tuple = ()
    error: str = ""

    def count(self, status: str) -> int:
        return sum(one == status for one in self.status.values())

    @property
    def num_waiting(self) -> int:
        return sum(one in WAITS for one in self.status.values())

    @property
    def tokens(self) -> int:
        return self.useful + self.again


def after(old: Lanes, events: Sequence[Event]) -> Lanes:
    """The lanes once `events`, those of one step, have happened."""
    order, prompts, status = list(old.order), dict(old.prompts), dict(old.status)
    computed, known, letters = dict(old.computed), dict(old.known), {}
    victims: list[Victim] = []
    entered: list[tuple[str, int | None]] = []
    finished: list[str] = []
    told = {"setting": old.setting, "reference": old.reference, "error": ("",)}
    useful, again, late, num_held, num_blocks = old.useful, old.again, 0, 0, old.num_blocks
    is_step = computing = False
    for kind, name, values in (event[1:] for event in events):
        if name is not None and name not in status and kind in ("add", "schedule"):
            order.append(name)
            status[name] = "waiting"
        if kind == "add":
            prompts[name] = values[0]
        elif kind == "step_begin":
            is_step = True
        elif kind == "victim":
            running = [one for one in order if status[one] == "running"]
            lost = computed.get(name, 0)
            reason = "least" if lost <= min(computed.get(one, 0) for one in running or [name]) else "last"
            reason = reason if running[-1:] == [name] else ""
            reason = "itself" if name == values[0] else "priority" if values[0] not in running else reason
            victims.append(Victim(name, values[0], reason, lost))
        elif kind == "preempt":
            status[name], letters[name] = values[0], "!"
            if values[0] == "swapped":
                victims = [one._replace(lost=None) if one.name == name else one for one in victims]
            else:
                computed[name] = 0
        elif kind == "schedule":
            status[name] = "running"
            computed[name] = values[0]
            entered.append((name, max(0, known[name] - values[0]) if name in known else None))
        elif kind == "compute":
            computing = True
            for one, first, number in zip(values[::3], values[1::3], values[2::3], strict=True):
                if one not in status:  # a fork of another
                    order.append(one)
                    status[one] = "running"
                before = known.get(one, 0)
                repeated = max(0, min(first + number, before) - first)
                letters[one] = "r" if repeated else "p" if first < prompts.get(one, 0) else "d"
                again, useful = again + repeated, useful + number - repeated
                computed[one], known[one] = first + number, max(before, first + number)
        elif kind == "finish":
            status[name] = "finished"
            finished.append(name)
        elif kind == "free" and computing:
            late += len(values)
        elif kind == "refs":
            num_held, num_blocks = sum(count > 0 for count in values[1:]), len(values) - 1
        elif kind in told:
            told[kind] = values
    lanes = dict(old.lanes)
    if is_step:
        for name in order:
            idle = {"running": "-", "finished": " "} | WAITS
            lanes[name] = lanes.get(name, "").ljust(old.num_steps) + letters.get(name, idle[status[name]])
    return replace(
        old, order=tuple(order), prompts=prompts, lanes=lanes, status=status, computed=computed, known=known,
        held=old.held + ((num_held + late,) if is_step else ()),
        num_blocks=num_blocks or (told["setting"] or (0,))[-1],
        num_steps=old.num_steps + is_step, useful=useful, again=again,
        num_preemptions=old.num_preemptions + list(letters.values()).count("!"),
        victims=tuple(victims), entered=tuple(entered), finished=tuple(finished),
        setting=tuple(told["setting"]), reference=tuple(told["reference"]), error=told["error"][0],
    )  # fmt: skip


# ---- in words


WHY = {"least": "the youngest who runs, with the least to lose", "last": "the youngest who runs"}


def _gave_way(victim: Victim) -> str:
    name, needy, reason, lost = victim
    then = "its K and V wait on the CPU" if lost is None else f"{tokens(lost)} to compute again"
    if reason == "itself":
        return f"{name} needs a block, none is free, and nobody younger runs: it gives way itself; {then}."
    if reason == "priority":
        return f"{needy} has a higher priority and finds no room. {name} gives way: {then}."
    why = WHY.get(reason, "whom the policy chose")
    return f"{needy} needs a block and none is free. {name} gives way, {why}: {then}."


def say(lanes: Lanes) -> str:
    if lanes.error:
        return f"The run ends here: {lanes.error}"[:140]
    if not lanes.num_steps:
        grows = f"each grows to {lanes.setting[1]} at most" if lanes.setting else "nobody runs yet"
        return f"{lanes.num_waiting} requests wait" + f" for {lanes.num_blocks} blocks; {grows}." * bool(lanes.setting)
    if len(lanes.victims) == 1:
        return _gave_way(lanes.victims[0])
    if lanes.victims:
        names = listed([victim.name for victim in lanes.victims])
        return f"{lanes.victims[0].needy} needs a block and none is free; in this step {names} give way."[:140]
    back = [name for name, number in lanes.entered if number is not None]
    free = lanes.num_blocks - lanes.held[-1]
    held = f"{lanes.held[-1]} of {lanes.num_blocks} blocks are held"
    if back:
        lost = sum(number or 0 for _, number in lanes.entered)
        return f"Back: {listed(back)}, with {tokens(lost)} to compute again; {held}."
    if set(lanes.status.values()) == {"finished"}:
        computed = f"{tokens(lanes.tokens)} computed, {lanes.again} of them again"
        return f"All are done after {lanes.num_steps} steps: {computed}."
    if lanes.finished:
        return f"Done: {listed(lanes.finished)}; the blocks come free after this step, in which {held}."
    if lanes.entered:
        return f"New: {listed([name for name, _ in lanes.entered])}, with its prompt; {held}."
    running = lanes.count("running")
    return f"{running} run, {lanes.num_waiting} wait; {held}, {free} are free."


def alt(lanes: Lanes) -> str:
    each = "; ".join(f"{name} {lanes.status[name]}" for name in shown(lanes))
    held = f" {lanes.held[-1]} of {lanes.num_blocks} blocks held." if lanes.held else ""
    out = "".join(f" {one.name} gives way to {one.needy}." for one in lanes.victims)
    return (f"Preemption, after {lanes.num_steps} steps. {each}.{held}{out} {lanes.tokens} tokens computed, "
            f"{lanes.again} of them again; {lanes.num_preemptions} preemptions.")  # fmt: skip


# ---- the picture

X0, COLUMN, COLUMNS, ROW, LANES = 84, 11, 64, 25, 8  # of lanes: left edge, width of a step, how many, height, how many
BASE, TALL = 309, 86  # of the blocks: the base line, the height of a full pool


def shown(lanes: Lanes) -> list[str]:
    """Up to LANES requests: all that are unfinished, and who ended last."""
    live = [name for name in lanes.order if lanes.status[name] != "finished"]
    done = [name for name in lanes.order if lanes.status[name] == "finished"]
    chosen = set((live + done[::-1])[:LANES])
    return [name for name in lanes.order if name in chosen]


def draw_lane(lanes: Lanes, pen: Svg, name: str, y: float, first: int, acting: bool) -> None:
    """One request's lane from step `first` on, at height y. acting: it gives way, or somebody does for it."""
    look, lane = owner(name) if len(name) == 1 else NOBODY, lanes.lanes.get(name, "")[first:]
    pen.box(8, y, 62, 22, look.hue, 5 if acting else 2)
    pen.text(39, y + 18, name[-4:], anchor="middle", bold=True)
    x = X0
    for letter, run in groupby(lane):
        w = COLUMN * len(list(run))
        if letter in "pdr-":
            pen.box(x, y + 1, w, 20, INK if letter == "r" else PAPER if letter == "-" else look.hue, 1)
        if letter == "p":
            pen.texture(x + 1, y + 1, w - 2, 20, look.texture if look.texture != "plain" else "rising")
        elif letter == "!":
            pen.path(f"M{x + 1} {y + 3}h{w - 2}l{1 - w / 2} 16Z", 3, fill=PAPER)
        elif letter in WAITS.values():
            pen.path(f"M{x + 2} {y + 11}h{w - 4}", 2 if letter == "w" else 5)
        x += w


def draw_pool(lanes: Lanes, pen: Svg, first: int) -> None:
    """Blocks held in each step, under the line of all that there are."""
    right, scale = X0 + COLUMN * COLUMNS, TALL / max(1, lanes.num_blocks)
    held = lanes.held[first:]
    if held:
        steps = "".join(f"V{BASE - scale * count:.1f}h{COLUMN}" for count in held)
        pen.path(f"M{X0} {BASE}{steps}V{BASE}Z", 2, fill=SHARED_FILL)
    pen.path(f"M{X0} {BASE}H{right}", 1)
    pen.path(f"M{X0} {BASE - TALL}H{right}", 5)
    pen.text(X0 - 8, BASE - TALL + 8, lanes.num_blocks, anchor="end", bold=True)
    pen.text(X0 - 8, BASE, 0, anchor="end")
    pen.text(X0 - 8, BASE - TALL + 34, "blocks", anchor="end")
    for step in range(first + 10 - first % 10, first + COLUMNS, 10):
        x = X0 + COLUMN * (step - first)
        pen.path(f"M{x} {BASE}v5", 2)
        pen.text(x, BASE + 24, step, anchor="middle")
    pen.text(X0 - 8, BASE + 24, "step", anchor="end")
