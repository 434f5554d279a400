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
        seen, nodes, hanging = set(), [self.root], set()
        while nodes:
            node = nodes.pop()
            if id(node) in seen:
                return f"the edge {told_chunks(node.chunks)} hangs in two places"
            seen.add(id(node))
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
                if getattr(block.block_hash, "node", None) is not node:
                    place = block.block_hash and told_chunks(block.block_hash.node.chunks)
                    says = f"says the edge {place}" if place else "says nothing"
                    return f"block {block.block_id} lies on the edge {told_chunks(node.chunks)}, its place {says}"
            for first, child in node.children.items():
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
        if not isinstance(blocks, list) or not all(isinstance(block, KVCacheBlock) for block in blocks):
            return f"returned {blocks!r}"[:80]
        return [block.block_id for block in blocks]


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
        return self.ids(self.student.find(self.root, chunks_of_text(text)))

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
        upper = self.student.split(self.edge(path), k)
        returned = told_chunks(upper.chunks) if isinstance(upper, RadixNode) else repr(upper)
        return f"{self.tree()}; returned {returned}"


class AddDriver(Forest):
    def add(self, text, ids):
        published = self.student.add(self.root, chunks_of_text(text), [self.blocks[i] for i in ids])
        return f"published {self.ids(published)}; {self.tree()}"


class TakeOutDriver(Forest):
    def take_out(self, block_id):
        self.student.take_out(self.blocks[block_id])
        return self.tree(join=True)


class TreeDriver:
    def __init__(self, student, block_size):
        self.index = student.RadixTree(block_size)
        self.blocks = [KVCacheBlock(i) for i in range(40)]

    def match(self, text, salt=None):
        return [block.block_id for block in self.index.match([ord(c) for c in text], salt)]

    def insert(self, text, ids, salt=None):
        self.index.insert([ord(c) for c in text], [self.blocks[i] for i in ids], salt)

    def remove(self, block_id):
        self.index.remove(self.blocks[block_id])

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
        leaf = self.student.leaf_to_evict(self.root, last_used)
        if leaf is not None and not isinstance(leaf, RadixNode):
            return f"returned {leaf!r}"[:80]
        return None if leaf is None else f"the edge {told_tree_edge(leaf)}"


def told_tree_edge(node):
    return f"{told_chunks(node.chunks)}[{' '.join(str(block.block_id) for block in node.blocks)}]"


class SizeDriver:
    def __init__(self, student):
        self.student = student

    def tree_size(self, texts, block_size):
        return self.student.tree_size([[ord(letter) for letter in text] for text in texts], block_size)
