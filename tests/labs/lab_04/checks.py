"""Lab 04, copy-on-write: its exercises."""

import re
from collections import Counter

from hypothesis import strategies as st

from kvlab.blocks import OutOfBlocks
from kvlab.grade import Exercise, LabInfo, Trace, calls, say, walks

LAB = LabInfo(title=say("Copy-on-write"), sections="L33 2.4; PAV 3.4", before=("03",))


def cdiv(a, b):
    return (a + b - 1) // b


def count(number, what):
    """1 block, 2 blocks."""
    return f"{number} {what}{'s' * (number != 1)}"


class Books:
    """The slow and obvious pool: owners are counted in the tables anew each time, the queue is a list."""

    def __init__(self, num_blocks):
        self.queue = list(range(1, num_blocks + 1))
        self.tables = {}
        self.named = set()

    def owners(self):
        return Counter(block for table in self.tables.values() for block in table)

    def take(self, n):
        if n > len(self.queue):
            raise OutOfBlocks
        taken, self.queue = self.queue[:n], self.queue[n:]
        self.named -= set(taken)
        return taken

    def dropped(self, blocks):
        owners = self.owners()
        self.queue += [block for block in blocks if not owners[block]]

    def told(self, name):
        return f"{name} = {self.tables[name]}"

    def books(self):
        owners = sorted(self.owners().items())
        parts = [self.told(name) for name in sorted(self.tables)]
        parts.append("owners " + (" ".join(f"{block}:{count}" for block, count in owners) or "none"))
        if self.named:
            parts.append("named " + " ".join(map(str, sorted(self.named))))
        return "; ".join([*parts, "free " + (" ".join(map(str, self.queue)) or "none")])

    def start(self, name, num_blocks):
        self.tables[name] = self.take(num_blocks)
        return self.books()

    def share(self, parent, child):
        self.tables[child] = list(self.tables[parent])
        return self.books()

    def grow(self, name):
        self.tables[name] += self.take(1)
        return self.books()

    def publish(self, name, index):
        self.named.add(self.tables[name][index])
        return self.books()

    def give_back(self, name):
        self.dropped(self.tables.pop(name)[::-1])
        return self.books()

    def writable(self, block):
        return self.owners()[block] == 1 and block not in self.named

    def next_name(self):
        return next((name for name in "ABCD" if name not in self.tables), None)

    def ops(self):
        new, ops = self.next_name(), []
        if new:
            ops += [("start", new, n) for n in (1, 2) if n <= len(self.queue)]
        return ops + [("give_back", name) for name in self.tables]


def first_difference(expected, got):
    """The label (table, owners, named, free, copy) and the two parts of the books that differ first."""
    if not isinstance(got, str) or not isinstance(expected, str):
        return None, expected, got
    ours, theirs = expected.split("; "), got.split("; ")
    for mine, yours in zip(ours, theirs, strict=False):
        if mine != yours:
            return mine.split(" ")[0], mine, yours
    return (ours[len(theirs)] if len(ours) > len(theirs) else "more").split(" ")[0], ours[-1], theirs[-1]


def explain_stranger(got):
    """For books that show something in a table that is no block: `A = [1, a list]`."""
    if isinstance(got, str) and (found := re.search(r"[\[ ](an? \w+)[,\]]", got)):
        if found[1] == "a list":
            return say("The table holds a list where a block belongs. pool.get_new_blocks(n) gives a list, also for "
                       "n = 1: take the block out of it, or extend the table by it.")  # fmt: skip
        return say("The table holds {what} where a block belongs: a table is a list of the blocks themselves, not of "
                   "their ids.", what=found[1])  # fmt: skip
    return None


def copied(part):
    """The two numbers of `copy 3 -> 7`."""
    return tuple(map(int, re.findall(r"\d+", part)))


def explain_books(label):
    if label == "owners":
        return say("ref_cnt must be the number of tables that hold the block: no more, no fewer.")
    if label == "free":
        return say("A block is in the free queue exactly when no table holds it. Which calls of the pool keep that "
                   "true?")
    if label == "named":
        return say("A published block keeps its name until the pool hands it out again.")
    return None


