"""The memory strip: its surprises with the arena's numbers, and that it counts each slot once."""

import pytest

from kvlab.arena import Job, PagedArena, run_paged
from kvlab.events import Recorder
from kvlab.watch import views
from kvlab.watch.strip import VIEW, after


@pytest.mark.parametrize("seed", range(6))
def test_longest_twice_as_many_run_in_pages(seed):
    player = views.strip("longest", seed=seed)
    regions, pages = player.states[1].sides
    assert (regions.running, pages.running) == (3, 6)
    assert sum(regions.wastes) == 36 and pages.wastes == (0, 0, 0)
    right, why = player.answer()
    assert player.ask()[1][right] == "6" and why.startswith("6 in pages, 3 in regions")


@pytest.mark.parametrize("seed", range(6))
def test_exact_more_is_free_than_asked_for_and_it_waits(seed):
    player = views.strip("exact", seed=seed)
    regions, pages = player.states[player.question.reveal].sides
    assert regions.blocked and regions.wastes[2] == 24 > player.states[0].jobs["E"][2] == 20
    assert all(side.wastes[1] == 0 for side, _ in (state.sides for state in player.states))
    assert "E" in {span[0] for span in pages.spans}
    right, why = player.answer()
    assert player.ask()[1][right] == "no, it waits" and "24 slots" in why and "in pages E runs" in why


@pytest.mark.parametrize("scenario", ["longest", "exact"])
def test_each_slot_is_counted_once_and_pages_have_no_external_waste(scenario):
    for state in views.strip(scenario, seed=2).states:
        for side in state.sides:
            assert side.used + sum(side.wastes) + side.placeable == state.slots
            assert side.used == sum(used for *_, used, _ in side.spans)
        assert state.sides[1].wastes[2] == 0 and sum(state.sides[1].wastes) <= 3 * state.sides[1].running


def test_the_lower_row_is_the_run_of_the_paged_arena():
    player = views.strip("exact")
    jobs = [Job(name, prompt, final) for name, (prompt, final, _) in player.states[0].jobs.items()]
    for now, state in zip(run_paged(PagedArena(12, 4), jobs, with_spans=True), player.states[1:], strict=False):
        assert list(map(tuple, now.spans)) == [
            (start, size, name, used, final) for name, start, size, used, final in state.sides[1].spans
        ]


def test_a_step_changes_nothing_but_makes_the_next_state():
    player = views.strip("exact")
    events = [event for event in VIEW.scenarios["exact"].play(0, None) if event.step == 5]
    before = player.states[4]
    copy = repr(before)
    assert after(before, events) == after(before, events) == player.states[5] and repr(before) == copy


def test_a_saved_trace_is_the_same_view_and_another_trace_is_refused_with_the_remedy(tmp_path):
    recorder = Recorder()
    for event in VIEW.scenarios["longest"].play(1, None):
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "run.jsonl")
    assert views.strip(trace=tmp_path / "run.jsonl").frames == views.strip("longest", seed=1).frames
    other = Recorder()
    other.emit("alloc", None, [1])
    with pytest.raises(ValueError, match="two runs of kvlab.arena"):
        views.strip(trace=other)
