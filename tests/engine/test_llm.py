"""LLM as its users meet it: what comes back, what is refused, and that nothing else is harmed by either."""

import numpy as np
import pytest
import torch

from kvlab.engine import LLM
from kvlab.engine.memory import choose_device
from kvlab.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(1, 30))


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint("qwen2-tied")), block_size=4, num_gpu_blocks_override=41, max_num_seqs=3)


@pytest.fixture
def unharmed(llm):
    """Whatever a test does to the engine, it must answer as before afterwards, with nothing held."""
    before = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    yield
    assert llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids == before
    assert llm.stats()["usage"] == 0 and not llm.engine.has_unfinished_requests()
    llm.engine.scheduler.manager.check()


# ---- what comes back


def test_one_prompt_many_prompts_one_params_each(llm):
    one = llm.generate(PROMPT, GREEDY)
    assert len(one) == 1 and len(one[0].outputs) == 1 and one[0].prompt_token_ids == PROMPT and one[0].finished
    assert llm.generate(np.array(PROMPT), GREEDY)[0].outputs == one[0].outputs
    each = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True) for k in (1, 5, 3)]
    many = llm.generate([PROMPT, [5], [6, 7]], each)
    assert [len(output.outputs[0].token_ids) for output in many] == [1, 5, 3]
    assert many[0].outputs[0].token_ids == one[0].outputs[0].token_ids[:1]
    assert all(output.outputs[0].finish_reason == "length" for output in many)


def test_prefix_hits_are_reported_once_and_change_nothing(llm):
    llm.engine.scheduler.manager.reset_prefix_cache()
    first, second = llm.generate([PROMPT], GREEDY)[0], llm.generate([PROMPT], GREEDY)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("n", [2, 4, 7])  # three seats
def test_children_equal_single_requests_with_seed_plus_index(llm, unharmed, n):
    params = SamplingParams(n=n, temperature=1.0, seed=11, max_tokens=9)
    together = llm.generate([PROMPT], params)[0].outputs
    assert [completion.index for completion in together] == list(range(n))
    alone = [llm.generate([PROMPT], params.child(i))[0].outputs[0].token_ids for i in range(n)]
    assert [completion.token_ids for completion in together] == alone
    assert len({tuple(token_ids) for token_ids in alone}) > 1


def test_seeds_survive_company_and_pressure(checkpoint):
    """The same seeded requests in a roomy pool, and in one that preempts them, give the same tokens."""
    requests = [[i, *range(1, 20)] for i in range(1, 7)]
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=14, ignore_eos=True) for i in range(6)]
    results = []
    for blocks, cpu_blocks, seats in ((200, 0, 1), (200, 0, 6), (16, 0, 6), (16, 40, 6)):
        engine = LLM(str(checkpoint("llama")), dtype="float64", block_size=4, num_gpu_blocks_override=blocks,
                     num_cpu_blocks_override=cpu_blocks, max_num_seqs=seats, enable_prefix_caching=False)  # fmt: skip
        results.append([output.outputs[0].token_ids for output in engine.generate(requests, params)])
        stats = engine.stats()
        if blocks == 16:
            assert stats["num_preemptions_swap" if cpu_blocks else "num_preemptions_recompute"] > 0
    assert results[0] == results[1] == results[2] == results[3]


def test_requests_without_seed_differ_from_each_other_and_repeat_with_the_engine_seed(checkpoint):
    def draw(seed):
        engine = LLM(str(checkpoint("qwen2-tied")), num_gpu_blocks_override=40, seed=seed)
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
        return [output.outputs[0].token_ids for output in engine.generate([PROMPT, PROMPT], params)]

    assert draw(0) == draw(0) != draw(1)
    assert draw(0)[0] != draw(0)[1]


