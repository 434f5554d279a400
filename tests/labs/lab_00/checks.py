"""Lab 00, why a cache: its exercises."""

import math
from fractions import Fraction

from hypothesis import strategies as st

from kvlab.grade import Approx, Exercise, LabInfo, Trace, calls, say
from kvlab.primer import GPU, GPUS
from kvlab.sizing import MODELS, ModelShape

LAB = LabInfo(title=say("Why a cache"), sections="L33 0, 3.4; PAV 1")

SHAPES = MODELS | {"TINY": ModelShape(10, 5, 6, 3, 4, 1, 3)}
GPU_TABLE = GPUS | {"TOY": GPU(1000.0, 10.0, 10_000)}
HALVES = st.integers(-6, 6).map(lambda i: i / 2)
ZERO_INSIDE = [9, 8]  # 0, 11, 14, 3 follow
STEPS = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 6)), min_size=1, max_size=3)


def close(a, b):
    return isinstance(b, int | float) and not isinstance(b, bool) and math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9)


def all_close(a, b):
    return isinstance(b, list) and len(a) == len(b) and all(map(close, a, b))


class NumProjected(Exercise):
    """Tokens that go through the model, on paper."""

    name, points, minutes, section = "num_projected", 2, 8, "L33 3.4"
    defines = ("num_projected",)
    ours = {"num_projected": "kvlab.primer:num_projected"}
    hints = (
        say("Write a line for each step: how many tokens go in? Without a cache: prompt, prompt + 1, prompt + 2, ..."),
        say("With a cache the first step takes the whole prompt and each step after it one token. There are "
            "num_tokens steps. What goes in at the last one?"),
        say("Without: num_tokens * prompt + (0 + 1 + ... + (num_tokens - 1)). With: prompt + num_tokens - 1, and 0 if "
            "there is no step at all."),
    )  # fmt: skip
    examples = (
        Trace((), (("num_projected", 3, 1, False),)),
        Trace((), (("num_projected", 3, 1, True),), why=say("One step: the prompt goes in, a token comes out, done.")),
        Trace((), (("num_projected", 3, 2, False),)),
        Trace((), (("num_projected", 3, 2, True),)),
        Trace((), (("num_projected", 3, 4, False),)),
        Trace((), (("num_projected", 3, 0, True),)),
        Trace((), (("num_projected", 100, 200, False),)),
        Trace((), (("num_projected", 100, 200, True),)),
    )

    class Oracle:
        """Makes every step."""

        def num_projected(self, prompt, num_tokens, with_cache):
            text, kept, gone_in = prompt, 0, 0
            for _ in range(num_tokens):
                gone_in += text - kept
                kept = text if with_cache else 0
                text += 1
            return gone_in

    def traces(self):
        return calls("num_projected", st.integers(1, 30), st.integers(0, 20), st.booleans())

    def describe(self, op):
        return f"num_projected(prompt={op[1]}, num_tokens={op[2]}, with_cache={op[3]})"

    def explain(self, op, expected, got):
        _, prompt, n, with_cache = op
        if isinstance(got, float):
            return say("Return a whole number: use // and not /.")
        if n == 0:
            return say("Nobody asks for a token, so no step is made.")
        if got == expected + 1 and with_cache:
            return say("The last token that comes out is never put in again: nobody asks what follows it.")
        if not with_cache and got == expected + n:
            return say("The first step has the prompt alone: {prompt} tokens. Only the second one has a token more.",
                       prompt=prompt)  # fmt: skip
        if with_cache:
            return say("First the prompt, {prompt} tokens at once. Then one token a step, in {steps} more steps.",
                       prompt=prompt, steps=max(0, n - 1))  # fmt: skip
        return say("Each of the {n} steps takes the whole text as it stands: the prompt, and all tokens so far.", n=n)


