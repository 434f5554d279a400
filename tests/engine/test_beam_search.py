"""Beam search by fork finds what `transformers` finds with num_beams: the same hypotheses, in the same order.

In float64 with plain weights the tokens must be equal without exception (scores are float32 in `transformers`, so
equal to 1e-5). In float32 two hypotheses may change places where scores are closer than a stated tolerance; such
searches are counted.
"""

import itertools
import json
import random
import shutil

import pytest
import torch
import transformers
from transformers import GenerationConfig

from kvlab import BeamSearchParams, SamplingParams
from kvlab.engine import LLM
from kvlab.model.loader import resolve_model
from kvlab.schedule import Policies, Request, beam_request

MANY = list(range(40))  # end-of-sequence tokens of a model that ends often


@pytest.fixture(scope="module")
def ends_often(checkpoint, tmp_path_factory):
    """The folder of a model whose config names many end-of-sequence tokens, so that searches end in all ways."""
    folder = tmp_path_factory.mktemp("ends-often") / "model"
    shutil.copytree(checkpoint("qwen2-tied"), folder)
    for name in ("config.json", "generation_config.json"):
        if (folder / name).exists():
            text = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps({**text, "eos_token_id": MANY}))
    return folder


class Beams:
    """`transformers`' beam search on one checkpoint."""

    def __init__(self, folder, dtype):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def search(self, prompt: list[int], params: BeamSearchParams, eos: list[int]) -> tuple[list, list[float]]:
        """The output tokens of each hypothesis, best first, and their scores (none of a single beam)."""
        eos = [] if params.ignore_eos else eos
        self.model.generation_config = GenerationConfig(eos_token_id=eos or None, pad_token_id=0)
        one = params.beam_width == 1
        out = self.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
            num_beams=params.beam_width, num_return_sequences=params.beam_width, max_new_tokens=params.max_tokens,
            return_dict_in_generate=True, output_scores=True,
            **({} if one else dict(length_penalty=params.length_penalty, early_stopping=params.early_stopping)),
        )  # fmt: skip
        found = []
        for row in out.sequences[:, len(prompt) :].tolist():
            length = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            found.append(row[:length])
        return found, [] if one else out.sequences_scores.tolist()


@pytest.fixture(scope="module")
def reference():
    made = {}

    def get(folder, dtype=torch.float64) -> Beams:
        if (folder, dtype) not in made:
            made[folder, dtype] = Beams(folder, dtype)
        return made[folder, dtype]

    return get


def prompts(seed: int, vocab: int = 211) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(40, vocab) for _ in range(length)] for length in (1, 9, 33, 12, 5)]


def compare(output, prompt, params, oracle: Beams, eos) -> list[str]:
    """AssertionError unless `output` holds what the reference finds; the finish reasons."""
    tokens, scores = oracle.search(prompt, params, eos)
    assert [s.token_ids for s in output.sequences] == tokens
    if scores:
        assert [s.score for s in output.sequences] == pytest.approx(scores, rel=1e-5, abs=1e-5)
    for sequence in output.sequences:
        norm = len(sequence.token_ids) ** params.length_penalty
        assert sequence.score == pytest.approx(sequence.cumulative_logprob / norm)
    return [s.finish_reason for s in output.sequences]


@pytest.mark.parametrize("ending", ["one token ends", "many tokens end", "nothing ends"])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_the_hypotheses_are_those_of_transformers(checkpoint, ends_often, reference, width, ending):
    folder = ends_often if ending == "many tokens end" else checkpoint("qwen2-tied")
    eos = MANY if ending == "many tokens end" else [0]
    llm = LLM(str(folder), dtype="float64", block_size=4, num_gpu_blocks_override=300)
    reasons = set()
    for length_penalty, early_stopping in itertools.product((0.0, 1.0, 2.0), (False, True)):
        params = BeamSearchParams(beam_width=width, max_tokens=16, length_penalty=length_penalty,
                                  early_stopping=early_stopping, ignore_eos=ending == "nothing ends")  # fmt: skip
        batch = prompts(int(10 * length_penalty))
        for prompt, output in zip(batch, llm.beam_search(batch, params), strict=True):
            assert output.prompt_token_ids == prompt and output.error is None
            reasons |= set(compare(output, prompt, params, reference(folder), eos))
    assert llm.stats()["usage"] == 0
    assert reasons >= {"stop"} if ending == "many tokens end" else reasons >= {"length"}


