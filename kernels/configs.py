"""The sizes that each kernel is launched with, in one table. Chosen when the kernel is written, never while serving.

Triton's autotune would try them out when a shape is first seen, so that the first request waits for the compiler, and
two runs may differ in their last bits. Here a shape always gets the same sizes.

A row holds for its architecture (compute capability times 10) and for newer ones, until one of them has a row of its
own. **Estimates**: chosen by what the compiler says (`python -m kvlab_kernels.aot`: registers, spills, shared
memory), not yet by measurement on a GPU.
"""

from typing import NamedTuple

import torch

from kvlab_kernels.launch import INTERPRETED, triton

INTERPRETED_SMS = 132  # so that interpreted kernels split as on an H200


class DecodeConfig(NamedTuple):
    """For gqa_packed and split_kv: tokens in a tile of K or V, warps of a program, stages of its pipeline."""

    tile: int
    num_warps: int
    num_stages: int


class VarlenConfig(NamedTuple):
    """For varlen. block_m: rows of a tile of Q, each one query head at one position."""

    block_m: int
    tile: int
    num_warps: int
    num_stages: int


class AWQConfig(NamedTuple):
    """For awq_matmul: rows of x and columns of the weight in a tile of the result."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (architecture, padded head dim): K and V of 2 bytes. Stages beyond 2 only prefetch the block table.
DECODE = {
    (80, 64): DecodeConfig(128, 4, 2),
    (80, 128): DecodeConfig(64, 4, 2),
    (80, 256): DecodeConfig(32, 4, 2),
}
# (architecture, padded head dim): for decodes and short chunks, for prefill
VARLEN = {
    (80, 64): (VarlenConfig(32, 64, 4, 2), VarlenConfig(128, 64, 8, 2)),
    (80, 128): (VarlenConfig(32, 32, 4, 2), VarlenConfig(128, 32, 8, 2)),  # a tile of 64 spills there
    (89, 128): (VarlenConfig(32, 32, 4, 2), VarlenConfig(128, 64, 8, 2)),
    (80, 256): (VarlenConfig(32, 16, 8, 2), VarlenConfig(64, 32, 8, 2)),
}
# The least block_m that holds all rows, else the last; for all architectures until one is measured. A warp needs 32
# columns: with fewer the compiler passes the unpacked weights through shared memory (tests/kernels/test_aot.py).
AWQ = (AWQConfig(16, 128, 4, 4), AWQConfig(32, 128, 4, 3), AWQConfig(64, 128, 4, 3))
LONG_QUERY = 64  # tokens from which on a chunk counts as prefill


def architecture(device: torch.device) -> int:
    """90 for an H200, 89 for a 4090; 80, the oldest in the tables, where kernels are interpreted."""
    if INTERPRETED or device.type != "cuda":
        return min(arch for arch, _ in DECODE)
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def num_sms(device: torch.device) -> int:
    """How many programs the device runs at once at the least: its streaming multiprocessors."""
    if INTERPRETED or device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def decode_config(arch: int, head_dim: int, element_size: int = 2, quantized: bool = False) -> DecodeConfig:
    """The row for a decode; `element_size` is the bytes of one number of q. ValueError before Ampere.

    quantized: K and V are stored in 8 bits. They are widened in registers, so more warps share a tile.
    """
    config = lookup(DECODE, arch, head_dim)
    return config._replace(tile=fit(config.tile, element_size), num_warps=8 if quantized else config.num_warps)


def varlen_config(
    arch: int, head_dim: int, group: int, max_query_len: int, element_size: int = 2, quantized: bool = False
) -> VarlenConfig:
    """The row for a step whose longest chunk has max_query_len tokens; `group` query heads share a KV head."""
    # fp32 does not run on tensor cores (its products are exact), and a large tile of it does not fit the registers.
    config = lookup(VARLEN, arch, head_dim)[max_query_len >= LONG_QUERY and element_size <= 2]
    if quantized:
        config = config._replace(block_m=min(config.block_m, 64), num_warps=8)
    block_m = max(config.block_m, triton.next_power_of_2(group))
    return config._replace(block_m=block_m, tile=fit(config.tile, element_size))


def awq_config(num_rows: int, element_size: int = 2) -> AWQConfig:
    """The row for x of num_rows; `element_size` is the bytes of one of its numbers."""
    config = next((row for row in AWQ if num_rows <= row.block_m), AWQ[-1])
    return config._replace(block_m=fit(config.block_m, element_size))


def lookup(table: dict, arch: int, head_dim: int):
    """The row of the newest architecture that is not newer than `arch`."""
    padded = max(triton.next_power_of_2(head_dim), 64)
    rows = [(since, row) for (since, dim), row in table.items() if dim == padded and since <= arch]
    if not rows:
        raise ValueError(f"no sizes for compute capability {arch / 10} and head dim {head_dim}: see kernels/configs.py")
    return max(rows)[1]


def fit(tile: int, element_size: int) -> int:
    """The tile for numbers of element_size bytes: a quarter for fp32, and at least the 16 rows of a tl.dot."""
    return max(tile // 4, 16) if element_size > 2 else tile
