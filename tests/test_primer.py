"""kvlab.primer: the cache changes no token, and the costs against counting one by one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.primer import (
    GPU,
    GPUS,
    Cache,
    ToyDecoder,
    attainable_flops,
    attend,
    attend_next,
    batch_for_balance,
    decode_with_cache,
    decode_without_cache,
    intensity,
    num_projected,
    step_bytes,
    step_flops,
    step_seconds,
)
from kvlab.sizing import ModelShape, model_shape

# ---- the decoder


@settings(max_examples=30)
@given(prompt=st.lists(st.integers(0, 28), min_size=1, max_size=8), n=st.integers(0, 8), layers=st.integers(1, 3),
       seed=st.integers(0, 99))  # fmt: skip
def test_the_cache_changes_no_token_and_saves_what_the_count_says(prompt, n, layers, seed):
    slow, fast = (ToyDecoder(num_layers=layers, seed=seed) for _ in range(2))
    assert decode_without_cache(slow, prompt, n) == decode_with_cache(fast, prompt, n)
    assert slow.num_projected == layers * num_projected(len(prompt), n, with_cache=False)
    assert fast.num_projected == layers * num_projected(len(prompt), n, with_cache=True)


def test_tokens_depend_on_order_and_on_all_that_came_before():
    outputs = {tuple(decode_with_cache(ToyDecoder(), prompt, 6)) for prompt in ([1, 2, 3], [2, 1, 3], [4, 2, 3], [3])}
    assert len(outputs) == 4


def test_any_split_of_the_prompt_gives_the_same_logits_to_the_last_bit():
    model, tokens = ToyDecoder(), [3, 1, 4, 1, 5, 9]
    want = model.forward(tokens, Cache())
    for cut in range(1, 6):
        cache = Cache()
        model.forward(tokens[:cut], cache)
        assert len(cache) == cut
        assert model.forward(tokens[cut:], cache) == want


def test_attention_by_hand():
    assert attend([0.0, 0.0], [[1.0, 2.0], [3.0, 4.0]], [[1.0], [3.0]]) == [2.0]  # all alike: the mean
    (value,) = attend([1000.0], [[1.0], [0.0]], [[5.0], [7.0]])  # no overflow, and only the first counts
    assert value == 5.0


def test_a_decoder_takes_another_step():
    """What the step finds reaches the logits, and the step sees K and V of all positions before."""
    seen = []

    def watched(layer, x, keys, values):
        seen.append(len(keys))
        return attend_next(layer, x, keys, values)

    model = ToyDecoder(num_layers=2, step=watched)
    assert model.forward([3, 1, 4], Cache()) == ToyDecoder(num_layers=2).forward([3, 1, 4], Cache())
    assert seen == [0, 0, 1, 1, 2, 2]
    deaf = ToyDecoder(step=lambda layer, x, keys, values: keys.append(x) or values.append(x) or [0.0] * len(x))
    assert deaf.forward([3, 1, 4], Cache()) != model.forward([3, 1, 4], Cache())


# ---- the costs, counted one by one


def count(shape: ModelShape, step) -> tuple[int, int]:
    """Every matrix and every pair of positions by itself: FLOP, and entries moved."""
    h, q, kv = shape.hidden_size, shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    inner = shape.intermediate_size
    matrices = [(q, h), (kv, h), (kv, h), (h, q), (inner, h), (inner, h), (h, inner)]
    flops, entries = 0, shape.vocab_size * h + sum(r * c for r, c in matrices) * shape.num_hidden_layers
    for new, computed in step:
        for position in range(computed, computed + new):
            entries += h  # its row of the embedding
            for _ in range(shape.num_hidden_layers):
                flops += sum(2 * rows * columns for rows, columns in matrices)
                for _ in range(shape.num_attention_heads):
                    for _ in range(position + 1):
                        flops += 2 * shape.head_dim + 2 * shape.head_dim
        flops += 2 * shape.vocab_size * h
        entries += (computed + new) * shape.num_hidden_layers * 2 * kv
    return flops, entries


STEPS = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=4)


@given(step=STEPS, heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]), layers=st.integers(1, 3), size=st.integers(1, 2))
def test_flops_and_bytes_are_what_is_counted(step, heads, layers, size):
    shape = ModelShape(31, 12, 20, layers, *heads, head_dim=4)
    flops, entries = count(shape, step)
    assert step_flops(shape, step) == flops
    assert step_bytes(shape, step, size) == entries * size
    assert intensity(shape, step, size) == flops / (entries * size)


def test_a_prefill_in_chunks_has_the_same_flops_but_for_the_logits():
    shape = model_shape("Qwen2.5-7B")
    whole = step_flops(shape, [(4000, 0)])
    chunks = [step_flops(shape, [(min(512, 4000 - done), done)]) for done in range(0, 4000, 512)]
    assert sum(chunks) - whole == 7 * 2 * shape.vocab_size * shape.hidden_size


def test_c16_intensity_of_decodes_is_about_their_number():
    shape = model_shape("Llama-3-8B")
    for batch in (1, 8, 64, 128):
        assert intensity(shape, [(1, 16)] * batch) == pytest.approx(batch, rel=0.05)
    assert intensity(shape, [(1, 4096)] * 128) < 40  # every sequence brings K/V of its own: a long context undoes it
    assert GPUS["H100"].balance == pytest.approx(295, abs=1)
    # 128 of 295: the most that this batch can use of the arithmetic, where the text says 75-85%.
    share = attainable_flops(GPUS["H100"], 128) / GPUS["H100"].peak_flops
    assert share == pytest.approx(0.434, abs=0.001)


def test_prefill_is_limited_by_arithmetic_and_decode_by_memory():
    shape, gpu = model_shape("Qwen2.5-7B"), GPUS["A100"]
    prefill, decode = [(2048, 0)], [(1, 2048)]
    assert intensity(shape, prefill) > gpu.balance > intensity(shape, decode)
    assert step_seconds(gpu, shape, prefill) == step_flops(shape, prefill) / gpu.peak_flops
    assert step_seconds(gpu, shape, decode) == step_bytes(shape, decode) / gpu.bandwidth
    assert attainable_flops(gpu, gpu.balance) == pytest.approx(gpu.peak_flops)
    assert attainable_flops(gpu, gpu.balance / 2) == pytest.approx(gpu.peak_flops / 2)


@given(peak=st.integers(1, 400), computed=st.integers(0, 9), heads=st.sampled_from([(1, 1), (4, 2), (6, 1)]))
def test_the_batch_that_reaches_the_balance_is_the_first_one_that_does(peak, computed, heads):
    shape, gpu = ModelShape(31, 12, 20, 2, *heads, head_dim=4), GPU(float(peak), 4.0, 0)
    found = batch_for_balance(gpu, shape, computed)
    reaches = lambda n: intensity(shape, [(1, computed)] * n) >= gpu.balance  # noqa: E731
    if found is None:
        assert not reaches(3000)
    else:
        assert found > 3000 or reaches(found)
        assert found == 1 or not reaches(min(found, 3000) - 1)


def test_full_heads_never_fill_an_h100_and_grouped_ones_do_while_contexts_are_short():
    gpu = GPUS["H100"]
    assert batch_for_balance(gpu, model_shape("Llama-2-7B"), 128) is None
    found, shape = batch_for_balance(gpu, model_shape("Llama-3-8B"), 128), model_shape("Llama-3-8B")
    assert intensity(shape, [(1, 128)] * (found - 1)) < gpu.balance <= intensity(shape, [(1, 128)] * found)
    assert batch_for_balance(gpu, model_shape("Llama-3-8B"), 1024) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ToyDecoder().forward([], Cache()), "give at least one"),
        (lambda: ToyDecoder().forward([29], Cache()), "each from 0 to 28"),
        (lambda: decode_with_cache(ToyDecoder(max_len=4), [1, 2], 4), "5 tokens: this decoder knows 4 positions"),
        (lambda: step_flops(model_shape("Qwen2.5-7B"), []), "the step is empty"),
        (lambda: step_bytes(model_shape("Qwen2.5-7B"), [(0, 5)]), r"\(0, 5\) in the step"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
