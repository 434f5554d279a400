"""Rung 9: move whole blocks in one launch, for copy-on-write (写时复制, L33 2.4) and for swap (交换, L33 5.2).

A block is not one piece of memory: each layer has its K and its V, and with INT8 the scales of both. For Qwen2.5-7B a
block of 16 tokens is 56 pieces of 16 KiB. A launch for each would cost 56 times a few microseconds, and most steps copy
one block. So the addresses go into a table, and the program's place in the launch says which piece it moves:

    piece        address of block 0's    bytes to the next block's    its bytes
    layer 0, K   0x7f00...               16384                        16384
    layer 0, V   ...                                                             program (pair, piece, part):
    layer 1, K                                                                   source[piece] + src * stride
    ...                                                                       -> target[piece] + dst * stride

A staging buffer (中转缓冲区), in which a block is one row of bytes, is only another table with the same pieces. So one
kernel copies blocks, gathers them into rows before a swap out, and scatters the rows after a swap in. Why rows: one
transfer of 896 KiB runs at the speed of the bus, 56 of 16 KiB do not (`kvlab.costs.crossover_transfer_bytes`).

All programs of a launch run at once. So no pair may write what another reads or writes: where one does,
`copy_blocks` begins another launch, and the effect is that of one copy after the other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvlab.model.kv_cache import independent_runs
from kvlab_kernels.checks import shown
from kvlab_kernels.launch import check_device, tl, triton

TILE_BYTES = 8192  # that one program moves
WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def move_blocks_kernel(
    source,  # int64 [num_pieces, 3]: address, bytes from block to block, bytes of a block
    target,
    pairs,  # int64 [2, num_pairs]: source blocks, then target blocks
    WORD: tl.constexpr,  # a type of whole numbers: what moves at once
    WORD_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # of all addresses and strides; the compiler cannot know it of a number out of a table
    TILE: tl.constexpr,  # words
):
    src = tl.load(pairs + tl.program_id(0))
    dst = tl.load(pairs + tl.num_programs(0) + tl.program_id(0))
    piece = tl.program_id(1)
    word = tl.program_id(2) * TILE + tl.arange(0, TILE)
    inside = word < tl.multiple_of(tl.load(source + piece * 3 + 2) // WORD_BYTES, ALIGNMENT // WORD_BYTES)
    read = tl.load(source + piece * 3) + src * tl.load(source + piece * 3 + 1)
    write = tl.load(target + piece * 3) + dst * tl.load(target + piece * 3 + 1)
    read = tl.multiple_of(read.to(tl.pointer_type(WORD)), ALIGNMENT)
    write = tl.multiple_of(write.to(tl.pointer_type(WORD)), ALIGNMENT)
    tl.store(write + word, tl.load(read + word, mask=inside), mask=inside)


@dataclass(frozen=True)
class Pieces:
    """Where the pieces of each block lie. Make it once; it keeps its tensors alive, for the table holds addresses."""

    table: Tensor  # int64 [num_pieces, 3] on the tensors' device
    rows: tuple[tuple[int, int, int], ...]  # the same on the host
    num_blocks: int
    tensors: tuple[Tensor, ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of each piece of one block."""
        return [size for _, _, size in self.rows]


def pieces_of(tensors: Sequence[Tensor]) -> Pieces:
    """The pieces of a cache's tensors, each [2, num_blocks, ...]: layers and scales, as `KVCache.tensors` has them.

    ValueError for other shapes, differing numbers of blocks, or blocks that do not lie in one piece.
    """
    for tensor in tensors:
        if tensor.dim() < 3 or tensor.shape[:2] != (2, tensors[0].shape[1]) or not tensor[0, 0].is_contiguous():
            raise ValueError(f"a tensor of the cache is {shown(tensor)}: give [2, num_blocks, ...], blocks contiguous")
    if not tensors:
        raise ValueError("there are no tensors: give a cache's layers, and its scales")
    check_device(*tensors)
    rows = [
        (half.data_ptr(), half.stride(0) * half.itemsize, half[0].numel() * half.itemsize)
        for tensor in tensors
        for half in tensor
    ]
    return _pieces(rows, tensors[0].shape[1], tensors)


