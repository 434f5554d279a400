"""Paged attention, drawn (lab 10).

    where       a token's way: page of the sequence, block table, physical block
    walk_frame  one query on its walk over tiles: scores, running maximum, weights, sum and result
    bytes_bars  what each rung asks the memory for     times   what that takes at least, beside the arithmetic
"""

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.lab.scenes.attention import Frame

BLUE, ORANGE, GREEN, RED, SKY, INK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#222222"  # Okabe and Ito
PAGES = ((SKY, ""), (ORANGE, "//"), (GREEN, ".."), ("#CC79A7", "xx"), ("#F0E442", "\\\\"), (BLUE, "--"))


def _box(ax: Any, x: float, y: float, text: str = "", fill: str = "white", hatch: str = "", width: float = 1,
         height: float = 1, bold: bool = False, dashed: bool = False) -> None:  # fmt: skip
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, hatch=hatch, edgecolor=INK, lw=2.6 if bold else 0.9,
                           linestyle="dashed" if dashed else "solid", zorder=3 if bold else 2))  # fmt: skip
    if text:
        plain = fill == "white" and not hatch
        plate = None if plain else {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=10, bbox=plate, zorder=4)


def where(block_table: Sequence[int], block_size: int, seq_len: int, position: int, num_blocks: int) -> Any:
    """A figure of one sequence: its tokens in order, its block table, and the pool. `position` is followed."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(9, 3.9), layout="constrained")
    step, scale = 1.0, num_blocks / (len(block_table) * block_size)
    wanted = position // block_size
    for page, block in enumerate(block_table):
        fill, hatch = PAGES[page % len(PAGES)]
        for offset in range(block_size):
            token = page * block_size + offset
            real = token < seq_len
            text, look = (str(token), (fill, hatch)) if real else ("", ("white", ""))
            _box(ax, token * scale, 0, text, *look, scale, 0.8, token == position, not real)
        middle = (page + 0.5) * block_size * scale
        _box(ax, middle - 0.5, 1.6, str(block), fill, hatch, 1, 0.7, page == wanted)
        bold = page == wanted
        for (x0, y0), (x1, y1) in (((middle, 0.8), (middle, 1.6)), ((middle, 2.3), (block + 0.5, 3.4))):
            arrow = {"arrowstyle": "->", "color": INK, "lw": 2.4 if bold else 0.9}
            ax.annotate("", (x1, y1), (x0, y0), arrowprops=arrow)
    for block in range(num_blocks):
        owner = list(block_table).index(block) if block in block_table else None
        fill, hatch = PAGES[owner % len(PAGES)] if owner is not None else ("white", "")
        for offset in range(block_size):
            held = owner is not None and owner * block_size + offset < seq_len
            followed = held and owner == wanted and offset == position % block_size
            _box(ax, block + offset / block_size * 0.94, 3.4, "", fill if held else "white", hatch if held else "",
                 0.94 / block_size, 0.8, followed, not held)  # fmt: skip
        ax.text(block + 0.47, 4.45, str(block), ha="center", va="center", fontsize=10)
    for y, text in ((0.4, "tokens of the\nsequence"), (1.95, "block table"), (3.8, "physical\nblocks")):
        ax.text(-0.3, y, text, ha="right", va="center", fontsize=10)
    ax.set(xlim=(-2.2, num_blocks + 0.1 * step), ylim=(4.8, -0.3))
    ax.axis("off")
    return figure


def walk_frame(frames: Sequence[Frame], i: int, block_table: Sequence[int], block_size: int, tile: int) -> Any:
    """A figure of frame i: left the scores with the running maximum, right what is kept."""
    import matplotlib.pyplot as plt

    frame, whole = frames[i], frames[-1]
    figure, (ax, kept) = plt.subplots(1, 2, figsize=(10, 4.4), width_ratios=(3, 2), layout="constrained")
    scores, n = whole.scores, len(whole.scores)
    low, high = min(*scores, 0) - 0.4, max(scores) + 0.9
    for position, score in enumerate(scores[: frame.end]):
        now = position >= frame.start
        fill, hatch = (ORANGE, "//") if now else (SKY, "")
        ax.bar(position, score - low, bottom=low, width=0.8, color=fill, hatch=hatch, edgecolor=INK, linewidth=0.8)
    if i:
        ax.axhline(frame.largest, color=RED, linewidth=1.6, linestyle="--")
        label, box = f"largest {frame.largest:.2f}", {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
        ax.text(n - 0.4, frame.largest + 0.1, label, color=RED, ha="right", va="bottom", fontsize=10, bbox=box)
    for page, block in enumerate(block_table[: -(-n // block_size)]):
        left, right = page * block_size, min((page + 1) * block_size, n)
        ax.text((left + right - 1) / 2, low - 0.35, f"block {block}", ha="center", va="top", fontsize=9)
        ax.axvline(left - 0.5, ymax=0.04, color=INK, linewidth=1)
    for start in range(0, n, tile):
        ax.axvline(start - 0.5, color=INK, linewidth=0.7, linestyle=":")
    ax.set(xlim=(-0.6, n - 0.4), ylim=(low - 1.1, high), xlabel="position", ylabel="score, times log2(e)")
    ax.set_xticks(range(0, n, 1 if n <= 16 else 2))
    ax.spines[["top", "right"]].set_visible(False)
    title = f"Tile {i} of {len(frames) - 1}: tokens {frame.start} to {frame.end - 1}" if i else "Before the first tile"
    ax.set_title(title, loc="left", fontsize=11)

    lines = [f"alpha  = {frame.alpha:.3f}", f"total  = {frame.total:.3f}"] if i else ["largest = -inf", "total  = 0"]
    kept.text(0, 1.02, "\n".join(lines), transform=kept.transAxes, family="monospace", fontsize=11, va="bottom")
    names = [f"result[{d}]" for d in range(4)]
    shown = [frame.result[d] / frame.total if i else 0.0 for d in range(4)]
    final = [whole.result[d] / whole.total for d in range(4)]
    kept.barh(range(4), shown, height=0.6, color=SKY, edgecolor=INK, label="result / total, so far")
    kept.plot(final, range(4), "D", color=RED, markersize=7, markeredgecolor=INK, label="at the end of the walk")
    reach = max(map(abs, [each for f in frames[1:] for each in (x / f.total for x in f.result[:4])])) * 1.15
    kept.set(xlim=(-reach, reach), ylim=(5.3, -0.6))
    kept.set_yticks(range(4), names, fontsize=10)
    kept.axvline(0, ymin=1.4 / 5.9, color=INK, linewidth=0.8)  # ends above the legend
    kept.spines[["top", "right"]].set_visible(False)
    kept.locator_params(axis="x", nbins=5)
    kept.legend(loc="lower center", fontsize=9, frameon=False, ncols=2, columnspacing=1)
    return figure


def bytes_bars(found: Mapping[str, Mapping[str, float]], unit: str, label: str) -> Any:
    """A figure: for each rung a bar of its K, V, copies, and table, in that order; its sum at the end."""
    import matplotlib.pyplot as plt

    looks = {"K": (SKY, ""), "V": (ORANGE, "//"), "copies": ("#BBBBBB", "xx"), "table": (INK, "")}
    figure, ax = plt.subplots(figsize=(9, 0.62 * len(found) + 1.2), layout="constrained")
    longest = max(sum(parts.values()) for parts in found.values())
    for row, parts in enumerate(found.values()):
        left = 0.0
        for what, (fill, hatch) in looks.items():
            if size := parts.get(what, 0):
                ax.barh(row, size, left=left, height=0.62, color=fill, hatch=hatch, edgecolor=INK, linewidth=0.9)
                if size > 0.05 * longest:
                    ax.text(left + size / 2, row, what, ha="center", va="center", fontsize=10,
                            bbox={"facecolor": fill, "edgecolor": "none", "pad": 1})  # fmt: skip
                left += size
        ax.text(left + 0.01 * longest, row, f"{left:,.4g} {unit}", va="center", fontsize=10)
    ax.set_yticks(range(len(found)), list(found), fontsize=11)
    ax.set(ylim=(len(found) - 0.5, -0.5), xlim=(0, 1.16 * longest), xlabel=label)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def times(moved: Mapping[str, float], flops: float, bandwidth: float, peak: float, ax: Any) -> None:
    """Bars: microseconds of each rung if all its bytes come from memory; and a line: the arithmetic's least time."""
    for row, size in enumerate(moved.values()):
        took = 1e6 * size / bandwidth
        ax.barh(row, took, height=0.62, color=SKY, edgecolor=INK)
        ax.text(took, row, f" {took:,.0f}", va="center", fontsize=10)
    least = 1e6 * flops / peak
    ax.axvline(least, color=RED, linewidth=2, linestyle="--")
    ax.text(least, -0.62, f" arithmetic: {least:.1f}", color=RED, va="bottom", fontsize=10)
    ax.set_yticks(range(len(moved)), list(moved), fontsize=11)
    ax.set(ylim=(len(moved) - 0.5, -0.6), xlabel="microseconds of one layer, if every byte comes from memory")
    ax.spines[["top", "right"]].set_visible(False)
