"""Lab 06, the radix tree: its exercises."""

from hypothesis import strategies as st

from kvlab.grade import AtMost, Exercise, LabInfo, Trace, say, walks

LAB = LabInfo(title=say("The radix tree"), sections="L33 6.1-6.3, 8.1; PAV 3.4, 6", before=("05",))
STEPS = "kvlab.prefix.radix_steps:"


class Places:
    """The slow and obvious tree: a dict from each beginning to its block (None: a gap), and where edges were cut."""

    def __init__(self, *places):
        self.blocks = {path: block for path, block in places}
        self.cuts = set()

    def below(self, path):
        return sorted(other for other in self.blocks if len(other) == len(path) + 1 and other.startswith(path))

    def ends(self, path):
        return len(self.below(path)) != 1 or path in self.cuts

    def tree(self):
        def of(path):
            start = path
            while not self.ends(path):
                (path,) = self.below(path)
            run = [path[:end] for end in range(len(start), len(path) + 1)]
            ids = " ".join("-" if self.blocks[p] is None else str(self.blocks[p]) for p in run)
            children = " ".join(sorted(of(child) for child in self.below(path)))
            return f"{path[len(start) - 1 :]}[{ids}]" + (f"({children})" if children else "")

        return " ".join(sorted(of(path) for path in self.below(""))) or "empty"

    def find(self, text):
        found = []
        while len(found) < len(text) and self.blocks.get(text[: len(found) + 1]) is not None:
            found.append(self.blocks[text[: len(found) + 1]])
        return found

    def put(self, text, ids):
        published = []
        for i, block in enumerate(ids):
            if self.blocks.get(text[: i + 1]) is None:
                self.blocks[text[: i + 1]] = block
                published.append(block)
        return published

    def forget(self, block):
        (path,) = [path for path, other in self.blocks.items() if other == block]
        self.blocks[path] = None
        live = [path for path, other in self.blocks.items() if other is not None]
        self.blocks = {path: b for path, b in self.blocks.items() if any(other.startswith(path) for other in live)}

    def ids(self):
        return sorted(block for block in self.blocks.values() if block is not None)

    def unused(self):
        return [block for block in range(1, 40) if block not in self.ids()]


def tree(*texts, gaps=()):
    """Places of texts, with blocks 1, 2, ... in the order in which they appear; those in `gaps` are gone."""
    places = Places()
    for text in texts:
        places.put(text, [*places.find(text), *places.unused()][: len(text)])
    for block in gaps:
        places.forget(block)
    return tuple(places.blocks.items())


@st.composite
def trees(draw, max_texts=4):
    texts = draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=max_texts))
    places = tree(*texts)
    gaps = draw(st.sets(st.sampled_from([block for _, block in places]), max_size=3))
    return tree(*texts, gaps=sorted(gaps))


def told(init):
    return f"the tree {Places(*init).tree()}"


def explain_tree(got):
    """What the driver found out of order in a tree."""
    text = got if isinstance(got, str) else ""
    if "share one Place" in text:
        return say("Each block needs a Place of its own, made for it alone: a split moves some blocks of an edge and "
                   "not the others.")  # fmt: skip
    if "another Place than before" in text:
        return say("The index keeps the Place as a key of its dictionary, so it loses a block whose Place is "
                   "exchanged. Who moves a block changes the Place that it has: block.block_hash.node = the new edge.")
    if "neither half" in text:
        return say("One of the two halves is the RadixNode that you were given: whoever holds it still holds a part of "
                   "the tree. Make one new node, not two.")  # fmt: skip
    if "keeps the very list" in text:
        return say("The lists belong to the caller, who will change them. An edge needs lists of its own: a slice or "
                   "list(...) makes one. And what you return is not an edge's own list either.")  # fmt: skip
    if "has changed the list" in text:
        return say("The lists belong to the caller, who needs them afterwards. Walk along them with an index, or work on "
                   "a copy.")  # fmt: skip
    if "are not a list" in text or "that is no edge" in text:
        return say("chunks and blocks are lists, and children leads from a chunk to a RadixNode: no tuple, no None.")
    if "its place says nothing" in text:
        return say("A block that gets a place gets a name as well: block.block_hash = Place(node), with the edge on "
                   "which it lies.")  # fmt: skip
    if "its place says" in text:
        return say("Whoever moves a block to another edge tells its place: block.block_hash.node is the edge that the "
                   "block lies on now.")  # fmt: skip
    if "does not know the edge above it" in text:
        return say("An edge has moved, and its `parent` still names another one. Links go both ways: children down, "
                   "parent up.")  # fmt: skip
    if "is filed under" in text:
        return say("children is a dict by the FIRST chunk of the child's edge. The first chunk of this edge has "
                   "changed.")
    if "chunks and" in text or "without chunks" in text:
        return say("chunks and blocks of an edge go side by side, one block (or None) for each chunk; only the root "
                   "has none.")  # fmt: skip
    if "hangs in two places" in text:
        return say("What has moved to one list must leave the other: nothing may hang in the tree twice.")
    if "is not in the tree" in text:
        return say("A block bears a place exactly as long as it hangs in the tree. Here a block, or all below an edge, "
                   "has been lost.")  # fmt: skip
    return None


