"""Lab 05, prefix reuse: its exercises."""

from hypothesis import strategies as st

from kvlab.blocks import OutOfBlocks
from kvlab.grade import Approx, AtMost, Exercise, LabInfo, Trace, say, walks

LAB = LabInfo(title=say("Prefix reuse"), sections="L33 6.1-6.3, 8.1; PAV 3.4, 6", before=("03",))
REUSE = "kvlab.prefix.reuse:"

# Two blocks that Python's hash() of a tuple cannot tell apart, found by a search of ten seconds.
TWINS = (4130, 100532, 60841, 22054), (76785, 101188, 97598, 0)


def _looked_at(traces, *questions):
    """`traces`, with `questions` asked at the end of each, so that no fault stays unseen."""
    return traces.map(lambda trace: Trace(trace.init, (*trace.ops, *((question,) for question in questions))))


class BlockKeys(Exercise):
    """Names for blocks: a hash chain."""

    name, points, minutes, section = "block_keys", 3, 18, "PAV 3.4"
    defines = ("block_keys",)
    ours = {"block_keys": "kvlab.prefix.hash_chain:block_keys"}
    driver = "KeysDriver"
    hints = (
        say("Carry one variable, the parent's key, from block to block. What could the parent of the first block be, "
            "so that the salt is in every key?"),
        say("A key is sha256(parent + data).digest(), where data are the bytes of the block's tokens. Give every "
            "token the same number of bytes: token.to_bytes(8, \"little\")."),
        say("The first parent is the SHA-256 of the salt, made bytes in a way that tells None from the text 'None'. Then "
            "each full block's key is the SHA-256 of its parent's key followed by its data, and is the next one's parent."),
    )  # fmt: skip
    examples = (
        Trace((2,), (("block_keys", [5, 6, 7, 8]),)),
        Trace((2,), (("block_keys", [5, 6, 7]), ("block_keys", []))),
        Trace((4,), (("kinds", [1, 2, 3, 4, 5, 6, 7, 8]),)),
        Trace((2,), (("block_keys", [5, 6, 5, 6]),)),
        Trace((2,), (("block_keys", [1, 2, 3, 4]), ("block_keys", [9, 9, 3, 4]))),
        Trace((2,), (("block_keys", [1, 2, 3, 4, 5, 6]), ("block_keys", [9, 2, 3, 4, 5, 6]))),
        Trace((2,), (("block_keys", [1, 2]), ("block_keys", [2, 1]))),
        Trace((1,), (("block_keys", [1]), ("block_keys", [1], "a"), ("block_keys", [1], "b"), ("block_keys", [1]))),
        Trace((1,), (("block_keys", [1]), ("block_keys", [1], "None"))),
        Trace((1,), (("block_keys", [1]), ("block_keys", [1], "")),
              why=say("The empty text is a salt, too, and not the same as no salt.")),
        Trace((1,), (("block_keys", [1]), ("block_keys", [1], "甲"), ("block_keys", [1], "乙")),
              why=say("A salt may be any text: encode() without further arguments loses none of it.")),
        Trace((1,), (("block_keys", [1], "a"), ("elsewhere", [1], "a")),
              why=say("hash() of a string gives another number in another process, so two engines would never find "
                      "each other's blocks. Make the root of the text itself: salt.encode().")),
        Trace((1,), (("block_keys", [2**63 - 1]),), why=say("Ids go up to 2**63 - 1: 8 bytes for each token.")),
        Trace((1,), (("block_keys", [1, 2], "a"), ("block_keys", [1, 2], "b"))),
        Trace((2,), (("block_keys", [1, 23]), ("block_keys", [12, 3])),
              why=say("Glued together as text, 1 and 23 look like 12 and 3.")),
        Trace((2,), (("block_keys", [300, 7]), ("block_keys", [44, 7])),
              why=say("300 = 256 + 44: one byte is not enough for a token id.")),
        Trace((1,), (("block_keys", [70_000]), ("block_keys", [4_464])),
              why=say("70,000 = 65,536 + 4,464: two bytes are not enough for a token id.")),
        Trace((4,), (("block_keys", list(TWINS[0])), ("block_keys", list(TWINS[1]))),
              why=say("Python's hash() gives these two blocks the same number. Use SHA-256 on the tokens themselves.")),
        Trace((1,), (("block_keys", [0]), ("block_keys", [2**61 - 1])),
              why=say("Python's hash() gives these two numbers the same value. Use SHA-256 on the tokens themselves.")),
        Trace((16,), (("reads", 320),)),
        Trace((16,), (("reads", 3200),)),
    )  # fmt: skip

    class Oracle:
        """Knows a block by all that stands before it, without any hashing."""

        def __init__(self, block_size):
            self.block_size, self.seen = block_size, {}

        def block_keys(self, tokens, salt=None):
            ends = range(self.block_size, len(tokens) + 1, self.block_size)
            return [self.seen.setdefault((salt, tuple(tokens[:end])), len(self.seen) + 1) for end in ends]

        elsewhere = block_keys

        def kinds(self, tokens):
            return ["list", "bytes of 32"]

        def reads(self, num_tokens):
            return AtMost(3 * num_tokens)

    def traces(self):
        tokens = st.lists(st.sampled_from([1, 2, 12, 21]), max_size=7)
        op = st.tuples(st.just("block_keys"), tokens, st.sampled_from([None, "a", "b"]))
        return st.builds(lambda size, ops: Trace((size,), ops), st.integers(1, 3), st.lists(op, min_size=1, max_size=6))

    def describe(self, op):
        if op[0] != "elsewhere":
            return super().describe(op)
        return f"in another process: block_keys({', '.join(map(repr, op[1:]))})"

    def describe_init(self, init):
        return f"block_size = {init[0]}; the same number below means the same key, numbered as they appear"

    def explain(self, op, expected, got):
        if op[0] == "kinds":
            return say("Return a list of keys, each the 32 bytes that sha256(...).digest() gives.")
        if op[0] == "reads":
            return say("Too many reads of tokens. The parent's key already stands for all tokens before the block: "
                       "read only the block's own.")  # fmt: skip
        if not isinstance(got, list) or len(got) != len(expected):
            return say("Only full blocks have a key: len(tokens) // block_size of them.")
        wrong = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
        if got[wrong] < expected[wrong]:
            return say("Block {i} (the first is 0) got a key that was given before, to a block with other tokens, another beginning "
                       "or another salt. Whoever finds it by that key reads the K/V "
                       "of somebody else's text.", i=wrong)  # fmt: skip
        return say("Block {i} has the same salt, the same tokens and the same beginning as one before, and got "
                   "another key: it would never be found again.", i=wrong)  # fmt: skip


