"""The picture of the view `prefix`, drawn and in words: left the tree, right the requests and their blocks' names.

Blocks that touch are one edge; a line leads from an edge to those below it. A block looks the same on both sides:
filled for who holds it, double where it is shared, dashed where it is free and still found.
"""

from collections.abc import Sequence

from kvlab.watch.style import INK, PAPER, QUIET, owner
from kvlab.watch.svg import Svg
from kvlab.watch.twins import Edge, Place, Row, Shelf

TOP, PITCH, HIGH, BAR = 32, 77, 64, 5
LEFT, LABEL, RIGHT, WIDE = 10, 580, 644, 552  # x of the tree, of the letters, of the chain; width of tree and chain
INSET, LINK, NARROW = 8, 12, 100  # between an edge and its ends; between two names of a chain; a box with short lines
MOST_ROWS, MOST_BLOCKS = 4, 4
# Advance widths of letters in DejaVu Sans, as shares of the size; others are about as wide as "o".
WIDTHS = dict.fromkeys("ijl", 0.28) | {" ": 0.32, ":": 0.34, "f": 0.35, "t": 0.39, "r": 0.41, "m": 0.97, "w": 0.82}
LEGEND = ("touching boxes: one edge; name→block; bar: found in the cache; thick: new; double: shared; "
          "dashed: free, still found")  # fmt: skip


def draw(shelf: Shelf, pen: Svg) -> None:
    rows = list(shelf.rows.items())[-MOST_ROWS:]
    size, small = shelf.books.block_size, shelf.tree_block_size
    longest = max((max(row.num_tokens, len(row.block_ids) * size) for _, row in rows), default=size)
    token = WIDE / min(max(longest, size), MOST_BLOCKS * size)
    cut = longest > MOST_BLOCKS * size
    few = any(edge.row >= MOST_ROWS for edge in shelf.edges)
    pen.text(8, 20, f"radix tree (基数树), blocks of {small}" + (f", first {MOST_ROWS} leaves" if few else ""))
    right = "hash chain (哈希链)" if shelf.paired or not shelf.edges else "its names, by request"
    right += f", blocks of {size}" if shelf.paired else f", first {MOST_BLOCKS} blocks" if cut else ""
    pen.text(RIGHT, 20, right + (f", last {MOST_ROWS} requests" if len(rows) < len(shelf.rows) else ""))
    if rows:
        pen.text(LABEL - 6, 20, "found")
    row = shelf.rows.get(shelf.acting, Row())
    if row.found_in_tree is not None and (small != size or shelf.differs(shelf.acting)):
        pen.text(LEFT + WIDE - 8, 20, f"{shelf.acting} finds {row.found_in_tree}", anchor="end", bold=True)
    if rows and not shelf.names:
        pen.text(LEFT, TOP + 40, "Nothing is published yet.")
    elif shelf.edges:
        _lines(shelf.edges, token * small, pen)
    elif shelf.names:
        pen.text(LEFT, TOP + 40, "This index keeps no tree; RadixTreeIndex does.")
    for edge in shelf.edges:
        for i, place in enumerate(edge.places):
            if edge.row < MOST_ROWS and (edge.depth + i + 1) * small * token < WIDE + 1:
                _place(shelf, edge, i, place, token * small, pen)
    for number, (name, row) in enumerate(rows):
        _row(shelf, name, row, TOP + PITCH * number, token, pen)


def alt(shelf: Shelf) -> str:
    def told(place: Place) -> str:
        state = "a gap" if place.block_id is None else f"block {place.block_id}"
        return f"{place.text} ({state}{f', held by {place.holders}' if place.holders else ''})"

    tree = "; ".join(
        f"in row {edge.row} after {edge.depth} blocks: {', '.join(map(told, edge.places))}" for edge in shelf.edges)
    rows = "; ".join(
        f"{name} waits: {' '.join(row.words)}" if row.found is None else
        f"{name}: {row.found} of {row.num_tokens} found, " + (", ".join(
            f"block {id_} {f'named {label[:3]}' if label else 'without a name'}" if shelf.finds(name, i) else "given up"
            for i, (id_, label) in enumerate(zip(row.block_ids, row.names, strict=True))) or "no blocks")
        for name, row in shelf.rows.items())  # fmt: skip
    return f"Radix tree: {tree or 'empty'}. Requests: {rows or 'none'}."


