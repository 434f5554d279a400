"""Long prompts among readers: steps as they were scheduled, gaps as they were felt, and the textbook's numbers."""

import pytest

from kvlab.costs import GPUCost, work_of_step
from kvlab.lab.scenes.chunks import NEWCOMER, beside, config_of, longest_gaps, mixed, on_paper, watch, whole
from kvlab.parts import Parts
from kvlab.sim import Simulator

COST = GPUCost.of("H100", "Llama-2-13B")


def chunks_first(pending, budget, limit):
    given = [0] * len(pending)
    for i in sorted(range(len(pending)), key=lambda i: pending[i] == 1):
        given[i] = min(pending[i], limit, budget)
        budget -= given[i]
    return given


@pytest.fixture(scope="module")
def scenes():
    return {"whole": beside(8000, COST, chunked=False, around=300), 512: beside(512, COST), 128: beside(128, COST)}


def test_the_whole_prompt_is_one_step_and_everybody_waits_for_it(scenes):
    scene = scenes["whole"]
    (step,) = scene.during
    assert step.tokens[NEWCOMER] == 8000 and len(step.tokens) == 33
    assert scene.worst_gap == scene.ttft == pytest.approx(step.end - step.start)
    # As tests/test_textbook_costs.py prices it (C17), with contexts a few tokens longer.
    alone = 1000 * COST.step_seconds(work_of_step([(1, 1000)] * 32 + [(8000, 0)]))
    assert scene.ttft == pytest.approx(alone, rel=0.005)


def test_chunks_beside_decodes_fill_the_budget(scenes):
    for budget, chunk in ((512, 480), (128, 96)):
        during = scenes[budget].during
        assert [step.tokens[NEWCOMER] for step in during] == [chunk] * (8000 // chunk) + [8000 % chunk]
        assert all(len(step.tokens) == 33 and len(step.sampled) >= 32 for step in during)


def test_a_smaller_budget_is_smoother_for_readers_and_slower_for_the_newcomer(scenes):
    whole_prompt, larger, smaller = scenes.values()
    assert whole_prompt.worst_gap > 10 * larger.worst_gap > 10 * smaller.worst_gap
    assert whole_prompt.ttft < larger.ttft < smaller.ttft
    assert larger.read(larger.ttft) == len(larger.during) > whole_prompt.read(larger.ttft)


def test_with_chunks_first_readers_wait_as_if_nothing_were_cut(scenes):
    scene = beside(512, COST, parts=Parts(plan_tokens=chunks_first))
    assert scene.worst_gap > 0.9 * scenes["whole"].worst_gap
    assert max(sum(step.tokens.values()) for step in scene.steps) <= 512


def test_a_budget_that_the_readers_use_up_is_refused():
    with pytest.raises(ValueError, match="32 readers"):
        beside(32, COST)


def test_watched_steps_are_those_of_the_simulator():
    workload = mixed(num_requests=12)
    config = config_of(256, 128)
    steps, result = watch(workload, config, COST), Simulator(config, COST).run(workload)
    columns = result.step_columns
    assert [sum(step.tokens.values()) for step in steps] == list(columns["num_tokens"])
    assert [round(1e6 * (step.end - step.start)) for step in steps] == list(columns["duration_ns"])
    gaps = longest_gaps(steps)
    assert gaps == {r.request_id: pytest.approx(r.longest_gap / 1e6) for r in result.records if r.output_tokens > 1}
    assert all(n <= 128 for step in steps for n in step.tokens.values())


def test_without_chunks_no_prompt_is_cut():
    workload = mixed(num_requests=12)
    steps = watch(workload, whole(40_000), COST)
    lengths = {a.request_id: a.prompt_tokens for a in workload.arrivals}
    first = {}
    for step in steps:
        for name, tokens in step.tokens.items():
            first.setdefault(name, tokens)
    assert first == lengths


def test_on_paper_counts_steps_from_the_first_moment_on():
    rows, came = on_paper([(0, 2, 1), (4, 3, 2)], 2, 2)
    assert rows == [[2, 0], [0, 0], [0, 0], [0, 0], [0, 2], [0, 1], [0, 1]] and came == [[0], [5, 6]]
    assert on_paper([(0, 1, 4), (1, 4, 1)], 3, 3, Parts(plan_tokens=chunks_first))[0][2] == [1, 2]


def test_traffic_is_the_same_from_the_same_seed():
    assert mixed(3).arrivals == mixed(3).arrivals != mixed(4).arrivals
