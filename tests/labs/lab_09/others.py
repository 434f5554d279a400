"""Lab 09: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_BOOK = '''
def by_the_book(tokens, kv_bytes_per_token, num_parameters, bandwidth, flops_rate):
    one_way = tokens * kv_bytes_per_token / bandwidth
    flops = 2 * num_parameters * tokens
    return one_way + one_way, flops / flops_rate
'''
_BILLS = '''
def two_bills(prices, tokens, found=0):
    swap, recompute = prices.fixed + prices.move * tokens, 0.0
    for keys in range(found + 1, tokens + 1):
        swap += prices.move
        recompute += prices.compute + prices.pair * keys
    return swap, recompute
'''
_CLOSED = '''
def two_bills(prices, tokens, found=0):
    new = tokens - found
    pairs = new * found + new * (new + 1) / 2
    return prices.fixed + prices.move * (tokens + new), prices.compute * new + prices.pair * pairs
'''
_FROM = '''
def swap_wins_from(prices):
    a, b, c = prices.pair / 2, prices.compute + prices.pair / 2 - 2 * prices.move, prices.fixed
    if a == 0:
        return c / b if b > 0 else None
    return (-b + (b * b + 4 * a * c) ** 0.5) / (2 * a)
'''
_HALVING = '''
def gained(prices, tokens):
    swap = prices.fixed + 2 * prices.move * tokens
    return prices.compute * tokens + prices.pair * tokens * (tokens + 1) / 2 - swap

def swap_wins_from(prices):
    low, high = 0.0, 1.0
    while gained(prices, high) <= 0:
        high *= 2
        if high > 1e12:
            return None
    if gained(prices, 1e-9) > 0:
        return 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if gained(prices, middle) > 0:
            high = middle
        else:
            low = middle
    return high
'''
_VICTIM = '''
def choose_victim(running, needy, gain):
    victim = needy
    for request in running:
        if request.sort_key <= needy.sort_key:
            continue
        if victim is needy:
            victim = request
            continue
        mine, best = gain(request) > 0, gain(victim) > 0
        if (mine, request.sort_key) > (best, victim.sort_key):
            victim = request
    return victim
'''
_QUEUED = '''
def choose_victim(running, needy, gain):
    queue = sorted(running, key=lambda r: (r.priority, r.arrival, r.child_index), reverse=True)
    behind = queue[: queue.index(needy)]
    for request in behind:
        if gain(request):
            return request
    return behind[0] if behind else needy
'''
_HOW = '''
def swap_or_recompute(request, num_blocks, num_free_cpu_blocks, prices=None):
    if num_blocks > num_free_cpu_blocks:
        return "recompute"
    tokens = request.num_computed_tokens
    by_link = prices.fixed + 2 * prices.move * tokens
    by_gpu = prices.compute * tokens + prices.pair * tokens * (tokens + 1) / 2
    return "swap" if by_link < by_gpu else "recompute"
'''
_FROM_CROSSING = '''
def swap_or_recompute(request, num_blocks, num_free_cpu_blocks, prices=QWEN):
    crossing = wins_from(prices)
    cheaper = crossing is not None and request.num_computed_tokens > crossing
    return "swap" if cheaper and num_blocks <= num_free_cpu_blocks else "recompute"
'''
_RESUME = '''
def may_resume(request, room):
    if not room.num_growing:
        return True
    spare = room.num_growing * (1 + request.num_preemptions)
    return room.free - room.promised - room.needed >= spare
'''
_DOUBLING = _changed(_RESUME, "(1 + request.num_preemptions)", "2 ** request.num_preemptions")
_WASTE = '''
def wasted_tokens(log):
    marks, wasted = {}, {}
    for name, first, num_tokens in log:
        mark = marks.get(name, 0)
        wasted[name] = wasted.get(name, 0) + min(first + num_tokens, mark) - first
        marks[name] = max(mark, first + num_tokens)
    return wasted
'''
_COUNTED = '''
from collections import Counter

def wasted_tokens(log):
    times = Counter((name, p) for name, first, num in log for p in range(first, first + num))
    wasted = dict.fromkeys((name for name, _, _ in log), 0)
    for (name, _), count in times.items():
        wasted[name] += count - 1
    return wasted
'''

_NUMPY = "import numpy as np\n"
_NAMED = "from collections import namedtuple\nPair = namedtuple('Pair', 'swap again')\n"
_DEFAULTS = '''
from collections import defaultdict

def wasted_tokens(log):
    mark, wasted = defaultdict(int), defaultdict(int)
    for name, first, n in log:
        wasted[name] += max(0, min(first + n, mark[name]) - first)
        mark[name] = max(mark[name], first + n)
    return wasted
'''
_CAPPED = _changed(_DOUBLING, "2 ** request.num_preemptions", "2 ** min(CAP, request.num_preemptions)")
_LAST = """
def choose_victim(running, needy, gain):
    behind = [r for r in running if r.sort_key > needy.sort_key]
    if not behind:
        NOBODY
    useful = [r for r in behind if gain(r) > 0]
    victim = max(useful or behind, key=lambda r: r.sort_key)
    return victim