class SharingCost(Exercise):
    """n samples of one prompt, on paper."""

    name, points, minutes, section = "sharing_cost", 2, 15, "L33 2.4"
    defines = ("sharing_cost",)
    ours = {"sharing_cost": "kvlab.blocks.branches:sharing_cost"}
    hints = (
        say("A sample's table has as many entries with sharing as without. How many of those entries can name the same "
            "block in every table?"),
        say("Only blocks with nothing but prompt tokens in them stay shared: num_prompt // block_size of them. If "
            "nobody has written yet, all blocks are shared."),
        say("A copy happens only if the prompt's last block is not full. All but one of the n samples make one: the "
            "last writer is the only owner left."),
    )  # fmt: skip
    examples = (
        Trace((), (("sharing_cost", 10, 1, 4, 4),)),
        Trace((), (("sharing_cost", 12, 1, 4, 4),)),
        Trace((), (("sharing_cost", 10, 0, 4, 4),)),
        Trace((), (("sharing_cost", 10, 2, 1, 4),)),
        Trace((), (("sharing_cost", 3, 6, 2, 4),)),
        Trace((), (("sharing_cost", 1000, 200, 4, 16),)),
    )

    class Oracle:
        """Plays it out: a block is shared as long as the tokens in it, and all before it, are the same."""

        def sharing_cost(self, num_prompt, num_output, n, block_size):
            samples = [[0] * num_prompt + [i + 1] * num_output for i in range(n)]
            blocks = [(len(s[: k + block_size]), tuple(s[: k + block_size]))
                      for s in samples for k in range(0, len(s), block_size)]  # fmt: skip
            mixed = {tuple(s[:num_prompt // block_size * block_size + block_size]) for s in samples}
            copies = len(mixed) - 1 if num_prompt % block_size and num_output else 0
            return [len(blocks), len(set(blocks)), copies]

    def traces(self):
        return calls("sharing_cost", st.integers(1, 20), st.integers(0, 12), st.integers(1, 5), st.integers(1, 6))

    def describe(self, op):
        return f"sharing_cost(num_prompt={op[1]}, num_output={op[2]}, n={op[3]}, block_size={op[4]})"

    def explain(self, op, expected, got):
        _, num_prompt, num_output, n, block_size = op
        if not isinstance(got, list) or len(got) != 3:
            return say("Return three whole numbers: blocks with copying, blocks with sharing, copies.")
        if not all(type(number) is int for number in got):
            return say("Blocks are counted in whole numbers: 12, not 12.0. Divide with //, and round up with "
                       "-(-a // b).")
        if got[0] != expected[0]:
            return say("With copying, each sample ({n} in all) holds every block of its {tokens}, also the last one, "
                       "full or not.", n=n, tokens=count(num_prompt + num_output, "token"))  # fmt: skip
        if got[2] != expected[2]:
            if num_output == 0:
                return say("Nobody has written yet, so nothing has been copied: a fork copies nothing.")
            if num_prompt % block_size == 0:
                return say("The prompt's last block is full: each sample writes its first token into a new block, and "
                           "nothing is copied.")  # fmt: skip
            return say("The prompt's last block has {owners}. Each writer but the last takes a copy and leaves; when "
                       "one owner is left it writes in place.", owners=count(n, "owner"))  # fmt: skip
        if num_output == 0:
            return say("Before anybody writes, all tables name the same blocks: also the last one, full or not.")
        return say("Shared for good: the blocks that hold nothing but prompt, here {full}. From there on each sample "
                   "has blocks of its own.", full=num_prompt // block_size)  # fmt: skip


class Fork(Exercise):
    """Fork: a child that shares every block."""

    name, points, minutes, section = "fork", 2, 5, "L33 2.4"
    defines = ("fork",)
    ours = {"fork": "kvlab.blocks.sharing:fork"}
    part = {"fork": "fork"}
    driver = "ForkDriver"
    hints = (
        say("Two things change: the books say that each block has one owner more, and there is one list more."),
        say("The pool has a method that adds an owner to each of some blocks: touch."),
        say("Return a new list. If you return the parent's own, what the child appends appears in the parent's table."),
    )  # fmt: skip
    examples = (
        Trace((2,), (("start", "A", 1), ("fork", "A", "B"))),
        Trace((3,), (("start", "A", 2), ("fork", "A", "B"))),
        Trace((3,), (("start", "A", 1), ("fork", "A", "B"), ("grow", "B"))),
        Trace((3,), (("start", "A", 1), ("fork", "A", "B"), ("grow", "A"))),
        Trace((3,), (("start", "A", 2), ("fork", "A", "B"), ("fork", "B", "C"), ("give_back", "A"), ("give_back", "C"),
                     ("give_back", "B"))),
        Trace((3,), (("start", "A", 2), ("publish", "A", 0), ("fork", "A", "B"), ("give_back", "A"), ("start", "C", 1)),
              why=say("A published block is shared like any other: the child is one owner more.")),
    )  # fmt: skip

    class Oracle(Books):
        def fork(self, parent, child):
            return self.share(parent, child)

        def ops(self):
            new, ops = self.next_name(), super().ops()
            if new:
                ops += [("fork", name, new) for name in self.tables]
            ops += [("publish", name, 0) for name, table in self.tables.items() if table[0] not in self.named]
            return ops + [("grow", name) for name in self.tables if self.queue]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 6)), max_ops=10)

    def describe_init(self, init):
        return f"a pool of {count(init[0], 'block')}"

    def explain(self, op, expected, got):
        label, _, yours = first_difference(expected, got)
        if stranger := explain_stranger(got):
            return stranger
        if op[0] == "grow":
            return say("A table has grown that should not have: parent and child must be two lists, not one.")
        if isinstance(yours, str) and yours.endswith("returned"):
            return say("fork returns the child's table: a list of blocks.")
        if op[0] == "fork" and label == op[2]:
            return say("The child's table names the same blocks as the parent's, in the same order: nothing is copied "
                       "at a fork, and no block is taken from the pool.")  # fmt: skip
        return explain_books(label)


class EnsureWritable(Exercise):
    """The write barrier."""

    name, points, minutes, section = "ensure_writable", 4, 15, "L33 2.4"
    defines = ("ensure_writable",)
    ours = {"ensure_writable": "kvlab.blocks.sharing:ensure_writable"}
    part = {"ensure_writable": "ensure_writable"}
    driver = "BarrierDriver"
    hints = (
        say("Two reasons forbid a write: somebody else reads the block (ref_cnt), or somebody may find it by its name "
            "(block_hash)."),
        say("When it may not be written: take a new block, put it into the table, give the old one back. Which of the "
            "first and the last must come first if the pool may be empty?"),
        say("[new] = pool.get_new_blocks(1) first: it raises OutOfBlocks before anything has changed. Then the table, "
            "then pool.free_blocks([old]). Return (old, new)."),
    )  # fmt: skip
    examples = (
        Trace((2,), (("start", "A", 1), ("ensure_writable", "A", 0))),
        Trace((2,), (("start", "A", 1), ("share", "A", "B"), ("ensure_writable", "B", 0))),
        Trace((3,), (("start", "A", 2), ("share", "A", "B"), ("ensure_writable", "B", 1))),
        Trace((4,), (("start", "A", 3), ("share", "A", "B"), ("ensure_writable", "B", 0))),
        Trace((2,), (("start", "A", 1), ("share", "A", "B"), ("ensure_writable", "A", 0), ("ensure_writable", "B", 0)),
              why=say("The last owner left writes in place.")),
        Trace((2,), (("start", "A", 1), ("publish", "A", 0), ("ensure_writable", "A", 0)),
              why=say("The block has one owner, but it is published: a prompt that comes later will find it by its "
                      "name and read it.")),
        Trace((1,), (("start", "A", 1), ("share", "A", "B"), ("ensure_writable", "B", 0), ("books",))),
        Trace((1,), (("start", "A", 1), ("publish", "A", 0), ("ensure_writable", "A", 0), ("books",)),
              why=say("The pool has no other block. If you give the old one back first, it is handed to you again: "
                      "then source and target of the copy are one block, and its name is gone.")),
    )  # fmt: skip

    class Oracle(Books):
        def ensure_writable(self, name, index):
            block = self.tables[name][index]
            if self.writable(block):
                return f"no copy; {self.books()}"
            [new] = self.take(1)
            self.tables[name][index] = new
            self.dropped([block])
            return f"copy {block} -> {new}; {self.books()}"

        def ops(self):
            new, ops = self.next_name(), [("books",), *super().ops()]
            for name, table in self.tables.items():
                if new:
                    ops.append(("share", name, new))
                for index, block in enumerate(table):
                    ops.append(("ensure_writable", name, index))
                    if block not in self.named:
                        ops.append(("publish", name, index))
            return ops

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 5)), max_ops=10)

    def describe_init(self, init):
        return f"a pool of {count(init[0], 'block')}"

    def describe(self, op):
        if op[0] == "ensure_writable":
            return f"ensure_writable(pool, table {op[1]}, {op[2]})"
        return super().describe(op)

    def explain(self, op, expected, got):
        if expected == "OutOfBlocks":
            return say("The block may not be written and the pool is empty: OutOfBlocks must come out.")
        if op[0] == "books":
            return say("The call before it raised OutOfBlocks, yet something has changed. Ask the pool for the new "
                       "block before you touch anything else.")  # fmt: skip
        label, mine, yours = first_difference(expected, got)
        if isinstance(yours, str) and yours.startswith("returned"):
            return say("Return None, or the pair of blocks (old, new): a tuple of two blocks, not of their ids or of "
                       "lists.")  # fmt: skip
        if stranger := explain_stranger(got):
            return stranger
        if mine == "no copy":
            return say("The block at index {index} has one owner and no name: write in place. A copy would cost a "
                       "block and gain nothing.", index=op[2])  # fmt: skip
        if label == "copy" and yours == "no copy":
            return say("The block at index {index} may not be written: look at its owners and at its name in the books "
                       "above.", index=op[2])  # fmt: skip
        if label == "copy":
            (old, new), (source, target) = copied(mine), copied(yours)
            if (source, target) == (new, old):
                return say("The pair is (old, new): the contents go from the block that was in the table to the one "
                           "that is there now.")  # fmt: skip
            if source != old:
                return say("At index {index} stands block {old}: that is the one to replace, and the first of the "
                           "pair. Do you look at `index`?", index=op[2], old=old)  # fmt: skip
            return say("The second of the pair is the block that the pool has just handed out, here {new}.", new=new)
        if label == "owners":
            return say("The new block has one owner. The old one has one fewer than before: this table has left it.")
        if label == op[1]:
            return say("The table must name the new block at this index, and only there.")
        return explain_books(label)


