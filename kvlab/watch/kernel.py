"""View 9, one query's walk (L33 2.3 and 8.1): pages, tiles, and the running maximum, sum and result of online softmax.

    kernels/online_softmax.py --source--> kvlab.standin (NumPy as `tl`) --a line at a time--> events "line"

One program of the real kernel's source runs on a cache of 7 blocks; no Triton is needed. After each line the names that
it has changed are noted. Head dim 2, blocks of 4, 10 tokens. `scale_log2e` is 1, so that every weight is a power of 2.
Scenarios: "rises": the largest score comes in the last tile. "reversed": the last tile first. "mask_off" and
"rescale_off": the same source with one line spoilt, which is marked.
"""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any

import numpy as np

from kvlab.events import Event, Recorder
from kvlab.parts import Parts
from kvlab.standin import tl, triton
from kvlab.standin.tensor import Value
from kvlab.watch.kernel_picture import alt, draw, say, short
from kvlab.watch.view import Question, Scenario, View

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


@dataclass(frozen=True)
class Walk:
    """source: the kernel's lines from the loop on. edited: which of them was changed, -1 for none. rows: those that ran
    in this frame. values, before: name -> its numbers, now and a frame ago. fresh: names that this turn of
    the loop has set. right: what _right says."""

    source: tuple[str, ...] = ()
    edited: int = -1
    size: int = SIZE
    length: int = LENGTH
    num_blocks: int = BLOCKS
    table: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    values: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    before: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    right: tuple[float, ...] = ()

    def one(self, name: str) -> float:
        return self.values[name][0]

    @property
    def tile(self) -> int:
        """The index in the table of the block that is being read; -1 before and behind the walk."""
        return int(self.one("block_index")) if "block_index" in self.values and not self.done else -1

    @property
    def done(self) -> bool:
        return "out" in self.values

    @property
    def dim(self) -> int:
        return len(self.values["query"])

    def equals(self) -> tuple[bool, bool, bool]:
        """Whether largest, total and output at the end are those of softmax over all tokens at once."""
        largest, total, *output = self.right
        pairs = (("largest", largest), ("total", total), ("out", output))
        return tuple(bool(np.allclose(self.values[name], right, rtol=1e-5)) for name, right in pairs)


def after(walk: Walk, events: Sequence[Event]) -> Walk:
    now, values, rows, changed = walk, dict(walk.values), [], set()
    for event in events:
        if event.kind == "source":
            edited, *lines = event.values
            now = replace(now, source=tuple(lines), edited=edited)
        elif event.kind == "cache":
            size, length, num_blocks, *table = event.values
            now = replace(now, size=size, length=length, num_blocks=num_blocks, table=tuple(table))
        elif event.kind == "right":
            now = replace(now, right=tuple(event.values))
        elif event.kind == "line":
            row, name, *numbers = event.values
            rows.append(row)
            if name:
                values[name] = tuple(float(x) for x in numbers)
                changed.add(name)
    return replace(now, rows=tuple(r for r in rows if r >= 0), values=values, before=walk.values,
                   changed=frozenset(changed),
                   fresh=frozenset(changed if "block" in changed else changed | walk.fresh))  # fmt: skip


# ---- the run


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


def _run(scenario: str) -> Callable[[int, Parts], list[Event]]:
    def play(seed: int, parts: Parts) -> list[Event]:
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

    return play


# ---- questions

FIND, LOAD, LARGEST, ALPHA = 17, 18, 20, 21  # frames of the third tile; frame 0 is the set-up, a tile has 8


def _ask_rises(walk: Walk) -> tuple[str, Sequence[str]]:
    old, new = walk.one("largest"), walk.one("new_largest")
    return f"The largest score goes from {old:g} to {new:g}. What is total, so far {walk.one('total'):g}, multiplied by?", [
        "0: start again", f"{2 ** (old - new):g}", "1: it stays", f"{2 ** (new - old):g}"]  # fmt: skip


