"""Batching on paper beside the real scheduler, and the textbook's figures (claims C15, C26)."""

import random
from itertools import permutations

import pytest

from kvlab.config import EngineConfig
from kvlab.parts import Parts
from kvlab.primer import GPUS, batch_for_balance
from kvlab.schedule.on_paper import (
    Stuck,
    continuous_schedule,
    full_memory,
    ghost_idle,
    num_idle,
    num_steps,
    serve,
    static_schedule,
    step_bounds,
)  # fmt: skip
from kvlab.schedule.policies import admit, admit_static
from kvlab.sim import ConstantCost, Simulator
from kvlab.sim.workload import NS, Arrival, Workload
from kvlab.sizing import model_shape


def text_lengths():
    """L33 7.2: sixteen requests of 10 to 120 tokens, from seed 42."""
    rng = random.Random(42)
    return [rng.randint(10, 120) for _ in range(16)]


def test_c15_four_requests_leave_exactly_60_percent_idle():
    assert ghost_idle([50, 500, 100, 150]) == (500, 1200, 0.6)


def test_c26_the_textbooks_experiment_2():
    lengths = text_lengths()
    static, continuous = static_schedule(lengths, 4), continuous_schedule(lengths, 4)
    assert (num_steps(static), num_idle(static, 4)) == (338, 393)
    assert num_steps(continuous) == 279 and round(338 / 279, 2) == 1.21
    assert round(100 * sum(lengths) / (4 * 338), 2) == 70.93
    # What the text leaves out: the last requests find nobody to share with, so the seats are not always full.
    assert num_idle(continuous, 4) == 157 and round(100 * sum(lengths) / (4 * 279), 2) == 85.93
    assert step_bounds(lengths, 4) == (240, 317)


@pytest.mark.parametrize("seed", range(40))
def test_paper_is_what_the_real_scheduler_does(seed):
    """One-token prompts, room for all, a second a step: the engine's own code starts and ends everybody as on paper."""
    rng = random.Random(seed)
    seats = rng.randint(1, 4)
    requests = sorted((rng.choice([0, rng.randint(0, 30)]), rng.randint(1, 12)) for _ in range(rng.randint(1, 14)))
    workload = Workload("x", [Arrival(at * NS, 1, n, str(i)) for i, (at, n) in enumerate(requests)])
    for policy, batching in ((admit, "continuous"), (admit_static, "static")):
        config = EngineConfig(num_gpu_blocks_override=200, max_num_seqs=seats, batching=batching)
        records = Simulator(config, ConstantCost(1)).run(workload).records
        in_engine = [(r.admitted_at // NS, r.last_token_at // NS) for r in records]
        assert serve(requests, seats, policy) == in_engine
        closed = Workload("y", [arrival._replace(at_ns=0) for arrival in workload.arrivals])
        records = Simulator(config, ConstantCost(1), Parts(admit=policy)).run(closed).records
        schedule = {"continuous": continuous_schedule, "static": static_schedule}[batching]
        turns = schedule([n for _, n in requests], seats)
        in_engine = [(r.admitted_at // NS, r.last_token_at // NS) for r in records]
        assert [(start, end) for _, start, end in turns] == in_engine


@pytest.mark.parametrize("seed", range(30))
def test_a_seat_has_one_request_at_a_time_and_nobody_waits_beside_a_free_one(seed):
    rng = random.Random(seed)
    lengths, seats = [rng.randint(1, 9) for _ in range(rng.randint(1, 15))], rng.randint(1, 5)
    for schedule in (static_schedule, continuous_schedule):
        turns = schedule(lengths, seats)
        busy = [(seat, step) for seat, start, end in turns for step in range(start, end)]
        assert len(set(busy)) == len(busy) == sum(lengths) and {seat for seat, _ in busy} <= set(range(seats))
        assert num_idle(turns, seats) == seats * num_steps(turns) - len(busy)
        assert [end - start for _, start, end in turns] == lengths
    last_start = max(start for _, start, _ in turns)
    assert all((seat, step) in busy for seat in range(seats) for step in range(last_start))
    static = static_schedule(lengths, seats)
    assert all(mine[1] <= other[1] for mine, other in zip(turns, static, strict=True)), "nobody starts later"


def test_no_order_leaves_the_bounds_and_both_are_reached():
    for lengths, seats in (([3, 1, 1, 1], 2), ([2, 2, 2, 2], 2), ([5, 1, 1, 1, 1, 1], 3), ([4, 3, 3, 1, 1], 2)):
        fewest, most = step_bounds(lengths, seats)
        found = {num_steps(continuous_schedule(order, seats)) for order in permutations(lengths)}
        assert min(found) >= fewest and max(found) <= most
        assert min(found) == fewest, "in these, some order reaches it"
    assert num_steps(continuous_schedule([1, 1, 1, 1, 4], 2)) == step_bounds([1, 1, 1, 1, 4], 2)[1] == 6


def test_who_lets_nobody_in_is_stuck():
    with pytest.raises(Stuck, match="step 3: nobody runs, and request 0"):
        serve([(3, 1)], 2, lambda *_: False)
    assert serve([], 2, admit) == []
    assert serve([(0, 2), (0, 2), (7, 1)], 2, lambda n, seats, forming: n == 0) == [(0, 2), (2, 4), (7, 8)]


def test_a_full_memory_is_read_once_a_step():
    gpu, shape = GPUS["H100"], model_shape("Llama-3-8B")
    kv_bytes = 54 * 10**9
    for context in (200, 1000, 4000):
        batch, seconds, share = full_memory(gpu, shape, kv_bytes, context, context + 1)
        assert batch == kv_bytes // ((context + 1) * shape.kv_bytes_per_token())
        needed = batch_for_balance(gpu, shape, context)
        assert (share == pytest.approx(1)) == (needed is not None and batch >= needed)
        if share < 1:
            assert seconds == pytest.approx((shape.weight_bytes() + kv_bytes) / gpu.bandwidth, rel=0.1)
    assert full_memory(gpu, shape, kv_bytes, 500, 10**9) == (0, 0.0, 0.0)
    few, many = (full_memory(gpu, shape, kv_bytes, 500, reserve)[2] for reserve in (8192, 501))
    assert few < many / 3
