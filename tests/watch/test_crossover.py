"""Swap or recompute: where the two cross, by kvlab.costs and by an oracle of its own; one constant a frame."""

from pathlib import Path

import pytest

from kvlab.costs import GPUCost, work_of_step
from kvlab.costs.preemption import crossover_bandwidth, recompute_seconds, swap_seconds
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.primer import GPU, GPUS
from kvlab.sizing import model_shape
from kvlab.watch import views
from kvlab.watch.bills import LENGTHS, MEMORY_RATE, Bills, after, borders, where
from kvlab.watch.view import states_of

SCENARIOS = ("length", "link", "pieces", "heads", "found")


def recompute_is_cheaper(tokens: int, bandwidth: float) -> bool:
    """By hand, from the textbook's two bills, with attention's pairs and the reading of the weights."""
    shape = model_shape("Llama-3-8B")
    swap = 2 * tokens * shape.kv_bytes_per_token() / bandwidth + 20e-6
    pairs = 4 * 32 * 32 * 128 * tokens * (tokens + 1) / 2
    return max((2 * shape.num_layer_weights * tokens + pairs) / 500e12,
               2 * shape.num_layer_weights / (0.8 * GPUS["H100"].bandwidth)) < swap  # fmt: skip


@pytest.mark.parametrize("bandwidth", [32e9, 16e9, 8e9, 4e9])
def test_the_borders_are_where_the_bills_cross(bandwidth):
    bills = Bills(bandwidth=bandwidth)
    cheaper = [recompute_is_cheaper(tokens, bandwidth) for tokens in range(LENGTHS[0], LENGTHS[1] + 1, 7)]
    assert len(borders(bills)) == sum(a != b for a, b in zip(cheaper, cheaper[1:], strict=False))
    for border in borders(bills):
        assert recompute_is_cheaper(border - 1, bandwidth) != recompute_is_cheaper(border, bandwidth)
        assert f"{border:,}" in where(bills)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("scenario", "right", "crossings"),
    [
        ("length", "none of them", [(), (), (), (), (30_871,)]),
        ("link", "those in the middle", [(), (), (159, 9256), (80,), ()]),
        ("pieces", "recompute", [(), (), (185, 523), (), ()]),
        ("heads", "both cost the same", [(), (177, 3120), (), ()]),
        ("found", "recompute", [(), (1151, 17_211), (), (1206, 56_821)]),
    ],
)
def test_the_surprise(scenario, right, crossings, seed):
    player = views.crossover(scenario, seed=seed)
    assert player.ask()[1][player.answer()[0]] == right
    assert [borders(bills) for bills in player.states] == crossings
    assert player.states[0].tokens in (2000, 4000, 8000)


def test_the_picture_has_the_prices_of_the_engine():
    now = views.crossover("pieces", seed=0).states[1]
    shape = model_shape("Llama-3-8B")
    swap = swap_seconds(now.tokens, shape.kv_bytes_per_token(), 32e9, latency=10e-6, transfer_bytes=32 * 1024)
    assert now.seconds(now.tokens) == (swap, recompute_seconds(now.tokens, shape, 500e12))
    svg = views.crossover("pieces", seed=0).svg(1)
    assert f">{1e3 * swap:.3g} ms<" in svg and ">32 KiB each, +10 µs<" in svg and ">500 TFLOP/s reached<" in svg


def test_without_floor_and_pairs_the_border_is_the_law_of_the_textbook():
    """L33 5.4: bandwidth x W = KV x FLOP/s, here with the weights of the layers; pairs move it little at 2,000."""
    shape = model_shape("Llama-3-8B")
    law = crossover_bandwidth(shape.num_layer_weights, shape.kv_bytes_per_token(), 500e12)
    assert Bills(bandwidth=1.05 * law).ratio(2000) > 1 > Bills(bandwidth=0.9 * law).ratio(2000)


