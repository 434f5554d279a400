"""Lab 03, the block allocator: its exercises."""

from hypothesis import strategies as st

from kvlab.blocks import OutOfBlocks
from kvlab.grade import AtMost, Exercise, LabInfo, Trace, calls, say, walks

LAB = LabInfo(title=say("The block allocator"), sections="L33 2.2, 6.3, 8.1, A.3; PAV 2, 3.2", before=("02",))

BLOCK_IDS = st.lists(st.integers(1, 30), min_size=1, max_size=5, unique=True)
BLOCK_SIZES = st.sampled_from([4, 2, 3, 16, 1])
CHANGED = say("The list belongs to whoever made the call, who may need it again: read it, take nothing out of it.")


def changed(got):
    """Whether the driver says that an argument was changed."""
    return isinstance(got, str) and got.startswith("the caller's list")


def another_error(got, expected):
    """Whether an error was raised where an error is due, but of another kind."""
    return isinstance(got, str) and got.endswith("Error") and got != expected


# ---- addresses


class Slots(Exercise):
    """From a token's position to its slot, and back."""

    name, points, minutes, section = "slots", 3, 10, "L33 2.2"
    defines = ("slot_of", "position_of")
    ours = {"slot_of": "kvlab.blocks.slots:slot_of", "position_of": "kvlab.blocks.slots:position_of"}
    bars = ("kvlab.blocks.table:BlockTable.slot",)
    hints = (
        say("divmod(37, 16) gives both numbers that you need: which logical block, and how far into it."),
        say("slot_of: the table turns the logical block into a physical one, block_ids[position // block_size]. A block "
            "begins at slot block_id * block_size. position_of is the same walk backwards: slot // block_size is the "
            "physical block; where does it stand in block_ids?"),
        say("Python reads block_ids[-1] without complaint, so test first: if not 0 <= position < len(block_ids) * "
            "block_size: raise IndexError(...). And list.index raises ValueError by itself."),
    )  # fmt: skip
    examples = (
        Trace((), (("slot_of", [7], 0, 16),)),
        Trace((), (("slot_of", [7], 3, 16),)),
        Trace((), (("slot_of", [7, 2], 16, 16),)),
        Trace((), (("slot_of", [9, 61, 142], 37, 16),)),
        Trace((), (("position_of", [9, 61, 142], 142 * 16 + 5, 16),)),
        Trace((), (("slot_of", [7, 2], 32, 16),)),
        Trace((), (("slot_of", [7, 2], -1, 16),)),
        Trace((), (("position_of", [7, 2], 48, 16),)),
    )  # fmt: skip
    num_random = 100

    class Oracle:
        """All slots of the table, one after the other."""

        @staticmethod
        def _slots(block_ids, block_size):
            return [b * block_size + i for b in block_ids for i in range(block_size)]

        def slot_of(self, block_ids, position, block_size):
            if position < 0:
                raise IndexError
            return self._slots(block_ids, block_size)[position]

        def position_of(self, block_ids, slot, block_size):
            return self._slots(block_ids, block_size).index(slot)

    def traces(self):
        return st.one_of(
            calls("slot_of", BLOCK_IDS, st.integers(-3, 30), BLOCK_SIZES),
            calls("position_of", BLOCK_IDS, st.integers(0, 130), BLOCK_SIZES),
        )

    def explain(self, op, expected, got):
        name, block_ids, number, size = op
        if expected == "IndexError" and another_error(got, expected):
            return say("An error is right here, but another one: raise IndexError, which the caller waits for.")
        if expected == "IndexError":
            return say("A table of {n} blocks of {size} has slots for positions 0 to {last} only. Raise IndexError: "
                       "whatever you return instead is another token's slot.", n=len(block_ids), size=size,
                       last=len(block_ids) * size - 1)  # fmt: skip
        if expected == "ValueError":
            return say("Slot {slot} lies in block {block}, and the table does not hold that block: raise ValueError.",
                       slot=number, block=number // size)  # fmt: skip
        if name == "slot_of":
            index, offset = divmod(number, size)
            return say("Position {p} is in logical block {i}, {o} slots in. The table says that logical block {i} is "
                       "physical block {b}, which begins at slot {start}.", p=number, i=index, o=offset,
                       b=block_ids[index], start=block_ids[index] * size)  # fmt: skip
        return say("Slot {slot} is in physical block {b}, {o} slots in. Block {b} is logical block {i} of the table.",
                   slot=number, b=number // size, o=number % size, i=block_ids.index(number // size))  # fmt: skip


class SlotMapping(Exercise):
    """The slots of all tokens of one step."""

    name, points, minutes, section = "slot_mapping", 2, 5, "L33 2.2"
    defines = ("slot_mapping",)
    ours = {"slot_mapping": "kvlab.blocks.slots:slot_mapping"}
    driver = "SlotMappingDriver"
    hints = (
        say("Each request continues where it stopped: its first new token is at position num_computed, not at 0."),
        say("The positions of a chunk are range(start, start + count). One list for the whole step, in order."),
        say("for ids, start, count in chunks: for position in range(start, start + count): append slot(ids, position, "
            "block_size)"),
    )  # fmt: skip
    examples = (
        Trace((), (("slot_mapping", [[[7], 0, 2]], 4),)),
        Trace((), (("slot_mapping", [[[7, 2], 3, 2]], 4),)),
        Trace((), (("slot_mapping", [[[7, 2, 5], 9, 1]], 4),), why=say("A decode is a chunk of one token.")),
        Trace((), (("slot_mapping", [[[7, 2, 5], 9, 1], [[3, 8], 2, 4]], 4),)),
        Trace((), (("slot_mapping", [], 4),)),
        Trace((), (("slot_mapping", [[[7, 2], 7, 2]], 4),), why=say(
            "Position 8 has no block yet: the step would write K and V of a token to nowhere.")),
    )  # fmt: skip

    class Oracle:
        def slot_mapping(self, chunks, block_size):
            found = []
            for ids, start, count in chunks:
                slots = [b * block_size + i for b in ids for i in range(block_size)]
                if start + count > len(slots):
                    raise IndexError
                found += slots[start : start + count]
            return found

    def traces(self):
        chunk = st.tuples(BLOCK_IDS, st.integers(0, 8), st.integers(1, 9)).map(list)
        return calls("slot_mapping", st.lists(chunk, max_size=3), BLOCK_SIZES)

    def explain(self, op, expected, got):
        if changed(got):
            return CHANGED
        if expected == "IndexError":
            return say("A chunk reaches beyond its request's table: raise IndexError, as slot_of does.")
        if isinstance(got, list) and any(isinstance(slot, list) for slot in got):
            return say("The GPU gets one flat list for the whole step, not a list for each request.")
        if isinstance(got, list) and len(got) != len(expected):
            return say("The step computes {n} tokens, so there are {n} slots.", n=len(expected))
        return say("Token i of a chunk is at position start + i of its request. Take its logical block from that "
                   "position, not from i.")  # fmt: skip


# ---- the free queue


class FreeQueue(Exercise):
    """A doubly linked free queue."""

    name, points, minutes, section = "free_queue", 5, 30, "L33 6.3"
    defines = ("FreeQueue",)
    ours = {"FreeQueue": "kvlab.blocks.free_queue:FreeKVCacheBlockQueue"}
    part = {"free_queue": "FreeQueue"}
    driver = "FreeQueueDriver"
    hints = (
        say("Between the two sentinels every block has two neighbours, so no method needs an `if` for an empty queue "
            "or for the ends."),
        say("remove: the neighbours of the block must learn of each other. Four links change, two of them the block's own."),
        say("append: the new block stands between the last one, self.tail.prev_free_block, and self.tail. popleft: if "
            "self.head.next_free_block is self.tail, the queue is empty; else remove that block and return it."),
    )  # fmt: skip
    examples = (
        Trace((3,), (("contents",), ("backwards",), ("num_free_blocks",))),
        Trace((3,), (("remove", 2), ("contents",), ("backwards",), ("num_free_blocks",), ("links_of", 2))),
        Trace((3,), (("popleft",), ("contents",), ("backwards",), ("links_of", 1))),
        Trace((2,), (("popleft",), ("popleft",), ("num_free_blocks",), ("popleft",), ("num_free_blocks",))),
        Trace((3,), (("popleft",), ("append", 1), ("contents",))),
        Trace((3,), (("remove", 1), ("remove", 3), ("contents",), ("append", 3), ("append", 1), ("contents",))),
        Trace((2,), (("append", 1), ("num_free_blocks",), ("contents",)), why=say(
            "Block 1 was in the queue: appending it again means that somebody freed it twice.")),
        Trace((2,), (("append", 2), ("contents",)), why=say("Block 2 was in the queue, at its end.")),
        Trace((2,), (("popleft",), ("remove", 1), ("num_free_blocks",), ("contents",)), why=say(
            "Block 1 had left the queue.")),
        *(Trace((n,), (("accesses_to_popleft",), ("accesses_to_remove", n // 2), ("accesses_to_append", n // 2),
                       ("accesses_to_count",))) for n in (10, 1_000, 10_000)),
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

        def backwards(self):
            return self.queue[::-1]

        def num_free_blocks(self):
            return len(self.queue)

        def links_of(self, block_id):
            return [None, None]

        def accesses_to_popleft(self):
            self.queue.pop(0)
            return AtMost(20)

        def accesses_to_remove(self, block_id):
            self.queue.remove(block_id)
            return AtMost(20)

        def accesses_to_append(self, block_id):
            self.queue.append(block_id)
            return AtMost(20)

        def accesses_to_count(self):
            return AtMost(0)

        def ops(self):
            out = [b for b in self.all if b not in self.queue]
            return [("contents",), ("backwards",), ("num_free_blocks",), ("popleft",), *(("append", b) for b in out),
                    *(("remove", b) for b in self.queue)]  # fmt: skip

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 5)), max_ops=12)

    def describe_init(self, init):
        return f"a queue of blocks 1 to {init[0]}"

    def explain(self, op, expected, got):
        if op[0] == "accesses_to_popleft":
            return say("Handing out a block must cost the same however long the queue is: the first block is "
                       "self.head.next_free_block, and the queue is empty if that is self.tail.")  # fmt: skip
        if op[0] == "accesses_to_remove":
            return say("Taking a block out of the middle must cost the same however long the queue is: use its own links "
                       "instead of walking from the head.")  # fmt: skip
        if op[0] == "accesses_to_append":
            return say("Freeing a block must cost the same however long the queue is: the last block is "
                       "self.tail.prev_free_block, nobody has to walk there. And a block's own links tell whether it "
                       "is in the queue: nobody has to look for it.")  # fmt: skip
        if op[0] == "accesses_to_count":
            return say("The scheduler asks for num_free_blocks at every step: keep a number instead of counting blocks.")
        if op[0] == "popleft" and expected == "OutOfBlocks":
            return say("An empty queue has no block to give: raise OutOfBlocks, and change nothing.")
        if op[0] == "popleft":
            return say("popleft takes the block at the head, the one that was freed first.")
        if op[0] == "num_free_blocks":
            return say("num_free_blocks must count every block that comes or goes, and nothing else.")
        if op[0] == "links_of":
            return say("A block outside the queue has no neighbours: set both of its links to None.")
        if op[0] == "append" and expected == "ValueError":
            return say("A block in the queue has neighbours, the first and the last one too: raise ValueError before any "
                       "link changes.")  # fmt: skip
        if op[0] == "remove" and expected == "ValueError":
            return say("A block outside the queue has no neighbours: raise ValueError.")
        if op[0] == "contents" and len(expected) > 1 and got == expected[-1:]:
            return say("Only the last block is there: each append has put its block in the place of the one before. "
                       "Who tells the tail, by tail.prev_free_block, that it has a new neighbour?")  # fmt: skip
        if op[0] == "contents":
            return say("Read from the head along next_free_block, this is what stands in the queue: append puts a block "
                       "at the tail, popleft takes the one at the head.")  # fmt: skip
        if op[0] == "backwards":
            return say("Read from the tail along prev_free_block, the queue must be the same, back to front. A link that "
                       "points forward needs its twin that points back.")  # fmt: skip
        return None


# ---- the pool


class PoolOracle:
    """The pool as three facts on each block: owners, place in the queue, name."""

    ends = False  # a double free may be tried

    def __init__(self, num_blocks):
        self.owners = dict.fromkeys(range(1, num_blocks + 1), 0)
        self.queue = list(range(1, num_blocks + 1))
        self.named = set()

    def get_new_blocks(self, num_blocks):
        if num_blocks > len(self.queue):
            raise OutOfBlocks
        taken, self.queue = self.queue[:num_blocks], self.queue[num_blocks:]
        for b in taken:
            self.owners[b] = 1
        self.named -= set(taken)
        return taken

    def free_blocks(self, block_ids):
        left = dict(self.owners)
        for b in block_ids:
            left[b] -= 1
            if left[b] < 0:
                raise ValueError
        self.queue += [b for b in dict.fromkeys(reversed(block_ids)) if not left[b]][::-1]
        self.owners = left

    def touch(self, block_ids):
        for b in block_ids:
            self.owners[b] += 1
        self.queue = [b for b in self.queue if not self.owners[b]]

    def publish(self, block_id):
        self.named.add(block_id)

    def ref_cnts(self):
        return dict(self.owners)

    def free_queue(self):
        return list(self.queue)

    def names(self):
        return [sorted(self.named), sorted(self.named)]

    def ops(self):
        owned = [b for b, n in self.owners.items() if n]
        cached = [b for b in self.queue if b in self.named]
        ops = [("ref_cnts",), ("free_queue",), ("names",)]
        ops += [("get_new_blocks", n) for n in range(1, min(3, len(self.queue)) + 1)]
        ops += [("get_new_blocks", len(self.queue) + 1)]
        ops += [("free_blocks", [b]) for b in owned]
        if len(owned) > 1:
            ops += [("free_blocks", owned[::-1]), ("free_blocks", owned[1:])]
        ops += [("touch", [b]) for b in owned + cached]
        ops += [("touch", (cached + owned)[:3])] if cached and owned else []
        ops += [("touch", (cached + owned)[:1] * 2)] if cached or owned else []
        ops += [("publish", b) for b in owned if b not in self.named]
        if self.ends and owned and self.queue:
            ops += [("free_blocks", [owned[0], self.queue[0]])]
        return ops


class _PoolExercise(Exercise):
    section = "PAV 3.2"
    num_random = 100

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(2, 5)), max_ops=10)

    def describe_init(self, init):
        return f"a pool of blocks 1 to {init[0]}, all free"

    def describe(self, op):
        told = {"names": "names: in the index, on the blocks", "publish": f"block {op[-1]} gets a name"}
        return told.get(op[0]) or super().describe(op)


