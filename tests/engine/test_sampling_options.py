"""Penalties, bias, log-probabilities and best_of: against slow oracles, `transformers`, and under preemption."""

import math

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engine import LLM
from kvlab.engine.logits import Adjustment, adjust, top_logprobs
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Policies

VOCAB = 211
ABS = 1e-5  # transformers normalises in float32 even in a float64 model
PROMPT = [7, 7, 9, *range(20, 40), 9]
OPTIONS = dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={5: 2.0, 9: -3.0},
               min_p=0.02, temperature=0.9, min_tokens=4, logprobs=3, max_tokens=16, seed=5)  # fmt: skip


def test_adjust_equals_the_definition_token_by_token():
    @settings(max_examples=200)
    @given(
        st.lists(st.floats(-5, 5), min_size=3, max_size=8),
        st.lists(st.integers(0, 9), max_size=6),
        st.lists(st.integers(0, 9), max_size=6),
        st.sampled_from([0.5, 1.0, 1.7]),
        st.sampled_from([-1.0, 0.0, 0.6]),
        st.sampled_from([0.0, 0.5, 0.3]),
    )
    def check(logits, prompt, output, repetition, presence, frequency):
        expected = []
        for token, x in enumerate(logits):
            x = -math.inf if token == 1 else x
            x += 1.5 * (token == 2)
            if token in prompt or token in output:
                x = x / repetition if x > 0 else x * repetition
            x -= frequency * output.count(token) + presence * (token in output)
            expected.append(x)
        row = torch.tensor(logits, dtype=torch.float64)
        adjust(row, Adjustment((1, 400), ((2, 1.5), (400, 1.0)), repetition, presence, frequency, prompt, output))
        assert row.tolist() == pytest.approx(expected)

    check()


def test_repetition_penalty_equals_transformers():
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    theirs = transformers.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([PROMPT + [50, 51]]), logits.clone())[0]
    adjust(logits[0], Adjustment(repetition=1.4, prompt=PROMPT, output=[50, 51]))
    assert torch.equal(logits[0], theirs)


def test_top_logprobs_are_the_log_softmax_with_ranks():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    tokens, counts = [3, int(logits[1].argmax()), 8, int(logits[3].argmin())], [0, 2, 5, 999]
    for row, token, count, entry in zip(
        logits.log_softmax(-1), tokens, counts, top_logprobs(logits, tokens, counts), strict=True
    ):
        order = row.argsort(descending=True).tolist()
        assert next(iter(entry)) == token and set(entry) == {token, *order[:count]}
        for t, logprob in entry.items():
            assert logprob.logprob == pytest.approx(float(row[t])) and order[logprob.rank - 1] == t


@pytest.fixture(scope="module")
def folder(checkpoint):
    return str(checkpoint("qwen2-tied"))


@pytest.fixture(scope="module")
def roomy(folder):
    return LLM(folder, dtype="float64", block_size=4, num_gpu_blocks_override=200)


