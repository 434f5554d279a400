"""Lab 03: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, *pairs: str) -> str:
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        assert old in source, old
        source = source.replace(old, new)
    return source


_SLOTS = '''
def slot_of(block_ids, position, block_size):
    if position < 0:
        raise IndexError(position)
    return block_size * block_ids[position // block_size] + position % block_size


def position_of(block_ids, slot, block_size):
    for index, block_id in enumerate(block_ids):
        if block_id * block_size <= slot < (block_id + 1) * block_size:
            return index * block_size + slot - block_id * block_size
    raise ValueError(slot)
'''

_MAPPING = '''
def slot_mapping(chunks, block_size):
    slots = []
    for block_ids, start, count in chunks:
        end = start + count
        if end > len(block_ids) * block_size:
            raise IndexError("beyond the table")
        for position in range(start, end):
            slots.append(block_ids[position // block_size] * block_size + position % block_size)
    return slots
'''

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

_GET = '''
def get_new_blocks(pool, num_blocks):
    queue = pool.free_block_queue
    if queue.num_free_blocks < num_blocks:
        raise OutOfBlocks("too few")
    taken = [queue.popleft() for _ in range(num_blocks)]
    for block in taken:
        block.ref_cnt += 1
        if block.block_hash is not None:
            pool.evict(block)
    return taken
'''

_FREE = '''
def free_blocks(pool, ordered_blocks):
    left = {}
    for block in ordered_blocks:
        left[block] = left.get(block, block.ref_cnt) - 1
        if left[block] < 0:
            raise ValueError("freed twice")
    for block in ordered_blocks:
        block.ref_cnt -= 1
        if not block.ref_cnt:
            pool.free_block_queue.append(block)
'''

_TOUCH = '''
class BlockPool(BlockPoolBase):
    get_new_blocks = lab.best("get_new_blocks")
    free_blocks = lab.best("free_blocks")

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1
            if block.ref_cnt == 1:
                self.free_block_queue.remove(block)
'''

_OFFSET = '''
def byte_offset(layout, block, token, head, dim, block_size, num_kv_heads, head_dim, itemsize=2, x=8):
    if not (0 <= token < block_size and 0 <= head < num_kv_heads and 0 <= dim < head_dim):
        raise IndexError("outside")
    start = block * block_size * num_kv_heads * head_dim
    if layout == "NHD":
        inside = (token * num_kv_heads + head) * head_dim + dim
    elif layout == "HND":
        inside = (head * block_size + token) * head_dim + dim
    elif layout == "HDNX":
        inside = ((head * (head_dim // x) + dim // x) * block_size + token) * x + dim % x
    elif layout == "HDN":
        inside = (head * head_dim + dim) * block_size + token
    else:
        raise ValueError(layout)
    return (start + inside) * itemsize
'''

_CUT = '''
def popleft_n(queue, n):
    if n > queue.num_free_blocks:
        raise OutOfBlocks("too few")
    block = queue.head.next_free_block
    taken = []
    for _ in range(n):
        taken.append(block)
        block = block.next_free_block
    queue.head.next_free_block = block
    block.prev_free_block = queue.head
    for gone in taken:
        gone.prev_free_block = gone.next_free_block = None
    queue.num_free_blocks -= n
    return taken
'''

_AUDIT = '''
def audit(ref_cnts, queue, tables):
    held, queued = {}, {}
    for table in tables:
        for b in table:
            held[b] = held.get(b, 0) + 1
    for b in queue:
        queued[b] = queued.get(b, 0) + 1
    wrong = {b: "unknown" for b in [*held, *queued] if b not in ref_cnts}
    for b, count in ref_cnts.items():
        n, q = held.get(b, 0), queued.get(b, 0)
        if n != count:
            wrong[b] = "miscounted"
        elif n and q:
            wrong[b] = "owned and free"
        elif q > 1:
            wrong[b] = "queued twice"
        elif not n and not q:
            wrong[b] = "lost"
    return wrong
'''

# exercise -> {what it is: the cell}
CORRECT = {
    "slots": {"compares ranges of slots": _SLOTS},
    "slot_mapping": {
        "looks before it writes": _MAPPING,
        "block by block": """
