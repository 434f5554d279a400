"""kvlab.costs: the work of a step against counting one by one, prices by hand, fits that find what was put in."""

import itertools
import json
import math
import random
from dataclasses import replace
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.config import EngineConfig
from kvlab.costs import (
    Breakdown,
    FittedCost,
    GPUCost,
    Part,
    StepWork,
    crossover_bandwidth,
    crossover_kv_heads,
    crossover_tokens,
    crossover_transfer_bytes,
    fit,
    recompute_seconds,
    swap_advantage,
    swap_seconds,
    transfer_seconds,
    work_of,
    work_of_step,
)
from kvlab.costs.fitted import nonnegative_least_squares
from kvlab.costs.preemption import effective_bandwidth
from kvlab.engine.core import EngineCore
from kvlab.primer import GPU, GPUS, flops_per_pair, flops_per_token, step_bytes, step_flops, step_seconds
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request, Scheduler
from kvlab.sim import SlotEchoRunner
from kvlab.sizing import MODELS, ModelShape, model_shape

STEPS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=6)
SMALL = ModelShape(31, 12, 20, 2, 4, 2, head_dim=4)
TOY = GPU(peak_flops=1e6, bandwidth=1e4, memory=10**6, pcie_bandwidth=500.0)
PLAIN = dict(compute_efficiency=1, memory_efficiency=1, pcie_efficiency=1, launch_seconds=0, host_seconds=0,
             host_seconds_per_sequence=0, transfer_latency=0)  # fmt: skip
WORKS = st.builds(
    StepWork, *[st.integers(1, 99)] * 4, st.integers(1, 10**6), st.integers(1, 10**4), *[st.integers(0, 9)] * 3
)


# ---- the work


def counted(output) -> StepWork:
    """The slow way: every pair by itself, from what the scheduler's output says."""
    pairs = read = logits = 0
    for request, new in output.scheduled:
        for position in range(request.num_computed_tokens, request.num_computed_tokens + new):
            pairs += len([key for key in range(request.num_tokens) if key <= position])
        read += len(range(request.num_computed_tokens + new))
        logits += request.num_computed_tokens + new == request.num_tokens
    kinds = [kind for kind, _, _ in output.block_ops]
    numbers = [new for _, new in output.scheduled]
    return StepWork(len(numbers), len([n for n in numbers if n != 1]), sum(numbers), logits, pairs, read,
                    *[kinds.count(kind) for kind in ("copy", "swap_out", "swap_in")])  # fmt: skip


def test_work_of_counts_what_the_scheduler_decided():
    """Chunks, decodes, forks (copies), swaps out and in, recomputation: all occur, or the test says so."""
    seen, lost = [], 0
    for num_cpu_blocks, budget in itertools.product((12, 0), (2, 3, 13)):  # small ones cut prompts at every place
        config = EngineConfig(block_size=4, num_gpu_blocks_override=24, num_cpu_blocks_override=num_cpu_blocks,
                              max_num_seqs=8, max_num_batched_tokens=budget)  # fmt: skip
        engine = EngineCore(Scheduler(config), Watch(SlotEchoRunner(24, 4, num_cpu_blocks), seen))
        for i in range(8):
            params = SamplingParams(n=2 if i % 3 == 0 else 1, max_tokens=6 + 3 * i, ignore_eos=True)
            engine.add_request(Request(str(i), [i] * (5 + 4 * i), params))
        while engine.has_unfinished_requests():
            engine.step()
        lost += engine.scheduler.stats.num_recomputed_tokens
    assert [quick for quick, _ in seen] == [slow for _, slow in seen]
    total = [sum(column) for column in zip(*[work for work, _ in seen], strict=True)]
    assert all(total) and lost and any(work.num_logits < work.num_sequences for work, _ in seen), (total, lost)


class Watch:
    """A runner before the runner, that notes the work and what counting says. (The engine catches what it raises.)"""

    def __init__(self, runner, seen: list[tuple[StepWork, StepWork]]):
        self.runner, self.seen = runner, seen

    def execute(self, output):
        self.seen.append((work_of(output), counted(output)))
        return self.runner.execute(output)


def test_work_of_a_step_by_hand():
    assert work_of_step([(1, 9), (3, 2), (2, 0)]) == StepWork(3, 2, 6, 3, 10 + (3 + 4 + 5) + (1 + 2), 10 + 5 + 2)


# ---- from first principles


