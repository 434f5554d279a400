"""An engine on weights in 4 bits generates what it generates on the same weights written out."""

import pytest
import torch

from kvlab import LLM, SamplingParams
from kvlab.model import awq

PROMPTS = [[7, 8, 9, 10, 11] * 2, [7, 8, 9, 10, 11, 4, 5], list(range(20, 30))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
ROOM = {"block_size": 4, "num_gpu_blocks_override": 60, "max_model_len": 48}


@pytest.fixture
def pair(request, checkpoint, tmp_path):
    """(AWQ folder, the folder of its weights written out in fp32)."""
    awq.quantise_checkpoint(checkpoint(getattr(request, "param", "qwen2-tied")), tmp_path / "awq", group_size=16)
    awq.dequantise_checkpoint(tmp_path / "awq", tmp_path / "plain")
    return str(tmp_path / "awq"), str(tmp_path / "plain")


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("pair", ["qwen2-tied", "qwen3", "llama"], indirect=True)
def test_written_out_on_a_cpu_the_tokens_are_the_same(pair):
    got, want = (LLM(folder, **ROOM) for folder in pair)
    assert not got.model.layers[0].qkv_proj.kernel
    assert tokens(got) == tokens(want)


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 7}], ids=["plain", "chunked"])
def test_by_the_kernel_the_tokens_are_the_same(pair, options):
    pytest.importorskip("triton")
    llm = LLM(pair[0], attention_backend="triton", **ROOM, **options)
    assert all(linear.kernel for linear in (llm.model.layers[0].gate_up_proj, llm.model.layers[1].o_proj))
    assert tokens(llm) == tokens(LLM(pair[1], attention_backend="torch", **ROOM, **options))


def test_many_rows_at_once_and_a_warm_up_before(pair, monkeypatch):
    """A step of more rows than the kernel takes writes the weights out; warming up leaves every block as it was."""
    pytest.importorskip("triton")
    from kvlab_kernels import awq_matmul

    monkeypatch.setattr(awq_matmul, "MOST_ROWS", 4)
    llm = LLM(pair[0], attention_backend="triton", **ROOM)
    llm.engine.runner.warm_up(max_num_batched_tokens=64)
    assert all(not layer.any() for layer in llm.engine.runner.kv_cache.layers)
    assert tokens(llm) == tokens(LLM(pair[1], attention_backend="torch", **ROOM))


def test_in_16_bits_too(pair):
    llm = LLM(pair[0], dtype="float16", **ROOM)
    assert llm.model.layers[0].down_proj(torch.zeros(1, 96, dtype=torch.float16)).dtype == torch.float16
    assert all(len(row) == 8 for row in tokens(llm))


def test_an_engine_can_insist_on_4_bits(pair):
    assert LLM(pair[0], quantization="awq", **ROOM).model_config.awq_group_size == 16
    with pytest.raises(ValueError, match="quantization is 'awq', but .*plain' has no quantization_config: use its AWQ"):
        LLM(pair[1], quantization="awq", **ROOM)
    with pytest.raises(ValueError, match="quantization is 'gptq': use one of None, awq"):
        LLM(pair[0], quantization="gptq", **ROOM)


def test_another_format_is_refused_with_what_to_use(pair):
    from pathlib import Path

    config = Path(pair[0]) / "config.json"
    config.write_text(config.read_text().replace('"gemm"', '"gemv"'))
    with pytest.raises(ValueError, match="version 'gemv' are not supported.*bf16 or fp16"):
        LLM(pair[0], **ROOM)
