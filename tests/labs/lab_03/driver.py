"""Lab 03: drives the student's classes with plain values. Runs in the child process."""

from kvlab.blocks import KVCacheBlock, OutOfBlocks
from kvlab.blocks.pool import BlockPoolBase


def told(blocks):
    """Blocks as ids; what is no block is said to be none, so that a list of ids does not pass for a list of blocks."""
    if blocks is None:
        return None
    return [b.block_id if isinstance(b, KVCacheBlock) else f"{b!r}, which is no KVCacheBlock" for b in blocks]


def unchanged(result, list_given, before):
    """`result`, if the list that was handed over is as it was; else words that no answer can be."""
    same = len(list_given) == len(before) and all(a is b for a, b in zip(list_given, before, strict=True))
    return result if same else f"the caller's list, changed: {len(before)} entries before, {len(list_given)} now"


class SlotMappingDriver:
    def __init__(self, student):
        self.student = student

    def slot_mapping(self, chunks, block_size):
        lists = [chunks, *(block_ids for block_ids, _, _ in chunks)]
        before = [list(one) for one in lists]
        result = self.student.slot_mapping(chunks, block_size)
        for one, was in zip(lists, before, strict=True):
            result = unchanged(result, one, was)
        return result


class CountedBlock(KVCacheBlock):
    """A block that counts how often its links are read or written."""

    __slots__ = ("_prev", "_next")
    accesses = 0

    def __init__(self, block_id):
        super().__init__(block_id)

    def _get(name):
        def read(self):
            CountedBlock.accesses += 1
            return getattr(self, name, None)

        def write(self, value):
            CountedBlock.accesses += 1
            setattr(self, name, value)

        return property(read, write)

    prev_free_block, next_free_block = _get("_prev"), _get("_next")


class QueueDriver:
    """What the drivers of both queue exercises share."""

    def contents(self):
        return told(self.queue.get_all_free_blocks())

    def num_free_blocks(self):
        return self.queue.num_free_blocks

    def links_of(self, block_id):
        block = self.blocks[block_id]
        return [block.prev_free_block and block.prev_free_block.block_id,
                block.next_free_block and block.next_free_block.block_id]  # fmt: skip

    def remove(self, block_id):
        self.queue.remove(self.blocks[block_id])

    def append(self, block_id):
        self.queue.append(self.blocks[block_id])


class FreeQueueDriver(QueueDriver):
    def __init__(self, student, num_blocks):
        self.blocks = {i: CountedBlock(i) for i in range(1, num_blocks + 1)}
        self.queue = student.FreeQueue(list(self.blocks.values()))

    def backwards(self):
        """The queue from its tail along prev_free_block; where there are no sentinels, there are no links to be wrong."""
        if not hasattr(self.queue, "tail"):
            return self.contents()[::-1]
        found, block = [], self.queue.tail.prev_free_block
        while block is not None and block is not self.queue.head and len(found) <= len(self.blocks):
            found.append(block)
            block = block.prev_free_block
        return told(found) + ["no link"] * (block is None)

    def popleft(self):
        block = self.queue.popleft()
        return block.block_id if isinstance(block, KVCacheBlock) else block

    def accesses_to_popleft(self):
        CountedBlock.accesses = 0
        self.queue.popleft()
        return CountedBlock.accesses

    def accesses_to_remove(self, block_id):
        CountedBlock.accesses = 0
        self.queue.remove(self.blocks[block_id])
        return CountedBlock.accesses

    def accesses_to_append(self, block_id):
        CountedBlock.accesses = 0
        self.queue.append(self.blocks[block_id])
        return CountedBlock.accesses

    def accesses_to_count(self):
        CountedBlock.accesses = 0
        self.queue.num_free_blocks  # noqa: B018
        return CountedBlock.accesses