class GetNewBlocks(_PoolExercise):
    """Hand out blocks, all or none."""

    name, points, minutes = "get_new_blocks", 3, 10
    defines = ("get_new_blocks",)
    ours = {"get_new_blocks": "kvlab.blocks.pool:BlockPool.get_new_blocks"}
    driver = "GetNewBlocksDriver"
    hints = (
        say("Count before you take: pool.free_block_queue.num_free_blocks tells how many there are."),
        say("A block from the head may still be cached. If its block_hash is not None, call pool.evict(block), or somebody "
            "will find the new owner's tokens under the old name."),
        say("if num_blocks > the count: raise OutOfBlocks. Then num_blocks times: popleft, evict if it has a name, set "
            "ref_cnt = 1, append to the list that you return."),
    )  # fmt: skip
    examples = (
        Trace((3,), (("get_new_blocks", 1), ("ref_cnts",))),
        Trace((2,), (("get_new_blocks", 2),), why=say("Two blocks were free and two were asked for: that is enough.")),
        Trace((3,), (("get_new_blocks", 2), ("free_queue",), ("get_new_blocks", 1), ("free_queue",))),
        Trace((3,), (("get_new_blocks", 0), ("free_queue",))),
        Trace((3,), (("get_new_blocks", 4), ("free_queue",), ("ref_cnts",)), why=say(
            "All or none: a request that got half of its blocks can neither run nor give way to others.")),
        Trace((3,), (("get_new_blocks", 3), ("free_blocks", [2, 1]), ("get_new_blocks", 1)), why=say(
            "The head of the queue is the block that was freed first; the smallest number says nothing.")),
        Trace((1,), (("get_new_blocks", 1), ("publish", 1), ("free_blocks", [1]), ("names",), ("get_new_blocks", 1),
                     ("names",))),
        Trace((3,), (("get_new_blocks", 3), ("publish", 1), ("free_blocks", [1, 2, 3]), ("get_new_blocks", 1)), why=say(
            "Block 1 has waited longest, cached or not: the queue alone decides who is given up first.")),
        Trace((2,), (("get_new_blocks", 1), ("publish", 1), ("free_blocks", [1]), ("get_new_blocks", 3), ("names",)),
              why=say("Nothing was handed out, so no name may be forgotten.")),
    )  # fmt: skip
    Oracle = PoolOracle

    def explain(self, op, expected, got):
        if expected == "OutOfBlocks":
            return say("Fewer blocks are free than were asked for: raise OutOfBlocks, and change nothing.")
        if op[0] == "names":
            return say("A block that gets a new owner will be overwritten: pool.evict(block) takes its old name away. "
                       "Only blocks that are handed out lose theirs.")  # fmt: skip
        if op[0] == "ref_cnts":
            return say("A block that is handed out has one owner: ref_cnt = 1. All others stay as they were.")
        if op[0] == "free_queue":
            return say("What is handed out leaves the queue from its head, and nothing else does.")
        return say("Blocks come from the head of pool.free_block_queue, in order, as KVCacheBlock objects in a list.")


