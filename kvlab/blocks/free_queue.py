"""The free queue: a doubly linked list threaded through the blocks themselves (L33 6.3).

    head <-> 7 <-> 2 <-> 9 <-> tail        popleft: the next block to be reused (least recently freed)
                                           append:  a block just freed
                                           remove:  a cached block in the middle that a prompt has hit

All three are O(1) and allocate nothing: a list would need O(n) to take a block out of the middle, and a
deque cannot do it at all. Two sentinels stand at the ends, so that no operation has a special case.
"""

from collections.abc import Sequence

from kvlab.blocks.block import KVCacheBlock, OutOfBlocks


class FreeKVCacheBlockQueue:
    """The blocks that nobody references, in eviction order.

    num_free_blocks: how many there are. head, tail: the sentinels, two blocks that stand for no K/V.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]):
        self.num_free_blocks = 0
        self.head = KVCacheBlock(-1)
        self.tail = KVCacheBlock(-1)
        self.head.next_free_block = self.tail
        self.tail.prev_free_block = self.head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the head. OutOfBlocks if the queue is empty."""
        block = self.head.next_free_block
        if block is self.tail:
            raise OutOfBlocks("the free queue is empty: free or preempt a request first")
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first n, in order. OutOfBlocks, and nothing taken, if there are fewer."""
        if n < 0:
            raise ValueError(f"n is {n}: ask for 0 or more blocks")
        if n > self.num_free_blocks:
            raise OutOfBlocks(f"{n} blocks asked for, {self.num_free_blocks} are free: free or preempt a request first")
        taken = []
        block = self.head.next_free_block
        for _ in range(n):
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None
            taken.append(block)
            block = following
        self.head.next_free_block = block
        block.prev_free_block = self.head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` out from wherever it stands. ValueError if it is not in the queue."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise ValueError(f"block {block.block_id} is not in the free queue, so it cannot be removed from it")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put `block` at the tail: it will be the last to be reused. ValueError if it is in the queue."""
        if block.next_free_block is not None:
            raise ValueError(f"block {block.block_id} is already in the free queue: it was freed twice")
        last = self.tail.prev_free_block
        last.next_free_block = block
        block.prev_free_block = last
        block.next_free_block = self.tail
        self.tail.prev_free_block = block
        self.num_free_blocks += 1

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Append each, in the order given."""
        for block in blocks:
            self.append(block)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All blocks in eviction order; O(n), for tests and views."""
        blocks = []
        block = self.head.next_free_block
        while block is not self.tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks
