"""Lab 07, continuous batching: its exercises."""

import itertools
from dataclasses import dataclass
from math import isclose

from hypothesis import strategies as st

from kvlab.grade import Exercise, LabInfo, OneOf, Trace, calls, say
from kvlab.primer import GPUS
from kvlab.sizing import GB, model_shape

LAB = LabInfo(title=say("Continuous batching"), sections="L33 3.1-3.4, 7.2, 8.1", before=("00", "02"))
PAPER = "kvlab.schedule.on_paper:"
LIFE = "kvlab.schedule.lifecycle:"
POLICY = "kvlab.schedule.policies:"
LENGTHS = st.lists(st.integers(1, 7), max_size=9)


def one(name, *arguments, why=None):
    return Trace((), ((name, *arguments),), why)


@dataclass(frozen=True)
class Numbers:
    """Whole numbers, exactly, and then others, about: of a few digits where they are told."""

    whole: list
    about: list

    def accepts(self, value):
        if not isinstance(value, list) or len(value) != len(self.whole) + len(self.about):
            return False
        whole, about = value[: len(self.whole)], value[len(self.whole) :]
        return all(type(a) is int and a == b for a, b in zip(whole, self.whole, strict=True)) and all(
            type(a) in (int, float) and isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(about, self.about, strict=True)
        )

    def __str__(self):
        return "(" + ", ".join([*map(str, self.whole), *(f"about {number:.4g}" for number in self.about)]) + ")"


class Seats:
    """A clock and seats, one step after the other: slow, and obvious. The oracle of both schedules."""

    def __init__(self):
        self.tokens = {}  # request -> the steps in which it got one

    def play(self, lengths, num_seats, is_static):
        queue, seats, step, where = list(enumerate(lengths)), [None] * num_seats, 0, {}
        self.tokens = {number: [] for number, _ in queue}
        while queue or any(seat is not None for seat in seats):
            nobody_sits = all(seat is None for seat in seats)
            for i in range(num_seats):
                if seats[i] is None and queue and (nobody_sits or not is_static):
                    number, left = queue.pop(0)
                    seats[i], where[number] = [number, left], i
            for i, seat in enumerate(seats):
                if seat is not None:
                    self.tokens[seat[0]].append(step)
                    seat[1] -= 1
                    if seat[1] == 0:
                        seats[i] = None
            step += 1
        return [[where[number], steps[0], steps[-1] + 1] for number, steps in self.tokens.items()]


class GhostIdle(Exercise):
    """The idle seats of one static batch, by hand."""

    name, points, minutes, section = "ghost_idle", 2, 8, "L33 3.1"
    defines = ("ghost_idle",)
    ours = {"ghost_idle": PAPER + "ghost_idle"}
    driver = "PaperDriver"
    hints = (
        say("How long does the batch last? And how many seat-steps are that, over all seats?"),
        say("A busy seat-step brings one token. So you know how many are busy: one for each token. The others are idle."),
        say("steps = max(lengths); seat_steps = steps * len(lengths); idle = seat_steps - sum(lengths). The share is idle "
            "over seat_steps."),
    )  # fmt: skip
    examples = (
        one("ghost_idle", [3, 1]),
        one("ghost_idle", [7]),
        one("ghost_idle", [4, 4, 4]),
        one("ghost_idle", [5, 2, 9, 1]),
        one("ghost_idle", [1, 1, 1, 8]),
        one("ghost_idle", [2, 2, 1]),
    )

    class Oracle:
        """Walks over all seat-steps."""

        def ghost_idle(self, lengths):
            steps = 0
            while any(length > steps for length in lengths):
                steps += 1
            states = [step < length for length in lengths for step in range(steps)]
            return Numbers([steps, states.count(False)], [states.count(False) / len(states)])

    def traces(self):
        return calls("ghost_idle", st.lists(st.integers(1, 30), min_size=1, max_size=8))

    def explain(self, op, expected, got):
        if changed(got):
            return CHANGED
        if not isinstance(got, list) or len(got) != 3:
            return say("Return three numbers: the steps, the idle seat-steps, and their share, from 0 to 1.")
        if got[0] != expected.whole[0]:
            return say("Nobody leaves before the last one has ended, so the batch takes as many steps as its longest "
                       "request has tokens.")  # fmt: skip
        if got[1] != expected.whole[1] or not isinstance(got[1], int):
            return say("An idle seat-step is one seat in one step in which it brings no token. A request of length n in a "
                       "batch of s steps is idle for s - n of them. It is a whole number.")  # fmt: skip
        if got[2] in [round(expected.about[0], digits) for digits in range(1, 10)]:
            return say("The share is right, but rounded: leave it as the division gives it.")
        return say("The share is idle seat-steps over ALL seat-steps of the batch, busy and idle. Not over the busy ones, "
                   "and not in percent.")  # fmt: skip


