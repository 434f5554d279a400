"""Decode attention over pages, in the small: what lab 10 builds, and what it uses where a part is unsolved.

The same ladder as kvlab_kernels.gather, naive, online_softmax and gqa_packed, with fewer arguments: contiguous q and
out, and block sizes and head dims that are powers of two.

    locate            where a token lies (L33 2.2)            attend_gathered   the plain function, one sequence
    naive_kernel      two passes, a program a head            online_softmax_kernel   one pass
    gqa_packed_kernel a group of heads in a program, tiles    paged_attention   its launch: the engine's `attention`
    bytes_moved       what each of them asks for
"""

import math

import numpy as np

from kvlab.standin.launch import tl, triton

LOG2E = math.log2(math.e)


def locate(position, kv_head, block_table, block_size, num_kv_heads, head_dim):
    """A token's K, in keys [num_blocks, block_size, num_kv_heads, head_dim]: (block, offset, element of its number 0).

    L33 2.2's walk: logical block, block table, physical block, offset.
    """
    block, offset = block_table[position // block_size], position % block_size
    return block, offset, ((block * block_size + offset) * num_kv_heads + kv_head) * head_dim


def attend_gathered(q, keys, values, block_table, seq_len):
    """Attention of one sequence's query: q [H, D] -> [H, D], fp64. Zeros if seq_len is 0.

    keys, values [num_blocks, block_size, num_kv_heads, D]. Gathers first, then softmax(q K^T / sqrt(D)) V.
    """
    block_size, num_kv_heads, head_dim = keys.shape[1:]
    if seq_len == 0:
        return np.zeros(q.shape)
    positions = np.arange(seq_len)
    blocks = np.asarray(block_table)[positions // block_size]
    k, v = (x[blocks, positions % block_size].astype(np.float64) for x in (keys, values))  # [L, num_kv_heads, D]
    grouped = q.astype(np.float64).reshape(num_kv_heads, -1, head_dim)
    scores = np.einsum("hgd,lhd->hgl", grouped, k) / math.sqrt(head_dim)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    return np.einsum("hgl,lhd->hgd", weights, v).reshape(q.shape)


@triton.jit
def naive_kernel(
    out, q, keys, values, block_tables, seq_lens, scale_log2e,
    stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    row = (seq * tl.num_programs(0) + head) * HEAD_DIM
    d, offset = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    query = tl.load(q + row + d).to(tl.float32) * scale_log2e
    inside = offset[:, None] * stride_slot + head // GROUP * stride_head + d[None, :]  # [BLOCK_SIZE, HEAD_DIM]

    largest = -float("inf")
    for page in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + page).to(tl.int64)
        known = page * BLOCK_SIZE + offset < seq_len
        k = tl.load(keys + block * stride_block + inside, mask=known[:, None], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(k * query[None, :], axis=1), -float("inf"))
        largest = tl.maximum(largest, tl.max(scores, axis=0))

    total = 0.0
    result = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for page in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + page).to(tl.int64)
        known = page * BLOCK_SIZE + offset < seq_len
        k = tl.load(keys + block * stride_block + inside, mask=known[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + block * stride_block + inside, mask=known[:, None], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(k * query[None, :], axis=1), -float("inf"))
        weights = tl.exp2(scores - largest)
        total += tl.sum(weights, axis=0)
        result += tl.sum(weights[:, None] * v, axis=0)
    tl.store(out + row + d, result / tl.where(seq_len > 0, total, 1.0))


@triton.jit
def online_softmax_kernel(
    out, q, keys, values, block_tables, seq_lens, scale_log2e,
    stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    row = (seq * tl.num_programs(0) + head) * HEAD_DIM
    d, offset = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    query = tl.load(q + row + d).to(tl.float32) * scale_log2e
    inside = offset[:, None] * stride_slot + head // GROUP * stride_head + d[None, :]

    largest, total = -float("inf"), 0.0
    result = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for page in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + page).to(tl.int64)
        known = page * BLOCK_SIZE + offset < seq_len
        k = tl.load(keys + block * stride_block + inside, mask=known[:, None], other=0.0).to(tl.float32)
        v = tl.load(values + block * stride_block + inside, mask=known[:, None], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(k * query[None, :], axis=1), -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=0))
        alpha = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest)
        total = total * alpha + tl.sum(weights, axis=0)
        result = result * alpha + tl.sum(weights[:, None] * v, axis=0)
        largest = new_largest
    tl.store(out + row + d, result / tl.where(seq_len > 0, total, 1.0))


