"""Whatever the engine does with blocks, budgets and preemption, its tokens are those of `transformers`.

In float64 with plain weights the tokens must be equal without exception; in float32 a token may differ where
the reference's two best logits are closer than a stated tolerance, and such places are counted.
"""

import itertools
import random

import pytest
import torch

from kvlab.engine import LLM
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Policies, Request

BLOCK_SIZES = (1, 4, 16, 32)
BUDGETS = (1, 5, 19, 256)
PRESSURES = ("none", "recompute", "swap", "mixed")
KINDS = ("qwen2-tied", "qwen2-untied", "qwen3", "llama")
CASES = list(itertools.product(BLOCK_SIZES, BUDGETS, PRESSURES, (True, False), (1, 3)))


def workload(seed: int, n: int) -> list[tuple[list[int], SamplingParams]]:
    """Six requests; some share beginnings of awkward lengths, one repeats another."""
    rng = random.Random(seed)
    trunk = [rng.randrange(1, 211) for _ in range(40)]
    requests = []
    for shared in (0, 15, 16, 17, 33, 33):
        prompt = trunk[:shared] + [rng.randrange(1, 211) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(temperature=0, n=n if shared == 17 else 1, max_tokens=rng.randint(2, 12),
                                ignore_eos=rng.random() < 0.5)  # fmt: skip
        requests.append((prompt, params))
    requests[-1] = (requests[-2][0], requests[-1][1])
    return requests


def make_engine(folder, dtype, block_size, budget, pressure, caching, n) -> LLM:
    # Under pressure the pool holds the longest request and little more: 54 tokens.
    usable = 400 // block_size if pressure == "none" else -(-54 // block_size) + 2
    rng = random.Random(0)
    choices = {"swap": ["swap"], "recompute": ["recompute"], "mixed": ["swap", "recompute"]}
    rash = lambda request, room: True  # noqa: E731  (admit whoever fits now, so that preemption is certain)
    return LLM(
        str(folder),
        dtype=dtype,
        block_size=block_size,
        num_gpu_blocks_override=usable + 1,
        num_cpu_blocks_override=0 if pressure in ("none", "recompute") else 3 * usable,
        max_num_seqs=3 + n,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        policies=None
        if pressure == "none"
        else Policies(may_resume=rash, swap_or_recompute=lambda *_: rng.choice(choices[pressure])),
    )


def run(llm: LLM, requests, arrival_seed: int) -> dict[str, list[Request]]:
    """Add the requests in a random order, spread over the first steps; the finished sequences of each."""
    rng = random.Random(arrival_seed)
    todo = [Request(str(i), prompt, params, eos_token_ids=(0,)) for i, (prompt, params) in enumerate(requests)]
    rng.shuffle(todo)
    done: dict[str, list[Request]] = {}
    while todo or llm.engine.has_unfinished_requests():
        while todo and rng.random() < 0.7:
            llm.engine.add_request(todo.pop())
        for step in llm.engine.step() if llm.engine.has_unfinished_requests() else ():
            if step.finish_reason:
                done.setdefault(step.request.parent_id, []).append(step.request)
        llm.engine.scheduler.manager.check()
    return done


def check_case(checkpoint, reference, kind, dtype, tolerance, case) -> dict[str, float]:
    block_size, budget, pressure, caching, n = case
    seed = hash(case[:2]) % 1000  # ints and strings of ints only: the same in every process
    requests = workload(seed, n)
    llm = make_engine(checkpoint(kind), str(dtype).removeprefix("torch."), block_size, budget, pressure, caching, n)
    oracle = reference(kind, dtype, tolerance)
    done = run(llm, requests, seed)
    for i, (prompt, params) in enumerate(requests):
        sequences = done[str(i)]
        assert len(sequences) == params.n
        for sequence in sequences:
            output = sequence.output_token_ids
            oracle.check(prompt, output)
            ended_by_eos = output[-1] == 0 and not params.ignore_eos
            assert sequence.finish_reason == ("stop" if ended_by_eos else "length")
            assert ended_by_eos or len(output) == params.max_tokens
            assert 0 not in output[:-1] or params.ignore_eos
    assert llm.stats()["usage"] == 0
    return llm.stats()


# Every value of every dimension appears with every model; all combinations are in the slow test.
SAMPLE = [CASES[i] for i in range(0, len(CASES), 11)]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_float64_is_equal_without_exception(checkpoint, reference, kind, case):
    check_case(checkpoint, reference, kind, torch.float64, 1e-9, case)
    assert reference(kind, torch.float64, 1e-9).num_near_ties == 0


@pytest.mark.parametrize("case", SAMPLE[::3], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_equal_up_to_near_ties(checkpoint, reference, kind, case):
    check_case(checkpoint, reference, kind, torch.float32, 1e-3, case)
    oracle = reference(kind, torch.float32, 1e-3)
    assert oracle.num_near_ties <= 0.002 * oracle.num_tokens + 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_all_combinations(checkpoint, reference, kind, block_size):
    for case in CASES:
        if case[0] == block_size:
            check_case(checkpoint, reference, kind, torch.float64, 1e-9, case)


def test_the_cases_meet_what_they_are_for(checkpoint, reference):
    """Preemption both ways, copies, hits and cut chunks do happen in these workloads."""
    recompute = check_case(checkpoint, reference, "qwen2-tied", torch.float64, 1e-9, (4, 256, "recompute", False, 3))
    swap = check_case(checkpoint, reference, "qwen2-tied", torch.float64, 1e-9, (4, 256, "swap", False, 3))
    hits = check_case(checkpoint, reference, "qwen2-tied", torch.float64, 1e-9, (4, 256, "none", True, 3))
    assert recompute["num_preemptions_recompute"] > 0 and recompute["num_recomputed_tokens"] > 0
    assert swap["num_preemptions_swap"] > 0 and swap["num_swapped_in_blocks"] > 0
    assert swap["num_preemptions_recompute"] == 0
    assert hits["num_prefix_hit_tokens"] > 0
    assert recompute["num_copy_on_writes"] > 0 and swap["num_copy_on_writes"] > 0
