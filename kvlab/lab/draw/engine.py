"""Drawings of lab 13: a draw on the unit interval, the parts of a step, memory of a step, the rungs of a ladder."""

from collections.abc import Mapping, Sequence
from typing import Any

INK, SKY, ORANGE, BLUE, GREEN, RED = "#222222", "#56B4E9", "#E69F00", "#0072B2", "#009E73", "#D55E00"  # Okabe and Ito
LOOKS = ((SKY, ""), (ORANGE, "//"), ("white", ""), (GREEN, ".."), ("#CC79A7", "xx"), ("#F0E442", "\\\\"),
         ("#DDDDDD", "--"))  # fmt: skip


def interval(weights: Sequence[float], kept: Sequence[int], names: Sequence[str], uniform: float, drawn: int) -> Any:
    """A figure: all tokens as pieces of [0, 1), in order; below, the kept ones, and where `uniform` falls."""
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    figure, ax = plt.subplots(figsize=(9, 2.7), layout="constrained")
    for y, some, title in ((1.35, range(len(weights)), "all tokens"), (0.0, kept, "kept, and drawn from")):
        total, left = sum(weights[i] for i in some), 0.0
        for i in some:
            width, (colour, hatch) = weights[i] / total, LOOKS[i % len(LOOKS)]
            here = y == 0 and i == drawn
            ax.add_patch(Rectangle((left, y), width, 0.8, facecolor=colour, hatch=hatch, edgecolor=INK,
                                   linewidth=2.6 if here else 0.9, zorder=2 if here else 1))  # fmt: skip
            if width > 0.035:
                ax.text(left + width / 2, y + 0.4, names[i], ha="center", va="center", fontsize=11, zorder=3,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2})  # fmt: skip
            left += width
        ax.text(0, y + 0.86, title, fontsize=10, va="bottom")
    ax.plot([uniform, uniform], [-0.3, 0.8], color=RED, linewidth=2.4, zorder=4)
    ax.text(min(max(uniform, 0.12), 0.88), -0.36, f"uniform {uniform:.3f} draws {names[drawn]}", ha="center", va="top",
            fontsize=11, color=INK, fontweight="bold")  # fmt: skip
    ax.set(xlim=(-0.005, 1.005), ylim=(-0.85, 2.5))
    ax.axis("off")
    return figure


def steps(found: Mapping[str, Mapping[str, float]], stages: Sequence[str], apart: str) -> Any:
    """A figure: for each kind of step a bar of 100%, cut into stages, its milliseconds beside it; at the right all
    stages but `apart`, in microseconds."""
    import matplotlib.pyplot as plt

    figure, (ax, rest) = plt.subplots(1, 2, figsize=(9.5, 0.62 * len(found) + 1.4), layout="constrained", sharey=True,
                                      width_ratios=(3, 2))  # fmt: skip
    for y, seconds in enumerate(found.values()):
        total, left, right = sum(seconds.values()), 0.0, 0.0
        for (colour, hatch), stage in zip(LOOKS, stages, strict=True):
            look = {"color": colour, "hatch": hatch, "edgecolor": INK, "linewidth": 0.9}
            width = 100 * seconds[stage] / total
            ax.barh(y, width, 0.66, left=left, label=stage if not y else None, **look)
            if width > 9:
                ax.text(left + width / 2, y, f"{width:.0f}", ha="center", va="center", fontsize=10,
                        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
            left += width
            if stage != apart:
                rest.barh(y, 1e6 * seconds[stage], 0.66, left=right, **look)
                right += 1e6 * seconds[stage]
        ax.text(102, y, f"{1000 * total:.2f} ms", va="center", fontsize=10)
        rest.text(right, y, f" {right:,.0f}", va="center", fontsize=10)
    ax.set_yticks(range(len(found)), list(found), fontsize=10)
    ax.set(xlim=(0, 128), xlabel="% of the step", ylim=(len(found) - 0.5, -0.5))
    ax.set_xticks(range(0, 101, 20))
    rest.set(xlim=(0, 1.25 * rest.dataLim.x1), xlabel=f"microseconds, all but {apart}")
    rest.tick_params(axis="y", length=0)
    for one in (ax, rest):
        one.spines[["top", "right"]].set_visible(False)
    figure.legend(*ax.get_legend_handles_labels(), ncols=len(stages), loc="outside upper center", frameon=False,
                  fontsize=9.5, handlelength=1.6, columnspacing=1.2)  # fmt: skip
    return figure


def memory(plans: Mapping[str, Mapping[str, float]], total: float,
           promised: Sequence[float]) -> Any:  # fmt: skip
    """A figure: for each plan its bytes in GB, one on the other, as they are in the worst step, against two lines.

    plans: name -> {part: GB}. total: GB of the GPU. promised: GB that each plan may use (utilisation times total).
    """
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(9, 0.85 * len(plans) + 1.5), layout="constrained")
    for y, parts in enumerate(plans.values()):
        left = 0.0
        for (colour, hatch), (part, size) in zip(LOOKS, parts.items(), strict=False):
            ax.barh(y, size, 0.6, left=left, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.9,
                    label=part if not y else None)  # fmt: skip
            left += size
        over = left - total
        told = f"{left:.2f} GB" + (f"\n{over:.2f} too many" if over > 0 else "")
        ax.text(max(left, total) + 0.01 * total, y, told, va="center", fontsize=10,
                fontweight="bold" if over > 0 else "normal")  # fmt: skip
        ax.plot([promised[y]] * 2, [y - 0.45, y + 0.45], color=INK, linewidth=2, linestyle=":")
    ax.axvline(total, color=RED, linewidth=2.4)
    ax.set_yticks(range(len(plans)), list(plans), fontsize=10)
    ax.set(xlim=(0, 1.26 * total), ylim=(len(plans) - 0.5, -0.5),
           xlabel=f"GB in the worst step; dotted: promised; thick: the {total:.0f} there are")  # fmt: skip
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1.0), frameon=False, fontsize=10)
    return figure


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def ladder(rows: Mapping[str, Any], columns: Mapping[str, str], title: str) -> Any:
    """A figure: one small bar chart for each of `columns` (attribute of a row -> heading), a bar for each rung."""
    import matplotlib.pyplot as plt

    size = 9.5, 0.42 * len(rows) + 1.2
    figure, axes = plt.subplots(1, len(columns), figsize=size, layout="constrained", sharey=True)
    for ax, (name, heading) in zip(axes, columns.items(), strict=True):
        values = [getattr(row, name) for row in rows.values()]
        for y, value in enumerate(values):
            colour, hatch = LOOKS[y]
            ax.barh(y, value, 0.66, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.9)
            ax.text(value + 0.03 * max(values), y, _short(value), va="center", fontsize=9.5)
        ax.set_title(heading, loc="left", fontsize=10)
        ax.set(xlim=(0, 1.42 * max(values)), ylim=(len(rows) - 0.5, -0.5))
        ax.set_xticks([])
        ax.spines[["top", "right", "bottom"]].set_visible(False)
    axes[0].set_yticks(range(len(rows)), list(rows), fontsize=10)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure
