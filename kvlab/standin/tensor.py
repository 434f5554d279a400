"""Values and pointers as a kernel sees them.

    Value    a scalar or a block of numbers, `data` (NumPy) with a dtype of `types`; int32 wraps, as on a GPU
    Pointer  an address or a block of addresses: a Memory and an offset in elements from its first one

Python's own numbers take the type of what they meet, as in Triton: 2 * int32 is int32, 0.5 * int32 is fp32.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

INT32 = np.iinfo(np.int32)


class Type:
    """A type of numbers, such as tl.float32."""

    def __init__(self, name: str, numpy: Any):
        self.name, self.numpy = name, np.dtype(numpy)

    def __repr__(self) -> str:
        return self.name


class PointerType:
    """What `pointer.dtype` gives; its element_ty is the type that it points to."""

    def __init__(self, element_ty: Type):
        self.element_ty = element_ty


TYPES = {
    name: Type(name, numpy)
    for name, numpy in (("int1", bool), ("int8", np.int8), ("int32", np.int32), ("int64", np.int64),
                        ("float16", np.float16), ("float32", np.float32))
}  # fmt: skip
OF_NUMPY = {kind.numpy: kind for kind in TYPES.values()}


class Indexed:
    """What values and pointers have in common: a shape, and x[:, None]."""

    __array_ufunc__ = None  # so that NumPy leaves the arithmetic to us

    @property
    def shape(self) -> tuple[int, ...]:
        return self._block().shape

    def __getitem__(self, index: Any) -> Any:
        wanted = index if isinstance(index, tuple) else (index,)
        if any(part is not None and part != slice(None) for part in wanted):
            raise TypeError("a block has no elements to pick: index it with : and None only, as in x[:, None]")
        if len(wanted) - wanted.count(None) > len(self.shape):
            raise IndexError(f"{self!r} has no axis for each colon: it has {len(self.shape)}")
        return self._like(self._block()[index])

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("a kernel's block is no NumPy array: use the operations of tl")

    def __iter__(self) -> Any:
        raise TypeError("a kernel cannot walk through a block: its elements are handled all at once")


class Value(Indexed):
    """A scalar or a block of numbers."""

    def __init__(self, data: Any):
        self.data = np.asarray(data)

    @property
    def dtype(self) -> Type:
        return OF_NUMPY[self.data.dtype]

    def to(self, dtype: Type) -> Value:
        """The same numbers as another type."""
        if not isinstance(dtype, Type):
            raise TypeError(f".to({dtype!r}): give a type such as tl.float32")
        return Value(self.data.astype(dtype.numpy))

    def _block(self) -> np.ndarray:
        return self.data

    def _like(self, data: np.ndarray) -> Value:
        return Value(data)

    def __index__(self) -> int:
        if self.data.ndim or self.data.dtype.kind not in "iu":
            raise TypeError(f"{self!r} is no whole number: a loop counts with a scalar")
        return int(self.data)

    def __float__(self) -> float:
        raise TypeError(f"float() of {self!r}, or a function of math: those take Python's numbers. Use tl's")

    def __bool__(self) -> bool:
        if self.data.size != 1:
            raise TypeError(
                f"`if`, `and`, `or`, `not` and `a < b < c` ask one question, and {self!r} holds {self.data.size} "
                f"answers: use &, |, ~ and tl.where"
            )
        return bool(self.data)

    def __repr__(self) -> str:
        return f"{self.dtype} {list(self.shape)}" if self.shape else f"{self.data} ({self.dtype})"

    def __neg__(self) -> Value:
        return Value(-self.data)

    def __invert__(self) -> Value:
        return Value(~self.data)


class Pointer(Indexed):
    """An address or a block of addresses: `offsets` (int64) elements behind the first one of `memory`."""

    def __init__(self, memory: Any, offsets: Any = 0):
        self.memory, self.offsets = memory, np.asarray(offsets, np.int64)

    @property
    def dtype(self) -> PointerType:
        return PointerType(OF_NUMPY[self.memory.dtype])

    def _block(self) -> np.ndarray:
        return self.offsets

    def _like(self, offsets: np.ndarray) -> Pointer:
        return Pointer(self.memory, offsets)

    def __add__(self, other: Any) -> Pointer:
        if isinstance(other, Pointer):
            raise TypeError("a pointer plus a pointer: add an offset, a whole number")
        step = as_value(other).data
        if step.dtype.kind != "i":
            raise TypeError(f"{self.memory.name} + {other!r}: an offset is a whole number of elements (use // , not /)")
        return Pointer(self.memory, self.offsets + step)  # whatever has wrapped in 32 bits before is wrong by now

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self + -as_value(other)

    def __repr__(self) -> str:
        return f"pointers {list(self.shape)} to {self.memory.name}"


def as_value(x: Any, like: np.dtype | None = None) -> Value:
    """`x` as a Value; a number of Python's own as `like`, if that can hold its kind, else as int32 or fp32."""
    if isinstance(x, Value):
        return x
    if isinstance(x, Pointer):
        raise TypeError(f"{x!r}, where numbers are wanted: tl.load reads them")
    if isinstance(x, bool):
        return Value(np.asarray(x))
    if isinstance(x, int):
        fits = INT32.min <= x <= INT32.max
        if like is not None and (like.kind == "f" or (like.kind == "i" and (like.itemsize == 8 or fits))):
            return Value(np.asarray(x, like))
        return Value(np.asarray(x, np.int32 if fits else np.int64))
    if isinstance(x, float):
        return Value(np.asarray(x, like if like is not None and like.kind == "f" else np.float32))
    raise TypeError(f"{x!r} ({type(x).__name__}) in a kernel: use numbers and what tl makes of them")


def together(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two operands as arrays of the type that they have in common."""
    given = next((x.data.dtype for x in (a, b) if isinstance(x, Value)), None)
    a, b = as_value(a, given).data, as_value(b, given).data
    kinds = a.dtype.kind + b.dtype.kind
    if "f" in kinds and kinds != "ff":  # a whole number takes the other's float type; NumPy would take fp64
        common = a.dtype if a.dtype.kind == "f" else b.dtype
    else:
        common = np.promote_types(a.dtype, b.dtype)
    return a.astype(common, copy=False), b.astype(common, copy=False)


def fit(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """Broadcast to one shape. ValueError, in a kernel's words, if there is none."""
    try:
        return np.broadcast_arrays(*arrays)
    except ValueError:
        shapes = " and ".join(str(list(array.shape)) for array in arrays)
        raise ValueError(f"blocks of shapes {shapes} do not fit together: a side must be equal, or 1") from None


def _binary(compute: Callable) -> tuple[Callable, Callable]:
    def forward(self: Value, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Value(compute(*fit(*together(self, other))))

    def backward(self: Value, other: Any) -> Any:
        return Value(compute(*fit(*together(other, self))))

    return forward, backward


def _true_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a / b if a.dtype.kind == "f" else a.astype(np.float32) / b.astype(np.float32)


def _floor_divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind == "f":
        raise TypeError("// is for whole numbers")
    return (a - np.fmod(a, b)) // b  # towards zero, as hardware does


for _name, _compute in {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": _true_divide,
    "floordiv": _floor_divide, "mod": np.fmod, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}.items():  # fmt: skip
    _forward, _backward = _binary(_compute)
    setattr(Value, f"__{_name}__", _forward)
    setattr(Value, f"__r{_name}__", _backward)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Value, f"__{_name}__", _binary(getattr(operator, _name))[0])