class Attend(Exercise):
    """Attention of one query."""

    name, points, minutes, section = "attend", 4, 18, "L33 3.4"
    defines = ("attend",)
    ours = {"attend": "kvlab.primer:attend"}
    driver = "AttendDriver"
    hints = (
        say("Three passes over the positions: a score for each key, a weight for each score, and the weighted sum of "
            "the values."),
        say("Subtract the largest score before math.exp: the quotient is the same, and exp cannot overflow. The "
            "weights must add up to 1."),
        say("scores = [sum(a * b for a, b in zip(q, k)) / math.sqrt(len(q)) for k in keys]; weights: exp(score - max), "
            "each divided by their sum; result[i] = sum of weight * value[i] over the positions."),
    )  # fmt: skip
    examples = (
        Trace((), (("attend", [1.0], [[2.0]], [[7.0]]),), why=say("One position: its weight is 1.")),
        Trace((), (("attend", [0.0, 0.0], [[1.0, 2.0], [3.0, 4.0]], [[1.0], [3.0]]),),
              why=say("Both scores are 0, so both weights are 1/2.")),
        Trace((), (("attend", [1.0], [[1.0], [0.0]], [[1.0], [0.5]]),)),
        Trace((), (("attend", [2.0, 0.0, 0.0, 0.0], [[1.0] * 4, [0.0] * 4], [[1.0], [0.0]]),),
              why=say("d is 4 here: the score of the first key is 2 / sqrt(4) = 1.")),
        Trace((), (("attend", [1.0, 1.0], [[1.0, 0.0], [0.0, 2.0]], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),),
              why=say("A value may be longer than a query: the result is as long as a value.")),
        Trace((), (("attend", [1000.0], [[1.0], [0.0]], [[5.0], [7.0]]),),
              why=say("A score of 1000: exp(1000) is more than a float can hold. What may you subtract from all "
                      "scores?")),
        Trace((), (("attend", [-1000.0], [[1.0], [2.0]], [[5.0], [7.0]]),),
              why=say("Scores of -1000 and -2000: every exp is 0, and 0 / 0 is an error. Subtract the largest score.")),
        Trace((), (("attend", [1000.0], [[0.0], [1.0]], [[5.0], [7.0]]),),
              why=say("Scores of 0 and 1000: the largest need not be the first.")),
    )  # fmt: skip

    class Oracle:
        """Each weight by itself: 1 over the sum of e to the differences."""

        def attend(self, q, keys, values):
            scores = [math.fsum(a * b for a, b in zip(q, k, strict=True)) * len(q) ** -0.5 for k in keys]
            weights = []
            for s in scores:
                others = [min(t - s, 700.0) for t in scores]
                weights.append(1 / math.fsum(map(math.exp, others)))
            return Approx([math.fsum(map(float.__mul__, weights, column)) for column in zip(*values, strict=True)],
                          rel=1e-6, abs=1e-9)  # fmt: skip

    def traces(self):
        @st.composite
        def one(draw):
            d, e, n = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
            vector = lambda size: draw(st.lists(HALVES, min_size=size, max_size=size))  # noqa: E731
            return Trace((), (("attend", vector(d), [vector(d) for _ in range(n)], [vector(e) for _ in range(n)]),))

        return one()

    def explain(self, op, expected, got):
        _, q, keys, values = op
        if isinstance(got, str) and got.endswith("changed"):
            return say("keys and values are the cache, and later positions need them as they were: put the result "
                       "into a new list, and leave what is given alone.")
        if not isinstance(got, list) or len(got) != len(values[0]):
            return say("Return a list of {n} numbers, as long as each value.", n=len(values[0]))
        dots = [sum(map(float.__mul__, q, k)) for k in keys]

        def mix(scores, total=None):
            top = max(scores)
            weights = [math.exp(max(s - top, -700.0)) for s in scores]
            total = total or sum(weights)
            columns = zip(*values, strict=True)
            return [sum(w * v for w, v in zip(weights, column, strict=True)) / total for column in columns]

        d = len(q)
        if d > 1 and all_close(mix(dots), got):
            return say("The scores are not scaled, or not by d: divide q . k by sqrt(d), the length of q, here "
                       "sqrt({d}).", d=d)  # fmt: skip
        if d > 1 and all_close(mix([s / d for s in dots]), got):
            return say("The scores are divided by d = {d}; the scale is sqrt(d).", d=d)
        if d > 1 and all_close(mix([s * math.sqrt(d) for s in dots]), got):
            return say("The scores are multiplied by sqrt(d); divide by it.")
        if all_close(mix([s / math.sqrt(len(keys)) for s in dots]), got):
            return say("The scale is the square root of the length of q, not of the number of keys.")
        if all_close(values[dots.index(max(dots))], got):
            return say("That is the value with the largest score alone. Every position has a share: exp(score) over the "
                       "sum.")
        if all_close([sum(column) / len(values) for column in zip(*values, strict=True)], got):
            return say("That is the plain mean of the values: the weights do not depend on the scores.")
        if all_close(mix([s / math.sqrt(d) for s in dots], total=1.0), got):
            return say("The weights do not add up to 1: divide by their sum.")
        return say("Score of each key: q . k / sqrt({d}). Weights: exp(score), divided by the sum of all of them. "
                   "Result: the sum of weight times value.", d=d)  # fmt: skip