class PrefixIndex(Exercise):
    """The index: match, insert, remove."""

    name, points, minutes, section = "prefix_index", 5, 28, "L33 6.2; PAV 3.4"
    defines = ("PrefixIndex",)
    ours = {"PrefixIndex": "kvlab.prefix.hash_chain:HashChainIndex",
            "RadixTreeIndex": "kvlab.prefix.radix_tree:RadixTreeIndex"}  # lab 06's, barred as well  # fmt: skip
    part = {"prefix_index": "PrefixIndex"}
    driver = "IndexDriver"
    hints = (
        say("match: walk along the keys and stop at the first one that nobody has published. insert: walk along keys "
            "and blocks side by side. remove: the block itself knows its name."),
        say("insert: a block gets the key as its block_hash only if it bears no name yet and nobody else has "
            "published that key. Check the number of tokens before you change anything."),
        say("remove: `if self.cached_block_hash_to_block.get(block.block_hash) is not block: raise ValueError`; then "
            "delete the entry, and set block.block_hash to None."),
    )  # fmt: skip
    examples = (
        Trace((2,), (("match", [1, 2, 3]),)),
        Trace((2,), (("insert", [1, 2], [7]), ("published",), ("match", [1, 2, 3]))),
        Trace((2,), (("insert", [1, 2, 3, 4], [7, 3]), ("match", [1, 2, 3, 4]), ("match", [1, 2, 3]), ("match", [1])),
              why=say("Only whole blocks can be found.")),
        Trace((2,), (("insert", [1, 2, 3, 4, 5], [7, 3]), ("match", [1, 2, 9, 9]), ("match", [9, 9, 3, 4]))),
        Trace((1,), (("insert", [1, 2], [7, 3], "a"), ("match", [1, 2], "a")),
              why=say("match and insert both hand the salt on to keys_of.")),
        Trace((1,), (("insert", [1], [4], "a"), ("match", [1])),
              why=say("Another salt, another tenant: nothing is shared. insert and match both hand the salt on to "
                      "keys_of.")),
        Trace((2,), (("insert", [1, 2, 3], [7, 3]), ("published",)),
              why=say("Three tokens fill one block of 2, not two. A block that is not full cannot be published.")),
        Trace((2,), (("insert", [1, 2, 3, 4, 5, 6], [7]), ("published",), ("match", [1, 2, 3, 4])),
              why=say("More tokens than blocks are fine: only the blocks that are given are published.")),
        Trace((2,), (("insert", [1, 2], [7]), ("insert", [1, 2], [8]), ("published",), ("match", [1, 2])),
              why=say("Two requests have computed the same block. The first publisher keeps the name.")),
        Trace((2,), (("insert", [1, 2], [7]), ("insert", [1, 2, 3, 4], [8, 9]), ("published",),
                     ("match", [1, 2, 3, 4])),
              why=say("Block 8 is a duplicate and stays without a name; block 9 is new and gets one.")),
        Trace((2,), (("insert", [1, 2], [7]), ("insert", [1, 2, 3, 4], [7, 9]), ("published",),
                     ("match", [1, 2, 3, 4]))),
        Trace((2,), (("insert", [1, 2], [7]), ("insert", [5, 6], [7]), ("match", [5, 6]), ("published",),
                     ("match", [1, 2])),
              why=say("Block 7 bears the name of 1, 2, and a block that has a name keeps it: no error, and no second "
                      "name.")),
        Trace((2,), (("insert", [1, 2], [7]), ("remove", 7), ("published",), ("match", [1, 2]), ("insert", [5, 6], [7]),
                     ("match", [5, 6]), ("match", [1, 2]))),
        Trace((2,), (("insert", [1, 2], [7]), ("remove", 8)), why=say("Block 8 has never been published.")),
        Trace((2,), (("insert", [1, 2], [7]), ("insert", [1, 2], [8]), ("remove", 8)),
              why=say("Block 8 was a duplicate and has no name, so there is nothing to forget.")),
        Trace((2,), (("insert", [1, 2], [7]), ("remove", 7), ("remove", 7)), why=say("Block 7 has been removed "
                                                                                     "before.")),
        Trace((2,), (("insert_into_another", [1, 2], [8]), ("remove", 8)),
              why=say("Block 8 has a name, and this index has never heard of it.")),
        Trace((2,), (("insert", [1, 2], [7]), ("insert_into_another", [1, 2], [8]), ("remove", 8), ("match", [1, 2])),
              why=say("Block 8 bears the same name as block 7, and is another block: this index knows 7 by it. The "
                      "question is whether it is this very block (`is`).")),
        Trace((1,), (("insert", [1, 2, 3], [4, 5, 6]), ("remove", 5), ("match", [1, 2, 3]), ("insert", [1, 2], [4, 9]),
                     ("match", [1, 2, 3])), why=say("A gap ends the run; once the gap is closed, what stands behind "
                                                    "it is found again.")),
        Trace((1,), (("insert", [1], [4], "a"), ("match", [1]), ("match", [1], "b"), ("match", [1], "a")),
              why=say("Another salt, another tenant: nothing is shared.")),
    )  # fmt: skip

    class Oracle:
        """Remembers published beginnings as they are, in a list of (salt, tokens, block)."""

        TEXTS = (([1, 1, 1, 1], None), ([1, 1, 2, 2, 1], None), ([2, 1, 1, 1], None), ([1, 1, 1, 1], "a"))

        def __init__(self, block_size):
            self.block_size, self.entries = block_size, []

        def _find(self, tokens, salt):
            return next((b for s, t, b in self.entries if (s, t) == (salt, list(tokens))), None)

        def match(self, tokens, salt=None):
            found = []
            while (stop := (len(found) + 1) * self.block_size) <= len(tokens):
                block = self._find(tokens[:stop], salt)
                if block is None:
                    break
                found.append(block)
            return found

        def insert(self, tokens, ids, salt=None):
            if len(tokens) < len(ids) * self.block_size:
                raise ValueError
            for i, block in enumerate(ids):
                beginning = list(tokens[: (i + 1) * self.block_size])
                if self._find(beginning, salt) is None and block not in [b for _, _, b in self.entries]:
                    self.entries.append((salt, beginning, block))

        def insert_into_another(self, tokens, ids):
            pass

        def remove(self, block_id):
            if block_id not in [b for _, _, b in self.entries]:
                raise ValueError
            self.entries = [entry for entry in self.entries if entry[2] != block_id]

        def published(self):
            return sorted(b for _, _, b in self.entries)

        def ops(self):
            named = self.published()
            unused = [b for b in range(1, 40) if b not in named]
            ops = [("published",)]
            for tokens, salt in self.TEXTS:
                ops.append(("match", tokens, salt))
                num = len(tokens) // self.block_size
                hits = self.match(tokens, salt)
                # As an engine does: the hits, then blocks of one's own; or, computed at the same time, all one's own.
                ops.append(("insert", tokens, hits + unused[: num - len(hits)], salt))
                ops.append(("insert", tokens, unused[:num], salt))
            return [*ops, *(("remove", b) for b in [*named, unused[0]])]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 2)), max_ops=10)

    def describe_init(self, init):
        return f"index = PrefixIndex({init[0]}); blocks are told by their ids"

    def describe(self, op):
        if op[0] != "insert_into_another":
            return super().describe(op)
        return f"another = PrefixIndex(...); another.insert({', '.join(map(repr, op[1:]))})"

    def explain(self, op, expected, got):
        if expected == "ValueError" and op[0] == "insert":
            return say("Raise ValueError, and publish nothing, when the tokens do not fill the blocks.")
        if expected == "ValueError":
            return say("Raise ValueError for a block that this index does not know by its name.")
        if isinstance(got, str) and got.startswith("ref_cnt"):
            return say("The index locks nothing and counts no owners: ref_cnt is not its business.")
        if op[0] == "match" and isinstance(got, str):
            return say("match gives a list of blocks, not of ids or keys, [] if there are none. It changes nothing.")
        if op[0] == "match" and isinstance(got, list) and len(got) > len(expected):
            return say("match found too much: a block under a name that is not its own, or one behind a gap. (K/V "
                       "behind a gap cannot be used: attention needs every token before it.)")
        if op[0] == "match" and isinstance(got, list) and got == expected[:-1] and op[2:] in ((), (None,)):
            return say("The last block is missing. (That one token must be left to compute is not the index's business: "
                       "whoever asks it sees to that, in the next exercise.)")  # fmt: skip
        if op[0] == "match":
            return say("match gives the blocks of the longest published beginning, the first block first.")
        if op[0] == "published":
            return say("A published block bears its key as block_hash, and the dictionary leads from that key to the "
                       "block: both, or neither.")  # fmt: skip
        return None


