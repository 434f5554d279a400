"""How large a token budget should be (L33 4.2-4.4, 8.2; lab 08): what a chunk costs, where tokens begin to cost time.

    chunk_work        query-key pairs and K/V tokens read, chunk by chunk: the first add up, the second grow
    knee              from how many tokens on a step is bound by arithmetic: the smallest budget that fills the GPU
    largest_chunk     the largest chunk that keeps a step within a limit of time: the largest budget that readers bear
"""

from collections.abc import Callable, Iterable
from math import floor


def chunk_work(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """(query-key pairs, tokens whose K/V is read) of each chunk of a prompt, in order; causal, as in StepWork."""
    found, end = [], 0
    for size in sizes:
        start, end = end, end + size
        found.append((end * (end + 1) // 2 - start * (start + 1) // 2, end))
    return found


def knee(flops_rate: float, memory_rate: float, num_weights: int, bytes_per_weight: float) -> int:
    """The fewest tokens in a step whose arithmetic takes longer than reading the weights does.

    flops_rate: FLOP/s, memory_rate: bytes/s, both as reached. A token takes 2 FLOP a weight, and a step reads each
    weight once: so the number of weights cancels.
    """
    reading = num_weights * bytes_per_weight / memory_rate
    return floor(reading * flops_rate / (2 * num_weights)) + 1


def largest_chunk(seconds: Callable[[int], float], limit: float, most: int) -> int:
    """The largest chunk, at most `most` tokens, in whose step nobody waits for more than `limit` seconds; 0 if none.

    seconds(chunk): how long a step with that chunk takes, longer or as long for more tokens; asked log2(most) times.
    """
    low, high = 0, most  # low fits, or is no chunk at all
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low

