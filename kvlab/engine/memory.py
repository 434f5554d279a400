"""How many KV blocks the engine gets (PAV 3.1), and what to say when they cannot be enough."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from kvlab import sizing
from kvlab.blocks import cdiv
from kvlab.config import EngineConfig
from kvlab.engine.profile import MemoryUse
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import kv_bytes_per_token

logger = logging.getLogger("kvlab")
CPU_POOL_BYTES = 1 << 30  # the pool on a CPU, unless num_gpu_blocks_override says otherwise


def choose_device(name: str) -> str:
    """The torch device for `name`; "auto" is CUDA if there is one. ValueError if it cannot be used here."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {name!r}: use 'auto', 'cpu' or 'cuda' ({str(error).splitlines()[0]})") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but PyTorch finds no CUDA GPU here: use 'cpu' (see `kvlab doctor`)")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}: kvlab runs on 'cpu' and 'cuda'")
    if device.type == "cuda" and device.index not in (None, torch.cuda.current_device()):
        # Triton launches, torch.cuda.Event records and torch.cuda.graph captures on the thread's current GPU.
        raise ValueError(
            f"device is {name!r}, and kvlab runs on one GPU, the current one: start the process with "
            f"CUDA_VISIBLE_DEVICES={device.index} and use 'cuda'"
        )
    return "cpu" if device.type == "cpu" else str(device)


def plan_blocks(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, memory: MemoryUse | None = None,
                num_gpu_blocks: Callable[..., int] = sizing.num_gpu_blocks) -> tuple[int, int]:  # fmt: skip
    """(GPU blocks, CPU blocks of swap space) for `model_config` with K/V stored as `dtype`.

    config: max_model_len and device must be set. memory: of the device, measured; None for a CPU, whose pool is 1 GiB.
    num_gpu_blocks: a replacement for ours (lab 01). ValueError if they cannot fit the machine's memory.
    """
    block_bytes = kv_bytes_per_token(model_config, dtype) * config.block_size
    num_gpu = config.num_gpu_blocks_override
    if num_gpu is None:
        if memory is None:  # the pool's share is what it is, whatever else is in memory
            num_gpu = num_gpu_blocks(CPU_POOL_BYTES, 1.0, 0, 0, 0, block_bytes)
        else:
            num_gpu = num_gpu_blocks(memory.total, config.gpu_memory_utilization, memory.used, memory.activations,
                                     memory.cudagraphs, block_bytes)  # fmt: skip
        # More than every seat at full length can never be used; the null block comes on top.
        num_gpu = min(num_gpu, config.max_num_seqs * cdiv(config.max_model_len, config.block_size) + 1)
    num_cpu = config.num_cpu_blocks_override
    if num_cpu is None:
        num_cpu = int(config.swap_space * sizing.GIB // block_bytes)
    if config.device == "cpu":
        on_host, rounded = (num_cpu + num_gpu) * block_bytes, ""
    else:  # pinned, and PyTorch's allocator of such memory rounds up
        on_host = 1 << (num_cpu * block_bytes - 1).bit_length() if num_cpu else 0
        rounded = ", pinned and so rounded up to a power of two"
    if on_host > host_bytes():
        raise ValueError(
            f"{num_gpu} blocks and {num_cpu} of swap space take {sizing.format_bytes(on_host)} of this machine's "
            f"{sizing.format_bytes(host_bytes())}{rounded}: lower num_gpu_blocks_override, "
            "num_cpu_blocks_override or swap_space"
        )
    return num_gpu, num_cpu


def host_bytes() -> int:
    """The machine's memory in bytes; where the system does not tell, more than any."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


def check_max_model_len(config: EngineConfig, num_gpu_blocks: int) -> None:
    """ValueError if a sequence of max_model_len tokens needs more than the usable blocks."""
    room = (num_gpu_blocks - 1) * config.block_size
    if config.max_model_len > room:
        others = "" if config.device == "cpu" else (
            ": more gpu_memory_utilization, kv_cache_dtype 'int8', fewer max_num_seqs or max_num_batched_tokens, or a "
            "smaller model make room"
        )  # fmt: skip
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but {num_gpu_blocks - 1} usable blocks of {config.block_size} "
            f"hold {room} tokens: set max_model_len to at most {room}, or give the engine at least "
            f"{cdiv(config.max_model_len, config.block_size) + 1} blocks{others}"
        )


@contextmanager
def out_of_memory(doing: str, remedy: str) -> Iterator[None]:
    """Make a ValueError, which says what to do, of CUDA's out-of-memory error: for a GPU's memory, or pinned memory."""
    try:
        yield
    except (torch.OutOfMemoryError, torch.AcceleratorError) as error:
        if "out of memory" not in str(error):
            raise
        first = " ".join(str(error).split()).partition(" See documentation")[0]
        whose = "the GPU's" if isinstance(error, torch.OutOfMemoryError) else "the GPU's or pinned"
        raise ValueError(f"{whose} memory ran out while {doing}: {remedy}. PyTorch says: {first}") from None


def log_memory(config: EngineConfig, block_bytes: int, memory: MemoryUse | None) -> None:
    """Tell the logger "kvlab" what there is room for, in vLLM's words. (The null block holds no tokens.)"""
    usable = config.num_gpu_blocks_override - 1
    device = "CPU" if config.device == "cpu" else "GPU"
    if memory is not None:
        logger.info(
            "Memory: %s in use before the KV cache (weights, and others' if there are any), %s at most for a step, "
            "%s for CUDA graphs, of %s x %g",
            *map(sizing.format_bytes, (memory.used, memory.activations, memory.cudagraphs, memory.total)),
            config.gpu_memory_utilization,
        )
    logger.info("%s KV cache size: %s tokens (%s blocks, %s)", device, f"{usable * config.block_size:,}",
                f"{usable:,}", sizing.format_bytes(usable * block_bytes))  # fmt: skip
    concurrency = usable / cdiv(config.max_model_len, config.block_size)
    logger.info("Maximum concurrency for %s tokens per request: %.2fx", f"{config.max_model_len:,}", concurrency)
