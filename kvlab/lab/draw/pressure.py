"""Preemption drawn (lab 09): matplotlib axes in, marks out. Whose functions do the pricing is the caller's choice.

    regions      where swapping wins and where recomputing does, over K/V bytes a token and parameters; models as points
    bills        seconds by swapping and by recomputing, over tokens
    pool         whose the blocks are over time, and each time that the job is thrown out
    lanes        requests by step: running, computing again, waiting, thrown out
    bars         a few figures of several rules side by side
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

BLUE, SKY, RED, ORANGE, GREEN, INK = "#0072B2", "#56B4E9", "#D55E00", "#F7DDA4", "#009E73", "#222222"
LETTERS = {  # lane letter -> (fill, hatch, what it says)
    "d": (SKY, "", "decodes"),
    "p": (BLUE, "", "computes its prompt"),
    "r": (ORANGE, "////", "computes again"),
    "-": ("#D0D0D0", "", "runs, no token"),
    "w": ("white", "", "waits"),
    "x": ("white", "xx", "waits, K/V dropped"),
    "s": ("white", "..", "waits, K/V on the CPU"),
}


def regions(ax: Any, models: Mapping[str, tuple[float, float]], bandwidth: float, flops_rate: float,
            told: str = "") -> None:  # fmt: skip
    """models: name -> (K/V bytes a token, parameters). bandwidth: bytes/s each way; flops_rate: FLOP/s reached.

    The border is bandwidth x parameters = K/V bytes x FLOP/s. told: more constants, to be written on the plot.
    """
    from matplotlib.patheffects import withStroke

    low, high = 4 * 1024, 2048 * 1024
    border = [kv * flops_rate / bandwidth for kv in (low, high)]
    bottom, top = 0.25e9, 200e9
    inside = [min(max(value, bottom), top) for value in border]
    corner = [kv for kv in (bottom * bandwidth / flops_rate, top * bandwidth / flops_rate) if low < kv < high]
    xs = sorted([low, *corner, high])
    line = [min(max(kv * flops_rate / bandwidth, bottom), top) for kv in xs]
    ax.fill_between(xs, line, top, facecolor=SKY, alpha=0.35, hatch="..", edgecolor="#8FB8D0", linewidth=0)
    ax.fill_between(xs, bottom, line, facecolor=ORANGE, alpha=0.6, hatch="//", edgecolor="#C8A860", linewidth=0)
    ax.plot(xs, line, color=INK, linewidth=2.5)
    rim = [withStroke(linewidth=2.5, foreground="white")]
    white = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9, "pad": 2}
    if inside[0] < top:
        ax.text(low * 1.3, top / 1.5, "swap wins", fontsize=12, va="top", bbox=white, fontweight="bold")
    if inside[1] > bottom:
        ax.text(high / 1.3, bottom * 1.5, "recompute wins", fontsize=12, ha="right", bbox=white, fontweight="bold")
    for name, (kv, parameters) in models.items():
        swaps = bandwidth * parameters > kv * flops_rate
        ax.plot(kv, parameters, "o" if swaps else "s", color=BLUE if swaps else RED, markersize=9,
                markeredgecolor="black", zorder=3)  # fmt: skip
        shift, side = ((-8, 3), "right") if name in _LEFT else ((8, -3), "left")
        ax.annotate(name, (kv, parameters), xytext=shift, textcoords="offset points", fontsize=9, ha=side, va="center",
                    zorder=4, path_effects=rim)  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(low, high), ylim=(bottom, top),
           xlabel="K and V of a token, KiB", ylabel="parameters, billions")  # fmt: skip
    ax.set_xticks([kib * 1024 for kib in (4, 16, 64, 256, 1024)], ["4", "16", "64", "256", "1024"])
    ax.set_yticks([b * 1e9 for b in (0.5, 1, 4, 16, 64)], ["0.5", "1", "4", "16", "64"])
    ax.minorticks_off()
    link = f"{'effective ' if told else ''}link {bandwidth / 1e9:.3g} GB/s"
    constants = f"{link} each way, {flops_rate / 1e12:.3g} TFLOP/s reached"
    ax.set_title(constants + (f"\n{told}" if told else ""), loc="left", fontsize=10)


_LEFT = ("Llama-3-70B", "Qwen2.5-3B")  # their labels stand to the left, out of the way of a neighbour's


def bills(ax: Any, price: Callable[[int], tuple[float, float]], tokens: Sequence[int], crossing: float | None,
          title: str = "") -> None:  # fmt: skip
    """price(tokens) -> (seconds by swapping, by recomputing). crossing: from where on swapping wins; None: never."""
    pairs, right = [price(n) for n in tokens], len(tokens) * 7 // 8
    for i, (name, colour, style) in enumerate((("swap", BLUE, "-"), ("recompute", RED, "--"))):
        ys = [1000 * pair[i] for pair in pairs]
        ax.plot(tokens, ys, style, color=colour, linewidth=2.2)
        above = pairs[right][i] >= pairs[right][1 - i]
        at = right if above else len(tokens) * 2 // 3
        ax.annotate(name, (tokens[at], ys[at]), xytext=(-6, 6) if above else (6, -8), textcoords="offset points",
                    color=colour, ha="right" if above else "left", va="center", fontsize=10,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # fmt: skip
    if crossing and tokens[0] < crossing < tokens[-1]:
        ax.axvline(crossing, color=INK, linewidth=1, linestyle=":")
        late = crossing > tokens[len(tokens) // 2]
        ax.text(crossing * (0.9 if late else 1.1), 1000 * min(min(pair) for pair in pairs), f"{crossing:,.0f}",
                fontsize=10, va="bottom", ha="right" if late else "left")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="tokens with K and V", xlim=(tokens[0], tokens[-1]))
    ax.set_xticks([n for n in (1, 10, 100, 1000, 10_000, 100_000) if tokens[0] <= n <= tokens[-1]])
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1000 else f"{value / 1000:g}K")
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.minorticks_off()
    ax.set_title(title, loc="left", fontsize=10)
    _bare(ax)


def pool(ax: Any, starts: Sequence[float], blocks: Mapping[str, Sequence[int]], job: str, lane: str, num_blocks: int,
         title: str = "", seconds: float | None = None) -> None:  # fmt: skip
    """Blocks over time: of all others, of `job`, and free. starts, lane: of each step; blocks: id -> its blocks."""
    mine = blocks[job]
    others = [sum(row[i] for name, row in blocks.items() if name != job) for i in range(len(starts))]
    both = [a + b for a, b in zip(mine, others, strict=True)]
    ax.fill_between(starts, 0, others, facecolor=SKY, edgecolor=BLUE, linewidth=0.4, step="post")
    ax.fill_between(starts, others, both, facecolor=ORANGE, hatch="////", edgecolor="#8A6A10", linewidth=0.3,
                    step="post")  # fmt: skip
    ax.axhline(num_blocks, color=INK, linewidth=2)
    out = [starts[i] for i, letter in enumerate(lane) if letter == "!"]
    ax.plot(out, [num_blocks * 1.08] * len(out), "v", color=RED, markersize=5, markeredgecolor="black",
            markeredgewidth=0.4, clip_on=False)  # fmt: skip
    ax.set(xlim=(0, seconds or starts[-1]), ylim=(0, num_blocks * 1.14), ylabel="blocks")
    ax.set_title(title, loc="left", fontsize=10)
    _bare(ax)


def lanes(ax: Any, rows: Mapping[str, str], title: str = "") -> None:
    """A row for each request, a box a step; see kvlab.lab.scenes.pressure for the letters. ! is a triangle."""
    from matplotlib.patches import Patch, Rectangle

    width, seen = max(map(len, rows.values())), set()
    for y, lane in enumerate(rows.values()):
        out = [x + 0.5 for x, letter in enumerate(lane) if letter == "!"]
        ax.plot(out, [y + 0.5] * len(out), "v", color=RED, markersize=7, markeredgecolor="black", zorder=3)
        lane = lane.replace("!x", "xx").replace("!s", "ss").replace("!", "w")
        start = 0
        for x in range(1, len(lane) + 1):
            if x < len(lane) and lane[x] == lane[start]:
                continue
            letter = lane[start]
            if letter in LETTERS:
                seen.add(letter)
                fill, hatch, _ = LETTERS[letter]
                ax.add_patch(Rectangle((start, y + 0.1), x - start, 0.8, facecolor=fill, hatch=hatch,
                                       edgecolor="#555555", linewidth=0.5))  # fmt: skip
            start = x
    ax.set(xlim=(0, width), ylim=(len(rows), 0), xlabel="step")
    ax.set_yticks([y + 0.5 for y in range(len(rows))], list(rows), fontsize=10)
    ax.tick_params(left=False)
    handles = [Patch(facecolor=fill, hatch=hatch, edgecolor="#555555", label=text)
               for letter, (fill, hatch, text) in LETTERS.items() if letter in seen]  # fmt: skip
    ax.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncol=4, fontsize=9, frameon=False)
    ax.set_title(title, loc="left", fontsize=11)
    _bare(ax)


def bars(axes: Sequence[Any], rows: Mapping[str, Mapping[str, float]], figures: Mapping[str, str]) -> None:
    """One panel for each of `figures` (key in a row -> heading); one bar for each of `rows`, with its number.

    The smallest, and all that read the same, are blue and without a hatch.
    """
    for i, (ax, (key, heading)) in enumerate(zip(axes, figures.items(), strict=True)):
        values = [row[key] for row in rows.values()]
        best = f"{min(values):,.0f}"
        for y, value in enumerate(values):
            fill, hatch = (SKY, "") if f"{value:,.0f}" == best else (ORANGE, "//")
            ax.barh(y, value, 0.62, color=fill, hatch=hatch, edgecolor=INK, linewidth=0.8)
            ax.text(value + max(values) * 0.03, y, f"{value:,.0f}", va="center", fontsize=10)
        ax.set(xlim=(0, max(values) * 1.32 or 1), ylim=(len(values) - 0.5, -0.5), xticks=[])
        ax.set_yticks(range(len(values)), list(rows) if i == 0 else [], fontsize=10)
        ax.tick_params(left=False)
        ax.set_title(heading, loc="left", fontsize=10)
        _bare(ax)
        ax.spines["bottom"].set_visible(False)


def _bare(ax: Any) -> None:
    ax.spines[["top", "right"]].set_visible(False)