class AttendNext(Exercise):
    """One layer, one new position."""

    name, points, minutes, section = "attend_next", 4, 10, "L33 3.4"
    defines = ("attend_next",)
    ours = {"attend_next": "kvlab.primer:attend_next"}
    driver = "NextDriver"
    hints = (
        say("Of the new position you need q, k and v. Of the positions before it you need what keys and values hold, "
            "and nothing else."),
        say("matvec(layer[\"k\"], x) is the new key. A position attends to itself too: append before you attend."),
        say("keys.append(matvec(layer[\"k\"], x)); the same for values with \"v\"; then return attention(matvec("
            "layer[\"q\"], x), keys, values)."),
    )  # fmt: skip
    examples = (
        Trace(([[1.0]], [[2.0]], [[3.0]]), (("attend_next", 0, [1.0]),)),
        Trace(([[1.0]], [[2.0]], [[3.0]]), (("attend_next", 0, [1.0]), ("attend_next", 0, [0.5]))),
        Trace(([[1.0, 0.0], [0.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 3.0]]),
              (("attend_next", 0, [1.0, 0.0]), ("attend_next", 0, [0.0, 1.0]), ("attend_next", 0, [1.0, 1.0]))),
        Trace(([[1.0]], [[2.0]], [[3.0]]), (("attend_next", 0, [1.0]), ("attend_next", 1, [0.5]),
                                           ("attend_next", 0, [2.0])),
              why=say("Sequence 1 is another user's text, with keys and values of its own.")),
    )  # fmt: skip

    class Oracle:
        """Keeps the inputs, and computes everything anew."""

        def __init__(self, q, k, v):
            self.q, self.k, self.v = q, k, v
            self.inputs = ([], [])

        def attend_next(self, sequence, x):
            inputs = self.inputs[sequence]
            inputs.append(x)
            times = lambda m, y: [math.fsum(map(float.__mul__, row, y)) for row in m]  # noqa: E731
            keys, values = [times(self.k, y) for y in inputs], [times(self.v, y) for y in inputs]
            found = Attend.Oracle().attend(times(self.q, x), keys, values).value
            tidy = lambda numbers: [round(number, 4) + 0.0 for number in numbers]  # noqa: E731
            return {"found": tidy(found), "keys": [tidy(k) for k in keys], "values": [tidy(v) for v in values]}

    def traces(self):
        @st.composite
        def walk(draw):
            d = draw(st.integers(1, 2))
            vector = lambda: draw(st.lists(HALVES, min_size=d, max_size=d))  # noqa: E731
            layer = tuple([vector() for _ in range(d)] for _ in "qkv")
            calls_ = draw(st.integers(1, 5))
            return Trace(layer, tuple(("attend_next", draw(st.integers(0, 1)), vector()) for _ in range(calls_)))

        return walk()

    def describe_init(self, init):
        return 'a layer with "q": {}, "k": {}, "v": {}'.format(*init)

    def describe(self, op):
        return f"attend_next(layer, {op[2]}, keys, values) of sequence {op[1]}"

    def explain(self, op, expected, got):
        if not isinstance(got, dict):
            return None
        for name in ("keys", "values"):
            have, want = got.get(name), expected[name]
            if have == want:
                continue
            if isinstance(have, list) and len(have) < len(want):
                return say("{name} must grow by one entry at each call: append to the list that you were given, and "
                           "make no new one.", name=name)  # fmt: skip
            if isinstance(have, list) and len(have) > len(want):
                return say("{name} must grow by one entry at each call, not more.", name=name)
            if isinstance(have, list) and have[:-1] != want[:-1]:
                return say("The entries of earlier positions stay as they are, in order; the new one goes to the end.")
            return say("The new entry of {name} is the layer's matrix \"{letter}\" times x.", name=name, letter=name[0])
        return say("Both lists are right. What is returned is the attention of this position's q over all keys and "
                   "values, its own among them.")


