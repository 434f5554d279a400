"""Workloads: who arrives when, with how long a prompt, and for how many tokens. Drawn from a seed, or read (traces.py).

    ClosedBatch | Poisson | Bursts  --times-->  Arrival, Arrival, ...  = Workload  -->  Simulator.run
    Fixed | Uniform | Lognormal | Empirical  --draw--^  (prompt_tokens, output_tokens)

Time is a whole number of nanoseconds, so that equal seeds give equal runs to the last digit. A prompt has no text:
only whether two prompts begin alike can matter to a scheduler, and that is what `prefix_ids` says.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, isfinite, log
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol

NS = 1_000_000_000  # nanoseconds in a second
OWN_TOKENS = 2**40  # token ids from here on belong to one request alone; prefix ids are smaller


class Arrival(NamedTuple):
    """One request. at_ns: when it comes. output_tokens: where it will stop.

    prefix_ids: one id for each block of the workload's `prefix_block_size` prompt tokens; equal ids are equal tokens.
    What they do not cover is the request's own and equal to nobody's. priority: smaller goes first.
    """

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    request_id: str
    priority: int = 0
    prefix_ids: tuple[int, ...] = ()


# --- lengths --------------------------------------------------------------------------------------------------


class Lengths(Protocol):
    """A distribution of token counts, each at least 1."""

    def draw(self, rng: Random) -> int: ...


@dataclass(frozen=True)
class Fixed:
    """Always `tokens`."""

    tokens: int

    def __post_init__(self):
        _whole(tokens=self.tokens)

    def draw(self, rng: Random) -> int:
        return self.tokens


@dataclass(frozen=True)
class Uniform:
    """Any whole number from low to high, both included, alike."""

    low: int
    high: int

    def __post_init__(self):
        _whole(low=self.low, high=self.high)
        if self.high < self.low:
            raise ValueError(f"uniform lengths from {self.low} to {self.high}: give the smaller number first")

    def draw(self, rng: Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True)
class Lognormal:
    """Many short, few very long: exp of a normal of deviation `sigma`, scaled to `mean`.

    Rounded, at least 1, at most `most` (which takes a little off the mean). sigma 1 is about what chats show.
    """

    mean: float
    sigma: float = 1.0
    most: int = 1_000_000

    def __post_init__(self):
        _whole(most=self.most)
        for name in ("mean", "sigma"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"{name} of lognormal lengths is {value!r}: use a positive number")

    def draw(self, rng: Random) -> int:
        drawn = exp(rng.gauss(log(self.mean) - self.sigma**2 / 2, self.sigma))
        return max(1, min(self.most, round(drawn)))


@dataclass(frozen=True)
class Empirical:
    """One of `values`, each as likely as it is frequent: the lengths of a trace."""

    values: Sequence[int]

    def __post_init__(self):
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ValueError("empirical lengths without a value: give at least one")
        for value in self.values:
            _whole(value=value)

    def draw(self, rng: Random) -> int:
        return rng.choice(self.values)


def parse_lengths(text: str) -> Lengths:
    """200, uniform:10:120, lognormal:200 or lognormal:200:1.2 (mean, sigma). ValueError says what is understood."""
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    kinds: dict[str, tuple[Callable[..., Lengths], tuple[type, ...], int]] = {
        "fixed": (Fixed, (int,), 1), "uniform": (Uniform, (int, int), 2), "lognormal": (Lognormal, (float, float), 1),
    }  # fmt: skip
    try:
        made, types, least = kinds[kind]
        if not least <= len(numbers) <= len(types):
            raise ValueError
        values = [to(number) for to, number in zip(types, numbers, strict=False)]
    except (KeyError, ValueError):
        raise ValueError(f"lengths {text!r}: write 200, uniform:10:120 or lognormal:200:1.2 (mean, sigma)") from None
    return made(*values)


# --- arrivals -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClosedBatch:
    """All at once, at time 0: an offline job."""

    def times(self, number: int, rng: Random) -> list[int]:
        return [0] * number


@dataclass(frozen=True)
class Poisson:
    """Independent users: `rate` requests a second on average, with exponential gaps."""

    rate: float

    def __post_init__(self):
        _positive(rate=self.rate)

    def times(self, number: int, rng: Random) -> list[int]:
        at, found = 0.0, []
        for _ in range(number):
            at += rng.expovariate(self.rate)
            found.append(round(at * NS))
        return found


@dataclass(frozen=True)
class Bursts:
    """`size` requests at once, every `every_s` seconds."""

    size: int
    every_s: float

    def __post_init__(self):
        _whole(size=self.size)
        _positive(every_s=self.every_s)

    def times(self, number: int, rng: Random) -> list[int]:
        return [round(i // self.size * self.every_s * NS) for i in range(number)]


# --- workloads ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival.

    prefix_block_size: tokens for which one of an arrival's prefix_ids stands. num_skipped: rows of a trace that
    asked for nothing (a prompt or an answer of 0 tokens).
    """

    name: str
    arrivals: Sequence[Arrival]
    prefix_block_size: int = 512
    num_skipped: int = 0

    def __post_init__(self):
        _whole(prefix_block_size=self.prefix_block_size)
        object.__setattr__(self, "arrivals", sorted(self.arrivals, key=lambda arrival: arrival.at_ns))

    def __len__(self) -> int:
        return len(self.arrivals)

    def prompt_of(self, number: int) -> list[int]:
        """Token ids of the prompt of arrival `number`: those of its prefix blocks, then tokens of its own."""
        arrival = self.arrivals[number]
        tokens: list[int] = []
        for prefix_id in arrival.prefix_ids:
            tokens += [prefix_id] * self.prefix_block_size
        del tokens[arrival.prompt_tokens :]
        return tokens + [OWN_TOKENS + number] * (arrival.prompt_tokens - len(tokens))

    def first(self, number: int) -> "Workload":
        """Only the first `number` requests."""
        return replace(self, arrivals=self.arrivals[:number])

    def faster(self, factor: float) -> "Workload":
        """The same requests, arriving `factor` times as fast."""
        _positive(factor=factor)
        return replace(self, arrivals=[a._replace(at_ns=round(a.at_ns / factor)) for a in self.arrivals])

    def with_outputs(self, tokens: int) -> "Workload":
        """The same requests, each stopping after `tokens` outputs."""
        _whole(tokens=tokens)
        return replace(self, arrivals=[a._replace(output_tokens=tokens) for a in self.arrivals])

    def save(self, path: str | Path) -> None:
        """Write it as JSON lines, which `read_trace` reads back unchanged."""
        lines = []
        for a in self.arrivals:
            row = {"arrival_s": a.at_ns / NS, "prompt_tokens": a.prompt_tokens, "output_tokens": a.output_tokens,
                   "request_id": a.request_id}  # fmt: skip
            if a.priority:
                row["priority"] = a.priority
            if a.prefix_ids:
                row |= {"prefix_ids": a.prefix_ids, "prefix_block_size": self.prefix_block_size}
            lines.append(json.dumps(row) + "\n")
        Path(path).write_text("".join(lines), encoding="utf-8")