class FreeBlocks(_PoolExercise):
    """Take blocks back, and notice a double free."""

    name, points, minutes = "free_blocks", 4, 20
    defines = ("free_blocks",)
    ours = {"free_blocks": "kvlab.blocks.pool:BlockPool.free_blocks"}
    driver = "FreeBlocksDriver"
    hints = (
        say("Giving a block back means: one owner fewer. Only at zero does it go to the queue."),
        say("To change nothing on an error, find the error first. How many owners would each block need? "
            "collections.Counter(blocks) counts how often each one occurs in the list."),
        say("for block, n in Counter(blocks).items(): if block.ref_cnt < n: raise ValueError. Then a second loop: "
            "ref_cnt -= 1, and at 0 append it to pool.free_block_queue."),
    )  # fmt: skip
    examples = (
        Trace((2,), (("get_new_blocks", 1), ("free_blocks", [1]), ("ref_cnts",), ("free_queue",))),
        Trace((3,), (("get_new_blocks", 3), ("free_blocks", [3, 2, 1]), ("free_queue",)), why=say(
            "The caller has put the blocks in the right order: a request's last block first, so that its beginning, "
            "which others may share, is evicted last.")),
        Trace((2,), (("get_new_blocks", 1), ("touch", [1]), ("free_blocks", [1]), ("ref_cnts",), ("free_queue",),
                     ("free_blocks", [1]), ("free_queue",)), why=say("Two tables held block 1.")),
        Trace((1,), (("get_new_blocks", 1), ("publish", 1), ("free_blocks", [1]), ("names",)), why=say(
            "A block without an owner may still be found: that is the state called cached.")),
        Trace((2,), (("get_new_blocks", 1), ("free_blocks", [1]), ("free_blocks", [1]), ("ref_cnts",),
                     ("free_queue",)), why=say("Block 1 was freed twice.")),
        Trace((3,), (("get_new_blocks", 2), ("free_blocks", [2, 1, 3]), ("ref_cnts",), ("free_queue",)), why=say(
            "Block 3 had no owner. The call fails as a whole: blocks 2 and 1 still belong to somebody.")),
        Trace((2,), (("get_new_blocks", 1), ("free_blocks", [1, 1]), ("ref_cnts",), ("free_queue",)), why=say(
            "One owner, two frees in one call: that is a double free as well.")),
        Trace((2,), (("get_new_blocks", 1), ("touch", [1]), ("free_blocks", [1, 1]), ("ref_cnts",), ("free_queue",)),
              why=say("Two owners, two frees in one call: nothing is wrong with that.")),
    )  # fmt: skip

    class Oracle(PoolOracle):
        ends = True

    def explain(self, op, expected, got):
        if changed(got):
            return CHANGED
        if expected == "ValueError":
            return say("A block is given back more often than it has owners: raise ValueError, and change nothing. In "
                       "silence, the same block would be handed to two users.")  # fmt: skip
        if op[0] == "ref_cnts":
            return say("Each time a block occurs in the list it has one owner fewer; after an error all counts are as before.")
        if op[0] == "free_queue":
            return say("A block goes to the tail when its last owner has gone, in the order of the list, and not before; "
                       "after an error the queue is as before.")  # fmt: skip
        if op[0] == "names":
            return say("free_blocks takes no name away: the K and V are still good until somebody overwrites them.")
        return say("free_blocks returns nothing.")


