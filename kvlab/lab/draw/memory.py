"""Drawing that several cells of a lab share: matplotlib axes in, marks out. Colours are Okabe-Ito's, and every kind of
mark differs in its pattern too, so that a greyscale print can be read.

    memory(ax, spans, capacity, per_row)     who holds which slots (lab 02)
    waste_areas(ax, moments)                 the five kinds of slots over time (lab 02)
    waste_bars(ax, {name: shares})           the same, averaged, one bar a scheme (lab 02)
    table(heads, rows), ledger(heads, verdicts, rows)     a small table, and one of what a text says
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.arena import Moment, Span

OWNERS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00", "#8DA0CB")
KINDS = {  # kind of slot -> (face, hatch, what it says)
    "used": ("#0072B2", "", "holds a token"),
    "reservation": ("#56B4E9", "..", "reservation"),
    "internal": ("#E69F00", "//", "internal"),
    "external": ("#D55E00", "xx", "external"),
    "placeable": ("#FFFFFF", "", "free"),
}
INK, PALE = "#222222", "#BBBBBB"


def memory(ax: Any, spans: Sequence[Span], capacity: int, per_row: int, title: str = "") -> None:
    """The slots of an arena, `per_row` to a row. Solid: holds a token. Dots: will. Strokes: never will. White: free."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Rectangle

    rows = -(-capacity // per_row)
    for row in range(rows):
        width = min(per_row, capacity - row * per_row)
        ax.add_patch(Rectangle((0, row), width, 0.8, facecolor="white", edgecolor=PALE, linewidth=1, linestyle="--"))
    for span in spans:
        face = OWNERS[_number(span.owner) % len(OWNERS)]
        parts = (
            (0, span.used, {"facecolor": face}),
            (span.used, span.final, {"facecolor": to_rgba(face, 0.25), "edgecolor": "#666666", "hatch": "..."}),
            (span.final, span.size, {"facecolor": "white", "edgecolor": PALE, "hatch": "//"}),
        )
        for begin, end, style in parts:
            for row, x, width in _cut(span.start + begin, span.start + end, per_row):
                ax.add_patch(Rectangle((x, row), width, 0.8, linewidth=0, **style))
        pieces = _cut(span.start, span.start + span.size, per_row)
        for row, x, width in pieces:
            ax.add_patch(Rectangle((x, row), width, 0.8, fill=False, edgecolor=INK, linewidth=1))
        row, x, width = pieces[0]
        wide = width > per_row / 8
        bare = span.used <= (per_row / 30 if wide else span.size / 2)  # the letter would lie on dots or strokes
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1} if bare else None
        ax.text(x + (per_row / 100 if wide else width / 2), row + 0.4, str(span.owner).removeprefix("r"), color=INK,
                ha="left" if wide else "center", va="center", fontsize=9 + wide, fontweight="bold",
                bbox=box)  # fmt: skip
    ax.set(xlim=(-per_row / 200, per_row * 1.005), ylim=(rows - 0.1, -0.1), xlabel="slot within the row")
    ax.set_yticks([row + 0.4 for row in range(rows)], [f"from {row * per_row}" for row in range(rows)])
    ax.set_xticks([per_row * i // 4 for i in range(5)])
    ax.tick_params(left=False)
    for side in ("top", "right", "left", "bottom"):
        ax.spines[side].set_visible(False)
    ax.set_title(title, loc="left", fontsize=11)


def waste_areas(ax: Any, moments: Sequence[Moment], title: str = "") -> None:
    """Percent of the arena's slots over the steps, one band for each kind of slot, labelled where it is thickest."""
    steps = [moment.step for moment in moments]
    shares = {kind: [100 * getattr(m.waste, kind) / m.waste.capacity for m in moments] for kind in KINDS}
    lower = [0.0] * len(moments)
    for kind, (face, hatch, words) in KINDS.items():
        upper = [a + b for a, b in zip(lower, shares[kind], strict=True)]
        ax.fill_between(steps, lower, upper, facecolor=face, hatch=hatch, edgecolor=INK, linewidth=0.3, step="post")
        inner = range(len(steps) // 5, max(len(steps) * 4 // 5, 1))
        at = max(inner, key=lambda i, s=shares[kind]: min(s[max(i - 9, 0) : i + 9]))
        if shares[kind][at] > 12:
            ax.text(steps[at], (lower[at] + upper[at]) / 2, words, ha="center", va="center", fontsize=9, color=INK,
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5})  # fmt: skip
        lower = upper
    ax.set(xlim=(steps[0], steps[-1]), ylim=(0, 100), xlabel="step", ylabel="% of all slots")
    ax.set_title(title, loc="left", fontsize=11)


def waste_bars(ax: Any, schemes: Mapping[str, Mapping[str, float]]) -> None:
    """One bar for each scheme: kind of slot -> share of all slots, 0 to 1.

    A part too small for its words has them above the bar, a second such part below; under half a percent it has none.
    """
    white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 1.5}
    for row, shares in enumerate(schemes.values()):
        left, outside = 0.0, 0
        for kind, (face, hatch, words) in KINDS.items():
            width = 100 * shares[kind]
            ax.barh(row, width, left=left, color=face, hatch=hatch, edgecolor=INK, linewidth=0.6, height=0.5)
            middle = left + width / 2
            if width > 11:
                text = f"{words}\n{width:.0f}%"
                ax.text(middle, row, text, ha="center", va="center", fontsize=9, color=INK, bbox=white)
            elif width >= 0.5:
                y, va = (row - 0.28, "bottom") if outside % 2 == 0 else (row + 0.28, "top")
                side = "left" if middle < 8 else "right" if middle > 92 else "center"
                x = {"left": left, "right": left + width, "center": middle}[side]
                ax.text(x, y, f"{words} {width:.0f}%", ha=side, va=va, fontsize=9, color=INK)
                outside += 1
            left += width
    ax.set_yticks(range(len(schemes)), list(schemes))
    ax.set(xlim=(0, 100), ylim=(len(schemes) - 0.4, -0.6), xlabel="% of all slots, mean over time")
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(left=False)


def _number(owner: object) -> int:
    """A number that stands for the owner's hue: r17 is 17, B is 66."""
    digits = "".join(c for c in str(owner) if c.isdigit())
    return int(digits) if digits else sum(map(ord, str(owner)))


def _cut(start: int, end: int, per_row: int) -> list[tuple[int, int, int]]:
    """(row, x, width) of each piece of the slots start .. end - 1."""
    pieces = []
    while start < end:
        row, x = divmod(start, per_row)
        width = min(end - start, per_row - x)
        pieces.append((row, x, width))
        start += width
    return pieces
