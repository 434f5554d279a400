"""The kernels as a backend, interpreted: against the loops of NaiveAttention and against TorchAttention."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from attention_steps import attend_with, blocks_for, make_cache, make_step
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model_kv_cache import OPS, block_of, cpu_block_of, numbered, one_by_one

from kvlab.model import kv_cache as kv_cache_module
from kvlab.model.attention import TorchAttention
from kvlab.model.backends import choose_attention_backend, get_attention_backend

pytest.importorskip("triton")
from kvlab.model import triton_attention  # noqa: E402
from kvlab.model.triton_attention import TritonAttention, bucket  # noqa: E402
from kvlab_kernels.sanitizer import reaching, sanitize  # noqa: E402


def step(heads, head_dim, block_size, chunks, dtype=torch.float32, stored=torch.float32, seed=0):
    """(cache, batch, q, k, v), as the decoder hands them over: slices of one projection."""
    num_heads, num_kv_heads = heads
    kv_cache = make_cache(*heads, head_dim, block_size, blocks_for(chunks, block_size), stored)
    batch, generator = make_step(kv_cache, chunks, seed)
    qkv = torch.randn(len(batch.token_ids), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    return kv_cache, batch, *qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)


def compare(heads, head_dim, block_size, chunks, tolerance=2e-5, split_tokens=0, **dtypes):
    kv_cache, batch, q, k, v = step(heads, head_dim, block_size, chunks, **dtypes)
    with sanitize():
        got = attend_with("triton", kv_cache, batch, q, k, v, split_tokens=split_tokens)
    assert got.shape == q.shape and got.dtype == q.dtype
    for name in ("naive", "torch"):
        expected = attend_with(name, kv_cache, batch, q, k, v)
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


CHUNKS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=3)
DECODES = st.lists(st.tuples(st.integers(0, 70), st.just(1)), max_size=3)


@given(CHUNKS, DECODES, st.sampled_from([1, 4, 16]), st.sampled_from([0, 16]))
@settings(max_examples=15, deadline=None)
def test_any_mix_of_chunks_and_decodes(chunks, decodes, block_size, split_tokens):
    if chunks or decodes:
        compare((4, 2), 16, block_size, decodes + chunks, split_tokens=split_tokens)


@pytest.mark.parametrize("heads, head_dim", [((14, 2), 64), ((7, 1), 80), ((4, 4), 96)], ids=str)
@pytest.mark.parametrize("chunks", [[(16, 1), (3, 1)], [(16, 1), (0, 5), (17, 4)]], ids=["decodes", "mixed"])
def test_head_sizes_and_groups(heads, head_dim, chunks):
    compare(heads, head_dim, 16, chunks)


def test_a_long_decode_is_split():
    kv_cache, batch, *_ = step((4, 2), 16, 16, [(599, 1), (40, 1)])
    decodes = TritonAttention().plan(batch, kv_cache).decodes
    assert decodes.num_splits == 4 and decodes.max_seq_len == 1024
    compare((4, 2), 16, 16, [(599, 1), (40, 1)])


def test_a_long_chunk_takes_the_sizes_for_prefill():
    compare((4, 2), 16, 16, [(30, 1), (5, 70)])


@pytest.mark.parametrize(
    "dtype, stored, tolerance",
    [
        (torch.float16, torch.float16, 2e-3),
        (torch.float32, torch.float16, 5e-3),
        (torch.bfloat16, torch.bfloat16, 3e-2),
        (torch.float32, torch.int8, 2e-5),
        (torch.bfloat16, torch.int8, 3e-2),
    ],
    ids=str,
)
@pytest.mark.parametrize("chunks", [[(31, 1), (0, 1)], [(100, 1), (20, 20)]], ids=["decodes", "mixed"])
def test_other_types(dtype, stored, tolerance, chunks):
    from kvlab_kernels.interpreter import BF16_IS_RIGHT

    if dtype == torch.bfloat16 and not BF16_IS_RIGHT:
        pytest.skip("this version of Triton's interpreter multiplies bf16 wrongly")
    compare((14, 2), 32, 16, chunks, tolerance, dtype=dtype, stored=stored)


def one_among(mine, decodes, chunks, split_tokens, head_dim=16):
    """What attention gives the sequence `mine`, (past, now), among others. Its numbers are always the same."""
    dtype = torch.float16 if head_dim > 128 else torch.float32
    alone, its_batch, *its = step((4, 2), head_dim, 8, [mine], dtype, dtype)
    kv_cache, batch, *ours = step((4, 2), head_dim, 8, [*decodes, mine, *chunks], dtype, dtype)
    rows = slice(len(decodes), len(decodes) + mine[1])
    for x, numbers in zip(ours, its, strict=True):
        x[rows] = numbers
    theirs = its_batch.block_tables[0].long()
    mine_now = batch.block_tables[len(decodes), : len(theirs)].long()
    kv_cache.layers[1][:, mine_now] = alone.layers[1][:, theirs]
    return attend_with("triton", kv_cache, batch, *ours, split_tokens=split_tokens)[rows]


def test_fixed_splits_give_a_decode_the_same_bits_in_any_batch():
    mine = 150, 1
    expected = one_among(mine, [], [], 48)
    for decodes, chunks in (([(3, 1)], []), ([(700, 1), (2, 1)], []), ([], [(10, 6)]), ([(5, 1)], [(0, 80)])):
        assert torch.equal(one_among(mine, decodes, chunks, 48), expected), (decodes, chunks)
    assert not torch.equal(one_among(mine, [(2000, 1)], [], 0), expected)  # other splits, and other bits


def test_and_a_chunk_too():
    """With a head dim for which tiles differ between short chunks and long ones."""
    mine = 150, 3
    expected = one_among(mine, [], [], 48, head_dim=160)
    for decodes, chunks in (([(3, 1)], []), ([(5, 1)], [(0, 70)])):
        assert torch.equal(one_among(mine, decodes, chunks, 48, head_dim=160), expected), (decodes, chunks)
    assert not torch.equal(one_among(mine, [], [(0, 70)], 0, 160), one_among(mine, [], [], 0, 160))


def test_the_workspace_is_kept_and_grows():
    backend = TritonAttention(split_tokens=16)
    for head_dim, chunks in ((16, [(40, 1)]), (96, [(100, 1), (30, 1)]), (16, [(40, 1)]), (16, [(60, 1)] * 6)):
        kv_cache, batch, q, k, v = step((4, 2), head_dim, 8, chunks)
        metadata = backend.plan(batch, kv_cache)
        backend.write(k, v, 0, metadata)
        first = backend.attend(q, 0, metadata)
        before = backend._workspace[0].data_ptr()
        assert torch.equal(backend.attend(q, 0, metadata), first)
        assert backend._workspace[0].data_ptr() == before


def test_buckets():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 256, 257)] == [1, 2, 4, 4, 8, 256, 512]


# --- what cannot run is said in time -------------------------------------------------------------------------


def test_float64_is_refused_before_the_first_step():
    kv_cache = make_cache(4, 2, 16, 4, 3, torch.float64)
    with pytest.raises(ValueError, match="float64.*float32, float16 and bfloat16"):
        choose_attention_backend("triton", kv_cache)
    with pytest.raises(ValueError, match="split_tokens is -1"):
        get_attention_backend("triton", -1)


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(triton_attention, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    kv_cache = make_cache(4, 2, 16, 4, 3, torch.float16)
    kv_cache.device = torch.device("cuda")
    with pytest.raises(ValueError, match="compute capability 7.5, the kernels need 8.0: use attention_backend 'torch'"):
        TritonAttention().check(kv_cache)


def test_auto():
    kv_cache = make_cache(4, 2, 16, 4, 3, torch.float32)
    assert isinstance(choose_attention_backend("auto", kv_cache), TorchAttention)
    assert isinstance(choose_attention_backend("triton", kv_cache), TritonAttention)
    on_gpu = SimpleNamespace(device=torch.device("cuda"), layers=[kv_cache.layers[0].half()], quantized=False)
    with pytest.warns(UserWarning, match="'torch', not the quicker 'triton'"):
        assert isinstance(choose_attention_backend("auto", on_gpu), TorchAttention)


def run(code: str, **env: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, "-c", code], env=clean | env, capture_output=True, text=True)


def test_without_a_gpu_one_sentence_says_that_kernels_are_interpreted():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    code = "from kvlab.model.backends import get_attention_backend as get; get('triton'); get('triton')"
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("interpreter") == 1 and "slowly" in done.stderr


def test_without_triton_the_engine_imports_and_the_backend_says_what_to_install():
    code = """
