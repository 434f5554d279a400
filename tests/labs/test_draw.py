"""What labs draw: every box with its text, every state with its pattern."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from kvlab.lab.draw import boxes as draw  # noqa: E402


@pytest.fixture(autouse=True)
def clean():
    plt.close("all")
    yield
    plt.close("all")


def test_rows_of_boxes(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    draw.box_rows([("one", [("a", "hit"), None, ("b", "new")]), ("two", [("c", "dead")])], "title", notes=["", "note"])
    ax = plt.gcf().axes[0]
    assert len(ax.patches) == 3
    assert [text.get_text() for text in ax.texts] == ["one", "a", "b", "two", "c", "note"]
    a, b, c = ax.patches
    assert b.get_x() > a.get_x() + a.get_width() and c.get_y() > a.get_y()


def test_rows_of_boxes_in_words(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    draw.box_rows([("one", [("a", "hit")])], alt='a row with "a" in it')
    (data,) = shown
    assert data["text/plain"] == 'a row with "a" in it' and 'alt="a row with &quot;a&quot; in it"' in data["text/html"]
    assert not plt.get_fignums()


def test_a_pool_at_one_moment():
    _, ax = plt.subplots()
    draw.pool_grid(ax, "oce", columns=2)
    assert [patch.get_xy() for patch in ax.patches] == [(0, 0), (1, 0), (0, 1)]
    assert len({(patch.get_facecolor(), patch.get_hatch()) for patch in ax.patches}) == 3


def test_a_pool_over_time():
    _, ax = plt.subplots()
    draw.pool_areas(ax, ["eeee", "ocee", "oocc"])
    assert ax.get_ylim() == (0, 4) and ax.get_xlim() == (0, 2)
    tops = [max(area.get_paths()[0].vertices[:, 1]) for area in ax.collections]
    assert tops == [2, 2, 4, 4]
