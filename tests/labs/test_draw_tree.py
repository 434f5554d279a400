"""A radix tree drawn: a box for each place, a frame for each edge."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.blocks import KVCacheBlock  # noqa: E402
from kvlab.lab.draw.tree import draw_tree  # noqa: E402
from kvlab.prefix.radix_steps import add, take_out  # noqa: E402
from kvlab.prefix.radix_tree import RadixNode  # noqa: E402


def drawn(root):
    figure, ax = pyplot.subplots()
    draw_tree(ax, root, 1)
    pyplot.close(figure)
    return len(ax.patches), [text.get_text() for text in ax.texts]


def test_a_box_for_each_place_and_a_frame_for_each_edge():
    root, blocks = RadixNode([], [], None), [KVCacheBlock(i) for i in range(6)]
    assert drawn(root) == drawn(None) == (0, [])
    add(root, ["a", "b", "c"], blocks[:3])
    assert drawn(root)[0] == 3 + 1
    add(root, ["a", "b", "x", "y"], [*blocks[:2], *blocks[3:5]])
    boxes, texts = drawn(root)
    assert boxes == 5 + 3 and {"x", "block 3", "block 0"} <= set(texts)
    take_out(blocks[0])
    assert "gap" in drawn(root)[1] and drawn(root)[0] == 8