class Limits(Exercise):
    """Two limits: what may be matched, what may be published."""

    name, points, minutes, section = "limits", 2, 5, "PAV 3.4"
    defines = ("match_limit", "num_publishable")
    ours = {"match_limit": REUSE + "match_limit", "num_publishable": REUSE + "num_publishable"}
    hints = (
        say("match_limit: set one token aside first, then round down to whole blocks."),
        say("num_publishable: a token that has just been sampled is known, but nobody has computed its K and V yet."),
        say("(num_tokens - 1) // block_size * block_size; and num_computed_tokens // block_size."),
    )
    examples = (
        Trace((), (("match_limit", 9, 4),)),
        Trace((), (("match_limit", 8, 4),), why=say("All 8 tokens may be cached, yet somebody must compute one: the "
                                                    "logits of the last token are not in the cache. And a hit is "
                                                    "made of whole blocks.")),
        Trace((), (("match_limit", 7, 4), ("match_limit", 1, 1), ("match_limit", 2, 1), ("match_limit", 3, 16))),
        Trace((), (("num_publishable", 8, 8, 4),)),
        Trace((), (("num_publishable", 16, 15, 4),), why=say("16 tokens are known, 15 have K/V: the last one was "
                                                             "only just sampled. So block 3 is not complete.")),
        Trace((), (("num_publishable", 3000, 512, 16), ("num_publishable", 3000, 0, 16), ("num_publishable", 5, 3, 4))),
    )  # fmt: skip

    class Oracle:
        """By counting."""

        def match_limit(self, num_tokens, block_size):
            return max(k for k in range(0, num_tokens, block_size))

        def num_publishable(self, num_tokens, num_computed_tokens, block_size):
            return sum(end <= num_computed_tokens for end in range(block_size, num_tokens + 1, block_size))

    def traces(self):
        size = st.integers(1, 5)
        matching = st.tuples(st.just("match_limit"), st.integers(1, 20), size)
        publishing = st.builds(lambda known, computed, size: ("num_publishable", known, min(known, computed), size),
                               st.integers(1, 20), st.integers(0, 20), size)  # fmt: skip
        return st.one_of(matching, publishing).map(lambda op: Trace((), (op,)))

    def explain(self, op, expected, got):
        if op[0] == "match_limit" and got == op[1]:
            return say("At least one token must be left to compute: its logits are what the next token is sampled "
                       "from.")
        if op[0] == "match_limit":
            return say("The largest number of tokens that is a multiple of block_size and smaller than num_tokens.")
        return say("Count the blocks whose last slot has K/V already. K/V exists for the computed tokens only.")


