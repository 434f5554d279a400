"""The pool is sized by what the largest steps took, on a device that counts bytes; what a GPU says is faked."""

import logging
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensor_meter import TensorMeter

from kvlab import LLM, SamplingParams, plan, sizing
from kvlab.config import EngineConfig
from kvlab.engine import build, memory, sampler
from kvlab.engine.build import build_engine, make_config
from kvlab.engine.profile import CudaMeter, largest_steps
from kvlab.engine.runner import ModelRunner
from kvlab.model.config import ModelConfig
from kvlab.model.known import known_config
from kvlab.model.kv_cache import kv_bytes_per_token
from kvlab.model.random_weights import write_random_model
from kvlab.plan import activation_bytes, cudagraph_bytes

MIB = 2**20
SHAPE = [field.name for field in fields(sizing.ModelShape)]


def built(total: int, used: int, **options):
    config, meter = make_config({"block_size": 16} | options), TensorMeter(total, used)
    return config, meter, build_engine("tiny", config, meter=meter)


def test_the_pool_is_what_the_measured_steps_leave():
    config, meter, engine = built(200 * MIB, 60 * MIB, max_num_batched_tokens=512, max_num_seqs=32, max_model_len=2048)
    block_bytes = 16 * kv_bytes_per_token(engine.model_config, torch.float32)
    assert meter.peak > 4 * MIB and meter.alive == 0
    assert config.num_gpu_blocks_override == sizing.num_gpu_blocks(200 * MIB, 0.9, 60 * MIB, meter.peak, 0, block_bytes)
    assert engine.engine_core.runner.kv_cache.num_blocks == config.num_gpu_blocks_override


@pytest.mark.parametrize("option", [{"max_num_batched_tokens": 256}, {"max_num_seqs": 16}])
def test_smaller_steps_leave_more_blocks(option):
    """Both limits are felt: the MLP's for every token, and the sampler's for every seat."""
    limits = dict(max_num_batched_tokens=1024, max_num_seqs=64, max_model_len=2048)
    (large, _, _), (small, _, _) = (built(100 * MIB, 60 * MIB, **limits | more) for more in ({}, option))
    assert small.num_gpu_blocks_override > large.num_gpu_blocks_override


def test_nothing_that_is_served_takes_more_than_was_measured():
    options = dict(max_num_batched_tokens=128, max_num_seqs=8, max_model_len=256)
    _, profiled, _ = built(200 * MIB, 60 * MIB, **options)
    llm = LLM("tiny", num_gpu_blocks_override=256, **options)
    prompts = [list(range(3, 3 + n)) for n in (250, 200, 1, 17, 120, 64, 90, 33, 5, 240, 16, 130)]
    kinds = [dict(temperature=1.5, top_p=0.999999), dict(temperature=1.0, top_k=2000), dict(temperature=0)]
    meter = TensorMeter(1, 0)
    meter.start()
    llm.generate(prompts, [SamplingParams(max_tokens=6, seed=i, **kinds[i % 3]) for i in range(len(prompts))])
    assert 0.3 * profiled.peak < meter.peak_bytes() <= profiled.peak


@given(st.integers(1, 300), st.integers(1, 5000), st.integers(2, 5000))
@settings(deadline=None)
def test_the_largest_steps_keep_to_the_limits_and_fill_them(seats, budget, max_model_len):
    config = EngineConfig(max_num_seqs=seats, max_num_batched_tokens=budget, max_model_len=max_model_len)
    mixed, decodes = largest_steps(config)
    assert len(mixed) == len(decodes) == min(seats, budget) and set(decodes) == {1}
    assert all(1 <= length < max_model_len for length in mixed)
    assert sum(mixed) == min(budget, len(mixed) * (max_model_len - 1))


