"""kvlab.lab.draw.memory: what the figures of the labs show is what they were given."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from kvlab.arena import ContiguousArena, Job, Span, run_contiguous  # noqa: E402
from kvlab.lab import show  # noqa: E402
from kvlab.lab.draw import memory as draw  # noqa: E402


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def widths(ax, hatch, filled=True):
    """Columns covered by rectangles with that hatch."""
    return sum(p.get_width() for p in ax.patches if p.get_hatch() == hatch and p.get_fill() == filled)


def test_a_span_is_cut_at_the_ends_of_rows():
    assert draw._cut(6, 19, per_row=8) == [(0, 6, 2), (1, 0, 8), (2, 0, 3)]
    assert draw._cut(8, 8, per_row=8) == []


def test_memory_shows_each_slot_as_what_it_is(ax):
    draw.memory(ax, [Span(0, 10, "A", 3, 7), Span(12, 8, "B", 8, 8)], capacity=24, per_row=8)
    free_rows = 24
    assert widths(ax, "...") == 4 and widths(ax, "//") == 3
    assert widths(ax, None) == free_rows + 3 + 8
    assert [text.get_text() for text in ax.texts] == ["A", "B"]
    assert len({to_hex(p.get_facecolor()) for p in ax.patches if p.get_fill() and p.get_hatch() is None}) == 3


def test_bars_add_up_and_bands_reach_the_top(ax):
    moments = run_contiguous(ContiguousArena(20), [Job(f"r{i}", 0, 6) for i in range(4)], lambda job: 8)
    shares = {kind: getattr(moments[0].waste, kind) / 20 for kind in draw.KINDS}
    draw.waste_bars(ax, {"now": shares})
    assert sum(p.get_width() for p in ax.patches) == pytest.approx(100)
    draw.waste_areas(ax, moments)
    assert max(path.vertices[:, 1].max() for c in ax.collections for path in c.get_paths()) == pytest.approx(100)


def test_small_parts_of_a_bar_are_labelled_outside_it(ax):
    shares = dict(zip(draw.KINDS, (0.66, 0.04, 0.004, 0.02, 0.276), strict=True))
    draw.waste_bars(ax, {"now": shares})
    inside, above, below, last = ax.texts
    assert inside.get_text() == "holds a token\n66%"
    assert above.get_text() == "reservation 4%" and below.get_text() == "external 2%"
    assert last.get_text() == "free\n28%" and last.get_position()[1] == inside.get_position()[1] == 0
    assert above.get_position()[1] < -0.25 and below.get_position()[1] > 0.25


def test_a_letter_over_dots_has_a_white_ground(ax):
    draw.memory(ax, [Span(0, 8, "A", 8, 8), Span(8, 8, "B", 1, 8), Span(16, 64, "C", 60, 64), Span(80, 48, "D", 0, 9)],
                capacity=256, per_row=128)  # fmt: skip
    assert [text.get_bbox_patch() is not None for text in ax.texts] == [False, True, False, True]


def test_a_ledger_says_what_holds(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "table", lambda heads, rows: shown.extend(rows))
    same, other = ("a", "a", True), ("a", "b", False)
    rows = [("1", *same, ""), ("2", *same, "c"), ("3", *other, ""), ("4", *other, "c")]
    show.ledger(("w", "s", "f", "v", "c"), ("yes", "if", "no"), rows)
    assert [row[3] for row in shown] == ["yes", "if", "no", "no"] and shown[1][4] == "c"


def test_a_table_without_html_keeps_its_columns(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    show.table(("what", "found"), [("a < b", 1), ("longer", "x")])
    assert shown[0]["text/plain"].splitlines() == ["what    found", "a < b   1", "longer  x"]
    assert "a &lt; b" in shown[0]["text/html"]
