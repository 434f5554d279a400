"""Lab 07: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_GHOST = """
def ghost_idle(lengths):
    longest = sorted(lengths)[-1]
    idle = 0
    for length in lengths:
        idle += longest - length
    return longest, idle, idle / (longest * len(lengths))
"""
_STATIC = """
def static_schedule(lengths, num_seats):
    turns, start, longest = [], 0, 0
    for i, length in enumerate(lengths):
        seat = i % num_seats
        if seat == 0:
            start += longest
            longest = 0
        turns.append((seat, start, start + length))
        longest = max(longest, length)
    return turns
"""
_CONTINUOUS = """
import heapq

def continuous_schedule(lengths, num_seats):
    free = [(0, seat) for seat in range(num_seats)]
    turns = []
    for length in lengths:
        start, seat = heapq.heappop(free)
        heapq.heappush(free, (start + length, seat))
        turns.append((seat, start, start + length))
    return turns
"""
_STEPWISE = """
def continuous_schedule(lengths, num_seats):
    waiting = list(enumerate(lengths))
    seats, turns, step = [None] * num_seats, [None] * len(lengths), 0
    while waiting or any(seats):
        for seat in range(num_seats):
            if not seats[seat] and waiting:
                i, length = waiting.pop(0)
                seats[seat] = [i, length]
                turns[i] = (seat, step, step + length)
        for seat in range(num_seats):
            if seats[seat]:
                seats[seat][1] -= 1
                if seats[seat][1] == 0:
                    seats[seat] = None
        step += 1
    return turns
"""
_BOUNDS = """
from math import ceil

def step_bounds(lengths, num_seats):
    ordered = sorted(lengths)
    return max(ceil(sum(ordered) / num_seats), ordered[-1]), sum(ordered[:-1]) // num_seats + ordered[-1]
"""
_ADMIT = """
def admit(num_running, max_num_seqs, batch_is_forming):
    return max_num_seqs - num_running >= 1

def admit_static(num_running, max_num_seqs, batch_is_forming):
    if not batch_is_forming:
        return False
    return admit(num_running, max_num_seqs, batch_is_forming)
"""
_SERVE = """
def serve(requests, num_seats, admit):
    waiting = list(enumerate(requests))
    turns, running, step = [None] * len(requests), [], 0
    while waiting or running:
        running = [(end, i) for end, i in running if end > step]
        forming = len(running) == 0
        while waiting and waiting[0][1][0] <= step and admit(len(running), num_seats, forming):
            i, (arrival, length) = waiting.pop(0)
            turns[i] = (step, step + length)
            running.append((step + length, i))
        if not running and waiting and waiting[0][1][0] <= step:
            raise Stuck
        step += 1
    return turns
"""
_JUMPS = """
def serve(requests, num_seats, admit):
    turns, step = [], 0
    while len(turns) < len(requests):
        ends = [end for _, end in turns if end > step]
        forming, said_no = not ends, False
        while len(turns) < len(requests) and requests[len(turns)][0] <= step and not said_no:
            if admit(len(ends), num_seats, forming):
                turns.append((step, step + requests[len(turns)][1]))
                ends.append(turns[-1][1])
            else:
                said_no = True
        if said_no and not ends:
            raise Stuck
        coming = [arrival for arrival, _ in requests[len(turns) : len(turns) + 1] if arrival > step]
        step = min(ends + coming, default=step)
    return turns
"""
_BUSY = """
def serve(requests, num_seats, admit):
    turns, step = [], 0
    while len(turns) < len(requests):
        busy = sum(end > step for _, end in turns)
        forming = busy == 0
        while len(turns) < len(requests) and requests[len(turns)][0] <= step:
            if not admit(busy, num_seats, forming):
                if busy == 0:
                    raise Stuck("nobody runs")
                break
            turns.append((step, step + requests[len(turns)][1]))
            busy += 1
        step += 1
    return turns
"""
_STATUS = """
RULES = {
    "schedule": (("waiting", "preempted", "swapped"), "running"),
    "recompute": (("running",), "preempted"),
    "swap": (("running",), "swapped"),
    "lose": (("swapped",), "preempted"),
    "stop": (("running",), "stop"),
    "length": (("running",), "length"),
    "abort": (("waiting", "running", "preempted", "swapped"), "abort"),
    "error": (("waiting", "running", "preempted", "swapped"), "error"),
}

def next_status(status, event):
    before, after = RULES.get(event, ((), None))
    if status not in before:
        raise ValueError(f"{status}: {event} is not possible")
    return after
