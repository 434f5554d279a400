"""Swap or recompute: what each costs, and where they cross (换出, 重算; L33 5.2-5.4, lab 09).

    swap         out and back in:   2 x S x KV bytes / bandwidth          + a fixed cost for each transfer
    recompute    a prefill:         (2 x W x S  + F x pairs) / FLOP/s     pairs = S (S + 1) / 2: the quadratic term

The textbook keeps the first term of each, so S cancels: swap wins when bandwidth x W > KV x FLOP/s. With the
quadratic term or a fixed cost it does not cancel. Tokens that the prefix cache still holds on resume need neither.

Bandwidths are bytes/s in one direction, flops_rate is FLOP/s that are reached: data-sheet figures times an efficiency.
"""

import math

from kvlab.primer import flops_per_pair, flops_per_token
from kvlab.sizing import ModelShape


def transfer_seconds(num_bytes: float, bandwidth: float, latency: float = 0.0, num_transfers: int = 1) -> float:
    """Seconds to move num_bytes in one direction, in num_transfers pieces that each have a fixed cost."""
    return num_bytes / bandwidth + latency * num_transfers


def effective_bandwidth(transfer_bytes: float, bandwidth: float, latency: float) -> float:
    """Bytes/s that transfers of this size reach, one after the other."""
    return transfer_bytes / transfer_seconds(transfer_bytes, bandwidth, latency)


def swap_seconds(tokens: int, kv_bytes_per_token: int, bandwidth: float, *, latency: float = 0.0,
                 transfer_bytes: int | None = None, found: int = 0, hidden: float = 0.0) -> float:  # fmt: skip
    """Seconds to swap `tokens` tokens' K/V out and in again (L33 5.2).

    latency: fixed seconds of a transfer. transfer_bytes: size of one, such as a block's; None moves all in one.
    found: tokens that are still, or again, on the GPU on resume (prefix cache): they are not copied back.
    hidden: the share of the copying, in [0, 1], that goes on while the GPU computes for others.
    """
    _check(tokens, found)
    if not 0 <= hidden <= 1:
        raise ValueError(f"hidden is {hidden!r}: give the share of the copying that nobody waits for, 0 to 1")
    seconds = 0.0
    for moved in (tokens, tokens - found):
        num_bytes = moved * kv_bytes_per_token
        pieces = math.ceil(num_bytes / (transfer_bytes or num_bytes)) if num_bytes else 0
        seconds += transfer_seconds(num_bytes, bandwidth, latency, pieces)
    return seconds * (1 - hidden)


def recompute_seconds(tokens: int, shape: ModelShape, flops_rate: float, *, quadratic: bool = True,
                      found: int = 0, fixed: float = 0.0) -> float:  # fmt: skip
    """Seconds to compute `tokens` tokens' K/V again (L33 5.3), in a step that does nothing else.

    quadratic: count attention's pairs too; False is the textbook's 2 x W x S, with the layers' matrices as W (the
    embedding computes nothing, the head only for one token). found: tokens that the prefix cache still has: they are
    attended to, not computed. fixed: seconds that any step takes.
    """
    _check(tokens, found)
    new = tokens - found
    flops = flops_per_token(shape) * new
    if quadratic:
        flops += flops_per_pair(shape) * (new * found + new * (new + 1) // 2)
    return flops / flops_rate + fixed


def swap_advantage(num_parameters: float, kv_bytes_per_token: float, bandwidth: float, flops_rate: float) -> float:
    """The textbook's law as a ratio (L33 5.4): seconds to recompute over seconds to swap; swap wins above 1."""
    return bandwidth * num_parameters / (kv_bytes_per_token * flops_rate)


def crossover_bandwidth(num_parameters: float, kv_bytes_per_token: float, flops_rate: float) -> float:
    """Bytes/s in one direction at which the law calls it even; a faster link makes swap win."""
    return kv_bytes_per_token * flops_rate / num_parameters


def crossover_kv_heads(shape: ModelShape, bandwidth: float, flops_rate: float, dtype_bytes: int = 2) -> float:
    """KV heads at which the law calls it even for a model of this size and depth: with fewer, swap wins."""
    one_head = shape.kv_bytes_per_token(dtype_bytes) / shape.num_key_value_heads
    return bandwidth * shape.num_parameters / (flops_rate * one_head)


def crossover_transfer_bytes(needed: float, bandwidth: float, latency: float) -> float | None:
    """The transfer size from which on a link reaches `needed` bytes/s (crossover_bandwidth); None: never."""
    if needed >= bandwidth:
        return None
    return latency * needed / (1 - needed / bandwidth)


def crossover_tokens(swap_per_token: float, recompute_per_token: float, recompute_per_pair: float = 0.0,
                     fixed: float = 0.0) -> float | None:  # fmt: skip
    """Tokens from which on swap wins; 0.0: always; None: never.

    swap_per_token: seconds out and in. recompute_per_pair: seconds a query-key pair (the quadratic term).
    fixed: what swapping costs whatever it moves, less what recomputing does; not negative.
    With neither of these two S cancels, as the textbook says: the answer is "always" or "never".
    """
    if fixed < 0:
        raise ValueError(f"fixed is {fixed!r}: give 0 or more, the fixed cost of swapping beyond that of recomputing")
    gain = recompute_per_token + recompute_per_pair / 2 - swap_per_token  # S tokens gain S x gain + S^2 x half pair
    half = recompute_per_pair / 2
    if half == 0:
        return None if gain <= 0 else fixed / gain
    if gain >= 0 and fixed == 0:
        return 0.0
    return (-gain + math.sqrt(gain * gain + 4 * half * fixed)) / (2 * half)


def _check(tokens: int, found: int) -> None:
    if not 0 <= found <= tokens:
        raise ValueError(f"{found} of {tokens} tokens found: give tokens >= 0, and of these 0 to all as found")
