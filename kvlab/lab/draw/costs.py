"""What a decode step costs, drawn (lab 00). Whose functions do the counting is the caller's choice.

    Diary        a toy decoder that writes down its steps and its multiply-adds
    two_ways     its steps as rows of boxes     step_costs   its multiply-adds, each step and all so far
    Roofline     steps as dots under a GPU's roof            batches      intensity over the size of a batch
    engine_times what a token took, computed anew and decoded

Each function returns a figure, for kvlab.lab.show.picture to show.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvlab import primer
from kvlab.primer import GPU, Cache, Step, ToyDecoder, Vector
from kvlab.sizing import ModelShape

BLUE, RED, GREEN, INK = "#0072B2", "#D55E00", "#009E73", "#222222"  # Okabe and Ito


class Diary(ToyDecoder):
    """A toy decoder that writes down each call: steps, (new tokens, tokens in the cache), and costs, multiply-adds."""

    def __init__(self, step: Callable[..., Vector] = primer.attend_next, **options: Any):
        super().__init__(step=self._watched, **({"max_len": 200, "seed": 2} | options))
        self.inner, self.multiply_adds = step, 0
        self.steps: list[tuple[int, int]] = []
        self.costs: list[int] = []

    def _watched(self, layer: Any, x: Vector, keys: list[Vector], values: list[Vector]) -> Vector:
        found = self.inner(layer, x, keys, values)
        self.multiply_adds += 3 * len(x) ** 2  # q, k and v: a matrix each
        self.multiply_adds += 2 * len(x) * len(keys)  # q . k, and weight times value, for each position
        return found

    def forward(self, tokens: Sequence[int], cache: Cache) -> Vector:
        self.steps.append((len(tokens), len(cache)))
        before = self.multiply_adds
        logits = super().forward(tokens, cache)
        self.costs.append(self.multiply_adds - before)
        return logits


def two_ways(without: Sequence[tuple[int, int]], with_cache: Sequence[tuple[int, int]]) -> Any:
    """Steps without a cache and with one, side by side: a row a step, a filled box a token computed in it."""
    figure, axes = _figure(1, 2, figsize=(10, 2.5))
    for ax, steps, title, colour in (
        (axes[0], without, "Without a cache", RED),
        (axes[1], with_cache, "With a cache", BLUE),
    ):
        _boxes(ax, steps, colour)
        total = sum(new for new, _ in steps)
        ax.set_title(f"{title}: {total} tokens go through the model", fontsize=11, loc="left", pad=10)
    return figure


def step_costs(without: Diary, with_cache: Diary, formula: Callable[[int, int], int]) -> Any:
    """Multiply-adds of each step, and of all so far. Dots: what the diaries counted. Lines: formula(new, computed)."""
    figure, axes = _figure(1, 2, figsize=(10, 3.8))
    looks = ((without, RED, "--", "without a cache"), (with_cache, BLUE, "-", "with a cache"))
    for diary, colour, style, name in looks:
        steps = range(1, len(diary.steps) + 1)
        costs = [cost / 1000 for cost in diary.costs]
        line = [formula(*step) / 1000 for step in diary.steps]
        axes[0].plot(steps, line, color=colour, linestyle=style, linewidth=1.5)
        axes[0].plot(steps[::4], costs[::4], "o", color=colour, markersize=4)
        at = len(steps) * 3 // 4
        sums = [sum(costs[: i + 1]) for i in range(len(costs))]
        axes[1].plot(steps, sums, color=colour, linestyle=style, linewidth=2)
        for ax, x, y, text in ((axes[0], at, costs[at - 1], name),
                               (axes[1], steps[-1], sums[-1], f"{name}: {sums[-1]:,.0f}")):  # fmt: skip
            ax.annotate(text, (x, y), xytext=(-8, 12 if ax is axes[0] or diary is with_cache else 0),
                        textcoords="offset points", color=colour, ha="right")  # fmt: skip
    for ax, title, label in ((axes[0], "Each step", "of this step"), (axes[1], "All steps so far", "so far")):
        ax.set(xlabel="step", ylabel=f"multiply-adds {label}, thousands", ylim=(0, None), xlim=(0, len(steps) + 1))
        ax.set_title(title, fontsize=11, loc="left")
    return figure


class Roofline:
    """Steps of a model as dots under the roof of a GPU; roof(gpu, x) and intensity(shape, step) are the caller's."""

    def __init__(self, roof: Callable[[GPU, float], float], intensity: Callable[[ModelShape, Step], float]):
        self.roof, self.intensity = roof, intensity

    def draw(self, gpu: GPU, name: str, shape: ModelShape, steps: Mapping[str, Step], title: str = "") -> Any:
        """A figure: the roof, the balance, and each of `steps`, by its label, with its share of the peak."""
        figure, ax = _figure(figsize=(9, 4.8))
        xs = [10 ** (i / 40) for i in range(-12, 160)]
        ax.plot(xs, [self.roof(gpu, x) / 1e12 for x in xs], color=INK, linewidth=2)
        ax.axvline(gpu.balance, color=INK, linewidth=1, linestyle=":")
        ax.text(gpu.balance * 1.08, 0.9, f"balance\n{gpu.balance:.0f}", fontsize=10, va="bottom")
        peak, slope = gpu.peak_flops / 1e12, gpu.bandwidth / 1e12
        ax.text(gpu.balance * 0.8, peak, f"{name}: {peak:.0f} TFLOP/s", fontsize=10, ha="right", va="center")
        ax.text(2.2, 2.8 * slope, f"{slope:.2f} TB/s", fontsize=10, rotation=36, rotation_mode="anchor")
        for label, step in steps.items():
            x = self.intensity(shape, step)
            y = self.roof(gpu, x) / 1e12
            decode, used = all(new == 1 for new, _ in step), 100 * y / peak
            colour = BLUE if decode else RED
            right = x >= gpu.balance
            place, side = ((0, -18), "center") if right else ((12, -4), "left") if x < 30 else ((-12, 4), "right")
            ax.plot(x, y, "o" if decode else "s", color=colour, markersize=9, markeredgecolor=INK)
            ax.annotate(f"{label}: {used:.{0 if used >= 1 else 2}f}%", (x, y), xytext=place, fontsize=10,
                        textcoords="offset points", color=colour, ha=side, va="center")  # fmt: skip
        ax.set(xscale="log", yscale="log", xlim=(0.5, 10_000), ylim=(0.8, 2500),
               xlabel="arithmetic intensity, FLOP per byte", ylabel="attainable TFLOP/s")  # fmt: skip
        _ticks(ax, (1, 10, 100, 1000, 10_000), (1, 10, 100, 1000))
        if title:
            ax.set_title(title, fontsize=11, loc="left")
        return figure


