"""Rung 4: online softmax (在线 softmax): one pass; when a larger score comes, what was added up is rescaled.

    scores      2 5 | 7 1 |                 two at a time
    largest         5     7
    total       e^-3 + 1,  then that times e^(5-7), plus 1 + e^-6
    result      the same with each weight times its V

Weights so far were taken relative to the old largest score; times exp(old - new) they are relative to the new one.
That factor is `alpha`. It applies to the sum of weights and to the weighted sum of V alike, and both are right after
every block (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022). So K and V are each read once.

As rung 3, one program for each sequence and query head, one block at a time.
"""

import math

from torch import Tensor

from kvlab_kernels.launch import tl, triton
from kvlab_kernels.naive import launch_per_head


@triton.jit(do_not_specialize=["stride_table"])
def online_softmax_kernel(
    q,  # [num_seqs, num_heads, head_dim], rows stride_q apart, heads stride_q_head
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    out,  # like q
    block_tables,  # int32 [num_seqs, width], rows stride_table apart
    seq_lens,  # int32 [num_seqs]
    scale_log2e,  # of the scores, times log2(e)
    stride_q,
    stride_q_head,
    stride_out,
    stride_out_head,
    stride_table,
    stride_block,
    stride_slot,
    stride_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_PADDED: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + seq)
    d = tl.arange(0, HEAD_DIM_PADDED)  # [D]
    dims = d < HEAD_DIM
    offset = tl.arange(0, BLOCK_SIZE_PADDED)  # [BS]
    query = tl.load(q + seq * stride_q + head * stride_q_head + d, mask=dims, other=0.0).to(tl.float32)
    query *= scale_log2e
    kv_head = head // GROUP * stride_head

    largest = -float("inf")
    total = 0.0
    result = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    for block_index in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + block_index).to(tl.int64)
        known = (offset < BLOCK_SIZE) & (block_index * BLOCK_SIZE + offset < seq_len)
        at = block * stride_block + offset[:, None] * stride_slot + kv_head + d[None, :]  # [BS, D]
        k = tl.load(key_cache + at, mask=known[:, None] & dims[None, :], other=0.0).to(tl.float32)
        v = tl.load(value_cache + at, mask=known[:, None] & dims[None, :], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(k * query[None, :], axis=1), -float("inf"))

        new_largest = tl.maximum(largest, tl.max(scores, axis=0))  # finite: each block of the walk has a token
        alpha = tl.exp2(largest - new_largest)  # in the first block exp2(-inf): 0, there is nothing to rescale
        weights = tl.exp2(scores - new_largest)  # [BS]
        total = total * alpha + tl.sum(weights, axis=0)
        result = result * alpha + tl.sum(weights[:, None] * v, axis=0)
        largest = new_largest

    result /= tl.where(seq_len > 0, total, 1.0)
    tl.store(out + seq * stride_out + head * stride_out_head + d, result.to(out.dtype.element_ty), mask=dims)


def online_softmax_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One query a sequence: q [S, H, D] -> [S, H, D]. Arguments, result and errors as `naive_attention`."""
    return launch_per_head(online_softmax_kernel, q, kv, block_tables, seq_lens, scale, out)


def online_softmax_reference(scores: list[float], values: list[float]) -> tuple[float, list[float]]:
    """The recurrence in plain Python: sum(softmax(scores) * values), and alpha at each step.

    Scores come one at a time. What the kernel does for a block at once, with a vector for each value.
    """
    largest, total, result, alphas = -math.inf, 0.0, 0.0, []
    for score, value in zip(scores, values, strict=True):
        new_largest = max(largest, score)
        alpha, weight = math.exp(largest - new_largest), math.exp(score - new_largest)
        total, result, largest = total * alpha + weight, result * alpha + weight * value, new_largest
        alphas.append(alpha)
    return result / total, alphas
