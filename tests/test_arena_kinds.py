"""The buddy and the paged arena against plain models; traces through all of them; the closed forms against counting."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlab.arena import (
    BuddyArena,
    ContiguousArena,
    Job,
    PagedArena,
    expected_utilisation,
    make_jobs,
    measure,
    measure_paged,
    run_contiguous,
    run_paged,
    tail_waste,
)

# ---- buddies, against an owner per unit


def free_blocks(units, start, size):
    """The largest wholly free aligned blocks of units[start : start + size], found by halving."""
    if all(unit is None for unit in units[start : start + size]):
        return [(start, size)]
    if size == 1:
        return []
    half = size // 2
    return free_blocks(units, start, half) + free_blocks(units, start + half, half)


class BuddyMachine(RuleBasedStateMachine):
    CAPACITY, START = 27, 3  # 16 + 8 + 2 + 1

    def __init__(self):
        super().__init__()
        self.arena = BuddyArena(self.CAPACITY, self.START)
        self.units = [None] * self.CAPACITY
        self.number = 0

    def holes(self):
        parts = ((0, 16), (16, 8), (24, 2), (26, 1))
        return [hole for start, size in parts for hole in free_blocks(self.units, start, size)]

    @rule(size=st.integers(1, 20))
    def allocate(self, size):
        taken = next(power for power in (1, 2, 4, 8, 16, 32) if power >= size)
        fitting = [hole for hole in self.holes() if hole[1] >= taken]
        self.number += 1
        got = self.arena.allocate(self.number, size)
        if not fitting:
            assert got is None
        else:
            start = min(fitting, key=lambda hole: (hole[1], hole[0]))[0]
            assert got == start + self.START
            self.units[start : start + taken] = [self.number] * taken

    @precondition(lambda self: any(self.units))
    @rule(data=st.data())
    def free(self, data):
        owner = data.draw(st.sampled_from(sorted({unit for unit in self.units if unit})))
        self.arena.free(owner)
        self.units = [None if unit == owner else unit for unit in self.units]

    @invariant()
    def same_picture(self):
        assert [owner for _, size, owner in self.arena.layout() for _ in range(size)] == self.units
        assert [(hole.start - self.START, hole.size) for hole in self.arena.holes] == self.holes()


TestBuddies = BuddyMachine.TestCase
TestBuddies.settings = settings(max_examples=100, stateful_step_count=40)


# ---- pages, against a count


class PagedMachine(RuleBasedStateMachine):
    NUM, SIZE = 5, 4

    def __init__(self):
        super().__init__()
        self.arena = PagedArena(self.NUM, self.SIZE)
        self.held = {}  # owner -> slots

    @rule(owner=st.integers(0, 4), more=st.integers(1, 9))
    def grow(self, owner, more):
        blocks = lambda slots: -(-slots // self.SIZE)  # noqa: E731
        size = self.held.get(owner, 0) + more
        free = self.NUM - sum(map(blocks, self.held.values()))
        fits = blocks(size) - blocks(self.held.get(owner, 0)) <= free
        assert self.arena.grow(owner, size) == fits
        if fits:
            self.held[owner] = size

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data):
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.arena.free(owner)
        del self.held[owner]

    @invariant()
    def five_kinds_add_up(self):
        arena = self.arena
        tables = {owner: table for owner, table in arena.tables.items() if table}
        assert {owner: len(table) for owner, table in tables.items()} == {
            owner: -(-slots // self.SIZE) for owner, slots in self.held.items()
        }
        ids = [block for table in tables.values() for block in table] + list(arena.free_blocks)
        assert sorted(ids) == list(range(self.NUM)), "a block is lost, or held twice"
        used = sum(self.held.values())
        # The slots of a last block that will be filled later are reserved; those of one that has ended are lost.
        growing = measure_paged(arena, {owner: (slots, slots + 9) for owner, slots in self.held.items()})
        ended = measure_paged(arena, {owner: (slots, slots) for owner, slots in self.held.items()})
        assert growing.capacity == ended.capacity == self.NUM * self.SIZE
        assert (growing.used, growing.internal, growing.external) == (used, 0, 0)
        assert (ended.used, ended.reservation, ended.internal) == (used, 0, growing.reservation)


TestPages = PagedMachine.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=40)

# ---- one trace through all

ARENAS = {
    "first": lambda: ContiguousArena(3008),
    "best": lambda: ContiguousArena(3008, "best"),
    "buddy": lambda: BuddyArena(3008),
    "paged": lambda: PagedArena(188, 16),
}
JOBS = make_jobs(60, seed=5, low=50, high=450, prompt=20)


def run(kind, reserve=512, jobs=JOBS):
    arena = ARENAS[kind]()
    return run_paged(arena, jobs) if kind == "paged" else run_contiguous(arena, jobs, lambda job: reserve or job.final)


@pytest.mark.parametrize("kind", ARENAS)
@pytest.mark.parametrize("reserve", [512, None])
def test_every_step_accounts_for_every_slot(kind, reserve):
    moments = run(kind, reserve)
    assert [moment.step for moment in moments] == list(range(len(moments)))
    for moment in moments:
        assert moment.waste.capacity == 3008 and min(vars(moment.waste).values()) >= 0
        assert moment.running + moment.waiting + moment.finished == len(JOBS)
        assert sum(span.used for span in moment.spans) == moment.waste.used
        assert all(span.used <= span.size for span in moment.spans)
    last = moments[-1]
    assert (last.waiting, last.finished) == (0, len(JOBS) - last.running)
    # Each job is seen once with each number of tokens: it goes on where it was preempted.
    seen = sum(moment.waste.used for moment in moments)
    assert seen == sum(sum(range(job.prompt + 1, job.final + 1)) for job in JOBS)
    assert last.preempted == 0 or kind == "paged"


def test_one_seed_one_trace():
    assert JOBS == make_jobs(60, seed=5, low=50, high=450, prompt=20) != make_jobs(60, 6, 50, 450, 20)
    assert {job.prompt for job in JOBS} == {20} and all(70 <= job.final <= 470 for job in JOBS)


def test_paging_finishes_the_same_trace_sooner_and_wastes_less():
    moments = {kind: run(kind) for kind in ARENAS}
    busy = {kind: [m.waste.utilization for m in ms if m.waiting] for kind, ms in moments.items()}
    mean = {kind: sum(values) / len(values) for kind, values in busy.items()}
    assert len(moments["paged"]) < len(moments["first"]) == len(moments["best"])  # 512 for all: any hole is as good
    assert mean["paged"] > 2 * mean["first"]


def test_a_full_arena_sends_the_youngest_back_and_it_goes_on_where_it_was():
    moments = run_paged(PagedArena(4, 2), [Job("a", 1, 7), Job("b", 1, 6)])
    assert moments[-1].preempted >= 1 and moments[-1].waste.used == 6
    for owner, final in (("a", 7), ("b", 6)):
        held = [sum(span.used for span in m.spans if span.owner == owner) for m in moments]
        assert [slots for slots in held if slots] == list(range(2, final + 1))  # once with each number of tokens


def test_who_was_sent_back_comes_before_those_who_never_ran():
    moments = run_paged(PagedArena(4, 2), [Job("a", 1, 7), Job("b", 1, 6), Job("c", 1, 6)])
    back = next(m.step for m in moments if m.preempted)
    assert "c" not in {span.owner for m in moments[:back] for span in m.spans}
    after = [span.owner for m in moments[back:] for span in m.spans if span.owner != "a"]
    assert after[0] == "b"


# ---- closed forms, against counting

RANGES = st.tuples(st.integers(1, 60), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair)))


@given(lengths=RANGES, prompt=st.integers(0, 30), spare=st.integers(0, 30))
def test_the_averages_counted(lengths, prompt, spare):
    low, high = lengths
    reserve = prompt + high + spare
    looks = [[(prompt + t) / reserve for t in range(1, n + 1)] for n in range(low, high + 1)]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    got = expected_utilisation(low, high, reserve, prompt)
    assert got.static == pytest.approx(mean([one[-1] for one in looks]))
    assert got.per_request == pytest.approx(mean([mean(one) for one in looks]))
    assert got.over_time == pytest.approx(mean([look for one in looks for look in one]))


@given(block_size=st.integers(1, 40), cycles=st.integers(1, 4))
def test_the_last_block_counted(block_size, cycles):
    lengths = range(1, cycles * block_size + 1)  # every remainder equally often
    empty = sum(-length % block_size for length in lengths)
    assert tail_waste(sum(lengths) / len(lengths), block_size) == pytest.approx(empty / (sum(lengths) + empty))


def test_the_average_over_time_is_what_an_arena_finds():
    """One job of each length through an arena with room for all: used slots over reserved slots."""
    jobs = [Job(str(n), 20, 20 + n) for n in range(50, 451)]
    moments = run_contiguous(ContiguousArena(401 * 512), jobs, lambda job: 512)
    used, reserved = sum(m.waste.used for m in moments), sum(m.running * 512 for m in moments)
    assert used / reserved == pytest.approx(expected_utilisation(50, 450, 512, prompt=20).over_time)


# ---- the textbook's figures


def test_c05_lengths_150_to_300_in_4096():
    held = expected_utilisation(150, 300, 4096).static
    assert 1 - held == pytest.approx(0.945, abs=0.001)  # the text: 68% wasted
    assert (1 - tail_waste(225, 16)) / held == pytest.approx(17.6, abs=0.1)  # times as many at once; the text: 6.6


def test_c08_uniform_50_to_450_in_2048():
    got = expected_utilisation(50, 450, 2048)
    assert got == pytest.approx((0.122, 0.061, 0.074), abs=0.0005)  # over time, long ones are seen more often


def test_c25_experiment_one():
    rng = random.Random(2026)
    lengths = [rng.randint(40, 600) for _ in range(100)]
    fixed, paged = ContiguousArena(100 * 2048), PagedArena(100 * 128, 16)
    for i, length in enumerate(lengths):
        fixed.allocate(i, 2048)
        paged.grow(i, length)
    done = {i: (length, length) for i, length in enumerate(lengths)}
    one, two = measure(fixed, done, 2048), measure_paged(paged, done)
    assert (one.capacity, one.used, one.internal) == (204_800, 37_213, 167_587)
    assert one.utilization == pytest.approx(0.1817, abs=5e-5)
    assert (sum(map(len, paged.tables.values())), two.internal) == (2_375, 787)
    assert two.used / (two.used + two.internal) == pytest.approx(0.9793, abs=5e-5)
    assert one.capacity / (two.used + two.internal) == pytest.approx(5.39, abs=0.005)


def test_c36_and_c37_block_sizes():
    assert -20 % 128 / 128 == 0.84375  # a request of 20 tokens in a block of 128; the text: 70%
    assert tail_waste(242.5, 16) == pytest.approx(0.03)  # "under 3%" holds from this mean length on
    assert tail_waste(501.2, 32) == pytest.approx(0.03, abs=1e-4)


def test_c38_a_pool_of_128_blocks():
    lengths = [40, 128, 300, 64, 210, 96, 180, 48, 150, 80, 60, 420, 33, 256, 90, 110]
    reserving, paged = ContiguousArena(128), PagedArena(128, 16)
    reserved = [reserving.allocate(i, 512 // 16) for i in range(16)]
    admitted = reserved.index(None)
    filled = sum(-(-length // 16) for length in lengths[:admitted])
    assert (admitted, filled) == (4, 34) and 1 - filled / 128 == pytest.approx(0.73, abs=0.005)
    placed = [paged.grow(i, length) for i, length in enumerate(lengths)]
    assert placed.index(False) == 13
    assert sum(len(paged.tables[i]) for i in range(13)) == 118


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PagedArena(8, 0), "block_size is 0"),
        (lambda: PagedArena(8, 4).free("a"), "'a' holds no blocks"),
        (lambda: BuddyArena(8).free("a"), "'a' holds no region"),
        (lambda: BuddyArena(8).allocate(None, 1), "owner is None"),
        (lambda: run_contiguous(ContiguousArena(8), [Job("a", 1, 9)], lambda job: 8), "needs 9"),
        (lambda: run_paged(PagedArena(4, 2), [Job("a", 1, 9)]), "needs 9 of 8 slots"),
        (lambda: expected_utilisation(5, 4, 9), "give 1 <= low <= high"),
        (lambda: expected_utilisation(1, 10, 9), "reserve more"),
        (lambda: tail_waste(0, 16), "give positive numbers"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