class TreeSize(Exercise):
    """The size of a tree, on paper."""

    name, points, minutes, section = "tree_size", 2, 12, "L33 6.2"
    defines = ("tree_size",)
    ours = {"tree_size": STEPS + "tree_size"}
    driver = "SizeDriver"
    hints = (
        say("A block in the tree is a place: the tokens of the block and ALL tokens before it. So collect beginnings, "
            "text[:block_size], text[:2 * block_size] and so on, in a set."),
        say("An edge ends at a place where the text can go on in two or more ways, or in none. Count for each "
            "beginning how many beginnings are exactly one block longer."),
        say("children = Counter(place[:-block_size] for place in places); then edges = sum(children[place] != 1 for "
            "place in places). Make the places tuples."),
    )  # fmt: skip
    examples = (
        Trace((), (("tree_size", ["ab"], 1),)),
        Trace((), (("tree_size", ["abcd", "abxy"], 1),)),
        Trace((), (("tree_size", ["abcd", "abxy"], 2),)),
        Trace((), (("tree_size", ["abcd", "ab"], 1),)),
        Trace((), (("tree_size", ["abcde"], 2),)),
        Trace((), (("tree_size", ["ab", "ab"], 1),)),
        Trace((), (("tree_size", ["abcd", "xycd"], 2),)),
        Trace((), (("tree_size", ["ab", "ba"], 2),)),
        Trace((), (("tree_size", ["abc", "abd", "xbc"], 1),)),
        Trace((), (("tree_size", [], 4),)),
    )  # fmt: skip

    class Oracle:
        """Adds texts to a dict of places, and reads off."""

        def tree_size(self, texts, block_size):
            places, blocks, numbers = Places(), 0, {}
            for text in texts:
                full = [text[end - block_size : end] for end in range(block_size, len(text) + 1, block_size)]
                letters = "".join(chr(65 + numbers.setdefault(chunk, len(numbers))) for chunk in full)
                places.put(letters, [*places.find(letters), *range(blocks + 1, blocks + 1 + len(letters))])
                blocks += len(letters)
            return [blocks, len(places.blocks), places.tree().count("[")]

    def traces(self):
        texts = st.lists(st.text("ab", max_size=6), max_size=5)
        return st.builds(lambda texts, size: Trace((), (("tree_size", texts, size),)), texts, st.integers(1, 3))

    def describe(self, op):
        return f"tree_size({op[1]}, block_size={op[2]}), each letter a token (a is 1, b is 11, c is 111, ...),"

    def explain(self, op, expected, got):
        if found := explain_tree(got):
            return found
        if not isinstance(got, list) or len(got) != 3:
            return say("Return three whole numbers: blocks without sharing, blocks in the tree, edges.")
        if got[0] != expected[0]:
            return say("Without sharing every text has all its full blocks for itself: len(text) // block_size of them.")
        if got[1] != expected[1]:
            return say("Two blocks are one block in the tree exactly if their tokens and all tokens before them are "
                       "the same. So cd after ab and cd after xy are two. A block of tokens 1, 11 is not a block of 11, "
                       "1; and only full blocks count.")  # fmt: skip
        if got[2] > expected[2]:
            return say("Too many edges. An edge ends where texts part (two or more ways to go on) or where nothing goes "
                       "on. A text that ends in the middle of an edge does not cut it, and the root is no edge.")
        return say("Too few edges. An edge is a run of blocks. It ends where texts part (two or more ways to go on), and "
                   "it ends where nothing goes on. Count both.")  # fmt: skip


