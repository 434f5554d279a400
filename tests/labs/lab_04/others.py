"""Lab 04: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_COST = '''
def sharing_cost(num_prompt, num_output, n, block_size):
    each = (num_prompt + num_output + block_size - 1) // block_size
    if not num_output:
        return n * each, each, 0
    common = num_prompt // block_size
    copies = n - 1 if num_prompt % block_size else 0
    return n * each, common + n * (each - common), copies
'''
_FORK = '''
def fork(pool, blocks):
    pool.touch(blocks)
    return list(blocks)
'''
_BARRIER = '''
def ensure_writable(pool, table, index):
    old = table[index]
    if old.ref_cnt == 1 and old.block_hash is None:
        return None
    new = pool.get_new_blocks(1)[0]
    table[index] = new
    pool.free_blocks([old])
    return old, new
'''
_ROOM = '''
def make_room(pool, table, start, num_tokens, block_size):
    first = start // block_size
    end = -(-(start + num_tokens) // block_size)
    standing = list(range(first, min(end, len(table))))
    num_new = max(0, end - len(table))
    num_copies = 0
    for index in standing:
        if not table[index].is_writable:
            num_copies += 1
    if num_new + num_copies > pool.get_num_free_blocks():
        return None
    copies = []
    for index in standing:
        pair = barrier(pool, table, index)
        if pair is not None:
            copies.append(pair)
    table.extend(pool.get_new_blocks(num_new))
    return copies
'''
_BEAM = '''
def beam_step(pool, tables, parents):
    following = []
    for parent in parents:
        following.append(share(pool, tables[parent]))
    for table in tables:
        pool.free_blocks(table[::-1])
    return following
'''
_TREE = '''
def fork_at(pool, table, num_tokens, block_size):
    keep = (num_tokens + block_size - 1) // block_size
    return share(pool, table[:keep])

def truncate(pool, table, num_tokens, block_size):
    keep = (num_tokens + block_size - 1) // block_size
    gone = table[keep:]
    del table[keep:]
    pool.free_blocks(gone[::-1])
'''
_GAIN = '''
def blocks_freed_by(tables):
    held = {}
    for table in tables:
        for block in table:
            held[block] = held.get(block, 0) + 1
    return sum(1 for block in held if block.ref_cnt == held[block])
'''
_BATCHES = '''
def copy_batches(copies):
    batches, written = [], set()
    for source, target in copies:
        if not batches or source in written or target in written:
            batches.append([])
            written = set()
        batches[-1].append((source, target))
        written.add(target)
    return batches
'''

# exercise -> {what it is: the cell}
CORRECT = {
    "sharing_cost": {
        "by counting blocks one by one": '''
def sharing_cost(num_prompt, num_output, n, block_size):
    private = shared = 0
    for index in range(0, num_prompt + num_output, block_size):
        private += n
        shared += 1 if index + block_size <= num_prompt or not num_output else n
    split = num_output > 0 and num_prompt % block_size > 0
    return private, shared, (n - 1) * split
''',
    },
    "fork": {
        "counts owners by hand": '''
def fork(pool, blocks):
    child = []
    for block in blocks:
        block.ref_cnt += 1
        child.append(block)
    return child
''',
    },
    "ensure_writable": {
        "turned round": '''
def ensure_writable(pool, table, index):
    old = table[index]
    if old.ref_cnt > 1 or old.block_hash:
        (table[index],) = pool.get_new_blocks(1)
        pool.free_blocks((old,))
        return old, table[index]
''',
        "leaves a shared block by hand": _changed(_BARRIER, "pool.free_blocks([old])", '''if old.ref_cnt > 1:
        old.ref_cnt -= 1
    else:
        pool.free_blocks([old])'''),
    },
    "make_room": {
        "takes all blocks in one call": '''
def make_room(pool, table, start, num_tokens, block_size):
    indices = sorted({position // block_size for position in range(start, start + num_tokens)})
    to_copy = [i for i in indices if i < len(table) and (table[i].ref_cnt > 1 or table[i].block_hash is not None)]
    to_add = [i for i in indices if i >= len(table)]
    if len(to_copy) + len(to_add) > pool.get_num_free_blocks():
        return None
    fresh = pool.get_new_blocks(len(to_copy) + len(to_add))
    copies = []
    for i in to_copy:
        copies.append((table[i], fresh.pop(0)))
        table[i] = copies[-1][1]
    pool.free_blocks([old for old, _ in copies])
    table += fresh
    return copies
''',
        "block by block after the count": '''
def make_room(pool, table, start, num_tokens, block_size):
    last = (start + num_tokens - 1) // block_size
    need = sum(index >= len(table) or not table[index].is_writable for index in range(start // block_size, last + 1))
    if need > pool.get_num_free_blocks():
        return None
    copies = []
    for index in range(start // block_size, last + 1):
        if index >= len(table):
            table.append(pool.get_new_blocks(1)[0])
        elif (pair := barrier(pool, table, index)) is not None:
            copies.append(pair)
    return copies
''',
    },
    "beam_step": {
        "the first child of a parent stays in its place": '''
def beam_step(pool, tables, parents):
    seen, following = set(), []
    for parent in parents:
        if parent in seen:
            following.append(share(pool, tables[parent]))
        else:
            seen.add(parent)
            following.append(tables[parent])
    for i, table in enumerate(tables):
        if i not in seen:
            pool.free_blocks(reversed(table))
    return following
''',
        "touches all, then frees all": '''
def beam_step(pool, tables, parents):
    pool.touch([block for parent in parents for block in tables[parent]])
    following = [tables[parent][:] for parent in parents]
    pool.free_blocks([block for table in tables for block in reversed(table)])
    return following
''',
    },
    "branch_and_return": {
        "block by block": '''
def fork_at(pool, table, num_tokens, block_size):
    child = [block for index, block in enumerate(table) if index * block_size < num_tokens]
    pool.touch(child)
    return child

def truncate(pool, table, num_tokens, block_size):
    while table and (len(table) - 1) * block_size >= num_tokens:
        pool.free_blocks([table.pop()])
''',
    },
    "blocks_freed_by": {
        "takes owners away one by one": '''
def blocks_freed_by(tables):
    left = {}
    freed = 0
    for table in tables:
        for block in table:
            left[block.block_id] = left.get(block.block_id, block.ref_cnt) - 1
            freed += left[block.block_id] == 0
    return freed
''',
    },
    "copy_batches": {
        "looks back over the running batch": '''
def copy_batches(copies):
    batches = []
    for source, target in copies:
        if batches and not any(done in (source, target) for _, done in batches[-1]):
            batches[-1].append((source, target))
        else:
            batches.append([(source, target)])
    return batches
''',
    },
}
WRONG = {
    "sharing_cost": {
        "n copies: the last writer does not write in place": _changed(_COST, "n - 1 if", "n if"),
        "always copies": _changed(_COST, "n - 1 if num_prompt % block_size else 0", "n - 1"),
        "one copy, whatever n": _changed(_COST, "n - 1 if", "1 if"),
        "the prompt's last part stays shared": _changed(_COST, "common = num_prompt // block_size",
                                                        "common = -(-num_prompt // block_size)"),
        "a fork costs the last block at once": _changed(_COST, "return n * each, each, 0",
                                                        "return n * each, each + n - 1, n - 1"),
        "prompt and output in blocks of their own": _changed(
            _COST, "each = (num_prompt + num_output + block_size - 1) // block_size",
            "each = -(-num_prompt // block_size) + -(-num_output // block_size)"),
        "floats": _changed(_COST, "each = (num_prompt + num_output + block_size - 1) // block_size",
                           "each = float(-(-(num_prompt + num_output) // block_size))"),
        "copies counted per block of the prompt": _changed(_COST, "n - 1 if num_prompt % block_size else 0",
                                                           "(n - 1) * (num_prompt // block_size)"),
    },
    "fork": {
        "the parent's own list": _changed(_FORK, "list(blocks)", "blocks"),
        "nobody counts the child": _changed(_FORK, "    pool.touch(blocks)\n", ""),
        "counts the last block only": _changed(_FORK, "touch(blocks)", "touch(blocks[-1:])"),
        "counts full blocks only, the last one not": _changed(_FORK, "touch(blocks)", "touch(blocks[:-1])"),
        "copies everything at once": _changed(_FORK, "    pool.touch(blocks)\n    return list(blocks)",
                                              "    return pool.get_new_blocks(len(blocks))"),
        "shares all but the last block": _changed(_FORK, "touch(blocks)\n    return list(blocks)",
                                                  "touch(blocks[:-1])\n    return list(blocks[:-1])"),
        "copies the books, not the contents": _FORK.replace(
            "    return list(blocks)", "    import copy\n    return [copy.copy(b) for b in blocks]"),
        "skips published blocks": _changed(_FORK, "touch(blocks)",
                                          "touch([b for b in blocks if b.block_hash is None])"),
        "block ids": _changed(_FORK, "list(blocks)", "[block.block_id for block in blocks]"),
        "sets the count to two": _changed(_FORK, "    pool.touch(blocks)\n",
                                          "    for block in blocks:\n        block.ref_cnt = 2\n"),
    },
    "ensure_writable": {
        "forgets the name": _changed(_BARRIER, " and old.block_hash is None", ""),
        "forgets the count": _changed(_BARRIER, "old.ref_cnt == 1 and ", ""),
        "always copies": _changed(_BARRIER, "if old.ref_cnt == 1 and old.block_hash is None:", "if False:"),
        "gives back first": '''
def ensure_writable(pool, table, index):
    old = table[index]
    if old.ref_cnt == 1 and old.block_hash is None:
        return None
    pool.free_blocks([old])
    [new] = pool.get_new_blocks(1)
    table[index] = new
    return old, new
''',
        "never gives back": _changed(_BARRIER, "    pool.free_blocks([old])\n", ""),
        "counts down by hand": _changed(_BARRIER, "pool.free_blocks([old])", "old.ref_cnt -= 1"),
        "the table keeps the old block": _changed(_BARRIER, "    table[index] = new\n", ""),
        "the pair turned round": _changed(_BARRIER, "return old, new", "return new, old"),
        "takes the name away instead": _changed(_BARRIER, "    if old.ref_cnt == 1 and", '''    if old.ref_cnt == 1:
        old.block_hash = None
    if old.ref_cnt == 1 and'''),
        "adds the copy at the end": _changed(_BARRIER, "table[index] = new", "table.append(new)"),
        "always the last block": _BARRIER.replace("table[index]", "table[-1]"),
        "a list in the table": _changed(_BARRIER, "pool.get_new_blocks(1)[0]", "pool.get_new_blocks(1)"),
        "ids in the pair": _changed(_BARRIER, "return old, new", "return old.block_id, new.block_id"),
        "says None when the pool is empty": _changed(
            _BARRIER, "    new = pool", '''    if not pool.get_num_free_blocks():
        return None
    new = pool'''),
    },
    "make_room": {
        "the copy is not counted": _changed(_ROOM, "num_new + num_copies >", "num_new >"),
        "copies before it counts": '''
def make_room(pool, table, start, num_tokens, block_size):
    copies = []
    for index in range(start // block_size, len(table)):
        if not table[index].is_writable:
            if pool.get_num_free_blocks() == 0:
                return None
            copies.append(barrier(pool, table, index))
    num_new = max(0, -(-(start + num_tokens) // block_size) - len(table))
    if num_new > pool.get_num_free_blocks():
        return None
    table.extend(pool.get_new_blocks(num_new))
    return copies
''',
        "copies the block of the last token": _changed(_ROOM, "first = start // block_size",
                                                       "first = max(0, start - 1) // block_size"),
        "one block more when the last is just full": _changed(
            _ROOM, "end = -(-(start + num_tokens) // block_size)", "end = (start + num_tokens) // block_size + 1"),
        "one block, however many tokens": _changed(_ROOM, "num_new = max(0, end - len(table))",
                                                   "num_new = int(end > len(table))"),
        "no barrier": _changed(_ROOM, "        pair = barrier(pool, table, index)\n", "        pair = None\n"),
        "always keeps one block free": _changed(_ROOM, "> pool.get_num_free_blocks()", ">= pool.get_num_free_blocks()"),
        "counts from the start of the sequence": _changed(_ROOM, "num_new = max(0, end - len(table))",
                                                          "num_new = -(-num_tokens // block_size)"),
        "raises instead of None": _changed(_ROOM, "        return None\n", "        raise OutOfBlocks('none')\n"),
        "forgets what it copied": _changed(_ROOM, "    return copies", "    return []"),
        "only the first block is ever copied": _changed(
            _ROOM, "standing = list(range(first, min(end, len(table))))",
            "standing = list(range(first, min(end, len(table))))[:1]"),
        "only the last block is ever copied": _changed(
            _ROOM, "standing = list(range(first, min(end, len(table))))",
            "standing = list(range(first, min(end, len(table))))[-1:]"),
        "fewer than no new blocks": _changed(_ROOM, "num_new = max(0, end - len(table))", "num_new = end - len(table)"),
        "new blocks first, copies highest first": """