class BlockPoolExercise(_PoolExercise):
    """touch: a cached block is owned again. And the pool is complete."""

    name, points, minutes, section = "block_pool", 3, 5, "PAV 3.4; L33 6.3"
    defines = ("BlockPool",)
    ours = {"BlockPool": "kvlab.blocks.pool:BlockPool"}
    part = {"block_pool": "BlockPool"}
    driver = "BlockPoolDriver"
    hints = (
        say("A block with an owner is in no queue; a block without one is. Which of the two is this block, before you count?"),
        say("This is the moment for which you wrote remove: the block may stand anywhere in the queue."),
        say("for block in blocks: if block.ref_cnt == 0: self.free_block_queue.remove(block); then block.ref_cnt += 1"),
    )  # fmt: skip
    examples = (
        Trace((2,), (("get_new_blocks", 1), ("touch", [1]), ("ref_cnts",)), why=say(
            "Block 1 had an owner already: it was in no queue, and has one owner more now.")),
        Trace((3,), (("get_new_blocks", 3), ("publish", 2), ("free_blocks", [3, 2, 1]), ("touch", [2]), ("free_queue",),
                     ("ref_cnts",), ("names",))),
        Trace((2,), (("get_new_blocks", 1), ("touch", [1]), ("free_blocks", [1]), ("get_new_blocks", 1), ("ref_cnts",)),
              why=say("Block 1 still had an owner when block 2 was handed out.")),
        Trace((3,), (("get_new_blocks", 2), ("publish", 1), ("free_blocks", [1]), ("touch", [2, 1]), ("ref_cnts",),
                     ("free_queue",)), why=say("One block of the hit was owned, the other one cached.")),
        Trace((2,), (("get_new_blocks", 1), ("publish", 1), ("free_blocks", [1]), ("touch", [1]), ("touch", [1]),
                     ("free_blocks", [1]), ("free_queue",))),
        Trace((2,), (("get_new_blocks", 1), ("publish", 1), ("free_blocks", [1]), ("touch", [1, 1]), ("ref_cnts",),
                     ("free_queue",)), why=say(
            "Block 1 was nobody's and occurs twice: it leaves the queue once, and has two owners.")),
    )  # fmt: skip
    Oracle = PoolOracle

    def explain(self, op, expected, got):
        if changed(got):
            return CHANGED
        if op[0] == "free_queue":
            return say("A block with an owner must not stay in the queue: it would be handed out to the next request while "
                       "this one reads it. And only the touched blocks leave.")  # fmt: skip
        if op[0] == "ref_cnts":
            return say("touch adds one owner to whoever is there already.")
        if op[0] == "names":
            return say("A hit changes nothing about the content: the block keeps its name.")
        if op[0] == "get_new_blocks":
            return say("The block that was handed out here has an owner already, or stands elsewhere in the queue.")
        return say("touch returns nothing.")