class Lru(Exercise):
    """Eviction without a clock: take, touch, release."""

    name, points, minutes, section = "lru", 4, 20, "L33 6.3; PAV 3.2"
    defines = ("take", "touch", "release")
    ours = {name: REUSE + name for name in ("take", "touch", "release")}
    driver = "Moves"
    hints = (
        say("take: count first, then popleft n times. What does a block from the queue still bear, and who must be "
            "told that its contents are about to go?"),
        say("touch: only a block without an owner stands in the queue. release: only a block without an owner goes "
            "back there, and it keeps its name."),
        say("release walks `reversed(table)`: the last block goes to the tail first, so the first one stands behind "
            "it and lives longer."),
    )  # fmt: skip
    examples = (
        Trace((4,), (("take", 2), ("queue",), ("owners",))),
        Trace((3,), (("take", 2), ("release", [1, 2]), ("queue",), ("owners",)),
              why=say("The last block goes first. A child without its parent cannot be reached, so the parent must "
                      "be the later of the two to be evicted.")),
        Trace((2,), (("take", 2), ("publish", [1, 2]), ("release", [1, 2]), ("findable",)),
              why=say("Freed is not forgotten: release leaves block_hash as it is, and take takes it away.")),
        Trace((2,), (("take", 1), ("publish", [1]), ("release", [1]), ("take", 1), ("take", 1), ("findable",)),
              why=say("Block 1 is about to be overwritten: the index must not find it any more.")),
        Trace((3,), (("take", 3), ("publish", [2]), ("release", [2]), ("release", [1, 3]), ("queue",), ("take", 1)),
              why=say("Block 2 was freed first, so it goes first, name or no name: the queue alone decides.")),
        Trace((3,), (("take", 1), ("publish", [1]), ("release", [1]), ("touch", [1]), ("queue",), ("owners",),
                     ("findable",))),
        Trace((3,), (("take", 2), ("touch", [2]), ("owners",), ("queue",), ("release", [1, 2]), ("queue",),
                     ("owners",)),
              why=say("Block 2 has two owners. It comes back when the second one has let go.")),
        Trace((3,), (("take", 1), ("take", 1), ("publish", [1, 2]), ("release", [2]), ("touch", [1, 2]), ("queue",),
                     ("owners",)),
              why=say("Block 1 has an owner and block 2 waits in the queue: decide for each block by itself.")),
        Trace((3,), (("take", 1), ("take", 1), ("publish", [1, 2]), ("release", [2]), ("touch", [2, 1]), ("queue",),
                     ("owners",)),
              why=say("Block 1 has an owner and block 2 waits in the queue: decide for each block by itself.")),
        Trace((3,), (("take", 2), ("touch", [1]), ("release", [1, 2]), ("queue",), ("owners",), ("release", [1]),
                     ("queue",), ("owners",))),
        Trace((2,), (("take", 3), ("queue",), ("owners",))),
        Trace((2,), (("take", 0), ("queue",))),
        Trace((2,), (("take", 1), ("release", [1]), ("release", [1]))),
        Trace((10,), (("links_used_to_touch", 10),)),
        Trace((10,), (("links_used_to_touch", 10_000),)),
    )  # fmt: skip

    class Oracle:
        """Lists of ids: right, and O(n)."""

        def __init__(self, num_blocks):
            self.free = list(range(1, num_blocks + 1))
            self.count = dict.fromkeys(self.free, 0)
            self.named, self.tables = set(), []

        def take(self, n):
            if n > len(self.free):
                raise OutOfBlocks
            taken, self.free = self.free[:n], self.free[n:]
            self.named -= set(taken)
            self.count.update(dict.fromkeys(taken, 1))
            self.tables += [taken] if taken else []
            return taken

        def touch(self, ids):
            for block in ids:
                self.count[block] += 1
            self.free = [block for block in self.free if block not in ids]
            self.tables += [list(ids)] if ids else []

        def release(self, ids):
            for block in ids[::-1]:
                if not self.count[block]:
                    raise ValueError
                self.count[block] -= 1
                if not self.count[block]:
                    self.free.append(block)
            if ids in self.tables:
                self.tables.remove(ids)

        def publish(self, ids):
            self.named |= set(ids)

        def queue(self):
            return list(self.free)

        def owners(self):
            return list(self.count.values())

        def findable(self):
            return sorted(self.named)

        def links_used_to_touch(self, num_blocks):
            return AtMost(20)

        def ops(self):
            cached = [block for block in self.free if block in self.named]
            shared = [block for table in self.tables for block in table if block in self.named]
            ops = [("queue",), ("owners",), ("findable",), *(("take", n) for n in (1, 2, 3, len(self.free) + 1))]
            ops += [("publish", [b for b in table if b not in self.named]) for table in self.tables]
            ops += [("release", table) for table in self.tables]
            ops += [("touch", hits) for hits in (cached[:1], cached[-2:], shared[:1], shared[:1] + cached[:1]) if hits]
            return [op for op in ops if len(op) == 1 or op[1] != []]

    def traces(self):
        return _looked_at(walks(self.Oracle, st.tuples(st.integers(2, 6)), max_ops=14), "queue", "owners", "findable")

    def describe_init(self, init):
        return f"a queue of blocks 1 to {init[0]}, an empty index; blocks are told by their ids"

    def describe(self, op):
        inner = {"take": "queue, index, ", "touch": "queue, ", "release": "queue, "}.get(op[0], "")
        return f"{op[0]}({inner}{', '.join(map(repr, op[1:]))})"

    def explain(self, op, expected, got):
        if isinstance(got, str) and got.startswith("OutOfBlocks, yet"):
            return say("See whether there are enough blocks before you take the first one.")
        if expected == "OutOfBlocks":
            return say("Fewer than n blocks are free: raise OutOfBlocks.")
        if expected == "ValueError":
            return say("A block without an owner cannot be released: raise ValueError, for somebody frees it twice.")
        if isinstance(got, str) and "lost its name" in got:
            return say("Only take takes a name away. touch and release leave block_hash as it is.")
        if isinstance(got, str) and got.startswith("the caller"):
            return say("Walk over the table backwards without reversing or emptying the list itself.")
        if isinstance(got, str) and "free queue" in got:
            return say("In the free queue stand exactly the blocks that nobody owns. A block that has an owner and "
                       "stands there is overwritten while it is read.")  # fmt: skip
        if isinstance(got, str) and "name" in got:
            return say("A block that is taken for new contents must be forgotten: index.remove(block), if it bears a "
                       "name.")  # fmt: skip
        if op[0] == "take":
            return say("Take the blocks at the head of the queue: they were freed longest ago.")
        if op[0] == "owners":
            return say("The numbers of owners of all blocks are wrong: take makes it one, touch adds one, release "
                       "takes one away. What is refused changes nothing.")  # fmt: skip
        if op[0] == "queue" and isinstance(got, list) and sorted(got) == sorted(expected):
            return say("The right blocks wait in the queue, in the wrong order.")
        if op[0] == "queue":
            return say("In the queue stand exactly the blocks that nobody owns.")
        if op[0] == "findable":
            return say("The index must find exactly the blocks whose contents are still good: until somebody takes "
                       "them for something else.")  # fmt: skip
        if op[0] == "links_used_to_touch":
            return say("Taking a block out of the middle must cost the same however long the queue is: "
                       "queue.remove(block) does it by the block's own links.")  # fmt: skip
        return None


