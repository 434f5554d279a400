"""Branches through the front door: what each generates is what a fresh engine says of the same tokens."""

import random
from collections import Counter

import pytest

from kvlab.engine import LLM, Branch
from kvlab.events import Recorder
from kvlab.sampling_params import BeamSearchParams, SamplingParams
from kvlab.schedule import Policies

ROOMY = dict(dtype="float64", block_size=4, num_gpu_blocks_override=101, max_num_seqs=8, max_model_len=120)


def greedy(max_tokens: int, **more) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **more)


@pytest.fixture(scope="module")
def folder(checkpoint):
    return str(checkpoint("qwen2-tied"))


@pytest.fixture(scope="module")
def oracle(folder):
    """oracle(token ids, params): outputs of an engine that knows neither branches nor a prefix cache."""
    llm = LLM(folder, **ROOMY, enable_prefix_caching=False)
    return lambda token_ids, params: llm.generate(token_ids, params)[0].outputs[0].token_ids


def tokens(number: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 211) for _ in range(number)]


def all_free(llm: LLM) -> bool:
    manager = llm.engine.scheduler.manager
    manager.check()
    return manager.block_pool.get_num_free_blocks() == manager.block_pool.num_usable_blocks


PRESSURES = {
    "roomy": dict(),
    "no cache": dict(enable_prefix_caching=False),
    "small": dict(num_gpu_blocks_override=14, max_num_batched_tokens=7),
    "swap": dict(num_gpu_blocks_override=14, num_cpu_blocks_override=30, enable_prefix_caching=False),
    "blocks of 1": dict(block_size=1, num_gpu_blocks_override=56, max_num_batched_tokens=7),
    "contiguous": dict(reservation="contiguous", num_gpu_blocks_override=31, max_model_len=50),
}


@pytest.mark.parametrize("options", PRESSURES.values(), ids=PRESSURES)
def test_every_branch_says_what_a_fresh_engine_says(folder, oracle, options):
    """Fork, append, generate, go back and free at random; in batches, mixed with ordinary requests."""
    pool = {**ROOMY, "max_model_len": None, **options}
    seen = Counter()
    for seed in range(3):
        llm = LLM(folder, policies=Policies(may_resume=lambda *_: True), **pool)
        rng = random.Random(seed)
        trunk = llm.branch(tokens(rng.choice([7, 8, 9, 16]), seed))
        branches = [trunk, trunk.fork(), trunk.fork()]
        for _ in range(8):
            branch = rng.choice(branches)
            kind = rng.random()
            if kind < 0.3:
                branches.append(branch.fork(rng.randint(1, branch.num_tokens)))
            elif kind < 0.45 and len(branches) > 3:
                branches.remove(branch)
                branch.free()
            elif branch.num_tokens < 30:
                branch.append(tokens(rng.randint(1, 6), rng.random()))
            chosen = [b for b in branches if b.num_tokens < 36 and rng.random() < 0.6]
            before = [b.token_ids for b in chosen]
            prompts = [*chosen, tokens(rng.randint(1, 20), rng.random())]
            params = [greedy(rng.randint(1, 9)) for _ in prompts]
            outputs = llm.generate(prompts, params)
            for prompt, ids, output, param in zip(prompts, [*before, prompts[-1]], outputs, params, strict=True):
                assert output.prompt_token_ids == ids
                assert output.outputs[0].token_ids == oracle(ids, param)
                if isinstance(prompt, Branch):
                    assert prompt.token_ids == ids + output.outputs[0].token_ids
            llm.engine.scheduler.manager.check()
        for branch in branches:
            branch.free()
        assert all_free(llm)
        seen += Counter({name: int(value) for name, value in llm.stats().items() if name.startswith("num")})
    if options.get("num_gpu_blocks_override") == 14:
        assert seen["num_reclaimed_branches"] > 0
    if "reservation" not in options:
        assert seen["num_copy_on_writes"] > 0 or options.get("block_size") == 1