def test_stop_tokens_min_tokens_and_eos(llm, unharmed):
    plain = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    stop = plain[2]
    first = plain.index(stop)
    stopped = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop]))[0].outputs[0]
    assert stopped.token_ids == plain[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    params = SamplingParams(temperature=0, max_tokens=8, min_tokens=5, stop_token_ids=[stop])
    late = llm.generate([PROMPT], params)[0].outputs[0]
    assert len(late.token_ids) >= 5 and stop not in late.token_ids[:5]


def test_stream_gives_what_generate_gives(llm, unharmed):
    params = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=9)
    expected = {c.index: c.token_ids for c in llm.generate([PROMPT], params)[0].outputs}
    streamed, reasons = {0: [], 1: []}, []
    for delta in llm.stream(PROMPT, params):
        streamed[delta.index] += delta.token_ids
        reasons += [delta.index] if delta.finish_reason else []
    assert streamed == expected and sorted(reasons) == [0, 1]


def test_leaving_a_stream_aborts_it_and_other_calls_may_run_inside_it(llm, unharmed):
    expected = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    stream = llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    got = next(stream).token_ids + next(stream).token_ids
    assert llm.generate([[9, 9]], GREEDY)[0].finished  # steps the engine; the stream must not lose its tokens
    got += next(stream).token_ids
    assert got == expected[:3]
    stream.close()
    assert not llm.engine.has_unfinished_requests()


def test_leaving_a_stream_of_three_amid_its_prompt_leaves_nothing(checkpoint):
    llm = LLM(str(checkpoint("qwen2-tied")), block_size=4, num_gpu_blocks_override=41, max_num_batched_tokens=4,
              long_prefill_token_threshold=2)  # fmt: skip
    stream = llm.stream(PROMPT, SamplingParams(n=3, max_tokens=9))
    llm.generate([[9]], SamplingParams(temperature=0, max_tokens=3))  # steps both
    [left] = llm.engine.scheduler.running
    assert 0 < left.num_computed_tokens < len(PROMPT) and left.num_to_fork == 2
    stream.close()
    assert not llm.engine.has_unfinished_requests() and llm.stats()["usage"] == 0
    llm.engine.scheduler.manager.check()


def test_a_stream_that_nobody_reads_is_aborted_when_it_is_dropped(llm, unharmed):
    stream = llm.stream(PROMPT, SamplingParams(max_tokens=9))
    assert llm.engine.has_unfinished_requests()
    del stream
    assert not llm.engine.has_unfinished_requests()


@pytest.mark.parametrize("kv_dtype, same", [("float64", True), ("bfloat16", False)])
def test_kv_may_be_stored_in_another_type_and_chunks_see_what_others_read(checkpoint, kv_dtype, same):
    results = []
    for budget in (256, 7):
        engine = LLM(str(checkpoint("qwen3")), kv_cache_dtype=kv_dtype, max_num_batched_tokens=budget, block_size=4,
                     num_gpu_blocks_override=99, enable_prefix_caching=False)  # fmt: skip
        results.append([o.outputs[0].token_ids for o in engine.generate([PROMPT, PROMPT[5:]], GREEDY)])
        assert engine.engine.runner.kv_cache.layers[0].dtype == getattr(torch, kv_dtype)
    assert results[0] == results[1]
    if same:
        plain = LLM(str(checkpoint("qwen3")), num_gpu_blocks_override=99).generate([PROMPT, PROMPT[5:]], GREEDY)
        assert results[0] == [o.outputs[0].token_ids for o in plain]


def test_prompts_in_vllms_dict_form(llm):
    expected = llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids
    assert llm.generate({"prompt_token_ids": PROMPT}, GREEDY)[0].outputs[0].token_ids == expected


