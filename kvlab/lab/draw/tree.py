"""A radix tree drawn as what it is, runs of blocks that part (lab 06): matplotlib axes in, marks out.

    0        2        4        6        8   token position
    [you are |a tutor ]--.                  a thick frame is an edge, a thin line parts its blocks
                         |[what is |a page]
                         '[who made|this  ]
"""

from collections.abc import Callable, Collection
from typing import Any

from kvlab.prefix.outline import outline

SKY, ORANGE, INK, PALE = "#56B4E9", "#F7DDA4", "#222222", "#F2F2F2"
INSET = 0.07  # of a block, left free at both ends of an edge


def draw_tree(ax: Any, root: Any, block_size: int, *, told: Callable[[tuple], str] | None = None,
              hits: Collection[int] = (), new: Collection[int] = (), title: str = "", width: int | None = None,
              height: int | None = None) -> None:  # fmt: skip
    """Draw all below `root` (nodes with chunks, blocks, children; None: an empty tree). Returns nothing.

    hits, new: ids of blocks in blue, and in hatched orange. told: what to write for a block's tokens. width, height: in
    blocks and rows, so that several pictures have one scale.
    """
    from matplotlib.patches import Rectangle

    told = told or (lambda chunk: " ".join(map(str, chunk)))
    edges = outline(root)
    num_rows = 1 + max((row for *_, row in edges), default=0)
    for node, depth, row in edges:
        end = depth + len(node.chunks)
        below = [r for other, _, r in edges if other.parent is node]
        if below:
            ax.plot([end, end], [row + 0.5, max(below) + 0.5], color=INK, linewidth=2, zorder=1)
            for r in {row, *below}:
                ax.plot([end - (r == row) * INSET, end + (r in below) * INSET], [r + 0.5] * 2, color=INK, linewidth=2)
        for i, (chunk, block) in enumerate(zip(node.chunks, node.blocks, strict=True)):
            id_ = None if block is None else block.block_id
            fill, hatch = (SKY, "") if id_ in hits else (ORANGE, "///") if id_ in new else (PALE, "")
            if block is None:
                fill, hatch = "white", "xx"
            x, x_end = max(depth + INSET, depth + i), min(end - INSET, depth + i + 1)
            ax.add_patch(Rectangle((x, row + 0.12), x_end - x, 0.76, facecolor=fill, hatch=hatch, edgecolor="#AAAAAA",
                                   linewidth=1, zorder=2))  # fmt: skip
            under = {"facecolor": fill, "edgecolor": "none", "pad": 1.2}
            ax.text(depth + i + 0.5, row + 0.4, told(chunk), ha="center", va="center", fontsize=9, color=INK, zorder=4,
                    bbox=under)  # fmt: skip
            ax.text(depth + i + 0.5, row + 0.71, "gap" if block is None else f"block {id_}", ha="center", va="center",
                    fontsize=8, color="#333333", zorder=4, bbox=under)  # fmt: skip
        ax.add_patch(Rectangle((depth + INSET, row + 0.12), len(node.chunks) - 2 * INSET, 0.76, fill=False,
                               edgecolor=INK, linewidth=2, zorder=3))  # fmt: skip
    columns = width or max((depth + len(node.chunks) for node, depth, _ in edges), default=1)
    ax.set(xlim=(-0.05, columns + 0.05), ylim=((height or num_rows) + 0.05, 0))
    ax.set_xticks(range(columns + 1), [str(i * block_size) for i in range(columns + 1)], fontsize=8)
    ax.set_yticks([])
    for side in ("left", "right", "top"):
        ax.spines[side].set_visible(False)
    ax.set_title(title, loc="left", fontsize=10)