class Find(Exercise):
    """Find: walk down the tree."""

    name, points, minutes, section = "find", 3, 12, "L33 6.2"
    defines = ("find",)
    ours = {"find": STEPS + "find"}
    driver = "FindDriver"
    hints = (
        say("Carry two variables: the edge on which you stand, and how many of its chunks lie behind you. At the root, "
            "the edge is the root and zero of its zero chunks lie behind you."),
        say("For each chunk: if your edge is used up, step to node.children.get(chunk), and to its place 0; stop if "
            "there is none. Then compare with node.chunks[i], and look whether node.blocks[i] is a gap."),
        say("for chunk in chunks: if i == len(node.chunks): node, i = node.children.get(chunk), 0. if node is None or "
            "node.chunks[i] != chunk or node.blocks[i] is None: break. Else append the block, and i += 1."),
    )  # fmt: skip
    examples = (
        Trace(tree("ab"), (("find", "ab"),)),
        Trace(tree("ab"), (("find", "x"), ("find", ""), ("find", "a")),
              why=say("A text may be empty, or begin with a chunk that the root has no child for, or end in the middle "
                      "of an edge.")),
        Trace(tree("ab"), (("find", "abc"),), why=say("The text is longer than the tree is deep.")),
        Trace(tree("abcd"), (("find", "abxd"),), why=say("The edge goes on with c, the text with x.")),
        Trace(tree("abcd", "abxy"), (("find", "abcd"), ("find", "abxy"), ("find", "abx"), ("find", "ab")),
              why=say("The edge ab ends. The text goes on in one of its children, or in none.")),
        Trace(tree("abcd", gaps=[2]), (("find", "abcd"),),
              why=say("There is a gap after the first block. K/V behind it cannot be used: attention needs every "
                      "token before it.")),
        Trace(tree("abcd", "abxy", gaps=[3]), (("find", "abcd"), ("find", "abxy")),
              why=say("An edge may begin with a gap.")),
        Trace(tree("ab"), (("find", "abab"), ("tree",))),
        Trace((), (("find", "ab"),), why=say("In an empty tree nothing is found.")),
        Trace((), (("looks", 1000),)),
    )  # fmt: skip

    class Oracle(Places):
        def looks(self, num_children):
            return AtMost(6)

    def traces(self):
        return st.builds(lambda places, texts: Trace(places, [("find", text) for text in texts] + [("tree",)]),
                         trees(), st.lists(st.text("ab", max_size=6), min_size=1, max_size=4))  # fmt: skip

    def describe_init(self, init):
        return told(init)

    def describe(self, op):
        if op[0] == "looks":
            return f"the children that find looks at, below a root with {op[1]}: it"
        return super().describe(op)

    def explain(self, op, expected, got):
        if op[0] == "looks":
            return say("A root with a thousand children: ask the dict for the one that begins with your chunk, "
                       "instead of looking at each.")  # fmt: skip
        if isinstance(got, str) and "changed the tree" in got:
            return say("find only looks. Some dict methods write while they look: setdefault, pop.")
        if isinstance(got, str) and "handed out" in got:
            return say("The caller may change the list that it gets, and would change the tree. Return a list of your "
                       "own.")  # fmt: skip
        if found := explain_tree(got):
            return found
        if not isinstance(got, list):
            return say("find returns a list of blocks (the blocks themselves, not their numbers, and no gaps); [] if "
                       "there are none.")  # fmt: skip
        if len(got) > len(expected):
            return say("The walk ends at the first chunk that is not in the tree, and at the first gap.")
        return say("The walk goes on as long as the chunks agree: along an edge, and from its end to the child that "
                   "begins with the next chunk.")  # fmt: skip