def slot_mapping(chunks, block_size):
    slots = []
    for block_ids, start, count in chunks:
        end = start + count
        while start < end:
            index, offset = divmod(start, block_size)
            n = min(block_size - offset, end - start)
            first = block_ids[index] * block_size + offset
            slots.extend(range(first, first + n))
            start += n
    return slots
""",
    },
    "free_queue": {
        "links written out": _LINKED,
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
    "get_new_blocks": {
        "takes, then marks": _GET,
        "leaves the counting to the queue": _changed(_GET, '''    if queue.num_free_blocks < num_blocks:
        raise OutOfBlocks("too few")
    taken = [queue.popleft() for _ in range(num_blocks)]
''', "    taken = queue.popleft_n(num_blocks)\n"),
    },
    "free_blocks": {
        "a dry run first": _FREE,
        "takes everything back on an error": '''
def free_blocks(pool, ordered_blocks):
    done, gone = [], []
    for block in ordered_blocks:
        if block.ref_cnt == 0:
            for other in done:
                other.ref_cnt += 1
            raise ValueError("freed twice")
        block.ref_cnt -= 1
        done.append(block)
        if block.ref_cnt == 0:
            gone.append(block)
    for block in gone:
        pool.free_block_queue.append(block)
''',
    },
    "block_pool": {
        "counts first": _TOUCH,
        "all three moves in one class": _changed(
            _TOUCH, '    get_new_blocks = lab.best("get_new_blocks")\n    free_blocks = lab.best("free_blocks")\n',
            _GET.replace("\n", "\n    ").replace("def get_new_blocks(pool", "def get_new_blocks(self").replace("pool.", "self.")
            + _FREE.replace("\n", "\n    ").replace("def free_blocks(pool", "def free_blocks(self").replace("pool.", "self."),
        ),
    },
    "byte_offset": {"a formula for each layout": _OFFSET},
    "popleft_n": {"notes first, clears then": _CUT},
    "audit": {"counts by hand": _AUDIT},
}  # fmt: skip
WRONG = {
    "slots": {
        "logical block for physical block": _changed(_SLOTS, "block_ids[position // block_size] +", "(position // block_size) +"),
        "a negative position counts from the end": _changed(_SLOTS, "    if position < 0:\n        raise IndexError(position)\n", ""),
        "beyond the table: the last block": _changed(
            _SLOTS, "block_ids[position // block_size]", "block_ids[min(position // block_size, len(block_ids) - 1)]"),
        "the block's number for its first slot": _changed(_SLOTS, "block_size * block_ids", "block_ids"),
        "the offset from the end of the table": _changed(_SLOTS, "+ position % block_size", "+ position % len(block_ids)"),
        "blocks as if they lay in a row": _changed(
            _SLOTS, "return index * block_size + slot - block_id * block_size", "return slot - block_ids[0] * block_size"),
        "a foreign slot has no position, and no error": _changed(_SLOTS, "raise ValueError(slot)", "return None"),
        "position_of by the last entry only": _changed(_SLOTS, "enumerate(block_ids)", "list(enumerate(block_ids))[-1:]"),
    },
    "slot_mapping": {
        "starts at 0": _changed(_MAPPING, "range(start, end)", "range(count)"),
        "the block from i, not from the position": _changed(
            _MAPPING, "block_ids[position // block_size]", "block_ids[(position - start) // block_size]"),
        "one token too many": _changed(_MAPPING, "end = start + count", "end = start + count + 1"),
        "one token too few": _changed(_MAPPING, "end = start + count", "end = start + count - 1"),
        "count taken for the end": _changed(_MAPPING, "end = start + count", "end = count"),
        "cut off at the table's end": _changed(_MAPPING, 'raise IndexError("beyond the table")', "end = len(block_ids) * block_size"),
        "empties the caller's list": _changed(_MAPPING, "    for block_ids, start, count in chunks:\n", """
    while chunks:
        block_ids, start, count = chunks.pop(0)
