"""Lab 09, preemption: its exercises."""

from dataclasses import dataclass
from fractions import Fraction

from hypothesis import strategies as st

from kvlab.grade import Approx, Exercise, LabInfo, Trace, calls, say

LAB = LabInfo(title=say("Preemption"), sections="L33 5.1-5.4, 8.1, 8.2, 9.3, A.2; PAV 7", before=("01", "03", "07"))
STEPS, POLICIES = "kvlab.costs.preemption_steps:", "kvlab.schedule.policies:"
PRICED = tuple(f"kvlab.costs.preemption:{name}" for name in (
    "swap_seconds", "recompute_seconds", "swap_advantage", "crossover_bandwidth", "crossover_tokens", "transfer_seconds"))  # fmt: skip


def near(a, b):
    return isinstance(a, int | float) and not isinstance(a, bool) and abs(a - b) <= 1e-6 * abs(b) + 1e-12


def is_pair(got):
    return isinstance(got, list | tuple) and len(got) == 2


class ByTheBook(Exercise):
    """Both bills as the textbook writes them."""

    name, points, minutes, section = "by_the_book", 2, 10, "L33 5.4"
    defines = ("by_the_book",)
    ours = {"by_the_book": STEPS + "by_the_book"}
    bars = PRICED
    driver = "BookDriver"
    hints = (
        say("Swapping moves bytes over a link, so divide bytes by bytes a second. Recomputing does arithmetic, so divide "
            "FLOP by FLOP a second. How often does each byte travel? How many FLOP does one weight cost a token?"),
        say("Each token's K and V go out and come in again: twice. Each weight is multiplied and the product added: two "
            "FLOP for each weight and token."),
        say("swap = 2 * tokens * kv_bytes_per_token / bandwidth, and recompute = 2 * num_parameters * tokens / "
            "flops_rate."),
    )  # fmt: skip
    examples = (
        Trace((), (("by_the_book", 1, 8, 10, 4, 5),)),
        Trace((), (("by_the_book", 1000, 327_680, 70e9, 32e9, 500e12),)),
        Trace((), (("by_the_book", 3, 5, 7, 100, 1000),)),
        Trace((), (("by_the_book", 16_384, 524_288, 7e9, 64e9, 300e12),)),
    )

    class Oracle:
        """Every byte makes two journeys, every weight does two operations."""

        def by_the_book(self, tokens, kv_bytes_per_token, num_parameters, bandwidth, flops_rate):
            num_bytes, work = Fraction(tokens) * Fraction(kv_bytes_per_token), Fraction(num_parameters) * tokens
            out = back = num_bytes / Fraction(bandwidth)
            multiply = add = work / Fraction(flops_rate)
            return Approx([float(out + back), float(multiply + add)])

    def traces(self):
        whole = st.integers(1, 50)
        return calls("by_the_book", whole, whole, whole, whole, whole)

    def explain(self, op, expected, got):
        if not is_pair(got):
            return say("Return two numbers: seconds to swap, seconds to recompute, in this order.")
        swap, recompute = expected.value
        if near(got[0], recompute) and near(got[1], swap) and not near(swap, recompute):
            return say("The two are in the wrong order: first swapping, then recomputing.")
        if near(got[0], 1000 * swap) or near(got[1], 1000 * recompute):
            return say("A thousand times too large: the function returns seconds, not milliseconds.")
        if near(2 * got[0], swap):
            return say("The K and V leave the GPU, and later they come back: each byte travels twice.")
        if near(2 * got[1], recompute):
            return say("A weight costs a token two operations: one multiplication and one addition.")
        if not near(got[0], swap):
            return say("Swapping: bytes of all tokens (tokens * kv_bytes_per_token), out and in, over the bytes that the link "
                       "moves in a second. All of these come as arguments.")  # fmt: skip
        return say("Recomputing: FLOP of all tokens, two for each weight and token, over the FLOP that the GPU does in a "
                   "second.")  # fmt: skip


