"""What the kernel's walk looks like: its lines, the cache, the tile, and the state that is carried on."""

from kvlab.watch.style import INK, PAPER, QUIET, SHARED_FILL, owner
from kvlab.watch.svg import Svg
from kvlab.watch.walk import Walk

LEFT = 520  # where the data begin; the source stands before
LETTERS = 44  # of a source line that fit before LEFT


def _list(numbers: tuple[float, ...]) -> str:
    return ", ".join(_say(x) for x in numbers)


def _say(x: float) -> str:
    return f"{x:.4g}".replace("inf", "∞").replace("-", "−")


def _focus(walk: Walk) -> int:
    """The line that is shown in full: the edited one if it ran or nothing has; else the first, but not the loop's."""
    if walk.edited in walk.rows or not walk.rows:
        return walk.edited
    return next((r for r in walk.rows if not walk.source[r].startswith("for")), -1)


def draw(walk: Walk, pen: Svg) -> None:
    for row, line in enumerate(walk.source):
        y, ran = 20 + 20.5 * row, row in walk.rows
        if ran:
            pen.box(2, y - 16, LEFT - 12, 20.5, INK, 1)
        wide = LETTERS - 4 * (row == walk.edited)  # bold
        words = line.strip() if len(line.strip()) < wide else line.strip()[: wide - 4] + "…"
        if row == walk.edited:
            pen.box(2, y - 16, LEFT - 12, 20.5, INK if ran else PAPER, 3, True)
        pen.text(16 if line.startswith("    ") else 6, y, words, fill=PAPER if ran else INK, bold=row == walk.edited)
    if _focus(walk) >= 0:
        pen.text(8, 333, walk.source[_focus(walk)].strip(), bold=True)
    _memory(walk, pen)
    if walk.done:
        _output(walk, pen)
    elif walk.values:
        pen.text(LEFT + 530, 94, f"query {_list(walk.values['query'])}")
        _table(walk, pen)
        if walk.tile >= 0:
            _tile(walk, pen)
    _state(walk, pen)


def _memory(walk: Walk, pen: Svg) -> None:
    for block in range(walk.num_blocks):
        x, index = LEFT + 97 * block, walk.table.index(block) if block in walk.table else -1
        here = index >= 0 and index == walk.tile
        pen.text(x, 20, f"block {block}", bold=here)
        pen.box(x, 28, 90, 30, owner("A").hue if index >= 0 else SHARED_FILL, 6 if here else 2)
        if index < 0:
            pen.text(x + 45, 50, "other" if block else "null", anchor="middle")
            continue
        pen.box(x, 58, 90, 12, PAPER, 6 if here else 2)
        pen.texture(x, 58, 90, 12, owner("A").texture)
        for slot in range(walk.size):
            token = index * walk.size + slot
            if token >= walk.length:
                pen.box(x + 22.5 * slot, 28, 22.5, 30, SHARED_FILL, 1)
            pen.text(x + 22.5 * slot + 11, 50, token if token < walk.length else "?", anchor="middle", bold=here)


def _table(walk: Walk, pen: Svg) -> None:
    """The block table of this sequence; thick: the entry of this tile."""
    pen.text(LEFT + 530, 132, "A's table")
    for i, block in enumerate(walk.table):
        pen.box(LEFT + 530 + 50 * i, 142, 44, 36, owner("A").hue, 6 if i == walk.tile else 2)
        pen.text(LEFT + 552 + 50 * i, 167, block, anchor="middle", bold=i == walk.tile)


COLUMNS = (("token", 30), ("K", 130), ("score", 240), ("weight", 350), ("V", 460))


def _tile(walk: Walk, pen: Svg) -> None:
    known = walk.values["known"]
    shown = {"K": ("k", walk.dim), "score": ("scores", 1), "weight": ("weights", 1), "V": ("v", walk.dim)}
    for name, x in COLUMNS:
        pen.text(LEFT + x, 90, name, anchor="middle", fill=QUIET)
    for slot in range(walk.size):
        y, token = 98 + 27 * slot, walk.tile * walk.size + slot
        pen.text(LEFT + 30, y + 20, token if token < walk.length else "?", anchor="middle")
        for column, (name, each) in shown.items():
            x = LEFT + dict(COLUMNS)[column]
            fresh = name in walk.fresh
            pen.box(x - 50, y, 100, 25, PAPER, 5 if name in walk.changed else 1, not fresh)
            if fresh and not (each > 1 and not known[slot]):
                pen.text(x, y + 20, _list(walk.values[name][slot * each : (slot + 1) * each]), anchor="middle",
                         bold=name in walk.changed)  # fmt: skip
            if fresh and each > 1 and not known[slot]:
                pen.texture(x - 50, y, 100, 25, "crossed")


