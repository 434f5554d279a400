"""Preemption drawn: points and labels say what was given."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab.draw import pressure as draw  # noqa: E402


@pytest.fixture
def ax():
    figure, ax = pyplot.subplots()
    yield ax
    pyplot.close(figure)


def texts(ax):
    return [text.get_text() for text in ax.texts]


def markers(ax, marker):
    return [line for line in ax.lines if line.get_marker() == marker]


def test_a_model_above_the_border_is_a_dot_and_one_below_a_square(ax):
    draw.regions(ax, {"up": (64 * 1024, 8e9), "down": (1024 * 1024, 1e9)}, 32e9, 500e12, "in pieces")
    assert [list(line.get_ydata()) for line in markers(ax, "o")] == [[8e9]]
    assert [list(line.get_ydata()) for line in markers(ax, "s")] == [[1e9]]
    assert {"up", "down", "swap wins", "recompute wins"} <= set(texts(ax))
    assert ax.get_title(loc="left") == "effective link 32 GB/s each way, 500 TFLOP/s reached\nin pieces"
    (border,) = [line for line in ax.lines if line.get_marker() == "None"]
    for kv, parameters in zip(border.get_xdata()[1:], border.get_ydata()[1:], strict=True):
        assert 32e9 * parameters == pytest.approx(kv * 500e12) or parameters in (0.25e9, 200e9)


@pytest.mark.parametrize("bandwidth", [1e6, 1e15])
def test_one_region_may_fill_the_map(ax, bandwidth):
    draw.regions(ax, {"m": (64 * 1024, 8e9)}, bandwidth, 500e12)
    assert len({"swap wins", "recompute wins"} & set(texts(ax))) == 1


def test_bills_are_the_callers_and_the_crossing_is_marked(ax):
    draw.bills(ax, lambda n: (1.0, 0.001 * n), [10, 100, 1000, 10_000], 1000.0, "a model")
    assert list(ax.lines[0].get_ydata()) == [1000] * 4
    assert list(ax.lines[1].get_ydata()) == pytest.approx([10, 100, 1000, 10_000])
    assert set(texts(ax)) == {"swap", "recompute", "1,000"}


@pytest.mark.parametrize("crossing", [None, 0.0, 1e9])
def test_no_crossing_no_mark(ax, crossing):
    draw.bills(ax, lambda n: (1.0, 2.0), [10, 100], crossing)
    assert set(texts(ax)) == {"swap", "recompute"} and len(ax.lines) == 2


def test_a_mark_for_each_time_that_the_job_is_thrown_out(ax):
    draw.pool(ax, [0, 1, 2, 3], {"job": [2, 0, 2, 0], "c": [1, 3, 1, 3]}, "job", "d!d!", 4)
    (marks,) = markers(ax, "v")
    assert list(marks.get_xdata()) == [1, 3]


def test_lanes_have_a_box_for_each_stretch_and_a_legend_of_what_is_there(ax):
    draw.lanes(ax, {"A": "ppdd ", "B": "w!xr"}, "title")
    assert len(ax.patches) == 2 + 3  # A: p, d; B: w, x, r
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told == ["decodes", "computes its prompt", "computes again", "waits", "waits, K/V dropped"]
    assert [len(line.get_xdata()) for line in markers(ax, "v")] == [0, 1]


def test_bars_show_each_number():
    figure, axes = pyplot.subplots(1, 2)
    draw.bars(axes, {"one": {"a": 1, "b": 2000}, "two": {"a": 0, "b": 5}}, {"a": "first", "b": "second"})
    assert [texts(ax) for ax in axes] == [["1", "0"], ["2,000", "5"]]
    assert [ax.get_title(loc="left") for ax in axes] == ["first", "second"]
    pyplot.close(figure)


def test_bars_that_read_the_same_look_the_same():
    figure, ax = pyplot.subplots()
    draw.bars([ax], {"one": {"a": 97.7}, "two": {"a": 119.0}, "three": {"a": 98.3}}, {"a": "seconds"})
    one, two, three = (bar.get_facecolor() for bar in ax.patches)
    assert one == three != two
    pyplot.close(figure)
