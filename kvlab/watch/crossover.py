"""View 8a, swap or recompute (换出, 重算; L33 5.4): who is cheaper when, by a model that shows its constants.

    the line      seconds to recompute / seconds to swap, over the victim's length (kvlab.costs.preemption)
    each frame    changes one constant; the thin line is the frame before

Nothing here is measured. Scenarios: "length": does any length make recomputing cheaper? "link": a slower one.
"pieces": blocks copied layer by layer. "heads": no grouped KV heads. "found": a part is still in the prefix cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log2
from random import Random

from kvlab.blocks import cdiv
from kvlab.events import Event, Recorder
from kvlab.parts import PartError, Parts
from kvlab.schedule.request import Request
from kvlab.sizing import KIB
from kvlab.watch.bills import LENGTHS, OVERHEAD, SHARES, Bills, after, alt, borders, grid, rows, say, share, where
from kvlab.watch.style import PAPER, QUIET, SHARED_FILL
from kvlab.watch.svg import Svg
from kvlab.watch.view import Question, Scenario, View

BLOCK = 16  # tokens of a block, for a student's policy


X0, X1, OCTAVE, ONE = 84, 724, 31, 152  # the chart: its sides, units a doubling, the height of "both cost the same"


def _x(tokens: float) -> float:
    return X0 + (X1 - X0) * log2(tokens / LENGTHS[0]) / log2(LENGTHS[1] / LENGTHS[0])


def _y(ratio: float) -> float:
    return ONE - OCTAVE * max(-3, min(4, log2(ratio)))


def _line(bills: Bills) -> str:
    return "M" + "L".join(f"{_x(n):.1f} {_y(bills.ratio(n)):.1f}" for n in grid())


def draw(bills: Bills, pen: Svg) -> None:
    top, bottom = ONE - 4 * OCTAVE, ONE + 3 * OCTAVE
    pen.text(8, 20, "model: time to recompute / time to swap, by tokens of the victim")
    pen.box(X0, top, X1 - X0, ONE - top)
    pen.box(X0, ONE, X1 - X0, bottom - ONE, SHARED_FILL)
    pen.text((X0 + X1) / 2, top + 24, "swap is cheaper", anchor="middle", bold=True)
    for ratio, lower, words in ((16, 14, "16+"), (4, 7, "4"), (1, 7, "1"), (1 / 4, 4, "1/4"), (1 / 8, 4, "1/8")):
        pen.text(X0 - 10, _y(ratio) + lower, words, anchor="end", bold=ratio == 1)
    for tokens, words in ((64, "64"), (256, "256"), (1024, "1K"), (4096, "4K"), (16384, "16K"), (65536, "64K")):
        pen.path(f"M{_x(tokens):.1f} {bottom}v6")
        pen.text(_x(tokens), bottom + 25, words, anchor="end" if tokens == LENGTHS[1] else "middle")
    pen.path(f"M{X0} {ONE}H{X1}", 5)
    x, y = _x(bills.tokens), _y(bills.ratio())
    pen.path(f"M{x:.1f} {bottom}V{y + 9:.1f}", 2)
    if bills.curve:
        _strip(bills, pen)
    _label(pen, X0 + 8, bottom - 16, "recompute is cheaper")
    if bills.curve and bills.before and bills.before.curve:
        pen.path(_line(bills.before), 3, QUIET)
    if bills.curve:
        pen.path(_line(bills), 6)
    pen.path(f"M{x - 9:.1f} {y:.1f}a9 9 0 1 0 18 0a9 9 0 1 0 -18 0Z", 4, fill=PAPER)
    listed = [(4 + 30 * i, *row) for i, row in enumerate(rows(bills))]
    for y, constant, name, value in sorted(listed, key=lambda row: row[1] == bills.changed):  # its thick edge on top
        changed = constant == bills.changed
        pen.box(752, y, 440, 30, SHARED_FILL if changed else PAPER, 5 if changed else 1)
        pen.text(762, y + 22, name)
        pen.text(1184, y + 22, value, anchor="end", bold=changed)
    _victim(bills, pen)


def _label(pen: Svg, x: float, y: float, words: str) -> None:
    """Words in the grey half; lines stop before them."""
    pen.box(x - 2, y - 18, 13 * len(words) + 4, 22, SHARED_FILL, 1, stroke=SHARED_FILL)
    pen.text(x, y, words, bold=True)


def _strip(bills: Bills, pen: Svg) -> None:
    """Who is cheaper along the axis, with the lengths at which that changes; below it a student's policy."""
    bottom = ONE + 3 * OCTAVE
    ends, swaps = [LENGTHS[0], *borders(bills), LENGTHS[1]], bills.ratio(LENGTHS[0]) > 1
    for low, high in zip(ends, ends[1:], strict=False):
        x, w = _x(low), _x(high) - _x(low)
        pen.box(x, 282, w, 26, PAPER if swaps else SHARED_FILL)
        if w > (60 if swaps else 130):
            pen.text(x + w / 2, 302, "swap" if swaps else "recompute", anchor="middle")
        swaps = not swaps
    for tokens in borders(bills):
        x, words = _x(tokens), f"{tokens:,}"
        pen.path(f"M{x:.1f} {ONE}V{bottom}", 4)
        if x > X1 - 90:
            _label(pen, x - 14 - 13 * len(words), bottom - 8, words)
        else:
            _label(pen, x + 8, bottom - 40, words)
    if bills.policy:
        pen.text(X0 - 6, 334, "policy", anchor="end")
        width = (X1 - X0) / len(bills.policy)
        for i, choice in enumerate(bills.policy):
            pen.box(X0 + i * width, 312, width, 26, PAPER if choice == "swap" else SHARED_FILL)
            pen.text(X0 + (i + 0.5) * width, 333, choice[:1].upper(), anchor="middle")


