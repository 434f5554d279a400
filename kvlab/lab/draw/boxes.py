"""What several cells of a lab draw. One look for all labs; matplotlib is imported when it is used.

    box_rows     labelled rows of boxes: tokens, keys, block tables, queues
    pool_grid    every block of a pool at one moment        pool_areas    how many blocks are what, over time

    hit     blue, solid     somebody else has computed it        new     white         computed now
    cached  orange, hatched nobody owns it, still findable       dead    grey, crossed  holds what nobody can reach
"""

from collections.abc import Sequence
from typing import Any

BLUE, VERMILLION, SKY = "#0072B2", "#D55E00", "#56B4E9"  # Okabe and Ito
KINDS = {  # fill, hatch, text
    "hit": (SKY, "", "black"),
    "new": ("white", "", "black"),
    "cached": ("#F7DDA4", "///", "black"),
    "dead": ("#D0D0D0", "xx", "black"),
    "owned": (BLUE, "", "white"),
    "empty": ("white", "", "black"),
}
Box = tuple[str, str]  # text, kind
Row = tuple[str, Sequence[Box | None]]  # label, boxes; None leaves a gap


def box_rows(rows: Sequence[Row], title: str = "", width: float = 0.8, notes: Sequence[str] = (),
             alt: str = "") -> None:  # fmt: skip
    """Show a figure of labelled rows of boxes; notes[i] stands to the right of row i. Boxes are `width` inches wide.

    alt: to be read in its place.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    longest = max(sum(1 if box else 0.25 for box in boxes) for _, boxes in rows)
    left = 0.13 * max(len(label) for label, _ in rows) / width
    right = 0.115 * max((len(note) for note in notes), default=0) / width
    size = (left + longest + right + 0.3) * width, 0.52 * len(rows) + (0.4 if title else 0)
    figure, ax = plt.subplots(figsize=size)
    for y, (label, boxes) in enumerate(rows):
        ax.text(-0.15, y + 0.5, label, ha="right", va="center", fontsize=11)
        x = 0.0
        for box in boxes:
            if box is None:
                x += 0.25
                continue
            text, kind = box
            fill, hatch, ink = KINDS[kind]
            dashes = "dashed" if kind == "empty" else "solid"
            ax.add_patch(Rectangle((x, y + 0.08), 1, 0.84, facecolor=fill, hatch=hatch, edgecolor="black", lw=1.1,
                                   linestyle=dashes))  # fmt: skip
            pad = {"facecolor": fill, "edgecolor": "none", "pad": 1.5} if hatch else None
            ax.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=11, color=ink, bbox=pad)
            x += 1
        if notes and notes[y]:
            ax.text(x + 0.15, y + 0.5, notes[y], ha="left", va="center", fontsize=11)
    ax.set(xlim=(-left - 0.15, longest + right + 0.15), ylim=(len(rows), 0))
    ax.axis("off")
    if title:
        ax.set_title(title, loc="left", fontsize=12)
    if alt:
        from kvlab.lab.show import picture

        figure.tight_layout()
        picture(figure, alt)
    else:
        plt.show()


STATES = {"o": (BLUE, ""), "l": ("#D0D0D0", "xx"), "c": ("#F7DDA4", "///"), "e": ("white", "")}


def pool_grid(ax: Any, frame: str, columns: int = 20) -> None:
    """Draw each block of a pool. frame: a letter a block, "o" owned, "l" locked, "c" cached, "e" empty."""
    from matplotlib.patches import Rectangle

    for i, letter in enumerate(frame):
        fill, hatch = STATES[letter]
        place = i % columns, i // columns
        ax.add_patch(Rectangle(place, 0.9, 0.9, facecolor=fill, hatch=hatch, edgecolor="black", lw=0.6))
    ax.set(xlim=(-0.2, columns + 0.1), ylim=(-(-len(frame) // columns) + 0.1, -0.2), aspect="equal")
    ax.axis("off")


def pool_areas(ax: Any, frames: Sequence[str]) -> None:
    """Draw how many blocks are in each state after each step; frames[i] is a pool_grid frame after step i."""
    counts = [[frame.count(letter) for frame in frames] for letter in STATES]
    colours = [fill for fill, _ in STATES.values()]
    areas = ax.stackplot(range(len(frames)), counts, colors=colours, edgecolor="black", linewidth=0.4, step="post")
    for area, (_, hatch) in zip(areas, STATES.values(), strict=True):
        area.set_hatch(hatch)
    ax.set(xlim=(0, len(frames) - 1), ylim=(0, len(frames[0])), xlabel="engine step")