def _lines(edges: Sequence[Edge], wide: float, pen: Svg) -> None:
    """From the root to its edges, and from each edge to those below it."""

    def middle(row: int) -> float:
        return TOP + PITCH * row + HIGH / 2

    ends = {(edge.row, edge.depth + len(edge.places)) for edge in edges} | {(-1, 0)}
    for row, depth in sorted(ends):
        below = [e.row for e in edges if (e.parent, e.depth) == (row, depth) and e.row < MOST_ROWS]
        if below and depth * wide < WIDE:
            x = LEFT + depth * wide
            top = middle(min(below) if row < 0 else row)
            if max(below) > (min(below) if row < 0 else row):
                pen.path(f"M{x:.0f} {top:.0f}V{middle(max(below)):.0f}", 3)
            for each in below:
                pen.path(f"M{x - INSET * (each == row):.0f} {middle(each):.0f}h{INSET * (1 + (each == row))}", 3)


def _box(pen: Svg, x: float, y: float, w: float, letters: str, thick: bool) -> None:
    pen.box(x, y, w, HIGH, owner(letters).hue if letters else PAPER, 6 if thick else 2, not letters and not thick)
    if len(letters) > 1:
        pen.box(x + 4, y + 3, w - 8, HIGH - 6, "none", 2)


def long(text: str, bold: bool = False) -> float:
    """About how many units a text of 20 units takes."""
    return sum(20 * WIDTHS.get(letter, 0.62) + 1.5 * bold for letter in text)


def fit(words: Sequence[str], w: float, most: int) -> list[list[str]]:
    """Words in at most `most` lines of w units; what is left out is "…"."""
    lines: list[list[str]] = [[]]
    for word in words:
        if lines[-1] and long(" ".join([*lines[-1], word])) > w - 12:
            if len(lines) == most:
                lines[-1][-1] = "…"
                break
            lines.append([])
        lines[-1].append(word)
    return lines


def _who(letters: str) -> str:
    """Letters of owners, in three signs at most."""
    if len(letters) < 4:
        return letters
    in_a_row = ord(letters[-1]) - ord(letters[0]) == len(letters) - 1
    return f"{letters[0]}–{letters[-1]}" if in_a_row else f"{letters[:2]}…"


def _place(shelf: Shelf, edge: Edge, i: int, place: Place, wide: float, pen: Svg) -> None:
    first, last = i == 0, i == len(edge.places) - 1
    x, y = LEFT + (edge.depth + i) * wide + INSET * first, TOP + PITCH * edge.row
    w = wide - INSET * (first + last)
    id_, letters, narrow = place.block_id, place.holders, wide < NARROW
    same_pool = shelf.tree_block_size == shelf.books.block_size
    with pen.linked(id_ if same_pool else f"tree {id_}"):
        _box(pen, x, y, w, letters, (edge.depth + i, place.text, id_) in shelf.grown)
        for line, words in enumerate(fit(place.text.split(), w + 8 * narrow, 1 if narrow else 2)):
            pen.text(x + w / 2, y + 18 + 19 * line, " ".join(words), anchor="middle")
        who, count, line = _who(letters), f"×{place.ref_cnt}", y + (39 if narrow else 57)
        if id_ is None or not letters:
            pen.text(x + w / 2, y + 57, "gap" if id_ is None else "free" if narrow else f"{id_} free", anchor="middle")
        elif narrow:
            pen.text(x + 7, y + 39, who, bold=True)
            pen.text(x + w - 7, y + 57, count, anchor="end", bold=True)
        else:
            pen.text(x + 9, y + 57, id_)
            pen.text(x + 15 + long(str(id_)), y + 57, who + count, bold=True)
        if len(letters) == 1:
            pen.texture(x + w - 31, line - 13, 25, 13, owner(letters).texture)
    if id_ in shelf.hits:
        pen.box(x, y + HIGH + 3, w, BAR, INK, 1)