CHANGED = say("The list belongs to the caller, who still needs it: leave it as it is, or work on a copy.")


def changed(got):
    return isinstance(got, str) and "has changed" in got


def misshapen(got, expected):
    if changed(got):
        return CHANGED
    if not isinstance(got, list) or any(not isinstance(turn, list) or len(turn) != 3 for turn in got):
        return say("Return a list with three whole numbers for each request: (seat, start, end).")
    if any(type(number) is not int for turn in got for number in turn):
        return say("(seat, start, end) are three whole numbers: seat 0 and step 3, not 3.0 and not 'seat 0'.")
    if len(got) != len(expected):
        return say("One entry for each request, also for those in a last batch that is not full.")
    if any([[turn[i] for i in order] for turn in got] == expected for order in itertools.permutations(range(3))):
        return say("The three numbers are right, in another order: (seat, start, end).")
    if [[seat, start, start + length] for seat, start, length in got] == expected:
        return say("The third number is `end`, the step after the last one: start + length, and not the length.")
    for (_, start, end), (_, right_start, right_end) in zip(got, expected, strict=True):
        if end - start != right_end - right_start:
            return say("A request of length n runs in n steps: start, start + 1, ..., start + n - 1. `end` is the step "
                       "after its last one, so end - start is its length. And entry i is request i: keep the order.")
    return None


def unfinished(error, message):
    """An exception of a schedule, where it has a well-known reason."""
    if error == "NotPlain" and "generator" in message:
        return say("Return a list. list(...) makes one of a generator; or append to a list in the place of `yield`.")
    if error == "IndexError":
        return say("There may be fewer requests than seats, and none at all.")
    return None


class StaticSchedule(Exercise):
    """A static schedule on paper."""

    name, points, minutes, section = "static_schedule", 3, 12, "L33 3.1, 7.2"
    defines = ("static_schedule",)
    ours = {"static_schedule": PAPER + "static_schedule"}
    bars = (PAPER + "serve",)
    driver = "PaperDriver"
    hints = (
        say("Cut the list into batches of num_seats: range(0, len(lengths), num_seats) gives the first of each."),
        say("All of a batch start in the same step. Carry that step in a variable, and move it on by the longest of the "
            "batch."),
        say("start = 0; for first in range(0, len(lengths), num_seats): batch = lengths[first : first + num_seats]; for "
            "seat, length in enumerate(batch): append (seat, start, start + length). Then start += max(batch)."),
    )  # fmt: skip
    examples = (
        one("static_schedule", [3], 1),
        one("static_schedule", [3, 1], 2),
        one("static_schedule", [3, 1, 2], 2, why=say("Seat 1 is free after one step. But nobody enters before the whole "
                                                     "batch has ended.")),
        one("static_schedule", [1, 3, 2, 2], 2),
        one("static_schedule", [2, 2, 2, 2, 2], 2, why=say("The last batch is not full.")),
        one("static_schedule", [2, 1], 4),
        one("static_schedule", [], 2, why=say("Nobody came.")),
        one("static_schedule", [1, 5, 2, 1, 1, 3, 4, 1], 3),
        one("static_schedule", [4, 2, 3], 1),
    )  # fmt: skip

    class Oracle(Seats):
        def static_schedule(self, lengths, num_seats):
            return self.play(lengths, num_seats, is_static=True)

    def traces(self):
        return calls("static_schedule", LENGTHS, st.integers(1, 4))

    def explain(self, op, expected, got):
        if found := misshapen(got, expected):
            return found
        if [turn[1:] for turn in got] == [turn[1:] for turn in expected]:
            return say("The times are right. Seats are numbered from 0, and the first of a batch takes seat 0, the next "
                       "one seat 1, and so on.")  # fmt: skip
        return say("Requests enter num_seats at a time, in order, all in the same step. The next ones begin in the step "
                   "in which the LONGEST of the batch has ended (its `end`), not the first one, not the last one.")

    def explain_error(self, op, expected, error, message):
        return unfinished(error, message)


