"""One stretch of memory, handed out in contiguous regions, as engines did it before paging (L33 1.1-1.2).

    start                                   start + capacity
      | A A A . . . . B B B B . . C C C . . . . |
              '-hole-'        '-'       '-hole-'

    free_total is 10, but largest_hole is 4: a region of 5 cannot be placed

A region is never moved or resized, since attention is reading it. allocate() takes the front of a hole;
free() gives the region back, joined with the holes beside it, so no two holes ever touch. The unit is the
caller's: token slots, blocks, or megabytes. ArenaBase is what lab 02 builds on, FirstFit its first exercise.
"""

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

Fit = Literal["first", "best", "worst"]


class Region(NamedTuple):
    """`size` units from `start` on, held by `owner`; a hole's owner is None."""

    start: int
    size: int
    owner: Hashable


class ArenaBase:
    """`capacity` units with ids start .. start + capacity - 1. What every arena keeps and can tell.

    holes: the free stretches as Regions with owner None, by address. held: owner -> its Region.
    start: 1 lets the ids be an engine's block ids, whose block 0 is the null block.
    """

    def __init__(self, capacity: int, start: int = 0):
        _whole("capacity", capacity, at_least=1)
        _whole("start", start, at_least=0)
        self.capacity, self.start = capacity, start
        self.holes: list[Region] = [Region(start, capacity, None)]
        self.held: dict[Hashable, Region] = {}

    def check(self, owner: Hashable, size: int) -> None:
        """ValueError for a size under 1, for the owner None, and for an owner that has a region already."""
        _whole("size", size, at_least=1)
        if owner is None:
            raise ValueError("owner is None, which marks a hole: name the request")
        if owner in self.held:
            raise ValueError(f"owner {owner!r} holds a region already: free it first, a region cannot grow")

    @property
    def free_total(self) -> int:
        """Units in all holes together."""
        return sum(hole.size for hole in self.holes)

    @property
    def largest_hole(self) -> int:
        """The largest region that could be allocated now; 0 when the arena is full."""
        return max((hole.size for hole in self.holes), default=0)

    @property
    def regions(self) -> list[Region]:
        """The regions held, by address."""
        return sorted(self.held.values(), key=lambda region: region.start)

    def layout(self) -> list[Region]:
        """Regions and holes by address: they cover the arena, without gap or overlap. For drawing."""
        return sorted([*self.held.values(), *self.holes], key=lambda region: region.start)


class FirstFit(ArenaBase):
    """Places regions, and takes none back. choose() may be replaced by another rule."""

    def choose(self, size: int) -> int | None:
        """The index in `holes` of the hole for `size` units, None if none is large enough: here the first."""
        return choose_hole(self.holes, size, "first")

    def allocate(self, owner: Hashable, size: int) -> int | None:
        """Give owner a region of `size` units: its start, or None (nothing changed) if no hole is that large.

        Raises ValueError for a size under 1, for the owner None, and for an owner that has a region already.
        """
        self.check(owner, size)
        index = self.choose(size)
        if index is None:
            return None
        hole = self.holes[index]
        rest = hole.size - size
        self.holes[index : index + 1] = [Region(hole.start + size, rest, None)] if rest else []
        self.held[owner] = Region(hole.start, size, owner)
        return hole.start


class ContiguousArena(FirstFit):
    """Places regions and takes them back.

    fit: which hole a region goes to when several are large enough: the "first" one by address, the "best"
    (smallest) or the "worst" (largest); the lowest address among equals.
    """

    def __init__(self, capacity: int, fit: Fit = "first", start: int = 0):
        super().__init__(capacity, start)
        if fit not in ("first", "best", "worst"):
            raise ValueError(f"fit is {fit!r}: choose 'first', 'best' or 'worst'")
        self.fit = fit

    def choose(self, size: int) -> int | None:
        return choose_hole(self.holes, size, self.fit)

    def free(self, owner: Hashable) -> None:
        """Take owner's region back and join it with the holes beside it; ValueError if it holds none."""
        if owner not in self.held:
            raise ValueError(f"owner {owner!r} holds no region: it was freed before, or never allocated")
        start, size, _ = self.held.pop(owner)
        index = bisect_left(self.holes, start, key=lambda hole: hole.start)
        if index < len(self.holes) and self.holes[index].start == start + size:
            size += self.holes.pop(index).size
        if index > 0 and self.holes[index - 1].start + self.holes[index - 1].size == start:
            index -= 1
            start, before, _ = self.holes.pop(index)
            size += before
        self.holes.insert(index, Region(start, size, None))


def choose_hole(holes: Sequence[Region], size: int, fit: Fit = "first") -> int | None:
    """The index of the hole for `size` units, None if none is large enough; ties go to the lowest address."""
    fitting = [i for i, hole in enumerate(holes) if hole.size >= size]
    if not fitting:
        return None
    if fit == "best":
        return min(fitting, key=lambda i: holes[i].size)
    if fit == "worst":
        return max(fitting, key=lambda i: holes[i].size)
    return fitting[0]


def _whole(name: str, value: int, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {at_least}")
