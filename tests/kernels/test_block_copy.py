"""Blocks are moved whole, in all layers, with their scales, as if one after the other; nothing else is touched."""

import contextlib

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE

from kvlab.model.config import ModelConfig
from kvlab.model.kv_cache import KVCache
from kvlab_kernels import launch
from kvlab_kernels.block_copy import (
    copy_blocks,
    copy_blocks_reference,
    gather_blocks,
    gather_blocks_reference,
    pieces_of,
    pieces_of_rows,
    scatter_blocks,
)

NUM_BLOCKS = 6


def reaching(*tensors):
    """The kernel finds the cache by addresses: the sanitizer must be told what they lie in."""
    if not launch.INTERPRETED:
        return contextlib.nullcontext()
    from kvlab_kernels.sanitizer import reaching

    return reaching(*tensors)


def make_cache(dtype=torch.float16, num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, num_blocks=NUM_BLOCKS):
    """(tensors, guards): random bytes, and the memory that the tensors are slices of, one block wider than they are."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, num_blocks + 1, block_size, num_kv_heads, head_dim)
    shapes = [(shape, dtype)] * num_layers
    if dtype == torch.int8:
        shapes += [(shape[:-1], torch.float32)] * num_layers
    guards = []
    for shape, kind in shapes:
        size = torch.empty(shape, dtype=kind).nbytes
        memory = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
        guards.append(memory.view(kind).view(shape).to(DEVICE))
    return [guard[:, :num_blocks] for guard in guards], guards


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8)


def equal(some, others):
    """To the bit: random bytes hold NaN of all kinds."""
    return all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(some, others, strict=True))


def copied(pairs, **shape):
    tensors, guards = make_cache(**shape)
    expected = [guard.clone() for guard in guards]
    copy_blocks_reference([guard[:, : tensors[0].shape[1]] for guard in expected], pairs)
    with reaching(*tensors):
        copy_blocks(pieces_of(tensors), pairs)
    assert equal(guards, expected)


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_in_all_layers(dtype):
    copied([(1, 4), (2, 5)], dtype=dtype)


@pytest.mark.parametrize(
    "shape",
    [
        dict(head_dim=5, num_kv_heads=1, block_size=1),  # pieces of 10 bytes
        dict(head_dim=3, num_kv_heads=1, block_size=1, dtype=torch.int8),  # of 3, and of 4
        dict(head_dim=6, num_kv_heads=1, block_size=2),  # of 24: words of 8 bytes, but not pairs of them
        dict(head_dim=128, num_kv_heads=9, block_size=5),  # more than one program's share
        dict(num_layers=1),
    ],
    ids=str,
)
def test_pieces_of_any_size(shape):
    copied([(0, 3), (3, 1)], **shape)


BLOCK = st.integers(0, NUM_BLOCKS - 1)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(BLOCK, BLOCK), max_size=8), st.sampled_from([torch.float16, torch.int8]))
@example([(1, 2), (3, 1)], torch.float16)  # 1 is read, then written: not both in one launch
@example([(1, 2), (2, 3), (3, 2), (2, 2)], torch.float16)
def test_the_effect_is_one_after_the_other(pairs, dtype):
    copied(pairs, dtype=dtype, num_layers=1, head_dim=4)


def test_few_launches(monkeypatch):
    """Copies that do not depend on each other go together, all layers in one launch."""
    from kvlab_kernels import block_copy

    calls = []
    original = block_copy._launch
    monkeypatch.setattr(block_copy, "_launch", lambda *args: calls.append(args[2:]) or original(*args))
    copied([(1, 4), (1, 5), (2, 3)], num_layers=3)
    assert calls == [([1, 1, 2], [4, 5, 3])]
    calls.clear()
    copied([(1, 4), (4, 5), (2, 2), (3, 4), (0, 3)])
    assert calls == [([1], [4]), ([4], [5]), ([3], [4]), ([0], [3])]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_by_rows_and_in_again(dtype):
    """A swap out, the blocks' memory reused, a swap in to other blocks: every bit is back, and nothing else moved."""
    tensors, guards = make_cache(dtype)
    before = [guard.clone() for guard in guards]
    cache = pieces_of(tensors)
    buffer = torch.full((4, sum(cache.sizes)), 77, dtype=torch.uint8, device=DEVICE)
    staging = pieces_of_rows(buffer[:3], cache)
    with reaching(*tensors, buffer[:3]):
        gather_blocks(cache, [4, 1, 4], staging)
        assert torch.equal(buffer[:3], gather_blocks_reference(tensors, [4, 1, 4])) and (buffer[3] == 77).all()
        assert equal(guards, before)
        for tensor in tensors:
            tensor[:, [1, 4]] = 0
        scatter_blocks(staging, cache, [0, 5, 1])
    for guard, old in zip(guards, before, strict=True):
        old[:, [0, 5, 1, 4]] = torch.stack((old[:, 4], old[:, 1], old[:, 4], torch.zeros_like(old[:, 4])), 1)
        assert equal([guard], [old])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_rows_are_those_of_the_caches_own_swap(dtype):
    """What `gather_blocks` leaves in a row is what KVCache keeps on the host, byte for byte."""
    kv_cache = KVCache(ModelConfig("qwen2", 8, 8, 3, 2, 2, 4, 16, 64), 6, 2, dtype, DEVICE, num_cpu_blocks=2)
    generator = torch.Generator().manual_seed(0)
    for layer in range(3):
        k, v = torch.randn(2, 12, 2, 4, generator=generator).to(DEVICE)
        kv_cache.write(layer, k, v, torch.arange(12, device=DEVICE))
    kv_cache.apply([("swap_out", 3, 0), ("swap_out", 5, 1)])
    cache = pieces_of(kv_cache.tensors)
    buffer = torch.zeros(2, kv_cache.bytes_per_block, dtype=torch.uint8, device=DEVICE)
    with reaching(*kv_cache.tensors, buffer):
        gather_blocks(cache, [3, 5], pieces_of_rows(buffer, cache))
    assert torch.equal(buffer.cpu(), kv_cache.cpu_pool)


