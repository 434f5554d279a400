"""Rung 5: all query heads of a KV head in one program (grouped-query attention, 分组查询注意力), on tensor cores.

    28 query heads, 4 KV heads: groups of 7          one program (sequence, KV head)
    Q  [16, D]    7 heads, and 9 rows of padding        K is read once, not 7 times
    K  [TILE, D]  TILE tokens out of several pages      S = Q K^T is a matrix product: tl.dot
    V  [TILE, D]                                        P V is another

Three ideas at once, each of which needs the others. With the group packed, the query is a matrix, so that the
products run on tensor cores; these want 16 rows, so a group of 7 is padded. And the tile is no longer the page: each
of a tile's 64 tokens looks up its own block id, so a tile is four pages of 16, or five, or a part of one of 256. The
block size can be what suits the memory manager, and the tile what suits the hardware (L33 2.3 reads page by page).

`sweep` is the walk over tiles with online softmax. The next two rungs call it too: they differ in where it starts and
ends, and in what each row may see. K and V may be quantised: that is rung 8, `kvlab_kernels.quantized`.
"""

from torch import Tensor

from kvlab_kernels.checks import check_decode
from kvlab_kernels.configs import DecodeConfig, architecture, decode_config
from kvlab_kernels.launch import tl, triton
from kvlab_kernels.naive import softmax_scale


@triton.jit
def sweep(
    query,  # [ROWS, D]
    limit,  # int32 [ROWS]: row r sees the tokens before limit[r]; at least one from `start` on
    start,  # the walk's first token
    end,  # and the one behind its last
    table,  # of this sequence: pointer to int32
    key_cache,  # of this KV head: pointers to its number 0 in slot 0
    value_cache,
    key_scales,  # fp32 [num_blocks, block_size, num_kv_heads] if K and V are quantised, else None
    value_scales,
    kv_head,
    scale_log2e,
    stride_block,
    stride_slot,
    stride_scale,  # from one slot's scales to the next's
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Online softmax over tokens start:end -> (largest [ROWS], total [ROWS], result [ROWS, D]), all fp32."""
    d = tl.arange(0, HEAD_DIM_PADDED)
    dims = d < HEAD_DIM
    largest = tl.full([ROWS], -float("inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    result = tl.zeros([ROWS, HEAD_DIM_PADDED], dtype=tl.float32)
    for first in range(start, end, TILE):
        token = first + tl.arange(0, TILE)  # [TILE]
        known = token < end  # the table is not read behind the sequence's last page
        block = tl.load(table + token // BLOCK_SIZE, mask=known, other=0).to(tl.int64)  # block * stride passes 2^31
        slot = block * stride_block + token % BLOCK_SIZE * stride_slot  # int64 [TILE]
        # K is loaded transposed, [D, TILE].
        k = tl.load(key_cache + slot[None, :] + d[:, None], mask=known[None, :] & dims[:, None], other=0.0)
        factor = scale_log2e
        if key_scales is not None:  # rung 8: one factor for all D numbers, so it can wait until after the product
            at_scale = (block * BLOCK_SIZE + token % BLOCK_SIZE) * stride_scale + kv_head
            factor *= tl.load(key_scales + at_scale, mask=known, other=0.0)[None, :]
            k = k.to(tl.float32).to(query.dtype)  # exact; the interpreter has no shorter way to bf16
        # ieee: the product of fp32 numbers would else be rounded to tf32 on a GPU.
        scores = tl.dot(query, k, input_precision="ieee") * factor  # [ROWS, TILE]
        scores = tl.where(known[None, :] & (token[None, :] < limit[:, None]), scores, -float("inf"))

        new_largest = tl.maximum(largest, tl.max(scores, axis=1))  # finite: each row sees a token of the first tile
        alpha = tl.exp2(largest - new_largest)
        weights = tl.exp2(scores - new_largest[:, None])  # [ROWS, TILE]
        # V [TILE, D] is masked as well as the scores: 0 * NaN is NaN.
        v = tl.load(value_cache + slot[:, None] + d[None, :], mask=known[:, None] & dims[None, :], other=0.0)
        total = total * alpha + tl.sum(weights, axis=1)
        if value_scales is not None:
            weights *= tl.load(value_scales + at_scale, mask=known, other=0.0)[None, :]
            v = v.to(tl.float32).to(query.dtype)
        result = result * alpha[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest
    return largest, total, result


@triton.jit(do_not_specialize=["stride_table"])
def gqa_packed_kernel(
    q,  # [num_seqs, num_heads, head_dim], rows stride_q apart, heads stride_q_head
    key_cache,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_cache,
    key_scales,  # fp32 [num_blocks, block_size, num_kv_heads], or None
    value_scales,
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
    stride_scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, padded to at least 16
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    seq_len = tl.load(seq_lens + seq)
    row = tl.arange(0, ROWS)
    head = kv_head * GROUP + row  # consecutive query heads share a KV head
    d = tl.arange(0, HEAD_DIM_PADDED)
    real = (row < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    query = tl.load(q + seq * stride_q + head[:, None] * stride_q_head + d[None, :], mask=real, other=0.0)
    largest, total, result = sweep(
        query, tl.full([ROWS], seq_len, dtype=tl.int32), 0, seq_len, block_tables + seq * stride_table,
        key_cache + kv_head * stride_head, value_cache + kv_head * stride_head, key_scales, value_scales, kv_head,
        scale_log2e, stride_block, stride_slot, stride_scale, ROWS, HEAD_DIM, HEAD_DIM_PADDED, BLOCK_SIZE, TILE,
    )  # fmt: skip
    result /= tl.where(seq_len > 0, total, 1.0)[:, None]  # nothing to attend to: zeros
    at = out + seq * stride_out + head[:, None] * stride_out_head + d[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=real)


def gqa_packed_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scales: Tensor | None = None,
    scale: float | None = None,
    out: Tensor | None = None,
    config: DecodeConfig | None = None,
) -> Tensor:
    """One query a sequence: q [S, H, D] -> [S, H, D]. Arguments, result and errors as `naive_attention`.

    scales: of quantised K and V, fp32 [2, num_blocks, block_size, num_kv_heads]; kv is then int8 or float8_e4m3fn, and
    q of any of the kernels' dtypes. config: sizes other than those of kernels/configs.py.
    """
    out = check_decode(q, kv, block_tables, seq_lens, out, scales)
    (num_seqs, num_heads, head_dim), num_kv_heads = q.shape, kv.shape[3]
    config = config or decode_config(architecture(q.device), head_dim, q.element_size(), scales is not None)
    if num_seqs:
        gqa_packed_kernel[(num_kv_heads, num_seqs)](
            q, kv[0], kv[1], *halves(scales), out, block_tables, seq_lens, softmax_scale(scale, head_dim),
            q.stride(0), q.stride(1), out.stride(0), out.stride(1), block_tables.stride(0),
            kv.stride(1), kv.stride(2), kv.stride(3), kv.shape[3],
            **packed_shape(num_heads // num_kv_heads, head_dim), BLOCK_SIZE=kv.shape[2], TILE=config.tile,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def halves(scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The scales of K and those of V."""
    return (None, None) if scales is None else (scales[0], scales[1])


def packed_shape(group: int, head_dim: int) -> dict[str, int]:
    """The shape of a packed query, padded to what tl.dot takes: powers of two, at least 16."""
    rows, padded = (max(triton.next_power_of_2(n), 16) for n in (group, head_dim))
    return {"GROUP": group, "ROWS": rows, "HEAD_DIM": head_dim, "HEAD_DIM_PADDED": padded}
