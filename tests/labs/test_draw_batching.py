"""Seats, states and queues drawn: what is busy, what is idle, what has happened so far, and no more than that."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab.draw.batching import HUES, letter, over_time, seat_chart, state_machine  # noqa: E402
from kvlab.schedule.on_paper import continuous_schedule, static_schedule  # noqa: E402

LENGTHS = [3, 1, 2]


@pytest.fixture
def ax():
    figure, axes = pyplot.subplots()
    yield axes
    pyplot.close(figure)


def boxes(ax, hatched):
    """(seat, start, end) of the idle rows, or of the requests."""
    found = []
    for patch in ax.patches:
        if (patch.get_hatch() is not None) == hatched:
            found.append((round(patch.get_y() - 0.1), patch.get_x(), patch.get_x() + patch.get_width()))
    return found


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_a_box_for_each_request_over_the_idle_time_of_each_seat(ax):
    seat_chart(ax, static_schedule(LENGTHS, 2), 2)
    assert boxes(ax, hatched=False) == static_schedule(LENGTHS, 2)
    assert boxes(ax, hatched=True) == [(0, 0, 5), (1, 0, 5)]
    assert texts(ax) == ["A", "B", "C"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["seat 0", "seat 1"]


def test_before_a_step_nothing_of_what_comes_later_is_told(ax):
    turns = continuous_schedule(LENGTHS, 2)
    seat_chart(ax, turns, 2, step=1, width=9, show_waiting=True)
    assert boxes(ax, hatched=False) == [(0, 0, 1), (1, 0, 1)]
    assert texts(ax) == ["A", "B", "waiting:\nC"] and ax.get_xlim()[1] > 9


def test_at_the_beginning_all_wait_and_at_the_end_nobody(ax):
    turns = continuous_schedule(LENGTHS, 2)
    seat_chart(ax, turns, 2, step=0, show_waiting=True)
    assert boxes(ax, hatched=False) == [] and texts(ax) == ["waiting:\nA B C"]
    ax.clear()
    seat_chart(ax, turns, 2, step=99, show_waiting=True)
    assert len(boxes(ax, hatched=False)) == 3 and texts(ax)[-1] == "waiting:\nnobody"


def test_an_empty_schedule_is_an_empty_chart(ax):
    seat_chart(ax, [], 2, width=4)
    assert not ax.patches and not texts(ax)


def test_neighbours_in_the_queue_have_different_hues_and_all_a_letter():
    assert len(set(HUES)) == len(HUES) == 7
    assert [letter(i) for i in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]


def test_the_states_and_only_what_happened(ax):
    state_machine(ax, {("waiting", "schedule", "running"): 3, ("waiting", "abort", "abort"): 1,
                       ("running", "abort", "abort"): 2, ("running", "stop", "stop"): 1})  # fmt: skip
    told = texts(ax)
    assert {"waiting", "running", "preempted", "swapped", "stop", "length", "abort", "error"} <= set(told)
    assert {"schedule 3", "abort 3", "stop 1"} <= set(told) and not any(text.startswith("swap ") for text in told)


def test_who_runs_and_who_waits_over_seconds(ax):
    columns = {"start_ns": [0, 10**9], "duration_ns": [10**9, 10**9], "num_running": [2, 1], "num_waiting": [5, 0]}
    over_time(ax, columns, title="x", top=6)
    (line,) = ax.lines
    assert list(line.get_xdata()) == [0, 1, 2] and list(line.get_ydata()) == [5, 0, 0]
    assert ax.get_ylim() == (0, 6) and [label for label in ax.get_legend_handles_labels()[1]] == ["running", "waiting"]