class TwoBills(Exercise):
    """Both bills with what the textbook leaves out."""

    name, points, minutes, section = "two_bills", 3, 15, "L33 5.2-5.4, 6"
    defines = ("two_bills",)
    ours = {"two_bills": STEPS + "two_bills"}
    bars = PRICED
    driver = "BillsDriver"
    hints = (
        say("Say it in words first. On the way out nobody knows yet what will be found, so everything goes. On the way in "
            "only what is missing comes."),
        say("new = tokens - found. Swap: the fixed part once, then `move` for each token that goes out and for each that "
            "comes in. Recompute: `compute` for each new token, `pair` for each query-key pair. Which keys does the first "
            "new token see?"),
        say("The first new token sees found + 1 keys, the next found + 2, the last one all of them. Together: new * found "
            "+ new * (new + 1) / 2 pairs."),
    )  # fmt: skip
    examples = (
        Trace((), (("two_bills", [1, 0, 0, 0], 10),)),
        Trace((), (("two_bills", [0, 1, 0, 0], 10),)),
        Trace((), (("two_bills", [0, 0, 1, 0], 1),), why=say("A single token: it sees one key, its own.")),
        Trace((), (("two_bills", [0, 0, 1, 0], 3),), why=say("Three tokens see one, two and three keys.")),
        Trace((), (("two_bills", [1, 10, 0, 100], 10),)),
        Trace((), (("two_bills", [1, 0, 0, 0], 10, 4),), why=say("Ten tokens go out. Four are found, six come in.")),
        Trace((), (("two_bills", [0, 1, 0, 0], 10, 4),)),
        Trace((), (("two_bills", [0, 0, 1, 0], 3, 1),), why=say("The second token sees two keys, the third sees three.")),
        Trace((), (("two_bills", [2, 3, 5, 7], 4, 4),), why=say("All is found: nothing to copy in, nothing to compute.")),
        Trace((), (("two_bills", [2e-6, 3e-5, 1e-9, 1e-3], 2000, 1500),)),
    )  # fmt: skip

    class Oracle:
        """Token by token."""

        def two_bills(self, prices, tokens, found=0):
            move, compute, pair, fixed = map(Fraction, prices)
            swap, recompute = fixed, Fraction(0)
            for position in range(tokens):
                swap += move
                if position >= found:
                    swap += move
                    recompute += compute + pair * (position + 1)
            return Approx([float(swap), float(recompute)])

    def traces(self):
        prices = st.lists(st.integers(0, 5), min_size=4, max_size=4)
        sizes = st.integers(1, 20).flatmap(lambda tokens: st.tuples(st.just(tokens), st.integers(0, tokens)))
        return st.builds(lambda p, size: Trace((), (("two_bills", p, *size),)), prices, sizes)

    def describe(self, op):
        return f"two_bills({priced(op[1])}, {', '.join(map(str, op[2:]))})"

    def explain(self, op, expected, got):
        if not is_pair(got):
            return say("Return two numbers: seconds to swap, seconds to recompute, in this order.")
        (move, compute, pair, fixed), tokens, found = op[1], op[2], op[3] if len(op) > 3 else 0
        swap, recompute = expected.value
        new = tokens - found
        if near(got[0], recompute) and near(got[1], swap) and not near(swap, recompute):
            return say("The two are in the wrong order: first swapping, then recomputing.")
        if not near(got[0], swap):
            if near(got[0], swap - fixed) or near(got[0], swap + fixed):
                return say("`fixed` is what one swap takes, out and in together: add it once.")
            if near(got[0], fixed + 2 * move * new):
                return say("When the victim leaves, nobody knows what will be found later: all tokens go out. Only the way "
                           "in becomes shorter.")  # fmt: skip
            return say("Swapping: the fixed part, all tokens out, and those that are not found in.")
        if near(got[1], compute * new + pair * new * (new + 1) / 2):
            return say("What is found need not be computed, but it is attended to: each new token also looks at the found "
                       "ones before it.")  # fmt: skip
        if near(got[1], compute * new + pair * tokens * (tokens + 1) / 2):
            return say("The pairs of found tokens are not computed again: only new tokens have queries.")
        return say("Recomputing: `compute` for each token that is not found, and `pair` for each key that such a token "
                   "sees. Token number i sees i keys, its own included.")  # fmt: skip


def counted(number, what):
    return f"{number} {what}{'' if number == 1 else 's'}"


def priced(prices):
    names = ("move", "compute", "pair", "fixed")
    return f"Prices({', '.join(f'{name}={value:g}' for name, value in zip(names, prices, strict=True))})"