def test_blocks_beyond_31_bits():
    try:
        memory = torch.empty(2 * 6 * (1 << 30), dtype=torch.uint8, device=DEVICE)
    except RuntimeError:
        pytest.skip("12 GiB of address space are refused")
    tensor = memory.as_strided((2, 6, 1, 1, 16), (6 << 30, 1 << 30, 16, 16, 1))
    tensor[:, 5] = torch.arange(32, device=DEVICE, dtype=torch.uint8).view(2, 1, 1, 16)
    tensor[:, 3] = 0
    with reaching(tensor):
        copy_blocks(pieces_of([tensor]), [(5, 3)])
    assert torch.equal(tensor[:, 3], tensor[:, 5])


def test_nothing_to_move():
    tensors, guards = make_cache()
    before = [guard.clone() for guard in guards]
    cache = pieces_of(tensors)
    staging = pieces_of_rows(torch.zeros(0, sum(cache.sizes), dtype=torch.uint8, device=DEVICE), cache)
    copy_blocks(cache, [])
    copy_blocks(cache, [(2, 2)])
    gather_blocks(cache, [], staging)
    scatter_blocks(staging, cache, [])
    assert equal(guards, before)


def test_what_does_not_fit_is_refused():
    tensors, guards = make_cache()
    before = [guard.clone() for guard in guards]
    cache = pieces_of(tensors)
    staging = pieces_of_rows(torch.zeros(2, sum(cache.sizes), dtype=torch.uint8, device=DEVICE), cache)
    other = pieces_of(make_cache(head_dim=16)[0])
    for refused, message in [
        (lambda: copy_blocks(cache, [(1, 2), (1, 6)]), "target block 6 does not exist: the cache has blocks 0 to 5"),
        (lambda: copy_blocks(cache, [(-1, 2)]), "source block -1"),
        (lambda: gather_blocks(cache, [6], staging), "source block 6"),
        (lambda: gather_blocks(cache, [1, 2, 3], staging), "3 blocks do not fit a staging buffer of 2 rows"),
        (lambda: scatter_blocks(staging, cache, [2, 2]), "name a block twice"),
        (lambda: scatter_blocks(staging, cache, [1, 2, 3]), "do not fit"),
        (lambda: gather_blocks(other, [1], staging), "make both of the same cache"),
        (lambda: pieces_of([]), "there are no tensors"),
        (lambda: pieces_of([tensors[0], tensors[1][:, :4]]), "give .2, num_blocks"),
        (lambda: pieces_of([tensors[0].transpose(3, 4)]), "blocks contiguous"),
        (lambda: pieces_of_rows(torch.zeros(2, 9, dtype=torch.uint8, device=DEVICE), cache), "give uint8"),
        (lambda: pieces_of_rows(torch.zeros(sum(cache.sizes), 2, dtype=torch.uint8, device=DEVICE).T, cache), "a row"),
    ]:
        with pytest.raises(ValueError, match=message):
            refused()
    assert equal(guards, before)


@pytest.mark.skipif(not launch.INTERPRETED, reason="the sanitizer works on interpreted kernels")
def test_a_table_that_points_elsewhere_is_noticed():
    from kvlab_kernels.sanitizer import OutOfBounds

    tensors, _ = make_cache()
    cache = pieces_of(tensors)
    with pytest.raises(OutOfBounds), reaching(tensors[0]):
        copy_blocks(cache, [(1, 2)])
    with reaching(*tensors):
        copy_blocks(cache, [(1, 2)])
