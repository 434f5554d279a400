"""Lab 02, fragmentation: its exercises."""

import itertools

from hypothesis import strategies as st

from kvlab.grade import Approx, AtMost, Exercise, LabInfo, Trace, calls, say, walks

LAB = LabInfo(title=say("Fragmentation"), sections="L33 0.2, 1.1-1.4, 7.1, A.3; PAV 1, 4", before=("01",))
ARENA = "kvlab.arena.contiguous:"
WASTE = "kvlab.arena.waste:"


class Bitmap:
    """Memory as a list with each unit's owner: slow, and hard to get wrong. The oracle of both arena exercises."""

    def __init__(self, units, start=0):
        self.units, self.start = list(units), start

    def runs(self):
        """(start, size) of each hole, by address."""
        found, begin = [], None
        for i, owner in enumerate([*self.units, "end"]):
            if owner is None and begin is None:
                begin = i
            elif owner is not None and begin is not None:
                found.append([begin, i - begin])
                begin = None
        return found

    def choose(self, size):
        return next((i for i, (_, length) in enumerate(self.runs()) if length >= size), None)

    def allocate(self, owner, size):
        if owner in self.units:
            raise ValueError
        index = self.choose(size)
        if index is None:
            return None
        start = self.runs()[index][0]
        self.units[start : start + size] = [owner] * size
        return start + self.start

    def free(self, owner):
        if owner not in self.units:
            raise ValueError
        self.units = [None if unit == owner else unit for unit in self.units]

    def holes(self):
        return [[start + self.start, size] for start, size in self.runs()]

    def held(self):
        owners = dict.fromkeys(unit for unit in self.units if unit is not None)
        return {o: [self.units.index(o) + self.start, self.units.count(o)] for o in owners}

    def largest_hole(self):
        return max((size for _, size in self.runs()), default=0)


def call_of(name, *arguments):
    return f"{name}({', '.join(map(repr, arguments))})"


STATE = ("holes", "held", "largest_hole", "free_lists")  # operations that only look


def look_or_call(op):
    return f"self.{op[0]}" if op[0] in STATE else call_of(*op)


def arena_of(name, capacity, start=0):
    return f"{name}({capacity} slots, first id {start})"


def not_regions(got):
    """What is wrong with the entries themselves, wherever they lie. None: all are Regions of the right owner."""
    entries = got.values() if isinstance(got, dict) else got if isinstance(got, list) else ()
    if any(isinstance(entry, str) for entry in entries):
        return say("Each entry must be a Region(start, size, owner), not a plain tuple or list: what comes later reads "
                   ".start and .owner.")  # fmt: skip
    if any(isinstance(entry, list) and len(entry) == 3 for entry in entries):
        if isinstance(got, dict):
            return say("The owner's name belongs in its Region too: Region(start, size, owner).")
        return say("A hole has no owner: Region(start, size, None). Otherwise free memory looks as if somebody held it.")
    return None


# ---- 1


@st.composite
def layouts(draw):
    """(pieces, start): regions and holes by address, no two holes side by side."""
    pieces, names = [], iter("abcdefgh")
    for _ in range(draw(st.integers(1, 6))):
        hole = draw(st.booleans()) and not (pieces and pieces[-1][0] is None)
        pieces.append([None if hole else next(names), draw(st.integers(1, 6))])
    return tuple(map(tuple, pieces)), draw(st.sampled_from((0, 0, 1)))