class SwapWinsFrom(Exercise):
    """From how many tokens on swapping wins."""

    name, points, minutes, section = "swap_wins_from", 4, 20, "L33 5.4"
    defines = ("swap_wins_from",)
    ours = {"swap_wins_from": STEPS + "swap_wins_from"}
    bars = PRICED
    driver = "CrossingDriver"
    hints = (
        say("S(S + 1)/2 is half of S * S and half of S: so `pair` is in both, a and b. Then go through the table row by row. "
            "Is a * S * S + b * S - fixed above zero for small S? For very large S? If that differs, it crosses zero once."),
        say("a = pair / 2, and b = compute + pair / 2 - 2 * move. If a is 0 it is a straight line: look at b and fixed. If "
            "a is above 0 it goes up in the end, so the answer is never None."),
        say("a == 0: None if b <= 0, else fixed / b. a > 0: 0.0 if fixed == 0 and b >= 0, else (-b + sqrt(b * b + 4 * a * "
            "fixed)) / (2 * a)."),
    )  # fmt: skip
    examples = (
        Trace((), (("swap_wins_from", [1, 5, 0, 0]),)),
        Trace((), (("swap_wins_from", [5, 1, 0, 0]),)),
        Trace((), (("swap_wins_from", [1, 5, 0, 12]),), why=say("A fixed cost, and each token gains 5 - 2.")),
        Trace((), (("swap_wins_from", [5, 1, 0, 12]),)),
        Trace((), (("swap_wins_from", [2, 5, 0, 3]),)),
        Trace((), (("swap_wins_from", [1, 5, 0, 10]),), why=say("The length at which both are equal need not be whole.")),
        Trace((), (("swap_wins_from", [1, 2, 0, 0]),), why=say("Both cost the same at every length: swapping is never the "
                                                               "cheaper one.")),
        Trace((), (("swap_wins_from", [1, 2, 0, 3]),)),
        Trace((), (("swap_wins_from", [1, 2, 1, 0]),), why=say("From the first token on: pairs alone decide.")),
        Trace((), (("swap_wins_from", [4, 3, 2, 0]),), why=say("Nothing is fixed, and short victims lose by swapping: "
                                                               "a token gains 3 + 1 - 8, and S tokens another S * S.")),
        Trace((), (("swap_wins_from", [1, 1, 2, 0]),), why=say("Here b is exactly 0.")),
        Trace((), (("swap_wins_from", [1, 1, 2, 9]),)),
        Trace((), (("swap_wins_from", [1, 5, 2, 12]),)),
        Trace((), (("swap_wins_from", [4, 3, 2, 12]),)),
        Trace((), (("swap_wins_from", [1.6384e-05, 2.590e-05, 1.0486e-09, 0]),)),
        Trace((), (("swap_wins_from", [1.6384e-05, 2.590e-05, 1.0486e-09, 1e-3]),),
              why=say("Prices are small numbers: 0.000001 is not zero.")),
        Trace((), (("swap_wins_from", [1.792e-06, 2.6e-05, 8e-10, 1e-3]),)),
        Trace((), (("swap_wins_from", [3.84e-07, 1.43e-06, 0, 0]),),
              why=say("Half a billion parameters: a token gains 0.66 millionths of a second, and that is not zero.")),
        Trace((), (("swap_wins_from", [3.84e-07, 1.43e-06, 0, 9e-7]),)),
        Trace((), (("swap_wins_from", [3.84e-07, 1.43e-06, 0, 2.5e-3]),)),
        Trace((), (("swap_wins_from", [1e-06, 2.001e-06, 0, 2.5e-3]),), why=say("A token gains next to nothing, so many are "
                                                                             "needed. They are a number all the same.")),
        Trace((), (("swap_wins_from", [1e-13, 4e-13, 0, 0]),)),
        Trace((), (("swap_wins_from", [1e-9, 1e-9, 1e-14, 0]),), why=say("A machine of the far future. The smallest price "
                                                                       "above zero is still a price.")),
    )  # fmt: skip

    class Oracle:
        """Looks for the crossing by halving, on exact bills."""

        def swap_wins_from(self, prices):
            move, compute, pair, fixed = map(Fraction, prices)

            def gains(tokens):
                return compute * tokens + pair * tokens * (tokens + 1) / 2 - fixed - 2 * move * tokens

            tiny, huge = Fraction(1, 10**15), Fraction(10**15)
            if gains(huge) <= 0:
                return None
            if gains(tiny) > 0:
                return Approx(0.0)
            low, high = tiny, huge
            for _ in range(160):
                middle = (low + high) / 2
                low, high = (low, middle) if gains(middle) > 0 else (middle, high)
            return Approx(float(high), rel=1e-6)

    def traces(self):
        def make(unit, *prices):
            return Trace((), (("swap_wins_from", [unit * price for price in prices]),))

        small, unit = st.integers(0, 6), st.sampled_from([1, 2**-20, 2**-45])  # powers of two: a tie stays a tie
        return st.builds(make, unit, st.integers(1, 6), st.integers(1, 12), small, small)

    def describe(self, op):
        return f"swap_wins_from({priced(op[1])})"

    def explain(self, op, expected, got):
        move, compute, pair, fixed = op[1]
        gain = compute + pair / 2 - 2 * move
        if expected is None:
            return say("A token costs at least as much to swap as to compute, and no pairs come to swapping's help: it is "
                       "cheaper at no length. The answer is None, not a number.")  # fmt: skip
        if expected.accepts(0.0):
            return say("Swapping is cheaper from the first token on: the answer is 0.0.")
        if got is None:
            return say("There is a length from which on swapping is cheaper. Pairs grow with the square of the length, so "
                       "in the end they outweigh everything.") if pair else say(
                       "Each token gains a little by swapping. So some number of tokens pays for the fixed cost.")  # fmt: skip
        if isinstance(got, int | float) and got < 0:
            return say("A negative number of tokens: that is the other root of the equation.")
        if near(got, 0) and fixed:
            return say("0.0 says that swapping is cheaper at every length. Here a fixed cost must be paid for first.")
        if pair and compute > 2 * move and near(got, fixed / (compute - 2 * move)):
            return say("This leaves the pairs out. Token number i sees i keys: S tokens have S * (S + 1) / 2 pairs.")
        if near(got, 0) and expected.value < 1:
            return say("A victim of one token gains already, and yet the bills are equal at some length above 0. That length is "
                       "asked for, whole or not; 0.0 only if swapping is cheaper at every length above 0.")  # fmt: skip
        if gain < 0 and near(got, 0):
            return say("Short victims are cheaper to compute here: each token loses by swapping, until the pairs outweigh "
                       "it. So 0.0 is too early.")  # fmt: skip
        if pair and near(got, _root(pair, compute + pair - 2 * move, fixed)):
            return say("S tokens have S * (S + 1) / 2 pairs: do not forget the half in front of S * S.")
        return say("Where are the two bills equal? Put your answer into two_bills: with S tokens both must cost the same, "
                   "as a length that need not be whole.")  # fmt: skip


