"""Real traffic through the scheduler: what a public trace shows. Run: python figures/real_traffic.py TRACE [--svg FILE]

A trace with prefix ids (Mooncake's): the hit rate of the prefix cache against its size, least recently used first.
Any other (Azure's, BurstGPT's): queueing, TTFT, ITL and KV use, end to end, under three ways to admit:

    paged          continuous batching, blocks as they are needed
    contiguous     the same, but each request reserves room for the longest one in the trace (L33 1)
    static         paged, but nobody enters before the whole batch has ended (L33 3.1)

The traces are not part of kvlab; docs/simulator.md says where they are from. The numbers are printed; --svg draws them.
"""

import argparse
from pathlib import Path
from time import process_time

from kvlab.config import EngineConfig
from kvlab.costs import GPUCost
from kvlab.sim import SLO, ConstantCost, SimResult, Simulator, Workload, read_trace
from kvlab.sizing import MODELS, num_gpu_blocks

SIZES = (1_000, 3_000, 10_000, 30_000, 50_000, 100_000)
OBJECTIVE = SLO(ttft_s=1.0, tpot_s=0.1)


def hit_rates(trace: Workload) -> dict[int, float]:
    """Share of prompt tokens found, by the cache's size in blocks; the last size holds all that the trace has.

    An engine whose steps take no time, so that the whole pool is cache; only prompts enter it, as in Mooncake's store.
    """
    size = trace.prefix_block_size
    everything = sum(-(-arrival.prompt_tokens // size) for arrival in trace.arrivals)
    prompts, found = trace.with_outputs(1), {}
    longest = max(arrival.prompt_tokens for arrival in trace.arrivals)
    for usable in (*(size for size in SIZES if size < everything), everything):
        config = EngineConfig(num_gpu_blocks_override=usable + 1, block_size=size, max_num_batched_tokens=longest)
        found[usable] = Simulator(config, ConstantCost(0)).run(prompts).summary()["prefix_hit_rate"]
    return found


def ideal_hit_rate(trace: Workload) -> float:
    """The same without any engine: tokens of prefix blocks seen before, over all; each prompt keeps one to compute."""
    size, seen, hits = trace.prefix_block_size, set(), 0
    for arrival in trace.arrivals:
        full = arrival.prefix_ids[: (arrival.prompt_tokens - 1) // size]
        known = next((i for i, prefix_id in enumerate(full) if prefix_id not in seen), len(full))
        hits += known * size
        seen.update(arrival.prefix_ids[: arrival.prompt_tokens // size])
    return hits / sum(arrival.prompt_tokens for arrival in trace.arrivals)


def admissions(trace: Workload, gpu: str, model: str) -> dict[str, SimResult]:
    """The trace under the three ways to admit, on one GPU."""
    cost, shape = GPUCost.of(gpu, model), MODELS[model]
    blocks = num_gpu_blocks(int(cost.gpu.memory), 0.9, shape.weight_bytes(), 2 * 10**9, 10**9,
                            16 * shape.kv_bytes_per_token())  # fmt: skip
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in trace.arrivals)
    ways = {"paged": {}, "contiguous": {"reservation": "contiguous", "max_model_len": longest},
            "static": {"batching": "static"}}  # fmt: skip
    found = {}
    for name, options in ways.items():
        config = EngineConfig(num_gpu_blocks_override=blocks, enable_prefix_caching=False, **options)
        began = process_time()
        found[name] = Simulator(config, cost).run(trace)
        print(f"{name}: {process_time() - began:.1f} s of CPU time, {found[name].stats.num_steps:,} steps")
    return found


def print_admissions(results: dict[str, SimResult]) -> None:
    columns = {name: result.summary(OBJECTIVE) for name, result in results.items()}
    print(f"{'':24}" + "".join(f"{name:>14}" for name in columns))
    for figure in ("queue_p50_s", "queue_p99_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_p50_s", "itl_p90_s",
                   "itl_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p50_s", "e2e_p99_s", "running", "peak_running",
                   "kv_usage", "kv_usage_peak", "kv_filled", "output_tokens_per_s", "goodput_per_s", "slo_met",
                   "preemptions", "refused", "makespan_s"):  # fmt: skip
        print(f"{figure:24}" + "".join(f"{found[figure]:>14,.4f}" for found in columns.values()))


def draw_admissions(results: dict[str, SimResult], title: str, path: Path) -> None:
    """TTFT as a share of requests, and blocks in use over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, result in results.items():
        times = result.requests.ttft_s.dropna().sort_values()
        left.plot(times, [(i + 1) / len(times) for i in range(len(times))], label=name)
        steps = result.steps
        mean = steps.groupby((steps.start_s // 30).astype(int)).kv_usage.mean()
        right.plot(mean.index / 2, mean, label=name)
    left.set(xscale="log", xlabel="time to first token, s", ylabel="share of requests", title=title)
    right.set(xlabel="minutes", ylabel="blocks owned, share of the pool", ylim=(0, 1))
    left.legend()
    figure.savefig(path)


def draw_hit_rates(rates: dict[int, float], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(rates), list(rates.values()), marker="o")
    axes.set(xscale="log", xlabel="blocks in the cache", ylabel="share of prompt tokens found", title=title)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--svg", type=Path, help="where to draw it")
    parser.add_argument("--gpu", default="A100")
    parser.add_argument("--model", default="Llama-3-8B")
    args = parser.parse_args()
    trace = read_trace(args.trace)
    if any(arrival.prefix_ids for arrival in trace.arrivals):
        rates = hit_rates(trace)
        for blocks, rate in rates.items():
            print(f"{blocks:>9,} blocks of {trace.prefix_block_size}: {rate:.2%} of prompt tokens found")
        print(f"counted without an engine, unbounded: {ideal_hit_rate(trace):.2%}")
        if args.svg:
            draw_hit_rates(rates, trace.name, args.svg)
        return
    results = admissions(trace, args.gpu, args.model)
    print_admissions(results)
    if args.svg:
        draw_admissions(results, f"{trace.name}: {args.model} on {args.gpu}", args.svg)


if __name__ == "__main__":
    main()
