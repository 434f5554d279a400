"""How the view budget is drawn: columns as wide as their steps are long, and below them a lane for each request.

A decode is a cell of its own; a chunk is drawn to the scale of what the decodes leave of the budget, the thick line.
"""

from kvlab.watch.pace import GPU, MODEL, RATES, Pace, Step
from kvlab.watch.style import INK, PAPER, owner
from kvlab.watch.svg import Svg

X0, WINDOW, PANEL = 84, 780, 890  # left edge; ms that are drawn, a unit each; left edge of the figures
TOP, TALL, CELL = 14, 150, 13  # of the columns: the line of the budget, height, least height of a decode
LANES, ROW, BASE = 196, 29, 314  # of the lanes: top, height of one; the time axis
MOST = 4  # lanes


def shown(pace: Pace) -> list[str]:
    """Up to MOST requests: who has not ended, and who ended last."""
    live = [name for name in pace.order if name not in pace.done]
    chosen = set((live + [name for name in pace.order if name in pace.done][::-1])[:MOST])
    return [name for name in pace.order if name in chosen]


def draw(pace: Pace, pen: Svg) -> None:
    half = WINDOW / 2
    left = max(0.0, half * (pace.now // half - 1)) if pace.now > WINDOW else 0.0  # moves on by halves
    rows = {name: LANES + ROW * i for i, name in enumerate(shown(pace))}
    right = X0 + WINDOW
    for name, y in rows.items():
        pen.box(8, y, 62, 25, owner(name).hue if len(name) == 1 else PAPER)
        pen.text(39, y + 20, name[-4:], anchor="middle", bold=True)
        pen.path(f"M{X0} {y + 13}H{right}", 1)
        if pace.arrived[name] > left or pace.arrived[name] == left == 0 and not pace.steps:
            x, end = X0 + pace.arrived[name] - left, X0 + pace.first.get(name, pace.now) - left
            if end > x:
                pen.box(x, y + 8, end - x, 10, PAPER, 2)
            if name not in pace.first:
                pen.path(f"M{x:.1f} {y + 2}v22", 6)
                words = "comes" if end == x else "no token yet"
                pen.box(end + 8, y + 1, 12 * len(words) + 8, 24, PAPER, 1, stroke=PAPER)
                pen.text(end + 12, y + 20, words, bold=end == x)
    for number, step in enumerate(pace.steps, 1):
        if step.start >= left:
            with pen.linked(f"step {number}"):
                _column(pace, pen, step, rows, X0 - left)
    pen.path(f"M{X0} {TOP}H{right}", 5)
    pen.path(f"M{X0} {TOP + TALL}H{right}", 2)
    pen.text(X0 - 8, TOP + 14, f"{pace.budget:,}", anchor="end", bold=True)
    pen.text(X0 - 8, TOP + TALL, 0, anchor="end")
    pen.text(X0 - 8, TOP + 60, "tokens", anchor="end")
    if pace.steps and set(pace.order) != pace.done:
        last = pace.steps[-1]
        pen.box(X0 + last.start - left, TOP, last.ms, TALL, "none", 6)
    _longest(pace, pen, rows, left)
    for ms in range(-(-int(left) // 100) * 100, int(left) + WINDOW + 1, 100):
        pen.path(f"M{X0 + ms - left:.1f} {BASE}v5", 2)
        pen.text(X0 + ms - left, BASE + 24, ms, anchor="middle")
    pen.text(8, BASE + 24, "model")
    pen.text(right, BASE + 24, "ms", anchor="end")
    pen.path(f"M{X0} {BASE}H{right}", 1)
    _figures(pace, pen)


def _column(pace: Pace, pen: Svg, step: Step, rows: dict[str, float], zero: float) -> None:
    """One step: its decodes and chunks, and the tokens that it brought. zero: where the time 0 is."""
    x, y, n = zero + step.start, float(TOP + TALL), len(step.decodes)
    budget = max(1, pace.budget, n + sum(number for _, number in step.chunks))
    cell = max(min(CELL, TALL / 3 / max(1, n)), TALL / budget)
    for name in step.decodes:
        y -= cell
        pen.box(x, y, step.ms, cell, owner(name).hue if len(name) == 1 else PAPER, 1)
    scale = (TALL - cell * n) / max(1, budget - n)
    for name, number in step.chunks:
        look, tall = owner(name) if len(name) == 1 else owner(""), scale * number
        y -= tall
        pen.box(x, y, step.ms, tall, look.hue, 1)
        pen.texture(x + 1, y + 1, step.ms - 2, max(0, tall - 2), look.texture if look.texture != "plain" else "rising")
        words = f"{name} {number:,}" if step.ms >= 110 else name
        wide = 13 * len(words) + 10
        if step.ms > wide + 8 and tall >= 30:
            pen.box(x + step.ms / 2 - wide / 2, y + tall / 2 - 14, wide, 26, PAPER, 1)
            pen.text(x + step.ms / 2, y + tall / 2 + 7, words, anchor="middle", bold=True)
    for name, before in step.came:
        if name in rows:
            end, middle = zero + step.end, rows[name] + 13
            if before is not None and zero + before >= X0:
                pen.path(f"M{zero + before:.1f} {middle}H{end:.1f}", 3)
            pen.path(f"M{end - 3:.1f} {middle - 3}h6v6h-6Z", 1, fill=INK)


def _longest(pace: Pace, pen: Svg, rows: dict[str, float], left: float) -> None:
    """The longest gap, thick and with its ms; the time to the first token of who came last, once it is known."""
    marks = []
    if pace.gap and pace.gap.name in rows and pace.gap.start >= left:
        marks.append((rows[pace.gap.name], pace.gap.start, pace.gap.end, f"{pace.gap.ms:.1f} ms", 9))
    name = pace.newest
    if pace.ttft is not None and name in rows and pace.arrived[name] >= left and pace.arrived[name] > 0:
        marks.append((rows[name], pace.arrived[name], pace.first[name], f"first token: {pace.ttft:.0f} ms", 0))
    for y, start, end, words, width in marks:
        a, b, wide = X0 + start - left, X0 + end - left, 12.4 * len(words) + 8
        if width:
            pen.path(f"M{a:.1f} {y + 13}H{b:.1f}", width)
        x = (a + b - wide) / 2 if b - a > wide + 20 else b + 14 if b + wide + 14 < X0 + WINDOW else a - wide - 14
        pen.box(x, y + 1, wide, 24, PAPER, 2)
        pen.text(x + wide / 2, y + 20, words, anchor="middle", bold=True)


def _figures(pace: Pace, pen: Svg) -> None:
    x, columns = PANEL, (1106, 1190)
    pen.text(x, 24, f"budget {pace.budget:,} tokens", 26, bold=True)
    pen.text(x, 62, "ms")
    pen.text(columns[0], 62, "so far", anchor="end")
    if pace.reference:
        pen.text(columns[1], 62, pace.reference[0], anchor="end")
    mine = (f"{pace.gap.ms:.1f}" if pace.gap else "", "" if pace.ttft is None else f"{pace.ttft:.0f}")
    for row, name in enumerate(("longest gap", f"TTFT of {pace.newest[-4:]}")):
        y = 70 + 36 * row
        pen.box(x, y, 304, 36, PAPER, 1)
        pen.text(x + 8, y + 26, name)
        pen.text(columns[0], y + 27, mine[row], 24, "end", bold=True)
        if pace.reference:
            pen.text(columns[1] - 6, y + 26, pace.reference[1 + row], anchor="end")
    if pace.steps:
        step = pace.steps[-1]
        what = {"memory": "reading the weights", "compute": "arithmetic"}.get(step.bound, step.bound)
        n = len(step.decodes)
        chunk = f" + chunk {step.num_tokens - n:,}" if step.chunks else ""
        pen.box(x, 156, 304, 92, PAPER, 5)
        pen.text(x + 10, 182, f"step {len(pace.steps)}: {step.ms:.1f} ms", 22, bold=True)
        pen.text(x + 10, 209, what)
        pen.text(x + 10, 236, f"{n} decode{'s' * (n != 1)}{chunk}")
    pen.text(x, 276, "Times are a model's:")
    pen.text(x, 302, f"{GPU}, {MODEL},")
    pen.text(x, 328, RATES)