class LinkedQueue:
    """A free queue as the notebook describes it, for the function popleft_n to work on."""

    def __init__(self, blocks):
        self.num_free_blocks = 0
        self.head, self.tail = CountedBlock(-1), CountedBlock(-1)
        self.head.next_free_block, self.tail.prev_free_block = self.tail, self.head
        for block in blocks:
            self.append(block)

    def append(self, block):
        last = self.tail.prev_free_block
        last.next_free_block = self.tail.prev_free_block = block
        block.prev_free_block, block.next_free_block = last, self.tail
        self.num_free_blocks += 1

    def remove(self, block):
        before, after = block.prev_free_block, block.next_free_block
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def popleft(self):
        block = self.head.next_free_block
        if block is self.tail:
            raise OutOfBlocks("empty")
        self.remove(block)
        return block

    def get_all_free_blocks(self):
        blocks, block = [], self.head.next_free_block
        while block is not self.tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks


class PopleftNDriver(QueueDriver):
    def __init__(self, student, num_blocks):
        self.popleft_many = student.popleft_n
        self.blocks = {i: CountedBlock(i) for i in range(1, num_blocks + 1)}
        self.queue = LinkedQueue(self.blocks.values())

    def popleft_n(self, n):
        return told(self.popleft_many(self.queue, n))

    def accesses_to_popleft_n(self, n):
        CountedBlock.accesses = 0
        self.popleft_many(self.queue, n)
        return CountedBlock.accesses


class Names:
    """A prefix index that knows names and nothing else."""

    block_size = 4

    def __init__(self):
        self.cached_block_hash_to_block = {}

    def remove(self, block):
        if block.block_hash is None:
            raise LookupError(f"block {block.block_id} has no name: evict only a block whose block_hash is not None")
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None


class OwnMoves(BlockPoolBase):
    """The three moves, so that each exercise can be driven before the others are solved."""

    def get_new_blocks(self, num_blocks):
        queue = self.free_block_queue
        if num_blocks > queue.num_free_blocks:
            raise OutOfBlocks(num_blocks)
        blocks = [queue.popleft() for _ in range(num_blocks)]
        for block in blocks:
            block.ref_cnt = 1
            if block.block_hash is not None:
                self.evict(block)
        return blocks

    def free_blocks(self, ordered_blocks):
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free_block_queue.append(block)

    def touch(self, blocks):
        for block in blocks:
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1


class PoolDriver:
    """A pool of blocks 1 to num_blocks, and block 0."""

    def __init__(self, student, num_blocks):
        self.pool = self.pool_class(student)(num_blocks + 1, prefix_index=Names())

    def blocks(self, block_ids):
        return [self.pool.blocks[i] for i in block_ids]

    def get_new_blocks(self, num_blocks):
        return told(self.pool.get_new_blocks(num_blocks))

    def free_blocks(self, block_ids):
        blocks = self.blocks(block_ids)
        return unchanged(self.pool.free_blocks(blocks), blocks, self.blocks(block_ids))

    def touch(self, block_ids):
        blocks = self.blocks(block_ids)
        return unchanged(self.pool.touch(blocks), blocks, self.blocks(block_ids))

    def publish(self, block_id):
        block = self.pool.blocks[block_id]
        block.block_hash = f"name {block_id}"
        self.pool.prefix_index.cached_block_hash_to_block[block.block_hash] = block

    def ref_cnts(self):
        return {b.block_id: b.ref_cnt for b in self.pool.blocks[1:]}

    def free_queue(self):
        return told(self.pool.free_block_queue.get_all_free_blocks())

    def names(self):
        """Ids of the blocks that the index knows, and of those that bear a name."""
        known = sorted(b.block_id for b in self.pool.prefix_index.cached_block_hash_to_block.values())
        return [known, [b.block_id for b in self.pool.blocks if b.block_hash is not None]]


class GetNewBlocksDriver(PoolDriver):
    def pool_class(self, student):
        return type("Pool", (OwnMoves,), {"get_new_blocks": student.get_new_blocks})


class FreeBlocksDriver(PoolDriver):
    def pool_class(self, student):
        return type("Pool", (OwnMoves,), {"free_blocks": student.free_blocks})


class BlockPoolDriver(PoolDriver):
    def pool_class(self, student):
        return student.BlockPool
