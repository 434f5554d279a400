"""Attention backends against the loops of `naive_paged_attention`, and those against plain softmax."""

import math
from subprocess import CalledProcessError
from types import SimpleNamespace

import pytest
import torch
from attention_steps import attend_with, blocks_for, make_cache, make_step
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.model import attention, backends
from kvlab.model.attention import TorchAttention, context_slots, group_by_length
from kvlab.model.backends import get_attention_backend
from kvlab.model.batch import flat_batch


def compare(num_heads, num_kv_heads, head_dim, block_size, chunks, dtype=torch.float64, tolerance=1e-12, kv_dtype=None):
    num_blocks = blocks_for(chunks, block_size)
    kv_cache = make_cache(num_heads, num_kv_heads, head_dim, block_size, num_blocks, kv_dtype or dtype)
    batch, generator = make_step(kv_cache, chunks)
    count = len(batch.token_ids)
    q = torch.randn(count, num_heads, head_dim, generator=generator).to(dtype)
    k, v = torch.randn(2, count, num_kv_heads, head_dim, generator=generator).to(dtype)
    expected = attend_with("naive", kv_cache, batch, q, k, v)
    got = attend_with("torch", kv_cache, batch, q, k, v)
    assert got.shape == q.shape and got.dtype == dtype
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", [(14, 2), (4, 4), (7, 1)], ids=str)
def test_head_sizes_and_groups(head_dim, heads):
    compare(*heads, head_dim, 16, [(16, 1), (3, 1), (0, 5), (17, 4)])


CHUNKS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)


@given(CHUNKS, st.integers(0, 4), st.sampled_from([1, 4, 16, 32]))
@settings(max_examples=60, deadline=None)
def test_any_mix_of_chunks_and_decodes(chunks, num_decodes, block_size):
    decodes = [(past, 1) for past, _ in chunks[:num_decodes]]
    compare(4, 2, 8, block_size, decodes + chunks)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_other_types(dtype, tolerance):
    compare(14, 2, 64, 16, [(31, 1), (0, 1), (100, 1), (0, 33), (20, 20)], dtype, tolerance)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_int8(dtype, tolerance):
    """Decodes, a chunk at hand and one with a context: all see K and V as they were stored."""
    compare(14, 2, 64, 16, [(31, 1), (0, 1), (100, 1), (0, 33), (20, 20)], dtype, tolerance, kv_dtype=torch.int8)


def test_decodes_in_several_groups_keep_their_rows(monkeypatch):
    lengths = [60, 1, 33, 5, 59, 2, 16, 15]
    monkeypatch.setattr(attention, "GATHER_BYTES", 70 * 2 * 2 * 8 * 8)  # 70 tokens at a time
    assert len(group_by_length(lengths, 70)) > 3
    compare(4, 2, 8, 4, [(n - 1, 1) for n in lengths] + [(3, 3)])


@given(st.lists(st.integers(1, 500), max_size=20), st.integers(1, 2000))
def test_groups_are_a_partition_within_the_limit(lengths, limit):
    groups = group_by_length(lengths, limit)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or len(group) * max(lengths[i] for i in group) <= limit


def test_large_scores_do_not_overflow():
    kv_cache = make_cache(2, 1, 4, 4, 4, torch.float32)
    batch, _ = make_step(kv_cache, [(0, 3)])
    q = torch.full((3, 2, 4), 1000.0)
    k = torch.tensor([1.0, 1000.0, -1000.0]).view(3, 1, 1).expand(3, 1, 4).contiguous()
    v = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 1, 4).contiguous()
    for name in ("naive", "torch"):
        out = attend_with(name, kv_cache, batch, q, k, v)
        assert out[:, 0, 0].tolist() == [1.0, 2.0, 2.0]


def test_the_oracle_by_hand():
    """Two tokens, block size 1, blocks in reverse order: the weights are those of softmax([s0, s1])."""
    kv_cache = make_cache(1, 1, 2, 1, 3)
    batch = flat_batch([([7, 8], 0, [2, 1], True)], 1)
    q = torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]], dtype=torch.float64)
    k = torch.tensor([[[3.0, 1.0]], [[0.0, 4.0]]], dtype=torch.float64)
    v = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=torch.float64)
    out = attend_with("naive", kv_cache, batch, q, k, v)
    a, b = (math.exp(2 * x / math.sqrt(2)) for x in (1.0, 4.0))
    expected = torch.tensor([[[1, 0]], [[a / (a + b), b / (a + b)]]], dtype=torch.float64)
    torch.testing.assert_close(out, expected, atol=1e-14, rtol=0)
    assert kv_cache.layers[1][0, 2, 0, 0].tolist() == [3.0, 1.0]  # position 0 lies in block 2


def test_slots_past_2_to_the_31():
    """Block ids are int32, but id x block size may need more; K's half and V's half alike."""
    kv_cache = SimpleNamespace(block_size=16, num_blocks=2**28 + 6)
    tables = torch.tensor([[2**28 + 5, 2**28]], dtype=torch.int32)
    slots, visible = context_slots(tables, torch.tensor([18], dtype=torch.int32), 19, kv_cache)
    keys = [(2**28 + 5) * 16 + i for i in range(16)] + [2**32, 2**32 + 1, 0]
    assert slots.tolist() == keys + [slot + kv_cache.num_blocks * 16 for slot in keys]
    assert visible.tolist() == [[True] * 18 + [False]]


def test_unknown_backends_are_named():
    with pytest.raises(ValueError, match=r"'flash' is unknown: use one of \['naive', 'torch', 'triton'\]"):
        get_attention_backend("flash")
    with pytest.raises(ValueError, match="deterministic_split_tokens is 256.*'torch' has no splits"):
        get_attention_backend("torch", 256)


@pytest.mark.parametrize("error", [RuntimeError("Failed to find C compiler"), CalledProcessError(1, ["gcc", "main.c"])])
def test_a_gpu_machine_that_cannot_build_kernels_attends_by_pytorch(error, monkeypatch):
    """Triton builds its launchers by a C compiler with Python.h: without either it fails in its own way."""

    def use_kernels(module):
        raise error

    kernels = SimpleNamespace(check=lambda kv_cache: None, interpreted=False, block_copy=None)
    choose = backends.get_attention_backend
    get = lambda name, *_: kernels if name == "triton" else choose(name)  # noqa: E731
    monkeypatch.setattr(backends, "get_attention_backend", get)
    kv_cache = SimpleNamespace(device=torch.device("cuda"), use_kernels=use_kernels)
    with pytest.warns(UserWarning, match="not the quicker 'triton'"):
        assert isinstance(backends.choose_attention_backend("auto", kv_cache), TorchAttention)
    with pytest.raises(type(error)):
        backends.choose_attention_backend("triton", kv_cache)
