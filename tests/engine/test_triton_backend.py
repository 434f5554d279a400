"""The engine on interpreted kernels generates what it generates on PyTorch's attention."""

import pytest

from kvlab import LLM, SamplingParams

pytest.importorskip("triton")

PROMPTS = [[7, 8, 9, 10, 11] * 2, [7, 8, 9, 10, 11, 4, 5], list(range(20, 30))]
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "num_gpu_blocks_override": 13, "num_cpu_blocks_override": 8},  # chunks
        {"deterministic_split_tokens": 16, "max_num_batched_tokens": 12},
        {"kv_cache_dtype": "int8", "max_num_batched_tokens": 12},
    ],
    ids=["plain", "chunked, under pressure", "fixed splits", "int8"],
)
def test_the_same_tokens_as_torch(checkpoint, options):
    options = {"block_size": 4, "num_gpu_blocks_override": 60, "max_model_len": 48} | options
    llm = LLM(str(checkpoint("qwen2-tied")), attention_backend="triton", **options)
    got = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]
    options.pop("deterministic_split_tokens", None)
    torch_llm = LLM(str(checkpoint("qwen2-tied")), attention_backend="torch", **options)
    assert got == [output.outputs[0].token_ids for output in torch_llm.generate(PROMPTS, GREEDY)]
    assert all(len(tokens) == 14 for tokens in got)
    if "num_cpu_blocks_override" in options:
        assert llm.stats()["num_preemptions_swap"] + llm.stats()["num_preemptions_recompute"] > 0


@pytest.mark.parametrize(
    "options, words",
    [
        ({"attention_backend": "triton", "dtype": "float64"}, ["float64", "bfloat16"]),
        ({"attention_backend": "triton", "block_size": 512}, ["512", "256"]),
        ({"attention_backend": "torch", "deterministic_split_tokens": 64}, ["64", "triton"]),
        ({"deterministic_split_tokens": -1}, ["-1", "0 is off"]),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_at_once(checkpoint, options, words):
    with pytest.raises(ValueError) as error:
        LLM(str(checkpoint("qwen2-tied")), num_gpu_blocks_override=8, **options)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_warm_up_leaves_every_block_as_it_was(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), attention_backend="triton", num_gpu_blocks_override=8, max_model_len=100)
    runner = llm.engine.runner
    forward, lengths = llm.model.forward, []

    def seen(batch, kv_cache):
        lengths.append((batch.num_decodes, batch.max_query_len, batch.max_seq_len))
        return forward(batch, kv_cache)

    llm.model.forward = seen
    runner.warm_up(max_num_batched_tokens=64)
    assert lengths == [(1, 1, 1), (1, 1, 100), (0, 2, 2), (0, 64, 64)]
    assert all(not layer.any() for layer in runner.kv_cache.layers)


def test_a_warm_up_of_a_backend_that_compiles_nothing_runs_nothing(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), attention_backend="torch", num_gpu_blocks_override=8, max_model_len=100)
    llm.model.forward = None
    llm.engine.runner.warm_up(max_num_batched_tokens=64)
