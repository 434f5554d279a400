"""Lab 10: drives the student's functions and kernels with plain values. Runs in the child process.

A case is a dict: seq_lens; block_size, kv_heads, group, head_dim; scores; values; spread; dtype; stale; layout. Its
pages lie in shuffled order. Every slot that no sequence owns holds NaN, and the tables' tails hold -1. If `stale`, the
slots hold what the last owner left, and the tails block ids of somebody else's. Layout "heads" keeps the tokens of one
KV head of a block together, so that the strides are others.
"""

import ast
import linecache
import math
import sys

import numpy as np

from kvlab.standin import OutOfBounds, Race, Spread, record, triton
from kvlab.standin.decode import LOG2E
from kvlab.standin.faults import faulty
from kvlab.standin.tensor import Pointer, Value

DEFAULTS = {"block_size": 4, "kv_heads": 1, "group": 1, "head_dim": 16, "scores": "random", "values": "positions",
            "spread": False, "dtype": "float32", "tile": 16, "nan": True, "stale": False, "layout": "tokens"}  # fmt: skip
FAR = 1 << 30


def number(kind, seq, position, head, d):
    """One number of q, K or V: between -2 and 2, a multiple of 1/32."""
    x = (seq * 71 + position * 13 + head * 29 + d * 31 + kind * 57 + 11) * 2654435761 % 4294967296
    return (x // 1024 % 129 - 64) / 32


class Paged:
    """The arrays of a case."""

    def __init__(self, case):
        self.case = case = DEFAULTS | case
        lens, size, kv_heads, dim = (case[name] for name in ("seq_lens", "block_size", "kv_heads", "head_dim"))
        pages = [-(-n // size) for n in lens]
        num_blocks, heads = sum(pages) + 2, kv_heads * case["group"]
        step = next(step for step in (5, 7, 11, 3, 2, 1) if math.gcd(step, num_blocks) == 1)
        order = iter([(3 + i * step) % num_blocks for i in range(num_blocks)])
        empty = np.nan if case["nan"] else 0.0
        self.keys, self.values = (self._pool(num_blocks, size, kv_heads, dim, empty) for _ in range(2))
        self.tables = np.full((len(lens), max([*pages, 1]) + 2 * case["stale"]), case["stale"] - 1, np.int32)
        self.lens = np.array(lens, np.int32)
        self.q = np.zeros((len(lens), heads, dim), case["dtype"])
        for seq in range(len(lens)):
            for head in range(heads):
                self.q[seq, head] = [query(case, seq, head, d) for d in range(dim)]
        if case["stale"]:
            self.keys[...], self.values[...] = 4 * self.q[0, 0], 5.0
        for seq, length in enumerate(lens):
            self.tables[seq, : pages[seq]] = [next(order) for _ in range(pages[seq])]
            for position in range(length):
                at = self.tables[seq, position // size], position % size
                for head in range(kv_heads):
                    self.keys[at][head] = [key(case, seq, position, head, d) for d in range(dim)]
                    self.values[at][head] = [value(case, seq, position, head, d) for d in range(dim)]
        self.out = np.full(self.q.shape, np.nan, case["dtype"])

    def _pool(self, num_blocks, size, kv_heads, dim, empty):
        """[num_blocks, size, kv_heads, dim], as the layout has it in memory."""
        if self.case["layout"] == "heads":
            return np.full((num_blocks, kv_heads, size, dim), empty, self.case["dtype"]).swapaxes(1, 2)
        return np.full((num_blocks, size, kv_heads, dim), empty, self.case["dtype"])

    def launch(self, kernel, packed):
        case, (_, size, kv_heads, dim) = self.case, self.keys.shape
        block, slot, head = (stride // self.keys.itemsize for stride in self.keys.strides[:3])
        keys, values = self.keys, self.values
        if case["spread"]:
            block, keys, values = FAR, Spread(keys, FAR), Spread(values, FAR)
        args = (self.out, self.q, keys, values, self.tables, self.lens, LOG2E / math.sqrt(dim),
                self.tables.shape[1], block, slot, head)  # fmt: skip
        sizes = {"GROUP": case["group"], "HEAD_DIM": dim, "BLOCK_SIZE": size}
        if packed:
            sizes |= {"ROWS": max(triton.next_power_of_2(case["group"]), 16), "TILE": case["tile"]}
        grid = (kv_heads if packed else kv_heads * case["group"]), len(self.lens)
        before = [x.copy() for x in (self.q, self.keys, self.values, self.tables, self.lens)]
        kernel[grid](*args, **sizes)
        for name, was, now in zip(("q", "keys", "values", "block_tables", "seq_lens"), before,
                                  (self.q, self.keys, self.values, self.tables, self.lens), strict=True):  # fmt: skip
            if was.tobytes() != now.tobytes():
                raise ValueError(f"the kernel has changed {name}")

    def head(self, seq, head, out, traffic):
        """A row of the output; or where NaN came from."""
        row = [round(float(x), 5) for x in out[seq, head]]
        if not any(math.isnan(x) for x in row):
            return row
        size, inner = self.case["block_size"], self.keys[0].size
        owned = {(int(block), p % size) for seq, n in enumerate(self.lens) for p in range(n)
                 for block in [self.tables[seq, p // size]]}  # fmt: skip
        stride, row = FAR if self.case["spread"] else inner, self.keys.strides[1] // self.keys.itemsize
        for access in traffic:
            if (access.kind, access.name) == ("load", "values"):
                for at in access.at.ravel().tolist():
                    slot = at // stride, at % stride // row % size
                    if slot not in owned:
                        return f"NaN, and V was read at block {slot[0]}, offset {slot[1]}, which belongs to nobody"
        return "NaN, although V was read where it is the sequences' own"


def query(case, seq, head, d):
    if case["scores"] == "split":
        return -256.0 if head % 2 else 256.0
    return {"equal": 0.0, "hot": 256.0, "cold": -256.0, "rising": 16.0}.get(case["scores"], number(0, seq, 0, head, d))


def key(case, seq, position, head, d):
    x = number(1, seq, position, head, d)
    if case["scores"] == "rising":
        return position / 2
    if case["scores"] == "large":
        return 16 * x
    return 1 + x / 64 if case["scores"] in ("hot", "cold", "split") else x


def value(case, seq, position, head, d):
    return float(d == position) if case["values"] == "positions" else number(2, seq, position, head, d)


class Reference:
    """The plain function, one sequence at a time."""

    def __init__(self, student, case):
        self.student, self.paged = student, Paged(case)

    def head(self, seq, head):
        p = self.paged
        before = [x.copy() for x in (p.q, p.keys, p.values, p.tables)]
        found = self.student.attend_gathered(p.q[seq], p.keys, p.values, p.tables[seq], int(p.lens[seq]))
        if any(a.tobytes() != b.tobytes() for a, b in zip(before, (p.q, p.keys, p.values, p.tables), strict=True)):
            return "one of the arguments was changed"
        if not isinstance(found, np.ndarray):
            return f"returned {type(found).__name__}, not an array"
        if found.shape != p.q[seq].shape:
            return f"returned an array of shape {list(found.shape)} for q of shape {list(p.q[seq].shape)}"
        if found.dtype != np.float64:
            return f"returned an array of {found.dtype}, not of float64"
        return rounded(found[head])


def rounded(row):
    return [round(float(x), 5) for x in row]


def kind(x):
    """A variable as Triton's compiler sees it: type and shape; None if it is nothing of the kind."""
    if isinstance(x, Value | Pointer):
        return f"{x.dtype if isinstance(x, Value) else 'pointer'} {list(x.shape)}"
    return {bool: "int1 []", int: "int32 []", float: "float32 []"}.get(type(x))


class LoopWatch:
    """A tracer: which variables of `code` have another type or shape when a line is reached again."""

    def __init__(self, code):
        self.code, self.found = code, {}

    def __call__(self, frame, event, argument):
        if frame.f_code is not self.code:
            return None
        first = {}

        def line(frame, event, argument):
            now = {name: seen for name, x in frame.f_locals.items() if (seen := kind(x))}
            before = first.setdefault(frame.f_lineno, now)
            for name in before.keys() & now.keys():
                if before[name] != now[name]:
                    self.found.setdefault(name, f"{name}: {before[name]}, then {now[name]}")
            return line

        return line


def words_refused(code):
    """Statements that Triton's compiler does not know, in the function with this code object."""
    tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == code.co_name]
    found = set()
    for node in ast.walk(functions[-1]) if functions else ():
        if isinstance(node, ast.Break | ast.Continue):
            found.add(type(node).__name__.lower())
        if isinstance(node, ast.For | ast.While) and any(isinstance(inner, ast.Return) for inner in ast.walk(node)):
            found.add("return inside a loop")
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            found.add("a < b < c")
    return found


class Decode:
    """A kernel, launched once."""

    packed = False

    def __init__(self, student, case):
        self.kernel = getattr(student, self.name)
        self.paged, self.traffic = Paged(case), None

    def launch(self):
        if self.traffic is None:
            with record() as self.traffic:
                self.paged.launch(self.kernel, self.packed)

    def head(self, seq, head):
        self.launch()
        return self.paged.head(seq, head, self.paged.out, self.traffic)

    def rows_read(self, name):
        """How many rows of K or V (one token, one KV head) the launch read, repeats included."""
        self.launch()
        return self.traffic.num_bytes("load", name) // (self.paged.keys.itemsize * self.paged.keys.shape[3])

    def steps(self):
        """How many loads of K the programs made, all together."""
        self.launch()
        return sum((access.kind, access.name) == ("load", "keys") for access in self.traffic)

    def refused(self):
        """What Triton's compiler would not take: statements, and variables whose type or shape a loop changes."""
        code, before = getattr(self.kernel, "fn", self.refused).__code__, sys.gettrace()
        watch = LoopWatch(code)
        paged = Paged(self.paged.case)
        sys.settrace(watch)
        try:
            paged.launch(self.kernel, self.packed)
        finally:
            sys.settrace(before)
        return sorted({*words_refused(code), *watch.found.values()})


class Naive(Decode):
    name = "naive_kernel"


class Online(Decode):
    name = "online_softmax_kernel"


class Packed(Decode):
    name, packed = "gqa_packed_kernel", True


class Launch:
    """The function that launches the packed kernel."""

    def __init__(self, student, case):
        self.student, self.paged, self.found = student, Paged(case), None

    def attend(self):
        p, arrays = self.paged, ("q", "keys", "values", "tables", "lens")
        before = [getattr(p, name).tobytes() for name in arrays]
        with record() as self.traffic:
            found = self.student.paged_attention(p.q, p.keys, p.values, p.tables, p.lens)
        if [getattr(p, name).tobytes() for name in arrays] != before:
            return "one of the arguments was changed"
        if not isinstance(found, np.ndarray):
            return f"returned {type(found).__name__}, not an array"
        if found.shape != p.q.shape or found.dtype != p.q.dtype:
            return f"returned {found.dtype} {list(found.shape)} for q, {p.q.dtype} {list(p.q.shape)}"
        if found.size and np.shares_memory(found, self.student.paged_attention(p.q, p.keys, p.values, p.tables, p.lens)):
            return "a second call gave the same array again"
        self.found = found
        return f"{found.dtype} {list(found.shape)}, by {self.traffic.programs} programs"

    def head(self, seq, head):
        return self.paged.head(seq, head, self.found, self.traffic)


class Plain:
    """Functions of plain values, which leave their lists alone."""

    def __init__(self, student):
        self.student = student

    def locate(self, position, kv_head, block_table, *sizes):
        given = list(block_table)
        found = self.student.locate(position, kv_head, given, *sizes)
        return found if given == block_table else "block_table was changed"

    def bytes_moved(self, rung, seq_lens, *sizes):
        given = list(seq_lens)
        found = self.student.bytes_moved(rung, given, *sizes)
        return found if given == seq_lens else "seq_lens was changed"


SCORES, VALUES = ("random", "equal", "large", "hot", "cold"), ("positions", "random")


def refused(case):
    """Why a student's case is none; "" if it is one."""
    if not isinstance(case, dict):
        return f"returned {case!r}, not a dict"[:120]
    lens, whole = case.get("seq_lens"), lambda x: type(x) is int
    if not isinstance(lens, list | tuple) or not all(whole(n) and n >= 0 for n in lens) or not 1 <= sum(lens) <= 40:
        return f"seq_lens is {lens!r}: give a list of lengths, 1 to 40 tokens in all"[:120]
    known = {"seq_lens", "block_size", "kv_heads", "group", "head_dim", "scores", "values", "nan", "spread"}
    if unknown := set(case) - known:
        return f"{min(map(str, unknown))!r} is no option of a case"
    full = DEFAULTS | case
    for name in ("block_size", "kv_heads", "group", "head_dim"):
        if not whole(full[name]) or not 1 <= full[name] <= 128:
            return f"{name} is {full[name]!r}: give a whole number from 1 to 128"
    for name, choices in (("scores", SCORES), ("values", VALUES), ("nan", (True, False)), ("spread", (True, False))):
        if full[name] not in choices:
            return f"{name} is {full[name]!r}: give one of {', '.join(map(str, choices))}"
    return ""


class Catch:
    """Faulty kernels, run on the cases that the student gives."""

    def __init__(self, student):
        self.student = student

    def catch(self, fault):
        case = self.student.case_for(fault)
        if case is None:
            return "no case can"
        if why := refused(case):
            return why
        right, wrong = (self._run(case, name) for name in ("none", fault))
        if isinstance(right, str):
            return f"the right kernel fails too: {right}"
        return "caught" if isinstance(wrong, str) or not np.allclose(right, wrong, atol=1e-3) else "slips through"

    @staticmethod
    def _run(case, name):
        paged = Paged(case)
        try:
            paged.launch(faulty(name), False)
        except (OutOfBounds, Race, ValueError, TypeError) as error:
            return str(error)
        return "NaN" if np.isnan(paged.out).any() else paged.out
