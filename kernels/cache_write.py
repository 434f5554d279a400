"""Rung 1: write this step's K and V into their slots (槽位) of the paged cache.

The scheduler has chosen a slot for each token: block_id * block_size + offset (L33 2.2). One program copies one token's
K and V, all heads at once, to where the slot mapping sends it:

    k, v           token 0 | token 1 | token 2 | token 3       [T, num_kv_heads, head_dim]
    slot_mapping        6         7        -1        2         -1: padding, written nowhere
                        |         |                  |
    cache          block 0: . . # .    block 1: . . # #        block_size 4

Tokens that follow each other need not have slots that do, so nothing is written but the slots named. Writing a step
again writes the same. vLLM calls this reshape_and_cache.
"""

import torch
from torch import Tensor

from kvlab_kernels.checks import check_cache, shown
from kvlab_kernels.launch import check_device, tl, triton

TILE = 1024  # numbers of one token that a program copies; more heads than that take more programs


@triton.jit
def cache_write_kernel(
    k,  # [T, ROW], ROW = num_kv_heads * head_dim, rows stride_k apart
    v,  # [T, ROW]
    key_cache,  # [num_blocks, block_size, ROW]
    value_cache,  # [num_blocks, block_size, ROW]
    slot_mapping,  # int64 [T]
    stride_k,
    stride_v,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    # 64 bits from here on: slot times row passes 2^31 in a cache of a few GB.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < ROW
    target = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + column
    tl.store(key_cache + target, tl.load(k + token * stride_k + column, mask=inside), mask=inside)
    tl.store(value_cache + target, tl.load(v + token * stride_v + column, mask=inside), mask=inside)


def reshape_and_cache(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """Put k and v [T, num_kv_heads, head_dim] into kv's slots, int64 [T]; a slot of -1 is skipped (L33 2.2).

    kv [2, num_blocks, block_size, num_kv_heads, head_dim], one layer; its dtype may be another than k's. k and v may be
    slices of one wider tensor, as a fused projection makes them. Raises ValueError for what does not fit.
    """
    check_write(k, v, kv, slot_mapping)
    num_tokens, row = k.shape[0], k.shape[1] * k.shape[2]
    if num_tokens == 0:
        return
    tile = min(TILE, triton.next_power_of_2(row))
    cache_write_kernel[(num_tokens, triton.cdiv(row, TILE))](
        k, v, kv[0], kv[1], slot_mapping,
        k.stride(0), v.stride(0), kv.stride(1), kv.stride(2),
        BLOCK_SIZE=kv.shape[2], ROW=row, TILE=tile,
        num_warps=max(tile // 256, 1),  # so that each thread moves 8 numbers at once
    )  # fmt: skip


def reshape_and_cache_reference(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor) -> None:
    """The same, one token after the other."""
    block_size = kv.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv[0, slot // block_size, slot % block_size] = k[token].to(kv.dtype)
            kv[1, slot // block_size, slot % block_size] = v[token].to(kv.dtype)


def check_write(k: Tensor, v: Tensor, kv: Tensor, slot_mapping: Tensor, scales: Tensor | None = None) -> None:
    """ValueError for what the kernel cannot write, RuntimeError for the device."""
    check_cache(kv, scales)
    heads_and_dim = list(kv.shape[3:])
    for name, x in (("k", k), ("v", v)):
        if list(x.shape[1:]) != heads_and_dim or not x.is_floating_point() or x.shape[0] != k.shape[0]:
            raise ValueError(f"{name} is {shown(x)}: give floating point {['T', *heads_and_dim]}, as the cache has it")
        if x.numel() and x[0].stride() != (heads_and_dim[1], 1):
            raise ValueError(f"{name} is {shown(x)}: the heads of one token must lie together")
    if kv.stride(3) != kv.shape[4]:
        raise ValueError(f"kv is {shown(kv)}: the heads of one slot must lie together")
    if slot_mapping.shape != k.shape[:1] or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping is {shown(slot_mapping)}: give contiguous int64 [{k.shape[0]}]")
    num_slots = kv.shape[1] * kv.shape[2]
    if not slot_mapping.is_cuda and slot_mapping.numel() and int(slot_mapping.max()) >= num_slots:
        raise ValueError(f"slot_mapping has slot {int(slot_mapping.max())}, but the cache has {num_slots} slots")
    check_device(k, v, kv, slot_mapping, *(() if scales is None else (scales,)))
