"""What a token budget costs: chunks add up, the knee agrees with the cost model."""

import pytest

from kvlab.costs import GPUCost, work_of_step
from kvlab.costs.budget import chunk_work, knee, largest_chunk
from kvlab.schedule.timetable import chunks


@pytest.mark.parametrize("size", [1, 7, 512, 4000])
def test_pairs_do_not_depend_on_the_cut_and_agree_with_the_work_of_steps(size):
    work, computed = chunk_work(chunks(4000, size)), 0
    assert sum(pairs for pairs, _ in work) == 4000 * 4001 // 2
    for chunk, found in zip(chunks(4000, size), work, strict=True):
        one = work_of_step([(chunk, computed)])
        assert found == (one.attention_pairs, one.kv_tokens_read)
        computed += chunk


@pytest.mark.parametrize("gpu", ["A100", "H100", "L4"])
@pytest.mark.parametrize("dtype_bytes", [1, 2])
def test_from_the_knee_on_the_linears_are_bound_by_arithmetic(gpu, dtype_bytes):
    cost = GPUCost.of(gpu, "Llama-3-8B", dtype_bytes=dtype_bytes)
    found = knee(cost.flops_rate, cost.memory_rate, cost.shape.num_layer_weights, dtype_bytes)
    bounds = [cost.explain(work_of_step([(n, 0)])).parts[1].bound for n in (found - 1, found)]
    assert bounds == ["memory", "compute"]


def test_the_knee_does_not_know_the_model():
    assert len({knee(989e12, 3.35e12, weights, 2) for weights in (10**8, 7 * 10**9, 70 * 10**9)}) == 1


def test_the_largest_chunk_fits_and_the_next_does_not():
    cost = GPUCost.of("H100", "Llama-3-8B")
    asked = []

    def seconds(chunk):
        asked.append(chunk)
        return cost.step_seconds(work_of_step([(1, 1000)] * 32 + [(chunk, 4000)]))

    chunk = largest_chunk(seconds, 0.05, 16_384)
    assert len(asked) <= 15
    assert seconds(chunk) <= 0.05 < seconds(chunk + 1)
    assert largest_chunk(seconds, 1e-6, 16_384) == 0 and largest_chunk(seconds, 60, 900) == 900