import sys
class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
sys.meta_path.insert(0, NoTriton())
import kvlab.engine.llm
from kvlab.model.backends import get_attention_backend
get_attention_backend("torch")
try:
    get_attention_backend("triton")
except ImportError as error:
    print(error)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "pip install triton" in done.stdout and '"torch"' in done.stdout


# --- blocks are moved by a kernel too ------------------------------------------------------------------------


@given(OPS, st.sampled_from([1, 3, 32]), st.sampled_from([torch.float32, torch.int8]))
@settings(max_examples=15, deadline=None)
def test_blocks_moved_by_a_kernel_end_where_one_by_one_leaves_them(ops, max_run, dtype):
    original, kv_cache_module.MAX_RUN = kv_cache_module.MAX_RUN, max_run
    try:
        kv_cache = numbered(dtype)
        before = [tensor.clone() for tensor in kv_cache.tensors]
        kv_cache.use_kernels(TritonAttention.block_copy)
        for tensor, numbers in zip(kv_cache.tensors, before, strict=True):
            tensor.copy_(numbers)
        gpu, cpu = one_by_one(kv_cache, ops)
        with sanitize(), reaching(*kv_cache.tensors, kv_cache._staging):
            kv_cache.apply(ops)
    finally:
        kv_cache_module.MAX_RUN = original
    assert {b: block_of(kv_cache, b) for b in gpu} == gpu
    assert {b: cpu_block_of(kv_cache, b) for b in cpu} == cpu


def test_a_cache_of_the_kernels_moves_its_blocks_by_one(monkeypatch):
    from kvlab_kernels import block_copy

    moved = []
    launch = block_copy._launch
    monkeypatch.setattr(block_copy, "_launch", lambda *args: moved.append(args[2:]) or launch(*args))
    kv_cache = make_cache(4, 2, 16, 4, 5, torch.float32)
    choose_attention_backend("triton", kv_cache)
    moved.clear()
    kv_cache.apply([("copy", 1, 2), ("copy", 3, 4)])
    assert moved == [([1, 3], [2, 4])]