def make_room(pool, table, start, num_tokens, block_size):
    first, end = start // block_size, -(-(start + num_tokens) // block_size)
    standing = [i for i in range(first, min(end, len(table))) if not table[i].is_writable]
    num_new = max(0, end - len(table))
    if num_new + len(standing) > pool.get_num_free_blocks():
        return None
    table.extend(pool.get_new_blocks(num_new))
    return [barrier(pool, table, index) for index in reversed(standing)]
""",
        "new blocks first": _changed(_ROOM, "    copies = []\n", "    table.extend(pool.get_new_blocks(num_new))\n"
                                     "    num_new, copies = 0, []\n"),
        "copies highest first": _changed(_ROOM, "    copies = []\n    for index in standing:",
                                         "    copies = []\n    for index in reversed(standing):"),
        "never a copy and a new block at once": _changed(_ROOM, "    if num_new + num_copies >", """
    if num_new and num_copies:
        return None
    if num_new + num_copies >"""),
        "copies to the end of the table": _changed(_ROOM, "range(first, min(end, len(table)))",
                                                   "range(first, len(table))"),
        "counts from the first block of the table": _changed(
            _ROOM, "    for index in standing:\n        if not",
            "    for index in range(min(end, len(table))):\n        if not"),
        "None among the pairs": _changed(_ROOM, "        if pair is not None:\n            copies.append(pair)",
                                         "        copies.append(pair)"),
        "appends a list": _changed(_ROOM, "table.extend(pool.get_new_blocks(num_new))",
                                   "table += [pool.get_new_blocks(1) for _ in range(num_new)]"),
        "the old way: only ref_cnt": _changed(_ROOM, "if not table[index].is_writable:",
                                              "if table[index].ref_cnt > 1:"),
    },
    "beam_step": {
        "gives back first": '''
def beam_step(pool, tables, parents):
    for table in tables:
        pool.free_blocks(reversed(table))
    return [share(pool, tables[parent]) for parent in parents]
''',
        "one after the other in place": '''
def beam_step(pool, tables, parents):
    following = list(tables)
    for i, parent in enumerate(parents):
        pool.free_blocks(reversed(following[i]))
        following[i] = share(pool, tables[parent])
    return following
''',
        "in place, reading what it has just overwritten": '''
def beam_step(pool, tables, parents):
    for i, parent in enumerate(parents):
        if i != parent:
            new = share(pool, tables[parent])
            pool.free_blocks(reversed(tables[i]))
            tables[i] = new
    return tables
''',
        "the dead are never given back": _changed(_BEAM, '''    for table in tables:
        pool.free_blocks(table[::-1])
''', ""),
        "only the dead are given back": _changed(
            _BEAM, "    for table in tables:\n", '''    for i, table in enumerate(tables):
        if i in parents:
            continue
'''),
        "two beams, one list": '''
def beam_step(pool, tables, parents):
    following = [tables[parent] for parent in parents]
    for i, table in enumerate(tables):
        for _ in range(parents.count(i) - 1):
            pool.touch(table)
        if i not in parents:
            pool.free_blocks(reversed(table))
    return following
''',
        "twins are not counted": '''
def beam_step(pool, tables, parents):
    for i, table in enumerate(tables):
        if i not in parents:
            pool.free_blocks(reversed(table))
    return [list(tables[parent]) for parent in parents]
''',
        "as many beams as before": _changed(
            _BEAM, "    for parent in parents:\n        following.append(share(pool, tables[parent]))",
            "    for i in range(len(tables)):\n        following.append(share(pool, tables[parents[i]]))"),
        "lists of ids": _changed(_BEAM, "    return following",
                                 "    return [[block.block_id for block in table] for table in following]"),
        "everybody goes on from the best": _changed(_BEAM, "tables[parent]", "tables[parents[0]]"),
    },
    "branch_and_return": {
        "skips published blocks": _changed(_TREE, "return share(pool, table[:keep])", """pool.touch(
        [b for b in table[:keep] if b.block_hash is None])
    return table[:keep]"""),
        "full blocks only": _changed(_TREE, '''def fork_at(pool, table, num_tokens, block_size):
    keep = (num_tokens + block_size - 1) // block_size''', '''def fork_at(pool, table, num_tokens, block_size):
    keep = num_tokens // block_size'''),
        "one block too many at a boundary": _TREE.replace("(num_tokens + block_size - 1) // block_size",
                                                          "num_tokens // block_size + 1"),
        "shares the whole table": _changed(_TREE, "share(pool, table[:keep])", "share(pool, table)"),
        "counts owners it does not keep": _changed(_TREE, "return share(pool, table[:keep])",
                                                   "pool.touch(table)\n    return table[:keep]"),
        "nobody counts the branch": _changed(_TREE, "return share(pool, table[:keep])", "return table[:keep]"),
        "cuts with a negative index": _changed(
            _TREE, "    gone = table[keep:]\n    del table[keep:]\n", '''    extra = len(table) - keep
    gone = table[-extra:]
    del table[-extra:]
'''),
        "forgets, and gives nothing back": _changed(_TREE, "    pool.free_blocks(gone[::-1])\n", ""),
        "gives back the first block first": _changed(_TREE, "gone[::-1]", "gone"),
        "gives back the block that it cuts": '''
def fork_at(pool, table, num_tokens, block_size):
    return share(pool, table[: -(-num_tokens // block_size)])

def truncate(pool, table, num_tokens, block_size):
    keep = num_tokens // block_size
    pool.free_blocks(reversed(table[keep:]))
    del table[keep:]
''',
        "another list, not this one": _changed(_TREE, "    gone = table[keep:]\n    del table[keep:]\n",
                                               "    gone = table[keep:]\n    table = table[:keep]\n"),
        "takes the name off the cut block": _changed(_TREE, "    gone = table[keep:]\n", '''
    if keep and num_tokens % block_size and table[keep - 1].block_hash:
        pool.prefix_index.remove(table[keep - 1])
    gone = table[keep:]
'''),
        "copies the cut block at once": _changed(
            _TREE, "    return share(pool, table[:keep])", '''    child = share(pool, table[:keep])
    if num_tokens % block_size:
        barrier(pool, child, keep - 1)
    return child'''),
    },
    "blocks_freed_by": {
        "all blocks": "def blocks_freed_by(tables):\n    return sum(len(table) for table in tables)\n",
        "all different blocks": "def blocks_freed_by(tables):\n    return len(set().union(*tables))\n",
        "only blocks with one owner": _changed(_GAIN, "block.ref_cnt == held[block]", "block.ref_cnt == 1"),
        "gives up what it counts": '''
def blocks_freed_by(tables):
    freed = 0
    for table in tables:
        for block in table:
            block.ref_cnt -= 1
            freed += block.ref_cnt == 0
    return freed
''',
        "counts a block once a table": '''
def blocks_freed_by(tables):
    blocks = [block for table in tables for block in table]
    return sum(block.ref_cnt == blocks.count(block) for block in blocks)
''',
    },
    "copy_batches": {
        "all at once": "def copy_batches(copies):\n    return [[tuple(copy) for copy in copies]] if copies else []\n",
        "one by one": "def copy_batches(copies):\n    return [[tuple(copy)] for copy in copies]\n",
        "reads what it has written": _changed(_BATCHES, "source in written or ", ""),
        "writes twice": _changed(_BATCHES, " or target in written", ""),
        "also cuts where a source is written": '''
def copy_batches(copies):
    batches, used = [], set()
    for source, target in copies:
        if not batches or source in used or target in used:
            batches.append([])
            used = set()
        batches[-1].append((source, target))
        used |= {source, target}
    return batches
''',
        "never forgets what was written": _changed(_BATCHES, "            written = set()\n", ""),
    },
}  # fmt: skip
