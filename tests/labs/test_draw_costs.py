"""What a step costs, drawn: boxes, dots and labels say what was counted."""

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab import primer  # noqa: E402
from kvlab.lab.draw import costs  # noqa: E402
from kvlab.lab.draw.costs import BLUE, RED, Diary  # noqa: E402
from kvlab.primer import GPUS  # noqa: E402
from kvlab.sizing import model_shape  # noqa: E402

QWEN, H100 = model_shape("Qwen2.5-7B"), GPUS["H100"]


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


@pytest.fixture
def diaries():
    slow, fast = Diary(), Diary()
    assert primer.decode_without_cache(slow, [3, 1, 4], 4) == primer.decode_with_cache(fast, [3, 1, 4], 4)
    return slow, fast


def texts(ax):
    return [text.get_text() for text in ax.texts]


def formula(new, computed):
    """Two layers of 8 x 8 matrices."""
    return 2 * (3 * 64 * new + 16 * sum(computed + i + 1 for i in range(new)))


def test_a_diary_has_each_call_and_what_it_cost(diaries):
    slow, fast = diaries
    assert slow.steps == [(3, 0), (4, 0), (5, 0), (6, 0)] and fast.steps == [(3, 0), (1, 3), (1, 4), (1, 5)]
    for diary in diaries:
        assert diary.costs == [formula(*step) for step in diary.steps]


def test_a_diary_takes_any_layer_function():
    calls = []

    def step(*arguments):
        calls.append(arguments)
        return primer.attend_next(*arguments)

    Diary(step=step, num_layers=3).forward([1, 2], primer.Cache())
    assert len(calls) == 6


def test_a_filled_box_is_a_token_that_is_computed(diaries):
    axes = costs.two_ways(*(diary.steps for diary in diaries)).axes
    fills = [sum(box.get_facecolor() == matplotlib.colors.to_rgba(colour) for box in ax.patches)
             for ax, colour in zip(axes, (RED, BLUE), strict=True)]  # fmt: skip
    assert fills == [18, 6] and [len(ax.patches) for ax in axes] == [18, 18]
    assert "18 tokens" in axes[0].get_title(loc="left") and "6 tokens" in axes[1].get_title(loc="left")


def test_dots_are_what_was_counted_and_lines_what_the_formula_says(diaries):
    each, total = costs.step_costs(*diaries, lambda new, computed: 1000 * new).axes
    lines, dots = each.lines[::2], each.lines[1::2]
    assert list(lines[0].get_ydata()) == [3, 4, 5, 6] and list(lines[1].get_ydata()) == [3, 1, 1, 1]
    assert [list(line.get_ydata()) for line in dots] == [[diary.costs[0] / 1000] for diary in diaries]
    assert total.lines[0].get_ydata()[-1] == sum(diaries[0].costs) / 1000
    assert [text.split(":")[0] for text in texts(total)] == texts(each) == ["without a cache", "with a cache"]


def test_the_roofline_uses_the_callers_functions_and_tells_decodes_from_prefills():
    roofline = costs.Roofline(lambda gpu, x: gpu.peak_flops / 4, lambda shape, step: 10.0 * len(step))
    ax = roofline.draw(H100, "H100", QWEN, {"two": [(1, 9)] * 2, "long": [(9, 0)]}, "a title").axes[0]
    assert {"two: 25%", "long: 25%", "H100: 989 TFLOP/s", "balance\n295"} <= set(texts(ax))
    assert ax.get_title(loc="left") == "a title"
    markers = [line for line in ax.lines if len(line.get_xdata()) == 1]
    assert [(line.get_xdata()[0], line.get_marker()) for line in markers] == [(20, "o"), (10, "s")]


def test_a_small_share_is_not_shown_as_zero():
    roofline = costs.Roofline(primer.attainable_flops, primer.intensity)
    assert "1 decode: 0.34%" in texts(roofline.draw(H100, "H100", QWEN, {"1 decode": [(1, 500)]}).axes[0])


def test_batches_have_a_line_for_each_context_and_each_chip():
    shapes = {"Qwen2.5-7B": QWEN, "Llama-2-7B": model_shape("Llama-2-7B")}
    axes = costs.batches(primer.intensity, shapes, {"H100": H100}, (16, 500)).axes
    assert [texts(ax) for ax in axes] == [["16 tokens", "500 tokens", "balance, H100: 295"]] * 2
    assert axes[0].lines[1].get_ydata()[-1] == primer.intensity(QWEN, [(1, 500)] * 1024)
    assert axes[1].get_title(loc="left").startswith("Llama-2-7B: 512 KiB")


def test_engine_times_are_drawn_in_units_of_the_first_decode():
    ax = costs.engine_times({32: (4.0, 2.0), 64: (10.0, 3.0)}).axes[0]
    assert [list(line.get_ydata()) for line in ax.lines] == [[2.0, 5.0], [1.0, 1.5]]
    assert texts(ax) == ["computed anew: 5.0", "decoded: 1.5"]
