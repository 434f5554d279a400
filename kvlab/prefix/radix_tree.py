"""The radix tree (基数树): prompts that share a beginning share a path (L33 6.2; lab 06).

    root(salt) --[AB][CD]--> . --[EF]-------> .        an edge is a run of blocks, a block the tokens that fill it
                             '---[GH][IJ]---> .        edges part where prompts do, always between two blocks

        insert CD->XY below [AB]:  the edge [AB][CD] is split, and [XY] hangs beside what was below

Each place on an edge has the block that holds those tokens, or a gap: nobody has published it yet, or it has been
evicted. A match ends at the first gap, so what lies behind one is out of reach until somebody publishes the missing
block anew; behind it everything is as it was. That is exactly what the hash chain does, so both give the same hits, and
each is the other's oracle. The hash chain needs one look-up a block; the tree also shows who shares what with whom.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Any

from kvlab.blocks import KVCacheBlock

Chunk = tuple[int, ...]  # the tokens of one block


class RadixNode:
    """An edge and what hangs below it. chunks[i] are the tokens of the i-th block of the run, blocks[i] who holds it.

    children: by the first chunk of their edge. A root has no chunks.
    """

    __slots__ = ("chunks", "blocks", "children", "parent")

    def __init__(self, chunks: list[Chunk], blocks: list[KVCacheBlock | None], parent: "RadixNode | None"):
        self.chunks, self.blocks, self.parent = chunks, blocks, parent
        self.children: dict[Chunk, RadixNode] = {}


class RadixTreeIndex:
    """A prefix index (kvlab.blocks.PrefixIndex) over one tree a salt."""

    def __init__(self, block_size: int):
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}: a block holds at least 1 token")
        self.block_size = block_size
        self.cached_block_hash_to_block: dict[int, KVCacheBlock] = {}
        self.roots: dict[Hashable, RadixNode] = {}  # by salt
        self._node_of: dict[int, RadixNode] = {}  # a block's name -> the edge it lies on
        self._names = count(1)

    def _chunks(self, tokens: Sequence[int], number: int) -> Iterator[Chunk]:
        size = self.block_size
        return (tuple(tokens[i * size : (i + 1) * size]) for i in range(number))

    def match(self, tokens: Sequence[int], salt: str | None = None) -> list[KVCacheBlock]:
        """The published blocks that hold the longest prefix of `tokens`, in order. O(hit)."""
        found: list[KVCacheBlock] = []
        node, i = self.roots.get(salt), 0
        for chunk in self._chunks(tokens, len(tokens) // self.block_size):
            if node is not None and i == len(node.chunks):
                node, i = node.children.get(chunk), 0
            if node is None or node.chunks[i] != chunk or node.blocks[i] is None:
                break
            found.append(node.blocks[i])
            i += 1
        return found

    def insert(self, tokens: Sequence[int], blocks: Sequence[KVCacheBlock], salt: str | None = None,
               cursor: Any = None) -> int:  # fmt: skip
        """Publish `blocks` as holders of the first len(blocks) blocks of `tokens`.

        Returns the cursor: how many blocks have been offered; given it back, those are not offered again. The walk
        starts at the root all the same, for edges split and join meanwhile: O(len(blocks)).
        ValueError if `tokens` do not fill the blocks.
        """
        if len(tokens) < len(blocks) * self.block_size:
            raise ValueError(f"{len(tokens)} tokens do not fill {len(blocks)} blocks of {self.block_size}")
        done = cursor or 0
        if len(blocks) <= done:
            return done
        node, i = self.roots.setdefault(salt, RadixNode([], [], None)), 0
        for number, (chunk, block) in enumerate(zip(self._chunks(tokens, len(blocks)), blocks, strict=True)):
            node, i = self._step(node, i, chunk)
            if number >= done and node.blocks[i] is None:  # the first publisher keeps the place; a hit has its own
                block.block_hash = next(self._names)
                node.blocks[i] = block
                self.cached_block_hash_to_block[block.block_hash] = block
                self._node_of[block.block_hash] = node
            i += 1
        self._tidy(node)
        return len(blocks)

    def remove(self, block: KVCacheBlock) -> None:
        """Leave a gap in the place of `block`. ValueError if it is not published here."""
        if self.cached_block_hash_to_block.get(block.block_hash) is not block:
            raise ValueError(f"block {block.block_id} is not published, so it cannot be removed")
        node = self._node_of.pop(block.block_hash)
        del self.cached_block_hash_to_block[block.block_hash]
        block.block_hash = None
        node.blocks[node.blocks.index(block)] = None
        self._tidy(node)

    # ---- the shape of the tree

    def _step(self, node: RadixNode, i: int, chunk: Chunk) -> tuple[RadixNode, int]:
        """Where `chunk` stands after the first i of `node`'s chunks; the place is made, with a gap, if it is new."""
        if i < len(node.chunks):
            if node.chunks[i] == chunk:
                return node, i
            node = self._split(node, i)
        elif chunk in node.children:
            return node.children[chunk], 0
        elif node.parent is not None and not node.children:  # a leaf grows
            node.chunks.append(chunk)
            node.blocks.append(None)
            return node, i
        child = node.children[chunk] = RadixNode([chunk], [None], node)
        return child, 0

    def _split(self, node: RadixNode, i: int) -> RadixNode:
        """Cut the edge after its first i chunks; they become a node of their own, above, which is returned."""
        upper = RadixNode(node.chunks[:i], node.blocks[:i], node.parent)
        node.parent.children[upper.chunks[0]] = upper
        node.chunks, node.blocks, node.parent = node.chunks[i:], node.blocks[i:], upper
        upper.children[node.chunks[0]] = node
        self._claim(upper)
        return upper

    def _claim(self, node: RadixNode) -> None:
        for block in node.blocks:
            if block is not None:
                self._node_of[block.block_hash] = node

    def _tidy(self, node: RadixNode) -> None:
        """Cut off gaps at the end of a leaf, and leaves without blocks; join an only child to its parent."""
        while not node.children:
            length = max((i + 1 for i, block in enumerate(node.blocks) if block is not None), default=0)
            if length:
                del node.chunks[length:], node.blocks[length:]
                return
            if node.parent is None:
                self.roots = {salt: root for salt, root in self.roots.items() if root is not node}
                return
            del node.parent.children[node.chunks[0]]
            node = node.parent
        if node.parent is not None and len(node.children) == 1:
            (child,) = node.children.values()
            node.chunks += child.chunks
            node.blocks += child.blocks
            node.children = child.children
            for grandchild in node.children.values():
                grandchild.parent = node
            self._claim(node)

    def check(self) -> None:
        """AssertionError unless the tree is as small as it can be and agrees with the names. O(everything)."""
        named = 0
        for root in self.roots.values():
            assert root.parent is None and not root.chunks and root.children, "a root without anything below it"
            nodes = list(root.children.values())
            while nodes:
                node = nodes.pop()
                assert len(node.chunks) == len(node.blocks) > 0 and node.parent.children[node.chunks[0]] is node
                assert len(node.children) != 1, "an only child that is not joined to its parent"
                assert node.children or node.blocks[-1] is not None, "a leaf that ends in a gap"
                for block in filter(None, node.blocks):
                    named += 1
                    assert self._node_of[block.block_hash] is node, f"{block} is thought to lie elsewhere"
                    assert self.cached_block_hash_to_block[block.block_hash] is block
                nodes += node.children.values()
        assert named == len(self._node_of) == len(self.cached_block_hash_to_block), "names without a place"
