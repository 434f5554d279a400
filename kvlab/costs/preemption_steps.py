"""Swap or recompute in steps (L33 5.2-5.4; lab 09): the functions that lab 09 builds, over four prices of a machine.

    by_the_book        the textbook's two bills: no quadratic term, nothing fixed
    two_bills          with attention's pairs, a fixed cost, and what the prefix cache still has
    swap_wins_from     where the two cross
    swap_or_recompute  the policy made of them: if there is room, and if it is cheaper
    wasted_tokens      what a run computed more than once

`preemption.py` has the same arithmetic over a model's shape and a link's data sheet; here a machine is four numbers.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvlab.costs.preemption import crossover_tokens, effective_bandwidth, swap_advantage
from kvlab.primer import flops_per_pair, flops_per_token
from kvlab.schedule import Request
from kvlab.sizing import ModelShape


class Prices(NamedTuple):
    """What a preemption costs, for one model on one machine. All in seconds.

    move: one token's K and V over the link, one way. compute: one token's K and V computed again, the weights' part.
    pair: one query-key pair of attention. fixed: what a swap, out and in together, takes whatever it moves.
    """

    move: float
    compute: float
    pair: float = 0.0
    fixed: float = 0.0


def prices_of(shape: ModelShape, bandwidth: float, flops_rate: float, *, fixed: float = 0.0,
              piece_bytes: float | None = None, latency: float = 0.0) -> Prices:  # fmt: skip
    """The prices of a model (bf16) behind a link of `bandwidth` bytes/s each way, at flops_rate FLOP/s reached.

    piece_bytes, latency: the K/V crosses in pieces of so many bytes that each take so many seconds more.
    """
    kv_bytes = shape.kv_bytes_per_token()
    reached = bandwidth if piece_bytes is None else effective_bandwidth(piece_bytes, bandwidth, latency)
    return Prices(kv_bytes / reached, flops_per_token(shape) / flops_rate, flops_per_pair(shape) / flops_rate, fixed)


def by_the_book(tokens: int, kv_bytes_per_token: float, num_parameters: float, bandwidth: float,
                flops_rate: float) -> tuple[float, float]:  # fmt: skip
    """(seconds to swap `tokens` tokens out and in, seconds to compute them again), as L33 5.4 counts."""
    swap = 2 * tokens * kv_bytes_per_token / bandwidth
    return swap, swap * swap_advantage(num_parameters, kv_bytes_per_token, bandwidth, flops_rate)


def two_bills(prices: Prices, tokens: int, found: int = 0) -> tuple[float, float]:
    """(seconds by swapping, seconds by recomputing) for a victim with K/V of `tokens` tokens, at least 1.

    found: how many of them the prefix cache still has when it comes back: they are neither copied in nor computed,
    but attended to.
    """
    new = tokens - found
    swap = prices.fixed + prices.move * (tokens + new)
    return swap, prices.compute * new + prices.pair * (new * found + new * (new + 1) / 2)


def swap_wins_from(prices: Prices) -> float | None:
    """Tokens from which on swapping is the cheaper one, if nothing is found; 0.0: always; None: never."""
    return crossover_tokens(2 * prices.move, prices.compute, prices.pair, prices.fixed)


def swap_or_recompute(request: Request, num_blocks: int, num_free_cpu_blocks: int, prices: Prices) -> str:
    """The part of that name, for a machine: "swap" if the victim's blocks fit swap space and it is cheaper."""
    swap, recompute = two_bills(prices, request.num_computed_tokens)
    return "swap" if num_blocks <= num_free_cpu_blocks and swap < recompute else "recompute"


def wasted_tokens(log: Iterable[tuple[str, int, int]]) -> dict[str, int]:
    """Request id -> tokens computed a second time or oftener.

    log: (request id, first position, number of tokens) for each chunk and each decode, in order. A request begins at
    position 0, and never beyond what it has computed before.
    """
    known: dict[str, int] = {}  # positions below this have been computed at some time
    wasted: dict[str, int] = {}
    for name, first, num_tokens in log:
        before = known.get(name, 0)
        wasted[name] = wasted.get(name, 0) + min(first + num_tokens, before) - first
        known[name] = max(before, first + num_tokens)
    return wasted
