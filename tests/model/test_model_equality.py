"""The decoder over pages computes what transformers computes, however a sequence is cut and wherever it lies."""

import dataclasses

import pytest
import torch
from paged_driver import PagedDriver, random_tokens
from random_checkpoints import KINDS

from kvlab.model.batch import flat_batch
from kvlab.model.kv_cache import KVCache
from kvlab.model.loader import load_model


def all_logits(hf_model, tokens) -> torch.Tensor:
    with torch.inference_mode():
        return hf_model(torch.tensor([tokens])).logits[0]


def assert_close(got, expected, tolerance=2e-4):
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got, expected.to(got.dtype), atol=tolerance, rtol=0)


@pytest.fixture(scope="module")
def exact(checkpoint):
    """A float64 model with plain weights: cutting must not change its logits beyond rounding."""
    return load_model(checkpoint("qwen2-tied")[0], dtype="float64")


# ---- against transformers


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_equal_transformers(checkpoint, kind):
    folder, hf_model = checkpoint(kind)
    model, config = load_model(folder)
    tokens = random_tokens(70)  # beyond original_max_position_embeddings of the scaled ropes
    expected = all_logits(hf_model, tokens)
    assert expected.std() > 0.5  # the models are not degenerate

    one_shot = PagedDriver(model, config, block_size=16)
    assert_close(one_shot.step({"a": tokens})["a"], expected[-1])

    by_token = PagedDriver(model, config, block_size=4)
    for position, token in enumerate(tokens):
        assert_close(by_token.step({"a": [token]})["a"], expected[position])

    generated = PagedDriver(model, config, block_size=4).greedy("a", tokens[:20], 24)
    hf_out = hf_model.generate(torch.tensor([tokens[:20]]), max_new_tokens=24, do_sample=False, eos_token_id=-1)
    assert generated == hf_out[0, 20:].tolist()
    assert len(set(generated)) > 6


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["qwen2-tied", "qwen3-bias"])
def test_stored_16_bit_and_sharded_weights(checkpoint, kind, stored):
    folder, hf_model = checkpoint(kind, stored, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    model, config = load_model(folder)
    assert config.dtype == str(stored).removeprefix("torch.")
    tokens = random_tokens(30)
    assert_close(PagedDriver(model, config, 16).step({"a": tokens})["a"], all_logits(hf_model, tokens)[-1])


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama-bias"])
def test_bfloat16_stays_near(checkpoint, kind):
    folder, hf_model = checkpoint(kind)
    model, config = load_model(folder, dtype="bfloat16")
    tokens = random_tokens(30)
    got = PagedDriver(model, config, 16).step({"a": tokens})["a"]
    expected = all_logits(hf_model, tokens)[-1]
    assert got.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.995


def test_packed_and_plain_linears_agree(checkpoint, monkeypatch):
    from kvlab.model import layers

    monkeypatch.setattr(layers, "PACK_MIN_WEIGHTS", 0)
    folder, hf_model = checkpoint("llama-bias")
    tokens = random_tokens(40)
    expected = all_logits(hf_model, tokens)[-1]
    for pack in (True, False):
        model, config = load_model(folder, pack=pack)
        assert model.lm_head.packed == (pack and layers.packing_works())
        assert_close(PagedDriver(model, config, 16).step({"a": tokens})["a"], expected)


# ---- however the work is cut


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, 31, 33])
def test_chunks_equal_one_shot(exact, block_size, chunk):
    model, config = exact
    tokens = random_tokens(65)
    expected = PagedDriver(model, config, block_size).step({"a": tokens})["a"]
    driver = PagedDriver(model, config, block_size, seed=1)
    for start in range(0, len(tokens), chunk):
        last = driver.step({"a": tokens[start : start + chunk]})["a"]
    assert (last - expected).abs().max() < 1e-10
    assert last.argmax() == expected.argmax()


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("backend", ["torch", "naive"])
def test_a_mixed_batch_equals_separate_ones(checkpoint, block_size, backend):
    """Decodes of different lengths, first chunks and later chunks in one step."""
    model, config = load_model(checkpoint("qwen3")[0], dtype="float64", backend=backend)
    lengths = {"d0": 1, "d1": 47, "d2": 16, "later": 21}  # computed before the mixed step
    mixed = {"d0": 1, "d1": 1, "d2": 1, "first": 19, "later": 9, "one": 1}
    tokens = {name: random_tokens(lengths.get(name, 0) + mixed[name], seed=i) for i, name in enumerate(mixed)}
    driver = PagedDriver(model, config, block_size)
    for name, length in lengths.items():
        driver.step({name: tokens[name][:length]}, wants=())
    got = driver.step({name: tokens[name][lengths.get(name, 0) :] for name in mixed}, wants=set(mixed) - {"first"})
    assert set(got) == set(mixed) - {"first"}
    for name, logits in got.items():
        alone = PagedDriver(model, config, block_size, seed=2).step({name: tokens[name]})[name]
        assert (logits - alone).abs().max() < 1e-10, name


