"""Lab 11's kernels on the stand-in: right, the same bits under Triton, the same rules as the project's own kernels."""

import numpy as np
import pytest

from kvlab.lab.scenes.attention import make_case
from kvlab.lab.scenes.mixed import make_batch
from kvlab.lab.under_triton import has_triton, under_triton
from kvlab.standin import mixed
from kvlab.standin.decode import attend_gathered

needs_triton = pytest.mark.skipif(not has_triton(), reason="Triton has wheels for Linux only")


@pytest.fixture
def case():
    return make_case([70, 0, 33], block_size=8, kv_heads=2, group=3, head_dim=32)


@pytest.fixture
def batch():
    return make_batch([(1, 50), (9, 20), (3, 3)], block_size=8, kv_heads=2, group=3, head_dim=32)


def plain(case):
    return np.array([attend_gathered(case.q[s], case.keys, case.values, case.block_tables[s], int(n))
                     for s, n in enumerate(case.seq_lens)])  # fmt: skip


def rows_of(batch):
    for seq, n in enumerate(batch.seq_lens):
        start, end = batch.query_start_loc[seq : seq + 2]
        for row in range(start, end):
            pages = batch.keys, batch.values, batch.block_tables[seq]
            yield row, attend_gathered(batch.q[row], *pages, int(n - (end - 1 - row)))


def test_splits_are_merged_to_attention(case):
    assert np.allclose(mixed.decode_attention(*case), plain(case), atol=1e-5)


def test_a_sequence_has_the_same_bits_alone(case):
    together = mixed.decode_attention(*case)
    for s in range(3):
        at = slice(s, s + 1)
        alone = case._replace(q=case.q[at], block_tables=case.block_tables[at], seq_lens=case.seq_lens[at])
        assert np.array_equal(mixed.decode_attention(*alone)[0], together[s])


def test_a_mixed_batch_is_attention_row_by_row(batch):
    out = np.full_like(batch.q, np.nan)
    mixed.launch_varlen(mixed.varlen_kernel, out, *batch)
    for row, want in rows_of(batch):
        assert np.allclose(out[row], want, atol=1e-5)


def quantized(case):
    numbers = [mixed.quantize(np.nan_to_num(x)) for x in (case.keys, case.values)]
    return [pair[0] for pair in numbers], [pair[1] for pair in numbers]


def test_int8_is_attention_over_what_is_stored(case):
    (k, v), (k_scales, v_scales) = quantized(case)
    out = np.full_like(case.q, np.nan)
    kernel = mixed.with_sweep(mixed.sweep_int8)
    mixed.launch_int8(kernel, out, case.q, k, v, k_scales, v_scales, case.block_tables, case.seq_lens)
    stored = case._replace(keys=k * k_scales[..., None], values=v * v_scales[..., None])
    assert np.allclose(out, plain(stored), atol=1e-5) and not np.allclose(out, plain(case), atol=1e-5)


@needs_triton
def test_triton_gives_the_same_bits(case, batch):
    ours = mixed.launch_split(mixed.split_kernel, 3, 32, *case)
    theirs = mixed.launch_split(under_triton(mixed.split_kernel), 3, 32, *case)
    assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, theirs, strict=True))
    outs = [np.full_like(batch.q, np.nan) for _ in range(2)]
    for out, kernel in zip(outs, (mixed.varlen_kernel, under_triton(mixed.varlen_kernel)), strict=True):
        mixed.launch_varlen(kernel, out, *batch)
    assert np.array_equal(*outs)


@needs_triton
def test_triton_gives_the_same_bits_of_int8(case):
    (k, v), (k_scales, v_scales) = quantized(case)
    outs = [np.full_like(case.q, np.nan) for _ in range(2)]
    kernel = mixed.with_sweep(mixed.sweep_int8)
    for out, one in zip(outs, (kernel, under_triton(kernel)), strict=True):
        mixed.launch_int8(one, out, case.q, k, v, k_scales, v_scales, case.block_tables, case.seq_lens, fewer=7)
    assert np.array_equal(*outs)


@needs_triton
def test_the_rules_are_those_of_the_kernels():
    import torch

    from kvlab.model.quantize import quantize
    from kvlab_kernels.split_kv import choose_num_splits

    for seqs in (1, 3, 33, 66, 200):
        for length in (0, 255, 511, 512, 8191, 8192, 100_000):
            for sms in (16, 132):
                assert mixed.choose_num_splits(seqs, 4, length, sms) == choose_num_splits(seqs, 4, length, sms)
    x = np.random.default_rng(0).normal(size=(20, 4, 32)).astype(np.float32)
    numbers, scales = quantize(torch.from_numpy(x))
    ours = mixed.quantize(x)
    assert np.array_equal(ours[0], numbers.numpy()) and np.array_equal(ours[1], scales.numpy())