class ContinuousSchedule(Exercise):
    """A continuous schedule on paper."""

    name, points, minutes, section = "continuous_schedule", 4, 15, "L33 3.2, 7.2"
    defines = ("continuous_schedule",)
    ours = {"continuous_schedule": PAPER + "continuous_schedule"}
    bars = (PAPER + "serve",)
    driver = "PaperDriver"
    hints = (
        say("You need not go step by step. Ask of each request, in order: which seat is free first, and from when on?"),
        say("Keep one number for each seat: the step from which on it is free. At the beginning they are all 0. The next "
            "request takes the smallest one, of equal ones the first."),
        say("free = [0] * num_seats; for length in lengths: start = min(free); seat = free.index(start); append (seat, "
            "start, start + length); free[seat] = start + length."),
    )  # fmt: skip
    examples = (
        one("continuous_schedule", [3], 1),
        one("continuous_schedule", [3, 1], 2),
        one("continuous_schedule", [3, 1, 2], 2, why=say("Seat 1 is free after one step, and the third request takes it "
                                                         "at once.")),
        one("continuous_schedule", [3, 1, 1, 4], 2, why=say("Both seats become free in the same step, and one request "
                                                            "is left.")),
        one("continuous_schedule", [2, 2, 1, 1], 2, why=say("Two seats become free in the same step, and both are filled "
                                                            "in it.")),
        one("continuous_schedule", [5, 1, 1, 1, 1], 2),
        one("continuous_schedule", [2, 1], 4),
        one("continuous_schedule", [], 2, why=say("Nobody came.")),
        one("continuous_schedule", [3, 1, 2, 1, 2, 3, 1], 3),
        one("continuous_schedule", [4, 2, 3], 1),
    )  # fmt: skip

    class Oracle(Seats):
        def continuous_schedule(self, lengths, num_seats):
            return self.play(lengths, num_seats, is_static=False)

    def traces(self):
        return calls("continuous_schedule", LENGTHS, st.integers(1, 4))

    def explain(self, op, expected, got):
        if found := misshapen(got, expected):
            return found
        if [turn[1:] for turn in got] == [turn[1:] for turn in expected]:
            return say("The times are right. Of several free seats the next request takes the one with the lowest number.")
        if any(mine[1] < right[1] for mine, right in zip(got, expected, strict=True)):
            return say("A request starts before a seat is free, or before the one in front of it: they enter in order, "
                       "and a seat has one request in one step.")  # fmt: skip
        return say("A seat whose request has got its last token in step 7 has `end` 8, and the next request starts in step "
                   "8: at once, not a step later, and whatever the others are doing.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        return unfinished(error, message)


class StepBounds(Exercise):
    """Two bounds: no schedule is shorter, no queue makes it longer."""

    name, points, minutes, section = "step_bounds", 2, 12, "L33 3.2, 7.2"
    stretch = True
    defines = ("step_bounds",)
    ours = {"step_bounds": PAPER + "step_bounds"}
    driver = "PaperDriver"
    hints = (
        say("Fewest: two reasons, each gives a number, and both must be met. Most: how many whole steps can all seats be "
            "busy, if the tokens of all others are spread evenly? So long the longest one waits, at most."),
        say("Fewest: all tokens over num_seats, rounded UP, and the longest request; the larger of the two. Most: the "
            "tokens of the others over num_seats, rounded DOWN, and then the longest request."),
        say("total, longest = sum(lengths), max(lengths). Rounded up: -(-total // num_seats). The latest start: (total - "
            "longest) // num_seats."),
    )  # fmt: skip
    examples = (
        one("step_bounds", [4], 1),
        one("step_bounds", [2, 2], 2),
        one("step_bounds", [5, 1, 1], 2, why=say("Seven tokens on two seats would take four steps. But one request has "
                                                 "five tokens, and a seat gives one a step.")),
        one("step_bounds", [2, 2, 2], 2),
        one("step_bounds", [1, 1, 1, 1, 4], 2, why=say("If the long one is the last in the queue, the others have kept "
                                                       "both seats busy for two steps.")),
        one("step_bounds", [3, 3, 3, 3], 3),
        one("step_bounds", [2, 7, 3], 8, why=say("There are more seats than requests.")),
        one("step_bounds", [6, 1, 5, 6, 2], 3),
    )  # fmt: skip

    class Oracle:
        """Tries one number of steps after the other."""

        def step_bounds(self, lengths, num_seats):
            fewest = 1
            while fewest * num_seats < sum(lengths) or any(length > fewest for length in lengths):
                fewest += 1
            others, latest = sorted(lengths)[:-1], 0
            while (latest + 1) * num_seats <= sum(others):
                latest += 1
            return [fewest, latest + max(lengths)]

    def traces(self):
        return calls("step_bounds", st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 5))

    def explain(self, op, expected, got):
        if changed(got):
            return CHANGED
        if not isinstance(got, list) or len(got) != 2 or any(type(number) is not int for number in got):
            return say("Return two whole numbers: the fewest steps of any schedule, and the most of a continuous one.")
        if got == expected[::-1]:
            return say("Both are right, in the wrong order: (fewest, most).")
        if got[0] < expected[0]:
            return say("No schedule is shorter than its longest request, and in one step the seats give num_seats tokens at "
                       "most. A part of a step is a step: round up.")  # fmt: skip
        if got[0] > expected[0]:
            return say("Too high. The bound asks for two things only: room for all tokens in whole steps (6 tokens on 2 "
                       "seats need 3 steps, not 4), and the longest request. It is no schedule: whether one reaches it is "
                       "another question.")  # fmt: skip
        if got[1] < expected[1]:
            return say("Too low for a bound that holds for every order, and is computed without any schedule: all tokens "
                       "but those of ONE longest request, over num_seats, rounded down; then that request.")  # fmt: skip
        return say("Too high. The longest request waits while every seat is busy with the others: (their tokens) // "
                   "num_seats whole steps. One step more, and a seat would have been free before.")  # fmt: skip


