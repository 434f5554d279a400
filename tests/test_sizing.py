"""kvlab.sizing: exact figures, known models' parameter counts, and clear refusals."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab import sizing
from kvlab.sizing import GIB, KIB, MODELS, ModelShape, model_shape

PARAMETERS = {  # as published with each model's weights
    "Llama-2-7B": 6_738_415_616,
    "Llama-2-13B": 13_015_864_320,
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
}


def test_every_model_in_the_table_has_its_published_parameter_count():
    assert {name: shape.num_parameters for name, shape in MODELS.items()} == PARAMETERS


@pytest.mark.parametrize(
    ("model", "dtype_bytes", "kib"),
    [
        ("Qwen2.5-0.5B", 2, 12),
        ("Qwen2.5-7B", 2, 56),
        ("Qwen2.5-7B", 1, 28),  # fp8 K/V halves it
        ("Llama-3-8B", 2, 128),
        ("Llama-3-70B", 2, 320),
        ("Llama-2-7B", 2, 512),
        ("Llama-2-13B", 2, 800),  # full multi-head attention: not the 160 KB of L33 0.1
    ],
)
def test_kv_bytes_per_token(model, dtype_bytes, kib):
    assert model_shape(model).kv_bytes_per_token(dtype_bytes) == kib * KIB


def test_int8_with_a_scale_for_each_head():
    assert sizing.kv_bytes_per_token(28, 4, 128, 1, scale_bytes=4) == 28 * 1024 + 28 * 2 * 4 * 4
    assert model_shape("Qwen2.5-7B").kv_bytes_per_token(1, 4) == 29_568
    with pytest.raises(ValueError, match="scale_bytes is -4"):
        sizing.kv_bytes_per_token(28, 4, 128, 1, scale_bytes=-4)


def test_a_block_of_sixteen_tokens():
    assert sizing.kv_bytes_per_token(28, 4, 128, 2) == 57_344
    assert sizing.bytes_per_block(57_344, 16) == 917_504


@pytest.mark.parametrize(
    ("kv_bytes", "requests"),
    [
        (54 * 10**9, 32),
        (54 * GIB, 34),
        (int(79.35 * GIB) - 26 * 10**9, 35),
    ],
)
def test_gb_and_gib_are_two_requests_apart(kv_bytes, requests):
    """A 13B with full multi-head attention and 2048 tokens a request (L33 0.1, claim C03)."""
    block = sizing.bytes_per_block(model_shape("Llama-2-13B").kv_bytes_per_token(), 16)
    blocks = sizing.num_gpu_blocks(kv_bytes, 1.0, 0, 0, 0, block)
    assert sizing.max_concurrency(blocks, 16, 2048) == requests


def test_num_gpu_blocks_of_a_7b_on_24_gib():
    """0.92 x 24 GiB = 23,708,219,473; less 15,231,233,024 of weights and 2 GiB: 6,329,502,801 bytes."""
    shape = model_shape("Qwen2.5-7B")
    blocks = sizing.num_gpu_blocks(24 * GIB, 0.92, shape.weight_bytes(), 3 * GIB // 2, GIB // 2, 917_504)
    assert blocks == 6898
    assert sizing.max_concurrency(blocks, 16, 4096) == 26


@pytest.mark.parametrize("utilization", [0, -0.1, 1.0001, 92, float("nan")])
def test_utilization_outside_its_range_is_refused(utilization):
    with pytest.raises(ValueError, match="gpu_memory_utilization is .*at most 1"):
        sizing.num_gpu_blocks(GIB, utilization, 0, 0, 0, 1024)


def test_nothing_left_says_how_many_bytes_are_missing():
    with pytest.raises(ValueError, match=r"no room .*: 25 bytes"):
        sizing.num_gpu_blocks(1000, 0.5, 400, 20, 5, 100)
    assert sizing.num_gpu_blocks(1000 + 50, 0.5, 400, 20, 5, 100) == 1  # 25 bytes more of budget are enough


def test_the_7b_that_does_not_fit_names_its_remedies():
    shape = model_shape("Qwen2.5-7B")
    with pytest.raises(ValueError, match="quantised.*larger GPU"):
        sizing.num_gpu_blocks(12 * GIB, 0.92, shape.weight_bytes(), GIB, 0, 917_504)


@settings(deadline=None)
@given(
    total=st.integers(1, 10**12),
    share=st.floats(0.01, 1),
    taken=st.tuples(*[st.integers(0, 10**11)] * 3),
    block=st.integers(1, 10**7),
)
def test_num_gpu_blocks_is_the_most_that_fits(total, share, taken, block):
    budget = int(total * share) - sum(taken)
    if budget < block:
        with pytest.raises(ValueError, match=f" {block - budget} bytes"):
            sizing.num_gpu_blocks(total, share, *taken, block)
    else:
        blocks = sizing.num_gpu_blocks(total, share, *taken, block)
        assert blocks * block <= budget < (blocks + 1) * block


@pytest.mark.parametrize(
    ("tokens", "requests"), [(1, 128), (16, 128), (17, 64), (512, 4), (2048, 1), (2049, 0)]
)
def test_max_concurrency_counts_whole_blocks(tokens, requests):
    assert sizing.max_concurrency(128, 16, tokens) == requests


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, None, "16"])
def test_counts_must_be_whole_and_positive(bad):
    with pytest.raises(ValueError, match="num_layers is .*whole number"):
        sizing.kv_bytes_per_token(bad, 4, 128)
    with pytest.raises(ValueError, match="block_size is .*whole number"):
        sizing.bytes_per_block(1024, bad)
    with pytest.raises(ValueError, match="tokens_per_request is .*whole number"):
        sizing.max_concurrency(10, 16, bad)


def test_weight_bytes():
    shape = model_shape("Llama-2-13B")
    assert shape.weight_bytes() == 26_031_728_640  # the 26 GB of L33 0.1, which are 24.24 GiB
    assert sizing.to_gb(shape.weight_bytes()) == pytest.approx(26.03, abs=0.005)
    assert sizing.to_gib(shape.weight_bytes()) == pytest.approx(24.24, abs=0.005)
    assert shape.weight_bytes(0.5) * 4 == shape.weight_bytes()
    with pytest.raises(ValueError, match="dtype_bytes"):
        shape.weight_bytes(float("nan"))


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (57_344, "56 KiB"), (3 * GIB // 2, "1.5 GiB"), (-2048, "-2 KiB")],
)
def test_format_bytes(num_bytes, text):
    assert sizing.format_bytes(num_bytes) == text


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="'GPT-5'.*Qwen2.5-7B"):
        model_shape("GPT-5")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": "llama", "vocab_size": 8}, "hidden_size"),
    ],
)
def test_a_config_that_cannot_be_counted_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        ModelShape.from_config(config)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("flags", [{}, {"attention_bias": True}, {"attention_bias": True, "mlp_bias": True}])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama"])
def test_parameter_counts_equal_those_of_transformers(kind, flags, tied):
    """The oracle: build the model without memory (on torch's meta device) and count."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=97,
        hidden_size=56,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=7,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        **flags,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert ModelShape.from_config(config.to_dict()).num_parameters == model.num_parameters()


def test_quantised_weights_save_less_where_the_embedding_is_most_of_the_model():
    shapes = [model_shape(name) for name in ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-72B")]
    shares = [shape.quantised_weight_bytes() / shape.weight_bytes() for shape in shapes]
    assert shares[0] > 0.45 > 0.4 > shares[1] > 0.3 > shares[2] > 4 / 16
    with pytest.raises(ValueError, match="group_size is 0"):
        model_shape("Qwen2.5-7B").quantised_weight_bytes(group_size=0)


@given(bits=st.sampled_from([3, 4, 8]), group=st.sampled_from([32, 64, 128]))
def test_quantised_weights_counted_group_by_group(bits, group):
    shape = ModelShape(50, 128, 256, 3, 4, 2, 32, attention_bias=True)
    matrices = [128 * 128, 64 * 128, 64 * 128, 128 * 128, *[128 * 256] * 3] * 3
    total_bits = sum(n * bits + n // group * (16 + bits) for n in matrices)
    rest = shape.num_parameters - sum(matrices)
    assert shape.quantised_weight_bytes(bits, group) == total_bits // 8 + 2 * rest
