"""Real traffic through the scheduler: what a public trace shows. Run: python figures/real_traffic.py TRACE [options]

A trace with prefix ids (Mooncake's): the hit rate of the prefix cache against its size, least recently used first.
Any other (Azure's, BurstGPT's): queueing, TTFT, ITL and KV use, end to end, under three ways to admit:

    paged          continuous batching, blocks as they are needed
    contiguous     the same, but each request reserves room for the longest one in the trace (L33 1)
    static         paged, but nobody enters before the whole batch has ended (L33 3.1)

    TRACE --read_trace--> Workload --Simulator.run--> printed
                                        '--measured--> --json FILE --kvlab.lab.scenes.traffic--> --svg FILE

The traces are not part of kvlab. What was computed from three of them is: kvlab/lab/data/NAME.json, each with the
command that made it. --as NAME says which of them TRACE is, for its source and licence to be written down.
"""

import argparse
import json
import re
from pathlib import Path
from statistics import mean, median
from time import process_time

from kvlab import __version__
from kvlab.config import EngineConfig
from kvlab.costs import GPUCost
from kvlab.lab.scenes.traffic import FORMAT, draw
from kvlab.sim import SLO, ConstantCost, SimResult, Simulator, Workload, read_trace
from kvlab.sim.result import quantiles
from kvlab.sim.workload import NS
from kvlab.sizing import MODELS, num_gpu_blocks

SOURCES = {
    "azure_conv": {
        "title": "Azure LLM inference 2023, conversation", "licence": "CC-BY-4.0",
        "source": "github.com/Azure/AzurePublicDataset", "file": "data/AzureLLMInferenceTrace_conv.csv",
        "paper": "Patel et al., Splitwise, ISCA 2024",
    },
    "azure_code": {
        "title": "Azure LLM inference 2023, code", "licence": "CC-BY-4.0",
        "source": "github.com/Azure/AzurePublicDataset", "file": "data/AzureLLMInferenceTrace_code.csv",
        "paper": "Patel et al., Splitwise, ISCA 2024",
    },
    "mooncake": {
        "title": "Mooncake, conversation", "licence": "Apache-2.0",
        "source": "github.com/kvcache-ai/Mooncake", "file": "FAST25-release/traces/conversation_trace.jsonl",
        "paper": "Qin et al., Mooncake, FAST 2025",
    },
}  # fmt: skip
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 30_000, 50_000, 100_000)
OBJECTIVE = SLO(ttft_s=1.0, tpot_s=0.1)
DEFAULTS = {"gpu": "H100", "model": "Qwen2.5-14B", "faster": 1.0}  # a model whose context holds every request
LEVELS = (*(i / 100 for i in range(100)), 0.995, 0.999, 1.0)  # of TTFT


