"""Copy-on-write played in words (lab 04). Whose functions do the bookkeeping is the caller's choice.

    Sheet            what the blocks hold: a word a slot, where a GPU has K and V
    Play(make_room)  sequences that write word by word; say() writes, keep() takes a picture of the moment
    draw_moments     the kept moments, one picture each
    beam_searches    real searches by the engine: who went on from whom, for somebody to play again in tables

    say("B", "soft") -> make_room(pool, table of B, ...) -> the copies, made on the sheet -> the word, written
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kvlab.blocks import BlockPool, KVCacheBlock, OutOfBlocks
from kvlab.config import EngineConfig
from kvlab.lab.draw.tables import draw_tables
from kvlab.parts import Parts
from kvlab.sampling_params import BeamSearchParams
from kvlab.schedule.beam import BeamMemory, beam_request

Table = list[KVCacheBlock]


class Sheet:
    """What the blocks hold, by block id. A slot that nobody has written holds ""."""

    def __init__(self, block_size: int = 4):
        self.block_size = block_size
        self.rows: dict[int, list[str]] = {}

    def write(self, table: Sequence[KVCacheBlock], position: int, word: str) -> None:
        self._row(table[position // self.block_size])[position % self.block_size] = word

    def copy(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        self.rows[target.block_id] = list(self._row(source))

    def read(self, table: Sequence[KVCacheBlock], num_tokens: int) -> list[str]:
        return [self._row(table[p // self.block_size])[p % self.block_size] for p in range(num_tokens)]

    def _row(self, block: KVCacheBlock) -> list[str]:
        return self.rows.setdefault(block.block_id, [""] * self.block_size)


@dataclass(frozen=True)
class Moment:
    """What draw_tables needs: block ids and words by name of the sequence, the blocks that are new, a title."""

    title: str
    tables: Mapping[str, list[int]]
    words: Mapping[str, list[str]]
    new: frozenset[int]


class Play:
    """Sequences over one pool and one sheet. make_room: the function of lab 04 that every write goes through."""

    def __init__(self, make_room: Callable[..., Any], block_size: int = 4, num_blocks: int = 40):
        self.make_room, self.block_size = make_room, block_size
        self.pool, self.sheet = BlockPool(num_blocks + 1), Sheet(block_size)
        self.tables: dict[str, Table] = {}
        self.lengths: dict[str, int] = {}
        self.num_copies = 0
        self.moments: list[Moment] = []

    @property
    def num_held(self) -> int:
        return self.pool.num_usable_blocks - self.pool.get_num_free_blocks()

    def put(self, name: str, table: Table, num_tokens: int) -> None:
        """`name` is now a sequence with this table, of which it reads the first num_tokens tokens."""
        self.tables[name], self.lengths[name] = table, num_tokens

    def say(self, name: str, words: str | Iterable[str]) -> frozenset[int]:
        """`name` (empty, if it is new) writes words, each through make_room. Returns the blocks new to its table.
        OutOfBlocks if the pool has too few."""
        table, before = self.tables.setdefault(name, []), set(self.tables[name])
        self.lengths.setdefault(name, 0)
        for word in words.split() if isinstance(words, str) else words:
            copies = self.make_room(self.pool, table, self.lengths[name], 1, self.block_size)
            if copies is None:
                raise OutOfBlocks(f"no room for {word!r}: {self.num_held} of {self.pool.num_usable_blocks} are held")
            for source, target in copies:
                self.sheet.copy(source, target)
            self.num_copies += len(copies)
            self.sheet.write(table, self.lengths[name], word)
            self.lengths[name] += 1
        return frozenset(block.block_id for block in table if block not in before)

    def read(self, name: str) -> list[str]:
        return self.sheet.read(self.tables[name], self.lengths[name])

    def keep(self, title: str, new: Collection[int] = ()) -> None:
        """Keep this moment; the title gets the blocks held and copied so far behind it."""
        blocks = f"{self.num_held} block{'s' * (self.num_held != 1)}, {self.num_copies} copied"
        tables = {name: [block.block_id for block in table] for name, table in self.tables.items()}
        words = {name: self.read(name) for name in self.tables}
        self.moments.append(Moment(f"{title}: {blocks}", tables, words, frozenset(new)))


def draw_moments(moments: Sequence[Moment], *, width: int = 12, height: int = 4, block_size: int = 4) -> Any:
    """A figure of the moments, two in a row and one scale for all: `width` positions, `height` sequences."""
    import matplotlib.pyplot as plt

    columns = min(2, len(moments))
    rows = -(-len(moments) // columns)
    size = (11 if columns > 1 else 8.5, rows * (0.6 + 0.5 * height))
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.get_layout_engine().set(h_pad=0.14, w_pad=0.1)  # inches: a title must not touch the ticks above it
    for ax in axes.flat[len(moments):]:
        ax.set_visible(False)
    for ax, moment in zip(axes.flat, moments, strict=False):
        draw_tables(ax, moment.tables, moment.words, block_size, new=moment.new, title=moment.title, width=width,
                    height=height)  # fmt: skip
    return figure


@dataclass(frozen=True)
class Search:
    """parents: for each step, the parents of the beams that lived on. memory: the engine's own account."""

    parents: list[list[int]]
    memory: BeamMemory


def beam_searches(shapes: Iterable[tuple[int, int, int]], block_size: int = 16) -> dict[tuple[int, int, int], Search]:
    """A search for each (prompt tokens, output tokens, width): by the model that we ship, over its glossary; without
    torch by the slot-echo model."""
    config = {"block_size": block_size, "num_gpu_blocks_override": 400}
    has_model = find_spec("torch") is not None and find_spec("transformers") is not None
    if has_model:
        from kvlab import LLM
        from kvlab.tiny import load_glossary

        llm = LLM("tiny", dtype="float32", **config)
        text = [t for entry in load_glossary() for t in llm.tokenizer.encode(entry["question"] + entry["answer"])]
    found = {}
    for num_prompt, num_output, width in shapes:
        params = BeamSearchParams(beam_width=width, max_tokens=num_output, ignore_eos=True)
        if has_model:
            (result,) = llm.beam_search([text[:num_prompt]], params)
        else:
            core = Parts().make_engine(EngineConfig(**config))
            request = beam_request("beams", list(range(num_prompt)), params)
            core.add_request(request)
            while core.has_unfinished_requests():
                core.step()
            result = request.group
        found[num_prompt, num_output, width] = Search(result.parents, result.memory)
    return found
