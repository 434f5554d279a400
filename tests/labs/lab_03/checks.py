"""Lab 03, the block allocator: its exercises."""

from hypothesis import strategies as st

from kvlab.blocks import OutOfBlocks
from kvlab.grade import AtMost, Exercise, LabInfo, Trace, say, walks

LAB = LabInfo(title=say("The block allocator"), sections="L33 2.2, 6.3; PAV 3.2", before=("02",))


class FreeQueue(Exercise):
    """A doubly linked free queue."""

    name, points, minutes, section = "free_queue", 5, 25, "L33 6.3"
    defines = ("FreeQueue",)
    ours = {"FreeQueue": "kvlab.blocks.free_queue:FreeKVCacheBlockQueue"}
    part = {"free_queue": "FreeQueue"}
    driver = "FreeQueueDriver"
    hints = (
        say("Between the two sentinels every block has two neighbours, so no method needs an `if` for an empty queue "
            "or for the ends."),
        say("remove: the neighbours of the block must learn of each other. Four links change, two of them the block's own."),
        say("append: the new block stands between the last one, tail.prev_free_block, and tail."),
    )  # fmt: skip
    examples = (
        Trace((2,), (("popleft",), ("popleft",), ("popleft",))),
        Trace((3,), (("popleft",), ("append", 1), ("contents",))),
        Trace((3,), (("remove", 2), ("contents",), ("num_free_blocks",))),
        Trace((3,), (("remove", 1), ("remove", 3), ("contents",), ("append", 3), ("append", 1), ("contents",))),
        Trace((2,), (("append", 1), ("contents",)), why=say("Block 1 was in the queue: appending it again means that "
                                                            "somebody freed it twice.")),
        Trace((2,), (("popleft",), ("remove", 1), ("contents",)), why=say("Block 1 had left the queue.")),
        Trace((3,), (("remove", 2), ("links_of", 2))),
        Trace((10,), (("accesses_to_remove", 5),)),
        Trace((10_000,), (("accesses_to_remove", 5_000),)),
    )  # fmt: skip

    class Oracle:
        """A plain list: right, and O(n) where yours must be O(1)."""

        def __init__(self, num_blocks):
            self.all = list(range(1, num_blocks + 1))
            self.queue = list(self.all)

        def popleft(self):
            if not self.queue:
                raise OutOfBlocks
            return self.queue.pop(0)

        def append(self, block_id):
            if block_id in self.queue:
                raise ValueError
            self.queue.append(block_id)

        def remove(self, block_id):
            if block_id not in self.queue:
                raise ValueError
            self.queue.remove(block_id)

        def contents(self):
            return list(self.queue)

        def num_free_blocks(self):
            return len(self.queue)

        def links_of(self, block_id):
            return [None, None]

        def accesses_to_remove(self, block_id):
            self.queue.remove(block_id)
            return AtMost(20)

        def ops(self):
            out = [b for b in self.all if b not in self.queue]
            return [("contents",), ("num_free_blocks",), ("popleft",), *(("append", b) for b in out),
                    *(("remove", b) for b in self.queue)]  # fmt: skip

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 5)), max_ops=12)

    def describe_init(self, init):
        return f"a queue of blocks 1 to {init[0]}"

    def explain(self, op, expected, got):
        if op[0] == "accesses_to_remove":
            return say("Taking a block out of the middle must cost the same however long the queue is: use its own links "
                       "instead of walking from the head.")  # fmt: skip
        if op[0] == "popleft" and expected == "OutOfBlocks":
            return say("An empty queue has no block to give: raise OutOfBlocks, and change nothing.")
        if op[0] == "popleft":
            return say("popleft takes the block at the head, the one that was freed first.")
        if op[0] == "num_free_blocks":
            return say("num_free_blocks must count every block that comes or goes, and nothing else.")
        if op[0] == "links_of":
            return say("A block outside the queue has no neighbours: set both of its links to None.")
        return None
