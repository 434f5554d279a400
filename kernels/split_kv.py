"""Rung 6: split one sequence's K and V among several programs (split-KV, Flash-Decoding), then merge.

A decode of one sequence has as many programs as KV heads: 4 for Qwen2.5-7B, on a GPU with 132 places for them. So the
context is cut:

    sequence   |--- split 0 ---|--- split 1 ---|--- split 2 --|        3 programs for each KV head
    each       its own softmax: result_i [D] and lse_i = log(sum of exp(score))
    merge      result = sum(result_i * exp(lse_i)) / sum(exp(lse_i))   exact: the same sum, in another order

(Dao et al., "Flash-Decoding for long-context inference", 2023; the merge is online softmax again, over splits.)
Partial results go through memory, in fp32, and the merge is a launch of its own: with one split neither is worth it,
and rung 5's kernel writes the output itself.

How many splits: see `choose_num_splits`. It looks at what a captured CUDA graph is fixed for (batch size and longest
length), not at the lengths of the moment. So a sequence may find fewer tokens than splits; an empty split writes
lse = -inf, for the workspace still holds what an earlier step left there.

The order of a sum changes its last bits. By default the number of splits depends on the batch, and so do a
sequence's bits. With `split_tokens` the cuts depend on the sequence alone, and its result is the same in any batch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kvlab_kernels.checks import check_decode, shown
from kvlab_kernels.configs import DecodeConfig, architecture, decode_config, num_sms
from kvlab_kernels.gqa_packed import gqa_packed_attention, halves, packed_shape, sweep
from kvlab_kernels.launch import check_device, tl, triton
from kvlab_kernels.naive import softmax_scale

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 256  # fewer are not worth a program's start and its part of the merge
MERGE_TILE = 16  # splits that the merge takes at once


@triton.jit(do_not_specialize=["stride_table", "split_tokens", "stride_lse"])
def split_kernel(
    q,  # [num_seqs, num_heads, head_dim], rows stride_q apart, heads stride_q_head
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    key_scales,  # fp32 [num_blocks, block_size, num_kv_heads], or None
    value_scales,
    partial,  # out: fp32 [num_seqs, num_heads, num_splits, head_dim], strides below; each split's own attention
    lse,  # out: fp32 [num_seqs, num_heads, num_splits], base 2
    block_tables,  # int32 [num_seqs, width], rows stride_table apart
    seq_lens,  # int32 [num_seqs]
    scale_log2e,  # of the scores, times log2(e)
    split_tokens,  # tokens of each split; 0: the sequence in equal parts
    stride_q,
    stride_q_head,
    stride_partial,  # from one (sequence, head) to the next
    stride_lse,
    stride_table,
    stride_block,
    stride_slot,
    stride_head,
    stride_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq_len = tl.load(seq_lens + seq)
    equal = tl.cdiv(tl.cdiv(seq_len, num_splits), TILE) * TILE  # whole tiles
    tokens = tl.where(split_tokens > 0, split_tokens, equal)
    start = split * tokens
    end = tl.where(split == num_splits - 1, seq_len, tl.minimum(start + tokens, seq_len))  # the last takes the rest

    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row
    num_heads = tl.num_programs(0) * GROUP
    at = seq * num_heads + head  # int64 [ROWS]
    if start >= end:
        tl.store(lse + at * stride_lse + split, tl.full([ROWS], -float("inf"), dtype=tl.float32), mask=row < GROUP)
        return

    d = tl.arange(0, HEAD_DIM_PADDED)
    real = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + seq * stride_q + head[:, None] * stride_q_head + d[None, :], mask=real, other=0.0)
    largest, total, result = sweep(
        query, tl.full([ROWS], seq_len, dtype=tl.int32), start, end, block_tables + seq * stride_table,
        key_cache + kv_head * stride_head, value_cache + kv_head * stride_head, key_scales, value_scales, kv_head,
        scale_log2e, stride_block, stride_slot, stride_scale, ROWS, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    tl.store(lse + at * stride_lse + split, largest + tl.log2(total), mask=row < GROUP)
    to = partial + (at * stride_partial + split * HEAD_DIM)[:, None] + d[None, :]
    tl.store(to, result / total[:, None], mask=real)


@triton.jit(do_not_specialize=["num_splits", "stride_lse"])
def merge_kernel(
    partial,  # fp32 [num_seqs, num_heads, num_splits, head_dim]
    lse,  # fp32 [num_seqs, num_heads, num_splits], base 2; -inf: an empty split, whose partial is not written
    out,  # [num_seqs, num_heads, head_dim]
    num_splits,
    stride_partial,
    stride_lse,
    stride_out,
    stride_out_head,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    MERGE_TILE: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    at = seq * tl.num_programs(0) + head
    d = tl.arange(0, HEAD_DIM_PADDED)
    dims = d < HEAD_DIM
    largest = -float("inf")
    total = 0.0
    result = tl.zeros([HEAD_DIM_PADDED], dtype=tl.float32)
    # Tiles of one size whatever num_splits is: empty splits behind the last add exact zeros, so the bits do not change.
    for first in range(0, num_splits, MERGE_TILE):
        split = first + tl.arange(0, MERGE_TILE)
        lses = tl.load(lse + at * stride_lse + split, mask=split < num_splits, other=-float("inf"))
        new_largest = tl.maximum(largest, tl.max(lses, axis=0))
        base = tl.where(new_largest == -float("inf"), 0.0, new_largest)  # a sequence of length 0: -inf - -inf is NaN
        alpha = tl.exp2(largest - base)
        weights = tl.exp2(lses - base)  # 0 for an empty split
        live = (lses > -float("inf"))[:, None] & dims[None, :]  # what lies in the others may be NaN
        parts = tl.load(partial + at * stride_partial + split[:, None] * HEAD_DIM + d[None, :], mask=live, other=0.0)
        total = total * alpha + tl.sum(weights, axis=0)
        result = result * alpha + tl.sum(weights[:, None] * parts, axis=0)
        largest = new_largest
    result /= tl.where(total > 0, total, 1.0)
    tl.store(out + seq * stride_out + head * stride_out_head + d, result.to(out.dtype.element_ty), mask=dims)


class Workspace(NamedTuple):
    """Where splits leave their results: fp32 [num_seqs, num_heads, num_splits, D], and without D. Never cleared."""

    partial: Tensor
    lse: Tensor


def make_workspace(num_seqs: int, num_heads: int, num_splits: int, head_dim: int, device) -> Workspace:
    """Room for a launch: 4 * num_seqs * num_heads * num_splits * (head_dim + 1) bytes. A larger one serves as well."""
    shape = (num_seqs, num_heads, num_splits)
    return Workspace(torch.empty(*shape, head_dim, device=device), torch.empty(shape, device=device))


def choose_num_splits(batch_size: int, num_kv_heads: int, max_seq_len: int, sms: int) -> int:
    """A power of two from 1 to MAX_SPLITS: the smallest that gives at least two programs to each of `sms` processors.

    Fewer if a split of the longest sequence would be shorter than MIN_SPLIT_TOKENS. Give the batch size and the longest
    length that a CUDA graph is captured for: what is chosen then holds for every batch that runs in it.
    """
    splits, programs = 1, max(batch_size * num_kv_heads, 1)
    while splits < MAX_SPLITS and programs * splits < 2 * sms and max_seq_len >= 2 * splits * MIN_SPLIT_TOKENS:
        splits *= 2
    return splits


def split_kv_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int | None = None,
    num_splits: int | None = None,
    split_tokens: int | None = None,
    scales: Tensor | None = None,
    scale: float | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """One query a sequence: q [S, H, D] -> [S, H, D]. Arguments, result and errors as `gqa_packed_attention`, and:

    max_seq_len: the longest length to plan for; what the block table's width allows if None.
    num_splits: how many; `choose_num_splits` if None.
    split_tokens: cut after so many tokens instead, whatever the batch. max_seq_len must then bound seq_lens (a longer
        sequence is still right, but its last split takes the rest, so its bits depend on max_seq_len).
    workspace: one kept between steps, as a CUDA graph needs it.
    """
    out = check_decode(q, kv, block_tables, seq_lens, out, scales)
    (num_seqs, num_heads, head_dim), num_kv_heads = q.shape, kv.shape[3]
    if max_seq_len is None:
        max_seq_len = block_tables.shape[1] * kv.shape[2]
    if num_splits is not None and split_tokens is not None:
        raise ValueError(f"num_splits is {num_splits} and split_tokens {split_tokens}: give one of them")
    for name, value in (("num_splits", num_splits), ("split_tokens", split_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}: give at least 1")
    if split_tokens is not None:
        num_splits = max(triton.cdiv(max_seq_len, split_tokens), 1)
    elif num_splits is None:
        num_splits = choose_num_splits(num_seqs, num_kv_heads, max_seq_len, num_sms(q.device))
    config = config or decode_config(architecture(q.device), head_dim, q.element_size(), scales is not None)
    # With split_tokens one split takes the long way too: the other kernel may be compiled to other bits.
    if num_splits == 1 and split_tokens is None:
        return gqa_packed_attention(q, kv, block_tables, seq_lens, scales=scales, scale=scale, out=out, config=config)
    if workspace is None:
        workspace = make_workspace(num_seqs, num_heads, num_splits, head_dim, q.device)
    partial, lse = check_workspace(workspace, num_seqs, num_heads, num_splits, head_dim)
    check_device(q, partial, lse)
    if num_seqs == 0:
        return out
    shape = packed_shape(num_heads // num_kv_heads, head_dim)
    split_kernel[(num_kv_heads, num_seqs, num_splits)](
        q, kv[0], kv[1], *halves(scales), partial, lse, block_tables, seq_lens,
        softmax_scale(scale, head_dim), split_tokens or 0,
        q.stride(0), q.stride(1), partial.stride(1), lse.stride(1), block_tables.stride(0),
        kv.stride(1), kv.stride(2), kv.stride(3), kv.shape[3],
        **shape, BLOCK_SIZE=kv.shape[2], TILE=config.tile,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    merge_kernel[(num_heads, num_seqs)](
        partial, lse, out, num_splits, partial.stride(1), lse.stride(1), out.stride(0), out.stride(1),
        HEAD_DIM=head_dim, HEAD_DIM_PADDED=shape["HEAD_DIM_PADDED"], MERGE_TILE=MERGE_TILE,
        num_warps=4,
    )  # fmt: skip
    return out


def check_workspace(workspace: Workspace, num_seqs: int, num_heads: int, num_splits: int, head_dim: int) -> Workspace:
    """The workspace if it is large enough; ValueError with what is needed if not."""
    partial, lse = workspace
    fits = (
        partial.dtype == lse.dtype == torch.float32
        and partial.is_contiguous()
        and lse.is_contiguous()
        and partial.dim() == 4
        and partial.shape[:3] == lse.shape
        and partial.shape[0] >= num_seqs
        and partial.shape[1] == num_heads
        and partial.shape[2] >= num_splits
        and partial.shape[3] == head_dim
    )
    if not fits:
        raise ValueError(
            f"the workspace is {shown(partial)} and {shown(lse)}: make_workspace({num_seqs}, {num_heads}, "
            f"{num_splits}, {head_dim}, device) or more is needed"
        )
    return workspace


def merge_reference(partial: Tensor, lse: Tensor) -> Tensor:
    """Merge results [..., num_splits, D] by their lse [..., num_splits] (base 2) -> [..., D], in float64.

    Splits of lse -inf count for nothing, whatever their result; with no other split the result is zero.
    """
    live = lse > -torch.inf
    weights = torch.where(live, torch.exp2(lse.double() - lse.double().amax(-1, keepdim=True)), 0.0)
    parts = torch.where(live[..., None], partial.double(), 0.0)
    return (weights[..., None] * parts).sum(-2) / weights.sum(-1, keepdim=True).clamp(min=1e-300)
