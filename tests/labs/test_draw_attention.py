"""Lab 10's pictures and scenes."""

import math

import pytest

np = pytest.importorskip("numpy")
matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab.draw import attention as draw  # noqa: E402
from kvlab.lab.scenes.attention import lines, make_case, requested, walk  # noqa: E402
from kvlab.standin import record  # noqa: E402
from kvlab.standin.decode import attend_gathered, gqa_packed_kernel, launch_packed  # noqa: E402
from kvlab.standin.memory import Access, Traffic  # noqa: E402


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def test_a_token_has_its_number_and_its_page_a_block():
    figure = draw.where([5, 2, 7], 4, 10, 9, 9)
    found = texts(figure)
    assert {"9", "5", "2", "7"} <= set(found) and "10" not in found
    bold = [patch for patch in figure.axes[0].patches if patch.get_linewidth() > 2 and hasattr(patch, "get_x")]
    assert len(bold) == 3, "the token, its table entry, its slot"
    assert bold[-1].get_x() == pytest.approx(7 + 0.94 / 4)


@pytest.mark.parametrize("tile", [1, 4, 5, 40])
def test_a_walk_ends_at_attention(tile):
    case = make_case([3, 27], block_size=4, kv_heads=2, group=2, head_dim=16)
    frames = walk(case, 1, 3, tile)
    assert len(frames) == 1 + math.ceil(27 / tile) and frames[0].end == 0 and frames[-1].end == 27
    want = attend_gathered(case.q[1], case.keys, case.values, case.block_tables[1], 27)[3]
    assert np.allclose(np.array(frames[-1].result) / frames[-1].total, want, atol=1e-5)
    assert frames[-1].largest == pytest.approx(max(frames[-1].scores))


@pytest.mark.parametrize("i", [0, 1, 3])
def test_a_frame_shows_the_scores_so_far(i):
    case = make_case([10], block_size=4, kv_heads=1, group=1)
    frames = walk(case, 0, 0, 4)
    figure = draw.walk_frame(frames, i, case.block_tables[0].tolist(), 4, 4)
    assert len(figure.axes[0].patches) == frames[i].end
    assert f"block {case.block_tables[0, 2]}" in texts(figure)


def test_bars_say_their_sums():
    figure = draw.bytes_bars({"gather": {"K": 1, "V": 1, "copies": 4}, "packed": {"K": 1, "V": 1}}, "GB", "asked for")
    assert [t for t in texts(figure) if "GB" in t] == ["6 GB", "2 GB"]


def test_times_have_a_line_for_the_arithmetic():
    _, ax = pyplot.subplots()
    draw.times({"naive": 3e6, "packed": 1e6}, 2e9, 1e9, 1e12, ax)
    assert [t.get_text().strip() for t in ax.texts] == ["3,000", "1,000", "arithmetic: 2000.0"]


def test_a_token_has_the_same_numbers_wherever_it_lies():
    cases = [make_case([9, 5], block_size=size, in_order=order) for size, order in ((4, True), (4, False), (1, False))]
    for case in cases:
        assert np.isnan(case.keys).any() and (case.block_tables == -1).any()
        assert np.array_equal(case.q, cases[0].q)
        rows = [case.keys[case.block_tables[0, p // n], p % n] for p in range(9) for n in [case.keys.shape[1]]]
        first = [cases[0].keys[cases[0].block_tables[0, p // 4], p % 4] for p in range(9)]
        assert np.array_equal(rows, first)


def test_lines_count_what_a_load_touches():
    at = np.array([0, 1, 32, 200])
    one = Traffic([Access("load", "keys", (0, 0, 0), at, 4), Access("store", "keys", (0, 0, 0), at, 4)])
    assert lines(one, "keys", 128) == (16, 3 * 128) and lines(one, "values", 128) == (0, 0)


def test_what_a_launch_asks_for():
    case = make_case([12, 0], block_size=4, kv_heads=2, group=3, head_dim=16)
    out = np.zeros_like(case.q)
    with record() as traffic:
        launch_packed(gqa_packed_kernel, out, *case)
    assert requested(traffic) == {"K": 12 * 2 * 16 * 4, "V": 12 * 2 * 16 * 4, "table": 2 * 12 * 4}