class FirstFit(Exercise):
    """Place a request in the first hole that is large enough."""

    name, points, minutes, section = "first_fit", 4, 12, "L33 1.1-1.2"
    defines = ("FirstFit",)
    ours = {"FirstFit": ARENA + "FirstFit"}
    driver = "FirstFitDriver"
    hints = (
        say("choose only looks, and allocate only acts. Walk over enumerate(self.holes) and return the first index whose "
            "size is enough; after the loop, return None."),
        say("allocate: the region begins where the hole begins. What is left of the hole begins `size` later and is `size` "
            "smaller. And what if nothing is left?"),
        say("rest = hole.size - size; if rest: self.holes[index] = Region(hole.start + size, rest, None), "
            "else: del self.holes[index]. Test with `index is None`: the hole with index 0 is a hole too."),
    )  # fmt: skip
    examples = (
        Trace(([["x", 2], [None, 3], ["y", 1], [None, 5]],), (("choose", 3), ("choose", 4), ("choose", 6), ("holes",))),
        Trace(([[None, 8]],), (("allocate", "A", 3), ("holes",), ("held",))),
        Trace(([[None, 4]],), (("allocate", "A", 4), ("holes",), ("allocate", "B", 1))),
        Trace(([["x", 2], [None, 3], ["y", 1], [None, 5]],),
              (("allocate", "A", 4), ("holes",), ("allocate", "B", 2), ("holes",), ("held",))),
        Trace(([[None, 4], ["x", 2], [None, 2], ["y", 3], [None, 3]],), (("allocate", "D", 5), ("holes",), ("held",)),
              why=say("9 units are free, and no 5 of them lie side by side.")),
        Trace(([[None, 6]],), (("allocate", "A", 2), ("allocate", "A", 2), ("holes",)),
              why=say("A's region cannot grow and cannot be given twice: call self.check(owner, size) first.")),
        Trace(([[None, 3], ["x", 1]], 1), (("allocate", "A", 3), ("held",)),
              why=say("Here the ids begin at 1, as an engine's blocks do: the hole knows where it starts.")),
    )  # fmt: skip

    class Oracle(Bitmap):
        def __init__(self, pieces, start=0):
            super().__init__([owner for owner, size in pieces for _ in range(size)], start)
            self.names = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ")

        def ops(self):
            name = next(self.names)
            sizes = range(1, self.largest_hole() + 2)
            return [("holes",), ("held",), *(("allocate", name, s) for s in sizes), *(("choose", s) for s in sizes)]

    def traces(self):
        return walks(self.Oracle, layouts(), max_ops=6)

    def describe_init(self, init):
        pieces = " ".join(f"{'.' * size if owner is None else owner * size}" for owner, size in init[0])
        return f"| {pieces} |" + (f"   start={init[1]}" if len(init) > 1 and init[1] else "")

    def describe(self, op):
        return look_or_call(op)

    def explain(self, op, expected, got):
        if op[0] in ("holes", "held") and (wrong := not_regions(got)):
            return wrong
        if op[0] == "holes":
            if isinstance(got, list) and any(size == 0 for _, size in got):
                return say("A hole of size 0 is no hole: when the region fills it, take it out of the list.")
            return say("holes are (start, size) by address. The region takes the FRONT of its hole, the rest stays a hole, "
                       "and a request that is refused changes nothing.")  # fmt: skip
        if op[0] == "held":
            return say("held maps each owner to its Region(start, size, owner). Nothing else may be in it, and a refused "
                       "request is not.")  # fmt: skip
        if op[0] == "choose":
            return say("choose gives the INDEX of the first hole with hole.size >= size, by address, or None. It changes "
                       "nothing.")  # fmt: skip
        if expected is None:
            return say("No hole is that large, so the answer is None: what counts is one hole, not all holes together.")
        if got is None:
            return say("There is a hole that is large enough. One that fits exactly will do, and index 0 is an index like "
                       "any other.")  # fmt: skip
        if op[0] == "allocate" and isinstance(expected, int):
            return say("allocate gives back where the region starts: the start of the first hole that is large enough.")
        return None


# ---- 2


