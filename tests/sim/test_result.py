"""Metrics: quantiles against numpy's, and the summary against the frames."""

from math import isnan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.config import EngineConfig
from kvlab.parts import Parts
from kvlab.sim import SLO, ConstantCost, Lognormal, Poisson, RequestRecord, Simulator, Uniform, make_workload
from kvlab.sim.result import quantiles

S = 1_000_000_000


@given(st.dictionaries(st.integers(-1000, 10**9), st.integers(1, 5), min_size=1, max_size=30),
       st.lists(st.floats(0, 1), max_size=5))  # fmt: skip
def test_quantiles_are_numpys(counts, wanted):
    values = np.repeat(list(counts), list(counts.values())).astype(float)
    wanted += [0.0, 0.5, 0.9, 0.99, 1.0]
    assert quantiles(counts, wanted) == pytest.approx(list(np.quantile(values, wanted)), rel=1e-9, abs=1e-3)


def test_quantiles_of_nothing():
    assert all(isnan(value) for value in quantiles({}, (0.5, 0.9)))


@pytest.fixture(scope="module")
def result():
    """Some hundred requests in a pool that is short: queues, preemptions, prefixes."""
    workload = make_workload(150, Lognormal(30), Uniform(1, 40), Poisson(20), prefix_tokens=16, num_prefixes=4, seed=2)
    config = EngineConfig(num_gpu_blocks_override=60, block_size=8, max_num_seqs=12, max_num_batched_tokens=48)
    result = Simulator(config, ConstantCost(0.03), Parts(may_resume=lambda request, room: True)).run(workload)
    assert result.stats.num_preemptions_recompute > 0 and result.records[-1].queue_ns > 0
    return result


def test_the_summary_is_what_the_frames_say(result):
    found, requests, steps = result.summary(), result.requests, result.steps
    for name in ("queue", "ttft", "tpot", "e2e"):
        for q in (50, 90, 99):
            assert found[f"{name}_p{q}_s"] == pytest.approx(requests[f"{name}_s"].quantile(q / 100)), name
            assert result.latencies.loc[name, f"p{q}"] == pytest.approx(found[f"{name}_p{q}_s"])
        assert result.latencies.loc[name, "mean"] == pytest.approx(requests[f"{name}_s"].mean())
        assert result.latencies.loc[name, "max"] == pytest.approx(requests[f"{name}_s"].max())
    assert result.latencies.loc["itl", "max"] == pytest.approx(requests.longest_itl_s.max())
    span = (requests.arrival_s + requests.e2e_s).max() - requests.arrival_s.min()
    assert found["makespan_s"] == pytest.approx(span)
    assert found["requests_per_s"] == pytest.approx(150 / span)
    assert found["output_tokens_per_s"] == pytest.approx(requests.output_tokens.sum() / span)
    tokens = requests.output_tokens.sum() + requests.prompt_tokens.sum()
    assert found["total_tokens_per_s"] == pytest.approx(tokens / span)
    assert found["prefix_hit_rate"] == pytest.approx(requests.cached_tokens.sum() / requests.prompt_tokens.sum())
    assert 0 < found["prefix_hit_rate"] < 1
    assert found["kv_usage"] == pytest.approx((steps.kv_usage * steps.duration_s).sum() / steps.duration_s.sum())
    assert found["running"] == pytest.approx((steps.num_running * steps.duration_s).sum() / steps.duration_s.sum())
    assert found["kv_usage_peak"] == steps.kv_usage.max() and found["peak_running"] == steps.num_running.max()
    assert found["steps"] == len(steps) and found["requests"] == len(requests)


def test_goodput_is_what_the_frame_says(result):
    requests = result.requests
    assert requests.tpot_s.isna().any()  # some ask for one token: no gap, and no objective for gaps to miss
    for slo in (SLO(ttft_s=1), SLO(tpot_s=0.0301), SLO(e2e_s=2), SLO(ttft_s=1, tpot_s=0.0301, e2e_s=2), SLO()):
        good = (requests.ttft_s <= (slo.ttft_s or 1e9)) & (requests.e2e_s <= (slo.e2e_s or 1e9))
        good &= requests.tpot_s.isna() | (requests.tpot_s <= (slo.tpot_s or 1e9))
        found = result.summary(slo)
        assert found["slo_met"] == pytest.approx(good.mean())
        assert found["goodput_per_s"] == pytest.approx(good.sum() / found["makespan_s"])
    assert result.summary(SLO())["slo_met"] == 1 and 0 < result.summary(SLO(ttft_s=1))["slo_met"] < 1
    assert "slo_met" not in result.summary()


def test_an_objective_is_met_up_to_its_limit():
    record = RequestRecord("r", 0, 1, 3, 0, 0, S, 5 * S, 2 * S, 0, "length", None)
    assert record.tpot_ns == 2 * S
    assert SLO(ttft_s=1).is_met(record) and not SLO(ttft_s=0.999).is_met(record)
    assert SLO(tpot_s=2).is_met(record) and not SLO(tpot_s=1.999).is_met(record)
    assert SLO(e2e_s=5).is_met(record) and not SLO(e2e_s=4.999).is_met(record)
    refused = RequestRecord("r", 0, 1, 0, 0, None, None, None, 0, 0, "refused", "too long")
    assert not SLO().is_met(refused)


@pytest.mark.parametrize("name", ["ttft_s", "tpot_s", "e2e_s"])
@pytest.mark.parametrize("value", [0, -1, "fast", float("nan")])
def test_an_objective_that_is_none(name, value):
    with pytest.raises(ValueError, match=f"{name} is .*: use a positive number of seconds"):
        SLO(**{name: value})