# ---- inside a block


class ByteOffset(Exercise):
    """Where a number of K lies, in four layouts."""

    name, points, minutes, section = "byte_offset", 4, 25, "L33 2.2"
    defines = ("byte_offset",)
    ours = {"byte_offset": "kvlab.blocks.layout:byte_offset"}
    hints = (
        say("Read a layout from right to left. The last letter moves by one number; each letter before it moves by the "
            "product of the sizes of all letters after it."),
        say("In all four layouts a block has block_size * num_kv_heads * head_dim numbers. In NHD a token moves by "
            "num_kv_heads * head_dim numbers, a head by head_dim, a dim by 1."),
        say("HDNX cuts dim in two: dim // x moves by block_size * x numbers, the token by x, dim % x by 1; the head by "
            "block_size * head_dim. Multiply by itemsize once, at the end."),
    )  # fmt: skip
    examples = (
        Trace((), (("byte_offset", "NHD", 0, 0, 0, 1, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "NHD", 0, 0, 1, 0, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "NHD", 0, 1, 0, 0, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "HND", 0, 1, 0, 0, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "HND", 0, 0, 1, 0, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "HDN", 0, 1, 0, 0, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "HDNX", 0, 1, 0, 0, 4, 2, 16, 2, 8),)),
        Trace((), (("byte_offset", "HDNX", 0, 0, 0, 7, 4, 2, 16, 2, 8),)),
        Trace((), (("byte_offset", "HDNX", 0, 0, 0, 8, 4, 2, 16, 2, 8),)),
        *(Trace((), (("byte_offset", layout, 142, 5, 3, 70, 16, 8, 128, 2, 8),)) for layout in ("NHD", "HND", "HDNX", "HDN")),
        Trace((), (("byte_offset", "HDNX", 1, 2, 1, 13, 4, 2, 32, 1, 16),), why=say("FP8: one byte a number, x = 16.")),
        Trace((), (("byte_offset", "NHD", 0, 4, 0, 0, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "HND", 0, 0, 2, 0, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "NHD", 1, -1, 0, 0, 4, 2, 8, 2, 8),), why=say(
            "That place is in block 0, which may be somebody else's.")),
        Trace((), (("byte_offset", "HND", 1, 0, -1, 0, 4, 2, 8, 2, 8),), why=say(
            "That place is in block 0, which may be somebody else's.")),
        Trace((), (("byte_offset", "HDN", 0, 0, 0, -1, 4, 2, 8, 2, 8),)),
        Trace((), (("byte_offset", "NDH", 0, 0, 0, 0, 4, 2, 8, 2, 8),)),
    )  # fmt: skip
    num_random = 150

    class Oracle:
        """Digit by digit: the place of a number in a row of dimensions."""

        def byte_offset(self, layout, block, token, head, dim, block_size, num_kv_heads, head_dim, itemsize, x):
            digits = {
                "N": (token, block_size), "H": (head, num_kv_heads), "D": (dim, head_dim),
                "P": (dim // x, head_dim // x), "X": (dim % x, x),
            }  # fmt: skip
            orders = {"NHD": "NHD", "HND": "HND", "HDNX": "HPNX", "HDN": "HDN"}
            if layout not in orders:
                raise ValueError
            for letter in "NHD":
                if not 0 <= digits[letter][0] < digits[letter][1]:
                    raise IndexError
            place = block
            for letter in orders[layout]:
                digit, size = digits[letter]
                place = place * size + digit
            return place * itemsize

    def traces(self):
        @st.composite
        def draw_one(draw):
            x, itemsize = draw(st.sampled_from([(8, 2), (4, 4), (16, 1), (4, 2)]))
            n, h, d = draw(st.sampled_from([4, 1, 3, 16])), draw(st.integers(1, 3)), x * draw(st.integers(1, 3))
            below, beyond = draw(st.sampled_from([(0, 0)] * 8 + [(1, 0), (0, 1)]))
            where = [draw(st.integers(-below, size - 1 + beyond)) for size in (n, h, d)]
            layout = draw(st.sampled_from(["NHD", "HND", "HDNX", "HDN"]))
            return Trace((), (("byte_offset", layout, draw(st.integers(0, 3)), *where, n, h, d, itemsize, x),))

        return draw_one()

    def describe(self, op):
        names = ("block", "token", "head", "dim", "block_size", "num_kv_heads", "head_dim", "itemsize", "x")
        return f"byte_offset({op[1]!r}, " + ", ".join(f"{n}={v}" for n, v in zip(names, op[2:], strict=True)) + ")"

    def explain(self, op, expected, got):
        _, layout, block, token, head, dim, n, h, d, itemsize, x = op
        if expected == "ValueError":
            return say("There is no such layout: raise ValueError.")
        if expected == "IndexError" and another_error(got, expected):
            return say("An error is right here, but another one: raise IndexError.")
        if expected == "IndexError":
            return say("A block has tokens 0 to {n}, heads 0 to {h} and dims 0 to {d}: raise IndexError. Without it you "
                       "read a number of somebody else.", n=n - 1, h=h - 1, d=d - 1)  # fmt: skip
        order = {"NHD": "token, head, dim", "HND": "head, token, dim", "HDN": "head, dim, token",
                 "HDNX": "head, dim // x, token, dim % x"}[layout]  # fmt: skip
        if isinstance(got, int) and got * itemsize == expected != got:
            return say("That is the number of the element. It has {bytes} bytes: multiply.", bytes=itemsize)
        return say("{layout} orders a block by {order}, from slow to fast. Each of them moves by the product of the sizes of "
                   "all that stand after it; a block has {all} bytes.", layout=layout, order=order,
                   all=n * h * d * itemsize)  # fmt: skip


# ---- stretch


class PopleftN(Exercise):
    """Cut n blocks from the head at once."""

    name, points, minutes, section = "popleft_n", 2, 15, "L33 6.3"
    stretch = True
    defines = ("popleft_n",)
    ours = {"popleft_n": "kvlab.blocks.free_queue:FreeKVCacheBlockQueue.popleft_n"}
    driver = "PopleftNDriver"
    hints = (
        say("The blocks between need no repair of their neighbours, for the neighbours leave too."),
        say("Walk n blocks along next_free_block, note each and clear its two links. Read the next one before you clear."),
        say("At the end `block` is the first that stays (or the tail): queue.head.next_free_block = block, and "
            "block.prev_free_block = queue.head."),
    )  # fmt: skip
    examples = (
        Trace((3,), (("popleft_n", 2), ("contents",), ("num_free_blocks",), ("links_of", 1), ("links_of", 2))),
        Trace((3,), (("popleft_n", 3), ("contents",), ("append", 2), ("contents",))),
        Trace((3,), (("popleft_n", 1), ("remove", 2), ("contents",))),
        Trace((3,), (("popleft_n", 0), ("contents",))),
        Trace((3,), (("popleft_n", 4), ("contents",), ("num_free_blocks",))),
        Trace((100,), (("accesses_to_popleft_n", 10),)),
        Trace((10_000,), (("accesses_to_popleft_n", 1_000),)),
    )  # fmt: skip

    class Oracle(FreeQueue.Oracle):
        def popleft_n(self, n):
            if n > len(self.queue):
                raise OutOfBlocks
            taken, self.queue = self.queue[:n], self.queue[n:]
            return taken

        def accesses_to_popleft_n(self, n):
            self.popleft_n(n)
            return AtMost(5 * n + 10)

        def ops(self):
            ops = [op for op in super().ops() if op[0] not in ("popleft", "backwards")]
            return ops + [("popleft_n", n) for n in range(len(self.queue) + 2)]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 6)), max_ops=8)

    def describe_init(self, init):
        return f"a queue of blocks 1 to {init[0]}"

    def explain(self, op, expected, got):
        if op[0] == "accesses_to_popleft_n":
            return say("That is more than n blocks need. (n times popleft repairs the head's link n times; "
                       "get_all_free_blocks walks the whole queue.) Read each block's next once, clear its two "
                       "links, and repair the head once: about 3 accesses a block.")  # fmt: skip
        if expected == "OutOfBlocks":
            return say("Fewer than n blocks are there: raise OutOfBlocks, and take none.")
        if op[0] == "links_of":
            return say("Blocks that left the queue have no neighbours: set both links of each to None.")
        if op[0] == "contents":
            return say("The first block that stays is now the neighbour of the head; both must know.")
        if op[0] == "num_free_blocks":
            return say("The n blocks have left: num_free_blocks must say so.")
        return None