class Split(Exercise):
    """Split: cut an edge in two."""

    name, points, minutes, section = "split", 3, 15, "L33 6.2"
    defines = ("split",)
    ours = {"split": STEPS + "split"}
    driver = "SplitDriver"
    hints = (
        say("Draw it: above, the edge that keeps the first k blocks; below it, the edge with the rest. Who pointed at "
            "the old edge? What did the old edge point at?"),
        say("Easiest: the new node is the UPPER one, and `node` stays the lower one. Then all below keeps its links. "
            "Three links change: the parent's child, the new node's child, node.parent."),
        say("upper = RadixNode(node.chunks[:k], node.blocks[:k], node.parent); node.parent.children[upper.chunks[0]] = "
            "upper; then cut node's lists, upper.children[node.chunks[0]] = node, node.parent = upper, and "
            "block.block_hash.node = upper for each block that moved (not for gaps)."),
    )  # fmt: skip
    examples = (
        Trace(tree("ab"), (("split", "ab", 1),)),
        Trace(tree("abcd"), (("split", "abcd", 3),)),
        Trace(tree("abcd"), (("split", "abcd", 1), ("split", "abcd", 2))),
        Trace(tree("abcd", "abxy"), (("split", "ab", 1),), why=say("What hung below the edge hangs below the lower "
                                                                   "half now.")),
        Trace(tree("abcd", "abxy"), (("split", "abxy", 1),)),
        Trace(tree("abcd", gaps=[1]), (("split", "abcd", 2),), why=say("A gap has no block, and so no place to tell.")),
        Trace(tree("abc", gaps=[2]), (("split", "abc", 2),),
              why=say("The upper half ends with a gap. A gap has no block, and so no place to tell.")),
    )  # fmt: skip

    class Oracle(Places):
        def start_of(self, path):
            start = path
            while len(start) > 1 and not self.ends(start[:-1]):
                start = start[:-1]
            return start

        def split(self, path, k):
            cut = self.start_of(path) + path[len(self.start_of(path)) :][: k - 1]
            self.cuts.add(cut)
            return f"{self.tree()}; returned {cut[len(self.start_of(cut)) - 1 :]}"

        def ops(self):
            ends = [path for path in self.blocks if self.ends(path)]
            return [("split", path, k) for path in ends for k in range(1, len(path) - len(self.start_of(path)) + 1)]

    def traces(self):
        return walks(self.Oracle, trees(), max_ops=3)

    def describe_init(self, init):
        return told(init)

    def describe(self, op):
        return f"split(the edge that ends at {op[1]}, {op[2]})"

    def explain(self, op, expected, got):
        if not isinstance(got, str) or got.split("; ")[0] == expected.split("; ")[0]:
            return say("split returns the upper of the two edges.")
        return explain_tree(got) or say("The first k blocks stand above, the rest below them, and what hung below the "
                                        "edge hangs below the rest.")  # fmt: skip


