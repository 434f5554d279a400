"""Steps under a token budget, drawn (lab 08): matplotlib axes in, marks out.

    grid        a timetable: a row a request, a column a step, in each box the tokens
    bars        steps as wide as they last and as high as they have tokens
    lanes       a dot for each token of a reader, the longest gap marked
    triangle    the query-key pairs of a prompt, cut into chunks
    trade       waiting for the first token against the gaps of readers, over budgets

    decode  blue, solid      chunk  orange, hatched      waiting  white, dotted edge      token comes out  black dot
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

BLUE, SKY, ORANGE, RED, GREEN, INK = "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#222222"  # Okabe and Ito
CHUNK, DECODE = {"facecolor": "#F7DDA4", "hatch": "///"}, {"facecolor": SKY, "hatch": ""}


def grid(ax: Any, rows: Sequence[Sequence[int]], came: Sequence[Sequence[int]],
         requests: Sequence[tuple[int, int, int]], budget: int, names: str = "ABCDEFGH",
         title: str = "") -> None:  # fmt: skip
    """A timetable. rows, came: as from kvlab.schedule.timetable; under each step its tokens, `budget` at most."""
    from matplotlib.patches import Rectangle

    for y, (arrival, prompt, _) in enumerate(requests):
        ends, computed = came[y][-1] if came[y] else len(rows) - 1, 0
        for x, row in enumerate(rows):
            tokens, look = row[y], {"facecolor": "white", "linestyle": ":"}
            if tokens:
                look = DECODE if computed >= prompt else CHUNK
            elif not arrival <= x <= ends:
                continue
            computed += tokens
            ax.add_patch(Rectangle((x + 0.06, y + 0.1), 0.88, 0.8, edgecolor=INK, linewidth=1, **look))
            if tokens or computed:
                pad = {"facecolor": look["facecolor"], "edgecolor": "none", "pad": 1}
                ax.text(x + 0.42, y + 0.5, str(tokens), ha="center", va="center", fontsize=11, bbox=pad)
            if x in came[y]:
                ax.plot(x + 0.82, y + 0.5, "o", color=INK, markersize=5)
    for x, row in enumerate(rows):
        ax.text(x + 0.5, len(requests) + 0.4, str(sum(row)), ha="center", va="center", fontsize=10,
                fontweight="bold" if sum(row) >= budget else "normal")  # fmt: skip
    ax.text(-0.2, len(requests) + 0.4, f"of {budget}", ha="right", va="center", fontsize=10)
    ax.set(xlim=(0, max(8, len(rows))), ylim=(len(requests) + 0.8, 0))
    ax.set_xticks([x + 0.5 for x in range(len(rows))], range(len(rows)), fontsize=10)
    ax.set_yticks([y + 0.5 for y in range(len(requests))], list(names[: len(requests)]), fontsize=11)
    _bare(ax)
    if title:
        ax.set_title(title, loc="left", fontsize=11)


def bars(ax: Any, steps: Sequence[Any], newcomer: str, origin: float, budget: int | None = None, top: float = 0,
         title: str = "") -> None:  # fmt: skip
    """Steps (start, end, tokens by id, ...) over the ms since `origin`; the newcomer's tokens upon the others'."""
    from matplotlib.patches import Rectangle

    for step in steps:
        x, width, bottom = step.start - origin, step.end - step.start, 0
        chunk = step.tokens.get(newcomer, 0)
        for height, look in ((sum(step.tokens.values()) - chunk, DECODE), (chunk, CHUNK if chunk > 1 else DECODE)):
            if height:
                ax.add_patch(Rectangle((x, bottom), width, height, edgecolor=INK, linewidth=0.6, **look))
                bottom += height
    highest = max(sum(step.tokens.values()) for step in steps)
    if budget is not None:
        ax.axhline(budget, color=INK, linewidth=2, linestyle="--")
    ax.set(xlim=(steps[0].start - origin, steps[-1].end - origin), ylim=(0, 1.1 * max(top, highest, budget or 0)))
    ax.set_ylabel("tokens in the step")
    ax.spines[["top", "right"]].set_visible(False)
    if title:
        ax.set_title(title, loc="left", fontsize=11)


def lanes(ax: Any, steps: Sequence[Any], names: Sequence[str], origin: float, newcomer: str = "") -> None:
    """A lane for each name, a dot when a token comes. Dashed the wait of `newcomer`, who arrived at `origin`, for its
    first token, and in red the longest gap of a reader that begins before it; in ms."""
    until = next((step.end - origin for step in steps if newcomer in step.sampled), steps[-1].end - origin)
    for y, name in enumerate(names):
        times = [step.end - origin for step in steps if name in step.sampled]
        gaps = [(b - a, a, b) for a, b in zip(times, times[1:], strict=False) if a < until]
        ax.plot([steps[0].start - origin, steps[-1].end - origin], [y, y], color="#BBBBBB", linewidth=1, zorder=1)
        ax.plot(times, [y] * len(times), "o", color=INK, markersize=3.5 if len(times) <= 80 else 1.5, zorder=3)
        if name == newcomer and times:
            start, end, colour, style = 0.0, times[0], BLUE, (0, (2, 1))
        elif gaps:
            _, start, end = max(gaps)
            colour, style = RED, "-"
        else:
            continue
        ax.plot([start, end], [y, y], color=colour, linewidth=4, linestyle=style, zorder=2)
        ax.text((start + end) / 2, y - 0.2, f"{end - start:,.0f} ms", ha="center", va="bottom", fontsize=10,
                color=colour)  # fmt: skip
    ax.set(xlim=(steps[0].start - origin, steps[-1].end - origin), ylim=(len(names) - 0.5, -0.9))
    ax.set_yticks(range(len(names)), names, fontsize=10)
    _bare(ax)


def triangle(ax: Any, sizes: Sequence[int], title: str = "", marks: Sequence[str] = ()) -> None:
    """Query-key pairs of a prompt computed in chunks of `sizes`: queries downwards, keys to the right. The bold lower
    edge of a chunk is what it reads.

    marks: a text for each chunk, to the right of it.
    """
    total, start = sum(sizes), 0
    for i, end in enumerate(accumulate(sizes)):
        look = {"facecolor": ("#F7DDA4", "#FBF0D6")[i % 2]}
        ax.fill([0, start, end, 0], [start, start, end, end], edgecolor=INK, linewidth=0.8, **look)
        ax.plot([0, end], [end, end], color=INK, linewidth=2.5, solid_capstyle="butt")
        if marks:
            ax.text(end + 0.02 * total, (start + end) / 2, marks[i], va="center", fontsize=10)
        start = end
    ax.set(xlim=(0, 1.02 * total), ylim=(total, 0), xlabel="keys", ylabel="queries", aspect="equal")
    ax.set_xticks([0, total], ["0", f"{total:,}"])
    ax.set_yticks([0, total], ["0", f"{total:,}"])
    ax.spines[["top", "right"]].set_visible(False)
    if title:
        ax.set_title(title, loc="left", fontsize=11)


def trade(ax: Any, lines: Mapping[str, Mapping[int, tuple[float, float]]], title: str = "") -> None:
    """lines: name -> {budget: (gap of a reader, wait for the first token)} in ms; both axes logarithmic.

    The points of the first line are labelled with their budgets; the other lines' budgets stand behind their names.
    """
    looks = ((BLUE, "o-"), (RED, "s--"), (GREEN, "D:"))
    for i, ((name, points), (colour, style)) in enumerate(zip(lines.items(), looks, strict=False)):
        xs, ys = zip(*points.values(), strict=True)
        label = f"{name}: {', '.join(f'{budget:,}' for budget in points)}" if i else name
        ax.plot(xs, ys, style, color=colour, markerfacecolor="white", linewidth=1.8, markersize=6, label=label)
        for budget, (x, y) in points.items() if i == 0 else ():
            ax.annotate(f"{budget:,}", (x, y), xytext=(4, 8), textcoords="offset points", fontsize=9, color=colour)
    ax.set(xscale="log", yscale="log")
    ax.spines[["top", "right"]].set_visible(False)
    if title:
        ax.set_title(title, loc="left", fontsize=11)


def plain_ticks(ax: Any, xs: Sequence[float] = (), ys: Sequence[float] = ()) -> None:
    """Whole numbers on logarithmic axes."""
    for axis, values in ((ax.xaxis, xs), (ax.yaxis, ys)):
        if len(values):
            axis.set_ticks(values, [f"{value:,}" for value in values])
            axis.set_minor_locator(_nothing())


def _nothing() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _bare(ax: Any) -> None:
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
