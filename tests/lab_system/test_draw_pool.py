"""Pictures of blocks say what is there: read off the drawn text, not off the pixels."""

import pytest

from kvlab.blocks import BlockPool, FreeKVCacheBlockQueue, KVCacheBlock

plt = pytest.importorskip("matplotlib.pyplot")
draw = pytest.importorskip("kvlab.lab.draw.pool")


@pytest.fixture
def ax():
    fig, ax = plt.subplots()
    yield ax
    plt.close(fig)


def texts(ax):
    return [text.get_text() for text in ax.texts]


def pool_with_two_requests():
    pool = BlockPool(5)
    a = pool.get_new_blocks(2)
    pool.touch(a[:1])
    return pool, {"A": a, "B": a[:1]}


def test_a_snapshot_is_plain_and_stays_as_it_was():
    pool, tables = pool_with_two_requests()
    shot = draw.snapshot(pool, tables, "now")
    pool.free_blocks(tables["A"])
    assert shot["blocks"][1] == (1, "AB", 2, None) and shot["blocks"][2] == (2, "A", 1, None)
    assert shot["queue"] == [3, 4] and shot["tables"] == {"A": [1, 2], "B": [1]}


def test_a_pool_is_drawn_with_owners_counts_queue_and_what_changed(ax):
    pool, tables = pool_with_two_requests()
    before = draw.snapshot(pool, tables, "before")
    pool.free_blocks(tables.pop("A"))
    draw.draw_pool(ax, draw.snapshot(pool, tables, "after"), before)
    shown = texts(ax)
    assert "B" in shown and "×2" not in shown and "null" in shown and ax.get_title(loc="left") == "after"
    assert any("B: [1]" in text for text in shown)
    assert sum(patch.get_linewidth() > 3 for patch in ax.patches) == 2, "blocks 1 and 2 have changed"


def test_an_address_is_told_with_its_sum(ax):
    draw.draw_address(ax, [9, 2, 5], num_tokens=11, block_size=4, position=7)
    assert "slot 2 × 4 + 3 = 11" in ax.get_title(loc="left")
    assert sum(patch.get_linewidth() == 2.5 for patch in ax.patches) == 3, "position, table entry and slot are marked"


def test_a_queue_is_drawn_in_order(ax):
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in (7, 2)])
    draw.draw_queue(ax, [b.block_id for b in queue.get_all_free_blocks()], marked=2)
    assert [text for text in texts(ax) if text] == ["head", "7", "2", "tail"]
    draw.draw_states(ax)


def test_a_layout_shows_whose_each_number_is_and_frames_each_load(ax):
    draw.draw_layout(ax, [(0, 0), (0, 0), (1, 0), (1, 1), (2, 1)], "NHD", per_load=2)
    assert texts(ax) == ["0", "0", "1", "1", "2", "head 0", "head 0, 1", "head 1"]
    frames = [patch for patch in ax.patches if patch.get_linewidth() > 2]
    assert [(frame.get_x(), frame.get_width()) for frame in frames] == [(0, 2), (2, 2), (4, 1)]
    assert ax.get_title(loc="left") == "NHD"
