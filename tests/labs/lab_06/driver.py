"""Lab 06: drives the student's functions and class with plain values. Runs in the child process.

Tokens are letters in what is told, whole numbers in what the student gets. A tree is told in one line:

    ab[1 2](cd[3 -] x[4])      an edge with blocks 1 and 2, and below it two edges; - is a gap
"""

from kvlab.blocks import KVCacheBlock
from kvlab.prefix.radix_steps import Place
from kvlab.prefix.radix_tree import RadixNode


def chunks_of_text(text):
    return [(ord(letter),) for letter in text]


def told_chunks(chunks):
    return "".join(chr(token) for chunk in chunks for token in chunk)


class Forest:
    """A tree built of places: [path, block id or None] in any order, with edges that end where paths part."""

    def __init__(self, student, *places):
        self.student = student
        self.blocks = {i: KVCacheBlock(i) for i in range(1, 40)}
        self.root = RadixNode([], [], None)
        known = {path: block for path, block in places}
        self._grow(self.root, "", known)
        self.names = {i: block.block_hash for i, block in self.blocks.items()}  # names are keys: they stay the same objects

    def _grow(self, node, path, known):
        below = sorted(other for other in known if len(other) == len(path) + 1 and other.startswith(path))
        if len(below) == 1 and node is not self.root:
            self._put(node, below[0], known[below[0]])
            return self._grow(node, below[0], known)
        for other in below:
            lower = RadixNode([], [], node)
            self._put(lower, other, known[other])
            node.children[lower.chunks[0]] = lower
            self._grow(lower, other, known)

    def _put(self, node, path, block_id):
        block = None if block_id is None else self.blocks[block_id]
        node.chunks.append((ord(path[-1]),))
        node.blocks.append(block)
        if block is not None:
            block.block_hash = Place(node)

    def edge(self, path):
        """The edge that ends at `path`."""
        node, rest = self.root, chunks_of_text(path)
        while rest:
            node = node.children[rest[0]]
            rest = rest[len(node.chunks) :]
        return node

    def tree(self, join=False):
        """The tree in a line; or, if it is not in order, what is the matter with it."""
        return self.complaint() or told_tree(self.root, join)

    def complaint(self):
        complaint = self._shared() or self._links() or self._renamed()
        if not complaint:
            self.names = {i: block.block_hash for i, block in self.blocks.items()}
        return complaint

    def _shared(self):
        holders = {}
        for i, block in self.blocks.items():
            if block.block_hash is not None and (other := holders.setdefault(id(block.block_hash), i)) != i:
                return f"blocks {other} and {i} share one Place"
        return ""

    def _renamed(self):
        for i, block in self.blocks.items():
            if None not in (self.names[i], block.block_hash) and block.block_hash is not self.names[i]:
                return f"block {i} has another Place than before"
        return ""

    def _links(self):
        seen, nodes, hanging = set(), [self.root], set()
        while nodes:
            node = nodes.pop()
            if id(node) in seen:
                return f"the edge {told_chunks(node.chunks)} hangs in two places"
            seen.add(id(node))
            if not isinstance(node.chunks, list) or not isinstance(node.blocks, list):
                return "an edge whose chunks or blocks are not a list"
            if len(node.chunks) != len(node.blocks):
                return f"an edge with {len(node.chunks)} chunks and {len(node.blocks)} blocks"
            if not node.chunks and node is not self.root:
                return "an edge without chunks"
            for block in node.blocks:
                if block is None:
                    continue
                if block.block_id in hanging:
                    return f"block {block.block_id} hangs in two places"
                hanging.add(block.block_id)
                if (lies_on := getattr(block.block_hash, "node", None)) is not node:
                    place = told_chunks(lies_on.chunks) if isinstance(lies_on, RadixNode) else ""
                    says = f"says the edge {place}" if place else "says nothing"
                    return f"block {block.block_id} lies on the edge {told_chunks(node.chunks)}, its place {says}"
            for first, child in node.children.items():
                if not isinstance(child, RadixNode):
                    return f"a child that is no edge: {child!r}"[:80]
                if not child.chunks:
                    return "an edge without chunks"
                if child.chunks[0] != first:
                    return f"the edge {told_chunks(child.chunks)} is filed under {told_chunks([first])}"
                if child.parent is not node:
                    return f"the edge {told_chunks(child.chunks)} does not know the edge above it"
                nodes.append(child)
        for block in self.blocks.values():
            if block.block_hash is not None and block.block_id not in hanging:
                return f"block {block.block_id} has a place and is not in the tree"
        return ""

    def ids(self, blocks):
        if not isinstance(blocks, list):
            return f"returned {blocks!r}"[:80]
        if all(isinstance(block, KVCacheBlock) for block in blocks):
            return [block.block_id for block in blocks]
        told = ("-" if b is None else f"block {b.block_id}" if isinstance(b, KVCacheBlock) else repr(b)[:20] for b in blocks)
        return f"returned [{', '.join(told)}]"


def told_tree(root, join=False):
    def of(node):
        chunks, blocks, children = list(node.chunks), list(node.blocks), node.children
        while join and len(children) == 1:
            (child,) = children.values()
            chunks, blocks, children = chunks + child.chunks, blocks + child.blocks, child.children
        ids = " ".join("-" if block is None else str(block.block_id) for block in blocks)
        below = " ".join(sorted(of(child) for child in children.values()))
        return f"{told_chunks(chunks)}[{ids}]" + (f"({below})" if below else "")

    return " ".join(sorted(of(child) for child in root.children.values())) or "empty"