def test_contexts_of_one_token(checkpoint):
    folder, hf_model = checkpoint("qwen2-tied")
    model, config = load_model(folder)
    got = PagedDriver(model, config, block_size=4).step({"a": [5], "b": [9]})
    for name, token in {"a": 5, "b": 9}.items():
        assert_close(got[name], all_logits(hf_model, [token])[-1])


def test_every_row_can_have_logits_and_none_needs_to(checkpoint):
    folder, hf_model = checkpoint("qwen2-untied")
    model, config = load_model(folder)
    tokens = random_tokens(20)
    kv_cache = KVCache(config, 4, 16, torch.float32)
    batch = flat_batch([(tokens, 0, [2, 1], False)], 16)
    assert model.forward(batch, kv_cache).shape == (0, config.vocab_size)
    batch = dataclasses.replace(batch, logits_indices=torch.arange(20))
    assert_close(model.forward(batch, kv_cache), all_logits(hf_model, tokens))


# ---- wherever the blocks lie


def test_shared_blocks_serve_several_sequences(exact):
    """Two sequences whose tables begin with the same two full blocks, computed by the first (L33 2.4)."""
    model, config = exact
    trunk, tails = random_tokens(32), {"a": random_tokens(5, 1), "b": random_tokens(9, 2)}
    driver = PagedDriver(model, config, block_size=16)
    driver.step({"a": trunk}, wants=())
    driver.tables["b"], driver.lengths["b"] = list(driver.tables["a"]), 32
    got = driver.step(tails)
    for name, tail in tails.items():
        alone = PagedDriver(model, config, block_size=16, seed=3).step({name: trunk + tail})[name]
        assert (got[name] - alone).abs().max() < 1e-10


@pytest.mark.parametrize("backend", ["torch", "naive"])
@pytest.mark.parametrize("garbage", [-1, 2**31 - 1])
def test_garbage_behind_the_table_is_never_read(checkpoint, backend, garbage):
    """Lengths around a block's end, in a table exactly as wide as the longest needs; NaN in all free slots."""
    model, config = load_model(checkpoint("qwen2-tied")[0], dtype="float64", backend=backend)
    lengths = {"a": 15, "b": 16, "c": 17, "d": 32, "e": 1}
    tokens = {name: random_tokens(length + 1, seed=length) for name, length in lengths.items()}
    driver = PagedDriver(model, config, block_size=16)
    driver.step({name: t[:-1] for name, t in tokens.items()}, wants=())
    seqs = []
    for name, length in lengths.items():
        table = driver.tables[name]
        while len(table) * 16 < length + 1:
            table.append(driver.free.pop())
        seqs.append((tokens[name][-1:], length, table, True))
    batch = flat_batch(seqs, 16)
    assert batch.block_tables.shape == (5, 3)
    for row, length in enumerate(lengths.values()):
        batch.block_tables[row, length // 16 + 1 :] = garbage
    logits = model.forward(batch, driver.kv_cache)
    for row, name in enumerate(lengths):
        alone = PagedDriver(model, config, block_size=4).step({name: tokens[name]})[name]
        assert (logits[row] - alone).abs().max() < 1e-10, name


def test_the_null_block_stays_zero(exact):
    model, config = exact
    driver = PagedDriver(model, config, block_size=4)
    driver.step({"a": random_tokens(9), "b": random_tokens(2)})
    driver.step({"a": [3], "b": [4]})
    assert all((layer[:, 0] == 0).all() for layer in driver.kv_cache.layers)
