"""Drawings of lab 11: multiprocessors with and without work, times by splits, a mixed batch, errors of INT8."""

from collections.abc import Mapping, Sequence
from typing import Any

INK, SKY, ORANGE, BLUE, GREEN, RED = "#222222", "#56B4E9", "#E69F00", "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito
BLOCKS = ((SKY, ""), (ORANGE, "//"), (GREEN, ".."), ("#CC79A7", "xx"), ("#F0E442", "\\\\"))


def occupancy(launches: Mapping[str, int], sms: int, columns: int = 22) -> Any:
    """A figure: for each launch a field of `sms` squares; filled with the number of programs where there is work."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, axes = plt.subplots(len(launches), 1, figsize=(9, 2.1 * len(launches)), layout="constrained", squeeze=False)
    for ax, (title, programs) in zip(axes[:, 0], launches.items(), strict=True):
        for i in range(sms):
            each = programs // sms + (i < programs % sms)
            x, y = i % columns, i // columns
            ax.add_patch(Rectangle((x, y), 0.86, 0.86, facecolor=SKY if each else "white", edgecolor=INK, lw=0.9,
                                   linestyle="solid" if each else "dotted"))  # fmt: skip
            if each:
                ax.text(x + 0.43, y + 0.45, str(each), ha="center", va="center", fontsize=9)
        busy = min(programs, sms)
        told = f"{title}: {programs:,} programs, {busy} of {sms} multiprocessors have work"
        ax.set_title(told, loc="left", fontsize=11)
        ax.set(xlim=(-0.1, columns), ylim=(-(-sms // columns), -0.1))
        ax.axis("off")
    return figure


def split_times(found: Mapping[int, Any], chosen: int, title: str) -> Any:
    """A figure: a bar of reading and merging for each number of splits, in microseconds; `chosen` is framed."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(9, 3.3), layout="constrained")
    highest = max(time.whole for time in found.values()) * 1e6
    for x, (splits, time) in enumerate(found.items()):
        ours = splits == chosen
        look = {"edgecolor": INK, "linewidth": 1.8 if ours else 0.9, "width": 0.7}
        ax.bar(x, time.read * 1e6, color=SKY, label="read K and V, write partial results" if not x else None, **look)
        ax.bar(x, time.merge * 1e6, bottom=time.read * 1e6, color=ORANGE, hatch="//",
               label="start the second launch, merge" if not x else None, **look)  # fmt: skip
        ax.text(x, time.whole * 1e6 + 0.02 * highest, f"{time.whole * 1e6:,.0f}", ha="center", fontsize=10,
                fontweight="bold" if ours else "normal")  # fmt: skip
    ax.set_xticks(range(len(found)), [f"{s}\n(chosen)" if s == chosen else str(s) for s in found], fontsize=10)
    ax.set(xlabel="splits", ylabel="microseconds (model)", ylim=(0, 1.15 * highest))
    ax.set_title(title, loc="left", fontsize=11)
    ax.legend(frameon=False, fontsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    return figure


def staircase(pairs: Sequence[tuple[int, int]], blocks: Sequence[tuple[int, int, int] | None],
              numbered: bool = True, unnamed: int | None = None) -> Any:  # fmt: skip
    """A figure: for each sequence its rows of q against its tokens. Filled is what a row sees; one look a query block.

    pairs: (rows, length). blocks: as kvlab.lab.scenes.mixed.query_blocks. numbered: say which.
    unnamed: a sequence whose blocks' numbers are not told.
    """
    import matplotlib.patheffects as effects
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    tall, widest = [max(rows, 1) for rows, _ in pairs], max(length for _, length in pairs)
    figure, axes = plt.subplots(len(pairs), 1, figsize=(9, 0.3 * sum(tall) + 0.75 * len(pairs)), height_ratios=tall,
                                layout="constrained", squeeze=False)  # fmt: skip
    for seq, (ax, (rows, length)) in enumerate(zip(axes[:, 0], pairs, strict=True)):
        for number, block in enumerate(blocks):
            if block is None or block[0] != seq:
                continue
            fill, hatch = BLOCKS[number % len(BLOCKS)]
            for row in range(block[1], block[2]):
                for token in range(length):
                    seen = token <= length - rows + row
                    look = {"facecolor": fill, "hatch": hatch} if seen else {"facecolor": "white"}
                    ax.add_patch(Rectangle((token, row), 1, 1, edgecolor=INK, lw=0.5, **look))
            ends = length - rows + block[2]
            ax.add_patch(Rectangle((0, block[1]), ends, block[2] - block[1], facecolor="none", edgecolor=INK, lw=2.4))
            if numbered:
                name = "block ?" if seq == unnamed else f"block {number}"
                ax.text(widest + 0.5, (block[1] + block[2]) / 2, name, va="center", fontsize=10)
        halo = [effects.Stroke(linewidth=5, foreground="white"), effects.Normal()]  # seen on any fill, in grey as well
        ax.axvline(length - rows, color=RED, linewidth=2.2, linestyle=(0, (2, 1)), path_effects=halo)
        what = "a decode" if rows == 1 else f"a chunk of {rows}"
        ax.set_title(f"sequence {seq}: {what}, after {length - rows} tokens", loc="left", fontsize=10)
        ax.set(xlim=(-0.1, widest + 3.2), ylim=(max(rows, 1), -0.05))
        ax.axis("off")
    return figure


def errors(found: Mapping[str, Mapping[str, float]], label: str) -> Any:
    """A figure: for each kind of numbers two bars, a scale for each row and one scale for all; a log axis."""
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(9, 0.75 * len(found) + 1.1), layout="constrained")
    looks, height = ((SKY, ""), (ORANGE, "//")), 0.36
    for row, sizes in enumerate(found.values()):
        for i, ((what, size), (fill, hatch)) in enumerate(zip(sizes.items(), looks, strict=False)):
            y = row + (i - 0.5) * height
            ax.barh(y, size, height=height, color=fill, hatch=hatch, edgecolor=INK, label=what if not row else None)
            ax.text(size * 1.06, y, f"{size:.2%}", va="center", fontsize=10)
    every = [size for sizes in found.values() for size in sizes.values()]
    ax.set_yticks(range(len(found)), list(found), fontsize=11)
    ax.set(xscale="log", xlim=(min(every) / 3, max(every) * 4), ylim=(len(found) - 0.4, -0.6), xlabel=label)
    ax.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    ax.spines[["top", "right"]].set_visible(False)
    return figure