@pytest.mark.parametrize("kind", ["qwen2-untied", "qwen3", "llama"])
def test_on_every_family_of_models(checkpoint, reference, kind):
    llm = LLM(str(checkpoint(kind)), dtype="float64", num_gpu_blocks_override=100)
    params = BeamSearchParams(beam_width=4, max_tokens=20)
    for prompt in prompts(3):
        compare(llm.beam_search(prompt, params)[0], prompt, params, reference(checkpoint(kind)), [0])


PRESSURE = list(itertools.product((2, 4, 6), (1, 4, 16), ("recompute", "swap", "mixed"), (True, False)))


def test_under_pressure_and_in_company_nothing_changes(ends_often, reference):
    """Pools that hold one group and little more, budgets from the width up; an older request before the group, and an
    urgent one that needs most of the pool when the beams have parted."""
    preempted = {"recompute": 0, "swap": 0}
    num_groups_preempted = 0
    greedy = LLM(str(ends_often), dtype="float64", num_gpu_blocks_override=300)
    for number, (width, block_size, pressure, caching) in enumerate(PRESSURE):
        rng = random.Random(number)
        max_tokens = 10
        params = BeamSearchParams(beam_width=width, max_tokens=max_tokens, ignore_eos=rng.random() < 0.7,
                                  early_stopping=rng.random() < 0.5)  # fmt: skip
        prompt = prompts(number)[1]
        worst = width * -(-(len(prompt) + max_tokens - 1) // block_size)
        choices = {"mixed": ["swap", "recompute"]}.get(pressure, [pressure])
        llm = LLM(
            str(ends_often), dtype="float64", block_size=block_size, enable_prefix_caching=caching,
            num_gpu_blocks_override=1 + worst + rng.choice([0, 1, 3]), num_cpu_blocks_override=2 * worst,
            max_num_seqs=width + 2, max_num_batched_tokens=rng.choice([width, width + 1, width + 2, 19, 256]),
            policies=Policies(swap_or_recompute=lambda *_, rng=rng, choices=choices: rng.choice(choices)),
        )  # fmt: skip
        plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        old = Request("old", [20, 5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        urgent = Request("urgent", (prompts(9)[2] * 9)[: worst * block_size - 12], plain, priority=-1)
        search = beam_request("beams", prompt, params, eos_token_ids=MANY)
        llm.engine.add_request(old)
        llm.engine.add_request(search)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
            llm.engine.scheduler.manager.check()
            if search.num_output_tokens == 2 and urgent.seed is None:
                llm.engine.add_request(urgent)
        num_groups_preempted += search.num_preemptions > 0
        tokens, scores = reference(ends_often).search(prompt, params, MANY)
        assert [h.token_ids for h in search.group.finished] == tokens, (width, block_size, pressure, caching)
        assert [h.score for h in search.group.finished] == pytest.approx(scores, rel=1e-5)
        for other in (old, urgent)[: 1 + (urgent.seed is not None)]:
            [alone] = greedy.generate(other.prompt_token_ids, other.sampling_params)
            assert other.output_token_ids == alone.outputs[0].token_ids
        stats = llm.stats()
        assert stats["usage"] == 0
        for kind in preempted:
            preempted[kind] += stats[f"num_preemptions_{kind}"]
    assert num_groups_preempted > len(PRESSURE) // 2
    assert all(number > len(PRESSURE) for number in preempted.values()), preempted


def test_the_shipped_model_in_float32(reference):
    """Near-ties: scores within 1e-4 of the reference's, rank by rank; at most one search in ten may need that."""
    llm = LLM("tiny", dtype="float32", num_gpu_blocks_override=200)
    oracle, eos = reference(resolve_model("tiny"), torch.float32), list(llm.model_config.eos_token_ids)
    num_searches = num_near_ties = 0
    texts = ["What is a KV cache?", "How does beam search"]
    for width, length_penalty, early_stopping in itertools.product((2, 4, 6), (0.0, 1.0, 2.0), (False, True)):
        params = BeamSearchParams(beam_width=width, max_tokens=24, length_penalty=length_penalty,
                                  early_stopping=early_stopping)  # fmt: skip
        for text, output in zip(texts, llm.beam_search(texts, params), strict=True):
            tokens, scores = oracle.search(output.prompt_token_ids, params, eos)
            assert output.prompt == text
            assert [s.score for s in output.sequences] == pytest.approx(scores, abs=1e-4)
            for sequence in output.sequences:
                assert sequence.text == llm.tokenizer.decode([t for t in sequence.token_ids if t not in eos])
            num_searches += 1
            num_near_ties += [s.token_ids for s in output.sequences] != tokens
    assert num_searches == 36 and num_near_ties <= num_searches // 10


# ---- the front door


def tokens_of(output) -> list[list[int]]:
    return [sequence.token_ids for sequence in output.sequences]


@pytest.mark.parametrize(
    ("width", "message"),
    [
        (9, "prompt 0: request '0': beam_width is 9 and there are 8 seats"),
        (7, "beam_width is 7 and a step computes 6 tokens"),
        (6, "6 beams of 2 blocks, .* more than the 8 KV blocks"),
        (211, "beam_width is 211, and of 211 tokens 1 end the sequence: use a beam_width of at most 210"),
    ],
)
def test_too_wide_for_seats_budget_pool_or_vocabulary(checkpoint, width, message):
    llm = LLM(str(checkpoint("qwen2-tied")), dtype="float64", num_gpu_blocks_override=9, max_num_seqs=8,
              max_num_batched_tokens=6)  # fmt: skip
    with pytest.raises(ValueError, match=message):
        llm.beam_search([[1, 2], [3, 4]], BeamSearchParams(beam_width=width, max_tokens=20))
    assert not llm.engine.has_unfinished_requests()
    assert len(llm.beam_search([1, 2], BeamSearchParams(beam_width=4, max_tokens=20))[0].sequences) == 4


def test_if_one_prompt_is_refused_none_is_started(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), dtype="float64", num_gpu_blocks_override=9)
    params = BeamSearchParams(beam_width=2, max_tokens=4)
    for wrong, message in [([], "prompt 1: .* empty"), ([500], "prompt 1: prompt holds 500"), ([5] * 90, "prompt 1: ")]:
        with pytest.raises(ValueError, match=message):
            llm.beam_search([[1, 2], wrong], params)
        assert not llm.engine.has_unfinished_requests() and llm.stats()["usage"] == 0


def test_a_failure_is_told_and_spares_others(checkpoint, monkeypatch):
    llm = LLM(str(checkpoint("qwen2-tied")), dtype="float64", num_gpu_blocks_override=60)
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    [alone] = llm.beam_search([9, 8], params)
    forward = llm.model.forward

    def spoilt(batch, kv_cache):
        if 77 in batch.token_ids.tolist():
            raise RuntimeError("77 is spoilt")
        return forward(batch, kv_cache)

    monkeypatch.setattr(llm.model, "forward", spoilt)
    failed, other = llm.beam_search([[1, 77], [9, 8]], params)
    assert failed.error == "RuntimeError: 77 is spoilt" and failed.sequences == []
    assert other.error is None and tokens_of(other) == tokens_of(alone)


def test_searches_and_streams_run_side_by_side(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), dtype="float64", num_gpu_blocks_override=60)
    params, plain = BeamSearchParams(beam_width=3, max_tokens=6), SamplingParams(temperature=0, max_tokens=12)
    [alone], [text] = llm.beam_search([9, 8], params), llm.generate([4, 5], plain)
    stream = llm.stream([4, 5], plain)
    tokens = list(next(stream).token_ids)
    [among] = llm.beam_search([9, 8], params)
    for delta in stream:
        tokens += delta.token_ids
    assert tokens_of(among) == tokens_of(alone) and tokens == text.outputs[0].token_ids


def test_memory_is_reported(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), dtype="float64", block_size=4, num_gpu_blocks_override=200)
    prompt = prompts(0)[2]  # 33 tokens: 8 full blocks that all beams share, to the end
    for width in (2, 4, 6):
        memory = llm.beam_search(prompt, BeamSearchParams(beam_width=width, max_tokens=8, ignore_eos=True))[0].memory
        assert memory.peak_blocks_copying == width * 10
        assert 8 < memory.peak_blocks <= 8 + 2 * width
        assert memory.saved_at_peak == 1 - memory.peak_blocks / memory.peak_blocks_copying >= 0.8 * (1 - 1 / width)
        assert 0 < memory.num_copies <= 8 * width
