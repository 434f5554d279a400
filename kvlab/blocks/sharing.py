"""Sharing blocks: fork and the write barrier, the two halves of copy-on-write (写时复制, L33 2.4; lab 04).

    fork              parent [3 7 9]   child [3 7 9]     every block has one owner more, no K/V moves
    ensure_writable   parent [3 7 9]   child [3 7 5]     before the child writes into block 9: 5 is its own copy

Both change the books only. The caller has the data plane copy src to dst before anything is written.
"""

from collections.abc import Sequence

from kvlab.blocks.block import KVCacheBlock
from kvlab.blocks.pool import BlockPoolBase


def fork(pool: BlockPoolBase, blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
    """The blocks of a child that shares all of `blocks` with its parent."""
    pool.touch(blocks)
    return list(blocks)


def ensure_writable(pool: BlockPoolBase, table: list[KVCacheBlock],
                    index: int) -> tuple[KVCacheBlock, KVCacheBlock] | None:  # fmt: skip
    """Make logical block `index` of `table` one that its owner may write.

    None if it is writable already: one owner and no published name. Else a new block takes its place in the table,
    and the pair (src, dst) says what must be copied. OutOfBlocks, and nothing changed, if no block is free.
    """
    shared = table[index]
    if shared.is_writable:
        return None
    [copy] = pool.get_new_blocks(1)
    table[index] = copy
    pool.free_blocks([shared])
    return shared, copy
