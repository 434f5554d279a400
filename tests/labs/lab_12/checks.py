"""Lab 12, Qwen2 on pages: its exercises."""

import cmath
import math
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvlab.grade import Approx, Exercise, LabInfo, Trace, calls, say

LAB = LabInfo(title=say("Qwen2 on pages"), sections="L33 2.2, 2.3, 3.4, 4.3, 8.1-1, 8.2; PAV 3.1", before=("03", "08"))
STEPS = "kvlab.model.decoder_steps:"
CHANGED = say("x, q, kv and weights are the engine's own memory, and others read them next: make a new tensor, and change none that you "
              "were given. (x *= ... and x[...] = ... change x.)")  # fmt: skip
SHARED = say("The result shares memory with an argument: whoever writes to one of them later changes the other. Return a new tensor, always.")


@dataclass(frozen=True)
class Told(Approx):
    """Approx, and from what it was computed: so that an explanation can compute it in other ways."""

    of: Any = None


def number(*keys):
    """As the driver's."""
    x = 12345
    for key in keys:
        x = (x * 31 + key * 2654435761 + 97) % 4294967296
    return (x * 2654435761 % 4294967296 // 1024 % 129 - 64) / 32


def one(name, *arguments, why=None):
    return Trace((), ((name, *arguments),), why)


def rounded(x):
    return [rounded(v) for v in x] if isinstance(x, list) else round(x, 6)


def flat(x):
    return [v for each in x for v in flat(each)] if isinstance(x, list) else [x]


def near(a, b, within=1e-3):
    """Lists of numbers, of one shape and nearly equal."""
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(near(x, y, within) for x, y in zip(a, b, strict=True))
    return not isinstance(b, list | str) and abs(a - b) <= within


def short(row):
    return "[" + ", ".join(v if isinstance(v, str) else f"{v:.4g}" for v in row) + "]"


def has_nan(got):
    return isinstance(got, list) and any(v == "NaN" for v in flat(got))


# ---- RoPE


class TurnPair(Exercise):
    """One pair of numbers, turned by hand."""

    name, points, minutes, section = "turn_pair", 2, 10, "L33 2.3 (q and k before the kernel)"
    defines = ("turn_pair",)
    ours = {"turn_pair": STEPS + "turn_pair"}
    bars = (STEPS + "rope",)
    driver = "Pair"
    hints = (
        say("First the angle: it grows with the position, and shrinks from pair to pair."),
        say("angle = position * theta ** (-2 * pair / head_dim), in radians, as math.cos and math.sin want it."),
        say("The new a is a * cos - b * sin. The new b is a * sin + b * cos, with the OLD a."),
    )
    examples = (
        one("turn_pair", 1.0, 0.0, 0, 0, 8, 10_000.0, why=say("At position 0 nothing turns.")),
        one("turn_pair", 1.0, 0.0, 1, 0, 8, 10_000.0, why=say("Pair 0 turns by 1 radian a position, whatever theta is.")),
        one("turn_pair", 1.0, 0.0, 3, 1, 8, 10_000.0),
        one("turn_pair", 0.0, 1.0, 3, 1, 8, 10_000.0),
        one("turn_pair", 2.0, -0.5, 7, 2, 8, 10_000.0),
        one("turn_pair", 1.5, 2.5, 40, 3, 32, 10_000.0),
        one("turn_pair", 1.5, 2.5, 40, 3, 32, 1_000_000.0, why=say("Another theta: Qwen2.5's.")),
        one("turn_pair", 1.0, 2.0, 100_005, 2, 8, 10_000.0, why=say("Far back in a long sequence: there is no largest position.")),
    )

    class Oracle:
        """A pair is a complex number; turning is a multiplication."""

        def turn_pair(self, a, b, position, pair, head_dim, theta):
            z = complex(a, b) * cmath.exp(1j * position / theta ** (2 * pair / head_dim))
            return Approx([z.real, z.imag], rel=0, abs=1e-6 * (1 + position))  # an angle in fp32 will do

    def traces(self):
        numbers = st.integers(-64, 64).map(lambda n: n / 32)
        return st.tuples(numbers, numbers, st.integers(0, 500), st.sampled_from((8, 32, 128)), st.integers(0, 3),
                         st.sampled_from((100.0, 1e4, 1e6))).map(
            lambda v: one("turn_pair", v[0], v[1], v[2], v[4], v[3], v[5]))  # fmt: skip

    def describe(self, op):
        names = ("a", "b", "position", "pair", "head_dim", "theta")
        return f"turn_pair({', '.join(f'{n}={v}' for n, v in zip(names, op[1:], strict=True))})"

    def explain(self, op, expected, got):
        a, b, position, pair, dim, theta = op[1:]
        if not isinstance(got, list) or len(got) != 2 or not all(isinstance(v, int | float) for v in got):
            return say("Return two numbers: what a and what b have become.")
        want = complex(*expected.value)
        if abs(complex(*got) - want.conjugate()) < 1e-6 or abs(complex(a, b) ** 2 - complex(*got) * want) < 1e-6:
            return say("That turns the other way round. The new a is a cos - b sin, the new b is a sin + b cos.")
        if abs(complex(*reversed(got)) - want) < 1e-4 * (1 + position):
            return say("The right two numbers, in the wrong order: what a has become comes first.")
        if abs(complex(*got) - want) < 2e-3:
            return say("Nearly right. Were the numbers rounded? Give all their digits back.")
        if abs(abs(complex(*got)) - abs(want)) > 1e-6:
            return say("Turning changes no length, and yours has changed it. Was the new b made from the new a? It needs the old one.")
        return say("The length is right, the angle is not. It is position * theta^(-2 pair / head_dim) radians: pair 0 of "
                   "head_dim 8 turns by 1 a position, pair 1 by 0.1, if theta is 10,000.")  # fmt: skip


class Rope(Exercise):
    """RoPE, for every head of every token."""

    name, points, minutes, section = "rope", 3, 14, "L33 2.3 (q and k before the kernel)"
    defines = ("rope",)
    ours = {"rope": STEPS + "rope"}
    bars = ("kvlab.model.layers:rope", "kvlab.model.layers:RotaryEmbedding", "kvlab.model.layers:inverse_frequencies")
    part = {"rope": "rope"}
    driver = "Rope"
    num_random = 20
    memory_mib = 1536
    hints = (
        say("Angles first: [T, D/2], position times frequency. Their cosines and sines must go over all heads: give them a place for "
            "the heads, [T, 1, D/2]."),
        say("half = D // 2; the frequencies are theta ** (-i / half) for i in torch.arange(half), in fp32. The pair of element i is i + half, so "
            "a = x[..., :half] and b = x[..., half:]."),
        say("torch.cat((a * cos - b * sin, a * sin + b * cos), -1), with cos and sin in fp32 until they are made x's dtype: cos.to(x.dtype)."),
    )  # fmt: skip
    examples = (
        one("rope", [0], 1, 4, 10_000, "float32", why=say("At position 0 nothing turns. The result is a new tensor all the same.")),
        one("rope", [1], 1, 2, 10_000, "float32"),
        one("rope", [1], 1, 4, 10_000, "float32"),
        one("rope", [3], 2, 8, 10_000, "float32"),
        one("rope", [0, 1, 2, 3, 4], 1, 8, 10_000, "float32"),
        one("rope", [9, 4, 5, 6, 0, 1], 3, 8, 10_000, "float32",
            why=say("A flat batch: a decode at position 9, a chunk at 4, a prompt at 0. The row in the batch is not the position.")),
        one("rope", [7, 8], 2, 16, 1_000_000, "float32", why=say("Another theta: Qwen2.5's.")),
        one("rope", [1900, 3], 2, 8, 10_000, "float32"),
        one("rope", [1900, 1903], 2, 16, 10_000, "bfloat16",
            why=say("x is bf16 here. The angles must be fp32 all the same: bf16 knows 1896, 1904, and nothing between.")),
        one("rope", [300, 5], 2, 8, 10_000, "float64"),
        one("rope", [60_001], 1, 16, 1_000_000, "float16", why=say("x is fp16 here. The angles are fp32: fp16 has 11 bits, and this position 16.")),
    )

    class Oracle:
        """A pair at a time, as complex numbers."""

        def rope(self, positions, heads, dim, theta, name):
            half, found = dim // 2, []
            for t, position in enumerate(positions):
                found.append([])
                for h in range(heads):
                    x = [number(1, t, h, d) for d in range(dim)]
                    z = [complex(x[i], x[i + half]) * cmath.exp(1j * position * theta ** (-i / half)) for i in range(half)]
                    found[-1].append([c.real for c in z] + [c.imag for c in z])
            loose = {"float32": 2e-4, "float64": 2e-4, "bfloat16": 4e-2, "float16": 4e-2}[name]
            return Approx(rounded(found), rel=0, abs=loose + 1e-6 * max(positions))

    def traces(self):
        return calls("rope", st.lists(st.integers(0, 300), min_size=1, max_size=4), st.integers(1, 3), st.sampled_from((2, 4, 8)),
                     st.sampled_from((100, 10_000)), st.just("float32"))  # fmt: skip

    def describe(self, op):
        _, positions, heads, dim, theta, name = op
        return f"rope(x {name} [{len(positions)}, {heads}, {dim}], positions={positions}, theta={theta})"

    def explain(self, op, expected, got):
        _, positions, heads, dim, theta, name = op
        if got == "one of the arguments was changed":
            return CHANGED
        if got == "memory of an argument":
            return SHARED
        if isinstance(got, str):
            return say("Return a new tensor of x's shape and x's dtype. (fp32 angles make the result fp32, unless cos and sin are made x's dtype.)")
        if has_nan(got):
            return say("There is NaN in it, and none in x: was memory read that is not x's?")
        x = [[[number(1, t, h, d) for d in range(dim)] for h in range(heads)] for t in range(len(positions))]
        half = dim // 2

        def halves(row, position, sign=1, step=1.0):
            z = [complex(row[i], row[i + half]) * cmath.exp(1j * sign * position * theta ** (-i * step / half)) for i in range(half)]
            return [c.real for c in z] + [c.imag for c in z]

        def neighbours(row, position):
            z = [complex(row[2 * i], row[2 * i + 1]) * cmath.exp(1j * position * theta ** (-i / half)) for i in range(half)]
            return [v for c in z for v in (c.real, c.imag)]

        def is_like(turn, places=positions):
            return near([[turn(head, at) for head in heads] for heads, at in zip(x, places, strict=True)], got, 0.05)

        if is_like(neighbours):
            return say("These are pairs of neighbours, 2i and 2i + 1, as in RoPE's paper. The checkpoints of Hugging Face want "
                       "element i with element i + D/2.")  # fmt: skip
        if is_like(lambda *a: halves(*a, sign=-1)):
            return say("All pairs turn the other way: the new a is a cos - b sin.")
        if is_like(halves, range(len(positions))):
            return say("Each row is turned by its number in the batch. It must be turned by positions[row], where it stands in its own sequence.")
        if is_like(halves, range(positions[0], positions[0] + len(positions))):
            return say("Only the first position is right, and the others were counted on from it. Rows of other requests stand beside it: each has positions[row].")
        if is_like(lambda *a: halves(*a, step=0.5)) or is_like(lambda *a: halves(*a, step=2)):
            return say("The frequencies fall by the wrong step: pair i turns by theta^(-2i/D), and D is all of a head, both halves.")
        if name != "float32":
            return say("Right in fp32, wrong in this dtype: compute positions, frequencies and angles in fp32 (.float()), and round only cos and sin.")
        t, h = next((t, h) for t in range(len(x)) for h in range(heads) if not near(expected.value[t][h], got[t][h], expected.abs))
        return say("First wrong: row {t}, which stands at position {position}, head {h}. It is {have}, and should be {want}. Element i and element i + D/2 are "
                   "a pair (a, b). It becomes (a cos - b sin, a sin + b cos), at its angle position * theta^(-2i/D), in every head.",
                   t=t, position=positions[t], h=h, have=short(got[t][h]), want=short(expected.value[t][h]))  # fmt: skip


# ---- RMSNorm


class RmsNorm(Exercise):
    """RMSNorm."""

    name, points, minutes, section = "rms_norm", 2, 10, "L33 3.4 (what stands between the matrices)"
    defines = ("rms_norm",)
    ours = {"rms_norm": "kvlab.model.layers:rms_norm"}
    part = {"rms_norm": "rms_norm"}
    driver = "Norm"
    num_random = 20
    memory_mib = 1536
    hints = (
        say("Square, mean over the last dimension, add eps, one over the root, times x, times weight. keepdim=True keeps the shapes together."),
        say("In bf16 and fp16 the squares lose digits or overflow: make x fp32 first. When is the result made narrow again: before weight, or after?"),
        say("wide = x.float() (float64 stays as it is); scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps); return "
            "(wide * scale).to(x.dtype) * weight."),
    )  # fmt: skip
    examples = (
        one("rms_norm", [1, 4], 1.0, "ones", 1e-6, "float32"),
        one("rms_norm", [3, 4], 1.0, "ones", 1e-6, "float32"),
        one("rms_norm", [2, 6], 1.0, "each", 1e-6, "float32"),
        one("rms_norm", [2, 6], 0.001, "each", 1e-6, "float32", why=say("x is about as small as the root of eps here, so eps counts.")),
        one("rms_norm", [2, 6], 1.0, "each", 0.5, "float32", why=say("eps is large here. It is added to the mean, under the root.")),
        one("rms_norm", [2, 4], 0.0, "each", 1e-6, "float32", why=say("A row of zeros stays a row of zeros: that is what eps is for.")),
        one("rms_norm", [2, 3, 4], 1.0, "each", 1e-6, "float32", why=say("x may have more dimensions; the mean is over the last one.")),
        one("rms_norm", [2, 3, 4], 1.0, "heads", 1e-6, "float32",
            why=say("Qwen3 normalises each head of q and k: here weight is [heads, D], a row a head, and x [T, heads, D].")),
        one("rms_norm", [2, 8], 400.0, "ones", 1e-6, "float16", why=say("x is fp16, up to 800. Its square would be 640,000, and fp16 ends at 65,504.")),
        one("rms_norm", [4, 64], 1.0, "ones", 1e-6, "bfloat16",
            why=say("x is bf16 and weight is 1, so the result is off by one rounding at most: 1 part in 512. Here it is off by more.")),
        one("rms_norm", [1, 6], 1.0, "each", 1e-6, "bfloat16",
            why=say("Rounded before weight, as in transformers. Rounded after it, the last digits are others, and in a long text so are tokens.")),
        one("rms_norm", [1, 11], 1.0, "each", 1e-6, "float16"),
        one("rms_norm", [2, 8], 1.0, "each", 1e-6, "float64", why=say("x is float64 here: do not make it narrower.")),
    )

    class Oracle:
        """Python's own numbers."""

        @staticmethod
        def right(row, w, eps):
            rms = math.sqrt(math.fsum(v * v for v in row) / len(row) + eps)
            return [v / rms * weight for v, weight in zip(row, w, strict=True)]

        def rms_norm(self, shape, scale, weights, eps, name, form=None):
            form = form or self.right
            narrow = {"float16": 11, "bfloat16": 8, "float32": 24, "float64": 53}[name]
            count, dim = math.prod(shape), shape[-1]
            x = [self.cut(number(2, i) * scale, narrow) for i in range(count)]
            per = dim if weights != "heads" else shape[-2] * dim
            found = []
            for start in range(0, count, dim):
                row = x[start : start + dim]
                w = [1.0 if weights == "ones" else number(3, (start + d) % per) for d in range(dim)]
                values = form(row, w, eps)
                if narrow < 24 and weights != "ones":  # before weight, and the product; the examples keep away from ties
                    values = [self.cut(self.cut(v / k, narrow) * k, narrow) if k else 0.0 for v, k in zip(values, w, strict=True)]
                found.append(values)
            for size in reversed(shape[1:-1]):
                found = [found[i : i + size] for i in range(0, len(found), size)]
            rel = {"float32": 1e-5, "float64": 1e-12}.get(name, 1.05 * 2.0**-narrow if weights == "ones" else 1e-6)
            return Approx(found, rel=rel, abs=1e-300 if name == "float64" else 1e-9 if name == "float32" else 1e-6)

        @staticmethod
        def cut(x, bits):
            if not x:
                return x
            size = 2.0 ** (math.frexp(x)[1] - bits)
            return round(x / size) * size

    def traces(self):
        shapes = st.one_of(st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 4, 6))),
                           st.tuples(st.integers(1, 2), st.integers(1, 3), st.sampled_from((2, 4))))  # fmt: skip
        return calls("rms_norm", shapes.map(list), st.sampled_from((0.01, 1.0, 30.0)), st.sampled_from(("ones", "each")),
                     st.sampled_from((1e-6, 1e-5, 0.1)), st.just("float32"))  # fmt: skip

    def describe(self, op):
        _, shape, scale, weights, eps, name = op
        w = {"ones": "all 1", "each": f"[{shape[-1]}]", "heads": str(shape[-2:])}[weights]
        return f"rms_norm(x {name} {shape}, numbers up to {2 * scale:g}; weight {w}; eps={eps:g})"

    def explain(self, op, expected, got):
        _, shape, scale, weights, eps, name = op
        if got == "one of the arguments was changed":
            return CHANGED
        if got == "memory of an argument":
            return SHARED
        if isinstance(got, str):
            return say("Return a new tensor of x's shape and x's dtype. (An fp32 factor makes the result fp32: .to(x.dtype).)")
        if has_nan(got):
            return say("NaN: 0 / 0, where eps was to help, or an overflow.")
        want, have = flat(expected.value), flat(got)
        if name == "float16" and max(map(abs, have)) < 0.1:
            return say("Everything has become (nearly) 0: a square overflowed to infinity, and one over infinity is 0. Compute in fp32.")
        if name in ("float16", "bfloat16") and weights != "ones" and all(abs(h - w) <= abs(w) / 100 for h, w in zip(have, want, strict=True)):
            return say("Only the last digit differs. The normalised x is made narrow (.to(x.dtype)) before it is multiplied by weight, and the product is narrow "
                       "again: this is the order of transformers, and of the engine. (F.rms_norm rounds once, after weight.)")  # fmt: skip
        if name in ("float16", "bfloat16"):
            return say("In fp32 it would be right, here it is rounded too often: square, mean, root and product in fp32, then one rounding, then weight.")
        if name == "float64":
            return say("Right in fp32, and float64 has more digits than that: x was made narrower.")
        for told, form in self.FORMS:
            if near(self.Oracle().rms_norm(*op[1:], form=form).value, got, 1e-5 * max(map(abs, want))):
                return told
        pairs = [(h / w) for h, w in zip(have, want, strict=True) if abs(w) > 1e-6]
        if pairs and max(pairs) - min(pairs) < 1e-3 * abs(pairs[0]):
            return say("Everything is {factor} times what it should be. Is it the mean of the squares, and is eps added to it under the root?",
                       factor=round(sum(pairs) / len(pairs), 3))  # fmt: skip
        size = shape[-1]
        row = next(i for i in range(0, len(want), size) if not near(want[i : i + size], have[i : i + size], 1e-5 * max(map(abs, want))))
        return say("The first wrong row is {have}, and should be {want}. It is x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension only, "
                   "each row for itself.", have=short(have[row : row + size]), want=short(want[row : row + size]))  # fmt: skip