def _victim(bills: Bills, pen: Svg) -> None:
    both = bills.seconds(bills.tokens)
    pen.text(752, 246, f"{bills.tokens:,} tokens (thick: cheaper)", bold=bills.changed == "tokens")
    for i, name in enumerate(("swap", "recompute")):
        cheaper = both[i] < both[1 - i]
        pen.box(752 + 224 * i, 258, 216, 78, PAPER, 6 if cheaper else 1)
        pen.text(764 + 224 * i, 284, name, bold=cheaper)
        pen.text(764 + 224 * i, 324, f"{1e3 * both[i]:.3g} ms", 32, bold=cheaper)


# ---- scenarios


def _run(changes: Sequence[tuple[str, float]], **start: float) -> Callable[[int, Parts], list[Event]]:
    """Frames that change one constant each, from the base. The seed draws the victim's length."""

    def play(seed: int, parts: Parts) -> list[Event]:
        recorder = Recorder()
        for name, value in ({"tokens": Random(seed).choice((2000, 4000, 8000))} | start).items():
            recorder.emit("constant", name, [value])
        if parts.swap_or_recompute is not None:
            _ask_policy(parts, recorder)
        for name, value in changes:
            recorder.step += 1
            recorder.emit("constant", name, [value])
        return recorder.events()

    return play


def _ask_policy(parts: Parts, recorder: Recorder) -> None:
    """What the policy says to a victim of each length, with room enough for it on the CPU."""
    said = []
    try:
        for i in range(16):
            request = Request("A", [0])
            request.num_computed_tokens = tokens = round(LENGTHS[0] * 2 ** ((i + 0.5) * 10 / 16))
            said.append(parts.policies.swap_or_recompute(request, cdiv(tokens, BLOCK), cdiv(tokens, BLOCK)))
        recorder.emit("policy", None, said)
    except PartError as error:
        recorder.emit("error", None, [str(error)])


def _which(said: str) -> Callable[[Bills], tuple[str, Sequence[str]]]:
    return lambda bills: (f"{said} For which victims is recomputing cheaper?", SHARES)


def _where(reveal: int) -> dict[str, Callable]:
    return {"answer": lambda states: share(states[reveal]), "why": lambda states: _because(states[reveal])}


def _because(bills: Bills) -> str:
    if not borders(bills):
        return f"The length is a factor of both and cancels; weights and pairs only add to recomputing: {where(bills)}."
    return f"Short victims wait for the weights, long ones for pairs; in between the link decides: {where(bills)}."


def _ask_pieces(bills: Bills) -> tuple[str, Sequence[str]]:
    piece = replace(bills, block_size=16).piece_bytes / KIB
    return (f"Now each layer's K and V of a block of 16 tokens is copied by itself: {piece:g} KiB, "
            f"{OVERHEAD} more for each. Which is cheaper?"), (
        "swap, as before", "swap, but by less than half as much", "recompute")  # fmt: skip