"""),
        "a list for each request": _changed(_MAPPING, "    slots = []\n", "    slots = []\n    whole = []\n",
                                            "block_ids, start, count in chunks:\n", "block_ids, start, count in chunks:\n"
                                            "        slots = []\n        whole.append(slots)\n", "return slots", "return whole"),
    },
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
        "walks to the end": _changed(_LINKED, "before = self.tail.prev_free_block", '''before = self.head
        while before.next_free_block is not self.tail:
            before = before.next_free_block'''),
        "walks from the tail to the head": _changed(_LINKED, "        block = self.head.next_free_block\n", '''
        block = self.tail
        while block.prev_free_block is not self.head:
            block = block.prev_free_block
'''),
        "lists the queue to see whether it is empty": _changed(
            _LINKED, "if block is self.tail:", "if not self.get_all_free_blocks():"),
        "the tail does not learn": _changed(
            _LINKED, "before.next_free_block = self.tail.prev_free_block = block", "before.next_free_block = block"),
        "looks for the block before it appends": _changed(
            _LINKED, "if block.next_free_block is not None:", "if block in self.get_all_free_blocks():"),
        "counts by walking": _changed(_LINKED, "        self.num_free_blocks += 1\n", "", "        self.num_free_blocks -= 1\n", "") + '''
    @property
    def num_free_blocks(self):
        return len(self.get_all_free_blocks())

    @num_free_blocks.setter
    def num_free_blocks(self, value):
        pass
''',
        "pops from an empty queue": _changed(_LINKED, "            raise OutOfBlocks(\"the queue is empty\")", "            return None"),
        "hands out the sentinel": _changed(
            _LINKED, "        if block is self.tail:\n            raise OutOfBlocks(\"the queue is empty\")\n", ""),
        "an empty queue counts below zero": _changed(_LINKED, '''        if block is self.tail:
            raise OutOfBlocks("the queue is empty")
''', '''        self.num_free_blocks -= 1
        if block is self.tail:
            raise OutOfBlocks("the queue is empty")
        self.num_free_blocks += 1
'''),
        "freed twice unnoticed": _changed(_LINKED, "            raise ValueError(\"in the queue already\")", "            return"),
        "notices only whoever is not the last one": _changed(
            _LINKED, "if block.next_free_block is not None:", "if block.next_free_block not in (None, self.tail):"),
        "takes out whoever is not there": _changed(_LINKED, '            raise ValueError("not in the queue")', "            return"),
        "the next block stays in popleft": _changed(_LINKED, "        self.remove(block)\n        return block", '''
        self.head.next_free_block = block.next_free_block
        block.next_free_block = block.prev_free_block = None
        self.num_free_blocks -= 1
        return block'''),
    },
    "get_new_blocks": {
        "takes what there is, then complains": _changed(_GET, '''    if queue.num_free_blocks < num_blocks:
        raise OutOfBlocks("too few")
''', ""),
        "gives fewer in silence": _changed(_GET, 'raise OutOfBlocks("too few")', "num_blocks = queue.num_free_blocks"),
        "nobody owns them": _changed(_GET, "        block.ref_cnt += 1\n", ""),
        "keeps the old name": _changed(_GET, "pool.evict(block)", "pass"),
        "the block forgets, the index does not": _changed(_GET, "pool.evict(block)", "block.block_hash = None"),
        "forgets names before it counts": _changed(_GET, "    if queue.num_free_blocks", '''    for block in queue.get_all_free_blocks()[:num_blocks]:
        if block.block_hash is not None:
            pool.evict(block)
    if queue.num_free_blocks'''),
        "smallest numbers first": _changed(_GET, "[queue.popleft() for _ in range(num_blocks)]", '''sorted(
        queue.get_all_free_blocks(), key=lambda b: b.block_id)[:num_blocks]
    for block in taken:
        queue.remove(block)'''),
        "uncached blocks first, from anywhere": _changed(_GET, "[queue.popleft() for _ in range(num_blocks)]", '''sorted(
        queue.get_all_free_blocks(), key=lambda b: b.block_hash is not None)[:num_blocks]
    for block in taken:
        queue.remove(block)'''),
        "does not take them out": _changed(
            _GET, "[queue.popleft() for _ in range(num_blocks)]", "queue.get_all_free_blocks()[:num_blocks]"),
        "numbers for blocks": _changed(_GET, "return taken", "return [block.block_id for block in taken]"),
        "evicts whoever comes": _changed(_GET, "if block.block_hash is not None:", "if True:"),
        "None when there are too few": _changed(_GET, 'raise OutOfBlocks("too few")', "return None"),
        "cached blocks do not count": _changed(_GET, "if queue.num_free_blocks < num_blocks:", '''
    if sum(b.block_hash is None for b in queue.get_all_free_blocks()) < num_blocks:'''),
        "one block short when the pool is used up": _changed(
            _GET, "queue.num_free_blocks < num_blocks", "queue.num_free_blocks <= num_blocks"),
    },
    "free_blocks": {
        "free whoever else owns it": _changed(_FREE, "        block.ref_cnt -= 1\n        if not block.ref_cnt:", '''
        block.ref_cnt = 0
        if block.next_free_block is None:'''),
        "a double free goes unnoticed": _changed(_FREE, '            raise ValueError("freed twice")', "            pass"),
        "ignored in silence": _changed(_FREE, '            raise ValueError("freed twice")', "            return"),
        "notices halfway": '''
def free_blocks(pool, ordered_blocks):
    for block in ordered_blocks:
        if block.ref_cnt == 0:
            raise ValueError("freed twice")
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            pool.free_block_queue.append(block)
''',
        "one look at each block": '''
def free_blocks(pool, ordered_blocks):
    if any(block.ref_cnt == 0 for block in ordered_blocks):
        raise ValueError("freed twice")
    for block in ordered_blocks:
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            pool.free_block_queue.append(block)
''',
        "twice in one list is always an error": _changed(_FREE, "    left = {}\n", '''    left = {}
    if len(set(ordered_blocks)) < len(ordered_blocks):
        raise ValueError("freed twice")
'''),
        "empties the caller's list": _changed(_FREE, "    for block in ordered_blocks:\n        block.ref_cnt", """
    while ordered_blocks:
        block = ordered_blocks.pop(0)
        block.ref_cnt"""),
        "takes the name away": _changed(_FREE, "        if not block.ref_cnt:\n", '''        if not block.ref_cnt:
            if block.block_hash is not None:
                pool.evict(block)
'''),
        "turns the order round": _changed(_FREE, "    for block in ordered_blocks:\n        block.ref_cnt -= 1", '''
    for block in reversed(ordered_blocks):
        block.ref_cnt -= 1'''),
        "by number": _changed(_FREE, "    for block in ordered_blocks:\n        block.ref_cnt -= 1", '''
    for block in sorted(ordered_blocks, key=lambda b: b.block_id):
        block.ref_cnt -= 1'''),
        "counts, and never returns them": _changed(_FREE, "pool.free_block_queue.append(block)", "pass"),
        "to the queue below one owner too many": _changed(_FREE, "if not block.ref_cnt:", "if block.ref_cnt <= 1:"),
    },
    "block_pool": {
        "stays in the queue": _changed(_TOUCH, "self.free_block_queue.remove(block)", "pass"),
        "looks after it has counted": _changed(_TOUCH, "if block.ref_cnt == 1:", "if block.ref_cnt == 0:"),
        "one owner, however many": _changed(_TOUCH, "block.ref_cnt += 1", "block.ref_cnt = 1",
                                            "if block.ref_cnt == 1:", "if block.next_free_block is not None:"),
        "takes the head": _changed(_TOUCH, "self.free_block_queue.remove(block)", "self.free_block_queue.popleft()"),
        "removes whoever is touched": _changed(_TOUCH, "if block.ref_cnt == 1:", "if True:"),
        "the name goes": _changed(_TOUCH, "self.free_block_queue.remove(block)", '''self.free_block_queue.remove(block)
                if block.block_hash is not None:
                    self.evict(block)'''),
        "to the tail": _changed(_TOUCH, "self.free_block_queue.remove(block)", '''self.free_block_queue.remove(block)
                self.free_block_queue.append(block)'''),
        "twice in one list is one owner": _changed(_TOUCH, "for block in blocks:", "for block in set(blocks):"),
        "takes out first, counts then": _changed(
            _TOUCH, "            block.ref_cnt += 1\n", "", "block.ref_cnt == 1", "block.ref_cnt == 0"
        ) + "        for block in blocks:\n            block.ref_cnt += 1\n",
        "empties the caller's list": _changed(_TOUCH, "        for block in blocks:\n", """
        while blocks:
            block = blocks.pop(0)
