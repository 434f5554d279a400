"""The textbook's numbers on memory, from our own arenas and closed forms (L33 0.2, 1.4, 7.1, A.3; PAV 4)."""

import random

import pytest

from kvlab.arena import ContiguousArena, PagedArena, expected_utilisation, measure, measure_paged, tail_waste


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
