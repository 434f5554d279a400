"""View 3, the address explorer (地址, L33 2.2): token -> logical block -> physical block -> slot -> bytes.

The slot is `kvlab.blocks.slots.slot_of`, the bytes `kvlab.blocks.layout.byte_offset`, on tables of the real manager.
Scenarios: "scattered": where is the token after the last of a block? "wrong": a table entry is wrong: what is read?
The edit is made on a copy of the table, as a kernel would be handed it: the manager's own books stay right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvlab.blocks.layout import byte_offset
from kvlab.blocks.slots import slot_of
from kvlab.events import Event
from kvlab.parts import Parts
from kvlab.watch import books as blocks
from kvlab.watch.books import KINDS, Books
from kvlab.watch.stage import Stage
from kvlab.watch.style import BLOCK_LEGEND, PAPER, QUIET, owner
from kvlab.watch.svg import Svg
from kvlab.watch.view import Question, Scenario, View

HEADS, DIM, ITEM = 2, 4, 2  # of the example on the picture: 16 bytes a token in each layer's K, and as many in its V
TEXT = {"A": "my dog ate a red fig and ran far".split(), "B": "sun and sea at low ebb by day".split()}
NUM_BLOCKS = 7


@dataclass(frozen=True)
class Address:
    """books: as in the pool. reader, token: who reads which position; token -1: nobody reads. table: the reader's, as
    it is handed to the kernel. edited: the index in it that was changed, -1 for none."""

    books: Books = Books()
    reader: str = ""
    token: int = -1
    table: tuple[int, ...] = ()
    edited: int = -1

    @property
    def slot(self) -> int:
        """The slot of the token that is read. -1: nobody reads."""
        return slot_of(self.table, self.token, self.books.block_size) if self.token >= 0 else -1

    def found(self) -> tuple[str, str]:
        """(owner letters, word) in that slot."""
        block_id, offset = divmod(self.slot, self.books.block_size)
        row = self.books.words.get(block_id, ())
        return self.books.owners(block_id), row[offset] if row else ""


def _written(seed: int, parts: Parts) -> Stage:
    """A and B take blocks in turns, the seed says who comes first: the table of neither is a run of neighbours."""
    stage = Stage(NUM_BLOCKS, parts=parts)
    names = "AB" if Random(seed).random() < 0.5 else "BA"
    for start in (0, 4):
        for name in names:
            stage.write(name, TEXT[name][start : start + 4])
    stage.write("A", TEXT["A"][8:])
    return stage


def _read(stage: Stage, token: int) -> None:
    stage.move("read", "A", [token], lambda: None)


def _scattered(seed: int, parts: Parts) -> list[Event]:
    stage = _written(seed, parts)
    for token in (0, 3, 4, 7, 8):
        _read(stage, token)
    return stage.recorder.events()


def _wrong(seed: int, parts: Parts) -> list[Event]:
    stage = _written(seed, parts)
    _read(stage, 5)
    tables = stage.manager.req_to_blocks
    stage.move("edit", "A", [1, tables["B"][1].block_id], lambda: None)
    for token in (5, 6, 8):
        _read(stage, token)
    return stage.recorder.events()


READ = 6  # the first frame on which a token is read: the start and five writes come before
ASK = READ + 1  # "scattered": token 3 is read; "wrong": the entry has been edited


def after(state: Address, events: Sequence[Event]) -> Address:
    now = blocks.after(state.books, events)
    reader = next((e.request_id for e in events if e.kind in ("read", "edit")), "A" if "A" in now.tables else
                  min(now.tables, default=""))  # fmt: skip
    table, edited, token = now.tables.get(reader, ()), state.edited, -1
    if edited >= 0 and reader == state.reader:
        table = state.table
    for event in events:
        if event.kind == "edit":
            edited, block_id = event.values
            table = (*table[:edited], block_id, *table[edited + 1 :])
        elif event.kind == "read":
            [token] = event.values
    return Address(now, reader, token, table, edited)


def _ask_next(state: Address) -> tuple[str, Sequence[str]]:
    right, own = slot_of(state.table, state.token + 1, state.books.block_size), state.slot
    options = sorted({own + 1, right, state.token + 1, right + 1})
    return f"A's token {state.token} is in slot {own}. In which slot is token {state.token + 1}?", [
        f"slot {i}" for i in options]  # fmt: skip


def _answer_next(states: Sequence[Address]) -> int:
    return list(_ask_next(states[ASK])[1]).index(f"slot {states[ASK + 1].slot}")


def _why_next(states: Sequence[Address]) -> str:
    now = states[ASK + 1]
    return (f"Slot {now.slot}: token {now.token} is the first of the next block, and the table says that is block "
            f"{now.table[now.token // now.books.block_size]}.")  # fmt: skip


def _ask_wrong(state: Address) -> tuple[str, Sequence[str]]:
    return f"Entry 1 of A's table now says block {state.table[1]}, which is B's. A reads its token 5. What comes?", [
        "A's word, as before", "a word of B", "an error", "nothing: zeros"]  # fmt: skip


def _answer_wrong(states: Sequence[Address]) -> int:
    return 1 if states[ASK + 1].found()[0] == "B" else 0


def _why_wrong(states: Sequence[Address]) -> str:
    letters, word = states[ASK + 1].found()
    return f"{word}, a word of {letters}: the slot is computed from the entry, and nobody checks whose block it is."


def say(state: Address) -> str:
    size = state.books.block_size
    if state.books.error:
        return f"This move failed: {state.books.error}"[:140]
    if state.books.move.kind == "edit" and state.token < 0:
        return f"Entry {state.edited} of {state.reader}'s table is changed to block {state.table[state.edited]}."
    if state.token >= 0:
        letters, word = state.found()
        what = f': "{word}"' if word else ""
        whose = "" if letters == state.reader else f", which is {letters}'s"
        return (f'Token {state.token} of {state.reader}: entry {state.token // size} says block {state.slot // size}, '
                f'so it is slot {state.slot}{what}{whose}.')  # fmt: skip
    if not state.table:
        return f"{len(state.books.queue)} free blocks of {size} slots; nobody holds one."
    return f"{state.reader}'s table is {list(state.table)[:16]}: one entry for every {size} tokens, in their order."


def alt(state: Address) -> str:
    tables = "; ".join(f"{name} holds {blocks.named(t)}" for name, t in sorted(state.books.tables.items()))
    return f"Address explorer. {tables or 'Nobody holds a block'}. {say(state)}"


SLOT, TOKEN = 42, 62


def draw(state: Address, pen: Svg) -> None:
    size, name = state.books.block_size, state.reader
    pen.text(8, 22, f"tokens of {name}, and its block table (块表)" if name else "no request yet")
    shown = state.table[:4]
    for i, block_id in enumerate(shown):
        x = 8 + (size * TOKEN + 30) * i if size == 4 else 8 + 290 * i
        wide = (size * TOKEN if size == 4 else 270) / size
        own = state.books.tables.get(name, ())
        row = state.books.words.get(own[i] if i < len(own) else -1, ())
        for j in range(size):
            here = state.token == i * size + j
            pen.box(x + wide * j, 32, wide, 34, owner(name).hue, 6 if here else 1)
            if size <= 4:
                word = row[j] if j < len(row) else ""
                pen.text(x + wide * (j + 0.5), 56, word or "·", anchor="middle", bold=here)
                pen.text(x + wide * (j + 0.5), 88, i * size + j, anchor="middle", bold=here)
        with pen.linked(block_id):
            chosen = state.token >= 0 and state.token // size == i
            pen.box(x, 98, wide * size, 34, PAPER, 6 if chosen or state.edited == i else 2, state.edited == i)
            pen.text(x + 10, 122, f"{i}: block {block_id}" + (" (edited)" if state.edited == i else ""), bold=chosen)
    if state.token >= 0 and state.token // size < len(shown) and state.slot < 28:
        i = state.token // size
        pen.arrow(8 + 290 * i + 60 if size != 4 else 8 + 278 * i + 124, 135, 8 + SLOT * state.slot + SLOT / 2, 168, 4)
    _memory(state, pen)
    _formula(state, pen)


def _memory(state: Address, pen: Svg) -> None:
    size = state.books.block_size
    for block_id in range(min(len(state.books.refs), 28 // size)):
        x, letters = 8 + SLOT * size * block_id, state.books.owners(block_id)
        row = state.books.words.get(block_id, ())
        with pen.linked(block_id):
            pen.text(x + 4, 256, f"{block_id} {letters or ('null' if not block_id else 'free')}", bold=bool(letters))
            pen.texture(x + 60, 242, 100, 14, owner(letters).texture)
            pen.box(x, 170, SLOT * size - 4, 40, owner(letters).hue if letters else PAPER, 2, not letters)
            for j in range(size):
                slot, wide = block_id * size + j, (SLOT * size - 4) / size
                if slot == state.slot:
                    pen.box(x + wide * j, 170, wide, 40, "none", 6)
                if j < len(row) and row[j]:
                    pen.text(x + wide * (j + 0.5), 197, row[j][:3], anchor="middle", bold=slot == state.slot)
                pen.text(x + wide * (j + 0.5), 230, slot, anchor="middle", fill=QUIET)


def _formula(state: Address, pen: Svg) -> None:
    size, t = state.books.block_size, state.token
    if t < 0:
        pen.text(8, 298, f"block = table[token // {size}]", 22)
        pen.text(480, 298, f"slot = block × {size} + token % {size}", 22)
        return
    block_id, offset = divmod(state.slot, size)
    at = byte_offset("NHD", block_id, offset, 0, 0, size, HEADS, DIM, ITEM)
    pen.text(8, 298, f"block = table[{t} // {size}] = table[{t // size}] = {block_id}", 22, bold=True)
    pen.text(480, 298, f"slot = {block_id} × {size} + {t} % {size} = {state.slot}", 22, bold=True)
    pen.text(8, 330, f"byte = {state.slot} × {HEADS} heads × {DIM} dims × {ITEM} bytes = {at}, "
                     "in K as in V, in each layer's tensor", 22)  # fmt: skip


VIEW = View(
    "address", "The address explorer (地址)", Address(), after, draw, say, alt,
    kinds=KINDS,
    legend=BLOCK_LEGEND,
    scenarios={
        "scattered": Scenario(_scattered, Question(ASK, ASK + 1, _ask_next, _answer_next, _why_next)),
        "wrong": Scenario(_wrong, Question(ASK, ASK + 1, _ask_wrong, _answer_wrong, _why_wrong)),
    },
)  # fmt: skip