class Admission(Exercise):
    """Who may enter: two rules of one line."""

    name, points, minutes, section = "admission", 2, 8, "L33 3.1, 3.2"
    defines = ("admit", "admit_static")
    ours = {"admit": POLICY + "admit", "admit_static": POLICY + "admit_static"}
    bars = (POLICY + "Policies.admit",)
    part = {"admit": "admit"}
    hints = (
        say("Continuous batching has one reason to say no: all seats are taken. Static batching has two."),
        say("The seats are all taken when num_running has reached max_num_seqs, or passed it: a request with several "
            "children counts for all of them."),
        say("return num_running < max_num_seqs, and for static batching the same with `batch_is_forming and` before it."),
    )
    examples = (
        Trace((), (("admit", 0, 4, True), ("admit", 3, 4, False), ("admit", 4, 4, False))),
        Trace((), (("admit", 2, 4, False),), why=say("Others run, and seats are free: that is what continuous batching is "
                                                     "about.")),
        Trace((), (("admit", 6, 4, False),), why=say("One request with six children takes six seats, of four: it runs "
                                                     "when it is alone, and nobody else enters.")),
        Trace((), (("admit_static", 0, 4, True), ("admit_static", 3, 4, True)),
              why=say("While the batch is forming, its seats are filled one after the other.")),
        Trace((), (("admit_static", 2, 4, False),), why=say("Two have left, and two seats are free. Nobody enters before "
                                                            "the whole batch has ended.")),
        Trace((), (("admit_static", 4, 4, True),), why=say("The batch is still forming, and full.")),
        Trace((), (("admit_static", 6, 4, True), ("admit_static", 0, 4, False), ("admit", 0, 4, False))),
        Trace((), (("admit", 1, 1, True), ("admit", 0, 1, True), ("admit_static", 0, 1, True))),
        Trace((), (("admit", 999, 1000, False), ("admit", 1000, 1000, False), ("admit_static", 999, 1000, True),
                   ("admit_static", 1000, 1000, True)), why=say("There may be any number of seats.")),
    )  # fmt: skip

    class Oracle:
        """Seats as a set of numbers: is one of them left?"""

        def admit(self, num_running, max_num_seqs, batch_is_forming):
            return bool(set(range(max_num_seqs)) - set(range(num_running)))

        def admit_static(self, num_running, max_num_seqs, batch_is_forming):
            return {True: self.admit(num_running, max_num_seqs, True), False: False}[batch_is_forming]

    def traces(self):
        names = st.sampled_from(["admit", "admit_static"])
        return st.tuples(names, st.integers(0, 6), st.integers(1, 5), st.booleans()).map(lambda op: Trace((), (op,)))

    def describe(self, op):
        return f"{op[0]}(num_running={op[1]}, max_num_seqs={op[2]}, batch_is_forming={op[3]})"

    def explain(self, op, expected, got):
        if type(got) is not bool:
            return say("Return True or False.")
        if got:
            return say("Yes here means one sequence too many, or one that comes too late for its batch.")
        return say("No here means a seat that stays empty while somebody waits for it.")


SCRIPTS = {"no to the first question": (False,), "no to the second question": (True, False), "only once": (True,)}