class StartRequest(Exercise):
    """A prompt comes in: hits, room, blocks."""

    name, points, minutes, section = "start_request", 4, 22, "L33 6.2-6.3"
    defines = ("start_request",)
    ours = {"start_request": REUSE + "start_request"}
    driver = "StartDriver"
    hints = (
        say("Four lines: match, count, touch, take. The order of the last two matters: a hit that nobody owns is "
            "also the next candidate for eviction."),
        say("Count: the new blocks, plus the hits that stand in the queue (ref_cnt 0), must not be more than "
            "queue.num_free_blocks. A hit in the queue is free now, and not free any more once you touch it."),
        say("hits = index.match(tokens[:match_limit(len(tokens), index.block_size)], salt); num_new = "
            "cdiv(len(tokens), index.block_size) - len(hits); compare; touch; take; return hits + new, len(hits) * "
            "index.block_size."),
    )  # fmt: skip
    examples = (
        Trace((4, 2), (("start", "A", [1, 2, 3]), ("queue",), ("owners",))),
        Trace((2, 2), (("start", "A", [1, 2, 3]), ("queue",))),
        Trace((5, 1), (("start", "A", [1, 2], "x"), ("start", "B", [1, 2], "x"), ("start", "C", [1, 2])),
              why=say("The same salt finds, another one does not: pass the salt on to index.match.")),
        Trace((5, 2), (("start", "A", [1, 2, 3]), ("start", "B", [1, 2, 4]), ("owners",), ("queue",)),
              why=say("B finds A's first block in use: one owner more, and one block fewer to take.")),
        Trace((5, 2), (("start", "A", [1, 2, 3, 4]), ("start", "B", [1, 2, 3, 4])),
              why=say("All four tokens are cached, and one must still be computed: so only the first block is a hit.")),
        Trace((3, 2), (("start", "A", [1, 2, 3]), ("finish", "A"), ("start", "B", [1, 2, 9]), ("queue",), ("owners",)),
              why=say("A has gone, and its first block can still be found in the queue.")),
        Trace((2, 2), (("start", "A", [1, 2, 3]), ("start", "B", [4, 5]), ("owners",), ("queue",)),
              why=say("Nothing is free: say None, and change nothing.")),
        Trace((3, 1), (("start", "A", [1, 2]), ("finish", "A"), ("start", "B", [1, 2, 3, 4]), ("owners",), ("queue",))),
        Trace((2, 2), (("start", "A", [1, 2, 3, 4]), ("finish", "A"), ("start", "B", [1, 2, 3, 4])),
              why=say("Both blocks are cached, one of them may be used: count the hits after match_limit_, not before. "
                      "The other one is free, and room enough.")),
        Trace((3, 1), (("start", "A", [1]), ("start", "B", [9, 8]), ("finish", "A"), ("finish", "B"),
                       ("start", "C", [1, 2, 3, 4])),
              why=say("A refusal changes nothing. Touched and released again, a hit would stand at the tail of the "
                      "queue, as if somebody had used it. Count first.")),
        Trace((3, 1), (("start", "A", [1, 2]), ("start", "B", [1, 3]), ("queue",)),
              why=say("B's hit is in use and costs no free block, and one block is enough for the other token.")),
        Trace((3, 1), (("start", "A", [1, 2, 3]), ("finish", "A"), ("start", "B", [8]), ("start", "C", [1, 2, 9, 9]),
                       ("owners",), ("queue",)),
              why=say("The hits of C are 2 of the 2 free blocks. So C finds two of its four blocks and no room for "
                      "the others: None, and no owner has changed.")),
        Trace((2, 1), (("start", "A", [1]), ("start", "B", [9]), ("finish", "A"), ("finish", "B"),
                       ("start", "C", [1, 5])),
              why=say("Hits that stand in the queue must be touched before new blocks are taken, or they are evicted "
                      "for the very request that has found them.")),
        Trace((3, 1), (("start", "A", [1, 2]), ("start", "B", [7]), ("finish", "A"), ("start", "C", [1, 5])),
              why=say("The hit of C stands at the tail of the queue; the block before it is taken.")),
        Trace((4, 1), (("start", "A", [1, 2], "x"), ("start", "B", [1, 2], "y"), ("owners",))),
    )  # fmt: skip

    class Oracle:
        """Lists of ids, and beginnings kept as they are."""

        TEXTS = ([1], [1, 1], [1, 1, 1, 2], [1, 1, 2, 2, 1], [2, 2, 2])

        def __init__(self, num_blocks, block_size):
            self.size, self.free, self.known, self.running = block_size, list(range(1, num_blocks + 1)), {}, {}
            self.num_blocks, self.num_started = num_blocks, 0

        def _owned(self):
            return [block for table in self.running.values() for block in table]

        def start(self, name, tokens, salt=None):
            self.num_started += 1
            beginnings = [(salt, tuple(tokens[:end])) for end in range(self.size, len(tokens) + 1, self.size)]
            table = []
            for beginning in beginnings:
                if beginning not in self.known or len(beginning[1]) >= len(tokens):
                    break
                table.append(self.known[beginning])
            num_hits = len(table)
            rest = [block for block in self.free if block not in table]
            while len(table) * self.size < len(tokens):
                if not rest:
                    return None
                table.append(rest.pop(0))
            self.free = rest
            self.known = {b: block for b, block in self.known.items() if block not in table[num_hits:]}
            for beginning, block in zip(beginnings, table, strict=False):
                if block not in self.known.values():
                    self.known.setdefault(beginning, block)
            self.running[name] = table
            return [list(table), num_hits * self.size]

        def finish(self, name):
            table = self.running.pop(name)
            self.free += [block for block in reversed(table) if block not in self._owned()]

        def queue(self):
            return list(self.free)

        def owners(self):
            owned = self._owned()
            return [owned.count(block) for block in range(1, self.num_blocks + 1)]

        def ops(self):
            name = "ABCDEFGHIJKLMNOP"[self.num_started % 16]
            ops = [("queue",), ("owners",), *(("finish", running) for running in self.running)]
            if name not in self.running:
                ops += [("start", name, tokens) for tokens in self.TEXTS] + [("start", name, self.TEXTS[2], "a")]
            return ops

    def traces(self):
        return _looked_at(walks(self.Oracle, st.tuples(st.integers(2, 7), st.integers(1, 2)), max_ops=12),
                          "queue", "owners")  # fmt: skip

    def describe_init(self, init):
        return f"{init[0]} blocks of {init[1]}; tables are told by block ids; what starts is computed at once"

    def describe(self, op):
        if op[0] != "start":
            return f"{op[0]}({', '.join(map(repr, op[1:]))})"
        salt = f", {op[3]!r}" if len(op) > 3 else ""
        return f"{op[1]} = start_request(queue, index, {op[2]}{salt})"

    def explain(self, op, expected, got):
        if op[0] == "start" and got == "a block was published":
            return say("Publish nothing here: the new blocks are known, and nobody has computed them yet.")
        if op[0] == "start" and expected is None and isinstance(got, str) and got.startswith("None, "):
            return say("It does not fit, and a refusal changes nothing, not even the order of the queue.")
        if op[0] == "start" and expected is None and isinstance(got, str) and got.startswith("(None"):
            return say("Return None itself, not a pair with None in it.")
        if op[0] == "start" and expected is None:
            return say("It does not fit: return None, before anything is touched or taken. A hit that stands in the "
                       "queue is free and needed at once: it counts among the free blocks that the request "
                       "needs.")  # fmt: skip
        if op[0] == "start" and (got is None or isinstance(got, str) and got.startswith(("None, ", "OutOfBlocks"))):
            return say("It fits. A hit that somebody owns costs no free block, and exactly as many free blocks as are "
                       "needed are enough.")  # fmt: skip
        if op[0] == "start" and isinstance(got, str):
            return say("Return the pair (table, num_cached): a list of blocks, and a number of tokens.")
        if op[0] == "start" and isinstance(got, list) and len(got[0]) != len(set(got[0])):
            return say("A block stands twice in the table: a hit was taken for new contents. Touch the hits, then take.")
        if op[0] == "start" and isinstance(got, list) and got[1] < expected[1]:
            return say("More tokens are cached than you found, or they were counted in blocks.")
        if op[0] == "start" and isinstance(got, list) and got[1] != expected[1]:
            return say("The number of tokens found cached is wrong: the hits' blocks times block_size, and never the "
                       "whole prompt.")  # fmt: skip
        if op[0] == "start":
            return say("The table is the hits, in order, then new blocks from the head of the queue: enough for all "
                       "tokens.")
        if op[0] == "owners":
            return say("The numbers of owners are wrong. A request that does not fit must change nothing, and one "
                       "that does owns every block of its table.")  # fmt: skip
        return say("The queue is wrong: hits leave it, new blocks come from its head, and a refused request leaves "
                   "it as it was.")


