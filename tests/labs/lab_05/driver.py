"""Lab 05: drives the student's names, index and moves with plain values. Runs in the child process."""

from collections.abc import Sequence

from kvlab.blocks import FreeKVCacheBlockQueue, KVCacheBlock, OutOfBlocks
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


class ForeignSalt(str):
    """A salt as another process sees it: the same text, and hash() gives another number."""

    def __hash__(self):
        return ~super().__hash__()

    __eq__ = str.__eq__


def ids_of(blocks):
    """The ids of a list of blocks; of anything else a sentence that says what it is."""
    if not isinstance(blocks, list | tuple):
        return f"{type(blocks).__name__} in place of a list of blocks" if blocks is not None else "None"
    others = [item for item in blocks if not isinstance(item, KVCacheBlock)]
    if others:
        return f"a list that holds {type(others[0]).__name__} in place of blocks"
    return [block.block_id for block in blocks]


class KeysDriver:
    def __init__(self, student, block_size):
        self.student, self.block_size, self.labels = student, block_size, Labels()

    def block_keys(self, tokens, salt=None):
        return self.labels.of(self.student.block_keys(tokens, self.block_size, salt))

    def elsewhere(self, tokens, salt):
        """The keys in another process."""
        return self.block_keys(tokens, ForeignSalt(salt))

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
    """An index, and a second one beside it. An operation that does more than it should is told in a sentence."""

    def __init__(self, student, block_size):
        self.index, self.second = student.PrefixIndex(block_size), student.PrefixIndex(block_size)
        self.blocks = [KVCacheBlock(i) for i in range(40)]
        for block in self.blocks[::2]:
            block.ref_cnt = 1
        self.foreign = set()  # ids of blocks that the second index has published

    def match(self, tokens, salt=None):
        owners, names = self._owners(), self._names()
        found = ids_of(self.index.match(tokens, salt))
        if self._names() != names:
            return "match has published or removed a block"
        return self._changed(owners) or found

    def insert(self, tokens, ids, salt=None):
        owners = self._owners()
        self.index.insert(tokens, [self.blocks[i] for i in ids], salt)
        return self._changed(owners)

    def insert_into_another(self, tokens, ids):
        self.second.insert(tokens, [self.blocks[i] for i in ids])
        self.foreign.update(ids)

    def remove(self, block_id):
        owners = self._owners()
        self.index.remove(self.blocks[block_id])
        return self._changed(owners)

    def published(self):
        """Blocks with a name, by which the index knows them."""
        known = self.index.cached_block_hash_to_block
        ours = [block for block in self.blocks if block.block_id not in self.foreign]
        for block in ours:
            if block.block_hash is not None and known.get(block.block_hash) is not block:
                return f"block {block.block_id} bears a name by which the index does not know it"
        named = [block.block_id for block in ours if block.block_hash is not None]
        return named if len(named) == len(known) else f"{len(known)} in the dictionary, {len(named)} blocks that bear a name"

    def _names(self):
        return [block.block_hash for block in self.blocks], list(self.index.cached_block_hash_to_block.items())

    def _owners(self):
        return [block.ref_cnt for block in self.blocks]

    def _changed(self, owners):
        for block, before in zip(self.blocks, owners, strict=True):
            if block.ref_cnt != before:
                return f"ref_cnt of block {block.block_id} went from {before} to {block.ref_cnt}"
        return None


class Moves:
    """A queue, an index of one-token blocks, and the three moves. What a move breaks is told in a sentence."""

    def __init__(self, student, num_blocks):
        self.student = student
        self.blocks = {i: KVCacheBlock(i) for i in range(1, num_blocks + 1)}
        self.free = FreeKVCacheBlockQueue(list(self.blocks.values()))
        self.index = HashChainIndex(1)
        self.num_published = 0

    def _of(self, ids):
        return [self.blocks[i] for i in ids]

    def take(self, n):
        before = self.queue(), self.owners(), self.findable()
        try:
            taken = self.student.take(self.free, self.index, n)
        except OutOfBlocks:
            if (self.queue(), self.owners(), self.findable()) != before:
                return "OutOfBlocks, yet something changed before"
            raise
        ids = ids_of(taken)
        named = [i for i in ids if self.blocks[i].block_hash is not None] if isinstance(ids, list) else []
        return f"block {named[0]} was taken and is still known by its name" if named else self._broken() or ids

    def touch(self, ids):
        names = self._names()
        self.student.touch(self.free, self._of(ids))
        return self._lost(names) or self._broken()

    def release(self, ids):
        names, table = self._names(), self._of(ids)
        self.student.release(self.free, table)
        if [block.block_id for block in table] != ids:
            return "the caller's table itself was changed"
        return self._lost(names) or self._broken()

    def _names(self):
        return [block.block_hash for block in self.blocks.values()]

    def _lost(self, names):
        for block, name in zip(self.blocks.values(), names, strict=True):
            if block.block_hash != name:
                return f"block {block.block_id} lost its name (block_hash)"
        return None

    def _broken(self):
        """The first block that stands where it must not, or None."""
        waiting, known = self.queue(), self.index.cached_block_hash_to_block
        for i, block in self.blocks.items():
            if block.ref_cnt and i in waiting:
                return f"block {i} has an owner and stands in the free queue"
            if not block.ref_cnt and i not in waiting:
                return f"block {i} has no owner and is not in the free queue"
            if block.ref_cnt < 0:
                return f"block {i} has {block.ref_cnt} owners"
            if block.block_hash is None and block in known.values():
                return f"block {i} has no name, and the index still finds it"
            if block.block_hash is not None and known.get(block.block_hash) is not block:
                return f"block {i} has a name, and the index does not know it"
        return None

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
        queue, owners, known = self.queue(), self.owners(), dict(self.index.cached_block_hash_to_block)
        try:
            started = self.student.start_request(self.free, self.index, tokens, salt)
        except OutOfBlocks:
            return "OutOfBlocks"
        if started is None:
            if self.owners() != owners:
                return "None, yet the owners changed"
            return f"None, yet the queue went from {queue} to {self.queue()}" if self.queue() != queue else None
        if not isinstance(started, tuple | list) or len(started) != 2 or started[0] is None:
            return f"{started!r}"
        table, num_cached = started
        ids = ids_of(table)
        if isinstance(ids, str):
            return f"{ids} as the table"
        if self.index.cached_block_hash_to_block.keys() - known.keys():
            return "a block was published"
        self.running[name] = table
        if len(table) * self.index.block_size >= len(tokens):
            self.index.insert(tokens, table[: len(tokens) // self.index.block_size], salt)
        return [ids, num_cached]

    def finish(self, name):
        release(self.free, self.running.pop(name))

    def queue(self):
        return [block.block_id for block in self.free.get_all_free_blocks()]

    def owners(self):
        return [block.ref_cnt for block in self.blocks]