class Serve(Exercise):
    """The loop of an engine, with arrivals."""

    name, points, minutes, section = "serve", 5, 25, "L33 3.2"
    defines = ("serve",)
    ours = {"serve": PAPER + "serve"}
    driver = "ServeDriver"
    hints = (
        say("Carry four things: the step, how many have entered, a dict (or list) of those who run with the tokens that "
            "they still need, and the start of each. They enter in order, so 'how many have entered' is also the number of "
            "the next one."),
        say("One turn of the loop, in this order: whoever needs no more tokens is taken out; forming = nobody runs; let "
            "enter; if nobody runs although somebody has arrived, raise Stuck; give each one token; step += 1. Work out "
            "`forming` once, before anybody enters."),
        say("while entered < len(requests) and requests[entered][0] <= step and admit(len(running), num_seats, forming): "
            "running[entered] = length; start of it = step; entered += 1. The outer loop goes on while anybody runs or "
            "has not entered yet."),
    )  # fmt: skip
    examples = (
        one("serve", [[0, 3]], 2, "continuous"),
        one("serve", [[0, 3], [0, 1], [0, 2]], 2, "continuous"),
        one("serve", [[0, 3], [0, 1], [0, 2]], 2, "static", why=say("The third one waits until the batch has ended.")),
        one("serve", [[0, 2], [0, 2], [0, 1], [0, 1]], 2, "static",
            why=say("All four enter two by two. The batch is forming during the whole step in which it begins, not only "
                    "for the first who enters.")),
        one("serve", [[0, 4], [1, 2]], 2, "continuous", why=say("The second one arrives in step 1 and finds a free seat "
                                                                "beside the first.")),
        one("serve", [[0, 4], [1, 2]], 2, "static", why=say("It finds a free seat too. But the batch has closed: it "
                                                            "formed in step 0.")),
        one("serve", [[3, 2]], 1, "continuous", why=say("Nobody is there before step 3. That is no reason to give up.")),
        one("serve", [[0, 1], [5, 1]], 1, "static", why=say("Between the two requests nobody is there.")),
        one("serve", [[0, 2], [2, 2]], 1, "continuous",
            why=say("The first one gets its last token in step 1. In step 2 its seat is free.")),
        one("serve", [], 2, "continuous"),
        one("serve", [[0, 2], [0, 2]], 4, "one by one"),
        one("serve", [[0, 2], [0, 2], [0, 1]], 2, "everybody", why=say("admit decides, and this one has said yes.")),
        one("serve", [[2, 1]], 2, "nobody", why=say("Nobody runs, one waits and is not let in: nothing would ever "
                                                    "change.")),
        one("serve", [[0, 1]], 1, "half of the seats"),
        one("serve", [[0, 2], [0, 1], [0, 1], [1, 3]], 4, "two to a batch"),
        one("serve", [[0, 3], [0, 1], [1, 1], [1, 2], [9, 1]], 3, "continuous"),
        one("serve", [[0, 2], [0, 2], [0, 2]], 3, "no to the second question",
            why=say("After a no there are no more questions in this step: nobody overtakes, and nobody is asked about "
                    "twice.")),
        one("serve", [[0, 7], [5, 1]], 2, "no to the second question",
            why=say("In step 0 nobody else has arrived: there is nobody to ask about. The second question comes in step 5.")),
        one("serve", [[3, 1]], 1, "no to the second question",
            why=say("Before step 3 nobody waits, so there is nothing to ask. The first question is answered with yes.")),
        one("serve", [[0, 1]], 1, "no to the first question", why=say("Ask once. A no to somebody who has arrived, while "
                                                                      "nobody runs, is Stuck.")),
        one("serve", [[0, 1], [0, 1]], 1, "only once", why=say("After the first request nobody is ever let in.")),
        one("serve", [[0, 20_000], [0, 1]], 1, "continuous", why=say("An answer may be long.")),
        one("serve", [[0, 1], [20_000, 1]], 1, "static", why=say("The next one may come late.")),
    )  # fmt: skip

    class Oracle:
        """Jumps from event to event: an end, or an arrival. Nothing is decided in between.

        A rule that counts its questions is asked in every step, or at every event: the loop may do either.
        """

        def serve(self, requests, num_seats, policy):
            if policy not in SCRIPTS:
                return self.play(requests, num_seats, policy, every_step=False)
            found = []
            for every_step in (True, False):
                try:
                    found.append(self.play(requests, num_seats, policy, every_step))
                except Stuck as error:
                    found.append(error)
            if isinstance(found[0], Stuck):
                raise found[0]
            return found[0] if found[0] == found[1] else OneOf(tuple(found))

        def play(self, requests, num_seats, policy, every_step):
            script = iter(SCRIPTS.get(policy, ()))
            rules = {
                "continuous": lambda n, forming: n < num_seats,
                "static": lambda n, forming: forming and n < num_seats,
                "one by one": lambda n, forming: n == 0,
                "half of the seats": lambda n, forming: n < num_seats // 2,
                "two to a batch": lambda n, forming: forming and n < 2,
                "never first": lambda n, forming: not forming and n < num_seats,
                "everybody": lambda n, forming: True,
                "nobody": lambda n, forming: False,
                "no to the first question": lambda n, forming: next(script, True),
                "no to the second question": lambda n, forming: next(script, True),
                "only once": lambda n, forming: next(script, False),
            }
            may_enter, found, now = rules[policy], [], 0
            while len(found) < len(requests):
                runs = [end for _, end in found if end > now]
                forming = not runs
                for arrival, length in requests[len(found) :]:
                    if arrival > now or not may_enter(len(runs), forming):
                        break
                    runs.append(now + length)
                    found.append([now, now + length])
                if len(found) == len(requests):
                    break
                arrival = requests[len(found)][0]
                if not runs and arrival <= now:
                    raise Stuck
                now = now + 1 if every_step else min([*runs, *([arrival] if arrival > now else [])])
            return found

    def traces(self):
        request = st.tuples(st.integers(0, 8), st.integers(1, 5)).map(list)
        requests = st.lists(request, max_size=7).map(sorted)
        policies = st.sampled_from(["continuous", "static", "one by one", "half of the seats", "two to a batch",
                                    "everybody", "never first"])  # fmt: skip
        return calls("serve", requests, st.integers(1, 4), policies)

    def describe(self, op):
        requests = ", ".join(f"({arrival}, {length})" for arrival, length in op[1])
        return f'serve([{requests}], {op[2]}, "{op[3]}")'

    def explain(self, op, expected, got):
        if changed(got):
            return CHANGED
        if isinstance(got, str) and got.startswith("asked "):
            return say("Ask admit(num_running, max_num_seqs, batch_is_forming): how many run now (a whole number), the seats "
                       "that there are, and True or False.")  # fmt: skip
        if isinstance(got, str) and "another Stuck" in got:
            return say("Raise the Stuck that the cell above imports: whoever calls waits for that one.")
        if isinstance(expected, OneOf):
            return say("The rule says yes, no, and from then on always yes. So this shows when it was asked: about the first "
                       "who waits and has arrived, until it says no, and then not again in this step.")  # fmt: skip
        if expected == "Stuck":
            return say("Somebody has arrived, nobody runs, and admit says no. Nothing that it is told will ever change, so "
                       "it will always say no: raise Stuck.")  # fmt: skip
        if not isinstance(got, list) or len(got) != len(expected):
            return say("Return (start, end) of each request, in order.")
        for mine, right, (arrival, length) in zip(got, expected, op[1], strict=True):
            if not isinstance(mine, list) or len(mine) != 2:
                return say("Return (start, end) of each request, in order.")
            if mine[1] - mine[0] != length:
                return say("Once it runs, a request gets one token in every step. So end - start is its length.")
            if mine[0] < arrival:
                return say("A request cannot start before it arrives.")
            if mine[0] < right[0]:
                return say("A request starts too early. Whoever got a token in this step is still in its seat; the batch "
                           "is forming only in a step that begins with all seats empty.")  # fmt: skip
            if mine[0] > right[0] and op[3] in ("static", "two to a batch"):
                return say("A request starts too late. If all seats are empty when a step begins, the batch is forming for "
                           "this whole step, also after the first one has entered: work it out once, before anybody "
                           "enters. And all who have arrived are asked about, one after the other, until admit says no.")
            if mine[0] > right[0]:
                return say("A request starts too late. In each step, all who have arrived may enter, one after the other, "
                           "until admit says no; and a seat is free in the step after its request's last token.")
        return None

    def explain_error(self, op, expected, error, message):
        if error == "Stuck":
            return say("Nobody runs, and that is fine: somebody will arrive, or admit would say yes. You are stuck only if "
                       "somebody HAS arrived, nobody runs, and admit says no. If that seems to be so, look at what you tell "
                       "admit: num_running are those who sit NOW, not all who have ever entered.")  # fmt: skip
        return None