class PrefillSeconds(Exercise):
    """What 99% saved is in seconds."""

    name, points, minutes, section = "prefill_seconds", 2, 5, "L33 6.2"
    defines = ("prefill_seconds",)
    ours = {"prefill_seconds": REUSE + "prefill_seconds"}
    hints = (
        say("Two clocks run at the same time, one for the arithmetic and one for reading the weights. The slower one "
            "decides."),
        say("Arithmetic: 2 FLOPs a parameter for each token that is NOT cached. Reading: 2 bytes a parameter, once, "
            "whether one token is computed or three thousand."),
        say("max(2 * num_parameters * (num_tokens - num_cached) / flops, 2 * num_parameters / bandwidth)"),
    )  # fmt: skip
    examples = (
        Trace((), (("prefill_seconds", 1000, 0, 1e9, 1e12, 1e12),)),
        Trace((), (("prefill_seconds", 1000, 900, 1e9, 1e12, 1e12),)),
        Trace((), (("prefill_seconds", 1000, 999, 1e9, 1e12, 1e11),),
              why=say("One token is left, and the weights are read all the same: 2e9 bytes at 1e11 bytes a second.")),
        Trace((), (("prefill_seconds", 1000, 0, 1e9, 1e13, 1e9),)),
    )  # fmt: skip

    class Oracle:
        def prefill_seconds(self, num_tokens, num_cached, num_parameters, flops, bandwidth):
            arithmetic = len(range(num_cached, num_tokens)) * num_parameters * 2 / flops
            reading = num_parameters * 2 / bandwidth
            return Approx(sorted([arithmetic, reading])[1], rel=1e-6)

    def traces(self):
        size = st.sampled_from([1e9, 7e9, 7e10])
        speed = st.sampled_from([1e11, 1e12, 1e14])
        return st.builds(lambda n, cached, *rest: Trace((), (("prefill_seconds", n, min(cached, n - 1), *rest),)),
                         st.integers(1, 4000), st.integers(0, 4000), size, speed, speed)  # fmt: skip

    def describe(self, op):
        return f"prefill_seconds({', '.join(f'{value:g}' for value in op[1:])})"

    def explain(self, op, expected, got):
        return say("The longer of two times: arithmetic for the tokens that are not cached, and one reading of all "
                   "weights.")