def _root(a, b, c):
    return (-b + (b * b + 4 * a * c) ** 0.5) / (2 * a) if a else 0


@dataclass(frozen=True)
class Between:
    """A whole number from low to high."""

    low: int
    high: int

    def accepts(self, value):
        return type(value) is int and self.low <= value <= self.high

    def __str__(self):
        if self.high > 10**6:
            return f"{self.low} or more"
        return str(self.low) if self.low == self.high else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class More:
    """[a border, by how much it moves when it was thrown out once more]: `each` at least, and it may double."""

    border: Between
    each: int

    def accepts(self, value):
        if not isinstance(value, list) or len(value) != 2 or not self.border.accepts(value[0]):
            return False
        return Between(self.each, value[0]).accepts(value[1])

    def __str__(self):
        return f"{self.border}, and {self.each} more at least"


NAMES = "ABCDEF"


@dataclass(frozen=True)
class Victim:
    """One of the queue, and what is needed to say why it is this one."""

    name: str
    queue: tuple[str, ...]
    gains: dict[str, int]
    needy: str

    def accepts(self, value):
        return value == self.name

    def __str__(self):
        return repr(self.name)

    def why_not(self, got):
        place = self.queue.index
        if place(got) < place(self.needy):
            return say("{got} stands before {needy} in the queue, and may not be thrown out for it, whatever it holds: otherwise "
                       "{needy} comes back, {got} needs a block, and they throw each other out for ever.",
                       got=got, needy=self.needy)  # fmt: skip
        if got == self.needy:
            return say("{needy} gives way itself only if nobody stands behind it. {name} does.", needy=got, name=self.name)
        if not self.gains[got] and self.gains[self.name]:
            return say("Throwing out {got} gives back no block. {name} stands behind {needy} too, and gives some.",
                       got=got, name=self.name, needy=self.needy)  # fmt: skip
        if place(got) < place(self.name):
            return say("{got} stands behind {needy}, but it is not the last one: {name} has the larger sort_key. How many blocks "
                       "they give does not count, only whether it is any.", got=got, name=self.name, needy=self.needy)  # fmt: skip
        return say("Of those behind needy, the last one whose gain is above 0: here it is {name}.", name=self.name)


