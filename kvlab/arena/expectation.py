"""What share of reserved memory holds tokens: closed forms for the averages that a simulation would give (L33 1.4).

    a request of n outputs after a prompt of p holds p + t slots in its step t = 1 .. n, of `reserve` that it owns

    static        at its end, averaged over requests                        p + E[n]
    per request   averaged over its own steps, then over requests           p + (E[n] + 1) / 2
    over time     averaged over all steps of all requests: what a probe     p + (E[n^2] + E[n]) / (2 E[n])
                  at a random moment sees; long requests are seen longer       ... each divided by `reserve`
"""

from typing import NamedTuple


class Utilisation(NamedTuple):
    """Shares of the reserved slots, 0 to 1."""

    static: float
    per_request: float
    over_time: float


def expected_utilisation(low: int, high: int, reserve: int, prompt: int = 0) -> Utilisation:
    """Of requests whose number of outputs is uniform on the whole numbers low .. high, after `prompt` tokens.

    reserve: slots that each owns from its start to its end. ValueError if the longest does not fit, or low < 1.
    """
    if not 1 <= low <= high:
        raise ValueError(f"lengths from {low} to {high}: give 1 <= low <= high")
    if not 0 <= prompt <= reserve - high:
        raise ValueError(f"a prompt of {prompt} and {high} outputs in {reserve} reserved slots: reserve more")
    mean = (low + high) / 2
    mean_square = mean**2 + ((high - low + 1) ** 2 - 1) / 12
    held = (mean, (mean + 1) / 2, (mean_square + mean) / (2 * mean))
    return Utilisation(*((prompt + slots) / reserve for slots in held))


def tail_waste(mean_tokens: float, block_size: int) -> float:
    """The share of paged slots that is empty in last blocks, 0 to 1 (L33 A.3): (B - 1) / 2 slots a request.

    For lengths spread evenly over the residues modulo block_size, at one moment.
    """
    if mean_tokens <= 0 or block_size < 1:
        raise ValueError(f"{mean_tokens} tokens in blocks of {block_size}: give positive numbers")
    empty = (block_size - 1) / 2
    return empty / (mean_tokens + empty)