def test_static_and_contiguous_give_the_same_tokens(checkpoint):
    requests = [[i, *range(1, 3 * i)] for i in range(1, 9)]
    results = []
    for options in ({}, {"batching": "static"}, {"reservation": "contiguous"},
                    {"batching": "static", "reservation": "contiguous"}):  # fmt: skip
        engine = LLM(str(checkpoint("qwen3")), dtype="float64", block_size=4, num_gpu_blocks_override=41,
                     max_model_len=40, **options)  # fmt: skip
        params = SamplingParams(temperature=0, n=2, max_tokens=12, ignore_eos=True)
        results.append([[c.token_ids for c in output.outputs] for output in engine.generate(requests, params)])
    assert results[0] == results[1] == results[2] == results[3]


# ---- what is refused


@pytest.mark.parametrize(
    "prompt, params, words",
    [
        ([], {}, ["empty", "at least one token"]),
        ([1, 211], {}, ["211", "0 to 210"]),
        ([-1], {}, ["-1", "0 to 210"]),
        ([1.5], {}, ["1.5"]),
        ([1] * 300, {}, ["300", "256", "shorten"]),
        ([1] * 170, {}, ["170", "40 KV blocks", "shorten"]),
        ([1] * 100, {"max_tokens": 100}, ["100", "max_tokens to 61"]),
        ([1], {"stop_token_ids": [500]}, ["500", "stop_token_ids"]),
        ([1], {"stop": "x"}, ["tokenizer", "stop_token_ids"]),
        ([True], {}, ["True"]),
        ({"prompt": None}, {}, ["None", "token ids"]),
    ],
)
def test_a_bad_prompt_is_refused_by_value_and_remedy(llm, unharmed, prompt, params, words):
    with pytest.raises(ValueError) as error:
        llm.generate([PROMPT, prompt], SamplingParams(temperature=0, **params))
    culprit = 0 if params.keys() & {"stop", "stop_token_ids"} else 1  # the first to whom the parameters apply
    for word in [*words, f"prompt {culprit}"]:
        assert word in str(error.value), str(error.value)
    with pytest.raises(ValueError):
        llm.stream(prompt, SamplingParams(temperature=0, **params))


def test_the_largest_request_that_is_said_to_fit_does_fit(llm, unharmed):
    output = llm.generate([[1] * 100], SamplingParams(temperature=0, max_tokens=61, ignore_eos=True))[0]
    assert len(output.outputs[0].token_ids) == 61
    longest = llm.generate([[1] * 100], SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))[0]
    assert len(longest.outputs[0].token_ids) == 61 and longest.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"block_size": 0}, ["block_size", "0"]),
        ({"gpu_memory_utilization": 0.0}, ["gpu_memory_utilization", "(0, 1]"]),
        ({"gpu_memory_utilization": 1.2}, ["1.2", "(0, 1]"]),
        ({"num_gpu_blocks_override": 1}, ["num_gpu_blocks_override", "null block"]),
        ({"max_model_len": 257}, ["257", "256"]),
        ({"max_model_len": 200, "num_gpu_blocks_override": 5}, ["200", "64", "14 blocks"]),
        ({"reservation": "contiguous", "num_gpu_blocks_override": 5}, ["256", "64"]),
        ({"max_num_seqs": 0}, ["max_num_seqs", "0"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens", "0"]),
        ({"block_sise": 16}, ["block_sise", "block_size"]),
        ({"dtype": "int4"}, ["int4", "float32"]),
        ({"swap_space": -1}, ["swap_space", "-1"]),
        ({"attention_backend": "magic"}, ["magic", "torch"]),
        ({"attention_backend": None}, ["None", "torch"]),
        ({"enable_prefix_caching": "no"}, ["'no'", "True or False"]),
        ({"device": "foo"}, ["foo", "cpu"]),
        ({"device": "meta"}, ["meta", "cpu"]),
        ({"num_gpu_blocks_override": 10**9}, ["GiB", "num_gpu_blocks_override"]),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 8, "max_model_len": 64}, ["8", "64"]),
    ],
)
def test_a_bad_setting_is_refused_by_value_and_remedy(checkpoint, options, words):
    with pytest.raises(ValueError) as error:
        LLM(str(checkpoint("qwen2-tied")), **options)
    for word in words:
        assert word in str(error.value), str(error.value)


