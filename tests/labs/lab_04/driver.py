"""Lab 04: drives the student's functions with plain values. Runs in the child process.

World holds a real pool and tables with names (A, B, ...). Each operation answers with the books in one line:

    A = [1, 2]; B = [1, 3]; owners 1:2 2:1 3:1; named 1; free 4 5
"""

from kvlab.blocks import BlockPool, KVCacheBlock
from kvlab.blocks.branches import make_room
from kvlab.blocks.table import cdiv


class Names:
    """As much of a prefix index as a pool needs: names that blocks bear."""

    block_size = 0

    def __init__(self):
        self.cached_block_hash_to_block = {}

    def publish(self, block):
        if block.block_hash is None:
            block.block_hash = f"name{block.block_id}"
            self.cached_block_hash_to_block[block.block_hash] = block

    def remove(self, block):
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None


class PlainBlock(KVCacheBlock):
    """A block that does not say whether it may be written: the student says it."""

    __slots__ = ()

    @property
    def is_writable(self):
        raise AttributeError("is_writable is kvlab's own rule: in this exercise you say when a block may be written")


def told_entry(entry):
    """What a table names at one index: a block id, or, if that is no block, what it is."""
    if isinstance(entry, KVCacheBlock):
        return str(entry.block_id)
    kind = type(entry).__name__
    return f"a{'n' * (kind[0] in 'aeiou')} {kind}"


def told_copy(pair):
    if isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(block, KVCacheBlock) for block in pair):
        return f"copy {pair[0].block_id} -> {pair[1].block_id}"
    return f"returned {pair!r}"


class World:
    def __init__(self, student, num_blocks):
        self.student = student
        self.names = Names()
        self.pool = self.make_pool(num_blocks)
        self.tables = {}

    def make_pool(self, num_blocks):
        return BlockPool(num_blocks + 1, prefix_index=self.names)

    def told(self, name):
        return f"{name} = [{', '.join(map(told_entry, self.tables[name]))}]"

    def books(self):
        parts = [self.told(name) for name in sorted(self.tables)]
        owned = [f"{block.block_id}:{block.ref_cnt}" for block in self.pool.blocks[1:] if block.ref_cnt]
        parts.append("owners " + (" ".join(owned) or "none"))
        if named := [str(b.block_id) for b in self.pool.blocks if b.block_hash is not None]:
            parts.append("named " + " ".join(named))
        free = [str(block.block_id) for block in self.pool.free_block_queue.get_all_free_blocks()]
        parts.append("free " + (" ".join(free) or "none"))
        return "; ".join(parts)

    def start(self, name, num_blocks):
        self.tables[name] = self.pool.get_new_blocks(num_blocks)
        return self.books()

    def share(self, parent, child):
        self.pool.touch(self.tables[parent])
        self.tables[child] = list(self.tables[parent])
        return self.books()

    def grow(self, name):
        self.tables[name] += self.pool.get_new_blocks(1)
        return self.books()

    def publish(self, name, index):
        self.names.publish(self.tables[name][index])
        return self.books()

    def give_back(self, name):
        self.pool.free_blocks(reversed(self.tables.pop(name)))
        return self.books()


class ForkDriver(World):
    def fork(self, parent, child):
        made = self.student.fork(self.pool, self.tables[parent])
        if not isinstance(made, list):
            return f"a {type(made).__name__} returned"
        self.tables[child] = made
        return self.books()


class BarrierDriver(World):
    def __init__(self, student, num_blocks):
        super().__init__(student, num_blocks)
        for block in self.pool.blocks:
            block.__class__ = PlainBlock

    def ensure_writable(self, name, index):
        pair = self.student.ensure_writable(self.pool, self.tables[name], index)
        return f"{'no copy' if pair is None else told_copy(pair)}; {self.books()}"


