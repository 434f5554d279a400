"""Rung 10, second part: RoPE (旋转位置编码) and the cache write in one launch.

    qkv      [ q q q q | k | v ]   one row of the projection
    q   -> rotated -> the query of attention
    k   -> rotated -> its slot in key_cache            with INT8: quantised on the way (rung 8)
    v   ------------> its slot in value_cache

Apart, the rotated k goes to memory and is read again to be written to its slot, which is where attention reads it. Here
it goes to the slot alone.

The rotation is that of the Hugging Face checkpoints (`kvlab.model.layers.rope`): elements i and i + D/2 form a pair,
and the minus sign is in the table. So the tile is laid out by halves: column c is element i of half h, each half padded
to a power of two, and its partner is element i of half 1 - h. Both are read in whole runs, whatever D is.
"""

import torch
from torch import Tensor

from kvlab.model import layers
from kvlab.model.quantize import LARGEST
from kvlab_kernels.cache_write import check_write, reshape_and_cache_reference
from kvlab_kernels.checks import DTYPES, shown
from kvlab_kernels.launch import check_device, tl, triton
from kvlab_kernels.quantized import check_written_dtype, quantize_and_cache_reference, store_rows


@triton.jit
def rotate(x, column, partner, cos, sin, real):
    """The heads of one token, at pointers x + column [HEADS, D], rotated; rounded as `layers.rope` rounds."""
    own = tl.load(x + column, mask=real, other=0.0)
    other = tl.load(x + partner, mask=real, other=0.0).to(tl.float32)
    turned = (own.to(tl.float32) * cos[None, :]).to(own.dtype)  # rounded alone; the second product is added unrounded
    return (turned.to(tl.float32) + other * sin[None, :]).to(own.dtype)


@triton.jit
def write_rows(x, cache, scales, real, row_real, LARGEST: tl.constexpr):
    """x [ROWS, D] to where the pointers say, quantised if there are scales."""
    if scales is not None:
        store_rows(x.to(tl.float32), cache, scales, real, row_real, LARGEST)
    else:
        tl.store(cache, x.to(tl.float32).to(cache.dtype.element_ty), mask=real)