def _answer_rises(states: Sequence[Walk]) -> int:
    before = states[LARGEST]
    gap, alpha = before.one("new_largest") - before.one("largest"), states[ALPHA].one("alpha")
    return [0, 2**-gap, 1, 2**gap].index(alpha)


def _why_rises(states: Sequence[Walk]) -> str:
    now = states[ALPHA]
    old, new = now.one("largest"), now.one("new_largest")
    return (f"By 2^({old:g} - {new:g}) = {now.one('alpha'):g}, and result too: their weights were relative to {old:g}, "
            f"from now on all are relative to {new:g}.")  # fmt: skip


def _ask_reversed(walk: Walk) -> tuple[str, Sequence[str]]:
    return "The loop is turned round: the last tile comes first. What is at the end not as in table order?", [
        "largest", "total", "the output", "nothing: all three are equal"]  # fmt: skip


def _why_reversed(states: Sequence[Walk]) -> str:
    if not all(states[-1].equals()):
        return "The walk depends on the order, and it must not."
    return ("Each step leaves the exact sums for the tiles seen so far, relative to their largest score: any order, "
            "any place in memory.")  # fmt: skip


def _ask_mask(walk: Walk) -> tuple[str, Sequence[str]]:
    own = LENGTH - walk.tile * SIZE
    return (f"Without its mask the kernel reads 4 slots of block {walk.table[walk.tile]}, of which {own} are this "
            "request's. What comes out?"), (
        "the right output: unused slots weigh 0", "an error: out of bounds", "a wrong output, and no error")  # fmt: skip


def _why_mask(states: Sequence[Walk]) -> str:
    now, own = states[-1], LENGTH % SIZE
    if now.equals()[2]:
        return "The output is right: what lay in the unused slots got no weight."
    strange = sum(now.values["weights"][own:]) / now.one("total")
    return (f"The old slots hold another request's K and V; they lie in the cache, so nothing fails, and they get "
            f"{100 * strange:.0f}% of the weight.")  # fmt: skip


def _ask_rescale(walk: Walk) -> tuple[str, Sequence[str]]:
    old, new = walk.one("largest"), walk.one("new_largest")
    return f"The largest score goes from {old:g} to {new:g}, but alpha is now always 1. What comes out?", (
        "the right output: the division by total mends it", "early tokens count too much",
        "the last tile counts too much", "an error")  # fmt: skip


def _answer_rescale(states: Sequence[Walk]) -> int:
    gap = states[LARGEST].one("new_largest") - states[LARGEST].one("largest")
    return 0 if states[-1].equals()[2] else 1 if states[ALPHA].one("alpha") > 2**-gap else 2


def _why_rescale(states: Sequence[Walk]) -> str:
    gap = states[LARGEST].one("new_largest") - states[LARGEST].one("largest")
    return (f"Tiles 0 and 1 were weighed relative to a maximum that is {gap:g} lower: each of their tokens counts "
            f"{2**gap:g} times too much.")  # fmt: skip


VIEW = View(
    "kernel", "One query's walk (在线 softmax)", Walk(), after, draw, say, alt,
    kinds=frozenset({"source", "line"}),
    legend="black bar: the line that ran; thick: changed in this step; crossed: masked; A: this request's slots",
    scenarios={
        "rises": Scenario(_run("rises"), Question(LARGEST, ALPHA, _ask_rises, _answer_rises, _why_rises)),
        "reversed": Scenario(_run("reversed"), Question(
            0, -1, _ask_reversed, lambda states: [*states[-1].equals(), False].index(False), _why_reversed)),
        "mask_off": Scenario(_run("mask_off"), Question(
            FIND, -1, _ask_mask, lambda states: 0 if states[-1].equals()[2] else 2, _why_mask)),
        "rescale_off": Scenario(_run("rescale_off"), Question(
            LARGEST, -1, _ask_rescale, _answer_rescale, _why_rescale)),
    },
    takes_parts=False,
    remedy="this view walks through one kernel line by line, which no engine records: take a trace of its scenarios",
)  # fmt: skip