class ChooseVictim(Exercise):
    """Who gives way."""

    name, points, minutes, section = "choose_victim", 4, 15, "L33 5.1-5.2, 8.1, A.2"
    defines = ("choose_victim",)
    ours = {"choose_victim": POLICIES + "choose_victim"}
    bars = (POLICIES + "Policies",)
    part = {"choose_victim": "choose_victim"}
    driver = "VictimDriver"
    num_random = 200
    hints = (
        say("Make a list of those who stand behind `needy`. Comparing two sort_keys tells who stands behind whom, in all "
            "cases: priority, arrival and siblings are in it."),
        say("Among those behind, keep those whose gain is above 0. If there are none, keep all of them. If nobody is "
            "behind at all, the answer is needy. Of what you kept, the last one: the largest sort_key."),
        say("behind = [r for r in running if r.sort_key > needy.sort_key]; then helpful = [r for r in behind if gain(r) > "
            "0]; then max(helpful or behind or [needy], key=...)."),
    )  # fmt: skip
    examples = (
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0)], {"A": 3, "B": 2}), [("choose_victim", "A")]),
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0), ("C", 0, 3, 0)], {"A": 9, "B": 5, "C": 1}), [("choose_victim", "A"),
                                                                                          ("choose_victim", "B")],
              why=say("The youngest helps, so it goes, whatever the others hold.")),
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0)], {"A": 3, "B": 2}), [("choose_victim", "B")],
              why=say("B is the youngest: nobody stands behind it.")),
        Trace(([("A", 0, 1, 0)], {"A": 3}), [("choose_victim", "A")], why=say("A runs alone.")),
        Trace(([("C", 0, 3, 0), ("A", 0, 1, 0), ("B", 0, 2, 0)], {"A": 3, "B": 2, "C": 2}), [("choose_victim", "A")],
              why=say("The list is in the order in which they came in last: somebody who was out and is back stands at its "
                      "end, however old.")),
        Trace(([("A", 1, 1, 0), ("B", 0, 2, 0), ("C", 0, 3, 0)], {"A": 3, "B": 2, "C": 2}), [("choose_victim", "B")],
              why=say("A smaller number goes first. A came first, and is of the lowest priority.")),
        Trace(([("A", 1, 1, 0), ("B", 0, 2, 0), ("C", 0, 3, 0)], {"A": 3, "B": 2, "C": 2}), [("choose_victim", "A")],
              why=say("B and C came later, but they stand before A.")),
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0), ("C", 0, 3, 0)], {"A": 3, "B": 2, "C": 0}), [("choose_victim", "A")],
              why=say("All of C's blocks are shared: throwing it out frees none.")),
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0), ("C", 0, 3, 0)], {"A": 3, "B": 0, "C": 0}), [("choose_victim", "A")],
              why=say("B and C share all their blocks with each other. One must go before the other can help.")),
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0), ("C", 0, 3, 0)], {"A": 9, "B": 3, "C": 0}), [("choose_victim", "B")],
              why=say("A has many blocks, and stands before B. Behind B there is only C.")),
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0), ("C", 0, 3, 0), ("D", 0, 4, 0)], {"A": 1, "B": 9, "C": 3, "D": 0}),
              [("choose_victim", "A")], why=say("D does not help. C is the next youngest, and it does.")),
        Trace(([("A", 0, 1, 0), ("B", 0, 1, 1), ("C", 0, 1, 2)], {"A": 1, "B": 1, "C": 1}), [("choose_victim", "A"),
                                                                                          ("choose_victim", "C")],
              why=say("Three samples of one prompt: they arrived together, and their index tells them apart.")),
        Trace(([("A", 0, 5, 0), ("B", 2, 1, 0), ("C", 1, 9, 0)], {"A": 1, "B": 0, "C": 4}), [("choose_victim", "A"),
                                                                                          ("choose_victim", "C")]),
        Trace(([("B", 0, 2, 0), ("A", 0, 1, 0)], {"A": 0, "B": 0}), [("choose_victim", "B"), ("choose_victim", "A")]),
        Trace(([("A", 0, 1, 0), ("B", 0, 2, 0)], {"A": 3, "B": 0}), [("choose_victim", "B")],
              why=say("Nobody stands behind B, and B frees nothing. A has three blocks, but it stands before B all the same.")),
        Trace(([("C", 1, 1, 0), ("A", 0, 1, 0), ("B", 0, 2, 0)], {"A": 1, "B": 9, "C": 0}), [("choose_victim", "C")],
              why=say("C is the last of all. Those before it have blocks, and keep them.")),
    )  # fmt: skip

    class Oracle:
        """Stands them in a queue, and walks it from its end."""

        def __init__(self, running, gains):
            self.queue = [name for name, *key in sorted(running, key=lambda row: row[1:])]
            self.gains = gains

        def choose_victim(self, needy):
            behind = self.queue[self.queue.index(needy) + 1 :]
            helpful = [name for name in behind if self.gains[name] > 0]
            name = [needy, *behind[-1:], *helpful[-1:]][-1]
            return Victim(name, tuple(self.queue), self.gains, needy)

    def traces(self):
        def make(keys, order, gains, needy):
            rows = [(name, *key) for name, key in zip(NAMES, keys, strict=False)]
            rows = [rows[i] for i in order if i < len(rows)]
            return Trace((rows, dict(zip(NAMES, gains, strict=True))), [("choose_victim", rows[needy % len(rows)][0])])

        key = st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 2))
        keys = st.lists(key, min_size=1, max_size=6, unique=True)
        gains = st.lists(st.sampled_from([0, 0, 1, 3, 8]), min_size=6, max_size=6)
        return st.builds(make, keys, st.permutations(range(6)), gains, st.integers(0, 5))

    def describe_init(self, init):
        rows, gains = init
        told = [f"{name} (priority {p}, arrival {a}{f', sibling {c}' if c else ''}, gain {gains[name]})"
                for name, p, a, c in rows]  # fmt: skip
        return f"running: {', '.join(told)}"

    def describe(self, op):
        return f"choose_victim(running, needy={op[1]}, gain)"

    def explain(self, op, expected, got):
        return expected.why_not(got)

    def explain_error(self, op, expected, error, message):
        if error == "HasChanged":
            return say("choose_victim only names somebody. The list, its order and the requests stay as they are.")
        if error == "NotARequest":
            return say("Return one of the requests in `running`, the object itself. There is always an answer: if nobody "
                       "stands behind needy, it is needy.")  # fmt: skip


