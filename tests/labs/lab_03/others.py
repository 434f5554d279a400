"""Lab 03: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""

_LINKED = '''
class FreeQueue(FreeQueueBase):
    def popleft(self):
        block = self.head.next_free_block
        if block is self.tail:
            raise OutOfBlocks("the queue is empty")
        self.remove(block)
        return block

    def append(self, block):
        if block.next_free_block is not None:
            raise ValueError("in the queue already")
        before = self.tail.prev_free_block
        block.prev_free_block, block.next_free_block = before, self.tail
        before.next_free_block = self.tail.prev_free_block = block
        self.num_free_blocks += 1

    def remove(self, block):
        if block.next_free_block is None:
            raise ValueError("not in the queue")
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1
'''


def _changed(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


# exercise -> {what it is: the cell}
CORRECT = {
    "free_queue": {
        "an ordered dict in place of links": '''
class FreeQueue:
    def __init__(self, blocks):
        self.queue = {block.block_id: block for block in blocks}

    @property
    def num_free_blocks(self):
        return len(self.queue)

    def popleft(self):
        if not self.queue:
            raise OutOfBlocks("none")
        return self.queue.pop(next(iter(self.queue)))

    def append(self, block):
        if block.block_id in self.queue:
            raise ValueError(block.block_id)
        self.queue[block.block_id] = block

    def remove(self, block):
        if block.block_id not in self.queue:
            raise ValueError(block.block_id)
        del self.queue[block.block_id]

    def get_all_free_blocks(self):
        return list(self.queue.values())
''',
    },
}
WRONG = {
    "free_queue": {
        "a stack": _changed(_LINKED, "before = self.tail.prev_free_block", "before = self.head"),
        "the links of a block that left stay": _changed(_LINKED, "block.prev_free_block = block.next_free_block = None", "pass"),
        "remove does not count": _changed(_LINKED, "self.num_free_blocks -= 1", "pass"),
        "remove forgets the way back": _changed(
            _LINKED, "        block.next_free_block.prev_free_block = block.prev_free_block\n", ""),
        "walks to the block": _changed(_LINKED, "        block.prev_free_block.next_free_block = block.next_free_block\n", '''
        before = self.head
        while before.next_free_block is not block:
            before = before.next_free_block
        before.next_free_block = block.next_free_block
'''),
        "pops from an empty queue": _changed(_LINKED, "            raise OutOfBlocks(\"the queue is empty\")", "            return None"),
        "freed twice unnoticed": _changed(_LINKED, "            raise ValueError(\"in the queue already\")", "            return"),
    },
}  # fmt: skip