def test_a_pool_that_holds_no_sequence_names_the_longest_that_it_would():
    options = dict(max_num_batched_tokens=128, max_num_seqs=4)
    with pytest.raises(ValueError, match=r"max_model_len is 2048.*set max_model_len to at most (\d+)") as error:
        built(74 * MIB, 60 * MIB, max_model_len=2048, gpu_memory_utilization=0.92, **options)
    longest = int(str(error.value).split("at most ")[1].split(",")[0])
    config, _, _ = built(74 * MIB, 60 * MIB, max_model_len=longest, gpu_memory_utilization=0.92, **options)
    assert config.max_model_len == longest


def test_no_room_at_all_says_how_much_is_missing():
    with pytest.raises(ValueError, match="no room for a single K/V block.*are missing.*gpu_memory_utilization"):
        built(60 * MIB, 60 * MIB)


def test_the_log_says_what_fits_in_the_words_of_vllm(caplog):
    with caplog.at_level(logging.INFO, logger="kvlab"):
        LLM("tiny", num_gpu_blocks_override=101, max_model_len=320)
    assert [record.getMessage() for record in caplog.records] == [
        "CPU KV cache size: 1,600 tokens (100 blocks, 3.12 MiB)",
        "Maximum concurrency for 320 tokens per request: 5.00x",
    ]
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kvlab"):
        built(200 * MIB, 60 * MIB, max_num_batched_tokens=64, max_num_seqs=2)
    assert caplog.messages[0].startswith("Memory: 60 MiB in use before the KV cache")
    assert caplog.messages[0].endswith("of 200 MiB x 0.9")