"""
_FULL = """
def full_memory(gpu, shape, kv_bytes, context, reserve):
    slots = kv_bytes // shape.kv_bytes_per_token()
    batch = slots // reserve
    if not batch:
        return 0, 0.0, 0.0
    step = [(1, context) for _ in range(batch)]
    seconds = step_seconds(gpu, shape, step)
    return batch, seconds, step_flops(shape, step) / gpu.peak_flops / seconds
"""

# exercise -> {what it is: the cell}
CORRECT = {
    "ghost_idle": {
        "one request at a time": _GHOST,
        "a namedtuple": _changed(
            "from collections import namedtuple\n\nGhost = namedtuple('Ghost', 'steps idle share')\n" + _GHOST,
            "return longest, idle, idle / (longest * len(lengths))",
            "return Ghost(longest, idle, idle / (longest * len(lengths)))",
        ),
        "the share first": """
def ghost_idle(lengths):
    steps = max(lengths)
    mean = sum(lengths) / len(lengths)
    return steps, steps * len(lengths) - sum(lengths), 1 - mean / steps
""",
    },
    "static_schedule": {
        "request by request": _STATIC,
        "recursive": """
def static_schedule(lengths, num_seats, start=0):
    batch, rest = lengths[:num_seats], lengths[num_seats:]
    if not batch:
        return []
    mine = [[seat, start, start + length] for seat, length in enumerate(batch)]
    return mine + static_schedule(rest, num_seats, start + max(batch))
""",
    },
    "continuous_schedule": {"a heap": _CONTINUOUS, "step by step": _STEPWISE},
    "step_bounds": {
        "ceil of a quotient": _BOUNDS,
        "seats filled one after the other": """
def step_bounds(lengths, num_seats):
    total, longest = sum(lengths), max(lengths)
    fewest, rest = divmod(total, num_seats)
    fewest += rest > 0
    return max(fewest, longest), longest + (total - longest) // num_seats
""",
    },
    "admission": {
        "with an if": _ADMIT,
        "both by hand": """
def admit(num_running, max_num_seqs, batch_is_forming):
    return not num_running >= max_num_seqs

def admit_static(num_running, max_num_seqs, batch_is_forming):
    return all([batch_is_forming, num_running < max_num_seqs])
""",
    },
    "serve": {
        "a list of ends": _SERVE,
        "counts who is busy": _BUSY,
        "from event to event": _JUMPS,
        "by keyword": _changed(
            _SERVE,
            "admit(len(running), num_seats, forming)",
            "admit(num_running=len(running), max_num_seqs=num_seats, batch_is_forming=forming)",
        ),
    },
    "next_status": {
        "by event": _STATUS,
        "a chain of ifs": """
def next_status(status, event):
    waits = status in ("waiting", "preempted", "swapped")
    if event == "schedule" and waits:
        return "running"
    if event in ("abort", "error") and (waits or status == "running"):
        return event
    if status == "running" and event in ("stop", "length"):
        return event
    if (status, event) == ("running", "recompute") or (status, event) == ("swapped", "lose"):
        return "preempted"
    if status == "running" and event == "swap":
        return "swapped"
    raise ValueError("%s in %s" % (event, status))
""",
    },
    "full_memory": {"slots first": _FULL},
}

WRONG = {
    "ghost_idle": {
        "in percent": _changed(_GHOST, "idle / (longest", "100 * idle / (longest"),
        "over the busy ones": _changed(_GHOST, "idle / (longest * len(lengths))", "idle / sum(lengths)"),
        "the mean share": """
def ghost_idle(lengths):
    steps = max(lengths)
    return steps, sum(steps - n for n in lengths), sum(1 - n / steps for n in lengths) / (len(lengths) - 1 or 1)
""",
        "the steps of all together": _changed(_GHOST, "return longest,", "return sum(lengths),"),
        "waits for the last one": _changed(_GHOST, "sorted(lengths)[-1]", "lengths[-1]"),
        "rounded": _changed(_GHOST, "idle / (longest * len(lengths))", "round(idle / (longest * len(lengths)), 2)"),
        "always four seats": _changed(_GHOST, "longest * len(lengths)", "longest * 4"),
        "sorts the caller's list": _changed(_GHOST, "    longest =", "    lengths.sort()\n    longest ="),
        "the share of busy ones": _changed(
            _GHOST, "idle / (longest * len(lengths))", "1 - idle / (longest * len(lengths))"
        ),
        "one step too many": _changed(_GHOST, "sorted(lengths)[-1]", "sorted(lengths)[-1] + 1"),
        "whole-number division": _changed(_GHOST, "idle / (longest", "idle // (longest"),
        "seats that somebody has left": _changed(_GHOST, "idle += longest - length", "idle += longest > length"),
        "idle as a float": _changed(_GHOST, "return longest, idle,", "return longest, float(idle),"),
    },
    "static_schedule": {
        "the next batch after the last one's end": _changed(_STATIC, "max(longest, length)", "length"),
        "the next batch after the first end": _changed(
            _STATIC, "max(longest, length)", "min(longest or length, length)"
        ),
        "a step between two batches": _changed(_STATIC, "start += longest\n", "start += longest + (i > 0)\n"),
        "continuous": _changed(_CONTINUOUS, "continuous_schedule", "static_schedule"),
        "forgets the last batch": """
