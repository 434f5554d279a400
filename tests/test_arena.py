"""kvlab.arena: contiguous allocation against a bitmap model, and the wastes it makes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.arena import ContiguousArena, Region, external_waste, internal_waste, measure, reservation_waste

FITS = ("first", "best", "worst")


def honeycomb(fit="first"):
    """L33 1.2's picture in units of 0.5 GB: A 1 GB, hole 2, B 4, hole 1, C 3, hole 1.5; 12.5 GB in all."""
    arena = ContiguousArena(25, fit)
    for owner, size in (("A", 2), ("x", 4), ("B", 8), ("y", 2), ("C", 6)):
        assert arena.allocate(owner, size) is not None
    arena.free("x")
    arena.free("y")
    return arena


@pytest.mark.parametrize("fit", FITS)
def test_c07_four_and_a_half_gb_free_and_two_and_a_half_cannot_be_placed(fit):
    arena = honeycomb(fit)
    assert [hole.size for hole in arena.holes] == [4, 2, 3]  # 2, 1 and 1.5 GB
    assert arena.free_total == 9 and arena.largest_hole == 4
    before = arena.layout()
    assert arena.allocate("D", 5) is None
    assert arena.layout() == before
    assert arena.allocate("D", 4) == 2  # 2 GB go where x was
    assert external_waste([4, 2, 3], need=5) == 9  # all of it


@pytest.mark.parametrize(("fit", "start"), [("first", 2), ("best", 14), ("worst", 2)])
def test_the_fits_choose_different_holes(fit, start):
    assert honeycomb(fit).allocate("D", 2) == start


def test_worst_fit_takes_the_largest_hole():
    arena = ContiguousArena(12, "worst")
    for owner, size in (("a", 2), ("b", 2), ("c", 3), ("d", 1)):
        arena.allocate(owner, size)
    arena.free("a")
    arena.free("c")
    assert arena.allocate("e", 1) == 8  # the hole of 4 at the end, not those of 2 and 3


@pytest.mark.parametrize("order", ["abc", "acb", "bac", "bca", "cab", "cba"])
def test_neighbouring_holes_are_joined_whatever_the_order(order):
    arena = ContiguousArena(6)
    for owner in "abc":
        arena.allocate(owner, 2)
    for owner in order:
        arena.free(owner)
    assert arena.layout() == [Region(0, 6, None)]
    assert arena.allocate("all", 6) == 0


def test_ids_can_start_at_one():
    arena = ContiguousArena(4, start=1)
    assert [arena.allocate(i, 1) for i in range(5)] == [1, 2, 3, 4, None]
    assert arena.layout() == [Region(1 + i, 1, i) for i in range(4)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ContiguousArena(0), "capacity is 0"),
        (lambda: ContiguousArena(4, fit="next"), "fit is 'next'.*'first', 'best' or 'worst'"),
        (lambda: ContiguousArena(4, start=-1), "start is -1"),
        (lambda: honeycomb().allocate("D", 0), "size is 0"),
        (lambda: honeycomb().allocate("D", 1.5), "size is 1.5"),
        (lambda: honeycomb().allocate("A", 1), "'A' holds a region already"),
        (lambda: honeycomb().allocate(None, 1), "owner is None"),
        (lambda: honeycomb().free("x"), "'x' holds no region"),
        (lambda: internal_waste(16, 17), "cannot outgrow"),
        (lambda: reservation_waste(9, 8), "0 <= used <= final"),
        (lambda: external_waste([4], 0), "need is 0"),
        (lambda: measure(honeycomb(), {"A": (1, 1)}, 1), "no progress given for 'B'"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_eighty_of_2048_slots():
    """L33 1.1: 1968 slots are never used, 3.9% are."""
    assert internal_waste(2048, 80) == 1968
    arena = ContiguousArena(2048)
    arena.allocate("r", 2048)
    assert measure(arena, {"r": (80, 80)}, need=2048).utilization == pytest.approx(0.039, abs=0.0005)


def test_each_waste_is_told_from_the_others():
    arena = ContiguousArena(100)
    arena.allocate("a", 30)
    arena.allocate("gap", 14)
    arena.allocate("b", 20)
    arena.free("gap")  # holes of 14 and 36
    waste = measure(arena, {"a": (10, 25), "b": (20, 20)}, need=12)
    assert (waste.used, waste.reservation, waste.internal) == (30, 15, 5)
    assert (waste.external, waste.placeable) == (2, 48)  # 14 = 12 + 2, 36 = 3 x 12
    assert waste.capacity == 100 and waste.utilization == 0.30


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 40), max_size=8), need=st.integers(1, 40))
def test_external_waste_is_what_is_left_after_placing_as_many_as_possible(sizes, need):
    arena = ContiguousArena(sum(sizes) + len(sizes) + 1)
    for i, size in enumerate(sizes):  # holes of the given sizes, a wall of 1 between them
        arena.allocate(("hole", i), size)
        arena.allocate(("wall", i), 1)
    arena.allocate("end", 1)
    for i in range(len(sizes)):
        arena.free(("hole", i))
    progress = {region.owner: (1, 1) for region in arena.regions}
    waste = measure(arena, progress, need)
    placed = 0
    while arena.allocate(("more", placed), need) is not None:
        placed += 1
    assert waste.placeable == placed * need
    assert waste.external == arena.free_total
    assert waste.capacity == arena.capacity


