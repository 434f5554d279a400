"""The manager: atomic allocation, copy-on-write, swap (pitfalls 1-4, 11), with exact counts."""

import pytest
from driving import engine, request, run, want

from kvlab.manager import KVCacheManager


def compute(manager, req, num_tokens=None, memory=None):
    """Allocate for what is missing and count it as computed. The operations, or None if it did not fit."""
    hits, num_hit = manager.get_computed_blocks(req) if req.request_id not in manager.req_to_blocks else ([], 0)
    computed = max(req.num_computed_tokens, num_hit)
    num_tokens = num_tokens or req.num_tokens - computed
    if manager.allocate_slots(req, num_tokens, hits) is None:
        return None
    req.num_computed_tokens = computed + num_tokens
    manager.cache_blocks(req, req.num_computed_tokens)
    manager.check()
    return manager.take_block_ops()


def names(manager, req):
    return [block.block_hash is not None for block in manager.req_to_blocks[req.request_id]]


def test_of_16_known_and_15_computed_tokens_3_blocks_of_4_are_published():
    manager = KVCacheManager(10, 4)
    req = request("a", 16)
    compute(manager, req, 15)
    assert names(manager, req) == [True, True, True, False]
    compute(manager, req, 1)
    assert names(manager, req) == [True] * 4


