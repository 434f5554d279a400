"""View 2, the block pool (块池, L33 2.2 and 6.3): who holds which block, the free queue in its order, the tables.

Scenarios: "fragmented": requests grow in turns, two end, and one arrives: which blocks does it get?
           "tight": more free blocks than are asked for, no two of them side by side: does it fit?
"""

from collections.abc import Sequence
from random import Random

from kvlab.blocks import cdiv
from kvlab.events import Event
from kvlab.parts import Parts
from kvlab.watch.books import KINDS, Books, after, named, tokens
from kvlab.watch.stage import Stage
from kvlab.watch.style import BLOCK_LEGEND, INK, PAPER, SHARED_FILL, owner
from kvlab.watch.svg import Svg
from kvlab.watch.view import Question, Scenario, View

ASKED = 10  # tokens of E in "tight"


def _grown(seed: int, num_blocks: int, parts: Parts) -> Stage:
    """A, B, C and D come with a block each and grow to two, in an order that the seed says; then B and D end.

    In no order does a block of B or D stand beside another: what the two give back is scattered.
    """
    random, order = Random(seed), "BBDDAACC"
    while any(one in "BD" and two in "BD" for one, two in zip(order, order[1:], strict=False)):
        order = "".join("".join(random.sample("ABCD", 4)) for _ in range(2))
    stage = Stage(num_blocks, parts=parts)
    for name in order:
        stage.write(name, ["x"] * 4 if name in "AC" else ["x"] * 3)
    stage.finish("B")
    stage.finish("D")
    return stage


def _fragmented(seed: int, parts: Parts) -> list[Event]:
    stage = _grown(seed, 14, parts)
    stage.write("E", ["x"] * 7)
    stage.write("A", ["x"])
    stage.write("E", ["x"] * 3)
    stage.finish("A")
    return stage.recorder.events()


def _tight(seed: int, parts: Parts) -> list[Event]:
    stage = _grown(seed, 9, parts)
    stage.write("E", ["x"] * ASKED)
    stage.finish("C")
    stage.write("F", ["x"] * 5)
    return stage.recorder.events()


BEFORE_E = 10  # the start, eight writes, two ends: the frame on which E is about to come


def _which(books: Books) -> list[tuple[int, ...]]:
    """Pairs of free blocks that one may think E gets: lowest numbers, freed last, head of the queue."""
    free = sorted(books.queue)
    pairs = sorted({tuple(sorted(pair)) for pair in (free[:2], books.queue[-2:], books.queue[:2])})
    turn = sum(free[:2]) % len(pairs)  # so that the right one is not always at the same place
    return pairs[turn:] + pairs[:turn]


def _ask_which(books: Books) -> tuple[str, Sequence[str]]:
    options = [f"blocks {a} and {b}" for a, b in _which(books)]
    return "E comes with 7 tokens, so it needs 2 blocks. B and D have just ended. Which blocks does E get?", [
        *options, "other blocks"]  # fmt: skip


def _answer_which(states: Sequence[Books]) -> int:
    pairs = _which(states[BEFORE_E])
    got = tuple(sorted(states[BEFORE_E + 1].new))
    return pairs.index(got) if got in pairs else len(pairs)


def _why_which(states: Sequence[Books]) -> str:
    got, head = states[BEFORE_E + 1].new, states[BEFORE_E].queue[:2]
    if set(got) == set(head):
        return f"E gets {named(got)}, the head of the queue: what was freed waits at the tail and is reused last."
    return f"E gets {named(got)}; the head of the queue was {named(head)}."


def _ask_tight(books: Books) -> tuple[str, Sequence[str]]:
    need = cdiv(ASKED, books.block_size)
    return f"{len(books.queue)} blocks are free. E comes with {ASKED} tokens, {need} blocks. Does it get in?", [
        "yes, at once", "only if they lie side by side", "only after compaction", "no"]  # fmt: skip


def _why_tight(states: Sequence[Books]) -> str:
    now = states[BEFORE_E + 1]
    if now.refused:
        return f"E is refused with {len(states[BEFORE_E].queue)} blocks free."
    table = now.tables["E"]
    apart = "they need not be neighbours: the table says where each is"
    return f"E gets {named(table)}; {apart}."