class Merge(Exercise):
    """Free a region, and join the holes beside it."""

    name, points, minutes, section = "merge", 5, 20, "L33 1.2"
    defines = ("Arena",)
    ours = {"Arena": ARENA + "ContiguousArena"}
    part = {"arena": "Arena"}
    driver = "ArenaDriver"
    hints = (
        say("Four cases: a hole on the left, one on the right, both, none. You need no four branches: let start and size "
            "grow while you look to the right, then to the left."),
        say("A hole h lies directly on the right if h.start == start + size, and on the left if h.start + h.size == start. "
            "Take it out of self.holes and add its size."),
        say("A short way: make a new list of the holes that do NOT touch, while you add up those that do; append the joined "
            "one; sort by start."),
    )  # fmt: skip
    examples = (
        Trace((4,), (("allocate", "A", 4), ("free", "A"), ("holes",), ("allocate", "B", 4))),
        Trace((6,), (("allocate", "A", 2), ("allocate", "B", 4), ("free", "A"), ("holes",))),
        Trace((6,), (("allocate", "A", 2), ("free", "A"), ("holes",), ("allocate", "B", 6)),
              why=say("The hole on the right of A begins where A ends.")),
        Trace((6,), (("allocate", "A", 2), ("allocate", "B", 4), ("free", "A"), ("free", "B"), ("holes",)),
              why=say("The hole on the left of B ends where B begins.")),
        Trace((9,), (("allocate", "A", 3), ("allocate", "B", 3), ("allocate", "C", 3), ("free", "A"), ("free", "C"),
                     ("holes",), ("free", "B"), ("holes",)), why=say("B has a hole on either side: three become one.")),
        Trace((8,), (("allocate", "A", 2), ("allocate", "B", 2), ("allocate", "C", 2), ("allocate", "D", 2), ("free", "D"),
                     ("free", "A"), ("holes",)), why=say("Holes stay in order of address, whatever the order of freeing.")),
        Trace((4,), (("allocate", "A", 2), ("free", "A"), ("free", "A")), why=say("A was freed twice.")),
        Trace((4,), (("free", "ghost"),)),
        Trace((4,), (("allocate", "A", 2), ("free", "A"), ("allocate", "A", 3)),
              why=say("Once freed, A may come again.")),
        Trace((4, 1), (("allocate", "A", 2), ("allocate", "B", 2), ("free", "B"), ("free", "A"), ("holes",)),
              why=say("Here the ids begin at 1, so every hole lies in 1 .. 4.")),
    )  # fmt: skip

    class Oracle(Bitmap):
        def __init__(self, capacity, start=0):
            super().__init__([None] * capacity, start)
            self.names = iter(f"r{i}" for i in range(100))

        def ops(self):
            here = list(dict.fromkeys(unit for unit in self.units if unit is not None))
            return [("holes",), *(("free", owner) for owner in here), ("largest_hole",),
                    *(("allocate", next(self.names), size) for size in range(1, 5))]  # fmt: skip

    num_random = 80

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 14), st.sampled_from((0, 1))), max_ops=16)

    def describe_init(self, init):
        return arena_of("Arena", *init)

    def describe(self, op):
        return look_or_call(op)

    def explain(self, op, expected, got):
        if op[0] == "holes" and (wrong := not_regions(got)):
            return wrong
        if op[0] == "free" and expected == "ValueError":
            return say("This owner holds no region. Freed twice, or never placed: raise ValueError, and change nothing.")
        if op[0] == "holes" and isinstance(got, list) and all(type(n) is int for hole in got for n in hole):
            pairs = [(a[0] + a[1], b[0]) for a, b in itertools.pairwise(sorted(got))]
            if any(end == begin for end, begin in pairs):
                return say("Two holes touch. Together they could hold a request that fits in neither: join them.")
            if any(end > begin for end, begin in pairs):
                return say("Two holes overlap: the same memory would be given away twice. A hole that was joined must leave "
                           "the list.")  # fmt: skip
            if sorted(got) == expected:
                return say("holes must stay in order of address: first fit takes the first of them.")
            if sum(size for _, size in got) < sum(size for _, size in expected):
                return say("Memory has leaked: some units are in no hole, and belong to nobody.")
            if sum(size for _, size in got) > sum(size for _, size in expected):
                return say("Units that somebody still holds are called free.")
            return say("A hole begins or ends at the wrong place. Two stretches are one only if the first ends exactly where "
                       "the second begins, and the first id is self.start, which need not be 0.")  # fmt: skip
        if op[0] in ("allocate", "largest_hole"):
            return say("The holes are not what they should be after the last free: look at arena.holes.")
        return None


# ---- 3


class Fits(Exercise):
    """First, best and worst fit as one choice."""

    name, points, minutes, section = "fits", 3, 8, "L33 1.2"
    defines = ("choose_hole",)
    ours = {"choose_hole": ARENA + "choose_hole"}
    driver = "ChooseDriver"
    hints = (
        say("First make the list of the indices whose hole is large enough. If it is empty, the answer is None. Only then "
            "choose among them."),
        say("min and max take key=lambda i: holes[i].size. Of equals both give the one that comes first: the lowest "
            "address."),
        say('fitting = [i for i, hole in enumerate(holes) if hole.size >= size]; for "first" it is fitting[0].'),
    )  # fmt: skip
    examples = (
        Trace((), (("choose_hole", [5, 2, 3], 2, "first"), ("choose_hole", [5, 2, 3], 2, "best"),
                   ("choose_hole", [5, 2, 3], 2, "worst"))),
        Trace((), (("choose_hole", [5, 2, 3], 3, "best"),)),
        Trace((), (("choose_hole", [2, 4, 4, 3], 3, "worst"), ("choose_hole", [4, 3, 5, 3], 3, "best"))),
        Trace((), (("choose_hole", [4, 2, 3], 5, "worst"), ("choose_hole", [], 1, "best"),
                   ("choose_hole", [4, 2, 3], 5, "first")),
              why=say("Where no hole is large enough, the answer is None, whatever the rule.")),
    )  # fmt: skip

    class Oracle:
        def choose_hole(self, sizes, size, fit):
            order = {"first": lambda i: i, "best": lambda i: (sizes[i], i), "worst": lambda i: (-sizes[i], i)}[fit]
            return min((i for i in range(len(sizes)) if sizes[i] >= size), key=order, default=None)

    def traces(self):
        return calls("choose_hole", st.lists(st.integers(1, 6), max_size=6), st.integers(1, 6),
                     st.sampled_from(("first", "best", "worst")))  # fmt: skip

    def describe(self, op):
        return f"holes of {op[1]}: choose_hole(holes, {op[2]}, {op[3]!r})"

    def explain(self, op, expected, got):
        sizes, size, fit = op[1:]
        if isinstance(got, dict):
            return say("choose_hole only looks: leave holes as it is. To put things in order, make a list of your own: "
                       "sorted(), not sort().")  # fmt: skip
        if expected is None:
            return say("No hole is large enough for {size}: the answer is None.", size=size)
        if isinstance(got, list):
            return say("Give back the INDEX of the hole in `holes`, not the hole itself.")
        if isinstance(got, int) and 0 <= got < len(sizes) and sizes[got] < size:
            return say("That hole is too small. Choose only among holes with hole.size >= {size}, and let the index count in "
                       "`holes`, not in a list that you have filtered.", size=size)  # fmt: skip
        enough = [index for index in range(len(sizes)) if sizes[index] >= size]
        if isinstance(got, int) and 0 <= got < len(enough) and enough[got] == expected:
            return say("Does your index count in a list that you have filtered? It must count in `holes`.")
        if isinstance(got, int) and 0 <= got < len(sizes) and sizes[got] == sizes[expected]:
            return say("Of equal holes, take the one with the lowest address.")
        if got is None:
            return say("There is a hole that is large enough; an exact fit counts.")
        return {
            "first": say("first: the lowest address of all that are large enough."),
            "best": say("best: the smallest hole that is large enough, so that least is left over."),
            "worst": say("worst: the largest hole, so that what is left over is still of use."),
        }[fit]


