"""kvlab.arena: pages, buddies, closed forms and the trace through any arena; each against something slower."""

import random
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.arena import (
    BuddyArena,
    ContiguousArena,
    Job,
    PagedArena,
    expected_utilisation,
    make_jobs,
    measure_paged,
    run_contiguous,
    run_paged,
    tail_waste,
)


def by_enumeration(low, high, reserve, prompt):
    """Every step of every length."""
    steps = [[Fraction(prompt + t, reserve) for t in range(1, n + 1)] for n in range(low, high + 1)]
    static = sum(one[-1] for one in steps) / len(steps)
    per_request = sum(sum(one) / len(one) for one in steps) / len(steps)
    return static, per_request, sum(map(sum, steps)) / sum(map(len, steps))


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 9), st.integers(0, 9))
def test_closed_forms_are_what_enumeration_gives(low, more, prompt, room):
    high = low + more
    reserve = prompt + high + room
    want = by_enumeration(low, high, reserve, prompt)
    assert expected_utilisation(low, high, reserve, prompt) == pytest.approx([float(share) for share in want])


def test_c08_six_percent_for_the_average_request_seven_at_a_random_moment():
    static, per_request, over_time = expected_utilisation(50, 450, 2048)
    assert [round(100 * share, 2) for share in (static, per_request, over_time)] == [12.21, 6.13, 7.44]


@pytest.mark.parametrize("block_size", [1, 2, 16, 128])
def test_tail_waste_is_the_mean_of_what_is_over(block_size):
    lengths = range(1, 4 * block_size + 1)  # every residue as often
    held = [-(-n // block_size) * block_size for n in lengths]
    assert tail_waste(sum(lengths) / len(lengths), block_size) == pytest.approx(1 - sum(lengths) / sum(held))


def test_c37_under_three_percent_from_which_mean_on():
    assert tail_waste(242, 16) > 0.03 > tail_waste(243, 16)
    assert tail_waste(501, 32) > 0.03 > tail_waste(502, 32)


asks = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 12)), max_size=20)


@given(st.integers(1, 6), st.sampled_from((1, 3, 4)), asks)
def test_pages_against_counting(num_blocks, block_size, asked):
    """(owner, n): grow by n tokens; 0 frees."""
    arena, tokens = PagedArena(num_blocks, block_size), {}
    for owner, n in asked:
        if n == 0:
            if owner in tokens:
                arena.free(owner)
                del tokens[owner]
            else:
                with pytest.raises(ValueError, match="holds no blocks"):
                    arena.free(owner)
        else:
            wanted = tokens | {owner: tokens.get(owner, 0) + n}
            fits = sum(-(-t // block_size) for t in wanted.values()) <= num_blocks
            assert arena.grow(owner, wanted[owner]) is fits
            tokens = wanted if fits else tokens
        ids = sorted([block for table in arena.tables.values() for block in table] + arena.free_blocks)
        assert ids == list(range(num_blocks))
        lengths = {o: len(table) for o, table in arena.tables.items()}
        assert lengths == {o: -(-t // block_size) for o, t in tokens.items()}
        waste = measure_paged(arena, {o: (t, t + 5) for o, t in tokens.items()})
        assert waste.capacity == arena.capacity and waste.external == 0 and waste.used == sum(tokens.values())


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=25))
def test_buddies_cover_the_arena_and_join_when_they_can(capacity, asked):
    arena, owners = BuddyArena(capacity, start=1), []
    fresh = [hole[:2] for hole in BuddyArena(capacity, start=1).holes]
    for i, (free, size) in enumerate(asked):
        if free and owners:
            arena.free(owners.pop(size % len(owners)))
        elif (start := arena.allocate(i, size)) is not None:
            owners.append(i)
            region = arena.held[i]
            assert region.start == start and size <= region.size < 2 * size
            assert (start - 1) % region.size == 0, "a region is aligned to its size"
        else:
            assert max((hole.size for hole in arena.holes), default=0) < size or size & (size - 1)
        layout, at = arena.layout(), 1
        for region in layout:
            assert region.start == at
            at += region.size
        assert at == 1 + capacity
        holes = {hole[:2] for hole in arena.holes}
        for start, size_ in holes - set(fresh):
            assert (((start - 1) ^ size_) + 1, size_) not in holes, "two free buddies"
    for owner in owners:
        arena.free(owner)
    assert [hole[:2] for hole in arena.holes] == fresh


def test_a_buddy_region_freed_twice_is_refused():
    arena = BuddyArena(8)
    arena.allocate("a", 3)
    arena.free("a")
    with pytest.raises(ValueError, match="'a' holds no region"):
        arena.free("a")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=12), st.integers(0, 3))
