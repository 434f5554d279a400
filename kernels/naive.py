"""Rung 3: attention that reads the pages in place. One program for each sequence and query head, in two passes.

    program (sequence, head)          block table [7, 3, 9]
    pass 1   walk 7, 3, 9:  the largest score
    pass 2   walk 7, 3, 9:  weights exp(score - largest), their sum, and the weighted sum of V

As in L33 2.3: look up the physical block, then load its tokens, and copy nothing. (The text's kernel makes one pass, as
rung 4 does.) Two costs remain, and the next two rungs remove them: K is read twice, because softmax (the numerically
safe one) must know the largest score before it adds up weights; and the G query heads that share a KV head each read it
for themselves.

The scores carry a factor log2(e) so that exp becomes exp2, which is what the hardware has.
"""

import math

from torch import Tensor

from kvlab_kernels.checks import check_decode
from kvlab_kernels.launch import tl, triton


@triton.jit(do_not_specialize=["stride_table"])
def naive_kernel(
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
    GROUP: tl.constexpr,  # query heads that share a KV head
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,  # sides of tiles are powers of two
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_PADDED: tl.constexpr,
):
    head = tl.program_id(0)  # fastest: programs that read the same K and V run side by side
    seq = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + seq)
    d = tl.arange(0, HEAD_DIM_PADDED)  # [D]
    dims = d < HEAD_DIM
    offset = tl.arange(0, BLOCK_SIZE_PADDED)  # [BS] in the block
    query = tl.load(q + seq * stride_q + head * stride_q_head + d, mask=dims, other=0.0).to(tl.float32)
    query *= scale_log2e
    kv_head = head // GROUP * stride_head

    largest = -float("inf")
    for block_index in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + block_index).to(tl.int64)  # block * stride passes 2^31
        known = (offset < BLOCK_SIZE) & (block_index * BLOCK_SIZE + offset < seq_len)
        at = block * stride_block + offset[:, None] * stride_slot + kv_head + d[None, :]  # [BS, D]
        k = tl.load(key_cache + at, mask=known[:, None] & dims[None, :], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(k * query[None, :], axis=1), -float("inf"))
        largest = tl.maximum(largest, tl.max(scores, axis=0))

    total = 0.0
    result = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    for block_index in range(0, tl.cdiv(seq_len, BLOCK_SIZE)):
        block = tl.load(block_tables + seq * stride_table + block_index).to(tl.int64)
        known = (offset < BLOCK_SIZE) & (block_index * BLOCK_SIZE + offset < seq_len)
        at = block * stride_block + offset[:, None] * stride_slot + kv_head + d[None, :]
        k = tl.load(key_cache + at, mask=known[:, None] & dims[None, :], other=0.0).to(tl.float32)
        # V is masked as well as the score: a slot behind the end may hold anything, and 0 * NaN is NaN.
        v = tl.load(value_cache + at, mask=known[:, None] & dims[None, :], other=0.0).to(tl.float32)
        scores = tl.where(known, tl.sum(k * query[None, :], axis=1), -float("inf"))
        weights = tl.exp2(scores - largest)  # [BS]
        total += tl.sum(weights, axis=0)
        result += tl.sum(weights[:, None] * v, axis=0)

    result /= tl.where(seq_len > 0, total, 1.0)  # nothing to attend to: zeros
    tl.store(out + seq * stride_out + head * stride_out_head + d, result.to(out.dtype.element_ty), mask=dims)


def naive_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One query a sequence: q [S, H, D] -> [S, H, D]. Equal to `kvlab_kernels.gather.decode_reference`.

    kv [2, num_blocks, block_size, num_kv_heads, D], block_tables int32 [S, W], seq_lens int32 [S] including this
    step's token, whose K and V have been written. scale: 1 / sqrt(D) if None. Raises ValueError for what does not fit.
    """
    return launch_per_head(naive_kernel, q, kv, block_tables, seq_lens, scale, out)


def launch_per_head(kernel, q, kv, block_tables, seq_lens, scale, out) -> Tensor:
    """Check, and launch a kernel that has one program for each head and sequence: this rung's or the next one's."""
    out = check_decode(q, kv, block_tables, seq_lens, out)
    (num_seqs, num_heads, head_dim), block_size = q.shape, kv.shape[2]
    if num_seqs:
        kernel[(num_heads, num_seqs)](
            q, kv[0], kv[1], out, block_tables, seq_lens,
            softmax_scale(scale, head_dim),
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), block_tables.stride(0),
            kv.stride(1), kv.stride(2), kv.stride(3),
            GROUP=num_heads // kv.shape[3],
            HEAD_DIM=head_dim, HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=block_size, BLOCK_SIZE_PADDED=triton.next_power_of_2(block_size),
            num_warps=4 if block_size >= 16 else 1,
        )  # fmt: skip
    return out


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The factor of the scores (1 / sqrt(head_dim) if None), with log2(e) in it, so that exp2 serves as exp."""
    return math.log2(math.e) * (head_dim**-0.5 if scale is None else scale)