class Add(Exercise):
    """Add: publish blocks along a text."""

    name, points, minutes, section = "add", 4, 25, "L33 6.2"
    defines = ("add",)
    ours = {"add": STEPS + "add"}
    driver = "AddDriver"
    hints = (
        say("It is the walk of `find`, except that you never stop. At each chunk there are three cases: the place is "
            "there; the text leaves the edge in its middle; the edge is used up and no child begins with the chunk."),
        say("In its middle: node = cut(node, i); now the edge is used up. Used up, no child: a leaf that is not the "
            "root takes the rest of the chunks onto its own edge; else a new child takes them. Make the places with "
            "None first, and let one line at the end of the loop fill them."),
        say("if i == len(node.chunks) and chunk in node.children: node, i = node.children[chunk], 0. elif i == "
            "len(node.chunks) or node.chunks[i] != chunk: make the places. Then, for every chunk: if node.blocks[i] is "
            "None: node.blocks[i] = block; block.block_hash = Place(node); published.append(block). i += 1."),
    )  # fmt: skip
    examples = (
        Trace((), (("add", "ab", [1, 2]),)),
        Trace((), (("add", "", []),)),
        Trace(tree("ab"), (("add", "xy", [3, 4]),)),
        Trace(tree("abcd"), (("add", "abxy", [1, 2, 5, 6]),), why=say("The text leaves the edge after ab: here the "
                                                                      "edge must be split.")),
        Trace(tree("abcd", "abxy"), (("add", "abpq", [1, 2, 7, 8]),), why=say("The third way to go on from ab.")),
        Trace(tree("ab"), (("add", "abc", [1, 2, 3]),), why=say("A leaf grows: the edge becomes longer. This is what "
                                                                "happens while an answer is being written.")),
        Trace(tree("abcd"), (("add", "ab", [1, 2]),), why=say("The text ends in the middle of an edge: nothing is to "
                                                              "be done.")),
        Trace(tree("ab"), (("add", "ab", [8, 9]),), why=say("Computed twice, by two requests at the same time. The "
                                                            "first publisher keeps the place.")),
        Trace(tree("ab"), (("add", "abc", [8, 9, 3]),), why=say("Blocks 8 and 9 are duplicates. Block 3 is new.")),
        Trace(tree("abcd", gaps=[2]), (("add", "abcd", [1, 9, 8, 7]),), why=say("The gap is filled; what lies behind "
                                                                                "it was never lost.")),
        Trace(tree("abcd"), (("add", "abxy", [1, 2, 5]),), why=say("Three blocks for a text of four chunks: only the "
                                                                   "first three are published.")),
        Trace(tree("abcd", "abxy"), (("add", "ax", [1, 9]),)),
        Trace(tree("abcd", gaps=[1]), (("add", "ax", [8, 9]),)),
    )  # fmt: skip

    class Oracle(Places):
        def add(self, text, ids):
            return f"published {self.put(text, ids)}; {self.tree()}"

        def ops(self):
            ops = []
            for text in ("a", "ab", "abab", "abba", "bb", "aab", "bab"):
                hits, unused = self.find(text), self.unused()
                ops.append(("add", text, [*hits, *unused][: len(text)]))
                ops += [("add", text, unused[: len(text)]), ("add", text, unused[: len(text) - 1])]
            return ops

    def traces(self):
        return walks(self.Oracle, st.one_of(st.just(()), trees()), max_ops=5)

    def describe_init(self, init):
        return told(init)

    def describe(self, op):
        return f"add(root, {op[1]!r}, blocks {op[2]})"

    def explain(self, op, expected, got):
        if not isinstance(got, str):
            return None
        if found := explain_tree(got):
            return found
        ours, mine = (text.split("; ", 1) for text in (expected, got))
        if ours[1] == mine[1]:
            return say("Return the blocks that got a place by this call, in order: not those whose place was taken.")
        if ours[1].count("[") < mine[1].count("["):
            return say("An edge ends only where texts part. Do not cut it where a text merely ends, give a run of new "
                       "blocks one edge, and let a leaf grow.")  # fmt: skip
        if ours[0] != mine[0]:
            return say("A place that has a block keeps it, and a gap takes the block that is offered.")
        return say("Compare the two trees: the edges, and the block in each place.")