@given(step=STEPS)
def test_gpu_cost_moves_and_computes_what_the_primer_counts(step):
    """With an infinite bandwidth only the FLOP are left, with infinite FLOP/s only the bytes."""
    computing = GPUCost(gpu=replace(TOY, bandwidth=math.inf), shape=SMALL, **PLAIN)
    moving = GPUCost(gpu=replace(TOY, peak_flops=math.inf), shape=SMALL, **PLAIN)
    work = work_of_step(step)
    assert computing.step_seconds(work) == pytest.approx(step_flops(SMALL, step) / TOY.peak_flops)
    rows = sum(new for new, _ in step) * SMALL.hidden_size * 2  # of the embedding: the primer counts them, we do not
    assert moving.step_seconds(work) == pytest.approx((step_bytes(SMALL, step) - rows) / TOY.bandwidth)


@given(step=STEPS, name=st.sampled_from(sorted(GPUS)), model=st.sampled_from(sorted(MODELS)))
def test_gpu_cost_lies_above_the_rooflines_bound_and_not_far(step, name, model):
    """Three kernels one after the other: never below one maximum over the sums, never above their sum."""
    cost, shape = GPUCost.of(name, model, **PLAIN), model_shape(model)
    seconds = cost.step_seconds(work_of_step(step))
    flops, moved = step_flops(shape, step) / cost.flops_rate, step_bytes(shape, step) / cost.memory_rate
    assert step_seconds(GPUS[name], shape, step) * 0.999 <= seconds <= flops + moved  # 0.1%: the embedding's rows


@settings(max_examples=300)
@given(
    work=st.builds(StepWork, *[st.integers(0, 3000)] * 4, st.integers(0, 10**9), st.integers(0, 10**6),
                   *[st.sampled_from([0, 0, 0, 5])] * 3),
    name=st.sampled_from(sorted(GPUS)), model=st.sampled_from(sorted(MODELS)), num_gpus=st.integers(1, 3),
)  # fmt: skip
def test_a_step_takes_what_its_parts_add_up_to_to_the_last_digit(work, name, model, num_gpus):
    cost = GPUCost.of(name, model, num_gpus=num_gpus)
    assert cost.step_seconds(work) == cost.explain(work).seconds


@given(work=WORKS, more=WORKS)
def test_more_work_never_takes_less(work, more):
    cost = GPUCost(gpu=TOY, shape=SMALL)
    larger = StepWork(*map(sum, zip(work, more, strict=True)))
    assert cost.step_seconds(larger) >= cost.step_seconds(work)
    for name in StepWork._fields:
        assert cost.step_seconds(work._replace(**{name: getattr(larger, name)})) >= cost.step_seconds(work)
        assert cost.explain(work).seconds == cost.step_seconds(work)


@pytest.mark.parametrize("name", sorted(GPUS))
def test_one_decode_is_bound_by_memory_and_a_long_prefill_by_arithmetic(name):
    for model in MODELS:
        cost = GPUCost.of(name, model, launch_seconds=0)
        assert cost.explain(work_of_step([(1, 500)])).bound == "memory"
        assert cost.explain(work_of_step([(4096, 0)])).bound == "compute"


def test_a_gpu_step_by_hand():
    cost = GPUCost(gpu=TOY, shape=SMALL, **PLAIN)
    # A layer: q 12x16, k and v 12x8 each, o 16x12, gate, up and down 12x20 each = 1296; two of them, 2592 weights.
    assert SMALL.num_layer_weights == 2592
    # 10 decodes of 99 + 1 tokens. linears: 51,840 FLOP = 0.052 s, 5184 bytes = 0.5184 s. K/V: 2 x 2 x 2 x 4 x 2 = 64
    # bytes a token, 64,000 bytes = 6.4 s. head: 31 x 12 x 2 = 744 bytes = 0.0744 s.
    parts = {part.name: part for part in cost.explain(work_of_step([(1, 99)] * 10)).parts}
    assert parts["linears"] == ("linears", pytest.approx(0.5184), "memory")
    assert parts["attention"] == ("attention", pytest.approx(6.4), "memory")
    assert parts["head"] == ("head", pytest.approx(0.0744), "memory")
    # 500 tokens in one chunk, no logits: 5184 FLOP a token = 2.592 s.
    chunk = {part.name: part for part in cost.explain(work_of_step([(500, 0)])._replace(num_logits=0)).parts}
    assert chunk["linears"] == ("linears", pytest.approx(2.592), "compute") and "head" not in chunk


