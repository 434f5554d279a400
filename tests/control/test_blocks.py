"""Free queue, pool, table and hash chain: exact orders and counts (pitfalls 1-4)."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.blocks import BlockPool, BlockTable, OutOfBlocks
from kvlab.prefix import HashChainIndex


def sequence(tokens, salt=None):
    return SimpleNamespace(request_id="r", all_token_ids=list(tokens), cache_salt=salt)


def order(pool):
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def published(pool, tokens, salt=None):
    """Allocate blocks for `tokens` and publish the full ones."""
    blocks = pool.get_new_blocks(-(-len(tokens) // pool.prefix_index.block_size))
    pool.cache_full_blocks(sequence(tokens, salt), blocks, len(tokens) // pool.prefix_index.block_size)
    return blocks


def make_pool(num, size=2):
    return BlockPool(num, prefix_index=HashChainIndex(size))


def test_block_0_is_never_handed_out_and_one_less_is_usable():
    pool = BlockPool(8)
    assert pool.num_usable_blocks == pool.get_num_free_blocks() == 7
    assert [b.block_id for b in pool.get_new_blocks(7)] == [1, 2, 3, 4, 5, 6, 7]
    assert pool.get_usage() == 1.0
    with pytest.raises(OutOfBlocks):
        pool.get_new_blocks(1)


def test_least_recently_freed_is_reused_first_and_a_requests_prefix_last():
    pool = make_pool(6)
    blocks = published(pool, [1, 2, 3, 4, 5, 6])
    pool.free_blocks(reversed(blocks))
    assert order(pool) == [4, 5, 3, 2, 1]  # never used ones first, then the request's last block
    pool.get_new_blocks(3)
    assert pool.prefix_index.match([1, 2, 3, 4, 5, 6]) == blocks[:2]


def test_a_cached_block_leaves_the_middle_of_the_queue_and_comes_back_at_its_end():
    pool = make_pool(5)
    blocks = published(pool, [1, 2, 3, 4])
    pool.free_blocks(reversed(blocks))
    assert order(pool) == [3, 4, 2, 1]
    pool.touch([blocks[1]])
    assert order(pool) == [3, 4, 1]
    pool.free_blocks([blocks[1]])
    assert order(pool) == [3, 4, 1, 2]


def test_a_reused_block_loses_its_name():
    pool = make_pool(2)
    [block] = published(pool, [1, 2])
    name = block.block_hash
    pool.free_blocks([block])
    assert pool.get_cached_block(name) is block  # free, and findable until it is reused
    pool.get_new_blocks(1)
    assert block.block_hash is None and pool.get_cached_block(name) is None
    assert pool.prefix_index.match([1, 2]) == []


def test_of_two_blocks_with_one_content_the_first_has_the_name_and_the_other_may_go():
    pool = make_pool(4)
    [first], [second] = published(pool, [1, 2]), published(pool, [1, 2])
    assert second.block_hash is None
    pool.free_blocks([second])
    pool.free_blocks([first])
    pool.get_new_blocks(2)  # block 3, and the duplicate
    assert pool.prefix_index.match([1, 2]) == [first]
    with pytest.raises(ValueError, match=f"block {second.block_id} is not published"):
        pool.prefix_index.remove(second)
    pool.get_new_blocks(1)
    assert pool.prefix_index.match([1, 2]) == []


def test_a_child_whose_parent_is_evicted_is_out_of_reach_until_the_parent_is_published_anew():
    pool = make_pool(4)
    parent, child = published(pool, [1, 2, 3, 4])
    pool.free_blocks([parent])  # the wrong order, on purpose
    pool.free_blocks([child])
    pool.get_new_blocks(2)  # block 3 and the parent
    assert pool.prefix_index.match([1, 2, 3, 4]) == [] and child.block_hash is not None
    [again] = [b for b in pool.blocks if b.ref_cnt and b is parent]
    pool.cache_full_blocks(sequence([1, 2]), [again], 1)
    assert pool.prefix_index.match([1, 2, 3, 4]) == [again, child]


def test_a_double_free_changes_nothing():
    pool = BlockPool(5)
    first, second = pool.get_new_blocks(2)
    pool.free_blocks([second])
    before = order(pool)
    for bad in ([first, second], [first, first]):
        with pytest.raises(ValueError, match="has no owner: it was freed twice"):
            pool.free_blocks(bad)
        assert first.ref_cnt == 1 and second.ref_cnt == 0 and order(pool) == before


def test_touch_takes_any_iterable_and_reports_it():
    from kvlab.events import Recorder

    recorder = Recorder()
    pool = BlockPool(5, recorder=recorder)
    blocks = pool.get_new_blocks(2)
    pool.touch(iter(blocks))
    assert [b.ref_cnt for b in blocks] == [2, 2]
    assert recorder.events("touch")[0].values == (1, 2)
    pool.touch([])
    assert len(recorder.events("touch")) == 1


def test_a_block_is_writable_with_one_owner_and_no_name():
    pool = make_pool(4)
    [block] = pool.get_new_blocks(1)
    assert block.is_writable
    pool.touch([block])
    assert not block.is_writable
    pool.free_blocks([block])
    pool.cache_full_blocks(sequence([1, 2]), [block], 1)
    assert block.ref_cnt == 1 and not block.is_writable


def test_the_cache_is_reset_only_when_nobody_owns_a_block():
    pool = make_pool(4)
    blocks = published(pool, [1, 2, 3, 4])
    assert not pool.reset_prefix_cache() and len(pool.prefix_index.match([1, 2, 3, 4])) == 2
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache() and not pool.cached_block_hash_to_block


def test_a_table_maps_positions_to_slots():
    """L33 2.2: token 37 at block size 16 is offset 5 of logical block 2."""
    pool = BlockPool(200)
    table = BlockTable([pool.blocks[17], pool.blocks[3], pool.blocks[142]])
    assert table.slot(37, 16) == 142 * 16 + 5
    for outside in (-1, 48):
        with pytest.raises(IndexError, match=f"position {outside} has no slot"):
            table.slot(outside, 16)
    version = table.version
    table.append(pool.blocks[4])
    assert table.version == version  # appending is not a change of what was there
    assert table.replace(0, pool.blocks[5]).block_id == 17 and table.version != version


# ---- the hash chain

TEXTS = st.lists(st.integers(0, 1), max_size=10)
STEPS = st.lists(st.tuples(TEXTS, st.sampled_from([None, "", "a"])), max_size=8)


@given(STEPS, TEXTS, st.sampled_from([None, "", "a"]), st.integers(1, 4))
@settings(deadline=None, max_examples=150)
def test_the_chain_finds_what_a_dictionary_of_whole_prefixes_finds(texts, query, salt, size):
    pool = BlockPool(200, prefix_index=HashChainIndex(size))
    names = {}
    for tokens, its_salt in texts:
        blocks = published(pool, tokens, its_salt)
        for k in range(1, len(tokens) // size + 1):
            names.setdefault((its_salt, tuple(tokens[: k * size])), blocks[k - 1])
    expected = []
    for k in range(1, len(query) // size + 1):
        if (salt, tuple(query[: k * size])) not in names:
            break
        expected.append(names[salt, tuple(query[: k * size])])
    assert pool.prefix_index.match(query, salt) == expected


@given(TEXTS, st.integers(1, 3), st.lists(st.integers(0, 10), max_size=4))
@settings(deadline=None, max_examples=100)
def test_a_cursor_saves_work_and_changes_nothing(tokens, size, stops):
    whole, grown = make_pool(30, size), make_pool(30, size)
    full = len(tokens) // size
    blocks, others = whole.get_new_blocks(full), grown.get_new_blocks(full)
    whole.cache_full_blocks(sequence(tokens), blocks, full)
    cursor = None
    for stop in [*sorted(min(s, full) for s in stops), full]:
        cursor = grown.cache_full_blocks(sequence(tokens), others, stop, cursor)
    assert [b.block_hash for b in blocks] == [b.block_hash for b in others]


def test_names_are_equal_in_every_process():
    program = (
        "from kvlab.prefix import HashChainIndex; from kvlab.blocks import BlockPool; i = HashChainIndex(2);"
        "b = BlockPool(5).get_new_blocks(2); i.insert([1, 2, 3, 4], b, 'tenant');"
        "print([x.block_hash.hex() for x in b])"
    )
    answers = {
        subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed},
                       capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(answers) == 1 and len(answers.pop()) > 64


def test_no_salt_is_not_the_empty_salt():
    pool = make_pool(10)
    published(pool, [1, 2], salt="")
    assert pool.prefix_index.match([1, 2]) == [] and len(pool.prefix_index.match([1, 2], "")) == 1