class NewKeys(Exercise):
    """Hash a growing text once."""

    name, points, minutes, section, stretch = "new_keys", 3, 12, "PAV 3.4", True
    defines = ("new_keys",)
    ours = {"new_keys": "kvlab.prefix.hash_chain:new_keys"}
    driver = "GrowingDriver"
    hints = (
        say("What must be remembered to go on with a chain? How many blocks have a key, and what the last key was."),
        say("The cursor can be that pair. None stands for (0, the root)."),
        say("done, parent = cursor or (0, root); loop over blocks from `done` on; return the new keys and (number of "
            "full blocks, parent)."),
    )  # fmt: skip
    examples = (
        Trace((2, None), (("grow", [1, 2, 3, 4]),)),
        Trace((2, None), (("grow", [1]), ("grow", [2]), ("grow", [3]), ("grow", [4, 5]))),
        Trace((2, None), (("grow", [1, 2]), ("grow", []), ("grow", [1, 2]))),
        Trace((2, None), (("grow", [1, 2]), ("grow", [3, 4]), ("again", [1, 2, 3, 4], None)),
              why=say("The same text hashed in one go must give the same keys.")),
        Trace((1, "a"), (("grow", [1]), ("grow", [2]), ("again", [1, 2], "b"), ("again", [1, 2], "a"))),
        Trace((16, None), (("reads", 160),)),
        Trace((16, None), (("reads", 8000),)),
    )

    class Oracle:
        def __init__(self, block_size, salt):
            self.block_size, self.salt, self.tokens, self.seen = block_size, salt, [], {}

        def _keys(self, tokens, salt, start):
            ends = range((start + 1) * self.block_size, len(tokens) + 1, self.block_size)
            return [self.seen.setdefault((salt, tuple(tokens[:end])), len(self.seen) + 1) for end in ends]

        def grow(self, tokens):
            start = len(self.tokens) // self.block_size
            self.tokens += tokens
            return self._keys(self.tokens, self.salt, start)

        def again(self, tokens, salt):
            return self._keys(tokens, salt, 0)

        def reads(self, num_tokens):
            return AtMost(4 * self.block_size)

    def traces(self):
        tokens = st.lists(st.integers(1, 2), max_size=4)
        salts = st.sampled_from([None, "a"])
        op = st.one_of(st.tuples(st.just("grow"), tokens), st.tuples(st.just("again"), tokens, salts))
        return st.builds(lambda size, salt, ops: Trace((size, salt), ops), st.integers(1, 3), salts,
                         st.lists(op, min_size=1, max_size=6))  # fmt: skip

    def describe_init(self, init):
        return f"block_size = {init[0]}, salt = {init[1]!r}; the same number below means the same key"

    def describe(self, op):
        if op[0] == "grow":
            return f"tokens += {op[1]}; new_keys(tokens, block_size, salt, cursor)"
        if op[0] == "again":
            return f"new_keys({op[1]}, block_size, {op[2]!r})"
        return f"reads for one more block after {op[1]} tokens"

    def explain(self, op, expected, got):
        if op[0] == "reads":
            return say("Only the new block's tokens need to be read: the cursor remembers the rest.")
        if isinstance(got, list) and len(got) != len(expected):
            return say("Give the keys of those full blocks that had none at the last call, and of no others.")
        return say("A chain that is continued must give the keys that one long chain gives.")
