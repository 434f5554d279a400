"""Slots, layouts and the inventory, each against a slow twin (L33 2.2; lab 03)."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlab.blocks import BlockTable, KVCacheBlock
from kvlab.blocks.audit import audit
from kvlab.blocks.layout import LAYOUTS, byte_offset
from kvlab.blocks.slots import position_of, slot_mapping, slot_of

tables = st.lists(st.integers(1, 300), min_size=1, max_size=8, unique=True)
sizes = st.integers(1, 17)


def all_slots(block_ids, block_size):
    return [block_id * block_size + offset for block_id in block_ids for offset in range(block_size)]


def test_the_textbook_s_token_37():
    assert slot_of([7, 61, 142], 37, 16) == 142 * 16 + 5
    assert position_of([7, 61, 142], 142 * 16 + 5, 16) == 37


@given(tables, sizes)
def test_slots_and_back(block_ids, block_size):
    slots = all_slots(block_ids, block_size)
    table = BlockTable(KVCacheBlock(i) for i in block_ids)
    for position, slot in enumerate(slots):
        assert slot_of(block_ids, position, block_size) == slot == table.slot(position, block_size)
        assert position_of(block_ids, slot, block_size) == position
    for position in (-1, len(slots)):
        with pytest.raises(IndexError, match=f"position {position} has no slot"):
            slot_of(block_ids, position, block_size)
    with pytest.raises(ValueError, match="which the table"):
        position_of(block_ids, 301 * block_size, block_size)


@given(st.lists(st.tuples(tables, st.integers(0, 9), st.integers(0, 9)), max_size=4), sizes)
def test_slot_mapping(chunks, block_size):
    chunks = [(ids, min(start, len(ids) * block_size), count) for ids, start, count in chunks]
    chunks = [(ids, start, min(count, len(ids) * block_size - start)) for ids, start, count in chunks]
    expected = [slot for ids, start, count in chunks for slot in all_slots(ids, block_size)[start : start + count]]
    assert slot_mapping(chunks, block_size) == expected


def test_slot_mapping_beyond_the_table():
    with pytest.raises(IndexError, match="position 8 has no slot"):
        slot_mapping([([1, 2], 7, 2)], 4)


SHAPES = {
    "NHD": lambda n, h, d, x: (n, h, d),
    "HND": lambda n, h, d, x: (h, n, d),
    "HDNX": lambda n, h, d, x: (h, d // x, n, x),
    "HDN": lambda n, h, d, x: (h, d, n),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(n=st.integers(1, 5), h=st.integers(1, 3), pieces=st.integers(1, 3), x=st.sampled_from([2, 4, 8]),
       itemsize=st.sampled_from([1, 2, 4]))  # fmt: skip
def test_byte_offset_by_walking_through_the_pool(layout, n, h, pieces, x, itemsize):
    d = pieces * x
    address = 0
    for block, *rest in product(range(2), *map(range, SHAPES[layout](n, h, d, x))):
        token, head, dim = {
            "NHD": lambda n, h, d: (n, h, d),
            "HND": lambda h, n, d: (n, h, d),
            "HDNX": lambda h, p, n, i: (n, h, p * x + i),  # noqa: B023
            "HDN": lambda h, d, n: (n, h, d),
        }[layout](*rest)
        assert byte_offset(layout, block, token, head, dim, n, h, d, itemsize, x) == address
        address += itemsize


def test_byte_offset_refuses():
    with pytest.raises(ValueError, match="layout 'DNH' is unknown"):
        byte_offset("DNH", 0, 0, 0, 0, 16, 8, 128)
    for token, head, dim, name in ((16, 0, 0, "token 16"), (0, 8, 0, "head 8"), (0, 0, 128, "dim 128"),
                                   (-1, 0, 0, "token -1")):  # fmt: skip
        with pytest.raises(IndexError, match=f"{name} is outside"):
            byte_offset("NHD", 0, token, head, dim, 16, 8, 128)


@pytest.mark.parametrize(
    "ref_cnts, queue, tables, found",
    [
        ({1: 2, 2: 1, 3: 0}, [3], [[1, 2], [1]], {}),
        ({1: 1, 2: 1, 3: 0}, [3], [[1, 2], [1]], {1: "miscounted"}),
        ({1: 1, 2: 0, 3: 0}, [3], [[1]], {2: "lost"}),
        ({1: 1, 2: 0, 3: 0}, [3, 1, 2], [[1]], {1: "owned and free"}),
        ({1: 0, 2: 0}, [1, 2, 1], [], {1: "queued twice"}),
        ({1: 1, 2: 0}, [0, 2], [[1, 9]], {0: "unknown", 9: "unknown"}),
        ({1: -1, 2: 0}, [1, 2], [], {1: "miscounted"}),
    ],
)
def test_audit(ref_cnts, queue, tables, found):
    assert audit(ref_cnts, queue, tables) == found
