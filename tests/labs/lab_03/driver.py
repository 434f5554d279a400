"""Lab 03: drives the student's classes with plain values. Runs in the child process."""

from kvlab.blocks import KVCacheBlock


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


class FreeQueueDriver:
    def __init__(self, student, num_blocks):
        self.blocks = {i: CountedBlock(i) for i in range(1, num_blocks + 1)}
        self.queue = student.FreeQueue(list(self.blocks.values()))

    def popleft(self):
        return self.queue.popleft().block_id

    def append(self, block_id):
        self.queue.append(self.blocks[block_id])

    def remove(self, block_id):
        self.queue.remove(self.blocks[block_id])

    def contents(self):
        return [block.block_id for block in self.queue.get_all_free_blocks()]

    def num_free_blocks(self):
        return self.queue.num_free_blocks

    def links_of(self, block_id):
        block = self.blocks[block_id]
        return [block.prev_free_block and block.prev_free_block.block_id,
                block.next_free_block and block.next_free_block.block_id]  # fmt: skip

    def accesses_to_remove(self, block_id):
        CountedBlock.accesses = 0
        self.queue.remove(self.blocks[block_id])
        return CountedBlock.accesses
