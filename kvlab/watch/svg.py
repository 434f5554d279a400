"""A small SVG writer: marks in, text out; no ids, no fonts from elsewhere, the same bytes every time.

    pen = Svg("what is to be seen")     pen.box(...), pen.text(...), pen.arrow(...)
    pen.marks                           one string a mark; equal marks of two frames are sent once (kvlab.watch.player)
    str(pen)                            the whole picture
"""

from html import escape

from kvlab.watch.style import HEIGHT, INK, PAPER, SMALLEST, WIDTH

TEXTURES = ("plain", "rising", "falling", "level", "upright", "crossed", "dots")
FONT = "DejaVu Sans, Arial, sans-serif"


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Svg:
    """One picture of WIDTH x HEIGHT units. alt: the words for those who cannot see it."""

    def __init__(self, alt: str = ""):
        self.alt = alt
        self.marks: list[str] = []
        self._groups: list[list[str]] = []

    def _add(self, mark: str) -> None:
        (self._groups[-1] if self._groups else self.marks).append(mark)

    def linked(self, name: object) -> "_Link":
        """`with pen.linked(7):` what is drawn within lights up together with all else linked under the same name."""
        return _Link(self, str(name))

    def box(self, x: float, y: float, w: float, h: float, fill: str = PAPER, width: float = 2, dash: bool = False,
            stroke: str = INK) -> None:  # fmt: skip
        """A rectangle. dash: a broken outline."""
        at = f'x="{_number(x)}" y="{_number(y)}" width="{_number(w)}" height="{_number(h)}"'
        broken = ' stroke-dasharray="6 5"' if dash else ""
        self._add(f'<rect {at} fill="{fill}" stroke="{stroke}" stroke-width="{_number(width)}"{broken}/>')

    def text(self, x: float, y: float, words: object, size: int = SMALLEST, anchor: str = "start", bold: bool = False,
             fill: str = INK) -> None:  # fmt: skip
        """Words on the base line y. anchor: start, middle or end. ValueError if it is too small for a class."""
        if size < SMALLEST:
            raise ValueError(f"size is {size}: the last row reads nothing below {SMALLEST}; say less instead")
        weight = ' font-weight="700"' if bold else ""
        self._add(f'<text x="{_number(x)}" y="{_number(y)}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"'
                  f"{weight}>{escape(str(words))}</text>")  # fmt: skip

    def path(self, d: str, width: float = 2, stroke: str = INK, fill: str = "none") -> None:
        self._add(f'<path d="{d}" fill="{fill}" stroke="{stroke}" stroke-width="{_number(width)}"/>')

    def arrow(self, x1: float, y1: float, x2: float, y2: float, width: float = 3) -> None:
        """A straight arrow from the first point to the second."""
        long = max(1e-9, ((x2 - x1) ** 2 + (y2 - y1) ** 2) ** 0.5)
        ux, uy = (x2 - x1) / long * 14, (y2 - y1) / long * 14
        ends = [(x2, y2), (x2 - ux - uy / 2, y2 - uy + ux / 2), (x2 - ux + uy / 2, y2 - uy - ux / 2)]
        self.path(f"M{_number(x1)} {_number(y1)}L{_number(x2 - ux)} {_number(y2 - uy)}", width)
        self.path("M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in ends) + "Z", 1, fill=INK)

    def texture(self, x: float, y: float, w: float, h: float, kind: str, gap: float = 9) -> None:
        """Fill a rectangle with one of TEXTURES. No <pattern>: it would need an id of its own on each page."""
        if kind not in TEXTURES:
            raise ValueError(f"texture is {kind!r}: take one of {', '.join(TEXTURES)}")
        lines: list[tuple[float, float, float, float]] = []
        steps = range(1, int((w + h) / gap) + 1)
        if kind in ("rising", "crossed"):
            for t in (i * gap for i in steps):
                lines.append((max(0, t - h), min(t, h), min(t, w), max(0, t - w)))
        if kind in ("falling", "crossed"):
            for t in (i * gap for i in steps):
                lines.append((w - max(0, t - h), min(t, h), w - min(t, w), max(0, t - w)))
        if kind == "level":
            lines += [(0, t, w, t) for t in (i * 5 for i in range(1, int(h / 5) + 1)) if t < h]
        if kind == "upright":
            lines += [(t, 0, t, h) for t in (i * gap for i in steps) if t < w]
        if kind == "dots":
            lines += [(t, h / 2, t + 3, h / 2) for t in (i * gap for i in steps) if t + 3 < w]
        d = "".join(f"M{_number(x + a)} {_number(y + b)}L{_number(x + c)} {_number(y + e)}" for a, b, c, e in lines)
        if d:
            self.path(d, 4 if kind == "dots" else 2)

    def __str__(self) -> str:
        return wrap("".join(self.marks), self.alt)


class _Link:
    def __init__(self, pen: Svg, name: str):
        self.pen, self.name = pen, name

    def __enter__(self) -> None:
        self.pen._groups.append([])

    def __exit__(self, *error: object) -> None:
        inner = "".join(self.pen._groups.pop())
        self.pen._add(f'<g data-link="{escape(self.name, quote=True)}">{inner}</g>')


def wrap(marks: str, alt: str) -> str:
    """The <svg> around marks."""
    box, label = f"0 0 {WIDTH} {HEIGHT}", escape(alt, quote=True)
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-family="{FONT}" role="img" '
            f'aria-label="{label}" style="max-width:100%;background:{PAPER}">{marks}</svg>')  # fmt: skip
