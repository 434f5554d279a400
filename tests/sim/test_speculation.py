"""Speculation in the simulator: what a verification asks for and brings; rejected drafts leave no trace."""

from dataclasses import replace
from math import ceil, sqrt

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config import EngineConfig
from kvlab.costs import StepWork, work_of_step
from kvlab.parts import Parts
from kvlab.sim import (
    Arrival,
    ConstantCost,
    Fixed,
    Simulator,
    Speculation,
    Uniform,
    Workload,
    closed_batch,
    make_workload,
)

S = 1_000_000_000


def config(usable=200, block_size=4, **options) -> EngineConfig:
    return EngineConfig(num_gpu_blocks_override=usable + 1, block_size=block_size, **options)


class Noted(ConstantCost):
    """One second a step; the work of each is kept."""

    def __init__(self):
        super().__init__(1)
        self.works: list[StepWork] = []

    def step_seconds(self, work):
        self.works.append(work)
        return super().step_seconds(work)


def run(lengths, made=None, **speculation):
    simulator = Simulator(made or config(), ConstantCost(1), speculation=Speculation(**speculation))
    return simulator.run(closed_batch(lengths))


# ---- by hand


def test_all_drafts_hold():
    # After the prompt, 5 tokens a step; of the last 2 only one can be a draft, for the last is sampled.
    result = run([(3, 13)], num_drafts=4, acceptance=1)
    assert list(result.step_columns["num_tokens"]) == [3, 5, 5, 2]
    assert list(result.step_columns["kv_tokens"]) == [3, 8, 13, 15]  # the last token of an answer needs no K/V
    assert result.records[0].output_tokens == 13 and result.records[0].last_token_at == 4 * S
    assert result.gaps == {S: 3, 0: 9} and result.records[0].tpot_ns == 3 * S / 12
    assert result.speculation == (3, 9, 9)
    assert result.summary()["tokens_per_verification"] == 4


def test_no_draft_holds():
    # One token a step, as without drafts; only the work is more, and kv_tokens counts what is left of it.
    result = run([(3, 5)], num_drafts=4, acceptance=0)
    plain = Simulator(config(), ConstantCost(1)).run(closed_batch([(3, 5)]))
    assert list(result.step_columns["num_tokens"]) == [3, 4, 3, 2, 1]
    for column in ("start_ns", "kv_tokens", "num_running"):
        assert result.step_columns[column] == plain.step_columns[column]
    assert result.gaps == plain.gaps and result.speculation == (3, 6, 0)
    assert result.summary()["tokens_per_verification"] == 1


