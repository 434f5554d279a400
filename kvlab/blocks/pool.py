"""The block pool: who owns which block, and which cached block is given up next (PAV 3.2).

    get_new_blocks: head of the free queue -> owned (a cached block is forgotten by the index first)
    touch:          a hit: cached -> owned again, taken out of the middle of the queue; owned: one owner more
    free_blocks:    one owner fewer; at none the block goes to the tail, its name and content still good

Block 0 is the null block: never handed out, kept zero, the target of padding. So num_gpu_blocks - 1 are usable.
Lab 03 writes the three methods above, over what BlockPoolBase holds.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvlab.blocks.block import KVCacheBlock, PrefixIndex
from kvlab.blocks.free_queue import FreeKVCacheBlockQueue
from kvlab.events import Recorder


class BlockPoolBase:
    """All blocks of one KV cache: the state, and all that reads it or deals in names.

    A pool adds get_new_blocks, touch and free_blocks, and may use of this:
    blocks: all blocks by id. null_block: blocks[0]. free_block_queue: those without an owner, in eviction order.
    prefix_index: who knows published blocks by name; None when caching is off. evict(block): make it forget one.

    num_gpu_blocks: blocks in the K/V tensors, the null block included.
    prefix_index: with one, full blocks can be published and found again; without, caching is off.
    free_queue: the class of the queue; it is made with the list of all blocks but the null block.
    """

    def __init__(self, num_gpu_blocks: int, enable_caching: bool | None = None,
                 prefix_index: PrefixIndex | None = None, recorder: Recorder | None = None,
                 free_queue: Callable[[list[KVCacheBlock]], Any] = FreeKVCacheBlockQueue):  # fmt: skip
        if num_gpu_blocks < 2:
            raise ValueError(f"num_gpu_blocks is {num_gpu_blocks}: a pool needs the null block and at least one more")
        if enable_caching and prefix_index is None:
            raise ValueError("enable_caching needs an index: pass prefix_index=HashChainIndex(block_size)")
        self.num_gpu_blocks = num_gpu_blocks
        self.prefix_index = None if enable_caching is False else prefix_index
        self.enable_caching = self.prefix_index is not None
        self.recorder = recorder
        self.blocks = [KVCacheBlock(i, is_null=i == 0) for i in range(num_gpu_blocks)]
        self.free_block_queue = free_queue(self.blocks[1:])
        self.null_block = self.blocks[0]

    @property
    def num_usable_blocks(self) -> int:
        return self.num_gpu_blocks - 1

    @property
    def cached_block_hash_to_block(self):
        """Published blocks by name, owned or cached. Empty when caching is off."""
        return self.prefix_index.cached_block_hash_to_block if self.enable_caching else {}

    def get_cached_block(self, block_hash: Any) -> KVCacheBlock | None:
        return self.cached_block_hash_to_block.get(block_hash)

    def get_num_free_blocks(self) -> int:
        """Blocks that can be handed out now; cached ones count, for they are given up when needed."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the usable blocks that some request owns, 0 to 1."""
        return 1.0 - self.get_num_free_blocks() / self.num_usable_blocks

    def cache_full_blocks(self, request, blocks: Sequence[KVCacheBlock], num_full_blocks: int,
                          cursor: Any = None) -> Any:  # fmt: skip
        """Publish the first `num_full_blocks` blocks of `request`: their K/V has been written. Returns a cursor.

        request: needs `all_token_ids` and `cache_salt`; its tokens must cover the full blocks.
        """
        if not self.enable_caching:
            return None
        full, unnamed = blocks[:num_full_blocks], ()
        if self.recorder is not None:
            unnamed = [block for block in full if block.block_hash is None]
        cursor = self.prefix_index.insert(request.all_token_ids, full, request.cache_salt, cursor)
        if unnamed and (published := [block.block_id for block in unnamed if block.block_hash is not None]):
            self.recorder.emit("publish", request.request_id, published)
        return cursor

    def reset_prefix_cache(self) -> bool:
        """Forget every published block. False, and nothing changed, while any block is owned."""
        if self.get_num_free_blocks() != self.num_usable_blocks:
            return False
        for block in self.blocks:
            if block.block_hash is not None:
                self.evict(block)
        return True

    def evict(self, block: KVCacheBlock) -> None:
        """Forget the name of `block`, which has one: what it holds is about to be overwritten."""
        self.prefix_index.remove(block)
        if self.recorder is not None:
            self.recorder.emit("evict", None, [block.block_id])


class BlockPool(BlockPoolBase):
    """The pool's three moves."""

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Hand out `num_blocks` blocks, ref_cnt 1. OutOfBlocks, and nothing changed, if too few are free."""
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if block.block_hash is not None:
                self.evict(block)
            block.ref_cnt = 1
        if self.recorder is not None and blocks:
            self.recorder.emit("alloc", None, [b.block_id for b in blocks])
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """One more owner for each of `blocks`; those in the free queue leave it."""
        blocks = list(blocks)
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
        if self.recorder is not None and blocks:
            self.recorder.emit("touch", None, [b.block_id for b in blocks])

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """One owner fewer for each of `ordered_blocks`; those without any go to the tail, in this order.

        Give a request's last block first: then its prefix is evicted last. ValueError on a double free,
        and nothing changed.
        """
        freed = []
        ordered_blocks = list(ordered_blocks)
        for i, block in enumerate(ordered_blocks):
            if block.ref_cnt < 1:
                for counted in ordered_blocks[:i]:
                    counted.ref_cnt += 1
                raise ValueError(f"block {block.block_id} has no owner: it was freed twice")
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                freed.append(block)
        self.free_block_queue.append_n(freed)
        if self.recorder is not None and freed:
            self.recorder.emit("free", None, [b.block_id for b in freed])
