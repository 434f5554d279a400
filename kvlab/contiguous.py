"""The same manager over a contiguous arena: how engines kept K/V before paging (L33 1).

A request reserves consecutive block ids for the longest sequence it could become, when it is admitted, and
keeps them to its end. The engine above and the kernels below cannot tell the difference, so one engine
shows what reservation costs: admission starves although most reserved slots are empty (L33 1.1, 1.3), and
a hole that is too short is of no use (L33 1.2). Nothing can be shared, so there is no prefix reuse either.
"""

from collections.abc import Callable, Sequence

from kvlab.arena import ContiguousArena
from kvlab.blocks import BlockPoolBase, BlockTable, KVCacheBlock, cdiv
from kvlab.events import Recorder
from kvlab.manager import NO_BLOCKS, KVCacheManager


class ContiguousKVCacheManager(KVCacheManager):
    """KVCacheManager whose tables are runs of consecutive blocks, reserved whole at admission.

    reserve: how many tokens to reserve for a request: a number for all, or a function of the request.
    arena: places the runs; a replacement for ours (lab 02) must offer allocate(owner, size) and free(owner).
    """

    def __init__(self, num_gpu_blocks: int, block_size: int, reserve: int | Callable[[object], int],
                 arena: ContiguousArena | None = None, recorder: Recorder | None = None,
                 block_pool: BlockPoolBase | None = None):  # fmt: skip
        super().__init__(num_gpu_blocks, block_size, enable_caching=False, block_pool=block_pool, recorder=recorder)
        self.arena = arena or ContiguousArena(num_gpu_blocks - 1, start=1)
        self._reserve = reserve if callable(reserve) else lambda request: reserve
        self._longest = super().max_tokens_per_request
        if not callable(reserve):
            if cdiv(reserve, block_size) > self.block_pool.num_usable_blocks:
                raise ValueError(
                    f"each request reserves {reserve} tokens, and there are {self.block_pool.num_usable_blocks} blocks "
                    f"of {block_size}: reserve less (max_model_len) or give the engine more blocks"
                )
            self._longest = cdiv(reserve, block_size) * block_size

    can_share = False
    tables_grow = False  # all that it may ever need was reserved

    @property
    def max_tokens_per_request(self) -> int:
        return self._longest

    def num_blocks_to_start(self, request, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        return cdiv(self._reserve(request), self.block_size)

    def allocate_slots(self, request, num_new_tokens: int,
                       new_computed_blocks: Sequence[KVCacheBlock] = ()) -> list[KVCacheBlock] | None:  # fmt: skip
        """As for KVCacheManager, but nothing ever grows past what was reserved: ValueError if it had to."""
        slots = self.num_blocks_to_start(request, 0, ()) * self.block_size
        if (needed := request.num_computed_tokens + num_new_tokens) > slots:
            raise ValueError(f"request {request.request_id!r} reserves {slots} slots but needs {needed}: reserve more")
        return super().allocate_slots(request, num_new_tokens, new_computed_blocks)

    def _start(self, request, num_new_tokens: int, hits: Sequence[KVCacheBlock]) -> list[KVCacheBlock] | None:
        size = self.num_blocks_to_start(request, 0, hits)
        first = self.arena.allocate(request.request_id, size)
        if first is None:
            return None
        blocks = self.block_pool.blocks[first : first + size]
        self.block_pool.touch(blocks)
        self.req_to_blocks[request.request_id] = BlockTable(blocks)
        return blocks

    def fork(self, parent, child, num_tokens: int | None = None) -> bool:
        """Consecutive blocks cannot be shared: the child must compute its own. Always False."""
        return False

    def hand_over(self, giver, taker, num_tokens: int) -> bool:
        """A reservation for the longest sequence is not held for somebody who does not run. Always False."""
        return False

    def swap_out(self, request) -> bool:
        return False

    def free(self, request) -> None:
        if self.req_to_blocks.get(request.request_id, NO_BLOCKS):
            self.arena.free(request.request_id)
        super().free(request)
