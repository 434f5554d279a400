"""Rung 7: prefill chunks and decodes in one launch (chunked prefill, 分块预填充).

The engine's step is a flat batch: each sequence owns some rows of q, a decode one, a chunk many (L33 4.3). Two things
are new. Programs are for blocks of rows, of which each sequence has its own number:

    query_start_loc  [0, 1, 6, 7]        sequences of 1, 5 and 1 rows; BLOCK_Q = 2
    query blocks      0 | 1 2 3 | 5      a block never spans two sequences; number 4 has nothing to do
    block 2           sequence 1, its rows 2 and 3 -> rows 3 and 4 of q

The host does not count them, since the lengths lie on the GPU. It launches T // BLOCK_Q + num_seqs programs, which is
always enough; sequence i's blocks begin at query_start_loc[i] // BLOCK_Q + i, and each program finds its sequence by
binary search. Programs that are too many end at once. (vLLM's unified attention counts in this way.)

And a row sees only what stands before it, context included: the chunk's row p, after `context` computed tokens, sees
tokens 0 to context + p. A decode is the case of one row. With many rows K and V are read once for a whole block of
them, so that prefill is bound by arithmetic, not by memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab_kernels.checks import check_attention, shown
from kvlab_kernels.configs import VarlenConfig, architecture, varlen_config
from kvlab_kernels.gather import gather_pages_reference
from kvlab_kernels.gqa_packed import halves, packed_shape, sweep
from kvlab_kernels.launch import check_device, tl, triton
from kvlab_kernels.naive import softmax_scale


@triton.jit
def find_sequence(query_start_loc, num_seqs, block, BLOCK_Q: tl.constexpr):
    """The last sequence whose query blocks begin at or before `block`: binary search."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_seqs", "stride_table"])
