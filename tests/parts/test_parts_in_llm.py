"""Parts in the engine that serves a model: the same tokens, and what is said when one fails there."""

import pytest
import torch
from test_parts import OTHERS, ListQueue, mine, raising

from kvlab import LLM, EngineConfig, Parts, SamplingParams
from kvlab.engine import memory
from kvlab.model.kv_cache import kv_bytes_per_token
from kvlab.parts import PartError
from kvlab.standin.decode import paged_attention

PROMPTS = ["The free queue", "The free queue holds", "A block table", "Why"]
PARAMS = SamplingParams(temperature=1.0, n=2, seed=3, max_tokens=12)
OPTIONS = dict(num_gpu_blocks_override=16, block_size=4, max_model_len=48, max_num_seqs=5, dtype="float64")


@pytest.mark.parametrize("extra", [{}, {"reservation": "contiguous"}])
def test_parts_change_no_token(extra):
    def tokens(parts):
        llm = LLM("tiny", parts=parts, **OPTIONS, **extra)
        return [[c.token_ids for c in out.outputs] for out in llm.generate(PROMPTS, PARAMS)], llm

    got, llm = tokens(Parts(**OTHERS))
    assert isinstance(llm.engine.scheduler.manager.block_pool.free_block_queue, ListQueue)
    assert got == tokens(None)[0]


def test_sizing_plans_the_blocks():
    def sizing(total_bytes, gpu_memory_utilization, weight_bytes, activation_bytes, cudagraph_bytes, block_bytes):
        asked.append((total_bytes, block_bytes))
        return 21

    asked = []
    llm = LLM("tiny", parts=Parts(sizing=sizing))
    assert llm.config.num_gpu_blocks_override == 21
    if not torch.cuda.is_available():
        assert asked[0][0] == memory.CPU_POOL_BYTES
    assert memory.plan_blocks(llm.config, llm.model_config, torch.float32)[0] == 21  # named by now: nobody is asked


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_computes_the_decodes(dtype):
    def attention(q, keys, values, block_tables, seq_lens):
        asked.append((q.shape, keys.shape, seq_lens.tolist()))
        return paged_attention(q, keys, values, block_tables, seq_lens)

    def tokens(parts, **options):
        llm = LLM("tiny", parts=parts, **OPTIONS | {"dtype": "float32", "kv_cache_dtype": dtype} | options)
        params = SamplingParams(temperature=0, max_tokens=6)
        return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]

    asked = []
    got = tokens(Parts(attention=attention))
    assert got == tokens(None)
    assert asked[-1][1] == (16, 4, 2, 32) and {len(lens) for *_, lens in asked} >= {4}
    with pytest.raises(ValueError, match="use device='cpu' and kv_cache_dtype='float32'"):
        tokens(Parts(attention=attention), kv_cache_dtype="float64")


def test_on_a_cpu_ours_gives_what_the_pool_holds():
    config = EngineConfig(device="cpu", max_num_seqs=100_000, max_model_len=2048)
    model_config = LLM("tiny", **OPTIONS).model_config
    block_bytes = kv_bytes_per_token(model_config, torch.float32) * config.block_size
    assert memory.plan_blocks(config, model_config, torch.float32) == (memory.CPU_POOL_BYTES // block_bytes, 0)


def test_the_error_of_a_part_comes_out_of_generate_with_its_own_traceback():
    llm = LLM("tiny", parts=Parts(free_queue=mine(ListQueue, append_n=raising, append=raising)), **OPTIONS)
    with pytest.raises(PartError, match="your part `free_queue` raised KeyError in Mine.append_n") as caught:
        llm.generate(PROMPTS, PARAMS)
    assert caught.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name == "raising"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ListQueue}, "give a kvlab.Parts"),
        ({"parts": Parts(), "policies": object()}, "policies and parts are both given"),
    ],
)
def test_what_is_no_parts_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LLM("tiny", **options)
