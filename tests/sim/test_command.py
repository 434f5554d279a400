"""`kvlab simulate`: what is typed is what is simulated, and what cannot be is one red line."""

import json
import sys
from math import isnan

import pytest

from kvlab import cli
from kvlab.config import EngineConfig
from kvlab.costs import FittedCost, GPUCost
from kvlab.sim import (
    SLO,
    Bursts,
    ConstantCost,
    Poisson,
    Simulator,
    Speculation,
    Uniform,
    make_workload,
    read_trace,
)  # fmt: skip
from kvlab.sizing import MODELS, num_gpu_blocks


@pytest.fixture
def simulate(monkeypatch, capsys, tmp_path):
    """simulate(argument, ...): exit code, stdout, stderr, and the summary that --json wrote."""

    def call(*arguments):
        path = tmp_path / "summary.json"
        path.unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["kvlab", "simulate", *map(str, arguments), "--json", str(path)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        found = json.loads(path.read_text()) if path.exists() else None
        return ended.value.code or 0, shown.out, shown.err, found

    return call


SMALL = "--num-gpu-blocks 41 --block-size 8 --max-num-seqs 4 --max-num-batched-tokens 64 --num-cpu-blocks 9".split()
CONFIG = dict(num_gpu_blocks_override=41, block_size=8, max_num_seqs=4, max_num_batched_tokens=64,
              num_cpu_blocks_override=9)  # fmt: skip
LENGTHS = "--prompt uniform:10:60 --output uniform:1:40".split()


def same(found, summary):
    """Whether the command found this summary."""
    for name, value in summary.items():
        assert found[name] == (None if isnan(value) else pytest.approx(value)), name


def test_a_made_workload(simulate):
    code, out, _, found = simulate("poisson", "-n", 60, "--rate", 30, "--seed", 3, *LENGTHS, *SMALL, "--step-ms", 20,
                                   "--ttft", 1, "--tpot", 0.05)  # fmt: skip
    workload = make_workload(60, Uniform(10, 60), Uniform(1, 40), Poisson(30), seed=3)
    summary = Simulator(EngineConfig(**CONFIG), ConstantCost(0.02)).run(workload).summary(SLO(ttft_s=1, tpot_s=0.05))
    assert code == 0
    same(found, summary)
    assert 0 < found["slo_met"] < 1
    assert f"TTFT{summary['ttft_p50_s']:>25.4f}{summary['ttft_p90_s']:>11.4f}" in out
    assert f"{summary['slo_met']:.1%} meet the objective" in out and "60 requests; 20 ms a step; 40 blocks of 8" in out


def test_options_of_the_engine_and_the_workload(simulate):
    common = ["bursts", "-n", 30, "--rate", 10, "--burst-size", 10, *LENGTHS]
    common += ["--prefix-tokens", 16, "--num-prefixes", 2]
    workload = make_workload(30, Uniform(10, 60), Uniform(1, 40), Bursts(10, 1.0), prefix_tokens=16, num_prefixes=2)
    cost = GPUCost.of("L4", "Qwen2.5-0.5B", block_size=8)
    for typed, options in [
        ((), {}),
        (("--no-prefix-caching",), {"enable_prefix_caching": False}),
        (("--batching", "static"), {"batching": "static"}),
        (("--reservation", "contiguous", "--max-model-len", 120), {"reservation": "contiguous", "max_model_len": 120}),
    ]:
        code, _, _, found = simulate(*common, *SMALL, *typed, "--gpu", "L4", "--model", "Qwen2.5-0.5B", "--faster", 2)
        assert code == 0
        same(found, Simulator(EngineConfig(**CONFIG | options), cost).run(workload.faster(2)).summary())


def test_without_blocks_it_takes_what_fits_beside_the_model(simulate):
    code, _, _, found = simulate("closed", "-n", 2, "--prompt", 10, "--output", 2)
    shape = MODELS["Llama-3-8B"]
    planned = num_gpu_blocks(80 * 10**9, 0.9, shape.weight_bytes(), 2 * 10**9, 10**9, 16 * shape.kv_bytes_per_token())
    assert code == 0 and found["num_gpu_blocks"] == planned and 24_000 < planned < 27_000


def test_a_trace_and_a_measured_cost(simulate, tmp_path):
    made, cost = tmp_path / "made.jsonl", tmp_path / "cost.json"
    FittedCost({"step": 0.01, "num_tokens": 0.0002}).save(cost)
    assert simulate("closed", "-n", 9, *LENGTHS, *SMALL, "--save", made)[0] == 0
    assert read_trace(made).arrivals == make_workload(9, Uniform(10, 60), Uniform(1, 40)).arrivals
    code, out, _, found = simulate(made, "-n", 7, *SMALL, "--cost", cost)
    assert code == 0 and "made: 7 requests" in out
    same(found, Simulator(EngineConfig(**CONFIG), FittedCost.load(cost)).run(read_trace(made).first(7)).summary())


def test_refused_requests_are_told(simulate):
    code, out, _, found = simulate("closed", "-n", 3, "--prompt", 400, "--output", 2, *SMALL, "--step-ms", 1)
    assert code == 0 and found["refused"] == 3 and found["finished"] == 0
    assert "refused, the first of 3: request '0': 400 prompt tokens" in out


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere"], "no trace 'nowhere': give a file, or one of closed, poisson, bursts"),
        (["poisson", "--rate", "0"], "rate is 0.0: use a positive number"),
        (["bursts", "--rate", "0"], "rate is 0.0: use a positive number"),
        (["closed", "-n", "0"], "num_requests is 0"),
        (["closed", "--prompt", "long"], "lengths 'long': write 200"),
        (["closed", "--gpu", "B9"], "no GPU 'B9' in the table"),
        (["closed", "--model", "GPT"], "no model 'GPT' in the table"),
        (["closed", "--cost", "nowhere.json"], "nowhere.json cannot be read as a cost"),
        (["closed", "--cost", "x", "--step-ms", "1"], "give one of them"),
        (["closed", "--ttft", "0"], "ttft_s is 0.0: use a positive number of seconds"),
        (["closed", "--batching", "some"], "batching is 'some': use one of continuous, static"),
        (["closed", "--model", "Llama-3-70B"], "no room for a single K/V block"),
    ],
)
def test_what_cannot_be_simulated(simulate, arguments, message):
    code, out, error, found = simulate(*arguments)
    assert code == 2 and message in error and not out and found is None


def test_speculation(simulate):
    common = ["closed", "-n", 20, "--seed", 3, *LENGTHS, *SMALL, "--step-ms", 20]
    code, out, _, found = simulate(*common, "--speculate", 3, "--acceptance", 0.6, "--draft-ms", 5)
    workload = make_workload(20, Uniform(10, 60), Uniform(1, 40), seed=3)
    speculation = Speculation(num_drafts=3, acceptance=0.6, seed=3, draft_seconds=0.005)
    result = Simulator(EngineConfig(**CONFIG), ConstantCost(0.02), speculation=speculation).run(workload)
    assert code == 0
    same(found, result.summary())
    verifications, drafts, accepted = result.speculation
    assert f"{1 + accepted / verifications:.2f} tokens each; {accepted:,} of {drafts:,} drafts held" in out
    code, out, _, found = simulate(*common)
    assert code == 0 and "draft_tokens" not in found and "drafts held" not in out
    code, _, err, _ = simulate(*common, "--acceptance", 0.6)
    assert code == 2 and "--speculate" in err
    code, _, err, _ = simulate(*common, "--speculate", -1)
    assert code == 2 and "num_drafts is -1" in err