def _over(root, plus=0.0):
    """A form of the norm with another root, and something added to weight."""
    return lambda row, w, eps: [v / root(row, eps) * (plus + weight) for v, weight in zip(row, w, strict=True)]


def _mean(row, eps):
    return math.fsum(v * v for v in row) / len(row)


RmsNorm.FORMS = (
    (say("eps is an argument. It looks as if 1e-6 or 1e-5 stood in its place."), _over(lambda row, eps: math.sqrt(_mean(row, 0) + 1e-6))),
    (say("eps is an argument. It looks as if 1e-6 or 1e-5 stood in its place."), _over(lambda row, eps: math.sqrt(_mean(row, 0) + 1e-5))),
    (say("eps is missing: it is added to the mean, under the root."), _over(lambda row, eps: math.sqrt(_mean(row, 0)) or 1.0)),
    (say("eps stands outside the root. It is added to the mean, under the root."), _over(lambda row, eps: math.sqrt(_mean(row, 0)) + eps)),
    (say("That is the sum of the squares. It is their mean."), _over(lambda row, eps: math.sqrt(_mean(row, 0) * len(row) + eps))),
    (say("That is 1 + weight, as in Gemma. In Qwen2 it is weight."), _over(lambda row, eps: math.sqrt(_mean(row, 0) + eps), 1.0)),
    (say("The mean of x was subtracted: that is LayerNorm. RMSNorm takes the root of the mean square as it is."),
     lambda row, w, eps: RmsNorm.Oracle.right([v - sum(row) / len(row) for v in row], w, eps)),
)  # fmt: skip