def test_copies_and_swaps_by_hand():
    cost = GPUCost(gpu=TOY, shape=SMALL, block_size=16, **PLAIN | {"transfer_latency": 0.5})  # 1024 bytes a block
    work = StepWork(blocks_copied=3, blocks_swapped_out=2, blocks_swapped_in=4)
    assert cost.explain(work) == Breakdown((
        Part("copies", pytest.approx(2 * 3 * 1024 / 1e4), "memory"),
        Part("swap out", pytest.approx(2 * 1024 / 500 + 2 * 0.5), "pcie"),
        Part("swap in", pytest.approx(4 * 1024 / 500 + 4 * 0.5), "pcie"),
    ))  # fmt: skip
    by_layer = replace(cost, transfers_per_block=4)  # K and V of two layers: four pieces, four latencies
    assert by_layer.step_seconds(work) - cost.step_seconds(work) == pytest.approx(6 * 3 * 0.5)
    swap = StepWork(blocks_swapped_out=2)  # half the speed on two links is the same speed
    assert replace(cost, pcie_efficiency=0.5, num_gpus=2).step_seconds(swap) == cost.step_seconds(swap)
    assert replace(cost, pcie_efficiency=0.5).step_seconds(swap) == pytest.approx(2 * 1024 / 250 + 2 * 0.5)


