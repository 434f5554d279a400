"""The views by name: `views.pool("fragmented", seed=3, step=12)` opens that run on that frame.

trace=: a Recorder, a file that it saved, or events: that run in place of a scenario. parts=: kvlab.parts.Parts, so that
a student's own structures are what is seen. projector=: open in large letters.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

from kvlab.events import Event, Recorder
from kvlab.parts import Parts
from kvlab.watch.player import Player
from kvlab.watch.view import read_trace

# Each is a module of kvlab.watch with a VIEW.
NAMES = ("pool", "fork", "prefix", "crossover", "preemption", "strip", "address", "kernel", "schedule", "budget")

Trace = str | Path | Recorder | Iterable[Event]


def show(name: str, scenario: str | None = None, seed: int = 0, step: int | None = None, parts: Parts | None = None,
         trace: Trace | None = None, projector: bool = False) -> Player:  # fmt: skip
    """The view `name`. ValueError if there is no such view or scenario."""
    if name not in NAMES:
        raise ValueError(f"there is no view {name!r}: take one of {', '.join(NAMES)}")
    view = import_module(f"kvlab.watch.{name}").VIEW
    if trace is not None:
        if scenario is not None or parts is not None:
            raise ValueError("a trace is a run that has happened: it takes neither a scenario nor parts")
        return Player(view, read_trace(view, trace), step=step, line=f"views.{name}(trace=...)", projector=projector)
    if parts is not None and not view.takes_parts:
        raise ValueError(f"the view {name!r} shows no structure that a part could replace: leave parts= out")
    scenario = scenario or next(iter(view.scenarios))
    if scenario not in view.scenarios:
        raise ValueError(f"{name} has no scenario {scenario!r}: take one of {', '.join(view.scenarios)}")

    def play(one: str, at: int | None = None) -> Player:
        line = f'views.{name}("{one}", seed={seed}' + (", parts=parts)" if parts else ")")
        chosen = view.scenarios[one]
        events = list(chosen.play(seed, parts or Parts()))
        return Player(view, events, chosen.question, at, line, projector, one,
                      lambda: {other: play(other) for other in view.scenarios})  # fmt: skip

    return play(scenario, step)


def pool(scenario: str | None = None, **options) -> Player:
    """View 2: the block pool. Scenarios "fragmented" and "tight"; options as for `show`."""
    return show("pool", scenario, **options)


def fork(scenario: str | None = None, **options) -> Player:
    """View 4: fork and copy-on-write. Scenarios "half_full" and "full"; options as for `show`."""
    return show("fork", scenario, **options)


def prefix(scenario: str | None = None, **options) -> Player:
    """View 5: radix tree and hash chain. Scenarios "first_or_last", "time_first", "time_last", "split", "evict"."""
    return show("prefix", scenario, **options)


def crossover(scenario: str | None = None, **options) -> Player:
    """View 8a: swap or recompute. Scenarios "length", "link", "pieces", "heads", "found"; options as for `show`."""
    return show("crossover", scenario, **options)


def preemption(scenario: str | None = None, **options) -> Player:
    """View 8b: preemption, replayed. Scenarios "six", "victim", "four", "watermark", "mixed"; options as for `show`."""
    return show("preemption", scenario, **options)


def strip(scenario: str | None = None, **options) -> Player:
    """View 1: the memory strip. Scenarios "longest" and "exact"; options as for `show`."""
    return show("strip", scenario, **options)


def address(scenario: str | None = None, **options) -> Player:
    """View 3: the address explorer. Scenarios "scattered" and "wrong"; options as for `show`."""
    return show("address", scenario, **options)


def kernel(scenario: str | None = None, **options) -> Player:
    """View 9: one query's walk. Scenarios "rises", "reversed", "mask_off", "rescale_off"; options as for `show`."""
    return show("kernel", scenario, **options)


def schedule(scenario: str | None = None, **options) -> Player:
    """View 6: static and continuous batching. Scenarios "mixed", "equal", "alone", "long_last", "late"."""
    return show("schedule", scenario, **options)


def budget(scenario: str | None = None, **options) -> Player:
    """View 7: the token budget. Scenarios "whole", "chunks", "half" and "starved"; options as for `show`."""
    return show("budget", scenario, **options)
