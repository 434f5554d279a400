"""@triton.jit and kernel[grid](...): each program of the grid runs the kernel's function, one after the other.

    with record() as traffic:
        kernel[4, 2](q, out, N=16)       8 programs
    traffic.num_bytes("load", "q")       bytes that they asked for

An array becomes a pointer to its first element, and is named as the kernel's argument is. Whole numbers become int32
(or int64, if they need it), other numbers fp32; a tl.constexpr stays as it is.
"""

import functools
import inspect
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvlab.standin import language
from kvlab.standin.language import Program
from kvlab.standin.memory import Memory, Traffic
from kvlab.standin.tensor import Pointer, as_value

OPTIONS = ("num_warps", "num_stages", "num_ctas")  # for the compiler
_recorders: list[Traffic] = []


@contextmanager
def record() -> Iterator[Traffic]:
    """Note every load and store of the launches inside."""
    traffic = Traffic()
    _recorders.append(traffic)
    try:
        yield traffic
    finally:
        _recorders.pop()


class Kernel:
    """What @triton.jit makes of a function. kernel[grid] launches it; another kernel may call it."""

    def __init__(self, fn: Any):
        self.fn = fn
        functools.update_wrapper(self, fn)
        self.parameters = inspect.signature(fn).parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if Program.now is None:
            raise RuntimeError(f"{self.fn.__name__} is a kernel: launch it with {self.fn.__name__}[grid](...)")
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid: Any) -> Any:
        return functools.partial(self.run, grid)

    def run(self, grid: Any, *args: Any, **kwargs: Any) -> None:
        """One launch: grid is 1 to 3 whole numbers, or a function of the constexprs that gives them."""
        kwargs = {name: value for name, value in kwargs.items() if name not in OPTIONS}
        bound = inspect.signature(self.fn).bind(*args, **kwargs)
        bound.apply_defaults()
        if callable(grid):
            grid = grid(bound.arguments)
        sides = [int(side) for side in (grid if isinstance(grid, tuple | list) else (grid,))]
        if not 1 <= len(sides) <= 3 or min(sides) < 0:
            raise ValueError(f"the grid is {grid!r}: give one to three numbers of programs")
        if Program.now is not None:
            raise RuntimeError("a kernel cannot launch a kernel")
        sides += [1] * (3 - len(sides))
        values = {name: self._argument(name, value) for name, value in bound.arguments.items()}
        traffic = _recorders[-1] if _recorders else None
        try:
            with np.errstate(all="ignore"):
                for z, y, x in itertools.product(*map(range, reversed(sides))):  # the first axis is the fastest
                    Program.now = Program((x, y, z), tuple(sides), traffic)
                    self.fn(**values)
        finally:
            Program.now = None

    def _argument(self, name: str, value: Any) -> Any:
        if _is_constexpr(self.parameters[name]):
            return value
        if hasattr(value, "detach"):  # a tensor of PyTorch's, on the CPU
            value = value.detach().numpy()
        if isinstance(value, np.ndarray):
            value = Memory(value, name)
        if isinstance(value, Memory):
            value.name, value.writer = name, None
            return Pointer(value)
        if isinstance(value, np.generic):
            value = value.item()
        return None if value is None else as_value(value)


def _is_constexpr(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    return annotation is language.constexpr or (isinstance(annotation, str) and "constexpr" in annotation)


def jit(fn: Any = None, **_: Any) -> Any:
    """As @triton.jit or @triton.jit(...), whose options are for the compiler."""
    return Kernel(fn) if fn is not None else Kernel


def next_power_of_2(n: int) -> int:
    return 1 << max(int(n) - 1, 0).bit_length()


class Language(SimpleNamespace):
    """The namespace `tl`."""

    def __getattr__(self, name: str) -> Any:
        if name == "bfloat16":
            raise AttributeError("NumPy has no bfloat16: use tl.float16 or tl.float32 in this stand-in")
        known = ", ".join(sorted(key for key in vars(self) if not key.startswith("_")))
        raise AttributeError(f"this stand-in has no tl.{name}; it has {known}")


tl = Language(**language.LANGUAGE)
triton = SimpleNamespace(jit=jit, cdiv=lambda a, b: -(-a // b), next_power_of_2=next_power_of_2, language=tl)