class FindDriver(Forest):
    def find(self, text):
        chunks, before = chunks_of_text(text), self.tree()
        found = self.student.find(self.root, chunks)
        if chunks != chunks_of_text(text):
            return "find has changed the list `chunks`"
        if (after := self.tree()) != before:
            return f"find has changed the tree: it was {before}, it is {after}"
        ids = self.ids(found)
        if isinstance(found, list):
            found.clear()
            if self.tree() != before:
                return "find has handed out the edge's own list `blocks`"
        return ids

    def looks(self, num_children):
        """Children looked at when a text goes on from a root with many."""
        root = RadixNode([], [], None)
        root.children = CountedDict(root.children)
        for i in range(num_children):
            dict.__setitem__(root.children, (i,), RadixNode([(i,)], [KVCacheBlock(i)], root))
        CountedDict.looks = 0
        self.student.find(root, [(num_children // 2,)])
        return CountedDict.looks


class CountedDict(dict):
    """Counts the entries that are looked at."""

    looks = 0

    def __getitem__(self, key):
        CountedDict.looks += 1
        return dict.__getitem__(self, key)

    def get(self, key, default=None):
        CountedDict.looks += 1
        return dict.get(self, key, default)

    def __contains__(self, key):
        CountedDict.looks += 1
        return dict.__contains__(self, key)

    def __iter__(self):
        for key in dict.__iter__(self):
            CountedDict.looks += 1
            yield key

    def keys(self):
        return list(self)

    def values(self):
        return [dict.__getitem__(self, key) for key in self]

    def items(self):
        return [(key, dict.__getitem__(self, key)) for key in self]


class SplitDriver(Forest):
    def split(self, path, k):
        node = self.edge(path)
        upper = self.student.split(node, k)
        returned = told_chunks(upper.chunks) if isinstance(upper, RadixNode) else repr(upper)
        halves = [upper, *getattr(upper, "children", {}).values()]
        if not (complaint := self.complaint()) and not any(half is node for half in halves):
            complaint = "neither half is `node` itself"
        return f"{complaint or told_tree(self.root)}; returned {returned}"


class AddDriver(Forest):
    def add(self, text, ids):
        chunks, blocks = chunks_of_text(text), [self.blocks[i] for i in ids]
        published = self.student.add(self.root, chunks, blocks)
        if chunks != chunks_of_text(text) or blocks != [self.blocks[i] for i in ids]:
            return "add has changed the list `chunks` or `blocks`"
        told = f"published {self.ids(published)}; {self.tree()}"
        for given in (chunks, blocks, published):  # whose they are is settled now
            if isinstance(given, list):
                given.clear()
        return told if told.endswith(f"; {self.tree()}") else "the tree keeps the very list `chunks` or `blocks` that add got"


class TakeOutDriver(Forest):
    def take_out(self, block_id):
        self.student.take_out(self.blocks[block_id])
        return self.tree(join=True)


class TreeDriver:
    def __init__(self, student, block_size):
        self.student, self.index = student, student.RadixTree(block_size)
        self.blocks = [KVCacheBlock(i) for i in range(40)]

    def match(self, text, salt=None):
        tokens = [ord(c) for c in text]
        found = self.index.match(tokens, salt)
        return [block.block_id for block in found] if tokens == [ord(c) for c in text] else "match has changed `tokens`"

    def insert(self, text, ids, salt=None):
        tokens, blocks = [ord(c) for c in text], [self.blocks[i] for i in ids]
        self.index.insert(tokens, blocks, salt)
        same = tokens == [ord(c) for c in text] and blocks == [self.blocks[i] for i in ids]
        return None if same else "insert has changed `tokens` or `blocks`"

    def remove(self, block_id):
        self.index.remove(self.blocks[block_id])

    def remove_of_another(self, block_id):
        """Remove here what a second index has published."""
        other, block = self.student.RadixTree(1), KVCacheBlock(block_id)
        other.insert([ord("a")], [block])
        self.index.remove(block)

    def num_trees(self):
        return len(self.index.roots)

    def published(self):
        """Blocks with a name, by which the index knows them."""
        known = self.index.cached_block_hash_to_block
        for block in self.blocks:
            if block.block_hash is not None and known.get(block.block_hash) is not block:
                return f"block {block.block_id} bears a name by which the index does not know it"
        named = [block.block_id for block in self.blocks if block.block_hash is not None]
        return named if len(named) == len(known) else f"{len(known)} names for {len(named)} blocks that bear one"


class LeafDriver(Forest):
    def leaf_to_evict(self, owned, last_used):
        for block in self.blocks.values():
            block.ref_cnt = int(block.block_id in owned)
        given, before = dict(last_used), self.tree()
        leaf = self.student.leaf_to_evict(self.root, given)
        if given != last_used or self.tree() != before:
            return "leaf_to_evict has changed the tree or last_used"
        if leaf is not None and not isinstance(leaf, RadixNode):
            return f"returned {leaf!r}"[:80]
        return None if leaf is None else f"the edge {told_tree_edge(leaf)}"


def told_tree_edge(node):
    return f"{told_chunks(node.chunks)}[{' '.join(str(block.block_id) for block in node.blocks)}]"


class SizeDriver:
    def __init__(self, student):
        self.student = student

    def tree_size(self, texts, block_size):
        def numbers(text):  # a: 1, b: 11, c: 111 -- written one after the other, ab and ba are the same
            return [int("1" * (ord(letter) - ord("a") + 1)) for letter in text]

        given = [numbers(text) for text in texts]
        size = self.student.tree_size(given, block_size)
        return size if given == [numbers(text) for text in texts] else "tree_size has changed the list `texts`"
