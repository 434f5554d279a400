"""kv_cache_dtype="int8": real answers stay what they are, and no policy changes a token.

Policies are compared in float64: there a number never lies so near the middle between two steps of int8 that the order
of a sum decides which one it becomes.
"""

import pytest
import torch
import transformers

from kvlab.config import EngineConfig
from kvlab.engine import LLM
from kvlab.engine.memory import plan_blocks
from kvlab.model.config import ModelConfig
from kvlab.sampling_params import BeamSearchParams, SamplingParams
from kvlab.schedule import Policies
from kvlab.tiny import MODEL_DIR, load_glossary

QUESTIONS = [[{"role": "user", "content": entry["question"]}] for entry in load_glossary()[::6]]
NEAR = 0.5  # logits closer than this may change places: an estimate of what int8 does, several times what was seen


def test_the_shipped_model_answers_as_transformers_does_but_for_near_ties():
    llm = LLM("tiny", kv_cache_dtype="int8")
    outputs = llm.chat(QUESTIONS, SamplingParams(temperature=0, max_tokens=96))
    assert llm.stats()["num_prefix_hit_tokens"] > 0
    network = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32).eval()
    num_tokens = num_near_ties = 0
    for output in outputs:
        answer = list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = network(torch.tensor([list(output.prompt_token_ids) + answer])).logits[0, -len(answer) - 1 : -1]
        for row, token in zip(logits, answer, strict=True):
            assert row.max() - row[token] < NEAR
            num_near_ties += int(row.argmax()) != token
            num_tokens += 1
    assert num_tokens > 500 and num_near_ties <= num_tokens // 100


def test_it_is_quantised_indeed(checkpoint):
    """Else the tests here could not fail: log-probabilities differ from those without int8, a little."""
    found = []
    for kv_cache_dtype in ("auto", "int8"):
        llm = LLM(str(checkpoint("qwen3")), dtype="float64", kv_cache_dtype=kv_cache_dtype, num_gpu_blocks_override=9)
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=1)
        [output] = llm.generate([list(range(1, 60))], params)
        found.append(max(entry.logprob for entry in output.outputs[0].logprobs[0].values()))
    assert 0 < abs(found[0] - found[1]) < 0.05


TIGHT = dict(num_gpu_blocks_override=16, policies=Policies(may_resume=lambda *_: True))
ENGINES = {
    "alone": dict(max_num_seqs=3, max_num_batched_tokens=256),
    "the oracle": dict(attention_backend="naive"),
    "chunks": dict(max_num_batched_tokens=7),
    "recompute": TIGHT,
    "swap": TIGHT | dict(num_cpu_blocks_override=60),
    "prefix reuse": dict(enable_prefix_caching=True),
    "prefix reuse and swap": TIGHT | dict(num_cpu_blocks_override=60, enable_prefix_caching=True),
}


@pytest.mark.parametrize("kind", ["qwen2-tied", "llama"])
def test_no_policy_changes_a_token(checkpoint, kind):
    """Six prompts with one beginning; one has three children, which copy their common last block."""
    prompts = [[*range(1, 19), i] for i in range(6)]
    params = [SamplingParams(temperature=1.0, seed=i, n=3 if i == 2 else 1, max_tokens=14, ignore_eos=True)
              for i in range(6)]  # fmt: skip
    results, stats = {}, {}
    for name, options in ENGINES.items():
        base = dict(dtype="float64", kv_cache_dtype="int8", block_size=4, num_gpu_blocks_override=200, max_num_seqs=8)
        llm = LLM(str(checkpoint(kind)), **base | dict(enable_prefix_caching=False) | options)
        outputs = llm.generate(prompts, params)
        results[name] = [[completion.token_ids for completion in output.outputs] for output in outputs]
        stats[name] = llm.stats()
        llm.engine.scheduler.manager.check()
    assert stats["recompute"]["num_preemptions_recompute"] > 0 and stats["swap"]["num_preemptions_swap"] > 0
    assert stats["prefix reuse"]["num_prefix_hit_tokens"] > 0
    for name, tokens in results.items():
        assert tokens == results["alone"], name
    assert len(set(map(tuple, results["alone"][2]))) == 3


def test_beams_move_scales_with_their_blocks(checkpoint):
    """Beams fork at every step, so blocks are copied all the time; the copies' scales must come along."""
    found = []
    for block_size, num_blocks in ((16, 60), (4, 200), (1, 600)):
        llm = LLM(str(checkpoint("qwen2-tied")), dtype="float64", kv_cache_dtype="int8", block_size=block_size,
                  num_gpu_blocks_override=num_blocks)  # fmt: skip
        [output] = llm.beam_search([list(range(1, 22))], BeamSearchParams(beam_width=4, max_tokens=12))
        found.append([sequence.token_ids for sequence in output.sequences])
    assert found[0] == found[1] == found[2]


def test_more_blocks_fit_the_same_memory():
    """The shipped model's heads of 32 take 36 bytes, scale included, where they took 128 in fp32."""
    config = EngineConfig(device="cpu", max_model_len=2048, max_num_seqs=10_000)
    shape = ModelConfig("qwen2", 256, 512, 4, 8, 2, 32, 2048, 2048)
    plain, small = (plan_blocks(config, shape, dtype)[0] for dtype in (torch.float32, torch.int8))
    assert abs(small / plain - 128 / 36) < 0.001


def test_other_names_are_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype is 'int4': use one of .*int8"):
        LLM("tiny", kv_cache_dtype="int4")
    with pytest.raises(ValueError, match="dtype is 'int8'"):
        LLM("tiny", dtype="int8")
