"""One finish reason for each continuation and one usage record for each request, however it ends."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config import EngineConfig
from kvlab.engine import LLM
from kvlab.engine.core import EngineCore
from kvlab.engine.output_processor import OutputProcessor
from kvlab.engine.outputs import Usage
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler
from kvlab.sim import SlotEchoRunner


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, token_ids) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


class MoodyRunner(SlotEchoRunner):
    """Raises now and then, for all and for one alone."""

    def __init__(self, rng, rate, *sizes):
        super().__init__(*sizes)
        self.rng, self.rate = rng, rate

    def execute(self, output):
        if self.rng.random() < self.rate:
            raise RuntimeError("on purpose")
        return super().execute(output)


@given(st.randoms(use_true_random=False), st.sampled_from([0, 0.03]), st.sampled_from([0, 0.1]), st.booleans())
@settings(max_examples=150)
def test_one_reason_for_each_index_and_one_usage_for_each_request(rng: random.Random, fails, aborts, caching):
    config = EngineConfig(block_size=4, num_gpu_blocks_override=14, num_cpu_blocks_override=rng.choice([0, 6]),
                          max_num_seqs=4, max_num_batched_tokens=rng.choice([3, 9, 64]), max_model_len=40,
                          enable_prefix_caching=caching)  # fmt: skip
    core = EngineCore(Scheduler(config), MoodyRunner(rng, fails, 14, 4, config.num_cpu_blocks_override))
    processor = OutputProcessor(Letters(), core.scheduler)
    requests, deltas = [], []
    for i in range(8):
        params = SamplingParams(n=rng.choice([1, 1, 2, 3]), max_tokens=rng.randint(1, 15), stop_token_ids=[7],
                                stop=rng.choice([(), ("b", "cd")]))  # fmt: skip
        requests.append(Request(str(i), [*range(rng.randint(1, 12))], params, eos_token_ids=[11]))
        core.add_request(requests[-1])
        processor.register(requests[-1], None)
    while core.has_unfinished_requests():
        if rng.random() < aborts:  # in any state, and by the id of a child too
            ended = core.abort_request(rng.choice(list(core.scheduler.requests)))
            deltas += processor.process(ended)
        deltas += processor.process(core.step())

    for request in requests:
        mine = [delta for delta in deltas if delta.request_id == request.request_id]
        output, n = processor.output(request.request_id), request.sampling_params.n
        assert Counter(d.index for d in mine if d.finish_reason is not None) == dict.fromkeys(range(n), 1)
        for i in range(n):
            pieces = [delta for delta in mine if delta.index == i]
            assert pieces[-1].finish_reason == output.outputs[i].finish_reason, "it speaks after its end"
            assert sum((delta.token_ids for delta in pieces), []) == output.outputs[i].token_ids
        assert [delta.usage is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
        assert output.finished and output.usage == mine[-1].usage
        assert output.usage == Usage(request.num_prompt_tokens, sum(len(c.token_ids) for c in output.outputs),
                                     output.num_cached_tokens)  # fmt: skip
        assert output.usage.cached_tokens < request.num_prompt_tokens


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint("qwen2-tied")), block_size=4, num_gpu_blocks_override=21, max_num_seqs=3)


def test_usage_counts_the_prompt_once_every_draw_and_the_hits(llm):
    params = SamplingParams(n=2, best_of=3, seed=1, max_tokens=5, ignore_eos=True)
    [output] = llm.generate([[*range(1, 14)]], params)
    assert len(output.outputs) == 2 and output.usage == Usage(13, 15, 0) and output.usage.total_tokens == 28
    [output] = llm.generate([[*range(1, 14)]], SamplingParams(temperature=0, max_tokens=1))
    assert output.usage == Usage(13, 1, 12)


def test_usage_is_the_same_after_preemptions(llm):
    prompts = [[100 + i, *range(2, 14)] for i in range(3)]
    before = llm.stats()["num_preemptions_recompute"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert llm.stats()["num_preemptions_recompute"] > before
    assert [output.usage for output in outputs] == [Usage(13, 30, 0)] * 3


def test_a_stream_brings_its_usage_last(llm):
    deltas = list(llm.stream([*range(40, 49)], SamplingParams(n=2, temperature=0, max_tokens=4, ignore_eos=True)))
    assert [delta.usage for delta in deltas] == [None] * 7 + [Usage(9, 8, 0)]


def test_no_usage_before_the_end():
    scheduler = Scheduler(EngineConfig(block_size=4, num_gpu_blocks_override=14))
    core, processor = EngineCore(scheduler, SlotEchoRunner(14, 4)), OutputProcessor(Letters(), scheduler)
    core.add_request(request := Request("a", [1, 2], SamplingParams(max_tokens=3, temperature=0)))
    processor.register(request, None)
    for usage in (None, None, Usage(2, 3, 0)):
        processor.process(core.step())
        assert processor.output("a").usage == usage
