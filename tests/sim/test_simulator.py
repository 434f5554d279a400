"""The simulator: hand-computed schedules, and a slow oracle that drives the real engine with a clock of its own."""

import random
import subprocess
import sys
from bisect import bisect_left
from collections import Counter
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import EngineConfig
from kvlab.costs import GPUCost, work_of
from kvlab.engine.core import EngineCore
from kvlab.events import Recorder
from kvlab.parts import PartError, Parts
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler
from kvlab.sim import (
    SLO,
    Arrival,
    Bursts,
    ConstantCost,
    Fixed,
    Lognormal,
    Poisson,
    Simulator,
    SlotEchoRunner,
    Uniform,
    Workload,
    closed_batch,
    make_workload,
)

ROOT = Path(__file__).parents[2]
S = 1_000_000_000


def config(usable=50, block_size=4, **options) -> EngineConfig:
    return EngineConfig(num_gpu_blocks_override=usable + 1, block_size=block_size, **options)


def fits(request, room) -> bool:
    """Admission without hysteresis: what makes preemptions."""
    return room.needed <= room.free


RECKLESS = Parts(may_resume=fits)


# ---- by hand


def test_a_schedule_by_hand_to_the_nanosecond():
    # Budget 4: A's prompt of 6 takes two steps, and B's prompt of 2 shares the second one.
    workload = Workload("two", [Arrival(0, 6, 2, "A"), Arrival(S // 2, 2, 3, "B")])
    result = Simulator(config(max_num_batched_tokens=4), ConstantCost(1)).run(workload)
    a, b = result.records
    assert (a.admitted_at, a.first_token_at, a.last_token_at) == (0, 2 * S, 3 * S)
    assert (b.admitted_at, b.first_token_at, b.last_token_at) == (1 * S, 2 * S, 4 * S)
    assert (b.queue_ns, b.ttft_ns, b.e2e_ns, b.tpot_ns) == (S // 2, 3 * S // 2, 7 * S // 2, S)
    assert result.gaps == {S: 3} and a.longest_gap == b.longest_gap == S
    columns = {name: list(column) for name, column in result.step_columns.items()}
    assert columns == {
        "start_ns": [0, S, 2 * S, 3 * S], "duration_ns": [S] * 4, "num_tokens": [4, 4, 2, 1],
        "num_sequences": [1, 2, 2, 1], "num_chunks": [1, 2, 0, 0], "num_running": [1, 2, 2, 1],
        "num_waiting": [0] * 4, "num_preempted": [0] * 4, "used_blocks": [1, 3, 3, 1], "kv_tokens": [4, 8, 10, 4],
    }  # fmt: skip
    found = result.summary(SLO(ttft_s=1.5))
    assert found["makespan_s"] == 4 and found["output_tokens_per_s"] == 5 / 4 and found["total_tokens_per_s"] == 13 / 4
    assert found["ttft_p50_s"] == 1.75 and found["goodput_per_s"] == 1 / 4 and found["slo_met"] == 0.5
    assert found["kv_usage"] == pytest.approx(8 / 4 / 50) and found["kv_filled"] == 26 / (8 * 4)
    assert found["running"] == 1.5 and found["peak_running"] == 2


def test_a_preemption_by_hand():
    # 4 blocks of 2. Each prompt of 3 takes two; in step 3 both want a third, and B, the younger, gives way. It comes
    # back when A has gone, in step 5, and computes its 5 tokens; 4 of them had K/V before.
    made = config(4, 2, enable_prefix_caching=False)
    result = Simulator(made, ConstantCost(1), RECKLESS).run(closed_batch([(3, 4), (3, 4)]))
    a, b = result.records
    assert [record.last_token_at // S for record in (a, b)] == [4, 6]
    assert result.gaps == {S: 5, 3 * S: 1} and (a.longest_gap, b.longest_gap) == (S, 3 * S)
    assert list(result.step_columns["num_tokens"]) == [6, 2, 1, 1, 5, 1]
    assert list(result.step_columns["num_preempted"]) == [0, 0, 1, 0, 0, 0]
    assert list(result.step_columns["num_waiting"]) == [0, 0, 1, 1, 0, 0]
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    found = result.summary()
    assert found["preemptions"] == 1 and found["recomputed_tokens"] == 4 and found["swapped_out_tokens"] == 0


def test_a_swap_by_hand():
    # The same with swap space: B's two blocks go and come back, and its fifth token is the only one to compute.
    made = config(4, 2, enable_prefix_caching=False, num_cpu_blocks_override=4)
    result = Simulator(made, ConstantCost(1), RECKLESS).run(closed_batch([(3, 4), (3, 4)]))
    found = result.summary()
    assert list(result.step_columns["num_tokens"]) == [6, 2, 1, 1, 1, 1]
    assert found["preemptions"] == 1 and found["recomputed_tokens"] == 0
    assert found["swapped_out_tokens"] == found["swapped_in_tokens"] == 4
    # With prefix caching the first block, published by then, is found on the GPU: only one is copied back.
    made = config(4, 2, num_cpu_blocks_override=4)
    found = Simulator(made, ConstantCost(1), RECKLESS).run(closed_batch([(3, 4), (3, 4)])).summary()
    assert found["swapped_out_tokens"] == 4 and found["swapped_in_tokens"] == 2


def test_who_gets_nothing_of_a_step_keeps_its_tokens_and_waits():
    def plan_tokens(pending, budget, limit):
        return [min(pending[0], budget)] + [0] * (len(pending) - 1)  # all to the first

    made = config(enable_prefix_caching=False)
    result = Simulator(made, ConstantCost(1), Parts(plan_tokens=plan_tokens)).run(closed_batch([(2, 3), (2, 3)]))
    assert list(result.step_columns["num_tokens"]) == [4, 1, 1, 1, 1]
    assert list(result.step_columns["kv_tokens"]) == [4, 5, 6, 3, 4]
    assert result.gaps == {S: 3, 3 * S: 1} and result.records[1].longest_gap == 3 * S


def test_an_idle_engine_goes_to_the_next_arrival():
    workload = Workload("far apart", [Arrival(5 * S, 1, 1, "a"), Arrival(100 * S, 1, 1, "b")])
    result = Simulator(config(), ConstantCost(0.25)).run(workload)
    assert list(result.step_columns["start_ns"]) == [5 * S, 100 * S]
    assert result.makespan_s == 95.25 and result.summary()["running"] == 1  # while it ran


def test_who_arrives_amid_a_step_waits_for_the_next():
    workload = Workload("late", [Arrival(0, 1, 3, "a"), Arrival(1, 1, 1, "b"), Arrival(S, 1, 1, "c")])
    records = Simulator(config(), ConstantCost(1)).run(workload).records
    assert [record.admitted_at for record in records] == [0, S, S]


@pytest.mark.parametrize("batching, steps, idle", [("static", 338, 393), ("continuous", 279, 0)])
def test_the_textbooks_experiment_2(batching, steps, idle):
    """L33 7.2 (claim C26), through the real scheduler. Its prompts are free, so here they are one token long."""
    rng = random.Random(42)
    lengths = [rng.randint(10, 120) for _ in range(16)]
    result = Simulator(config(200, 16, max_num_seqs=4, batching=batching), ConstantCost(1)).run(
        closed_batch([(1, length) for length in lengths])
    )
    assert result.stats.num_steps == steps and result.stats.num_idle_seats == idle
    assert result.makespan_s == steps and sum(lengths) == 959
    assert sum(result.step_columns["num_tokens"]) == 959
    assert steps >= -(-959 // 4) == 240  # no schedule on 4 seats is shorter
    if batching == "static":
        assert round(100 * 959 / (959 + idle), 2) == 70.93
        assert round(steps / 279, 2) == 1.21 and steps - 279 == 59


# ---- against the engine, with every token's time written down


def oracle(workload: Workload, config: EngineConfig, costs, policies=None, recorder=None):
    """The slow way: EngineCore on the slot-echo model, a list of times for each request, steps counted one by one."""
    scheduler = Scheduler(config, None, policies, recorder)
    inner = SlotEchoRunner(config.num_gpu_blocks_override, config.block_size, config.num_cpu_blocks_override or 0)
    durations, admitted, held = [], {}, []

    class Clocked:
        def execute(self, output):
            for request, _ in output.scheduled:
                admitted.setdefault(request.request_id, now)
            tokens = sum(request.num_computed_tokens for request in scheduler.running)
            blocks = {block.block_id for table in scheduler.manager.req_to_blocks.values() for block in table}
            held.append((len(blocks), tokens + output.total_num_scheduled_tokens))
            durations.append(round(costs.step_seconds(work_of(output)) * S))
            return inner.execute(output)

    core = EngineCore(scheduler, Clocked())
    times: dict[str, list[int]] = {}
    to_come, now = list(workload.arrivals), 0
    while to_come or core.has_unfinished_requests():
        while to_come and to_come[0].at_ns <= now:
            a = to_come.pop(0)
            params = SamplingParams(max_tokens=a.output_tokens, ignore_eos=True, temperature=0, seed=0)
            prompt = [97 + len(times) * 3] * a.prompt_tokens
            times[a.request_id] = []
            try:
                core.add_request(Request(a.request_id, prompt, params, priority=a.priority))
            except ValueError:
                pass
        if not core.has_unfinished_requests():
            now = max(now, to_come[0].at_ns) if to_come else now
            continue
        results = core.step()
        now += durations[-1]
        for result in results:
            times[result.request.request_id] += [now] * len(result.new_token_ids)
    return times, admitted, durations, held, scheduler.stats


@st.composite
def settings_and_workload(draw):
    """Pools that barely fit, with and without swap space; requests that come at once or over time."""
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    usable = draw(st.integers(2, 24))
    chunked = draw(st.booleans())
    made = config(
        usable, block_size, max_num_seqs=draw(st.integers(1, 6)), enable_prefix_caching=False,
        max_num_batched_tokens=draw(st.integers(1, 40)) if chunked else 400, enable_chunked_prefill=chunked,
        long_prefill_token_threshold=draw(st.sampled_from([0, 0, 3])),
        num_cpu_blocks_override=draw(st.sampled_from([0, 2, 40])),
        batching=draw(st.sampled_from(["continuous", "continuous", "static"])),
    )  # fmt: skip
    arrival = st.tuples(st.integers(0, 3 * S), st.integers(1, 40), st.integers(1, 20), st.integers(0, 2))
    drawn = draw(st.lists(arrival, min_size=1, max_size=12))
    arrivals = [Arrival(at, prompt, out, f"r{i}", priority) for i, (at, prompt, out, priority) in enumerate(drawn)]
    return made, Workload("drawn", arrivals)


class WorkCost:
    """Steps of different lengths, so that no two gaps are equal by chance."""

    def step_seconds(self, work) -> float:
        return 0.01 + 0.001 * work.num_tokens + 0.00001 * work.attention_pairs + 0.003 * work.blocks_swapped_out


@given(settings_and_workload(), st.booleans())
def test_every_time_is_the_engines(drawn, reckless):
    made, workload = drawn
    parts = RECKLESS if reckless else None
    times, admitted, durations, held, stats = oracle(workload, made, WorkCost(), parts and parts.policies)

    def check(scheduler, now):
        scheduler.manager.check()

    result = Simulator(made, WorkCost(), parts).run(workload, check)
    assert list(result.step_columns["duration_ns"]) == durations
    columns = result.step_columns
    assert list(zip(columns["used_blocks"], columns["kv_tokens"], strict=True)) == held
    assert vars(result.stats) == vars(stats)
    gaps = Counter()
    for record, arrival in zip(result.records, workload.arrivals, strict=True):
        assert record.request_id == arrival.request_id and record.arrived_at == arrival.at_ns
        own = times[arrival.request_id]
        if not own:
            assert record.finish_reason == "refused" and record.error and record.ttft_ns is record.tpot_ns is None
            continue
        between = [b - a for a, b in zip(own, own[1:], strict=False)]
        gaps.update(between)
        assert record.finish_reason == "length" and record.error is None
        assert record.output_tokens == len(own) == arrival.output_tokens
        assert record.admitted_at == admitted[arrival.request_id]
        assert (record.first_token_at, record.last_token_at) == (own[0], own[-1])
        assert record.longest_gap == max(between, default=0)
    assert result.gaps == gaps


@given(settings_and_workload(), st.booleans())
def test_every_token_is_accounted_for(drawn, reckless):
    made, workload = drawn
    recorder = Recorder()
    result = Simulator(made, WorkCost(), RECKLESS if reckless else None, recorder).run(workload)
    served = [record for record in result.records if record.finish_reason != "refused"]
    columns, stats, found = result.step_columns, result.stats, result.summary()
    # The last output is never computed.
    once = sum(record.prompt_tokens + record.output_tokens - 1 for record in served)
    assert sum(columns["num_tokens"]) == stats.num_scheduled_tokens == once + stats.num_recomputed_tokens
    assert found["finished"] == len(served) == stats.num_finished
    assert found["recomputed_tokens"] == stats.num_recomputed_tokens
    preempted = sum(record.num_preemptions for record in served)
    assert found["preemptions"] == preempted == sum(columns["num_preempted"]) == len(recorder.events("preempt"))
    moved = {kind: sum(len(event.values) for event in recorder.events(kind)) for kind in ("swap_out", "swap_in")}
    assert found["swapped_out_tokens"] == moved["swap_out"] * made.block_size
    assert found["swapped_in_tokens"] == moved["swap_in"] * made.block_size
    assert sum(result.gaps.values()) == sum(record.output_tokens - 1 for record in served)
    assert sum(gap * count for gap, count in result.gaps.items()) == sum(
        record.last_token_at - record.first_token_at for record in served
    )
    for used, held in zip(columns["used_blocks"], columns["kv_tokens"], strict=True):
        assert held <= used * made.block_size <= result.num_usable_blocks * made.block_size


@given(settings_and_workload(), st.booleans())
def test_littles_law_is_an_identity(drawn, reckless):
    """Sequences in the system, summed over time, are what the requests spent in it (from the first step they saw)."""
    made, workload = drawn
    result = Simulator(made, WorkCost(), RECKLESS if reckless else None).run(workload)
    columns = result.step_columns
    inside = sum(
        duration * (running + waiting)
        for duration, running, waiting in zip(
            columns["duration_ns"], columns["num_running"], columns["num_waiting"], strict=True
        )
    )
    starts = list(columns["start_ns"])
    spent = sum(
        record.last_token_at - starts[bisect_left(starts, record.arrived_at)]
        for record in result.records
        if record.last_token_at is not None
    )
    assert inside == spent


def test_littles_law_on_a_long_run():
    workload = make_workload(4000, Uniform(10, 60), Lognormal(30, 0.8), Poisson(8), seed=5)
    result = Simulator(config(400, 16), ConstantCost(0.02)).run(workload)
    rate = len(workload) / result.makespan_s
    wait = sum(record.e2e_ns for record in result.records) / len(workload) / S
    steps = result.steps
    mean_inside = ((steps.num_running + steps.num_waiting) * steps.duration_s).sum() / result.makespan_s
    assert mean_inside == pytest.approx(rate * wait, rel=0.02)
    assert rate == pytest.approx(8, rel=0.05) and mean_inside > 3


# ---- seeds, parts, refusals


def test_the_same_seed_gives_the_same_frames():
    def frames(seed):
        workload = make_workload(200, Lognormal(40), Uniform(1, 40), Poisson(20), seed=seed)
        made = config(60, 8, max_num_seqs=16, max_num_batched_tokens=64, num_cpu_blocks_override=20)
        result = Simulator(made, GPUCost.of("A100", "Llama-3-8B", block_size=8), RECKLESS).run(workload)
        assert result.summary()["preemptions"] > 0
        return result.requests, result.steps, result.latencies

    first, again, other = frames(1), frames(1), frames(2)
    for one, two in zip(first, again, strict=True):
        pd.testing.assert_frame_equal(one, two, check_exact=True)
    assert not first[0].equals(other[0])


def test_the_same_seed_gives_the_same_numbers_in_another_process():
    code = (
        "from kvlab.sim import *; from kvlab.config import EngineConfig\n"
        "w = make_workload(60, Lognormal(40), Uniform(1, 40), Poisson(20), prefix_tokens=20, num_prefixes=3, seed=4)\n"
        "print(Simulator(EngineConfig(num_gpu_blocks_override=90), ConstantCost(0.01)).run(w).summary())"
    )
    seen = set()
    for hash_seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        seen.add(done.stdout)
    assert len(seen) == 1


def test_parts_decide():
    """Each replaced policy and class is asked, and what it says is what happens."""
    asked = Counter()

    def admit(num_running, max_num_seqs, batch_is_forming):
        asked["admit"] += 1
        return num_running < 2

    def choose_victim(running, needy, gain):
        asked["choose_victim"] += 1
        return running[0]  # the oldest, which ours never takes

    def swap_or_recompute(request, num_blocks, num_free_cpu_blocks):
        asked["swap_or_recompute"] += 1
        return "recompute"

    made = config(4, 2, num_cpu_blocks_override=8)
    parts = Parts(may_resume=fits, admit=admit, choose_victim=choose_victim, swap_or_recompute=swap_or_recompute)
    result = Simulator(made, ConstantCost(1), parts).run(closed_batch([(3, 4), (3, 4), (1, 1)]))
    assert result.summary()["peak_running"] == 2 and result.summary()["swapped_out_tokens"] == 0
    assert set(asked) == {"admit", "choose_victim", "swap_or_recompute"}
    assert result.records[0].num_preemptions > 0


def test_a_part_that_fails_is_named():
    def admit(num_running, max_num_seqs, batch_is_forming):
        raise KeyError("seat")

    with pytest.raises(PartError, match="your part `admit` raised KeyError"):
        Simulator(config(), ConstantCost(1), Parts(admit=admit)).run(closed_batch([(1, 1)]))


def test_a_policy_that_never_says_yes_is_told():
    with pytest.raises(RuntimeError, match="stuck at 0.0 s: 2 requests wait, 0 run"):
        Simulator(config(), ConstantCost(1), Parts(admit=lambda *_: False)).run(closed_batch([(1, 1)] * 2))


def test_what_can_never_be_served_is_refused_and_the_others_go_on():
    result = Simulator(config(4, 4), ConstantCost(1)).run(closed_batch([(3, 2), (40, 2), (3, 2)]))
    assert [record.finish_reason for record in result.records] == ["length", "refused", "length"]
    assert "40 prompt tokens" in result.records[1].error
    found = result.summary(SLO(e2e_s=10))
    assert found["refused"] == 1 and found["finished"] == 2 and found["slo_met"] == 2 / 3
    assert result.requests.loc[1, "error"] == result.records[1].error
    assert result.requests.loc[1, ["ttft_s", "e2e_s", "queue_s", "tpot_s"]].isna().all()


def test_max_model_len_cuts_outputs():
    result = Simulator(config(max_model_len=10), ConstantCost(1)).run(closed_batch([(6, 100)]))
    assert result.records[0].output_tokens == 4 and result.summary()["output_tokens_per_s"] == 1


def test_nothing_to_do():
    result = Simulator(config(), ConstantCost(1)).run(Workload("empty", []))
    assert result.records == [] and result.summary()["requests"] == 0 and len(result.requests) == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_time_are_refused(seconds):
    with pytest.raises(ValueError, match="step 1 takes .* seconds: costs must give 0 or more"):
        Simulator(config(), ConstantCost(seconds)).run(closed_batch([(1, 1)]))


def test_without_blocks_it_says_what_to_set():
    with pytest.raises(ValueError, match="num_gpu_blocks_override is None"):
        Simulator(EngineConfig(), ConstantCost(1)).run(closed_batch([(1, 1)]))


# ---- prefixes


def test_shared_prefixes_are_found_and_own_tokens_are_not():
    # Ten requests, one after the other: a system prompt of 8 tokens (2 blocks of 4) and 5 tokens of their own.
    workload = make_workload(10, Fixed(5), Fixed(6), Bursts(1, 100), prefix_tokens=8, seed=3)
    result = Simulator(config(200), ConstantCost(1)).run(workload)
    assert [record.cached_tokens for record in result.records] == [0] + [8] * 9
    assert result.summary()["prefix_hit_rate"] == 72 / 130
    assert list(result.step_columns["num_tokens"])[::6] == [13] + [5] * 9


def test_equal_prompts_share_them_but_not_their_outputs():
    arrivals = [Arrival(i * 100 * S, 8, 8, str(i), 0, (7, 7)) for i in range(2)]
    arrivals.append(Arrival(200 * S, 12, 1, "other", 0, (7, 7)))  # goes on after 8 tokens in a way of its own
    result = Simulator(config(200), ConstantCost(1)).run(Workload("equal", arrivals, prefix_block_size=4))
    assert [record.cached_tokens for record in result.records] == [0, 4, 8]  # one token is left to compute


def test_outputs_of_equal_prompts_are_published_under_names_of_their_own():
    # 8 prompt tokens and 9 outputs, of which 16 are computed: 4 blocks of 4 each. The prompt's 2 have one name each.
    arrivals = [Arrival(i * 100 * S, 8, 9, str(i), 0, (7, 7)) for i in range(2)]
    seen = []
    Simulator(config(200), ConstantCost(1)).run(
        Workload("equal", arrivals, prefix_block_size=4),
        lambda scheduler, now: seen.append(len(scheduler.manager.block_pool.cached_block_hash_to_block)),
    )
    assert seen[-1] == 2 + 2 * 2


def test_chains_of_prefix_ids_are_found_as_far_as_they_are_equal():
    ids = [(1, 2, 3), (1, 2, 4), (9, 2, 3), (1, 2, 3)]
    arrivals = [Arrival(i * 100 * S, 12, 1, str(i), 0, chain) for i, chain in enumerate(ids)]
    result = Simulator(config(200), ConstantCost(1)).run(Workload("chains", arrivals, prefix_block_size=4))
    assert [record.cached_tokens for record in result.records] == [0, 8, 0, 8]


def least_recently_used(workload: Workload, usable: int, size: int) -> list[int]:
    """Cached tokens of each prompt, one request after the other, over a list of blocks in order of eviction."""
    queue: list[int | None] = [None] * usable  # prefix ids; each stands for all before it, too
    found = []
    for arrival in workload.arrivals:
        full = arrival.prefix_ids[: (arrival.prompt_tokens - 1) // size]
        hits = next((i for i, prefix_id in enumerate(full) if prefix_id not in queue), len(full))
        found.append(hits * size)
        for prefix_id in full[:hits]:
            queue.remove(prefix_id)
        needed = -(-arrival.prompt_tokens // size)
        del queue[: needed - hits]
        whole = arrival.prompt_tokens // size
        held = [prefix_id if i < whole and (i < hits or prefix_id not in queue) else None
                for i, prefix_id in enumerate(arrival.prefix_ids)]  # fmt: skip
        queue += reversed(held)
    return found


@given(st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(1, 4)), min_size=1, max_size=40),
       st.integers(6, 12))  # fmt: skip
def test_the_prefix_cache_evicts_least_recently_used_blocks(drawn, usable):
    """Prompts of a random tree of prefixes through a pool that cannot hold it, against a plain list (L33 6.3)."""
    names: dict[tuple[int, ...], int] = {}
    arrivals = []
    for number, (path, rest) in enumerate(drawn):
        path = [*path, 100 + number % 3]  # an id says all before it: one for each way from the root
        ids = tuple(names.setdefault(tuple(path[: i + 1]), len(names)) for i in range(len(path)))
        arrivals.append(Arrival(number * S, 4 * len(path) - 4 + rest, 1, str(number), 0, ids))
    workload = Workload("tree", arrivals, prefix_block_size=4)
    result = Simulator(config(usable, 4), ConstantCost(0.1)).run(workload)
    assert [record.cached_tokens for record in result.records] == least_recently_used(workload, usable, 4)
