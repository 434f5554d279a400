"""Drawings of lab 12.

    layer_flow   a layer of Qwen2 as boxes, and which of them know that sequences exist
    circles      RoPE: a query and a key as hands on one clock for each pair
    flat         a step's flat batch, row by row, coloured by request, with the pool below
    drift        the largest difference of each result on its way through the model, for some faults
    ledger_bars  the bytes of a step, item by item, on a log axis
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

INK, SKY, ORANGE, BLUE, GREEN, RED = "#222222", "#56B4E9", "#E69F00", "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito
REQUESTS = ((SKY, ""), (ORANGE, "//"), (GREEN, ".."), ("#CC79A7", "xx"), ("#F0E442", "\\\\"), ("#BBBBBB", "--"))
LINES = ((BLUE, "-", "o"), (RED, "--", "s"), (GREEN, "-.", "^"), ("#CC79A7", ":", "D"), (ORANGE, "-", "v"))


def _box(ax: Any, x: float, y: float, width: float, height: float, text: str, look: tuple[str, str] = ("white", ""),
         size: float = 10, bold: bool = False, dashed: bool = False) -> None:  # fmt: skip
    from matplotlib.patches import Rectangle

    fill, hatch = look
    ax.add_patch(Rectangle((x, y), width, height, facecolor=fill, hatch=hatch, edgecolor=INK, lw=2.4 if bold else 0.9,
                           linestyle="dashed" if dashed else "solid"))  # fmt: skip
    pad = {"facecolor": fill, "edgecolor": "none", "pad": 1} if hatch else None
    ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, bbox=pad)


def layer_flow() -> Any:
    """A figure: the two halves of a layer. Thick is what knows positions or sequences; white is row by row."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(10, 2.9), layout="constrained")
    rows = ((("RMSNorm", 0), ("q, k, v", 0), ("RoPE", 1), ("write K, V\nto their slots", 1),
             ("attention\nover pages", 1), ("o", 0), ("+", 0)),
            (("RMSNorm", 0), ("gate, up", 0), ("SiLU(gate) · up", 0), ("down", 0), ("+", 0)))  # fmt: skip
    for y, boxes in enumerate(rows):
        x, top = 0.9, 1.5 * y
        ax.text(0.3, top + 0.4, "x", ha="center", va="center", fontsize=13)
        for text, knows in boxes:
            width = 0.45 if text == "+" else 1.3
            ax.annotate("", (x, top + 0.4), (x - 0.35, top + 0.4), arrowprops={"arrowstyle": "->", "color": INK})
            _box(ax, x, top, width, 0.8, text, (ORANGE, "//") if knows else ("white", ""), bold=bool(knows))
            x += width + 0.35
        ax.annotate("", (x - 0.1, top + 0.4), (x - 0.35, top + 0.4), arrowprops={"arrowstyle": "->", "color": INK})
        plus = x - 0.35 - 0.225
        ax.plot([0.3, 0.3, plus, plus], [top + 0.2, top - 0.22, top - 0.22, top], color=INK, lw=0.9)
        ax.text(x, top + 0.4, "x", ha="center", va="center", fontsize=13)
    ax.set(xlim=(-0.1, 11.4), ylim=(2.5, -0.45))
    ax.axis("off")
    return figure


