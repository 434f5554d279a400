"""Split-KV, mixed batches and INT8 in the small: what lab 11 builds, and what it uses where a part is unsolved.

The same as kvlab_kernels.split_kv, varlen and quantized, with fewer arguments: contiguous q and out, block sizes and
head dims that are powers of two.

    choose_num_splits  how many programs share one sequence     merge          their results as one, by log-sum-exp
    sweep              lab 10's walk, from start to end         split_kernel   a program for a part of a sequence
    find_sequence      whose query block is it?                 varlen_kernel  prefill chunks and decodes in one launch
    quantize           INT8, a scale for each token and head    sweep_int8     the walk over such K and V
    decode_attention   split, merged, with the same bits in any batch: the engine's `attention`
"""

import math
from types import FunctionType

import numpy as np

from kvlab.standin.launch import Kernel, tl, triton

LOG2E = math.log2(math.e)
MAX_SPLITS, MIN_SPLIT_TOKENS = 64, 256
SPLIT_TOKENS = 32


def choose_num_splits(num_seqs, num_kv_heads, max_seq_len, sms):
    """A power of two, 1 to 64: two programs for each of `sms`, unless a split would have fewer than 256 tokens."""
    splits = 1
    while (splits < MAX_SPLITS and num_seqs * num_kv_heads * splits < 2 * sms
           and max_seq_len >= 2 * splits * MIN_SPLIT_TOKENS):  # fmt: skip
        splits *= 2
    return splits


def merge(partial, lse):
    """partial [num_splits, D], lse [num_splits] (base 2; -inf: empty, its partial is garbage) -> (result [D], lse)."""
    live = lse > -np.inf
    if not live.any():
        return np.zeros(partial.shape[1], partial.dtype), -np.inf
    largest = lse[live].max()
    weights = np.exp2(lse[live] - largest)
    return weights @ partial[live] / weights.sum(), largest + np.log2(weights.sum())


