"""The same prompts over a radix tree and over a hash chain, move by move: stage and state of the view `prefix`.

    twins = Twins(13, {"A": words, "B": words})    twins.prompt("A")    twins.finish("A")    -> twins.recorder.events()

Two managers of our own, each with its index and its pool, make the same moves; what they report becomes a Shelf. A
student's index takes the side that it belongs to, the tree's if it has `roots`; so ours is always there to compare.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvlab.config import EngineConfig
from kvlab.events import Event
from kvlab.parts import Parts
from kvlab.prefix import HashChainIndex, RadixTreeIndex
from kvlab.schedule.request import Request
from kvlab.watch import books
from kvlab.watch.books import Books
from kvlab.watch.stage import Stage, probe_tree


class Twins(Stage):
    """num_blocks: of the chain's pool, null block included; the tree's holds as many tokens. prompts: who will come.

    tree_block_size: tokens in a block of the tree; None: as many as in one of the chain.
    """

    def __init__(self, num_blocks: int, prompts: Mapping[str, Sequence[str]], block_size: int = 4,
                 tree_block_size: int | None = None, parts: Parts | None = None):  # fmt: skip
        parts, small = parts or Parts(), tree_block_size or block_size
        config = EngineConfig(block_size=small, num_gpu_blocks_override=(num_blocks - 1) * block_size // small + 1)
        is_tree = hasattr(parts.make_manager(config).block_pool.prefix_index, "roots")
        self.tree = (parts if is_tree else parts | Parts(prefix_index=RadixTreeIndex)).make_manager(config)
        self.prompts, self.tree_block_size = prompts, small
        self.words = sorted({word for words in prompts.values() for word in words})  # a token is a place in this list
        chain = parts | Parts(prefix_index=HashChainIndex) if is_tree else parts
        super().__init__(num_blocks, block_size, chain, caching=True)
        self.move("coming", None, prompts, self._announce)

    def _announce(self) -> None:
        for name, words in self.prompts.items():
            self.recorder.emit("wait", name, words)

    def _probe(self) -> None:
        super()._probe()
        self.recorder.emit("tree", None, [self.tree_block_size])
        probe_tree(self.tree, self.recorder, lambda chunk: " ".join(self.words[token] for token in chunk))

    def prompt(self, name: str) -> None:
        """The prompt of `name` comes: what is cached is found, the rest is computed and published."""
        self.move("prompt", name, self.prompts[name], lambda: self._prompt(name))

    def _prompt(self, name: str) -> None:
        tokens = [self.words.index(word) for word in self.prompts[name]]
        for side, manager in (("chain", self.manager), ("tree", self.tree)):
            request = Request(name, tokens)
            hits, found = manager.get_computed_blocks(request)
            if manager.allocate_slots(request, len(tokens) - found, hits) is None:
                self.recorder.emit("refused", name, [side])
                continue
            manager.cache_blocks(request, len(tokens))
            self.recorder.emit("match", name, [side, found, *(block.block_id for block in hits)])

    def finish(self, name: str) -> None:
        self.move("finish", name, [], lambda: [side.free(Request(name, [0])) for side in (self.manager, self.tree)])


class Place(NamedTuple):
    """A block's place in the tree. block_id None: a gap."""

    text: str
    block_id: int | None
    ref_cnt: int
    holders: str


