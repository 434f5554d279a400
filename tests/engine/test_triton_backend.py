"""The engine on interpreted kernels generates what it generates on PyTorch's operations."""

from collections import Counter

import pytest

from kvlab import LLM, SamplingParams

pytest.importorskip("triton")
from kvlab_kernels import cache_write, quantized, rms_norm, rope_cache, split_kv, swiglu, varlen  # noqa: E402

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


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_other_models(checkpoint, kind):
    """In chunks, with reuse, INT8 K and V and too little memory."""
    options = {"block_size": 4, "num_gpu_blocks_override": 9, "max_model_len": 24, "max_num_batched_tokens": 4}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def run(backend):
        llm = LLM(str(checkpoint(kind)), attention_backend=backend, kv_cache_dtype="int8", **options)
        outputs = llm.generate([prompt[:6] for prompt in PROMPTS], params)
        return [(out.outputs[0].token_ids, out.num_cached_tokens) for out in outputs], llm.stats()

    got = run("triton")
    assert got == run("torch")
    assert got[1]["num_preemptions_recompute"] > 0 and any(num_cached for _, num_cached in got[0])


@pytest.fixture
def launches(monkeypatch):
    """Counts the launches of each kernel, by name."""
    counted = Counter()

    class Counting:
        def __init__(self, kernel, name):
            self.kernel, self.name = kernel, name

        def __getitem__(self, grid):
            counted[self.name] += 1
            return self.kernel[grid]

    for module, names in {
        cache_write: ["cache_write_kernel"], quantized: ["quantized_write_kernel"], rms_norm: ["rms_norm_kernel"],
        rope_cache: ["rope_cache_kernel"], split_kv: ["split_kernel"], swiglu: ["swiglu_kernel"],
        varlen: ["varlen_kernel"],
    }.items():  # fmt: skip
        for name in names:
            monkeypatch.setattr(module, name, Counting(getattr(module, name), name))
    return counted


@pytest.mark.parametrize("kind, norms", [("qwen2-tied", 2), ("qwen3", 3)])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_what_a_step_launches(checkpoint, launches, kind, norms, kv_cache_dtype):
    """A prompt of one step: each kernel once a layer; two norms, a third for Qwen3's q and k, and one before the head.

    K and V are written on the way, so neither rung 1 nor rung 8 writes anything.
    """
    llm = LLM(str(checkpoint(kind)), attention_backend="triton", num_gpu_blocks_override=8, max_model_len=40,
              kv_cache_dtype=kv_cache_dtype)  # fmt: skip
    launches.clear()
    llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1))
    layers = llm.model_config.num_hidden_layers
    assert launches == {"rms_norm_kernel": norms * layers + 1, "rope_cache_kernel": layers, "swiglu_kernel": layers,
                        "varlen_kernel": layers}  # fmt: skip


def test_a_model_in_float64_keeps_pytorch_beside_the_kernels_of_attention(checkpoint, launches):
    """Attention reads fp32 K and V, as it did; what computes in float64 does not become fp32."""
    options = dict(dtype="float64", kv_cache_dtype="float32", num_gpu_blocks_override=8, max_model_len=40)
    params = SamplingParams(temperature=0, max_tokens=3)
    got = LLM(str(checkpoint("qwen3")), attention_backend="triton", **options).generate(PROMPTS[:2], params)
    want = LLM(str(checkpoint("qwen3")), attention_backend="torch", **options).generate(PROMPTS[:2], params)
    assert [output.outputs[0].token_ids for output in got] == [output.outputs[0].token_ids for output in want]
    assert set(launches) == {"cache_write_kernel", "varlen_kernel"}  # and gqa_packed, which is not counted


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
