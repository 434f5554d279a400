"""Steps under a budget, drawn: boxes, heights, gaps and areas say what was scheduled."""

from typing import NamedTuple

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab.draw import steps as draw  # noqa: E402


class Step(NamedTuple):
    start: float
    end: float
    tokens: dict
    sampled: list


STEPS = [
    Step(0, 10, {"a": 1}, ["a"]),
    Step(10, 40, {"a": 1, "new": 6}, ["a", "new"]),
    Step(40, 52, {"a": 1, "new": 1}, ["a"]),
]


@pytest.fixture
def ax():
    figure, ax = pyplot.subplots()
    yield ax
    pyplot.close(figure)


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_a_box_for_each_share_of_a_step_and_for_each_step_without_one(ax):
    rows, came = [[1, 0], [0, 4], [1, 0]], [[0, 2], [1]]
    draw.grid(ax, rows, came, [(0, 1, 2), (1, 4, 1)], budget=4)
    assert len(ax.patches) == 4, "A in three steps, one of them without a token; B in one"
    assert {"1", "4", "0", "of 4"} <= set(texts(ax))
    bold = [text.get_text() for text in ax.texts if text.get_fontweight() == "bold"]
    assert bold == ["4"], "only step 1 uses the budget up"
    assert len(ax.lines) == 3, "a dot for each token that came"
    hatched = [box for box in ax.patches if box.get_hatch()]
    assert len(hatched) == 2, "the two prompts; a decode is solid"


def test_bars_are_as_wide_as_the_time_and_as_high_as_the_tokens(ax):
    draw.bars(ax, STEPS, "new", origin=10, budget=8)
    boxes = [(box.get_x(), box.get_width(), box.get_y(), box.get_height()) for box in ax.patches]
    assert boxes == [(-10, 10, 0, 1), (0, 30, 0, 1), (0, 30, 1, 6), (30, 12, 0, 1), (30, 12, 1, 1)]
    assert [bool(box.get_hatch()) for box in ax.patches] == [False, False, True, False, False]
    assert ax.lines[0].get_ydata()[0] == 8


def test_lanes_mark_the_longest_gap_and_the_wait_for_the_first_token(ax):
    draw.lanes(ax, STEPS, ["a", "new"], origin=15, newcomer="new")
    assert texts(ax) == ["30 ms", "25 ms"], "a's second token came 30 ms after its first; new's 25 ms after 15"


def test_a_gap_after_the_newcomer_has_its_first_token_is_not_marked(ax):
    draw.lanes(ax, [*STEPS, Step(52, 152, {"a": 1}, ["a"])], ["a", "new"], origin=15, newcomer="new")
    assert texts(ax) == ["30 ms", "25 ms"]


def test_slices_of_the_triangle_add_up_to_it(ax):
    draw.triangle(ax, [4, 2, 2], marks=["x", "y", "z"])
    areas = []
    for patch in ax.patches:
        points = patch.get_xy()
        pairs = zip(points, points[1:], strict=False)
        areas.append(abs(sum(x1 * y2 - x2 * y1 for (x1, y1), (x2, y2) in pairs)) / 2)
    assert areas == [8, 10, 14] and texts(ax) == ["x", "y", "z"]
    assert [max(line.get_xdata()) for line in ax.lines] == [4, 6, 8], "the lower edges: what each chunk reads"


def test_a_trade_curve_tells_its_budgets(ax):
    draw.trade(ax, {"ours": {64: (10, 900), 1024: (80, 200)}, "theirs": {128: (500, 200)}})
    draw.plain_ticks(ax, (10, 100), (200, 1000))
    assert texts(ax) == ["64", "1,024"] and [line.get_label() for line in ax.lines] == ["ours", "theirs: 128"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["200", "1,000"]
