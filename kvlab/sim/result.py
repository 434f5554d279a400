"""What a simulation brought, in the field's terms, and as pandas frames.

    arrival ---queue---> admitted ---prefill---> first token --ITL--> token --ITL--> ... last token
       |<------------------ TTFT ------------------>|<----------- TPOT x (n - 1) ---------->|
       |<----------------------------------- E2E ------------------------------------------>|

TTFT: time to first token. ITL: the gap between two tokens of a request. TPOT: the mean of a request's gaps. Times are
kept in whole nanoseconds and given in seconds.
"""

from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import Any, NamedTuple

from kvlab.config import EngineConfig
from kvlab.schedule import SchedulerStats
from kvlab.sim.speculation import SpeculationStats
from kvlab.sim.workload import NS, Workload

STEP_COLUMNS = ("start_ns", "duration_ns", "num_tokens", "num_sequences", "num_chunks", "num_running", "num_waiting",
                "num_preempted", "used_blocks", "kv_tokens")  # fmt: skip
QUANTILES = (0.5, 0.9, 0.99)


class RequestRecord(NamedTuple):
    """One request's story; times in ns, None for what did not happen. longest_gap: its worst ITL."""

    request_id: str
    arrived_at: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    admitted_at: int | None
    first_token_at: int | None
    last_token_at: int | None
    longest_gap: int
    num_preemptions: int
    finish_reason: str  # "length"; "refused", with the reason in `error`
    error: str | None

    @property
    def queue_ns(self) -> int | None:
        """From arrival until it is first scheduled."""
        return None if self.admitted_at is None else self.admitted_at - self.arrived_at

    @property
    def ttft_ns(self) -> int | None:
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def tpot_ns(self) -> float | None:
        """None with a single token: there is no gap."""
        if self.first_token_at is None or self.output_tokens < 2:
            return None
        return (self.last_token_at - self.first_token_at) / (self.output_tokens - 1)

    @property
    def e2e_ns(self) -> int | None:
        return None if self.last_token_at is None else self.last_token_at - self.arrived_at


