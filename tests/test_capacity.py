"""The short formulas of lab 01, held beside kvlab.sizing, which counts from a ModelShape."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab import capacity, sizing
from kvlab.sizing import MODELS, ModelShape


@pytest.mark.parametrize("name", MODELS)
def test_a_config_counts_like_the_shape(name):
    config, shape = capacity.model_config(name), MODELS[name]
    assert ModelShape.from_config(config) == shape
    assert capacity.token_bytes(config) == shape.kv_bytes_per_token()
    assert capacity.token_bytes(config, 1) == shape.kv_bytes_per_token(1)
    assert capacity.num_parameters(config) == shape.num_parameters


def test_head_dim_may_be_said_and_the_heads_left_out():
    config = {"model_type": "llama", "hidden_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
              "head_dim": 8, "intermediate_size": 7, "vocab_size": 11}  # fmt: skip
    assert capacity.token_bytes(config) == 2 * 3 * 4 * 8 * 2
    assert capacity.num_parameters(config) == ModelShape.from_config(config).num_parameters


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="known are Llama-2-7B"):
        capacity.model_config("GPT-5")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1 KB", 1000), ("1 KiB", 1024), ("7 B", 7), ("54 GB", 54 * 10**9), ("54 GiB", 54 * 2**30),
     ("79.35 GiB", 85_201_413_734), ("0.29 GB", 290_000_000), ("1.001 KiB", 1025)],
)  # fmt: skip
def test_to_bytes(text, num_bytes):
    assert capacity.to_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["54", "54GB", "54 gb", "54 Gb", "54 TB", "x GB", "", "54 GB free", "nan GB"])
def test_sizes_that_cannot_be_read_are_refused(text):
    with pytest.raises(ValueError):
        capacity.to_bytes(text)


@given(st.lists(st.integers(1, 64), min_size=1), st.sampled_from([1, 4, 16]))
def test_reservation_slot_by_slot(lengths, block_size):
    reserved = [i < length for length in lengths for i in range(64)]
    paged = [i < length for length in lengths for i in range(64) if i // block_size <= (length - 1) // block_size]
    idle, idle_paged, gain = capacity.compare_reservation(lengths, 64, block_size)
    assert idle == pytest.approx(reserved.count(False) / len(reserved))
    assert idle_paged == pytest.approx(paged.count(False) / len(paged))
    assert gain == pytest.approx(len(reserved) / len(paged))


def test_quantised_bytes_add_up_to_the_shapes():
    shape = MODELS["Qwen2.5-7B"]
    rest = (shape.num_parameters - shape.num_layer_weights) * 2
    assert capacity.quantised_bytes(shape.num_layer_weights) + rest == shape.quantised_weight_bytes()
    assert capacity.quantised_bytes(129) == 66 + 4  # 129 weights and 2 zero points of 4 bits, 2 scales


@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 16))
def test_break_even_is_where_the_blocks_pass_the_state(state, per_token, block_size):
    def held(tokens):
        return -(-tokens // block_size) * block_size * per_token

    tokens = capacity.break_even_tokens(state, per_token, block_size)
    assert held(tokens - 1) <= state < held(tokens)
    assert sizing.bytes_per_block(per_token, block_size) * -(-tokens // block_size) == held(tokens)
