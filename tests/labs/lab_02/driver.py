"""Lab 02: drives the student's arenas and formulas with plain values. Runs in the child process."""

import sys
from dataclasses import astuple
from numbers import Real

from kvlab.arena import ArenaBase, Region, Utilisation, Waste


def span(region, owner=None):
    """[start, size] of a Region of `owner`; with the owner behind it if that is another; a text if it is no Region."""
    if not isinstance(region, Region):
        return f"{region}, of class {type(region).__name__}"
    return [region.start, region.size] if region.owner == owner else [*region[:2], str(region.owner)]


def spans(regions):
    return [span(region) for region in regions]


def index_of(chosen):
    """What a choice gave. A hole in place of its index is a list."""
    return list(chosen) if isinstance(chosen, tuple) else chosen


def regions_of(pieces):
    """[[owner or None, size], ...] by address -> Regions."""
    made, start = [], 0
    for owner, size in pieces:
        made.append(Region(start, size, owner))
        start += size
    return made


class FirstFitDriver:
    """An arena that begins with `pieces` in it: (owner, size) by address; the owner None is a hole."""

    def __init__(self, student, pieces, start=0):
        self.arena = student.FirstFit(sum(size for _, size in pieces), start)
        placed = [Region(r.start + start, r.size, r.owner) for r in regions_of(pieces)]
        self.arena.holes = [r for r in placed if r.owner is None]
        self.arena.held = {r.owner: r for r in placed if r.owner is not None}

    def choose(self, size):
        return index_of(self.arena.choose(size))

    def allocate(self, owner, size):
        return self.arena.allocate(owner, size)

    def holes(self):
        return spans(self.arena.holes)

    def held(self):
        return {owner: span(region, owner) for owner, region in self.arena.held.items()}


class ArenaDriver:
    def __init__(self, student, capacity, start=0):
        self.arena = student.Arena(capacity, start)

    def allocate(self, owner, size):
        return self.arena.allocate(owner, size)

    def free(self, owner):
        self.arena.free(owner)

    def holes(self):
        return spans(self.arena.holes)

    def largest_hole(self):
        return self.arena.largest_hole


class ChooseDriver:
    def __init__(self, student):
        self.choose = student.choose_hole

    def choose_hole(self, sizes, size, fit):
        """The holes have the given sizes, with regions of 1 between them."""
        holes, start = [], 0
        for hole in sizes:
            holes.append(Region(start, hole, None))
            start += hole + 1
        before = list(holes)
        chosen = index_of(self.choose(holes, size, fit))
        return chosen if holes == before else {"given": chosen, "and holes has become": spans(holes)}


class WasteDriver:
    def __init__(self, student):
        self.student = student

    def internal_waste(self, size, final):
        return self.student.internal_waste(size, final)

    def reservation_waste(self, used, final):
        return self.student.reservation_waste(used, final)

    def external_waste(self, hole_sizes, need):
        return self.student.external_waste(list(hole_sizes), need)

    def measure(self, pieces, progress, need):
        placed = regions_of(pieces)
        arena = ArenaBase(sum(size for _, size in pieces))
        arena.holes = [r for r in placed if r.owner is None]
        arena.held = {r.owner: r for r in placed if r.owner is not None}
        found = self.student.measure(arena, {owner: tuple(pair) for owner, pair in progress.items()}, need)
        return list(astuple(found)) if isinstance(found, Waste) else f"a {type(found).__name__}, not a Waste"


class ExpectationDriver:
    def __init__(self, student):
        self.student = student

    def expected_utilisation(self, low, high, reserve, prompt=0):
        found = self.student.expected_utilisation(low, high, reserve, prompt)
        if not isinstance(found, Utilisation):
            return f"a {type(found).__name__}, not a Utilisation"
        return [float(share) if isinstance(share, Real) and not isinstance(share, bool) else share for share in found]

    def lines_run(self, low, high, reserve):
        """Lines of the student's cells that run in one call, libraries not counted."""
        count = 0

        def trace(frame, event, _):
            nonlocal count
            if not frame.f_code.co_filename.startswith("<your notebook"):
                return None
            count += event == "line"
            return trace

        sys.settrace(trace)
        try:
            self.student.expected_utilisation(low, high, reserve)
        finally:
            sys.settrace(None)
        return count


class PagedDriver:
    def __init__(self, student, num_blocks, block_size):
        self.arena = student.PagedArena(num_blocks, block_size)

    def grow(self, owner, num_tokens):
        return self.arena.grow(owner, num_tokens)

    def free(self, owner):
        self.arena.free(owner)

    def blocks_of(self, owner):
        return len(self.arena.tables.get(owner, ()))

    def num_free(self):
        return len(self.arena.free_blocks)

    def owners(self):
        return sorted(self.arena.tables)

    def first_blocks(self, owner, number):
        """The ids of the first blocks, to see that they stay when the table grows."""
        return list(self.arena.tables[owner][:number])

    def every_block_once(self):
        ids = [block for table in self.arena.tables.values() for block in table] + list(self.arena.free_blocks)
        return sorted(ids) == list(range(self.arena.num_blocks))


class BuddyDriver:
    def __init__(self, student, capacity):
        self.arena = student.BuddyArena(capacity)

    def allocate(self, owner, size):
        return self.arena.allocate(owner, size)

    def free(self, owner):
        self.arena.free(owner)

    def free_lists(self):
        return {size: sorted(offsets) for size, offsets in self.arena.free_lists.items() if offsets}

    def size_of(self, owner):
        return self.arena.held[owner].size