# ---- 4


@st.composite
def moments(draw):
    """An arena at a moment: (pieces, progress, need)."""
    pieces, progress = [], {}
    for i in range(draw(st.integers(1, 6))):
        size = draw(st.integers(1, 9))
        if draw(st.booleans()):
            final = draw(st.integers(1, size))
            pieces.append((f"r{i}", size))
            progress[f"r{i}"] = (draw(st.integers(0, final)), final)
        elif not (pieces and pieces[-1][0] is None):
            pieces.append((None, size))
    return pieces or [(None, 4)], progress, draw(st.integers(1, 6))


class Wastes(Exercise):
    """The three wastes, each slot counted once."""

    name, points, minutes, section = "wastes", 5, 12, "L33 1.1-1.3"
    defines = ("internal_waste", "reservation_waste", "external_waste", "measure")
    ours = {name: WASTE + name for name in ("internal_waste", "reservation_waste", "external_waste", "measure")}
    driver = "WasteDriver"
    hints = (
        say("Draw one region as a bar: used | will be used | never used. Its three parts are used, final - used and "
            "size - final."),
        say("A hole of 7 takes one region of 5, and 2 are over. Python has an operator for what is over."),
        say("measure: add up used, reservation and internal over arena.regions, with progress[region.owner] giving (used, "
            "final). External comes from the sizes of arena.holes; placeable is arena.free_total minus it."),
    )  # fmt: skip
    examples = (
        Trace((), (("internal_waste", 2048, 80), ("reservation_waste", 30, 80), ("internal_waste", 16, 16))),
        Trace((), (("external_waste", [4, 2, 3], 5), ("external_waste", [4, 2, 3], 1), ("external_waste", [], 3))),
        Trace((), (("external_waste", [7], 5), ("external_waste", [10, 4], 5), ("external_waste", [3, 3], 6)),
              why=say("need=5: a hole of 7 takes one region and 2 slots are over; a hole of 10 takes two.")),
        Trace((), (("measure", [["A", 10]], {"A": (2, 6)}, 4),)),
        Trace((), (("measure", [["A", 10], [None, 6]], {"A": (2, 6)}, 4),)),
        Trace((), (("measure", [[None, 7], ["A", 10], [None, 3], ["B", 10]], {"A": (6, 6), "B": (0, 10)}, 5),)),
    )  # fmt: skip

    class Oracle:
        def internal_waste(self, size, final):
            return sum(1 for _ in range(final, size))

        def reservation_waste(self, used, final):
            return sum(1 for _ in range(used, final))

        def external_waste(self, hole_sizes, need):
            over = 0
            for size in hole_sizes:
                while size >= need:
                    size -= need
                over += size
            return over

        def measure(self, pieces, progress, need):
            kinds = [0, 0, 0, 0, 0]
            for owner, size in pieces:
                for slot in range(size):
                    if owner is None:
                        kinds[4 if slot < size // need * need else 3] += 1
                    else:
                        used, final = progress[owner]
                        kinds[0 if slot < used else 1 if slot < final else 2] += 1
            return kinds

    def traces(self):
        sizes = st.lists(st.integers(1, 20), max_size=5)
        single = calls("external_waste", sizes, st.integers(1, 8))
        return single | moments().map(lambda values: Trace((), (("measure", *values),)))

    def describe(self, op):
        if op[0] != "measure":
            return call_of(*op)
        pieces = " ".join(f"{owner or 'hole'}:{size}" for owner, size in op[1])
        inside = ", ".join(f"{owner}: used {used} of {final}" for owner, (used, final) in op[2].items())
        return f"| {pieces} |  {inside}  measure(..., need={op[3]})"

    def explain(self, op, expected, got):
        if op[0] == "internal_waste":
            return say("Internal: slots of the region beyond the request's final length. Nobody will ever write them.")
        if op[0] == "reservation_waste":
            return say("Reservation: slots that the request will write, but has not yet: from used to final.")
        if op[0] == "external_waste":
            return say("External: in each hole by itself, what is over after as many regions of `need` as fit.")
        if not isinstance(got, list) or len(got) != 5 or not all(type(number) in (int, float) for number in got):
            return say("Give back Waste(used, reservation, internal, external, placeable).")
        names = ("used", "reservation", "internal", "external", "placeable")
        if sum(got) != sum(expected):
            return say("Your five numbers add up to {sum}, but the arena has {capacity} slots: some slot is counted twice or "
                       "not at all.", sum=sum(got), capacity=sum(expected))  # fmt: skip
        wrong = next(i for i in range(5) if got[i] != expected[i])
        return say("The first that differs is {name}: {got} instead of {expected}.", name=names[wrong], got=got[wrong],
                   expected=expected[wrong])  # fmt: skip


# ---- 5


class Expected(Exercise):
    """Expected utilisation, in closed form."""

    name, points, minutes, section = "expected", 5, 30, "L33 1.4"
    defines = ("expected_utilisation",)
    ours = {"expected_utilisation": "kvlab.arena.expectation:expected_utilisation"}
    driver = "ExpectationDriver"
    hints = (
        say("First write down what ONE request of n outputs holds on average over its own steps: p + (1 + 2 + ... + n) / n."),
        say("Over time, a request counts once for each step that it lives. So divide the sum of all slots held in all steps, "
            "E[n (n + 1) / 2], by the number of all steps, E[n]."),
        say("E[n^2] = E[n]^2 + variance. Of k = high - low + 1 neighbouring whole numbers, the variance is (k^2 - 1) / 12. Then "
            "over_time = (p + (E[n^2] + E[n]) / (2 E[n])) / R."),
    )  # fmt: skip
    examples = (
        Trace((), (("expected_utilisation", 1, 1, 10),)),
        Trace((), (("expected_utilisation", 4, 4, 10),)),
        Trace((), (("expected_utilisation", 1, 3, 10),)),
        Trace((), (("expected_utilisation", 4, 4, 10, 2),)),
        Trace((), (("expected_utilisation", 50, 450, 2048),)),
        Trace((), (("expected_utilisation", 1, 3, 10, 5),)),
        Trace((), (("lines_run", 1, 300, 2048),)),
    )  # fmt: skip
    num_random = 40

    class Oracle:
        """Every step of every length, one after another."""

        def expected_utilisation(self, low, high, reserve, prompt=0):
            lengths = list(range(low, high + 1))
            shares = [[(prompt + t) / reserve for t in range(1, n + 1)] for n in lengths]
            static = sum(steps[-1] for steps in shares) / len(lengths)
            per_request = sum(sum(steps) / len(steps) for steps in shares) / len(lengths)
            over_time = sum(map(sum, shares)) / sum(map(len, shares))
            return Approx([round(share, 12) for share in (static, per_request, over_time)])

        def lines_run(self, low, high, reserve):
            return AtMost(100)

    def traces(self):
        return st.tuples(st.integers(1, 12), st.integers(0, 20), st.integers(0, 9), st.integers(0, 9)).map(
            lambda v: Trace((), (("expected_utilisation", v[0], v[0] + v[1], v[0] + v[1] + v[2] + v[3], v[2]),))
        )

    def describe(self, op):
        call = call_of("expected_utilisation", *op[1:])
        return call if op[0] == "expected_utilisation" else f"the lines of your code that ran in {call}"

    def explain(self, op, expected, got):
        if op[0] == "lines_run":
            return say("A loop over n, of 300 lengths: with a billion it would take for ever. In closed form the work is the same "
                       "for any number of lengths.")  # fmt: skip
        low, high, reserve, prompt = (*op[1:], 0)[:4]
        if not isinstance(got, list) or len(got) != 3 or not all(type(share) in (int, float) for share in got):
            return say("Give back three numbers: Utilisation(static, per_request, over_time).")
        want, mean = expected.value, (low + high) / 2
        if all(Approx(100 * share).accepts(value) for share, value in zip(want, got, strict=True)):
            return say("These are percent. Give shares, from 0 to 1.")
        if Approx((prompt + mean / 2) / reserve).accepts(got[1]):
            return say("per_request: you took the average from 0 to n. In its first step a request holds 1 slot already, so "
                       "the average of 1 .. n is (n + 1) / 2.")  # fmt: skip
        wrong = next(i for i in range(3) if not Approx(want[i], rel=1e-9).accepts(got[i]))
        if prompt and Approx(want[wrong] - prompt / reserve).accepts(got[wrong]):
            return say("The prompt's slots are full from the first step to the last: it adds prompt / reserve.")
        if wrong == 0:
            return say("static differs. It is (p + E[n]) / R, and E[n] = (low + high) / 2, with / and not //.")
        if wrong == 1:
            return say("per_request differs. A request of n outputs holds p + (n + 1) / 2 slots on average; then the mean over "
                       "n, and divide by R.")  # fmt: skip
        if Approx(want[1]).accepts(got[2]):
            return say("over_time is the same as per_request in your answer. But a long request is there for more steps, and "
                       "a look at a random moment meets it more often.")  # fmt: skip
        return say("over_time: slots held, added up over all steps of all requests, by all steps, and by R. Mind that E[n^2] is "
                   "not E[n]^2, and that the variance of k neighbouring whole numbers is (k^2 - 1) / 12.")  # fmt: skip


# ---- 6


class Paged(Exercise):
    """Pages: grow a table block by block."""

    name, points, minutes, section = "paged", 5, 12, "L33 2.2; PAV 2, 4"
    defines = ("PagedArena",)
    ours = {"PagedArena": "kvlab.arena.paged:PagedArena"}
    driver = "PagedDriver"
    hints = (
        say("How many blocks do num_tokens tokens need? Round up: -(-num_tokens // block_size). How many does the table have "
            "already? Only the difference is missing."),
        say("All or nothing: compare what is missing with len(self.free_blocks) before you take the first block."),
        say("table = self.tables.setdefault(owner, []), then for each missing block table.append(self.free_blocks.pop()). "
            "free: self.free_blocks.extend(self.tables.pop(owner)), after a look whether the owner is there."),
    )  # fmt: skip
    examples = (
        Trace((4, 4), (("grow", "A", 1), ("blocks_of", "A"), ("num_free",))),
        Trace((4, 4), (("grow", "A", 4), ("blocks_of", "A"), ("grow", "A", 5), ("blocks_of", "A")),
              why=say("4 tokens fill one block of 4 exactly; the fifth needs another.")),
        Trace((4, 4), (("grow", "A", 2), ("grow", "A", 3), ("grow", "A", 4), ("blocks_of", "A"), ("num_free",)),
              why=say("num_tokens is the total: within the last block nothing is to be done.")),
        Trace((2, 4), (("grow", "A", 5), ("free", "A"), ("num_free",), ("owners",), ("every_block_once",))),
        Trace((3, 4), (("grow", "A", 4), ("grow", "B", 12), ("num_free",), ("owners",), ("grow", "B", 8),
                       ("every_block_once",)), why=say("B asks for 3 blocks and 2 are free.")),
        Trace((2, 4), (("grow", "A", 8), ("grow", "A", 8), ("grow", "A", 9), ("blocks_of", "A"))),
        Trace((4, 4), (("grow", "A", 8), ("grow", "A", 4), ("blocks_of", "A"), ("num_free",), ("every_block_once",)),
              why=say("A's table is long enough already: it stays as it is, and the answer is True.")),
        Trace((2, 4), (("grow", "A", 1), ("free", "A"), ("free", "A")), why=say("A was freed twice.")),
        Trace((4, 2), (("grow", "A", 3), ("grow", "B", 1), ("first_blocks", "A", 2), ("grow", "A", 6),
                       ("first_blocks", "A", 2)), why=say("What is written stays where it is: a table grows at its end.")),
        Trace((6, 1), (("grow", "A", 2), ("grow", "B", 1), ("grow", "A", 4), ("free", "B"), ("every_block_once",))),
    )  # fmt: skip

    class Oracle:
        """Counts tokens only. Which free block is given is left to the student."""

        def __init__(self, num_blocks, block_size):
            self.num_blocks, self.block_size, self.tokens, self.seen = num_blocks, block_size, {}, {}
            self.names = iter(f"r{i}" for i in range(100))

        def _blocks(self, tokens):
            count = 0
            while count * self.block_size < tokens:
                count += 1
            return count

        def num_free(self):
            return self.num_blocks - sum(map(self._blocks, self.tokens.values()))

        def blocks_of(self, owner):
            return self._blocks(self.tokens.get(owner, 0))

        def grow(self, owner, num_tokens):
            if self._blocks(num_tokens) - self.blocks_of(owner) > self.num_free():
                return False
            self.tokens[owner] = max(num_tokens, self.tokens.get(owner, 0))
            return True

        def free(self, owner):
            if owner not in self.tokens:
                raise ValueError
            del self.tokens[owner]
            self.seen.pop(owner, None)

        def owners(self):
            return sorted(self.tokens)

        def every_block_once(self):
            return True

        def first_blocks(self, owner, number, got=None):
            """Whatever it is at the first look; the same from then on."""
            return self.seen.setdefault((owner, number), got)

        def ops(self):
            size = self.block_size
            extras = (1, size, 2 * size, -size)
            more = [("grow", o, max(n + extra, 1)) for o, n in self.tokens.items() for extra in extras]
            new = [("grow", next(self.names), n) for n in (1, size, size + 1, 2 * size)]
            looks = [("num_free",), ("every_block_once",), ("owners",), *(("blocks_of", o) for o in self.tokens)]
            return [*looks, *new, *more, *(("free", o) for o in self.tokens)]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 6), st.sampled_from((1, 2, 4))), max_ops=14)

    def describe_init(self, init):
        return f"PagedArena({init[0]} blocks of {init[1]})"

    def describe(self, op):
        names = {"blocks_of": "len(tables[{!r}])", "num_free": "len(free_blocks)", "owners": "sorted(tables)",
                 "every_block_once": "every block in one table, or free, and only once",
                 "first_blocks": "tables[{!r}][:{}]"}  # fmt: skip
        return names[op[0]].format(*op[1:]) if op[0] in names else call_of(*op)

    def explain(self, op, expected, got):
        if op[0] == "free" and expected == "ValueError":
            return say("This owner has no table. Freed twice, or never came: raise ValueError, and change nothing.")
        if op[0] == "grow" and expected is False:
            return say("There are not enough free blocks for all that is missing: the answer is False.")
        if op[0] == "grow" and expected is True:
            return say("There are enough free blocks: any of them will do, wherever they lie. The answer is True.")
        if op[0] == "blocks_of" and isinstance(got, int) and got < expected:
            return say("A table never gets shorter, and it holds at least num_tokens / block_size blocks, rounded up.")
        if op[0] == "blocks_of":
            return say("num_tokens tokens need num_tokens / block_size blocks, rounded up, in all: not on top of what the "
                       "table has.")  # fmt: skip
        if op[0] in ("num_free", "every_block_once"):
            return say("Every block is in one table or in free_blocks, and only once. A refusal takes none; freeing gives all "
                       "back.")  # fmt: skip
        if op[0] == "owners":
            return say("Only who holds blocks has a table: a refused newcomer does not, and neither does who was freed.")
        if op[0] == "first_blocks":
            return say("The blocks that A had must stay at the front of its table: its tokens are in them.")
        return None