def test_beside_decodes_it_is_what_the_simulator_prices():
    """As lab 09 does after its exercise 5; its H100 has other efficiencies."""
    cost = GPUCost(gpu=GPU(500e12, MEMORY_RATE, 80e9), shape=model_shape("Llama-3-8B"), compute_efficiency=1,
                   memory_efficiency=1, launch_seconds=0)  # fmt: skip
    others = [(1, 500)] * 64
    longer = sum(
        cost.step_seconds(work_of_step([*others, (125, done)])) - cost.step_seconds(work_of_step(others))
        for done in range(0, 1000, 125)
    )
    _, beside = Bills(decodes=64).seconds(1000)
    assert beside == pytest.approx(longer, rel=0.1) and beside < Bills().seconds(1000)[0] / 5  # no row of logits


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_frame_changes_one_constant_and_says_which(scenario):
    player = views.crossover(scenario)
    for old, now in zip(player.states, player.states[1:], strict=False):
        fields = ("model", "kv_heads", "bandwidth", "block_size", "flops_rate", "found", "decodes", "tokens", "curve")
        assert [name for name in fields if getattr(old, name) != getattr(now, name)] == [now.changed]
        assert now.before.ratio() == old.ratio()


def test_before_the_question_of_lengths_only_one_victim_is_drawn():
    player = views.crossover("length")
    assert "every length" not in player.frames[0].alt + player.frames[0].say
    assert ">recompute<" in player.svg(0) and player.svg(1).count(">swap<") == player.svg(0).count(">swap<") + 1


def test_pure_and_the_same_from_a_saved_trace(tmp_path):
    recorder = Recorder()
    for event in views.crossover("link").view.scenarios["link"].play(3, Parts()):
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "prices.jsonl")
    player = views.crossover(trace=tmp_path / "prices.jsonl")
    assert player.frames == views.crossover("link", seed=3).frames
    events = recorder.events()
    state = states_of(player.view, events)[0]
    assert after(state, events[-1:]) == after(state, events[-1:]) and state == player.states[0]


def short_ones_only(request, num_blocks, num_free_cpu_blocks):
    return "swap" if request.num_computed_tokens < 1000 else "recompute"


def test_a_policy_is_drawn_below_the_lengths():
    player = views.crossover("link", parts=Parts(swap_or_recompute=short_ones_only))
    assert player.states[-1].policy == ("swap",) * 6 + ("recompute",) * 10
    assert player.svg(1).count(">S<") == 6 and ">policy<" not in views.crossover("link").svg(1)


def test_a_policy_that_fails_says_so():
    player = views.crossover("link", parts=Parts(swap_or_recompute=lambda *args: None))
    assert "swap_or_recompute" in player.frames[0].say


def test_a_run_of_an_engine_has_no_prices():
    with pytest.raises(ValueError, match="constant.*prices and no run"):
        views.crossover(trace=Recorder().events() or [*views.pool().view.scenarios["tight"].play(0, Parts())])


def test_the_figures_of_the_page_on_demonstrations_are_those_of_the_view():
    page = " ".join((Path(__file__).parents[2] / "docs" / "demos.md").read_text(encoding="utf-8").split())
    runs = {name: views.crossover(name) for name in SCENARIOS}
    pieces, link = runs["pieces"].states, runs["link"].states
    for said in (
        "{:.0f} ms against {:.0f} ms for 4,000".format(*(1e3 * seconds for seconds in Bills().seconds(4000))),
        f"the weights are read ({1e3 * Bills().floor:.1f} ms)",
        f"cheaper up to {borders(runs['length'].states[-1])[0]:,} tokens",
        "from {} to {:,} tokens".format(*borders(link[2])),
        f"at 4 GB/s from {borders(link[3])[0]} on",
        f"32 GB/s become {pieces[1].reached / 1e9:.1f}",
        f"tokens {pieces[2].reached / 1e9:.1f}, with 256 tokens {pieces[3].reached / 1e9:.1f} GB/s",
        runs["found"].answer()[1].split(":")[0].replace("Recomputing", "recomputing"),
    ):
        assert said in page
