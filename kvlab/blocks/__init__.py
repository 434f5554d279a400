"""Blocks: the allocator of PagedAttention (L33 2.2 and 6.3, PAV 3.2). Plain Python; lab 03.

    FreeKVCacheBlockQueue   the blocks nobody references, in eviction order, O(1) at both ends and inside
            |
        BlockPool           hands blocks out, counts references, asks the prefix index to forget evicted ones
            |
        BlockTable          one request's list of blocks: logical block -> physical block -> slot
"""

from kvlab.blocks.block import KVCacheBlock, OutOfBlocks, PrefixIndex
from kvlab.blocks.free_queue import FreeKVCacheBlockQueue
from kvlab.blocks.pool import BlockPool, BlockPoolBase
from kvlab.blocks.sharing import ensure_writable, fork
from kvlab.blocks.table import BlockTable, cdiv

__all__ = [
    "BlockPool",
    "BlockPoolBase",
    "BlockTable",
    "FreeKVCacheBlockQueue",
    "KVCacheBlock",
    "OutOfBlocks",
    "PrefixIndex",
    "cdiv",
    "ensure_writable",
    "fork",
]
