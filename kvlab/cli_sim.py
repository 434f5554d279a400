"""`kvlab simulate`: a trace, or a workload drawn from a seed, through the real scheduler on a virtual clock.

    trace file | closed, poisson, bursts  ->  Workload  -.
    --gpu and --model | --cost | --step-ms  ->  costs  --+->  Simulator.run  ->  the summary on stdout
    engine options, --with NOTEBOOK  ->  config, parts  -'
"""

import json
from math import isfinite
from pathlib import Path
from time import process_time
from typing import Annotated, Any

import typer

from kvlab.cli_labs import parts_of

WORKLOAD, COST, ENGINE, SPECULATION = "What arrives", "What a step costs", "Engine", "Speculative decoding"
# What a GPU needs besides weights and K/V, in bytes; estimates, and large ones for a small model.
ACTIVATION_BYTES, CUDAGRAPH_BYTES = 2 * 10**9, 10**9


def simulate(
    workload: Annotated[
        str, typer.Argument(help="A trace file (Azure, BurstGPT, Mooncake or ours), or: closed, poisson, bursts.")
    ],
    num_requests: Annotated[
        int | None,
        typer.Option("--num-requests", "-n", help="So many (1000); the first of a trace.", rich_help_panel=WORKLOAD),
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Requests a second, of poisson and bursts.", rich_help_panel=WORKLOAD)
    ] = 4.0,
    burst_size: Annotated[int, typer.Option(help="Requests in a burst.", rich_help_panel=WORKLOAD)] = 32,
    prompt: Annotated[
        str, typer.Option(help="Lengths: 200, uniform:10:120 or lognormal:200:1.2.", rich_help_panel=WORKLOAD)
    ] = "lognormal:500",
    output: Annotated[str, typer.Option(help="The same, of outputs.", rich_help_panel=WORKLOAD)] = "lognormal:200",
    prefix_tokens: Annotated[
        int, typer.Option(help="A system prompt before each prompt.", rich_help_panel=WORKLOAD)
    ] = 0,
    num_prefixes: Annotated[int, typer.Option(help="How many different ones.", rich_help_panel=WORKLOAD)] = 1,
    faster: Annotated[float, typer.Option(help="Arrivals so many times as fast.", rich_help_panel=WORKLOAD)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of what is drawn.", rich_help_panel=WORKLOAD)] = 0,
    gpu: Annotated[str, typer.Option(help="By name: A100, H100, ...", rich_help_panel=COST)] = "A100",
    model: Annotated[str, typer.Option(help="By name: Llama-3-8B, ...", rich_help_panel=COST)] = "Llama-3-8B",
    num_gpus: Annotated[int, typer.Option(help="GPUs that share the model.", rich_help_panel=COST)] = 1,
    cost: Annotated[
        Path | None, typer.Option(help="Measured: what kvlab calibrate wrote.", rich_help_panel=COST)
    ] = None,
    step_ms: Annotated[float | None, typer.Option(help="Every step takes as long.", rich_help_panel=COST)] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NOTEBOOK", help="Run on your solved parts of this lab; may be given again."),
    ] = None,
    num_gpu_blocks: Annotated[
        int | None, typer.Option(help="Blocks; else what fits the GPU beside the model.", rich_help_panel=ENGINE)
    ] = None,
    num_cpu_blocks: Annotated[int, typer.Option(help="Blocks of swap space.", rich_help_panel=ENGINE)] = 0,
    block_size: Annotated[int, typer.Option(help="Tokens per block.", rich_help_panel=ENGINE)] = 16,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence; contiguous reserves it.", rich_help_panel=ENGINE)
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Seats.", rich_help_panel=ENGINE)] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="The token budget of a step.", rich_help_panel=ENGINE)
    ] = 2048,
    no_prefix_caching: Annotated[
        bool, typer.Option("--no-prefix-caching", help="Share no prefixes.", rich_help_panel=ENGINE)
    ] = False,
    batching: Annotated[str, typer.Option(help="continuous or static.", rich_help_panel=ENGINE)] = "continuous",
    reservation: Annotated[str, typer.Option(help="paged or contiguous.", rich_help_panel=ENGINE)] = "paged",
    speculate: Annotated[
        int, typer.Option(help="Drafts that a decode has verified in each step.", rich_help_panel=SPECULATION)
    ] = 0,
    acceptance: Annotated[
        float | None, typer.Option(help="Probability that a draft holds (0.8).", rich_help_panel=SPECULATION)
    ] = None,
    draft_ms: Annotated[
        float | None, typer.Option(help="What drafting adds to a step (0).", rich_help_panel=SPECULATION)
    ] = None,
    ttft: Annotated[float | None, typer.Option(help="Objective: seconds to the first token, at most.")] = None,
    tpot: Annotated[float | None, typer.Option(help="Objective: seconds a token after it, at most.")] = None,
    e2e: Annotated[float | None, typer.Option(help="Objective: seconds to the last token, at most.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the summary as JSON.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the workload as our own trace.")] = None,
) -> None:
    """Replay a trace, or a made workload, through the scheduler on a virtual clock: latency, throughput, KV use."""
    from kvlab.config import EngineConfig
    from kvlab.costs import FittedCost, GPUCost
    from kvlab.sim import SLO, ConstantCost, Simulator

    objectives = {"ttft_s": ttft, "tpot_s": tpot, "e2e_s": e2e}
    slo = SLO(**objectives) if any(value is not None for value in objectives.values()) else None
    if step_ms is not None and cost is not None:
        raise ValueError("--step-ms and --cost both say what a step takes: give one of them")
    speculation = _speculation(speculate, acceptance, draft_ms, seed)
    parts = parts_of(with_) if with_ else None
    on_gpu = GPUCost.of(gpu, model, block_size=block_size, num_gpus=num_gpus)
    costs = ConstantCost(step_ms / 1000) if step_ms is not None else FittedCost.load(cost) if cost else on_gpu
    if num_gpu_blocks is None:
        num_gpu_blocks = _blocks_beside_the_model(on_gpu, parts)
    config = EngineConfig(
        num_gpu_blocks_override=num_gpu_blocks, num_cpu_blocks_override=num_cpu_blocks, block_size=block_size,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=not no_prefix_caching, batching=batching, reservation=reservation,
    )  # fmt: skip
    prefixes = (prefix_tokens, num_prefixes)
    arriving = _workload(workload, num_requests, rate, burst_size, (prompt, output), prefixes, seed)
    if faster != 1:
        arriving = arriving.faster(faster)
    if save is not None:
        arriving.save(save)
    began = process_time()
    result = Simulator(config, costs, parts, speculation=speculation).run(arriving)
    took = process_time() - began
    found = result.summary(slo)
    priced = str(cost) if cost else f"{model} on {num_gpus} x {gpu}"
    if step_ms is not None:
        priced = f"{step_ms:g} ms a step"
    print(f"{arriving.name}: {len(arriving)} requests; {priced}; {num_gpu_blocks - 1} blocks of {block_size}")
    print(to_text(found))
    speed = len(arriving) / took if took else float("inf")
    print(f"simulated in {took:.1f} s of this machine's time: {speed:,.0f} requests/s, {found['steps']} steps")
    if refused := [record for record in result.records if record.finish_reason == "refused"]:
        print(f"refused, the first of {len(refused)}: {refused[0].error}")
    if json_path is not None:
        about = {"workload": arriving.name, "cost": priced, "num_gpu_blocks": num_gpu_blocks, "block_size": block_size}
        plain = {name: value if isfinite(value) else None for name, value in found.items()}  # JSON knows no nan
        json_path.write_text(json.dumps(about | plain, indent=1) + "\n", encoding="utf-8")