@pytest.mark.parametrize(("num_tokens", "hit"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 8)])
def test_a_full_hit_still_computes_at_least_one_token(num_tokens, hit):
    manager = KVCacheManager(20, 4)
    compute(manager, request("a", 11))  # 2 full blocks
    blocks, found = manager.get_computed_blocks(request("b", num_tokens))
    assert (len(blocks), found) == (hit // 4, hit)


def test_hits_in_the_free_queue_count_against_capacity_and_a_refusal_changes_nothing():
    manager = KVCacheManager(6, 4)  # 5 usable
    first = request("a", 8)
    compute(manager, first)
    manager.free(first)
    blocker = request("b", [99] * 8)
    compute(manager, blocker)  # 3 are free, 2 of them cached
    again = request("c", 17)  # 2 hits and 3 more: 5
    hits, _ = manager.get_computed_blocks(again)
    queue = manager.block_pool.free_block_queue.get_all_free_blocks()
    assert len(hits) == 2 and len(queue) == 3
    assert manager.num_blocks_to_start(again, 17, hits) == 5
    assert manager.allocate_slots(again, 9, hits) is None
    assert manager.block_pool.free_block_queue.get_all_free_blocks() == queue
    assert [b.ref_cnt for b in hits] == [0, 0] and again.request_id not in manager.req_to_blocks
    assert len(manager.allocate_slots(again, 4, hits)) == 1  # one of the three is enough for the first chunk


def test_a_failed_growth_changes_nothing():
    manager = KVCacheManager(4, 4, enable_caching=False)
    parent, child = request("a", 9), request("b", 20)
    compute(manager, parent)
    manager.fork(parent, child)
    table = list(manager.req_to_blocks["b"])
    assert manager.allocate_slots(child, 1) is None  # a copy is needed, and nothing is free
    assert manager.req_to_blocks["b"] == table and [b.ref_cnt for b in table] == [2, 2, 2]
    assert manager.take_block_ops() == []
    manager.free(parent)
    assert manager.allocate_slots(child, 1) == [] and manager.take_block_ops() == []  # alone now: no copy


def test_the_copy_is_part_of_the_count():
    manager = KVCacheManager(6, 4, enable_caching=False)  # 5 usable
    parent, child = request("a", 10), request("b", 20)
    compute(manager, parent)
    manager.fork(parent, child)
    assert manager.allocate_slots(child, 7) is None  # 10 + 7 tokens: 2 new blocks and 1 copy, 2 free
    assert len(manager.allocate_slots(child, 6)) == 2
    [(kind, src, _)] = manager.take_block_ops()
    assert (kind, src) == ("copy", manager.req_to_blocks["a"][2].block_id)


@pytest.mark.parametrize(("prompt", "copies"), [(1000, 3), (992, 0)])
def test_four_samples_copy_the_last_block_three_times_or_never(prompt, copies):
    """L33 2.4, C13: nothing is copied at the fork; 1000 = 62.5 blocks of 16, 992 = 62."""
    core = engine(block_size=16, usable=100, max_num_batched_tokens=1000, max_num_seqs=4)
    req = request("a", prompt, max_tokens=20, n=4)
    core.add_request(req)
    core.step()
    assert core.scheduler.stats.num_copy_on_writes == 0 and len(core.scheduler.running) == 4
    assert core.scheduler.manager.block_pool.get_num_free_blocks() == 100 - -(-prompt // 16)
    got = run(core)
    assert core.scheduler.stats.num_copy_on_writes == copies
    for i in range(4):
        name = f"a#{i}" if i else "a"
        assert want(req, i)[1:] == got[name]


# ---- swap


def swapped_pair():
    """Parent and child share 2 blocks and a half; both are swapped out."""
    manager = KVCacheManager(12, 4, enable_caching=False, num_cpu_blocks=6)
    parent, child = request("a", 11), request("b", 20)
    compute(manager, parent, 10)
    manager.fork(parent, child)
    return manager, parent, child


def test_one_cpu_block_for_each_distinct_gpu_block():
    manager, parent, child = swapped_pair()
    assert manager.swap_out(parent) and manager.swap_out(child)
    assert [kind for kind, _, _ in manager.take_block_ops()] == ["swap_out"] * 3
    assert manager.swap_space.num_free_blocks == 3
    manager.free(parent)
    assert manager.swap_space.num_free_blocks == 3  # the child needs all of them
    manager.free(child)
    assert manager.swap_space.num_free_blocks == 6


def test_a_block_written_after_its_sibling_went_is_copied_out_again():
    manager, parent, child = swapped_pair()
    manager.swap_out(child)
    manager.take_block_ops()
    compute(manager, parent, 1)  # writes into the third block, alone now
    assert manager.swap_out(parent)
    assert len(manager.take_block_ops()) == 1  # two are on the CPU already
    assert manager.swap_space.tables["a"][:2] == manager.swap_space.tables["b"][:2]
    assert manager.swap_space.tables["a"][2] != manager.swap_space.tables["b"][2]


def test_swap_is_all_or_nothing():
    manager = KVCacheManager(12, 4, enable_caching=False, num_cpu_blocks=2)
    req = request("a", 11)
    compute(manager, req)
    table = list(manager.req_to_blocks["a"])
    assert not manager.swap_out(req)
    assert manager.req_to_blocks["a"] == table and manager.swap_space.num_free_blocks == 2
    assert manager.take_block_ops() == [] and not manager.swap_space.tables


def test_swap_in_counts_the_block_of_the_next_token():
    manager = KVCacheManager(4, 4, enable_caching=False, num_cpu_blocks=6)  # 3 usable
    req = request("a", 9)
    compute(manager, req, 8)
    manager.swap_out(req)
    blocker = request("b", [7] * 4)
    compute(manager, blocker)  # 2 free: enough for what was swapped out, not for the next token
    assert manager.allocate_slots(req, 1) is None and "a" in manager.swap_space.tables
    manager.free(blocker)
    assert len(manager.allocate_slots(req, 1)) == 3
    assert [kind for kind, _, _ in manager.take_block_ops()] == ["swap_in", "swap_in"]


def test_the_way_back_shares_full_blocks_with_a_sibling_and_copies_the_one_that_is_written():
    manager, parent, child = swapped_pair()
    manager.swap_out(child)
    manager.take_block_ops()
    third_on_cpu = manager.swap_space.tables["b"][2]
    new = manager.allocate_slots(child, 1)
    mine, theirs = manager.req_to_blocks["b"], manager.req_to_blocks["a"]
    assert mine[:2] == theirs[:2] and mine[2] is not theirs[2] and mine[2].is_writable
    assert manager.take_block_ops() == [("swap_in", third_on_cpu, new[0].block_id)]
    manager.check()


def test_the_way_back_asks_the_prefix_index_first():
    manager = KVCacheManager(12, 4, num_cpu_blocks=6)
    req = request("a", 11)
    compute(manager, req, 10)
    blocks = list(manager.req_to_blocks["a"])
    manager.swap_out(req)
    manager.take_block_ops()
    hits, num_hit = manager.get_computed_blocks(req)
    assert hits == blocks[:2] and num_hit == 8
    manager.allocate_slots(req, 1, hits)
    assert [kind for kind, _, _ in manager.take_block_ops()] == ["swap_in"]  # the half block only


def test_swap_in_copy_and_reuse_of_the_copys_source_in_one_list_of_operations():
    """A copy's source is freed and becomes the target of a swap-in before anything has been copied: order counts."""
    manager = KVCacheManager(5, 4, enable_caching=False, num_cpu_blocks=4)  # 4 usable
    away = request("away", [5] * 4 + [6])
    compute(manager, away, 4)
    manager.swap_out(away)
    parent, child = request("a", 6), request("b", 20)
    compute(manager, parent, 6)
    manager.fork(parent, child)
    manager.take_block_ops()
    shared = manager.req_to_blocks["a"][1]
    compute_ops = manager.allocate_slots(child, 1)
    assert compute_ops is not None and manager.req_to_blocks["b"][1] is not shared
    manager.free(parent)  # the copy's source is free now, with the copy still to be made
    third = request("c", [8] * 4)
    manager.allocate_slots(third, 4)  # takes the block that was never used
    manager.free(third)
    assert manager.allocate_slots(away, 1) is not None
    assert shared in manager.req_to_blocks["away"]
    gpu = {block.block_id: f"gpu {block.block_id}" for block in manager.block_pool.blocks}
    source, copy = gpu[shared.block_id], manager.req_to_blocks["b"][1].block_id
    cpu = {i: f"cpu {i}" for i in range(4)}
    for kind, src, dst in manager.take_block_ops():
        if kind == "swap_in":
            gpu[dst] = cpu[src]
        else:
            assert kind == "copy"
            gpu[dst] = gpu[src]
    assert gpu[copy] == source
    assert gpu[manager.req_to_blocks["away"][0].block_id].startswith("cpu")
    manager.check()


def test_unshared_blocks_are_what_a_victim_gives_back():
    manager, parent, child = swapped_pair()
    assert manager.num_blocks_freed_by([parent]) == 0
    compute(manager, child, 1)
    assert manager.num_blocks_freed_by([parent]) == manager.num_blocks_freed_by([child]) == 1
    before = manager.block_pool.get_num_free_blocks()
    manager.free(child)
    assert manager.block_pool.get_num_free_blocks() == before + 1


def test_a_forked_childs_half_block_is_copied_before_a_write_even_if_its_parent_published_it_meanwhile():
    """Forked while the parent's tokens are on the way: the block gets a name, the parent goes, and ref_cnt is 1."""
    manager = KVCacheManager(12, 4)
    parent, child = request("a", 4), request("b", [1, 2, 3, 9, 9])
    compute(manager, parent, 3)
    manager.allocate_slots(parent, 1)
    manager.fork(parent, child)  # 3 computed tokens
    parent.num_computed_tokens = 4
    manager.cache_blocks(parent, 4)
    shared = manager.req_to_blocks["b"][0]
    manager.free(parent)
    assert shared.ref_cnt == 1 and shared.block_hash is not None
    manager.allocate_slots(child, 1)
    assert [kind for kind, _, _ in manager.take_block_ops()] == ["copy"]
    assert manager.get_computed_blocks(request("c", 5))[1] == 4  # still cached


def test_fork_needs_a_parent_with_blocks_and_a_child_without():
    manager, parent, child = swapped_pair()
    with pytest.raises(ValueError, match="'nobody' holds no blocks"):
        manager.fork(request("nobody", 3), request("c", 3))
    with pytest.raises(ValueError, match="'b' already holds blocks; fork into a new request"):
        manager.fork(parent, child)