def static_schedule(lengths, num_seats):
    turns, start = [], 0
    for first in range(0, len(lengths) - num_seats + 1, num_seats):
        batch = lengths[first : first + num_seats]
        turns += [(seat, start, start + length) for seat, length in enumerate(batch)]
        start += max(batch)
    return turns
""",
        "seats numbered on": _changed(_STATIC, "turns.append((seat,", "turns.append((i,"),
        "seats from 1": _changed(_STATIC, "turns.append((seat,", "turns.append((seat + 1,"),
        "all end together": """
def static_schedule(lengths, num_seats):
    turns, start = [], 0
    for first in range(0, len(lengths), num_seats):
        batch = lengths[first : first + num_seats]
        turns += [(seat, start, start + max(batch)) for seat, _ in enumerate(batch)]
        start += max(batch)
    return turns
""",
        "last step in place of end": _changed(_STATIC, "start + length)", "start + length - 1)"),
        "sorted": _changed(_STATIC, "enumerate(lengths)", "enumerate(sorted(lengths))"),
        "eats the list": """
def static_schedule(lengths, num_seats):
    turns, start = [], 0
    while lengths:
        batch = [lengths.pop(0) for _ in range(min(num_seats, len(lengths)))]
        turns += [(seat, start, start + length) for seat, length in enumerate(batch)]
        start += max(batch)
    return turns
""",
        "all batches start at 0": _changed(_STATIC, "start += longest\n", "start = longest\n"),
        "start and length": _changed(_STATIC, "start + length)", "length)"),
        "None if nobody came": _changed(_STATIC, "    return turns", "    return turns or None"),
        "a list of batches": """
def static_schedule(lengths, num_seats):
    turns, start = [], 0
    for first in range(0, len(lengths), num_seats):
        batch = lengths[first : first + num_seats]
        turns.append([(seat, start, start + length) for seat, length in enumerate(batch)])
        start += max(batch)
    return turns
""",
        "needs a full first batch": """
def static_schedule(lengths, num_seats):
    turns, start = [], 0
    for first in range(0, len(lengths), num_seats):
        for seat in range(num_seats):
            turns.append((seat, start, start + lengths[first + seat]))
        start += max(lengths[first : first + num_seats])
    return turns
""",
        "longest of all batches so far": """
def static_schedule(lengths, num_seats):
    turns, start = [], 0
    for first in range(0, len(lengths), num_seats):
        batch = lengths[first : first + num_seats]
        turns += [(seat, start, start + length) for seat, length in enumerate(batch)]
        start += max(lengths[: first + num_seats])
    return turns
""",
    },
    "continuous_schedule": {
        "start, end, seat": _changed(
            _CONTINUOUS, "turns.append((seat, start, start + length))", "turns.append((start, start + length, seat))"
        ),
        "seat, start, length": _changed(
            _CONTINUOUS, "turns.append((seat, start, start + length))", "turns.append((seat, start, length))"
        ),
        "times as floats": _changed(
            _CONTINUOUS, "turns.append((seat, start,", "turns.append((seat, float(start),"
        ),
        "as many requests as seats": _changed(
            _CONTINUOUS, "    turns = []", "    lengths[num_seats - 1]\n    turns = []"
        ),
        "a step late": _changed(
            _CONTINUOUS, "heapq.heappush(free, (start + length,", "heapq.heappush(free, (start + length + 1,"
        ),
        "a step early": _changed(
            _CONTINUOUS, "heapq.heappush(free, (start + length,", "heapq.heappush(free, (start + length - 1,"
        ),
        "round robin": """
def continuous_schedule(lengths, num_seats):
    free, turns = [0] * num_seats, []
    for i, length in enumerate(lengths):
        seat = i % num_seats
        turns.append((seat, free[seat], free[seat] + length))
        free[seat] += length
    return turns
""",
        "the highest seat": """
