"""The buddy system: regions of 1, 2, 4, 8, ... units, split in halves and joined again.

    16                        | - - - - - - - - - - - - - - - - |
    allocate("A", 3): take 4  | A A A a | - - - - | - - - - - - - - |     halves of 8 and 4 stay free

The buddy of the region of size s at offset x is at x ^ s, so joining is one look-up. Holes are found fast and join
fast; the price is the rounding up. Our own extension: L33 does not treat it.
"""

from collections.abc import Hashable

from kvlab.arena.contiguous import ArenaBase, Region, _whole


class BuddyBase(ArenaBase):
    """free_lists: size (a power of two) -> the offsets of the free regions of that size. Offsets count from 0.

    Any capacity will do: 13 begins as regions of 8, 4 and 1.
    """

    def __init__(self, capacity: int, start: int = 0):
        _whole("capacity", capacity, at_least=1)
        _whole("start", start, at_least=0)
        self.capacity, self.start = capacity, start
        self.held = {}
        self.free_lists: dict[int, set[int]] = {}
        offset = 0
        for power in range(capacity.bit_length() - 1, -1, -1):
            here = bool(capacity & 1 << power)
            self.free_lists[1 << power] = {offset} if here else set()
            offset += here << power

    @property
    def holes(self) -> list[Region]:
        """The free regions by address."""
        return sorted(Region(self.start + x, size, None) for size, offsets in self.free_lists.items() for x in offsets)

    def place(self, owner: Hashable, offset: int, size: int) -> int:
        """Write down that owner holds the region: its start."""
        self.held[owner] = Region(self.start + offset, size, owner)
        return self.start + offset

    def take(self, owner: Hashable) -> tuple[int, int]:
        """(offset, size) of owner's region, which it holds no longer. ValueError if it holds none."""
        if owner not in self.held:
            raise ValueError(f"owner {owner!r} holds no region: it was freed before, or never allocated")
        region = self.held.pop(owner)
        return region.start - self.start, region.size


class BuddyArena(BuddyBase):
    """Places regions rounded up to a power of two."""

    def allocate(self, owner: Hashable, size: int) -> int | None:
        """The start of a region of at least `size`, cut from the smallest free one, lowest first; None if none fits."""
        self.check(owner, size)
        wanted = 1 << (size - 1).bit_length()
        found = min((s for s, offsets in self.free_lists.items() if s >= wanted and offsets), default=None)
        if found is None:
            return None
        offset = min(self.free_lists[found])
        self.free_lists[found].remove(offset)
        while found > wanted:
            found //= 2
            self.free_lists[found].add(offset + found)
        return self.place(owner, offset, wanted)

    def free(self, owner: Hashable) -> None:
        """Take owner's region back, joined with its buddy as long as that is free; ValueError if it holds none."""
        offset, size = self.take(owner)
        while offset ^ size in self.free_lists[size]:
            self.free_lists[size].remove(offset ^ size)
            offset, size = min(offset, offset ^ size), 2 * size
        self.free_lists[size].add(offset)