def say(books: Books) -> str:
    kind, name, values = books.move.kind, books.move.request_id, books.move.values
    if books.error:
        return f"This move failed: {books.error}"[:140]
    if books.refused:
        return f"{name} needs more blocks than are free, so it is refused, and nothing has changed."
    if kind == "stage":
        return f"The pool: {len(books.queue)} free blocks of {books.block_size} tokens; block 0 is never handed out."
    if kind == "write" and books.new:
        return f"{name} writes {tokens(len(values))} and takes {named(books.new)} from the head of the queue."
    if kind == "write":
        return f"{name} writes {tokens(len(values))} into the block that it has."
    if kind == "finish":
        return f"{name} ends and gives back {named(books.freed)}, its last block first."
    return f"{len(books.new)} blocks taken, {len(books.freed)} given back."


def alt(books: Books) -> str:
    tables = "; ".join(f"{name} holds {named(table)}" for name, table in sorted(books.tables.items()))
    wrong = "".join(f" Block {i} is {what}." for i, what in books.wrong.items())
    return f"Block pool. {tables or 'Nobody holds a block'}. Free queue from its head: " + (
        f"{', '.join(map(str, books.queue)) or 'empty'}.{wrong}")  # fmt: skip


PER_ROW, CARD, CHIP = 8, (84, 100), 44


def draw(books: Books, pen: Svg) -> None:
    for block_id, count in enumerate(books.refs):
        _card(books, pen, block_id, count, 8 + 94 * (block_id % PER_ROW), 6 + 112 * (block_id // PER_ROW))
    y = 262
    pen.text(8, y, "free queue (空闲队列), head first")
    for i, block_id in enumerate(books.queue):
        with pen.linked(block_id):
            pen.box(8 + (CHIP + 6) * i, y + 14, CHIP, 40, width=5 if block_id in books.freed else 2, dash=True)
            pen.text(8 + (CHIP + 6) * i + CHIP / 2, y + 42, block_id, anchor="middle", bold=block_id in books.freed)
    if not books.queue:
        pen.text(8, y + 42, "empty")
    pen.text(790, 26, "block tables (块表)")
    for row, (name, table) in enumerate(sorted(books.tables.items())):
        y = 44 + 50 * row
        pen.box(790, y, 44, 40, owner(name).hue)
        pen.text(812, y + 28, name, 24, "middle", bold=True)
        for i, block_id in enumerate(table):
            with pen.linked(block_id):
                pen.box(846 + 50 * i, y, CHIP, 40, width=5 if block_id in books.new else 2)
                pen.text(846 + 50 * i + CHIP / 2, y + 28, block_id, anchor="middle")


def _card(books: Books, pen: Svg, block_id: int, count: int, x: float, y: float) -> None:
    (w, h), letters = CARD, books.owners(block_id)
    look, changed = owner(letters), block_id in books.changed
    with pen.linked(block_id):
        if block_id == 0:  # the null block: nobody's, and never free
            pen.box(x, y, w, h, SHARED_FILL, 1)
        else:
            pen.box(x, y, w, h, look.hue if letters else PAPER, 6 if changed else 2, dash=not letters and not changed)
        if len(letters) > 1:
            pen.box(x + 6, y + 6, w - 12, h - 12, "none", 2)
        pen.text(x + 8, y + 24, block_id)
        if count > 1:
            pen.text(x + w - 8, y + 24, f"×{count}", anchor="end", bold=True)
        word = "null" if block_id == 0 else "freed" if block_id in books.freed else letters
        pen.text(x + w / 2, y + 58, word, 20 if len(word) > 2 else 32, "middle", bold=bool(letters))
        if letters:
            pen.box(x + 1, y + 66, w - 2, 14, PAPER, 1)
            pen.texture(x + 1, y + 66, w - 2, 14, look.texture)
            row = books.words.get(block_id, ())
            for i, written in enumerate(row):
                pen.box(x + 8 + i * (w - 16) / len(row), y + 84, (w - 16) / len(row) - 3, 10,
                        INK if written else PAPER, 1)  # fmt: skip
        if block_id in books.wrong:
            pen.box(x - 3, y - 3, w + 6, h + 6, "none", 4)
            pen.text(x + w / 2, y + h - 6, "wrong", anchor="middle", bold=True)


VIEW = View(
    name="pool",
    title="The block pool (块池)",
    begin=Books(),
    after=after,
    draw=draw,
    say=say,
    alt=alt,
    kinds=KINDS,
    legend=BLOCK_LEGEND,
    scenarios={
        "fragmented": Scenario(
            _fragmented, Question(BEFORE_E, BEFORE_E + 1, _ask_which, _answer_which, _why_which)
        ),
        "tight": Scenario(
            _tight,
            Question(BEFORE_E, BEFORE_E + 1, _ask_tight, lambda states: 3 if states[BEFORE_E + 1].refused else 0,
                     _why_tight),  # fmt: skip
        ),
    },
)