class SwapOrRecompute(Exercise):
    """Swap or recompute."""

    name, points, minutes, section = "swap_or_recompute", 2, 10, "L33 5.4, 8.2"
    defines = ("swap_or_recompute",)
    ours = {"swap_or_recompute": STEPS + "swap_or_recompute"}
    part = {"swap_or_recompute": "swap_or_recompute"}
    driver = "HowDriver"
    hints = (
        say("A victim that does not fit is done with at once. For one that fits you have a function already that gives both "
            "prices. What must it be told?"),
        say("The victim has K and V for request.num_computed_tokens tokens. Ask both_bills (your two_bills) for the price of "
            "so many."),
        say('swap, recompute = both_bills(prices, request.num_computed_tokens); "swap" if num_blocks <= '
            'num_free_cpu_blocks and swap < recompute, else "recompute".'),
    )  # fmt: skip
    examples = (
        Trace((), (("swap_or_recompute", 32, 33, 2, 10, [1, 5, 0, 0]),)),
        Trace((), (("swap_or_recompute", 32, 33, 2, 10, [5, 1, 0, 0]),)),
        Trace((), (("swap_or_recompute", 32, 33, 2, 1, [1, 5, 0, 0]),), why=say("Two blocks, and room for one.")),
        Trace((), (("swap_or_recompute", 32, 33, 2, 2, [1, 5, 0, 0]),), why=say("It just fits.")),
        Trace((), (("swap_or_recompute", 32, 33, 2, 0, [1, 5, 0, 0]),), why=say("There is no swap space.")),
        Trace((), (("swap_or_recompute", 5, 6, 1, 10, [1, 5, 0, 20]),),
              why=say("Five tokens do not pay for the fixed cost.")),
        Trace((), (("swap_or_recompute", 5, 900, 1, 10, [1, 5, 0, 20]),),
              why=say("900 tokens are known, and 5 of them have K and V so far: only these can be lost.")),
        Trace((), (("swap_or_recompute", 10, 11, 1, 10, [4, 1, 2, 0]),), why=say("The pairs decide.")),
        Trace((), (("swap_or_recompute", 4, 5, 1, 10, [4, 1, 2, 0]),)),
        Trace((), (("swap_or_recompute", 7, 8, 1, 10, [4, 1, 2, 0]),)),
        Trace((), (("swap_or_recompute", 20_000, 20_001, 1250, 2000, [1.6384e-05, 2.59e-05, 1.0486e-09, 0]),),
              why=say("A multi-head 7B with a long context.")),
        Trace((), (("swap_or_recompute", 16, 17, 1, 10, [1, 2, 0, 0]),), why=say("Both cost the same, and recomputing needs "
                                                                                 "no CPU memory.")),
        Trace((), (("swap_or_recompute", 17, 18, 2, 40, [1, 5, 0, 30]),),
              why=say("Tokens are priced, not blocks.")),
        Trace((), (("swap_or_recompute", 8, 9, 2, 1, [1, 5, 0, 0]),),
              why=say("Blocks of 4 tokens: how many blocks the victim has, num_blocks says.")),
        Trace((), (("swap_or_recompute", 64, 65, 2, 2, [1, 5, 0, 0]),), why=say("Blocks of 32 tokens: two, and both fit.")),
    )  # fmt: skip

    class Oracle:
        def swap_or_recompute(self, computed, known, num_blocks, num_free_cpu_blocks, prices):
            bills = TwoBills.Oracle().two_bills(prices, computed).value
            return "recompute" if num_blocks > num_free_cpu_blocks or bills[0] >= bills[1] else "swap"

    def traces(self):
        def make(computed, more, block_size, free, prices):
            blocks = -(-computed // block_size)
            return Trace((), (("swap_or_recompute", computed, computed + more, blocks, max(0, blocks + free), prices),))

        prices = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(0, 1), st.integers(0, 60)).map(list)
        return st.builds(make, st.integers(1, 60), st.sampled_from([1, 1, 30]), st.sampled_from([16, 4, 32]),
                         st.integers(-1, 4), prices)  # fmt: skip

    def describe(self, op):
        return (f"a victim with K/V for {op[1]} of its {op[2]} tokens, in {counted(op[3], 'block')}, {counted(op[4], 'CPU block')} free, "
                f"{priced(op[5])}: swap_or_recompute")  # fmt: skip

    def explain(self, op, expected, got):
        if got not in ("swap", "recompute"):
            return say('Return one of two words: "swap" or "recompute".')
        _, computed, known, num_blocks, free, prices = op
        swap, recompute = TwoBills.Oracle().two_bills(prices, computed).value
        if got == "swap" and num_blocks > free:
            return say("The victim's blocks do not fit swap space, and half a victim cannot be swapped.")
        if got == "swap" and swap == recompute:
            return say("Swapping is not cheaper here, both cost the same. Recomputing needs no CPU memory.")
        return say("It fits. By swapping it costs {swap}, by recomputing {recompute}: the bill is for the tokens that have K and V "
                   "(request.num_computed_tokens), with the prices that were given, swapping first.",
                   swap=f"{float(swap):g}", recompute=f"{float(recompute):g}")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "HasChanged":
            return say("swap_or_recompute only answers. What becomes of the request is the scheduler's business.")


