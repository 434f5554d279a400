"""Static beside continuous batching: the scheduler's own steps, and where nothing is gained."""

from pathlib import Path

import pytest

from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import on_paper
from kvlab.schedule.policies import admit_static
from kvlab.schedule.request import Request
from kvlab.watch import views
from kvlab.watch.schedule import LATE, SEATS
from kvlab.watch.seats import after

SCENARIOS = ("mixed", "equal", "alone", "long_last", "late")


def events_of(scenario, seed=0, parts=None):
    return list(views.schedule().view.scenarios[scenario].play(seed, parts or Parts()))


def chosen(player):
    return player.ask()[1][player.answer()[0]]


def of_last(player, name):
    """(steps, idle cells) of one side at the end."""
    side = player.states[-1].sides[name]
    return side.num_steps, side.num_cells(SEATS) - side.busy


@pytest.mark.parametrize("seed", range(6))
def test_mixed_lengths_gain_a_third_and_no_seat_is_idle_while_somebody_waits(seed):
    player = views.schedule("mixed", seed=seed)
    assert of_last(player, "static") == (18, 38)
    steps, idle = of_last(player, "continuous")
    assert 10 <= steps <= 12 and idle == 4 * steps - 34 and chosen(player) == "10 to 12"
    static, other = (player.states[-1].sides[name] for name in ("static", "continuous"))
    assert other.num_idle_wanted(SEATS) == 0 < static.num_idle_wanted(SEATS)


@pytest.mark.parametrize(
    ("scenario", "static"),
    [("equal", [(8, 0), (10, 0), (12, 0)]), ("alone", [(10, 24)] * 3), ("long_last", [(13, 25)] * 3)],
)
@pytest.mark.parametrize("seed", range(3))
def test_equal_lengths_an_empty_queue_or_the_longest_last_and_nothing_is_gained(scenario, static, seed):
    player = views.schedule(scenario, seed=seed)
    assert of_last(player, "static") == of_last(player, "continuous") == static[seed]
    assert chosen(player) == "none" and "None" in player.answer()[1]


@pytest.mark.parametrize("seed", range(3))
def test_where_the_longest_is_last_some_are_ready_earlier_and_nobody_later(seed):
    static, other = (views.schedule("long_last", seed=seed).states[-1].sides[name] for name in ("static", "continuous"))
    sooner = [static.last_step(name) - other.last_step(name) for name in "ABCDEFGH"]
    assert min(sooner) == 0 < max(sooner)


@pytest.mark.parametrize("seed", range(4))
def test_equal_lengths_that_come_one_after_another_do_gain(seed):
    player = views.schedule("late", seed=seed)
    static, other = (player.states[LATE].sides[name] for name in ("static", "continuous"))
    assert (static.first_step("B"), other.first_step("B")) == (5, 2) and chosen(player) == "static 5, continuous 2"
    assert of_last(player, "continuous")[0] <= of_last(player, "static")[0]
    assert player.states[1].sides["static"].waiting == ["B"] and static.wanted[1:4] == (True, True, True)


@pytest.mark.parametrize("scenario", ["mixed", "equal", "alone", "long_last"])
@pytest.mark.parametrize("seed", range(3))
def test_the_seats_are_those_of_the_schedules_on_paper(scenario, seed):
    state = views.schedule(scenario, seed=seed).states[-1]
    lengths = [number for _, number in state.lengths]
    for name, plan in (("static", on_paper.static_schedule), ("continuous", on_paper.continuous_schedule)):
        side, turns = state.sides[name], plan(lengths, SEATS)
        assert side.num_steps == on_paper.num_steps(turns)
        assert side.num_cells(SEATS) - side.busy == on_paper.num_idle(turns, SEATS)
        for (one, length), (seat, start, end) in zip(state.lengths, turns, strict=True):
            assert (side.first_step(one), side.last_step(one)) == (start + 1, end)
            letters = "".join(letter for column in side.columns for who, letter in column if who == one)
            assert letters == "p" + "d" * (length - 1)
            if name == "static":  # on paper a freed seat is chosen otherwise
                assert side.columns[start][seat][0] == one


def test_pure_and_the_same_from_a_saved_trace(tmp_path):
    recorder = Recorder()
    for event in events_of("mixed", seed=1):
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "run.jsonl")
    player = views.schedule(trace=tmp_path / "run.jsonl")
    assert player.frames == views.schedule("mixed", seed=1).frames
    before, events = player.states[6], [event for event in recorder.events() if event.step == 7]
    assert after(before, events) == after(before, events) == player.states[7] and before.num_steps == 6