# ---- 7, stretch


class Buddy(Exercise):
    """The buddy system."""

    name, points, minutes, section, stretch = "buddy", 4, 25, "beyond L33 1.2", True
    defines = ("BuddyArena",)
    ours = {"BuddyArena": "kvlab.arena.buddy:BuddyArena"}
    driver = "BuddyDriver"
    hints = (
        say("allocate: round size up to a power of two. Of the sizes that are large enough and have a free region, take the "
            "smallest, and its lowest offset. As long as it is too large: halve it, and put the right half into its free list."),
        say("free: the buddy of (offset, size) is at offset ^ size. While it is in free_lists[size], take it out; the pair "
            "begins at the smaller offset and is twice as large."),
        say("while offset ^ size in self.free_lists[size]: self.free_lists[size].remove(offset ^ size); "
            "offset = min(offset, offset ^ size); size *= 2. Then add it. The order matters: offset before size."),
    )  # fmt: skip
    examples = (
        Trace((8,), (("allocate", "A", 8), ("free_lists",), ("free", "A"), ("free_lists",))),
        Trace((8,), (("allocate", "A", 1), ("free_lists",), ("size_of", "A"))),
        Trace((8,), (("allocate", "A", 3), ("size_of", "A"), ("free_lists",), ("allocate", "B", 5)),
              why=say("A has 4 and B needs 8: nothing that is free is large enough, so the answer is None.")),
        Trace((8,), (("allocate", "A", 2), ("allocate", "B", 2), ("free", "A"), ("free", "B"), ("free_lists",))),
        Trace((8,), (("allocate", "A", 2), ("allocate", "B", 2), ("allocate", "C", 2), ("free", "B"), ("free", "C"),
                     ("free_lists",)), why=say("B and C lie side by side, but they are not buddies: B's is A.")),
        Trace((8,), (("allocate", "A", 1), ("allocate", "B", 4), ("allocate", "C", 2), ("free_lists",)),
              why=say("C fits a free region of exactly 2: no larger one may be split.")),
        Trace((8,), (("allocate", "A", 1), ("free", "A"), ("free", "A"))),
        Trace((8,), (("allocate", "A", 1), ("allocate", "A", 1))),
        Trace((13,), (("free_lists",), ("allocate", "A", 7), ("allocate", "B", 2), ("free", "A"), ("free", "B"),
                      ("free_lists",))),
    )  # fmt: skip

    class Oracle:
        """A tree that is split on the way down, and looked at afresh each time."""

        def __init__(self, capacity):
            self.owner = [None] * capacity
            self.roots, offset = [], 0
            for power in reversed(range(capacity.bit_length())):
                if capacity >> power & 1:
                    self.roots.append((offset, 1 << power))
                    offset += 1 << power
            self.held = {}
            self.names = iter(f"r{i}" for i in range(100))

        def _free(self, offset, size):
            if all(owner is None for owner in self.owner[offset : offset + size]):
                return [(size, offset)]
            if (offset, size) in self.held.values() or size == 1:
                return []
            return self._free(offset, size // 2) + self._free(offset + size // 2, size // 2)

        def _all_free(self):
            return sorted(part for root in self.roots for part in self._free(*root))

        def allocate(self, owner, size):
            if owner in self.held:
                raise ValueError
            wanted = next(s for s in (1, 2, 4, 8, 16, 32, 64) if s >= size)
            offset = next((o for s, o in self._all_free() if s >= wanted), None)
            if offset is not None:
                self.owner[offset : offset + wanted] = [owner] * wanted
                self.held[owner] = offset, wanted
            return offset

        def free(self, owner):
            if owner not in self.held:
                raise ValueError
            offset, size = self.held.pop(owner)
            self.owner[offset : offset + size] = [None] * size

        def free_lists(self):
            found = {}
            for size, offset in self._all_free():
                found.setdefault(size, []).append(offset)
            return found

        def size_of(self, owner):
            return self.held[owner][1]

        def ops(self):
            new = [("allocate", next(self.names), size) for size in (1, 2, 3, 4, 5)]
            return [("free_lists",), *new, *(("free", o) for o in self.held), *(("size_of", o) for o in self.held)]

    def traces(self):
        return walks(self.Oracle, st.tuples(st.integers(1, 24)), max_ops=14)

    def describe_init(self, init):
        return arena_of("BuddyArena", *init)

    def describe(self, op):
        return f"self.held[{op[1]!r}].size" if op[0] == "size_of" else look_or_call(op)

    def explain(self, op, expected, got):
        if op[0] == "free_lists" and isinstance(got, dict):
            free = [(offset, size) for size, offsets in got.items() for offset in offsets]
            if not all(type(number) is int and number >= 0 for pair in free for number in pair):
                return say("free_lists: a size, which is a power of two, to a set of offsets, which are whole numbers.")
            if any(offset % size for offset, size in free):
                return say("A region of size s begins at a multiple of s. Two buddies become one that begins at the smaller of "
                           "their offsets, min(offset, offset ^ size).")  # fmt: skip
            if any(offset ^ size in got[size] for offset, size in free):
                return say("Two buddies are free side by side: join them, and look again, as often as the buddy is free.")
            missing = sum(size * len(offsets) for size, offsets in expected.items()) - sum(size for _, size in free)
            if missing > 0:
                return say("Memory has leaked: some free units are in no free list.")
            if missing < 0:
                return say("Units are counted twice, or are held and called free. A region that is given out, split or joined "
                           "leaves its free list.")  # fmt: skip
        if op[0] == "free_lists":
            return say("free_lists: split only as far as needed, from the smallest region that will do, and join a freed region "
                       "with its buddy, at offset ^ size, as often as that is free.")  # fmt: skip
        if op[0] == "allocate" and expected == "ValueError":
            return say("A's region cannot grow and cannot be given twice: call self.check(owner, size) first.")
        if op[0] == "allocate" and expected is None:
            return say("No free region is large enough, after rounding up: None, and nothing is split.")
        if op[0] == "allocate" and got is None:
            return say("There is a free region that is large enough. Mind that a size that is a power of two already is not "
                       "rounded up.")  # fmt: skip
        if op[0] == "allocate":
            return say("Take the smallest free region that will do, the lowest offset of that size, and keep its left half.")
        if op[0] == "size_of":
            return say("A region has the smallest power of two that holds the request.")
        return say("This owner holds no region: self.take(owner) raises the ValueError.")