def test_a_trunk_is_computed_once_and_its_forks_share_it(folder, oracle):
    llm = LLM(folder, **ROOMY, enable_prefix_caching=False)
    with llm.branch(tokens(30)) as trunk:
        assert (trunk.num_tokens, trunk.num_computed_tokens, trunk.num_blocks) == (30, 30, 8)
        computed = llm.stats()["num_scheduled_tokens"]
        forks = [trunk.fork() for _ in range(3)]
        assert all(fork.num_shared_blocks == 8 for fork in forks)
        for i, fork in enumerate(forks):
            fork.append([i + 5])
        outputs = llm.generate(forks, greedy(3))
        assert llm.stats()["num_scheduled_tokens"] - computed == 3 * 3  # the appended token and two outputs, each
        assert [output.num_cached_tokens for output in outputs] == [30] * 3
        assert all(fork.num_shared_blocks == 7 for fork in forks)
        for fork in forks:
            assert fork.token_ids[31:] == oracle(fork.token_ids[:31], greedy(3))
            fork.free()
        assert trunk.num_shared_blocks == 0
    assert all_free(llm) and trunk.is_freed and repr(trunk) == "Branch('branch-0', freed, 0/30 tokens)"
    trunk.free()


def test_branches_seeds_stop_strings_and_logprobs_go_on_as_for_a_prompt(folder, oracle):
    llm = LLM(folder, **ROOMY)
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=1, repetition_penalty=1.3, ignore_eos=True)
    want = llm.generate(tokens(9), params)[0].outputs[0]
    got = llm.branch(tokens(9)).generate(params).outputs[0]
    assert got.token_ids == want.token_ids and len(got.logprobs) == 8
    stop = want.token_ids[3]
    branch = llm.branch(tokens(9))
    output = branch.generate(SamplingParams(temperature=1.0, seed=5, max_tokens=8, repetition_penalty=1.3,
                                            ignore_eos=True, stop_token_ids=[stop])).outputs[0]  # fmt: skip
    assert output.finish_reason == "stop" and branch.token_ids == tokens(9) + output.token_ids


def test_a_stop_string_ends_the_output_and_the_branch_goes_on():
    llm = LLM("tiny")
    question = [{"role": "user", "content": "What is a KV block?"}]
    want = llm.chat(question)[0].outputs[0].token_ids
    branch = llm.branch(question)
    start = branch.num_tokens
    output = branch.generate(SamplingParams(temperature=0, max_tokens=99, stop="allocation")).outputs[0]
    assert output.finish_reason == "stop" and "allocation" not in output.text
    assert branch.token_ids[start:] == output.token_ids == want[: len(output.token_ids)]
    branch.generate(SamplingParams(temperature=0, max_tokens=99))
    assert branch.token_ids[start:] == want
    assert branch.text.endswith("thread block.")
    branch.append(" And then?")
    assert branch.text.endswith("thread block. And then?")
    branch.free()
    assert all_free(llm)


def test_all_of_it_from_the_midst_of_a_stream(folder, oracle):
    llm = LLM(folder, **ROOMY)
    trunk, other = llm.branch(tokens(10)), llm.branch(tokens(6, 1))
    stream = llm.stream(tokens(5, 2), greedy(12))
    mine = llm.stream(trunk, greedy(12))
    got, children = [], []
    for delta in stream:
        got += delta.token_ids
        if len(got) == 4:
            assert trunk.is_generating  # the other stream's steps are its steps, too
            children = [trunk.fork(), trunk.fork(9)]
            other.append([7])
            other.generate(greedy(2))
            other.free()
        if len(got) == 8:
            with pytest.raises(ValueError, match="branch 'branch-0' is generating: wait for its end, or fork it now"):
                trunk.append([1])
            with pytest.raises(ValueError, match="is generating"):
                trunk.generate()
            trunk.free()
    assert got == oracle(tokens(5, 2), greedy(12))
    last = list(mine)[-1]
    assert last.finish_reason == "abort"
    assert children[1].token_ids == tokens(10)[:9]
    for child in children:
        before = child.token_ids
        assert child.generate(greedy(5)).outputs[0].token_ids == oracle(before, greedy(5))
        child.free()
    assert all_free(llm)


def test_leaving_a_stream_keeps_what_was_said_and_its_kv(folder, oracle):
    llm = LLM(folder, **ROOMY)
    trunk = llm.branch(tokens(10))
    stream = llm.stream(trunk, greedy(20))
    while trunk.num_tokens < 14:
        next(stream)
    stream.close()
    assert trunk.token_ids == tokens(10) + oracle(tokens(10), greedy(4)) and trunk.num_computed_tokens == 13
    assert not trunk.is_generating
    assert trunk.generate(greedy(3)).num_cached_tokens == 13
    assert trunk.token_ids == tokens(10) + oracle(tokens(10), greedy(7))


