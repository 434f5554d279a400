"""The paged arena on paper: fixed blocks in any order, and a table for each owner (L33 2.2; PAV 2, 4).

    table of A: [3, 0]      | A A A .| B B B B| B . . .| A A A A|      block_size 4: A holds 7 tokens, B 5
                               block 0  block 1  block 2  block 3

Nothing is reserved but the rest of the last block, and any free block is as good as any other. The engine's own block
layer, with reference counts and hashes, is kvlab.blocks (lab 03).
"""

from collections.abc import Hashable, Mapping

from kvlab.arena.contiguous import _whole
from kvlab.arena.waste import Waste, internal_waste, reservation_waste


class PagedBase:
    """`num_blocks` blocks of `block_size` slots. free_blocks: ids that nobody owns. tables: owner -> its block ids."""

    def __init__(self, num_blocks: int, block_size: int = 16):
        _whole("num_blocks", num_blocks, at_least=1)
        _whole("block_size", block_size, at_least=1)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks: list[int] = list(reversed(range(num_blocks)))  # pop() gives the lowest id first
        self.tables: dict[Hashable, list[int]] = {}

    @property
    def capacity(self) -> int:
        """Slots in all blocks."""
        return self.num_blocks * self.block_size


class PagedArena(PagedBase):
    """Gives owners the blocks that their tokens need, when they need them."""

    def grow(self, owner: Hashable, num_tokens: int) -> bool:
        """Make owner's table long enough for `num_tokens` in all. False, and nothing changed, if blocks are short."""
        missing = -(-num_tokens // self.block_size) - len(self.tables.get(owner, ()))
        if missing > len(self.free_blocks):
            return False
        table = self.tables.setdefault(owner, [])
        for _ in range(missing):
            table.append(self.free_blocks.pop())
        return True

    def free(self, owner: Hashable) -> None:
        """Take all blocks of owner back; ValueError if it holds no table."""
        if owner not in self.tables:
            raise ValueError(f"owner {owner!r} holds no blocks: it was freed before, or never came")
        self.free_blocks += self.tables.pop(owner)


def measure_paged(arena: PagedBase, progress: Mapping[Hashable, tuple[int, int]]) -> Waste:
    """The same five kinds as `measure`: only last blocks waste, and there is no external waste at all.

    progress: owner -> (used, final) for every owner in the arena.
    """
    used = reservation = internal = 0
    for owner, table in arena.tables.items():
        now, final = progress[owner]
        size = len(table) * arena.block_size
        used += now
        reservation += reservation_waste(now, min(final, size))
        internal += internal_waste(size, min(final, size))
    return Waste(used, reservation, internal, 0, placeable=len(arena.free_blocks) * arena.block_size)
