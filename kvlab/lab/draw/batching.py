"""Who sits where and when, drawn (lab 07): matplotlib axes in, marks out.

    seat_chart     a row a seat, time to the right: busy with a letter, idle hatched
    state_machine  what happened to requests, as arrows with counts
    over_time      how many run and how many wait, second by second

Requests have a letter, a hue and a place; idle is a hatch, so that a grey copy says as much.
"""

from collections.abc import Mapping, Sequence
from typing import Any

HUES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#F0E442", "#D55E00")  # Okabe and Ito
DARK = ("#0072B2",)  # white letters on it
INK, GREY = "#222222", "#8A8A8A"
Turn = tuple[int, int, int]  # seat, start, end


def letter(number: int) -> str:
    """A, B, ... Z, A1, B1, ..."""
    return chr(65 + number % 26) + (str(number // 26) if number >= 26 else "")


def seat_chart(ax: Any, turns: Sequence[Turn], num_seats: int, *, until: int | None = None, step: int | None = None,
               width: int | None = None, title: str = "", show_waiting: bool = False) -> None:  # fmt: skip
    """Draw a schedule. turns[i]: (seat, start, end) of request i. until: idle time is drawn up to it (the last end).

    step: only what has happened before this step, with a line there. width: steps on the axis. show_waiting: name those
    who have not begun, to the right.
    """
    from matplotlib.patches import Rectangle

    until = max((end for *_, end in turns), default=0) if until is None else until
    shown = until if step is None else min(step, until)
    width = width or until
    for seat in range(num_seats if shown else 0):
        ax.add_patch(Rectangle((0, seat + 0.1), shown, 0.8, facecolor="white", hatch="///", edgecolor=GREY, lw=0.8))
    for number, (seat, start, end) in enumerate(turns):
        stop = min(end, shown)
        if stop <= start:
            continue
        hue = HUES[number % len(HUES)]
        ax.add_patch(Rectangle((start, seat + 0.1), stop - start, 0.8, facecolor=hue, edgecolor=INK, lw=1))
        if stop - start >= width / 60 * len(letter(number)):
            ax.text((start + stop) / 2, seat + 0.5, letter(number), ha="center", va="center", fontsize=11,
                    color="white" if hue in DARK else "black")  # fmt: skip
        if end <= shown:
            ax.plot([end, end], [seat + 0.1, seat + 0.9], color=INK, lw=3, solid_capstyle="butt")
    if step is not None:
        ax.axvline(step, color=INK, lw=1.5, linestyle=":")
    if show_waiting:
        waits = [letter(number) for number, (_, start, _) in enumerate(turns) if start >= shown]
        text = " ".join(waits) if waits else "nobody"
        ax.text(1.01, 0.5, f"waiting:\n{_wrapped(text)}", transform=ax.transAxes, va="center", fontsize=10)
    ax.set(xlim=(0, width * 1.005), ylim=(num_seats, 0))
    ax.set_yticks([seat + 0.5 for seat in range(num_seats)], [f"seat {seat}" for seat in range(num_seats)], fontsize=10)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    if title:
        ax.set_title(title, loc="left", fontsize=11)


def _wrapped(text: str, per_line: int = 8) -> str:
    words = text.split()
    return "\n".join(" ".join(words[i : i + per_line]) for i in range(0, len(words), per_line))


PLACES = {"waiting": (0, 1), "running": (1.5, 1), "preempted": (0.75, 0), "swapped": (2.25, 0),
          "stop": (3.6, 1.45), "length": (3.6, 1.0), "abort": (3.6, 0.3), "error": (3.6, -0.15)}  # fmt: skip
LIVE = ("waiting", "running", "preempted", "swapped")
BENDS = {("recompute", "running"): -0.3, ("schedule", "preempted"): -0.3, ("swap", "running"): 0.3,
         ("schedule", "swapped"): 0.3}  # fmt: skip
WIDE, HIGH = 0.3, 0.15  # half of a box


def state_machine(ax: Any, counts: Mapping[tuple[str, str, str], int]) -> None:
    """Draw what happened. counts: (status, event, next status) -> how often; thicker arrows happened more often.

    An abort or an error may come in any of the four live states, so one arrow leaves the frame around them.
    """
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    def box(x: float, y: float, wide: float, high: float, **look: Any) -> None:
        shape = "round,pad=0.02"
        ax.add_patch(FancyBboxPatch((x - wide, y - high), 2 * wide, 2 * high, boxstyle=shape, edgecolor=INK, **look))

    def arrow(start: tuple[float, float], stop: tuple[float, float], count: int, text: str, bend: float = 0.0) -> None:
        ax.add_patch(FancyArrowPatch(start, stop, connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", color=INK,
                                     mutation_scale=14, lw=1 + min(4, count / 8), shrinkA=0, shrinkB=0))  # fmt: skip
        x, y = (start[0] + stop[0]) / 2, (start[1] + stop[1]) / 2
        x, y = x + bend * (stop[1] - start[1]) / 2, y - bend * (stop[0] - start[0]) / 2
        ax.text(x, y, text, ha="center", va="center", fontsize=10, zorder=5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip

    box(1.125, 0.5, 1.6, 0.82, facecolor="none", lw=1, linestyle="--")
    for name, (x, y) in PLACES.items():
        live = name in LIVE
        box(x, y, WIDE, HIGH, facecolor="white" if live else "#F2F2F2", lw=2 if live else 1, zorder=3)
        ax.text(x, y, name, ha="center", va="center", fontsize=11, zorder=4)
    for end in ("abort", "error"):
        came = {before: count for (before, event, _), count in counts.items() if event == end}
        if came:
            y = PLACES[end][1]
            arrow((2.745, y), (PLACES[end][0] - WIDE - 0.03, y), sum(came.values()), f"{end} {sum(came.values())}")
    for (before, event, after), count in counts.items():
        if event not in ("abort", "error"):
            (x, y), (to_x, to_y) = PLACES[before], PLACES[after]
            bend = BENDS.get((event, before), 0)
            arrow(_edge(x, y, to_x, to_y), _edge(to_x, to_y, x, y), count, f"{event} {count}", bend)
    ax.set(xlim=(-0.6, 4.0), ylim=(-0.45, 1.75))
    ax.axis("off")


def _edge(x: float, y: float, to_x: float, to_y: float) -> tuple[float, float]:
    """Where the line from the middle of a box to another point leaves the box, and a little more."""
    dx, dy = to_x - x, to_y - y
    scale = min((WIDE + 0.03) / abs(dx) if dx else 9, (HIGH + 0.03) / abs(dy) if dy else 9)
    return x + dx * scale, y + dy * scale


def over_time(ax: Any, columns: Mapping[str, Sequence[int]], title: str = "", top: int | None = None) -> None:
    """Draw how many run (filled) and wait (line) over seconds. columns: a SimResult's step_columns."""
    seconds = [start / 1e9 for start in columns["start_ns"]]
    end = (columns["start_ns"][-1] + columns["duration_ns"][-1]) / 1e9
    seconds, running = [*seconds, end], [*columns["num_running"], 0]
    waiting = [*columns["num_waiting"], 0]
    ax.fill_between(seconds, running, step="post", facecolor="#56B4E9", edgecolor=INK, lw=0.6, label="running")
    ax.step(seconds, waiting, where="post", color="#D55E00", lw=2, linestyle="--", label="waiting")
    ax.set(xlim=(0, None), ylim=(0, top))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    ax.set_title(title, loc="left", fontsize=11)
