"""Lab 11's pictures and scenes."""

import pytest

np = pytest.importorskip("numpy")
matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab.draw import mixed as draw  # noqa: E402
from kvlab.lab.scenes.mixed import (  # noqa: E402
    KINDS,
    make_batch,
    query_blocks,
    rows_of,
    split_time,
    workspace_bytes,
)
from kvlab.primer import GPUS  # noqa: E402
from kvlab.standin.mixed import find_sequence, launch_split, split_kernel  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_every_program_stands_on_a_multiprocessor():
    figure = draw.occupancy({"few": 4, "many": 300}, 132)
    few, many = ([int(t.get_text()) for t in ax.texts] for ax in figure.axes)
    assert few == [1] * 4 and len(many) == 132 and sum(many) == 300
    assert all(len(ax.patches) == 132 for ax in figure.axes)


def test_a_bar_for_each_number_of_splits_and_the_chosen_one_is_named():
    found = {s: split_time(1, 4096, s) for s in (1, 2, 4)}
    figure = draw.split_times(found, 2, "title")
    assert texts(figure) == [f"{time.whole * 1e6:,.0f}" for time in found.values()]
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["1", "2\n(chosen)", "4"]


def test_a_staircase_shows_what_each_row_sees():
    pairs = [(1, 5), (3, 4), (0, 2)]
    figure = draw.staircase(pairs, query_blocks([1, 3, 0], 2))
    seen = [sum(p.get_facecolor()[:3] != (1, 1, 1) and p.get_width() == p.get_height() == 1 and p.get_linewidth() < 1
                for p in ax.patches) for ax in figure.axes]  # fmt: skip
    assert seen == [5, 2 + 3 + 4, 0]
    assert texts(figure) == ["block 0", "block 1", "block 2"]
    assert texts(draw.staircase(pairs, query_blocks([1, 3, 0], 2), unnamed=1)) == ["block 0", "block ?", "block ?"]


def test_errors_have_a_bar_for_each_scale():
    figure = draw.errors({"a": {"x": 0.01, "y": 0.2}, "b": {"x": 0.001, "y": 0.01}}, "label")
    assert texts(figure) == ["1.00%", "20.00%", "0.10%", "1.00%"]


def test_the_model_of_time_is_bounded_by_the_data_sheet_and_by_the_idle():
    gpu = GPUS["H200"]
    kv = 2 * 2 * 32_768 * 4 * 128
    one = split_time(1, 32_768, 1, share=1.0)
    assert one.merge == 0 and one.read == pytest.approx(kv / (gpu.bandwidth * 4 / 132))
    many = split_time(1, 32_768, 64)
    assert many.read == pytest.approx((kv + workspace_bytes(1, 28, 128, 64)) / gpu.bandwidth)
    assert many.whole < one.whole and many.merge > 0
    assert split_time(64, 4096, 2).whole > split_time(64, 4096, 1).whole, "a full launch gains nothing"


def test_a_workspace_has_the_bytes_that_a_launch_leaves():
    batch = make_batch([(1, 40), (1, 30)], block_size=8, kv_heads=2, group=3, head_dim=32)
    partial, lse = launch_split(split_kernel, 3, 16, *batch[:5])
    assert partial.nbytes + lse.nbytes == workspace_bytes(2, 6, 32, 3)


@pytest.mark.parametrize("rows", [[1, 5, 1], [0, 3], [4, 4], [1] * 7, [0, 0, 9, 1]])
@pytest.mark.parametrize("block_q", [1, 2, 4])
def test_query_blocks_cover_each_row_once_where_the_kernel_finds_them(rows, block_q):
    from kvlab.standin import tl, triton

    @triton.jit
    def find(out, starts, n, BLOCK_Q: tl.constexpr):
        tl.store(out + tl.program_id(0), find_sequence(starts, n, tl.program_id(0), BLOCK_Q))

    blocks = query_blocks(rows, block_q)
    found = np.zeros(len(blocks), np.int32)
    find[len(blocks)](found, np.cumsum([0, *rows]).astype(np.int32), len(rows), BLOCK_Q=block_q)
    covered = [(seq, row) for seq, first, end in filter(None, blocks) for row in range(first, end)]
    assert covered == [(seq, row) for seq, count in enumerate(rows) for row in range(count)]
    assert all(block is None or block[0] == seq for block, seq in zip(blocks, found, strict=True))


def test_a_batch_has_its_rows_and_its_tables():
    batch = make_batch([(1, 9), (4, 12)], block_size=4, kv_heads=1, group=2)
    assert batch.q.shape == (5, 2, 16) and batch.query_start_loc.tolist() == [0, 1, 5]
    assert batch.seq_lens.tolist() == [9, 12]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_of_their_kind(kind):
    x = rows_of(kind, 50)
    share = np.abs(x).max(axis=1) / np.abs(x).mean(axis=1)
    assert x.dtype == np.float32 and x.shape == (50, 128)
    assert (share.min() > 5) == (kind in ("one outlier", "all but one tiny"))
