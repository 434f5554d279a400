"""How many KV blocks the engine gets (PAV 3.1), and what to say when they cannot be enough."""

import os
from collections.abc import Callable

import torch

from kvlab import sizing
from kvlab.blocks import cdiv
from kvlab.config import EngineConfig
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import kv_bytes_per_token

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
    return "cpu" if device.type == "cpu" else str(device)


def plan_blocks(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype,
                num_gpu_blocks: Callable[..., int] = sizing.num_gpu_blocks) -> tuple[int, int]:  # fmt: skip
    """(GPU blocks, CPU blocks of swap space) for `model_config` with K/V stored as `dtype`.

    config: max_model_len and device must be set. num_gpu_blocks: a replacement for ours (lab 01).
    ValueError if they cannot fit the machine's memory.
    """
    block_bytes = kv_bytes_per_token(model_config, dtype) * config.block_size
    num_gpu = config.num_gpu_blocks_override
    if num_gpu is None:
        # More than every seat at full length can never be used; the null block comes on top.
        most = config.max_num_seqs * cdiv(config.max_model_len, config.block_size) + 1
        num_gpu = min(most, num_gpu_blocks(*_memory(config, model_config, dtype), block_bytes))
    num_cpu = config.num_cpu_blocks_override
    if num_cpu is None:
        num_cpu = int(config.swap_space * sizing.GIB // block_bytes)
    on_host = (num_cpu + (num_gpu if config.device == "cpu" else 0)) * block_bytes
    if on_host > host_bytes():
        raise ValueError(
            f"{num_gpu} blocks and {num_cpu} of swap space take {sizing.format_bytes(on_host)} of this machine's "
            f"{sizing.format_bytes(host_bytes())}: lower num_gpu_blocks_override, num_cpu_blocks_override or swap_space"
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
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but {num_gpu_blocks - 1} usable blocks of {config.block_size} "
            f"hold {room} tokens: set max_model_len to at most {room}, or give the engine at least "
            f"{cdiv(config.max_model_len, config.block_size) + 1} blocks"
        )


def _memory(config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> tuple[int, float, int, int, int]:
    """Total bytes, the share to use, and the bytes of weights, activations and CUDA graphs (as sizing wants them)."""
    if config.device == "cpu":
        return CPU_POOL_BYTES, 1.0, 0, 0, 0  # the pool's share is what it is, whatever else is in memory
    free, total = torch.cuda.mem_get_info()
    # An estimate of the largest step: the MLP's two wide activations for every token, and fp32 logits for every seat.
    activations = config.max_num_batched_tokens * model_config.intermediate_size * 3 * dtype.itemsize
    activations += config.max_num_seqs * model_config.vocab_size * 3 * 4
    if model_config.awq_group_size:  # a long step writes the largest matrix out, gate and up
        activations += 2 * model_config.intermediate_size * model_config.hidden_size * dtype.itemsize
    return total, config.gpu_memory_utilization, total - free, activations, 0
