"""The run that the view `kernel` draws: online_softmax.py's source on the stand-in for Triton, an event for each line.

source   the changed line (-1: none), then the kernel's lines from its loop on
cache    block size, tokens, blocks, then the block table
right    largest score, total and output by NumPy, all tokens at once
line     which of those lines ran (-1: one before the loop), a name that it set and its numbers
"""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import numpy as np

from kvlab.events import Event, Recorder
from kvlab.standin import tl, triton
from kvlab.standin.tensor import Value

KERNEL, FILE = "online_softmax_kernel", "online_softmax.py"
SIZE, LENGTH, BLOCKS, DIM = 4, 10, 7, 2
# The first name of a line that opens a frame; the lines behind it, up to the next such line, are in the same frame.
OPENS = ("for", "k", "scores", "new_largest", "alpha", "weights", "total", "result")
WALK = "range(0, tl.cdiv(seq_len, BLOCK_SIZE))"
EDITS = {
    "rises": ("", ""),
    "reversed": (WALK, "range(tl.cdiv(seq_len, BLOCK_SIZE) - 1, -1, -1)"),
    "mask_off": (" & (block_index * BLOCK_SIZE + offset < seq_len)", ""),
    "rescale_off": ("alpha = tl.exp2(largest - new_largest)", "alpha = 1.0"),
}


def _kernel(edit: tuple[str, str]) -> tuple[Any, list[str], int]:
    """(the kernel with the edit, on the stand-in; its lines; the line of the loop, from 0)."""
    spec = find_spec("kvlab_kernels")
    if spec is None or spec.origin is None:
        raise ImportError("the package kvlab_kernels, whose source this view runs, is not installed: install kvlab")
    text = (Path(spec.origin).parent / FILE).read_text(encoding="utf-8")
    found = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == KERNEL)
    lines = text.splitlines()[found.decorator_list[0].lineno - 1 : found.end_lineno]
    source = "\n".join(lines)
    if edit[0]:
        if source.count(edit[0]) != 1:
            raise ValueError(f"{FILE} has no longer one {edit[0]!r}: change EDITS in kvlab.watch.kernel with it")
        source = source.replace(*edit)
    names: dict[str, Any] = {"tl": tl, "triton": triton}
    exec(compile(source, f"{KERNEL}, edited" if edit[0] else KERNEL, "exec"), names)
    lines = source.splitlines()
    return names[KERNEL], lines, next(i for i, line in enumerate(lines) if line.startswith("    for "))


@contextmanager
def _each_line(code: CodeType, tell: Callable[[int, dict[str, Any], set[str]], None]) -> Iterator[None]:
    """While inside: tell(line of `code` that has run, from 0; the locals; which are new). Other code is not traced."""
    line, seen = -1, {}

    def local(frame: FrameType, kind: str, _: Any) -> Callable:
        nonlocal line, seen
        if kind in ("line", "return"):
            now = dict(frame.f_locals)
            if line >= 0:
                tell(line, now, {name for name, x in now.items() if seen.get(name) is not x})
            line, seen = frame.f_lineno - 1, now
        return local

    old = sys.gettrace()
    sys.settrace(lambda frame, kind, _: local if frame.f_code is code else None)
    try:
        yield
    finally:
        sys.settrace(old)


def _numbers(x: Any) -> list[float | str] | None:
    """A name's numbers as JSON can say them; None for what is no number, such as a pointer."""
    if not isinstance(x, Value | int | float):
        return None
    flat = np.ravel(x.data if isinstance(x, Value) else x).tolist()
    return [str(n) if not np.isfinite(n) else n for n in map(float, flat)]


def _cache(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """(q, keys, values, table). The largest score is the last tile's; behind token 9 lies what another request left."""
    random = Random(seed)
    rises, table = random.choice((1, 2, 3)), random.sample(range(1, BLOCKS), 3)
    scores = [random.sample([3, 2, 1, 0], 4), random.sample([2, 1, 1, 0], 4), [3 + rises, 2, 4 + rises, 1]]
    keys, values = np.full((2, BLOCKS, SIZE, 1, DIM), 7, np.float32)
    for block, row in zip(table, scores, strict=True):
        for slot, score in enumerate(row):
            first = random.randrange(3)
            keys[block, slot, 0] = first, score - first
            values[block, slot, 0] = random.randrange(5), random.randrange(5)
    values[table[-1], LENGTH % SIZE :] = 9
    return np.ones((1, 1, DIM), np.float32), keys, values, table


def _right(q: np.ndarray, keys: np.ndarray, values: np.ndarray, table: list[int]) -> list[float]:
    """(largest score, total, *output): softmax to the base 2 of all tokens at once, in fp64."""
    k, v = (x[table].reshape(-1, DIM)[:LENGTH].astype(np.float64) for x in (keys, values))
    scores = k @ q[0, 0]
    weights = 2.0 ** (scores - scores.max())
    return [scores.max().item(), weights.sum().item(), *(weights @ v / weights.sum()).tolist()]


def short(line: str) -> str:
    """A source line without what only Triton must know: its comment, `tl.`, types, axes and the broadcasts."""
    line = re.sub(r"  +#.*", "", line)
    line = re.sub(r"\btl\.|\.to\(tl\.\w+\)|\.to\(out[^)]*\)|\[:, None\]|\[None, :\]|, axis=\d|, other=0\.0", "", line)
    return line[4:]


def record_walk(scenario: str, seed: int) -> list[Event]:
    """One program of the kernel with the edit of `scenario` (of EDITS); the seed draws scores, V and the table."""
    recorder = Recorder()
    kernel, lines, loop = _kernel(EDITS[scenario])
    rows = {i: row for row, i in enumerate(i for i in range(loop, len(lines)) if lines[i].strip())}
    _, original, _ = _kernel(("", ""))
    edited = next((row for i, row in rows.items() if lines[i] != original[i]), -1)
    q, keys, values, table = _cache(seed)
    out = np.zeros_like(q)
    recorder.emit("source", None, [edited, *(short(lines[i]) for i in rows)])
    recorder.emit("cache", None, [SIZE, LENGTH, BLOCKS, *table])
    recorder.emit("right", None, _right(q, keys, values, table))

    def tell(line: int, local: dict[str, Any], new: set[str]) -> None:
        first = lines[line].split()[0]
        if first in OPENS and line >= loop and "/=" not in lines[line]:
            recorder.step += 1
        new |= {first} & set(local)  # alpha = 1.0 gives the same object again
        told = {name: numbers for name in sorted(new) if (numbers := _numbers(local[name])) is not None}
        if "tl.store" in lines[line]:
            told["out"] = out.ravel().tolist()
        for name, numbers in (told or {"": []}).items():
            recorder.emit("line", None, [rows.get(line, -1), name, *numbers])

    with _each_line(kernel.fn.__code__, tell):
        kernel[1, 1](
            q, keys, values, out, np.array([table], np.int32), np.array([LENGTH], np.int32), 1.0,
            DIM, DIM, DIM, DIM, len(table), SIZE * DIM, DIM, DIM,
            GROUP=1, HEAD_DIM=DIM, HEAD_DIM_PADDED=DIM, BLOCK_SIZE=SIZE, BLOCK_SIZE_PADDED=SIZE,
        )  # fmt: skip
    return recorder.events()
