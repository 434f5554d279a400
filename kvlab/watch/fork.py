"""View 4, fork and copy-on-write (写时复制, L33 2.4): who shares which block, and which write needs a copy.

Tables left and right, the physical blocks between them, as in the pictures of the PagedAttention paper.
Scenarios: "half_full": a prompt of 10 tokens, four writers: how many copies? "full": the same with 12 tokens.
"""

from collections.abc import Sequence
from random import Random

from kvlab.events import Event
from kvlab.parts import Parts
from kvlab.watch.books import KINDS, Books, after, listed, named, tokens
from kvlab.watch.stage import Stage
from kvlab.watch.style import BLOCK_LEGEND, PAPER, owner
from kvlab.watch.svg import Svg
from kvlab.watch.view import Question, Scenario, View

PROMPT = "my dog is small and it likes to eat ripe red figs".split()
NEXT = {"A": "figs", "B": "nuts", "C": "rice", "D": "peas"}
FORKED = 2  # the frame on which four requests share the prompt and none has written
WRITTEN = FORKED + len(NEXT)


def _run(num_prompt: int):
    def play(seed: int, parts: Parts) -> list[Event]:
        stage, order = Stage(9, parts=parts), list(NEXT)
        Random(seed).shuffle(order)
        stage.write("A", PROMPT[:num_prompt])
        stage.fork("A", "BCD")
        for name in order:
            stage.write(name, [NEXT[name]])
        for name in order[1:]:
            stage.finish(name)
        return stage.recorder.events()

    return play


OPTIONS = {0: "no copy", 1: "1 copy", 3: "3 copies", 4: "4 copies"}  # 4: what one who forgets the last owner says


def _ask(books: Books) -> tuple[str, Sequence[str]]:
    num_words = sum(map(bool, books.words.get(books.tables["A"][-1], ())))
    held = "is full" if num_words == books.block_size else f"holds {num_words} of {books.block_size} tokens"
    return f"Four requests share a last block that {held}. Each writes one token. How many blocks are copied?", (
        tuple(OPTIONS.values()))  # fmt: skip


def _answer(states: Sequence[Books]) -> int:
    made = states[WRITTEN].num_copies
    return list(OPTIONS).index(made) if made in OPTIONS else -1


def _why(states: Sequence[Books]) -> str:
    made, held = states[WRITTEN].num_copies, sum(count > 0 for count in states[WRITTEN].refs)
    if made == 0:
        return f"0 copies, {held} blocks: the shared block was full, so every new token went into a new block."
    if made == len(NEXT) - 1:
        return f"{made} copies, {held} blocks: whoever comes last is the only owner left, and writes in place."
    return f"{made} copies, {held} blocks held by four requests."


def say(books: Books) -> str:
    kind, name, values = books.move.kind, books.move.request_id, books.move.values
    if books.error:
        return f"This move failed: {books.error}"[:140]
    if books.refused:
        return f"{name} needs more blocks than are free, so it is refused, and nothing has changed."
    if kind == "stage":
        return f"{len(books.queue)} free blocks of {books.block_size} tokens, and nobody there yet."
    if kind == "fork_all":
        return f"{listed(values)} fork from {name}: counts go up, nothing is copied, no block is taken."
    if kind == "finish":
        return f"{name} ends: each of its counts goes down by 1; given back, at 0: {named(books.freed)}."
    if books.copies:
        [(source, target), *_] = books.copies
        return f"{name} wants to write into block {source}, which others read: it is copied to block {target} first."
    if books.new:
        return f"{name} writes {tokens(len(values))} into {named(books.new)}, new and its own."
    last = books.tables.get(name, (0,))[-1]
    return f"{name} writes into block {last}, of which it is the only owner: no copy."


def alt(books: Books) -> str:
    tables = "; ".join(f"{name} holds {named(table)}" for name, table in sorted(books.tables.items()))
    shared = "".join(f" Block {i} has {count} owners." for i, count in enumerate(books.refs) if count > 1)
    wrong = "".join(f" Block {i} is {what}." for i, what in books.wrong.items())
    return f"Fork. {tables or 'Nobody holds a block'}.{shared} Copies so far: {books.num_copies}.{wrong}"


