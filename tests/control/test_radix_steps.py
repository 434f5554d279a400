"""The steps of lab 06, put together as an index, beside the hash chain: never another hit, and no dead wood."""

import random

import pytest
from test_fuzz import break_it

from kvlab.blocks import BlockPool, KVCacheBlock
from kvlab.prefix import HashChainIndex, radix_steps
from kvlab.prefix.radix_steps import Place, add, chunks_of, find, leaf_to_evict, take_out, tree_size
from kvlab.prefix.radix_tree import RadixNode


def below(node):
    yield node
    for child in node.children.values():
        yield from below(child)


def check(root):
    """AssertionError unless links, names and shape agree."""
    for node in below(root):
        assert len(node.chunks) == len(node.blocks) and (node.chunks or node is root)
        for chunk, child in node.children.items():
            assert child.parent is node and child.chunks[0] == chunk
        for block in filter(None, node.blocks):
            assert isinstance(block.block_hash, Place) and block.block_hash.node is node
        assert node is root or node.children or node.blocks[-1] is not None, "dead wood"


class Steps:
    def __init__(self, block_size):
        self.block_size, self.cached_block_hash_to_block = block_size, {}
        self.root = RadixNode([], [], None)

    def match(self, tokens, salt=None):
        return radix_steps.find(self.root, chunks_of(tokens, self.block_size))

    def insert(self, tokens, blocks, salt=None, cursor=None):
        for block in radix_steps.add(self.root, chunks_of(tokens, self.block_size), blocks):
            self.cached_block_hash_to_block[block.block_hash] = block

    def remove(self, block):
        del self.cached_block_hash_to_block[block.block_hash]
        radix_steps.take_out(block)


class Text:
    def __init__(self, tokens):
        self.request_id, self.all_token_ids, self.cache_salt = "r", tokens, None


def play(number, check=check):
    """Texts come, are published and end, in two pools, one with each index; every text is looked up after each move."""
    rng = random.Random(number)
    size = rng.choice([1, 1, 2])
    pools = [BlockPool(rng.choice([8, 12]), prefix_index=Steps(size))]
    pools.append(BlockPool(pools[0].num_gpu_blocks, prefix_index=HashChainIndex(size)))
    held, texts = [], []
    for _ in range(50):
        if rng.random() < 0.5 or not held:
            tokens = [rng.randrange(2) for _ in range(rng.randint(0, 8))]
            texts.append(tokens)
            tables = []
            for pool in pools:
                hits = pool.prefix_index.match(tokens) if number % 3 else []
                needed = -(-len(tokens) // size) - len(hits)
                if needed + sum(b.ref_cnt == 0 for b in hits) > pool.get_num_free_blocks():
                    break
                pool.touch(hits)
                tables.append(hits + pool.get_new_blocks(needed))
            if tables:
                for pool, table in zip(pools, tables, strict=True):
                    pool.cache_full_blocks(Text(tokens), table, len(tokens) // size)
                held.append(tables)
        else:
            order = list(range(len(held[0][0]))) if number % 2 else None
            tables = held.pop(rng.randrange(len(held)))
            for pool, table in zip(pools, tables, strict=True):
                pool.free_blocks(table if order else table[::-1])
        check(pools[0].prefix_index.root)
        for tokens in texts:
            tree, chain = ([b.block_id for b in pool.prefix_index.match(tokens)] for pool in pools)
            assert tree == chain
        cached = [{b.block_id for b in pool.cached_block_hash_to_block.values()} for pool in pools]
        assert cached[0] == cached[1]


def test_the_steps_together_are_the_hash_chain():
    for number in range(150):
        play(number)


FAULTS = {
    "a match passes over a gap": ("find", "block is None or ", ""),
    "a match does not look at the tokens": ("find", " or chunks[len(found)] != chunk", ""),
    "places are not told": ("split", "_settle(upper, upper.blocks)", "pass"),
    "a split forgets what is above": ("split", "upper.parent.children[upper.chunks[0]] = upper", "pass"),
    "a split forgets what is below": ("split", "node.parent = upper", "pass"),
    "the second publisher takes the place": ("add", "if node.blocks[i] is None:", "if True:"),
    "a leaf with children grows": ("add", "if node.children or node.parent is None:", "if node.parent is None:"),
    "no split": ("add", "node = split(node, i)", "del node.chunks[i:], node.blocks[i:]"),
    "a removed block stays": ("take_out", "node.blocks[node.blocks.index(block)] = ", ""),
    "an empty edge stays": ("take_out", "del node.children[first]", "pass"),
    "dead wood stays": ("take_out", "node.blocks[-1] is None", "not node.blocks"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_caught(monkeypatch, fault):
    break_it(monkeypatch, radix_steps, *FAULTS[fault])
    with pytest.raises(Exception):  # noqa: B017
        for number in range(150):
            play(number)


def texts_to_nodes(*texts):
    root, blocks = RadixNode([], [], None), {}
    for i, text in enumerate(texts):
        blocks[text] = [KVCacheBlock(10 * i + k) for k in range(len(text))]
        add(root, chunks_of(text, 1), blocks[text])
    return root, blocks


def test_tree_size_is_what_adding_makes():
    rng = random.Random(1)
    for _ in range(200):
        texts = {"".join(rng.choice("ab") for _ in range(rng.randint(0, 6))) for _ in range(rng.randint(0, 6))}
        root, blocks = texts_to_nodes(*texts)
        nodes = list(below(root))[1:]
        size = sum(map(len, texts)), sum(len(node.chunks) for node in nodes), len(nodes)
        assert tree_size(list(texts), 1) == size
    assert tree_size(["abcdef", "abcdxy", "abcd"], 2) == (8, 4, 3)


def test_leaf_only_eviction_never_makes_a_gap():
    root, blocks = texts_to_nodes("abcd", "abxy", "q")
    last_used = {block.block_id: 0 for row in blocks.values() for block in row} | {3: 5, 13: 2, 20: 9}
    assert leaf_to_evict(root, last_used).chunks == [("x",), ("y",)]
    blocks["abxy"][3].ref_cnt = 1
    assert leaf_to_evict(root, last_used).chunks == [("c",), ("d",)]
    for block in reversed(blocks["abcd"][2:]):
        take_out(block)
    assert leaf_to_evict(root, last_used).chunks == [("q",)]
    take_out(blocks["q"][0])
    assert leaf_to_evict(root, last_used) is None
    assert find(root, chunks_of("abxz", 1)) == [*blocks["abcd"][:2], blocks["abxy"][2]]