def continuous_schedule(lengths, num_seats):
    free, turns = [0] * num_seats, []
    for length in lengths:
        start = min(free)
        seat = max(i for i in range(num_seats) if free[i] == start)
        turns.append((seat, start, start + length))
        free[seat] = start + length
    return turns
""",
        "longest first": _changed(
            _CONTINUOUS, "for length in lengths:", "for length in sorted(lengths, reverse=True):"
        ),
        "in order of their end": _changed(
            _CONTINUOUS, "    return turns", "    return sorted(turns, key=lambda turn: turn[2])"
        ),
        "the seat that is free last": _changed(_CONTINUOUS, "heapq.heappop(free)", "free.pop(free.index(max(free)))"),
        "only one enters in a step": _changed(
            _STEPWISE,
            "seats[seat] = [i, length]\n                turns[i] = (seat, step, step + length)",
            "seats[seat] = [i, length]\n                turns[i] = (seat, step, step + length)\n                if step:\n                    break",
        ),
        "refills only the first seats": _changed(
            _STEPWISE, "if not seats[seat] and waiting:", "if not seats[seat] and waiting and (step == 0 or seat < 2):"
        ),
        "static": _changed(_STATIC, "static_schedule", "continuous_schedule"),
        "the list of the text, without seats": """
def continuous_schedule(lengths, num_seats):
    steps, active, waiting = 0, list(lengths[:num_seats]), list(lengths[num_seats:])
    while active:
        steps += 1
        active = [n - 1 for n in active]
        active = [n if n else waiting.pop(0) for n in active if n or waiting]
    return steps
""",
        "eats the list": _changed(
            _STEPWISE,
            "waiting = list(enumerate(lengths))",
            "waiting = list(enumerate(list(lengths)))\n    lengths.reverse()",
        ),
        "seats filled from their index, and one seat unused": _changed(
            _CONTINUOUS, "range(num_seats)", "range(max(1, num_seats - 1))"
        ),
        "last step in place of end": _changed(
            _CONTINUOUS,
            "turns.append((seat, start, start + length))",
            "turns.append((seat, start, start + length - 1))",
        ),
        "waits until two seats are free": _changed(
            _STEPWISE,
            "            if not seats[seat] and waiting:",
            "            if not seats[seat] and waiting and (step == 0 or seats.count(None) > 1):",
        ),
        "backfills with the shortest": """
def continuous_schedule(lengths, num_seats):
    free, turns, left = [0] * num_seats, [None] * len(lengths), list(range(len(lengths)))
    while left:
        start = min(free)
        seat = free.index(start)
        i = left.pop(0) if start == 0 else left.pop(left.index(min(left, key=lambda j: lengths[j])))
        turns[i] = (seat, start, start + lengths[i])
        free[seat] = start + lengths[i]
    return turns
""",
    },
    "step_bounds": {
        "rounded down": _changed(_BOUNDS, "ceil(sum(ordered) / num_seats)", "sum(ordered) // num_seats"),
        "a float": _changed(_BOUNDS, "ceil(sum(ordered) / num_seats)", "sum(ordered) / num_seats"),
        "a schedule in the place of a bound": """
def step_bounds(lengths, num_seats):
    free = [0] * num_seats
    for length in sorted(lengths, reverse=True):
        free[free.index(min(free))] += length
    return max(free), (sum(lengths) - max(lengths)) // num_seats + max(lengths)
""",
        "all longest ones left out": """
