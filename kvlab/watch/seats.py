"""The state of the view schedule, and its words: who sat in which seat in which step, in one run or in two.

The scheduler knows seats only as a number. Which row a request is drawn in is ours: the first that is free. Who runs in
a step keeps its seat in it, also without a token; who gives way has left it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvlab.events import Event
from kvlab.watch import lanes as by_step
from kvlab.watch.books import listed
from kvlab.watch.lanes import WAITS, Lanes

MOST_ROWS = 8
Column = tuple[tuple[str, str], ...]  # (request, its letter in this step) of each seat, ("", "") where it is idle


@dataclass(frozen=True)
class Side:
    """One run. columns: of each step. wanted: of each step, did somebody wait in it? lanes: as in kvlab.watch.lanes."""

    lanes: Lanes = Lanes()
    columns: tuple[Column, ...] = ()
    wanted: tuple[bool, ...] = ()

    @property
    def num_steps(self) -> int:
        return len(self.columns)

    @property
    def waiting(self) -> list[str]:
        return [name for name in self.lanes.order if self.lanes.status[name] in WAITS]

    @property
    def is_done(self) -> bool:
        return bool(self.lanes.order) and set(self.lanes.status.values()) == {"finished"}

    @property
    def busy(self) -> int:
        """Cells in which a request ran."""
        return sum(bool(name) for column in self.columns for name, _ in column)

    def num_idle_wanted(self, seats: int) -> int:
        """Idle cells of the steps in which somebody waited."""
        return sum(seats - sum(bool(name) for name, _ in column)
                   for column, wanted in zip(self.columns, self.wanted, strict=True) if wanted)  # fmt: skip

    def num_cells(self, seats: int) -> int:
        return sum(max(seats, len(column)) for column in self.columns)

    def first_step(self, name: str) -> int:
        """The step in which `name` first had a seat; 0 if it had none yet."""
        return next((i for i, column in enumerate(self.columns, 1) if name in dict(column)), 0)

    def last_step(self, name: str) -> int:
        return max((i for i, column in enumerate(self.columns, 1) if name in dict(column)), default=0)


@dataclass(frozen=True)
class Schedule:
    """sides: "static" and "continuous", or one run under "". seats: of each. lengths: request -> tokens that it will
    get, where a scenario tells. reference: steps that static batching takes in all, where it tells."""

    sides: dict[str, Side] = field(default_factory=dict)
    seats: int = 0
    lengths: tuple[tuple[str, int], ...] = ()
    reference: int = 0

    @property
    def num_steps(self) -> int:
        return max((side.num_steps for side in self.sides.values()), default=0)

    @property
    def num_rows(self) -> int:
        """Seats that are drawn: all, or, of a great many, as many as were ever taken."""
        peak = max((len(column) for side in self.sides.values() for column in side.columns), default=0)
        return self.seats if 0 < self.seats <= MOST_ROWS else min(MOST_ROWS, max(1, peak))

    @property
    def now(self) -> dict[str, Side]:
        """The sides that ran in this step."""
        return {name: side for name, side in self.sides.items() if side.num_steps == self.num_steps}


def after(old: Schedule, events: Sequence[Event]) -> Schedule:
    """The schedule once `events`, those of one step, have happened."""
    by_side: dict[str, list[Event]] = {}
    seats, lengths, reference, at = old.seats, old.lengths, old.reference, ""
    for event in events:
        if event.kind == "side":
            at = event.values[0]
        elif event.kind == "seats":
            seats, reference, *told = event.values
            lengths = tuple(zip(told[::2], told[1::2], strict=True))
        else:
            if event.kind == "step_begin" and event.values:
                seats = event.values[1]
            by_side.setdefault(at, []).append(event)
    sides = dict(old.sides)
    for name, its in by_side.items():
        sides[name] = _side(sides.get(name, Side()), its)
    return Schedule(sides, seats, lengths, reference)


def _side(old: Side, events: Sequence[Event]) -> Side:
    lanes = by_step.after(old.lanes, events)
    if lanes.num_steps == old.lanes.num_steps:
        return replace(old, lanes=lanes)
    letters = {name: lane[-1] for name, lane in lanes.lanes.items()}
    seated = [name for name in lanes.order if letters[name] in "pdr-"]
    column = [pair if pair[0] in seated else ("", "") for pair in (old.columns[-1] if old.columns else ())]
    places = {name: i for i, (name, _) in enumerate(column) if name}
    free = iter([i for i, (name, _) in enumerate(column) if not name] + list(range(len(column), len(seated) + 1)))
    for name in seated:
        if name not in places:
            places[name] = next(free)
    row = {seat: (name, letters[name]) for name, seat in places.items()}
    columns = (*old.columns, tuple(row.get(i, ("", "")) for i in range(max(row, default=-1) + 1)))
    waited = any(status in WAITS and letters[name] in WAITS.values() for name, status in old.lanes.status.items())
    return Side(lanes, columns, (*old.wanted, waited))


# ---- in words


def _clause(name: str, side: Side, seats: int) -> str:
    """What one run did in this step, and why."""
    lanes, said = side.lanes, list[str]()
    busy = sum(bool(name) for name, _ in side.columns[-1])
    new = [name for name, _ in lanes.entered]
    if lanes.victims:
        said.append(f"{listed([victim.name for victim in lanes.victims])} gives way")
    if new:
        said.append(f"{listed(new)} {'enters' if len(new) == 1 else 'enter'}")
    if lanes.finished:
        said.append(f"{listed(lanes.finished)} {'ends' if len(lanes.finished) == 1 else 'end'}")
    if busy < seats <= 64 and side.wanted[-1]:
        idle = "1 seat is idle" if busy == seats - 1 else f"{seats - busy} seats are idle"
        why = "for nobody enters a batch that has begun" if name == "static" else "and some wait"
        said.append(f"{idle}, {why}")
    elif busy < seats <= 64 and not said:
        said.append("nobody waits for the idle seat" + "s" * (busy < seats - 1))
    return ", ".join(said) or f"{busy} run, none ends"


def say(state: Schedule) -> str:
    failed = next((side.lanes.error for side in state.sides.values() if side.lanes.error), "")
    if failed:
        return f"The run ends here: {failed}"[:140]
    if not state.num_steps:
        waiting = len(next(iter(state.sides.values())).waiting)
        come = "1 request is" if waiting == 1 else f"{waiting} requests are"
        return f"{come} there, and {state.seats} seats. Each step brings one token to whoever sits."
    if len(state.sides) == 1:
        [side] = state.sides.values()
        return f"Step {state.num_steps}: {_clause('', side, state.seats)}; {len(side.waiting)} wait."[:140]
    if all(side.is_done for side in state.sides.values()):
        static, other = (state.sides[name] for name in ("static", "continuous"))
        idle = [side.num_cells(state.seats) - side.busy for side in (static, other)]
        return (f"All done: static in {static.num_steps} steps, continuous in {other.num_steps}; idle cells: "
                f"{idle[0]} and {idle[1]}.")  # fmt: skip
    said = {name: _clause(name, side, state.seats) for name, side in state.now.items()}
    if len(said) == 2 and len(set(said.values())) == 1:
        return f"Step {state.num_steps}, both: {said['static']}."[:140]
    done = "".join(f" {name.capitalize()} is done since step {side.num_steps}."
                   for name, side in state.sides.items() if name not in said)  # fmt: skip
    sides = " ".join(f"{name.capitalize()}: {words}." for name, words in said.items())
    return f"Step {state.num_steps}. {sides}{done}"[:140]


def alt(state: Schedule) -> str:
    parts = []
    for name, side in state.sides.items():
        rows = [" ".join(column[seat][0] if seat < len(column) and column[seat][0] else "idle"
                         for column in side.columns) for seat in range(state.num_rows)]  # fmt: skip
        seats = "; ".join(f"seat {i}: {row}" for i, row in enumerate(rows, 1)) if side.columns else "nothing yet"
        parts.append(f"{name or 'run'}, {side.num_steps} steps. {seats}. Waiting: {listed(side.waiting) or 'nobody'}.")
    return "Schedule. " + " ".join(parts)