def pieces_of_rows(staging: Tensor, like: Pieces) -> Pieces:
    """A buffer in which each row is a block: uint8 [rows, bytes of a block], the pieces of `like` one after the other.

    ValueError for another shape. (`KVCache.cpu_pool` has the same order.)
    """
    if staging.dtype != torch.uint8 or staging.dim() != 2 or staging.shape[1] != sum(like.sizes):
        raise ValueError(f"the staging buffer is {shown(staging)}: give uint8 [rows, {sum(like.sizes)}]")
    if staging.stride(1) != 1:
        raise ValueError(f"the staging buffer is {shown(staging)}: the bytes of a row must lie together")
    check_device(staging, like.table)
    rows, address = [], staging.data_ptr()
    for size in like.sizes:
        rows.append((address, staging.stride(0), size))
        address += size
    return _pieces(rows, staging.shape[0], (staging,))


def _pieces(rows: list[tuple[int, int, int]], num_blocks: int, tensors: Sequence[Tensor]) -> Pieces:
    table = torch.tensor(rows, dtype=torch.int64, device=tensors[0].device)
    return Pieces(table, tuple(rows), num_blocks, tuple(tensors))


def copy_blocks(cache: Pieces, pairs: Iterable[tuple[int, int]]) -> None:
    """Copy block src to block dst for each (src, dst), with the effect of one copy after the other.

    ValueError for a block out of range, before anything is copied.
    """
    pairs = [(src, dst) for src, dst in pairs]
    _check_blocks("source", [src for src, _ in pairs], cache)
    _check_blocks("target", [dst for _, dst in pairs], cache)
    copies = [("copy", src, dst) for src, dst in pairs if src != dst]
    for _, src, dst in independent_runs(copies, at_once=True):
        _launch(cache, cache, src, dst)


def gather_blocks(cache: Pieces, src: Sequence[int], staging: Pieces) -> None:
    """Block src[i] -> row i of the staging buffer. ValueError for a block out of range or too many of them."""
    _check_blocks("source", src, cache)
    _check_rows(len(src), staging)
    _launch(cache, staging, src, range(len(src)))


def scatter_blocks(staging: Pieces, cache: Pieces, dst: Sequence[int]) -> None:
    """Row i of the staging buffer -> block dst[i]. ValueError as for `gather_blocks`, and for a block named twice."""
    _check_blocks("target", dst, cache)
    _check_rows(len(dst), staging)
    if len(set(dst)) < len(dst):
        raise ValueError(f"the targets {list(dst)} name a block twice: which row would win is not defined")
    _launch(staging, cache, range(len(dst)), dst)


def _launch(source: Pieces, target: Pieces, src: Sequence[int], dst: Sequence[int]) -> None:
    if source.sizes != target.sizes:
        raise ValueError(f"the pieces are of {source.sizes} bytes and of {target.sizes}: make both of the same cache")
    check_device(source.table, target.table)
    if not src:
        return
    # The largest power of two that divides all there is; 16 bytes are the widest load.
    numbers = [number for row in (*source.rows, *target.rows) for number in row]
    alignment = next(width for width in (16, 8, 4, 2, 1) if all(number % width == 0 for number in numbers))
    word = min(alignment, 8)
    pairs = torch.tensor([list(src), list(dst)], dtype=torch.int64, device=source.table.device)
    move_blocks_kernel[(len(src), len(source.rows), triton.cdiv(max(source.sizes), TILE_BYTES))](
        source.table, target.table, pairs,
        WORD=WORDS[word], WORD_BYTES=word, ALIGNMENT=alignment, TILE=TILE_BYTES // word,
        num_warps=4,
    )  # fmt: skip


def _check_blocks(what: str, blocks: Sequence[int], cache: Pieces) -> None:
    for block in blocks:
        if not 0 <= block < cache.num_blocks:
            raise ValueError(f"{what} block {block} does not exist: the cache has blocks 0 to {cache.num_blocks - 1}")


def _check_rows(count: int, staging: Pieces) -> None:
    if count > staging.num_blocks:
        raise ValueError(f"{count} blocks do not fit a staging buffer of {staging.num_blocks} rows: move fewer at once")


def copy_blocks_reference(tensors: Sequence[Tensor], pairs: Iterable[tuple[int, int]]) -> None:
    """The same, one pair and one tensor after the other."""
    for src, dst in pairs:
        for tensor in tensors:
            tensor[:, dst] = tensor[:, src].clone()


def gather_blocks_reference(tensors: Sequence[Tensor], src: Sequence[int]) -> Tensor:
    """The rows that `gather_blocks` fills: uint8 [len(src), bytes of a block]."""
    rows = [
        torch.cat([tensor[half, block].reshape(-1).view(torch.uint8) for tensor in tensors for half in (0, 1)])
        for block in src
    ]
    return torch.stack(rows)
