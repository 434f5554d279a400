"""The operations of triton.language that paged attention needs, on NumPy.

What Triton refuses is refused here: blocks whose sides are no powers of two, a tl.dot of small or unlike operands.
What a masked load without `other` leaves is anything; here it is NaN, or a large whole number, so that it is noticed.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from kvlab.standin.memory import Access, Traffic
from kvlab.standin.tensor import TYPES, Pointer, Type, Value, as_value, fit, together

ANYTHING = 0x5A5A5A5A
SMALLEST_DOT = 16


class Program:
    """The program that runs now: its place in the grid, and where its accesses are noted."""

    now: "Program | None" = None

    def __init__(self, place: tuple[int, int, int], grid: tuple[int, int, int], traffic: Traffic | None):
        self.place, self.grid, self.traffic = place, grid, traffic
        self.number = 1 + place[0] + grid[0] * (place[1] + grid[1] * place[2])

    def note(self, kind: str, pointer: Pointer, at: np.ndarray) -> None:
        if self.traffic is not None:
            self.traffic.append(Access(kind, pointer.memory.name, self.place, at, pointer.memory.dtype.itemsize))


def running() -> Program:
    if Program.now is None:
        raise RuntimeError("this belongs inside a kernel, which is launched with kernel[grid](...)")
    return Program.now


class constexpr:
    """An argument that is known when the kernel is compiled: an annotation, N: tl.constexpr."""

    def __new__(cls, value: Any) -> Any:
        return value


# ---- where am I, and what do I read


def program_id(axis: int) -> Value:
    """This program's place along one axis of the grid, int32."""
    return Value(np.int32(running().place[axis]))


def num_programs(axis: int) -> Value:
    """How many programs the grid has along one axis, int32."""
    return Value(np.int32(running().grid[axis]))


def load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
    """What lies at the addresses. Where mask is False nothing is read, and the result is `other`."""
    at, chosen = _addresses("load", pointer, mask)
    memory = pointer.memory
    if other is None:
        found = np.full(at.shape, np.nan if memory.dtype.kind == "f" else min(ANYTHING, np.iinfo(memory.dtype).max))
        found = found.astype(memory.dtype)
    else:
        found = np.broadcast_to(fit(as_value(other).data, at)[0], at.shape).astype(memory.dtype)
    found[chosen] = memory.read(at[chosen])
    running().note("load", pointer, at[chosen])
    return Value(found)


def store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    """Write value to the addresses, as the type that lies there. Where mask is False nothing is written."""
    at, chosen = _addresses("store", pointer, mask)
    values = np.asarray(as_value(value).data)
    if fit(values, at)[0].shape != at.shape:
        raise ValueError(f"tl.store of a block {list(values.shape)} at addresses {list(at.shape)}: shapes must agree")
    values = np.broadcast_to(values, at.shape)[chosen].astype(pointer.memory.dtype)
    pointer.memory.write(at[chosen], values, running().number)
    running().note("store", pointer, at[chosen])


def _addresses(what: str, pointer: Any, mask: Any) -> tuple[np.ndarray, np.ndarray]:
    """(addresses, which of them are accessed), of one shape."""
    if not isinstance(pointer, Pointer):
        raise TypeError(f"tl.{what} of {pointer!r}: give a pointer, an argument of the kernel plus an offset")
    chosen = as_value(True if mask is None else mask).data
    if chosen.dtype != bool:
        raise TypeError(f"tl.{what}: the mask is {as_value(mask)!r}; give a comparison")
    at, chosen = fit(pointer.offsets, chosen)
    if at.shape != pointer.shape:
        raise ValueError(f"tl.{what}: a mask {list(as_value(mask).shape)} for addresses {list(pointer.shape)}")
    return at.copy(), chosen


# ---- blocks


def arange(start: int, end: int) -> Value:
    """start, start + 1, ..., end - 1, int32. The length must be a power of two, known beforehand."""
    if not isinstance(start, int) or not isinstance(end, int):
        raise TypeError("tl.arange: both ends must be constants, Python's own whole numbers or tl.constexpr")
    _sides([end - start], "tl.arange")
    return Value(np.arange(start, end, dtype=np.int32))


def full(shape: Any, value: Any, dtype: Type) -> Value:
    """A block of one value."""
    sides = list(shape) if isinstance(shape, list | tuple) else [shape]
    _sides(sides, "tl.full")
    return Value(np.full(sides, as_value(value).data.astype(dtype.numpy)))


def zeros(shape: Any, dtype: Type) -> Value:
    """A block of zeros."""
    return full(shape, 0, dtype)


def _sides(sides: list, who: str) -> None:
    for side in sides:
        if not isinstance(side, int) or side < 1 or side & (side - 1):
            raise ValueError(f"{who}: a side of {side!r}; a block's sides are powers of two, known beforehand")


