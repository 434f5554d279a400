"""kvlab.calibrate: the engine's steps are the simulator's, and what it measures becomes a cost that can be loaded.

How long anything takes is not tested here; benchmarks/sim_vs_engine.py measures it.
"""

import itertools
import random

import pytest
from typer.testing import CliRunner

from kvlab import LLM, calibrate, cli
from kvlab.calibrate import (
    Calibration,
    Calibrator,
    TimedStep,
    block_costs,
    mean_steps,
    spread,
    timed_steps,
    workloads,
)
from kvlab.costs import FittedCost, StepWork, work_of_step
from kvlab.sim import Simulator, closed_batch

FEW = [("decode", [(9, 5)] * 3), ("prefill", [(30, 1)]), ("chunks", [(70, 3), (20, 2)])]


class Noted:
    """A cost that notes the work of every step."""

    def __init__(self):
        self.works = []

    def step_seconds(self, work: StepWork) -> float:
        self.works.append(work)
        return 1e-3


@pytest.mark.parametrize("pool", [(400, 0), (24, 0), (24, 60)], ids=["ample", "recompute", "swap"])
def test_the_simulator_takes_the_engines_steps_to_the_last_count(pool):
    """The same closed batch through the model and through the simulator: equal work in every step, equal counters."""
    gpu, cpu = pool
    llm = LLM("tiny", num_gpu_blocks_override=gpu, num_cpu_blocks_override=cpu, max_num_seqs=6,
              max_num_batched_tokens=32, enable_prefix_caching=False)  # fmt: skip
    rng = random.Random(1)
    load = [(rng.randint(4, 90), rng.randint(20, 60)) for _ in range(9)]
    real = timed_steps(llm, load)
    noted = Noted()
    result = Simulator(llm.config, noted).run(closed_batch(load))
    assert noted.works == [step.work for step in real]
    assert result.stats == llm.engine.scheduler.stats
    preempted = (result.stats.num_preemptions_recompute, result.stats.num_preemptions_swap)
    assert [bool(count) for count in preempted] == [pool == (24, 0), pool == (24, 60)]
    # Who gets a token when is the same, too, so a right cost gives right latencies.
    ends = {}
    for number, step in enumerate(real, 1):
        ends |= {request_id: number for request_id in step.sampled}
    first = int(next(iter(real[0].sampled), min(ends, key=int)))
    assert [record.last_token_at // 10**6 for record in result.records] == [
        ends[str(first + i)] for i in range(len(load))
    ]


def test_the_steps_of_a_run_add_up_by_the_clock_and_the_runner_is_given_back():
    llm, ticks = LLM("tiny", enable_prefix_caching=False, max_num_batched_tokens=16), itertools.count()
    runner = llm.engine.runner
    steps = timed_steps(llm, [(20, 3), (5, 1)], clock=lambda: next(ticks))
    assert llm.engine.runner is runner
    assert [step.seconds for step in steps] == [1] * len(steps)
    assert [step.work for step in steps[:2]] == [work_of_step([(16, 0)])._replace(num_logits=0),
                                                 work_of_step([(4, 16), (5, 0)])]  # fmt: skip
    assert sum(len(step.sampled) for step in steps) == 4
    with pytest.raises(ValueError, match="prompt"):
        timed_steps(llm, [(3000, 1)])
    assert llm.engine.runner is runner


def test_mean_steps_are_of_the_same_steps_and_leave_out_pauses():
    run = lambda *seconds: [TimedStep(StepWork(num_tokens=i), s, ()) for i, s in enumerate(seconds)]  # noqa: E731
    assert mean_steps([run(1, 5), run(3, 4), run(2, 9)]) == run(2, 6)
    assert mean_steps([run(1, 5), run(3, 4), run(2, 16)]) == run(2, 4.5)
    with pytest.raises(ValueError, match="different steps"):
        mean_steps([run(1, 2), run(1, 2)[::-1]])


@pytest.mark.parametrize(("longest", "budget", "seats"), [(2048, 512, 64), (64, 16, 2), (40, 2048, 256)])
def test_workloads_fit_the_engine(longest, budget, seats):
    found = dict(workloads(longest, budget, seats))
    assert {"chunks", "mixed"} < set(found) and any(name.startswith("decode") for name in found)
    for name, load in found.items():
        assert all(prompt >= 1 and outputs >= 1 and prompt + outputs <= longest for prompt, outputs in load), name


def test_a_calibration_explains_its_steps_and_can_be_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "workloads", lambda *_: iter(FEW))
    path = tmp_path / "cost.json"
    done = CliRunner().invoke(cli.app, ["calibrate", "tiny", "--rounds", "2", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "decode" in done.output and "off by" in done.output
    cost = FittedCost.load(path)
    assert cost.about["model"] == "tiny"
    assert {"blocks_copied", "blocks_swapped_out", "blocks_swapped_in"} < set(cost.seconds_per)
    assert cost.step_seconds(work_of_step([(64, 0)])) > cost.step_seconds(work_of_step([(1, 8)])) > 0


def test_a_calibration_tells_measured_from_modelled():
    works = [work_of_step([(1, 9)]), work_of_step([(4, 0)])]
    found = Calibration(FittedCost({"step": 2.0}), [("a", works[0], 1.0), ("a", works[1], 4.0), ("b", works[0], 2.0)])
    assert found.errors() == [1.0, -0.5, 0.0]
    assert found.table() == [("a", 2, 5.0, 4.0), ("b", 1, 2.0, 2.0)]
    assert spread([0.1, -0.3, 0.2]) == (0.2, 0.3)


def test_block_costs_ask_only_for_what_the_pool_has():
    llm = LLM("tiny", num_gpu_blocks_override=4, num_cpu_blocks_override=0, max_model_len=32)
    assert set(block_costs(llm)) == {"blocks_copied"}
    assert all(seconds > 0 for seconds in block_costs(llm).values())


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="raise `seconds`"):
        Calibrator("tiny", seconds=1e-9)
    for option, value in (("--rounds", "0"), ("--threads", "0")):
        done = CliRunner().invoke(cli.app, ["calibrate", option, value])
        assert isinstance(done.exception, ValueError) and f"{option[2:]} is 0" in str(done.exception)