def test_an_old_stream_that_is_closed_late_does_not_touch_the_branch(folder):
    llm = LLM(folder, **ROOMY)
    trunk = llm.branch(tokens(10))
    old = llm.stream(trunk, greedy(3))
    while trunk.is_generating or trunk.num_tokens == 10:
        next(old)
    new = llm.stream(trunk, greedy(5))
    old.close()
    assert sum(len(delta.token_ids) for delta in new) == 5


REFUSED = {
    "num_tokens is 0": lambda llm, b: b.fork(0),
    "num_tokens is 11": lambda llm, b: b.fork(11),
    "num_tokens is True": lambda llm, b: b.fork(True),
    "append: prompt holds 999": lambda llm, b: b.append([999]),
    "append: the prompt is None": lambda llm, b: b.append(None),
    "the prompt has 121 tokens and max_model_len is 120": lambda llm, b: b.append([1] * 111),
    "fork it once for each continuation": lambda llm, b: b.generate(SamplingParams(n=2)),
    "for prompt_logprobs all is computed again": lambda llm, b: b.generate(SamplingParams(prompt_logprobs=0)),
    "give a SamplingParams": lambda llm, b: b.generate(7),
    "give text or a list of token ids": lambda llm, b: llm.beam_search(b, BeamSearchParams(beam_width=2, max_tokens=3)),
    "but Branch.* has None": lambda llm, b: llm.generate(b, cache_salt="x"),
    "prompt 1: branch .* is generating": lambda llm, b: llm.generate([b, b]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_changes_nothing(folder, message):
    llm = LLM(folder, **ROOMY)
    branch = llm.branch(tokens(10))
    before = branch.token_ids, llm.stats()["usage"], repr(branch)
    with pytest.raises(ValueError, match=message):
        REFUSED[message](llm, branch)
    assert (branch.token_ids, llm.stats()["usage"]) == before[:2] and not branch.is_generating
    if "prompt 1" not in message:  # there the first was added already: its last token was made ready to be computed
        assert repr(branch) == before[2]
    assert len(branch.generate(greedy(2)).outputs[0].token_ids) == 2
    branch.free()
    for use in (branch.fork, branch.generate, branch.compute, lambda: branch.append([1])):
        with pytest.raises(ValueError, match="branch 'branch-0' has been freed"):
            use()
    assert all_free(llm)


def test_a_branch_belongs_to_one_llm(folder):
    one, two = LLM(folder, **ROOMY), LLM(folder, **ROOMY)
    with pytest.raises(ValueError, match="belongs to another LLM"):
        two.generate(one.branch(tokens(4)))


def test_a_listener_amid_a_step_is_told_so(folder):
    recorder = Recorder()
    llm = LLM(folder, recorder=recorder, **ROOMY)
    trunk = llm.branch(tokens(10))
    told = []

    def listen(event):
        if event.kind in ("step_begin", "alloc", "step_end") and llm.engine.scheduler.in_step:
            for call in (trunk.fork, trunk.free, lambda: trunk.append([1])):
                with pytest.raises(ValueError, match="a step is being made"):
                    call()
                told.append(event.kind)

    recorder.listen(listen)
    llm.generate(tokens(5, 1), greedy(2))
    assert set(told) == {"step_begin", "alloc", "step_end"}
    trunk.free()
    assert all_free(llm)


def test_a_model_that_fails(folder, oracle, monkeypatch):
    llm = LLM(folder, **ROOMY)
    kept = llm.branch(tokens(10))
    with monkeypatch.context() as broken:
        broken.setattr(llm.model, "forward", lambda *_: 1 / 0)
        with pytest.raises(RuntimeError, match="branch 'branch-[0-9]+' could not be computed: ZeroDivisionError"):
            llm.branch(tokens(8, 1))
        output = kept.generate(greedy(3))
        assert output.outputs[0].finish_reason == "error" and "ZeroDivisionError" in output.error
    assert kept.token_ids == tokens(10)
    assert kept.generate(greedy(3)).outputs[0].token_ids == oracle(tokens(10), greedy(3))
    kept.free()
    assert all_free(llm) and not llm.engine.scheduler.held
