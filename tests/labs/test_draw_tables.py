"""Block tables drawn: as many boxes as blocks, and sliders that redraw."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab.draw.tables import draw_tables  # noqa: E402
from kvlab.lab.show import picture, player, sliders  # noqa: E402


def boxes(tables):
    figure, ax = pyplot.subplots()
    draw_tables(ax, tables, {name: [] for name in tables}, 4)
    pyplot.close(figure)
    return len(ax.patches), [text.get_text() for text in ax.texts]


@pytest.mark.parametrize(
    "tables",
    [
        {"A": [1, 2, 3]},
        {"A": [1, 2, 3], "B": [1, 2, 3]},
        {"A": [1, 2, 4], "B": [1, 2, 3], "C": [1, 2, 4]},  # sharers are brought next to each other
        {"A": [1], "B": [1, 5], "C": [1], "D": [2, 6]},
        {"A": [], "B": [7]},
    ],
)
def test_as_many_boxes_as_blocks(tables):
    num_boxes, texts = boxes(tables)
    assert num_boxes == len({block for table in tables.values() for block in table})
    assert set(tables) <= set(texts)


def test_a_shared_box_says_how_many_share_it():
    assert "block 1  ×3" in boxes({"A": [1, 2], "B": [1], "C": [1, 3]})[1]


class Shown(list):
    """Stands for IPython's display; update() is told as well."""

    def __call__(self, bundle, raw, display_id=None):
        self.append(bundle)
        return self

    def update(self, bundle, raw):
        self[-1] = bundle


def test_a_slider_redraws_and_a_saved_page_has_the_picture(monkeypatch):
    widgets = pytest.importorskip("ipywidgets")
    shown, drawn, made = Shown(), [], []

    class Slider(widgets.IntSlider):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(widgets, "IntSlider", Slider)
    monkeypatch.setattr("IPython.display.display", shown)

    def draw(step):
        drawn.append(step)
        return pyplot.figure(figsize=(step, 1))

    sliders(draw, alt="a <row>", step=(1, 5, 2))
    bars, first = shown
    assert "application/vnd.jupyter.widget-view+json" in bars
    assert "application/vnd.jupyter.widget-view+json" not in first, "a page without widgets would drop the picture"
    assert first["text/html"].startswith('<img alt="a &lt;row&gt;"')
    made[0].value = 4
    assert drawn == [2, 4] and len(shown) == 2
    assert shown[1]["text/html"] != first["text/html"]


def test_a_slider_may_choose_among_names(monkeypatch):
    widgets = pytest.importorskip("ipywidgets")
    shown, drawn, made = Shown(), [], []

    class Choice(widgets.Dropdown):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(widgets, "Dropdown", Choice)
    monkeypatch.setattr("IPython.display.display", shown)

    def draw(**values):
        drawn.append(values)
        return pyplot.figure()

    sliders(draw, gpu=(("24 GB", "80 GB"), "80 GB"), context=(1, 32, 4))
    assert made[0].options == ("24 GB", "80 GB")
    made[0].value = "24 GB"
    assert drawn == [{"gpu": "80 GB", "context": 4}, {"gpu": "24 GB", "context": 4}]


def test_a_player_draws_the_step_it_shows(monkeypatch):
    widgets = pytest.importorskip("ipywidgets")
    shown, drawn, made = Shown(), [], []

    class Slider(widgets.IntSlider):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(widgets, "IntSlider", Slider)
    monkeypatch.setattr("IPython.display.display", shown)
    player("abc", lambda ax, step: drawn.append(step))
    made[0].value = 2
    assert drawn == [0, 2] and made[0].max == 2


def test_a_picture_has_words_and_is_closed(monkeypatch):
    shown = Shown()
    monkeypatch.setattr("IPython.display.display", shown)
    before = pyplot.get_fignums()
    picture(pyplot.figure(), "four tables")
    assert shown[0]["text/plain"] == "four tables" and 'alt="four tables"' in shown[0]["text/html"]
    assert pyplot.get_fignums() == before
