"""The part `step`, watched: it calls schedule, execute and update_from_output once each, and hands on what it got.

A step that forgot one of them would let the engine run for ever, or run twice over the same tokens; here it is told
which. What the engine itself raises inside a step is the engine's, and comes through as it is.
"""

from collections.abc import Callable
from typing import Any

from kvlab.parts.guard import Complaint, PartError, guard_function

ORDER = ("schedule", "execute", "update_from_output")


def guard_step(function: Callable, complaint: Complaint | None = None) -> Callable:
    """`function` as a step function of EngineCore. PartError if it leaves the order, or what it returns is wrong."""
    guarded = guard_function("step", function, complaint)

    def step(scheduler: Any, runner: Any) -> Any:
        watch = _Watch()
        try:
            results = guarded(_Seen(scheduler, watch), _Seen(runner, watch))
        except Exception:
            if watch.error is not None:
                raise watch.error from watch.error.__cause__  # whatever the part made of it
            raise
        if watch.error is not None:
            raise watch.error
        if len(watch.gave) < len(ORDER):
            raise PartError("step", f"your part `step` never called {ORDER[len(watch.gave)]}()")
        return results

    return step


class _Watch:
    """gave: what each call of ORDER returned so far. error: what was raised in one of them."""

    def __init__(self):
        self.gave: list[Any] = []
        self.error: Exception | None = None

    def call(self, name: str, method: Callable, args: tuple, named: dict[str, Any]) -> Any:
        try:
            self._check(name, (*args, *(named[key] for key in ("output", "sampled") if key in named)))
            result = method(*args, **named)
        except Exception as error:
            self.error = self.error or error
            raise
        self.gave.append(result)
        return result

    def _check(self, name: str, args: tuple) -> None:
        done = len(self.gave)
        if done == len(ORDER) or ORDER[done] != name:
            after = f"after {ORDER[done - 1]}()" if done else "first"
            order = ", ".join(ORDER)
            raise PartError("step", f"your part `step` called {name}() {after}: the order is {order}, once each")
        if len(args) != done or any(given is not gave for given, gave in zip(args, self.gave, strict=True)):
            wanted = ("nothing", "what schedule() returned", "what schedule() and execute() returned, in this order")
            raise PartError("step", f"your part `step` gave {name}() something else: give it {wanted[done]}")


class _Seen:
    """Scheduler or runner, as it is but for the three calls, which are written down."""

    def __init__(self, target: Any, watch: _Watch):
        self._target, self._watch = target, watch

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in ORDER:
            return found
        return lambda *args, **named: self._watch.call(name, found, args, named)
