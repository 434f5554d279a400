"""The pieces of a layer against their definitions, and the linear layer's one packed copy."""

import math
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlab.model import layers
from kvlab.model.batch import flat_batch
from kvlab.model.config import ModelConfig
from kvlab.model.layers import Linear, RotaryEmbedding, inverse_frequencies, rms_norm, rope, swiglu


def config(head_dim=8, **changes) -> ModelConfig:
    return ModelConfig("llama", 8, 8, 1, 2, 2, head_dim, 16, 128, **changes)


def test_rms_norm_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    got = rms_norm(x, torch.tensor([1.0, 2.0]), eps=0.0001)
    rms = math.sqrt(12.5 + 0.0001)
    torch.testing.assert_close(got, torch.tensor([[3 / rms, 8 / rms], [0.0, 0.0]]))


def test_rms_norm_sums_wide_and_keeps_the_type():
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # 300^2 overflows float16
    got = rms_norm(x, torch.ones(4096, dtype=torch.float16), eps=1e-6)
    assert got.dtype == torch.float16 and (got == 1).all()
    x = torch.randn(5, 64, dtype=torch.float64)
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (rms_norm(x, torch.ones(64, dtype=torch.float64), 1e-6) - exact).abs().max() < 1e-14


def test_rope_turns_pairs_half_a_head_apart():
    rotary = RotaryEmbedding(config(head_dim=4, rope_theta=100.0), torch.float64)
    x = torch.tensor([[[1.0, 0.0, 0.0, 2.0]]], dtype=torch.float64)
    got = rope(x, *rotary(torch.tensor([3])))[0, 0].tolist()
    slow = 3 * 100.0**-0.5  # the second pair's angle; the first pair turns by 3 radians
    assert got == pytest.approx([math.cos(3), -2 * math.sin(slow), math.sin(3), 2 * math.cos(slow)], abs=1e-6)


@given(st.integers(0, 127), st.integers(0, 127), st.integers(0, 127))
def test_rope_scores_depend_on_distance_only(m, n, shift):
    shift = min(shift, 127 - max(m, n))
    rotary = RotaryEmbedding(config(), torch.float64)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)

    def score(a, b):
        turned = [rope(x, *rotary(torch.tensor([p]))) for x, p in ((q, a), (k, b))]
        return float((turned[0] * turned[1]).sum())

    assert score(m, n) == pytest.approx(score(m + shift, n + shift), abs=1e-4)  # the table is fp32
    assert float(rope(q, *rotary(torch.tensor([m]))).norm()) == pytest.approx(float(q.norm()), abs=1e-5)


def test_scaled_frequencies():
    plain = inverse_frequencies(config())
    linear = inverse_frequencies(config(rope_scaling=dict(rope_type="linear", factor=4.0)))
    assert torch.equal(linear, plain / 4)
    scaling = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
    llama3 = inverse_frequencies(config(rope_scaling={**scaling, "original_max_position_embeddings": 16}))
    turns = 16 * plain / (2 * math.pi)
    assert turns.tolist() == pytest.approx([2.55, 0.255, 0.0255, 0.00255], rel=0.01)
    keep = (float(turns[0]) - 1) / 3
    assert float(llama3[0]) == pytest.approx((keep + (1 - keep) / 8) * float(plain[0]))
    assert torch.equal(llama3[1:], plain[1:] / 8)  # these turn less than once over the trained context


def test_swiglu_by_hand():
    got = swiglu(torch.tensor([[0.0, 1.0, -20.0]]), torch.tensor([[5.0, 2.0, 3.0]]))
    assert got[0].tolist() == pytest.approx([0.0, 2 / (1 + math.exp(-1)), -60 / (1 + math.exp(20))], abs=1e-6)


# ---- the linear layer