class MayResume(Exercise):
    """When it may come back."""

    name, points, minutes, section = "may_resume", 4, 15, "L33 9.3-1"
    defines = ("may_resume",)
    ours = {"may_resume": POLICIES + "may_resume"}
    bars = (POLICIES + "Policies",)
    part = {"may_resume": "may_resume"}
    driver = "ResumeDriver"
    hints = (
        say("First the case in which nobody runs: who would make room for it if you said no? Then count what must be free: "
            "three numbers added up."),
        say("needed + promised + spare <= free. For a request that was never thrown out, spare is num_growing. How does "
            "it grow with request.num_preemptions?"),
        say("spare = room.num_growing * (1 + request.num_preemptions), or room.num_growing * 2 ** request.num_preemptions; "
            "and True at once if room.num_growing == 0."),
    )  # fmt: skip
    examples = (
        Trace((), (("may_resume", 0, 5, 9, 0, 0),), why=say("Nobody runs.")),
        Trace((), (("may_resume", 7, 5, 5, 0, 0),), why=say("Thrown out seven times, and now nobody runs.")),
        Trace((), (("may_resume", 7, 9, 5, 3, 0),),
              why=say("Nobody runs. Who says no now says no for ever: no one is there to make room.")),
        Trace((), (("least_free", 0, 5, 0, 1),), why=say("5 blocks needed, one spare for the one that grows.")),
        Trace((), (("least_free", 0, 5, 0, 3),), why=say("Three are running, and each may need a block soon.")),
        Trace((), (("least_free", 0, 5, 4, 1),), why=say("4 blocks are promised to others, whose prompts are not done.")),
        Trace((), (("least_free", 1, 5, 4, 3),), why=say("It was thrown out once.")),
        Trace((), (("least_free", 2, 5, 4, 3),), why=say("It was thrown out twice.")),
        Trace((), (("least_free", 0, 0, 2, 1),), why=say("All it needs is found in the cache.")),
        Trace((), (("least_free", 10, 1, 0, 1),), why=say("It was thrown out ten times: a bound on the spare blocks would "
                                                         "let it in and out for ever.")),
        Trace((), (("least_free", 6, 3, 1, 2),)),
        Trace((), (("least_free", 50, 3, 1, 1),)),
        Trace((), (("least_free", 0, 20_000, 500, 40),), why=say("A large pool, and a long request.")),
        Trace((), (("least_free", 7, 300, 100, 40),)),
        Trace((), (("asks_more", 3, 3, 1, 2),), why=say("From its third time out to its fourth.")),
        Trace((), (("asks_more", 100, 3, 1, 1),), why=say("From its hundredth time out to the next.")),
        Trace((), (("asks_more", 500, 3, 1, 2),)),
    )  # fmt: skip

    class Oracle:
        """Counts the blocks out, one preemption after the other."""

        def may_resume(self, num_preemptions, needed, free, promised, num_growing):
            assert num_growing == 0, "with others there are several right answers: ask least_free"
            return True

        def least_free(self, num_preemptions, needed, promised, num_growing):
            least = most = num_growing
            for _ in range(num_preemptions):
                least, most = least + num_growing, 2 * most
            taken = needed + promised
            return Between(taken + least, taken + most)

        def asks_more(self, num_preemptions, needed, promised, num_growing):
            border = self.least_free(num_preemptions, needed, promised, num_growing)
            return More(border, num_growing)

    def traces(self):
        alone = st.tuples(st.just("may_resume"), st.integers(0, 6), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9),
                          st.just(0))  # fmt: skip
        blocks = st.one_of(st.integers(0, 9), st.integers(0, 600))
        others = st.tuples(st.sampled_from(["least_free", "asks_more"]), st.integers(0, 6), blocks, blocks, st.integers(1, 6))
        return st.one_of(alone, others).map(lambda op: Trace((), (op,)))

    def describe(self, op):
        if op[0] == "may_resume":
            _, times, needed, free, promised, growing = op
            return f"thrown out {counted(times, 'time')}, Room({needed=}, {free=}, {promised=}, num_growing={growing}): may_resume"
        name, times, needed, promised, growing = op
        more = ", and how many more after one time more" if name == "asks_more" else ""
        return (f"thrown out {counted(times, 'time')}, {needed=}, {promised=}, num_growing={growing}: the fewest free blocks with "
                f"which may_resume says yes{more}")  # fmt: skip

    def explain(self, op, expected, got):
        if op[0] == "may_resume":
            return say("num_growing is 0: nobody runs, so nobody will ever give a block back. The engine would stand still.")
        _, times, needed, promised, growing = op
        border, got, more = (expected.border, *got) if op[0] == "asks_more" else (expected, got, None)
        if got is None:
            return say("It never says yes, however many blocks are free.")
        if got < needed + promised:
            return say("Without room for all that it needs, and for what others were promised, it is thrown out again soon: "
                       "before its prompt is done, or when the others go on with theirs.")  # fmt: skip
        if got < border.low:
            return say("Too early. Each running request may need a block in the next few steps, and the newcomer goes first "
                       "when one does. So num_growing spare blocks, and num_growing more for each time that it was thrown "
                       "out, without an end.")  # fmt: skip
        if border.accepts(got) and more is not None and more < growing:
            return say("Too early the next time: each time out asks for num_growing spare blocks more at least, however often it "
                       "was out before. A rule that stops asking for more lets it in and out for ever.")  # fmt: skip
        return say("Too late: blocks lie idle. num_growing spare blocks for one that was never thrown out, and each time "
                   "num_growing more, or twice as many as before.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "HasChanged":
            return say("may_resume only answers. The scheduler counts the preemptions.")
        if error == "NeitherTrueNorFalse":
            return say("Return True or False.")
        if error == "YesThenNo":
            return say("More free blocks cannot turn a yes into a no: there is one border, and yes from there on.")
        if error == "AttributeError" and "set attribute" in message:
            return say("`room` is read only: what the scheduler has counted stays as it is. Use names of your own.")


class WastedTokens(Exercise):
    """What was computed twice."""

    name, points, minutes, section = "wasted_tokens", 3, 15, "L33 5.3, 8.1"
    stretch = True
    defines = ("wasted_tokens",)
    ours = {"wasted_tokens": STEPS + "wasted_tokens"}
    driver = "WasteDriver"
    hints = (
        say("For each request, remember how far it has ever been: the first position that was never computed."),
        say("A chunk from `first` to `first + num_tokens` repeats what lies below that mark, and nothing if it begins at or "
            "above it. Afterwards the mark moves up, never down."),
        say("wasted[name] += min(first + num_tokens, mark) - first; then mark = max(mark, first + num_tokens). The mark begins "
            "at 0."),
    )  # fmt: skip
    examples = (
        Trace((), (("wasted_tokens", []),)),
        Trace((), (("wasted_tokens", [("A", 0, 8)]),)),
        Trace((), (("wasted_tokens", [("A", 0, 8), ("A", 0, 8)]),)),
        Trace((), (("wasted_tokens", [("A", 0, 8), ("A", 8, 1), ("A", 9, 1)]),), why=say("Nothing was lost.")),
        Trace((), (("wasted_tokens", [("A", 0, 4), ("B", 0, 4)]),), why=say("Two requests, each with positions of its own.")),
        Trace((), (("wasted_tokens", [("A", 0, 8), ("A", 0, 12)]),), why=say("8 are repeated, 4 are new.")),
        Trace((), (("wasted_tokens", [("A", 0, 8), ("A", 0, 3), ("A", 0, 10)]),),
              why=say("Thrown out again after three tokens: 3 and then 8 are repeated.")),
        Trace((), (("wasted_tokens", [("A", 0, 8), ("A", 4, 6)]),),
              why=say("Four were found in the cache, four are repeated, two are new.")),
        Trace((), (("wasted_tokens", [("A", 0, 8), ("B", 0, 2), ("A", 8, 1), ("B", 0, 3), ("A", 2, 7)]),)),
        Trace((), (("wasted_tokens", [("A", 0, 1500), ("B", 0, 9), ("A", 0, 1500), ("A", 1500, 1)]),),
              why=say("A long prompt, twice.")),
    )  # fmt: skip

    class Oracle:
        """Writes down every position."""

        def wasted_tokens(self, log):
            seen, wasted = set(), {}
            for name, first, num_tokens in log:
                wasted.setdefault(name, 0)
                for position in range(first, first + num_tokens):
                    wasted[name] += (name, position) in seen
                    seen.add((name, position))
            return wasted

    def traces(self):
        @st.composite
        def logs(draw):
            marks, log = {"A": 0, "B": 0, "C": 0}, []
            for _ in range(draw(st.integers(0, 8))):
                name = draw(st.sampled_from("ABC"))
                first = draw(st.integers(0, marks[name]))
                num_tokens = draw(st.integers(1, 6))
                log.append((name, first, num_tokens))
                marks[name] = first + num_tokens  # what it has K/V for; an earlier stint may have been further
            return Trace((), (("wasted_tokens", log),))

        return logs()

    def explain(self, op, expected, got):
        if not isinstance(got, dict) or got.keys() != expected.keys():
            return say("Return a dict with every request of the log, 0 for one that repeated nothing.")
        return say("A token is wasted each time that its position is computed although it was computed before, in whatever "
                   "stint. What was only found or swapped in is in no chunk.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "HasChanged":
            return say("The log belongs to the caller: read it, and leave it as it is.")