@triton.jit
def gqa_packed_kernel(
    out, q, keys, values, block_tables, seq_lens, scale_log2e,
    stride_table, stride_block, stride_slot, stride_head,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    kv_head, seq = tl.program_id(0), tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    row, d = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    first_head = (seq * tl.num_programs(0) + kv_head) * GROUP
    at = (first_head + row)[:, None] * HEAD_DIM + d[None, :]  # [ROWS, HEAD_DIM]
    real = (row < GROUP)[:, None]
    query = tl.load(q + at, mask=real, other=0.0)

    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for start in range(0, seq_len, TILE):
        token = start + tl.arange(0, TILE)
        known = token < seq_len
        block = tl.load(block_tables + seq * stride_table + token // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = block * stride_block + token % BLOCK_SIZE * stride_slot + kv_head * stride_head
        k = tl.load(keys + slot[None, :] + d[:, None], mask=known[None, :], other=0.0)  # [HEAD_DIM, TILE]
        v = tl.load(values + slot[:, None] + d[None, :], mask=known[:, None], other=0.0)  # [TILE, HEAD_DIM]
        scores = tl.where(known[None, :], tl.dot(query, k, input_precision="ieee") * scale_log2e, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        alpha = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])
        total = total * alpha + tl.sum(weights, axis=1)
        result = result * alpha[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    tl.store(out + at, result / tl.where(seq_len > 0, total, 1.0)[:, None], mask=real)


def launch_by_head(kernel, out, q, keys, values, block_tables, seq_lens):
    """Launch rung 3 or 4: one program for each query head and sequence."""
    (num_seqs, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, keys.shape[1:3]
    kernel[num_heads, num_seqs](
        out, q, keys, values, block_tables, seq_lens, LOG2E / math.sqrt(head_dim),
        block_tables.shape[1], block_size * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim,
        GROUP=num_heads // num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
    )  # fmt: skip


def launch_packed(kernel, out, q, keys, values, block_tables, seq_lens, tile=16):
    """Launch rung 5: one program for each KV head and sequence."""
    (num_seqs, num_heads, head_dim), (block_size, num_kv_heads) = q.shape, keys.shape[1:3]
    group = num_heads // num_kv_heads
    kernel[num_kv_heads, num_seqs](
        out, q, keys, values, block_tables, seq_lens, LOG2E / math.sqrt(head_dim),
        block_tables.shape[1], block_size * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim,
        GROUP=group, ROWS=max(triton.next_power_of_2(group), 16), HEAD_DIM=head_dim, BLOCK_SIZE=block_size, TILE=tile,
    )  # fmt: skip


def paged_attention(q, keys, values, block_tables, seq_lens):
    """One query a sequence, q [S, H, D] -> [S, H, D]. The engine's part `attention`.

    keys, values [num_blocks, block_size, num_kv_heads, D] of q's dtype; block_tables int32 [S, W], seq_lens int32 [S].
    """
    out = np.empty_like(q)
    launch_packed(gqa_packed_kernel, out, q, keys, values, block_tables, seq_lens, tile=64)
    return out


def bytes_moved(rung, seq_lens, num_heads, num_kv_heads, head_dim, dtype_bytes=2):
    """Bytes of K and V that one layer's decode asks the memory for. rung: gather, naive, online or packed."""
    of_one_head = sum(seq_lens) * head_dim * dtype_bytes  # K of one KV head; V is as much again
    passes = {"gather": 6 * num_kv_heads, "naive": 3 * num_heads, "online": 2 * num_heads, "packed": 2 * num_kv_heads}
    return passes[rung] * of_one_head