def _answer_pieces(states: Sequence[Bills]) -> int:
    before, now = states[0].ratio(), states[1].ratio()
    return 2 if now < 1 else int(now < before / 2)


def _why_pieces(states: Sequence[Bills]) -> str:
    now = states[1]
    longer = now.seconds(now.tokens)[0] / states[0].seconds(now.tokens)[0]
    reached = f"{now.reached / 1e9:.1f} of {now.bandwidth / 1e9:g} GB/s"
    return (f"Each piece takes {1e6 * now.piece_bytes / now.bandwidth:.0f} µs for its bytes and {OVERHEAD} besides: "
            f"{reached}. Swapping takes {longer:.0f} times as long.")  # fmt: skip


def _ask_heads(bills: Bills) -> tuple[str, Sequence[str]]:
    ratio = bills.ratio()
    heads = f"there are {bills.shape.num_attention_heads} KV heads, not {bills.kv_heads}"
    return f"Swapping is {ratio:.1f} times cheaper. Without grouped heads (GQA) {heads}: and then?", (
        f"still {ratio:.1f} times", f"{ratio / 2:.1f} times", "both cost the same", "recompute is far cheaper")


def _answer_heads(states: Sequence[Bills]) -> int:
    lost = log2(states[0].ratio() / states[1].ratio())
    return min(range(4), key=lambda times: abs(lost - times))


def _why_heads(states: Sequence[Bills]) -> str:
    (swap_before, compute_before), (swap, compute) = (bills.seconds(bills.tokens) for bills in states[:2])
    return (f"Swapping takes {swap / swap_before:.1f} times the time, recomputing {compute / compute_before:.1f}: "
            "what counts is parameters for each byte of K and V.")  # fmt: skip


def _ask_found(bills: Bills) -> tuple[str, Sequence[str]]:
    return "When the victim comes back, 90% of it is still in the prefix cache. Whom does that help more?", (
        "both alike: each has a tenth to do", "swap", "recompute")  # fmt: skip


def _answer_found(states: Sequence[Bills]) -> int:
    moved = states[1].ratio() / states[0].ratio()
    return 0 if 0.9 < moved < 1.1 else 1 if moved > 1 else 2


def _why_found(states: Sequence[Bills]) -> str:
    swap, recompute = (new / old for new, old in zip(states[1].seconds(states[1].tokens),
                                                     states[0].seconds(states[0].tokens), strict=True))  # fmt: skip
    return (f"Recomputing falls to {100 * recompute:.0f}%, swapping to {100 * swap:.0f}%: on the way out nobody knew "
            "what would be found.")  # fmt: skip


VIEW = View(
    name="crossover",
    title="Swap or recompute (换出, 重算)",
    begin=Bills(),
    after=after,
    draw=draw,
    say=say,
    alt=alt,
    kinds=frozenset({"constant"}),
    remedy="this view draws prices and no run: open a scenario, or a trace that was saved from one",
    legend="thick line and dot: now; thin: the frame before; grey: recompute is cheaper; thick box: what changed",
    scenarios={
        "length": Scenario(
            _run([("curve", True), ("tokens", 32_768), ("tokens", 256), ("decodes", 64)], curve=False),
            Question(0, 1, _which("So far one victim is drawn, the ring. Now all lengths."), **_where(1)),
        ),
        "link": Scenario(
            _run([("bandwidth", 16e9), ("bandwidth", 8e9), ("bandwidth", 4e9), ("flops_rate", 125e12)]),
            Question(1, 2, _which("The link becomes slower again, from 16 to 8 GB/s."), **_where(2)),
        ),
        "pieces": Scenario(
            _run([("block_size", 16), ("block_size", 64), ("block_size", 256), ("block_size", 0)]),
            Question(0, 1, _ask_pieces, _answer_pieces, _why_pieces),
        ),
        "heads": Scenario(
            _run([("kv_heads", 32), ("kv_heads", 16), ("kv_heads", 4)]),
            Question(0, 1, _ask_heads, _answer_heads, _why_heads),
        ),
        "found": Scenario(
            _run([("found", 90), ("found", 50), ("found", 95)]),
            Question(0, 1, _ask_found, _answer_found, _why_found),
        ),
    },
)