@triton.jit
def rope_cache_kernel(
    q,  # [T, q_heads, head_dim], rows stride_q apart, contiguous within a row
    k,  # [T, kv_heads, head_dim]
    v,
    cos,  # [positions, head_dim]
    sin,  # with the sign of the first half in it
    positions,  # int64 [T]
    rotated,  # out: [T, q_heads, head_dim], contiguous
    key_cache,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache,
    key_scales,  # fp32 [num_blocks, block_size, kv_heads], or None
    value_scales,
    slot_mapping,  # int64 [T]
    stride_q,
    stride_k,
    stride_v,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    Q_HEADS_PADDED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    KV_HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    HALF: tl.constexpr = HEAD_DIM // 2
    c = tl.arange(0, 2 * HALF_PADDED)
    half = c // HALF_PADDED
    i = c % HALF_PADDED
    dims = i < HALF
    d = half * HALF + i
    partner = (1 - half) * HALF + i
    row = tl.load(positions + token) * HEAD_DIM
    cosine = tl.load(cos + row + d, mask=dims, other=0.0).to(tl.float32)
    sine = tl.load(sin + row + d, mask=dims, other=0.0).to(tl.float32)

    head = tl.arange(0, Q_HEADS_PADDED)[:, None] * HEAD_DIM
    real = (head < Q_HEADS * HEAD_DIM) & dims[None, :]
    query = rotate(q + token * stride_q, head + d[None, :], head + partner[None, :], cosine, sine, real)
    tl.store(rotated + token * Q_HEADS * HEAD_DIM + head + d[None, :], query, mask=real)

    kv_head = tl.arange(0, KV_HEADS_PADDED)
    heads = kv_head < KV_HEADS
    real = heads[:, None] & dims[None, :]
    head = kv_head[:, None] * HEAD_DIM
    to = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + head + d[None, :]
    key = rotate(k + token * stride_k, head + d[None, :], head + partner[None, :], cosine, sine, real)
    value = tl.load(v + token * stride_v + head + d[None, :], mask=real, other=0.0)
    if key_scales is not None:
        key_scales += slot * KV_HEADS + kv_head
        value_scales += slot * KV_HEADS + kv_head
    write_rows(key, key_cache + to, key_scales, real, heads, LARGEST)
    write_rows(value, value_cache + to, value_scales, real, heads, LARGEST)


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    slot_mapping: Tensor,
    *,
    scales: Tensor | None = None,
) -> Tensor:
    """Rotated q [T, H, D], contiguous; k, rotated, and v [T, num_kv_heads, D] go to their slots. k is not changed.

    cos, sin [positions, 1, D] of q's dtype: the tables of `kvlab.model.layers.RotaryEmbedding`, sign included.
    positions int64 [T]. kv, scales and slot_mapping as for `quantize_and_cache`, or without scales as for
    `reshape_and_cache`. A token whose slot is -1 is padding: its row of the result is not written. Raises ValueError
    for what does not fit.
    """
    check_write(k, v, kv, slot_mapping, scales)
    check_written_dtype(kv)
    num_tokens, (kv_heads, head_dim) = k.shape[0], kv.shape[3:]
    fits = q.dim() == 3 and q.shape[0] == num_tokens and q.shape[2] == head_dim
    if not fits or q.dtype not in DTYPES or q.dtype != k.dtype:
        raise ValueError(f"q is {shown(q)}: give [{num_tokens}, heads, {head_dim}] of k's dtype, {k.dtype}")
    if q.numel() and q[0].stride() != (head_dim, 1):
        raise ValueError(f"q is {shown(q)}: the heads of one token must lie together")
    if head_dim % 2:
        raise ValueError(f"the head dim is {head_dim}: elements are rotated in pairs, so it must be even")
    for name, x in (("cos", cos), ("sin", sin)):
        if x.dim() not in (2, 3) or x.numel() != len(x) * head_dim or x.dtype != q.dtype or not x.is_contiguous():
            raise ValueError(f"{name} is {shown(x)}: give contiguous {q.dtype} [positions, 1, {head_dim}]")
    if cos.shape != sin.shape:
        raise ValueError(f"cos is {shown(cos)} and sin is {shown(sin)}: give two tables of one shape")
    if positions.shape != slot_mapping.shape or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(f"positions is {shown(positions)}: give contiguous int64 [{num_tokens}]")
    if not positions.is_cuda and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= len(cos):
            raise ValueError(f"positions go from {low} to {high}, but cos and sin have {len(cos)} rows")
    check_device(q, k, cos, sin, positions)
    rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        rope_cache_kernel[(num_tokens,)](
            q, k, v, cos, sin, positions, rotated, kv[0], kv[1], *((None, None) if scales is None else scales),
            slot_mapping, q.stride(0), k.stride(0), v.stride(0), kv.stride(1), kv.stride(2),
            BLOCK_SIZE=kv.shape[2], Q_HEADS=q.shape[1], Q_HEADS_PADDED=triton.next_power_of_2(q.shape[1]),
            KV_HEADS=kv_heads, KV_HEADS_PADDED=triton.next_power_of_2(kv_heads),
            HEAD_DIM=head_dim, HALF_PADDED=triton.next_power_of_2(head_dim // 2), LARGEST=LARGEST.get(kv.dtype, 0.0),
            num_warps=4,
        )  # fmt: skip
    return rotated


def rope_and_cache_reference(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, kv: Tensor, slot_mapping: Tensor,
    *, scales: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The same in steps: `layers.rope` for q and k, then the write of rung 1 or 8. Rows of padding are rotated too."""
    turn = [table.view(-1, 1, q.shape[2])[positions] for table in (cos, sin)]
    if scales is None:
        reshape_and_cache_reference(layers.rope(k, *turn), v, kv, slot_mapping)
    else:
        quantize_and_cache_reference(layers.rope(k, *turn), v, kv, scales, slot_mapping)
    return layers.rope(q, *turn)