def step_bounds(lengths, num_seats):
    longest = max(lengths)
    others = sum(length for length in lengths if length != longest)
    return max(-(-sum(lengths) // num_seats), longest), others // num_seats + longest
""",
        "always one more": _changed(_BOUNDS, "ceil(sum(ordered) / num_seats)", "sum(ordered) // num_seats + 1"),
        "no longest": _changed(
            _BOUNDS, "max(ceil(sum(ordered) / num_seats), ordered[-1])", "ceil(sum(ordered) / num_seats)"
        ),
        "most counts the longest twice": _changed(_BOUNDS, "sum(ordered[:-1])", "sum(ordered)"),
        "most rounded up": _changed(_BOUNDS, "sum(ordered[:-1]) // num_seats", "ceil(sum(ordered[:-1]) / num_seats)"),
        "most is static": """
def step_bounds(lengths, num_seats):
    longest = max(lengths)
    fewest = max(-(-sum(lengths) // num_seats), longest)
    return fewest, sum(max(lengths[i : i + num_seats]) for i in range(0, len(lengths), num_seats))
""",
        "most is one after the other": _changed(
            _BOUNDS, "sum(ordered[:-1]) // num_seats + ordered[-1]", "sum(ordered)"
        ),
        "most as they came": """
def step_bounds(lengths, num_seats):
    free = [0] * num_seats
    for length in lengths:
        free[free.index(min(free))] += length
    return max(-(-sum(lengths) // num_seats), max(lengths)), max(free)
""",
        "the last in the list is the longest": _changed(
            _BOUNDS, "ordered = sorted(lengths)", "ordered = list(lengths)"
        ),
        "rounds to the nearest": _changed(_BOUNDS, "ceil(", "round("),
        "the other way round": """
def step_bounds(lengths, num_seats):
    longest = max(lengths)
    return (sum(lengths) - longest) // num_seats + longest, max(-(-sum(lengths) // num_seats), longest)
""",
        "sorts the caller's list": _changed(_BOUNDS, "    ordered =", "    lengths.sort()\n    ordered ="),
        "Graham's factor": _changed(
            _BOUNDS,
            "sum(ordered[:-1]) // num_seats + ordered[-1]",
            "int((2 - 1 / num_seats) * max(ceil(sum(ordered) / num_seats), ordered[-1]))",
        ),
        "fewest with all seats used": _changed(
            _BOUNDS, "sum(ordered) / num_seats", "sum(ordered) / min(num_seats, len(ordered) - 1 or 1)"
        ),
    },
    "admission": {
        "one too many": _changed(_ADMIT, ">= 1", ">= 0"),
        "one too few": _changed(_ADMIT, ">= 1", "> 1"),
        "not equal": _changed(_ADMIT, "max_num_seqs - num_running >= 1", "num_running != max_num_seqs"),
        "continuous asks for forming": _changed(
            _ADMIT,
            "return max_num_seqs - num_running >= 1",
            "return batch_is_forming and max_num_seqs - num_running >= 1",
        ),
        "continuous: or": _changed(
            _ADMIT,
            "return max_num_seqs - num_running >= 1",
            "return batch_is_forming or max_num_seqs - num_running >= 1",
        ),
        "always": _changed(_ADMIT, "max_num_seqs - num_running >= 1", "True"),
        "static: only into an empty room": _changed(
            _ADMIT, "return admit(num_running, max_num_seqs, batch_is_forming)", "return num_running == 0"
        ),
        "static: forming is enough": _changed(
            _ADMIT, "return admit(num_running, max_num_seqs, batch_is_forming)", "return True"
        ),
        "static is continuous": _changed(_ADMIT, "    if not batch_is_forming:\n        return False\n", ""),
        "static the wrong way round": _changed(_ADMIT, "if not batch_is_forming", "if batch_is_forming"),
        "static: not equal": _changed(
            _ADMIT, "return admit(num_running, max_num_seqs, batch_is_forming)", "return num_running != max_num_seqs"
        ),
        "how many": _changed(_ADMIT, "max_num_seqs - num_running >= 1", "max_num_seqs - num_running"),
        "None for no": _changed(
            _ADMIT, "return max_num_seqs - num_running >= 1", "return True if max_num_seqs > num_running else None"
        ),
        "None for a closed batch": _changed(_ADMIT, "        return False\n", "        return None\n"),
        "the empty room is special": _changed(
            _ADMIT,
            "return max_num_seqs - num_running >= 1",
            "return max_num_seqs - num_running >= 1 and (num_running > 0 or batch_is_forming)",
        ),
        "at most 256": _changed(
            _ADMIT, "max_num_seqs - num_running >= 1", "num_running < min(256, max_num_seqs)"
        ),
        "four seats": _changed(_ADMIT, "max_num_seqs - num_running >= 1", "num_running < 4"),
    },
    "serve": {
        "forming is asked again and again": _changed(
            _SERVE, "admit(len(running), num_seats, forming)", "admit(len(running), num_seats, not running)"
        ),
        "always forming": _changed(_SERVE, "forming = len(running) == 0", "forming = True"),
        "never forming": _changed(_SERVE, "forming = len(running) == 0", "forming = False"),
        "forming while a seat is free": _changed(
            _SERVE, "forming = len(running) == 0", "forming = len(running) < num_seats"
        ),
        "forming only in step 0": _changed(_SERVE, "forming = len(running) == 0", "forming = step == 0"),
        "leaves a step late": _changed(_SERVE, "if end > step]", "if end >= step]"),
        "leaves a step early": _changed(_SERVE, "if end > step]", "if end > step + 1]"),
        "leaves after others have entered": """
def serve(requests, num_seats, admit):
    waiting, turns, running, step = list(enumerate(requests)), [None] * len(requests), [], 0
    while waiting or running:
        forming = not running
        while waiting and waiting[0][1][0] <= step and admit(len(running), num_seats, forming):
            i, (arrival, length) = waiting.pop(0)
            turns[i] = (step, step + length)
            running.append(step + length)
        if not running and waiting and waiting[0][1][0] <= step:
            raise Stuck
        running = [end for end in running if end > step]
        step += 1
    return turns
""",
        "one enters a step": _changed(_SERVE, "while waiting and waiting[0]", "if waiting and waiting[0]"),
        "ignores arrivals": _changed(_SERVE, "waiting[0][1][0] <= step and admit", "admit"),
        "arrives a step late": _changed(
            _SERVE, "waiting[0][1][0] <= step and admit", "waiting[0][1][0] < step and admit"
        ),
        "gives up when nobody is there": _changed(
            _SERVE, "if not running and waiting and waiting[0][1][0] <= step:", "if not running and waiting:"
        ),
        "loops for ever": _changed(_SERVE, "            raise Stuck\n", "            return turns\n"),
        "its own rule": _changed(_SERVE, "admit(len(running), num_seats, forming)", "len(running) < num_seats"),
        "its own limit on top": _changed(
            _SERVE,
            "and admit(len(running), num_seats, forming)",
            "and len(running) < num_seats and admit(len(running), num_seats, forming)",
        ),
        "asks with the free seats": _changed(
            _SERVE, "admit(len(running), num_seats, forming)", "admit(num_seats - len(running), num_seats, forming)"
        ),
        "asks with the list": _changed(
            _SERVE, "admit(len(running), num_seats, forming)", "admit(running, num_seats, forming)"
        ),
        "asks before it counts the newcomer": """
def serve(requests, num_seats, admit):
    waiting, turns, running, step = list(enumerate(requests)), [None] * len(requests), [], 0
    while waiting or running:
        running = [end for end in running if end > step]
        forming, before = not running, len(running)
        while waiting and waiting[0][1][0] <= step and admit(before, num_seats, forming):
            i, (arrival, length) = waiting.pop(0)
            turns[i] = (step, step + length)
            running.append(step + length)
        if not running and waiting and waiting[0][1][0] <= step:
            raise Stuck
        step += 1
    return turns
""",
        "the room is left for a step": _changed(_SERVE, "        step += 1\n", "        step += 1 if running else 2\n"),
        "reverses the list": _changed(_SERVE, "    turns, running", "    requests.reverse()\n    turns, running"),
        "overtakes": """
def serve(requests, num_seats, admit):
    waiting, turns, running, step = list(enumerate(requests)), [None] * len(requests), [], 0
    while waiting or running:
        running = [end for end in running if end > step]
        forming = not running
        for entry in sorted(waiting, key=lambda entry: entry[1][1]):
            i, (arrival, length) = entry
            if arrival <= step and admit(len(running), num_seats, forming):
                waiting.remove(entry)
                turns[i] = (step, step + length)
                running.append(step + length)
        if not running and waiting and min(a for _, (a, _) in waiting) <= step:
            raise Stuck
        step += 1
    return turns
""",
        "overtakes after a no": """
def serve(requests, num_seats, admit):
    turns, running, step = [None] * len(requests), [], 0
    waiting = list(range(len(requests)))
    while waiting:
        running = [end for end in running if end > step]
        forming, arrived = not running, [i for i in waiting if requests[i][0] <= step]
        for i in arrived:
            if admit(len(running), num_seats, forming):
                waiting.remove(i)
                turns[i] = (step, step + requests[i][1])
                running.append(turns[i][1])
        if arrived and not running:
            raise Stuck
        step += 1
    return turns
""",
        "asks again after a no": """
def serve(requests, num_seats, admit):
    turns, running, step = [], [], 0
    while len(turns) < len(requests):
        running = [end for end in running if end > step]
        forming = not running
        for _ in range(num_seats + 1):
            if len(turns) < len(requests) and requests[len(turns)][0] <= step:
                if admit(len(running), num_seats, forming):
                    turns.append((step, step + requests[len(turns)][1]))
                    running.append(turns[-1][1])
        if len(turns) < len(requests) and requests[len(turns)][0] <= step and not running:
            raise Stuck
        step += 1
    return turns
""",
        "asks twice about each": _changed(
            _SERVE,
            "and admit(len(running), num_seats, forming)",
            "and admit(len(running), num_seats, forming) and admit(len(running), num_seats, forming)",
        ),
        "asks about who has not arrived": _changed(
            _SERVE,
            "waiting[0][1][0] <= step and admit(len(running), num_seats, forming)",
            "admit(len(running), num_seats, forming) and waiting[0][1][0] <= step",
        ),
        "asks while nobody waits": _changed(
            _SERVE,
            "        step += 1\n",
            "        if not running and not admit(0, num_seats, True):\n            raise Stuck\n        step += 1\n",
        ),
        "asks once more before it is stuck": _changed(
            _SERVE,
            "waiting[0][1][0] <= step:\n            raise",
            "waiting[0][1][0] <= step and not admit(0, num_seats, True):\n            raise",
        ),
        "stuck only if nobody has ever run": _changed(
            _SERVE,
            "            raise Stuck\n",
            "            if turns[0] is None:\n                raise Stuck\n            return turns\n",
        ),
        "gives up after a thousand steps": _changed(
            _SERVE, "while waiting or running:", "while (waiting or running) and step < 1000:"
        ),
        "gives up after ten thousand steps": _changed(
            _SERVE, "while waiting or running:", "while (waiting or running) and step < 10_000:"
        ),
        "a Stuck of its own": "class Stuck(Exception):\n    pass\n\n" + _SERVE,
        "counts all who have entered": _changed(
            _SERVE, "admit(len(running), num_seats, forming)", "admit(len(requests) - len(waiting), num_seats, forming)"
        ),
        "last step in place of end": _changed(
            _SERVE, "turns[i] = (step, step + length)", "turns[i] = (step, step + length - 1)"
        ),
        "waits from its arrival": _changed(
            _SERVE, "turns[i] = (step, step + length)", "turns[i] = (arrival, step + length)"
        ),
        "jumps over arrivals": """
def serve(requests, num_seats, admit):
    waiting, turns, running, step = list(enumerate(requests)), [None] * len(requests), [], 0
    while waiting or running:
        running = [end for end in running if end > step]
        forming = not running
        while waiting and waiting[0][1][0] <= step and admit(len(running), num_seats, forming):
            i, (arrival, length) = waiting.pop(0)
            turns[i] = (step, step + length)
            running.append(step + length)
        if not running and waiting:
            if waiting[0][1][0] <= step:
                raise Stuck
            step = waiting[0][1][0]
        elif running:
            step = min(running)
        else:
            break
    return turns
""",
        "a stuck one is skipped": _changed(_SERVE, "            raise Stuck\n", "            waiting.pop(0)\n"),
        "raises something else": _changed(
            _SERVE, "            raise Stuck\n", "            raise RuntimeError('stuck')\n"
        ),
    },
    "next_status": {
        "a KeyError": """
TABLE = {(b, e): a for e, (bs, a) in {
    "schedule": (("waiting", "preempted", "swapped"), "running"), "recompute": (("running",), "preempted"),
    "swap": (("running",), "swapped"), "lose": (("swapped",), "preempted"), "stop": (("running",), "stop"),
    "length": (("running",), "length"), "abort": (("waiting", "running", "preempted", "swapped"), "abort"),
    "error": (("waiting", "running", "preempted", "swapped"), "error")}.items() for b in bs}

def next_status(status, event):
    return TABLE[status, event]
""",
        "None": _changed(
            _STATUS, '        raise ValueError(f"{status}: {event} is not possible")', "        return None"
        ),
        "stays": _changed(
            _STATUS, '        raise ValueError(f"{status}: {event} is not possible")', "        return status"
        ),
        "without the event": _changed(_STATUS, "{status}: {event} is", "{status}: this is"),
        "without the status": _changed(_STATUS, "{status}: {event} is", "{event} is"),
        "scheduled again and again": _changed(
            _STATUS, '"schedule": (("waiting",', '"schedule": (("running", "waiting",'
        ),
        "swapped must be lost first": _changed(
            _STATUS, '"schedule": (("waiting", "preempted", "swapped")', '"schedule": (("waiting", "preempted")'
        ),
        "preempted goes to waiting": _changed(_STATUS, '(("running",), "preempted")', '(("running",), "waiting")'),
        "ends while preempted": _changed(_STATUS, '"stop": (("running",)', '"stop": (("running", "preempted")'),
        "ends while swapped": _changed(_STATUS, '"length": (("running",)', '"length": (("running", "swapped")'),
        "who waits can be preempted": _changed(
            _STATUS, '"recompute": (("running",)', '"recompute": (("running", "waiting")'
        ),
        "swapped is recomputed directly": _changed(
            _STATUS, '"recompute": (("running",)', '"recompute": (("running", "swapped")'
        ),
        "lose ends it": _changed(_STATUS, '(("swapped",), "preempted")', '(("swapped",), "error")'),
        "lose puts it to the beginning": _changed(_STATUS, '(("swapped",), "preempted")', '(("swapped",), "waiting")'),
        "no lose": _changed(_STATUS, '    "lose": (("swapped",), "preempted"),\n', ""),
        "abort only while running": _changed(
            _STATUS, '"abort": (("waiting", "running", "preempted", "swapped")', '"abort": (("running",)'
        ),
        "no abort while swapped": _changed(
            _STATUS,
            '"abort": (("waiting", "running", "preempted", "swapped")',
            '"abort": (("waiting", "running", "preempted")',
        ),
        "error only while running": _changed(
            _STATUS, '"error": (("waiting", "running", "preempted", "swapped")', '"error": (("running",)'
        ),
        "abort twice": _changed(_STATUS, '"abort": (("waiting",', '"abort": (("abort", "waiting",'),
        "an ended one may fail": _changed(_STATUS, '"error": (("waiting",', '"error": (("stop", "waiting",'),
        "a new run": _changed(_STATUS, '"schedule": (("waiting",', '"schedule": (("abort", "waiting",'),
        "finished": _changed(_STATUS, '"stop": (("running",), "stop")', '"stop": (("running",), "finished")'),
        "unknown words pass": _changed(
            _STATUS, "RULES.get(event, ((), None))", "RULES.get(event, ((status,), status))"
        ),
        "an AssertionError": _changed(
            _STATUS,
            '    if status not in before:\n        raise ValueError(f"{status}: {event} is not possible")',
            "    assert status in before, (status, event)",
        ),
        "waiting can be swapped": _changed(_STATUS, '"swap": (("running",)', '"swap": (("running", "waiting")'),
        "an unknown status is aborted": """
def next_status(status, event):
    if event in ("abort", "error") and status not in ("stop", "length", "abort", "error"):
        return event
    if status in ("waiting", "preempted", "swapped") and event == "schedule":
        return "running"
    if status == "running" and event in ("stop", "length", "recompute", "swap"):
        return {"recompute": "preempted", "swap": "swapped"}.get(event, event)
    if (status, event) == ("swapped", "lose"):
        return "preempted"
    raise ValueError(f"{status} {event}")
""",
        "a piece of a word is enough": _changed(
            _STATUS, "if status not in before:", "if not any(status in one for one in before):"
        ),
        "big letters": _changed(_STATUS, "    before, after", "    status = status.lower()\n    before, after"),
        "an event for a status": _changed(
            _STATUS, "    before, after", '    status = "swapped" if status == "swap" else status\n    before, after'
        ),
        "a piece of an event": _changed(
            _STATUS,
            "RULES.get(event, ((), None))",
            "next((rule for name, rule in RULES.items() if name.startswith(event)), ((), None))",
        ),
        "preempted can be lost": _changed(_STATUS, '"lose": (("swapped",)', '"lose": (("swapped", "preempted")'),
    },
    "full_memory": {
        "what is written, not what is reserved": _changed(_FULL, "slots // reserve", "slots // (context + 1)"),
        "a float": _changed(_FULL, "slots // reserve", "slots / reserve"),
        "reads what is reserved": _changed(_FULL, "[(1, context) for", "[(1, reserve) for"),
        "no check for none": _changed(_FULL, "    if not batch:\n        return 0, 0.0, 0.0\n", ""),
        "at least one": _changed(_FULL, "    batch = slots // reserve", "    batch = max(1, slots // reserve)"),
        "in percent": _changed(_FULL, "step_flops(shape, step)", "100 * step_flops(shape, step)"),
        "rounds up": _changed(_FULL, "slots // reserve", "-(-slots // reserve)"),
        "one request's arithmetic": _changed(_FULL, "step_flops(shape, step) /", "step_flops(shape, step[:1]) /"),
        "one request's time": _changed(_FULL, "step_seconds(gpu, shape, step)", "step_seconds(gpu, shape, step[:1])"),
        "one of a hundred": _changed(_FULL, "slots // reserve", "min(100, slots // reserve)"),
        "prefill": _changed(_FULL, "[(1, context) for", "[(context, 0) for"),
        "the balance": _changed(_FULL, "step_flops(shape, step) / gpu.peak_flops / seconds", "batch / gpu.balance"),
        "milliseconds": _changed(_FULL, "return batch, seconds,", "return batch, 1000 * seconds,"),
        "without the weights' memory twice": _changed(
            _FULL, "kv_bytes // shape", "(kv_bytes - shape.weight_bytes()) // shape"
        ),
    },
}