def _speculation(num_drafts: int, acceptance: float | None, draft_ms: float | None, seed: int) -> Any:
    from kvlab.sim import Speculation

    if num_drafts == 0:
        for name, value in (("--acceptance", acceptance), ("--draft-ms", draft_ms)):
            if value is not None:
                raise ValueError(f"{name} {value:g} without drafts: say how many with --speculate")
        return None
    return Speculation(num_drafts=num_drafts, acceptance=0.8 if acceptance is None else acceptance, seed=seed,
                       draft_seconds=(draft_ms or 0) / 1000)  # fmt: skip


def _blocks_beside_the_model(cost: Any, parts: Any) -> int:
    """Blocks in what 90% of the GPUs' memory leaves beside the weights, by a student's `sizing` if there is one."""
    from kvlab.sizing import num_gpu_blocks

    plan = num_gpu_blocks if parts is None else parts.num_gpu_blocks
    per_block = cost.kv_bytes_per_token * cost.block_size
    return plan(int(cost.gpu.memory * cost.num_gpus), 0.9, cost.shape.weight_bytes(cost.dtype_bytes),
                ACTIVATION_BYTES * cost.num_gpus, CUDAGRAPH_BYTES * cost.num_gpus, per_block)  # fmt: skip


def _workload(name: str, number: int | None, rate: float, burst_size: int, lengths: tuple[str, str],
              prefixes: tuple[int, int], seed: int) -> Any:  # fmt: skip
    from kvlab.sim import Bursts, ClosedBatch, Poisson, make_workload, read_trace
    from kvlab.sim.workload import parse_lengths

    made = {
        "closed": ClosedBatch,
        "poisson": lambda: Poisson(rate),
        "bursts": lambda: Bursts(burst_size, burst_size / Poisson(rate).rate),
    }
    if name in made:
        prompt, output = map(parse_lengths, lengths)
        tokens, different = prefixes
        return make_workload(1000 if number is None else number, prompt, output, made[name](), seed=seed,
                             prefix_tokens=tokens, num_prefixes=different, name=name)  # fmt: skip
    if not Path(name).exists():
        raise ValueError(f"no trace {name!r}: give a file, or one of {', '.join(made)}")
    trace = read_trace(name)
    if number is not None and number < 1:
        raise ValueError(f"num_requests is {number}: use a whole number >= 1")
    return trace if number is None else trace.first(number)