@dataclass(frozen=True, kw_only=True)
class SLO:
    """A service objective: a request is good if it meets each limit that is set. Seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __post_init__(self):
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not value > 0):
                raise ValueError(f"{name} is {value!r}: use a positive number of seconds, or None for no objective")

    def is_met(self, record: RequestRecord) -> bool:
        """False for a request that was refused; one without gaps meets every TPOT."""
        if record.ttft_ns is None:
            return False
        pairs = ((self.ttft_s, record.ttft_ns), (self.tpot_s, record.tpot_ns), (self.e2e_s, record.e2e_ns))
        return all(limit is None or took is None or took <= limit * NS for limit, took in pairs)


def quantiles(counts: Mapping[float, int], wanted: Iterable[float]) -> list[float]:
    """Quantiles of a distribution given as {value: how often}, interpolated between neighbours as numpy does.

    nan for an empty one.
    """
    values = sorted(counts)
    ends, total = [], 0
    for value in values:
        total += counts[value]
        ends.append(total)
    if not total:
        return [float("nan") for _ in wanted]
    found = []
    for q in wanted:
        below, part = divmod(q * (total - 1), 1)
        low = bisect_right(ends, below)
        high = low if below + 1 < ends[low] or low + 1 == len(values) else low + 1
        found.append(values[low] + (values[high] - values[low]) * part)
    return found


def _counted(values: Iterable[float | None]) -> Counter:
    return Counter(value for value in values if value is not None)


@dataclass(eq=False)
class SimResult:
    """What a run wrote down. records: of all requests, in order of arrival. stats: the scheduler's own counters.

    step_columns: by name, one number a step. gaps: {ITL in ns: how often}. speculation: None where there was none.
    """

    workload: Workload
    config: EngineConfig
    stats: SchedulerStats
    num_usable_blocks: int
    records: Sequence[RequestRecord]
    step_columns: Mapping[str, array]
    gaps: Mapping[int, int]
    speculation: SpeculationStats | None = None

    @cached_property
    def distributions(self) -> dict[str, Mapping[float, int]]:
        """{"queue", "ttft", "tpot", "itl", "e2e": {nanoseconds: how often}}."""
        found: dict[str, Mapping[float, int]] = {}
        for name in ("queue", "ttft", "tpot", "e2e"):
            found[name] = _counted(getattr(record, f"{name}_ns") for record in self.records)
            if name == "tpot":
                found["itl"] = self.gaps
        return found

    @property
    def makespan_s(self) -> float:
        """From the first arrival to the last token."""
        ended = [record.last_token_at for record in self.records if record.last_token_at is not None]
        return (max(ended) - self.records[0].arrived_at) / NS if ended else 0.0

    def summary(self, slo: SLO | None = None) -> dict[str, float]:
        """All figures of the run by name: seconds, tokens, shares from 0 to 1. With `slo`, goodput as well.

        kv_usage: share of the pool's blocks that somebody owns; kv_filled: tokens with K/V over the slots of owned
        blocks (above 1 where blocks are shared). Both are means over the time in which the engine ran.
        swapped_out_tokens: slots that were moved, whole blocks. draft_tokens: that were checked.
        """
        stats, size, span = self.stats, self.config.block_size, self.makespan_s
        finished = [record for record in self.records if record.last_token_at is not None]
        prompts = sum(record.prompt_tokens for record in finished)
        outputs = sum(record.output_tokens for record in finished)
        found: dict[str, float] = {
            "requests": len(self.records), "finished": len(finished), "refused": len(self.records) - len(finished),
            "steps": stats.num_steps, "makespan_s": span, "requests_per_s": _share(len(finished), span),
            "output_tokens_per_s": _share(outputs, span), "total_tokens_per_s": _share(prompts + outputs, span),
        }  # fmt: skip
        if slo is not None:
            good = sum(slo.is_met(record) for record in self.records)
            found |= {"goodput_per_s": _share(good, span), "slo_met": _share(good, len(self.records))}
        for name, counts in self.distributions.items():
            for q, value in zip(QUANTILES, quantiles(counts, QUANTILES), strict=True):
                found[f"{name}_p{q * 100:.0f}_s"] = value / NS
        busy = sum(self.step_columns["duration_ns"])
        used = self._over_time("used_blocks")
        found |= {
            "kv_usage": _share(used, busy * self.num_usable_blocks), "kv_usage_peak": stats.peak_usage,
            "kv_filled": _share(self._over_time("kv_tokens"), used * size),
            "running": _share(self._over_time("num_running"), busy),
            "peak_running": stats.peak_running,
            "preemptions": stats.num_preemptions_recompute + stats.num_preemptions_swap,
            "recomputed_tokens": stats.num_recomputed_tokens, "swapped_out_tokens": stats.num_swapped_out_blocks * size,
            "swapped_in_tokens": stats.num_swapped_in_blocks * size, "idle_seats": stats.num_idle_seats,
            "prefix_hit_rate": _share(stats.num_prefix_hit_tokens, stats.num_prefix_queried_tokens),
        }  # fmt: skip
        if self.speculation is not None:
            verifications, drafts, accepted = self.speculation
            found |= {"draft_tokens": drafts, "accepted_tokens": accepted,
                      "tokens_per_verification": _share(verifications + accepted, verifications)}  # fmt: skip
        return found

    def _over_time(self, name: str) -> int:
        """The sum of a column, each step weighed by its nanoseconds."""
        return sum(map(mul, self.step_columns[name], self.step_columns["duration_ns"]))

    # ---- frames; pandas is imported here alone

    @cached_property
    def requests(self) -> Any:
        """A row for each request, in order of arrival; seconds, NaN for what did not happen."""
        import pandas as pd

        rows = []
        for r in self.records:
            times = [_seconds(t) for t in (r.arrived_at, r.queue_ns, r.ttft_ns, r.tpot_ns, r.e2e_ns)]
            gap = _seconds(r.longest_gap if r.output_tokens > 1 else None)
            rows.append((r.request_id, r.prompt_tokens, r.output_tokens, r.cached_tokens, *times, gap,
                         r.num_preemptions, r.finish_reason, r.error))  # fmt: skip
        names = ["request_id", "prompt_tokens", "output_tokens", "cached_tokens", "arrival_s", "queue_s", "ttft_s",
                 "tpot_s", "e2e_s", "longest_itl_s", "num_preemptions", "finish_reason", "error"]  # fmt: skip
        return pd.DataFrame(rows, columns=names)

    @cached_property
    def steps(self) -> Any:
        """A row for each step: when, how long, what it computed, who ran and waited, blocks in use.

        Counts are of the step as it was scheduled; kv_tokens are there at its end. Who arrived meanwhile is not in it.
        """
        import pandas as pd

        frame = pd.DataFrame({name: list(column) for name, column in self.step_columns.items()})
        frame.insert(0, "start_s", frame.pop("start_ns") / NS)
        frame.insert(1, "duration_s", frame.pop("duration_ns") / NS)
        frame["kv_usage"] = frame["used_blocks"] / self.num_usable_blocks
        return frame

    @cached_property
    def latencies(self) -> Any:
        """Rows queue, ttft, tpot, itl, e2e; columns mean, p50, p90, p99, max; in seconds."""
        import pandas as pd

        rows = {}
        for name, counts in self.distributions.items():
            total = sum(counts.values())
            mean = _share(sum(value * count for value, count in counts.items()), total)
            rows[name] = [value / NS for value in (mean, *quantiles(counts, (*QUANTILES, 1.0)))]
        return pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "p50", "p90", "p99", "max"])


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _seconds(ns: float | None) -> float:
    return float("nan") if ns is None else ns / NS
