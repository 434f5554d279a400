"""`kvlab serve`: vLLM's flags, into an engine's settings and the server's."""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab.cli_labs import needs, parts_of, show_log

SERVER, ENGINE = "Server", "Engine"
FLAG = {"rich_help_panel": ENGINE}


def serve(
    model: Annotated[str | None, typer.Argument(help="'tiny' (shipped), a model's folder, or a hub id.")] = None,
    model_: Annotated[str | None, typer.Option("--model", help="The same.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="What requests call it; may be given again.", rich_help_panel=SERVER)
    ] = None,
    host: Annotated[
        str, typer.Option(help="127.0.0.1 is this machine only, 0.0.0.0 all its networks.", rich_help_panel=SERVER)
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 is any free one.", rich_help_panel=SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(help="Requests must bring one of them.", envvar="KVLAB_API_KEY", rich_help_panel=SERVER),
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Prompts that may wait; others get 429.", rich_help_panel=SERVER)
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that requests in flight have after SIGTERM.", rich_help_panel=SERVER)
    ] = 60.0,
    uvicorn_log_level: Annotated[
        str, typer.Option(help="critical, error, warning, info (each request), debug.", rich_help_panel=SERVER)
    ] = "warning",
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="NOTEBOOK", help="Run on your solved parts of this lab; may be given again."),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence, outputs included.", **FLAG)] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Seats.", **FLAG)] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="The token budget of a step.", **FLAG)] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="Share of the GPU's memory.", **FLAG)] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per block.", **FLAG)] = None,
    num_gpu_blocks_override: Annotated[int | None, typer.Option(help="Blocks in the pool.", **FLAG)] = None,
    swap_space: Annotated[float | None, typer.Option(help="GiB of CPU memory for swapped blocks.", **FLAG)] = None,
    enable_prefix_caching: Annotated[bool | None, typer.Option(help="Share equal prefixes; on.", **FLAG)] = None,
    enable_chunked_prefill: Annotated[bool | None, typer.Option(help="Prompts over several steps; on.", **FLAG)] = None,
    long_prefill_token_threshold: Annotated[
        int | None, typer.Option(help="Tokens of one prompt in a step at most.", **FLAG)
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16, float16.", **FLAG)] = None,
    kv_cache_dtype: Annotated[str | None, typer.Option(help="The same, of K and V; or int8.", **FLAG)] = None,
    quantization: Annotated[str | None, typer.Option(help="awq: insist on weights in 4 bits.", **FLAG)] = None,
    attention_backend: Annotated[str | None, typer.Option(help="auto, torch, triton or naive.", **FLAG)] = None,
    enforce_eager: Annotated[bool | None, typer.Option(help="Never replay CUDA graphs; off.", **FLAG)] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.", **FLAG)] = None,
    seed: Annotated[int | None, typer.Option(help="Where the seeds of requests without one come from.", **FLAG)] = None,
) -> None:
    """Serve a model to OpenAI clients: completions, chats, streams, metrics (docs/serving.md)."""
    from kvlab.serve import ServerArgs

    if model and model_ and model != model_:
        raise ValueError(f"the model is given twice, {model!r} and --model {model_!r}: give one")
    model = model or model_ or "tiny"
    args = ServerArgs(
        served_model_name=tuple(served_model_name or (_name_of(model),)), host=host, port=port,
        api_key=tuple(api_key or ()), max_waiting=max_waiting, drain_timeout=drain_timeout,
        uvicorn_log_level=uvicorn_log_level,
    )  # fmt: skip
    options: dict[str, Any] = {
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "gpu_memory_utilization": gpu_memory_utilization,
        "block_size": block_size,
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "swap_space": swap_space,
        "enable_prefix_caching": enable_prefix_caching,
        "enable_chunked_prefill": enable_chunked_prefill,
        "long_prefill_token_threshold": long_prefill_token_threshold,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "quantization": quantization,
        "attention_backend": attention_backend,
        "enforce_eager": enforce_eager,
        "device": device,
        "seed": seed,
        "parts": parts_of(with_) if with_ else None,
    }
    options = {name: value for name, value in options.items() if value is not None}
    if "parts" in options and options["parts"].arena:
        options = {"max_model_len": 512} | options | {"reservation": "contiguous"}  # an arena places whole requests
    raise typer.Exit(_run(args, model, options))


def _name_of(model: str) -> str:
    """A folder's own name: its path is nobody's business."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _run(args: Any, model: str, options: dict[str, Any]) -> int:
    with needs("engine", "serve"):
        from kvlab import LLMEngine
        from kvlab.serve import serve as run

        show_log()
        return run(args, lambda recorder: LLMEngine(model, recorder=recorder, **options))