BIG = (layers.PACK_MIN_WEIGHTS // 256, 256)


@pytest.fixture
def needs_packing():
    if not layers.packing_works():
        pytest.skip("this PyTorch build has no packed linear operators")


@pytest.mark.parametrize("rows", [0, 1, 3, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(needs_packing, rows, bias):
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(rows, 256, generator=generator), torch.randn(BIG, generator=generator)
    b = torch.randn(BIG[0], generator=generator) if bias else None
    packed, plain = Linear(weight, b), Linear(weight, b, pack=False)
    assert packed.packed and not plain.packed
    with torch.inference_mode():
        assert packed(x).shape == (rows, BIG[0])
        torch.testing.assert_close(packed(x), plain(x), atol=1e-3, rtol=0)


def test_only_one_copy_is_kept(needs_packing):
    weight = torch.randn(BIG)
    seen = weakref.ref(weight)
    linear = Linear(weight)
    del weight
    assert linear.packed and seen() is None


def test_when_weights_stay_plain(monkeypatch):
    weight = torch.randn(BIG)
    assert not Linear(weight.double()).packed
    assert not Linear(weight.bfloat16()).packed
    assert not Linear(weight[:-1].contiguous()).packed  # one row under the size from which it pays
    monkeypatch.setenv("KVLAB_PACKED_LINEAR", "0")
    assert not Linear(weight).packed
    monkeypatch.delenv("KVLAB_PACKED_LINEAR")
    monkeypatch.setattr(layers, "packing_works", lambda: False)
    linear = Linear(weight)
    assert not linear.packed and linear.weight is weight
    x = torch.randn(2, 256)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("fault", [AttributeError, RuntimeError, None])
def test_operators_that_fail_or_compute_wrongly_are_found_out(monkeypatch, fault):
    class Broken:
        def _reorder_linear_weight(self, weight, batch):
            if fault:
                raise fault("no such operator")
            return weight

        def _linear_pointwise(self, x, weight, bias, *rest):
            return x @ weight.T  # forgets the bias

    monkeypatch.setattr(torch.ops, "mkldnn", Broken())
    layers.packing_works.cache_clear()
    try:
        assert not layers.packing_works()
    finally:
        layers.packing_works.cache_clear()


# ---- the flat batch


def test_the_layout_of_a_step():
    """The picture at the top of kvlab/model/batch.py."""
    batch = flat_batch([([5, 6, 7], 5, [7, 3], True), ([10, 11], 0, [8], False), ([9], 9, [2, 6, 5], True)], 4)
    assert batch.token_ids.tolist() == [5, 6, 7, 10, 11, 9]
    assert batch.positions.tolist() == [5, 6, 7, 0, 1, 9]
    assert batch.slot_mapping.tolist() == [13, 14, 15, 32, 33, 21]
    assert batch.query_start_loc.tolist() == [0, 3, 5, 6]
    assert batch.seq_lens.tolist() == [8, 2, 10]
    assert batch.block_tables.tolist() == [[7, 3, 0], [8, 0, 0], [2, 6, 5]]
    assert batch.logits_indices.tolist() == [2, 5]
    assert (batch.num_decodes, batch.max_query_len, batch.max_seq_len) == (0, 3, 10)
    int32 = (batch.query_start_loc, batch.seq_lens, batch.block_tables)
    int64 = (batch.token_ids, batch.positions, batch.slot_mapping, batch.logits_indices)
    assert {t.dtype for t in int32} == {torch.int32} and {t.dtype for t in int64} == {torch.int64}


@pytest.mark.parametrize("lengths, expected", [([1, 1, 2, 1], 2), ([2, 1], 0), ([1, 1], 2), ([1], 1)])
def test_leading_decodes_are_counted(lengths, expected):
    assert flat_batch([([1] * n, 0, [1], False) for n in lengths], 4).num_decodes == expected


@pytest.mark.parametrize(
    "seq, message",
    [
        (([], 0, [1], True), "sequence 0 has 0 tokens from position 0"),
        (([1], -1, [1], True), "from position -1"),
        (([1, 2], 3, [1], True), "reaches position 4, but its 1 blocks hold 4 tokens each: allocate 2"),
    ],
)
def test_impossible_chunks_are_refused(seq, message):
    with pytest.raises(ValueError, match=message):
        flat_batch([seq], 4)