def test_what_a_verification_costs():
    """1 + k rows through the linears and the head, causal pairs, all before it read; and the seconds of guessing."""
    cost = Noted()
    speculation = Speculation(num_drafts=4, acceptance=1, draft_seconds=0.25)
    result = Simulator(config(), cost, speculation=speculation).run(closed_batch([(10, 6)]))
    expected = work_of_step([(5, 10)])._replace(num_logits=5)
    assert cost.works == [work_of_step([(10, 0)]), expected]
    assert list(result.step_columns["duration_ns"]) == [S, 5 * S // 4]


def test_a_small_budget_checks_fewer_drafts():
    # Both decode from step 2 on. Of 7 tokens A takes 5, and B's 2 are its last token and one draft.
    result = run([(2, 11), (2, 5)], config(max_num_batched_tokens=7), num_drafts=4, acceptance=1)
    assert list(result.step_columns["num_tokens"]) == [4, 7, 7]
    assert result.speculation == (4, 10, 10)
    # Of 5 tokens nothing is left for B while A runs: its drafts are dropped and made anew.
    result = run([(2, 11), (2, 6)], config(max_num_batched_tokens=5), num_drafts=4, acceptance=1)
    assert [record.last_token_at // S for record in result.records] == [3, 4]


@pytest.mark.parametrize(("num_drafts", "steps"), [(0, 8), (1, 10), (4, 29)])
def test_verification_displaces_prefill(num_drafts, steps):
    """Ten decodes beside a prompt of 400 tokens and a budget of 64: what they take, the prompt does not get."""
    arrivals = [Arrival(0, 4, 1000, str(i)) for i in range(10)] + [Arrival(S, 400, 1, "prompt")]
    speculation = Speculation(num_drafts=num_drafts, acceptance=0) if num_drafts else None
    made = config(5000, max_num_batched_tokens=64)
    result = Simulator(made, ConstantCost(1), speculation=speculation).run(Workload("displaced", arrivals))
    assert steps == ceil(400 / (64 - 10 * (1 + num_drafts)))
    assert result.records[-1].ttft_ns == steps * S


# ---- on average


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("num_drafts", [1, 4, 8])
def test_tokens_a_verification(num_drafts, acceptance):
    """(1 - a^(k+1)) / (1 - a), within four standard errors; a seed that missed it would be one of 16,000."""
    speculation = Speculation(num_drafts=num_drafts, acceptance=acceptance, seed=5)
    closed_form = (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
    assert speculation.expected_tokens == pytest.approx(closed_form)
    made = config(20_000, 16)
    result = Simulator(made, ConstantCost(1), speculation=speculation).run(closed_batch([(8, 2000)] * 20))
    found = result.summary()["tokens_per_verification"]
    # Of m tokens, P(at least i) = a^(i-1), so E[m^2] = sum (2i - 1) a^(i-1).
    square = sum((2 * i - 1) * acceptance ** (i - 1) for i in range(1, num_drafts + 2))
    deviation = sqrt((square - closed_form**2) / result.speculation.num_verifications)
    assert abs(found - closed_form) < 4 * deviation + 20 * num_drafts / result.speculation.num_verifications


def test_the_same_drafts_hold_whoever_else_is_there():
    def steps_of_the_first(company):
        result = run([(5, 300)] + company, num_drafts=3, acceptance=0.7)
        return result.records[0].last_token_at

    alone = steps_of_the_first([])
    assert alone == steps_of_the_first([(30, 200), (1, 90)])
    other_seed = Simulator(config(), ConstantCost(1), speculation=Speculation(num_drafts=3, acceptance=0.7, seed=1))
    assert alone != other_seed.run(closed_batch([(5, 300)])).records[0].last_token_at


def test_requests_have_drafts_of_their_own():
    records = run([(5, 300)] * 8, num_drafts=3, acceptance=0.7).records
    assert len({record.last_token_at for record in records}) > 3


# ---- always


def fits(request, room) -> bool:
    """Admission without hysteresis: what makes preemptions."""
    return room.needed <= room.free


@settings(deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=8),
    usable=st.integers(16, 40), budget=st.integers(1, 40), cpu=st.integers(0, 20), caching=st.booleans(),
    num_drafts=st.integers(1, 6), acceptance=st.sampled_from([0, 0.5, 0.9, 1]), shared=st.integers(0, 12),
)  # fmt: skip
def test_every_request_gets_its_tokens_and_rejected_drafts_leave_no_trace(
    lengths, usable, budget, cpu, caching, num_drafts, acceptance, shared
):
    made = config(usable, max_num_batched_tokens=budget, num_cpu_blocks_override=cpu, enable_prefix_caching=caching)
    arrivals = [Arrival(0, shared + p, o, str(i), 0, (7,) if shared else ()) for i, (p, o) in enumerate(lengths)]
    workload = Workload("any", arrivals, prefix_block_size=max(shared, 1))

    def look(scheduler, now):
        scheduler.manager.check()
        for request in scheduler.running:
            assert request.num_computed_tokens < request.num_tokens  # the last token has no K/V yet
            for i, block in enumerate(scheduler.manager.req_to_blocks[request.request_id]):
                assert block.block_hash is None or (i + 1) * 4 <= request.num_computed_tokens

    speculation = Speculation(num_drafts=num_drafts, acceptance=acceptance)
    simulator = Simulator(made, ConstantCost(1), Parts(may_resume=fits), speculation=speculation)
    result = simulator.run(workload, look)
    for (prompt, outputs), record in zip(lengths, result.records, strict=True):
        if record.finish_reason != "refused":
            assert (record.prompt_tokens, record.output_tokens) == (shared + prompt, outputs)
    finished = [record for record in result.records if record.finish_reason != "refused"]
    assert sum(result.gaps.values()) == sum(record.output_tokens - 1 for record in finished)
    assert sum(gap * n for gap, n in result.gaps.items()) == sum(
        record.last_token_at - record.first_token_at for record in finished
    )
    verifications, drafts, accepted = result.speculation
    assert accepted <= drafts <= num_drafts * verifications
    assert accepted == (drafts if acceptance == 1 else 0 if acceptance == 0 else accepted)


def test_prefixes_are_found_as_without_drafts():
    workload = make_workload(30, Uniform(5, 40), Uniform(20, 60), seed=2, prefix_tokens=16, num_prefixes=3)
    made = config(4000, max_num_seqs=4)
    with_drafts = Simulator(made, ConstantCost(1), speculation=Speculation()).run(workload).summary()
    without = Simulator(made, ConstantCost(1)).run(workload).summary()
    assert with_drafts["prefix_hit_rate"] == without["prefix_hit_rate"] > 0
    assert with_drafts["steps"] < without["steps"] and "draft_tokens" not in without


def test_drafts_can_cost_preemptions():
    """Slots for drafts are blocks too: on a tight pool, requests that ask for 8 tokens more preempt more often."""
    workload = make_workload(12, Fixed(8), Fixed(24), seed=0)
    made, parts = config(12 * 8, enable_prefix_caching=False), Parts(may_resume=fits)
    assert Simulator(made, ConstantCost(1), parts).run(workload).summary()["preemptions"] == 0
    made = replace(made, num_gpu_blocks_override=12 * 6)
    plain = Simulator(made, ConstantCost(1), parts).run(workload).summary()
    none_holds = Speculation(num_drafts=8, acceptance=0)
    drafting = Simulator(made, ConstantCost(1), parts, speculation=none_holds).run(workload).summary()
    assert drafting["preemptions"] > plain["preemptions"]


@pytest.mark.parametrize(
    "options", [{"num_drafts": 0}, {"num_drafts": 2.5}, {"num_drafts": True}, {"acceptance": 1.1},
                {"acceptance": "high"}, {"draft_seconds": -1}, {"draft_seconds": float("inf")}],
)  # fmt: skip
def test_bad_values_are_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} is {value!r}"):
        Speculation(**options)
