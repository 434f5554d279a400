"""Block tables drawn so that sharing can be seen (lab 04): matplotlib axes in, marks out.

    rows: sequences.  columns: token positions.  A block that k tables name is drawn once, k rows high, and says xk.

         0  1  2  3    4  5  6  7    8  9
    A  [           | a b c d, x2 ] [ new ]        so the number of boxes is the number of blocks held
    B  [ x3: 0-3   |             ] [     ]
    C  [           ] [ e f g     ]

picture(figure, alt) shows a figure with words for those who cannot see it; sliders(draw, ...) redraws one as sliders
move. Colours are Okabe-Ito's; shared, private, published and new
differ in outline and pattern too, so that a greyscale print can be read.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

HUES = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#F0E442", "#D55E00")
INK, SHARED = "#222222", "#E8E8E8"


def draw_tables(ax: Any, tables: Mapping[str, Sequence[int]], words: Mapping[str, Sequence[str]], block_size: int, *,
                new: Collection[int] = (), published: Collection[int] = (), title: str = "",
                width: int | None = None, height: int | None = None) -> None:  # fmt: skip
    """Draw `tables`, block ids by name of the sequence, with the words that each sequence reads back.

    new: blocks with a thick outline. published: blocks with strokes. width, height: columns and rows to show, so that
    several pictures have one scale.
    """
    from matplotlib.patches import Rectangle

    names = _as_tree(tables)
    columns = width or max([block_size, *(len(table) * block_size for table in tables.values())])
    hue = {name: HUES[i % len(HUES)] for i, name in enumerate(tables)}
    for index in range(max(map(len, tables.values()), default=0)):
        row = 0
        while row < len(names):
            block = tables[names[row]][index] if index < len(tables[names[row]]) else None
            end = row + 1
            while end < len(names) and block is not None and tables[names[end]][index : index + 1] == [block]:
                end += 1
            if block is not None:
                x, y, high = index * block_size, row + 0.06, end - row - 0.12
                count = end - row
                face = SHARED if count > 1 else hue[names[row]]
                ax.add_patch(Rectangle((x + 0.06, y), block_size - 0.12, high, facecolor=face, edgecolor=INK,
                                       linewidth=2.6 if block in new else 1,
                                       alpha=1 if count > 1 else 0.75))  # fmt: skip
                if block in published:
                    ax.add_patch(Rectangle((x + 0.06, y), block_size - 0.12, high, fill=False, hatch="//",
                                           edgecolor="#999999", linewidth=0))  # fmt: skip
                label = f"block {block}" + (f"  ×{count}" if count > 1 else "") + ("  new" if block in new else "")
                ax.text(x + 0.2, y + 0.06, label, fontsize=8, va="top", color=INK, fontweight="bold")
                for offset in range(block_size):
                    _words(ax, x + offset, names[row:end], words, y, high)
            row = end
    for row, name in enumerate(names):
        ax.text(-0.25, row + 0.5, name, ha="right", va="center", fontsize=11, fontweight="bold", color=INK)
    ax.set(xlim=(-0.1, columns + 0.1), ylim=((height or max(1, len(names))) + 0.02, -0.02))
    ax.set_xticks([i + 0.5 for i in range(columns)], list(map(str, range(columns))), fontsize=8)
    ax.set_yticks([])
    ax.tick_params(bottom=False)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(title, loc="left", fontsize=10)


def _words(ax: Any, position: int, rows: Sequence[str], words: Mapping[str, Sequence[str]], y: float,
           high: float) -> None:  # fmt: skip
    """What the sequences of one box read at `position`: once if it is the same for all who read so far."""
    read = {words[name][position] for name in rows if position < len(words[name])}
    if read:
        ax.text(position + 0.5, y + high * 0.5 + 0.14, "/".join(sorted(read)), ha="center", va="center", fontsize=9,
                color=INK)  # fmt: skip


def _as_tree(tables: Mapping[str, Sequence[int]]) -> list[str]:
    """The names, those that share a beginning next to each other."""
    def group(names: list[str], depth: int) -> list[str]:
        if len(names) < 2:
            return names
        by_block: dict[int | None, list[str]] = {}  # None: tables that end here
        for name in names:
            by_block.setdefault(tables[name][depth] if depth < len(tables[name]) else None, []).append(name)
        parts = [part if block is None else group(part, depth + 1) for block, part in by_block.items()]
        return [name for part in parts for name in part]

    return group(list(tables), 0)