def varlen_kernel(
    q,  # [T, num_heads, head_dim], rows stride_q apart, heads stride_q_head
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    key_scales,  # fp32 [num_blocks, block_size, num_kv_heads], or None
    value_scales,
    out,  # like q
    block_tables,  # int32 [num_seqs, width], rows stride_table apart
    seq_lens,  # int32 [num_seqs], this step's tokens included
    query_start_loc,  # int32 [num_seqs + 1]
    num_seqs,
    scale_log2e,  # of the scores, times log2(e)
    stride_q,
    stride_q_head,
    stride_out,
    stride_out_head,
    stride_table,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,  # positions of a query block
    ROWS: tl.constexpr,  # BLOCK_Q * GROUP, padded: one row for each position and head of the group
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = find_sequence(query_start_loc, num_seqs, block, BLOCK_Q)
    first_row = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - first_row
    first = (block - (first_row // BLOCK_Q + seq)) * BLOCK_Q  # this block's first position in the chunk
    if first >= query_len:
        return
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len

    row = tl.arange(0, ROWS)
    position = first + row // GROUP  # [ROWS] in the chunk
    head = kv_head * GROUP + row % GROUP
    d = tl.arange(0, HEAD_DIM_PADDED)
    real = ((row < BLOCK_Q * GROUP) & (position < query_len))[:, None] & (d < HEAD_DIM)[None, :]
    at = (first_row + position).to(tl.int64)
    query = tl.load(q + (at * stride_q + head * stride_q_head)[:, None] + d[None, :], mask=real, other=0.0)
    largest, total, result = sweep(
        query, context + position + 1, 0, tl.minimum(context + first + BLOCK_Q, seq_len),
        block_tables + seq.to(tl.int64) * stride_table,
        key_cache + kv_head * stride_head, value_cache + kv_head * stride_head, key_scales, value_scales, kv_head,
        scale_log2e, stride_block, stride_slot, stride_scale, ROWS, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    to = out + (at * stride_out + head * stride_out_head)[:, None] + d[None, :]
    tl.store(to, (result / total[:, None]).to(out.dtype.element_ty), mask=real)


def varlen_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    max_query_len: int | None = None,
    scales: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    config: VarlenConfig | None = None,
) -> Tensor:
    """Causal attention of a flat batch: q [T, H, D] -> [T, H, D]. Equal to `varlen_reference`.

    Sequence i owns rows query_start_loc[i] to [i + 1] (int32 [S + 1]), maybe none; they are the last of its seq_lens[i]
    tokens, whose K and V have all been written. Rows behind query_start_loc[S] are padding, and `out` is not written
    there. kv, block_tables, scales, scale and errors as `gqa_packed_attention`.

    max_query_len: the longest chunk, by which sizes are chosen (T if None). config: sizes instead.
    """
    out = check_attention(q, kv, block_tables, seq_lens, out, scales)
    check_starts(query_start_loc, seq_lens, q.shape[0])
    check_device(q, query_start_loc)
    (num_rows, num_heads, head_dim), num_kv_heads, num_seqs = q.shape, kv.shape[3], len(seq_lens)
    group = num_heads // num_kv_heads
    if config is None:
        longest = num_rows if max_query_len is None else max_query_len
        arch, quantized = architecture(q.device), scales is not None
        config = varlen_config(arch, head_dim, group, longest, q.element_size(), quantized)
    if config.block_m < max(group, 16):
        raise ValueError(f"block_m is {config.block_m}: a position has {group} rows, and tl.dot needs 16")
    block_q = config.block_m // group
    if num_seqs and num_rows:
        varlen_kernel[(num_rows // block_q + num_seqs, num_kv_heads)](
            q, kv[0], kv[1], *halves(scales), out, block_tables, seq_lens, query_start_loc, num_seqs,
            softmax_scale(scale, head_dim),
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), block_tables.stride(0),
            kv.stride(1), kv.stride(2), kv.stride(3), kv.shape[3],
            **packed_shape(group, head_dim) | {"ROWS": config.block_m},
            BLOCK_Q=block_q, BLOCK_SIZE=kv.shape[2], TILE=config.tile,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def check_starts(query_start_loc: Tensor, seq_lens: Tensor, num_rows: int) -> None:
    """ValueError unless query_start_loc is int32 [S + 1] and, where it lies on the CPU, cuts rows as it must."""
    num_seqs = len(seq_lens)
    if list(query_start_loc.shape) != [num_seqs + 1] or query_start_loc.dtype != torch.int32:
        raise ValueError(f"query_start_loc is {shown(query_start_loc)}: give int32 [{num_seqs + 1}]")
    if not query_start_loc.is_contiguous():
        raise ValueError(f"query_start_loc is {shown(query_start_loc)}: make it contiguous")
    if query_start_loc.is_cuda or seq_lens.is_cuda:
        return
    starts = query_start_loc.tolist()
    if starts[0] != 0 or starts[-1] > num_rows or starts != sorted(starts):
        raise ValueError(f"query_start_loc is {starts}: it must rise from 0 to at most the {num_rows} rows of q")
    for i, (query_len, seq_len) in enumerate(zip(query_start_loc.diff().tolist(), seq_lens.tolist(), strict=True)):
        if query_len > seq_len:
            raise ValueError(
                f"sequence {i} has {query_len} rows of q but length {seq_len}: seq_lens counts this step's tokens too"
            )


def varlen_reference(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float | None = None,
) -> Tensor:
    """The same by gathering: each sequence's pages in a row, a mask, PyTorch's attention in float64. Padding: zeros."""
    out = torch.zeros_like(q)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        start, end = starts[i], starts[i + 1]
        if start == end:
            continue
        keys, values = gather_pages_reference(kv, block_tables[i : i + 1], seq_lens[i : i + 1], seq_len)
        positions = torch.arange(seq_len, device=q.device)
        visible = positions <= positions[seq_len - (end - start) :, None]
        out[start:end] = F.scaled_dot_product_attention(
            q[None, start:end].transpose(1, 2).double(),
            keys.transpose(1, 2).double(), values.transpose(1, 2).double(),
            attn_mask=visible, scale=scale, enable_gqa=True,
        )[0].transpose(0, 1).to(q.dtype)  # fmt: skip
    return out