def _output(walk: Walk, pen: Svg) -> None:
    largest, total, *right = walk.right
    pen.text(LEFT, 100, "output = result / total")
    pen.text(LEFT + 330, 100, _list(walk.values["out"]), 28, bold=True)
    pen.text(LEFT, 140, "all tokens at once, by NumPy")
    pen.text(LEFT + 330, 140, _list(tuple(right)), 28)
    pen.text(LEFT, 186, f"largest and total: {_say(walk.one('largest'))} and {_say(walk.one('total'))}; "
                        f"at once: {_say(largest)} and {_say(total)}")  # fmt: skip
    verdict = "equal" if walk.equals()[2] else "wrong"
    pen.box(LEFT + 546, 96, 126, 44, PAPER, 6)
    pen.text(LEFT + 609, 127, verdict, 28, "middle", bold=True)


CARDS = (("largest", 0, 140), ("alpha", 148, 120), ("total", 276, 170), ("result", 454, 220))


def _state(walk: Walk, pen: Svg) -> None:
    for name, x, w in CARDS:
        changed = name in walk.changed and walk.rows != () and not walk.done
        source = walk.before if name == "result" and walk.done else walk.values
        now, was = source.get(name), walk.before.get(name)
        pen.box(LEFT + x, 214, w, 92, PAPER, 6 if changed else 2)
        pen.text(LEFT + x + 10, 236, name, bold=changed)
        if now:
            pen.text(LEFT + x + 10, 268, _list(now), 26, bold=True)
        if changed and was and was != now:
            pen.text(LEFT + x + 10, 297, f"was {_list(was)}")
    if {"new_largest", "largest"} & walk.fresh == {"new_largest"}:  # found, and not yet in its place
        pen.box(LEFT, 214, 140, 92, "none", 6 if "new_largest" in walk.changed else 2)
        pen.text(LEFT + 10, 297, f"new: {_say(walk.one('new_largest'))}", bold="new_largest" in walk.changed)


def say(walk: Walk) -> str:
    values, now = walk.values, walk.changed
    if walk.done:
        return (f"result / total is the output: {_list(values['out'])}; "
                + ("it is what softmax over all tokens at once gives." if walk.equals()[2] else
                   f"softmax over all tokens gives {_list(walk.right[2:])}."))  # fmt: skip
    if not walk.rows:
        return f"One query, {walk.length} tokens in blocks {_list(walk.table)}. Before the walk total and result are 0."
    if "block" in now:
        left = int(sum(values["known"]))
        said = f"Entry {walk.tile} of the table says block {_say(walk.one('block'))}"
        return f"{said}; {left} of its {walk.size} slots are read."
    if "k" in now:
        loaded = f"K and V of block {_say(walk.one('block'))} are loaded, each once"
        return loaded + ("." if all(values["known"]) else "; masked slots are not read, they count as 0.")
    if "scores" in now:
        masked = "" if all(values["known"]) else " A masked slot has −∞, so its weight will be 0."
        return f"The scores are K times q: {_list(values['scores'])}.{masked}"
    if "new_largest" in now:
        old, new = walk.one("largest"), walk.one("new_largest")
        return f"The largest score so far is {_say(new)}; " + (f"it was {_say(old)}." if new != old else "no change.")
    if "alpha" in now:
        old, new = walk.one("largest"), walk.one("new_largest")
        if walk.edited == next(iter(walk.rows)):
            return f"alpha is 1 whatever comes; it should be 2^({_say(old)} − {_say(new)}) = {_say(2 ** (old - new))}."
        alpha = f"alpha = 2^({_say(old)} − {_say(new)}) = {_say(walk.one('alpha'))}"
        return f"{alpha}: what was added up so far is multiplied by it."
    if "weights" in now:
        return f"Each weight is 2^(score − {_say(walk.one('new_largest'))}): {_list(values['weights'])}."
    if "total" in now:
        old, alpha = walk.before["total"][0], walk.one("alpha")
        return f"total = {_say(old)} × {_say(alpha)} + {_say(sum(values['weights']))} = {_say(walk.one('total'))}."
    old = f"({_list(walk.before['result'])}) × {_say(walk.one('alpha'))}"
    return f"result = {old} + weights × V = ({_list(values['result'])})."


def alt(walk: Walk) -> str:
    state = "; ".join(f"{name} {_list(walk.values[name])}" for name, *_ in CARDS if name in walk.values)
    return f"Kernel walk over blocks {_list(walk.table)}. {say(walk)} {state}."
