"""What a lab shows besides text: a figure with words for it, sliders over a figure, a table. matplotlib and Jupyter are
imported when they are used.

    picture(figure, alt)              a still figure
    sliders(draw, alt, name=range)    draw(**values) anew as sliders move; a saved page keeps the first picture
    player(frames, draw)              the same with one slider over steps
    live(draw, goes_on, alt)          a figure that is drawn anew while something goes on
    table(heads, rows)   ledger(...)  short texts; what a text says beside what we found
"""

import base64
from collections.abc import Callable, Sequence
from html import escape
from io import BytesIO
from typing import Any


def picture(figure: Any, alt: str) -> None:
    """Show `figure`, with `alt` to be read in its place."""
    from IPython.display import display

    display(_image(figure, alt), raw=True)


Range = tuple[int, int, int] | tuple[Sequence[str], str]


def sliders(draw: Callable[..., Any], alt: str = "a figure with sliders", **ranges: Range) -> None:
    """A slider for each of `ranges` above the figure that draw(**values) returns.

    A range is (first, last, start) for whole numbers, or (names, start) for a list of names to choose from.
    The figure is drawn anew as a slider moves. It is an output of its own beside the sliders, so a saved page, where
    nothing moves, still has it.
    """
    from IPython.display import display

    first = _image(draw(**{name: values[-1] for name, values in ranges.items()}), alt)
    bars = {}
    try:
        from ipywidgets import VBox
    except ImportError:
        pass
    else:
        bars = {name: _bar(name, values) for name, values in ranges.items()}
        note = {"text/plain": "(sliders)", "text/html": "<i>Run this cell, and sliders move the figure.</i>"}
        display(VBox([*bars.values()])._repr_mimebundle_() | note, raw=True)
    shown = display(first, raw=True, display_id=True)

    def moved(_: Any) -> None:
        shown.update(_image(draw(**{name: bar.value for name, bar in bars.items()}), alt), raw=True)

    for bar in bars.values():
        bar.observe(moved, names="value")


def player(frames: Sequence[Any], draw: Callable[[Any, int], None], size: tuple[float, float] = (9, 2.6),
           alt: str = "a figure with a slider over its steps") -> None:  # fmt: skip
    """A slider over `frames`: draw(ax, i) draws frame i on axes of `size` inches."""
    import matplotlib.pyplot as plt

    def at(step: int) -> Any:
        figure, ax = plt.subplots(figsize=size, layout="constrained")
        draw(ax, step)
        return figure

    sliders(at, alt, step=(0, len(frames) - 1, 0))


def live(draw: Callable[[], Any], goes_on: Callable[[], bool], alt: str, every: float = 0.2) -> int:
    """Show the figure that draw() returns, anew every so many seconds while goes_on(), and once more at the end.

    Returns how many were shown. A saved page keeps the last one.
    """
    import time

    from IPython.display import display

    shown, number = display(_image(draw(), alt), raw=True, display_id=True), 1
    while goes_on():
        time.sleep(every)
        shown.update(_image(draw(), alt), raw=True)
        number += 1
    return number


def _bar(name: str, values: Range) -> Any:
    from ipywidgets import Dropdown, IntSlider

    if len(values) == 2:
        names, start = values
        return Dropdown(options=list(names), value=start, description=name)
    low, high, start = values
    return IntSlider(start, low, high, description=name)


def _image(figure: Any, alt: str) -> dict[str, str]:
    """`figure` as an output; the figure is closed. HTML, because a saved page keeps no words beside a bare PNG."""
    import matplotlib.pyplot as plt

    data = BytesIO()
    figure.savefig(data, format="png", dpi=110)
    plt.close(figure)
    source = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    html = f'<img alt="{escape(alt)}" style="max-width:100%" src="{source}">'
    return {"text/plain": alt, "text/html": html}


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Show rows of short texts as a table; plain columns where there is no HTML."""
    from IPython.display import display

    cells = [[str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    lines = ["  ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in [list(heads), *cells]]
    styles = ["text-align:left;white-space:nowrap", *["text-align:left"] * (len(heads) - 1)]
    marked = [
        "".join(f"<{tag} style='{style}'>{escape(value)}</{tag}>" for value, style in zip(row, styles, strict=True))
        for tag, row in [("th", heads), *(("td", row) for row in cells)]
    ]
    head, *body = (f"<tr>{row}</tr>" for row in marked)
    html = f"<table><thead>{head}</thead><tbody>{''.join(body)}</tbody></table>"
    display({"text/plain": "\n".join(lines), "text/html": html}, raw=True)


def ledger(heads: Sequence[str], verdicts: Sequence[str], rows: Sequence[tuple[str, str, str, bool, str]]) -> None:
    """Show what a text says beside what we found. rows: where, the text's words, ours, do they agree?, condition.

    verdicts: three words, for "holds", "holds if" (there is a condition) and "contradicted".
    """
    holds, holds_if, contradicted = verdicts
    said = [
        (where, says, found, (holds_if if condition else holds) if agrees else contradicted, condition)
        for where, says, found, agrees, condition in rows
    ]
    table(heads, said)
