"""Steps on paper beside the real scheduler's, and the textbook's chunks (L33 4.2, C18)."""

import random

import pytest

from kvlab.config import EngineConfig
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Policies, Request, Scheduler
from kvlab.schedule.policies import plan_tokens
from kvlab.schedule.timetable import chunks, timetable


def chunks_first(pending, budget, limit):
    plan = [0] * len(pending)
    for i in sorted(range(len(pending)), key=lambda i: pending[i] == 1):
        plan[i] = min(pending[i], limit, budget)
        budget -= plan[i]
    return plan


def by_scheduler(requests, plan, budget, limit):
    """The rows of a scheduler with ample memory; requests come in when their step begins."""
    config = EngineConfig(num_gpu_blocks_override=200, enable_prefix_caching=False, max_num_batched_tokens=budget,
                          long_prefill_token_threshold=limit)  # fmt: skip
    scheduler, rows = Scheduler(config, policies=Policies(plan_tokens=plan)), []
    came = [[] for _ in requests]
    while len(rows) <= max(arrival for arrival, _, _ in requests) or scheduler.has_unfinished_requests():
        for i, (arrival, prompt, output) in enumerate(requests):
            if arrival == len(rows):
                params = SamplingParams(max_tokens=output, ignore_eos=True)
                scheduler.add_request(Request(str(i), list(range(prompt)), params))
        output = scheduler.schedule()
        given = {int(request.request_id): tokens for request, tokens in output.scheduled}
        brings = {r.request_id: [7] for r, n in output.scheduled if r.num_computed_tokens + n == r.num_tokens}
        for request_id in brings:
            came[int(request_id)].append(len(rows))
        rows.append([given.get(i, 0) for i in range(len(requests))])
        scheduler.update_from_output(output, brings)
    return rows, came


@pytest.mark.parametrize("plan", [plan_tokens, chunks_first])
def test_the_scheduler_takes_the_same_steps(plan):
    rng = random.Random(4)
    for _ in range(80):
        requests = sorted((rng.randint(0, 7), rng.randint(1, 30), rng.randint(1, 8)) for _ in range(rng.randint(1, 6)))
        budget = rng.randint(1, 16)
        limit = rng.randint(1, budget)
        assert timetable(requests, plan, budget, limit) == by_scheduler(requests, plan, budget, limit), requests


def test_a_prompt_beside_decodes_takes_as_many_steps_as_it_has_chunks():
    readers = [(0, 1, 90)] * 3
    for prompt, budget in ((7, 5), (40, 16), (12, 4)):
        rows, came = timetable([*readers, (1, prompt, 1)], plan_tokens, budget, budget)
        sizes = chunks(prompt, budget, 3)
        assert [row[3] for row in rows[1 : 1 + len(sizes)]] == sizes and came[3] == [len(sizes)]


def test_the_textbooks_chunks():
    assert chunks(4000, 512) == [512] * 7 + [416]
    assert chunks(4000, 512, 32) == [480] * 8 + [160]
    assert chunks(4000, 32, 32) is None


def test_nobody_and_nothing():
    assert timetable([], plan_tokens, 4, 4) == ([], [])
    assert timetable([(2, 1, 1)], plan_tokens, 4, 4) == ([[0], [0], [1]], [[2]])