def test_pinned_swap_space_counts_as_what_pytorch_takes(monkeypatch):
    """Its allocator rounds pinned memory up to a power of two: 20 GiB would take 32 (pytorch/pytorch#95823)."""
    shape = ModelConfig("qwen2", 16, 16, 1, 1, 1, 16, 64, 64)
    monkeypatch.setattr(memory, "host_bytes", lambda: 24 << 30)

    def plan_blocks(device, **options):
        config = EngineConfig(device=device, num_gpu_blocks_override=8, max_model_len=64, **options)
        return memory.plan_blocks(config, shape, torch.float32)

    assert plan_blocks("cpu", swap_space=20.0) == (8, (20 << 30) // 2048)
    assert plan_blocks("cuda", swap_space=16.0) == (8, (16 << 30) // 2048)
    with pytest.raises(ValueError, match=r"swap space take 32 GiB of .* 24 GiB.*power of two.*swap_space"):
        plan_blocks("cuda", swap_space=20.0)


def test_pinned_memory_that_is_refused_is_a_sentence_too():
    """By CUDA itself, so that PyTorch has another exception for it."""
    with pytest.raises(ValueError, match="pinned memory ran out while making blocks: take fewer. .*CUDA error"):
        with memory.out_of_memory("making blocks", "take fewer"):
            raise torch.AcceleratorError("CUDA error: out of memory")
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        with memory.out_of_memory("making blocks", "take fewer"):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def raise_out_of_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.02 GiB. See documentation for more")


@pytest.mark.parametrize(
    "owner, name, said",
    [
        (build, "load_model", "ran out while loading the weights of 'tiny': use a smaller or a quantised model"),
        (ModelRunner, "execute", "ran out while running the largest step: lower max_num_batched_tokens"),
        (build, "choose_attention_backend", "ran out while running the largest step"),
    ],
)
def test_out_of_memory_is_a_sentence_with_a_remedy(monkeypatch, owner, name, said):
    monkeypatch.setattr(owner, name, raise_out_of_memory)
    with pytest.raises(ValueError, match=said) as error:
        built(200 * MIB, 60 * MIB, max_num_batched_tokens=64, max_num_seqs=2)
    assert str(error.value).endswith("PyTorch says: CUDA out of memory. Tried to allocate 1.02 GiB.")


def test_out_of_memory_for_the_pool_itself(monkeypatch):
    monkeypatch.setattr(build, "KVCache", raise_out_of_memory)
    with pytest.raises(ValueError, match="while making 64 K/V blocks: lower gpu_memory_utilization"):
        LLM("tiny", num_gpu_blocks_override=64)


class FakeCuda:
    """A GPU of 1000 bytes: another process has 100, PyTorch holds 320 for tensors of 300."""

    total, others, reserved, allocated, top = 1000, 100, 320, 300, 0
    calls: list[str]

    def __init__(self):
        self.calls = []

    def mem_get_info(self, device):
        return self.total - self.others - self.reserved, self.total

    def memory_reserved(self, device):
        return self.reserved

    def memory_allocated(self, device):
        return self.allocated

    def max_memory_allocated(self, device):
        return self.top

    def reset_peak_memory_stats(self, device):
        self.top = self.allocated

    def synchronize(self, device):
        self.calls.append("synchronize")

    def empty_cache(self):
        self.reserved = self.allocated


def test_the_cuda_meter_counts_tensors_at_their_peak_and_all_else_as_it_is(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setattr("kvlab.engine.profile.torch", SimpleNamespace(cuda=cuda, device=torch.device))
    meter = CudaMeter("cuda:0")
    assert meter.total_bytes == 1000
    assert meter.used_bytes() == 400  # what PyTorch keeps in reserve is given back before it counts
    meter.start()
    cuda.allocated, cuda.reserved, cuda.top = 310, 560, 550  # tensors grew to 550, 310 are left
    cuda.others += 30  # kernels that were loaded
    assert meter.peak_bytes() == 550 - 300 + 30
    assert cuda.calls  # nothing is read while the GPU still works


@pytest.mark.parametrize(
    "tokens, seats, length, at_once",
    [(1024, 4, 512, 1 << 22), (256, 64, 64, 1 << 22), (64, 64, 64, 1 << 22), (64, 64, 64, 1 << 17)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Qwen3-0.6B"])
def test_the_plan_estimates_what_is_measured(eighths, name, dtype, tokens, seats, length, at_once, monkeypatch):
    """kvlab.plan's formula against the meter: less by a seventh at most, more by a half at most."""
    for module in (plan, sampler):
        monkeypatch.setattr(module, "SAMPLED_AT_ONCE", at_once)
    meter = TensorMeter(2**31, 0)
    limits = dict(max_num_batched_tokens=tokens, max_num_seqs=seats, max_model_len=length, dtype=dtype)
    engine = build_engine(str(eighths(name)), make_config(limits), meter=meter)
    shape = sizing.ModelShape(**{field: getattr(engine.model_config, field) for field in SHAPE})
    estimate = activation_bytes(shape, engine.model.dtype.itemsize, tokens, seats)
    assert 0.86 < estimate / meter.peak < 1.5


@pytest.fixture(scope="session")
def eighths(tmp_path_factory):
    """eighths(name): one layer of a model, every width an eighth of it but the heads', which are half as wide."""
    made = {}

    def get(name: str):
        if name not in made:
            config = known_config(name)
            for field in ("hidden_size", "intermediate_size", "vocab_size"):
                config[field] //= 8
            config |= dict(num_hidden_layers=1, num_attention_heads=config["num_attention_heads"] // 4, head_dim=64,
                           num_key_value_heads=config["num_key_value_heads"] // 4, eos_token_id=0)  # fmt: skip
            made[name] = write_random_model(tmp_path_factory.mktemp("eighth") / name, config, tokenizer=False)
        return made[name]

    return get


@given(st.integers(1, 600), st.sampled_from([16, 1024, 1025, 32_768]))
@settings(deadline=None)
def test_the_plan_counts_graphs_as_the_runner_does(seats, length):
    graphs = pytest.importorskip("kvlab.engine.graphs")
    config = ModelConfig.from_dict(known_config("Qwen2.5-7B"))
    sizes, lengths = graphs.capture_sizes(seats), graphs.capture_lengths(length)
    runners = graphs.estimate_bytes(config, torch.bfloat16, sizes, len(lengths))
    assert cudagraph_bytes(sizing.model_shape("Qwen2.5-7B"), 2, seats, length) == runners
