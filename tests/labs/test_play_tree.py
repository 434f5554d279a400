"""Caches under pressure: the same hits from every index, nobody's blocks taken, no gap under leaf-only eviction."""

import random

import pytest

from kvlab.blocks import OutOfBlocks
from kvlab.lab.scenes.tree import (
    LeafCache,
    NamelessFirst,
    QueueCache,
    chats,
    endless,
    findable,
    join,
    plans,
    record_turns,
    serve,
    strangers,
    words,
)  # fmt: skip
from kvlab.prefix import HashChainIndex, RadixTreeIndex
from kvlab.prefix.radix_steps import leaf_to_evict

PROMPTS = plans(2)[:60]
TIGHT = 4 * max(-(-len(tokens) // 8) for tokens in PROMPTS)  # blocks of 8: four prompts that share nothing just fit


def below(node):
    for child in node.children.values():
        yield child
        yield from below(child)


def caches(num_blocks, size=8):
    yield QueueCache(RadixTreeIndex(size), num_blocks)
    yield QueueCache(HashChainIndex(size), num_blocks)
    yield NamelessFirst(RadixTreeIndex(size), num_blocks)
    for whole_edge in (False, True):
        for joined in (False, True):
            yield LeafCache(num_blocks, size, leaf_to_evict, whole_edge, joined)


@pytest.mark.parametrize("make", [chats, plans, strangers])
def test_traffic_is_the_same_from_the_same_seed(make):
    assert make(3) == make(3) != make(4)


def test_a_turn_of_a_chat_goes_on_where_an_earlier_one_was():
    prompts = chats(1)
    goes_on = [any(tokens[: len(before)] == before for before in prompts[:i]) for i, tokens in enumerate(prompts)]
    assert goes_on.count(False) == 40, "each of the 40 people has one first turn"


def test_with_room_for_all_every_rule_finds_what_an_endless_cache_finds():
    found = sum(endless(PROMPTS, HashChainIndex(8))) / sum(map(len, PROMPTS))
    assert 0.3 < found < 1
    for cache in caches(num_blocks=2000):
        assert serve(PROMPTS, cache) == pytest.approx(found)


def test_the_last_token_is_never_found():
    assert findable("abcdefgh", 2) == "abcdef" and findable("abcdefg", 2) == "abcdef" and findable("ab", 2) == ""
    assert endless([list(range(8))] * 2, RadixTreeIndex(2)) == [0, 6]


def test_the_queue_finds_the_same_over_either_index():
    for num_blocks in (TIGHT, TIGHT + 10, TIGHT + 40):
        tree, chain, *_ = caches(num_blocks)
        assert serve(PROMPTS, tree) == serve(PROMPTS, chain)


def test_no_rule_takes_a_block_from_its_owner():
    for num_blocks in (TIGHT, TIGHT + 10):
        for cache in caches(num_blocks):
            running = []
            for tokens in PROMPTS:
                if len(running) == 4:
                    cache.end(running.pop(0))
                running.append(cache.start(tokens)[0])
                owned = [block.block_id for block in {id(b): b for table in running for b in table}.values()]
                assert len(set(owned)) == len(owned) <= num_blocks
                assert all(block.ref_cnt == sum(block in table for table in running) for block in running[-1])


def test_nameless_blocks_go_first():
    cache = NamelessFirst(RadixTreeIndex(2), 4)
    cache.end(cache.start([1, 2, 3, 4, 5])[0])  # two named blocks, one without a name, one never used
    cache.start([7, 8, 9])
    assert len(cache.index.match([1, 2, 3, 4])) == 2
    queue = QueueCache(RadixTreeIndex(2), 4)
    queue.end(queue.start([1, 2, 3, 4, 5])[0])
    queue.start([7, 8, 9])
    assert len(queue.index.match([1, 2, 3, 4])) == 2, "last block first: the nameless one stands before the named"
    queue.start([10])
    cache.start([10])
    assert len(queue.index.match([1, 2, 3, 4])) == len(cache.index.match([1, 2, 3, 4])) == 1


@pytest.mark.parametrize("whole_edge", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_leaves_only_leave_no_gap_and_joined_no_only_child(whole_edge, joined):
    cache, only_children = LeafCache(TIGHT, 8, leaf_to_evict, whole_edge, joined), 0
    running = []
    for tokens in PROMPTS:
        if len(running) == 4:
            cache.end(running.pop(0))
        running.append(cache.start(tokens)[0])
        for node in below(cache.root):
            assert None not in node.blocks and all(block.block_hash.node is node for block in node.blocks)
            assert all(child.parent is node for child in node.children.values())
            only_children += len(node.children) == 1
    assert (only_children == 0) == joined


def test_a_tree_whose_leaves_are_all_owned_has_nothing_to_give():
    cache = LeafCache(4, 2, leaf_to_evict)
    cache.start([1, 2, 3, 4, 5, 6])
    with pytest.raises(OutOfBlocks):
        cache.start([7, 8, 9, 10])


def test_join_spares_the_root():
    cache = LeafCache(4, 2, leaf_to_evict)
    cache.start([1, 2, 3])
    join(cache.root)
    assert not cache.root.chunks and len(cache.root.children) == 1


def test_the_engines_turns_are_recorded_as_they_were():
    prompts = [("A", [1, 2, 3, 4]), ("B", [1, 2, 5, 6]), ("A", [1, 2, 3, 4])]
    moments = record_turns(RadixTreeIndex, prompts)
    assert [moment.step for moment in moments] == list(range(len(moments)))
    last = {moment.turn: moment for moment in moments}
    assert [last[turn].num_found for turn in (1, 2, 3)] == [0, 2, 2], "the last token is always computed"
    assert moments[0].owned == {1, 2} and not last[3].owned
    sizes = [sum(len(node.blocks) for node in below(moment.root)) for moment in moments if moment.root]
    assert sizes[0] < sizes[-1], "a moment is not changed by what comes after it"


def test_words_are_as_many_as_asked_for():
    assert {len(words(random.Random(seed), 2, 4)) for seed in range(30)} == {2, 3, 4}