def test_what_is_said_names_who_comes_and_who_goes():
    player = views.schedule("mixed")
    assert player.frames[3].say == ("Step 3. Static: D ends, 1 seat is idle, for nobody enters a batch that has begun. "
                                    "Continuous: E enters, D ends.")  # fmt: skip
    assert "18 steps, all done" in player.svg(18) and "11 steps, all done" in player.svg(11)
    assert "seat 3: C C E E H H idle" in player.frames[-1].alt


# ---- a student's parts


def test_a_students_admit_is_the_lower_run():
    player = views.schedule("mixed", parts=Parts(admit=admit_static))
    assert of_last(player, "continuous") == of_last(player, "static") == (18, 38)
    assert chosen(player).startswith("18") and "cells are idle while some wait" in player.answer()[1]
    timid = views.schedule("mixed", parts=Parts(admit=lambda running, seats, forming: running < 1))
    assert of_last(timid, "static") == (18, 38) and of_last(timid, "continuous") == (34, 3 * 34)


def test_a_part_that_fails_or_never_lets_anybody_in_has_a_last_frame():
    broken = views.schedule("mixed", parts=Parts(admit=lambda *args: 1 / 0))
    assert any("admit" in frame.say for frame in broken.frames)
    never = views.schedule("mixed", parts=Parts(admit=lambda *args: False))
    assert any("The run ends here: stuck" in frame.say for frame in never.frames)
    assert len(never.frames[-1].say) <= 140


# ---- engines


def test_a_live_engine_has_one_chart_with_its_own_seats():
    recorder = Recorder()
    config = EngineConfig(num_gpu_blocks_override=40, block_size=4, max_num_seqs=3)
    engine = Parts().make_engine(config, recorder=recorder)
    for number in range(5):
        engine.add_request(Request(f"r{number}", [number] * 5, SamplingParams(max_tokens=12 * number + 3)))
    while engine.has_unfinished_requests():
        engine.step()
    player = views.schedule(trace=recorder)
    [side] = player.states[-1].sides.values()
    assert player.states[-1].seats == 3 and max(map(len, side.columns)) == 3 and side.is_done
    assert side.num_steps == engine.scheduler.stats.num_steps > 20
    assert player.frames[1].say == "Step 1: r0, r1 and r2 enter; 2 wait." and "static" not in player.frames[-1].alt
    assert f">{side.num_steps}<" in player.svg(side.num_steps)


def test_a_model_with_many_seats_and_several_answers_to_one_prompt():
    pytest.importorskip("torch")
    from kvlab import LLM

    recorder = Recorder()
    llm = LLM("tiny", num_gpu_blocks_override=60, block_size=4, max_model_len=64, recorder=recorder)
    params = SamplingParams(n=3, max_tokens=6, ignore_eos=True, seed=1)
    llm.generate([[1, 2, 3, 4, 5 + i] for i in range(4)], params)
    player = views.schedule(trace=recorder)
    end = player.states[-1]
    assert end.num_rows == 8 and end.seats > 8 and end.sides[""].is_done
    assert max(map(len, end.sides[""].columns)) == 12
    with pytest.raises(ValueError, match="recorder=recorder"):
        views.schedule(trace=[event for event in recorder.events() if event.kind != "compute"])


def test_the_figures_of_the_page_on_demonstrations_are_those_of_the_views():
    page = " ".join((Path(__file__).parents[2] / "docs" / "demos.md").read_text(encoding="utf-8").split())
    ends = {scenario: views.schedule(scenario) for scenario in SCENARIOS}
    (static, idle), (other, less) = (of_last(ends["mixed"], name) for name in ("static", "continuous"))
    late = ends["late"].states[-1].sides
    for said in (
        f"Static batching takes {static} steps. And",
        f"{other}. Static leaves {idle} of {static * SEATS} cells idle, 53%, most of them with a dot;",
        f"continuous {less} of {other * SEATS}, and",
        f"eight answers of 4 tokens: {of_last(ends['equal'], 'continuous')[0]} steps in both",
        f"{of_last(ends['alone'], 'continuous')[0]} steps in both, and {of_last(ends['alone'], 'static')[1]} of 40",
        f"still {of_last(ends['long_last'], 'continuous')[0]} steps in both",
        f"in step {late['continuous'].first_step('B')}, not {late['static'].first_step('B')}",
    ):
        assert said in page
    side = ends["mixed"].states[-1].sides["static"]
    assert 2 * side.num_idle_wanted(SEATS) > idle and round(100 * idle / (static * SEATS)) == 53
