"""Lab 11: drives the student's functions and kernels with plain values. Runs in the child process.

A case is a dict, see DEFAULTS. Its pages lie in shuffled order; every slot that no sequence owns holds NaN (127 in int8, NaN as
its scale), the tables' tails hold -1, and what a kernel writes to holds NaN before.
"""

import inspect
import math
import warnings

import numpy as np

from kvlab.standin import Spread, record, tl, triton
from kvlab.standin import mixed as ours

DEFAULTS = {"block_size": 4, "kv_heads": 1, "group": 1, "head_dim": 16, "values": "positions", "scores": "random",
            "spread": False, "tile": 16, "splits": 2, "split_tokens": 16, "query_lens": None, "block_q": 4,
            "padding": 0, "fewer": 0, "start": 0}  # fmt: skip
FAR = 1 << 30


def number(kind, seq, position, head, d):
    """One number of q, K or V: between -2 and 2, a multiple of 1/32."""
    x = (seq * 71 + position * 13 + head * 29 + d * 31 + kind * 57 + 11) * 2654435761 % 4294967296
    return (x // 1024 % 129 - 64) / 32


def query(case, seq, position, head, d):
    return {"equal": 0.0, "hot": 256.0, "cold": -256.0}.get(case["scores"], number(0, seq, position, head, d))


def key(case, seq, position, head, d):
    x = number(1, seq, position, head, d)
    if case["scores"] == "large":
        return 16 * x
    return 1 + x / 64 if case["scores"] in ("hot", "cold") else x


def value(case, seq, position, head, d):
    return float(d == position) if case["values"] == "positions" else number(2, seq, position, head, d)


class Paged:
    """The arrays of a case. rows: of q for each sequence, the last ones of its tokens."""

    def __init__(self, case):
        self.case = case = DEFAULTS | case
        lens, size, kv_heads, dim = (case[name] for name in ("seq_lens", "block_size", "kv_heads", "head_dim"))
        pages = [-(-n // size) for n in lens]
        num_blocks, heads = sum(pages) + 2, kv_heads * case["group"]
        step = next(step for step in (5, 7, 11, 3, 2, 1) if math.gcd(step, num_blocks) == 1)
        order = iter([(3 + i * step) % num_blocks for i in range(num_blocks)])
        self.keys = np.full((num_blocks, size, kv_heads, dim), np.nan, np.float32)
        self.values = self.keys.copy()
        self.tables = np.full((len(lens), max([*pages, 1])), -1, np.int32)
        self.lens = np.array(lens, np.int32)
        self.rows = [1] * len(lens) if case["query_lens"] is None else case["query_lens"]
        self.starts = np.cumsum([0, *self.rows]).astype(np.int32)
        self.q = np.full((self.starts[-1] + case["padding"], heads, dim), 0.0, np.float32)
        for seq, length in enumerate(lens):
            self.tables[seq, : pages[seq]] = [next(order) for _ in range(pages[seq])]
            for i in range(self.rows[seq]):
                for head in range(heads):
                    self.q[self.starts[seq] + i, head] = [query(case, seq, i, head, d) for d in range(dim)]
            for position in range(length):
                at = self.tables[seq, position // size], position % size
                for head in range(kv_heads):
                    self.keys[at][head] = [key(case, seq, position, head, d) for d in range(dim)]
                    self.values[at][head] = [value(case, seq, position, head, d) for d in range(dim)]

    def arrays(self):
        return self.q, self.keys, self.values, self.tables, self.lens

    def only(self, seq):
        """The arrays of one sequence alone."""
        return self.q[seq : seq + 1], self.keys, self.values, self.tables[seq : seq + 1], self.lens[seq : seq + 1]

    def blind(self, launch, *args, **options):
        """Launch, and be sure that nothing has changed but what is written to. ValueError if it has."""
        before = [x.tobytes() for x in self.arrays()]
        with record() as self.traffic:
            found = launch(*args, **options)
        for name, was, now in zip(("q", "keys", "values", "block_tables", "seq_lens"), before, self.arrays(),
                                  strict=True):  # fmt: skip
            if was != now.tobytes():
                raise ValueError(f"{name} has changed")
        return found

    def rows_read(self, name):
        """Rows of K or V (one token, one KV head) that were read, repeats included."""
        return self.traffic.num_bytes("load", name) / self.keys.itemsize / self.keys.shape[3]


class FarKernel:
    """A kernel whose blocks of K and V lie FAR elements apart."""

    def __init__(self, kernel, far):
        self.kernel, self.far = kernel, far

    def __getitem__(self, grid):
        def run(*args, **sizes):
            bound = inspect.signature(self.kernel.fn).bind(*args, **sizes)
            if self.far:
                given = bound.arguments
                given |= {"keys": Spread(given["keys"], FAR), "values": Spread(given["values"], FAR), "stride_block": FAR}
            self.kernel[grid](*bound.args, **bound.kwargs)

        return run


def rounded(row):
    row = [round(float(x), 5) for x in row]
    return "NaN" if any(math.isnan(x) for x in row) else "infinite" if any(math.isinf(x) for x in row) else row


def plain(x):
    x = float(x)
    return "NaN" if math.isnan(x) else ("inf" if x > 0 else "-inf") if math.isinf(x) else round(x, 5)


class Merge:
    """merge, of partial results: a list of [lse, result]; an lse of None is an empty split, whose result is garbage."""

    GARBAGE = (np.nan, np.inf, 1000.0)  # what an earlier step left may look like good numbers

    def __init__(self, student):
        self.student = student

    def _merge(self, partial, lse):
        before = partial.tobytes(), lse.tobytes()
        found = self.student.merge(partial, lse)
        if (partial.tobytes(), lse.tobytes()) != before:
            return "one of the arguments was changed"
        if not isinstance(found, tuple) or len(found) != 2:
            return f"returned {type(found).__name__}, not (result, lse)"
        result, total = found
        if not isinstance(result, np.ndarray) or result.shape != partial.shape[1:]:
            return f"the result is {getattr(result, 'shape', result)!r}, not an array {list(partial.shape[1:])}"
        if np.shares_memory(result, partial):
            return "the result is a view of partial"
        if np.ndim(total) != 0:
            return "the lse is not one number"
        return result, float(total)

    def merge(self, parts):
        found = self._merge(*self._arrays(parts))
        return found if isinstance(found, str) else [rounded(found[0]), plain(found[1])]

    def merge_in_two(self, parts, first):
        """The first ones, the others, and then these two."""
        halves = [self._merge(*self._arrays(some)) for some in (parts[:first], parts[first:])]
        for half in halves:
            if isinstance(half, str):
                return half
        found = self._merge(np.array([h[0] for h in halves], np.float32), np.array([h[1] for h in halves], np.float32))
        return found if isinstance(found, str) else [rounded(found[0]), plain(found[1])]

    def _arrays(self, parts):
        lse = [-np.inf if lse is None else lse for lse, _ in parts]
        rows = [[self.GARBAGE[(i + len(parts)) % 3]] * len(row) if empty is None else row
                for i, (empty, row) in enumerate(parts)]  # fmt: skip
        return np.array(rows, np.float32), np.array(lse, np.float32)


class Split:
    """split_kernel, launched once."""

    def __init__(self, student, case):
        self.student, self.paged, self.found = student, Paged(case), None

    def launch(self):
        if self.found is None:
            case, p = self.paged.case, self.paged
            kernel = FarKernel(self.student.split_kernel, case["spread"])
            self.found = p.blind(ours.launch_split, kernel, case["splits"], case["split_tokens"], *p.arrays(),
                                 tile=case["tile"])  # fmt: skip

    def lse(self, seq, head, split):
        self.launch()
        return plain(self.found[1][seq, head, split])

    def part(self, seq, head, split):
        self.launch()
        return rounded(self.found[0][seq, head, split])

    def rows_read(self, name):
        self.launch()
        return self.paged.rows_read(name)


@triton.jit
def _find(out, blocks, query_start_loc, num_seqs, BLOCK_Q: tl.constexpr):
    i = tl.program_id(0)
    block = tl.load(blocks + i)
    tl.store(out + i, search(query_start_loc, num_seqs, block, BLOCK_Q))  # noqa: F821


class Find:
    """find_sequence, called by one program for each query block, or for each of `asked`."""

    def __init__(self, student, starts, block_q, programs, asked=None):
        self.student, self.starts = student, np.array(starts, np.int32)
        self.blocks = np.array(range(programs) if asked is None else asked, np.int32)
        self.block_q, self.found = block_q, None

    def find(self):
        if self.found is None:
            _find.fn.__globals__["search"] = self.student.find_sequence
            self.found = np.full(len(self.blocks), -99, np.int32)
            with record() as self.traffic:
                _find[len(self.blocks)](self.found, self.blocks, self.starts, len(self.starts) - 1, BLOCK_Q=self.block_q)

    def sequence_of(self, block):
        self.find()
        return int(self.found[self.blocks.tolist().index(block)])

    def most_loads(self):
        self.find()
        found = [0] * len(self.blocks)
        for access in self.traffic:
            if access.name == "query_start_loc":
                found[access.program[0]] += access.at.size
        return max(found)


class Varlen:
    """varlen_kernel, launched once."""

    def __init__(self, student, case):
        self.student, self.paged, self.out = student, Paged(case), None

    def launch(self):
        if self.out is None:
            case, p = self.paged.case, self.paged
            self.out = np.full_like(p.q, np.nan)
            kernel = FarKernel(self.student.varlen_kernel, case["spread"])
            p.blind(ours.launch_varlen, kernel, self.out, *p.arrays(), p.starts, block_q=case["block_q"], tile=case["tile"])

    def row(self, seq, i, head):
        self.launch()
        return rounded(self.out[self.paged.starts[seq] + i, head])

    def padding(self):
        self.launch()
        return "untouched" if np.isnan(self.out[self.paged.starts[-1] :]).all() else "written to"

    def rows_read(self, name):
        self.launch()
        return self.paged.rows_read(name)


class Quantize:
    """quantize, of nested lists."""

    def __init__(self, student):
        self.student = student

    def _do(self, x, dtype):
        x = np.array(x, dtype)
        before = x.tobytes()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = self.student.quantize(x)
        if any("encountered in cast" in str(one.message) for one in warned):
            raise ValueError("NaN was made a whole number")
        if x.tobytes() != before:
            raise ValueError("x has changed")
        if not isinstance(found, tuple) or len(found) != 2 or not all(isinstance(y, np.ndarray | np.generic) for y in found):
            raise ValueError("quantize returns two arrays: numbers, scales")
        return found

    def kinds(self, x, dtype):
        return ", ".join(f"{y.dtype} {list(y.shape)}" for y in self._do(x, dtype))

    def scales(self, x, dtype):
        scales = self._do(x, dtype)[1]
        return "NaN or infinite" if not np.isfinite(scales).all() else scales.astype(float).tolist()

    def numbers(self, x, dtype):
        return self._do(x, dtype)[0].tolist()


class Int8:
    """sweep_int8, in a kernel that decodes."""

    def __init__(self, student, case):
        self.student, self.paged, self.out = student, Paged(case), None
        p = self.paged
        self.q = p.q
        arrays = []
        for x in (p.keys, p.values):
            numbers, scales = ours_quantize(np.nan_to_num(x))
            dead = np.isnan(x).any(axis=-1)
            numbers[dead], scales[dead] = 127, np.nan
            arrays.append((numbers, scales))
        (self.keys, self.key_scales), (self.values, self.value_scales) = arrays

    def launch(self):
        if self.out is None:
            self.out = np.full_like(self.q, np.nan)
            with record() as self.traffic:
                kernel = FarKernel(ours.with_sweep(self.student.sweep_int8), self.paged.case["spread"])
                ours.launch_int8(kernel, self.out, self.q, self.keys, self.values, self.key_scales,
                                 self.value_scales, self.paged.tables, self.paged.lens, tile=self.paged.case["tile"],
                                 fewer=self.paged.case["fewer"], start=self.paged.case["start"])  # fmt: skip

    def head(self, seq, head):
        self.launch()
        return rounded(self.out[seq, head])

    def bytes_read(self, name):
        self.launch()
        return self.traffic.num_bytes("load", name)


def ours_quantize(x):
    """INT8 by a scale for each row; here too, since ours is barred while it is graded."""
    scales = (np.abs(x).max(axis=-1) / 127).astype(np.float32)
    return np.rint(x / np.where(scales > 0, scales, 1)[..., None]).astype(np.int8), scales


class Decode:
    """decode_attention, with all sequences and with one alone."""

    def __init__(self, student, case):
        self.student, self.paged, self.found = student, Paged(case), None

    def attend(self):
        p = self.paged
        found = p.blind(self.student.decode_attention, *p.arrays())
        if not isinstance(found, np.ndarray) or any(np.shares_memory(found, x) for x in p.arrays()):
            return f"returned {type(found).__name__}, not a new array"
        if found.shape != p.q.shape or found.dtype != p.q.dtype:
            return f"returned {found.dtype} {list(found.shape)} for q, {p.q.dtype} {list(p.q.shape)}"
        self.found = found
        return f"{found.dtype} {list(found.shape)}"

    def head(self, seq, head):
        if self.found is None:
            self.attend()
        return rounded(self.found[seq, head])

    def alone(self, seq):
        """Whether the sequence alone gets the bits that it got among the others."""
        if self.found is None:
            self.attend()
        alone = self.student.decode_attention(*self.paged.only(seq))[0]
        return "the same bits" if alone.tobytes() == self.found[seq].tobytes() else "other bits"

    def most_tokens(self):
        """The most tokens of K that one program read."""
        if self.found is None:
            self.attend()
        found = {}
        for access in self.paged.traffic:
            if access.name == "keys":
                found[access.program] = found.get(access.program, 0) + access.at.size // self.paged.keys.shape[3]
        return max(found.values(), default=0)

    def programs(self):
        """How many programs read K."""
        if self.found is None:
            self.attend()
        return len({access.program for access in self.paged.traffic if access.name == "keys"})
