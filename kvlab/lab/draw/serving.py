"""A server drawn (lab 14): axes in, marks out.

    squares      every block of a pool at one moment, with the letter of its request
    breath       blocks held, cached and free over time
    crowd        requests that run and that wait, over time
    lanes        a bar for each client: waiting for its first token, reading, leaving
    saturation   tokens a second and seconds a request over the number of clients

What a mark means is told by letter, hatch and outline; colour only helps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

BLUE, SKY, RED, ORANGE, GREY, INK = "#0072B2", "#56B4E9", "#D55E00", "#F7DDA4", "#D0D0D0", "#222222"
OWNERS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#D55E00")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def squares(ax: Any, owners: Sequence[str], letters: Mapping[str, str], columns: int = 16) -> None:
    """owners: of each block a request's id, "shared", "cached" or "". letters: request id -> letter."""
    from matplotlib.patches import Rectangle

    for i, owner in enumerate(owners):
        x, y = i % columns, i // columns
        letter = "2+" if owner == "shared" else letters.get(owner, "?") if owner not in ("", "cached") else ""
        own = OWNERS[LETTERS.find(letter) % len(OWNERS)]
        fill = {"shared": GREY, "cached": ORANGE, "": "white"}.get(owner, own)
        hatch, line = "///" if owner == "cached" else None, "-" if owner else ":"
        ax.add_patch(Rectangle((x, y), 0.88, 0.88, facecolor=fill, edgecolor=INK, lw=1.6 if letter else 0.7,
                               hatch=hatch, linestyle=line))  # fmt: skip
        ax.text(x + 0.44, y + 0.46, letter, ha="center", va="center", fontsize=9, weight="bold")
    ax.set(xlim=(-0.2, columns + 0.1), ylim=(-(-len(owners) // columns) + 0.1, -0.2), aspect="equal")
    ax.axis("off")


def breath(ax: Any, moments: Sequence[Any]) -> None:
    """moments: with time, held, cached and free."""
    from matplotlib.patches import Patch

    looks = (("held", BLUE, None), ("cached", ORANGE, "///"), ("free", "white", None))
    areas = ax.stackplot([m.time for m in moments], *([getattr(m, name) for m in moments] for name, _, _ in looks),
                         colors=[fill for _, fill, _ in looks], edgecolor=INK, linewidth=0.5, step="post")  # fmt: skip
    for area, (_, _, hatch) in zip(areas, looks, strict=True):
        area.set_hatch(hatch)
    total = moments[0].held + moments[0].cached + moments[0].free
    ax.set(xlim=(moments[0].time, max(moments[-1].time, moments[0].time + 0.1)), ylim=(0, total), ylabel="blocks")
    patches = [Patch(facecolor=fill, hatch=hatch, edgecolor=INK, label=name) for name, fill, hatch in looks]
    ax.legend(handles=patches[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def crowd(ax: Any, moments: Sequence[Any], seats: int | None = None) -> None:
    """moments: with time, running and waiting. seats: a line to compare with."""
    times = [m.time for m in moments]
    ax.step(times, [m.running for m in moments], where="post", color=BLUE, lw=2, label="running")
    ax.step(times, [m.waiting for m in moments], where="post", color=RED, lw=1.6, ls="--", label="waiting")
    if seats is not None:
        ax.axhline(seats, color=INK, lw=1, ls=":", label=f"{seats} seats")
    ax.set(xlim=(times[0], max(times[-1], times[0] + 0.1)), ylim=(0, None), ylabel="requests", xlabel="seconds")
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    _open(ax)


def lanes(ax: Any, visits: Sequence[Any]) -> None:
    """visits: with arrival, first, last, left; a lane each, in their order."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for y, visit in enumerate(visits):
        first = visit.last if visit.first is None else visit.first
        ax.barh(y, first - visit.arrival, left=visit.arrival, height=0.8, facecolor="white", edgecolor=INK,
                hatch="....", lw=0.6)  # fmt: skip
        ax.barh(y, visit.last - first, left=first, height=0.8, facecolor=SKY, edgecolor=INK, lw=0.6)
        if visit.left:
            ax.plot(visit.last, y, marker="x", color=RED, markersize=7, markeredgewidth=2)
    ax.legend(handles=[Patch(facecolor="white", edgecolor=INK, hatch="....", label="no token yet"),
                       Patch(facecolor=SKY, edgecolor=INK, label="reading"),
                       Line2D([], [], color=RED, marker="x", ls="", markeredgewidth=2, label="hung up")],
              loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)  # fmt: skip
    ax.set(ylim=(len(visits) - 0.4, -0.6), yticks=[], ylabel="clients", xlim=(0, None))
    _open(ax)


def saturation(axes: Sequence[Any], rows: Sequence[tuple[int, float, float]], seats: int) -> None:
    """axes: two. rows: (clients, tokens a second, mean seconds a request)."""
    places = range(len(rows))
    for ax, column, label in ((axes[0], 1, "tokens a second"), (axes[1], 2, "seconds a request")):
        values = [row[column] for row in rows]
        for place, (num_clients, *_), value in zip(places, rows, values, strict=True):
            fits = num_clients <= seats
            ax.bar(place, value, 0.7, facecolor=SKY if fits else ORANGE, hatch=None if fits else "///", edgecolor=INK)
            ax.text(place, value, f"{value:,.0f}" if column == 1 else f"{value:.2f}", ha="center", va="bottom")
        ax.set_xticks(places, [str(row[0]) for row in rows])
        ax.set(xlabel=f"clients (hatched: more than the {seats} seats)", ylabel=label, ylim=(0, 1.15 * max(values)))
        _open(ax)


def _open(ax: Any) -> None:
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