class MakeRoom(Exercise):
    """Room for the next tokens, all or nothing."""

    name, points, minutes, section = "make_room", 4, 25, "L33 2.4"
    defines = ("make_room",)
    ours = {"make_room": "kvlab.blocks.branches:make_room"}
    driver = "RoomDriver"
    hints = (
        say("Positions start to start + num_tokens - 1 fall into logical blocks start // block_size to "
            "(start + num_tokens - 1) // block_size. Some are in the table already, the others are new."),
        say("Count first, change later: one block for each that is not in the table yet, and one for each that is and "
            "may not be written. Compare the sum with pool.get_num_free_blocks() once."),
        say("If it fits: barrier(pool, table, index) for those that stand, keeping what is not None; then "
            "table.extend(pool.get_new_blocks(number of new ones))."),
    )  # fmt: skip
    examples = (
        Trace((2, 4), (("start", "A", 3), ("write", "A", 1))),
        Trace((2, 4), (("start", "A", 4), ("write", "A", 1))),
        Trace((3, 4), (("start", "A", 3), ("write", "A", 6))),
        Trace((2, 4), (("start", "A", 2), ("share", "A", "B"), ("write", "A", 1), ("write", "B", 1))),
        Trace((3, 4), (("start", "A", 4), ("share", "A", "B"), ("write", "B", 1)),
              why=say("The shared block is full and nobody writes into it: nothing is copied.")),
        Trace((2, 4), (("start", "A", 2), ("share", "A", "B"), ("write", "B", 3), ("write", "B", 2)),
              why=say("3 more tokens need the copy of a block and a new one: two blocks, and one is free. 2 more need "
                      "the copy alone.")),
        Trace((1, 4), (("start", "A", 4), ("write", "A", 1))),
        Trace((1, 4), (("start", "A", 2), ("share", "A", "B"), ("write", "B", 1))),
        Trace((2, 4), (("start", "A", 4), ("publish", "A"), ("go_back", "A", 2), ("write", "A", 1)),
              why=say("A has gone back into a full block that is published: it writes where others may read.")),
        Trace((1, 4), (("start", "A", 4), ("publish", "A"), ("go_back", "A", 2), ("write", "A", 1)),
              why=say("The published block must be copied, and there is no block for the copy.")),
        Trace((3, 2), (("start", "A", 1), ("grow", "A"), ("write", "A", 2)),
              why=say("A block that is in the table already, empty, need not be taken again.")),
        Trace((4, 4), (("start", "A", 2), ("share", "A", "B"), ("write", "B", 3)),
              why=say("A copy and a new block, and both fit: the copy takes its block first.")),
        Trace((6, 4), (("start", "A", 8), ("share", "A", "B"), ("step_back", "B", 2), ("write", "B", 3)),
              why=say("The 3 tokens fall into two blocks, and both are shared: each is copied, the lower one first.")),
        Trace((8, 2), (("start", "A", 6), ("share", "A", "B"), ("step_back", "B", 1), ("write", "B", 7)),
              why=say("Three shared blocks in the way of the write, and a new one behind them.")),
        Trace((3, 2), (("start", "A", 4), ("share", "A", "B"), ("step_back", "B", 1), ("write", "B", 2), ("books",)),
              why=say("Two copies, and one block is free: nothing may change.")),
        Trace((6, 4), (("start", "A", 12), ("share", "A", "B"), ("step_back", "B", 5), ("write", "B", 2)),
              why=say("The table reaches further than the write: what no new token falls into stays as it is, before "
                      "the write and behind it.")),
        Trace((4, 4), (("start", "A", 9), ("step_back", "A", 2), ("write", "A", 1)),
              why=say("The table reaches further than the write: no block is missing, and none is too many.")),
        Trace((8, 2), (("start", "A", 4), ("publish", "A"), ("step_back", "A", 1), ("write", "A", 5))),
    )  # fmt: skip

    class Oracle(Books):
        def __init__(self, num_blocks, block_size):
            super().__init__(num_blocks)
            self.block_size, self.lengths = block_size, {}

        def told(self, name):
            return f"{super().told(name)} with {count(self.lengths[name], 'token')}"

        def start(self, name, num_tokens):
            self.lengths[name] = num_tokens
            return super().start(name, cdiv(num_tokens, self.block_size))

        def share(self, parent, child):
            self.lengths[child] = self.lengths[parent]
            return super().share(parent, child)

        def publish(self, name):
            self.named |= set(self.tables[name][: self.lengths[name] // self.block_size])
            return self.books()

        def go_back(self, name, num_tokens):
            keep = cdiv(num_tokens, self.block_size)
            gone = self.tables[name][keep:]
            self.tables[name] = self.tables[name][:keep]
            self.lengths[name] = num_tokens
            self.dropped(gone[::-1])
            return self.books()

        def step_back(self, name, num_tokens):
            self.lengths[name] = num_tokens
            return self.books()

        def write(self, name, num_tokens):
            """One position after the other on a copy of the books; they are kept if it came to the end."""
            table, queue, named = list(self.tables[name]), list(self.queue), set(self.named)
            copies = []
            try:
                for position in range(self.lengths[name], self.lengths[name] + num_tokens):
                    index = position // self.block_size
                    if index == len(self.tables[name]):
                        self.tables[name] += self.take(1)
                    block = self.tables[name][index]
                    if not self.writable(block):
                        [new] = self.take(1)
                        self.tables[name][index] = new
                        copies.append((block, new))
            except OutOfBlocks:
                self.tables[name], self.queue, self.named = table, queue, named
                return f"None; {self.books()}"
            self.dropped([block for block, _ in copies])
            self.lengths[name] += num_tokens
            return "; ".join([*([f"copy {a} -> {b}" for a, b in copies] or ["no copy"]), self.books()])

        def ops(self):
            new, ops = self.next_name(), []
            if new:
                lengths = (3,) if self.tables else (6, 9, 3)
                ops += [("start", new, n) for n in lengths if cdiv(n, self.block_size) <= len(self.queue)]
            for name, length in self.lengths.items():
                if name not in self.tables:
                    continue
                ops += [("write", name, n) for n in (1, 2, 5)]
                if new:
                    ops += 3 * [("share", name, new)]
                if length >= self.block_size:
                    ops.append(("publish", name))
                if length > 1:
                    ops.append(("go_back", name, length - 1))
                    ops += 2 * [("step_back", name, n) for n in sorted({1, length // 2})]
                if self.queue and len(self.tables[name]) * self.block_size <= length + self.block_size:
                    ops.append(("grow", name))
                if not new:
                    ops.append(("give_back", name))
            return ops

    def traces(self):
        # Mostly pools with room: what fits has more ways to go wrong than what does not.
        num_blocks = st.sampled_from((12, 20, 30, 6, 4))
        return walks(self.Oracle, st.tuples(num_blocks, st.integers(1, 4)), max_ops=12)

    def describe_init(self, init):
        return f"a pool of {count(init[0], 'block')} of {count(init[1], 'token')}"

    def describe(self, op):
        if op[0] == "write":
            return f"make_room for {count(op[2], 'more token')} of {op[1]}"
        if op[0] == "grow":
            return f"grow({op[1]!r}) by one empty block"
        if op[0] == "step_back":
            return f"{op[1]} goes back to {count(op[2], 'token')} and keeps its table"
        return super().describe(op)

    def explain(self, op, expected, got):
        label, mine, yours = first_difference(expected, got)
        if isinstance(yours, str) and yours.startswith("returned"):
            return say("Return the list of pairs (old, new), empty if nothing is to be copied, or None. Where the "
                       "barrier gave None there is no pair.")  # fmt: skip
        if stranger := explain_stranger(got):
            return stranger
        if mine == "None":
            return say("It does not fit: copies and new blocks together are more than the pool has free. Return None, "
                       "and change nothing.")  # fmt: skip
        if yours == "None":
            return say("It fits: one block for each copy and one for each block that is missing, and so many are free. "
                       "What is in the table and writable needs none, nor does a full block that nothing is written "
                       "into.")  # fmt: skip
        if expected.startswith("None"):
            return say("None was right, but the books have changed on the way. Count everything before you change "
                       "anything.")  # fmt: skip
        if mine == "no copy":
            return say("No block that this write touches is shared or published: nothing is to be copied.")
        pairs, theirs = ([copied(part) for part in told.split("; ") if part.startswith("copy")]
                         for told in (expected, got))  # fmt: skip
        if theirs and sorted(pairs) == sorted((old, new) for new, old in theirs):
            return say("A pair is (old, new): the contents go from the first to the second.")
        if theirs and sorted(old for old, _ in pairs) == sorted(old for old, _ in theirs):
            return say("The right blocks are copied, but in another order than asked: first the copies, lowest index "
                       "first, then the new blocks.")  # fmt: skip
        if len(theirs) > len(pairs):
            return say("A block is copied that no new token falls into: the write touches indices start // block_size "
                       "to (start + num_tokens - 1) // block_size.")  # fmt: skip
        if label == "copy" and expected.split("; ", 1)[-1] == got.split("; ", 1)[-1]:
            return say("The table has a new block now, but you do not say so: return the pair (old, new), or nobody "
                       "moves the contents.")  # fmt: skip
        if label == "copy":
            return say("A block that this write touches is shared or published, and it has not been copied. A write "
                       "may touch several that are in the table: look at each.")  # fmt: skip
        if label == op[1]:
            return say("The table must cover all positions up to the last new token, with no block more than that "
                       "needs.")
        return explain_books(label)


class BeamStep(Exercise):
    """One step of a beam search, in tables."""

    name, points, minutes, section = "beam_step", 3, 10, "L33 2.4"
    defines = ("beam_step",)
    ours = {"beam_step": "kvlab.blocks.branches:beam_step"}
    driver = "BeamDriver"
    hints = (
        say("In whose hands is a block between the moment when the old beams let go of it and the moment when the new "
            "ones take it? Such a moment must not be."),
        say("Fork first, for every new beam. Then give every old table back. What lives on never has fewer than one "
            "owner."),
        say("following = [share(pool, tables[parent]) for parent in parents]; then pool.free_blocks(reversed(table)) "
            "for each old table, the parents' too: their place has been taken by the forks."),
    )  # fmt: skip
    examples = (
        Trace((8, 4, 2, 2), (("step", [0, 1]),)),
        Trace((8, 4, 2, 2), (("step", [0, 1]), ("step", [0, 0]))),
        Trace((8, 4, 2, 2), (("step", [0, 1]), ("step", [1, 1]), ("step", [1, 0]))),
        Trace((8, 4, 2, 1), (("step", [0, 0]), ("step", [1, 0, 1]), ("step", [2])),
              why=say("There may be more beams than before, or fewer: parents has one entry for each next beam.")),
        Trace((9, 2, 2, 3), (("step", [0, 1, 2]), ("step", [2, 2, 0]), ("step", [1, 0, 1]), ("step", [0, 0, 0]))),
        Trace((6, 2, 4, 2), (("step", [0, 1]), ("step", [0, 1]), ("step", [1, 1]), ("step", [0, 1]), ("step", [0, 0])),
              why=say("Beams that are not given back, or given back too little, hold blocks for ever.")),
    )  # fmt: skip

    class Oracle:
        """Beams are strings, and a block is a token run with an identity: plain lists, owners counted in them."""

        def __init__(self, num_blocks, block_size, num_prompt, width):
            self.block_size, self.num_made = block_size, 0
            self.texts = ["." * num_prompt] * width
            prompt = [self.new() for _ in range(cdiv(num_prompt, block_size))]
            self.tables = [list(prompt) for _ in range(width)]

        def new(self):
            self.num_made += 1
            return self.num_made

        def step(self, parents):
            self.texts = [self.texts[parent] + "abcdef"[i] for i, parent in enumerate(parents)]
            self.tables = [list(self.tables[parent]) for parent in parents]
            copied = 0
            for table in self.tables:
                if len(table) * self.block_size < len(self.texts[0]):
                    table.append(self.new())
                elif sum(table[-1] in other for other in self.tables) > 1:
                    table[-1] = self.new()
                    copied += 1
            held = len({block for table in self.tables for block in table})
            return f"{' '.join(self.texts)}; {held} blocks held, {copied} copied"

        def ops(self):
            if len(self.texts[0]) >= 12:
                return []
            width = len(self.texts)
            return [("step", [0] * width), ("step", list(range(width))), ("step", list(range(width))[::-1]),
                    ("step", [width - 1] * width), ("step", [0] + list(range(width - 1))),
                    ("step", list(range(1, width)) + [width - 1]), ("step", [0] * min(6, width + 1)),
                    ("step", [width - 1])]  # fmt: skip

    def traces(self):
        init = st.tuples(st.just(64), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4))
        return walks(self.Oracle, init, max_ops=8)

    def describe_init(self, init):
        return (f"a pool of {count(init[0], 'block')} of {count(init[1], 'token')}, a prompt of "
                f"{count(init[2], 'token')} (dots), {count(init[3], 'beam')}")  # fmt: skip

    def describe(self, op):
        return f"beam_step with parents {op[1]}, then each beam writes a letter"

    def explain(self, op, expected, got):
        if not isinstance(got, str) or ";" not in got:
            return say("Return a list with one table, a list of blocks, for each entry of parents.")
        (mine, counts), (yours, found) = expected.split("; ", 1), got.split("; ", 1)
        if "?" in yours:
            return say("A `?` is a token that is gone: its block had no owner for a moment, and what nobody owns may "
                       "be written by anybody. Let the new beams take hold before the old ones let go.")  # fmt: skip
        if mine != yours:
            return say("A beam reads what another one wrote, or has lost its place: beam i goes on from "
                       "tables[parents[i]], in a list of its own, with an owner of its own in every block.")
        held, wanted = int(found.split()[0]), int(counts.split()[0])
        if held > wanted:
            return say("Held: {held}, though the new tables name {wanted}. Somebody has not been given back.",
                       held=count(held, "block"), wanted=wanted)  # fmt: skip
        return say("The beams read right, but more was copied than needed: somebody who is gone is still counted as an "
                   "owner.")  # fmt: skip


class Tree(Exercise):
    """Branch off anywhere, go back anywhere."""

    name, points, minutes, section = "branch_and_return", 4, 15, "L33 2.4"
    defines = ("fork_at", "truncate")
    ours = {"fork_at": "kvlab.blocks.branches:fork_at", "truncate": "kvlab.blocks.branches:truncate"}
    driver = "TreeDriver"
    hints = (
        say("How many blocks hold the first num_tokens tokens? It is the same number in both functions."),
        say("A block that holds some of the tokens and not others stays in the table, shared in part. Who writes into "
            "it next is the barrier's business."),
        say("keep = cdiv(num_tokens, block_size). fork_at: share of table[:keep]. truncate: pool.free_blocks of "
            "table[keep:] reversed, then del table[keep:]. Not table[-k:]: for k = 0 that is the whole table."),
    )  # fmt: skip
    examples = (
        Trace((3, 4), (("start", "A"), ("write", "A", 4), ("fork_at", "A", "B", 4), ("write", "B", 1))),
        Trace((4, 4), (("start", "A"), ("write", "A", 6), ("fork_at", "A", "B", 6), ("write", "B", 1),
                       ("write", "A", 1))),
        Trace((4, 4), (("start", "A"), ("write", "A", 7), ("fork_at", "A", "B", 2), ("write", "B", 2))),
        Trace((4, 4), (("start", "A"), ("write", "A", 7), ("fork_at", "A", "B", 0), ("write", "B", 1))),
        Trace((4, 4), (("start", "A"), ("write", "A", 4), ("truncate", "A", 4))),
        Trace((4, 4), (("start", "A"), ("write", "A", 9), ("truncate", "A", 2), ("write", "A", 1))),
        Trace((4, 4), (("start", "A"), ("write", "A", 9), ("truncate", "A", 0))),
        Trace((5, 4), (("start", "A"), ("write", "A", 8), ("publish", "A"), ("truncate", "A", 6), ("write", "A", 1)),
              why=say("Going back into a published block takes no name away: the barrier copies it before the write.")),
        Trace((6, 4), (("start", "A"), ("write", "A", 8), ("publish", "A"), ("fork_at", "A", "B", 6),
                       ("give_back", "A"), ("write", "B", 1)),
              why=say("A published block is shared like any other: the branch is one owner more.")),
        Trace((6, 2), (("start", "A"), ("write", "A", 5), ("fork_at", "A", "B", 3), ("write", "B", 2),
                       ("truncate", "A", 1), ("write", "A", 1), ("give_back", "B"))),
    )  # fmt: skip

    class Oracle(Books):
        def __init__(self, num_blocks, block_size):
            super().__init__(num_blocks)
            self.block_size, self.texts, self.num_written = block_size, {}, 0

        def told(self, name):
            return f"{super().told(name)} reads {self.texts[name] or 'nothing'}"

        def start(self, name):
            self.tables[name], self.texts[name] = [], ""
            return self.books()

        def write(self, name, num_tokens):
            for _ in range(num_tokens):
                index = len(self.texts[name]) // self.block_size
                if index == len(self.tables[name]):
                    self.tables[name] += self.take(1)
                elif not self.writable(block := self.tables[name][index]):
                    [self.tables[name][index]] = self.take(1)
                    self.dropped([block])
                self.texts[name] += "abcdefghijklmnopqrstuvwxyz"[self.num_written % 26]
                self.num_written += 1
            return self.books()

        def publish(self, name):
            self.named |= set(self.tables[name][: len(self.texts[name]) // self.block_size])
            return self.books()

        def fork_at(self, parent, child, num_tokens):
            self.tables[child] = self.tables[parent][: cdiv(num_tokens, self.block_size)]
            self.texts[child] = self.texts[parent][:num_tokens]
            return self.books()

        def truncate(self, name, num_tokens):
            table, keep = self.tables[name], cdiv(num_tokens, self.block_size)
            self.tables[name], self.texts[name] = table[:keep], self.texts[name][:num_tokens]
            self.dropped(table[keep:][::-1])
            return self.books()

        def ops(self):
            new, ops = self.next_name(), []
            if new:
                ops.append(("start", new))
            for name in self.tables:
                length = len(self.texts[name])
                if len(self.queue) >= 3:
                    ops += [("write", name, n) for n in (1, 3)]
                places = sorted({0, length // 2, max(0, length - 1), length})
                if new:
                    ops += [("fork_at", name, new, place) for place in places]
                ops += [("truncate", name, place) for place in places]
                if length >= self.block_size:
                    ops.append(("publish", name))
                ops.append(("give_back", name))
            return ops

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(4, 12), st.integers(2, 4)), max_ops=10)

    def describe_init(self, init):
        return f"a pool of {count(init[0], 'block')} of {count(init[1], 'token')}"

    def describe(self, op):
        if op[0] == "fork_at":
            return f"{op[2]} = fork_at({op[1]}, {count(op[3], 'token')})"
        if op[0] == "truncate":
            return f"truncate({op[1]}, {count(op[2], 'token')})"
        return super().describe(op)

    def explain(self, op, expected, got):
        label, mine, yours = first_difference(expected, got)
        if isinstance(yours, str) and yours.endswith("returned"):
            return say("fork_at returns the child's table: a list of blocks.")
        if op[0] == "fork_at" and label == op[2] and mine.count(",") == yours.count(","):
            return say("At a fork nothing is copied and no block is taken, not even a block that is shared in part. "
                       "The barrier will copy it if somebody writes there.")  # fmt: skip
        if isinstance(got, str) and "?" in got:
            return say("A `?` is a token that the table no longer leads to. A block that holds only some of the tokens "
                       "that stay must stay too.")  # fmt: skip
        if op[0] == "truncate" and label == op[1]:
            return say("The table keeps every block that holds at least one token of the first {n}, and no other.",
                       n=op[2])  # fmt: skip
        if op[0] == "fork_at" and label == op[2]:
            return say("The branch shares every block that holds at least one token of the first {n}, and no other.",
                       n=op[3])  # fmt: skip
        if label == "free" and op[0] == "truncate":
            return say("What is cut off goes back to the pool, the last block first, so that a beginning is reused "
                       "last.")
        return explain_books(label)


class Gain(Exercise):
    """What giving up branches would bring."""

    name, points, minutes, section, stretch = "blocks_freed_by", 1, 8, "L33 5.1", True
    defines = ("blocks_freed_by",)
    ours = {"blocks_freed_by": "kvlab.blocks.branches:blocks_freed_by"}
    driver = "GainDriver"
    hints = (
        say("A block comes back when its last owner goes. If three tables hold it and you give up two, it stays."),
        say("Count how often each block appears in the tables that go, and compare with its ref_cnt."),
    )  # fmt: skip
    examples = (
        Trace((3,), (("start", "A", 2), ("freed_by", "A"), ("books",))),
        Trace((3,), (("start", "A", 2), ("share", "A", "B"), ("freed_by", "A"), ("books",),
                     ("freed_by", "A", "B"), ("books",))),
        Trace((4,), (("start", "A", 1), ("share", "A", "B"), ("grow", "A"), ("grow", "B"), ("share", "B", "C"),
                     ("freed_by", "A"), ("freed_by", "A", "B"), ("freed_by", "B", "C"), ("freed_by", "A", "B", "C"))),
        Trace((2,), (("start", "A", 1), ("freed_by",))),
    )  # fmt: skip

    class Oracle(Books):
        def freed_by(self, *names):
            left = Counter(b for name, table in self.tables.items() if name not in names for b in table)
            return sum(1 for block in self.owners() if not left[block])

        def ops(self):
            new, names = self.next_name(), list(self.tables)
            ops = [("books",), *super().ops(), ("freed_by",), *(("freed_by", name) for name in names)]
            ops += [("freed_by", a, b) for a in names for b in names if a < b]
            if new:
                ops += [("share", name, new) for name in names]
            return ops + [("grow", name) for name in names if self.queue]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 6)), max_ops=10)

    def describe_init(self, init):
        return f"a pool of {count(init[0], 'block')}"

    def describe(self, op):
        if op[0] == "freed_by":
            return f"blocks_freed_by(tables {', '.join(op[1:]) or 'of nobody'})"
        return super().describe(op)

    def explain(self, op, expected, got):
        if op[0] == "books":
            return say("Asking must not change the books: count, and give nothing back.")
        if isinstance(got, int) and got > expected:
            return say("Too many: a block that somebody else holds too, or one that you have counted twice, brings "
                       "nothing.")
        return say("Too few: a block whose owners all go comes back, also when several of them share it.")


class Cut:
    """Accepts a list of batches that keeps the order, has no hazard, and is as short as it can be."""

    def __init__(self, copies, fewest):
        self.copies, self.fewest = copies, fewest

    def problem(self, value):
        if not isinstance(value, list) or not all(isinstance(batch, list) for batch in value):
            return "form"
        if [tuple(copy) for batch in value for copy in batch] != [tuple(copy) for copy in self.copies]:
            return "order"
        for batch in value:
            written = set()
            for source, target in batch:
                if source in written or target in written:
                    return "hazard"
                written.add(target)
        return "long" if len(value) > self.fewest else None

    def accepts(self, value):
        return self.problem(value) is None

    def __str__(self):
        return f"the copies in their order, in {self.fewest} batch{'es' * (self.fewest != 1)}"


class CopyBatches(Exercise):
    """Which copies may be made at once."""

    name, points, minutes, section, stretch = "copy_batches", 2, 15, "L33 2.4", True
    defines = ("copy_batches",)
    ours = {"copy_batches": "kvlab.blocks.branches:copy_batches"}
    hints = (
        say("Remember which blocks the running batch writes. What would go wrong if the next copy read one of them, or "
            "wrote one of them again?"),
        say("Reading a block that an earlier copy of the batch also reads is harmless. So is writing a block that an "
            "earlier copy reads: all sources are read first."),
    )  # fmt: skip
    examples = (
        Trace((), (("copy_batches", []),)),
        Trace((), (("copy_batches", [[1, 2], [1, 3]]),)),
        Trace((), (("copy_batches", [[1, 2], [2, 3]]),)),
        Trace((), (("copy_batches", [[1, 2], [3, 1]]),)),
        Trace((), (("copy_batches", [[1, 2], [3, 2]]),)),
        Trace((), (("copy_batches", [[1, 2], [2, 3], [4, 2], [3, 5]]),)),
    )  # fmt: skip

    class Oracle:
        """Tries it: a batch is right if reading everything first gives what one copy after the other gives."""

        def copy_batches(self, copies):
            number, start = 0, 0
            while start < len(copies):
                end = start + 1
                while end < len(copies) and self.same(copies[start : end + 1]):
                    end += 1
                number, start = number + 1, end
            return Cut(copies, number)

        @staticmethod
        def same(batch):
            one_by_one = {b: b for copy in batch for b in copy}
            at_once = dict(one_by_one)
            for source, target in batch:
                one_by_one[target] = one_by_one[source]
            return len({t for _, t in batch}) == len(batch) and one_by_one == at_once | {t: s for s, t in batch}

    def traces(self):
        copy = st.tuples(st.integers(1, 5), st.integers(1, 5)).filter(lambda c: c[0] != c[1]).map(list)
        return calls("copy_batches", st.lists(copy, max_size=6))

    def explain(self, op, expected, got):
        return {
            "form": say("Return a list of batches, each a list of (source, target)."),
            "order": say("Every copy must be in exactly one batch, and the order must stay."),
            "hazard": say("In one batch a copy reads a block that an earlier one of the batch writes, or two copies "
                          "write one block, in no particular order: at once and one after the other would differ."),
            "long": say("These are more batches than needed: cut only where two copies of a batch would get in each "
                        "other's way."),
        }.get(expected.problem(got))  # fmt: skip