class Audit(Exercise):
    """An inventory that finds what went wrong."""

    name, points, minutes, section = "audit", 2, 12, "PAV 2, 3.5"
    stretch = True
    defines = ("audit",)
    ours = {"audit": "kvlab.blocks.audit:audit"}
    hints = (
        say("Count twice: how often is each block in a table, and how often in the queue? collections.Counter does both."),
        say("Go through all ids that occur anywhere, and ask the five questions in their order. The first yes counts."),
        say("references = Counter(b for table in tables for b in table); a Counter gives 0 for what it has not seen."),
    )  # fmt: skip
    examples = (
        Trace((), (("audit", {1: 1, 2: 0}, [2], [[1]]),)),
        Trace((), (("audit", {1: 2, 2: 1, 3: 0}, [3], [[1, 2], [1]]),)),
        Trace((), (("audit", {1: 1, 2: 0}, [2], [[1], [1]]),)),
        Trace((), (("audit", {1: 1, 2: 0}, [2, 1], [[1]]),)),
        Trace((), (("audit", {1: 0, 2: 0}, [1, 2, 1], []),)),
        Trace((), (("audit", {1: 0, 2: 0}, [1], []),)),
        Trace((), (("audit", {1: 1, 2: 0}, [2], []),), why=say("Nobody holds block 1, but its count says so: it leaks.")),
        Trace((), (("audit", {1: 2}, [], [[1, 1]]),), why=say("A block that stands twice in a table has two entries.")),
        Trace((), (("audit", {1: 0}, [1, 0], [[5]]),)),
        Trace((), (("audit", {1: -1, 2: 0}, [1, 2], []),)),
    )  # fmt: skip

    class Oracle:
        """Asks every question of every block."""

        def audit(self, ref_cnts, queue, tables):
            entries = [b for table in tables for b in table]
            found = {}
            for b in {*ref_cnts, *queue, *entries}:
                held, queued = entries.count(b), list(queue).count(b)
                answers = {
                    "unknown": b not in ref_cnts, "miscounted": ref_cnts.get(b) != held,
                    "owned and free": held > 0 and queued > 0, "queued twice": queued > 1,
                    "lost": held == 0 and queued == 0,
                }  # fmt: skip
                found.update([(b, word) for word, yes in answers.items() if yes][:1])
            return found

    def traces(self):
        ids = st.integers(0, 4)
        counts = st.dictionaries(st.integers(1, 3), st.integers(-1, 2), min_size=1)
        return calls("audit", counts, st.lists(ids, max_size=4), st.lists(st.lists(ids, max_size=3), max_size=2))

    def explain(self, op, expected, got):
        if not isinstance(got, dict):
            return say("Return a dict: block id -> what is wrong with it.")
        for block in sorted({*expected, *got}):
            if expected.get(block) != got.get(block):
                return say("Look at block {block}: it is {word}.", block=block, word=expected.get(block, "all right"))
        return None
