"""Lab 12: drives the student's functions with plain values. Runs in the child process.

Numbers come from `number`, so that the oracle knows them too. Every slot that no token owns holds NaN.
"""

from types import SimpleNamespace

import torch

from kvlab.model.batch import FlatBatch
from kvlab.sizing import ModelShape

torch.set_num_threads(1)
WEIGHTS = {"input_layernorm.weight": "h", "q_proj.weight": "qh", "q_proj.bias": "q", "k_proj.weight": "kh",
           "k_proj.bias": "k", "v_proj.weight": "kh", "v_proj.bias": "k", "o_proj.weight": "hq",
           "post_attention_layernorm.weight": "h", "gate_proj.weight": "ih", "up_proj.weight": "ih",
           "down_proj.weight": "hi"}  # fmt: skip


def number(*keys):
    """A number between -2 and 2, a multiple of 1/32."""
    x = 12345
    for key in keys:
        x = (x * 31 + key * 2654435761 + 97) % 4294967296
    return (x * 2654435761 % 4294967296 // 1024 % 129 - 64) / 32


def dtype(name):
    return getattr(torch, name)


def told(x):
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def bits(x):
    return x.contiguous().view(torch.uint8).tolist()


def plain(x):
    """A tensor as lists of Python's floats; NaN as a word, since it is not equal to itself."""
    values = x.to(torch.float64).tolist()

    def each(value):
        return [each(v) for v in value] if isinstance(value, list) else "NaN" if value != value else value

    return each(values)


def called(function, x, *arguments, keep=()):
    """What `function` gives for x; or what is wrong with it as a tensor."""
    before = [bits(t) for t in (x, *keep)]
    found = function(x, *arguments)
    if [bits(t) for t in (x, *keep)] != before:
        return "one of the arguments was changed"
    if not isinstance(found, torch.Tensor) or found.shape != x.shape or found.dtype != x.dtype:
        return f"returned {told(found)} for {told(x)}"
    return "memory of an argument" if shared(found, x, *keep) else plain(found)


def shared(found, *arguments):
    """Is `found` one of them, or a view of it?"""
    return any(found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for x in arguments)


class Pair:
    def __init__(self, student):
        self.student = student

    def turn_pair(self, *arguments):
        return self.student.turn_pair(*arguments)


class Rope:
    def __init__(self, student):
        self.student = student

    def rope(self, positions, heads, dim, theta, name):
        shape = len(positions), heads, dim
        x = torch.tensor([[[number(1, t, h, d) for d in range(dim)] for h in range(heads)] for t in range(len(positions))])
        # As in the engine: a part of q, k and v side by side.
        wide = torch.full((shape[0], heads + 2, dim), torch.nan, dtype=dtype(name))
        wide[:, 1:-1] = x
        positions = torch.tensor(positions, dtype=torch.int64)
        return called(self.student.rope, wide[:, 1:-1], positions, float(theta), keep=(positions,))


class Norm:
    def __init__(self, student):
        self.student = student

    def rms_norm(self, shape, scale, weights, eps, name):
        x = torch.tensor([number(2, i) for i in range(torch.Size(shape).numel())], dtype=torch.float64).view(shape)
        x = (x * scale).to(dtype(name))
        size = shape[-1:] if weights != "heads" else shape[-2:]
        w = torch.ones(size) if weights == "ones" else torch.tensor(
            [number(3, i) for i in range(torch.Size(size).numel())], dtype=torch.float64).view(size)  # fmt: skip
        w = w.to(dtype(name))
        return called(self.student.rms_norm, x, w, eps, keep=(w,))


class Flat:
    def __init__(self, student, seqs, block_size):
        self.seqs, self.block_size = [tuple(seq) for seq in seqs], block_size
        self.student, self.found = student, None

    def flat_batch(self):
        before = [(list(tokens), start, list(blocks), wants) for tokens, start, blocks, wants in self.seqs]
        self.found = self.student.flat_batch(self.seqs, self.block_size)
        if before != [(list(tokens), start, list(blocks), wants) for tokens, start, blocks, wants in self.seqs]:
            return "seqs was changed"
        return "a FlatBatch" if isinstance(self.found, FlatBatch) else type(self.found).__name__

    def field(self, name):
        x = getattr(self.found, name)
        return f"{told(x)}: {x.tolist()}" if isinstance(x, torch.Tensor) else x

    def tables(self):
        """The block tables, each as far as its sequence goes."""
        x = self.found.block_tables
        if not isinstance(x, torch.Tensor) or x.ndim != 2 or len(x) != len(self.seqs) or x.dtype != torch.int32:
            return told(x)
        pages = [-(-(start + len(tokens)) // self.block_size) for tokens, start, _, _ in self.seqs]
        return [row[:n] for row, n in zip(x.tolist(), pages, strict=True)]


class Pages:
    """One sequence over pages."""

    def __init__(self, student, case):
        self.student, self.case = student, case
        n, length, size = case["rows"], case["length"], case["block_size"]
        group, kv_heads, dim = case["group"], case["kv_heads"], case["head_dim"]
        pages = -(-length // size)
        self.table = [(5 * i + 2) % (pages + 3) if (pages + 3) % 5 else (3 * i + 2) % (pages + 3) for i in range(pages)]
        kind = dtype(case["dtype"])
        assert not set(self.table) & set(case["spare"])
        self.kv = torch.full((2, pages + 3, size, kv_heads, dim), torch.nan, dtype=kind)
        for p in range(length):
            for head in range(kv_heads):
                at = self.table[p // size], p % size, head
                self.kv[0][at] = torch.tensor([case["loud"] * number(5, p, head, d) for d in range(dim)])
                self.kv[1][at] = torch.tensor([value(case, p, head, d) for d in range(dim)])
        wide = torch.full((n, kv_heads * group + 2, dim), torch.nan, dtype=kind)
        for row in range(n):
            for head in range(kv_heads * group):
                position = length - n + row
                wide[row, head] = torch.tensor([number(4, position, head, d) for d in range(dim)])
        self.q, self.found = wide[:, :-2], None  # a part of q, k and v side by side, as in the engine

    def attend(self):
        table = self.table + list(self.case["spare"])
        given = list(table)
        before = bits(self.q), bits(self.kv)
        found = self.student.attend(self.q, self.kv, table, self.case["length"])
        if (bits(self.q), bits(self.kv)) != before or table != given:
            return "one of the arguments was changed"
        if isinstance(found, torch.Tensor) and shared(found, self.q, self.kv):
            return "memory of an argument"
        if isinstance(found, torch.Tensor) and found.shape == self.q.shape:
            self.found = found
        return told(found)

    def row(self, row, head):
        return plain(self.found[row, head])


def value(case, p, head, d):
    return float(d == p) if case["values"] == "positions" else number(6, p, head, d)


class Layer:
    """A layer over pages, step after step. sizes: hidden, heads, kv_heads, dim, intermediate."""

    def __init__(self, student, sizes, block_size):
        self.student, self.size = student, block_size
        self.hidden, heads, self.kv_heads, dim, inner = sizes
        lengths = {"h": self.hidden, "q": heads * dim, "k": self.kv_heads * dim, "i": inner}
        self.w = {name: self._weight(i, [lengths[c] for c in dims]) for i, (name, dims) in enumerate(WEIGHTS.items())}
        self.config = SimpleNamespace(hidden_size=self.hidden, num_attention_heads=heads,
                                      num_key_value_heads=self.kv_heads, head_dim=dim, intermediate_size=inner,
                                      rms_norm_eps=1e-2, rope_theta=100.0)  # fmt: skip
        self.kv = torch.full((2, 12, block_size, self.kv_heads, dim), torch.nan)
        self.free, self.tables, self.lengths = [7, 2, 9, 4, 11, 1, 6, 3, 10, 5, 8], {}, {}

    @staticmethod
    def _weight(kind, dims):
        flat = [number(10 + kind, i) / (2 if len(dims) == 2 else 1) for i in range(torch.Size(dims).numel())]
        return torch.tensor(flat).view(dims)

    def step(self, chunks):
        """chunks: [[sequence's number, how many new tokens], ...]: the layer's output, a list for each row."""
        x, at, slots, starts, tables, lens = [], [], [], [0], [], []
        for name, count in chunks:
            start, table = self.lengths.get(name, 0), self.tables.setdefault(name, [])
            self.lengths[name] = start + count
            while len(table) * self.size < start + count:
                table.append(self.free.pop(0))
            for p in range(start, start + count):
                x.append([number(9, name, p, d) for d in range(self.hidden)])
                at.append(p)
                slots.append(table[p // self.size] * self.size + p % self.size)
            starts.append(len(x))
            tables.append(list(table))
            lens.append(start + count)
        width = max(map(len, tables))
        counts = [count for _, count in chunks]
        batch = FlatBatch(
            token_ids=torch.zeros(len(x), dtype=torch.int64), positions=torch.tensor(at),
            slot_mapping=torch.tensor(slots), query_start_loc=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            block_tables=torch.tensor([t + [1_000_000] * (width - len(t)) for t in tables], dtype=torch.int32),
            logits_indices=torch.tensor(starts[1:]) - 1,
            num_decodes=next((i for i, n in enumerate(counts) if n != 1), len(counts)),
            max_query_len=max(counts), max_seq_len=max(lens),
        )  # fmt: skip
        owned = {table[p // self.size] * self.size + p % self.size for name, table in self.tables.items()
                 for p in range(self.lengths[name])}  # fmt: skip
        x = torch.tensor(x)
        fixed = {**self.w, "positions": batch.positions, "slot_mapping": batch.slot_mapping, "seq_lens": batch.seq_lens}
        before = {name: bits(t) for name, t in fixed.items()}, bits(x)
        with torch.inference_mode():
            found = self.student.decoder_layer(x, self.w, batch, self.kv, self.config)
        if ({name: bits(t) for name, t in fixed.items()}, bits(x)) != before:
            return "an argument other than kv was changed"
        if not isinstance(found, torch.Tensor) or found.shape != x.shape or found.dtype != x.dtype:
            return f"returned {told(found)} for {told(x)}"
        written = (~self.kv.isnan()).any(-1).any(-1).any(0).flatten().nonzero().flatten().tolist()
        if stray := sorted(set(written) - owned):
            return f"slot {stray[0]} was written, and it is nobody's"
        return plain(found)


class Ledger:
    def __init__(self, student, shape):
        self.student, self.shape = student, ModelShape(**shape)

    def step_ledger(self, step, *dtype_bytes):
        given = [tuple(each) for each in step]
        found = self.student.step_ledger(given, self.shape, *dtype_bytes)
        return found if given == [tuple(each) for each in step] else "step was changed"


class Detective:
    def __init__(self, student):
        self.student = student

    def first_wrong(self, trace, reference, atol):
        traces = [[(name, torch.tensor(rows, dtype=torch.float32)) for name, rows in each] for each in (trace, reference)]
        before = [[(name, id(x), bits(x)) for name, x in each] for each in traces]
        found = self.student.first_wrong(*traces, atol)
        same = before == [[(name, id(x), bits(x)) for name, x in each] for each in traces]
        return found if same else "the traces were changed"
