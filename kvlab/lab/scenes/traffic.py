"""An hour of real traffic (labs 06 and 07), from committed results: kvlab/lab/data holds what figures/real_traffic.py
computed from public traces, which kvlab does not ship. Each file says from what and by which command.

    traffic("azure_conv") -> dict --draw_admissions--> figure: three ways to admit, TTFT, waiting, running, K/V memory
    traffic("mooncake")   -> dict --draw_hit_rates---> figure: tokens found over the size of the prefix cache

    picture(draw_admissions("azure_conv"), tell_admissions("azure_conv"))     in a notebook

A figure is of a trace by name (NAMES) or of such a dict. It names source, licence, settings and command by itself.
"""

import json
from pathlib import Path
from typing import Any

from kvlab.sizing import model_shape

FORMAT = "kvlab traffic 1"
DATA = Path(__file__).parents[1] / "data"
NAMES = ("azure_conv", "azure_code", "mooncake")
Traffic = dict[str, Any]

INK, PALE = "#222222", "#BBBBBB"
LOOKS = {"paged": ("#0072B2", "-", 2.2), "contiguous": ("#D55E00", "--", 1.8), "static": ("#009E73", "-.", 1.8)}


def traffic(name: str | Traffic) -> Traffic:
    """What was found for a trace. A dict:

    trace: title, source, licence, paper, requests, minutes, prompt_tokens and output_tokens {median, mean, max}.
    settings; command; kvlab (the version).
    Of admissions: ways {"paged", "contiguous", "static"}, each {summary: what SimResult.summary gives, ttft_s: at
    `levels`, per_minute: {running, waiting, kv_owned, kv_filled}, means over a minute; None where nothing ran}.
    Of hit rates: blocks and hit_rate, and hit_rate_unbounded, counted without an engine.
    """
    if not isinstance(name, str):
        return name
    if name not in NAMES:
        raise ValueError(f"no traffic {name!r}: there are {', '.join(NAMES)}; others: python figures/real_traffic.py")
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def draw(name: str | Traffic) -> Any:
    """The figure that fits the trace."""
    found = traffic(name)
    return draw_admissions(found) if "ways" in found else draw_hit_rates(found)


def draw_admissions(name: str | Traffic = "azure_conv") -> Any:
    """A figure of four panels: the time to the first token, requests that wait and that run, and K/V memory.

    name: "azure_conv", "azure_code", or what `traffic` gives.
    """
    found = traffic(name)
    figure, axes = _figure(2, 2, figsize=(10, 6.6))
    (first, waiting), (running, memory) = axes
    for way, (colour, style, width) in LOOKS.items():
        got, look = found["ways"][way], {"color": colour, "linestyle": style, "linewidth": width}
        first.plot(got["ttft_s"], [100 * level for level in found["levels"]], label=way, **look)
        for ax, series, scale in ((waiting, "waiting", 1), (running, "running", 1), (memory, "kv_owned", 100)):
            ax.plot(*_over_minutes(got["per_minute"][series], scale), **look)
    filled = found["ways"]["contiguous"]["per_minute"]["kv_filled"]
    memory.plot(*_over_minutes(filled, 100), color=LOOKS["contiguous"][0], linestyle=":", linewidth=1.8)
    first.set(xscale="log", xlabel="seconds to the first token", ylabel="% of requests that have it", ylim=(0, 101))
    figure.legend(*first.get_legend_handles_labels(), frameon=False, fontsize=11, loc="upper right", ncols=3,
                  borderaxespad=0.1)  # fmt: skip
    waiting.set(xlabel="minutes", ylabel="requests that wait")
    waiting.set_yscale("symlog", linthresh=1)  # 0 to 1, then powers of ten
    waiting.set_yticks([0, 1, 10, 100, 1000, 10_000], ["0", "1", "10", "100", "1,000", "10,000"])
    waiting.set_ylim(0, 2 * max(1, *(max(got["per_minute"]["waiting"]) for got in found["ways"].values())))
    running.set(xlabel="minutes", ylabel="requests that run", ylim=(0, None))
    memory.set(xlabel="minutes", ylabel="% of the K/V blocks", ylim=(0, 101))
    for ax, title in ((first, "Time to the first token"), (waiting, "Who waits"), (running, "Who runs"),
                      (memory, "Blocks owned (dotted: contiguous, what holds a token)")):  # fmt: skip
        ax.set_title(title, loc="left", fontsize=11)
    settings = found["settings"]
    faster = "" if settings["faster"] == 1 else f", arrivals {settings['faster']:g} times as fast"
    _title(figure, f"{settings['model']} on one {settings['gpu']}, simulated{faster}", found)
    _source(figure, found)
    return figure