def make_workload(num_requests: int, prompt: Lengths, output: Lengths,
                  arrivals: ClosedBatch | Poisson | Bursts | None = None, *, seed: int = 0, prefix_tokens: int = 0,
                  num_prefixes: int = 1, name: str = "made") -> Workload:  # fmt: skip
    """`num_requests` requests drawn from `seed`; without `arrivals`, all come at once.

    prefix_tokens: each prompt begins with so many tokens of one of `num_prefixes` system prompts, and goes on with
    `prompt` tokens of its own. Times, prompts, outputs and prefixes come from streams of their own: changing one
    distribution leaves the others as they were.
    """
    _whole(num_requests=num_requests, num_prefixes=num_prefixes)
    if not isinstance(prefix_tokens, int) or prefix_tokens < 0:
        raise ValueError(f"prefix_tokens is {prefix_tokens!r}: use a whole number, 0 for prompts that share nothing")
    draws = {what: Random(f"{seed} {what}") for what in ("times", "prompts", "outputs", "prefixes")}
    times = (arrivals or ClosedBatch()).times(num_requests, draws["times"])
    made = []
    for number, at in enumerate(times):
        prefix = (draws["prefixes"].randrange(num_prefixes),) if prefix_tokens else ()
        tokens = prefix_tokens + prompt.draw(draws["prompts"])
        made.append(Arrival(at, tokens, output.draw(draws["outputs"]), str(number), 0, prefix))
    return Workload(name, made, prefix_block_size=prefix_tokens or 512)


def closed_batch(lengths: Iterable[tuple[int, int]], name: str = "batch") -> Workload:
    """Exactly these (prompt_tokens, output_tokens), all at time 0, in this order."""
    arrivals = []
    for number, (prompt, output) in enumerate(lengths):
        _whole(prompt_tokens=prompt, output_tokens=output)
        arrivals.append(Arrival(0, prompt, output, str(number)))
    return Workload(name, arrivals)


def _whole(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} is {value!r}: use a whole number >= 1")


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise ValueError(f"{name} is {value!r}: use a positive number")
