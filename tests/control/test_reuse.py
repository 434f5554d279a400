"""Prefix reuse in miniature beside the real manager: the same blocks, the same hits, the same order of eviction."""

from hypothesis import given
from hypothesis import strategies as st

from kvlab.blocks import FreeKVCacheBlockQueue, KVCacheBlock, OutOfBlocks
from kvlab.manager import KVCacheManager
from kvlab.prefix import HashChainIndex, block_keys, new_keys, reuse
from kvlab.schedule import Request

SIZE = 2
PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=9)
SALTS = st.sampled_from([None, "a"])


@given(st.integers(3, 9), st.lists(st.tuples(st.booleans(), PROMPTS, SALTS), max_size=25))
def test_miniature_and_manager_agree(num_blocks, story):
    manager = KVCacheManager(num_blocks + 1, SIZE)
    index = HashChainIndex(SIZE)
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(1, num_blocks + 1)])
    running = []
    for number, (starts, prompt, salt) in enumerate(story):
        if starts or not running:
            request = Request(str(number), prompt, cache_salt=salt)
            hits, num_hit = manager.get_computed_blocks(request)
            fits = manager.allocate_slots(request, len(prompt) - num_hit, hits) is not None
            started = reuse.start_request(queue, index, prompt, salt)
            assert fits == (started is not None)
            if not fits:
                continue
            table, found = started
            assert found == num_hit
            assert [b.block_id for b in table] == manager.get_block_ids(request.request_id)
            request.num_computed_tokens = len(prompt)
            manager.cache_blocks(request, len(prompt))
            full = reuse.num_publishable(len(prompt) + 1, len(prompt), SIZE)
            index.insert(prompt, table[:full], salt)
            running.append((request, table))
        else:
            request, table = running.pop(len(prompt) % len(running))
            manager.free(request)
            reuse.release(queue, table)
        free = manager.block_pool.free_block_queue.get_all_free_blocks()
        assert [(b.block_id, b.block_hash) for b in queue.get_all_free_blocks()] == [
            (b.block_id, b.block_hash) for b in free
        ]


def test_take_takes_nothing_when_it_cannot_take_all():
    queue = FreeKVCacheBlockQueue([KVCacheBlock(1)])
    try:
        reuse.take(queue, HashChainIndex(SIZE), 2)
    except OutOfBlocks:
        pass
    assert queue.num_free_blocks == 1


def test_release_sees_a_block_freed_twice():
    block = KVCacheBlock(1)
    queue = FreeKVCacheBlockQueue([block])
    try:
        reuse.release(queue, [block])
    except ValueError as error:
        assert "freed twice" in str(error)
    else:
        raise AssertionError("nobody noticed")


def test_keys_are_those_that_the_index_publishes():
    index, block = HashChainIndex(3), KVCacheBlock(1)
    index.insert([1, 2, 3], [block], "s")
    assert block_keys([1, 2, 3, 4], 3, "s") == [block.block_hash]
    assert block_keys([1, 2], 3) == []


@given(st.lists(PROMPTS, max_size=6), SALTS)
def test_a_growing_text_gets_the_keys_of_the_whole_one(pieces, salt):
    tokens, keys, cursor = [], [], None
    for piece in pieces:
        tokens += piece
        new, cursor = new_keys(tokens, SIZE, salt, cursor)
        keys += new
    assert keys == block_keys(tokens, SIZE, salt)


def test_prefill_is_bound_by_compute_or_by_reading_the_weights():
    bound = {"num_parameters": 1e9, "flops": 1e12, "bandwidth": 1e12}
    assert reuse.prefill_seconds(3000, 0, **bound) == 6.0
    assert reuse.prefill_seconds(3000, 2999, **bound) == 2e-3 == reuse.prefill_seconds(3000, 2999.5, **bound)
