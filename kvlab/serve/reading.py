"""What a client reads: server-sent events out of bytes, and figures out of two scrapes of /metrics (lab 14).

    bytes as they come --EventReader--> data of each event       whole_bytes: how much of some UTF-8 is whole characters
    text of /metrics --samples--> {name: value}; two of them --between--> rates; one histogram --quantile--> seconds

Plain Python: it needs neither a server nor a package.
"""

import math
from collections.abc import Mapping, Sequence


def whole_bytes(data: bytes) -> int:
    """How many bytes at the beginning of `data` are whole characters. data: UTF-8 that may end within a character."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte >= 0xC0:  # the first byte of a character says how many it has: 110..., 1110..., 11110...
            size = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < size else len(data)
        if byte < 0x80:
            break
    return len(data)


class EventReader:
    """The data of server-sent events, out of bytes that come in pieces of any size.

    Lines end in LF or CRLF, an event ends in an empty line. Fields other than `data`, and comments, are left out.
    """

    def __init__(self):
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """The data of each event that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" ").decode())
            elif not line and self._data:
                events.append("\n".join(self._data))
                self._data = []
        return events


def samples(text: str, prefix: str = "vllm:") -> dict[str, float]:
    """The samples of Prometheus' text format whose names begin with `prefix`: name -> value, summed over its labels.

    A histogram's bucket is named NAME_bucket<=BOUND.
    """
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith(prefix):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        if name.endswith("_bucket"):
            name += "<=" + labels.partition('le="')[2].partition('"')[0]
        found[name] = found.get(name, 0.0) + float(value)
    return found


def buckets(scrape: Mapping[str, float], name: str) -> list[tuple[float, float]]:
    """(upper bound, how many at most so large) of the histogram `name`, in order; the last bound is infinite."""
    start = f"{name}_bucket<="
    return sorted((float(key[len(start) :]), value) for key, value in scrape.items() if key.startswith(start))


def between(before: Mapping[str, float], after: Mapping[str, float], seconds: float) -> tuple:
    """(tokens generated a second, mean seconds to the first token, share of prompt tokens found) between two scrapes.

    The second is None if no first token fell into the interval, the third if no prompt did.
    """

    def rise(name: str) -> float:
        return after[f"vllm:{name}"] - before[f"vllm:{name}"]

    num_first, queried = rise("time_to_first_token_seconds_count"), rise("prefix_cache_queries_total")
    return (
        rise("generation_tokens_total") / seconds,
        rise("time_to_first_token_seconds_sum") / num_first if num_first else None,
        rise("prefix_cache_hits_total") / queried if queried else None,
    )


def quantile(q: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """Prometheus' histogram_quantile: where the share q (0 to 1) of all values lies, by a straight line in a bucket.

    buckets: as `buckets` gives them, their counts cumulative. None without values; a rank in the infinite bucket gives
    the largest finite bound.
    """
    rank, low, below = q * buckets[-1][1], 0.0, 0.0
    if not buckets[-1][1]:
        return None
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