"""
_ROUNDED = _changed(_FROM, "    if a == 0", "    ROUND\n    if a == 0")
_UP_TO = _changed(_HALVING, "high > 1e12", "high > LIMIT")

CORRECT = {
    "by_the_book": {
        "one way twice": _BOOK,
        "a named tuple": _NAMED + _changed(_BOOK, "return one_way + one_way, flops / flops_rate",
                                           "return Pair(one_way + one_way, flops / flops_rate)"),
        "an array": _NUMPY + _changed(_BOOK, "return one_way + one_way, flops / flops_rate",
                                      "return np.array([one_way + one_way, flops / flops_rate])"),
    },
    "two_bills": {
        "token by token": _BILLS,
        "in closed form": _CLOSED,
        "a named tuple": _NAMED + _changed(_BILLS, "return swap, recompute", "return Pair(swap, recompute)"),
        "an array": _NUMPY + _changed(_BILLS, "return swap, recompute", "return np.array([swap, recompute])"),
    },
    "swap_wins_from": {
        "one formula": _FROM,
        "by halving": _HALVING,
        "with numpy": _NUMPY + _changed(_changed(_FROM, "c / b", "np.float64(c) / b"),
                                        "(b * b + 4 * a * c) ** 0.5", "np.sqrt(b * b + 4 * a * c)"),
    },
    "choose_victim": {"one pass": _VICTIM, "a queue from its end": _QUEUED, "two lists": _changed(_LAST, "NOBODY", "return needy")},
    "swap_or_recompute": {"with the bills inside": _HOW, "by the crossing": _FROM_CROSSING},
    "may_resume": {
        "what is left over": _RESUME,
        "doubling": _DOUBLING,
        "doubling, as a float": _changed(_DOUBLING, "2 **", "2.0 **"),
        "something between": _changed(_RESUME, "(1 + request.num_preemptions)",
                                      "(1 + request.num_preemptions * (request.num_preemptions + 1) // 2)"),
        "call by call": '''
def spare(growing, times):
    return growing if times == 0 else growing + spare(growing, times - 1)

def may_resume(request, room):
    taken = room.needed + room.promised
    return room.num_growing == 0 or taken + spare(room.num_growing, request.num_preemptions) <= room.free
''',
    },
    "wasted_tokens": {"a mark": _WASTE, "a counter of positions": _COUNTED, "a defaultdict": _DEFAULTS},
}
WRONG = {
    "by_the_book": {
        "one way only": _changed(_BOOK, "one_way + one_way", "one_way"),
        "one FLOP a weight": _changed(_BOOK, "2 * num_parameters", "num_parameters"),
        "in the other order": _changed(_BOOK, "one_way + one_way, flops / flops_rate", "flops / flops_rate, 2 * one_way"),
        "the bytes of the weights": _changed(_BOOK, "kv_bytes_per_token / bandwidth", "2 * num_parameters / bandwidth"),
        "for one token": _changed(_BOOK, "2 * num_parameters * tokens", "2 * num_parameters"),
        "milliseconds": _changed(_BOOK, "flops / flops_rate", "1000 * flops / flops_rate"),
        "whole seconds": _changed(_BOOK, "flops / flops_rate", "flops // flops_rate"),
        "milliseconds, both": _changed(_BOOK, "one_way + one_way, flops / flops_rate",
                                       "2000 * one_way, 1000 * flops / flops_rate"),
        "the 70B's bytes": _changed(_BOOK, "tokens * kv_bytes_per_token", "tokens * 320_000"),
        "three FLOP, as in training": _changed(_BOOK, "flops = 2", "flops = 6"),
    },
    "two_bills": {
        "found on the way out too": _changed(_CLOSED, "(tokens + new)", "(new + new)"),
        "found on neither way": _changed(_CLOSED, "(tokens + new)", "2 * tokens"),
        "fixed twice": _changed(_CLOSED, "prices.fixed +", "2 * prices.fixed +"),
        "fixed forgotten": _changed(_CLOSED, "prices.fixed + ", ""),
        "fixed for recomputing": _changed(_CLOSED, "+ prices.pair * pairs", "+ prices.pair * pairs + prices.fixed"),
        "one way": _changed(_CLOSED, "(tokens + new)", "new"),
        "pairs of the new ones alone": _changed(_CLOSED, "new * found + ", ""),
        "pairs of all": _changed(_CLOSED, "new * found + new * (new + 1) / 2", "tokens * (tokens + 1) / 2"),
        "a token does not see itself": _changed(_CLOSED, "new * (new + 1) / 2", "new * (new - 1) / 2"),
        "both halves of the square": _changed(_CLOSED, "new * (new + 1) / 2", "new * new"),
        "half the square": _changed(_CLOSED, "new * (new + 1) / 2", "new * new / 2"),
        "new ones see the found ones once": _changed(_CLOSED, "new * found + ", "found + "),
        "found ones are computed": _changed(_CLOSED, "prices.compute * new", "prices.compute * tokens"),
        "nothing fixed if all is found": _changed(
            _CLOSED, "    return", "    if not new:\n        return 0.0, 0.0\n    return"),
        "in the other order": _changed(_BILLS, "return swap, recompute", "return recompute, swap"),
        "without found": '''
def two_bills(prices, tokens):
    return prices.fixed + 2 * prices.move * tokens, prices.compute * tokens + prices.pair * tokens * (tokens + 1) / 2
''',
    },
    "swap_wins_from": {
        "no pairs": '''
def swap_wins_from(prices):
    gain = prices.compute - 2 * prices.move
    return prices.fixed / gain if gain > 0 else None
''',
        "the other root": _changed(_FROM, "(-b + ", "(-b - "),
        "division by zero": _changed(_FROM, "    if a == 0:\n        return c / b if b > 0 else None\n", ""),
        "zero for never": _changed(_FROM, "else None", "else 0.0"),
        "infinity for never": _changed(_FROM, "else None", 'else float("inf")'),
        "None for always": _changed(_FROM, "    if a == 0", "    if c == 0 and b >= 0:\n        return None\n    if a == 0"),
        "zero wherever nothing is fixed": _changed(_FROM, "    if a == 0", "    if c == 0 and b:\n        return 0.0\n    if a == 0"),
        "never where a token loses": _changed(_FROM, "    if a == 0", "    if b < 0:\n        return None\n    if a == 0"),
        "even counts as won": _changed(_FROM, "if b > 0 else None", "if b > 0 else 0.0 if b == c == 0 else None"),
        "one way": _changed(_FROM, "2 * prices.move", "prices.move"),
        "the half forgotten": _changed(_FROM, "a, b, c = prices.pair / 2", "a, b, c = prices.pair"),
        "a pair less": _changed(_FROM, "prices.compute + prices.pair / 2", "prices.compute - prices.pair / 2"),
        "no half pair in b": _changed(_FROM, "prices.compute + prices.pair / 2", "prices.compute"),
        "whole tokens": _changed(_FROM, "    return (-b", "    return -(-(-b").replace("(2 * a)", "(2 * a) // 1)"),
        "small is zero": _changed(_FROM, "if a == 0", "if a < 1e-6"),
        "a small gain is none": _changed(_FROM, "b > 0", "b > 1e-6"),
        "the smallest gain is none": _changed(_FROM, "b > 0", "b > 1e-12"),
        "small pairs are none": _changed(_ROUNDED, "ROUND", "a = 0 if a < 5e-13 else a"),
        "a small fixed cost is none": _changed(_ROUNDED, "ROUND", "c = 0 if c < 1e-6 else c"),
        "below one token is always": _changed(
            _FROM, "    return (-b", "    return 0.0 if a + b > c else (-b"),
        "halving up to 100,000": _changed(_UP_TO, "LIMIT", "1e5"),
        "halving up to a million": _changed(_UP_TO, "LIMIT", "1e6"),
        "whole quotients": _changed(_FROM, "c / b", "c // b"),
        "fixed is ignored": _changed(_FROM, ", prices.fixed", ", 0"),
    },
    "choose_victim": {
        "the last of the list": '''
def choose_victim(running, needy, gain):
    return running[-1]
''',
        "pops it": '''
def choose_victim(running, needy, gain):
    return running.pop()
''',
        "the youngest of all": '''
def choose_victim(running, needy, gain):
    return max(running, key=lambda r: r.sort_key)
''',
        "the youngest of all that helps": '''
def choose_victim(running, needy, gain):
    return max([r for r in running if gain(r) > 0] or running, key=lambda r: r.sort_key)
''',
        "the oldest": _changed(_QUEUED, "reverse=True", "reverse=False"),
        "the largest behind": '''
def choose_victim(running, needy, gain):
    behind = [r for r in running if r.sort_key > needy.sort_key]
    return max(behind, key=gain) if behind else needy
''',
        "needy counts as behind": _changed(_QUEUED, "queue[: queue.index(needy)]", "queue[: queue.index(needy) + 1]"),
        "needy if none helps": _changed(_QUEUED, "behind[0] if behind else needy", "needy"),
        "None if nobody is behind": _changed(_QUEUED, "behind[0] if behind else needy", "behind[0] if behind else None"),
        "an error if nobody is behind": _changed(_QUEUED, "behind[0] if behind else needy", "behind[0]"),
        "priority turned round": _changed(_QUEUED, "(r.priority,", "(-r.priority,"),
        "priority forgotten": _changed(_QUEUED, "(r.priority, ", "("),
        "siblings forgotten": _changed(_QUEUED, ", r.child_index)", ")"),
        "arrival first": _changed(_QUEUED, "(r.priority, r.arrival,", "(r.arrival, r.priority,"),
        "gain forgotten": _changed(_QUEUED, "if gain(request):", "if True:"),
        "the largest if the last does not help": '''
def choose_victim(running, needy, gain):
    behind = sorted([r for r in running if r.sort_key > needy.sort_key], key=lambda r: r.sort_key)
    if not behind:
        return needy
    return behind[-1] if gain(behind[-1]) else max(reversed(behind), key=gain)
''',
        "more than one block": _changed(_QUEUED, "if gain(request):", "if gain(request) > 1:"),
        "the first behind that helps": _changed(_QUEUED, "in behind:", "in reversed(behind):"),
        "oldest of those that do not help": _changed(_QUEUED, "behind[0] if", "behind[-1] if"),
        "sorts the list itself": _changed(_VICTIM, "    victim = needy\n", "    running.sort(key=lambda r: r.sort_key)\n    victim = needy\n"),
        "its name": _changed(_VICTIM, "return victim", "return victim.request_id"),
        "anybody who helps if nobody is behind": '''
def choose_victim(running, needy, gain):
    behind = [r for r in running if r.sort_key > needy.sort_key] or running
    useful = [r for r in behind if gain(r) > 0]
    return max(useful or behind, key=lambda r: r.sort_key)
''',
        "the largest if nobody is behind and needy frees nothing": _changed(
            _LAST, "NOBODY", "return needy if gain(needy) > 0 else max(running, key=gain)"),
        "somebody before if nobody is behind and needy frees nothing": _changed(
            _LAST, "NOBODY", "return ([needy] if gain(needy) else [r for r in running if gain(r)] or [needy])[-1]"),
        "drops the victim's tokens": _changed(_changed(_LAST, "NOBODY", "return needy"), "    return victim",
                                              "    victim.num_computed_tokens = 0\n    return victim"),
        "counts the preemption": _changed(_changed(_LAST, "NOBODY", "return needy"), "    return victim",
                                          "    victim.num_preemptions += 1\n    return victim"),
        "forgets the preemptions": _changed(_changed(_LAST, "NOBODY", "return needy"), "    return victim",
                                            "    victim.num_preemptions = 0\n    return victim"),
        "of the same priority only": _changed(_QUEUED, "if gain(request):", "if gain(request) and request.priority == needy.priority:"),
        "never needy": '''
def choose_victim(running, needy, gain):
    others = [r for r in running if r is not needy]
    behind = [r for r in others if r.sort_key > needy.sort_key]
    helpful = [r for r in behind if gain(r) > 0]
    return max(helpful or behind or others or [needy], key=lambda r: r.sort_key)
''',
    },
    "swap_or_recompute": {
        "if it fits": '''
def swap_or_recompute(request, num_blocks, num_free_cpu_blocks, prices=None):
    return "swap" if num_blocks <= num_free_cpu_blocks else "recompute"
''',
        "if it is cheaper": _changed(_HOW, "    if num_blocks > num_free_cpu_blocks:\n        return \"recompute\"\n", ""),
        "one block less": _changed(_HOW, "num_blocks > num_free_cpu_blocks", "num_blocks >= num_free_cpu_blocks"),
        "even is swapped": _changed(_HOW, "by_link < by_gpu", "by_link <= by_gpu"),
        "all known tokens": _changed(_HOW, "request.num_computed_tokens", "request.num_tokens"),
        "whole blocks": _changed(_HOW, "request.num_computed_tokens", "16 * num_blocks"),
        "blocks for tokens": _changed(_HOW, "request.num_computed_tokens", "num_blocks"),
        "the other way round": _changed(_HOW, "by_link < by_gpu", "by_link > by_gpu"),
        "no pairs": _changed(_HOW, " + prices.pair * tokens * (tokens + 1) / 2", ""),
        "pairs less one": _changed(_HOW, "(tokens + 1)", "(tokens - 1)"),
        "nothing fixed": _changed(_HOW, "prices.fixed + ", ""),
        "one way": _changed(_HOW, "2 * prices.move", "prices.move"),
        "a bool": _changed(_HOW, '"swap" if by_link < by_gpu else "recompute"', "by_link < by_gpu"),
        "the prices of the notebook": _changed(_HOW, "    tokens =", "    prices = QWEN\n    tokens ="),
        "another word": _changed(_HOW, '"swap" if', '"SWAP" if'),
        "from the crossing, rounded": _changed(
            _HOW, '"swap" if by_link < by_gpu', '"swap" if prices.compute > 2 * prices.move and prices.fixed < 20'),
        "blocks of 16": _changed(_HOW, "num_blocks > num_free", "-(-request.num_computed_tokens // 16) > num_free"),
        "room for its tokens": _changed(
            _HOW, "num_blocks > num_free_cpu_blocks", "request.num_computed_tokens > 16 * num_free_cpu_blocks"),
        "drops it itself": _changed(_HOW, "    return \"swap\" if", "    request.num_computed_tokens = 0\n    return \"swap\" if"),
        "any room will do": _changed(_HOW, "num_blocks > num_free_cpu_blocks", "num_free_cpu_blocks == 0"),
    },
    "may_resume": {
        "numpy's True": _NUMPY + '''
def may_resume(request, room):
    if room.num_growing == 0:
        return np.bool_(True)
    wanted = sum([room.needed, room.promised] + [room.num_growing] * (request.num_preemptions + 1))
    return np.bool_(wanted <= room.free)
''',
        "always": '''
def may_resume(request, room):
    return True
''',
        "what it needs is free": '''
def may_resume(request, room):
    return room.num_growing == 0 or room.needed <= room.free
''',
        "alone only": '''
def may_resume(request, room):
    return room.num_growing == 0
''',
        "stuck when alone": _changed(_RESUME, "    if not room.num_growing:\n        return True\n", ""),
        "alone, if it fits": _changed(_RESUME, "return True", "return room.needed + room.promised <= room.free"),
        "promises forgotten": _changed(_RESUME, " - room.promised", ""),
        "promises twice": _changed(_RESUME, " - room.promised", " - 2 * room.promised"),
        "nothing spare": _changed(_RESUME, "room.num_growing * (1 + request.num_preemptions)", "0"),
        "no back-off": _changed(_RESUME, " * (1 + request.num_preemptions)", ""),
        "no hysteresis": _changed(_RESUME, "(1 + request.num_preemptions)", "request.num_preemptions"),
        "one block a preemption": _changed(_RESUME, " * (1 + request.num_preemptions)", " + request.num_preemptions"),
        "one spare block": _changed(_RESUME, "room.num_growing * (1 ", "1 * (1 "),
        "a bound": _changed(_RESUME, "(1 + request.num_preemptions)", "(1 + min(3, request.num_preemptions))"),
        "a high bound": _changed(_DOUBLING, "2 ** request.num_preemptions", "min(16, 2 ** request.num_preemptions)"),
        "doubles six times": _changed(_CAPPED, "CAP", "6"),
        "doubles eight times": _changed(_CAPPED, "CAP", "8"),
        "doubles sixteen times": _changed(_CAPPED, "CAP", "16"),
        "adds 64 times": _changed(_RESUME, "(1 + request.num_preemptions)", "min(64, 1 + request.num_preemptions)"),
        "adds 200 times": _changed(_RESUME, "(1 + request.num_preemptions)", "min(200, 1 + request.num_preemptions)"),
        "at most 200 spare": _changed(_RESUME, ">= spare", ">= min(200, spare)"),
        "gives up after sixty": _changed(
            _RESUME, "    spare =", "    if request.num_preemptions > 60:\n        return True\n    spare ="),
        "plenty is always enough": _changed(_RESUME, "    return room.free", "    return room.free >= 1000 or room.free"),
        "the large ones at once": _changed(_RESUME, "    return room.free", "    return room.needed >= 160 or room.free"),
        "a watermark of 1%": _changed(_RESUME, ">= spare", ">= spare + room.free // 100"),
        "writes into room": _changed(_RESUME, "    spare =", "    room.free = room.free - room.promised\n    spare ="),
        "one for True": _changed(_RESUME, "return room.free", "return 1 if room.free").rstrip() + " else 0\n",
        "forgets what it went through": _changed(
            _RESUME, "    spare =", "    times = request.num_preemptions\n    request.num_preemptions = 0\n    spare ="
        ).replace("(1 + request.num_preemptions)", "(1 + times)"),
        "an odd number of free blocks": _changed(_RESUME, ">= spare", ">= spare and room.free % 7 != 3"),
        "gives up after three": _changed(
            _RESUME, "    spare =", "    if request.num_preemptions > 3:\n        return True\n    spare ="),
        "one more than enough": _changed(_RESUME, ">= spare", "> spare"),
        "needed forgotten": _changed(_RESUME, " - room.needed", ""),
        "squares": _changed(_RESUME, "(1 + request.num_preemptions)", "(1 + request.num_preemptions) ** 2"),
        "doubles at once": _changed(_RESUME, "(1 + request.num_preemptions)", "2 ** (1 + request.num_preemptions)"),
        "counts here": _changed(_RESUME, "    spare =", "    request.num_preemptions += 1\n    spare ="),
        "forgets to answer": _changed(_RESUME, "    return room.free", "    room.free"),
        "the number of free blocks": _changed(_RESUME, ">= spare", "- spare"),
    },
    "wasted_tokens": {
        "the whole chunk": _changed(_WASTE, "min(first + num_tokens, mark) - first", "(num_tokens if first < mark else 0)"),
        "the mark follows": _changed(_WASTE, "max(mark, first + num_tokens)", "first + num_tokens"),
        "one mark for all": _changed(_WASTE, "marks.get(name, 0)", "max(marks.values(), default=0)"),
        "from the beginning": _changed(_WASTE, "min(first + num_tokens, mark) - first", "min(num_tokens, mark)"),
        "only those who wasted": _changed(_WASTE, "    return wasted", "    return {name: n for name, n in wasted.items() if n}"),
        "a sum": _changed(_WASTE, "return wasted", "return sum(wasted.values())"),
        "once only": _changed(_COUNTED, "count - 1", "(count > 1)"),
        "the first time too": _changed(_COUNTED, "count - 1", "(count if count > 1 else 0)"),
        "room for 50 positions": '''
def wasted_tokens(log):
    seen, wasted = {}, {}
    for name, first, n in log:
        times = seen.setdefault(name, [0] * 50)
        wasted.setdefault(name, 0)
        for position in range(first, first + n):
            wasted[name] += times[position]
            times[position] = 1
    return wasted
''',
        "of the last chunk only": '''
def wasted_tokens(log):
    last, wasted = {}, {}
    for name, first, n in log:
        begin, end = last.get(name, (0, 0))
        wasted[name] = wasted.get(name, 0) + max(0, min(end, first + n) - max(begin, first))
        last[name] = (first, first + n)
    return wasted
''',
        "None": _changed(_WASTE, "    return wasted", "    print(wasted)"),
        "one too few": _changed(_WASTE, "mark) - first", "mark) - first - (first < mark)"),
        "empties the log": _changed(_WASTE, "    for name, first, num_tokens in log:\n",
                                    "    while log:\n        name, first, num_tokens = log.pop(0)\n"),
    },
}  # fmt: skip
