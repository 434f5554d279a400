"""Prefix reuse in miniature: what pool and manager do to cached blocks, over a queue and an index alone (lab 05).

    start_request   match -> do they fit? -> touch the hits -> take new ones      a prompt comes in
    release         last block first, names kept                                  a request ends
    match_limit, num_publishable, prefill_seconds                                 the arithmetic beside it

The engine itself runs on BlockPool and KVCacheManager, which do the same with forks, chunks and swap space; a test
holds the two side by side.
"""

from collections.abc import Sequence

from kvlab.blocks import FreeKVCacheBlockQueue, KVCacheBlock, OutOfBlocks, PrefixIndex, cdiv


def match_limit(num_tokens: int, block_size: int) -> int:
    """How many of `num_tokens` tokens may come from the cache: whole blocks, and at least one token left to compute."""
    return (num_tokens - 1) // block_size * block_size


def num_publishable(num_tokens: int, num_computed_tokens: int, block_size: int) -> int:
    """How many blocks of a request may be published: those whose K/V is complete, whatever tokens are known beyond."""
    return num_computed_tokens // block_size


def take(queue: FreeKVCacheBlockQueue, index: PrefixIndex, n: int) -> list[KVCacheBlock]:
    """The n blocks freed longest ago, for new contents. OutOfBlocks, and nothing changed, if there are fewer."""
    if n > queue.num_free_blocks:
        raise OutOfBlocks(f"{n} blocks asked for, {queue.num_free_blocks} are free")
    blocks = [queue.popleft() for _ in range(n)]
    for block in blocks:
        if block.block_hash is not None:
            index.remove(block)
        block.ref_cnt = 1
    return blocks


def touch(queue: FreeKVCacheBlockQueue, blocks: Sequence[KVCacheBlock]) -> None:
    """One owner more for each of `blocks`; those that nobody owned leave the queue."""
    for block in blocks:
        if block.ref_cnt == 0:
            queue.remove(block)
        block.ref_cnt += 1


def release(queue: FreeKVCacheBlockQueue, table: Sequence[KVCacheBlock]) -> None:
    """One owner fewer for each block of `table`, the last one first. ValueError if one has none."""
    for block in reversed(table):
        if block.ref_cnt < 1:
            raise ValueError(f"block {block.block_id} has no owner: it was freed twice")
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            queue.append(block)


def start_request(queue: FreeKVCacheBlockQueue, index: PrefixIndex, tokens: Sequence[int],
                  salt: str | None = None) -> tuple[list[KVCacheBlock], int] | None:  # fmt: skip
    """Blocks for the prompt `tokens`: (table, tokens found cached). None, and nothing changed, if they do not fit."""
    hits = index.match(tokens[: match_limit(len(tokens), index.block_size)], salt)
    num_new = cdiv(len(tokens), index.block_size) - len(hits)
    if num_new + sum(block.ref_cnt == 0 for block in hits) > queue.num_free_blocks:
        return None
    touch(queue, hits)  # first: taking new ones could evict them
    return hits + take(queue, index, num_new), len(hits) * index.block_size


def prefill_seconds(num_tokens: int, num_cached: int, num_parameters: float, flops: float, bandwidth: float) -> float:
    """A lower bound for the prefill of `num_tokens` tokens of which `num_cached` have K/V, weights in 2 bytes.

    2 FLOPs a parameter and token at `flops` a second, or one reading of the weights at `bandwidth` bytes a second,
    whichever takes longer. Attention's own FLOPs are left out.
    """
    return max(2 * num_parameters * (num_tokens - num_cached) / flops, 2 * num_parameters / bandwidth)