class TakeOut(Exercise):
    """Take out: forget one block."""

    name, points, minutes, section = "take_out", 3, 18, "L33 6.2; PAV 6"
    defines = ("take_out",)
    ours = {"take_out": STEPS + "take_out"}
    driver = "TakeOutDriver"
    hints = (
        say("Three things: the place becomes a gap, the block loses its name, and what is dead is cut off. What is "
            "dead? A gap with no block behind it."),
        say("Only a leaf can have dead places: its last ones. When nothing is left of it, it leaves its parent, and "
            "then the parent may be a leaf that ends in gaps. So it is a loop, upwards."),
        say("while node.parent is not None and not node.children: remember first = node.chunks[0]; pop chunks and "
            "blocks while blocks and blocks[-1] is None; if blocks are left, return; else node = node.parent and del "
            "node.children[first]."),
    )  # fmt: skip
    examples = (
        Trace(tree("abc"), (("take_out", 3),)),
        Trace(tree("a"), (("take_out", 1),), why=say("The last block of the tree.")),
        Trace(tree("abc"), (("take_out", 2),), why=say("A parent before its child: a gap, and block 3 stays where it "
                                                       "is. Somebody may publish block 2 anew.")),
        Trace(tree("abc"), (("take_out", 2), ("take_out", 3)), why=say("When 3 goes, nothing hangs behind the gap any "
                                                                       "more.")),
        Trace(tree("abc"), (("take_out", 1), ("take_out", 2), ("take_out", 3))),
        Trace(tree("abcd", "abxy"), (("take_out", 6), ("take_out", 5))),
        Trace(tree("abcd", "abxy"), (("take_out", 1), ("take_out", 2), ("take_out", 3), ("take_out", 4))),
        Trace(tree("ab", "xy"), (("take_out", 1), ("take_out", 2), ("take_out", 4))),
        Trace(tree("abcd", "abxy"), (("take_out", 2), ("take_out", 3), ("take_out", 4), ("take_out", 5),
                                     ("take_out", 6)),
              why=say("When the last leaf below ab is gone, the edge ab is a leaf itself, and it ends in a gap.")),
    )  # fmt: skip

    class Oracle(Places):
        def take_out(self, block):
            self.forget(block)
            return self.tree()

        def ops(self):
            return [("take_out", block) for block in self.ids()]

    def traces(self):
        return walks(self.Oracle, trees(), max_ops=6)

    def describe_init(self, init):
        return told(init)

    def describe(self, op):
        return f"take_out(block {op[1]})"

    def explain(self, op, expected, got):
        if found := explain_tree(got):
            return found
        if isinstance(got, str) and got.count("-") > expected.count("-"):
            return say("Gaps with no block behind them are dead wood: it would grow for ever. Cut it off, upwards from "
                       "the leaf, as far as it goes. (To merge or not is yours: here an only child is always shown as "
                       "one edge with its parent.)")  # fmt: skip
        return say("Only this block leaves. All others keep their places, also behind the new gap. (To merge or not is "
                   "yours: here an only child is always shown as one edge with its parent.)")  # fmt: skip


