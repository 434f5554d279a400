"""Lab 10: drives the student's functions and kernels with plain values. Runs in the child process.

A case is a dict: seq_lens; block_size, kv_heads, group, head_dim; scores; values; spread; dtype. Its pages lie in
shuffled order. Every slot that no sequence owns holds NaN, and the tables' tails hold -1.
"""

import math

import numpy as np

from kvlab.standin import OutOfBounds, Race, Spread, record
from kvlab.standin.decode import LOG2E
from kvlab.standin.faults import faulty

DEFAULTS = {"block_size": 4, "kv_heads": 1, "group": 1, "head_dim": 16, "scores": "random", "values": "positions",
            "spread": False, "dtype": "float32", "tile": 16, "nan": True}  # fmt: skip
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
        self.keys = np.full((num_blocks, size, kv_heads, dim), empty, case["dtype"])
        self.values = self.keys.copy()
        self.tables = np.full((len(lens), max([*pages, 1])), -1, np.int32)
        self.lens = np.array(lens, np.int32)
        self.q = np.zeros((len(lens), heads, dim), case["dtype"])
        for seq, length in enumerate(lens):
            self.tables[seq, : pages[seq]] = [next(order) for _ in range(pages[seq])]
            for head in range(heads):
                self.q[seq, head] = [query(case, seq, head, d) for d in range(dim)]
            for position in range(length):
                at = self.tables[seq, position // size], position % size
                for head in range(kv_heads):
                    self.keys[at][head] = [key(case, seq, position, head, d) for d in range(dim)]
                    self.values[at][head] = [value(case, seq, position, head, d) for d in range(dim)]
        self.out = np.full(self.q.shape, np.nan, case["dtype"])

    def launch(self, kernel, packed):
        case, (_, size, kv_heads, dim) = self.case, self.keys.shape
        block, keys, values = size * kv_heads * dim, self.keys, self.values
        if case["spread"]:
            block, keys, values = FAR, Spread(keys, FAR), Spread(values, FAR)
        args = (self.out, self.q, keys, values, self.tables, self.lens, LOG2E / math.sqrt(dim),
                self.tables.shape[1], block, kv_heads * dim, dim)  # fmt: skip
        sizes = {"GROUP": case["group"], "HEAD_DIM": dim, "BLOCK_SIZE": size}
        if packed:
            sizes |= {"ROWS": 16, "TILE": case["tile"]}
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
        stride = FAR if self.case["spread"] else inner
        for access in traffic:
            if (access.kind, access.name) == ("load", "values"):
                for at in access.at.ravel().tolist():
                    slot = at // stride, at % stride // (inner // size)
                    if slot not in owned:
                        return f"NaN, and V was read at block {slot[0]}, offset {slot[1]}, which belongs to nobody"
        return "NaN, although V was read where it is the sequences' own"


def query(case, seq, head, d):
    return {"equal": 0.0, "hot": 256.0, "cold": -256.0}.get(case["scores"], number(0, seq, 0, head, d))


def key(case, seq, position, head, d):
    x = number(1, seq, position, head, d)
    if case["scores"] == "large":
        return 16 * x
    return 1 + x / 64 if case["scores"] in ("hot", "cold") else x


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
        return rounded(found[head])


def rounded(row):
    return [round(float(x), 5) for x in row]


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
        return self.traffic.num_bytes("load", name) / self.paged.keys.itemsize / self.paged.keys.shape[3]


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
        self.found = found
        return f"{found.dtype} {list(found.shape)}, by {self.traffic.programs} programs"

    def head(self, seq, head):
        return self.paged.head(seq, head, self.found, self.traffic)


class Catch:
    """Faulty kernels, run on the cases that the student gives."""

    def __init__(self, student):
        self.student = student

    def catch(self, fault):
        case = self.student.case_for(fault)
        if case is None:
            return "no case can"
        if not isinstance(case, dict) or not set(case) <= {*DEFAULTS, "seq_lens"} - {"dtype", "tile"}:
            return f"returned {case!r}"[:120]
        if not case.get("seq_lens") or sum(case["seq_lens"]) > 40:
            return "seq_lens must have 1 to 40 tokens in all"
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
