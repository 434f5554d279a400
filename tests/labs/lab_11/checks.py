"""Lab 11, split-KV, mixed batches and INT8: its exercises."""

import math
import re
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvlab.grade import Approx, AtMost, Exercise, LabInfo, Trace, calls, say

LAB = LabInfo(title=say("Split-KV, mixed batches, INT8"), sections="L33 2.3, 4.2-4.4, 8.1-1, A.1; PAV 3.1",
              before=("08", "10"))  # fmt: skip
OURS = "kvlab.standin.mixed:"
DEFAULTS = {"block_size": 4, "kv_heads": 1, "group": 1, "head_dim": 16, "values": "positions", "scores": "random",
            "spread": False, "tile": 16, "splits": 2, "split_tokens": 16, "query_lens": None, "block_q": 4,
            "padding": 0, "fewer": 0, "start": 0}  # fmt: skip


def number(kind, seq, position, head, d):
    """As the driver's: one number of q, K or V."""
    x = (seq * 71 + position * 13 + head * 29 + d * 31 + kind * 57 + 11) * 2654435761 % 4294967296
    return (x // 1024 % 129 - 64) / 32


class Attention:
    """Attention in loops, from the case's description: no pages, no arrays, no tiles."""

    int8 = False

    def __init__(self, case):
        self.case = case = DEFAULTS | case
        self.lens, self.group, self.dim = case["seq_lens"], case["group"], case["head_dim"]
        self.rows = case["query_lens"] or [1] * len(self.lens)

    def launch(self):
        return None

    def scores(self, seq, i, head, tokens):
        q = [self.query(seq, i, head, d) for d in range(self.dim)]
        for position in tokens:
            k = self.stored([self.key(seq, position, head // self.group, d) for d in range(self.dim)])
            yield sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(self.dim)

    def attention(self, seq, i, head, tokens):
        """(result, log2 of the sum of exp of the scores) of one row over these tokens."""
        tokens = list(tokens)
        scores = list(self.scores(seq, i, head, tokens))
        if not scores:
            return [0.0] * self.dim, -math.inf
        top = max(scores)
        weights = [math.exp(score - top) for score in scores]
        total, sums = math.fsum(weights), [0.0] * self.dim
        for position, weight in zip(tokens, weights, strict=True):
            v = self.stored([self.value(seq, position, head // self.group, d) for d in range(self.dim)])
            sums = [a + weight / total * b for a, b in zip(sums, v, strict=True)]
        return sums, (top + math.log(total)) / math.log(2)

    def close(self, row):
        return Approx([round(x, 5) for x in row], rel=0, abs=4e-3 if self.case["scores"] not in ("random", "equal") else 3e-4)

    def stored(self, row):
        if not self.int8 or not any(row):
            return row
        scale = max(map(abs, row)) / 127
        return [round(x / scale) * scale for x in row]

    def query(self, seq, position, head, d):
        return {"equal": 0.0, "hot": 256.0, "cold": -256.0}.get(self.case["scores"], number(0, seq, position, head, d))

    def key(self, seq, position, head, d):
        x = number(1, seq, position, head, d)
        return 16 * x if self.case["scores"] == "large" else 1 + x / 64 if self.case["scores"] in ("hot", "cold") else x

    def value(self, seq, position, head, d):
        return float(d == position) if self.case["values"] == "positions" else number(2, seq, position, head, d)

    def head(self, seq, head):
        return self.close(self.attention(seq, 0, head, range(self.lens[seq]))[0])


PHRASES = {"equal": "all keys alike", "hot": "all scores near +1000", "cold": "all scores near -1000",
           "large": "large scores", "random": ""}  # fmt: skip


def _n(count, what):
    return f"{count} {what}" + "s" * (count != 1)


def told(options):
    """A case in a line."""
    c = DEFAULTS | options
    parts = [f"seq_lens {c['seq_lens']}"]
    parts += [f"query rows {c['query_lens']}, BLOCK_Q {c['block_q']}"] if c["query_lens"] else []
    parts += [f"block size {c['block_size']}, {_n(c['kv_heads'] * c['group'], 'query head')} on {_n(c['kv_heads'], 'KV head')}"]
    parts += [f"head_dim {c['head_dim']}"]
    parts += [PHRASES[c["scores"]]] if PHRASES[c["scores"]] else []
    parts += ["V of position p is 1 at place p, so that a result is the weights"] if c["values"] == "positions" else []
    parts += [f"tile {c['tile']}"] if c["tile"] != 16 else []
    parts += ["blocks 2^30 elements apart"] if c["spread"] else []
    parts += [f"{_n(c['padding'], 'row')} of padding behind"] if c["padding"] else []
    parts += [f"limit falls by {c['fewer']} from one head of a group to the next"] if c["fewer"] else []
    parts += [f"walk from token {c['start']}"] if c["start"] else []
    return "; ".join(parts)


class _Attends(Exercise):
    """What the attention exercises have in common."""

    num_random = 20
    seconds = 20.0

    def describe_init(self, init):
        return told(init[0])

    def describe(self, op):
        if op[0] == "launch":
            return f"{self.defines[0]}[grid](...)"
        if op[0] == "rows_read":
            return f"rows of {op[1]} (a token, a KV head) that were read:"
        if op[0] == "head":
            return f"sequence {op[1]}, query head {op[2]}:"
        return f"{op[0]} of {', '.join(map(str, op[1:]))}"

    def explain(self, op, expected, got):
        if got == "infinite":
            return say("Infinity: something was divided by 0, or 2 was raised to a large score. Weights are relative to the "
                       "largest score.")  # fmt: skip
        if got == "NaN":
            return say("NaN. Either nobody stored this row, or the table led to a slot that belongs to nobody, or -inf was "
                       "taken from -inf, or 0 was divided by 0.")  # fmt: skip
        if isinstance(got, list) and hasattr(expected, "value") and not any(expected.value):
            return say("A row that sees no token at all gets zeros.")
        if isinstance(got, list) and hasattr(expected, "value") and self.case_is_weights(expected.value):
            want, total = expected.value, sum(got)
            if abs(total - 1) > 2e-2:
                return say("The weights add up to {total}, not to 1: divide by their sum.", total=round(total, 3))
            extra = [p for p, w in enumerate(want) if w == 0 and abs(got[p]) > 1e-4]
            if extra:
                return say("Position {p} has a weight, and this row does not see it.", p=extra[0])
            missing = [p for p, w in enumerate(want) if w > 1e-3 and abs(got[p]) < 1e-6]
            if missing:
                return say("Position {p} has no weight, and this row sees it.", p=missing[0])
        return self.otherwise(op)

    def otherwise(self, op):
        return say("These are not the numbers of softmax(q K^T / sqrt(head_dim)) V over the row's own tokens. Is it the right "
                   "row of q, the right KV head (GROUP consecutive query heads share one), the sequence's own table?")  # fmt: skip

    @staticmethod
    def case_is_weights(want):
        return min(want) >= 0 and abs(sum(want) - 1) < 1e-3

    def explain_error(self, op, expected, error, message):
        if error == "OutOfBounds" and "nothing lies" in message:
            return say("An offset passed 2^31 in 32 bits, and wrapped. `sweep` makes the block id 64 bits wide; do the same.")
        if error == "OutOfBounds" and "block_tables" in message:
            return say("The walk leaves the block table. Does it end at the last token that the sequence has? Does it read the sequence's "
                       "own row of the table, stride_table numbers behind the row before?")  # fmt: skip
        if error == "OutOfBounds" and re.search(r"load of (keys|values)\[-", message):
            return say("A block of number -1: such numbers fill the table behind a sequence's last page. Is it the right sequence's row of the "
                       "table, and does the walk end at its last token?")  # fmt: skip
        if error == "OutOfBounds":
            return say("An address outside the argument. Count its strides: which index runs fastest, and which rows are nobody's?")
        if error == "Race":
            return say("Two programs write the same place. Each has rows of its own. Are the strides the array's: which index runs "
                       "fastest, and how many are there of it? And rows that only pad ROWS, or lie behind the chunk's last one, are "
                       "somebody else's: mask the store.")  # fmt: skip
        if error == "ValueError" and "has changed" in message:
            return say("Only what the kernel is to write may change.")
        return None


# ---- 1


class ChooseNumSplits(Exercise):
    """How many splits."""

    name, points, minutes, section = "choose_num_splits", 3, 10, "L33 2.3"
    defines = ("choose_num_splits",)
    ours = {"choose_num_splits": OURS + "choose_num_splits"}
    hints = (
        say("Start with one split, and double while more are wanted and more are allowed."),
        say("Wanted: num_seqs * num_kv_heads * splits < 2 * sms. Allowed: twice as many splits are at most 64, and would still "
            "have 256 tokens each, max_seq_len >= 256 * (2 * splits)."),
        say("while splits < 64 and num_seqs * num_kv_heads * splits < 2 * sms and max_seq_len >= 512 * splits: splits *= 2"),
    )  # fmt: skip
    examples = tuple(Trace((), (("choose_num_splits", *room),)) for room in (
        (1, 4, 8192, 132), (1, 4, 100, 132), (1, 4, 511, 132), (1, 4, 512, 132), (1, 4, 1023, 132), (1, 4, 1024, 132),
        (1, 4, 1_000_000, 132), (1, 1, 10_000_000, 132), (66, 4, 8192, 132), (65, 4, 8192, 132), (33, 4, 8192, 132),
        (256, 4, 8192, 132), (8, 8, 8192, 108), (1, 8, 20_000, 108), (1, 1, 16_384, 16), (1, 1, 16_383, 32),
        (1, 1, 16_384, 33), (3, 1, 100_000, 24), (100, 8, 0, 132),
    ))  # fmt: skip

    class Oracle:
        """Looks through all numbers that are allowed."""

        def choose_num_splits(self, num_seqs, num_kv_heads, max_seq_len, sms):
            allowed = [s for s in (1, 2, 4, 8, 16, 32, 64) if s == 1 or max_seq_len / s >= 256]
            enough = [s for s in allowed if s * num_seqs * num_kv_heads >= 2 * sms]
            return (enough or allowed[-1:])[0]

    def traces(self):
        return calls("choose_num_splits", st.integers(1, 80), st.sampled_from((1, 2, 4, 8)),
                     st.integers(0, 40_000), st.sampled_from((16, 58, 108, 132)))  # fmt: skip

    def describe(self, op):
        return "choose_num_splits(num_seqs={}, num_kv_heads={}, max_seq_len={}, sms={})".format(*op[1:])

    def explain(self, op, expected, got):
        seqs, heads, longest, sms = op[1:]
        if type(got) is not int or got not in (1, 2, 4, 8, 16, 32, 64):
            return say("A power of two, please, a whole number from 1 to 64.")
        if got > 1 and longest < 256 * got:
            return say("{got} splits of {longest} tokens: some would have fewer than 256, and are not worth their start.",
                       got=got, longest=longest)  # fmt: skip
        if got < expected:
            return say("{programs} programs for {sms} multiprocessors, and more splits were allowed. Two for each are wanted.",
                       programs=seqs * heads * got, sms=sms)  # fmt: skip
        return say("Half as many splits were enough: {programs} programs for {sms} multiprocessors.",
                   programs=seqs * heads * got // 2, sms=sms)  # fmt: skip


# ---- 2


class Merge(Exercise):
    """Merge partial results by log-sum-exp."""

    name, points, minutes, section = "merge", 3, 15, "L33 2.3"
    defines = ("merge",)
    ours = {"merge": OURS + "merge"}
    driver = "Merge"
    hints = (
        say("A split's result is a mean, and 2^lse is the sum of the weights behind it. So the merged result is the mean of "
            "the results, weighted with 2^lse."),
        say("2^lse may be infinite: subtract the largest lse first. And an empty split's row is garbage, perhaps NaN, so that a "
            "weight of 0 does not help: leave it out, partial[lse > -np.inf]."),
        say("live = lse > -np.inf; if none: zeros and -np.inf. Else top = lse[live].max(); w = np.exp2(lse[live] - top); result = "
            "w @ partial[live] / w.sum(); lse = top + np.log2(w.sum())"),
    )  # fmt: skip
    ROW = [1.0, -2.0, 4.0]
    examples = (
        Trace((), (("merge", [[3.0, ROW]]),), say("One split: its result and its lse come out as they are.")),
        Trace((), (("merge", [[0.0, [1.0, 0.0]], [0.0, [0.0, 1.0]]]),), say("Equal lse: the mean.")),
        Trace((), (("merge", [[1.0, [1.0, 0.0]], [0.0, [0.0, 1.0]]]),), say("An lse that is 1 larger: twice the weight.")),
        Trace((), (("merge", [[2.0, ROW], [-1.0, [0.5, 0.5, 0.5]], [4.0, [8.0, 0.0, -1.0]]]),)),
        Trace((), (("merge", [[2.0, ROW], [None, ROW]]),), say("The second split is empty; its row holds NaN. Elsewhere garbage is infinite, or 1000.")),
        Trace((), (("merge", [[None, ROW], [-3.0, ROW]]),)),
        Trace((), (("merge", [[None, ROW], [None, ROW]]),), say("Nothing but empty splits.")),
        Trace((), (("merge", [[1500.0, [1.0, 0.0]], [1501.0, [0.0, 1.0]]]),), say("2^1500 is infinite.")),
        Trace((), (("merge", [[-1500.0, [1.0, 0.0]], [-1501.0, [0.0, 1.0]]]),), say("2^-1500 is 0.")),
        Trace((), (("merge", [[1500.0, [1.0, 2.0]], [-1500.0, [0.0, 1.0]], [None, [0.0, 0.0]]]),)),
        Trace((), (("merge", [[0.0, [1.0]], [-12.0, [4096.0]]]),), say("A split of little weight counts too: 4096 times 2^-12 is 1.")),
        Trace((), (("merge_in_two", [[0.0, [1.0, 0.0]], [0.0, [0.0, 1.0]], [0.0, [0.0, 0.0]]], 2),),
              say("Two of three are merged, and then the third. Their lse says how much two weigh.")),
        Trace((), (("merge_in_two", [[None, ROW], [None, ROW], [2.0, ROW]], 2),)),
        Trace((), (("merge_in_two", [[5.0, ROW], [7.0, [1.0, 1.0, 1.0]], [-2.0, ROW], [6.5, [0.0, 1.0, 9.0]]], 1),)),
    )  # fmt: skip

    class Oracle:
        """Whole sums, in another base."""

        def merge(self, parts):
            live = [(lse * math.log(2), row) for lse, row in parts if lse is not None]
            if not live:
                return [[0.0] * len(parts[0][1]), "-inf"]
            middle = sum(lse for lse, _ in live) / len(live)
            if max(lse for lse, _ in live) - middle > 600:  # not to be had all at once
                middle = max(lse for lse, _ in live)
            weights = [math.exp(lse - middle) for lse, _ in live]
            whole = math.fsum(weights)
            row = [math.fsum(w * row[d] for w, (_, row) in zip(weights, live, strict=True)) / whole
                   for d in range(len(parts[0][1]))]  # fmt: skip
            return Approx([row, (middle + math.log(whole)) / math.log(2)], rel=1e-5, abs=1e-4)

        def merge_in_two(self, parts, first):
            return self.merge(parts)

    def traces(self):
        @st.composite
        def one(draw):
            dim, n = draw(st.integers(1, 3)), draw(st.integers(1, 6))
            value = st.integers(-16, 16).map(lambda x: x / 4)
            lse = st.one_of(value, st.none(), st.sampled_from((-1000.0, 1000.0)))
            parts = [[draw(lse), [draw(value) for _ in range(dim)]] for _ in range(n)]
            if n > 1 and draw(st.booleans()):
                return Trace((), (("merge_in_two", parts, draw(st.integers(1, n - 1))),))
            return Trace((), (("merge", parts),))

        return one()

    def describe(self, op):
        lses = ", ".join("-inf" if lse is None else f"{lse:g}" for lse, _ in op[1])
        rows = ", ".join("[garbage]" if lse is None else str(row) for lse, row in op[1])
        how = "merge" if op[0] == "merge" else f"merge of the first {op[2]}, of the others, and of these two:"
        return f"{how} partial=[{rows}], lse=[{lses}]"

    def explain(self, op, expected, got):
        if not isinstance(got, list):
            return say("Return (result, lse): a new array like a row of partial, and one number. The arguments stay as they are.")
        if got[0] == "NaN" or got[1] == "NaN":
            return say("NaN. An empty split's row is garbage, and 0 * NaN is NaN. If all are empty, -inf - -inf is NaN as well. "
                       "And inf / inf: subtract the largest lse first.")  # fmt: skip
        if got[0] == "infinite" or got[1] == "inf":
            return say("Infinity: 2^lse of a large lse, or something divided by 0. Subtract the largest lse first.")
        want = expected.value if hasattr(expected, "value") else expected
        live = [lse for lse, _ in op[1] if lse is not None]
        if not live:
            return say("Nothing but empty splits: the result is zeros, whatever their rows hold, and the lse is -inf, the log2 of 0.")
        if got[1] == "-inf":
            return say("A split after an empty one may have tokens: leave out the empty one, and go on.")
        if Approx(want[0], rel=1e-2, abs=1e-3).accepts(got[0]) and Approx(want[1], rel=1e-5, abs=1e-4).accepts(got[1]):
            return say("Nearly right, but digits were lost. Does a split of little weight count? And partial is fp32: compute in it, or in more.")
        if Approx(want[0], rel=1e-4, abs=1e-3).accepts(got[0]):
            return say("The result is right, its lse is not. The merged lse is the log2 of the sum of all 2^lse: with it, "
                       "merged results can be merged again.")  # fmt: skip
        if len(live) < len(op[1]):
            return say("An empty split is known by its lse of -inf, not by its row: garbage may be NaN, infinite, or look like good "
                       "numbers. Such a row must not count.")  # fmt: skip
        if op[0] == "merge_in_two":
            return say("Merged in two goes, it must give the same. Is the lse that you return the log2 of the sum of all 2^lse?")
        return say("Each result is a mean over its split. The merged mean weights it with 2^lse, and divides by the sum of these.")


# ---- 3


def split_case(*seq_lens, asks=None, why=None, **options):
    """A trace: launch, then every part of every head, or those in `asks`: (sequence, head) pairs."""
    options = {"seq_lens": list(seq_lens), **options}
    c = DEFAULTS | options
    pairs = asks or [(s, h) for s in range(len(seq_lens)) for h in range(c["kv_heads"] * c["group"])]
    ops = [("launch",)]
    for s, h in pairs:
        for split in range(c["splits"]):
            ops.append(("lse", s, h, split))
            if split * c["split_tokens"] < seq_lens[s]:
                ops.append(("part", s, h, split))
    return Trace((options,), tuple(ops), why)


class Split(_Attends):
    """Split-KV: a program for a part of a sequence."""

    name, points, minutes, section = "split_kernel", 5, 20, "L33 2.3"
    defines = ("split_kernel",)
    ours = {"split_kernel": OURS + "split_kernel"}
    driver = "Split"
    hints = (
        say("Lab 10's packed kernel, with three changes: where the walk starts and ends, where the results go, and what is "
            "stored with them. `sweep` does the walk."),
        say("start = split * split_tokens; end = tl.minimum(start + split_tokens, seq_len). Every row sees all tokens before end: "
            "limit is a block of ROWS times end. A place in lse is (head of all * num_splits + split), one in partial that times "
            "HEAD_DIM."),
        say("tl.store(lse + to, largest + tl.log2(total), mask=row < GROUP) and tl.store(partial + to[:, None] * HEAD_DIM + d[None, :], "
            "result / total[:, None], mask=...). Of an empty split largest is -inf and total 0, so the same line stores -inf."),
    )  # fmt: skip
    examples = (
        split_case(10, splits=1),
        split_case(10, splits=1, scores="equal"),
        split_case(16, splits=2, split_tokens=8),
        split_case(14, splits=2, split_tokens=8, why=say("The last split has fewer tokens.")),
        split_case(14, splits=4, split_tokens=4, why=say("A split of 4 tokens in a tile of 16: the others are not its own.")),
        split_case(7, splits=2, split_tokens=8, why=say("The second split is empty: its lse is -inf.")),
        split_case(8, splits=2, split_tokens=8),
        split_case(9, splits=2, split_tokens=8),
        split_case(5, splits=4, split_tokens=8, why=say("Three of the four splits begin behind the end.")),
        split_case(0, 3, splits=2, split_tokens=8),
        split_case(13, 6, splits=2, split_tokens=8, values="random"),
        split_case(12, splits=3, split_tokens=4, group=3),
        split_case(12, splits=3, split_tokens=4, kv_heads=2),
        split_case(12, 9, splits=3, split_tokens=4, kv_heads=2, group=3, values="random"),
        split_case(40, splits=2, split_tokens=32, values="random", block_size=8, why=say("Two tiles in a split.")),
        split_case(70, splits=2, split_tokens=48, values="random", block_size=16, head_dim=32, scores="large"),
        split_case(14, splits=2, split_tokens=8, scores="hot", why=say("The scores are near +1000.")),
        split_case(14, splits=2, split_tokens=8, scores="cold", why=say("The scores are near -1000.")),
        split_case(12, splits=2, split_tokens=8, block_size=1),
        split_case(40, splits=3, split_tokens=16, tile=32, values="random"),
        split_case(9, splits=2, split_tokens=4, spread=True),
        split_case(9, 14, kv_heads=2, group=7, splits=2, split_tokens=8, head_dim=32, values="random",
                   asks=[(0, 0), (0, 6), (0, 7), (1, 13)]),
        Trace(({"seq_lens": [40, 12], "splits": 3, "group": 3, "values": "random"},), (("launch",), ("rows_read", "keys")),
              say("All splits together read K once.")),
    )  # fmt: skip

    class Oracle(Attention):
        def _tokens(self, seq, split):
            size = self.case["split_tokens"]
            return range(min(split * size, self.lens[seq]), min(split * size + size, self.lens[seq]))

        def lse(self, seq, head, split):
            lse = self.attention(seq, 0, head, self._tokens(seq, split))[1]
            return "-inf" if math.isinf(lse) else Approx(lse, rel=1e-5, abs=1e-3)

        def part(self, seq, head, split):
            return self.close(self.attention(seq, 0, head, self._tokens(seq, split))[0])

        def rows_read(self, name):
            tile, size = self.case["tile"], self.case["split_tokens"]
            whole = -(-size // tile) * tile
            return AtMost(self.case["kv_heads"] * sum(-(-n // size) * whole for n in self.lens))

    def traces(self):
        @st.composite
        def one(draw):
            lens = draw(st.lists(st.integers(0, 30), min_size=1, max_size=2))
            return split_case(*lens, splits=draw(st.integers(1, 3)), split_tokens=draw(st.sampled_from((4, 8, 16, 32))),
                              block_size=draw(st.sampled_from((1, 2, 4, 8, 32))), kv_heads=draw(st.integers(1, 2)),
                              group=draw(st.integers(1, 3)), values="random")  # fmt: skip

        return one().filter(lambda t: max(t.init[0]["seq_lens"]) <= t.init[0]["splits"] * t.init[0]["split_tokens"])

    def describe_init(self, init):
        c = DEFAULTS | init[0]
        return told(init[0]) + f"; {_n(c['splits'], 'split')} of {c['split_tokens']} tokens"

    def describe(self, op):
        if op[0] in ("lse", "part"):
            return f"sequence {op[1]}, query head {op[2]}, split {op[3]}: {'its lse' if op[0] == 'lse' else 'its result'}"
        return super().describe(op)

    def explain(self, op, expected, got):
        if op[0] == "rows_read":
            return say("Too much is read: a split's walk goes from its start to its end, and no further.")
        if op[0] == "lse" and expected == "-inf" and got == "NaN":
            return say("An empty split stores lse = -inf, for every head: what an earlier step left there (NaN here) must not count.")
        if op[0] == "lse" and expected == "-inf":
            return say("This split has no token, so its lse is -inf. If it is another split's that lies here, count the places again: "
                       "(sequence, head of all, split), and the last index runs fastest.")  # fmt: skip
        if op[0] == "lse" and got == "-inf":
            return say("This split has tokens, and its lse says that it has none.")
        if op[0] == "lse" and got == "NaN":
            return say("Nobody stored this lse, or it is NaN. Its place is (sequence, head of all, split), and the last index runs "
                       "fastest. A limit counts from the sequence's first token, not from the split's: a row that sees nothing gives NaN.")  # fmt: skip
        if op[0] == "lse":
            return say("lse is the log2 of the sum of 2^score over this split's own tokens: largest + log2(total). Which tokens, which "
                       "query head, which place? And sweep scales the scores by the scale_log2e that it is given.")  # fmt: skip
        return super().explain(op, expected, got)


# ---- 4


def find_case(starts, block_q, padding=0, why=None, counted=False, asks=None):
    programs = (starts[-1] + padding) // block_q + len(starts) - 1
    ops = (("most_loads",),) if counted else tuple(("sequence_of", block) for block in asks or range(programs))
    return Trace((list(starts), block_q, programs, *([list(asks)] if asks else [])), ops, why)


class FindSequence(Exercise):
    """Whose query block is it."""

    name, points, minutes, section = "find_sequence", 3, 12, "L33 4.3"
    defines = ("find_sequence",)
    ours = {"find_sequence": OURS + "find_sequence"}
    driver = "Find"
    seconds = 10.0
    hints = (
        say("Sequence i's blocks begin at query_start_loc[i] // BLOCK_Q + i. This rises with i. You look for the last i that "
            "begins at or before `block`."),
        say("Binary search: keep low and high so that every sequence before low begins at or before block, and none from high on. "
            "Look at the one in the middle: tl.load(query_start_loc + middle)."),
        say("low, high = 0, num_seqs; while low < high: middle = (low + high) // 2; if tl.load(query_start_loc + middle) // "
            "BLOCK_Q + middle <= block: low = middle + 1, else: high = middle. Return low - 1."),
    )  # fmt: skip
    examples = (
        find_case([0, 1], 4),
        find_case([0, 1, 6, 7], 2, why=say("This is the example above.")),
        find_case([0, 5], 2),
        find_case([0, 4, 8], 4),
        find_case([0, 1, 2, 3], 4, why=say("Three decodes: one block each.")),
        find_case([0, 0, 3], 2, why=say("The first sequence has no row in this step.")),
        find_case([0, 7, 7, 9], 4),
        find_case([0, 3], 2, padding=9, why=say("Rows of padding behind: more programs than there are blocks, as in a CUDA graph.")),
        find_case([0, 1, 2], 2, padding=6),
        find_case([*range(31), 60], 4),
        find_case(list(range(301)), 4, asks=(0, 1, 200, 255, 374), why=say("300 sequences.")),
        find_case(list(range(65)), 4, counted=True, asks=(0, 1, 30, 41, 63, 78, 79), why=say("64 sequences: 6 or 7 looks are enough.")),
        find_case(list(range(301)), 4, counted=True, asks=(0, 1, 150, 200, 373, 374), why=say("300 sequences: 9 looks are enough.")),
    )  # fmt: skip

    class Oracle:
        """Goes through the sequences one by one."""

        def __init__(self, starts, block_q, programs, asked=None):
            self.begins = [start // block_q + i for i, start in enumerate(starts[:-1])]

        def sequence_of(self, block):
            return sum(begin <= block for begin in self.begins) - 1

        def most_loads(self):
            return AtMost(len(self.begins).bit_length() + 1)

    def traces(self):
        @st.composite
        def one(draw):
            rows, starts = draw(st.lists(st.sampled_from((1, 1, 0, 3, 8)), min_size=1, max_size=9)), [0]
            for n in rows:
                starts.append(starts[-1] + n)
            return find_case(starts, draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((0, 0, 5))))

        return one().filter(lambda trace: trace.init[2] > 0)

    def describe_init(self, init):
        starts = str(init[0]) if len(init[0]) < 40 else f"[0, 1, 2, 3, ..., {init[0][-1]}], one row a sequence"
        return f"query_start_loc {starts}, BLOCK_Q {init[1]}, {_n(init[2], 'program')}"

    def describe(self, op):
        return f"find_sequence for block {op[1]}" if op[0] == "sequence_of" else "the most loads that one program made:"

    def explain(self, op, expected, got):
        if op[0] == "most_loads":
            return say("A program looked {got} times. What it looks for is in order, so each look can halve what is left.", got=got)
        if isinstance(got, int) and got > expected:
            return say("Sequence {got} begins behind this block. The last that begins at or before it is wanted, and it is one "
                       "of num_seqs; query_start_loc has one number more.", got=got)  # fmt: skip
        return say("A later sequence begins at or before this block. Sequence i begins at query_start_loc[i] // BLOCK_Q + i.")

    def explain_error(self, op, expected, error, message):
        if error == "OutOfBounds":
            return say("The search looked outside query_start_loc. low and high stay between 0 and num_seqs.")
        if error == "TypeError":
            return say("A kernel computes with numbers, one at a time here: tl.load(query_start_loc + middle).")
        return None


# ---- 5


def mixed(*pairs, asks=None, why=None, more=(), **options):
    """A trace of (rows of q, length) pairs: launch, then every row of every head, or those in `asks`."""
    options = {"seq_lens": [n for _, n in pairs], "query_lens": [r for r, _ in pairs], "values": "random", **options}
    heads = options.get("kv_heads", 1) * options.get("group", 1)
    rows = asks or [(s, i, h) for s, (r, _) in enumerate(pairs) for i in range(r) for h in range(heads)]
    return Trace((options,), (("launch",), *(("row", *row) for row in rows), *more), why)


class Varlen(_Attends):
    """Varlen: chunks and decodes in one launch."""

    name, points, minutes, section = "varlen_kernel", 5, 25, "L33 4.2-4.4"
    defines = ("varlen_kernel",)
    ours = {"varlen_kernel": OURS + "varlen_kernel"}
    driver = "Varlen"
    hints = (
        say("First find out who you are: the sequence, how many rows it has in this step, and the first position of your block "
            "in its chunk. If that is behind the chunk, return."),
        say("begin = query_start_loc[seq]; query_len = query_start_loc[seq + 1] - begin; first = (block - begin // BLOCK_Q - seq) "
            "* BLOCK_Q. Row r is position first + r // GROUP and head r % GROUP of the group. It sees the tokens before context + "
            "position + 1, with context = seq_len - query_len."),
        say("A row is real if row < BLOCK_Q * GROUP and its position < query_len. at = ((begin + position) * num_kv_heads + kv_head) * GROUP + "
            "row % GROUP, and axis 1 of the grid is num_kv_heads. The walk ends at tl.minimum(context + first + BLOCK_Q, seq_len). "
            "Divide, store with the mask."),
    )  # fmt: skip
    examples = (
        mixed((1, 5), values="positions", why=say("A decode: one row, which sees all five tokens.")),
        mixed((3, 3), values="positions", why=say("A prompt from its start: row 0 sees one token, row 1 two.")),
        mixed((2, 6), values="positions", why=say("A later chunk: four tokens were computed before. That is the context.")),
        mixed((4, 4), values="positions"),
        mixed((5, 5), values="positions", why=say("Five rows in blocks of four: the second block has one.")),
        mixed((1, 5), (1, 9), (1, 3)),
        mixed((5, 9), (1, 6), (3, 3)),
        mixed((1, 7), (9, 11), (1, 4)),
        mixed((0, 5), (2, 4), why=say("The first sequence has no row in this step.")),
        mixed((2, 5), (0, 3), (1, 7)),
        mixed((6, 8), group=3, block_q=2),
        mixed((6, 8), kv_heads=2),
        mixed((6, 9), (1, 12), kv_heads=2, group=3, block_q=2, head_dim=32),
        mixed((5, 30), (2, 33), (1, 40), block_size=8, values="random", why=say("More than one tile of 16 tokens.")),
        mixed((20, 37), group=2, block_size=16, head_dim=32, scores="large", asks=[(0, i, 1) for i in (0, 3, 4, 11, 19)]),
        mixed((20, 30), values="positions", head_dim=32, scores="equal", asks=[(0, i, 0) for i in (0, 2, 9, 16, 17, 19)], why=say("A long chunk, and keys all alike.")),
        mixed((5, 7), scores="hot", values="positions"),
        mixed((5, 7), scores="cold", values="positions"),
        mixed((3, 9), (1, 5), spread=True),
        mixed((3, 7), (1, 2), padding=6, more=(("padding",),), why=say("Six rows behind are padding: nobody's.")),
        mixed((2, 7), block_q=1, group=7),
        mixed((4, 9), (3, 6), block_q=2, group=7, kv_heads=2, head_dim=32, asks=[(0, 0, 0), (0, 3, 13), (1, 2, 7)],
              why=say("BLOCK_Q * GROUP is 14, and ROWS 16: two rows are nobody's.")),
        Trace(({"seq_lens": [64], "query_lens": [64], "values": "random"},), (("launch",), ("rows_read", "keys")),
              say("A block's walk ends at its own last position.")),
        Trace(({"seq_lens": [40, 30], "query_lens": [8, 1], "values": "random", "group": 3},),
              (("launch",), ("rows_read", "keys")), say("K is read once for a block, not once for a row.")),
    )  # fmt: skip

    class Oracle(Attention):
        def row(self, seq, i, head):
            context = self.lens[seq] - self.rows[seq]
            return self.close(self.attention(seq, i, head, range(context + i + 1))[0])

        def padding(self):
            return "untouched"

        def rows_read(self, name):
            block, tile, read = self.case["block_q"], self.case["tile"], 0
            for rows, length in zip(self.rows, self.lens, strict=True):
                for first in range(0, rows, block):
                    end = min(length - rows + first + block, length)
                    read += -(-end // tile) * tile
            return AtMost(read * self.case["kv_heads"])

    def traces(self):
        @st.composite
        def one(draw):
            pairs = []
            for _ in range(draw(st.integers(1, 3))):
                rows = draw(st.sampled_from((1, 1, 2, 5, 0)))
                pairs.append((rows, max(rows + draw(st.integers(0, 20)), 1)))
            group = draw(st.integers(1, 3))
            return mixed(*pairs, group=group, kv_heads=draw(st.integers(1, 2)), block_q=draw(st.sampled_from((1, 2, 4))),
                         block_size=draw(st.sampled_from((1, 4, 32))))  # fmt: skip

        return one()

    def describe(self, op):
        if op[0] == "row":
            return f"sequence {op[1]}, row {op[2]} of its chunk, query head {op[3]}:"
        return "rows of padding:" if op[0] == "padding" else super().describe(op)

    def explain(self, op, expected, got):
        if op[0] == "rows_read":
            return say("Too much is read. All rows of a block share one walk over K and V, and it ends at the block's last position: "
                       "nobody in it sees further. A program without rows reads nothing: return.")  # fmt: skip
        if op[0] == "padding":
            return say("A row behind the last sequence's was written. Such rows belong to nobody.")
        return super().explain(op, expected, got)

    def otherwise(self, op):
        return say("Not the numbers of this row. Is position = first + row // GROUP, head = row % GROUP in the group, and does the "
                   "row see context + position + 1 tokens, context included?")  # fmt: skip


# ---- 6


@dataclass(frozen=True)
class Nearest:
    """Whole numbers, each at most half a step from the exact one (ties go either way), none beyond 127."""

    exact: Any

    def accepts(self, value):
        return self._close(self.exact, value)

    def _close(self, exact, value):
        if isinstance(exact, list):
            return isinstance(value, list) and len(value) == len(exact) and all(map(self._close, exact, value))
        return type(value) is int and abs(value) <= 127 and abs(value - exact) <= 0.5 + 1e-3

    def __str__(self):
        return f"whole numbers nearest to {self.rounded(self.exact)}"

    def rounded(self, exact):
        return [self.rounded(x) for x in exact] if isinstance(exact, list) else round(exact, 2)


class Quantize(Exercise):
    """INT8, a scale for each token and head."""

    name, points, minutes, section = "quantize", 3, 10, "PAV 3.1"
    defines = ("quantize",)
    ours = {"quantize": OURS + "quantize"}
    driver = "Quantize"
    hints = (
        say("One scale for each row of D numbers: the largest magnitude becomes 127."),
        say("scales = np.abs(x).max(axis=-1) / 127, in float32. Then x / scales[..., None], rounded to the nearest, as int8."),
        say("A row of zeros has scale 0, and 0 / 0 is NaN: divide by np.where(scales > 0, scales, 1)[..., None]. np.rint rounds; "
            ".astype(np.int8) alone cuts off."),
    )  # fmt: skip
    INPUTS = (
        ([1.27, 0.5, -0.3], "float32"), ([[127.0, 1.0], [-254.0, 3.0]], "float32"), ([0.0, 0.0], "float32"),
        ([-5.0, 1.0, 2.0], "float32"), ([0.9, -0.9, 0.6], "float32"), ([[0.0, 0.0], [1.0, -0.26]], "float32"),
        ([[[1.0, 0.3], [100.0, 7.0]], [[0.01, -0.007], [3.0, 2.0]]], "float32"), ([1e-6, 3e-7], "float32"),
        ([[3.0, -1.7, 0.33, 0.77]], "float16"), ([60000.0, 12345.0], "float16"), ([1e30, -3e29], "float32"),
        ([[[5.0]], [[-0.25]]], "float32"), ([1e-12, -4e-13], "float32"),
    )  # fmt: skip
    examples = tuple(Trace((), tuple((what, x, dtype) for what in ("kinds", "scales", "numbers"))) for x, dtype in INPUTS)

    class Oracle:
        """One number after the other."""

        def kinds(self, x, dtype):
            shape, inner = [], x
            while isinstance(inner, list):
                shape, inner = [*shape, len(inner)], inner[0]
            return f"int8 {shape}, float32 {shape[:-1]}"

        def scales(self, x, dtype):
            if isinstance(x[0], list):
                return self._join([self.scales(row, dtype) for row in x])
            return Approx(max(abs(self._as(v, dtype)) for v in x) / 127, rel=1e-5, abs=0)

        def _join(self, found):
            return Approx([one.value for one in found], rel=1e-5, abs=0)

        def numbers(self, x, dtype):
            return Nearest(self._exact(x, dtype))

        def _exact(self, x, dtype):
            if isinstance(x[0], list):
                return [self._exact(row, dtype) for row in x]
            row = [self._as(v, dtype) for v in x]
            largest = max(map(abs, row))
            return [v * 127 / largest if largest else 0.0 for v in row]

        @staticmethod
        def _as(v, dtype):
            import struct

            form = "e" if dtype == "float16" else "f"
            return struct.unpack(form, struct.pack(form, v))[0]

    def traces(self):
        row = st.lists(st.integers(-400, 400).map(lambda v: v / 64), min_size=3, max_size=3)
        return st.tuples(st.lists(st.lists(row, min_size=2, max_size=2), min_size=1, max_size=2),
                         st.sampled_from(("float32", "float16"))).map(
            lambda given: Trace((), tuple((what, *given) for what in ("kinds", "scales", "numbers"))))  # fmt: skip

    def describe(self, op):
        return f"quantize of {op[2]} {op[1]}: {op[0].replace('kinds', 'dtypes and shapes')}"

    def explain(self, op, expected, got):
        if op[0] == "kinds":
            return say("Two arrays: int8 of x's shape, and float32 scales of the same shape without the last side.")
        if got == "NaN or infinite":
            return say("A scale that is not a number: what is the largest magnitude of this row, and can x's type hold it?")
        if op[0] == "scales":
            return say("The scale of a row is its largest magnitude / 127, computed in float32. Negative numbers have a magnitude "
                       "too, and each row its own.")  # fmt: skip
        return say("Each number is to be the nearest multiple of its row's scale: divide by this scale, in float32 and with nothing "
                   "added to it; round, do not cut off. A row of zeros is zeros, not 0 / 0.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if "has changed" in message:
            return say("x is the model's: leave it as it is, and return new arrays.")
        if "NaN was made" in message:
            return say("NaN or infinity became int8, and what that gives is another thing on each machine. A row of zeros has scale 0, and "
                       "0 / 0 is NaN. Or x's type could not hold what you computed: float16 ends at 65504. Make it float32 first.")  # fmt: skip
        if error in ("AxisError", "IndexError", "ValueError"):
            return say("x may have any number of sides: a row is what runs along the last one, axis=-1.")
        return None


# ---- 7


def int8_case(*seq_lens, more=(), why=None, **options):
    options = {"seq_lens": list(seq_lens), "values": "random", **options}
    heads = options.get("kv_heads", 1) * options.get("group", 1)
    asks = [("head", s, h) for s in range(len(seq_lens)) for h in range(heads)]
    return Trace((options,), (("launch",), *asks, *more), why)


class SweepInt8(_Attends):
    """The walk over INT8."""

    name, points, minutes, section, stretch = "sweep_int8", 4, 20, "PAV 3.1", True
    defines = ("sweep_int8",)
    ours = {"sweep_int8": OURS + "sweep_int8"}
    driver = "Int8"
    hints = (
        say("q . (scale * k) is scale * (q . k): K's scale may wait until after the product. And weight * (scale * v) is (weight * "
            "scale) * v: V's scale may go onto the weight. Where must it not go?"),
        say("at_scale = (block * BLOCK_SIZE + token % BLOCK_SIZE) * stride_scale. Both loads need mask=known and other=0.0. The "
            "numbers of K and V become query's type: .to(query.dtype)."),
        say("scores = tl.dot(query, k) * (scale_log2e * key_scale)[None, :]; total = total * alpha + tl.sum(weights, axis=1) FIRST; "
            "then weights * value_scale[None, :] in the second tl.dot."),
    )  # fmt: skip
    examples = (
        int8_case(3, scores="equal"),
        int8_case(5),
        int8_case(5, values="positions"),
        int8_case(9, 4),
        int8_case(9, 4, kv_heads=2, group=3),
        int8_case(0, 7),
        int8_case(40, block_size=8, head_dim=32),
        int8_case(33, 20, block_size=16, kv_heads=2, group=2, head_dim=32),
        int8_case(20, scores="large", head_dim=32),
        int8_case(9, group=3, fewer=3, values="positions", why=say("Each row has a limit of its own.")),
        int8_case(40, group=4, fewer=9, kv_heads=2, head_dim=32),
        int8_case(9, group=2, fewer=-7, why=say("A limit may lie behind the end of the walk: what is not read counts for nobody.")),
        int8_case(9, start=4, values="positions", why=say("The walk begins at token 4: those before it count for nobody.")),
        int8_case(40, 6, start=7, block_size=8, head_dim=32),
        int8_case(9, spread=True),
        int8_case(9, scores="hot"),
        int8_case(9, scores="cold"),
        int8_case(30, block_size=1, tile=32),
        Trace(({"seq_lens": [40], "values": "random", "kv_heads": 2},),
              (("launch",), ("bytes_read", "keys"), ("bytes_read", "values"), ("bytes_read", "key_scales"), ("bytes_read", "value_scales"))),
    )  # fmt: skip

    class Oracle(Attention):
        """Attention over numbers that are rounded first."""

        int8 = True

        def head(self, seq, head):
            length = self.lens[seq]
            start = self.case["start"]
            sees = min(max(length - head % self.group * self.case["fewer"], start + 1), length)
            return self.close(self.attention(seq, 0, head, range(start, sees))[0])

        def bytes_read(self, name):
            rows = self.case["kv_heads"] * sum(self.lens)
            return AtMost(rows * (4 if "scales" in name else self.dim))

    def traces(self):
        @st.composite
        def one(draw):
            lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=2))
            return int8_case(*lens, block_size=draw(st.sampled_from((1, 4, 32))), kv_heads=draw(st.integers(1, 2)),
                             group=draw(st.integers(1, 3)))  # fmt: skip

        return one()

    def describe(self, op):
        return f"bytes of {op[1]} that were read:" if op[0] == "bytes_read" else super().describe(op)

    def explain(self, op, expected, got):
        if op[0] == "bytes_read":
            return say("One scale for each token and KV head is read once; so is each row of K and V. Those behind `end` are nobody's: "
                       "mask the loads.")  # fmt: skip
        if got == "NaN":
            return say("NaN. The scale of a slot that belongs to nobody is NaN here, and 0 * NaN is NaN: mask the loads of the "
                       "scales, other=0.0. Or it is not this slot's scale: n counts tokens over all blocks, and the scales of neighbours lie "
                       "stride_scale apart. And -inf * 0 is NaN: scale the scores before they are masked.")  # fmt: skip
        if isinstance(got, list) and not any(got):
            return say("Nothing but zeros. A weight is below 1, and as int8 it is 0: `sweep` makes the weights of V's type, which will not do here. "
                       "Make V of theirs.")  # fmt: skip
        return super().explain(op, expected, got)

    def otherwise(self, op):
        return say("K's scale belongs on the scores, one number a token. V's belongs on the weights, but only AFTER their sum was "
                   "taken: total is the softmax's, and knows no scale of V. Is the scale that of the token's own slot? And does each tile "
                   "multiply both total and result by alpha, as in `sweep`?")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "TypeError" and "tl.dot" in message:
            return say("tl.dot wants two operands of one type: widen the int8 block, .to(query.dtype).")
        return super().explain_error(op, expected, error, message)


# ---- 8


def whole(*seq_lens, more=(), why=None, asks=None, **options):
    options = {"seq_lens": list(seq_lens), "values": "random", **options}
    heads = options.get("kv_heads", 1) * options.get("group", 1)
    asks = asks or [(s, h) for s in range(len(seq_lens)) for h in range(heads)]
    return Trace((options,), (("attend",), *(("head", *ask) for ask in asks), *more), why)


class DecodeAttention(_Attends):
    """The same bits in any batch."""

    name, points, minutes, section, stretch = "decode_attention", 4, 20, "L33 8.1-1", True
    defines = ("decode_attention",)
    ours = {"decode_attention": OURS + "decode_attention"}
    part = {"attention": "decode_attention"}
    driver = "Decode"
    num_random = 8
    hints = (
        say("The cuts must depend on the sequence alone. What in your launch depends on the others? How many splits there are may: "
            "those behind a sequence's end are empty."),
        say("split_tokens = SPLIT_TOKENS, num_splits = as many as the longest sequence needs, at least 1. Then merge each "
            "sequence's and head's row: partial[seq, head], lse[seq, head]."),
        say("partial, lse = launch_split(split, num_splits, SPLIT_TOKENS, q, keys, values, block_tables, seq_lens). If bits still "
            "differ, the merge adds in another order when there are more empty splits: hand it only the "
            "-(-seq_len // SPLIT_TOKENS) that are live."),
    )  # fmt: skip
    ALONE = "A sequence's bits must not depend on who is in its batch."
    examples = (
        whole(10),
        whole(32),
        whole(33),
        whole(70, 5, kv_heads=2, group=3, head_dim=32),
        whole(0, 9),
        whole(0),
        Trace(({"seq_lens": []},), (("attend",),), say("No sequence at all.")),
        whole(300, asks=[(0, 0)], head_dim=32, more=(("most_tokens",), ("programs",)),
              why=say("300 tokens are 10 splits, of 32 tokens at most.")),
        whole(50, 400, asks=[(0, 0)], head_dim=32, group=3, more=(("alone", 0), ("alone", 1)), why=say(ALONE)),
        whole(290, 1000, 33, asks=[(2, 0)], head_dim=32, group=3, block_size=16, more=(("alone", 0), ("alone", 2)), why=say(ALONE)),
        whole(170, 40, 200, 0, asks=[(3, 0)], head_dim=32, group=2, block_size=16,
              more=(("alone", 0), ("alone", 1), ("alone", 3)), why=say(ALONE)),
    )  # fmt: skip

    class Oracle(Attention):
        def attend(self):
            return f"float32 [{len(self.lens)}, {self.case['kv_heads'] * self.group}, {self.dim}]"

        def alone(self, seq):
            return "the same bits"

        def most_tokens(self):
            return AtMost(32)

        def programs(self):
            return sum(-(-n // 32) for n in self.lens) * self.case["kv_heads"]

    def traces(self):
        @st.composite
        def one(draw):
            lens = draw(st.lists(st.integers(0, 120), min_size=1, max_size=3))
            return whole(*lens, group=draw(st.integers(1, 2)), block_size=16, asks=[(0, 0)], more=(("alone", len(lens) - 1),))

        return one()

    def describe(self, op):
        return {"attend": "decode_attention(q, keys, values, block_tables, seq_lens)", "most_tokens":
                "the most tokens that one program read:", "programs": "the programs that read K:", "alone": f"sequence {op[-1]} alone gets"}.get(op[0]) \
            or super().describe(op)  # fmt: skip

    def explain(self, op, expected, got):
        if op[0] == "attend":
            return say("Return a new array like q, and leave the arguments as they are.")
        if op[0] == "alone":
            return say("Alone this sequence gets other last bits than among the others. Floating point notices in which order it "
                       "adds. So the cuts, and the order of the merge, must depend on the sequence alone.")  # fmt: skip
        if op[0] == "most_tokens":
            return say("One program read more than SPLIT_TOKENS tokens of K. Cut there, whatever the length.")
        if op[0] == "programs" and got < expected:
            return say("Fewer programs read K than there are pieces of SPLIT_TOKENS tokens: let launch_split and your kernel compute each piece.")
        if op[0] == "programs":
            return say("More programs read K than there are pieces of SPLIT_TOKENS tokens. Cut every SPLIT_TOKENS, no oftener: each piece "
                       "costs a result and an lse.")  # fmt: skip
        return super().explain(op, expected, got)
