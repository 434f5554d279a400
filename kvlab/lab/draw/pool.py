"""Pictures of blocks, drawn from the structures themselves, for the labs. matplotlib is imported when one is drawn.

    shot = snapshot(pool, tables, "B ends")      what there is to see of a pool, as plain values
    draw_pool(ax, shot)                          one square a block: owner, owners' number, name; the queue beneath
    draw_queue, draw_address, draw_states        a linked queue; a token's way to its slot; a block's three states
    draw_layout(ax, numbers, title, per_load)    the first numbers of a block, and whose each is
    player(frames, draw)                         a slider over frames; without a live kernel, one line of text

Who owns a block is told by letter, what state it is in by outline and hatch; colour only helps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.watch.style import OWNERS

COLOURS = {letter: owner.hue for letter, owner in OWNERS.items()}  # the same in the live views
SHARED, FREE, INK = "#DDDDDD", "#FFFFFF", "#000000"


def snapshot(pool: Any, tables: Mapping[str, Sequence[Any]], caption: str) -> dict:
    """A pool at one moment. tables: request -> its blocks."""
    owners: dict[int, str] = {}
    for name, table in tables.items():
        for block in table:
            owners[block.block_id] = owners.get(block.block_id, "") + name
    return {
        "caption": caption,
        "blocks": [(b.block_id, owners.get(b.block_id, ""), b.ref_cnt, b.block_hash) for b in pool.blocks],
        "queue": [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
        "tables": {name: [b.block_id for b in table] for name, table in tables.items()},
    }


def draw_pool(ax: Any, shot: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> None:
    """Blocks as squares, the free queue in its order, the tables. A thick outline: changed since `before`."""
    old = {b[0]: b for b in before["blocks"]} if before else {}
    for i, (block_id, owners, ref_cnt, name) in enumerate(shot["blocks"]):
        changed = bool(old) and old[block_id] != (block_id, owners, ref_cnt, name)
        face = SHARED if len(owners) > 1 else COLOURS.get(owners, FREE)
        cached = not owners and name is not None
        _box(ax, i, 2.3, 0.86, face, hatch="///" if cached else None, width=3.2 if changed else 1.2,
             style="-" if owners or cached else ":")  # fmt: skip
        ax.text(i + 0.08, 3.08, block_id, fontsize=8, va="top", color="#444444",
                bbox=dict(facecolor="white", edgecolor="none", pad=0.6) if cached else None)  # fmt: skip
        word = "null" if block_id == 0 else owners or (f"“{name}”" if cached else "")
        ax.text(i + 0.43, 2.72, word, ha="center", va="center", fontsize=8 if len(word) > 2 else 14, weight="bold",
                bbox=dict(facecolor="white", edgecolor="none", pad=1.5) if cached else None)  # fmt: skip
        if ref_cnt > 1:
            ax.text(i + 0.8, 2.36, f"×{ref_cnt}", ha="right", fontsize=9, weight="bold")
    ax.text(0, 1.78, "free queue, head first:", fontsize=9, va="center")
    for i, block_id in enumerate(shot["queue"]):
        x = 2.55 + 0.72 * i
        _box(ax, x, 1.55, 0.48, FREE, hatch="///" if shot["blocks"][block_id][3] is not None else None)
        ax.text(x + 0.24, 1.79, block_id, ha="center", va="center", fontsize=9,
                bbox=dict(facecolor="white", edgecolor="none", pad=0.8))  # fmt: skip
        if i:
            ax.annotate("", (x - 0.02, 1.79), (x - 0.22, 1.79), arrowprops=dict(arrowstyle="->", lw=1))
    if not shot["queue"]:
        ax.text(2.55, 1.78, "empty", fontsize=9, va="center", style="italic")
    rows = "      ".join(f"{name}: {table}" for name, table in shot["tables"].items()) or "none"
    ax.text(0, 1.15, "tables:  " + rows, fontsize=9, va="center", family="monospace")
    ax.set_title(shot["caption"], loc="left", fontsize=10, weight="bold")
    _bare(ax, (-0.1, max(len(shot["blocks"]), 7)), (0.95, 3.3))


def draw_queue(ax: Any, block_ids: Sequence[int], caption: str = "", marked: int | None = None) -> None:
    """A doubly linked queue: sentinels at the ends, links both ways. marked: a block that something happens to."""
    labels = ["head", *map(str, block_ids), "tail"]
    for i, label in enumerate(labels):
        here = label == str(marked)
        _box(ax, i * 1.3, 0, 0.8, COLOURS["A"] if here else SHARED if label in ("head", "tail") else FREE,
             width=2.5 if here else 1.2)  # fmt: skip
        ax.text(i * 1.3 + 0.4, 0.4, label, ha="center", va="center", fontsize=10)
        if i:
            for y, ends in ((0.55, (-0.5, 0)), (0.25, (0, -0.5))):
                a, b = (i * 1.3 + e for e in ends)
                ax.annotate("", (b, y), (a, y), arrowprops=dict(arrowstyle="->", lw=1.2, shrinkA=0, shrinkB=0))
    ax.set_title(caption, loc="left", fontsize=10, weight="bold")
    _bare(ax, (-0.1, 1.3 * 7), (-0.1, 0.95))


def draw_address(ax: Any, block_ids: Sequence[int], num_tokens: int, block_size: int, position: int) -> None:
    """A token's way from its position through the block table to its slot: three rows and the path between them."""
    index, offset = divmod(position, block_size)
    blocks = sorted(block_ids)
    step = 1.0
    wide = max(len(block_ids), len(blocks)) * (block_size + 0.6) * step

    def cell_x(group: int, i: int) -> float:
        return group * (block_size + 0.6) * step + i * step

    for p in range(num_tokens):
        here = p == position
        x = cell_x(p // block_size, p % block_size)
        _box(ax, x, 4, 0.94, COLOURS["A"] if here else FREE, width=2.5 if here else 1)
        ax.text(x + 0.47, 4.47, p, ha="center", va="center", fontsize=10, weight="bold" if here else None)
    for i, block_id in enumerate(block_ids):
        here = i == index
        x = cell_x(i, 0) + (block_size - 1.6) / 2
        _box(ax, x, 2, 1.6, COLOURS["A"] if here else FREE, width=2.5 if here else 1, height=0.94)
        ax.text(x + 0.8, 2.47, block_id, ha="center", va="center", fontsize=11, weight="bold" if here else None)
        ax.text(x + 0.8, 3.12, f"logical {i}", ha="center", fontsize=8, color="#444444")
    for g, block_id in enumerate(blocks):
        for i in range(block_size):
            here = block_id == block_ids[index] and i == offset
            _box(ax, cell_x(g, i), 0, 0.94, COLOURS["A"] if here else FREE, width=2.5 if here else 1)
            ax.text(cell_x(g, i) + 0.47, 0.47, block_id * block_size + i, ha="center", va="center", fontsize=9,
                    weight="bold" if here else None)  # fmt: skip
        ax.text(cell_x(g, 0), -0.12, f"physical block {block_id}", fontsize=8, va="top", color="#444444")
    x0 = cell_x(index, offset) + 0.47
    x1 = cell_x(index, 0) + block_size / 2
    x2 = cell_x(blocks.index(block_ids[index]), offset) + 0.47
    arrow = dict(arrowstyle="->", lw=2, color="#0072B2")
    ax.annotate("", (x1, 3.45), (x0, 3.98), arrowprops=arrow)
    ax.annotate("", (x2, 1.0), (x1, 1.96), arrowprops=arrow)
    for y, label in ((4.47, "positions"), (2.47, "block table"), (0.47, "slots")):
        ax.text(-0.4, y, label, ha="right", va="center", fontsize=9)
    ax.set_title(f"position {position}:  {position} // {block_size} = {index},  {position} % {block_size} = {offset};  "
                 f"table[{index}] = {block_ids[index]};  slot {block_ids[index]} × {block_size} + {offset} = "
                 f"{block_ids[index] * block_size + offset}", loc="left", fontsize=10, weight="bold")  # fmt: skip
    _bare(ax, (-3, wide), (-0.6, 5.1))


def draw_states(ax: Any) -> None:
    """The three states of a block and the moves between them."""
    from matplotlib.patches import FancyBboxPatch

    facts = {"free": "ref_cnt 0\nin the queue\nno name", "owned": "ref_cnt 1 or more\nnot in the queue",
             "cached": "ref_cnt 0\nin the queue\nhas a name"}  # fmt: skip
    for x, (state, fact) in zip((0.1, 4, 7.9), facts.items(), strict=True):
        hatch, line = "///" if state == "cached" else None, ":" if state == "free" else "-"
        ax.add_patch(FancyBboxPatch((x, 1), 1.9, 1.5, boxstyle="round,pad=0.05", facecolor=FREE, edgecolor=INK,
                                    linewidth=1.6, hatch=hatch, linestyle=line))  # fmt: skip
        ground = dict(facecolor="white", edgecolor="none", pad=2)
        ax.text(x + 0.95, 2.2, state, ha="center", va="center", fontsize=12, weight="bold", bbox=ground)
        ax.text(x + 0.95, 1.5, fact, ha="center", va="center", fontsize=9, bbox=ground)
    moves = [  # from x, to x, y, text, above the arrow?
        (2.1, 3.9, 2.3, "get_new_blocks", True),
        (3.9, 2.1, 1.4, "free_blocks: the last\nowner goes, no name", False),
        (6.0, 7.8, 2.3, "free_blocks: the last\nowner goes, has a name", True),
        (7.8, 6.0, 1.75, "touch: a hit", True),
        (7.8, 6.0, 1.4, "get_new_blocks: its turn,\nthe name is taken away", False),
    ]
    for start, end, y, text, above in moves:
        ax.annotate("", (end, y), (start, y), arrowprops=dict(arrowstyle="->", lw=1.8, shrinkA=0, shrinkB=0))
        ax.text((start + end) / 2, y + (0.08 if above else -0.08), text, ha="center", va="bottom" if above else "top",
                fontsize=9)  # fmt: skip
    loop = dict(arrowstyle="->", lw=1.8, connectionstyle="arc3,rad=1.6")
    ax.annotate("", (5.2, 0.93), (4.7, 0.93), arrowprops=loop)
    ax.text(4.95, 0.3, "touch: one owner more;  free_blocks: one fewer", ha="center", va="center", fontsize=9)
    _bare(ax, (0, 9.9), (0.1, 2.9))


def draw_layout(ax: Any, numbers: Sequence[tuple[int, int]], title: str, per_load: int) -> None:
    """Numbers in the order of memory, each with its token; a thick frame is one load of `per_load` numbers.

    numbers: (token, head) of each. Beneath a frame stand the heads that it reads.
    """
    shades = ("#FFFFFF", "#E69F00", "#56B4E9", "#CC79A7")
    for i, (token, _) in enumerate(numbers):
        _box(ax, i, 0, 1, shades[token % len(shades)], width=0.6)
        ax.text(i + 0.5, 0.5, token, ha="center", va="center", fontsize=10)
    for start in range(0, len(numbers), per_load):
        load = numbers[start : start + per_load]
        _box(ax, start, 0, len(load), "none", width=2.6, height=1)
        heads = ", ".join(map(str, sorted({head for _, head in load})))
        ax.text(start + len(load) / 2, -0.12, f"head {heads}", ha="center", va="top", fontsize=9)
    ax.set_title(title, loc="left", fontsize=11)
    _bare(ax, (-0.2, len(numbers) + 0.2), (-0.75, 1.1))


def _box(ax: Any, x: float, y: float, size: float, face: str, hatch: str | None = None, width: float = 1.2,
         style: str = "-", height: float | None = None) -> None:  # fmt: skip
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), size, height or size, facecolor=face, edgecolor=INK, hatch=hatch, linewidth=width,
                           linestyle=style))  # fmt: skip


def _bare(ax: Any, xlim: tuple[float, float], ylim: tuple[float, float]) -> None:
    ax.set_xlim(*xlim)
    ax.set_ylim(*ylim)
    ax.axis("off")