"""),
        "only the first one": _changed(_TOUCH, "for block in blocks:", "for block in list(blocks)[:1]:"),
    },
    "byte_offset": {
        "NHD and HND exchanged": _changed(_OFFSET, '"NHD"', '"HND?"', '"HND"', '"NHD"', '"HND?"', '"HND"'),
        "the number of the element, not the byte": _changed(_OFFSET, "(start + inside) * itemsize", "start + inside"),
        "always two bytes": _changed(_OFFSET, "(start + inside) * itemsize", "(start + inside) * 2"),
        "always x = 8": _changed(_OFFSET, "    start = block", "    x = 8\n    start = block"),
        "one stride for dim in HDNX": _changed(
            _OFFSET, "((head * (head_dim // x) + dim // x) * block_size + token) * x + dim % x",
            "head * head_dim * block_size + dim * block_size + token * x"),
        "HDNX without the pieces": _changed(
            _OFFSET, "((head * (head_dim // x) + dim // x) * block_size + token) * x + dim % x",
            "(head * block_size + token) * head_dim + dim"),
        "HDN with token before dim": _changed(_OFFSET, "(head * head_dim + dim) * block_size + token",
                                              "(head * block_size + token) * head_dim + dim"),
        "a block has one head": _changed(_OFFSET, "block * block_size * num_kv_heads * head_dim", "block * block_size * head_dim"),
        "reads the next head without complaint": _changed(
            _OFFSET, "0 <= token < block_size and 0 <= head < num_kv_heads and 0 <= dim < head_dim", "0 <= token < block_size"),
        "negative numbers count from the end": _changed(
            _OFFSET, "0 <= token < block_size and 0 <= head < num_kv_heads and 0 <= dim < head_dim",
            "token < block_size and head < num_kv_heads and dim < head_dim"),
        "a token before the block is read": _changed(_OFFSET, "0 <= token", "token"),
        "a head before the block is read": _changed(_OFFSET, "0 <= head", "head"),
        "any other layout is HDN": _changed(
            _OFFSET, '    elif layout == "HDN":\n', "    else:\n", "    else:\n        raise ValueError(layout)\n", ""),
    },
    "popleft_n": {
        "popleft, n times": '''
def popleft_n(queue, n):
    if n > queue.num_free_blocks:
        raise OutOfBlocks("too few")
    return [queue.popleft() for _ in range(n)]
''',
        "reads the whole queue": _changed(_CUT, "    block = queue.head.next_free_block\n    taken = []\n    for _ in range(n):\n"
            "        taken.append(block)\n        block = block.next_free_block\n",
            "    whole = queue.get_all_free_blocks()\n    taken = whole[:n]\n    block = (whole + [queue.tail])[n]\n"),
        "the first one that stays looks back": _changed(_CUT, "    block.prev_free_block = queue.head\n", ""),
        "their links stay": _changed(_CUT, "        gone.prev_free_block = gone.next_free_block = None\n", "        pass\n"),
        "only the inner links go": _changed(_CUT, "for gone in taken:", "for gone in taken[:-1]:"),
        "not counted": _changed(_CUT, "    queue.num_free_blocks -= n\n", ""),
        "takes what there is": _changed(_CUT, 'raise OutOfBlocks("too few")', "n = queue.num_free_blocks"),
        "one too many": _changed(_CUT, "range(n)", "range(n + 1)"),
    },
    "audit": {
        "a shared block counts once": _changed(_AUDIT, "held[b] = held.get(b, 0) + 1", "held[b] = 1"),
        "twice in one table counts once": _changed(_AUDIT, "for b in table:", "for b in set(table):"),
        "the queue as a set": _changed(_AUDIT, "queued[b] = queued.get(b, 0) + 1", "queued[b] = 1"),
        "leaks go unnoticed": _changed(_AUDIT, "if n != count:", "if n > count:"),
        "a lost block goes unnoticed": _changed(_AUDIT, '        elif not n and not q:\n            wrong[b] = "lost"\n', ""),
        "only known blocks": _changed(_AUDIT, "wrong = {b: \"unknown\" for b in [*held, *queued] if b not in ref_cnts}", "wrong = {}"),
        "owned and free goes unnoticed": _changed(_AUDIT, '        elif n and q:\n            wrong[b] = "owned and free"\n', ""),
        "other questions first": _changed(_AUDIT, "if n != count:", "if q > 1:\n            wrong[b] = \"queued twice\"\n        elif n != count:"),
    },
}  # fmt: skip
