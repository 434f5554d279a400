"""Lab 12's pictures and scenes: what the lab says of its twelve faults is so."""

import pytest

torch = pytest.importorskip("torch")
matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")

from kvlab.lab.draw import decoder as draw  # noqa: E402
from kvlab.lab.scenes.decoder import (  # noqa: E402
    FAULTS,
    first_difference,
    reference_model,
    spread,
    text_of,
    tokens_of,
    with_fault,
)
from kvlab.model.decoder_steps import first_wrong  # noqa: E402

QUESTION = "What is external fragmentation?"
SEEN = {"pairs", "theta", "heads", "scale", "offset"}  # the lab says that the answer shows these


@pytest.fixture(autouse=True)
def closed():
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def right():
    return with_fault("").answer(QUESTION)


def texts(figure):
    return [text.get_text() for ax in figure.axes for text in ax.texts]


def watched(fault, cut=None):
    prompt, run = tokens_of(QUESTION), with_fault(fault, watch=True)
    for chunk in (prompt[:cut], prompt[cut:]) if cut else (prompt,):
        run.step({"a": chunk})
    return run.trace


def test_without_a_fault_it_is_transformers(right):
    prompt = tokens_of(QUESTION)
    with torch.inference_mode():
        expected = reference_model()(torch.tensor([prompt + right])).logits[0]
    assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == right
    assert text_of(right).startswith("External fragmentation")
    run = with_fault("")
    run.step({"a": prompt[:30], "b": prompt[:7]})
    got = run.step({"a": prompt[30:], "b": prompt[7:50]})
    torch.testing.assert_close(got["a"], expected[len(prompt) - 1], atol=1e-4, rtol=0)
    torch.testing.assert_close(got["b"], expected[49], atol=1e-4, rtol=0)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_answer_shows_a_fault_or_does_not_as_the_lab_says(fault, right):
    assert (first_difference(with_fault(fault).answer(QUESTION), right) is not None) == (fault in SEEN)


@pytest.mark.parametrize("fault", FAULTS)
def test_logits_show_every_fault_but_a_shift_if_the_prompt_is_cut(fault):
    good = watched("", cut=50)
    (_, found), (_, expected) = watched(fault, cut=50)[-1], good[-1]
    assert ((found - expected).abs().max() > 1e-3) == (fault != "shift")
    whole = first_wrong(watched(fault), watched(""), 1e-3)
    assert (whole is None) == (fault == "offset")


def test_a_difference_of_answers():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 3], [1, 2]) == 1 and first_difference([1], [1, 2]) == 1


def test_a_spread_names_each_result_and_nan_is_infinitely_far():
    a, b = torch.zeros(2, 2), torch.tensor([[0.0, 0.5], [0.0, -2.0]])
    assert spread([("x", a)], [("x", b)]) == [("x", 2.0)]
    assert spread([("x", a)], [("x", b * torch.nan)]) == [("x", float("inf"))]


def test_circles_tell_the_dot_product_of_the_distance():
    one, other = (texts(draw.circles(start + 3, start, 8, 100.0, (0, 2))) for start in (0, 50))
    dots = [text for text in one if "·" in text]
    assert len(dots) == 2 and dots == [text for text in other if "·" in text] and "-0.990" in dots[0]


def test_a_flat_batch_is_drawn_row_by_row_and_in_its_slots():
    figure = draw.flat("AB", [range(5, 6), range(0, 3)], [9, 0, 1, 2], [0, 1, 4], 4, 3)
    shown = texts(figure)
    assert shown.count("A5") == 2 and shown.count("B2") == 2, "once among the rows, once in the pool"
    assert "block 2" in shown and "block 3" not in shown


def test_drift_has_a_line_for_each_run_and_a_tick_for_each_result():
    names = ["embedding", "layer 0 norm", "layer 0 rope q", "logits"]
    figure = draw.drift({"a": [(n, 0.0) for n in names], "b": [(n, 10.0) for n in names]}, 1e-3)
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["embedding", "norm", "rope q", "logits"]
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["a", "b"]


def test_a_bar_for_each_item_of_the_ledger():
    bill = {"weights": 14_000_000_000, "kv_read": 0, "kv_written": 57_344, "widest": 2_000_000, "logits": 608_256}
    shown = texts(draw.ledger_bars(bill, "title"))
    assert "14 GB" in shown and "57.3 KB" in shown and "0 KB" in shown


def test_a_layer_is_two_halves():
    assert texts(draw.layer_flow()).count("RMSNorm") == 2
