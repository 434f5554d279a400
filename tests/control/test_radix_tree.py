"""The radix tree beside the hash chain: the same operations through two block pools, and never another hit."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_fuzz import break_it

from kvlab.blocks import BlockPool, KVCacheBlock
from kvlab.parts import Parts, survive
from kvlab.prefix import HashChainIndex, RadixTreeIndex


class Text:
    """What the pool needs to know of a request."""

    def __init__(self, tokens, salt):
        self.request_id, self.all_token_ids, self.cache_salt = "r", tokens, salt


class Twins:
    """Two pools, one with each index: block i of one is block i of the other, always."""

    def __init__(self, size, num):
        self.size = size
        self.pools = [BlockPool(num, prefix_index=index(size)) for index in (HashChainIndex, RadixTreeIndex)]
        self.held = []  # (text, [blocks in each pool], [cursor in each])

    def both(self, do):
        """`do` to each pool with what it calls the same; the results."""
        return [do(side, pool) for side, pool in enumerate(self.pools)]

    def hits(self, tokens, salt):
        found = self.both(lambda side, pool: pool.prefix_index.match(tokens, salt))
        assert [b.block_id for b in found[0]] == [b.block_id for b in found[1]]
        return found

    def start(self, tokens, salt, use_hits):
        """use_hits=False: computed a second time, so that its blocks' places are taken."""
        hits = self.hits(tokens, salt) if use_hits else [[], []]
        self.both(lambda side, pool: pool.touch(hits[side]))
        needed = -(-len(tokens) // self.size) - len(hits[0])
        if needed > self.pools[0].get_num_free_blocks():
            self.both(lambda side, pool: pool.free_blocks(reversed(hits[side])))
            return
        blocks = self.both(lambda side, pool: hits[side] + pool.get_new_blocks(needed))
        self.held.append((Text(tokens, salt), blocks, [None, None]))

    def publish(self, i, full, keep_cursor):
        text, blocks, cursors = self.held[i % len(self.held)]
        full = min(full, len(text.all_token_ids) // self.size)
        found = self.both(lambda side, pool: pool.cache_full_blocks(text, blocks[side], full, cursors[side]))
        cursors[:] = found if keep_cursor else [None, None]

    def finish(self, i, shuffle=None):
        """Usually the last block first; but any may go before another when they are shared."""
        _, blocks, _ = self.held.pop(i % len(self.held))
        places = list(range(len(blocks[0])))[::-1]
        if shuffle is not None:
            shuffle(places)
        self.both(lambda side, pool: pool.free_blocks([blocks[side][k] for k in places]))

    def push_out(self, n):
        if n <= self.pools[0].get_num_free_blocks():
            self.both(lambda side, pool: pool.free_blocks(pool.get_new_blocks(n)))

    def reset(self):
        chain, tree = self.both(lambda side, pool: pool.reset_prefix_cache())
        assert chain == tree

    def same(self):
        self.pools[1].prefix_index.check()
        chain, tree = self.both(lambda side, pool: (
            [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            [(b.ref_cnt, b.block_hash is None) for b in pool.blocks],
            {b.block_id for b in pool.cached_block_hash_to_block.values()},
        ))  # fmt: skip
        assert chain == tree


TOKENS = st.lists(st.integers(0, 1), max_size=9)  # so few that prefixes meet all the time
SALTS = st.sampled_from([None, None, None, "a"])
INDEX = st.integers(0, 10**6)


class TwinMachine(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 2), num=st.integers(4, 12))
    def begin(self, size, num):
        self.twins = Twins(size, num)

    @rule(tokens=TOKENS, salt=SALTS)
    def look(self, tokens, salt):
        self.twins.hits(tokens, salt)

    @rule(tokens=TOKENS, salt=SALTS, use_hits=st.booleans())
    def start(self, tokens, salt, use_hits):
        self.twins.start(tokens, salt, use_hits)

    @precondition(lambda self: self.twins.held)
    @rule(i=INDEX, full=st.integers(0, 9), keep_cursor=st.booleans())
    def publish(self, i, full, keep_cursor):
        self.twins.publish(i, full, keep_cursor)

    @precondition(lambda self: self.twins.held)
    @rule(i=INDEX, shuffle=st.none() | st.randoms(use_true_random=False).map(lambda rng: rng.shuffle))
    def finish(self, i, shuffle):
        self.twins.finish(i, shuffle)

    @rule(n=st.integers(1, 3))
    def push_out(self, n):
        self.twins.push_out(n)

    @rule()
    def reset(self):
        self.twins.reset()

    @invariant()
    def same(self):
        self.twins.same()


TestTwins = TwinMachine.TestCase
TestTwins.settings = settings(max_examples=100, stateful_step_count=40, suppress_health_check=list(HealthCheck))


def play(number):
    """The same at random, longer and much faster; every text of the past is looked up after every move."""
    rng = random.Random(number)
    twins = Twins(rng.choice([1, 1, 2]), rng.choice([5, 8, 16]))
    texts = []
    for _ in range(60):
        move = rng.random()
        if move < 0.4 or not twins.held:
            tokens, salt = [rng.randrange(2) for _ in range(rng.randint(0, 9))], rng.choice([None, None, "a"])
            texts.append((tokens, salt))
            twins.start(tokens, salt, rng.random() < 0.6)
        if twins.held and move < 0.75:
            for _ in range(2):
                twins.publish(rng.choice([-1, rng.randrange(99)]), rng.randint(1, 9), rng.random() < 0.7)
        elif twins.held and move < 0.93:
            twins.finish(rng.randrange(99), rng.choice([None, rng.shuffle]))
        elif move < 0.99:
            twins.push_out(rng.randint(1, 3))
        else:
            twins.reset()
        twins.same()
        for tokens, salt in texts:
            twins.hits(tokens, salt)


def test_played_at_random():
    for number in range(300):
        play(number)


def tree_of(*texts, block_size=1):
    index = RadixTreeIndex(block_size)
    blocks = {text: [KVCacheBlock(10 * i + k + 1) for k in range(len(text))] for i, text in enumerate(texts)}
    for text in texts:
        index.insert([ord(c) for c in text], blocks[text])
        index.check()
    return index, blocks


def shape(index):
    """The tree in letters: [edge, children...], '.' for a gap."""

    def of(node):
        places = zip(node.chunks, node.blocks, strict=True)
        edge = "".join("." if block is None else chr(*chunk) for chunk, block in places)
        return [edge, *sorted((of(child) for child in node.children.values()), key=str)]

    return of(index.roots[None])[1:]


def test_an_edge_grows_splits_and_joins_again():
    index, blocks = tree_of("abc", "abcd")
    assert shape(index) == [["abcd"]]
    index, blocks = tree_of("abcd", "abxy")
    assert shape(index) == [["ab", ["cd"], ["xy"]]]
    for i in (3, 2):
        index.remove(blocks["abxy"][i])
        index.check()
    assert shape(index) == [["abcd"]]
    assert index.match([ord(c) for c in "abxy"]) == blocks["abcd"][:2]


def test_what_lies_behind_a_gap_is_out_of_reach_until_it_is_filled():
    index, blocks = tree_of("abcd")
    index.remove(blocks["abcd"][1])
    assert shape(index) == [["a.cd"]]
    word = [ord(c) for c in "abcd"]
    assert index.match(word) == blocks["abcd"][:1]
    again = KVCacheBlock(99)
    index.insert(word[:2], [blocks["abcd"][0], again])
    assert index.match(word) == [blocks["abcd"][0], again, *blocks["abcd"][2:]]


def test_the_last_block_takes_the_root_with_it():
    index, blocks = tree_of("ab")
    for block in blocks["ab"]:
        index.remove(block)
    assert not index.roots and not index.cached_block_hash_to_block


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: RadixTreeIndex(0), "block_size is 0"),
        (lambda: RadixTreeIndex(4).insert([1, 2, 3], [KVCacheBlock(1)]), "3 tokens do not fill 1 blocks of 4"),
        (lambda: RadixTreeIndex(4).remove(KVCacheBlock(7)), "block 7 is not published"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_it_drives_the_engine():
    assert [o for o in survive(Parts(prefix_index=RadixTreeIndex)) if not o.survived] == []


FAULTS = {
    "a match passes over a gap": ("match", " or node.blocks[i] is None", ""),
    "a match does not look at the tokens": ("match", "node.chunks[i] != chunk or ", ""),
    "one tree for all salts": ("insert", "self.roots.setdefault(salt,", "self.roots.setdefault(None,"),
    "the second publisher takes the place": ("insert", "and node.blocks[i] is None", ""),
    "all are offered again": ("insert", "done = cursor or 0", "done = 0"),
    "the upper half keeps its old owner": ("_split", "self._claim(upper)", "pass"),
    "a split forgets what is above": ("_split", "node.parent.children[upper.chunks[0]] = upper", "pass"),
    "joined blocks keep their old owner": ("_tidy", "self._claim(node)", "pass"),
    "grandchildren keep their old parent": ("_tidy", "grandchild.parent = node", "pass"),
    "a removed block stays": ("remove", "node.blocks[node.blocks.index(block)] = None", "pass"),
    "a leaf with children grows": ("_step", "and not node.children", ""),
    "the block does not forget": ("remove", "block.block_hash = None", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(monkeypatch, fault):
    break_it(monkeypatch, RadixTreeIndex, *FAULTS[fault])
    monkeypatch.setattr(RadixTreeIndex, "check", lambda self: None)  # behaviour must do
    with pytest.raises(Exception):  # noqa: B017
        for number in range(300):
            play(number)
