"""The state of views that show blocks: the allocator's books at one step, and what changed in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvlab.blocks.audit import audit
from kvlab.events import Event

MOVES = ("stage", "write", "fork_all", "finish")
KINDS = frozenset({"refs", "queue"})


@dataclass(frozen=True)
class Books:
    """refs: count by block id. queue: free blocks, head first. tables: request -> block ids.
    words: block id -> what its slots hold. move: the event that led here; new: blocks that it took.
    copies: (from, to) that it needed. num_copies: so far. freed: blocks that it gave back. wrong: kvlab.blocks.audit.
    """

    block_size: int = 4
    refs: tuple[int, ...] = ()
    queue: tuple[int, ...] = ()
    tables: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    words: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    move: Event = Event(0, "stage", None, ())
    new: tuple[int, ...] = ()
    freed: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    num_copies: int = 0
    changed: frozenset[int] = frozenset()
    wrong: Mapping[int, str] = field(default_factory=dict)
    error: str = ""
    refused: bool = False

    def owners(self, block_id: int) -> str:
        """The letters of those whose tables name the block, in order."""
        return "".join(name for name, table in sorted(self.tables.items()) if block_id in table)


def after(books: Books, events: Sequence[Event]) -> Books:
    """The books once `events`, those of one step, have happened."""
    words = {block_id: list(row) for block_id, row in books.words.items()}
    tables: dict[str, tuple[int, ...]] = {}
    new: list[int] = []
    freed: list[int] = []
    copies: list[tuple[int, int]] = []
    size, refs, queue, error = books.block_size, books.refs, books.queue, ""
    move, probed = events[0], False
    for event in events:
        kind, values = event.kind, event.values
        if kind in MOVES:
            move = event
        if kind == "stage":
            size = values[1]
        elif kind == "block_size":
            size = values[0]
        elif kind == "alloc":
            new += values
            words.update({block_id: [""] * size for block_id in values})
        elif kind == "free":
            freed += values
        elif kind == "copy":
            copies.append((values[0], values[1]))
            words[values[1]] = list(words.get(values[0], [""] * size))
        elif kind == "slot":
            words.setdefault(values[0], [""] * size)[values[1]] = values[2]
        elif kind == "table":
            tables[event.request_id] = values
        elif kind == "refs":
            refs, probed = values, True
        elif kind == "queue":
            queue = values
        elif kind == "error":
            error = values[0]
    tables = tables if probed else dict(books.tables)
    for block_id in freed:
        words.pop(block_id, None)
    kept = {block_id: tuple(row) for block_id, row in words.items()}
    changed = {i for i, count in enumerate(refs) if books.refs and count != books.refs[i]}
    changed |= {i for i, row in kept.items() if row != books.words.get(i)}
    wrong = audit(dict(list(enumerate(refs))[1:]), queue, list(tables.values()))
    return replace(books, block_size=size, refs=refs, queue=queue, tables=tables, words=kept, move=move, new=tuple(new),
                   freed=tuple(freed), copies=tuple(copies), num_copies=books.num_copies + len(copies),
                   changed=frozenset(changed), wrong=wrong, error=error,
                   refused=any(event.kind == "refused" for event in events))  # fmt: skip


def listed(things: Sequence[object]) -> str:
    """As said aloud: "3", "3 and 7", "3, 7 and 9"."""
    words = list(map(str, things))
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def tokens(number: int) -> str:
    return f"{number} token{'s' * (number != 1)}"


def named(block_ids: Sequence[int]) -> str:
    """Blocks as said aloud: "block 3", "blocks 3 and 7"; "no block" for none."""
    return f"block{'s' * (len(block_ids) > 1)} {listed(block_ids)}" if block_ids else "no block"
