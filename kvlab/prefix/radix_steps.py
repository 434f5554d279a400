"""The radix tree in steps (L33 6.2; lab 06): the functions that a prefix index over a tree is made of.

    tree_size      texts on paper: blocks without sharing, blocks in the tree, edges
    find           walk down: the blocks that hold the beginning of a text, up to the first gap
    split          cut an edge in two, where two texts part
    add            publish blocks along a text: places are made, gaps are filled, what is taken stays
    take_out       forget one block: a gap, and no dead wood
    leaf_to_evict  which edge leaf-only eviction gives up next, in the place of the pool's queue

Here a block's name is its Place, which knows the edge it lies on; whoever moves blocks to another edge tells the
places. RadixTreeIndex does the same with whole numbers for names, and joins edges again; it drives the engine.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from kvlab.blocks import KVCacheBlock
from kvlab.prefix.radix_tree import Chunk, RadixNode


class Place:
    """The name of a published block. node: the edge that it lies on."""

    __slots__ = ("node",)

    def __init__(self, node: RadixNode):
        self.node = node


def chunks_of(tokens: Sequence[int], block_size: int) -> list[Chunk]:
    """The tokens of each full block, as tuples."""
    return [tuple(tokens[end - block_size : end]) for end in range(block_size, len(tokens) + 1, block_size)]


def tree_size(texts: Sequence[Sequence[int]], block_size: int) -> tuple[int, int, int]:
    """Full blocks of all texts together, different ones among them (by all that stands before), edges of the tree."""
    paths = [tuple(chunks_of(text, block_size)) for text in texts]
    places = {path[:end] for path in paths for end in range(1, len(path) + 1)}
    children = Counter(place[:-1] for place in places)
    return sum(map(len, paths)), len(places), sum(children[place] != 1 for place in places)


def find(root: RadixNode, chunks: Sequence[Chunk]) -> list[KVCacheBlock]:
    """The blocks that hold the longest published beginning of `chunks`, in order. O(hit)."""
    found: list[KVCacheBlock] = []
    node: RadixNode | None = root
    while len(found) < len(chunks) and (node := node.children.get(chunks[len(found)])) is not None:
        for chunk, block in zip(node.chunks, node.blocks, strict=True):
            if block is None or len(found) == len(chunks) or chunks[len(found)] != chunk:
                return found
            found.append(block)
    return found


def split(node: RadixNode, k: int) -> RadixNode:
    """Cut the edge `node` after its first k blocks, 0 < k < len(node.chunks). Returns the new upper edge; `node` is
    the lower one."""
    upper = RadixNode(node.chunks[:k], node.blocks[:k], node.parent)
    upper.children[node.chunks[k]] = node
    upper.parent.children[upper.chunks[0]] = upper
    node.parent = upper
    del node.chunks[:k], node.blocks[:k]
    _settle(upper, upper.blocks)
    return upper


def _settle(node: RadixNode, blocks: Sequence[KVCacheBlock | None]) -> None:
    for block in blocks:
        if block is not None:
            block.block_hash.node = node


def add(root: RadixNode, chunks: Sequence[Chunk], blocks: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
    """Publish blocks[i] at the place of chunks[i], as many as there are blocks. Returns those that got a place.

    A place that is taken stays with its first publisher. Edges part only where texts do; a leaf grows.
    """
    published, node, i = [], root, 0
    for number, block in enumerate(blocks):
        if i == len(node.chunks) and (child := node.children.get(chunks[number])) is not None:
            node, i = child, 0
        elif i == len(node.chunks) or node.chunks[i] != chunks[number]:
            rest = list(chunks[number : len(blocks)])
            if i < len(node.chunks):
                node = split(node, i)
            if node.children or node.parent is None:
                node.children[rest[0]] = node = RadixNode([], [], node)
                i = 0
            node.chunks += rest
            node.blocks += [None] * len(rest)
        if node.blocks[i] is None:
            node.blocks[i], block.block_hash = block, Place(node)
            published.append(block)
        i += 1
    return published


def take_out(block: KVCacheBlock) -> None:
    """Forget a published block. Its place becomes a gap; gaps at the end of a leaf, and edges without blocks and
    children, are cut off."""
    node = block.block_hash.node
    node.blocks[node.blocks.index(block)] = block.block_hash = None
    while node.parent is not None and not node.children:
        first = node.chunks[0]
        while node.blocks and node.blocks[-1] is None:
            node.blocks.pop()
            node.chunks.pop()
        if node.blocks:
            return
        node = node.parent
        del node.children[first]


def leaf_to_evict(root: RadixNode, last_used: Mapping[int, float]) -> RadixNode | None:
    """Of the edges without children whose blocks nobody owns, the one whose latest use is longest ago; None if none.

    last_used: by block_id.
    """
    free = [leaf for leaf in _leaves(root) if not any(block.ref_cnt for block in leaf.blocks)]
    return min(free, key=lambda leaf: max(last_used[block.block_id] for block in leaf.blocks), default=None)


def _leaves(root: RadixNode) -> Iterator[RadixNode]:
    nodes = list(root.children.values())
    while nodes:
        node = nodes.pop()
        if node.children:
            nodes += node.children.values()
        else:
            yield node