def test_each_request_of_a_trace_ends_and_each_slot_is_counted_once(sizes, seed):
    jobs = [Job(f"r{i}", prompt, prompt + n) for i, (prompt, n) in enumerate(sizes)]
    runs = [
        run_contiguous(ContiguousArena(48), jobs, lambda job: 24, with_spans=True),
        run_contiguous(ContiguousArena(48, "worst"), jobs, lambda job: job.final, with_spans=True),
        run_contiguous(BuddyArena(48), jobs, lambda job: job.final, with_spans=True),
        run_paged(PagedArena(12, 4), jobs, with_spans=True),
        run_paged(PagedArena(24, 1), jobs, with_spans=True),
    ]
    for moments in runs:
        assert all(m.running + m.waiting + m.finished == len(jobs) for m in moments)
        assert all(m.running > 0 for m in moments), "a step in which nobody runs"
        for m in moments:
            assert sum(span.used for span in m.spans) == m.waste.used
            assert sum(span.final - span.used for span in m.spans) == m.waste.reservation
            assert min(vars(m.waste).values()) >= 0 and m.waste.capacity == moments[0].waste.capacity
    for moments in runs[:3]:  # nobody gives way, so the work is exactly the outputs
        assert sum(m.running for m in moments) == sum(job.final - job.prompt for job in jobs)
    assert all(m.waste.external == 0 for m in runs[0]), "equal reservations that divide the arena leave no holes"


def test_a_run_agrees_with_the_closed_form():
    """Every length once, so only the end of the run, when seats stay empty, is not what the formula says."""
    moments = run_contiguous(ContiguousArena(4 * 64), make_jobs(5, 60, seed=1), lambda job: 64)
    used, owned = sum(m.waste.used for m in moments), sum(64 * m.running for m in moments)
    assert used / owned == pytest.approx(expected_utilisation(5, 60, 64).over_time)


def test_the_youngest_gives_way_and_comes_back_first_with_all_its_tokens():
    jobs = [Job("r0", 1, 16), Job("r1", 1, 16), Job("r2", 8, 9)]
    moments = run_paged(PagedArena(5, 4), jobs, with_spans=True)
    assert moments[-1].preempted == 1 and moments[-1].finished + moments[-1].running == 3
    used = [{o: sum(s.used for s in m.spans if s.owner == o) for o in ("r0", "r1", "r2")} for m in moments]
    first = [next(i for i, u in enumerate(used) if u[owner]) for owner in ("r0", "r1", "r2")]
    gone = [i for i, u in enumerate(used) if i > first[1] and not u["r1"] and any(v["r1"] for v in used[i:])]
    assert gone and all(used[i]["r0"] for i in gone), "r1 gave way, r0 went on"
    assert used[gone[-1] + 1]["r1"] == used[gone[0] - 1]["r1"] + 1, "what it had written is computed again"
    assert first[2] > gone[-1], "r2 came later and stays behind r1"


def test_a_newcomer_leaves_a_block_for_each_that_runs():
    jobs = [Job("r0", 3, 8), Job("r1", 3, 8)]
    assert run_paged(PagedArena(2, 4), jobs)[0].running == 1
    assert run_paged(PagedArena(3, 4), jobs)[0].running == 2


def test_blocked_says_that_only_the_holes_are_in_the_way():
    jobs = [Job("r0", 0, 1), Job("r1", 0, 2), Job("r2", 0, 1), Job("r3", 0, 2)]
    moments = run_contiguous(ContiguousArena(4), jobs, lambda job: job.final)
    assert [m.blocked for m in moments] == [False, True, False, False], "holes of 1 and 1, and r3 needs 2"


class Forgetful(ContiguousArena):
    def free(self, owner):
        del self.held[owner]


class Stingy(PagedArena):
    def free(self, owner):
        del self.tables[owner]


def test_an_arena_that_loses_memory_ends_the_run_and_is_told():
    jobs = [Job(f"r{i}", 1, 4) for i in range(9)]
    with pytest.raises(RuntimeError, match="refuses .*lost memory"):
        run_contiguous(Forgetful(8), jobs, lambda job: 4)
    with pytest.raises(RuntimeError, match="refuses .*lost memory"):
        run_paged(Stingy(4, 2), jobs)


def test_jobs_are_the_same_at_every_call_and_cover_the_lengths():
    assert make_jobs(3, 9, seed=4, prompt=2) == make_jobs(3, 9, seed=4, prompt=2)
    assert sorted(job.final for job in make_jobs(3, 9, seed=random.randrange(99), prompt=2)) == list(range(5, 12))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_utilisation(0, 5, 10), "lengths from 0 to 5"),
        (lambda: expected_utilisation(1, 5, 6, prompt=2), "reserve more"),
        (lambda: tail_waste(0, 16), "positive numbers"),
        (lambda: PagedArena(0), "num_blocks is 0"),
        (lambda: PagedArena(4, 0), "block_size is 0"),
        (lambda: BuddyArena(0), "capacity is 0"),
        (lambda: run_contiguous(ContiguousArena(8), [Job("a", 1, 5)], lambda job: 4), "it needs 5"),
        (lambda: run_contiguous(ContiguousArena(8), [Job("a", 1, 5)], lambda job: 9), "reserves 9 of 8"),
        (lambda: run_paged(PagedArena(2, 4), [Job("a", 1, 9)]), "needs 9 of 8"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