CARD, GAP, LEFT = (290, 74), 84, 290
PLACES = {"A": (8, 30), "B": (8, 190), "C": (960, 30), "D": (960, 190)}


def _place(block_id: int) -> tuple[float, float]:
    return LEFT + 325 * ((block_id - 1) // 4), 4 + GAP * ((block_id - 1) % 4)


def draw(books: Books, pen: Svg) -> None:
    for block_id, count in enumerate(books.refs[1:], 1):
        _card(books, pen, block_id, count)
    for name, (x, y) in PLACES.items():
        if name in books.tables:
            _table(books, pen, name, x, y)
    for source, target in books.copies:
        (x1, y1), (x2, y2) = _place(source), _place(target)
        w, h = CARD
        if source == target:
            continue  # a barrier that only pretends
        if x1 == x2:
            x, down = x1 + w - 26, y2 > y1
            pen.arrow(x, y1 + (h - 8 if down else 8), x, y2 + (4 if down else h - 4), 5)
        else:
            right = x2 > x1
            pen.arrow(x1 + (w - 8 if right else 8), y1 + h / 2, x2 + (4 if right else w - 4), y2 + h / 2, 5)
    last = "".join(f" ({source} → {target})" for source, target in books.copies)
    pen.text(8, 332, f"copies so far: {books.num_copies}{last}", 22, bold=True)


def _table(books: Books, pen: Svg, name: str, x: float, y: float) -> None:
    acting = books.move.request_id == name
    pen.box(x, y, 44, 44, owner(name).hue, 5 if acting else 2)
    pen.text(x + 22, y + 31, name, 26, "middle", bold=True)
    pen.texture(x + 1, y + 46, 42, 12, owner(name).texture)
    for i, block_id in enumerate(books.tables[name]):
        with pen.linked(block_id):
            pen.box(x + 56, y + 32 * i, 164, 32, width=5 if block_id in books.new and acting else 2)
            pen.text(x + 64, y + 23 + 32 * i, f"{i}: block {block_id}")


def _card(books: Books, pen: Svg, block_id: int, count: int) -> None:
    (x, y), (w, h), letters = _place(block_id), CARD, books.owners(block_id)
    changed = block_id in books.changed
    with pen.linked(block_id):
        pen.box(x, y, w, h, owner(letters).hue if letters else PAPER, 6 if changed else 2, not letters and not changed)
        if len(letters) > 1:
            pen.box(x + 5, y + 5, w - 10, h - 10, "none", 2)
        pen.text(x + 12, y + 28, f"block {block_id}")
        pen.text(x + 112, y + 28, letters or "free", bold=bool(letters))
        if count:
            pen.text(x + w - 12, y + 28, f"×{count}", 22, "end", bold=True)
        if letters:
            pen.texture(x + 186, y + 10, 44, 20, owner(letters).texture)
            row = books.words.get(block_id) or ("",) * books.block_size
            for i, word in enumerate(row):
                own = word in NEXT.values()
                pen.box(x + 10 + 68 * i, y + 35, 66, 33, PAPER, 1)
                pen.text(x + 43 + 68 * i, y + 58, word[:5], anchor="middle", bold=own)
        if block_id in books.wrong:
            pen.box(x - 3, y - 3, w + 6, h + 6, "none", 5)
            pen.text(x + w - 60, y + 28, "wrong", anchor="end", bold=True)


VIEW = View(
    name="fork",
    title="Fork and copy-on-write (写时复制)",
    begin=Books(),
    after=after,
    draw=draw,
    say=say,
    alt=alt,
    kinds=KINDS,
    legend=BLOCK_LEGEND,
    scenarios={
        name: Scenario(_run(num_prompt), Question(FORKED, WRITTEN, _ask, _answer, _why))
        for name, num_prompt in (("half_full", 10), ("full", 12))
    },
)