def hit_rates(trace: Workload) -> dict[int, float]:
    """Share of prompt tokens found, by the cache's size in blocks; the last size holds all that the trace has.

    An engine whose steps take no time, so that the whole pool is cache; only prompts enter it, as in Mooncake's store.
    """
    size = trace.prefix_block_size
    everything = sum(-(-arrival.prompt_tokens // size) for arrival in trace.arrivals)
    prompts, found = trace.with_outputs(1), {}
    longest = max(arrival.prompt_tokens for arrival in trace.arrivals)
    least = -(-longest // size) + 1  # a smaller pool would refuse the longest prompt
    for usable in (*(size for size in SIZES if least <= size < everything), everything):
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


def print_admissions(summaries: dict[str, dict[str, float]]) -> None:
    print(f"{'':24}" + "".join(f"{name:>14}" for name in summaries))
    for figure in ("queue_p50_s", "queue_p99_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "itl_p50_s", "itl_p90_s",
                   "itl_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_p50_s", "e2e_p99_s", "running", "peak_running",
                   "kv_usage", "kv_usage_peak", "kv_filled", "output_tokens_per_s", "goodput_per_s", "slo_met",
                   "preemptions", "refused", "makespan_s"):  # fmt: skip
        print(f"{figure:24}" + "".join(f"{found[figure]:>14,.4f}" for found in summaries.values()))


def per_minute(result: SimResult) -> dict[str, list[float]]:
    """Means over each minute from the first arrival on; while the engine is idle nobody runs, and nothing is owned.

    running, waiting: requests. kv_owned: blocks in use, as a share of the pool; kv_filled: slots that hold a token.
    """
    columns, pool = result.step_columns, result.num_usable_blocks
    wanted = {"running": ("num_running", 1), "waiting": ("num_waiting", 1), "kv_owned": ("used_blocks", pool),
              "kv_filled": ("kv_tokens", pool * result.config.block_size)}  # fmt: skip
    minutes = [start // (60 * NS) for start in columns["start_ns"]]
    series = {}
    for name, (column, whole) in wanted.items():
        sums = [0] * (minutes[-1] + 1)
        for minute, length, value in zip(minutes, columns["duration_ns"], columns[column], strict=True):
            sums[minute] += value * length
        series[name] = [short(total / (60 * NS) / whole) for total in sums]
    return series


def short(value: float) -> float | None:
    """Four digits are enough for a figure; what is whole stays whole. JSON knows no nan: None."""
    if value != value:
        return None
    return value if isinstance(value, int) else float(f"{value:.4g}")


def about(trace: Workload, name: str | None, args: argparse.Namespace) -> dict:
    """What the figures were computed from, and how."""
    known = SOURCES.get(name, {"title": trace.name, "source": "not told", "licence": "not told", "file": None})
    spread = {}
    for kind in ("prompt_tokens", "output_tokens"):
        lengths = [getattr(arrival, kind) for arrival in trace.arrivals]
        spread[kind] = {"median": median(lengths), "mean": round(mean(lengths), 1), "max": max(lengths)}
    file = Path(known["file"] or args.trace).name
    options = f" --as {name} --json kvlab/lab/data/{name}.json" if name else ""
    for option, default in DEFAULTS.items():
        if (value := getattr(args, option)) != default:
            options += f" --{option} {value}"
    counts = {"requests": len(trace), "minutes": round(trace.arrivals[-1].at_ns / 60 / NS, 1)}
    command = f"python figures/real_traffic.py {file}{options}"
    return {"format": FORMAT, "trace": known | counts | spread, "command": command, "kvlab": __version__}


def measured_admissions(results: dict[str, SimResult], args: argparse.Namespace) -> dict:
    some = next(iter(results.values()))
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in some.workload.arrivals)
    settings = {"gpu": args.gpu, "model": args.model, "faster": args.faster, "blocks": some.num_usable_blocks,
                "block_size": some.config.block_size, "seats": some.config.max_num_seqs,
                "token_budget": some.config.max_num_batched_tokens, "longest_request": longest,
                "ttft_objective_s": OBJECTIVE.ttft_s, "tpot_objective_s": OBJECTIVE.tpot_s}  # fmt: skip
    ways = {}
    for name, result in results.items():
        ttft = quantiles(result.distributions["ttft"], LEVELS)
        ways[name] = {"summary": {key: short(value) for key, value in result.summary(OBJECTIVE).items()},
                      "ttft_s": [short(value / NS) for value in ttft],
                      "per_minute": per_minute(result)}  # fmt: skip
    return {"settings": settings, "levels": LEVELS, "ways": ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--as", dest="name", choices=SOURCES, help="which of the known traces it is")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--svg", type=Path, help="where to draw it")
    parser.add_argument("--gpu", default=DEFAULTS["gpu"])
    parser.add_argument("--model", default=DEFAULTS["model"])
    parser.add_argument("--faster", type=float, default=DEFAULTS["faster"], help="arrivals so many times as fast")
    args = parser.parse_args()
    trace = read_trace(args.trace).faster(args.faster)
    found = about(trace, args.name, args)
    if any(arrival.prefix_ids for arrival in trace.arrivals):
        rates, ideal = hit_rates(trace), ideal_hit_rate(trace)
        for blocks, rate in rates.items():
            print(f"{blocks:>9,} blocks of {trace.prefix_block_size}: {rate:.2%} of prompt tokens found")
        print(f"counted without an engine, unbounded: {ideal:.2%}")
        found |= {"settings": {"block_size": trace.prefix_block_size, "model": args.model},
                  "blocks": list(rates), "hit_rate": [short(rate) for rate in rates.values()],
                  "hit_rate_unbounded": short(ideal)}  # fmt: skip
    else:
        results = admissions(trace, args.gpu, args.model)
        print_admissions({name: result.summary(OBJECTIVE) for name, result in results.items()})
        found |= measured_admissions(results, args)
    if args.json:
        args.json.write_text(to_json(found), encoding="utf-8")
    if args.svg:
        draw(found).savefig(args.svg)


def to_json(found: dict) -> str:
    """Indented, with each list of numbers on one line."""
    lists = re.compile(r"\[\s+([^\[\]{}]*?)\s+\]")
    return lists.sub(lambda match: f"[{' '.join(match[1].split())}]", json.dumps(found, indent=1)) + "\n"


if __name__ == "__main__":
    main()