class Stuck(Exception):
    """Named as the one that the notebook gives."""


STATUSES = ("waiting", "running", "preempted", "swapped", "stop", "length", "abort", "error")
EVENTS = ("schedule", "recompute", "swap", "lose", "stop", "length", "abort", "error")


UNKNOWN_WORD = say("A word that is none of them is refused, whatever the other word is: abort and error too come only to the "
                   "four states before the end.")  # fmt: skip


class NextStatus(Exercise):
    """What can happen to a request: its states."""

    name, points, minutes, section = "next_status", 3, 15, "L33 3.2, 5"
    defines = ("next_status",)
    ours = {"next_status": LIFE + "next_status"}
    bars = (LIFE + "transitions",)
    driver = "StatusDriver"
    hints = (
        say("Make a table on paper: four rows for the states before the end, eight columns for the events. Mark what is "
            "possible. You should find sixteen marks."),
        say("A dict with the pair (status, event) as key is the table. A seat is given to those who have none, taken from "
            "those who have one; a token is sampled only for who runs; abort and error may come to all four."),
        say('table = {("waiting", "schedule"): "running", ("running", "swap"): "swapped", ...}. if (status, event) not in '
            'table: raise ValueError(f"{event} cannot happen to a request that is {status}").'),
    )  # fmt: skip
    examples = (
        Trace((), (("next_status", "waiting", "schedule"), ("next_status", "running", "stop"))),
        Trace((), (("next_status", "running", "recompute"), ("next_status", "preempted", "schedule"))),
        Trace((), (("next_status", "running", "swap"), ("next_status", "swapped", "schedule"))),
        *(Trace((), tuple(("next_status", status, event) for event in ("abort", "error")))
          for status in ("waiting", "running", "preempted", "swapped")),
        Trace((), (("next_status", "running", "schedule"),),
              why=say("It has a seat already. (That it gets tokens in many steps is no event: its status stays.)")),
        Trace((), (("next_status", "waiting", "stop"), ("next_status", "preempted", "length"),
                   ("next_status", "swapped", "stop")),
              why=say("A token is sampled only for who runs.")),
        Trace((), (("next_status", "waiting", "recompute"), ("next_status", "waiting", "swap")),
              why=say("Who waits has no seat and no K/V that could be taken.")),
        Trace((), (("next_status", "swapped", "lose"),),
              why=say("Its K/V is gone, and all its tokens must be computed again. Which state says so?")),
        Trace((), (("next_status", "stop", "abort"), ("next_status", "error", "error")),
              why=say("It has ended. A user who leaves now changes nothing: whoever calls must look first.")),
        Trace((), (("next_status", "running", "dance"), ("next_status", "sleeping", "schedule"),
                   ("next_status", "sleeping", "abort"), ("next_status", "sleeping", "error")), why=UNKNOWN_WORD),
        *(Trace((), tuple(("next_status", status, event) for event in EVENTS), why=UNKNOWN_WORD)
          for status in ("sleeping", "", "wait", "Waiting", "run", *sorted(set(EVENTS) - set(STATUSES)))),
        *(Trace((), tuple(("next_status", status, event) for status in STATUSES), why=UNKNOWN_WORD)
          for event in ("dance", "", "Stop", "s", *sorted(set(STATUSES) - set(EVENTS)))),
        *(one("next_status", status, event) for status, event in itertools.product(STATUSES, EVENTS)),
    )  # fmt: skip

    class Oracle:
        """Rule by rule: who has a seat, who has none, who has ended."""

        def next_status(self, status, event):
            has_seat, waits = status == "running", status in ("waiting", "preempted", "swapped")
            if event in ("abort", "error") and (has_seat or waits):
                return event
            if event == "schedule" and waits:
                return "running"
            if has_seat and event in ("stop", "length", "recompute", "swap"):
                return {"recompute": "preempted", "swap": "swapped"}.get(event, event)
            if status == "swapped" and event == "lose":
                return "preempted"
            raise ValueError

    def explain(self, op, expected, got):
        status, event = op[1], op[2]
        if isinstance(got, str) and "does not name" in got:
            return say("Whoever reads this in a log at night wants to know which event and which status it was: name both "
                       "in the message.")  # fmt: skip
        if expected == "ValueError":
            if got == "KeyError":
                return say("A KeyError says that a dict had no such key. Say what it means: raise a ValueError that names "
                           "the status and the event.")  # fmt: skip
            return say("This cannot happen. A table that lets it pass hides a fault in the engine: raise ValueError.")
        if event in ("abort", "error"):
            return say("Users leave, and things break, at any time until a request has ended. The status afterwards is "
                       "called like the event.")  # fmt: skip
        if event in ("stop", "length"):
            return say("It has ended, and the status afterwards is called like the event.")
        if status == "swapped" and event == "schedule":
            return say("Its K/V is copied back when it takes a seat: then it runs like any other.")
        return say("Ask two things: has it a seat after this event? And where is its K/V?")

    def explain_error(self, op, expected, error, message):
        return say("This does happen: do not refuse it.") if error == "ValueError" else None


