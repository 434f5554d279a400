"""KVCache moves blocks as if its operations ran one by one, in all layers, and refuses what would do harm."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvlab.model import kv_cache as module
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache, independent_runs, kv_bytes_per_token

CONFIG = ModelConfig("qwen2", 8, 8, 3, 2, 2, 4, 16, 64)
NUM_BLOCKS, NUM_CPU_BLOCKS = 6, 4


def numbered() -> KVCache:
    """Every element differs: layer, K or V, block, position."""
    kv_cache = KVCache(CONFIG, NUM_BLOCKS, 2, torch.float64, num_cpu_blocks=NUM_CPU_BLOCKS)
    count = 0
    for layer in kv_cache.layers:
        layer[:, 1:] = torch.arange(count, count + layer[:, 1:].numel(), dtype=torch.float64).view_as(layer[:, 1:])
        count += layer.numel()
    return kv_cache


def block_of(kv_cache: KVCache, block: int) -> list:
    return [layer[:, block].tolist() for layer in kv_cache.layers]


def one_by_one(kv_cache: KVCache, ops) -> tuple[dict, dict]:
    """The meaning of a list of operations, on plain Python lists."""
    gpu = {b: block_of(kv_cache, b) for b in range(kv_cache.num_blocks)}
    cpu = {b: kv_cache.cpu_pool[b].tolist() for b in range(kv_cache.num_cpu_blocks)}
    for kind, src, dst in ops:
        if kind == "copy":
            gpu[dst] = gpu[src]
        elif kind == "swap_out":
            cpu[dst] = gpu[src]
        else:
            gpu[dst] = cpu[src]
    return gpu, cpu


GPU, GPU_TARGET = st.integers(0, NUM_BLOCKS - 1), st.integers(1, NUM_BLOCKS - 1)
CPU = st.integers(0, NUM_CPU_BLOCKS - 1)
OPS = st.lists(
    st.one_of(
        st.tuples(st.just("copy"), GPU, GPU_TARGET),
        st.tuples(st.just("swap_out"), GPU, CPU),
        st.tuples(st.just("swap_in"), CPU, GPU_TARGET),
    ),
    max_size=25,
)


@given(OPS, st.sampled_from([1, 2, 3, 32]))
@example([("swap_in", 0, target) for target in range(1, NUM_BLOCKS)], 32)  # more copies than there are CPU blocks
@settings(max_examples=300, deadline=None)
def test_apply_is_one_by_one(ops, max_run):
    """Few blocks and many operations: most of them read or overwrite what another has just written."""
    original, module.MAX_RUN = module.MAX_RUN, max_run
    try:
        kv_cache = numbered()
        gpu, cpu = one_by_one(kv_cache, ops)
        kv_cache.apply(iter(ops))
    finally:
        module.MAX_RUN = original
    assert {b: block_of(kv_cache, b) for b in gpu} == gpu
    assert {b: kv_cache.cpu_pool[b].tolist() for b in cpu} == cpu


@given(OPS)
def test_runs_keep_the_order_and_hold_no_hazard(ops):
    runs = independent_runs(ops)
    assert [(kind, s, d) for kind, src, dst in runs for s, d in zip(src, dst, strict=True)] == ops
    for kind, sources, targets in runs:
        assert len(set(targets)) == len(targets) <= module.MAX_RUN
        if kind == "copy":
            assert all(source not in targets[:i] for i, source in enumerate(sources))


def test_neighbours_without_hazards_move_together():
    copies = [("copy", 1, 4), ("copy", 2, 5), ("copy", 3, 6)]
    assert independent_runs(copies) == [("copy", [1, 2, 3], [4, 5, 6])]
    assert len(independent_runs([("copy", 1, 2), ("copy", 2, 3)])) == 2  # reads what was written
    assert len(independent_runs([("copy", 1, 2), ("copy", 3, 2)])) == 2  # writes it again
    assert len(independent_runs([("copy", 1, 2), ("copy", 3, 1)])) == 1  # reads come before writes
    # A swap reads one memory and writes the other: equal numbers are different blocks.
    assert len(independent_runs([("swap_out", 1, 2), ("swap_out", 2, 3)])) == 1


def test_a_chain_within_one_step():
    """A block goes out, its place is filled from the host, and that is copied on (pitfalls 11)."""
    kv_cache = numbered()
    first, second = block_of(kv_cache, 1), block_of(kv_cache, 2)
    kv_cache.apply([("swap_out", 2, 0), ("swap_out", 1, 3), ("copy", 2, 1), ("swap_in", 3, 2), ("copy", 2, 5)])
    assert block_of(kv_cache, 1) == second
    assert block_of(kv_cache, 2) == block_of(kv_cache, 5) == first
    assert kv_cache.cpu_pool[0].tolist() == second


@pytest.mark.parametrize(
    "bad, message",
    [
        (("move", 1, 2), "kind must be one of"),
        (("copy", 1, 6), "target below 6"),
        (("copy", -1, 2), "source must be below 6"),
        (("swap_out", 1, 4), "target below 4"),
        (("swap_in", 4, 1), "source must be below 4"),
        (("copy", 1, 0), "null block must stay zero"),
        (("swap_in", 1, 0), "null block must stay zero"),
    ],
)
def test_a_bad_operation_changes_nothing(bad, message):
    kv_cache = numbered()
    before = [block_of(kv_cache, b) for b in range(NUM_BLOCKS)]
    with pytest.raises(ValueError, match=message):
        kv_cache.apply([("copy", 1, 2), bad])
    assert [block_of(kv_cache, b) for b in range(NUM_BLOCKS)] == before


def test_the_textbooks_slot():
    """L33 2.2: token 37 at block size 16 is in logical block 2, physical block 142, offset 5."""
    config = ModelConfig("qwen2", 8, 8, 1, 2, 1, 2, 16, 64)
    kv_cache = KVCache(config, 143, 16, torch.float32)
    kv_cache.write(0, torch.ones(1, 1, 2), torch.full((1, 1, 2), 2.0), torch.tensor([142 * 16 + 5]))
    assert kv_cache.layers[0][0, 142, 5].tolist() == [[1.0, 1.0]]
    assert kv_cache.layers[0][1, 142, 5].tolist() == [[2.0, 2.0]]
    assert kv_cache.layers[0].sum() == 6.0


def test_sizes():
    qwen25_7b = ModelConfig("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768)
    assert kv_bytes_per_token(qwen25_7b, torch.bfloat16) == 56 * 1024
    kv_cache = numbered()
    assert kv_cache.bytes_per_block == 2 * kv_bytes_per_token(CONFIG, torch.float64) == 2 * 2 * 3 * 2 * 4 * 8
    assert sum(t.numel() * t.element_size() for t in kv_cache.layers) == NUM_BLOCKS * kv_cache.bytes_per_block
    pool = kv_cache.cpu_pool
    assert pool.numel() * pool.element_size() == NUM_CPU_BLOCKS * kv_cache.bytes_per_block


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(block_size=0), "block_size is 0"),
        (dict(num_blocks=1), "num_blocks is 1: at least 2"),
        (dict(num_cpu_blocks=-1), "num_cpu_blocks is -1"),
    ],
)
def test_impossible_caches_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        KVCache(CONFIG, **{**dict(num_blocks=4, block_size=2, dtype=torch.float32), **kwargs})