class Decode(Exercise):
    """Decode without a cache, and with one."""

    name, points, minutes, section = "decode", 4, 15, "L33 3.4"
    defines = ("decode_without_cache", "decode_with_cache")
    ours = {
        "decode_without_cache": "kvlab.primer:decode_without_cache",
        "decode_with_cache": "kvlab.primer:decode_with_cache",
    }
    driver = "DecodeDriver"
    hints = (
        say("Both are loops of num_tokens steps. A step calls model.forward once and takes the largest logit: "
            "logits.index(max(logits))."),
        say("Without: every step gives all tokens and a new Cache(). With: one Cache() for the whole loop, and each "
            "step gives only the tokens that are not in it yet."),
        say("With: new = list(prompt) before the loop; in it logits = model.forward(new, cache), then new = [token]. "
            "So the first step is the prefill, and all others have one token."),
    )  # fmt: skip
    examples = (
        Trace((), (("decode_without_cache", [3], 1),)),
        Trace((), (("decode_without_cache", [3, 1], 3),)),
        Trace((), (("decode_with_cache", [3], 1),)),
        Trace((), (("decode_with_cache", [3, 1], 3),)),
        Trace((), (("decode_without_cache", [3, 1, 4], 0),)),
        Trace((), (("decode_with_cache", [3, 1, 4], 0),)),
        Trace((), (("decode_with_cache", ZERO_INSIDE, 4),),
              why=say("Token 0 is a token as any other: it does not end the text.")),
        Trace((), (("decode_without_cache", ZERO_INSIDE, 4),)),
        Trace((), (("decode_with_cache", [3, 1, 4], 2), ("decode_with_cache", [5, 9], 2)),
              why=say("Two requests, one after the other: the second one must not see the first one's cache.")),
    )

    class Oracle:
        def _tokens(self, prompt, n):
            tokens = list(prompt)
            for _ in range(n):
                state = 7
                for token in tokens:
                    state = (state * 31 + token + 11) % 1_000_003
                tokens.append(state % 29)
            return tokens[len(prompt) :]

        def decode_without_cache(self, prompt, n):
            computed = sum(len(prompt) + i for i in range(n))
            return {"tokens": self._tokens(prompt, n), "computed": computed, "calls": n}

        def decode_with_cache(self, prompt, n):
            return {"tokens": self._tokens(prompt, n), "computed": len(prompt) + n - 1 if n else 0, "calls": n}

    def traces(self):
        prompts = st.lists(st.integers(0, 28), min_size=1, max_size=5)
        return st.one_of(calls("decode_without_cache", prompts, st.integers(0, 5)),
                         calls("decode_with_cache", prompts, st.integers(0, 5)))  # fmt: skip

    def describe(self, op):
        return f"{op[0]}(model, {op[1]}, {op[2]})"

    def explain(self, op, expected, got):
        if not isinstance(got, dict):
            return say("Work on a list of your own: the caller still needs the prompt as it was.")
        computed, want = got["computed"], expected["computed"]
        with_cache = op[0] == "decode_with_cache"
        if op[2] == 0:
            return say("No token is asked for: return an empty list, and compute nothing.")
        if got["tokens"] == expected["tokens"]:
            if computed == want:
                return say("The tokens are right, in {got} calls of model.forward where {n} do, one for each new "
                           "token: the prompt goes in at once, in the prefill.", got=got["calls"], n=op[2])
            if not with_cache:
                return say("The tokens are right, but {got} went through the model, and without a cache it is {want}: "
                           "every step computes the whole text, in a cache of its own.", got=computed, want=want)
            if computed == want + 1:
                return say("The tokens are right, but one too many went through the model: the last one that comes "
                           "out is never put in.")  # fmt: skip
            return say("The tokens are right, but {got} went through the model, where {want} are enough: what is in "
                       "the cache need not go in again.", got=computed, want=want)  # fmt: skip
        if isinstance(got["tokens"], list) and got["tokens"] == [*op[1], *expected["tokens"]]:
            return say("Return the new tokens alone, without the prompt.")
        if isinstance(got["tokens"], list) and len(got["tokens"]) != op[2]:
            return say("{n} new tokens are asked for.", n=op[2])
        if computed > want:
            return say("The model saw some tokens twice: it computes the tokens you give it *behind* those in the "
                       "cache. So give it either all tokens and an empty cache, or the new ones and the old cache.")
        if with_cache and got["calls"] == op[2] and computed == want:
            return say("As many tokens went in as should. Was the cache empty at the start of this call, and did "
                       "each step go on behind the one before? The next token is the index of the largest logit.")
        return say("The model must see the whole text, in order: all of it at each step, or what is new behind what "
                   "the cache holds. The next token is the index of the largest logit.")  # fmt: skip


