"""One stretch of memory, handed out in contiguous regions, as engines did it before paging (L33 1.1-1.2).

    start                                   start + capacity
      | A A A . . . . B B B B . . C C C . . . . |
              '-hole-'        '-'       '-hole-'

    free_total is 10, but largest_hole is 4: a region of 5 cannot be placed

A region is never moved or resized, since attention is reading it. allocate() takes the front of a hole;
free() gives the region back, joined with the holes beside it, so no two holes ever touch. The unit is the
caller's: token slots, blocks, or megabytes.
"""

from bisect import bisect_left
from collections.abc import Hashable
from typing import Literal, NamedTuple

Fit = Literal["first", "best", "worst"]


class Region(NamedTuple):
    """`size` units from `start` on, held by `owner`; a hole's owner is None."""

    start: int
    size: int
    owner: Hashable


class ContiguousArena:
    """`capacity` units with ids start .. start + capacity - 1.

    fit: which hole a region goes to when several are large enough: the "first" one by address, the "best"
    (smallest) or the "worst" (largest); the lowest address among equals. start: 1 lets the ids be an engine's
    block ids, whose block 0 is the null block.
    """

    def __init__(self, capacity: int, fit: Fit = "first", start: int = 0):
        _whole("capacity", capacity, at_least=1)
        _whole("start", start, at_least=0)
        if fit not in ("first", "best", "worst"):
            raise ValueError(f"fit is {fit!r}: choose 'first', 'best' or 'worst'")
        self.capacity, self.fit, self.start = capacity, fit, start
        self._holes: list[tuple[int, int]] = [(start, capacity)]  # (start, size) by address
        self._regions: dict[Hashable, tuple[int, int]] = {}

    def allocate(self, owner: Hashable, size: int) -> int | None:
        """Give owner a region of `size` units: its start, or None (nothing changed) if no hole is that large.

        Raises ValueError for a size under 1, for the owner None, and for an owner that has a region already.
        """
        _whole("size", size, at_least=1)
        if owner is None:
            raise ValueError("owner is None, which marks a hole: name the request")
        if owner in self._regions:
            raise ValueError(f"owner {owner!r} holds a region already: free it first, a region cannot grow")
        index = self._choose(size)
        if index is None:
            return None
        hole_start, hole_size = self._holes[index]
        if hole_size == size:
            del self._holes[index]
        else:
            self._holes[index] = (hole_start + size, hole_size - size)
        self._regions[owner] = (hole_start, size)
        return hole_start

    def free(self, owner: Hashable) -> None:
        """Take owner's region back and join it with the holes beside it; ValueError if it holds none."""
        if owner not in self._regions:
            raise ValueError(f"owner {owner!r} holds no region: it was freed before, or never allocated")
        start, size = self._regions.pop(owner)
        index = bisect_left(self._holes, (start, 0))
        if index < len(self._holes) and self._holes[index][0] == start + size:
            size += self._holes.pop(index)[1]
        if index > 0 and sum(self._holes[index - 1]) == start:
            index -= 1
            start, before = self._holes.pop(index)
            size += before
        self._holes.insert(index, (start, size))

    def _choose(self, size: int) -> int | None:
        """The index of the hole for `size` units; holes are in address order, so ties go to the lowest."""
        fitting = [i for i, (_, hole_size) in enumerate(self._holes) if hole_size >= size]
        if not fitting:
            return None
        if self.fit == "best":
            return min(fitting, key=lambda i: self._holes[i][1])
        if self.fit == "worst":
            return max(fitting, key=lambda i: self._holes[i][1])
        return fitting[0]

    @property
    def free_total(self) -> int:
        """Units in all holes together."""
        return sum(size for _, size in self._holes)

    @property
    def largest_hole(self) -> int:
        """The largest region that could be allocated now; 0 when the arena is full."""
        return max((size for _, size in self._holes), default=0)

    @property
    def holes(self) -> list[Region]:
        """The holes by address."""
        return [Region(start, size, None) for start, size in self._holes]

    @property
    def regions(self) -> list[Region]:
        """The regions held, by address."""
        return sorted(Region(start, size, owner) for owner, (start, size) in self._regions.items())

    def layout(self) -> list[Region]:
        """Regions and holes by address: they cover the arena, without gap or overlap. For drawing."""
        return sorted(self.regions + self.holes)


def _whole(name: str, value: int, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {at_least}")