def broadcast_to(x: Any, shape: Any) -> Value:
    return Value(np.broadcast_to(as_value(x).data, tuple(shape)).copy())


def expand_dims(x: Any, axis: int) -> Any:
    return x._like(np.expand_dims(x._block(), axis))


def trans(x: Value) -> Value:
    """Rows and columns exchanged."""
    return Value(x.data.T.copy())


# ---- arithmetic


def cdiv(a: Any, b: Any) -> Any:
    """a / b, rounded up: whole numbers."""
    return (a + b - 1) // b


def where(condition: Any, x: Any, y: Any) -> Value:
    """x where the condition holds, else y. Both are computed."""
    return Value(np.where(*fit(as_value(condition).data, *together(x, y))))


def maximum(x: Any, y: Any, **_: Any) -> Value:
    """The larger one, element by element; the other one beside NaN."""
    return Value(np.fmax(*fit(*together(x, y))))


def minimum(x: Any, y: Any, **_: Any) -> Value:
    return Value(np.fmin(*fit(*together(x, y))))


def _floating(compute: Any) -> Any:
    def function(x: Any) -> Value:
        data = as_value(x).data
        if data.dtype.kind != "f":
            raise TypeError(f"tl.{compute.__name__} of {as_value(x)!r}: convert it with .to(tl.float32)")
        return Value(compute(data))

    return function


exp, exp2, log, log2, sqrt, floor = map(_floating, (np.exp, np.exp2, np.log, np.log2, np.sqrt, np.floor))


def absolute(x: Any) -> Value:
    return Value(np.abs(as_value(x).data))


def reduce_sum(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The sum along one axis, which goes away; of all if axis is None."""
    return Value(np.sum(*_along(x, axis), keepdims=keep_dims, dtype=x.data.dtype))


def reduce_max(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    """The largest along one axis; NaN only where there is nothing else."""
    return Value(np.fmax.reduce(*_along(x, axis), keepdims=keep_dims))


def reduce_min(x: Value, axis: int | None = None, keep_dims: bool = False) -> Value:
    return Value(np.fmin.reduce(*_along(x, axis), keepdims=keep_dims))


def _along(x: Any, axis: int | None) -> tuple[np.ndarray, int | tuple[int, ...]]:
    if not isinstance(x, Value) or not x.shape:
        raise ValueError(f"a sum or a maximum over {x!r}: give a block")
    if axis is not None and not -len(x.shape) <= axis < len(x.shape):
        raise ValueError(f"axis {axis} of a block {list(x.shape)}")
    return x.data, tuple(range(len(x.shape))) if axis is None else axis


def dot(a: Value, b: Value, acc: Value | None = None, **_: Any) -> Value:
    """The matrix product [M, K] x [K, N] -> fp32 [M, N]. Every side at least 16, both of one type: so tensor cores."""
    for x in (a, b):
        if not isinstance(x, Value) or len(x.shape) != 2:
            raise ValueError(f"tl.dot of {x!r}: give blocks of two dimensions")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"tl.dot of {list(a.shape)} and {list(b.shape)}: the inner sides must be equal")
    if a.dtype is not b.dtype:
        raise TypeError(f"tl.dot of {a.dtype} and {b.dtype}: convert one with .to(...)")
    if min(*a.shape, *b.shape) < SMALLEST_DOT:
        raise ValueError(f"tl.dot of {list(a.shape)} and {list(b.shape)}: every side must be at least {SMALLEST_DOT}")
    product = a.data.astype(np.float32) @ b.data.astype(np.float32)
    return Value(product) if acc is None else acc + Value(product)


# ---- what a kernel may also say


def static_assert(condition: Any, message: str = "") -> None:
    assert condition, message


def static_range(*bounds: Any) -> range:
    return range(*bounds)


def tl_range(*bounds: Any, **_: Any) -> range:
    return range(*bounds)


LANGUAGE = {
    **TYPES, "sum": reduce_sum, "max": reduce_max, "min": reduce_min, "abs": absolute, "range": tl_range,
    **{f.__name__: f for f in (program_id, num_programs, load, store, arange, full, zeros, broadcast_to, expand_dims,
                               trans, cdiv, where, maximum, minimum, dot, static_assert, static_range, constexpr)},
    **dict(zip(("exp", "exp2", "log", "log2", "sqrt", "floor"), (exp, exp2, log, log2, sqrt, floor), strict=True)),
}  # fmt: skip
LANGUAGE["math"] = SimpleNamespace(**{name: LANGUAGE[name] for name in ("exp", "exp2", "log", "log2", "sqrt", "floor")})
for _name in ("sum", "max", "min", "exp", "exp2", "trans", "expand_dims", "abs"):
    setattr(Value, _name, LANGUAGE[_name])