class AgainstBitmap(RuleBasedStateMachine):
    """The same requests to an arena and to a list with an owner per unit, searched unit by unit."""

    fit = "first"
    start = 0

    def __init__(self):
        super().__init__()
        self.arena = ContiguousArena(24, self.fit, self.start)
        self.units: list[int | None] = [None] * 24
        self.next_owner = 0

    def runs(self) -> list[tuple[int, int]]:
        """(index, length) of every maximal run of free units."""
        found, index = [], 0
        while index < len(self.units):
            length = 0
            while index + length < len(self.units) and self.units[index + length] is None:
                length += 1
            if length:
                found.append((index, length))
            index += length + 1
        return found

    @rule(size=st.integers(1, 26))
    def allocate(self, size):
        fitting = [run for run in self.runs() if run[1] >= size]
        key = {"first": lambda r: r[0], "best": lambda r: (r[1], r[0]), "worst": lambda r: (-r[1], r[0])}[
            self.fit
        ]
        expected = min(fitting, key=key)[0] if fitting else None
        owner, self.next_owner = self.next_owner, self.next_owner + 1
        got = self.arena.allocate(owner, size)
        if expected is None:
            assert got is None
        else:
            assert got == expected + self.start
            self.units[expected : expected + size] = [owner] * size

    @precondition(lambda self: any(unit is not None for unit in self.units))
    @rule(data=st.data())
    def free(self, data):
        owner = data.draw(st.sampled_from(sorted({unit for unit in self.units if unit is not None})))
        self.arena.free(owner)
        self.units = [None if unit == owner else unit for unit in self.units]

    @invariant()
    def same_picture(self):
        layout = self.arena.layout()
        assert [region.owner for region in layout for _ in range(region.size)] == self.units
        assert [region.start - self.start for region in layout] == [
            sum(region.size for region in layout[:i]) for i in range(len(layout))
        ]
        assert [(hole.start - self.start, hole.size) for hole in self.arena.holes] == self.runs()
        assert self.arena.free_total == self.units.count(None)
        assert self.arena.largest_hole == max((length for _, length in self.runs()), default=0)


def _machine(fit, start):
    machine = type(f"AgainstBitmap_{fit}_{start}", (AgainstBitmap,), {"fit": fit, "start": start})
    case = machine.TestCase
    case.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
    return case


TestFirstFit = _machine("first", 0)
TestBestFit = _machine("best", 1)
TestWorstFit = _machine("worst", 7)
