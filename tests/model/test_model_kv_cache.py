"""KVCache moves blocks as if its operations ran one by one, in all layers, and refuses what would do harm."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvlab.model import kv_cache as module
from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache, independent_runs, kv_bytes_per_token

CONFIG = ModelConfig("qwen2", 8, 8, 3, 2, 2, 4, 16, 64)
NUM_BLOCKS, NUM_CPU_BLOCKS = 6, 4


def numbered(dtype=torch.float64) -> KVCache:
    """Every element differs: layer, K or V, block, position (in int8 up to 256: every scale and every block do)."""
    kv_cache = KVCache(CONFIG, NUM_BLOCKS, 2, dtype, num_cpu_blocks=NUM_CPU_BLOCKS)
    count = 0
    for tensor in [*kv_cache.layers, *kv_cache.scales]:
        numbers = torch.arange(count, count + tensor[:, 1:].numel(), dtype=torch.float64).view_as(tensor[:, 1:])
        tensor[:, 1:] = numbers * 0.618 % 1 * 256 - 128 if tensor.dtype == torch.int8 else numbers
        count += tensor.numel()
    return kv_cache


def block_of(kv_cache: KVCache, block: int) -> list:
    return [tensor[:, block].tolist() for tensor in kv_cache.tensors]


def cpu_block_of(kv_cache: KVCache, block: int) -> list:
    return [piece[block].tolist() for piece in kv_cache.pieces(kv_cache.cpu_pool)]


def one_by_one(kv_cache: KVCache, ops) -> tuple[dict, dict]:
    """The meaning of a list of operations, on plain Python lists."""
    gpu = {b: block_of(kv_cache, b) for b in range(kv_cache.num_blocks)}
    cpu = {b: cpu_block_of(kv_cache, b) for b in range(kv_cache.num_cpu_blocks)}
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


@given(OPS, st.sampled_from([1, 2, 3, 32]), st.sampled_from([torch.float64, torch.int8]))
@example([("swap_in", 0, target) for target in range(1, NUM_BLOCKS)], 32, torch.int8)  # more copies than CPU blocks
@settings(max_examples=300, deadline=None)
def test_apply_is_one_by_one(ops, max_run, dtype):
    """Few blocks and many operations: most of them read or overwrite what another has just written."""
    original, module.MAX_RUN = module.MAX_RUN, max_run
    try:
        kv_cache = numbered(dtype)
        gpu, cpu = one_by_one(kv_cache, ops)
        kv_cache.apply(iter(ops))
    finally:
        module.MAX_RUN = original
    assert {b: block_of(kv_cache, b) for b in gpu} == gpu
    assert {b: cpu_block_of(kv_cache, b) for b in cpu} == cpu


@given(OPS)
def test_runs_keep_the_order_and_hold_no_hazard(ops):
    runs = independent_runs(ops)
    assert [(kind, s, d) for kind, src, dst in runs for s, d in zip(src, dst, strict=True)] == ops
    for kind, sources, targets in runs:
        assert len(set(targets)) == len(targets) <= module.MAX_RUN
        if kind == "copy":
            assert all(source not in targets[:i] for i, source in enumerate(sources))


@given(OPS)
def test_runs_for_a_kernel_read_nothing_that_they_write(ops):
    runs = independent_runs(ops, at_once=True)
    assert [(kind, s, d) for kind, src, dst in runs for s, d in zip(src, dst, strict=True)] == ops
    for kind, sources, targets in runs:
        assert len(set(targets)) == len(targets)
        if kind == "copy":
            pairs = list(zip(sources, targets, strict=True))
            assert not any(s == d for i, (s, _) in enumerate(pairs) for j, (_, d) in enumerate(pairs) if i != j)


def test_neighbours_without_hazards_move_together():
    copies = [("copy", 1, 4), ("copy", 2, 5), ("copy", 3, 6)]
    assert independent_runs(copies) == [("copy", [1, 2, 3], [4, 5, 6])]
    assert len(independent_runs([("copy", 1, 2), ("copy", 2, 3)])) == 2  # reads what was written
    assert len(independent_runs([("copy", 1, 2), ("copy", 3, 2)])) == 2  # writes it again
    assert len(independent_runs([("copy", 1, 2), ("copy", 3, 1)])) == 1  # reads come before writes
    assert len(independent_runs([("copy", 1, 2), ("copy", 3, 1)], at_once=True)) == 2
    assert len(independent_runs(copies, at_once=True)) == 1
    # A swap reads one memory and writes the other: equal numbers are different blocks.
    assert len(independent_runs([("swap_out", 1, 2), ("swap_out", 2, 3)])) == 1


def test_a_chain_within_one_step():
    """A block goes out, its place is filled from the host, and that is copied on (pitfalls 11)."""
    kv_cache = numbered()
    first, second = block_of(kv_cache, 1), block_of(kv_cache, 2)
    kv_cache.apply([("swap_out", 2, 0), ("swap_out", 1, 3), ("copy", 2, 1), ("swap_in", 3, 2), ("copy", 2, 5)])
    assert block_of(kv_cache, 1) == second
    assert block_of(kv_cache, 2) == block_of(kv_cache, 5) == first
    assert cpu_block_of(kv_cache, 0) == second


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
    assert kv_cache.scales == []
    for cache in (kv_cache, numbered(torch.int8)):
        tensors = [*cache.layers, *cache.scales]
        assert sum(t.numel() * t.element_size() for t in tensors) == NUM_BLOCKS * cache.bytes_per_block
        pool = cache.cpu_pool
        assert pool.numel() * pool.element_size() == NUM_CPU_BLOCKS * cache.bytes_per_block


def test_sizes_of_int8():
    """Qwen2.5-7B: half of bf16, and 4 bytes more for each head of K and V: 3% of its 128 numbers."""
    qwen25_7b = ModelConfig("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, 32768)
    assert kv_bytes_per_token(qwen25_7b, torch.int8) == 28 * 1024 + 2 * 28 * 4 * 4 == 29_568


def test_int8_is_read_as_it_was_written():
    """Reading gives `as_read` to the bit, whatever the slots, and the rest of the cache stays zero."""
    kv_cache = KVCache(CONFIG, NUM_BLOCKS, 2, torch.int8)
    k, v = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([7, 2, 11])
    kv_cache.write(1, k, v, slots)
    read = kv_cache.layer(1, torch.float32).view(2, -1, 2, 4)
    assert torch.equal(read[0, slots], kv_cache.as_read(k)) and torch.equal(read[1, slots], kv_cache.as_read(v))
    for x in (k, v):
        half_a_step = x.abs().amax(-1, keepdim=True) / 127 / 2
        assert ((kv_cache.as_read(x) - x).abs() <= half_a_step * (1 + 1e-5)).all()
        assert not torch.equal(kv_cache.as_read(x), x)
    read[:, slots] = 0
    assert read.count_nonzero() == 0 and kv_cache.layer(0, torch.float32).count_nonzero() == 0


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(block_size=0), "block_size is 0"),
        (dict(num_blocks=1), "num_blocks is 1: at least 2"),
        (dict(num_cpu_blocks=-1), "num_cpu_blocks is -1"),
        (dict(dtype=torch.int32), "dtype is torch.int32: K and V are stored as floating point, or as torch.int8"),
    ],
)
def test_impossible_caches_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        KVCache(CONFIG, **{**dict(num_blocks=4, block_size=2, dtype=torch.float32), **kwargs})


@pytest.mark.parametrize("fails", ["copy_blocks", "scatter_blocks"])
def test_kernels_that_do_not_start_are_not_kept(fails):
    """Without a C compiler Triton fails at the first launch: the engine goes on with PyTorch, its copies too."""

    def launch(name):
        def call(*args):
            if name == fails:
                raise RuntimeError("Failed to find C compiler")

        return call

    pieces = {name: lambda *args: None for name in ("pieces_of", "pieces_of_rows")}
    moves = {name: launch(name) for name in ("copy_blocks", "gather_blocks", "scatter_blocks")}
    kv_cache = numbered()
    with pytest.raises(RuntimeError, match="C compiler"):
        kv_cache.use_kernels(SimpleNamespace(**pieces, **moves))
    kv_cache.apply([("copy", 2, 3), ("swap_out", 2, 1), ("swap_in", 1, 4)])
    assert block_of(kv_cache, 2) == block_of(kv_cache, 3) == block_of(kv_cache, 4)


def test_its_memory_on_the_host_is_there_whatever_the_default_device():
    with torch.device("meta"):
        assert KVCache(CONFIG, 3, 2, torch.float32, num_cpu_blocks=2).cpu_pool.device.type == "cpu"