def to_text(found: dict[str, float]) -> str:
    """A summary for people: what SimResult.summary gives, in a screen's width."""
    lines = [f"{'seconds':18}{'p50':>11}{'p90':>11}{'p99':>11}"]
    names = {"queue": "in the queue", "ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "end to end"}
    for name, words in names.items():
        lines.append(f"{words:18}" + "".join(f"{found[f'{name}_p{q}_s']:>11.4f}" for q in (50, 90, 99)))
    rest = [
        ("makespan", f"{found['makespan_s']:,.1f} s for {found['finished']:,} requests ({found['refused']:,} refused)"),
        ("throughput", f"{found['requests_per_s']:,.2f} requests/s, {found['output_tokens_per_s']:,.1f} outputs/s, "
                       f"{found['total_tokens_per_s']:,.1f} tokens/s with prompts"),
        ("running", f"{found['running']:,.1f} on average, {found['peak_running']:,} at most; "
                    f"{found['idle_seats']:,} idle seat-steps"),
        ("KV blocks in use", f"{found['kv_usage']:.1%} on average, {found['kv_usage_peak']:.1%} at most; "
                             f"{found['kv_filled']:.1%} of their slots hold a token"),
        ("preemptions", f"{found['preemptions']:,}; {found['recomputed_tokens']:,} tokens computed again, "
                        f"{found['swapped_out_tokens']:,} swapped out"),
        ("prefix hits", f"{found['prefix_hit_rate']:.1%} of prompt tokens"),
    ]  # fmt: skip
    if "draft_tokens" in found:
        text = f"{found['tokens_per_verification']:.2f} tokens each; {found['accepted_tokens']:,} of " \
               f"{found['draft_tokens']:,} drafts held"
        rest.append(("verifications", text))
    if "slo_met" in found:
        good = f"{found['goodput_per_s']:,.2f} requests/s; {found['slo_met']:.1%} meet the objective"
        rest.insert(2, ("goodput", good))
    return "\n".join([*lines, *(f"{name:18}{text}" for name, text in rest)])