# ---- the flat batch


class FlatBatch(Exercise):
    """The flat batch of a step."""

    name, points, minutes, section = "flat_batch", 4, 18, "L33 2.2, 4.3"
    defines = ("flat_batch",)
    ours = {"flat_batch": "kvlab.model.batch:flat_batch"}
    part = {"flat_batch": "flat_batch"}
    driver = "Flat"
    num_random = 25
    memory_mib = 1536
    hints = (
        say("One sequence after the other. Its tokens stand at positions start to start + len(token_ids) - 1: a range. What does each list get from it?"),
        say("A token at position p goes to slot block_ids[p // block_size] * block_size + p % block_size. seq_lens gets start + len(token_ids): all "
            "that is attended to."),
        say("query_start_loc begins with 0 and gets len(token_ids), of all tokens so far, after each sequence. Logits come out of a sequence's last row, which "
            "is then len(token_ids) - 1. Decodes are counted from the front, up to the first sequence of more than one token."),
    )  # fmt: skip
    FIELDS = ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices", "num_decodes",
              "max_query_len", "max_seq_len")  # fmt: skip

    @staticmethod
    def batch(seqs, block_size, why=None):
        fields = [("field", name) for name in FlatBatch.FIELDS]
        return Trace((seqs, block_size), (("flat_batch",), *fields[:5], ("tables",), *fields[5:]), why)

    class Oracle:
        """Token by token; a slot is found by walking."""

        def __init__(self, seqs, block_size):
            self.rows, self.seqs, self.size = [], seqs, block_size
            for number_, (tokens, start, blocks, wants) in enumerate(seqs):
                slots = [block * block_size + offset for block in blocks for offset in range(block_size)]
                for i, token in enumerate(tokens):
                    self.rows.append((number_, token, start + i, slots[start + i], wants and i + 1 == len(tokens)))

        def flat_batch(self):
            return "a FlatBatch"

        def tables(self):
            return [blocks[: -(-(start + len(tokens)) // self.size)] for tokens, start, blocks, _ in self.seqs]

        def field(self, name):
            counts = [sum(row[0] == i for row in self.rows) for i in range(len(self.seqs))]
            ends = [start + n for (_, start, _, _), n in zip(self.seqs, counts, strict=True)]
            if name in ("num_decodes", "max_query_len", "max_seq_len"):
                decodes = 0
                while decodes < len(counts) and counts[decodes] == 1:
                    decodes += 1
                return {"num_decodes": decodes, "max_query_len": max(counts), "max_seq_len": max(ends)}[name]
            values, kind = {
                "token_ids": ([row[1] for row in self.rows], "int64"),
                "positions": ([row[2] for row in self.rows], "int64"),
                "slot_mapping": ([row[3] for row in self.rows], "int64"),
                "query_start_loc": ([sum(counts[:i]) for i in range(len(counts) + 1)], "int32"),
                "seq_lens": (ends, "int32"),
                "logits_indices": ([i for i, row in enumerate(self.rows) if row[4]], "int64"),
            }[name]
            return f"{kind} [{len(values)}]: {values}"

    def traces(self):
        @st.composite
        def batches(draw):
            size, free = draw(st.integers(1, 4)), iter(draw(st.permutations(range(1, 60))))
            seqs = []
            for _ in range(draw(st.integers(1, 4))):
                start, count = draw(st.integers(0, 7)), draw(st.sampled_from((1, 1, 2, 3, 5)))
                blocks = [next(free) for _ in range(-(-(start + count) // size) + draw(st.integers(0, 1)))]
                seqs.append([draw(st.lists(st.integers(10, 99), min_size=count, max_size=count)), start, blocks, draw(st.booleans())])
            seqs.sort(key=lambda seq: len(seq[0]) != 1)
            return self.batch(seqs, size)

        return batches()

    def describe_init(self, init):
        seqs, size = init
        return f"block_size {size}, seqs: " + "; ".join(
            f"{t} from position {s} in blocks {b}, {'logits' if w else 'no logits'}" for t, s, b, w in seqs)  # fmt: skip

    def describe(self, op):
        return {"flat_batch": "flat_batch(seqs, block_size)", "tables": "block_tables, as far as each sequence goes:"}.get(
            op[0], f"{op[-1]}:")  # fmt: skip

    def explain(self, op, expected, got):
        if op[0] == "flat_batch":
            if got == "seqs was changed":
                return say("seqs belongs to the engine (block_ids is its block table): copy what you change.")
            return say("Return a FlatBatch, as the last line of the cell does.")
        if op[0] == "tables":
            return say("block_tables is int32 [sequences, width]: each row is a sequence's block_ids, filled up at the end to one width.")
        name = op[1]
        if isinstance(got, str) and isinstance(expected, str) and got.partition(":")[2] == expected.partition(":")[2]:
            return say("The numbers are right, the dtype is not. int64 for what indexes, int32 for starts, lengths and tables.")
        return {
            "token_ids": say("All tokens to be computed now, sequence after sequence, without gaps."),
            "positions": say("Where each token stands in its OWN sequence: start, start + 1, ... A decode's is not 0, nor is a later chunk's."),
            "slot_mapping": say("The slot of a token at position p: block_ids[p // block_size] * block_size + p % block_size. p is the position in the "
                                "sequence, not the row in the chunk."),
            "query_start_loc": say("Where each sequence's rows begin: 0 first, and at the end the number of all rows. One entry more than there are sequences."),
            "seq_lens": say("How many tokens a sequence's last row attends to: those computed before, and all of this step's."),
            "logits_indices": say("The LAST row of each sequence that wants logits, counted in the whole batch. Those that do not want any have no entry."),
            "num_decodes": say("How many sequences from the front have exactly one token, up to the first that has more."),
            "max_query_len": say("The most tokens that a sequence has in this step."),
            "max_seq_len": say("The longest of seq_lens."),
        }[name]  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if op[0] == "tables" or "expected sequence of length" in message:
            return say("A tensor has rows of one length: fill the shorter block tables up, with anything.")
        return None


FlatBatch.examples = (
    FlatBatch.batch([[[11, 12, 13], 0, [7], True]], 4, say("One prompt of three tokens, from position 0.")),
    FlatBatch.batch([[[11, 12, 13, 14, 15], 0, [7, 3], True]], 4, say("The fifth token is on the second page.")),
    FlatBatch.batch([[[99], 9, [2, 6, 5], True]], 4, say("A decode: one token, at position 9.")),
    FlatBatch.batch([[[15, 16, 17], 5, [7, 3], False]], 4, say("A chunk from the middle of a prompt: nobody wants logits of it.")),
    FlatBatch.batch([[[13, 14, 15, 16], 3, [7, 3], True]], 4, say("A chunk that begins in one page and ends in the next.")),
    FlatBatch.batch([[[99], 9, [2, 6, 5], True], [[15, 16, 17], 5, [7, 3], False], [[20, 21], 0, [8], True]], 4,
                    say("A decode, a chunk, and a prompt in one step.")),
    FlatBatch.batch([[[50], 4, [9, 1], True], [[60], 0, [4], True], [[70, 71], 2, [6], True]], 4,
                    say("A prompt of one token is computed like a decode: one row.")),
    FlatBatch.batch([[[50], 3, [9], True], [[60], 8, [4, 2, 5], True]], 4, say("Only decodes.")),
    FlatBatch.batch([[[50], 2, [5, 9, 3], True]], 1, say("Blocks of one token.")),
    FlatBatch.batch([[[5, 6], 1, [3, 8, 7], True]], 2, say("A block more has been reserved than is needed now.")),
    FlatBatch.batch([[[5, 6], 0, [3], False], [[7, 8, 9], 0, [4, 5], False]], 2, say("Nobody wants logits: an empty tensor.")),
    FlatBatch.batch([[[5, 6], 6, [3, 9, 2, 8], True], [[7, 8, 9], 0, [4, 5], True]], 2,
                    say("The longest sequence is not the one with the longest chunk.")),
)  # fmt: skip


# ---- the ledger


class StepLedger(Exercise):
    """The memory ledger of a step."""

    name, points, minutes, section = "step_ledger", 3, 14, "L33 3.4, 8.2-2; PAV 3.1"
    defines = ("step_ledger",)
    ours = {"step_ledger": STEPS + "step_ledger"}
    bars = ("kvlab.primer:step_bytes",)
    driver = "Ledger"
    hints = (
        say("For each item ask: once a step, once a new token, once a token of context, or once a sampled sequence?"),
        say("shape.kv_bytes_per_token(dtype_bytes) is K and V of one token in all layers. kv_written: times the new tokens. kv_read: times all tokens that are there "
            "afterwards."),
        say("weights: (shape.num_layer_weights + shape.vocab_size * shape.hidden_size) * dtype_bytes. logits: 4 bytes, vocab_size numbers, for each sampled "
            "sequence. widest: new tokens * 2 * intermediate_size * dtype_bytes."),
    )  # fmt: skip
    SMALL = {"vocab_size": 11, "hidden_size": 6, "intermediate_size": 10, "num_hidden_layers": 3, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 5}  # fmt: skip
    SEVEN = {"vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
             "num_attention_heads": 28, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": True}  # fmt: skip
    examples = (
        Trace((SMALL,), (("step_ledger", [[1, 0, True]], 2),), say("One sequence, one token, none before it.")),
        Trace((SMALL,), (("step_ledger", [[1, 9, True]], 2),), say("A decode after nine tokens.")),
        Trace((SMALL,), (("step_ledger", [[4, 0, True]], 2),), say("A whole prompt of four tokens: only its last one is sampled.")),
        Trace((SMALL,), (("step_ledger", [[4, 6, False]], 2),), say("A chunk from the middle: nothing is sampled.")),
        Trace((SMALL,), (("step_ledger", [[1, 9, True], [1, 2, True], [4, 6, False], [3, 0, True]], 2),)),
        Trace((SMALL,), (("step_ledger", [[1, 9, True], [4, 6, False]]),), say("dtype_bytes is not given: it is 2.")),
        Trace((SMALL,), (("step_ledger", [[1, 9, True], [4, 6, False]], 4),), say("fp32. The logits have 4 bytes in any case.")),
        Trace((SMALL | {"tie_word_embeddings": True},), (("step_ledger", [[2, 1, True]], 2),),
              say("The head is tied: the same matrix as the embedding, and read all the same.")),
        Trace((SEVEN,), (("step_ledger", [[1, 4000, True]] * 3 + [[512, 1024, False]], 2),), say("Qwen2.5-7B.")),
    )

    class Oracle:
        """Counts matrices and tokens one by one."""

        def __init__(self, shape):
            self.s = shape

        def step_ledger(self, step, dtype_bytes=2):
            s = self.s
            h, q, kv = s["hidden_size"], s["num_attention_heads"] * s["head_dim"], s["num_key_value_heads"] * s["head_dim"]
            layer = h * q + h * kv + h * kv + q * h + 3 * h * s["intermediate_size"]
            weights = sum(layer for _ in range(s["num_hidden_layers"])) + s["vocab_size"] * h
            found = {"weights": weights * dtype_bytes, "kv_written": 0, "kv_read": 0, "logits": 0, "widest": 0}
            for new, computed, sampled in step:
                for position in range(computed + new):
                    token = 2 * kv * s["num_hidden_layers"] * dtype_bytes
                    found["kv_read"] += token
                    if position >= computed:
                        found["kv_written"] += token
                        found["widest"] += (s["intermediate_size"] + s["intermediate_size"]) * dtype_bytes
                if sampled:
                    found["logits"] += s["vocab_size"] * 4
            return found

    def traces(self):
        step = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.booleans()).map(list), min_size=1, max_size=4)
        return step.map(lambda s: Trace((self.SMALL,), (("step_ledger", s, 2),)))

    def describe_init(self, init):
        return ", ".join(f"{name} {value}" for name, value in init[0].items())

    def describe(self, op):
        return f"step_ledger({', '.join([str([tuple(each) for each in op[1]]), *map(str, op[2:])])})"

    def explain(self, op, expected, got):
        if got == "step was changed":
            return say("step is the scheduler's: read it only.")
        if not isinstance(got, dict) or set(got) != set(expected):
            return say("Return a dict with the keys weights, kv_written, kv_read, logits, widest.")
        wrong = next(name for name in expected if got[name] != expected[name] or type(got[name]) is not int)
        if type(got[wrong]) is not int:
            return say("{item}: bytes are whole numbers.", item=wrong)
        return {
            "weights": say("weights: the matrices of all layers (shape.num_layer_weights) and the head, vocab_size x hidden_size, each read once a step, whoever is in it."),
            "kv_written": say("kv_written: K and V of the new tokens, in all layers: 2 x layers x KV heads (not query heads) x head_dim each."),
            "kv_read": say("kv_read: each sequence's whole context, those computed before and this step's, once; in all layers."),
            "logits": say("logits: vocab_size numbers of fp32, 4 bytes, for each sequence that is sampled. Not for each token."),
            "widest": say("widest: gate AND up, intermediate_size numbers each, for every new token, of one layer: the layers use its memory in turn."),
        }[wrong]  # fmt: skip


# ---- attention over pages


class Attend(Exercise):
    """One sequence's rows over its pages: causal and grouped."""

    name, points, minutes, section = "attend", 4, 20, "L33 2.2, 2.3, 4.3"
    defines = ("attend",)
    ours = {"attend": STEPS + "attend"}
    bars = ("kvlab.model.attention:naive_paged_attention", "kvlab.model.attention:TorchAttention",
            "kvlab.model.attention:context_slots")  # fmt: skip
    part = {"attend": "attend"}
    driver = "Pages"
    num_random = 25
    memory_mib = 1536
    hints = (
        say("Three steps. Gather K and V of positions 0 to seq_len - 1 through the block table, [seq_len, Hkv, D]. Then scores, a matrix [n, seq_len] "
            "for each query head. Then mask, softmax, times V."),
        say("positions = torch.arange(seq_len); k, v = kv[:, torch.tensor(block_table)[positions // block_size], positions % block_size]. Query head h "
            "reads KV head h // (H // Hkv): k.repeat_interleave(H // Hkv, dim=1) gives every query head its own."),
        say("Row i stands at position seq_len - n + i, and sees all positions up to that one: hidden = positions[None] > (seq_len - n + "
            "torch.arange(n))[:, None]; scores.masked_fill(hidden, -inf).softmax(-1)."),
    )  # fmt: skip
    DEFAULTS = {"block_size": 4, "kv_heads": 1, "group": 1, "head_dim": 16, "values": "positions", "loud": 0.25, "spare": (),
                "dtype": "float32"}  # fmt: skip

    @staticmethod
    def case(rows, length, why=None, looked_at=None, **options):
        case = Attend.DEFAULTS | {"rows": rows, "length": length} | options
        heads = case["kv_heads"] * case["group"]
        looked_at = looked_at or [(row, head) for row in range(rows) for head in range(heads)]
        return Trace((case,), (("attend",), *(("row", *at) for at in looked_at)), why)

    class Oracle:
        """In loops, without pages."""

        def __init__(self, case):
            self.case = case

        def attend(self):
            c = self.case
            return f"{c['dtype']} [{c['rows']}, {c['kv_heads'] * c['group']}, {c['head_dim']}]"

        def row(self, row, head):
            close = {"float32": 2e-5, "float64": 2e-6}.get(self.case["dtype"], 4e-2 if self.case["values"] == "random" else 1e-2)
            return Told(rounded(self.output(row, head)), rel=0, abs=close, of=(self, row, head))

        def key(self, p, kv_head):
            return [self.case["loud"] * number(5, p, kv_head, d) for d in range(self.case["head_dim"])]

        def value(self, p, kv_head):
            of_position = self.case["values"] == "positions"
            return [float(d == p) if of_position else number(6, p, kv_head, d) for d in range(self.case["head_dim"])]

        def output(self, row, head, scale=None, kv_head=None, end=None, begin=0, swapped=False):
            """The output of one head; every argument more is a way of being wrong."""
            c = self.case
            own, kv_head = c["length"] - c["rows"] + row, head // c["group"] if kv_head is None else kv_head
            places = range(begin, own + 1 if end is None else end)
            q, scale = [number(4, own, head, d) for d in range(c["head_dim"])], scale or c["head_dim"] ** -0.5
            keys, values = ([at(p, kv_head) for p in places] for at in (self.key, self.value))
            if swapped:
                keys, values = values, keys
            scores = [scale * sum(a * b for a, b in zip(q, k, strict=True)) for k in keys]
            exps = [math.exp(score - max(scores)) for score in scores]
            return [sum(e * v[d] for e, v in zip(exps, values, strict=True)) / math.fsum(exps) for d in range(c["head_dim"])]

    def traces(self):
        @st.composite
        def cases(draw):
            length = draw(st.integers(1, 14))
            return self.case(draw(st.integers(1, length)), length, block_size=draw(st.sampled_from((1, 2, 4, 16))),
                             kv_heads=draw(st.integers(1, 2)), group=draw(st.integers(1, 3)),
                             values=draw(st.sampled_from(("positions", "random"))))  # fmt: skip

        return cases()

    def describe_init(self, init):
        c = init[0]
        first = c["length"] - c["rows"]
        rows = f"row 0 at position {first}" if c["rows"] == 1 else f"rows 0 to {c['rows'] - 1} at positions {first} to {c['length'] - 1}"
        told = f"{rows}, seq_len {c['length']}, block size {c['block_size']}, {c['kv_heads'] * c['group']} query heads on " \
               f"{c['kv_heads']} KV heads, {c['dtype']}"  # fmt: skip
        return told + ("; V of position p is 1 at place p, so that the output is the weights" if c["values"] == "positions" else "")

    def describe(self, op):
        return "attend(q, kv, block_table, seq_len)" if op[0] == "attend" else f"row {op[1]}, query head {op[2]}:"

    def explain(self, op, expected, got):
        if got == "one of the arguments was changed":
            return CHANGED
        if got == "memory of an argument":
            return SHARED
        if op[0] == "attend":
            return say("Return a new tensor of q's shape [n, H, D] and q's dtype.")
        oracle, row, head = expected.of
        c = oracle.case
        own, dim, heads, kv_heads = c["length"] - c["rows"] + row, c["head_dim"], c["kv_heads"] * c["group"], c["kv_heads"]
        if has_nan(got) and c["loud"] > 1:
            return say("NaN, where scores are large: exp of them is infinite, and infinity over infinity is NaN. Subtract the largest score first, as softmax does.")
        if has_nan(got):
            return say("NaN. Slots behind seq_len, and blocks that are not in the table, hold anything, here NaN, and 0 * NaN is NaN. Take positions 0 to seq_len - 1 "
                       "only, each from block_table[p // block_size]. (Or does a row see nothing at all? Softmax of nothing but -inf is NaN.)")  # fmt: skip
        ways = (
            (say("The scores are not divided by sqrt(D)."), {"scale": 1.0}),
            (say("The scores are divided by D. It is sqrt(D)."), {"scale": 1 / dim}),
            (say("K and V are swapped: kv[0] is K, kv[1] is V."), {"swapped": True}),
            (say("The causal mask is missing: this row stands at position {own}, and it sees what comes later.", own=own), {"end": c["length"]}),
            (say("This row sees positions 0 to {row}, as if it stood at position {row}. It stands at {own}: row i at seq_len - n + i.", row=row, own=own), {"end": row + 1}),
            (say("This row does not see itself. Its own K and V have been written already, and it attends to them as well."), {"end": own}),
            (say("It sees the n newest tokens only. All before them are there, through the block table."), {"begin": c["length"] - c["rows"]}),
            (say("Query head {head} reads KV head {wrong} here, by remainder. It is head // (H / Hkv): consecutive heads share one.",
                 head=head, wrong=head % kv_heads), {"kv_head": head % kv_heads}),
            (say("Query head {head} reads KV head 0, as all do. It is head // (H / Hkv).", head=head), {"kv_head": 0}),
        )  # fmt: skip
        for told, way in ways:
            if way.get("end") == 0:
                continue
            found = oracle.output(row, head, **way)
            if not near(found, expected.value, 3 * expected.abs) and near(found, got, expected.abs):
                return told
        if c["values"] == "random":
            return say("The weights may be right, as the examples before passed: is it the V of the right KV head? Query head h reads KV head h // (H / Hkv).")
        if any(g > 1e-3 for g in got[own + 1 :]):
            return say("This row stands at position {own}, and it sees {p}, which comes later: the causal mask is missing, or shifted. Row i stands at "
                       "position seq_len - n + i.", own=own, p=next(p for p in range(own + 1, len(got)) if got[p] > 1e-3))  # fmt: skip
        missing = [p for p in range(own + 1) if expected.value[p] > 2e-3 and abs(got[p]) < 1e-6]
        if missing:
            return say("This row stands at position {own} and does not see position {p}. It sees all from 0 to {own}, through the block table.",
                       own=own, p=missing[0])  # fmt: skip
        if abs(sum(got) - 1) > 2e-2:
            return say("The weights add up to {total}, not to 1: softmax goes over the positions, the last dimension of the scores.",
                       total=round(sum(got), 3))  # fmt: skip
        if heads == 1:
            return say("It sees the right positions, with other weights: softmax of q · k / sqrt(D). Is position p's K read at block_table[p // block_size], "
                       "offset p % block_size? Is the scale right, and the same for all?")  # fmt: skip
        return say("It sees the right positions, with other weights. Was another query head's q taken, or another KV head's K? Query head h reads KV head "
                   "h // (H / Hkv): consecutive heads share one. And is position p's K read at block_table[p // block_size], offset p % block_size?")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error in ("IndexError", "RuntimeError") and (op[0] == "attend"):
            return say("Is it the block table? It may be longer than needed, as the rows of a padded tensor are, and what stands behind the sequence's own pages "
                       "is no block number: cut it to ceil(seq_len / block_size) entries, or look up only the pages of positions 0 to seq_len - 1.")  # fmt: skip
        return None


Attend.examples = (
    Attend.case(1, 1, say("One token, alone: it sees itself.")),
    Attend.case(1, 3, say("A decode.")),
    Attend.case(1, 9, say("A decode whose context lies on three pages.")),
    Attend.case(3, 3, say("A whole prompt.")),
    Attend.case(5, 5),
    Attend.case(3, 7, say("A chunk: the last three of seven tokens.")),
    Attend.case(2, 12, say("A chunk at the end of full pages.")),
    Attend.case(1, 7, group=3, why=say("Three query heads share a KV head.")),
    Attend.case(1, 7, kv_heads=2, values="random", why=say("Two KV heads, each with its own query head.")),
    Attend.case(2, 6, kv_heads=2, group=2, why=say("Query heads 0 and 1 share KV head 0, 2 and 3 share KV head 1.")),
    Attend.case(3, 9, kv_heads=2, group=3, values="random"),
    Attend.case(2, 6, spare=(3,), why=say("A block more has been reserved than is needed now. Nothing is in it yet.")),
    Attend.case(1, 9, spare=(1_000_000,), why=say("The table is a row of a padded tensor here: what stands behind the sequence's own pages is no block number.")),
    Attend.case(4, 11, block_size=1),
    Attend.case(4, 11, block_size=16, head_dim=32),
    Attend.case(3, 8, loud=60, why=say("The scores are large: exp of them is infinite, unless the largest is subtracted, as softmax does.")),
    Attend.case(3, 9, dtype="bfloat16", kv_heads=2, group=2, why=say("q and kv are bf16 here, and the result is.")),
    Attend.case(2, 9, dtype="float64", group=2),
)  # fmt: skip


# ---- the layer


class Layer(Exercise):
    """A whole layer."""

    name, points, minutes, section = "decoder_layer", 4, 20, "L33 2.2, 3.4, 4.3"
    defines = ("decoder_layer",)
    ours = {"decoder_layer": STEPS + "decoder_layer"}
    driver = "Layer"
    num_random = 10
    memory_mib = 1536
    hints = (
        say("Follow the picture, box by box. Where does x itself go on, past the boxes? Twice, to a +."),
        say("Slots: kv[0].flatten(0, 1) is a view [num_blocks * block_size, Hkv, D], so kv[0].flatten(0, 1)[batch.slot_mapping] = k writes into the pages. "
            "Then, for sequence i, the rows query_start_loc[i] to query_start_loc[i + 1] attend over batch.block_tables[i].tolist(), int(batch.seq_lens[i])."),
        say("q = F.linear(h, w['q_proj.weight'], w['q_proj.bias']).unflatten(-1, (-1, D)), the same for k and v; turn q and k, not v. After attention "
            "x = x + F.linear(out.flatten(1), w['o_proj.weight']); the second norm is of this new x."),
    )  # fmt: skip

    class Oracle:
        """No pages, no batch: all of a sequence at once, in loops."""

        def __init__(self, sizes, block_size):
            self.hidden, self.heads, self.kv_heads, self.dim, self.inner = sizes
            self.lengths, self.steps = {}, 0

        def weight(self, kind, rows, columns):
            return [[number(10 + kind, r * columns + c) / 2 for c in range(columns)] for r in range(rows)]

        @staticmethod
        def times(matrix, x, bias=None):
            out = [math.fsum(a * b for a, b in zip(row, x, strict=True)) for row in matrix]
            return out if bias is None else [a + b for a, b in zip(out, bias, strict=True)]

        def norm(self, x, kind):
            rms = math.sqrt(sum(v * v for v in x) / len(x) + self.eps)
            return [v / rms * number(10 + kind, d) for d, v in enumerate(x)]

        def turned(self, x, position):
            half = self.dim // 2
            z = [complex(x[i], x[i + half]) * cmath.exp(1j * position * self.theta ** (-i / half)) for i in range(half)]
            return [c.real for c in z] + [c.imag for c in z]

        def split(self, x):
            return [x[i : i + self.dim] for i in range(0, len(x), self.dim)]

        def step(self, chunks):
            before, self.steps = dict(self.lengths), self.steps + 1
            for name, count in chunks:
                self.lengths[name] = before.get(name, 0) + count
            rows = [(name, before.get(name, 0) + i) for name, count in chunks for i in range(count)]
            return Told(self.rows(chunks, before), rel=2e-5, abs=3e-4, of=(self, chunks, before, rows, self.steps))

        def rows(self, chunks, before, eps=1e-2, theta=100.0, biased=1):
            """The output of a step; every argument more is a way of being wrong."""
            self.eps, self.theta = eps, theta
            found, q_size, kv_size = [], self.heads * self.dim, self.kv_heads * self.dim
            bias = [[biased * number(10 + kind, i) for i in range(size)] for kind, size in ((2, q_size), (4, kv_size), (6, kv_size))]
            wq, wk, wv = (self.weight(kind, size, self.hidden) for kind, size in ((1, q_size), (3, kv_size), (5, kv_size)))
            wo = self.weight(7, self.hidden, q_size)
            gate, up = (self.weight(kind, self.inner, self.hidden) for kind in (9, 10))
            down = self.weight(11, self.hidden, self.inner)
            for name, count in chunks:
                start = before.get(name, 0)
                end = start + count
                xs = [[number(9, name, p, d) for d in range(self.hidden)] for p in range(end)]
                hs = [self.norm(x, 0) for x in xs]
                keys = [[self.turned(k, p) for k in self.split(self.times(wk, h, bias[1]))] for p, h in enumerate(hs)]
                values = [self.split(self.times(wv, h, bias[2])) for h in hs]
                for p in range(start, end):
                    out = []
                    for head, q in enumerate(self.split(self.times(wq, hs[p], bias[0]))):
                        q, kv_head = self.turned(q, p), head * self.kv_heads // self.heads
                        scores = [sum(a * b for a, b in zip(q, keys[o][kv_head], strict=True)) / math.sqrt(self.dim)
                                  for o in range(p + 1)]  # fmt: skip
                        exps = [math.exp(s - max(scores)) for s in scores]
                        out += [sum(e * values[o][kv_head][d] for o, e in enumerate(exps)) / sum(exps) for d in range(self.dim)]
                    x = [a + b for a, b in zip(xs[p], self.times(wo, out), strict=True)]
                    h = self.norm(x, 8)
                    g = [v / (1 + math.exp(-v)) for v in self.times(gate, h)]
                    mlp = self.times(down, [a * b for a, b in zip(g, self.times(up, h), strict=True)])
                    found.append([round(a + b, 5) for a, b in zip(x, mlp, strict=True)])
            return found

    SIZES = ([6, 2, 1, 4, 5], [6, 4, 2, 2, 5], [8, 2, 2, 4, 6])
    examples = (
        Trace((SIZES[2], 4), (("step", [[0, 1]]),), say("One sequence, one token, position 0.")),
        Trace((SIZES[2], 4), (("step", [[0, 3]]),), say("A prompt of three tokens.")),
        Trace((SIZES[2], 4), (("step", [[0, 3]]), ("step", [[0, 1]])), say("Then a decode: it attends to what the first step has written.")),
        Trace((SIZES[0], 4), (("step", [[0, 6]]), ("step", [[0, 1]]), ("step", [[0, 1]]))),
        Trace((SIZES[1], 4), (("step", [[0, 3], [1, 5]]),), say("Two prompts in one batch: neither sees the other.")),
        Trace((SIZES[1], 2), (("step", [[0, 3], [1, 2]]), ("step", [[1, 1], [0, 4]]), ("step", [[0, 1], [1, 1], [2, 3]])),
              say("Chunks and decodes of several sequences in each step.")),
        Trace((SIZES[0], 1), (("step", [[0, 2]]), ("step", [[0, 2]])), say("A prompt in two chunks, blocks of one token.")),
    )

    def traces(self):
        @st.composite
        def runs(draw):
            steps = []
            for _ in range(draw(st.integers(1, 3))):
                names = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
                steps.append(("step", sorted([[name, draw(st.sampled_from((1, 1, 2, 3)))] for name in names], key=lambda c: c[1] != 1)))
            return Trace((draw(st.sampled_from(self.SIZES)), 4), tuple(steps))

        return runs()

    def describe_init(self, init):
        (hidden, heads, kv_heads, dim, inner), size = init
        return f"hidden {hidden}, {heads} query heads on {kv_heads} KV heads of {dim}, intermediate {inner}, block size {size}"

    def describe(self, op):
        return "a step with " + ", ".join(f"{n} token{'s' * (n > 1)} of sequence {name}" for name, n in op[1]) + ":"

    def explain(self, op, expected, got):
        if isinstance(got, str) and got.startswith("an argument"):
            return CHANGED
        if isinstance(got, str) and got.startswith("slot"):
            return say("K and V go to the slots of batch.slot_mapping, and nowhere else.")
        if isinstance(got, str):
            return say("Return a new tensor like x, [T, hidden].")
        if has_nan(got):
            return say("NaN: a slot was read that nobody has written. Are this step's k AND v written, to batch.slot_mapping, before anybody attends? Into kv itself, "
                       "not into a copy of it? Or does a sequence attend over another one's table, or over another one's seq_len?")  # fmt: skip
        oracle, chunks, before, places, steps = expected.of
        for told, way in self.WAYS:
            if near(oracle.rows(chunks, before, **way), got):
                return told
        row = next(i for i, (g, w) in enumerate(zip(got, expected.value, strict=True)) if not near(w, g, expected.abs))
        name, position = places[row]
        first = say("First wrong: row {row}, position {position} of sequence {name}. It is {have}, and should be {want}.", row=row, position=position, name=name,
                    have=short(got[row]), want=short(expected.value[row]))  # fmt: skip
        if steps > 1:
            return say("{first} A step before this one was right, so norms, biases and MLP are. What is new? batch.positions, which are not the row's number; "
                       "the slots; and attention over all of the sequence, query_start_loc[i] to query_start_loc[i + 1], up to seq_lens[i].", first=first)  # fmt: skip
        if row > 0:
            return say("{first} Those before it are right. What is different there: its position, its sequence, what it attends to?", first=first)
        return say("{first} Go through the picture: are the biases of q, k and v added? q and k turned, v not? x added after both halves, and the "
                   "second norm of the new x? silu of gate, times up?", first=first)  # fmt: skip


Layer.WAYS = (
    *((say("eps was taken from somewhere else. It is config.rms_norm_eps, here 0.01, for both norms."), {"eps": eps}) for eps in (1e-6, 1e-5, 0.0)),
    *((say("theta was taken from somewhere else. It is config.rope_theta, here 100."), {"theta": theta}) for theta in (1e4, 1e6)),
    (say("The biases of q, k and v are missing."), {"biased": 0}),
)


# ---- the detective


class FirstWrong(Exercise):
    """Where two runs part ways."""

    name, points, minutes, section, stretch = "first_wrong", 2, 12, "L33 8.1-1", True
    defines = ("first_wrong",)
    ours = {"first_wrong": STEPS + "first_wrong"}
    driver = "Detective"
    num_random = 25
    memory_mib = 1536
    hints = (
        say("Go through both traces together. In each pair of tensors: which elements are close? And what does NaN <= atol give?"),
        say("close = (x - y).abs() <= atol is False for NaN, which is what is wanted; the other way round, > atol is False too. A row is right if all its elements are close."),
        say("A tensor may be [rows, columns] or [rows, heads, D]: close.flatten(1).all(-1) says of each row whether it is right. The first that is not: "
            "int((~right).nonzero()[0])."),
    )
    GOOD = [["a", [[1.0, 2.0], [3.0, 4.0]]], ["b", [[5.0], [6.0], [7.0]]]]
    examples = (
        one("first_wrong", GOOD, GOOD, 0.1, why=say("Nothing differs: None.")),
        one("first_wrong", [["a", [[1.0, 2.0], [3.0, 4.5]]]], [["a", [[1.0, 2.0], [3.0, 4.0]]]], 0.1),
        one("first_wrong", [["a", [[1.0, 2.0], [2.0, 4.0]]]], [["a", [[1.0, 2.0], [3.0, 4.0]]]], 0.1, why=say("It is smaller than it should be.")),
        one("first_wrong", [["a", [[1.0, 2.0], [3.0, 4.0]]], ["b", [[5.0], [6.5], [9.0]]]], GOOD, 0.1, why=say("The FIRST row of the first result that differs.")),
        one("first_wrong", [["a", [[1.0, 2.0], [9.0, 4.0]]], ["b", [[9.0], [6.0], [7.0]]]], GOOD, 0.1, why=say("The first result in the order of computation, not the first row.")),
        one("first_wrong", [["a", [[1.0, 2.0], [3.0, 4.0]]], ["b", [[5.0], [6.0], [99.0]]]], GOOD, 0.1),
        one("first_wrong", [["a", [[1.05, 2.0], [3.0, 4.05]]], ["b", [[5.05], [6.0], [7.0]]]], GOOD, 0.1, why=say("All within the tolerance.")),
        one("first_wrong", [["a", [[1.25, 1.75]]]], [["a", [[1.0, 2.0]]]], 0.25, why=say("Exactly the tolerance is still right.")),
        one("first_wrong", [["a", [[1.0, math.nan]]]], [["a", [[1.0, 2.0]]]], 0.1, why=say("NaN is wrong, and no comparison with NaN is True.")),
        one("first_wrong", [["a", [[1.0, 2.0]]]], [["a", [[math.nan, 2.0]]]], 0.1),
        one("first_wrong", [["a", [[1.0, math.inf]]]], [["a", [[1.0, 2.0]]]], 0.1),
        one("first_wrong", [["a", [[100_000.5, 0.0]]]], [["a", [[100_000.0, 0.0]]]], 0.25, why=say("The tolerance is absolute. (allclose and isclose have a relative one "
                                                                                                "besides, if it is not set to 0.)")),
        one("first_wrong", [["a", [[1.0, 2.0], [2.0, 3.0005]]]], [["a", [[1.0, 2.0], [2.0, 3.0]]]], 1e-4, why=say("A small tolerance.")),
        one("first_wrong", [["q", [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 9.0]]]]], [["q", [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]]]], 0.1,
            why=say("q is [rows, heads, D]. What is wrong is in row 1, whatever the head.")),
        one("first_wrong", [["q", [[[1.0], [2.0], [9.0]], [[5.0], [6.0], [7.0]]]]], [["q", [[[1.0], [2.0], [3.0]], [[5.0], [6.0], [7.0]]]]], 0.1,
            why=say("q is [rows, heads, D]: head 2 of row 0.")),
        one("first_wrong", [["norm", [[1.0]]], ["norm", [[3.0]]]], [["norm", [[1.0]]], ["norm", [[3.0]]]], 0.1, why=say("Two results may have one name: go by their order.")),
        one("first_wrong", [["a", [[0.9, 1.1], [1.0, 1.0]]]], [["a", [[1.0, 1.0], [1.0, 1.0]]]], 0.05, why=say("Differences of opposite sign do not cancel.")),
        one("first_wrong", [["a", [[1.0] * 6, [1.0] * 5 + [1.2]]]], [["a", [[1.0] * 6, [1.0] * 6]]], 0.1, why=say("One element of six is enough.")),
    )

    class Oracle:
        """Number by number. Infinity on both sides is nowhere asked for: the two ways to write it disagree there."""

        def first_wrong(self, trace, reference, atol):
            for (name, rows), (_, others) in zip(trace, reference, strict=True):
                for i, (row, other) in enumerate(zip(rows, others, strict=True)):
                    for a, b in zip(flat(row), flat(other), strict=True):
                        if math.isnan(a) or math.isnan(b) or abs(a - b) > atol:
                            return [name, i]
            return None

    def traces(self):
        @st.composite
        def pairs(draw):
            rows, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            number_ = st.sampled_from((0.0, 1.0, 1.0, 1.0, -1.0, math.nan))

            def each():
                return [[f"r{i}", draw(st.lists(st.lists(number_, min_size=columns, max_size=columns), min_size=rows, max_size=rows))]
                        for i in range(2)]  # fmt: skip

            return one("first_wrong", each(), each(), 0.5)

        return pairs()

    def explain(self, op, expected, got):
        if got == "the traces were changed":
            return say("The traces are compared again and again: read them only. (x - y makes a new tensor; x.sub_(y), x -= y and .pop() change what you were given.)")
        if expected is None:
            return say("Nothing differs by more than atol: None.")
        if got is None:
            return say("Something differs here by more than atol (or is NaN), and you found nothing.")
        if not isinstance(got, list) or len(got) != 2 or type(got[1]) is not int:
            return say("Return the name and the row's number, a Python int: int(...).")
        if got[0] != expected[0]:
            return say("The first result that differs, in the order of the trace.")
        return say("The result is right, the row is not: the first row in which any element differs, counted in rows, neither in elements nor in heads.")