def test_several_gpus_share_the_work_and_launches_can_be_the_limit():
    one, two = (GPUCost.of("H100", "Llama-3-70B", num_gpus=n, **PLAIN) for n in (1, 2))
    work = work_of_step([(1, 900)] * 8)
    assert one.step_seconds(work) == pytest.approx(2 * two.step_seconds(work))
    assert not one.weights_fit and two.weights_fit
    small = GPUCost.of("H100", "Qwen2.5-0.5B", launch_seconds=5e-6, kernels_per_layer=12, host_seconds=0)
    found = small.explain(work_of_step([(1, 10)]))
    assert found.bound == "launch"
    host = 2e-6
    assert found.seconds == pytest.approx(12 * 24 * 5e-6 + host)  # the kernels hide behind their launches
    assert "mostly launch" in str(found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: GPUCost.of("H900", "Qwen2.5-7B"), "no GPU 'H900' in the table: known are H200, H100"),
        (lambda: GPUCost.of("H100", "Qwen9"), "no model 'Qwen9'"),
        (lambda: GPUCost.of("H100", "Qwen2.5-7B", memory_efficiency=0), "memory_efficiency is 0"),
        (lambda: GPUCost.of("H100", "Qwen2.5-7B", pcie_efficiency=1.2), "pcie_efficiency is 1.2"),
        (lambda: GPUCost.of("H100", "Qwen2.5-7B", num_gpus=0), "num_gpus is 0"),
        (lambda: GPUCost.of("H100", "Qwen2.5-7B", launch_seconds=-1e-6), "launch_seconds is -1e-06"),
        (lambda: GPUCost(gpu=GPU(1e12, 1e12, 1), shape=SMALL).step_seconds(StepWork(blocks_swapped_in=1)),
         "pcie_bandwidth is 0"),
        (lambda: swap_seconds(5, 10, 1.0, found=6), "6 of 5 tokens found"),
        (lambda: swap_seconds(5, 10, 1.0, hidden=1.5), "hidden is 1.5"),
        (lambda: recompute_seconds(-1, SMALL, 1.0), "0 of -1 tokens"),
        (lambda: crossover_tokens(1.0, 1.0, fixed=-1), "fixed is -1"),
        (lambda: FittedCost({"steps": 1.0}), "unknown term 'steps'"),
        (lambda: FittedCost({"step": -1.0}), r"seconds_per\['step'\] is -1.0"),
        (lambda: fit([], []), "give one for each step"),
        (lambda: fit([StepWork()], [1.0, 2.0]), "1 works and 2 durations"),
        (lambda: fit([StepWork()], [0.0]), "duration is not above 0"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ---- swap or recompute


def test_swap_by_hand():
    assert transfer_seconds(3000, 1000, latency=0.5, num_transfers=2) == 4.0
    assert effective_bandwidth(1000, 1000, latency=1.0) == 500
    assert swap_seconds(10, 100, 1000.0) == 2.0  # 1000 bytes out and 1000 back
    assert swap_seconds(10, 100, 1000.0, found=5) == 1.5  # out, and half back
    assert swap_seconds(10, 100, 1000.0, latency=0.25, transfer_bytes=400) == 2.0 + 2 * 3 * 0.25  # 3 pieces each way
    assert swap_seconds(10, 100, 1000.0, latency=0.25, found=10) == 1.0 + 0.25  # nothing comes back, and costs nothing
    assert swap_seconds(10, 100, 1000.0, hidden=0.75) == 0.5
    assert swap_seconds(0, 100, 1000.0, latency=1.0) == 0


@given(tokens=st.integers(0, 300), data=st.data())
def test_recompute_is_a_prefill_behind_what_was_found(tokens, data):
    found = data.draw(st.integers(0, tokens))
    shape, new = model_shape("Qwen2.5-7B"), tokens - found
    linear = recompute_seconds(tokens, shape, 1e15, quadratic=False, found=found)
    assert linear == pytest.approx(new * flops_per_token(shape) / 1e15)
    whole = recompute_seconds(tokens, shape, 1e15, found=found, fixed=0.5)
    if new:
        head = 2 * shape.vocab_size * shape.hidden_size
        assert whole == pytest.approx((step_flops(shape, [(new, found)]) - head) / 1e15 + 0.5)
    else:
        assert whole == 0.5


@given(swap=st.floats(1e-6, 1e-4), again=st.floats(1e-6, 1e-4), pair=st.sampled_from([0, 1e-10, 1e-8]),
       fixed=st.sampled_from([0, 1e-4, 1e-2]))  # fmt: skip
def test_from_the_crossover_on_swap_wins_and_before_it_does_not(swap, again, pair, fixed):
    found = crossover_tokens(swap, again, pair, fixed)
    gain = lambda s: again * s + pair * s * (s + 1) / 2 - swap * s - fixed  # noqa: E731
    if found is None:
        assert all(gain(10**k) <= 1e-12 for k in range(9))
    else:
        assert gain(found * 1.001 + 1e-3) >= -1e-12
        if found > 1e-3:
            assert gain(found * 0.999) <= 1e-12


def test_without_fixed_costs_and_pairs_s_cancels():
    assert crossover_tokens(1e-5, 2e-5) == 0.0
    assert crossover_tokens(2e-5, 1e-5) is None


@given(model=st.sampled_from(sorted(MODELS)), rate=st.floats(1e14, 1e15), bandwidth=st.floats(1e9, 1e11))
def test_crossings_are_where_the_law_calls_it_even(model, rate, bandwidth):
    shape = MODELS[model]
    size, kv = shape.num_parameters, shape.kv_bytes_per_token()
    even = crossover_bandwidth(size, kv, rate)
    assert swap_advantage(size, kv, even, rate) == pytest.approx(1)
    heads = crossover_kv_heads(shape, bandwidth, rate)
    assert swap_advantage(size, kv * heads / shape.num_key_value_heads, bandwidth, rate) == pytest.approx(1)
    piece = crossover_transfer_bytes(even, bandwidth, 1e-5)
    if piece is None:
        assert even >= bandwidth
    else:
        assert effective_bandwidth(piece, bandwidth, 1e-5) == pytest.approx(even)


def test_scales_of_int8_are_moved_and_read_too():
    plain, int8 = (GPUCost.of("H200", "Qwen2.5-7B", kv_dtype_bytes=1, kv_scale_bytes=n) for n in (0, 4))
    assert (plain.kv_bytes_per_token, int8.kv_bytes_per_token) == (28_672, 29_568)
    work = StepWork(blocks_copied=1000)
    assert int8.step_seconds(work) / plain.step_seconds(work) == pytest.approx(132 / 128)
    with pytest.raises(ValueError, match="kv_scale_bytes is -1"):
        GPUCost.of("H200", "Qwen2.5-7B", kv_scale_bytes=-1)


# ---- fitted


TRUE = {"step": 1e-3, "num_chunks": 5e-4, "num_tokens": 3e-5, "attention_pairs": 4e-9, "kv_tokens_read": 1e-7,
        "blocks_swapped_in": 1e-4}  # fmt: skip


@settings(max_examples=20)
@given(steps=st.lists(STEPS, min_size=40, max_size=40, unique_by=tuple), swaps=st.integers(1, 5))
def test_a_fit_finds_the_cost_that_made_the_steps(steps, swaps):
    works = [work_of_step(step)._replace(blocks_swapped_in=i % 3 * swaps) for i, step in enumerate(steps)]
    cost = FittedCost(TRUE)
    found = fit(works, [cost.step_seconds(work) for work in works])
    for work in works:
        assert found.step_seconds(work) == pytest.approx(cost.step_seconds(work), rel=1e-6)


def test_a_fit_finds_the_coefficients_themselves():
    steps = [[(n, c)] * b for n, c, b in itertools.product((1, 1, 7, 50), (0, 30, 200), (1, 3, 9))]
    works = [work_of_step(s)._replace(blocks_swapped_in=i % 4, num_logits=i % 3) for i, s in enumerate(steps)]
    cost = FittedCost(TRUE | {"num_sequences": 2e-5, "num_logits": 1e-5})
    found = fit(works, [cost.step_seconds(work) for work in works])
    for term, seconds in cost.seconds_per.items():
        assert found.seconds_per[term] == pytest.approx(seconds, rel=1e-6), term
    assert "blocks_copied" not in found.seconds_per  # never seen, so nothing is said of it


@settings(max_examples=30)
@given(data=st.data())
def test_no_other_solution_without_negative_terms_is_nearer(data):
    """Also where the best plain solution has negative terms."""
    columns = [[1.0] * 9, [t for t in (1, 5, 20) for _ in range(3)], [3, 40, 400] * 3]
    columns = [[value / math.hypot(*column) for value in column] for column in columns]
    target = data.draw(st.lists(st.floats(0.1, 10), min_size=9, max_size=9))
    error = lambda x: sum((sum(map(mul, x, row)) - t) ** 2 for row, t in zip(zip(*columns), target))  # noqa: B905, E731
    found = nonnegative_least_squares(columns, target)
    assert min(found) >= 0
    for i, value in enumerate(found):
        for step in (1e-4, -1e-4, 0.1, -0.1):
            other = [*found[:i], max(0.0, value + step), *found[i + 1 :]]
            assert error(other) >= error(found) * (1 - 1e-9) - 1e-12


@pytest.mark.parametrize("seed", range(5))
def test_noise_makes_a_fit_neither_low_nor_high(seed):
    """Times scattered by 30% around the true ones: measured / modelled is 1 on average, and the sum is the true one."""
    rng, cost = random.Random(seed), FittedCost(TRUE)
    works = [work_of_step([(n, c)] * b) for n, c, b in itertools.product((1, 1, 7, 50), (0, 30, 200), (1, 3, 9))] * 25
    seconds = [cost.step_seconds(work) * rng.choice((0.7, 1.3)) for work in works]
    modelled = list(map(fit(works, seconds).step_seconds, works))
    ratios = [measured / model for measured, model in zip(seconds, modelled, strict=True)]
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=1e-4)
    assert sum(modelled) == pytest.approx(sum(map(cost.step_seconds, works)), rel=0.04)  # 900 steps: 3 deviations


