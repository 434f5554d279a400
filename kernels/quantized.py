"""Rung 8: K and V in 8 bits (quantisation, 量化): half the bytes of bf16 to read, twice the tokens in a pool (PAV 3.1).

    write   k of one token and head   [ 0.30  -1.27   0.02 ...]      scale = largest / 127 = 0.01
            key_cache                 [   30   -127      2 ...]      int8
            key_scales                0.01                           fp32, [num_blocks, block_size, num_kv_heads]

    read    score of token t          (q . k_t) * scale_t            one number after the product, not D before it
            result                    sum of (weight_t * scale_t) * v_t

One head of one token shares a scale, so that the scale leaves the product: q . (30, -127, 2) * 0.01. That is why
attention over INT8 is no kernel of its own. `sweep`, the walk of rungs 5 to 7, multiplies the scores of a tile by K's
scales, and the weights by V's: a few lines, which are not compiled where there are no scales. (vLLM calls this layout
int8_per_token_head.) The sum of the weights must come first: it is the softmax's, and knows no scale of V.

How far off: see `error_bound`. Accuracy in a model is another question, which only its answers decide.

FP8 (float8_e4m3fn) is stored in the same way, 448 in the place of 127. Its steps grow with the number, which suits a
head in which few numbers are large. It needs compute capability 8.9. Interpreted, it can be read, but not written:
there Triton rounds to it wrongly.
"""

import torch
from torch import Tensor

from kvlab.model.quantize import LARGEST, dequantize, quantize
from kvlab_kernels.cache_write import check_write
from kvlab_kernels.launch import INTERPRETED, tl, triton


@triton.jit
def largest_of(x):
    """The largest magnitude in each row of fp32 x [ROWS, D] -> [ROWS]; infinity where one is infinite or NaN."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), axis=1)


@triton.jit
def quantize_rows(x, scale, dtype: tl.constexpr, LARGEST: tl.constexpr):
    """fp32 x [ROWS, D] as multiples of scale [ROWS], in dtype; zeros where the scale is zero or infinite."""
    known = (scale > 0) & (scale < float("inf"))
    # div_rn divides as PyTorch does; a plain division may differ in the last bit, and so in what it is rounded to.
    scaled = tl.div_rn(x, tl.broadcast_to(tl.where(known, scale, 1.0)[:, None], x.shape))
    scaled = tl.where(known[:, None], tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST), 0.0)
    if dtype == tl.int8:
        scaled = tl.floor(scaled + 0.5)
    return scaled.to(dtype)


@triton.jit
def store_rows(x, cache, scales, real, row_real, LARGEST: tl.constexpr):
    """Quantise fp32 x [ROWS, D] and store it at the pointers `cache` [ROWS, D] and `scales` [ROWS], masked."""
    scale = tl.div_rn(largest_of(x), LARGEST)
    tl.store(cache, quantize_rows(x, scale, cache.dtype.element_ty, LARGEST), mask=real)
    tl.store(scales, scale, mask=row_real)


@triton.jit
def quantized_write_kernel(
    k,  # [T, num_kv_heads, head_dim], rows stride_k apart, contiguous within a row
    v,
    key_cache,  # int8 or fp8 [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    key_scales,  # fp32 [num_blocks, block_size, num_kv_heads]
    value_scales,
    slot_mapping,  # int64 [T]
    stride_k,
    stride_v,
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PADDED)
    d = tl.arange(0, HEAD_DIM_PADDED)
    heads = head < HEADS
    real = heads[:, None] & (d < HEAD_DIM)[None, :]
    column = head[:, None] * HEAD_DIM + d[None, :]  # [HEADS, D]
    to = slot // BLOCK_SIZE * stride_block + slot % BLOCK_SIZE * stride_slot + column
    to_scale = slot * HEADS + head
    key = tl.load(k + token * stride_k + column, mask=real, other=0.0).to(tl.float32)
    store_rows(key, key_cache + to, key_scales + to_scale, real, heads, LARGEST)
    value = tl.load(v + token * stride_v + column, mask=real, other=0.0).to(tl.float32)
    store_rows(value, value_cache + to, value_scales + to_scale, real, heads, LARGEST)


def quantize_and_cache(k: Tensor, v: Tensor, kv: Tensor, scales: Tensor, slot_mapping: Tensor) -> None:
    """Quantise k and v [T, num_kv_heads, head_dim] into kv's slots, int64 [T]; a slot of -1 is skipped (L33 2.2).

    kv [2, num_blocks, block_size, num_kv_heads, head_dim] of int8, or on a GPU float8_e4m3fn; scales fp32
    [2, num_blocks, block_size, num_kv_heads]. What is stored is what `kvlab.model.quantize.quantize` says, to the bit
    (of int8). Raises ValueError for what does not fit.
    """
    check_write(k, v, kv, slot_mapping, scales)
    check_written_dtype(kv)
    heads, head_dim = kv.shape[3:]
    if k.shape[0]:
        quantized_write_kernel[(k.shape[0],)](
            k, v, kv[0], kv[1], scales[0], scales[1], slot_mapping,
            k.stride(0), v.stride(0), kv.stride(1), kv.stride(2),
            BLOCK_SIZE=kv.shape[2], HEADS=heads, HEADS_PADDED=triton.next_power_of_2(heads),
            HEAD_DIM=head_dim, HEAD_DIM_PADDED=triton.next_power_of_2(head_dim), LARGEST=LARGEST[kv.dtype],
            num_warps=4,
        )  # fmt: skip


def check_written_dtype(kv: Tensor) -> None:
    """ValueError if a kernel cannot write kv's dtype here."""
    if INTERPRETED and kv.dtype == torch.float8_e4m3fn:
        raise ValueError(
            "Triton's interpreter rounds to float8_e4m3fn wrongly: write int8, or use kvlab.model.quantize.quantize"
        )


def quantize_and_cache_reference(k: Tensor, v: Tensor, kv: Tensor, scales: Tensor, slot_mapping: Tensor) -> None:
    """The same, one token after the other."""
    block_size = kv.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            for half, x in enumerate((k, v)):
                at = half, slot // block_size, slot % block_size
                kv[at], scales[at] = quantize(x[token], kv.dtype)


def dequantized(kv: Tensor, scales: Tensor) -> Tensor:
    """The cache that attention over kv and its scales must equal, in float64."""
    return dequantize(kv, scales, torch.float64)


def error_bound(q: Tensor, keys: Tensor, values: Tensor, scale: float | None = None) -> Tensor:
    """How far INT8 may move the attention of q [D] over keys and values [L, D]: one number, for each of the D results.

    A stored number is at most half a step off, largest / 254. So a score is off by at most e = max over tokens of
    |q|_1 * scale * largest(k_t) / 254. Each weight then changes by a factor between exp(-2e) and exp(2e), the weights
    in sum by at most exp(2e) - 1, and the result by that times the largest v, and half a step of V. (In exact
    arithmetic; fp16 has its own limit, where weight_t * scale_t falls below 6e-8.)
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    e = q.abs().sum() * abs(scale) * keys.abs().max() / 254
    return (torch.exp(2 * e) - 1) * values.abs().max() + values.abs().max() / 254
