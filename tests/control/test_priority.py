"""Priorities: smaller goes first, strictly smaller may preempt, equals never do, and nobody plays ping-pong."""

import random

import pytest
from driving import engine, request, run, want

from kvlab.schedule import RequestStatus


def states(core, *requests):
    return [req.status for req in requests]


RUNNING, SWAPPED, PREEMPTED, WAITING = (
    RequestStatus.RUNNING, RequestStatus.SWAPPED, RequestStatus.PREEMPTED, RequestStatus.WAITING,
)  # fmt: skip


@pytest.mark.parametrize("num_cpu, status", [(0, PREEMPTED), (20, SWAPPED)])
def test_one_of_higher_priority_takes_the_seat_of_the_lowest(num_cpu, status):
    core = engine(max_num_seqs=2, num_cpu_blocks_override=num_cpu)
    core.add_request(low := request("low", 9, max_tokens=12, priority=5))
    core.add_request(middle := request("middle", 9, max_tokens=12, priority=3))
    for _ in range(3):
        core.step()
    core.add_request(high := request("high", 9, max_tokens=3, priority=1))
    core.step()
    assert states(core, low, middle, high) == [status, RUNNING, RUNNING]
    assert high.num_output_tokens == 1  # it made its way in one step
    run(core)
    assert (low.num_preemptions, middle.num_preemptions, high.num_preemptions) == (1, 0, 0)
    assert low.output_token_ids == want(low) and middle.output_token_ids == want(middle)
    assert high.output_token_ids == want(high)


def test_it_takes_blocks_from_as_few_as_it_needs_and_the_budget_they_give_back():
    core = engine(usable=16, max_num_batched_tokens=16)
    lows = [request(f"low{i}", [i] * 12, max_tokens=4, priority=9) for i in range(3)]
    for req in lows:
        core.add_request(req)
        core.step()
    assert states(core, *lows) == [RUNNING] * 3
    core.add_request(high := request("high", [7] * 14, max_tokens=2, priority=0))
    output = core.scheduler.schedule()
    assert output.preempted == ["low2"]  # the youngest; that is enough, so the others stay
    assert {r.request_id: n for r, n in output.scheduled} == {"low0": 1, "low1": 1, "high": 14}
    core.scheduler.update_from_output(output, core.runner.execute(output))
    run(core)
    assert [req.output_token_ids for req in (*lows, high)] == [want(req) for req in (*lows, high)]


def test_nobody_is_preempted_when_that_would_not_be_enough():
    core = engine(usable=10, max_num_seqs=3)
    core.add_request(equal := request("equal", [1] * 30, max_tokens=8, priority=1))
    core.step()
    core.add_request(low := request("low", [2] * 3, max_tokens=8, priority=2))
    core.step()
    core.add_request(high := request("high", [3] * 20, max_tokens=8, priority=1))
    core.step()  # low's single block would not let it in, and equal is its equal
    assert states(core, equal, low, high) == [RUNNING, RUNNING, WAITING]
    run(core)
    assert [r.num_preemptions for r in (equal, high)] == [0, 0]


def test_equal_priorities_never_preempt_each_other_for_a_seat():
    core = engine(max_num_seqs=1)
    core.add_request(first := request("first", 3, max_tokens=6, priority=4))
    core.step()
    core.add_request(second := request("second", 3, max_tokens=6, priority=4))
    run(core)
    assert first.num_preemptions == second.num_preemptions == 0


def test_no_ping_pong_however_the_priorities_arrive():
    """Each preemption for priority is caused by one arrival: at most one a (victim, arrival of higher rank)."""
    rng = random.Random(1)
    core = engine(usable=14, max_num_seqs=3, num_cpu_blocks_override=10)
    requests = [request(f"r{i}", [i] * rng.randint(1, 20), max_tokens=rng.randint(1, 9), priority=rng.randint(0, 3))
                for i in range(40)]  # fmt: skip
    for req in requests:
        core.add_request(req)
        core.step()
        core.step()
    run(core)
    assert [req.output_token_ids for req in requests] == [want(req) for req in requests]
    for i, req in enumerate(requests):
        higher_later = sum(other.priority < req.priority for other in requests[i + 1 :])
        assert req.num_preemptions <= higher_later + 3  # and a few for blocks, which hysteresis bounds


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_family_that_shares_its_prompt_is_worth_all_that_only_it_holds(n):
    """The blocks that siblings share come free with the last of them: they count when all of them must go."""
    core = engine(usable=12, max_num_seqs=6)
    core.add_request(request("family", [5] * 24, max_tokens=12, n=n, priority=5))
    core.add_request(equal := request("equal", [6] * 3, max_tokens=12, priority=0))
    for _ in range(2):
        core.step()
    core.add_request(urgent := request("urgent", [7] * 16, max_tokens=2, priority=0))
    core.step()
    assert urgent.num_output_tokens == 1 and equal.num_preemptions == 0
    run(core)
    assert urgent.output_token_ids == want(urgent)