def tell_admissions(name: str | Traffic = "azure_conv") -> str:
    """The same figure in words."""
    found = traffic(name)
    told = [f"{found['trace']['title']}: three ways to admit."]
    for way in LOOKS:
        got = found["ways"][way]["summary"]
        told.append(
            f"{way}: half of the requests have their first token within {got['ttft_p50_s']:.3g} s, 99% within "
            f"{got['ttft_p99_s']:.3g} s; {got['running']:.0f} run on average, {got['peak_running']} at most; "
            f"{got['kv_usage']:.0%} of the blocks are owned, and {got['kv_filled']:.0%} of their slots hold a token."
        )
    return " ".join(told)


def draw_hit_rates(name: str | Traffic = "mooncake") -> Any:
    """A figure: prompt tokens found over the size of the prefix cache, in blocks and in GiB of a model's K/V."""
    found = traffic(name)
    figure, ax = _figure(figsize=(9, 4.4))
    ceiling = 100 * found["hit_rate_unbounded"]
    rates = [100 * rate for rate in found["hit_rate"]]
    ax.axhline(ceiling, color=INK, linestyle=":", linewidth=1.2)
    ax.text(found["blocks"][0], ceiling + 0.8, f"room for all: {ceiling:.1f}%", fontsize=10)
    ax.plot(found["blocks"], rates, "o-", color=LOOKS["paged"][0], linewidth=2)
    for blocks, rate in list(zip(found["blocks"], rates, strict=True))[:-1]:
        ax.annotate(f"{rate:.1f}%", (blocks, rate), xytext=(4, -13), textcoords="offset points", fontsize=10)
    size = found["settings"]["block_size"]
    ax.set(xscale="log", xlabel=f"blocks of {size} tokens in the cache", ylabel="prompt tokens found, %",
           ylim=(0, max(ceiling * 1.15, 1)))  # fmt: skip
    ax.set_xticks(found["blocks"], [f"{blocks:,}" for blocks in found["blocks"]])
    ax.minorticks_off()
    gib = _block_bytes(found) / 2**30
    above = ax.secondary_xaxis("top", functions=(lambda blocks: blocks * gib, lambda size: size / gib))
    above.set_xlabel(f"GiB of K and V of {found['settings']['model']}")
    above.set_xticks([100, 1000, 10_000], ["100", "1,000", "10,000"])
    above.minorticks_off()
    _title(figure, "A prefix cache of least recently used blocks", found)
    _source(figure, found)
    return figure


def tell_hit_rates(name: str | Traffic = "mooncake") -> str:
    """The same figure in words."""
    found, gib = traffic(name), _block_bytes(traffic(name)) / 2**30
    points = "; ".join(f"{blocks:,} blocks, {blocks * gib:,.0f} GiB: {rate:.1%}"
                       for blocks, rate in zip(found["blocks"], found["hit_rate"], strict=True))  # fmt: skip
    return f"{found['trace']['title']}: prompt tokens found over the size of the cache. {points}."


def _block_bytes(found: Traffic) -> int:
    settings = found["settings"]
    return model_shape(settings["model"]).kv_bytes_per_token() * settings["block_size"]


def _over_minutes(values: list[float], scale: float) -> tuple[list[float], list[float]]:
    """Places in the middle of each minute, and values."""
    return [i + 0.5 for i in range(len(values))], [scale * value for value in values]


def _title(figure: Any, first: str, found: Traffic) -> None:
    trace = found["trace"]
    prompt, output = (f"{trace[kind]['median']:,g}" for kind in ("prompt_tokens", "output_tokens"))
    figure.suptitle(f"{first}\n{trace['requests']:,} requests in {trace['minutes']:.0f} minutes; in the median, a "
                    f"prompt has {prompt} tokens and an output {output}", x=0.01, ha="left", fontsize=12)  # fmt: skip


def _source(figure: Any, found: Traffic) -> None:
    trace = found["trace"]
    paper = f"; {trace['paper']}" if "paper" in trace else ""
    figure.supxlabel(f"Trace: {trace['title']} ({trace['source']}, {trace['licence']}{paper}).\n"
                     f"{found['command']}", x=0.01, ha="left", fontsize=8.5, color="#555555")  # fmt: skip


def _figure(*grid: int, **options: Any) -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(*grid, layout="constrained", **options)
    for ax in figure.axes:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes
