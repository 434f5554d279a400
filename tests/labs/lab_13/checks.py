"""Lab 13, the engine: its exercises."""

from decimal import Decimal, localcontext
from fractions import Fraction

from hypothesis import strategies as st

from kvlab.grade import Exercise, LabInfo, OneOf, Trace, calls, say

LAB = LabInfo(title=say("The engine"), sections="L33 0.2, 1, 3, 4, 8.1, 8.2; PAV 3.1, 6", before=("01", "07", "08"))
STEPS = "kvlab.engine.engine_steps:"
INF = float("inf")


def whole(value):
    return isinstance(value, int) and not isinstance(value, bool)


class Pick(Exercise):
    """One number draws one token."""

    name, points, minutes, section = "pick", 2, 8, "L33 4.3"
    defines = ("pick",)
    ours = {"pick": STEPS + "pick"}
    driver = "DrawDriver"
    hints = (
        say("Put the weights end to end on a line, in order. Where does the share `uniform` of the whole line lie?"),
        say("The target is uniform * the last running sum. Walk along, with a running sum, until it has passed the target. "
            "Passed means more than, not equal: a piece ends where the next begins."),
        say("Two walks. The first adds up, and keeps the sum that it ends with. The second begins at 0 again, and returns the "
            "index as soon as its sum is > target. Do not divide the weights: a sum of quotients need not be 1."),
    )  # fmt: skip
    examples = (
        Trace((), (("pick", [1, 2, 5], 0.25),)),
        Trace((), (("pick", [1, 1], 0.0), ("pick", [1, 1], 0.5)), why=say("Two halves: 0.5 begins the second.")),
        Trace((), (("pick", [0, 1], 0.0),), why=say("A token of weight 0 has no piece, not even at uniform 0.")),
        Trace((), (("pick", [1, 0, 1], 0.5),)),
        Trace((), (("pick", [3, 0, 0], 0.875),)),
        Trace((), (("pick", [0.5, 0.25], 0.875),), why=say("The weights need not add up to 1.")),
        Trace((), (("pick", [0.5, 0.25], 0.25),)),
        Trace((), (("pick", [7], 0.75),)),
        Trace((), (("pick", [1] * 10, 1 - 2**-53),), why=say("The largest uniform there is. Ten times 1/10 falls short of 1 in "
                                                             "binary.")),
        Trace((), (("pick", [0.1] * 10, 1 - 2**-53),), why=say("Ten times 0.1 is not 1 in binary.")),
        Trace((), (("pick", [5, 2, 1], 0.75),), why=say("In the order of the indices, whichever is the heaviest.")),
        Trace((), (("shares", [1, 4, 2, 1], 64),)),
        Trace((), (("pick", [2**-40, 2**-41], 0.75),), why=say("Small weights are weights.")),
        Trace((), (("pick", [1] * 18, 0.5),), why=say("9 of 18 is exactly one half, so index 9 begins here. Eighteenths, added "
                                                      "up one by one, miss it.")),
        Trace((), (("pick", [0, 1, 0.7, 1], 0.0),), why=say("Subtracted from the end, these weights do not come back to 0.")),
    )  # fmt: skip

    class Oracle:
        """Counts in exact fractions from the end."""

        def pick(self, weights, uniform):
            parts = [Fraction(w) for w in weights]
            after = sum(parts) * (1 - Fraction(uniform))  # what lies behind the target
            found, behind = None, Fraction(0)
            for i in reversed(range(len(parts))):
                if behind < after <= behind + parts[i]:
                    found = i
                behind += parts[i]
            return found

        def shares(self, weights, num):
            return [w * num // sum(weights) for w in weights]

    def traces(self):
        weights = st.lists(st.integers(0, 6), min_size=1, max_size=5).filter(any)
        return calls("pick", weights, st.integers(0, 63).map(lambda n: n / 64))

    def describe(self, op):
        if op[0] == "shares":
            return f"how often pick({op[1]}, uniform) gives each index, for uniform = 0/{op[2]}, 1/{op[2]}, ...:"
        return super().describe(op)

    def explain(self, op, expected, got):
        if isinstance(got, str) and "changed" in got:
            return say("The list belongs to the caller. Keep the running sum in a variable of your own.")
        if op[0] == "shares":
            return say("Over all uniforms each index is drawn for exactly its share: no randomness is left in it.")
        if got is None:
            return say("For every uniform below 1 there is an index. A walk that ends without one has added the weights in two "
                       "ways: take as their sum the last running sum itself, for sum() and a running sum may be rounded "
                       "differently.")
        if not whole(got):
            return say("pick returns an index, and for every uniform below 1 there is one.")
        if op[1][got : got + 1] == [0]:
            return say("This index has weight 0: nothing may draw it. The running sum must EXCEED the target; to reach it "
                       "is not enough.")  # fmt: skip
        if len(set(op[1])) == 1 and len(op[1]) > 2:
            return say("Are the weights divided before they are added? Quotients are rounded, and so is each of their sums. Leave "
                       "the weights as they are, and multiply the uniform.")  # fmt: skip
        return say("The running sum, in the order of the indices, first exceeds uniform * the whole sum at the index asked "
                   "for. Is your target a share of the sum, and is `exceeds` a > ?")  # fmt: skip


class Keep(Exercise):
    """Top-k and top-p."""

    name, points, minutes, section = "keep", 3, 15, "L33 4.3"
    defines = ("keep",)
    ours = {"keep": STEPS + "keep"}
    driver = "DrawDriver"
    hints = (
        say("Make a list of the indices by rank first. Everything else cuts this list. The order that you return is "
            "another one."),
        say("sorted(range(len(weights)), key=lambda i: (-weights[i], i)) ranks, and breaks ties by index. Top-p then walks "
            "along what top-k left, and its p is a share of THAT sum."),
        say("With a running sum over the ranks, stop after the first rank at which the sum reaches (>=) top_p * sum of the "
            "ranks that are left; that rank stays in. Return sorted(...). Skip it all when top_p is 1."),
    )  # fmt: skip
    examples = (
        Trace((), (("keep", [1, 4, 2, 1], 0, 1.0),)),
        Trace((), (("keep", [1, 4, 2, 1], 2, 1.0),)),
        Trace((), (("keep", [4, 1, 2, 1], 3, 1.0),), why=say("The third and fourth rank are equals: the lower index is the "
                                                             "third.")),
        Trace((), (("keep", [2, 2, 2], 2, 1.0),)),
        Trace((), (("keep", [1, 4, 2, 1], 9, 1.0),), why=say("A top_k beyond the vocabulary keeps all.")),
        Trace((), (("keep", [1, 4, 2, 1], 0, 0.5),), why=say("4 of 8 reach one half exactly: no second token is needed.")),
        Trace((), (("keep", [1, 4, 2, 1], 0, 0.625),), why=say("4 of 8 fall short, 6 of 8 reach it.")),
        Trace((), (("keep", [1, 4, 2, 1], 2, 0.5),), why=say("Top-k leaves 4 and 2: 4 of 6 are more than a half.")),
        Trace((), (("keep", [4, 3, 1], 2, 0.5625),), why=say("Top-k leaves 4 and 3. Of these 7, not of all 8, 4 is more than "
                                                         "0.5625.")),
        Trace((), (("keep", [1, 1, 1, 1], 0, 0.375),)),
        Trace((), (("keep", [0, 3, 0], 0, 1.0),), why=say("With both off, everything is kept, also what cannot be drawn.")),
        Trace((), (("keep", [1, 5, 2], 1, 0.0625),), why=say("The first rank is always kept.")),
        Trace((), (("keep", [0.25, 0.5, 0.25], 0, 0.75),)),
        Trace((), (("keep", [1, 2, 4, 8, 16], 4, 0.75),)),
        Trace((), (("keep", list(range(12)), 0, 0.5),), why=say("Ascending as numbers, not by rank.")),
        Trace((), (("keep", [9999, 1], 0, 0.999),), why=say("9,999 of 10,000 reach 0.999. Only a top_p of 1 is off.")),
        Trace((), (("keep", [1] * 12, 0, 0.5),), why=say("6 of 12 are exactly one half. Twelfths, added up one by one, miss it.")),
        Trace((), (("keep", [2**-40] * 4, 0, 0.75),), why=say("Small weights are weights: three of four reach 0.75, two do not.")),
    )  # fmt: skip

    class Oracle:
        """Takes the heaviest out, again and again."""

        def keep(self, weights, top_k, top_p):
            left = {i: Fraction(w) for i, w in enumerate(weights)}

            def heaviest():
                best = max(left.values())
                return min(i for i, w in left.items() if w == best)

            first = []
            while left and (not top_k or len(first) < top_k):
                i = heaviest()
                first.append((i, left.pop(i)))
            if top_p < 1:
                total = sum(w for _, w in first)
                for n in range(1, len(first) + 1):
                    if sum(w for _, w in first[:n]) >= Fraction(top_p) * total:
                        first = first[:n]
                        break
            return sorted(i for i, _ in first)

    def traces(self):
        weights = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)
        return calls("keep", weights, st.integers(0, 7), st.integers(1, 16).map(lambda n: n / 16))

    def describe(self, op):
        return f"keep({op[1]}, top_k={op[2]}, top_p={op[3]})"

    def explain(self, op, expected, got):
        if isinstance(got, str) and "changed" in got:
            return say("The list belongs to the caller: sorted() makes a new one, list.sort() and pop() change it.")
        if not isinstance(got, list) or not all(map(whole, got)):
            return say("Return a list of indices (not of weights).")
        if sorted(got) == expected:
            return say("The right indices, in another order: ascending, for pick walks in token-id order.")
        weights, top_k, top_p = op[1:]
        if sorted(weights[i] for i in got if i < len(weights)) == sorted(weights[i] for i in expected):
            return say("Among equals the lower index ranks first, so that two engines keep the same tokens.")
        if top_k and len(got) > top_k:
            return say("top_k {k} keeps {k} at most, also where the next one is an equal: the lower index is in, the other out.",
                       k=top_k)  # fmt: skip
        if top_p == 1:
            return say("top_k keeps that many first ranks; 0 is off; top_p 1 is off, and then even weight 0 stays.")
        if top_k and len(got) > len(expected):
            return say("Top-k goes first. p is a share of the sum that top-k LEFT, not of all weights.")
        if len(set(weights)) == 1 and abs(len(got) - len(expected)) == 1 and len(weights) > 4:
            return say("Are the weights divided before they are added? Quotients are rounded, and so is each of their sums. Leave "
                       "the weights as they are, and multiply p by the sum.")  # fmt: skip
        if len(got) < len(expected):
            return say("The run reaches p only together with the token that takes it there: keep that one too.")
        return say("The SHORTEST run of first ranks whose sum reaches (>=) top_p times the sum. Stop as soon as it does.")