def step_text(step):
    return "[" + ", ".join(f"({new}, {computed})" for new, computed in step) + "]"


class _Cost(Exercise):
    driver = "CostDriver"
    section = "L33 3.4"

    def describe(self, op):
        name, *rest = op
        told = [step_text(value) if isinstance(value, list | tuple) else str(value) for value in rest]
        return f"{name.removesuffix('_by_default')}({', '.join(told)})"


class StepFlops(_Cost):
    """The arithmetic of a step."""

    name, points, minutes = "step_flops", 4, 20
    defines = ("step_flops",)
    ours = {"step_flops": "kvlab.primer:step_flops"}
    hints = (
        say("Three terms: matrices for each new token, logits for each sequence, attention for each pair of a new "
            "token and a token it looks at."),
        say("A new token looks at all tokens computed before the step, at the new ones before it, and at itself. The "
            "new tokens of a sequence look at new * computed + (1 + 2 + ... + new) tokens in all."),
        say("2 * num_layer_weights * new + 2 * vocab_size * hidden_size + 4 * layers * attention heads * head_dim * "
            "pairs, summed over the sequences."),
    )  # fmt: skip
    examples = (
        Trace((), (("step_flops", "TINY", [(1, 0)]),)),
        Trace((), (("step_flops", "TINY", [(3, 0)]),)),
        Trace((), (("step_flops", "TINY", [(1, 2)]),)),
        Trace((), (("step_flops", "TINY", [(2, 3)]),)),
        Trace((), (("step_flops", "TINY", [(1, 2), (1, 5)]),)),
        Trace((), (("step_flops", "Qwen2.5-7B", [(1, 1000)]),)),
    )

    class Oracle:
        """Every matrix and every pair of positions by itself."""

        def step_flops(self, name, step):
            s, flops = SHAPES[name], 0
            q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
            matrices = [q, kv, kv, q, s.intermediate_size, s.intermediate_size, s.intermediate_size]
            for new, computed in step:
                for position in range(computed, computed + new):
                    flops += s.num_hidden_layers * sum(2 * s.hidden_size * other for other in matrices)
                    looked_at = position + 1
                    flops += s.num_hidden_layers * s.num_attention_heads * looked_at * (2 * s.head_dim + 2 * s.head_dim)
                flops += 2 * s.vocab_size * s.hidden_size
            return flops

    def traces(self):
        return calls("step_flops", st.just("TINY"), STEPS)

    def explain(self, op, expected, got):
        if not isinstance(got, int | float):
            return say("Return a number of floating-point operations.")
        if isinstance(got, float) and got == expected:
            return say("Return a whole number: use // and not /.")
        s, step = SHAPES[op[1]], op[2]
        head, attention = 2 * s.vocab_size * s.hidden_size, 4 * s.num_hidden_layers * s.num_attention_heads * s.head_dim
        news = sum(new for new, _ in step)
        pairs = sum(new * computed + new * (new + 1) // 2 for new, computed in step)
        if 2 * got == expected:
            return say("Exactly half: a multiply and an add are two operations.")
        if got == expected - attention * pairs:
            if pairs == len(step):
                return say("A token looks at itself, too: even the first one of a text has a pair.")
            return say("The attention itself is missing: q . k, and weights times values.")
        olds = sum(computed for _, computed in step)
        if olds and got == expected + 2 * s.num_layer_weights * olds:
            return say("Tokens computed before do not go through the matrices again: that is what the cache is for.")
        if got * s.num_hidden_layers == expected * s.num_hidden_layers - attention * pairs * (s.num_hidden_layers - 1):
            return say("Every layer attends: times num_hidden_layers. (num_layer_weights is of all layers already.)")
        if got == expected + head * (news - len(step)):
            return say("The output matrix makes logits for one token of each sequence, the last, and not for every new "
                       "token.")
        if got == expected - head * len(step) or got == expected - head * (len(step) - 1):
            return say("The output matrix (vocab_size x hidden_size) works once for each sequence.")
        others = {
            sum(n * (c + n) for n, c in step): say("A new token does not look at those that come after it."),
            sum(n * c + n * (n - 1) // 2 for n, c in step): say("A token looks at itself, too."),
            sum(c + n for n, c in step): say("Each new token looks at the text before it, not only the last one."),
            sum(n * c for n, c in step): say("New tokens look at each other, too: each at those before it, and at "
                                             "itself."),
        }
        for other, text in others.items():
            if got == expected + attention * (other - pairs):
                return text
        if got == expected - attention * pairs // 2:
            return say("A pair costs 4 FLOP for each dimension: 2 for q . k, and 2 for weight times value.")
        wide, hidden = s.num_attention_heads * s.head_dim, s.hidden_size
        if got * wide == expected * wide - attention * pairs * (wide - hidden):
            return say("A query has head_dim numbers in each of num_attention_heads heads; together they need not be "
                       "hidden_size.")
        fewer_heads = s.num_attention_heads - s.num_key_value_heads
        if got == expected - attention * pairs * fewer_heads // s.num_attention_heads:
            return say("Heads that share K and V still each compute their own scores: count num_attention_heads here.")
        return say("Three terms: matrices {matrices} (each new token), output matrix {head} (each sequence), attention "
                   "{attention} ({pairs} pairs).", matrices=2 * s.num_layer_weights * news, head=head * len(step),
                   attention=attention * pairs, pairs=pairs)  # fmt: skip


class StepBytes(_Cost):
    """The bytes of a step."""

    name, points, minutes = "step_bytes", 4, 12
    defines = ("step_bytes",)
    ours = {"step_bytes": "kvlab.primer:step_bytes"}
    hints = (
        say("What is read once, however many sequences there are? What does each sequence bring?"),
        say("Once: the layers' weights and the output matrix. For each new token: one row of the embedding. For each sequence: "
            "the K and V of all its tokens, old (read) and new (written)."),
        say("(num_layer_weights + vocab_size * hidden_size + hidden_size * all new tokens) * dtype_bytes + "
            "sum(computed + new) * shape.kv_bytes_per_token(dtype_bytes)."),
    )  # fmt: skip
    examples = (
        Trace((), (("step_bytes", "TINY", [(1, 0)], 2),)),
        Trace((), (("step_bytes", "TINY", [(1, 9)], 2),)),
        Trace((), (("step_bytes", "TINY", [(1, 9), (1, 9)], 2),)),
        Trace((), (("step_bytes", "TINY", [(3, 2)], 2),)),
        Trace((), (("step_bytes", "TINY", [(3, 2)], 1),)),
        Trace((), (("step_bytes_by_default", "TINY", [(1, 0)]),)),
        Trace((), (("step_bytes", "Qwen2.5-7B", [(1, 1000)], 2),)),
    )

    class Oracle:
        """Tensor by tensor."""

        def step_bytes(self, name, step, dtype_bytes):
            s = SHAPES[name]
            q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
            entries = s.vocab_size * s.hidden_size
            for _ in range(s.num_hidden_layers):
                entries += s.hidden_size * (2 * q + 2 * kv + 3 * s.intermediate_size)
                for new, computed in step:
                    entries += 2 * kv * computed + 2 * kv * new
            for new, _ in step:
                entries += new * s.hidden_size
            return entries * dtype_bytes

        def step_bytes_by_default(self, name, step):
            return self.step_bytes(name, step, 2)

    def traces(self):
        return calls("step_bytes", st.just("TINY"), STEPS, st.sampled_from([1, 2, 4]))

    def explain(self, op, expected, got):
        if not isinstance(got, int | float):
            return say("Return a number of bytes.")
        s, step = SHAPES[op[1]], op[2]
        size = op[3] if len(op) > 3 else 2
        weights = (s.num_layer_weights + s.vocab_size * s.hidden_size) * size
        news, kv = sum(new for new, _ in step), s.kv_bytes_per_token(size)
        rows = news * s.hidden_size * size
        if len(step) > 1 and got == expected + weights * (len(step) - 1):
            return say("The weights are read once for the whole step: all {n} sequences use them.", n=len(step))
        if news > 1 and got == expected + weights * (news - 1):
            return say("The weights are read once for the whole step, not once for each token.")
        if got == expected - rows:
            return say("Of the embedding, each new token reads one row: hidden_size entries.")
        if got == expected - kv * news:
            return say("The K and V of the new tokens are written: they are moved, too.")
        if got == expected - kv * sum(computed for _, computed in step):
            return say("The K and V of all tokens computed before are read: this is what the cache costs at every "
                       "step.")
        if got == expected + kv * sum(map(sum, step)) * (s.num_attention_heads // s.num_key_value_heads - 1):
            return say("Only num_key_value_heads heads have K and V; kv_bytes_per_token counts those.")
        if got == expected + kv * sum(new * (computed + new) - computed - new for new, computed in step):
            return say("The new tokens of one sequence are computed together: its K and V are read once, not once for "
                       "each.")
        if got == self.Oracle().step_bytes(op[1], step, 2):
            return say("dtype_bytes says how many bytes a number has; here it is {size}, not 2.", size=size)
        if got == expected - s.vocab_size * s.hidden_size * size:
            return say("The head is read, too: vocab_size x hidden_size numbers.")
        if 2 * got == 2 * expected - kv * sum(map(sum, step)):
            return say("Both K and V are moved; kv_bytes_per_token counts both.")
        if got * size == expected or got == expected * size:
            return say("Count entries, times dtype_bytes, once. kv_bytes_per_token(dtype_bytes) is in bytes already.")
        if got == expected + s.vocab_size * s.hidden_size * size - rows:
            return say("Of the embedding only the rows of the new tokens are read; the whole matrix stays where it is.")
        return say("Weights and output matrix, once: {weights} bytes. Rows of the embedding: {rows}. K and V, old and new: "
                   "{kv}.",
                   weights=weights, rows=rows, kv=sum(map(sum, step)) * kv)  # fmt: skip


class Roofline(_Cost):
    """The roofline."""

    name, points, minutes = "roofline", 2, 10
    defines = ("attainable_flops", "step_seconds")
    ours = {"attainable_flops": "kvlab.primer:attainable_flops", "step_seconds": "kvlab.primer:step_seconds"}
    hints = (
        say("If each byte brings few operations, the memory is the limit. If it brings many, the arithmetic units "
            "are."),
        say("Memory lets through bandwidth bytes a second, so flop_per_byte * bandwidth operations a second; no more "
            "than peak_flops can be done. A step has two times, and both run at once."),
        say("min(gpu.peak_flops, flop_per_byte * gpu.bandwidth); max(FLOP / peak_flops, bytes / bandwidth)."),
    )  # fmt: skip
    examples = (
        Trace((), (("attainable_flops", "TOY", 1.0),)),
        Trace((), (("attainable_flops", "TOY", 500.0),), why=say("TOY has a peak of 1000 FLOP/s, whatever the "
                                                                 "intensity.")),
        Trace((), (("attainable_flops", "H100", 1.0),)),
        Trace((), (("step_seconds", "TOY", "TINY", [(1, 0)], 2),)),
        Trace((), (("step_seconds", "H100", "Qwen2.5-7B", [(1, 1000)], 2),)),
        Trace((), (("step_seconds", "H100", "Qwen2.5-7B", [(2000, 0)], 2),)),
        Trace((), (("step_seconds", "H100", "Qwen2.5-7B", [(1, 1000)], 1),)),
    )

    class Oracle:
        """The time follows from the roofline: operations over what is attainable."""

        def attainable_flops(self, gpu, flop_per_byte):
            g = GPU_TABLE[gpu]
            return Approx(flop_per_byte * g.bandwidth if flop_per_byte < g.balance else g.peak_flops)

        def step_seconds(self, gpu, shape, step, dtype_bytes):
            flops = StepFlops.Oracle().step_flops(shape, step)
            moved = StepBytes.Oracle().step_bytes(shape, step, dtype_bytes)
            return Approx(flops / self.attainable_flops(gpu, flops / moved).value)

    def traces(self):
        gpus = st.sampled_from(["TOY", "T4", "A100"])
        return st.one_of(
            calls("attainable_flops", gpus, st.integers(1, 400).map(float)),
            calls("step_seconds", gpus, st.just("TINY"), STEPS, st.sampled_from([1, 2, 4])),
        )

    def explain(self, op, expected, got):
        if op[0] == "attainable_flops":
            gpu = GPU_TABLE[op[1]]
            if close(op[2] * gpu.bandwidth, got):
                return say("There is a roof: no more than peak_flops.")
            if close(gpu.peak_flops, got):
                return say("At {i:g} FLOP per byte the memory is the limit: {b:g} bytes a second arrive, each good "
                           "for {i:g} operations.", i=op[2], b=gpu.bandwidth)  # fmt: skip
            return say("Two limits, in FLOP/s: the peak, and FLOP per byte times bytes per second.")
        _, gpu, shape, step, size = op
        gpu = GPU_TABLE[gpu]
        flops = StepFlops.Oracle().step_flops(shape, step)
        moved = StepBytes.Oracle().step_bytes(shape, step, size)
        computing, moving = flops / gpu.peak_flops, moved / gpu.bandwidth
        if close(computing + moving, got):
            return say("Computing and moving go on at the same time: the longer of the two counts, not their sum.")
        if close(min(computing, moving), got):
            return say("The step ends when both are done: the longer time counts.")
        if close(max(computing, StepBytes.Oracle().step_bytes(shape, step, 2) / gpu.bandwidth), got):
            return say("dtype_bytes decides how many bytes move: pass it on.")
        return say("Computing takes FLOP / peak_flops = {a:.3g} s, moving takes bytes / bandwidth = {b:.3g} s.",
                   a=computing, b=moving)  # fmt: skip


class BatchForBalance(_Cost):
    """How large a batch fills the GPU?"""

    name, points, minutes, stretch = "batch_for_balance", 3, 25, True
    defines = ("batch_for_balance",)
    ours = {"batch_for_balance": "kvlab.primer:batch_for_balance"}
    hints = (
        say("B decodes do B * f operations and move W + B * b bytes. Get f, b and W from flops_of and bytes_of with "
            "one and with two sequences."),
        say("The intensity B * f / (W + B * b) grows with B, but never passes f / b. When is that too little?"),
        say("B * f >= balance * (W + B * b) means B * (f - balance * b) >= balance * W. If the bracket is not "
            "positive: None. Else divide, and round up with math.ceil."),
    )  # fmt: skip
    examples = (
        Trace((), (("batch_for_balance", "H100", "Llama-3-8B", 100, 2),)),
        Trace((), (("batch_for_balance", "H100", "Llama-3-8B", 1000, 2),),
              why=say("No batch is large enough: each sequence brings K and V that nobody else uses.")),
        Trace((), (("batch_for_balance", "A100", "Llama-3-8B", 100, 2),)),
        Trace((), (("batch_for_balance", "A100", "Llama-3-8B", 100, 1),)),
        Trace((), (("batch_for_balance", "A100", "Llama-2-7B", 0, 2),)),
        Trace((), (("batch_for_balance", "A100", "Llama-2-7B", 500, 2),)),
    )

    class Oracle:
        """Doubles until it is enough, then halves the interval; in exact fractions."""

        def batch_for_balance(self, gpu, shape, computed, dtype_bytes):
            g, one = GPU_TABLE[gpu], [(1, computed)]
            balance = Fraction(g.balance)
            flops = StepFlops.Oracle().step_flops(shape, one)
            costs = [StepBytes.Oracle().step_bytes(shape, one * n, dtype_bytes) for n in (1, 2)]
            own, shared = costs[1] - costs[0], 2 * costs[0] - costs[1]
            enough = lambda n: n * flops >= balance * (shared + n * own)  # noqa: E731
            high = 1
            while not enough(high):
                high *= 2
                if high > 10**12:
                    return None
            low = high // 2
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high

    def traces(self):
        return calls("batch_for_balance", st.sampled_from(["T4", "A100", "H100", "L4"]),
                     st.sampled_from(["Qwen2.5-0.5B", "Qwen2.5-7B", "Llama-2-7B", "Llama-3-70B"]),
                     st.integers(0, 2000), st.sampled_from([1, 2]))  # fmt: skip

    def explain(self, op, expected, got):
        if expected is None:
            return say("Here the K and V of one sequence cost more than its arithmetic is worth: f / b is below the "
                       "balance, and no batch helps. Return None.")  # fmt: skip
        if isinstance(got, float):
            return say("Return a whole number of sequences.")
        if got == expected - 1:
            return say("With {got} the intensity is still below the balance: round up.", got=got)
        if got == expected + 1:
            return say("One fewer is enough: round up, and not further.")
        return say("Solve B * f >= balance * (W + B * b) for B. Two decodes move W + 2 * b, one moves W + b: the "
                   "difference is b, and W is the rest.")  # fmt: skip