class FullMemory(Exercise):
    """A full memory: batch, step and arithmetic."""

    name, points, minutes, section = "full_memory", 2, 15, "L33 3.3, 3.4"
    stretch = True
    defines = ("full_memory",)
    ours = {"full_memory": PAPER + "full_memory"}
    driver = "MemoryDriver"
    num_random = 30
    hints = (
        say("How many requests fit? Each holds `reserve` slots, and a slot takes shape.kv_bytes_per_token() bytes."),
        say("The step is a list with one pair for each of them: (1, context). If none fits there is no step at all."),
        say("share = step_flops(shape, step) / (seconds * gpu.peak_flops), with seconds = step_seconds(gpu, shape, step)."),
    )
    examples = (
        one("full_memory", "H100", "Llama-3-8B", 50 * GB, 1000, 1001),
        one("full_memory", "H100", "Llama-3-8B", 50 * GB, 1000, 8192),
        one("full_memory", "L4", "Llama-3-8B", 2 * GB, 500, 4096),
        one("full_memory", "H100", "Llama-3-8B", 50 * GB, 100, 101, why=say("So many short requests fit that arithmetic, "
                                                                           "not memory, is the limit.")),
        one("full_memory", "L4", "Llama-3-8B", GB, 500, 100_000, why=say("Not one fits.")),
        one("full_memory", "H100", "Llama-3-8B", 131_072 * 3, 1, 2, why=say("Three slots: one request of two.")),
    )  # fmt: skip

    class Oracle:
        """With its own sums of weights, FLOP and bytes."""

        def full_memory(self, gpu, model, kv_bytes, context, reserve):
            chip, shape = GPUS[gpu], model_shape(model)
            per_token = 2 * 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
            batch = 0
            if kv_bytes >= reserve * per_token:
                batch = int(kv_bytes / (reserve * per_token) + 1e-12)
            if not batch:
                return Numbers([0], [0.0, 0.0])
            head = shape.vocab_size * shape.hidden_size
            q = shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
            flops = batch * (2 * shape.num_layer_weights + 2 * head + 4 * q * (context + 1))
            moved = 2 * (shape.num_layer_weights + head + batch * shape.hidden_size) + batch * (context + 1) * per_token
            seconds = max(flops / chip.peak_flops, moved / chip.bandwidth)
            return Numbers([batch], [seconds, flops / chip.peak_flops / seconds])

    def traces(self):
        chips, models = st.sampled_from(["H100", "A100", "L4"]), st.sampled_from(["Llama-3-8B", "Qwen2.5-7B"])
        sizes = st.integers(1, 60).map(lambda n: n * GB + 7)
        lengths = st.tuples(st.integers(1, 3000), st.integers(1, 3000))
        return st.tuples(chips, models, sizes, lengths).map(
            lambda t: one("full_memory", *t[:3], t[3][0], t[3][0] + t[3][1])
        )  # fmt: skip

    def describe(self, op):
        gpu, model, kv_bytes, context, reserve = op[1:]
        return f"full_memory({gpu}, {model}, kv_bytes={kv_bytes:,}, context={context}, reserve={reserve})"

    def explain(self, op, expected, got):
        if not isinstance(got, list) or len(got) != 3:
            return say("Return three numbers: how many requests fit, the seconds of a step, and the share, 0 to 1.")
        if got[0] != expected.whole[0] or type(got[0]) is not int:
            return say("Each request holds `reserve` slots, used or not, and kv_bytes_per_token() bytes for each slot. "
                       "Only whole requests fit: a whole number, rounded down.")  # fmt: skip
        if not got[0]:
            return say("If not one fits, nothing runs: (0, 0.0, 0.0).")
        if type(got[1]) in (int, float) and isclose(got[1], 1000 * expected.about[0], rel_tol=1e-6):
            return say("Those are milliseconds. The step's time is in seconds, as step_seconds gives it.")
        if type(got[1]) not in (int, float) or not isclose(got[1], expected.about[0], rel_tol=1e-6):
            return say("As many fit as you say, but the time of their step is another: it is step_seconds(gpu, shape, step), "
                       "with one pair (1, context) for each of them. What is reserved and not written is not read.")
        return say("The share: operations of the step, over what the chip could do in these seconds (peak_flops a second). "
                   "From 0 to 1.")  # fmt: skip
