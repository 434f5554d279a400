"""Lab 05: drives the student's names, index and moves with plain values. Runs in the child process."""

from collections.abc import Sequence

from kvlab.blocks import FreeKVCacheBlockQueue, KVCacheBlock
from kvlab.prefix import HashChainIndex
from kvlab.prefix.reuse import release


class CountedTokens(Sequence):
    """Token ids that count how many of them are read."""

    def __init__(self, tokens):
        self.tokens, self.reads = tokens, 0

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        got = self.tokens[index]
        self.reads += len(got) if isinstance(index, slice) else 1
        return got

    def __iter__(self):
        for token in self.tokens:
            self.reads += 1
            yield token


class Labels:
    """Keys told as numbers, in the order in which they first appear."""

    def __init__(self):
        self.numbers = {}

    def of(self, keys):
        return [self.numbers.setdefault(key, len(self.numbers) + 1) for key in keys]


class KeysDriver:
    def __init__(self, student, block_size):
        self.student, self.block_size, self.labels = student, block_size, Labels()

    def block_keys(self, tokens, salt=None):
        return self.labels.of(self.student.block_keys(tokens, self.block_size, salt))

    def kinds(self, tokens):
        keys = self.student.block_keys(tokens, self.block_size)
        return [type(keys).__name__, *sorted({f"{type(key).__name__} of {len(key)}" for key in keys})]

    def reads(self, num_tokens):
        tokens = CountedTokens(list(range(num_tokens)))
        self.student.block_keys(tokens, self.block_size)
        return tokens.reads


class GrowingDriver:
    def __init__(self, student, block_size, salt):
        self.student, self.block_size, self.salt = student, block_size, salt
        self.tokens, self.cursor, self.labels = [], None, Labels()

    def grow(self, tokens):
        self.tokens += tokens
        keys, self.cursor = self.student.new_keys(list(self.tokens), self.block_size, self.salt, self.cursor)
        return self.labels.of(keys)

    def again(self, tokens, salt):
        """Another sequence, from its beginning."""
        keys, _ = self.student.new_keys(list(tokens), self.block_size, salt)
        return self.labels.of(keys)

    def reads(self, num_tokens):
        """Of the next block, after num_tokens tokens."""
        tokens = CountedTokens(list(range(num_tokens)))
        _, cursor = self.student.new_keys(tokens, self.block_size)
        tokens = CountedTokens(list(range(num_tokens + self.block_size)))
        self.student.new_keys(tokens, self.block_size, None, cursor)
        return tokens.reads


class IndexDriver:
    def __init__(self, student, block_size):
        self.index = student.PrefixIndex(block_size)
        self.blocks = [KVCacheBlock(i) for i in range(40)]

    def match(self, tokens, salt=None):
        return [block.block_id for block in self.index.match(tokens, salt)]

    def insert(self, tokens, ids, salt=None):
        self.index.insert(tokens, [self.blocks[i] for i in ids], salt)

    def remove(self, block_id):
        self.index.remove(self.blocks[block_id])

    def published(self):
        """Blocks with a name, by which the index knows them."""
        known = self.index.cached_block_hash_to_block
        for block in self.blocks:
            if block.block_hash is not None and known.get(block.block_hash) is not block:
                return f"block {block.block_id} bears a name by which the index does not know it"
        named = [block.block_id for block in self.blocks if block.block_hash is not None]
        return named if len(named) == len(known) else f"{len(known)} in the dictionary, {len(named)} blocks that bear a name"


class Moves:
    """A queue, an index of one-token blocks, and the three moves."""

    def __init__(self, student, num_blocks):
        self.student = student
        self.blocks = {i: KVCacheBlock(i) for i in range(1, num_blocks + 1)}
        self.free = FreeKVCacheBlockQueue(list(self.blocks.values()))
        self.index = HashChainIndex(1)
        self.num_published = 0

    def _of(self, ids):
        return [self.blocks[i] for i in ids]

    def take(self, n):
        return [block.block_id for block in self.student.take(self.free, self.index, n)]

    def touch(self, ids):
        self.student.touch(self.free, self._of(ids))

    def release(self, ids):
        self.student.release(self.free, self._of(ids))

    def publish(self, ids):
        for block in self._of(ids):
            self.num_published += 1
            self.index.insert([self.num_published], [block])

    def queue(self):
        return [block.block_id for block in self.free.get_all_free_blocks()]

    def owners(self):
        return [block.ref_cnt for block in self.blocks.values()]

    def findable(self):
        return sorted(block.block_id for block in self.index.cached_block_hash_to_block.values())

    def links_used_to_touch(self, num_blocks):
        """Accesses to links when the block in the middle of a queue of num_blocks is hit."""
        blocks = [CountedBlock(i) for i in range(num_blocks)]
        queue = FreeKVCacheBlockQueue(blocks)
        CountedBlock.accesses = 0
        self.student.touch(queue, [blocks[num_blocks // 2]])
        return CountedBlock.accesses


class CountedBlock(KVCacheBlock):
    """A block that counts how often its links are read or written."""

    __slots__ = ("_prev", "_next")
    accesses = 0

    def _get(name):
        def read(self):
            CountedBlock.accesses += 1
            return getattr(self, name, None)

        def write(self, value):
            CountedBlock.accesses += 1
            setattr(self, name, value)

        return property(read, write)

    prev_free_block, next_free_block = _get("_prev"), _get("_next")


class StartDriver:
    def __init__(self, student, num_blocks, block_size):
        self.student = student
        self.blocks = [KVCacheBlock(i) for i in range(1, num_blocks + 1)]
        self.free = FreeKVCacheBlockQueue(self.blocks)
        self.index = HashChainIndex(block_size)
        self.running = {}

    def start(self, name, tokens, salt=None):
        """(ids of the table, tokens found) or None; then its full blocks are computed and published."""
        started = self.student.start_request(self.free, self.index, tokens, salt)
        if started is None:
            return None
        table, num_cached = started
        self.running[name] = table
        ids = [block.block_id for block in table]
        if len(table) * self.index.block_size >= len(tokens):
            self.index.insert(tokens, table[: len(tokens) // self.index.block_size], salt)
        return [ids, num_cached]

    def finish(self, name):
        release(self.free, self.running.pop(name))

    def queue(self):
        return [block.block_id for block in self.free.get_all_free_blocks()]

    def owners(self):
        return [block.ref_cnt for block in self.blocks]
