"""`kvlab plan`: what fits a GPU, before anything is downloaded. `kvlab random-model`: a folder to try it with."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.capacity import model_config, to_bytes
from kvlab.cli_labs import needs
from kvlab.plan import CARDS, DTYPE_BYTES, Plan, alternatives, find_card, make_plan, settings_of
from kvlab.sizing import MODELS, ModelShape, format_bytes

TYPICAL = (1024, 4096)  # tokens of a request, prompt and output, that are shown besides max_model_len
POSITIONS = {"Llama-2": 4096, "Llama-3": 8192, "Qwen2.5": 131_072}  # of the models that are known by size alone


def plan(
    model: Annotated[str, typer.Argument(help="A folder, a hub id (config.json is downloaded), or a known name.")],
    gpu: Annotated[str | None, typer.Option(help="4090, A100, ...; without one, all that are known.")] = None,
    memory: Annotated[str | None, typer.Option(help="Of a GPU not in the table: '24 GiB'.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence; else the model's own.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the GPU's memory; 0.9.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.")] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="The same, of K and V; or int8.")] = None,
    quantization: Annotated[str | None, typer.Option(help="awq: as if the weights were in 4 bits.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block; 16.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Seats; 256.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="The token budget of a step; 2048.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Does a model fit a GPU, and how many requests with it? Nothing is loaded (docs/gpu.md)."""
    if gpu and memory:
        raise ValueError("--gpu and --memory are both given: one of them says how much memory there is")
    config = config_of(model)
    shape = ModelShape.from_config(config)
    settings = settings_of(
        config, max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization, dtype=dtype,
        kv_cache_dtype=kv_cache_dtype, quantization=quantization, block_size=block_size, max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    name = Path(model).resolve().name if Path(model).is_dir() else model
    if gpu or memory:
        card = find_card(gpu) if gpu else None
        made = make_plan(shape, CARDS[card].total_bytes if card else _bytes(memory), settings)
        others = [] if made.fits else alternatives(made, card)
        if as_json:
            print(json.dumps(_facts(name, card, made) | {"alternatives": [_other(*pair) for pair in others]}, indent=2))
        else:
            print(describe(name, card, made, others))
        return
    plans = {card: make_plan(shape, CARDS[card].total_bytes, settings) for card in CARDS}
    if as_json:
        print(json.dumps([_facts(name, card, made) for card, made in plans.items()], indent=2))
    else:
        print(table(name, plans))


def random_model(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    like: Annotated[str, typer.Option(help="A known model, such as Qwen/Qwen2.5-7B.")],
    layers: Annotated[int | None, typer.Option(help="So many layers; else all.", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Stored as bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
    tokenizer: Annotated[bool, typer.Option(help="Copy the shipped model's tokenizer.")] = True,
    awq: Annotated[bool, typer.Option("--awq", help="Weights in 4 bits, as AWQ stores them.")] = False,
) -> None:
    """Write a model folder in a real model's exact shape, with random weights: to try the path, not the words."""
    with needs("engine"):
        from kvlab.model.known import known_config
        from kvlab.model.random_weights import AWQ_CONFIG, write_random_model

        config = known_config(like) | ({"quantization_config": AWQ_CONFIG} if awq else {})
        if layers is not None:
            config["num_hidden_layers"] = layers
        write_random_model(folder, config, dtype=dtype, seed=seed, tokenizer=tokenizer)
    num_bytes = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {config['num_hidden_layers']} layers of {like}, random, {format_bytes(num_bytes)}")


def config_of(model: str) -> dict[str, Any]:
    """The config.json of a folder or a hub id; of a known name, what we know of it."""
    from kvlab.model.hub import read_config
    from kvlab.model.known import KNOWN

    if "/" in model or model == "tiny" or Path(model).is_dir():
        return read_config(model)
    if model in KNOWN:
        return KNOWN[model]
    if model in MODELS:
        positions = next(number for prefix, number in POSITIONS.items() if model.startswith(prefix))
        return model_config(model) | {"max_position_embeddings": positions}
    raise ValueError(
        f"model {model!r} is no folder here: give one, a hub id like 'Qwen/Qwen2.5-7B-Instruct', or one of "
        f"{', '.join(dict.fromkeys([*KNOWN, *MODELS]))}"
    )


def _bytes(memory: str) -> int:
    number = memory.rstrip("KMGiB ")
    return to_bytes(f"{number.strip()} {memory[len(number) :].strip()}")


def verdict(name: str, where: str, plan: Plan) -> str:
    """One sentence."""
    settings = plan.settings
    what = f"{name} in {'4-bit AWQ' if settings.quantization else settings.dtype}"
    if plan.missing_bytes:
        return f"{what} does not fit {where}: {format_bytes(plan.missing_bytes)} are missing for the first K/V block."
    if not plan.fits:
        return (f"{what} fits {where} for sequences of up to {plan.num_tokens:,} tokens, less than the "
                f"{settings.max_model_len:,} of max_model_len.")  # fmt: skip
    times = plan.concurrency(settings.max_model_len)
    return (f"{what} fits {where}: K/V of {plan.num_tokens:,} tokens, {times:.2f} requests of "
            f"{settings.max_model_len:,} tokens at once.")  # fmt: skip


def describe(name: str, card: str | None, plan: Plan, others: list[tuple[str, Plan]]) -> str:
    """The whole plan for people: each use with its formula, what is left, the verdict, and what would help."""
    s, shape = plan.settings, plan.shape
    weights = DTYPE_BYTES[s.dtype]
    stored = f"{shape.num_parameters:,} parameters x {weights} bytes ({s.dtype})"
    if s.quantization:
        stored = f"AWQ: {shape.num_layer_weights:,} weights in 4 bits, groups of {s.group_size}; the rest in {s.dtype}"
    budget = int(plan.total_bytes * s.gpu_memory_utilization)
    scale = " + 4 for a scale" if s.kv_dtype == "int8" else ""
    head = f"{shape.head_dim} x {DTYPE_BYTES[s.kv_dtype]}{scale}"
    total = format_bytes(plan.total_bytes)
    if card:
        total += f", an estimate: {CARDS[card].memory_gib} GiB, of which CUDA sees {CARDS[card].usable:.1%}"
    lines = [
        ("budget", budget, f"gpu_memory_utilization {s.gpu_memory_utilization:g} x {total}"),
        ("weights", plan.weight_bytes, stored),
        ("CUDA context", plan.context_bytes, "estimate: driver, libraries, compiled kernels"),
        ("largest step", plan.activation_bytes,
         f"estimate: {s.max_num_batched_tokens} tokens through a layer, or the sampler on "
         f"{min(s.max_num_seqs, s.max_num_batched_tokens)} seats x {shape.vocab_size:,} words, whichever is more"),
        ("CUDA graphs", plan.cudagraph_bytes, f"estimate: decodes of up to {s.max_num_seqs} seats"),
        ("left for K/V", max(0, budget - plan.weight_bytes - plan.context_bytes - plan.activation_bytes
                             - plan.cudagraph_bytes), "budget less all of these"),
    ]  # fmt: skip
    rows = [f"{name} on {card or 'a GPU of ' + format_bytes(plan.total_bytes)}", ""]
    rows += [f"  {what:<14}{format_bytes(num_bytes):>11}   {why}" for what, num_bytes, why in lines]
    rows += [
        "",
        f"  K/V of a token  {format_bytes(plan.kv_bytes_per_token)} = 2 x {shape.num_hidden_layers} layers x "
        f"{shape.num_key_value_heads} KV heads x ({head}) bytes",
        f"  num_gpu_blocks  {plan.num_gpu_blocks:,} of {s.block_size} tokens, one of them the null block: "
        f"{plan.num_tokens:,} tokens",
    ]
    if plan.num_tokens:
        at_once = [f"{plan.concurrency(n):.2f} of {n:,} tokens" for n in (*_typical(s.max_model_len), s.max_model_len)]
        rows.append(f"  requests at once, sharing nothing: {'; '.join(at_once)} (seats: {s.max_num_seqs})")
    rows += ["", verdict(name, f"the {card}" if card else "this GPU", plan)]
    if card and CARDS[card].note:
        rows.append(f"Note on the {card}: {CARDS[card].note}.")
    if others:
        rows.append("What would fit:")
        rows += [f"  {words}: {other.num_tokens:,} tokens, {other.concurrency(other.settings.max_model_len):.2f} "
                 f"requests of {other.settings.max_model_len:,}" for words, other in others]  # fmt: skip
    elif not plan.fits:
        rows.append("Nothing that we know to change makes it fit: use a smaller model, or --max-model-len.")
    rows.append("The engine measures, when it starts, what is estimated here.")
    return "\n".join(rows)


def table(name: str, plans: dict[str, Plan]) -> str:
    """All cards, one a line."""
    settings = next(iter(plans.values())).settings
    lengths = (*_typical(settings.max_model_len), settings.max_model_len)
    head = f"{'GPU':<11}{'sees':>11}{'weights':>11}{'K/V tokens':>12}" + "".join(f"{f'x {n:,}':>12}" for n in lengths)
    rows = [f"{name}: tokens of K/V, and how many requests of so many tokens at once", "", head]
    for card, plan in plans.items():
        row = f"{card:<11}{format_bytes(plan.total_bytes):>11}{format_bytes(plan.weight_bytes):>11}"
        if plan.missing_bytes:
            row += f"   does not fit: {format_bytes(plan.missing_bytes)} are missing"
        else:
            row += f"{plan.num_tokens:>12,}" + "".join(f"{plan.concurrency(n):>12.2f}" for n in lengths)
        rows.append(row)
    rows += ["", "Estimates: what each GPU reports to CUDA, the largest step, CUDA graphs. kvlab plan MODEL --gpu NAME "
             "shows each, and what would help."]  # fmt: skip
    return "\n".join(rows)


def _typical(max_model_len: int) -> list[int]:
    return [length for length in TYPICAL if length < max_model_len]


def _facts(name: str, card: str | None, plan: Plan) -> dict[str, Any]:
    facts = {"model": name, "gpu": card} | asdict(plan) | {"num_tokens": plan.num_tokens, "fits": plan.fits}
    lengths = (*_typical(plan.settings.max_model_len), plan.settings.max_model_len)
    facts["concurrency"] = {str(length): round(plan.concurrency(length), 2) for length in lengths}
    facts["estimates"] = ["activation_bytes", "cudagraph_bytes", "context_bytes"] + ["total_bytes"] * (card is not None)
    return facts | {"verdict": verdict(name, f"the {card}" if card else "this GPU", plan)}


def _other(words: str, plan: Plan) -> dict[str, Any]:
    return {"change": words, "num_tokens": plan.num_tokens,
            "concurrency": round(plan.concurrency(plan.settings.max_model_len), 2)}  # fmt: skip
