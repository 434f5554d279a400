"""Branches of one sequence over one pool (分支, L33 2.4; lab 04): what fork and the write barrier are for.

    sharing_cost      n samples of one prompt, in closed form: blocks with copying, blocks with sharing, copies
    make_room         slots for the next tokens, every block of them writable; all or nothing
    beam_step         survivors fork, the dead give back, and nothing they share is ever free in between
    fork_at, truncate an agent's tree: branch off at any position, go back to any position
    blocks_freed_by   what giving up some branches would bring: only what nobody else holds
    copy_batches      which copies of an ordered list may be made at once

Tables here are plain lists. The engine's own way through the same rules is kvlab.manager, with requests, swap space
and hits in one count.
"""

from collections import Counter
from collections.abc import Sequence

from kvlab.blocks.block import KVCacheBlock
from kvlab.blocks.pool import BlockPool
from kvlab.blocks.sharing import ensure_writable, fork
from kvlab.blocks.table import cdiv

Copy = tuple[KVCacheBlock, KVCacheBlock]  # (source, target)


def sharing_cost(num_prompt: int, num_output: int, n: int, block_size: int) -> tuple[int, int, int]:
    """What n samples of one prompt hold once each has written K/V for num_output tokens of its own.

    Returns (blocks if each had a private copy of the prompt, blocks with sharing, blocks copied on the way).
    """
    each = cdiv(num_prompt + num_output, block_size)
    if num_output == 0:
        return n * each, each, 0
    shared, in_last = divmod(num_prompt, block_size)
    return n * each, shared + n * (each - shared), n - 1 if in_last else 0


def make_room(pool: BlockPool, table: list[KVCacheBlock], start: int, num_tokens: int,
              block_size: int) -> list[Copy] | None:  # fmt: skip
    """Let `table` hold positions start to start + num_tokens - 1, all of them writable.

    Returns the copies to make before anything is written, or None, and nothing changed, if the pool has too few
    free blocks for the copies and the new blocks together. `table` covers all positions before `start`.
    """
    touched = range(start // block_size, cdiv(start + num_tokens, block_size))
    standing = [index for index in touched if index < len(table)]
    num_new = len(touched) - len(standing)
    if num_new + sum(not table[index].is_writable for index in standing) > pool.get_num_free_blocks():
        return None
    copies = [ensure_writable(pool, table, index) for index in standing]
    table.extend(pool.get_new_blocks(num_new))
    return [copy for copy in copies if copy is not None]


def beam_step(pool: BlockPool, tables: Sequence[list[KVCacheBlock]],
              parents: Sequence[int]) -> list[list[KVCacheBlock]]:  # fmt: skip
    """The tables of the next beams: beam i goes on from tables[parents[i]]. Who is nobody's parent is given back."""
    following = [fork(pool, tables[parent]) for parent in parents]  # first: what lives on is never without owner
    for table in tables:
        pool.free_blocks(reversed(table))
    return following


def fork_at(pool: BlockPool, table: Sequence[KVCacheBlock], num_tokens: int, block_size: int) -> list[KVCacheBlock]:
    """The table of a branch that shares the first num_tokens tokens; the last block may be shared in part."""
    return fork(pool, table[: cdiv(num_tokens, block_size)])


def truncate(pool: BlockPool, table: list[KVCacheBlock], num_tokens: int, block_size: int) -> None:
    """Go back to the first num_tokens tokens: give back, last first, the blocks that hold none of them."""
    keep = cdiv(num_tokens, block_size)
    pool.free_blocks(reversed(table[keep:]))
    del table[keep:]


def blocks_freed_by(tables: Sequence[Sequence[KVCacheBlock]]) -> int:
    """How many blocks come back if all of `tables` are given up together: those that nobody else holds."""
    held = Counter(block for table in tables for block in table)
    return sum(block.ref_cnt == count for block, count in held.items())


def copy_batches(copies: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cut an ordered list of (source, target) copies into the fewest batches that may each be made at once.

    A batch reads all its sources before it writes any target. So a copy starts a new batch when the running one
    writes its source or its target.
    """
    batches: list[list[tuple[int, int]]] = []
    written: set[int] = set()
    for source, target in copies:
        if not batches or source in written or target in written:
            batches.append([])
            written = set()
        batches[-1].append((source, target))
        written.add(target)
    return batches
