"""What the pointers of one argument may reach, and a note of every access.

    Memory   a NumPy array, seen as one row of elements from its first to its last
    Spread   blocks that lie far apart: terabytes of addresses, of which only the blocks exist
    Traffic  what was read and written: by which argument, by which program, how many bytes
"""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

from kvlab.standin.tensor import OF_NUMPY


class OutOfBounds(IndexError):
    """A kernel accessed an element that the argument does not have."""


class Race(RuntimeError):
    """Two programs wrote the same element: on a GPU nobody knows whose stays."""


class Access(NamedTuple):
    """One load or store. at: int64, the elements of `name` that were not masked."""

    kind: str  # "load" or "store"
    name: str  # of the kernel's argument
    program: tuple[int, int, int]
    at: np.ndarray
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.at.size * self.itemsize


class Traffic(list):
    """Every Access of the launches that were recorded, in order."""

    def num_bytes(self, kind: str = "", *names: str) -> int:
        """Bytes asked for: of one kind ("" is both), of the arguments `names` (none named: of all)."""
        chosen = (a for a in self if kind in ("", a.kind) and (not names or a.name in names))
        return sum(access.num_bytes for access in chosen)

    def table(self) -> dict[tuple[str, str], int]:
        """(kind, argument) -> bytes."""
        found: Counter = Counter()
        for access in self:
            found[access.kind, access.name] += access.num_bytes
        return dict(found)

    @property
    def programs(self) -> int:
        """How many programs accessed anything."""
        return len({access.program for access in self})


class Memory:
    """The elements of a NumPy array, strides and all, in one row: element 0 is array[0, 0, ...]."""

    def __init__(self, array: np.ndarray, name: str = "memory"):
        if array.dtype not in OF_NUMPY:
            known = ", ".join(str(dtype) for dtype in OF_NUMPY)
            raise TypeError(f"{name} is {array.dtype}: a kernel here takes arrays of {known}")
        if any(stride < 0 or stride % array.itemsize for stride in array.strides):
            raise ValueError(f"{name} has strides {array.strides}: give an array that runs forward")
        last = sum((n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)) // array.itemsize
        self.size = last + 1 if array.size else 0
        self.data = np.lib.stride_tricks.as_strided(array, (self.size,), (array.itemsize,), writeable=True)
        self.name, self.dtype = name, array.dtype
        self.writer: np.ndarray | None = None  # by element, the program of this launch that wrote it; from 1

    def refuse(self, kind: str, at: np.ndarray) -> None:
        """OutOfBounds unless every element of `at` is there."""
        outside = (at < 0) | (at >= self.size)
        if outside.any():
            raise OutOfBounds(
                f"{kind} of {self.name}[{int(at[outside][0])}]: it has the elements 0 to {self.size - 1} "
                f"({int(outside.sum())} of {at.size} addresses lie outside)"
            )

    def read(self, at: np.ndarray) -> np.ndarray:
        self.refuse("load", at)
        return self.data[at]

    def write(self, at: np.ndarray, values: Any, program: int) -> None:
        self.refuse("store", at)
        if self.writer is None:
            self.writer = np.zeros(self.size, np.int32)
        others = (self.writer[at] != 0) & (self.writer[at] != program)
        if others.any():
            raise Race(
                f"store to {self.name}[{int(at[others][0])}], which another program of this launch has written: does "
                f"this program mask what is not its own?"
            )
        self.writer[at] = program
        self.data[at] = values


class Spread(Memory):
    """Blocks, array[block], that lie `stride` elements apart: only they can be accessed, whatever is between.

    For offsets that pass 2^31 on a machine of any size: element block * stride + i is array[block].flat[i].
    """

    def __init__(self, array: np.ndarray, stride: int, name: str = "memory"):
        super().__init__(array, name)
        self.inner, self.stride = array[0].size, stride
        if stride < self.inner:
            raise ValueError(f"a stride of {stride} for blocks of {self.inner} elements: they would overlap")

    def read(self, at: np.ndarray) -> np.ndarray:
        return super().read(self._packed(at))

    def write(self, at: np.ndarray, values: Any, program: int) -> None:
        super().write(self._packed(at), values, program)

    def _packed(self, at: np.ndarray) -> np.ndarray:
        block, inner = at // self.stride, at % self.stride
        lost = (block < 0) | (block * self.inner >= self.size) | (inner >= self.inner)
        if lost.any():
            raise OutOfBounds(
                f"access to {self.name}[{int(at[lost][0])}], where nothing lies: its blocks begin every {self.stride} "
                f"elements. (A negative one is an offset that has passed 2^31 in 32 bits)"
            )
        return block * self.inner + inner