class RoomDriver(World):
    """Tables with lengths: `start` and `write` count tokens."""

    def __init__(self, student, num_blocks, block_size):
        super().__init__(student, num_blocks)
        self.block_size = block_size
        self.lengths = {}

    def told(self, name):
        length = self.lengths[name]
        return f"{super().told(name)} with {length} token{'s' * (length != 1)}"

    def start(self, name, num_tokens):
        self.lengths[name] = num_tokens
        return super().start(name, cdiv(num_tokens, self.block_size))

    def share(self, parent, child):
        self.lengths[child] = self.lengths[parent]
        return super().share(parent, child)

    def publish(self, name):
        for block in self.tables[name][: self.lengths[name] // self.block_size]:
            self.names.publish(block)
        return self.books()

    def go_back(self, name, num_tokens):
        keep = cdiv(num_tokens, self.block_size)
        self.pool.free_blocks(reversed(self.tables[name][keep:]))
        del self.tables[name][keep:]
        self.lengths[name] = num_tokens
        return self.books()

    def step_back(self, name, num_tokens):
        """Fewer tokens, the same table: as after drafts that were not accepted."""
        self.lengths[name] = num_tokens
        return self.books()

    def write(self, name, num_tokens):
        table, start = self.tables[name], self.lengths[name]
        copies = self.student.make_room(self.pool, table, start, num_tokens, self.block_size)
        if copies is None:
            return f"None; {self.books()}"
        self.lengths[name] += num_tokens
        if not isinstance(copies, list):
            return f"returned {copies!r}; {self.books()}"
        return "; ".join([*(map(told_copy, copies) if copies else ["no copy"]), self.books()])


class Memory(BlockPool):
    """A pool with contents. What nobody owns and nobody can find is gone at once: somebody else may write there."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rows = {block.block_id: [] for block in self.blocks}

    def free_blocks(self, ordered_blocks):
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        for block in blocks:
            if block.ref_cnt == 0 and block.block_hash is None:
                self.rows[block.block_id] = ["?"] * len(self.rows[block.block_id])

    def write(self, table, position, token, block_size, room=make_room):
        """One token through the barrier; how many blocks were copied."""
        copies = room(self, table, position, 1, block_size)
        for source, target in copies:
            self.rows[target.block_id] = list(self.rows[source.block_id])
        row = self.rows[table[position // block_size].block_id]
        row[position % block_size :] = [token]  # what stood behind is from another branch
        return len(copies)

    def read(self, table, num_tokens, block_size):
        rows = [(self.rows[block.block_id] + ["?"] * block_size)[:block_size] for block in table]
        return "".join("".join(row) for row in rows)[:num_tokens].ljust(num_tokens, "?")


class BeamDriver:
    def __init__(self, student, num_blocks, block_size, num_prompt, width):
        self.student, self.block_size, self.num_tokens = student, block_size, num_prompt
        self.pool = Memory(num_blocks + 1)
        prompt = []
        for position in range(num_prompt):
            self.pool.write(prompt, position, ".", block_size)
        self.tables = [prompt]
        for _ in range(width - 1):
            self.pool.touch(prompt)
            self.tables.append(list(prompt))

    def step(self, parents):
        tables = self.student.beam_step(self.pool, self.tables, list(parents))
        if not isinstance(tables, list) or not all(isinstance(table, list) for table in tables):
            return "not a list of tables"
        if strangers := [entry for table in tables for entry in table if not isinstance(entry, KVCacheBlock)]:
            return f"a table with {told_entry(strangers[0])} in it"
        self.tables, copied = tables, 0
        for i, table in enumerate(tables):
            copied += self.pool.write(table, self.num_tokens, "abcdef"[i], self.block_size)
        self.num_tokens += 1
        texts = [self.pool.read(table, self.num_tokens, self.block_size) for table in tables]
        held = self.pool.num_usable_blocks - self.pool.get_num_free_blocks()
        return f"{' '.join(texts)}; {held} blocks held, {copied} copied"


class TreeDriver(World):
    def __init__(self, student, num_blocks, block_size):
        super().__init__(student, num_blocks)
        self.block_size, self.lengths, self.written = block_size, {}, 0

    def make_pool(self, num_blocks):
        return Memory(num_blocks + 1, prefix_index=self.names)

    def told(self, name):
        text = self.pool.read(self.tables[name], self.lengths[name], self.block_size)
        return f"{super().told(name)} reads {text or 'nothing'}"

    def start(self, name):
        self.tables[name], self.lengths[name] = [], 0
        return self.books()

    def write(self, name, num_tokens):
        for _ in range(num_tokens):
            letter = "abcdefghijklmnopqrstuvwxyz"[self.written % 26]
            self.pool.write(self.tables[name], self.lengths[name], letter, self.block_size)
            self.lengths[name] += 1
            self.written += 1
        return self.books()

    def publish(self, name):
        for block in self.tables[name][: self.lengths[name] // self.block_size]:
            self.names.publish(block)
        return self.books()

    def fork_at(self, parent, child, num_tokens):
        made = self.student.fork_at(self.pool, self.tables[parent], num_tokens, self.block_size)
        if not isinstance(made, list):
            return f"a {type(made).__name__} returned"
        if strangers := [entry for entry in made if not isinstance(entry, KVCacheBlock)]:
            return f"a table with {told_entry(strangers[0])} in it returned"
        self.tables[child], self.lengths[child] = made, num_tokens
        return self.books()

    def truncate(self, name, num_tokens):
        self.student.truncate(self.pool, self.tables[name], num_tokens, self.block_size)
        self.lengths[name] = num_tokens
        return self.books()


class GainDriver(World):
    def freed_by(self, *names):
        return self.student.blocks_freed_by([self.tables[name] for name in names])