def _row(shelf: Shelf, name: str, row: Row, y: float, token: float, pen: Svg) -> None:
    wide, size = token * shelf.books.block_size, shelf.books.block_size
    acting, holds = shelf.acting == name, name in shelf.books.tables
    pen.box(LABEL, y, 46, 34, owner(name[:1]).hue if holds else PAPER, 5 if acting else 2, not holds and not acting)
    pen.text(LABEL + 23, y + 26, name[:2], 24, "middle", bold=True)
    if holds:
        pen.texture(LABEL, y + 36, 46, 10, owner(name[:1]).texture)
    if row.found is not None:
        pen.text(LABEL + 23, y + 66, f"{row.found}/{row.num_tokens}", anchor="middle", bold=acting)
    texts = [row.words[i : i + size] for i in range(0, len(row.words), size)]
    apart, num = _apart(shelf, name), max(len(texts), len(row.block_ids))
    for i in range(min(num, MOST_BLOCKS)):
        x, w = RIGHT + i * wide, wide - LINK
        if i < len(row.block_ids) and row.found is not None:
            _chip(shelf, name, i, x, y, w, pen)
        else:
            pen.box(x, y, w, HIGH, PAPER, 1, dash=True)
        dead = i < len(row.block_ids) and not shelf.finds(name, i)
        if i < len(texts):
            _words(texts[i], i * size, apart, x, y, w, QUIET if dead else INK, pen)
        if i < num - 1 and row.found is not None:
            pen.path(f"M{x + w + 2:.1f} {y + 44:.1f}l9 6l-9 6z", 1, fill=INK)
    if row.found:
        pen.box(RIGHT, y + HIGH + 3, min(row.found * token, WIDE) - LINK, BAR, INK, 1)
    if shelf.differs(name):
        pen.box(RIGHT - 3, y - 3, WIDE + 6, HIGH + 6, "none", 5)


def _apart(shelf: Shelf, name: str) -> frozenset[int]:
    """Where the text of `name` differs from that which came before it and is most like it; if half of it is alike."""
    words, least = shelf.rows[name].words, frozenset(range(len(shelf.rows[name].words)))
    for other, row in shelf.rows.items():
        if other == name:
            break
        apart = frozenset(i for i, word in enumerate(words) if row.words[i : i + 1] != (word,))
        least = min(least, apart, key=len)
    return least if 2 * len(least) <= len(words) else frozenset()


def _words(words: Sequence[str], start: int, apart: frozenset[int], x: float, y: float, w: float, fill: str,
           pen: Svg) -> None:  # fmt: skip
    """The words of a block, those that differ in bold."""
    at = start
    for line, some in enumerate(fit(words, w, 2)):
        left = x + (w - long(" ".join(some))) / 2
        for word in some:
            bold = at in apart
            pen.text(left, y + 18 + 19 * line, word, bold=bold, fill=fill)
            left += long(f"{word} ", bold)
            at += 1


def _chip(shelf: Shelf, name: str, i: int, x: float, y: float, w: float, pen: Svg) -> None:
    """A block of a request: its name, and which block the name leads to; who holds it, or how many do."""
    row, books = shelf.rows[name], shelf.books
    id_, label = row.block_ids[i], row.names[i]
    if not shelf.finds(name, i):
        gone_now = id_ in shelf.evicted
        pen.box(x, y, w, HIGH, PAPER, 6 if gone_now else 1, stroke=INK if gone_now else QUIET)
        pen.text(x + w / 2, y + 57, "gone", anchor="middle", bold=gone_now, fill=INK if gone_now else QUIET)
        return
    letters = books.owners(id_)
    with pen.linked(id_):
        _box(pen, x, y, w, letters, name == shelf.acting and id_ in books.new)
        pen.text(x + 7, y + 57, f"{label[:3] if len(label) == 8 else label}→{id_}" if label else "no name")
        if letters:
            pen.text(x + w - 6, y + 57, letters if len(letters) == 1 else f"×{books.refs[id_]}", 20, "end", bold=True)