class Edge(NamedTuple):
    """depth: blocks before it. parent: its parent's row, -1 at the root."""

    depth: int
    row: int
    parent: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Row:
    """One request. words: of its prompt, where they are known. found, found_in_tree: tokens, None before it came.

    block_ids, names: its table in the chain's pool, and under which names its blocks were published ("": none).
    """

    num_tokens: int = 0
    words: tuple[str, ...] = ()
    found: int | None = None
    found_in_tree: int | None = None
    block_ids: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shelf:
    """books: of the chain's pool. rows: by request. names: block id -> name, what the index finds now.

    edges: the tree. hits: ids in the tree found in this step; grown: (depth, text, id) of places new in it.
    evicted: blocks that lost their name in this step. again: who comes in it has come before.
    paired: tree and chain are two indexes; else the run has one.
    """

    books: Books = Books()
    rows: Mapping[str, Row] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    tree_block_size: int = 4
    hits: frozenset[int] = frozenset()
    grown: frozenset[tuple] = frozenset()
    evicted: tuple[int, ...] = ()
    again: bool = False
    paired: bool = False

    @property
    def acting(self) -> str:
        return self.books.move.request_id or ""

    def finds(self, name: str, i: int) -> bool:
        """Is block i of `name` still what it was: held, or kept under its name?"""
        row = self.rows[name]
        id_ = row.block_ids[i]
        return name in self.books.tables or bool(row.names[i]) and self.names.get(id_) == row.names[i]

    def differs(self, name: str) -> bool:
        """Tree and chain of the same block size found unequal beginnings: one of them is wrong."""
        row = self.rows[name]
        equal = row.found_in_tree in (None, row.found) or self.tree_block_size != self.books.block_size
        return not equal


def after(shelf: Shelf, events: Sequence[Event]) -> Shelf:
    """The shelf once `events`, those of one step, have happened."""
    moved = next((event for event in events if event.kind in ("coming", "prompt")), None)
    now = books.after(shelf.books, events)
    now = now if moved is None else replace(now, move=moved)
    rows, edges, hits = dict(shelf.rows), [], list[int]()
    names, evicted, started = dict(shelf.names), list[int](), set[str]()
    small, again, paired = shelf.tree_block_size, False, shelf.paired
    for event in events:
        _, kind, name, values = event
        row = rows.get(name or "", Row())
        if kind == "wait":
            rows[name or ""] = Row(len(values), tuple(values))
        elif kind == "add":
            rows[name or ""] = Row(values[0])
        elif kind == "prompt":
            again = row.found is not None
            rows[name or ""] = Row(len(values), tuple(values))
        elif kind == "match":
            side, found, *ids = values
            rows[name or ""] = replace(row, found=found) if side == "chain" else replace(row, found_in_tree=found)
            hits += ids if side == "tree" else []
        elif kind == "schedule" and name in rows and row.found is None:
            rows[name] = replace(row, found=values[0])
            started.add(name)
            now = replace(now, move=event)
        elif kind == "index":
            now, small = replace(now, block_size=values[0]), values[0]
        elif kind == "tree":
            small, paired = values[0], True
        elif kind == "edge":
            places = tuple(Place(*values[i : i + 4]) for i in range(3, len(values), 4))
            edges.append(Edge(*values[:3], places))
        elif kind == "names":
            names = dict(zip(values[::2], values[1::2], strict=True))
        elif kind == "evict":
            evicted += values
    for name, table in now.tables.items():
        rows[name] = replace(rows.get(name, Row()), block_ids=table, names=tuple(names.get(i, "") for i in table))
    for name in set(shelf.books.tables) - set(now.tables):  # it may have published in the step in which it ended
        row = rows[name]
        kept = {id_: names[id_] for id_ in row.block_ids if id_ in names and id_ not in now.new}
        rows[name] = replace(row, names=tuple(kept.get(*pair) for pair in zip(row.block_ids, row.names, strict=True)))
    for name in started & set(now.tables):
        hits += rows[name].block_ids[: (rows[name].found or 0) // now.block_size]
    if not any(event.kind == "names" for event in events):  # a step that nobody has probed
        edges = list(shelf.edges)
    grown = frozenset(_places(edges) - _places(shelf.edges))
    return replace(shelf, books=now, rows=rows, names=names, edges=tuple(edges), tree_block_size=small,
                   hits=frozenset(hits), grown=grown, evicted=tuple(evicted), again=again, paired=paired)  # fmt: skip


def _places(edges: Sequence[Edge]) -> set[tuple]:
    return {(edge.depth + i, place.text, place.block_id) for edge in edges for i, place in enumerate(edge.places)}


def common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many tokens the two begin with in common."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
