"""Rung 2: gather (聚集) the pages into contiguous memory, then attend. What everybody writes first.

    block table [7, 3]       pages, block_size 4            keys [1, 8, heads, dim]
                             3: e f . .         ->          a b c d e f 0 0
                             7: a b c d

It is right, and it is the yardstick for the rungs after it, but each byte of K and V is read from its page, written to
the copy, and read again by attention: three times the traffic of a kernel that reads the pages in place (L33 2.3).

Positions behind a sequence's end are filled with zeros. To leave there what the memory holds, and to mask the scores
alone, would not do: attention multiplies every V by its weight, and 0 * NaN is NaN.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlab_kernels.checks import check_cache, check_decode, check_tables
from kvlab_kernels.launch import check_device, tl, triton

TILE = 32  # tokens that a program copies, of one KV head


@triton.jit(do_not_specialize=["stride_table", "max_seq_len"])
def gather_kernel(
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    keys,  # out: [num_seqs, max_seq_len, num_kv_heads, head_dim], contiguous
    values,
    block_tables,  # int32 [num_seqs, width], rows stride_table apart
    seq_lens,  # int32 [num_seqs]
    stride_table,
    stride_block,
    stride_slot,
    stride_head,
    max_seq_len,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    positions = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    head = tl.program_id(2)
    d = tl.arange(0, HEAD_DIM_PADDED)  # [D]
    written = positions < tl.load(seq_lens + seq)
    blocks = tl.load(block_tables + seq * stride_table + positions // BLOCK_SIZE, mask=written, other=0).to(tl.int64)
    slots = blocks * stride_block + positions % BLOCK_SIZE * stride_slot + head * stride_head
    source = slots[:, None] + d[None, :]  # [TILE, D]
    target = ((seq * max_seq_len + positions)[:, None] * NUM_KV_HEADS + head) * HEAD_DIM + d[None, :]
    dims = (d < HEAD_DIM)[None, :]
    known = written[:, None] & dims
    wanted = (positions < max_seq_len)[:, None] & dims
    tl.store(keys + target, tl.load(key_cache + source, mask=known, other=0.0), mask=wanted)
    tl.store(values + target, tl.load(value_cache + source, mask=known, other=0.0), mask=wanted)


def gather_pages(kv: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int) -> tuple[Tensor, Tensor]:
    """K and V of each sequence in a row: two tensors [S, max_seq_len, num_kv_heads, head_dim], zeros behind the end.

    kv [2, num_blocks, block_size, num_kv_heads, head_dim], block_tables int32 [S, W], seq_lens int32 [S]. A sequence
    longer than max_seq_len is cut. Raises ValueError for what does not fit.
    """
    check_cache(kv)
    check_tables(kv, block_tables, seq_lens)
    check_device(kv, block_tables, seq_lens)
    num_seqs, (num_kv_heads, head_dim) = len(seq_lens), kv.shape[3:]
    shape = (2, num_seqs, max_seq_len, num_kv_heads, head_dim)
    keys, values = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    if keys.numel():
        gather_kernel[(num_seqs, triton.cdiv(max_seq_len, TILE), num_kv_heads)](
            kv[0], kv[1], keys, values, block_tables, seq_lens,
            block_tables.stride(0), kv.stride(1), kv.stride(2), kv.stride(3), max_seq_len,
            NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HEAD_DIM_PADDED=triton.next_power_of_2(head_dim),
            BLOCK_SIZE=kv.shape[2], TILE=TILE,
            num_warps=4,
        )  # fmt: skip
    return keys, values


def gather_attention(
    q: Tensor, kv: Tensor, block_tables: Tensor, seq_lens: Tensor, *, max_seq_len: int, scale: float | None = None
) -> Tensor:
    """One query a sequence, q [S, H, D] -> [S, H, D]: gather, then PyTorch's attention. scale: 1 / sqrt(D) if None.

    max_seq_len bounds seq_lens (the width of the copies). A sequence of length 0 gives zeros.
    """
    check_decode(q, kv, block_tables, seq_lens, None)
    if max_seq_len < 1:
        raise ValueError(f"max_seq_len is {max_seq_len}: give at least 1")
    keys, values = gather_pages(kv, block_tables, seq_lens, max_seq_len)
    return attend(q, keys, values, seq_lens, scale)


def gather_pages_reference(
    kv: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int
) -> tuple[Tensor, Tensor]:
    """`gather_pages`, one position after the other."""
    block_size = kv.shape[2]
    out = kv.new_zeros(2, len(seq_lens), max_seq_len, *kv.shape[3:])
    for seq, seq_len in enumerate(seq_lens.tolist()):
        for position in range(min(seq_len, max_seq_len)):
            block = int(block_tables[seq, position // block_size])
            out[:, seq, position] = kv[:, block, position % block_size]
    return out[0], out[1]


def decode_reference(
    q: Tensor, kv: Tensor, block_tables: Tensor, seq_lens: Tensor, *, scale: float | None = None
) -> Tensor:
    """What every decode kernel of the ladder must equal: q [S, H, D] -> [S, H, D], computed in float64."""
    longest = max(seq_lens.tolist(), default=0)
    keys, values = gather_pages_reference(kv, block_tables, seq_lens, max(longest, 1))
    return attend(q.double(), keys.double(), values.double(), seq_lens, scale).to(q.dtype)


def attend(q: Tensor, keys: Tensor, values: Tensor, seq_lens: Tensor, scale: float | None) -> Tensor:
    """softmax(q K^T * scale) V over contiguous K and V [S, L, num_kv_heads, D], of which seq_lens [S] are real.

    A sequence of length 0 attends to the zero behind its end, which gives zeros; a softmax over nothing gives NaN.
    """
    positions = torch.arange(keys.shape[1], device=q.device)
    visible = positions < seq_lens.clamp(min=1)[:, None]
    return F.scaled_dot_product_attention(
        q[:, :, None], keys.transpose(1, 2), values.transpose(1, 2),
        attn_mask=visible[:, None, None], scale=scale, enable_gqa=True,
    )[:, :, 0]  # fmt: skip