class RadixTree(Exercise):
    """The index: match, insert, remove."""

    name, points, minutes, section = "radix_tree", 4, 12, "L33 6.2; PAV 3.4"
    defines = ("RadixTree",)
    ours = {"RadixTree": "kvlab.prefix.radix_tree:RadixTreeIndex",
            "HashChainIndex": "kvlab.prefix.hash_chain:HashChainIndex"}  # lab 05's, barred as well  # fmt: skip
    part = {"prefix_index": "RadixTree"}
    driver = "TreeDriver"
    hints = (
        say("Each method is a line or two around one of your functions, plus the names: what grow publishes enters the "
            "dictionary, what forget is to forget leaves it."),
        say("match must not make a tree for a salt that nobody has used: self.roots.get(salt). insert may: "
            "self.roots.setdefault(salt, RadixNode([], [], None))."),
        say("remove: look up block.block_hash BEFORE forget, which sets it to None. `if "
            "self.cached_block_hash_to_block.get(block.block_hash) is not block: raise ValueError(...)`."),
    )  # fmt: skip
    examples = (
        Trace((2,), (("match", "abc"),)),
        Trace((2,), (("insert", "ab", [7]), ("published",), ("match", "abc"))),
        Trace((2,), (("insert", "abcd", [7, 3]), ("match", "abcd"), ("match", "abc"), ("match", "a")),
              why=say("Only whole blocks can be found.")),
        Trace((2,), (("insert", "abc", [7, 3]), ("published",)),
              why=say("Three tokens fill one block of 2, not two: ValueError, and nothing is published.")),
        Trace((2,), (("insert", "abcdef", [7]), ("published",), ("match", "abcd")),
              why=say("More tokens than blocks are fine: only the blocks that are given are published.")),
        Trace((1,), (("insert", "abcd", [1, 2, 3, 4]), ("insert", "abxy", [1, 2, 5, 6]), ("match", "abcd"),
                     ("match", "abxz"), ("published",))),
        Trace((2,), (("insert", "ab", [7]), ("insert", "abcd", [8, 9]), ("published",), ("match", "abcd")),
              why=say("Block 8 is a duplicate and stays without a name; block 9 is new and gets one.")),
        Trace((2,), (("insert", "ab", [7]), ("remove", 7), ("published",), ("match", "ab"), ("insert", "ef", [7]),
                     ("match", "ef"), ("match", "ab"))),
        Trace((2,), (("insert", "abc", [7, 3], "x"), ("num_trees",)),
              why=say("The insert that raised ValueError must not leave a tree behind.")),
        Trace((1,), (("insert", "a", [7]), ("remove_of_another", 8), ("published",)),
              why=say("Block 8 has a name, but another index gave it: this one must refuse it.")),
        Trace((2,), (("insert", "ab", [7]), ("remove", 8)), why=say("Block 8 has never been published.")),
        Trace((2,), (("insert", "ab", [7]), ("remove", 7), ("remove", 7)),
              why=say("Block 7 has been removed before.")),
        Trace((1,), (("insert", "abc", [4, 5, 6]), ("remove", 5), ("match", "abc"), ("insert", "ab", [4, 9]),
                     ("match", "abc"))),
        Trace((1,), (("insert", "a", [4], "x"), ("match", "a"), ("match", "a", "y"), ("match", "a", "x"),
                     ("num_trees",)), why=say("A salt is a tenant, with a tree of its own. To look for something must "
                                              "not plant a tree.")),
        Trace((1,), (("insert", "abcd", [1, 2, 3, 4]), ("insert", "abx", [1, 2, 5]), ("remove", 2), ("remove", 4),
                     ("match", "ab"), ("insert", "ab", [1, 6]), ("match", "abcd"), ("published",))),
    )  # fmt: skip

    class Oracle:
        """A dict of places for each salt."""

        TEXTS = (("aaaa", None), ("aabba", None), ("baaa", None), ("aaaa", "x"))

        def __init__(self, block_size):
            self.block_size, self.trees = block_size, {}

        def _path(self, text):
            size = self.block_size
            return tuple(text[end - size : end] for end in range(size, len(text) + 1, size))

        def match(self, text, salt=None):
            return self._tree(salt).find(self._path(text)) if salt in self.trees else []

        def _tree(self, salt):
            return self.trees.setdefault(salt, Places())

        def insert(self, text, ids, salt=None):
            if len(text) < len(ids) * self.block_size:
                raise ValueError
            self._tree(salt).put(self._path(text), ids)

        def remove(self, block):
            for places in self.trees.values():
                if block in places.blocks.values():
                    places.blocks = {path: None if b == block else b for path, b in places.blocks.items()}
                    return
            raise ValueError

        def remove_of_another(self, block):
            raise ValueError

        def published(self):
            return sorted(block for places in self.trees.values() for block in places.ids())

        def num_trees(self):
            return AtMost(len(self.trees))

        def ops(self):
            named = self.published()
            unused = [b for b in range(1, 40) if b not in named]
            ops = [("published",), ("num_trees",)]
            for text, salt in self.TEXTS:
                num, hits = len(text) // self.block_size, self.match(text, salt)
                ops += [("match", text, salt), ("insert", text, hits + unused[: num - len(hits)], salt),
                        ("insert", text, unused[:num], salt)]  # fmt: skip
            return [*ops, *(("remove", b) for b in [*named, unused[0]])]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 2)), max_ops=10)

    def describe_init(self, init):
        return f"index = RadixTree({init[0]}); letters are tokens, blocks are told by their ids"

    def describe(self, op):
        if op[0] == "remove_of_another":
            return f"remove({op[1]}), a block that another RadixTree has published,"
        return super().describe(op)

    def explain(self, op, expected, got):
        if isinstance(got, str) and "has changed" in got:
            return say("tokens and blocks belong to the caller, who needs them afterwards: work on copies.")
        if expected == "ValueError" and op[0] == "insert":
            return say("Raise ValueError, and publish nothing, when the tokens do not fill the blocks.")
        if expected == "ValueError":
            return say("Raise ValueError for a block that this index does not know by its name.")
        if op[0] == "num_trees":
            return say("There are more trees in self.roots than salts under which something was published.")
        if op[0] == "match" and isinstance(got, list) and len(got) > len(expected):
            return say("match found more than was published under this salt, or a block that has been removed.")
        if op[0] == "match":
            return say("match gives the blocks of the longest published beginning, the first block first.")
        return say("A published block bears its place as block_hash, and the dictionary leads from that place to the "
                   "block: both, or neither.")  # fmt: skip