class Sample(Exercise):
    """From logits to a token."""

    name, points, minutes, section = "sample", 3, 12, "L33 4.3"
    defines = ("sample",)
    ours = {"sample": STEPS + "sample"}
    part = {"sampler": "sample"}
    driver = "DrawDriver"
    num_random = 120
    hints = (
        say("Temperature 0 first, for nothing can be divided by it. Then weights, then keep, then pick. pick answers with a "
            "place among what it was given: which token is that?"),
        say("exp(1000) overflows, and weights need only be right up to a factor. Subtract the highest logit before you divide "
            "and exponentiate: the highest weight is then 1."),
        say("The weight of x is math.exp((x - highest) / temperature). keep_ranks says which ids stay; draw_one on the weights "
            "of these gives a place among them, and the id at that place is the token."),
    )  # fmt: skip
    examples = (
        Trace((), (("sample", [0.0, 2.0, 1.0], 0, 0, 1.0, 0.9),), why=say("Temperature 0 is greedy, whatever the uniform.")),
        Trace((), (("sample", [3.0, 1.0, 3.0], 0, 0, 1.0, 0.9),), why=say("Greedy, and two equals: the lowest id.")),
        Trace((), (("sample", [-INF, -5.0, -7.0], 0, 2, 0.5, 0.5),)),
        Trace((), (("sample", [0.0, 0.0, 0.0, 0.0], 1.0, 0, 1.0, 0.625),)),
        Trace((), (("sample", [0.0, 1.0, 2.0], 1.0, 0, 1.0, 0.0),), why=say("Token-id order: a small uniform draws token 0, "
                                                                        "though it is the least likely.")),
        Trace((), (("sample", [2.0, 1.0, 0.0], 0.25, 0, 1.0, 0.97),), why=say("A low temperature sharpens.")),
        Trace((), (("sample", [2.0, 1.0, 0.0], 4.0, 0, 1.0, 0.7),), why=say("A high temperature flattens.")),
        Trace((), (("sample", [1000.0, 1000.5, 999.0], 0.5, 0, 1.0, 0.5),), why=say("exp(2000) is too large for a float.")),
        Trace((), (("sample", [-9000.0, -9001.0], 1.0, 0, 1.0, 0.9),), why=say("exp(-9000) is 0: all weights would be.")),
        Trace((), (("sample", [0.0, 0.5, 0.0], 1e-3, 0, 1.0, 0.99),)),
        Trace((), (("sample", [-INF, 1.0, -INF, 1.0], 1.0, 0, 1.0, 0.75),), why=say("Banned tokens have -inf, and weight 0.")),
        Trace((), (("sample", [-INF, -INF, 3.0], 1.0, 2, 0.9, 0.0),)),
        Trace((), (("sample", [0.0, 3.0, 1.0, 2.0], 1.0, 2, 1.0, 0.9),), why=say("Top-k leaves tokens 1 and 3: pick's second "
                                                                             "is token 3.")),
        Trace((), (("sample", [1.0, 1.0, 1.0, 1.0], 1.0, 2, 1.0, 0.75),)),
        Trace((), (("sample", [0.0, 3.0, 1.0, 2.0], 1.0, 0, 0.7, 0.9),)),
        Trace((), (("sample", [0.0, 3.0, 1.0, 2.0], 3.0, 0, 0.7, 0.6),), why=say("Temperature first, then top-p: it is the "
                                                                             "heated weights whose share counts.")),
        Trace((), (("sample", [0.0, 1.0, 2.0, 3.0], 1.0, 3, 0.95, 0.05),)),
        Trace((), (("sample", [0.0, 0.25, 0.5, 0.75], 1.0, 0, 0.5, 0.0625),), why=say("The two likeliest reach a half: tokens 2 "
                                                                                  "and 3 are left.")),
        Trace((), (("sample", [0.0, 0.001], 0.001, 0, 1.0, 0.0),), why=say("Only 0 is greedy. At 0.001 token 0 still has a share "
                                                                       "of 27%, and uniform 0 is in it.")),
        Trace((), (("sample", [16777216.0, 16777217.0], 1.0, 0, 1.0, 0.3),), why=say("In float32 these two logits are one number. "
                                                                                 "The row is float64: stay in it.")),
        Trace((), (("sample", [1.386, 1.099, 0.0], 1.0, 2, 0.5625, 0.9),), why=say("Top-k first: of what it leaves, token 0 has "
                                                                               "more than 0.5625.")),
        Trace((), (("sample", [0.0, -3.5], 1.0, 0, 1.0, 0.99),), why=say("Unlikely is not never.")),
        Trace((), (("sample", [-INF, 1.0, 2.0], 1.0, 0, 1.0, 0.0),), why=say("Uniform 0, and token 0 is banned.")),
        Trace((), (("sample", [2.0, 2.0, 2.0, 2.0], 1.0, 0, 1.0, 0.5),), why=say("Four equal pieces: 0.5 begins the third.")),
    )  # fmt: skip

    class Oracle:
        """In 60 decimal digits. Where the target lies on a border between two tokens, either will do."""

        def sample(self, logits, temperature, top_k, top_p, uniform):
            if temperature == 0:
                return logits.index(max(logits))
            with localcontext() as context:
                context.prec = 60
                heat = Decimal(temperature)
                top = Decimal(max(logits))
                weights = [Decimal(0) if x == -INF else ((Decimal(x) - top) / heat).exp() for x in logits]
                shifts = ("0",) if set(weights) <= {0, 1} and top_p == 1 else ("-1e-12", "0", "1e-12")
                found = {self._draw(weights, logits, top_k, Decimal(top_p) + shift, Decimal(uniform) + shift)
                         for shift in map(Decimal, shifts)}  # fmt: skip
            found.discard(None)
            return found.pop() if len(found) == 1 else OneOf(tuple(sorted(found)))

        def _draw(self, weights, logits, top_k, top_p, uniform):
            first = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
            if top_p < Decimal("0.999999"):
                total = sum(weights[i] for i in first)
                n = 1
                while n < len(first) and sum(weights[i] for i in first[:n]) < top_p * total:
                    n += 1
                first = first[:n]
            target = max(uniform, Decimal(0)) * sum(weights[i] for i in first)
            for i in sorted(first):
                target -= weights[i]
                if target < 0:
                    return i

    def traces(self):
        some = st.sampled_from([n / 8 for n in range(-12, 13)] + [-INF])
        logits = st.lists(some, min_size=3, max_size=7)
        heats = st.sampled_from([0.5, 1.0, 1.5, 3.0, 0])
        return calls("sample", logits.filter(lambda x: max(x) > -INF), heats, st.integers(0, 8),
                     st.sampled_from([1.0, 0.95, 0.9, 0.7, 0.5, 0.2]), st.integers(0, 63).map(lambda n: n / 64))  # fmt: skip

    def describe(self, op):
        names = ("temperature", "top_k", "top_p", "uniform")
        return f"sample({op[1]}, {', '.join(f'{n}={v}' for n, v in zip(names, op[2:], strict=True))})"

    def explain(self, op, expected, got):
        logits, temperature, top_k, top_p, uniform = op[1:]
        if isinstance(got, str) and "changed" in got:
            return say("With n = 4 the same row of logits is drawn from four times. Work on numbers of your own: logits -= ... "
                       "and logits[i] = ... write into the engine's array.")  # fmt: skip
        if not whole(got):
            return say("sample returns one token id, a whole number of Python's (int). Where keep and pick work on places, "
                       "translate back.")  # fmt: skip
        if temperature == 0:
            return say("Temperature 0 is greedy: the highest logit; of equals, the lowest id. The uniform plays no part.")
        if (not 0 <= got < len(logits) or logits[got] == -INF) and (top_k or top_p < 1):
            return say("This token is banned (its logit is -inf), or there is none of this number. Did you return the PLACE among "
                       "the kept ones? The token is kept[place].")  # fmt: skip
        if not 0 <= got < len(logits) or logits[got] == -INF:
            return say("This token is banned (its logit is -inf, its weight 0), or there is none of this number.")
        if top_k or top_p < 1:
            return say("Here top_k or top_p cuts. Weights first (with the temperature), then keep; pick then answers with a "
                       "place among the kept ones, and the token is kept[place].")  # fmt: skip
        return say("Weights are exp(logit / temperature), in token-id order; subtract the highest logit first, which changes "
                   "no share.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "ZeroDivisionError":
            return say("Temperature 0 cannot divide: it means greedy, and needs no weights. And if all weights became 0, the "
                       "logits were not shifted by the highest.")  # fmt: skip
        if error in ("OverflowError", "StopIteration"):
            return say("exp of a large number overflows, and of a very negative one is 0. Subtract the highest logit first: "
                       "then the highest weight is 1 and nothing can overflow.")  # fmt: skip
        return None


class Draws(Exercise):
    """Who draws in this step, and which number."""

    name, points, minutes, section = "draws", 3, 15, "L33 3.2, 4.3, 5.3"
    defines = ("draws",)
    ours = {"draws": STEPS + "draws"}
    driver = "CountDriver"
    hints = (
        say("Three questions for each entry. Does this step compute its last known token? In which row is that token? How many "
            "outputs does it have already?"),
        say("The first: num_computed + num_scheduled == num_tokens. The second: keep a running count of rows; the last row of "
            "an entry is the count after it, minus 1. The third: num_tokens - num_prompt_tokens."),
        say("For child in range(1 + entry.num_to_fork): append (row, entry.seed + child, position). Count the rows of those who "
            "are NOT sampled too: their tokens are in the batch."),
    )  # fmt: skip
    examples = (
        Trace((), (("draws", (7, 4, 4, 0, 4)),), why=say("A whole prompt: its last row gives the first output.")),
        Trace((), (("draws", (7, 4, 5, 4, 1)),), why=say("A decode: one row, and it has one output already.")),
        Trace((), (("draws", (7, 4, 4, 0, 3)),), why=say("A chunk that does not reach the end of the prompt: nobody draws.")),
        Trace((), (("draws", (7, 4, 4, 3, 1)),), why=say("The last chunk of a prompt, one token long, and no output yet.")),
        Trace((), (("draws", (7, 9, 9, 0, 4), (8, 2, 6, 5, 1)),), why=say("The chunk's four rows come first, and nobody draws "
                                                                     "from them.")),
        Trace((), (("draws", (7, 4, 9, 0, 9)),), why=say("Preempted with five outputs, computed again: position 5 is next. The "
                                                   "first five are not drawn again.")),
        Trace((), (("draws", (7, 4, 9, 0, 4)),), why=say("Computed again in chunks: this one ends where the prompt ends, but not "
                                                   "where the known tokens end.")),
        Trace((), (("draws", (7, 4, 4, 0, 4, 2)),), why=say("n = 3: three draws from one row, each with a seed of its own.")),
        Trace((), (("draws", (7, 4, 4, 0, 3, 2)),)),
        Trace((), (("draws", (7, 4, 6, 5, 1), (7, 4, 6, 5, 1)),)),
        Trace((), (("draws",),)),
    )  # fmt: skip

    class Oracle:
        """Lays the batch out token by token."""

        def draws(self, *entries):
            rows = []
            for seed, prompt, known, computed, scheduled, *forks in entries:
                for at in range(computed, computed + scheduled):
                    last = at == known - 1
                    rows.append([(seed + c, known - prompt) for c in range(1 + (forks[0] if forks else 0))] if last else [])
            return [[row, seed, position] for row, found in enumerate(rows) for seed, position in found]

    def traces(self):
        @st.composite
        def entry(draw):
            prompt, outputs = draw(st.integers(1, 5)), draw(st.integers(0, 3))
            computed = draw(st.integers(0, prompt + outputs - 1))
            scheduled = draw(st.integers(1, prompt + outputs - computed))
            forks = draw(st.integers(0, 2)) if not outputs else 0
            return (draw(st.integers(0, 9)) * 10, prompt, prompt + outputs, computed, scheduled, forks)

        return st.lists(entry(), max_size=4).map(lambda entries: Trace((), (("draws", *entries),)))

    def describe(self, op):
        names = ("seed", "prompt", "tokens", "computed", "scheduled", "to_fork")
        told = ["Entry(" + ", ".join(f"{n} {v}" for n, v in zip(names, e, strict=False)) + ")" for e in op[1:]]
        return f"draws([{', '.join(told)}])"

    def explain(self, op, expected, got):
        if isinstance(got, str) and "changed" in got:
            return say("draws only reads. The list belongs to the scheduler.")
        if not isinstance(got, list) or not all(isinstance(one, list) and len(one) == 3 for one in got):
            return say("Return a list of tuples (row, seed, position); an empty list if nobody draws.")
        if len(got) > len(expected):
            return say("Too many draws. A request is sampled only in the step that computes its LAST known token: computed + "
                       "scheduled == num_tokens. Every other row is K and V for later.")  # fmt: skip
        if len(got) < len(expected):
            return say("A draw is missing. A decode, the last chunk of a prompt and the last chunk of a recomputation all end at "
                       "the last known token; and a prompt with n > 1 is drawn from once for each child as well.")  # fmt: skip
        if [one[0] for one in got] != [one[0] for one in expected]:
            return say("The row: entries lie one after the other, one row for each scheduled token, also of those who do not "
                       "draw. A request is sampled from its last row.")  # fmt: skip
        if [one[2] for one in got] != [one[2] for one in expected]:
            return say("The position is the number of outputs that the request HAS, num_tokens - num_prompt_tokens. It does not "
                       "depend on how often or in how many pieces something was computed.")  # fmt: skip
        return say("The seed is the request's own, and seed + c for its child c = 1, 2, ...: else all samples say the same.")

    def explain_error(self, op, expected, error, message):
        if error == "AttributeError" and "set attribute" in message:
            return say("An Entry is only read: whose children are born, and when, is the scheduler's business. Count in a variable "
                       "of your own.")  # fmt: skip
        return None


class Step(Exercise):
    """The step."""

    name, points, minutes, section = "step", 2, 8, "L33 4.3, 4.4"
    defines = ("step",)
    ours = {"step": "kvlab.engine.core:step"}
    bars = ("kvlab.engine.core:EngineCore",)
    part = {"step": "step"}
    driver = "StepDriver"
    hints = (
        say("Three verbs: decide, compute, take in. Who does which?"),
        say("What schedule() returns goes to the runner, and to the scheduler again, together with what the runner returned."),
        say("output = scheduler.schedule(); sampled = runner.execute(output); the last line returns what "
            "scheduler.update_from_output makes of the two."),
    )  # fmt: skip
    examples = (
        Trace((), (("step", ["a", "b"], ["a", "b"]),)),
        Trace((), (("step", ["a"], []),), why=say("A chunk in the middle of a prompt: it is computed, nobody "
                                                      "draws, sampled is {}. Unheard, it is computed again, for ever.")),
        Trace((), (("step", [], []),), why=say("Nobody computes, but blocks must be copied out: the runner has to be told.")),
        Trace((), (("step", ["a"], ["a"]), ("step", ["a", "b"], ["b"]))),
        Trace((), (("step_that_fails", "execute"),), why=say("The runner raises. Who fails is found around your step.")),
        Trace((), (("step_that_fails", "schedule"),)),
        Trace((), (("step_that_fails", "update_from_output"),)),
    )  # fmt: skip

    class Oracle:
        def step(self, scheduled, with_results):
            return ["schedule()", "execute(the output)", "update_from_output(the output, the sampled)",
                    "returned what update_from_output gave"]  # fmt: skip

        def step_that_fails(self, where):
            calls = ["schedule", "execute", "update_from_output"]
            return calls[: calls.index(where) + 1] + ["the error came out"]

    def describe(self, op):
        if op[0] == "step_that_fails":
            return f"step(scheduler, runner), where {op[1]} raises OverflowError, calls in order:"
        what = f"a step of {', '.join(op[1])}" if op[1] else "a step of copies alone"
        return f"step(scheduler, runner), {what}, does in order:"

    def explain(self, op, expected, got):
        if not isinstance(got, list):
            return None
        if op[0] == "step_that_fails":
            if got[-1] == expected[-1]:
                return say("After an error nothing more is called: no second try, no update, no new plan. What was decided must stay "
                           "as it is, so that the engine around your step can try it again.")  # fmt: skip
            return say("An error must come through, as it is. The engine around your step finds out whose it is; a step that hides "
                       "it leaves requests that never end.")  # fmt: skip
        if got[: len(expected) - 1] == expected[:-1]:
            return say("Everything is done, but what update_from_output returns must come out of step: it is what the users "
                       "wait for.")  # fmt: skip
        called = [one.split("(")[0] for one in got]
        if called.count("schedule") > 1 or called.count("execute") > 1:
            return say("Once each. A second schedule() decides a second step; a second execute() computes twice.")
        if "execute" not in called:
            return say("The runner must be told of every step, even one in which nobody computes: K and V may have to be copied.")
        if "update_from_output" not in called:
            return say("The scheduler must hear of every step what came of it, else no token is ever appended.")
        return say("Decide, compute, take in: each call gets what the calls before it returned, those very objects.")

    def explain_error(self, op, expected, error, message):
        if op[0] == "step_that_fails":
            return say("The error must come out as it was raised: another one in its place hides whose it is.")
        return None


class WorstBatch(Exercise):
    """The worst step."""

    name, points, minutes, section = "worst_batch", 2, 10, "PAV 3.1"
    defines = ("worst_batch",)
    ours = {"worst_batch": STEPS + "worst_batch"}
    driver = "CountDriver"
    hints = (
        say("How many requests can be in it, if each computes at least one token? Fix this number first."),
        say("min(max_num_seqs, max_num_batched_tokens) requests, one token each. What is left of the budget goes to the first "
            "until it has max_model_len, then to the second, and so on."),
        say("Begin with [1] * num_seqs, and left = max_num_batched_tokens - num_seqs. Each request in turn may take as much more as "
            "is left, but no more than max_model_len - 1; subtract it from left."),
    )  # fmt: skip
    examples = (
        Trace((), (("worst_batch", 8, 2, 16),)),
        Trace((), (("worst_batch", 8, 1, 16),)),
        Trace((), (("worst_batch", 8, 3, 4),), why=say("The longest has 4 tokens at most, and somebody takes the rest.")),
        Trace((), (("worst_batch", 3, 8, 16),), why=say("Three tokens: no more than three requests.")),
        Trace((), (("worst_batch", 100, 3, 4),), why=say("Three requests of at most 4 tokens: the budget is never full.")),
        Trace((), (("worst_batch", 5, 5, 2),)),
        Trace((), (("worst_batch", 1, 1, 2),)),
        Trace((), (("worst_batch", 4, 3, 1),), why=say("Sequences of one token: three requests are three tokens.")),
        Trace((), (("worst_batch", 512, 32, 2048),)),
        Trace((), (("worst_batch", 8192, 256, 4096),)),
    )  # fmt: skip

    class Oracle:
        """Deals out one token at a time: to the first who may still take one."""

        def worst_batch(self, budget, seats, longest):
            counts = []
            while len(counts) < seats and sum(counts) < budget:
                counts.append(1)
            at, left = 0, budget - len(counts)
            while left and at < len(counts):
                if counts[at] == longest:
                    at += 1
                else:
                    counts[at] += 1
                    left -= 1
            return counts

    def traces(self):
        return calls("worst_batch", st.integers(1, 24), st.integers(1, 8), st.integers(1, 9))

    def describe(self, op):
        return f"worst_batch(max_num_batched_tokens={op[1]}, max_num_seqs={op[2]}, max_model_len={op[3]})"

    def explain(self, op, expected, got):
        if not isinstance(got, list) or not all(map(whole, got)):
            return say("Return a list of whole numbers: the tokens of each request.")
        budget, seats, longest = op[1:]
        if any(not 1 <= n <= longest for n in got):
            return say("A request in a step computes at least 1 token, and at most max_model_len.")
        if sum(got) > budget or len(got) > seats:
            return say("The engine never runs this step: it has more tokens than the budget, or more requests than seats.")
        if sum(got) < sum(expected):
            return say("There is room for more tokens. What is left of the budget goes to whoever may still take some.")
        if len(got) < len(expected):
            return say("There is room for more requests: each needs only one token, and may have a row of logits.")
        if sorted(got) == sorted(expected):
            return say("The right step, in another order: the longest first.")
        return say("As many tokens, as many requests; and the longest could be longer still. Leave the others one token each, "
                   "as far as you can.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "ZeroDivisionError":
            return say("max_model_len may be 1: then nobody can take more than the one token that each has.")
        return None


class CarefulExecute(Exercise):
    """Who spoils the batch?"""

    name, points, minutes, section = "careful_execute", 3, 15, "L33 4.4"
    stretch = True
    defines = ("careful_execute",)
    ours = {"careful_execute": STEPS + "careful_execute"}
    is_compared = False  # docstring and hints lead to the very lines that ours has
    driver = "CarefulDriver"
    hints = (
        say("Try all of them together first. Only if that raises, go through them one by one, each in a try of its own."),
        say("Before going one by one: were the copies made? `output.block_ops and not output.block_ops_done` says that they were "
            "not. Then raise what was raised (a bare `raise`)."),
        say("except Exception, not a bare except: who presses Ctrl-C wants to be heard. What runner.execute gives for "
            "alone(output, i) goes into sampled; in the except, the text of the error goes into failed, under the request's id."),
    )  # fmt: skip
    examples = (
        Trace((), (("careful_execute", ["a", "b"], {}),), why=say("All is well: one forward, nobody is tried twice.")),
        Trace((), (("careful_execute", ["a", "b"], {"b": "NaN"}),)),
        Trace((), (("careful_execute", ["a", "b", "c"], {"a": "NaN", "c": "inf"}),), why=say("Two of three fail: the one between "
                                                                                     "them goes on.")),
        Trace((), (("careful_execute", ["a"], {"a": "NaN"}),)),
        Trace((), (("careful_execute", ["a", "silent"], {"a": "NaN"}),), why=say("A chunk: it is computed, and has no token.")),
        Trace((), (("careful_execute", ["a", "b"], {"a": ""}),), why=say("An error may have no words.")),
        Trace((), (("careful_execute", ["a", "b"], {"b": "NaN"}, "made"),), why=say("The copies are made once.")),
        Trace((), (("careful_execute", ["a", "b"], {}, "made"),)),
        Trace((), (("careful_execute", ["a", "b"], {}, "fail"),), why=say("The copies failed: whose K and V is right, nobody "
                                                                     "knows.")),
        Trace((), (("careful_execute", ["a", "b"], {"a": "interrupt"}),)),
        Trace((), (("careful_execute", ["a", "b"], {"b": "interrupt alone"}),), why=say("Ctrl-C while b is tried alone is no error "
                                                                                   "of b's.")),
        Trace((), (("careful_execute", [], {}),)),
    )  # fmt: skip
    num_random = 20

    class Oracle:
        """Says who is in which forward."""

        def careful_execute(self, names, bad, copies="none"):
            asked, copied = [",".join(names)], int(copies == "made")
            if copies == "fail":
                raise ConnectionError("the copy")
            if "interrupt" in bad.values():
                return ["interrupted", asked, copied]
            if "interrupt alone" in bad.values():
                return ["interrupted", asked + [n for n in names if "interrupt alone" not in map(bad.get, names[: names.index(n)])],
                        copied]  # fmt: skip
            failed = {name: bad[name] for name in names if name in bad}
            if failed:
                asked += names
            sampled = {name: [len(name) + ord(name[0])] for name in names if name not in failed and name != "silent"}
            return [sampled, failed, asked, copied]

    def traces(self):
        names = st.lists(st.sampled_from(["a", "b", "c", "dd", "silent"]), unique=True, max_size=4)
        bad = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.sampled_from(["NaN", "inf"]))
        return calls("careful_execute", names, bad, st.sampled_from(["none", "made"]))

    def describe(self, op):
        names, bad, *copies = op[1:]
        told = {"made": ", with a block to copy", "fail": ", whose copy raises"}.get(copies[0] if copies else "", "")
        when = {"interrupt": "Ctrl-C is pressed while {} is computed", "interrupt alone": "{} raises, and then Ctrl-C is pressed"}
        spoilt = ", ".join(when.get(w, f"{{}} raises {w!r}").format(n) for n, w in bad.items()) or "nobody raises"
        return f"careful_execute on a step of {', '.join(names) or 'nobody'}{told}, where {spoilt}: sampled, failed, forwards, copies"

    def explain(self, op, expected, got):
        if got == "ConnectionError" or isinstance(expected, Exception):
            return say("If the copies failed, nothing may be tried: the blocks that they should have filled are in doubt. Raise "
                       "what was raised.")  # fmt: skip
        if not isinstance(got, list):
            return say("Return two dicts: token ids by request id, and the words of the error by request id.")
        if expected[0] == "interrupted":
            return say("Ctrl-C must stop the engine, in the first try and in those alone. `except Exception` lets it through; a "
                       "bare `except` and `except BaseException` eat it.")  # fmt: skip
        if got[0] == "interrupted":
            return None
        if [*got[0], *got[1]] != [name for name in [*got[0], *got[1]] if not name.startswith("(")]:
            return say("The keys are request ids: request.request_id, not the request.")
        if got[2] != expected[2]:
            return say("All together first. Only if that fails: each once, alone, in the order of the step.")
        if got[3] != expected[3]:
            return say("A block was copied {n} times. alone(output, i) says that its copies have been made.", n=got[3])
        if got[1] != expected[1]:
            if any(words.startswith("(") for words in got[1].values()):
                return say("failed holds the WORDS of the error, str(error): they go to the user, and the error keeps the whole "
                           "batch alive.")  # fmt: skip
            return say("failed: request id -> str(error), for those who fail ALONE, and nobody else.")
        return say("sampled: the tokens of all who could be computed alone.")

    def explain_error(self, op, expected, error, message):
        if error == "ValueError":
            return say("The forward raised this, not the copies: block_ops is empty, or block_ops_done is set. So everybody is tried "
                       "alone. Only failed copies (block_ops, and not block_ops_done) end it all.")  # fmt: skip
        if error == "ConnectionError":
            return say("This is the copy, made a second time. Give the runner alone(output, i), which says that it has been made.")
        return None