def batches(intensity: Callable[[ModelShape, Step], float], shapes: Mapping[str, ModelShape],
            gpus: Mapping[str, GPU], contexts: Sequence[int] = (16, 500, 4000)) -> Any:  # fmt: skip
    """Intensity of a decode step over the sequences in it; a panel a model, a line a context (three at most)."""
    figure, axes = _figure(1, len(shapes), figsize=(10, 4.2), sharey=True)
    sizes = [round(2 ** (i / 4)) for i in range(41)]
    for ax, (name, shape) in zip(axes, shapes.items(), strict=True):
        for context, colour, style in zip(contexts, (BLUE, GREEN, RED), ("-", "--", "-."), strict=False):
            line = [intensity(shape, [(1, context)] * size) for size in sizes]
            ax.plot(sizes, line, color=colour, linestyle=style, linewidth=2)
            ax.text(1150, line[-1], f"{context} tokens", color=colour, va="center", fontsize=10)
        for gpu_name, gpu in gpus.items():
            ax.axhline(gpu.balance, color=INK, linewidth=1, linestyle=":")
            ax.text(1.1, gpu.balance * 1.07, f"balance, {gpu_name}: {gpu.balance:.0f}", fontsize=10)
        ax.set(xscale="log", yscale="log", xlim=(1, 1024), ylim=(0.8, 1200), xlabel="sequences in the batch")
        _ticks(ax, (1, 4, 16, 64, 256, 1024), (1, 10, 100, 1000))
        ax.set_title(f"{name}: {shape.kv_bytes_per_token() // 1024} KiB of K and V a token", loc="left", fontsize=11)
    axes[0].set_ylabel("intensity of a decode step, FLOP per byte")
    return figure


def engine_times(measured: Mapping[int, tuple[float, float]]) -> Any:
    """measured: tokens before -> seconds of one token (computed anew, decoded). The first decode is drawn as 1."""
    figure, ax = _figure(figsize=(8.5, 3.8))
    lengths = list(measured)
    unit = measured[lengths[0]][1]
    for i, (name, colour, style) in enumerate((("computed anew", RED, "o--"), ("decoded", BLUE, "s-"))):
        line = [measured[n][i] / unit for n in lengths]
        ax.plot(lengths, line, style, color=colour, linewidth=2)
        ax.annotate(f"{name}: {line[-1]:.1f}", (lengths[-1], line[-1]), xytext=(8, 0), textcoords="offset points",
                    color=colour, va="center")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="tokens before the one that is made",
           ylabel=f"processor time of one token\n(a decode after {lengths[0]} tokens = 1)")  # fmt: skip
    _ticks(ax, lengths, (1, 3, 10, 30))
    ax.set_xlim(lengths[0] * 0.88, lengths[-1] * 2.5)
    ax.set_title("kvlab's engine on one core, measured just now", loc="left", fontsize=11)
    return figure


def _figure(*grid: int, **options: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*grid, layout="constrained", **options)
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _ticks(ax: Any, xs: Sequence[int], ys: Sequence[int]) -> None:
    """Plain numbers on axes that are logarithmic."""
    ax.set_xticks(xs, [f"{x:,}" for x in xs])
    ax.set_yticks(ys, [f"{y:,}" for y in ys])
    ax.minorticks_off()


def _boxes(ax: Any, steps: Sequence[tuple[int, int]], colour: str) -> None:
    from matplotlib.patches import Rectangle

    for row, (new, computed) in enumerate(steps):
        for position in range(computed + new):
            face, edge = (colour, colour) if position >= computed else ("white", "#999999")
            place = position + 0.08, row + 0.1
            ax.add_patch(Rectangle(place, 0.84, 0.8, facecolor=face, edgecolor=edge, linewidth=1.2))
    width = max(computed + new for new, computed in steps)
    ax.set(xlim=(0, width), ylim=(len(steps), 0))
    ax.set_xticks([i + 0.5 for i in range(width)], range(width), fontsize=10)
    ax.set_yticks([i + 0.5 for i in range(len(steps))], [f"step {i + 1}" for i in range(len(steps))], fontsize=10)
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    for side in ax.spines.values():
        side.set_visible(False)