@pytest.mark.parametrize(
    "options", [{"n": 0}, {"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2},
                {"min_tokens": 9, "max_tokens": 8}, {"temperature": float("nan")}, {"seed": 1.5}, {"n": True}],
)  # fmt: skip
def test_bad_sampling_params_name_the_field_and_the_value(options):
    with pytest.raises(ValueError) as error:
        SamplingParams(**options)
    name = next(iter(options))
    assert name in str(error.value) and repr(options[name]) in str(error.value)


def test_missing_checkpoint_and_missing_tokenizer(checkpoint, tmp_path, llm):
    with pytest.raises(ValueError, match="nowhere"):
        LLM(str(tmp_path / "nowhere"))
    with pytest.raises((ValueError, FileNotFoundError), match="config.json"):
        LLM(str(tmp_path))
    with pytest.raises(ValueError, match="token ids"):
        llm.generate("text, but this checkpoint has no tokenizer", GREEDY)


# ---- what fails on the way


def test_a_request_that_spoils_a_forward_fails_alone(llm, unharmed, monkeypatch):
    expected = [llm.generate([p], GREEDY)[0].outputs[0].token_ids for p in (PROMPT, [3, 4])]
    forward = llm.model.forward

    def spoiled(batch, kv_cache):
        if (batch.token_ids == 77).any():
            raise torch.OutOfMemoryError("no room for token 77")
        return forward(batch, kv_cache)

    monkeypatch.setattr(llm.model, "forward", spoiled)
    good, bad, fine = llm.generate([PROMPT, [77, 78], [3, 4]], GREEDY)
    assert [good.outputs[0].token_ids, fine.outputs[0].token_ids] == expected
    assert bad.outputs[0].finish_reason == "error" and bad.finished
    assert "no room for token 77" in bad.error and good.error is None
    deltas = list(llm.stream([77], SamplingParams(n=3)))
    assert [(delta.index, delta.finish_reason) for delta in deltas] == [(i, "error") for i in range(3)]
    assert [c.finish_reason for c in llm.generate([77], SamplingParams(n=3))[0].outputs] == ["error"] * 3
    monkeypatch.undo()


def test_failed_copies_end_their_step_and_nothing_else(checkpoint, monkeypatch):
    engine = LLM(str(checkpoint("qwen2-tied")), block_size=4, num_gpu_blocks_override=41, max_num_seqs=2,
                 max_num_batched_tokens=6)  # the first prompt fills a step, then its two children have the seats
    expected = engine.generate([[3, 4]], GREEDY)[0].outputs[0].token_ids
    kv_cache, params = engine.engine.runner.kv_cache, SamplingParams(n=2, temperature=1.0, max_tokens=6)
    apply = kv_cache.apply

    def broken(block_ops):
        if block_ops:
            raise RuntimeError("copy engine on fire")
        apply(block_ops)

    monkeypatch.setattr(kv_cache, "apply", broken)
    spoiled, waiting = engine.generate([PROMPT[:6], [3, 4]], [params, GREEDY])
    assert {completion.finish_reason for completion in spoiled.outputs} == {"error"}
    assert "on fire" in spoiled.error
    assert waiting.outputs[0].token_ids == expected
    assert engine.stats()["usage"] == 0


def test_a_gpu_that_is_not_the_current_one_is_refused(monkeypatch):
    """Kernels are launched, events recorded, graphs captured on the thread's current GPU, wherever the tensors are."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert [choose_device(name) for name in ("auto", "cuda", "cuda:0", "cpu")] == ["cuda", "cuda", "cuda:0", "cpu"]
    with pytest.raises(ValueError, match=r"'cuda:1'.*CUDA_VISIBLE_DEVICES=1.*'cuda'"):
        choose_device("cuda:1")
