"""The steps of lab 09 say the same as the functions over a model's shape and a link."""

import pytest

from kvlab.costs import crossover_tokens, recompute_seconds, swap_seconds
from kvlab.costs.preemption_steps import (
    Prices,
    by_the_book,
    prices_of,
    swap_or_recompute,
    swap_wins_from,
    two_bills,
    wasted_tokens,
)  # fmt: skip
from kvlab.primer import flops_per_pair, flops_per_token
from kvlab.schedule import Request
from kvlab.sizing import MODELS, model_shape

LINK, SPEED = 32e9, 500e12


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens, found", [(1, 0), (1000, 0), (1000, 400), (20_000, 20_000)])
def test_bills_of_a_machine_are_those_of_its_model_and_link(name, tokens, found):
    shape = model_shape(name)
    kv = shape.kv_bytes_per_token()
    swap, again = two_bills(prices_of(shape, LINK, SPEED, fixed=1e-3), tokens, found)
    assert swap == pytest.approx(1e-3 + swap_seconds(tokens, kv, LINK, found=found))
    assert again == pytest.approx(recompute_seconds(tokens, shape, SPEED, found=found), abs=1e-12)
    crossing = crossover_tokens(2 * kv / LINK, flops_per_token(shape) / SPEED, flops_per_pair(shape) / SPEED, 1e-3)
    assert swap_wins_from(prices_of(shape, LINK, SPEED, fixed=1e-3)) == pytest.approx(crossing)


def test_pieces_make_the_link_slower_whatever_the_length():
    shape = model_shape("Qwen2.5-7B")
    kv = shape.kv_bytes_per_token()
    prices = prices_of(shape, LINK, SPEED, piece_bytes=kv, latency=1e-5)
    for tokens in (1, 64, 5000):
        assert two_bills(prices, tokens)[0] == pytest.approx(
            swap_seconds(tokens, kv, LINK, latency=1e-5, transfer_bytes=kv))


def test_the_textbooks_70b():
    assert by_the_book(1000, 320_000, 70e9, LINK, SPEED) == pytest.approx((0.02, 0.28))


@pytest.mark.parametrize("prices, free, want", [
    (Prices(1, 5), 2, "swap"), (Prices(1, 5), 1, "recompute"), (Prices(1, 2), 9, "recompute"),
    (Prices(5, 1), 9, "recompute"), (Prices(1, 5, 0, 200), 9, "recompute"),
])  # fmt: skip
def test_swapped_if_it_fits_and_is_cheaper(prices, free, want):
    request = Request("r", [1] * 90)
    request.num_computed_tokens = 32
    assert swap_or_recompute(request, 2, free, prices) == want


def test_waste_is_what_is_computed_below_the_mark():
    assert wasted_tokens([]) == {}
    assert wasted_tokens([("A", 0, 8), ("B", 0, 2), ("A", 0, 3), ("A", 0, 10), ("A", 10, 1)]) == {"A": 11, "B": 0}