def test_a_fitted_cost_says_where_its_seconds_go_and_survives_a_file(tmp_path):
    cost = FittedCost(TRUE, {"model": "tiny"})
    work = StepWork(2, 1, 10, 1, 100, 50, 3, 0, 7)
    assert cost.step_seconds(work) == pytest.approx(1e-3 + 5e-4 + 3e-4 + 4e-7 + 5e-6 + 7e-4)
    assert cost.explain(work).seconds == pytest.approx(cost.step_seconds(work))
    assert [part.name for part in cost.explain(work).parts] == list(TRUE)
    cost.save(tmp_path / "cost.json")
    assert FittedCost.load(tmp_path / "cost.json") == cost


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a cost"),
        ("[]", "is no cost"),
        ('{"seconds_per": {}}', "is no cost"),
        (json.dumps({"format": "kvlab step cost 1"}), "seconds_per"),
        (json.dumps({"format": "kvlab step cost 1", "seconds_per": []}), "make a new one"),
        (json.dumps({"format": "kvlab step cost 1", "seconds_per": {"step": "1"}}), "'1': give seconds"),
    ],
)
def test_a_file_that_holds_no_cost_is_named(tmp_path, text, message):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        FittedCost.load(path)
    assert "cost.json" in str(error.value) and "kvlab calibrate" in str(error.value)


def test_pairs_of_whole_models():
    assert flops_per_pair(model_shape("Llama-2-7B")) == 4 * 32 * 32 * 128