@triton.jit
def sweep(
    query, limit, start, end, table, keys, values, scale_log2e, stride_block, stride_slot,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Online softmax over tokens start to end - 1 -> largest [ROWS], total [ROWS], result [ROWS, HEAD_DIM].

    Row r of query sees the tokens before limit[r]. keys and values point to number 0 of this KV head in slot 0.
    """
    d = tl.arange(0, HEAD_DIM)
    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        known = token < end
        block = tl.load(table + token // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = block * stride_block + token % BLOCK_SIZE * stride_slot
        k = tl.load(keys + slot[None, :] + d[:, None], mask=known[None, :], other=0.0)
        v = tl.load(values + slot[:, None] + d[None, :], mask=known[:, None], other=0.0)
        visible = known[None, :] & (token[None, :] < limit[:, None])
        scores = tl.where(visible, tl.dot(query, k, input_precision="ieee") * scale_log2e, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        alpha = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * alpha + tl.sum(weights, axis=1)
        result = result * alpha[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    return largest, total, result


@triton.jit
def split_kernel(
    partial, lse, q, keys, values, block_tables, seq_lens, scale_log2e, split_tokens,
    stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = split * split_tokens
    end = tl.minimum(start + split_tokens, tl.load(seq_lens + seq))
    row, d = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    real = row < GROUP
    at = (seq * tl.num_programs(0) + kv_head) * GROUP + row  # of q's rows, [ROWS]
    to = at * tl.num_programs(2) + split
    if start >= end:
        tl.store(lse + to, tl.full([ROWS], -float("inf"), dtype=tl.float32), mask=real)
        return
    query = tl.load(q + at[:, None] * HEAD_DIM + d[None, :], mask=real[:, None], other=0.0)
    largest, total, result = sweep(
        query, end + tl.zeros([ROWS], dtype=tl.int32), start, end, block_tables + seq * stride_table,
        keys + kv_head * stride_head, values + kv_head * stride_head, scale_log2e, stride_block, stride_slot,
        ROWS, HEAD_DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    tl.store(lse + to, largest + tl.log2(total), mask=real)
    tl.store(partial + to[:, None] * HEAD_DIM + d[None, :], result / total[:, None], mask=real[:, None])


@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The last sequence whose query blocks begin at or before `block`; sequence i's begin at start // BLOCK_Q + i."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def varlen_kernel(
    out, q, keys, values, block_tables, seq_lens, query_start_loc, num_seqs, scale_log2e,
    stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    block, kv_head = tl.program_id(0), tl.program_id(1)
    seq = find_sequence(query_start_loc, num_seqs, block, BLOCK_Q)
    begin = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - begin
    first = (block - begin // BLOCK_Q - seq) * BLOCK_Q
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    row, d = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    position = first + row // GROUP
    real = ((row < BLOCK_Q * GROUP) & (position < query_len))[:, None]
    at = ((begin + position) * tl.num_programs(1) + kv_head) * GROUP + row % GROUP
    query = tl.load(q + at[:, None] * HEAD_DIM + d[None, :], mask=real, other=0.0)
    context = seq_len - query_len
    largest, total, result = sweep(
        query, context + position + 1, 0, tl.minimum(context + first + BLOCK_Q, seq_len),
        block_tables + seq * stride_table, keys + kv_head * stride_head, values + kv_head * stride_head,
        scale_log2e, stride_block, stride_slot, ROWS, HEAD_DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    tl.store(out + at[:, None] * HEAD_DIM + d[None, :], result / total[:, None], mask=real)


def quantize(x):
    """x [..., D] -> int8 [..., D] and fp32 scales [...]: x is nearly numbers * scales[..., None]."""
    wide = x.astype(np.float32)
    scales = np.abs(wide).max(axis=-1) / np.float32(127)
    steps = wide / np.where(scales > 0, scales, 1)[..., None]
    return np.rint(steps).clip(-127, 127).astype(np.int8), scales


@triton.jit
def sweep_int8(
    query, limit, start, end, table, keys, values, key_scales, value_scales, scale_log2e,
    stride_block, stride_slot, stride_scale,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As sweep, over int8 K and V. The scale of slot n lies at key_scales + n * stride_scale."""
    d = tl.arange(0, HEAD_DIM)
    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)
        known = token < end
        block = tl.load(table + token // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = block * stride_block + token % BLOCK_SIZE * stride_slot
        at_scale = (block * BLOCK_SIZE + token % BLOCK_SIZE) * stride_scale
        factor = tl.load(key_scales + at_scale, mask=known, other=0.0) * scale_log2e
        k = tl.load(keys + slot[None, :] + d[:, None], mask=known[None, :], other=0).to(query.dtype)
        v = tl.load(values + slot[:, None] + d[None, :], mask=known[:, None], other=0).to(query.dtype)
        visible = known[None, :] & (token[None, :] < limit[:, None])
        scores = tl.where(visible, tl.dot(query, k, input_precision="ieee") * factor[None, :], -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        alpha = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * alpha + tl.sum(weights, axis=1)
        weights *= tl.load(value_scales + at_scale, mask=known, other=0.0)[None, :]
        result = result * alpha[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    return largest, total, result


@triton.jit
def int8_kernel(
    out, q, keys, values, key_scales, value_scales, block_tables, seq_lens, scale_log2e, fewer, start,
    stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    row, d = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    at = ((seq * tl.num_programs(0) + kv_head) * GROUP + row)[:, None] * HEAD_DIM + d[None, :]
    real = (row < GROUP)[:, None]
    query = tl.load(q + at, mask=real, other=0.0)
    largest, total, result = sweep_int8(
        query, tl.maximum(seq_len - row * fewer, start + 1), start, seq_len, block_tables + seq * stride_table,
        keys + kv_head * stride_head, values + kv_head * stride_head, key_scales + kv_head, value_scales + kv_head,
        scale_log2e, stride_block, stride_slot, tl.num_programs(0), ROWS, HEAD_DIM, BLOCK_SIZE, TILE,
    )  # fmt: skip
    tl.store(out + at, result / tl.where(seq_len > start, total, 1.0)[:, None], mask=real)


def with_sweep(walk):
    """int8_kernel, which calls `walk` in the place of sweep_int8."""
    fn = int8_kernel.fn
    made = FunctionType(fn.__code__, {**fn.__globals__, "sweep_int8": walk}, fn.__name__, fn.__defaults__)
    made.__annotations__, made.__module__ = fn.__annotations__, fn.__module__
    return Kernel(made)


# ---- launches


def _sizes(q, keys, tile):
    (num_heads, head_dim), (block_size, num_kv_heads) = q.shape[1:], keys.shape[1:3]
    group = num_heads // num_kv_heads
    strides = block_size * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim
    rows = max(triton.next_power_of_2(group), 16)
    return strides, {"GROUP": group, "ROWS": rows, "HEAD_DIM": head_dim, "BLOCK_SIZE": block_size, "TILE": tile}


def launch_split(kernel, num_splits, split_tokens, q, keys, values, block_tables, seq_lens, tile=16):
    """partial [S, H, num_splits, D] and lse [S, H, num_splits]; NaN where the kernel has written nothing."""
    partial = np.full((*q.shape[:2], num_splits, q.shape[2]), np.nan, np.float32)
    lse = np.full(partial.shape[:3], np.nan, np.float32)
    strides, sizes = _sizes(q, keys, tile)
    kernel[keys.shape[2], len(q), num_splits](
        partial, lse, q, keys, values, block_tables, seq_lens, LOG2E / math.sqrt(q.shape[2]), split_tokens,
        block_tables.shape[1], *strides, **sizes,
    )  # fmt: skip
    return partial, lse


def launch_varlen(kernel, out, q, keys, values, block_tables, seq_lens, query_start_loc, block_q=4, tile=16):
    """One launch for the flat batch q [T, H, D]. Rows behind the last sequence's are not written."""
    strides, sizes = _sizes(q, keys, tile)
    num_seqs, block_rows = len(seq_lens), triton.next_power_of_2(block_q * sizes["GROUP"])
    kernel[len(q) // block_q + num_seqs, keys.shape[2]](
        out, q, keys, values, block_tables, seq_lens, query_start_loc, num_seqs, LOG2E / math.sqrt(q.shape[2]),
        block_tables.shape[1], *strides, **sizes | {"BLOCK_Q": block_q, "ROWS": max(block_rows, 16)},
    )  # fmt: skip


def launch_int8(kernel, out, q, keys, values, key_scales, value_scales, block_tables, seq_lens, tile=16,
                fewer=0, start=0):  # fmt: skip
    """Decode over int8 keys and values with fp32 scales [num_blocks, block_size, num_kv_heads].

    kernel: with_sweep(a sweep_int8). fewer: the i-th head of a group sees i * fewer tokens fewer (at least one).
    start: the walk begins at this token; those before it count for nobody.
    """
    strides, sizes = _sizes(q, keys, tile)
    kernel[keys.shape[2], len(q)](
        out, q, keys, values, key_scales, value_scales, block_tables, seq_lens, LOG2E / math.sqrt(q.shape[2]), fewer,
        start, block_tables.shape[1], *strides, **sizes,
    )  # fmt: skip


def decode_attention(q, keys, values, block_tables, seq_lens):
    """One query a sequence, q [S, H, D] -> [S, H, D], cut every SPLIT_TOKENS tokens. The engine's part `attention`."""
    out = np.zeros_like(q)
    num_splits = max(-(-int(seq_lens.max(initial=0)) // SPLIT_TOKENS), 1)
    partial, lse = launch_split(split_kernel, num_splits, SPLIT_TOKENS, q, keys, values, block_tables, seq_lens)
    for seq, head in np.ndindex(*q.shape[:2]):
        out[seq, head] = merge(partial[seq, head], lse[seq, head])[0]
    return out