@pytest.fixture(scope="module")
def network(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def logprobs_of(network, token_ids):
    with torch.inference_mode():
        return network(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def test_logprobs_are_those_of_the_model_whatever_the_sampler_does(roomy, network):
    completion = roomy.generate([PROMPT], SamplingParams(**OPTIONS))[0].outputs[0]
    reference = logprobs_of(network, PROMPT + completion.token_ids)[len(PROMPT) - 1 :]
    total = 0.0
    for token, entry, row in zip(completion.token_ids, completion.logprobs, reference, strict=False):
        total += float(row[token])
        assert entry[token].logprob == pytest.approx(float(row[token]), abs=ABS)
        assert set(row.topk(3).indices.tolist()) <= set(entry) and len(entry) <= 4
    assert completion.cumulative_logprob == pytest.approx(total, abs=20 * ABS)


@pytest.mark.parametrize("budget, blocks", [(200, 200), (5, 200), (7, 13)])
def test_prompt_logprobs_are_whole_with_hits_chunks_and_preemption(folder, network, budget, blocks):
    llm = LLM(folder, dtype="float64", block_size=4, num_gpu_blocks_override=blocks, max_num_batched_tokens=budget,
              policies=Policies(may_resume=lambda *_: True))  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, ignore_eos=True)
    llm.generate([PROMPT], SamplingParams(max_tokens=1))  # its blocks are cached now
    outputs = llm.generate([PROMPT, PROMPT, [3]], params)
    reference = logprobs_of(network, PROMPT)
    for output in outputs[:2]:
        assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(PROMPT)
        for position in range(1, len(PROMPT)):
            entry, row = output.prompt_logprobs[position], reference[position - 1]
            assert entry[PROMPT[position]].logprob == pytest.approx(float(row[PROMPT[position]]), abs=ABS)
            assert set(row.topk(2).indices.tolist()) <= set(entry)
    assert outputs[2].prompt_logprobs == [None]
    if blocks == 13:
        assert llm.stats()["num_preemptions_recompute"] > 0


def test_penalties_logprobs_and_draws_survive_preemption_batching_and_forks(folder, roomy):
    params = [SamplingParams(**{**OPTIONS, "seed": i, "n": 1 + i % 3}) for i in range(5)]
    prompts = [[i, *PROMPT] for i in range(5)]
    expected = [roomy.generate([p], q)[0].outputs for p, q in zip(prompts, params, strict=True)]
    for cpu_blocks in (0, 60):
        tight = LLM(folder, dtype="float64", block_size=4, num_gpu_blocks_override=16, max_num_seqs=4,
                    num_cpu_blocks_override=cpu_blocks, policies=Policies(may_resume=lambda *_: True))  # fmt: skip
        got = [output.outputs for output in tight.generate(prompts, params)]
        stats = tight.stats()
        assert stats["num_preemptions_swap" if cpu_blocks else "num_preemptions_recompute"] > 0
        for a, b in zip(sum(expected, []), sum(got, []), strict=True):
            assert a.token_ids == b.token_ids and a.finish_reason == b.finish_reason
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-9)
            assert [set(entry) for entry in a.logprobs] == [set(entry) for entry in b.logprobs]


def test_min_tokens_hold_after_a_preemption(folder, roomy):
    """Three quarters of the vocabulary would end it: at 12 outputs it does soon, and never before."""
    params = [SamplingParams(seed=i, max_tokens=30, min_tokens=12, stop_token_ids=range(160)) for i in range(5)]
    prompts = [[i, *PROMPT] for i in range(5)]
    expected = [roomy.generate([p], q)[0].outputs[0].token_ids for p, q in zip(prompts, params, strict=True)]
    tight = LLM(folder, dtype="float64", block_size=4, num_gpu_blocks_override=16, max_num_seqs=4,
                policies=Policies(may_resume=lambda *_: True))  # fmt: skip
    got = [output.outputs[0].token_ids for output in tight.generate(prompts, params)]
    assert tight.stats()["num_preemptions_recompute"] > 0
    assert got == expected and all(12 <= len(tokens) < 30 for tokens in got)


def test_best_of_returns_the_likeliest_of_the_same_draws(roomy):
    params = dict(temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    everyone = roomy.generate([PROMPT], SamplingParams(n=5, logprobs=0, **params))[0].outputs
    best = roomy.generate([PROMPT], SamplingParams(n=2, best_of=5, **params))[0].outputs
    ranked = sorted(everyone, key=lambda c: -c.cumulative_logprob)[:2]
    assert [c.token_ids for c in best] == [c.token_ids for c in ranked]
    assert [c.index for c in best] == [0, 1] and best[0].logprobs is None
    assert best[0].cumulative_logprob >= best[1].cumulative_logprob
    with pytest.raises(ValueError, match="best_of"):
        roomy.stream(PROMPT, SamplingParams(n=2, best_of=5, **params))


def test_bias_can_force_and_forbid(roomy):
    forced = SamplingParams(temperature=0, max_tokens=4, logit_bias={17: 100.0}, ignore_eos=True)
    assert roomy.generate([PROMPT], forced)[0].outputs[0].token_ids == [17] * 4
    plain = roomy.generate([PROMPT], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))[0].outputs[0]
    forbidden = SamplingParams(temperature=0, max_tokens=6, logit_bias={plain.token_ids[0]: -100.0}, ignore_eos=True)
    assert plain.token_ids[0] not in roomy.generate([PROMPT], forbidden)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "options", [{"min_p": -0.1}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"presence_penalty": 3}, {"logprobs": -1},
                {"frequency_penalty": -2.5}, {"logit_bias": {1: 200.0}}, {"logit_bias": {-1: 1.0}},
                {"n": 3, "best_of": 2}, {"prompt_logprobs": 1.5}, {"stop": ""}, {"stop": [3]}],
)  # fmt: skip
def test_bad_options_name_the_field_and_the_value(options):
    with pytest.raises(ValueError) as error:
        SamplingParams(**options)
    assert list(options)[-1] in str(error.value)
