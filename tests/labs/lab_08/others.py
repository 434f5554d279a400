"""Lab 08: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_CHUNKS = '''
def chunks(num_tokens, budget, num_decodes):
    room = budget - num_decodes
    if room <= 0:
        return None
    sizes = []
    while num_tokens > 0:
        sizes.append(min(room, num_tokens))
        num_tokens -= sizes[-1]
    return sizes
'''
_PLAN = '''
def plan_tokens(pending, budget, limit):
    order = sorted(range(len(pending)), key=lambda i: pending[i] != 1)
    plan = [0] * len(pending)
    for i in order:
        plan[i] = min(pending[i], limit, budget)
        budget -= plan[i]
    return plan
'''
_TABLE = '''
def timetable(requests, plan, budget, limit):
    n = len(requests)
    pending = [prompt for _, prompt, _ in requests]
    came = [[] for _ in requests]
    running, entered, rows = [], 0, []
    while any(len(came[i]) < requests[i][2] for i in range(n)):
        step, row = len(rows), [0] * n
        for i, tokens in zip(running, plan([pending[i] for i in running], budget, limit)):
            row[i] = tokens
        left = budget - sum(row)
        while entered < n and requests[entered][0] <= step and left > 0:
            row[entered] = min(pending[entered], limit, left)
            left -= row[entered]
            running.append(entered)
            entered += 1
        for i in list(running):
            pending[i] -= row[i]
            if pending[i] == 0:
                came[i].append(step)
                pending[i] = 1
                if len(came[i]) == requests[i][2]:
                    running.remove(i)
        rows.append(row)
    return rows, came
'''
_WORK = '''
def chunk_work(sizes):
    found, computed = [], 0
    for size in sizes:
        found.append((size * computed + size * (size + 1) // 2, computed + size))
        computed += size
    return found
'''
_KNEE = '''
import math

def knee(flops_rate, memory_rate, num_weights, bytes_per_weight):
    return math.floor(bytes_per_weight * flops_rate / (2 * memory_rate)) + 1
'''
_LARGEST = '''
def largest_chunk(seconds, limit, most):
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
'''
_EXPECTED = '''
def expected_tokens(acceptance, num_drafts):
    total, chance = 0.0, 1.0
    for _ in range(num_drafts + 1):
        total += chance
        chance *= acceptance
    return total
'''

CORRECT = {
    "chunks": {
        "a loop": _CHUNKS,
        "division": '''
def chunks(num_tokens, budget, num_decodes):
    room = budget - num_decodes
    if room < 1:
        return None
    return [min(room, num_tokens - start) for start in range(0, num_tokens, room)]
''',
        "recursion": '''
def chunks(num_tokens, budget, num_decodes):
    if num_decodes >= budget:
        return None
    if num_tokens <= budget - num_decodes:
        return (num_tokens,)
    return (budget - num_decodes, *chunks(num_tokens - budget + num_decodes, budget, num_decodes))
''',
    },
    "plan_tokens": {
        "sorted": _PLAN,
        "two lists": '''
def plan_tokens(pending, budget, limit):
    plan = {}
    decodes = [i for i in range(len(pending)) if pending[i] == 1]
    others = [i for i in range(len(pending)) if pending[i] != 1]
    for i in decodes[:budget]:
        plan[i] = 1
    left = budget - len(plan)
    for i in others:
        given = min(pending[i], limit, left)
        plan[i] = given
        left = left - given
    return [plan.get(i, 0) for i in range(len(pending))]
''',
        "counts the decodes, then one walk": '''
def plan_tokens(pending, budget, limit):
    served = min(budget, sum(tokens == 1 for tokens in pending))
    room, plan = budget - served, []
    for tokens in pending:
        if tokens == 1:
            plan.append(1 if served > 0 else 0)
            served -= 1
        else:
            plan.append(min(tokens, limit, room))
            room -= plan[-1]
    return tuple(plan)
''',
    },
    "timetable": {
        "entered is a number": _TABLE,
        "rows of tuples": _changed(_TABLE, "return rows, came", "return tuple(map(tuple, rows)), tuple(map(tuple, came))"),
        "objects": '''
class Story:
    def __init__(self, number, arrival, prompt, output):
        self.number, self.arrival, self.left, self.output, self.came = number, arrival, prompt, output, []

    @property
    def is_over(self):
        return len(self.came) == self.output


def timetable(requests, plan, budget, limit):
    stories = [Story(i, *request) for i, request in enumerate(requests)]
    outside, inside, rows = list(stories), [], []
    step = 0
    while not all(story.is_over for story in stories):
        amounts = dict(zip(inside, plan([story.left for story in inside], budget, limit))) if inside else {}
        spare = budget - sum(amounts.values())
        while outside and outside[0].arrival <= step and spare:
            story = outside.pop(0)
            amounts[story] = min(story.left, limit, spare)
            spare -= amounts[story]
            inside.append(story)
        for story, amount in amounts.items():
            story.left -= amount
            if story.left == 0:
                story.came.append(step)
                story.left = 1
        rows.append([amounts.get(story, 0) for story in stories])
        inside = [story for story in inside if not story.is_over]
        step += 1
    return rows, [story.came for story in stories]
''',
    },
    "chunk_work": {
        "by a formula": _WORK,
        "differences of triangles": '''
def chunk_work(sizes):
    half = lambda n: n * (n + 1) // 2
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(half(end) - half(end - size), end) for end, size in zip(ends, sizes)]
''',
        "counts every pair": '''
def chunk_work(sizes):
    found, computed = [], 0
    for size in sizes:
        pairs = 0
        for query in range(computed, computed + size):
            for key in range(query + 1):
                pairs += 1
        computed += size
        found.append((pairs, computed))
    return found
''',
        "named pairs": '''
from collections import namedtuple

Work = namedtuple("Work", "pairs read")

def chunk_work(sizes):
    return [Work(sum(range(sum(sizes[:i]) + 1, sum(sizes[: i + 1]) + 1)), sum(sizes[: i + 1])) for i in range(len(sizes))]
''',
    },
    "knee": {
        "in closed form": _KNEE,
        "by trying": '''
def knee(flops_rate, memory_rate, num_weights, bytes_per_weight):
    n = 1
    while 2 * n * num_weights / flops_rate <= num_weights * bytes_per_weight / memory_rate:
        n += 1
    return n
''',
    },
    "largest_chunk": {
        "halving": _LARGEST,
        "gallops": '''
def largest_chunk(seconds, limit, most):
    step = 1
    while step <= most and seconds(step) <= limit:
        step *= 2
    low, high = step // 2, min(step, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds(middle) <= limit else (low, middle)
    return low
''',
        "steps of powers of two": '''
def largest_chunk(seconds, limit, most):
    best, step = 0, 1 << most.bit_length()
    while step:
        if best + step <= most and seconds(best + step) <= limit:
            best += step
        step //= 2
    return best
''',
        "bisect": '''
from bisect import bisect_right

def largest_chunk(seconds, limit, most):
    return bisect_right(range(1, most + 1), limit, key=seconds)
''',
    },
    "expected_tokens": {
        "a sum": _EXPECTED,
        "in closed form": '''
def expected_tokens(acceptance, num_drafts):
    if acceptance == 1:
        return num_drafts + 1
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
''',
        "backwards": '''
def expected_tokens(acceptance, num_drafts):
    return 1 + acceptance * expected_tokens(acceptance, num_drafts - 1) if num_drafts else 1
''',
    },
}

WRONG = {
    "chunks": {
        "the rest is forgotten": '''
def chunks(num_tokens, budget, num_decodes):
    room = budget - num_decodes
    return [room] * (num_tokens // room) if room > 0 else None
''',
        "the last one is full as well": '''
def chunks(num_tokens, budget, num_decodes):
    room = budget - num_decodes
    return [room] * -(-num_tokens // room) if room > 0 else None
''',
        "an empty chunk at the end": '''
def chunks(num_tokens, budget, num_decodes):
    room = budget - num_decodes
    return [room] * (num_tokens // room) + [num_tokens % room] if room > 0 else None
''',
        "evenly": '''
def chunks(num_tokens, budget, num_decodes):
    room = budget - num_decodes
    if room < 1:
        return None
    n = -(-num_tokens // room)
    return [num_tokens // n + (i < num_tokens % n) for i in range(n)]
''',
        "the decodes take nothing": _changed(_CHUNKS, "room = budget - num_decodes", "room = budget"),
        "the decodes pay once": '''
def chunks(num_tokens, budget, num_decodes):
    if budget <= num_decodes:
        return None
    sizes = [min(num_tokens, budget - num_decodes)]
    while sum(sizes) < num_tokens:
        sizes.append(min(budget, num_tokens - sum(sizes)))
    return sizes
''',
        "with the decodes in them": _changed(_CHUNKS, "return sizes", "return [size + num_decodes for size in sizes]"),
        "an empty list if there is no room": _changed(_CHUNKS, "return None", "return []"),
        "one token gets in anyway": _changed(_CHUNKS, "    if room <= 0:\n        return None\n", "    room = max(room, 1)\n"),
        "loops for ever at exactly no room": _changed(_CHUNKS, "room <= 0", "room < 0").replace(
            "while num_tokens > 0:", "while num_tokens > 0 and len(sizes) < 10_000:"),
        "the number of chunks": _changed(_CHUNKS, "return sizes", "return len(sizes)"),
        "the small one first": _changed(_CHUNKS, "return sizes", "return sizes[::-1]"),
        "floats": '''
def chunks(num_tokens, budget, num_decodes):
    room = float(budget - num_decodes)
    if room < 1:
        return None
    sizes = []
    while num_tokens > 0:
        sizes.append(min(room, num_tokens))
        num_tokens -= sizes[-1]
    return sizes
''',
    },
    "plan_tokens": {
        "chunks first": _changed(_PLAN, "!= 1", "== 1"),
        "in order": _changed(_PLAN, "sorted(range(len(pending)), key=lambda i: pending[i] != 1)", "range(len(pending))"),
        "shortest first": _changed(_PLAN, "pending[i] != 1", "pending[i]"),
        "longest chunk first": _changed(_PLAN, "pending[i] != 1", "(pending[i] != 1, -pending[i])"),
        "in the order of service": _changed(_PLAN, "return plan", "return [plan[i] for i in order]"),
        "the youngest first": _changed(_PLAN, "pending[i] != 1", "(pending[i] != 1, -i)"),
        "no limit": _changed(_PLAN, "min(pending[i], limit, budget)", "min(pending[i], budget)"),
        "the limit is for all chunks together": '''
def plan_tokens(pending, budget, limit):
    plan = [0] * len(pending)
    for i, tokens in enumerate(pending):
        if tokens == 1 and budget > 0:
            plan[i] = 1
            budget -= 1
    for i, tokens in enumerate(pending):
        if tokens > 1:
            plan[i] = min(tokens, limit, budget)
            budget -= plan[i]
            limit -= plan[i]
    return plan
''',
        "the limit is for the decodes too": '''
def plan_tokens(pending, budget, limit):
    order = sorted(range(len(pending)), key=lambda i: pending[i] != 1)
    plan = [0] * len(pending)
    budget = min(budget, limit)
    for i in order:
        plan[i] = min(pending[i], budget)
        budget -= plan[i]
    return plan
''',
        "decodes are free": _changed(_PLAN, "budget -= plan[i]", "budget -= plan[i] if pending[i] > 1 else 0"),
        "nothing is subtracted": _changed(_PLAN, "        budget -= plan[i]\n", ""),
        "below zero": '''
def plan_tokens(pending, budget, limit):
    left = budget - sum(1 for tokens in pending if tokens == 1)
    plan = []
    for tokens in pending:
        if tokens == 1:
            plan.append(1)
        else:
            plan.append(min(tokens, limit, left))
            left -= plan[-1]
    return plan
''',
        "all decodes, whatever the budget": '''
def plan_tokens(pending, budget, limit):
    left = max(0, budget - sum(1 for tokens in pending if tokens == 1))
    plan = []
    for tokens in pending:
        if tokens == 1:
            plan.append(1)
        else:
            plan.append(min(tokens, limit, left))
            left -= plan[-1]
    return plan
''',
        "no decodes if they do not all fit": '''
def plan_tokens(pending, budget, limit):
    decodes = sum(1 for tokens in pending if tokens == 1)
    serve = decodes <= budget
    left = budget - decodes if serve else budget
    plan = []
    for tokens in pending:
        if tokens == 1:
            plan.append(1 if serve else 0)
        else:
            plan.append(min(tokens, limit, left))
            left -= plan[-1]
    return plan
''',
        "whole prompts only": _changed(_PLAN, "        plan[i] = min(pending[i], limit, budget)",
                                       "        plan[i] = pending[i] if pending[i] <= min(limit, budget) else 0"),
        "one chunk a step": _changed(_PLAN, "    for i in order:\n", "    chunked = False\n    for i in order:\n        if "
                                     "pending[i] > 1:\n            if chunked:\n                continue\n            "
                                     "chunked = True\n"),
        "stops at the first that is cut": _changed(_PLAN, "        budget -= plan[i]\n",
                                                   "        budget -= plan[i]\n        if plan[i] < pending[i]:\n"
                                                   "            break\n"),
        "evenly among the chunks": '''
def plan_tokens(pending, budget, limit):
    plan = [0] * len(pending)
    for i, tokens in enumerate(pending):
        if tokens == 1 and budget > 0:
            plan[i] = 1
            budget -= 1
    chunks = [i for i, tokens in enumerate(pending) if tokens > 1]
    for i in chunks:
        plan[i] = min(pending[i], limit, budget // len(chunks))
    return plan
''',
        "a part of one token counts as a decode": _changed(_PLAN, "pending[i] != 1", "min(pending[i], limit) != 1"),
        "small ones count as decodes": _changed(_PLAN, "pending[i] != 1", "pending[i] > 2"),
        "nothing pending gets one": _changed(_PLAN, "min(pending[i], limit, budget)", "min(max(1, pending[i]), limit, budget)"),
        "eats its input": _changed(_PLAN, "    return plan", "    pending.clear()\n    return plan"),
        "counts down in its input": _changed(_PLAN, "        budget -= plan[i]\n",
                                             "        budget -= plan[i]\n        pending[i] -= plan[i]\n"),
        "hands the input back": _changed(_PLAN, "    return plan", "    return pending if plan == pending else plan"),
        "only those who get something": _changed(_PLAN, "return plan", "return [tokens for tokens in plan if tokens]"),
        "one list for all answers": "OUT = []\n" + _changed(_PLAN, "    plan = [0] * len(pending)\n",
                                                            "    plan = OUT\n    plan[:] = [0] * len(pending)\n"),
        "an array": _changed(_PLAN, "    return plan", "    import numpy\n    return numpy.array(plan)"),
        "a list of what an array holds": _changed(_PLAN, "    return plan", "    import numpy\n    return list(numpy.array(plan))"),
        "True for one": _changed(_PLAN, "plan[i] = min(pending[i], limit, budget)",
                                 "plan[i] = min(pending[i], limit, budget)\n        plan[i] = True if plan[i] == 1 else plan[i]"),
        "a spare token is kept": _changed(_PLAN, "min(pending[i], limit, budget)",
                                          "min(pending[i], limit, budget if pending[i] == 1 else max(0, budget - 1))"),
        "fails with nobody": _changed(_PLAN, "    plan = [0]", "    limit = min(limit, max(pending))\n    plan = [0]"),
    },
    "timetable": {
        "the token comes a step later": _changed(_TABLE, "came[i].append(step)", "came[i].append(step + 1)"),
        "only one enters a step": _changed(_TABLE, "while entered < n and", "if entered < n and"),
        "newcomers know no limit": _changed(_TABLE, "min(pending[entered], limit, left)", "min(pending[entered], left)"),
        "newcomers have a budget of their own": _changed(_TABLE, "left = budget - sum(row)", "left = budget"),
        "newcomers do not share": _changed(_TABLE, "            left -= row[entered]\n", ""),
        "who gets nothing enters too": _changed(_TABLE, "<= step and left > 0:", "<= step:"),
        "nobody enters while one inside gets nothing": _changed(
            _TABLE, "left = budget - sum(row)", "left = budget - sum(row) if all(row[i] for i in running) else 0"),
        "came, then rows": _changed(_TABLE, "return rows, came", "return came, rows"),
        "arrivals are seen a step late": _changed(_TABLE, "requests[entered][0] <= step", "requests[entered][0] < step"),
        "arrivals are not looked at": _changed(_TABLE, "requests[entered][0] <= step and ", ""),
        "the plan is asked about newcomers as well": '''
def timetable(requests, plan, budget, limit):
    n = len(requests)
    pending = [prompt for _, prompt, _ in requests]
    came, rows = [[] for _ in requests], []
    while any(len(came[i]) < requests[i][2] for i in range(n)):
        step, row = len(rows), [0] * n
        here = [i for i in range(n) if requests[i][0] <= step and len(came[i]) < requests[i][2]]
        for i, tokens in zip(here, plan([pending[i] for i in here], budget, limit)):
            row[i] = tokens
            pending[i] -= tokens
            if pending[i] == 0:
                came[i].append(step)
                pending[i] = 1
        rows.append(row)
    return rows, came
''',
        "decodes first, whatever the plan": _changed(_TABLE, "plan([pending[i] for i in running], budget, limit)",
                                                     "serve([pending[i] for i in running], budget, limit)") + '''

def serve(pending, budget, limit):
    plan = [0] * len(pending)
    for i in sorted(range(len(pending)), key=lambda i: pending[i] != 1):
        plan[i] = min(pending[i], limit, budget)
        budget -= plan[i]
    return plan
''',
        "the plan gets no limit": _changed(_TABLE, "for i in running], budget, limit)", "for i in running], budget, budget)"),
        "every chunk brings a token": _changed(_TABLE, "            if pending[i] == 0:\n                came[i].append(step)\n"
                                               "                pending[i] = 1\n", "            if row[i]:\n                "
                                               "came[i].append(step)\n            if pending[i] == 0:\n                "
                                               "pending[i] = 1\n            if came[i]:\n"),
        "the last token is computed too": _changed(_TABLE, "if len(came[i]) == requests[i][2]:",
                                                   "if len(came[i]) > requests[i][2]:").replace(
            "len(came[i]) < requests[i][2] for", "len(came[i]) <= requests[i][2] for"),
        "the first token is not counted": _changed(_TABLE, "if len(came[i]) == requests[i][2]:",
                                                   "if len(came[i]) == requests[i][2] + 1:").replace(
            "len(came[i]) < requests[i][2] for", "len(came[i]) <= requests[i][2] for").replace(
            "    return rows, came", "    return rows, [steps[1:] for steps in came]"),
        "who has ended stays": _changed(_TABLE, "                    running.remove(i)\n", "                    pending[i] = 1\n"),
        "skips one after each who ends": _changed(_TABLE, "for i in list(running):", "for i in running:"),
        "the empty steps are missing": _changed(_TABLE, "        rows.append(row)\n", "        rows.append(row) if any(row) or "
                                                "running else None\n        if not any(row):\n            requests = [(max(0, "
                                                "a - 1), p, o) for a, p, o in requests]\n"),
        "a new token is computed in the same step": _changed(_TABLE, "        for i in list(running):\n", '''        for i in list(running):
            if row[i] == pending[i] and len(came[i]) + 1 < requests[i][2] and sum(row) < budget:
                row[i] += 1
                came[i].append(step)
                pending[i] = row[i]
'''),
        "eats its input": _changed(_TABLE, "    return rows, came", "    requests.clear()\n    return rows, came"),
        "one row for all steps": _changed(_TABLE, "    running, entered, rows = [], 0, []\n",
                                          "    running, entered, rows, row = [], 0, [], [0] * n\n").replace(
            "step, row = len(rows), [0] * n", "step = len(rows)\n        for i in range(n):\n            row[i] = 0"),
        "the plan is asked about the shortest first": _changed(
            _TABLE, "        for i, tokens in zip(running,", "        running.sort(key=lambda i: pending[i])\n        "
            "for i, tokens in zip(running,"),
        "the running ones take turns": _changed(_TABLE, "        rows.append(row)\n",
                                                "        running = running[1:] + running[:1]\n        rows.append(row)\n"),
        "only the rows": _changed(_TABLE, "return rows, came", "return rows"),
        "waits, not moments": _changed(_TABLE, "return rows, came",
                                       "return rows, [[s - a for s in c] for c, (a, _, _) in zip(came, requests)]"),
    },
    "chunk_work": {
        "every token sees all": _changed(_WORK, "size * computed + size * (size + 1) // 2", "size * (computed + size)"),
        "nobody sees itself": _changed(_WORK, "size * (size + 1) // 2", "size * (size - 1) // 2"),
        "nothing before it": _changed(_WORK, "size * computed + size", "size"),
        "reads only what was there": _changed(_WORK, "computed + size))", "computed))"),
        "reads for each of its tokens": _changed(_WORK, "computed + size))", "size * (computed + size)))"),
        "reads only its own": _changed(_WORK, ", computed + size))", ", size))"),
        "computed stands still": _changed(_WORK, "        computed += size\n", ""),
        "only the chunk before": _changed(_WORK, "computed += size", "computed = size"),
        "floats": _changed(_WORK, "// 2", "/ 2"),
        "all so far": _changed(_WORK, "    return found", "    return [(sum(p for p, _ in found[: i + 1]), r) for i, (_, r) in "
                               "enumerate(found)]"),
        "in all": _changed(_WORK, "return found", "return sum(p for p, _ in found), sum(r for _, r in found)"),
        "the other way round": _changed(_WORK, "return found", "return [(r, p) for p, r in found]"),
        "each chunk as long as the first": _changed(_WORK, "        computed += size", "        computed += sizes[0]"),
        "eats its input": '''
def chunk_work(sizes):
    found, computed = [], 0
    while sizes:
        size = sizes.pop(0)
        found.append((size * computed + size * (size + 1) // 2, computed + size))
        computed += size
    return found
''',
    },
    "knee": {
        "one FLOP a weight": _changed(_KNEE, "(2 * memory_rate)", "memory_rate"),
        "two bytes, always": _changed(_KNEE, "bytes_per_weight * flops_rate", "2 * flops_rate"),
        "rounds up, and stops at a tie": _changed(_KNEE, "math.floor(", "math.ceil(").replace(" + 1", ""),
        "at least 1, and stops at a tie": '''
import math

def knee(flops_rate, memory_rate, num_weights, bytes_per_weight):
    return max(1, math.ceil(bytes_per_weight * flops_rate / (2 * memory_rate)))
''',
        "tries until the arithmetic takes as long": '''
def knee(flops_rate, memory_rate, num_weights, bytes_per_weight):
    n = 1
    while 2 * n * num_weights / flops_rate < num_weights * bytes_per_weight / memory_rate:
        n += 1
    return n
''',
        "rounds down": _changed(_KNEE, " + 1", ""),
        "rounds": _changed(_KNEE, "math.floor(", "round(").replace(" + 1", ""),
        "rounds, and adds one": _changed(_KNEE, "math.floor(", "round("),
        "a float": _changed(_KNEE, "math.floor", ""),
        "one too many": _changed(_KNEE, " + 1", " + 2"),
        "no bytes": _changed(_KNEE, "bytes_per_weight * flops_rate", "flops_rate"),
        "one token is never enough": _changed(_KNEE, "return math", "return 2 if flops_rate < memory_rate else math"),
        "upside down": _changed(_KNEE, "bytes_per_weight * flops_rate / (2 * memory_rate)",
                                "2 * memory_rate / (bytes_per_weight * flops_rate)"),
        "grows with the model": _changed(_KNEE, "(2 * memory_rate)", "(2 * memory_rate) * num_weights / 8e9"),
        "divides by the bytes": _changed(_KNEE, "bytes_per_weight * flops_rate / (2", "flops_rate / (2 * bytes_per_weight"),
        "bytes as whole numbers": _changed(_KNEE, "bytes_per_weight * flops_rate", "max(1, int(bytes_per_weight)) * flops_rate"),
    },
    "largest_chunk": {
        "one by one": '''
def largest_chunk(seconds, limit, most):
    best = 0
    while best < most and seconds(best + 1) <= limit:
        best += 1
    return best
''',
        "shorter than the limit": _changed(_LARGEST, "<= limit", "< limit"),
        "stops below": _changed(_LARGEST, "return low", "return max(0, low - 1)"),
        "never all of them": _changed(_LARGEST, "low, high = 0, most", "low, high = 0, most - 1"),
        "one more than most": _changed(_LARGEST, "low, high = 0, most", "low, high = 0, most + 1").replace(
            "seconds(middle)", "seconds(min(middle, most))"),
        "1 if none fits": _changed(_LARGEST, "return low", "return max(low, 1)"),
        "None if none fits": _changed(_LARGEST, "return low", "return low or None"),
        "the first that does not fit": _changed(_LARGEST, "return low", "return low + 1"),
        "the first of those that take as long": '''
def largest_chunk(seconds, limit, most):
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        took = seconds(middle)
        if took == limit:
            high = middle
            while high > 1 and seconds(high - 1) == limit:
                high -= 1
            return high
        if took < limit:
            low = middle
        else:
            high = middle - 1
    return low
''',
        "powers of two": '''
def largest_chunk(seconds, limit, most):
    best, size = 0, 1
    while size <= most and seconds(size) <= limit:
        best, size = size, size * 2
    return best
''',
        "a straight line through two points": '''
def largest_chunk(seconds, limit, most):
    first, last = seconds(0), seconds(most)
    if last <= limit:
        return most
    return max(0, int((limit - first) / (last - first) * most)) if last > first else 0
''',
        "twenty rounds": '''
def largest_chunk(seconds, limit, most):
    low, high = 0, most
    for _ in range(20):
        if low == high:
            break
        middle = (low + high + 1) // 2
        if seconds(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low
''',
        "asks three times": _changed(_LARGEST, "if seconds(middle) <= limit:",
                                     "if seconds(middle) <= limit and seconds(middle) <= limit and seconds(middle) <= limit:"),
        "one below 0": _changed(_LARGEST, "return low", "return low if low or seconds(0) <= limit else -1"),
        "thinks that 1 always fits": _changed(_LARGEST, "low, high = 0, most", "low, high = 1, most"),
        "a float": _changed(_LARGEST, "return low", "return float(low)"),
    },
    "expected_tokens": {
        "every draft by itself": '''
def expected_tokens(acceptance, num_drafts):
    return 1 + acceptance * num_drafts
''',
        "without the model's own": _changed(_EXPECTED, "return total", "return total - 1"),
        "accepted ones only": _changed(_EXPECTED, "total, chance = 0.0, 1.0", "total, chance = 0.0, acceptance"),
        "one draft too few": _changed(_EXPECTED, "range(num_drafts + 1)", "range(max(1, num_drafts))"),
        "all or nothing": '''
def expected_tokens(acceptance, num_drafts):
    return 1 + num_drafts * acceptance ** num_drafts
''',
        "divides by zero": '''
def expected_tokens(acceptance, num_drafts):
    return (1 - acceptance ** (num_drafts + 1)) / (1 - acceptance)
''',
        "the limit of many drafts": '''
def expected_tokens(acceptance, num_drafts):
    return num_drafts + 1 if acceptance == 1 else 1 / (1 - acceptance)
''',
        "no own token if all are accepted": _changed(_EXPECTED, "return total", "return total - acceptance ** num_drafts * "
                                                     "(num_drafts > 0)"),
        "two decimals": _changed(_EXPECTED, "return total", "return round(total, 2)"),
        "whole tokens": _changed(_EXPECTED, "return total", "return round(total)"),
    },
}  # fmt: skip
