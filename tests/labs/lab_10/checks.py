"""Lab 10, paged attention: its exercises."""

import math

from hypothesis import strategies as st

from kvlab.grade import Approx, AtMost, Exercise, LabInfo, Trace, say

LAB = LabInfo(title=say("Paged attention in Triton"), sections="L33 2.2, 2.3, 8.1-1, 8.1-2, 9.3-2, A.1; PAV 3.2",
              before=("00", "03"))  # fmt: skip
OURS = "kvlab.standin.decode:"
DEFAULTS = {"block_size": 4, "kv_heads": 1, "group": 1, "head_dim": 16, "scores": "random", "values": "positions",
            "spread": False, "dtype": "float32", "tile": 16, "stale": False, "layout": "tokens"}  # fmt: skip


def number(kind, seq, position, head, d):
    """As the driver's: one number of q, K or V."""
    x = (seq * 71 + position * 13 + head * 29 + d * 31 + kind * 57 + 11) * 2654435761 % 4294967296
    return (x // 1024 % 129 - 64) / 32


class Attention:
    """Attention in loops, from the case's description: no pages, no arrays."""

    def __init__(self, case):
        self.case = case = DEFAULTS | case
        self.lens, self.group, self.dim = case["seq_lens"], case["group"], case["head_dim"]

    def launch(self):
        return None

    def refused(self):
        return []

    def attend(self):
        heads = self.group * self.case["kv_heads"]
        programs = self.case["kv_heads"] * len(self.lens)
        return f"{self.case['dtype']} [{len(self.lens)}, {heads}, {self.dim}], by {programs} programs"

    def head(self, seq, head):
        weights, sums = self.weights(seq, head), [0.0] * self.dim
        for position, weight in enumerate(weights):
            for d in range(self.dim):
                sums[d] += weight * self.value(seq, position, head // self.group, d)
        loose = self.case["dtype"] == "float16" or self.case["scores"] not in ("random", "equal")
        return Approx([round(x, 5) for x in sums], rel=0, abs=4e-3 if loose else 5e-5)

    def weights(self, seq, head):
        scores = []
        for position in range(self.lens[seq]):
            dot = sum(self.query(seq, head, d) * self.key(seq, position, head // self.group, d) for d in range(self.dim))
            scores.append(dot / math.sqrt(self.dim))
        exps = [math.exp(score - max(scores)) for score in scores]
        return [x / math.fsum(exps) for x in exps]

    def query(self, seq, head, d):
        if self.case["scores"] == "split":
            return -256.0 if head % 2 else 256.0
        return {"equal": 0.0, "hot": 256.0, "cold": -256.0, "rising": 16.0}.get(self.case["scores"], number(0, seq, 0, head, d))

    def key(self, seq, position, head, d):
        x = number(1, seq, position, head, d)
        if self.case["scores"] == "rising":
            return position / 2
        return 16 * x if self.case["scores"] == "large" else 1 + x / 64 if self.case["scores"] in ("hot", "cold", "split") else x

    def value(self, seq, position, head, d):
        return float(d == position) if self.case["values"] == "positions" else number(2, seq, position, head, d)


class Exact(Attention):
    """In float64: the yardstick."""

    def head(self, seq, head):
        return Approx(super().head(seq, head).value, rel=0, abs=2e-5)


def case(*seq_lens, heads=None, why=None, more=(), **options):
    """A trace: launch, then look at one head after the other. heads: (sequence, head) pairs; all if None."""
    options = {"seq_lens": list(seq_lens), **options}
    num_heads = options.get("kv_heads", 1) * options.get("group", 1)
    looked_at = heads or [(seq, head) for seq in range(len(seq_lens)) for head in range(num_heads)]
    return Trace((options,), (*more, *(("head", *pair) for pair in looked_at)), why)


@st.composite
def random_cases(draw, first=("launch",), packed=False, most=18, layouts=("tokens", "heads")):
    options = {
        "seq_lens": draw(st.lists(st.integers(0, most), min_size=1, max_size=3)),
        "block_size": draw(st.sampled_from((4, 2, 8, 1, 32) if packed else (4, 2, 8, 1))),
        "kv_heads": draw(st.integers(1, 2)),
        "group": draw(st.integers(1, 3)),
        "values": draw(st.sampled_from(("positions", "random"))),
        "scores": draw(st.sampled_from(("random", "equal", "large"))),
        "stale": draw(st.booleans()),
        "layout": draw(st.sampled_from(layouts)),
    }
    return case(*options.pop("seq_lens"), more=(first,) if first else (), **options)


STARTS = {"float32": "", "float16": " in fp16"}
PHRASES = {"equal": "all keys alike", "hot": "all scores near +1000", "cold": "all scores near -1000",
           "large": "large scores", "rising": "each score far above the one before it", "split": "scores near +1000 for even heads, -1000 for odd ones",
           "random": ""}  # fmt: skip


def _n(count, what):
    return f"{count} {what}" + "s" * (count != 1)


def told(options):
    """A case in a line."""
    c = DEFAULTS | options
    lens = ", ".join(map(str, c["seq_lens"]))
    heads = f"{_n(c['kv_heads'] * c['group'], 'query head')} on {_n(c['kv_heads'], 'KV head')}"
    parts = [f"seq_lens [{lens}], block size {c['block_size']}, {heads}, head_dim {c['head_dim']}{STARTS[c['dtype']]}"]
    parts += [PHRASES[c["scores"]]] if PHRASES[c["scores"]] else []
    parts += ["V of position p is 1 at place p, so that the output is the weights"] if c["values"] == "positions" else []
    parts += [f"tile {c['tile']}"] if c["tile"] != 16 else []
    parts += ["blocks 2^30 elements apart"] if c["spread"] else []
    parts += ["nobody's slots hold old numbers, and the table's tail old block ids"] if c["stale"] else []
    parts += [f"stride_slot is head_dim, stride_head {c['block_size'] * c['head_dim']}"] if c["layout"] == "heads" else []
    return "; ".join(parts)


class _Attends(Exercise):
    """What the attention exercises have in common."""

    Oracle = Attention
    num_random = 25
    seconds = 20.0

    def describe_init(self, init):
        return told(init[0])

    def describe(self, op):
        if op[0] == "launch":
            return f"{self.defines[0]}[grid](...)"
        if op[0] == "head":
            return f"sequence {op[1]}, query head {op[2]}:"
        if op[0] == "rows_read":
            return f"rows of {op[1]} (a token, a KV head) that were read:"
        if op[0] == "steps":
            return "loads of K, of all programs together:"
        if op[0] == "refused":
            return "what Triton would refuse in it:"
        return f"{self.defines[0]}(q, keys, values, block_tables, seq_lens)"

    def explain(self, op, expected, got):
        if op[0] == "rows_read":
            return say("Too much is read. K goes through each program twice, once in each pass, and V once, in the second.")
        if op[0] == "refused" and isinstance(got, list) and any(": " not in word for word in got):
            return say("The stand-in lets this pass, Triton's compiler does not: it knows no break, no continue, no return inside "
                       "a loop, and no a < b < c. Let the loop end by its range, and leave out by a mask or tl.where.")
        if op[0] == "refused":
            return say("The stand-in lets this pass, Triton's compiler does not: it compiles a loop once. What a loop changes must "
                       "have its final type and shape before the loop: 0.0, not 0, for a sum; tl.zeros([HEAD_DIM], "
                       "dtype=tl.float32), not 0.0, for the result; a number for each row where there are rows.")  # fmt: skip
        if op[0] == "attend":
            if isinstance(got, str) and got.startswith("a second"):
                return say("The next layer's call would overwrite this one's result: make a new array in each call.")
            return say("The result is a new array like q. The grid is (num_kv_heads, num_seqs): a program for each KV head "
                       "and sequence.")  # fmt: skip
        if isinstance(got, str) and "belongs to nobody" in got:
            return say("Slots that belong to nobody hold NaN here; on a GPU they hold what somebody has left. A weight of 0 "
                       "does not help: 0 * NaN is NaN. So mask the load of V, with other=0.0. And ask whether this slot should "
                       "have been read at all: does the walk follow the table, up to the last token?")  # fmt: skip
        if isinstance(got, str) and got.startswith("NaN"):
            if not any(expected.value):
                return say("A sequence of length 0 has nothing to attend to: its output is zeros. Here 0 was divided by 0, "
                           "or nothing was stored.")  # fmt: skip
            return say("NaN comes from inf - inf (a maximum that is still -inf), from inf / inf (scores of which no maximum was "
                       "subtracted), from 0 / 0 (nothing was added up, or all weights are 0), from a masked load without "
                       "other=0.0, from scores that are NaN because K of a dead slot went into them, or from rows of out "
                       "that nobody stored.")  # fmt: skip
        if isinstance(got, str):
            return say("Return a new float64 array of shape [num_heads, head_dim], and leave the arguments as they are.")
        if not isinstance(got, list) or not hasattr(expected, "value"):
            return None
        want = expected.value
        if len(got) == len(want) and max(abs(g - w) for g, w in zip(got, want, strict=True)) < 4e-3:
            return say("Nearly. Either something is computed in too few digits (convert K, V and q before you multiply), or "
                       "something small is added that does not belong.")  # fmt: skip
        if any(math.isnan(x) for x in got):
            if not any(want):
                return say("A sequence of length 0 has nothing to attend to: its output is zeros.")
            return say("NaN. Slots that belong to nobody hold NaN, and 0 * NaN is NaN: take positions 0 to seq_len - 1 only, "
                       "through the table. Or it was inf / inf or 0 / 0: subtract the largest score before exp.")
        if any(math.isinf(x) for x in got):
            return say("Infinity: exp of a large score. Subtract the largest score first.")
        return self.explain_weights(got, want) if self.are_weights(want) else None

    @staticmethod
    def are_weights(want):
        return min(want) >= 0 and abs(sum(want) - 1) < 1e-3

    @staticmethod
    def explain_weights(got, want):
        total = sum(got)
        length = max(p for p, w in enumerate(want) if w > 0) + 1
        if length > 1 and all(abs(g - total / length) < 1e-3 for g in got[:length]) and abs(got[0] - want[0]) > 1e-3 \
                and max(want) - min(want[:length]) > 1e-3:  # fmt: skip
            return say("Every position got the same weight: the scores did not get through.")
        if min(got) > 1e-3 and min(want) == 0:
            return say("Something is added at every place, where each of your tokens has a 1 at its own: V of slots that belong to "
                       "nobody went in, with a weight.")  # fmt: skip
        if abs(total - 1) > 2e-2:
            missing = [p for p in range(length) if want[p] > 1e-3 and abs(got[p]) < 1e-6]
            if missing and abs(total) > 1e-6:
                return say("Position {p} has no weight. Are all pages walked, the last one too, which may be part full? And "
                           "each token of a page?", p=missing[0])  # fmt: skip
            return say("The weights add up to {total}, not to 1. Divide by their sum; and the sum and the result must always "
                       "be relative to the same maximum: what changes one changes the other.", total=round(total, 3))
        pairs = [(g, w) for g, w in zip(got, want, strict=True) if g > 1e-3 and w > 1e-3]
        logs = [(math.log(g / pairs[0][0]), math.log(w / pairs[0][1])) for g, w in pairs[1:] if w != pairs[0][1]]
        ratios = [a / b for a, b in logs if abs(b) > 0.05]
        if len(ratios) > 1 and max(ratios) - min(ratios) < 0.05 * abs(max(ratios)) and abs(ratios[0] - 1) > 0.02:
            return say("These weights belong to scores that are {factor} times what they should be. Is the scale "
                       "in, once? (In a kernel scale_log2e holds 1 / sqrt(head_dim) and log2(e), because exp2 stands "
                       "for exp.)", factor=round(sum(ratios) / len(ratios), 2))  # fmt: skip
        missing = [p for p in range(length) if want[p] > 1e-2 and abs(got[p]) < 1e-6]
        if missing:
            return say("Position {p} has no weight, although its page is in the block table. Does the walk reach the last "
                       "page, which may be part full? Is the table's row the sequence's own?", p=missing[0])  # fmt: skip
        return say("The weights are not those of softmax(q K^T / sqrt(head_dim)). Is the scale right? Which K was read? Look at the KV head "
                   "(consecutive query heads share one), the sequence's own row of the table, and, with several pages, "
                   "whether ALL that was added up is rescaled when a larger score comes.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "OutOfBounds" and "nothing lies" in message:
            return say("block * stride_block passes 2^31 here, and in 32 bits it wraps. Make the block id 64 bits wide "
                       "before you multiply: .to(tl.int64).")  # fmt: skip
        if error == "OutOfBounds" and "block_tables" in message:
            return say("The walk leaves the block table: it has a page for each started block_size tokens, no more. Mask the "
                       "load of the table, or end the loop in time.")  # fmt: skip
        if error == "OutOfBounds" and (" of q[" in message or " of out[" in message):
            return say("A row of q or out that is not there. Rows are counted as (sequence * heads + head) * HEAD_DIM, and rows "
                       "that only pad a group must be masked.")  # fmt: skip
        if error == "OutOfBounds":
            return say("An address outside the cache. Behind a sequence's last page the table holds -1; a load that is not "
                       "masked there follows it. Else: is each stride with its own index?")  # fmt: skip
        if error == "TypeError" and ("ufunc" in message or "float()" in message):
            return say("NumPy, math and Python's float do not work on what tl.load gives: a kernel computes with tl.")
        if error == "IndexError" and "no axis" in message:
            return say("A number, where a block is wanted. What a loop changes must have its shape before the loop, also if the loop "
                       "makes no round: tl.zeros([ROWS], ...), not 0.0.")  # fmt: skip
        if error == "Race":
            return say("Each program writes rows of its own: sequence and head both count. (And if rows pad a group to 16, they "
                       "are no heads of yours: behind the group lies the next one. Mask the load of q and the store.)")
        if error == "ValueError" and "at least 16" in message:
            return say("tl.dot wants sides of 16 and more: q is [ROWS, HEAD_DIM], K comes transposed as [HEAD_DIM, TILE].")
        if error == "ValueError" and "has changed" in message:
            return say("A kernel of attention writes to out and to nothing else.")
        return None


class Locate(Exercise):
    """Where a token lies, by hand."""

    name, points, minutes, section = "locate", 2, 8, "L33 2.2, A.1"
    defines = ("locate",)
    ours = {"locate": OURS + "locate"}
    driver = "Plain"
    hints = (
        say("Which page of the sequence is it, and which place in that page? One division with remainder gives both."),
        say("block = block_table[page]. Then count elements: a token has num_kv_heads * head_dim of them, a block has "
            "block_size times as many."),
        say("element = block * (block_size * num_kv_heads * head_dim) + offset * (num_kv_heads * head_dim) + kv_head * "
            "head_dim"),
    )  # fmt: skip
    examples = (
        Trace((), (("locate", 0, 0, [0], 4, 1, 1),)),
        Trace((), (("locate", 0, 0, [3], 4, 1, 1),)),
        Trace((), (("locate", 37, 0, [9, 40, 142], 16, 1, 1),), say("This is the textbook's token 37.")),
        Trace((), (("locate", 15, 0, [9, 40], 16, 1, 1),)),
        Trace((), (("locate", 16, 0, [9, 40], 16, 1, 1),)),
        Trace((), (("locate", 5, 1, [7, 2], 4, 3, 10),)),
        Trace((), (("locate", 2, 2, [5, 6, 4], 1, 4, 8),)),
        Trace((), (("locate", 37, 3, [9, 40, 142], 16, 4, 128),)),
    )  # fmt: skip

    class Oracle:
        """Counts elements in the order of the array."""

        def locate(self, position, kv_head, block_table, block_size, num_kv_heads, head_dim):
            page, offset = 0, position
            while offset >= block_size:
                page, offset = page + 1, offset - block_size
            block, before = block_table[page], 0
            for size, index in ((1, block), (block_size, offset), (num_kv_heads, kv_head), (head_dim, 0)):
                before = before * size + index
            return [block, offset, before]

    def traces(self):
        @st.composite
        def one(draw):
            size, heads, table = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.permutations(range(6)))
            position = draw(st.integers(0, 6 * size - 1))
            arguments = position, draw(st.integers(0, heads - 1)), list(table), size, heads, draw(st.integers(1, 9))
            return Trace((), (("locate", *arguments),))

        return one()

    def describe(self, op):
        position, kv_head, table, size, heads, dim = op[1:]
        return (f"locate(position={position}, kv_head={kv_head}, block_table={table}, block_size={size}, "
                f"num_kv_heads={heads}, head_dim={dim})")  # fmt: skip

    def explain(self, op, expected, got):
        if got == "block_table was changed":
            return say("The table belongs to the block manager: read it, and change nothing.")
        if not isinstance(got, list) or len(got) != 3:
            return say("Return three whole numbers: physical block, offset in it, element.")
        if any(type(x) is not int for x in got):
            return say("Whole numbers, please: // divides without a remainder, / does not.")
        if got[0] != expected[0]:
            return say("The physical block is what the table says for the token's page, position // block_size.")
        if got[1] != expected[1]:
            return say("The offset is what is left in the page: position % block_size.")
        return say("Block and offset are right. In keys [num_blocks, block_size, num_kv_heads, head_dim] the last index runs "
                   "fastest: a step of kv_head is head_dim elements, a step of offset num_kv_heads times that, a step of "
                   "block block_size times that again.")  # fmt: skip


STALE = say("Nobody's slots hold what the last owner left, and the table goes on with old block ids. Only seq_len says where "
            "the sequence ends.")  # fmt: skip
RISING = say("The scores of the last page lie more than 128 above those of the first, and 2^128 is infinite in fp32: the weights "
             "must be relative to the largest of all.")  # fmt: skip
STRIDES = say("A block keeps the tokens of one KV head together here, so the strides are others. The kernel is told them: "
              "stride_slot from token to token, stride_head from KV head to KV head.")  # fmt: skip


class Gathered(_Attends):
    """The plain function: gather, then attend."""

    name, points, minutes, section = "attend_gathered", 3, 12, "L33 2.3"
    Oracle = Exact
    defines = ("attend_gathered",)
    ours = {"attend_gathered": OURS + "attend_gathered"}
    driver = "Reference"
    hints = (
        say("Two parts. First collect K and V of positions 0 to seq_len - 1, [seq_len, num_kv_heads, head_dim], through the "
            "table. Then one query head after the other."),
        say("blocks = block_table[positions // block_size]; k = keys[blocks, positions % block_size]. Query head h reads KV "
            "head h // group."),
        say("scores = k[:, h // group] @ q[h] / sqrt(head_dim); weights = exp(scores - scores.max()); out[h] = weights @ "
            "v[:, h // group] / weights.sum(). In float64, and return zeros first if seq_len is 0."),
    )  # fmt: skip
    examples = (
        case(1),
        case(3, scores="equal"),
        case(3),
        case(4),
        case(5),
        case(9, values="random"),
        case(0, 2, why=say("A sequence of length 0 gives zeros.")),
        case(6, 3),
        case(7, group=2, values="random"),
        case(7, kv_heads=2, values="random"),
        case(7, kv_heads=2, group=2),
        case(7, kv_heads=3, group=2, values="random"),
        case(6, scores="large"),
        case(6, scores="hot", why=say("The scores are large: exp of them is infinite.")),
        case(6, scores="cold", why=say("All scores are far below 0: without their maximum subtracted, every exp is 0.")),
        case(6, scores="split", group=2, why=say("Each query head has scores of its own, and a largest one of its own.")),
        case(14, block_size=1),
        case(14, block_size=16, head_dim=32),
        case(9, dtype="float16", kv_heads=2, why=say("The arrays are fp16 here: compute in float64.")),
        case(6, stale=True, why=STALE),
        case(9, 2, 5, stale=True, kv_heads=2, group=2, why=STALE),
    )

    def traces(self):
        return random_cases(first=None, layouts=("tokens",))

    def describe(self, op):
        return f"attend_gathered of sequence {op[1]}, query head {op[2]}:"


LENGTHS = (
    case(1, more=(("launch",),)),
    case(3, more=(("launch",),), scores="equal"),
    case(3, more=(("launch",),)),
    case(4, more=(("launch",),)),
    case(5, more=(("launch",),), scores="equal"),
    case(5, more=(("launch",),)),
    case(9, more=(("launch",),)),
    case(14, more=(("launch",),), values="random"),
    case(3, 6, more=(("launch",),), why=say("Two sequences: each has its own row of the table, of q and of out.")),
    case(9, 2, 5, more=(("launch",),), why=say("The shorter ones' rows of the table end with -1.")),
    case(0, 2, more=(("launch",),), why=say("A sequence of length 0 gives zeros.")),
    case(7, group=2, more=(("launch",),)),
    case(7, kv_heads=2, more=(("launch",),)),
    case(6, 7, kv_heads=2, group=3, more=(("launch",),), values="random",
         why=say("Query heads 0, 1, 2 share KV head 0, and 3, 4, 5 share KV head 1.")),
    case(6, scores="large", more=(("launch",),)),
    case(18, head_dim=32, scores="large", group=3, more=(("launch",),),
         why=say("Scores of different pages lie hundreds apart: there is one maximum, over all pages.")),
    case(9, scores="rising", more=(("launch",),), why=RISING),
    case(6, scores="hot", more=(("launch",),), why=say("The scores are large: exp2 of them is infinite.")),
    case(6, scores="cold", more=(("launch",),), why=say("All scores are far below 0: a maximum that starts at 0 never moves.")),
    case(14, block_size=16, more=(("launch",),)),
    case(30, block_size=16, head_dim=32, values="random", more=(("launch",),)),
    case(5, block_size=1, more=(("launch",),)),
    case(9, spread=True, more=(("launch",),), why=say("The blocks lie far apart, as in a large cache.")),
    case(9, 5, kv_heads=2, group=2, spread=True, more=(("launch",),), values="random"),
    case(9, dtype="float16", kv_heads=2, more=(("launch",),), values="random",
         why=say("K and V are fp16 here. Add up in fp32: .to(tl.float32) after the load.")),
    case(6, stale=True, more=(("launch",),), why=STALE),
    case(9, 2, 5, stale=True, kv_heads=2, group=2, more=(("launch",),), why=STALE),
    case(9, 6, kv_heads=2, group=2, layout="heads", more=(("launch",),), why=STRIDES),
    case(9, 5, kv_heads=3, spread=True, layout="heads", more=(("launch",),), values="random", why=STRIDES),
    case(20, 11, dtype="float16", group=2, head_dim=64, scores="large", more=(("launch",),), values="random",
         why=say("K and V are fp16 here. Add up in fp32: .to(tl.float32) after the load.")),
)  # fmt: skip


COUNTS = (
    case(9, 6, group=2, heads=[(0, 0)], more=(("launch",), ("rows_read", "keys"))),
    case(9, 6, group=2, heads=[(0, 0)], more=(("launch",), ("rows_read", "values"))),
    case(9, 6, group=2, heads=[(0, 0)], more=(("launch",), ("refused",))),
)  # fmt: skip


def reads(times):
    """What a kernel may read: each page of each program's walk, `times` times."""

    class Counted(Attention):
        def rows_read(self, name):
            size, heads = self.case["block_size"], self.case["kv_heads"] * self.group
            return AtMost(times[name] * heads * sum(-(-n // size) * size for n in self.lens))

    return Counted


class Naive(_Attends):
    """Naive: a program for each head, two passes."""

    name, points, minutes, section = "naive_kernel", 5, 20, "L33 2.3"
    defines = ("naive_kernel",)
    ours = {"naive_kernel": OURS + "naive_kernel"}
    driver = "Naive"
    bars = (OURS + "online_softmax_kernel", OURS + "gqa_packed_kernel", "kvlab.standin.faults:faulty")
    Oracle = reads({"keys": 2, "values": 1})
    hints = (
        say("Say in words what one program does: it knows its head and its sequence. It walks the pages twice: for the "
            "largest score, then for weights, their sum, and the weighted sum of V. Address first: a page is a block id, "
            "and `inside` is the same for every page."),
        say("inside = offset[:, None] * stride_slot + head // GROUP * stride_head + d[None, :] is [BLOCK_SIZE, HEAD_DIM]. The "
            "page adds block.to(tl.int64) * stride_block. Tokens behind the end: mask the loads, and set their scores to "
            "-inf with tl.where."),
        say("scores = tl.where(known, tl.sum(k * query[None, :], axis=1), -inf); pass 1: largest = tl.maximum(largest, "
            "tl.max(scores, axis=0)); pass 2: weights = tl.exp2(scores - largest); total += tl.sum(weights, axis=0); result "
            "+= tl.sum(weights[:, None] * v, axis=0). At the end divide by tl.where(seq_len > 0, total, 1.0)."),
    )  # fmt: skip
    examples = (*LENGTHS, *COUNTS)

    def traces(self):
        return random_cases()


class Online(_Attends):
    """Online softmax: one pass."""

    name, points, minutes, section = "online_softmax_kernel", 4, 15, "L33 2.3"
    defines = ("online_softmax_kernel",)
    ours = {"online_softmax_kernel": OURS + "online_softmax_kernel"}
    driver = "Online"
    bars = (OURS + "gqa_packed_kernel", "kvlab.standin.faults:faulty")
    Oracle = reads({"keys": 1, "values": 1})
    hints = (
        say("Keep three things: the largest score so far, the sum of weights relative to it, and the weighted sum of V "
            "relative to it. When a page brings a larger score, what was added up so far is too large by one factor."),
        say("new_largest = tl.maximum(largest, tl.max(scores, axis=0)); alpha = tl.exp2(largest - new_largest). In the first "
            "page largest is -inf and alpha is 0: there is nothing to rescale."),
        say("total = total * alpha + tl.sum(weights, axis=0); result = result * alpha + tl.sum(weights[:, None] * v, axis=0); "
            "largest = new_largest"),
    )  # fmt: skip
    examples = (*LENGTHS, *COUNTS)

    def traces(self):
        return random_cases()

    def explain(self, op, expected, got):
        if op[0] == "rows_read":
            return say("K and V are to be read once by each program. Two passes are what this kernel is to spare.")
        return super().explain(op, expected, got)


class Packed(_Attends):
    """GQA-packed: a program for each KV head, in tiles."""

    name, points, minutes, section = "gqa_packed_kernel", 6, 25, "L33 2.3, 9.3-2"
    defines = ("gqa_packed_kernel",)
    ours = {"gqa_packed_kernel": OURS + "gqa_packed_kernel"}
    driver = "Packed"
    hints = (
        say("Two changes to the online kernel. The query is a matrix of GROUP rows, padded to ROWS, so largest and total are one number "
            "a row. And the loop runs over tiles of tokens, not over pages: each token of the tile looks up its own block."),
        say("token = start + tl.arange(0, TILE); known = token < seq_len; block = tl.load(block_tables + seq * stride_table + "
            "token // BLOCK_SIZE, mask=known, other=0).to(tl.int64). K is loaded transposed: slot[None, :] + d[:, None]."),
        say("scores = tl.dot(query, k) * scale_log2e, [ROWS, TILE]; max and sum go along axis=1; alpha is [ROWS], so result "
            "* alpha[:, None] + tl.dot(weights.to(v.dtype), v). Heads of the group: (seq * tl.num_programs(0) + kv_head) * "
            "GROUP + row, real where row < GROUP; mask load and store of them."),
    )  # fmt: skip
    LAUNCH = (("launch",),)
    examples = (
        *(trace for trace in LENGTHS if not trace.init[0].get("dtype")),
        case(16, block_size=16, more=LAUNCH),
        case(17, 33, block_size=4, head_dim=32, values="random", more=LAUNCH, why=say("More than one tile of 16 tokens.")),
        case(33, block_size=32, head_dim=32, values="random", more=LAUNCH, why=say("A page holds two tiles here.")),
        case(31, block_size=1, head_dim=32, more=LAUNCH),
        case(31, block_size=8, head_dim=32, scores="hot", more=LAUNCH),
        case(31, block_size=8, head_dim=32, scores="cold", more=LAUNCH),
        case(31, head_dim=32, tile=32, more=LAUNCH),
        case(20, head_dim=32, scores="rising", more=LAUNCH, why=RISING),
        case(6, scores="split", group=2, more=LAUNCH, why=say("Each row has scores of its own, and a largest one of its own.")),
        case(31, head_dim=32, tile=32, heads=[(0, 0)], more=(*LAUNCH, ("steps",))),
        case(40, 3, group=7, kv_heads=2, head_dim=64, more=LAUNCH, heads=[(0, 0), (0, 6), (0, 7), (1, 13), (1, 5)]),
        case(5, group=17, kv_heads=2, more=LAUNCH, heads=[(0, 0), (0, 16), (0, 17), (0, 33)],
             why=say("17 heads in a group: ROWS is 32 here.")),
        case(40, group=16, head_dim=64, more=LAUNCH, heads=[(0, 0), (0, 15)]),
        case(20, 5, group=3, kv_heads=2, dtype="float16", head_dim=32, values="random", more=LAUNCH,
             why=say("K and V are fp16. tl.dot wants two operands of one type: weights.to(v.dtype).")),
        case(40, 16, group=3, kv_heads=2, heads=[(0, 0)], more=(*LAUNCH, ("rows_read", "keys"))),
        case(40, 16, group=3, kv_heads=2, heads=[(0, 0)], more=(*LAUNCH, ("rows_read", "values"))),
        case(40, 16, group=3, kv_heads=2, heads=[(0, 0)], more=(*LAUNCH, ("refused",))),
    )  # fmt: skip

    class Oracle(Attention):
        def rows_read(self, name):
            tile = self.case["tile"]
            return AtMost(self.case["kv_heads"] * sum(-(-n // tile) * tile for n in self.lens))

        def steps(self):
            return AtMost(self.case["kv_heads"] * sum(-(-n // self.case["tile"]) for n in self.lens))

    def traces(self):
        return random_cases(packed=True, most=40)

    def explain(self, op, expected, got):
        if op[0] == "rows_read":
            return say("Each row of K and V is to be read once for the whole group, not once for each of its heads.")
        if op[0] == "steps":
            return say("A step takes TILE tokens, whatever the block size: one load of K for all of them.")
        return super().explain(op, expected, got)


class Launch(_Attends):
    """The launch: from arrays to programs."""

    name, points, minutes, section = "paged_attention", 3, 10, "L33 2.3"
    defines = ("paged_attention",)
    ours = {"paged_attention": OURS + "paged_attention"}
    part = {"attention": "paged_attention"}
    bars = (OURS + "launch_packed",)
    driver = "Launch"
    num_random = 15
    hints = (
        say("All that the kernel asks for is in the shapes: q is [num_seqs, num_heads, head_dim], keys is [num_blocks, "
            "block_size, num_kv_heads, head_dim]. Strides count elements, not bytes."),
        say("out = np.empty_like(q); the grid is (num_kv_heads, num_seqs). ROWS is the group, rounded up to a power of two, "
            "and at least 16: max(triton.next_power_of_2(group), 16)."),
        say("stride_table = block_tables.shape[1]; stride_head = head_dim; stride_slot = num_kv_heads * head_dim; stride_block "
            "= block_size * stride_slot; scale_log2e = math.log2(math.e) / math.sqrt(head_dim)."),
    )  # fmt: skip
    ATTEND = (("attend",),)
    examples = (
        case(3, more=ATTEND),
        case(9, 2, 5, more=ATTEND),
        case(7, kv_heads=2, group=3, more=ATTEND, values="random"),
        case(7, 0, kv_heads=3, block_size=8, more=ATTEND),
        case(20, 70, block_size=16, head_dim=128, more=ATTEND),
        case(6, group=17, more=ATTEND, why=say("17 heads in a group: ROWS must hold them all.")),
        case(6, group=28, kv_heads=2, more=ATTEND, heads=[(0, 0), (0, 55)]),
        case(3, group=71, more=ATTEND, heads=[(0, 0), (0, 70)], why=say("71 heads on one KV head, as in Falcon-7B: ROWS must hold them "
             "all.")),
        case(9, 2, 5, stale=True, kv_heads=2, more=ATTEND),
        case(9, dtype="float16", kv_heads=2, group=2, more=ATTEND, values="random"),
        Trace(({"seq_lens": []},), (("attend",),), say("No sequence at all.")),
    )

    def traces(self):
        return random_cases(first=("attend",), packed=True, layouts=("tokens",))


class BytesMoved(Exercise):
    """Bytes that each rung asks for."""

    name, points, minutes, section = "bytes_moved", 3, 10, "L33 2.3, 9.3-2"
    defines = ("bytes_moved",)
    ours = {"bytes_moved": OURS + "bytes_moved"}
    driver = "Plain"
    hints = (
        say("K of one KV head is sum(seq_lens) * head_dim * dtype_bytes. V is as much. How often does each go by?"),
        say("gather moves each byte three times: read from the page, written to the copy, read by attention. The naive kernel "
            "reads K twice and V once, for every QUERY head."),
        say("In units of one KV head's K: gather 3 * 2 * num_kv_heads, naive 3 * num_heads, online 2 * num_heads, packed 2 * "
            "num_kv_heads."),
    )  # fmt: skip
    ROOMS = ([10], 1, 1, 1, 1), ([10], 4, 2, 1, 1), ([3, 4], 7, 1, 16, 2), ([100, 28], 28, 4, 128, 2), ([], 4, 2, 64, 2)
    examples = tuple(
        Trace((), (("bytes_moved", rung, *room),)) for room in ROOMS for rung in ("gather", "naive", "online", "packed")
    )

    class Oracle:
        """Walks through every program of every rung."""

        def bytes_moved(self, rung, seq_lens, num_heads, num_kv_heads, head_dim, dtype_bytes):
            row, moved = head_dim * dtype_bytes, 0
            for length in seq_lens:
                if rung == "gather":
                    for _ in range(num_kv_heads):
                        moved += 2 * length * row  # read the pages, K and V
                        moved += 2 * length * row  # write the copies
                        moved += 2 * length * row  # read them
                for _ in range(num_kv_heads if rung == "packed" else num_heads if rung != "gather" else 0):
                    moved += length * row * (2 if rung == "naive" else 1)
                    moved += length * row
            return moved

    def traces(self):
        lens, size = st.lists(st.integers(0, 50), max_size=4), st.integers(1, 8)
        rungs = st.sampled_from(("gather", "naive", "online", "packed"))
        return st.builds(
            lambda rung, lens, kv, group, dim, b: Trace((), (("bytes_moved", rung, lens, kv * group, kv, dim, b),)),
            rungs, lens, size, size, size, st.sampled_from((1, 2, 4)),
        )  # fmt: skip

    def describe(self, op):
        rung, lens, heads, kv, dim, size = op[1:]
        return (f'bytes_moved("{rung}", seq_lens={lens}, num_heads={heads}, num_kv_heads={kv}, head_dim={dim}, '
                f"dtype_bytes={size})")  # fmt: skip

    def explain(self, op, expected, got):
        rung = op[1]
        if got == "seq_lens was changed":
            return say("The list of lengths is the caller's, who needs it for the next rung: leave it as it is.")
        if not isinstance(got, int) or isinstance(got, bool):
            return say("A whole number of bytes, please.")
        if rung == "gather":
            return say("gather reads every page, writes the copy, and attention reads the copy. It knows KV heads only: PyTorch's "
                       "attention reads each copy once for the whole group, we assume.")  # fmt: skip
        if rung == "packed":
            return say("One program for each KV head reads K once and V once.")
        return say("One program for each QUERY head, and each reads for itself: K {passes}, V once.",
                   passes="twice" if rung == "naive" else "once")  # fmt: skip


class CaseFor(Exercise):
    """Catch the fault."""

    name, points, minutes, section, stretch = "case_for", 4, 25, "L33 2.3", True
    defines = ("case_for",)
    ours = {"case_for": "kvlab.standin.faults:case_for"}
    driver = "Catch"
    seconds = 10.0
    hints = (
        say("For each fault ask: in which case is the changed line's result another one? Then: can that reach the output?"),
        say('"late" and "value" need a page that is not full. "lost" needs a later page with a larger score. "zero" needs all '
            'scores far below 0. "group" needs two KV heads and a group of two. "narrow" needs blocks far apart.'),
        say("One fault cannot be caught: what the changed line reads is thrown away by the next line. Return None for it."),
    )  # fmt: skip
    FAULTS = ("short", "late", "lost", "zero", "group", "narrow", "value", "key")
    examples = tuple(Trace((), (("catch", fault),)) for fault in FAULTS)

    class Oracle:
        """Which faults can be noticed at all."""

        def catch(self, fault):
            return "no case can" if fault == "key" else "caught"

    def describe(self, op):
        return f'the kernel with the fault "{op[1]}", on case_for("{op[1]}"):'

    def explain(self, op, expected, got):
        if got == "slips through":
            return say("On this case the faulty kernel gives what the right one gives. When does the changed line matter?")
        if got == "no case can":
            return say("There is a case that shows this fault.")
        if expected == "no case can" and isinstance(got, str):
            return say("No case can show this one. What becomes of the numbers that are read too much? If nothing, return None.")
        return say("A case is a dict with seq_lens, and any of block_size, kv_heads, group, head_dim, scores, values, spread, "
                   "nan.")  # fmt: skip