class LeafToEvict(Exercise):
    """Leaf-only eviction: which edge goes next."""

    name, points, minutes, stretch, section = "leaf_to_evict", 2, 8, True, "L33 6.2"
    defines = ("leaf_to_evict",)
    ours = {"leaf_to_evict": STEPS + "leaf_to_evict"}
    driver = "LeafDriver"
    hints = (
        say("Walk over the whole tree with a list of nodes to visit. Candidates are edges without children."),
        say("A leaf with one owned block (ref_cnt above 0) is out. An edge was last used when the latest of its blocks "
            "was."),
        say("min(candidates, key=lambda leaf: max(last_used[block.block_id] for block in leaf.blocks), default=None)"),
    )  # fmt: skip
    examples = (
        Trace(tree("ab"), (("leaf_to_evict", [], {1: 5, 2: 5}),)),
        Trace((), (("leaf_to_evict", [], {}),), why=say("The root is no edge, and cannot be evicted.")),
        Trace(tree("a", "b"), (("leaf_to_evict", [], {1: 7, 2: 3}),)),
        Trace(tree("a", "b"), (("leaf_to_evict", [2], {1: 7, 2: 3}),), why=say("Block 2 is owned.")),
        Trace(tree("ab", "ac"), (("leaf_to_evict", [], {1: 1, 2: 8, 3: 9}),),
              why=say("Block 1 was used longest ago, but others hang below it.")),
        Trace(tree("ab", "c"), (("leaf_to_evict", [], {1: 1, 2: 9, 3: 5}),),
              why=say("Edge ab was last used at 9, by its second block.")),
        Trace(tree("ab", "c"), (("leaf_to_evict", [1, 3], {1: 9, 2: 1, 3: 5}),),
              why=say("Owned in part is owned; both leaves are.")),
        Trace(tree("abcd", "abx", "q"), (("leaf_to_evict", [], {1: 1, 2: 1, 3: 4, 4: 4, 5: 2, 6: 3}),)),
    )  # fmt: skip

    class Oracle(Places):
        def leaf_to_evict(self, owned, last_used):
            best = None
            for path in self.blocks:
                if not self.below(path):
                    start = path
                    while len(start) > 1 and not self.ends(start[:-1]):
                        start = start[:-1]
                    ids = [self.blocks[path[:end]] for end in range(len(start), len(path) + 1)]
                    use = max(last_used[block] for block in ids)
                    if not set(ids) & set(owned) and (best is None or use < best[0]):
                        best = use, f"the edge {path[len(start) - 1 :]}[{' '.join(map(str, ids))}]"
            return None if best is None else best[1]

    def traces(self):
        def make(texts, order, owned):
            places = tree(*texts)
            ids = [block for _, block in places]
            last_used = dict(zip(ids, [i for i in order if i < len(ids)], strict=True))
            return Trace(places, (("leaf_to_evict", [block for block in ids if block in owned], last_used),))

        texts = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)
        return st.builds(make, texts, st.permutations(range(16)), st.sets(st.integers(1, 8), max_size=2))

    def describe_init(self, init):
        return told(init)

    def describe(self, op):
        return f"leaf_to_evict(root, {op[2]}) while {op[1] or 'nobody'} is owned"

    def explain(self, op, expected, got):
        if isinstance(got, str) and "has changed" in got:
            return say("leaf_to_evict only names an edge: the tree and last_used stay as they are.")
        return say("Of the edges without children and without an owned block: the one whose latest use is longest ago. "
                   "None if there is none.")  # fmt: skip
