"""What lab 07 plays: lengths of one mean, machines on the virtual clock, lives of requests; and the facts it tells."""

from collections import Counter

import pytest

from kvlab.lab.beside import run_beside_ours
from kvlab.lab.scenes.batching import MEAN, SHAPES, Machine, draw_lengths, lives, record_lives
from kvlab.parts import Parts
from kvlab.schedule.lifecycle import next_status
from kvlab.schedule.on_paper import continuous_schedule, num_steps, static_schedule
from kvlab.schedule.policies import admit, admit_static
from kvlab.sim import Lognormal, Uniform, make_workload
from kvlab.sim.workload import Poisson


@pytest.mark.parametrize("shape", SHAPES)
def test_all_shapes_have_one_mean_and_come_again(shape):
    lengths = draw_lengths(shape, 20_000)
    assert sum(lengths) / len(lengths) == pytest.approx(MEAN, rel=0.03) and min(lengths) >= 1
    assert lengths == draw_lengths(shape, 20_000) and lengths[:9] == draw_lengths(shape, 9)
    assert (lengths == draw_lengths(shape, 20_000, seed=1)) == (shape == "all equal")


def test_equal_lengths_gain_nothing_and_long_tails_four_times():
    def gain(shape, seats):
        lengths = draw_lengths(shape, 40 * seats)
        return num_steps(static_schedule(lengths, seats)) / num_steps(continuous_schedule(lengths, seats))

    assert gain("all equal", 16) == 1
    assert gain("exponential", 4) < gain("exponential", 64) and gain("exponential", 64) > 4


CHATS = make_workload(250, Lognormal(300, 0.8, 2000), Lognormal(200, 0.8, 1500), seed=1)


def test_a_small_card_needs_pages_first_and_a_large_one_the_rule():
    for gpu, waiting, rule_matters_more in (("L4", CHATS.first(60), False), ("H100", CHATS, True)):
        machine = Machine(gpu, "Llama-3-8B")
        neither, rule, pages, both = (
            machine.run(waiting, policy, reserve).result.summary()["output_tokens_per_s"]
            for policy, reserve in ((admit_static, 4096), (admit, 4096), (admit_static, None), (admit, None))
        )
        assert neither < min(rule, pages) and both > 2 * neither
        assert (rule > pages) == rule_matters_more


def test_c29_long_prompts_and_short_answers_gain_nothing():
    machine = Machine("H100", "Llama-3-8B")
    workload = make_workload(20, Uniform(15_000, 17_000), Uniform(1, 9), seed=1)
    spans = [machine.run(workload, rule, max_num_seqs=64).result.makespan_s for rule in (admit_static, admit)]
    assert spans[0] == spans[1]


def test_a_newcomer_waits_for_a_batch_or_for_a_step():
    machine = Machine("H100", "Llama-3-8B")
    workload = make_workload(60, Lognormal(300, 0.8, 2000), Lognormal(200, 0.8, 1500), Poisson(1), seed=1)
    static, now = (machine.run(workload, rule).result.summary()["ttft_p50_s"] for rule in (admit_static, admit))
    assert static > 10 * now


def test_mfu_counts_all_arithmetic():
    run = Machine("H100", "Llama-3-8B").run(CHATS, admit)
    shape, records = Machine("H100", "Llama-3-8B").cost.shape, run.result.records
    tokens = sum(r.prompt_tokens + r.output_tokens - 1 for r in records)
    outputs = sum(r.output_tokens for r in records)
    pairs = sum(n * (n + 1) // 2 for n in (r.prompt_tokens + r.output_tokens - 1 for r in records))
    heads = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    flops = (2 * shape.num_layer_weights * tokens + 4 * heads * pairs
             + 2 * shape.vocab_size * shape.hidden_size * outputs)  # fmt: skip
    assert run.mfu == pytest.approx(flops / (989e12 * run.result.makespan_s))
    assert run.result.summary()["preemptions"] == 0, "else some are computed twice"


def test_the_recorded_lives_are_legal_and_show_every_kind():
    status, seen = {}, Counter()
    for request, event in lives(record_lives(admit)):
        before = status.get(request, "waiting")
        status[request] = next_status(before, event)
        seen[before, event] += 1
    assert len(status) == 24 and set(status.values()) == {"stop", "length", "abort", "error"}
    assert {event for _, event in seen} == {"schedule", "recompute", "swap", "stop", "length", "abort", "error"}
    assert seen["waiting", "abort"] == seen["running", "abort"] == 1


def test_answers_of_different_lengths_beside_ours():
    options = {"num_requests": 4, "num_samples": 1, "max_num_seqs": 2, "stand_in": True}
    result = run_beside_ours(Parts(admit=admit_static), max_tokens=(2, 9, 3, 4), **options)
    assert result.same_tokens and sorted(map(len, result.ours.tokens)) == [2, 3, 4, 9]
    steps = {what: (int(mine), int(theirs)) for what, mine, theirs in result.rows() if what == "steps"}["steps"]
    assert steps[0] > steps[1]
    with pytest.raises(ValueError, match="3 numbers for 4 requests"):
        run_beside_ours(Parts(), max_tokens=(1, 2, 3), **options)