def circles(query_at: int, key_at: int, head_dim: int, theta: float, pairs: Sequence[int]) -> Any:
    """A figure: for each of `pairs` a circle with the query's hand and the key's, both (1, 0) at position 0."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Circle

    figure, axes = plt.subplots(1, len(pairs), figsize=(3.1 * len(pairs), 3.5), layout="constrained", squeeze=False)
    for ax, pair in zip(axes[0], pairs, strict=True):
        speed = theta ** (-2 * pair / head_dim)
        ax.add_patch(Circle((0, 0), 1, facecolor="white", edgecolor=INK, lw=1.2))
        for at, colour, style, name in ((query_at, BLUE, "solid", "q"), (key_at, RED, "dashed", "k")):
            x, y = math.cos(at * speed), math.sin(at * speed)
            ax.plot([0, x], [0, y], color=colour, linestyle=style, lw=2.6)
            ax.plot(x, y, "o" if name == "q" else "s", color=colour, markersize=8, markeredgecolor=INK)
            far = 1.2 if name == "q" else 1.42
            ax.text(far * x, far * y, name, color=colour, ha="center", va="center", fontsize=13, fontweight="bold")
        dot = math.cos((query_at - key_at) * speed)
        ax.set_title(f"pair {pair}: {speed:.4g} a position", fontsize=11)
        ax.text(0, -1.78, f"q · k = {dot:.3f}", ha="center", va="center", fontsize=12)
        ax.set(xlim=(-1.65, 1.65), ylim=(-1.95, 1.65), aspect="equal")
        ax.axis("off")
    figure.suptitle(f"query at position {query_at}, key at {key_at}: {query_at - key_at} apart", fontsize=11)
    return figure


def flat(names: Sequence[str], chunks: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int],
         block_size: int, num_blocks: int) -> Any:  # fmt: skip
    """A figure of a flat batch: tokens, positions and slots in a row each, one look a request; below, the pool's slots.

    names: of the requests. chunks: the positions of each one's tokens. slots: of all tokens. starts: query_start_loc.
    """
    import matplotlib.pyplot as plt

    count = len(slots)
    figure, ax = plt.subplots(figsize=(10, 4.1), layout="constrained")
    unit = num_blocks * block_size / count  # a token's box, measured in slots of the pool
    owner_of_slot = {}
    for i, (name, positions) in enumerate(zip(names, chunks, strict=True)):
        look = REQUESTS[i % len(REQUESTS)]
        for j, position in enumerate(positions):
            row = starts[i] + j
            slot = slots[row]
            owner_of_slot[slot] = i, position
            for y, text in ((0, f"{name}{position}"), (1, str(position)), (2, str(slot))):
                _box(ax, row * unit, y, unit, 0.8, text, look)
    for start in starts:
        ax.plot([start * unit] * 2, [-0.45, 2.9], color=INK, lw=2.4)
        ax.text(start * unit, -0.55, str(start), ha="center", va="bottom", fontsize=10)
    for slot in range(num_blocks * block_size):
        found = owner_of_slot.get(slot)
        look = REQUESTS[found[0] % len(REQUESTS)] if found else ("white", "")
        text = f"{names[found[0]]}{found[1]}" if found else ""
        _box(ax, slot + 0.05, 4.0, 0.9, 0.8, text, look, size=8, dashed=not found)
    for block in range(num_blocks):
        ax.text((block + 0.5) * block_size, 5.1, f"block {block}", ha="center", va="center", fontsize=9)
        ax.plot([block * block_size] * 2, [3.8, 5.3], color=INK, lw=1.6)
    ax.plot([num_blocks * block_size] * 2, [3.8, 5.3], color=INK, lw=1.6)
    for y, text in ((-0.75, "query_start_loc"), (0.4, "token"), (1.4, "position"), (2.4, "slot"), (4.4, "pool")):
        ax.text(-0.6, y, text, ha="right", va="center", fontsize=10)
    ax.set(xlim=(-7.5, num_blocks * block_size + 0.2), ylim=(5.4, -1.15))
    ax.axis("off")
    return figure


def drift(found: Mapping[str, Sequence[tuple[str, float]]], atol: float) -> Any:
    """A figure: for each run the largest difference of each result, in the order of computation; a log axis."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(10, 4.2), layout="constrained")
    floor = 1e-8
    for i, (title, values) in enumerate(found.items()):
        colour, style, marker = LINES[i % len(LINES)]
        heights = [min(max(size, floor), 1e3) for _, size in values]
        ax.plot(range(len(values)), heights, color=colour, linestyle=style, marker=marker, markersize=5, label=title)
    names = [name for name, _ in next(iter(found.values()))]
    first = [i for i, name in enumerate(names) if name.startswith("layer") and name.endswith(" norm")
             and not name.endswith("second norm")]  # fmt: skip
    for i in first:
        ax.axvline(i - 0.5, color=INK, lw=0.6, linestyle=":")
    ax.axhline(atol, color=INK, lw=1.2, linestyle="--")
    ax.text(len(names) - 0.6, atol * 1.25, f"tolerance {atol:g}", ha="right", fontsize=9)
    ax.set_xticks(range(len(names)), [name.split(" ", 2)[2] if name.startswith("layer") else name for name in names],
                  rotation=90, fontsize=8)  # fmt: skip
    ax.set(yscale="log", ylabel="largest difference", xlim=(-0.6, len(names) - 0.4), ylim=(floor / 2, 1e2))
    for layer, i in enumerate(first):
        ax.text(i - 0.3, 35, f"layer {layer}", fontsize=9, va="center")
    ax.set_yticks([floor, 1e-6, 1e-4, 1e-2, 1, 1e2], ["none", "1e-6", "1e-4", "0.01", "1", "100"])
    ax.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=len(found))
    ax.spines[["top", "right"]].set_visible(False)
    return figure


LABELS = {"weights": "weights read", "kv_read": "K and V read", "kv_written": "K and V written",
          "widest": "gate and up of a layer", "logits": "logits"}  # fmt: skip


def ledger_bars(ledger: Mapping[str, int], title: str) -> Any:
    """A figure: a bar for each item of a step's ledger, in bytes, on a log axis that never changes."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(9, 2.9), layout="constrained")
    looks = {"weights": ("#BBBBBB", "xx"), "kv_read": (SKY, ""), "kv_written": (BLUE, ""), "widest": (ORANGE, "//"),
             "logits": (GREEN, "..")}  # fmt: skip
    for row, (item, label) in enumerate(LABELS.items()):
        size, (fill, hatch) = ledger[item], looks[item]
        ax.barh(row, size, left=0, height=0.62, color=fill, hatch=hatch, edgecolor=INK, linewidth=0.9)
        unit, scale = next(((u, s) for u, s in (("GB", 1e9), ("MB", 1e6)) if size >= s), ("KB", 1e3))
        ax.text(max(size, 1.1e4) * 1.15, row, f"{size / scale:,.3g} {unit}", va="center", fontsize=10)
        ax.text(0.99e4, row, label + " ", ha="right", va="center", fontsize=11)
    ax.set(xscale="log", xlim=(1e4, 1e12), ylim=(4.6, -0.6), xlabel="bytes of one step")
    ax.set_yticks([])
    ax.set_title(title, loc="left", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
    return figure
