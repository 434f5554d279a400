"""kvlab.blocks.branches is what lab 04 falls back on: held beside the lab's own oracles, through the lab's drivers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.blocks import BlockPool, branches
from kvlab.grade import load_lab
from kvlab.grade.exercise import expectation, load_module, same

LAB = load_lab("04")
DRIVER = load_module(LAB.driver_path)
OURS = [e for e in LAB.exercises if all(ours.startswith("kvlab.blocks.branches:") for ours in e.ours.values())]


def play(exercise, trace):
    """AssertionError at the first operation at which ours and the oracle part ways."""
    driver = getattr(DRIVER, exercise.driver)(branches, *trace.init) if exercise.driver else branches
    oracle = exercise.Oracle(*trace.init)
    for op in trace.ops:
        got = expectation(driver, op, None)
        assert same(expectation(oracle, op, as_lists(got)), as_lists(got)), op


def as_lists(value):
    return [as_lists(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("exercise", OURS, ids=lambda e: e.name)
def test_ours_is_what_the_lab_asks_for(exercise):
    for trace in exercise.examples:
        play(exercise, trace)
    given(exercise.traces())(lambda trace: play(exercise, trace))()


def test_the_lab_falls_back_on_all_of_them():
    assert len(OURS) == 6


@given(st.integers(1, 40), st.integers(0, 20), st.integers(1, 5), st.integers(1, 6))
def test_the_closed_form_is_what_a_pool_counts(num_prompt, num_output, n, block_size):
    pool, prompt, copies = BlockPool(400), [], []
    branches.make_room(pool, prompt, 0, num_prompt, block_size)
    tables = [prompt, *(branches.fork_at(pool, prompt, num_prompt, block_size) for _ in range(n - 1))]
    for table in tables if num_output else ():
        copies += branches.make_room(pool, table, num_prompt, num_output, block_size)
    held = pool.num_usable_blocks - pool.get_num_free_blocks()
    expected = sum(map(len, tables)), held, len(copies)
    assert branches.sharing_cost(num_prompt, num_output, n, block_size) == expected


def test_room_that_is_not_there_changes_nothing():
    pool = BlockPool(4)
    table = pool.get_new_blocks(2)
    other = branches.fork_at(pool, table, 6, 4)
    assert branches.make_room(pool, other, 6, 3, 4) is None  # a copy and a new block: two, and one is free
    assert other == table and [block.ref_cnt for block in table] == [2, 2] and pool.get_num_free_blocks() == 1
    assert len(branches.make_room(pool, other, 6, 2, 4)) == 1


def test_going_back_to_the_length_that_is_there_gives_nothing_back():
    pool = BlockPool(4)
    table = pool.get_new_blocks(2)
    branches.truncate(pool, table, 8, 4)
    assert len(table) == 2 and pool.get_num_free_blocks() == 1


def test_a_batch_is_cut_only_where_it_must_be():
    assert branches.copy_batches([(1, 2), (3, 1)]) == [[(1, 2), (3, 1)]]
    assert branches.copy_batches([(1, 2), (2, 3)]) == [[(1, 2)], [(2, 3)]]
    assert branches.copy_batches([(1, 2), (1, 2)]) == [[(1, 2)], [(1, 2)]]
