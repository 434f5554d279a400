"""Lab 02: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in source, old
        source = source.replace(old, new)
    return source


_FIRST_FIT = '''
class FirstFit(ArenaBase):
    def choose(self, size):
        return next((i for i, hole in enumerate(self.holes) if hole.size >= size), None)

    def allocate(self, owner, size):
        self.check(owner, size)
        index = self.choose(size)
        if index is None:
            return None
        hole = self.holes.pop(index)
        if hole.size > size:
            self.holes.insert(index, Region(hole.start + size, hole.size - size, None))
        self.held[owner] = Region(hole.start, size, owner)
        return hole.start
'''

_MERGE = '''
class Arena(Placer):
    def free(self, owner):
        if owner not in self.held:
            raise ValueError(owner)
        start, size, _ = self.held.pop(owner)
        for hole in list(self.holes):
            if hole.start == start + size:
                self.holes.remove(hole)
                size += hole.size
        for hole in list(self.holes):
            if hole.start + hole.size == start:
                self.holes.remove(hole)
                start, size = hole.start, size + hole.size
        self.holes.append(Region(start, size, None))
        self.holes.sort()
'''

_FITS = '''
def choose_hole(holes, size, fit):
    fitting = [i for i, hole in enumerate(holes) if hole.size >= size]
    if not fitting:
        return None
    key = {"first": lambda i: i, "best": lambda i: (holes[i].size, i), "worst": lambda i: (-holes[i].size, i)}[fit]
    return min(fitting, key=key)
'''

_WASTES = '''
from kvlab.arena import Waste

def internal_waste(size, final):
    return size - final

def reservation_waste(used, final):
    return final - used

def external_waste(hole_sizes, need):
    return sum(size - size // need * need for size in hole_sizes)

def measure(arena, progress, need):
    used = sum(progress[r.owner][0] for r in arena.regions)
    reservation = sum(reservation_waste(*progress[r.owner]) for r in arena.regions)
    internal = sum(internal_waste(r.size, progress[r.owner][1]) for r in arena.regions)
    external = external_waste([hole.size for hole in arena.holes], need)
    placeable = arena.free_total - external
    return Waste(used, reservation, internal, external, placeable)
'''

_EXPECTED = '''
def expected_utilisation(low, high, reserve, prompt=0):
    k = high - low + 1
    mean = (low + high) / 2
    square = mean**2 + (k**2 - 1) / 12
    static = (prompt + mean) / reserve
    per_request = (prompt + (mean + 1) / 2) / reserve
    over_time = (prompt + (square + mean) / (2 * mean)) / reserve
    return Utilisation(static, per_request, over_time)
'''

_PAGED = '''
class PagedArena(PagedBase):
    def grow(self, owner, num_tokens):
        have = len(self.tables.get(owner, []))
        missing = -(-num_tokens // self.block_size) - have
        if missing > len(self.free_blocks):
            return False
        for _ in range(missing):
            self.tables.setdefault(owner, []).append(self.free_blocks.pop())
        self.tables.setdefault(owner, [])
        return True

    def free(self, owner):
        if owner not in self.tables:
            raise ValueError(owner)
        self.free_blocks += self.tables.pop(owner)
'''

_BUDDY = '''
class BuddyArena(BuddyBase):
    def allocate(self, owner, size):
        self.check(owner, size)
        want = 1 << (size - 1).bit_length()
        have = min((s for s, offsets in self.free_lists.items() if s >= want and offsets), default=None)
        if have is None:
            return None
        offset = min(self.free_lists[have])
        self.free_lists[have].remove(offset)
        while have > want:
            have //= 2
            self.free_lists[have].add(offset + have)
        return self.place(owner, offset, have)

    def free(self, owner):
        offset, size = self.take(owner)
        while offset ^ size in self.free_lists[size]:
            self.free_lists[size].remove(offset ^ size)
            offset, size = min(offset, offset ^ size), size * 2
        self.free_lists[size].add(offset)
'''

# exercise -> {what it is: the cell}
CORRECT = {
    "first_fit": {
        "holes taken out and put back": _FIRST_FIT,
        "all holes made anew from what is held": '''
class FirstFit(ArenaBase):
    def choose(self, size):
        fitting = [i for i in range(len(self.holes)) if self.holes[i].size >= size]
        return min(fitting) if fitting else None

    def allocate(self, owner, size):
        self.check(owner, size)
        index = self.choose(size)
        if index is None:
            return None
        start = self.holes[index].start
        self.held[owner] = Region(start, size, owner)
        self.holes, at = [], self.start
        for region in [*self.regions, Region(self.start + self.capacity, 0, "end")]:
            if region.start > at:
                self.holes.append(Region(at, region.start - at, None))
            at = region.start + region.size
        return start
''',
    },
    "merge": {
        "right, then left": _MERGE,
        "all holes made anew from what is held": '''
class Arena(Placer):
    def free(self, owner):
        if self.held.pop(owner, None) is None:
            raise ValueError(owner)
        taken = {slot for region in self.regions for slot in range(region.start, region.start + region.size)}
        holes, run = [], None
        for slot in range(self.start, self.start + self.capacity + 1):
            free = slot < self.start + self.capacity and slot not in taken
            if free and run is None:
                run = slot
            if not free and run is not None:
                holes.append(Region(run, slot - run, None))
                run = None
        self.holes = holes
''',
    },
    "fits": {
        "one key for each": _FITS,
        "one walk": '''
def choose_hole(holes, size, fit):
    best = None
    for index, hole in enumerate(holes):
        if hole.size < size:
            continue
        if best is None:
            best = index
        elif fit == "best" and hole.size < holes[best].size:
            best = index
        elif fit == "worst" and hole.size > holes[best].size:
            best = index
    return best
''',
    },
    "wastes": {
        "sums": _WASTES,
        "slot by slot": '''
from kvlab.arena import Waste

def internal_waste(size, final):
    return len(range(final, size))

def reservation_waste(used, final):
    return len(range(used, final))

def external_waste(hole_sizes, need):
    return sum(hole_sizes) - sum(need * (size // need) for size in hole_sizes)

def measure(arena, progress, need):
    counts = {"used": 0, "reservation": 0, "internal": 0, "external": 0, "placeable": 0}
    for region in arena.layout():
        for slot in range(region.size):
            if region.owner is None:
                counts["placeable" if slot < region.size - region.size % need else "external"] += 1
            else:
                used, final = progress[region.owner]
                counts["used" if slot < used else "reservation" if slot < final else "internal"] += 1
    return Waste(**counts)
''',
    },
    "expected": {
        "by mean and variance": _EXPECTED,
        "exact fractions": _changed(
            "from fractions import Fraction\n" + _EXPECTED, ("k = high - low + 1", "low, high = Fraction(low), Fraction(high)\n    k = high - low + 1")),
        "sums of squares and cubes": '''
def expected_utilisation(low, high, reserve, prompt=0):
    def squares(n):
        return n * (n + 1) * (2 * n + 1) // 6
    number = high - low + 1
    total = (low + high) * number // 2
    slots = (squares(high) - squares(low - 1) + total) / 2
    return Utilisation((prompt + total / number) / reserve, (prompt + (total / number + 1) / 2) / reserve,
                       (prompt + slots / total) / reserve)
''',
    },
    "paged": {
        "taken from the end, one by one": _PAGED,
        "taken from the front, in one slice": '''
class PagedArena(PagedBase):
    def grow(self, owner, num_tokens):
        table = list(self.tables.get(owner, ()))
        missing = max(0, (num_tokens - 1) // self.block_size + 1 - len(table))
        if len(self.free_blocks) < missing:
            return False
        self.tables[owner] = table + self.free_blocks[:missing]
        self.free_blocks = self.free_blocks[missing:]
        return True

    def free(self, owner):
        table = self.tables.pop(owner, None)
        if table is None:
            raise ValueError("no such owner")
        self.free_blocks = sorted(self.free_blocks + table)
''',
    },
    "buddy": {
        "loops": _BUDDY,
        "recursive": '''
class BuddyArena(BuddyBase):
    def _get(self, size):
        if size not in self.free_lists:
            return None
        if self.free_lists[size]:
            offset = min(self.free_lists[size])
            self.free_lists[size].remove(offset)
            return offset
        offset = self._get(2 * size)
        if offset is not None:
            self.free_lists[size].add(offset + size)
        return offset

    def _put(self, offset, size):
        buddy = offset - size if offset // size % 2 else offset + size
        if buddy in self.free_lists[size]:
            self.free_lists[size].remove(buddy)
            self._put(min(offset, buddy), 2 * size)
        else:
            self.free_lists[size].add(offset)

    def allocate(self, owner, size):
        self.check(owner, size)
        wanted = 1
        while wanted < size:
            wanted += wanted
        offset = self._get(wanted)
        return None if offset is None else self.place(owner, offset, wanted)

    def free(self, owner):
        self._put(*self.take(owner))
''',
    },
}
WRONG = {
    "first_fit": {
        "the hole with index 0 is taken for none": _changed(_FIRST_FIT, ("index is None", "not index")),
        "an exact fit is refused": _changed(_FIRST_FIT, (">= size", "> size")),
        "a hole of size 0 stays": _changed(_FIRST_FIT, ("if hole.size > size:", "if True:")),
        "the end of the hole, not the front": _changed(
            _FIRST_FIT, ("Region(hole.start + size, hole.size", "Region(hole.start, hole.size"),
            ("Region(hole.start, size, owner)", "Region(hole.start + hole.size - size, size, owner)"),
            ("return hole.start", "return hole.start + hole.size - size")),
        "the hole does not shrink": _changed(
            _FIRST_FIT, ("Region(hole.start + size, hole.size - size, None)", "hole")),
        "the last hole that fits": _changed(_FIRST_FIT, ("enumerate(self.holes)", "reversed(list(enumerate(self.holes)))")),
        "the smallest hole that fits": _changed(
            _FIRST_FIT, ("next((i for i, hole in enumerate(self.holes) if hole.size >= size), None)",
                         "min((i for i, hole in enumerate(self.holes) if hole.size >= size), "
                         "key=lambda i: self.holes[i].size, default=None)")),
        "writes down the owner before it looks": _changed(
            _FIRST_FIT, ("        index = self.choose(size)\n",
                         "        self.held[owner] = Region(0, size, owner)\n        index = self.choose(size)\n")),
        "an owner may come twice": _changed(_FIRST_FIT, ("        self.check(owner, size)\n", "")),
        "looks at all free slots together": _changed(
            _FIRST_FIT, ("if index is None:\n            return None",
                         "if self.free_total < size:\n            return None\n        index = index or 0")),
        "the rest goes to the end of the list": _changed(
            _FIRST_FIT, ("self.holes.insert(index, ", "self.holes.append(")),
        "addresses from 0, wherever the arena starts": _changed(
            _FIRST_FIT, ("return hole.start", "return hole.start - self.start")),
        "a plain tuple is held": _changed(_FIRST_FIT, ("Region(hole.start, size, owner)", "(hole.start, size, owner)")),
        "a region without its owner": _changed(_FIRST_FIT, ("Region(hole.start, size, owner)", "Region(hole.start, size, None)")),
        "the rest is a plain tuple": _changed(
            _FIRST_FIT, ("Region(hole.start + size, hole.size - size, None)", "(hole.start + size, hole.size - size, None)")),
        "the rest has an owner": _changed(
            _FIRST_FIT, ("Region(hole.start + size, hole.size - size, None)", "Region(hole.start + size, hole.size - size, owner)")),
        "choose puts the holes in order of size": _changed(
            _FIRST_FIT, ("        return next(", "        self.holes.sort(key=lambda hole: hole.size)\n        return next(")),
        "choose gives the hole": _changed(_FIRST_FIT, ("next((i for i,", "next((hole for i,")),
        "holds the whole hole": _changed(_FIRST_FIT, ("Region(hole.start, size, owner)", "Region(hole.start, hole.size, owner)")),
    },
    "merge": {
        "no joining at all": _changed(_MERGE, ("hole.start == start + size", "False"), ("hole.start + hole.size == start", "False")),
        "joins only to the right": _changed(_MERGE, ("hole.start + hole.size == start", "False")),
        "joins only to the left": _changed(_MERGE, ("hole.start == start + size", "False")),
        "one neighbour is enough": _changed(
            _MERGE, ("                size += hole.size\n",
                     "                size += hole.size\n                self.holes.append(Region(start, size, None))\n"
                     "                self.holes.sort()\n                return\n")),
        "the joined hole stays in the list": _changed(
            _MERGE, ("                self.holes.remove(hole)\n                size += hole.size", "                size += hole.size")),
        "joins with whatever hole is to the right": _changed(_MERGE, ("hole.start == start + size", "hole.start > start")),
        "the order of freeing": _changed(_MERGE, ("        self.holes.sort()\n", "")),
        "freed twice, unnoticed": _changed(_MERGE, ("            raise ValueError(owner)", "            return")),
        "a KeyError": _changed(_MERGE, ("        if owner not in self.held:\n            raise ValueError(owner)\n", "")),
        "still held": _changed(_MERGE, ("self.held.pop(owner)", "self.held[owner]")),
        "off by one": _changed(_MERGE, ("hole.start == start + size", "hole.start == start + size + 1")),
        "a joined hole loses a neighbour's size": _changed(
            _MERGE, ("start, size = hole.start, size + hole.size", "start, size = hole.start, max(size, hole.size)")),
        "the hole keeps its owner": _changed(_MERGE, ("Region(start, size, None)", "Region(start, size, owner)")),
        "the hole is a plain tuple": _changed(_MERGE, ("Region(start, size, None)", "(start, size, None)")),
        "joins holes that are one slot apart": _changed(_MERGE, ("hole.start == start + size", "hole.start - start - size in (0, 1)")),
        "starts at 0, wherever the arena starts": _changed(
            _MERGE, ("Region(start, size, None)", "Region(start - self.start, size, None)")),
        "appended, and no more": '''
class Arena(Placer):
    def free(self, owner):
        if owner not in self.held:
            raise ValueError(owner)
        self.holes.append(Region(*self.held.pop(owner)[:2], None))
''',
        "first fit again in place of free": "class Arena(Placer):\n    pass\n",
    },
    "fits": {
        "an exact fit is refused": _changed(_FITS, (">= size", "> size")),
        "the last of equals": _changed(_FITS, ("(holes[i].size, i)", "(holes[i].size, -i)"), ("(-holes[i].size, i)", "(-holes[i].size, -i)")),
        "the hole, not its index": _changed(_FITS, ("return min(fitting, key=key)", "return list(holes[min(fitting, key=key)][:2])")),
        "the position among those that fit": _changed(_FITS, ("return min(fitting, key=key)", "return fitting.index(min(fitting, key=key))")),
        "worst is the smallest": _changed(_FITS, ("(-holes[i].size, i)", "(holes[i].size, i)")),
        "the smallest of all, large enough or not": _changed(_FITS, ("if hole.size >= size]", "]")),
        "0 for none": _changed(_FITS, ("return None", "return 0")),
        "sorts by size first": _changed(_FITS, ("    fitting = [", "    holes = sorted(holes, key=lambda hole: hole.size)\n    fitting = [")),
        "sorts the holes in place": _changed(
            _FITS, ("    fitting = [", "    before = list(holes)\n    holes.sort(key=lambda hole: hole.size)\n    fitting = ["),
            ("return min(fitting, key=key)", "return before.index(holes[min(fitting, key=key)])"),
            ('"first": lambda i: i,', '"first": lambda i: before.index(holes[i]),'),
            ("(-holes[i].size, i)", "(-holes[i].size, before.index(holes[i]))")),
        "an error when nothing fits": _changed(_FITS, ("    if not fitting:\n        return None\n", "")),
    },
    "wastes": {
        "reservation holds internal too": _changed(_WASTES, ("reservation_waste(*progress[r.owner]) for", "r.size - progress[r.owner][0] for")),
        "internal counts from what is used": _changed(_WASTES, ("internal_waste(r.size, progress[r.owner][1])", "internal_waste(r.size, progress[r.owner][0])")),
        "external is all or nothing": _changed(
            _WASTES, ("sum(size - size // need * need for size in hole_sizes)", "sum(size for size in hole_sizes if size < need)")),
        "external of all holes together": _changed(
            _WASTES, ("sum(size - size // need * need for size in hole_sizes)", "sum(hole_sizes) % need")),
        "one region in each hole": _changed(
            _WASTES, ("sum(size - size // need * need for size in hole_sizes)",
                      "sum(size - need if size >= need else size for size in hole_sizes)")),
        "all that is free is placeable": _changed(_WASTES, ("arena.free_total - external", "arena.free_total")),
        "placeable counts regions": _changed(_WASTES, ("arena.free_total - external", "(arena.free_total - external) // need")),
        "only the largest hole": _changed(_WASTES, ("[hole.size for hole in arena.holes]", "[arena.largest_hole]")),
        "used and final mixed up": _changed(_WASTES, ("used = sum(progress[r.owner][0]", "used = sum(progress[r.owner][1]")),
        "a plain tuple": _changed(_WASTES, ("return Waste(used,", "return (used,")),
        "holes of exactly the size are lost": _changed(
            _WASTES, ("sum(size - size // need * need for size in hole_sizes)",
                      "sum(size % need if size > need else size for size in hole_sizes)")),
        "internal has the wrong sign": _changed(_WASTES, ("    return size - final", "    return final - size")),
    },
    "expected": {
        "the average from 0": _changed(_EXPECTED, ("(mean + 1) / 2)", "mean / 2)"), ("(square + mean)", "square")),
        "over time is per request": _changed(_EXPECTED, ("(square + mean) / (2 * mean)", "(mean + 1) / 2")),
        "E[n]^2 for E[n^2]": _changed(_EXPECTED, (" + (k**2 - 1) / 12", "")),
        "the variance of a continuous interval": _changed(_EXPECTED, ("(k**2 - 1) / 12", "(high - low) ** 2 / 12")),
        "one length too few": _changed(_EXPECTED, ("high - low + 1", "high - low")),
        "the prompt grows too": _changed(_EXPECTED, ("(prompt + (mean + 1) / 2)", "(prompt / 2 + (mean + 1) / 2)")),
        "no prompt over time": _changed(_EXPECTED, ("(prompt + (square + mean)", "((square + mean)")),
        "no prompt at the end": _changed(_EXPECTED, ("static = (prompt + mean)", "static = mean")),
        "percent": _changed(_EXPECTED, 
            ("Utilisation(static, per_request, over_time)", "Utilisation(100 * static, 100 * per_request, 100 * over_time)")),
        "a plain tuple": _changed(_EXPECTED, ("Utilisation(static, per_request, over_time)", "(static, per_request, over_time)")),
        "whole numbers only": _changed(_EXPECTED, ("(low + high) / 2", "(low + high) // 2")),
        "a loop": '''
def expected_utilisation(low, high, reserve, prompt=0):
    total = steps = shares = 0
    for n in range(low, high + 1):
        total += n
        steps += n * (n + 1) / 2
        shares += (n + 1) / 2
    count = high - low + 1
    return Utilisation((prompt + total / count) / reserve, (prompt + shares / count) / reserve,
                       (prompt + steps / total) / reserve)
''',
        "a loop in sum()": '''
def expected_utilisation(low, high, reserve, prompt=0):
    count, total = high - low + 1, (low + high) * (high - low + 1) / 2
    slots = sum(n * (n + 1) / 2 for n in range(low, high + 1))
    return Utilisation((prompt + total / count) / reserve, (prompt + (total / count + 1) / 2) / reserve,
                       (prompt + slots / total) / reserve)
''',
        "weighted by length twice": _changed(_EXPECTED, ("(square + mean) / (2 * mean)", "(square + mean) / mean")),
    },
    "paged": {
        "rounds down": _changed(_PAGED, ("-(-num_tokens // self.block_size)", "num_tokens // self.block_size")),
        "one block too many at a full one": _changed(_PAGED, ("-(-num_tokens // self.block_size)", "(num_tokens // self.block_size + 1)")),
        "num_tokens is taken for more tokens": _changed(_PAGED, (" - have\n", "\n")),
        "takes what it gets": _changed(_PAGED, (
            "        if missing > len(self.free_blocks):\n            return False\n", ""), (
            "        for _ in range(missing):\n", "        for _ in range(missing):\n            if not self.free_blocks:\n                return False\n")),
        "a refused newcomer has a table": _changed(_PAGED, (
            "        if missing > len", "        self.tables.setdefault(owner, [])\n        if missing > len")),
        "never gives a block back": _changed(_PAGED, ("self.free_blocks += self.tables.pop(owner)", "self.tables.pop(owner)")),
        "gives blocks back and keeps them": _changed(_PAGED, ("self.tables.pop(owner)", "self.tables[owner]")),
        "the same block twice": _changed(_PAGED, ("self.free_blocks.pop()", "self.free_blocks[-1]")),
        "a fresh table each time": _changed(_PAGED, (
            "        for _ in range(missing):\n", "        self.free_blocks += self.tables.pop(owner, [])\n        missing += have\n        for _ in range(missing):\n")),
        "freed twice, unnoticed": _changed(_PAGED, ("            raise ValueError(owner)", "            return")),
        "nothing for True": _changed(_PAGED, ("        return True\n", "")),
        "new blocks at the front": _changed(_PAGED, (".append(self.free_blocks.pop())", ".insert(0, self.free_blocks.pop())")),
        "fewer tokens take the slice from the wrong end": '''
class PagedArena(PagedBase):
    def grow(self, owner, num_tokens):
        table = self.tables.get(owner, [])
        need = -(-num_tokens // self.block_size) - len(table)
        if need > len(self.free_blocks):
            return False
        new = self.free_blocks[:need]
        self.free_blocks = self.free_blocks[need:]
        self.tables[owner] = table + new
        return True

    def free(self, owner):
        if owner not in self.tables:
            raise ValueError(owner)
        self.free_blocks += self.tables.pop(owner)
''',
        "a table shrinks": _changed(_PAGED, (
            "        for _ in range(missing):\n", "        while missing < 0:\n            self.free_blocks.append(self.tables[owner].pop())\n"
            "            missing += 1\n        for _ in range(missing):\n")),
        "False where nothing is missing": _changed(_PAGED, (
            "        if missing > len(", "        if missing < 0 or missing > len(")),
        "the last free block is never given": _changed(_PAGED, ("if missing > len(", "if missing >= len(")),
        "tables of all arenas in one": _changed(_PAGED, ("    def grow", "    tables = {}\n\n    def __init__(self, num_blocks, block_size=16):\n        "
                                                "super().__init__(num_blocks, block_size)\n        del self.tables\n\n    def grow")),
    },
    "buddy": {
        "joins with any neighbour": _changed(_BUDDY, ("offset ^ size", "offset + size")),
        "joins once only": _changed(_BUDDY, ("while offset ^ size in", "if offset ^ size in")),
        "size before offset": _changed(_BUDDY, ("offset, size = min(offset, offset ^ size), size * 2", "size *= 2; offset = min(offset, offset ^ size)")),
        "never joins": _changed(_BUDDY, ("while offset ^ size in self.free_lists[size]", "while False")),
        "starts at the later offset": _changed(_BUDDY, ("min(offset, offset ^ size)", "max(offset, offset ^ size)")),
        "the buddy stays in its list": _changed(_BUDDY, ("            self.free_lists[size].remove(offset ^ size)\n", "")),
        "an error where nothing is free": _changed(_BUDDY, (
            ", default=None)\n        if have is None:\n            return None\n", ")\n")),
        "splits the largest": _changed(_BUDDY, ("have = min((s for", "have = max((s for")),
        "keeps the right half": _changed(_BUDDY, (
            "            self.free_lists[have].add(offset + have)\n", "            self.free_lists[have].add(offset)\n            offset += have\n")),
        "does not split": _changed(_BUDDY, ("while have > want:", "while False:")),
        "rounds a power of two up again": _changed(_BUDDY, ("1 << (size - 1).bit_length()", "1 << size.bit_length()")),
        "holds only what was asked for": _changed(_BUDDY, ("self.place(owner, offset, have)", "self.place(owner, offset, size)")),
        "an owner may come twice": _changed(_BUDDY, ("        self.check(owner, size)\n", "")),
        "the highest offset": _changed(_BUDDY, ("min(self.free_lists[have])", "max(self.free_lists[have])")),
    },
}  # fmt: skip
