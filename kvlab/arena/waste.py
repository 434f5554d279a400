"""The three wastes of contiguous allocation, each slot of the arena counted exactly once.

    a request's region:   | used | reservation waste |  internal waste  |
                          0      used              final             size
                                 will be written     nobody will ever
                                 later (L33 1.3)     write it (L33 1.1)

    outside all regions:  | placeable: further regions of `need` fit | external waste (L33 1.2) |

`used` tokens have their K/V now; `final` is the request's length when it ends, which only hindsight (or a
simulation) knows. The same slot moves from one column to the next as time goes on, so a figure of waste is of
a moment.
"""

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from kvlab.arena.contiguous import ArenaBase, Region


def internal_waste(size: int, final: int) -> int:
    """Internal fragmentation (内部碎片, L33 1.1): slots of a region of `size` that its request never fills.

    A request that ends at 80 of 2048 reserved slots wastes 1968 of them for as long as it runs.
    """
    if not 0 <= final <= size:
        raise ValueError(f"final length {final} in a region of {size}: a request cannot outgrow its region")
    return size - final


def reservation_waste(used: int, final: int) -> int:
    """Reservation waste (预留浪费, L33 1.3): slots that the request will fill, but has not yet."""
    if not 0 <= used <= final:
        raise ValueError(f"{used} tokens used of a final length of {final}: give 0 <= used <= final")
    return final - used


def external_waste(hole_sizes: Iterable[int], need: int) -> int:
    """External fragmentation (外部碎片, L33 1.2): free slots that no further region of `need` slots can take.

    Each hole holds size // need such regions; what is over, in every hole, is the waste. It depends on the
    size that is asked for: holes of 20, 10 and 15 waste all 45 for need = 25, and nothing for need = 5.
    """
    if need < 1:
        raise ValueError(f"need is {need}: give the slots of the next region, at least 1")
    return sum(size % need for size in hole_sizes)


@dataclass(frozen=True)
class Waste:
    """Slots of an arena at one moment; the five add up to its capacity."""

    used: int
    reservation: int
    internal: int
    external: int
    placeable: int

    @property
    def capacity(self) -> int:
        return self.used + self.reservation + self.internal + self.external + self.placeable

    @property
    def utilization(self) -> float:
        """The share of all slots that holds K/V now (L33 1.4)."""
        return self.used / self.capacity


def measure(arena: ArenaBase, progress: Mapping[Hashable, tuple[int, int]], need: int) -> Waste:
    """Where each slot of the arena is now.

    progress: owner -> (used, final) for every owner in the arena. need: slots of the region that would be
    asked for next. Raises ValueError if an owner's progress is missing or does not fit its region.
    """
    used = reservation = internal = 0
    for region in arena.regions:
        now, final = _progress_of(region, progress)
        used += now
        reservation += reservation_waste(now, final)
        internal += internal_waste(region.size, final)
    external = external_waste((hole.size for hole in arena.holes), need)
    return Waste(used, reservation, internal, external, placeable=arena.free_total - external)


def _progress_of(region: Region, progress: Mapping[Hashable, tuple[int, int]]) -> tuple[int, int]:
    if region.owner not in progress:
        raise ValueError(
            f"no progress given for {region.owner!r}: give (used, final) for every owner in the arena"
        )
    return progress[region.owner]
