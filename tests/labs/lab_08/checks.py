"""Lab 08, chunked prefill: its exercises."""

from hypothesis import strategies as st

from kvlab.grade import Approx, AtMost, Exercise, LabInfo, Trace, calls, say

LAB = LabInfo(title=say("Chunked prefill"), sections="L33 4.1-4.4, 8.2", before=("07",))
TABLE, BUDGET = "kvlab.schedule.timetable:", "kvlab.costs.budget:"


class Chunks(Exercise):
    """Cut one prompt into chunks."""

    name, points, minutes, section = "chunks", 2, 10, "L33 4.2"
    defines = ("chunks",)
    ours = {"chunks": TABLE + "chunks"}
    hints = (
        say("How many tokens of each step are left for the prompt, when the decodes have taken theirs?"),
        say("Take as much as fits until nothing is left. The last chunk is what is left: it may be smaller."),
        say("room = budget - num_decodes; if room < 1 return None. Else: sizes = []; while num_tokens > 0: append "
            "min(room, num_tokens), and subtract it."),
    )  # fmt: skip
    examples = (
        Trace((), (("chunks", 10, 5, 0),)),
        Trace((), (("chunks", 7, 5, 3),)),
        Trace((), (("chunks", 4000, 512, 0),), why=say("4000 / 512 is 7.8: the eighth chunk is not a full one.")),
        Trace((), (("chunks", 4000, 512, 32),), why=say("The decodes take 32 tokens of each step's 512.")),
        Trace((), (("chunks", 3, 512, 32),), why=say("A short prompt is one chunk.")),
        Trace((), (("chunks", 1, 1, 0),)),
        Trace((), (("chunks", 6, 4, 3),), why=say("One token a step is left for the prompt.")),
        Trace((), (("chunks", 5, 3, 3),), why=say("The decodes use the budget up. The prompt never gets a token.")),
        Trace((), (("chunks", 5, 3, 9),)),
    )  # fmt: skip

    class Oracle:
        """Hands out single tokens."""

        def chunks(self, num_tokens, budget, num_decodes):
            if budget <= num_decodes:
                return None
            sizes, used = [], budget
            for _ in range(num_tokens):
                if used == budget:  # this step is full: the next one begins with its decodes
                    sizes.append(0)
                    used = num_decodes
                sizes[-1] += 1
                used += 1
            return sizes

    def traces(self):
        return calls("chunks", st.integers(1, 30), st.integers(1, 8), st.integers(0, 8))

    def describe(self, op):
        return f"chunks({op[1]}, budget={op[2]}, num_decodes={op[3]})"

    def explain(self, op, expected, got):
        _, num_tokens, budget, num_decodes = op
        if expected is None:
            return say("{decodes} decodes take all of a budget of {budget} in every step. No chunk of any size gets in: "
                       "return None.", decodes=num_decodes, budget=budget)  # fmt: skip
        if not isinstance(got, list):
            return say("Return a list of whole numbers: the size of each chunk.")
        if any(type(size) is not int for size in got):
            return say("Tokens are whole: use //, min and subtraction, not /.")
        if sum(got) != num_tokens:
            return say("The chunks are the whole prompt: their sizes add up to {tokens}.", tokens=num_tokens)
        if 0 in got:
            return say("There is no chunk of 0 tokens: that would be a step in which the prompt is not computed.")
        if max(got) + num_decodes > budget:
            return say("A step has {budget} tokens for all. {decodes} of them belong to those who decode.", budget=budget,
                       decodes=num_decodes)  # fmt: skip
        return say("Every chunk takes all that the decodes leave of the budget; only the last one may be smaller.")


class PlanTokens(Exercise):
    """The plan: decodes first, chunks from what is left."""

    name, points, minutes, section = "plan_tokens", 4, 15, "L33 4.4"
    defines = ("plan_tokens",)
    ours = {"plan_tokens": "kvlab.schedule.policies:plan_tokens"}
    bars = (TABLE + "timetable", "kvlab.lab.scenes.chunks:on_paper")
    part = {"plan_tokens": "plan_tokens"}
    driver = "PlanDriver"
    hints = (
        say("Make the answer first: a list of zeros, one for each request. Then walk over the requests twice, and write "
            "into their own places."),
        say("The first walk serves those with exactly one token pending, the second one all others. Each takes the "
            "smallest of three numbers, and what it takes is gone from the budget."),
        say("plan = [0] * len(pending). In both walks: plan[i] = min(tokens, limit, budget); budget -= plan[i]. The first "
            "walk skips where tokens != 1, the second where tokens == 1."),
    )  # fmt: skip
    examples = (
        Trace((), (("plan_tokens", [1, 1, 1], 5, 5),)),
        Trace((), (("plan_tokens", [1, 7, 1], 5, 5),), why=say("Two decodes, then three tokens for the prompt.")),
        Trace((), (("plan_tokens", [7, 1, 1], 5, 5),), why=say("The prompt stands first in the list, and comes last.")),
        Trace((), (("plan_tokens", [7], 5, 5),)),
        Trace((), (("plan_tokens", [3], 5, 5),), why=say("Nobody gets more than it has pending.")),
        Trace((), (("plan_tokens", [4, 6, 1], 8, 8),), why=say("One chunk is whole, the next one is cut.")),
        Trace((), (("plan_tokens", [6, 4, 1], 8, 8),), why=say("Chunks are served in order, the long one too.")),
        Trace((), (("plan_tokens", [9, 9, 1], 10, 4),), why=say("No request gets more than the limit, and what it leaves "
                                                                "is for the next.")),
        Trace((), (("plan_tokens", [9, 1], 20, 4),), why=say("The limit holds even if budget is left over.")),
        Trace((), (("plan_tokens", [1, 1, 1, 1], 2, 2),), why=say("More decodes than budget: the first ones are served.")),
        Trace((), (("plan_tokens", [5, 1, 1, 1], 2, 2),)),
        Trace((), (("plan_tokens", [1, 5, 2], 1, 1),)),
        Trace((), (("plan_tokens", [2, 1, 3], 0, 4),), why=say("Nothing is left: everybody gets 0.")),
        Trace((), (("plan_tokens", [1, 1], 0, 4),)),
        Trace((), (("plan_tokens", [], 5, 5),), why=say("Nobody runs: an empty list.")),
        Trace((), (("plan_tokens", [0, 1, 3], 3, 3),), why=say("A request may have nothing pending: a beam that waits for "
                                                               "the others of its group.")),
        Trace((), (("plan_tokens", [2, 2, 2, 1, 1, 1], 6, 6),)),
    )  # fmt: skip

    class Oracle:
        """Hands out the budget token by token: each goes to the first who is still to be served."""

        def plan_tokens(self, pending, budget, limit):
            plan = [0] * len(pending)
            for _ in range(budget):
                hungry = [i for i, tokens in enumerate(pending) if plan[i] < min(tokens, limit)]
                if not hungry:
                    break
                plan[min(hungry, key=lambda i: (pending[i] != 1, i))] += 1
            return plan

    def traces(self):
        tokens = st.one_of(st.just(1), st.integers(0, 9))
        return calls("plan_tokens", st.lists(tokens, max_size=6), st.integers(0, 14), st.integers(1, 9))

    def describe(self, op):
        return f"plan_tokens(pending={op[1]}, budget={op[2]}, limit={op[3]})"

    def explain(self, op, expected, got):
        _, pending, budget, limit = op
        if isinstance(got, str) and "changed" in got:
            return say("`pending` belongs to the scheduler, which compares your plan with it. Work on a list of your own.")
        if isinstance(got, str):
            return say("Make a new list in each call: whoever has an answer may keep it, and nobody else writes to it.")
        if not isinstance(got, list) or len(got) != len(pending):
            return say("Return a list with one number for each request, in the order of `pending`: 0 for those who get "
                       "nothing.")  # fmt: skip
        if any(type(tokens) is not int for tokens in got):
            return say("Tokens are whole numbers (True is not one).")
        served = sorted(range(len(pending)), key=lambda i: pending[i] != 1)
        if got != expected and got == [expected[i] for i in served]:
            return say("The right numbers in the wrong places: they stand in the order in which you have served. Each belongs "
                       "into the place that its request has in `pending`.")  # fmt: skip
        if min(got, default=0) < 0:
            return say("Nobody can be given less than 0 tokens. What is left of the budget must not fall below 0 either.")
        if sum(got) > budget:
            return say("{given} tokens were given of a budget of {budget}. Subtract what each request gets, the decodes "
                       "too.", given=sum(got), budget=budget)  # fmt: skip
        if any(mine > tokens for mine, tokens in zip(got, pending, strict=True)):
            return say("Nobody can compute more tokens than it has pending.")
        if max(got, default=0) > limit:
            return say("No request gets more than `limit` tokens in one step, even if budget is left.")
        readers = [i for i, tokens in enumerate(pending) if tokens == 1]
        if sum(got[i] for i in readers) < sum(expected[i] for i in readers):
            return say("Somebody who decodes has got nothing, although there was budget: they are reading, and see a pause. "
                       "All with exactly one token pending come before any chunk.")  # fmt: skip
        if [got[i] for i in readers] != [expected[i] for i in readers]:
            return say("Too many decodes for the budget: serve them in the order of the list.")
        if sum(got) < sum(expected):
            return say("Budget is left over, and somebody could have used it. Give each chunk the smallest of what it has "
                       "pending, the limit, and what is left: a part of a prompt is better than none of it.")  # fmt: skip
        return say("Chunks are served in order: the first one takes what it can, then the next one.")


class Timetable(Exercise):
    """The timetable: a scheduler on paper."""

    name, points, minutes, section = "timetable", 4, 22, "L33 4.4"
    defines = ("timetable",)
    ours = {"timetable": TABLE + "timetable"}
    bars = ("kvlab.lab.scenes.chunks:on_paper", "kvlab.lab.scenes.chunks:watch")
    driver = "TimetableDriver"
    hints = (
        say("For each request keep how many tokens it has pending: at first the whole prompt, later 1. And keep two lists "
            "of request numbers: who runs, and who waits."),
        say("A step has three parts. Ask the plan about those who run, and write its answer into the row. Then let waiting "
            "ones in while budget is left. Then go over all who run: subtract, and if nothing is pending, a token comes "
            "out; it is pending itself now, unless it was the last."),
        say("row = [0] * len(requests); for i, n in zip(running, plan([pending[i] for i in running], budget, limit)): "
            "row[i] = n. left = budget - sum(row). While left > 0 and waiting and requests[waiting[0]][0] <= step: i = "
            "waiting.pop(0); running.append(i); row[i] = min(pending[i], limit, left); left -= row[i]."),
    )  # fmt: skip
    examples = (
        Trace((), (("timetable", [(0, 2, 1)], "decodes first", 5, 5),),
              why=say("The whole prompt in step 0. The token comes at the end of the same step.")),
        Trace((), (("timetable", [(0, 2, 3)], "decodes first", 5, 5),),
              why=say("After its first token a request computes one token a step: the one that came last. The last token "
                      "of all is computed by nobody.")),
        Trace((), (("timetable", [(0, 7, 1)], "decodes first", 3, 3),),
              why=say("A prompt in three chunks. Only the step with the last chunk brings a token.")),
        Trace((), (("timetable", [(0, 1, 3), (1, 4, 2)], "decodes first", 3, 3),),
              why=say("The newcomer gets what is left of the budget.")),
        Trace((), (("timetable", [(0, 1, 5), (1, 9, 1)], "chunks first", 3, 3),),
              why=say("Those who run are served by the plan, and this plan serves chunks first. A newcomer is not asked "
                      "about: it gets what is left.")),
        Trace((), (("timetable", [(0, 4, 2), (0, 4, 2)], "decodes first", 6, 6),),
              why=say("Two enter in one step: the second with what the first one leaves.")),
        Trace((), (("timetable", [(0, 8, 1), (0, 8, 1)], "decodes first", 6, 2),),
              why=say("The limit holds for newcomers as well.")),
        Trace((), (("timetable", [(0, 9, 1), (0, 6, 1)], "decodes first", 4, 3),),
              why=say("Both run from step 0 on. The plan is asked about them in the order in which they have entered.")),
        Trace((), (("timetable", [(0, 9, 2), (1, 9, 2), (1, 9, 2)], "in order", 6, 3),)),
        Trace((), (("timetable", [(2, 1, 1)], "decodes first", 3, 3),),
              why=say("Nobody is there in steps 0 and 1: two rows of zeros.")),
        Trace((), (("timetable", [(0, 1, 2), (4, 1, 2)], "in order", 3, 3),)),
        Trace((), (("timetable", [(0, 1, 4), (0, 1, 4), (1, 3, 1)], "decodes first", 2, 2),),
              why=say("Two decodes use the budget up. The third has to wait outside until one of them has ended.")),
        Trace((), (("timetable", [(0, 1, 4), (0, 5, 1), (1, 5, 1)], "chunks first", 3, 3),),
              why=say("Who gets no token has not entered: the plan is not asked about it in the next step.")),
        Trace((), (("timetable", [(0, 3, 2), (0, 2, 2)], "one each", 4, 4),),
              why=say("This plan leaves budget unused. The rest of it is for newcomers only.")),
        Trace((), (("timetable", [(0, 9, 1), (0, 4, 1), (1, 2, 1)], "the first alone", 4, 2),),
              why=say("This plan gives the second of those who run nothing, and leaves budget. It is for newcomers only: "
                      "one who waits outside enters with it, whoever inside gets nothing.")),
        Trace((), (("timetable", [], "decodes first", 3, 3),)),
    )  # fmt: skip

    class Oracle:
        """Keeps for each request how many tokens exist and how many are computed; the rest follows."""

        def timetable(self, requests, plan, budget, limit):
            known = {i: prompt for i, (_, prompt, _) in enumerate(requests)}
            computed = dict.fromkeys(known, 0)
            done = {i: prompt + output for i, (_, prompt, output) in enumerate(requests)}
            entered, rows, came = [], [], [[] for _ in requests]
            while any(known[i] < done[i] for i in known):
                step, given = len(rows), {}
                here = [i for i in entered if known[i] < done[i]]
                for i, tokens in zip(here, _planned(plan, [known[i] - computed[i] for i in here], budget, limit),
                                     strict=True):  # fmt: skip
                    given[i] = tokens
                for i, (arrival, prompt, _) in enumerate(requests):
                    left = budget - sum(given.values())
                    if i not in entered and arrival <= step and left:
                        entered.append(i)
                        given[i] = min(prompt, limit, left)
                rows.append([given.get(i, 0) for i in known])
                for i, tokens in given.items():
                    computed[i] += tokens
                    if computed[i] == known[i]:
                        known[i] += 1
                        came[i].append(step)
            return [rows, came]

    def traces(self):
        request = st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 4))
        return calls("timetable", st.lists(request, min_size=1, max_size=4).map(sorted),
                     st.sampled_from(sorted(_FIRST)), st.integers(1, 8), st.integers(1, 8))  # fmt: skip

    def describe(self, op):
        return f"timetable({[tuple(request) for request in op[1]]}, plan: {op[2]}, budget={op[3]}, limit={op[4]})"

    def explain(self, op, expected, got):
        if isinstance(got, str) and "changed" in got:
            return say("`requests` belongs to the caller: leave it as it is, and keep notes of your own.")
        if isinstance(got, str):
            return say("The plan is asked with the budget of the whole step and with the limit, both as they were given.")
        if not isinstance(got, list) or len(got) != 2 or not all(isinstance(part, list) for part in got):
            return say("Return two things: the list of rows, and for each request the list of steps in which its tokens "
                       "came.")  # fmt: skip
        rows, came = expected
        if got == [came, rows]:
            return say("Both are right, but the wrong way round: rows first, then came.")
        if len(got[0]) == len(rows) and all(row == got[0][0] for row in got[0]) and any(row != rows[0] for row in rows):
            return say("All rows are alike. Are they one and the same list, which each step writes to? Make a new row in "
                       "each step.")  # fmt: skip
        for step, (row, mine) in enumerate(zip(rows, got[0], strict=False)):
            if row != mine:
                return self._explain_row(op, rows, step, row, mine)
        if len(got[0]) != len(rows):
            return say("A row for each step, from step 0 to the one in which the last token of all comes: that makes {n}, "
                       "and yours are {mine}.", n=len(rows), mine=len(got[0]))  # fmt: skip
        return say("The rows are right, the moments are not. A token comes at the end of each step that computes the last "
                   "of a request's known tokens, and in no other: a chunk with more of the prompt behind it brings none.")

    def _explain_row(self, op, rows, step, row, mine):
        if not isinstance(mine, list) or len(mine) != len(row):
            return say("A row has a number for each request, 0 for those who compute nothing.")
        which = next(i for i, (a, b) in enumerate(zip(row, mine, strict=True)) if a != b)
        is_new = not any(earlier[which] for earlier in rows[:step])
        where = {"step": step, "who": which, "ours": row[which], "mine": mine[which]}
        if is_new and op[1][which][0] > step:
            return say("Step {step}: request {who} has not arrived yet.", **where)
        if is_new:
            return say("Step {step}, request {who}: it enters, or waits. Newcomers come in order and get the smallest of "
                       "what they have pending, the limit, and what the plan and those before them have left; with "
                       "nothing left they stay outside.", **where)  # fmt: skip
        return say("Step {step}, request {who}: {mine} instead of {ours}. Who runs gets exactly what the plan says, which "
                   "is asked about all who entered in an earlier step and have not ended, in the order in which they "
                   "entered. After its first token a request has 1 token pending; after its last one it is gone.",
                   **where)  # fmt: skip


_FIRST = {
    "decodes first": lambda tokens: tokens == 1,
    "chunks first": lambda tokens: tokens != 1,
    "in order": lambda tokens: True,
    "one each": None,
    "the first alone": None,
}


def _planned(plan, pending, budget, limit):
    """What the driver's plan of this name answers."""
    if plan == "one each":
        return [1] * min(len(pending), budget) + [0] * (len(pending) - budget)
    given = dict.fromkeys(range(len(pending)), 0)
    if plan == "the first alone":
        return [min(pending[0], limit, budget), *list(given.values())[1:]] if pending else []
    for i in sorted(given, key=lambda i: not _FIRST[plan](pending[i])):
        given[i] = min(pending[i], limit, budget - sum(given.values()))
    return list(given.values())


class ChunkWork(Exercise):
    """What a chunk costs."""

    name, points, minutes, section = "chunk_work", 2, 12, "L33 4.2"
    defines = ("chunk_work",)
    ours = {"chunk_work": BUDGET + "chunk_work"}
    bars = ("kvlab.costs.work:work_of_step",)
    driver = "WorkDriver"
    hints = (
        say("Write down, for a chunk of 2 tokens behind 3 computed ones, what each of the two sees. And whose K and V must "
            "be fetched from memory for that?"),
        say("A token sees all before it and itself: behind `computed`, the first of a chunk sees computed + 1, the next "
            "computed + 2, and so on. What is read is one copy of all of them: computed + size."),
        say("pairs = size * computed + size * (size + 1) // 2; read = computed + size; then computed += size."),
    )  # fmt: skip
    examples = (
        Trace((), (("chunk_work", [1]),)),
        Trace((), (("chunk_work", [4]),), why=say("1 + 2 + 3 + 4 pairs.")),
        Trace((), (("chunk_work", [2, 2]),), why=say("The second chunk's tokens see 3 and 4.")),
        Trace((), (("chunk_work", [3, 2, 1]),)),
        Trace((), (("chunk_work", [1, 1, 1]),), why=say("Chunks of one token: so many decodes.")),
        Trace((), (("chunk_work", [512] * 7 + [416]),)),
        Trace((), (("chunk_work", [3001, 2]),)),
        Trace((), (("chunk_work", []),), why=say("No chunk, no work.")),
    )  # fmt: skip

    class Oracle:
        """Draws the triangle: a row of keys for each query."""

        def chunk_work(self, sizes):
            found, rows = [], 0
            for size in sizes:
                seen = range(rows + 1, rows + size + 1)
                rows += size
                found.append([sum(seen), max(seen)])
            return found

    def traces(self):
        return calls("chunk_work", st.lists(st.integers(1, 40), max_size=6))

    def explain(self, op, expected, got):
        if isinstance(got, str):
            return say("The list `sizes` belongs to the caller: leave it as it is.")
        if not isinstance(got, list) or len(got) != len(expected) or any(
            not isinstance(one, list) or len(one) != 2 for one in got
        ):  # fmt: skip
            return say("Return a list with a pair of numbers for each chunk: (pairs, tokens read).")
        if any(type(number) is not int for one in got for number in one):
            return say("Pairs and tokens are whole numbers: divide with //.")
        if [read for _, read in got] != [read for _, read in expected]:
            return say("A chunk reads K and V of every token that its own tokens see: all that is computed, and its own. "
                       "Each is read once for the chunk, however many of its tokens look at it.")  # fmt: skip
        if got[0][0] != expected[0][0]:
            return say("The first chunk has nothing before it: its tokens see 1, 2, 3, ... tokens, each itself included.")
        return say("A later chunk's tokens see everything that the chunks before it have computed, and then each other, "
                   "as far as they go.")  # fmt: skip


class Knee(Exercise):
    """The knee: from where on tokens cost time."""

    name, points, minutes, section = "knee", 2, 10, "L33 8.2"
    defines = ("knee",)
    ours = {"knee": BUDGET + "knee"}
    hints = (
        say("Two times. How long does the arithmetic of n tokens take? How long does it take to read the weights, once, "
            "however many tokens there are?"),
        say("n * 2 * num_weights / flops_rate, and num_weights * bytes_per_weight / memory_rate. At which n is the first "
            "one longer?"),
        say("The two are equal at n = bytes_per_weight * flops_rate / (2 * memory_rate). Take the next whole number above, "
            "also if this one is whole: int(n) + 1."),
    )  # fmt: skip
    examples = (
        Trace((), (("knee", 989e12, 3.35e12, 8_000_000_000, 2),)),
        Trace((), (("knee", 312e12, 2.039e12, 8_000_000_000, 2),)),
        Trace((), (("knee", 989e12, 3.35e12, 13_000_000_000, 2),), why=say("A larger model reads longer and computes "
                                                                           "longer.")),
        Trace((), (("knee", 989e12, 3.35e12, 8_000_000_000, 1),), why=say("Weights of one byte are read in half the time.")),
        Trace((), (("knee", 989e12, 3.35e12, 8_000_000_000, 0.5),)),
        Trace((), (("knee", 1e12, 3e12, 8_000_000_000, 2),), why=say("A slow processor on fast memory: a single token is "
                                                                     "enough.")),
        Trace((), (("knee", 121e12, 0.3e12, 500_000_000, 4),)),
        Trace((), (("knee", 4, 1, 8, 2),), why=say("With 4 tokens the two times are equal: 16 seconds each. That is not "
                                                   "longer yet.")),
        Trace((), (("knee", 2, 1, 8, 1),), why=say("With 1 token the two times are equal.")),
    )  # fmt: skip

    class Oracle:
        """Counts upwards until the arithmetic takes longer."""

        def knee(self, flops_rate, memory_rate, num_weights, bytes_per_weight):
            reading = num_weights * bytes_per_weight / memory_rate
            tokens = 1
            while tokens * 2 * num_weights / flops_rate <= reading:
                tokens += 1
            return tokens

    def traces(self):
        def make(memory_rate, whole, part, num_weights, size):
            # Never a tie, where rounding would decide. (The examples have two, of numbers that are exact.)
            return Trace((), (("knee", memory_rate * (whole + part / 10), memory_rate, num_weights, size),))

        return st.builds(make, st.integers(1, 50), st.integers(0, 300), st.sampled_from([2.2, 3.4, 5.6, 7.8]),
                         st.integers(1, 99), st.sampled_from([0.5, 1, 2, 4]))  # fmt: skip

    def describe(self, op):
        return f"knee(flops_rate={op[1]:g}, memory_rate={op[2]:g}, num_weights={op[3]:,}, bytes_per_weight={op[4]})"

    def explain(self, op, expected, got):
        if type(got) is float:
            return say("A number of tokens is a whole number.")
        if not isinstance(got, int):
            return say("Return a whole number of tokens.")
        if got == expected - 1:
            return say("With {n} tokens the arithmetic does not take longer than the reading: less, or just as long. You want "
                       "the first number of tokens with which it takes longer.", n=got)  # fmt: skip
        if got == expected + 1:
            return say("With one token fewer the arithmetic takes longer already: you want the first such number.")
        _, flops_rate, memory_rate, _, size = op
        if any(got == int(other * flops_rate / (2 * memory_rate)) + 1 for other in (1, 2) if other != size):
            return say("bytes_per_weight is {size} here: reading takes that many bytes for each weight.", size=size)
        if got in (2 * expected, 2 * expected - 1):
            return say("A token takes 2 FLOP for each weight: a product and a sum.")
        return say("Arithmetic: 2 FLOP a weight for each token. Reading: bytes_per_weight for each weight, once a step, "
                   "whatever the number of tokens. (How many weights there are should not matter in the end.)")


class LargestChunk(Exercise):
    """The largest chunk that the readers bear."""

    name, points, minutes, section = "largest_chunk", 3, 14, "L33 4.4, 8.2"
    defines = ("largest_chunk",)
    ours = {"largest_chunk": BUDGET + "largest_chunk"}
    driver = "ChunkDriver"
    hints = (
        say("More tokens never make a step shorter. So if a chunk of 500 is too slow, which chunks need not be tried?"),
        say("Keep two numbers: the largest chunk of which you know that it fits (0 at first, which is no chunk), and the "
            "largest one that may still fit (`most`). Try the middle, and move one of the two."),
        say("while low < high: middle = (low + high + 1) // 2; if seconds(middle) <= limit: low = middle, else: high = "
            "middle - 1. The + 1 matters: without it the loop stands still when high is low + 1."),
    )  # fmt: skip
    examples = (
        Trace((), (("largest_chunk", 10, 0, 1, 15, 100),)),
        Trace((), (("largest_chunk", 10, 0, 1, 14.5, 100),)),
        Trace((), (("largest_chunk", 10, 6, 2, 15, 100),), why=say("The first six tokens cost nothing.")),
        Trace((), (("largest_chunk", 10, 0, 1, 500, 100),), why=say("All of them fit: the answer is `most`.")),
        Trace((), (("largest_chunk", 10, 0, 1, 109, 100),)),
        Trace((), (("largest_chunk", 10, 0, 1, 110, 100),)),
        Trace((), (("largest_chunk", 10, 0, 5, 14, 100),), why=say("A chunk of one token is too slow already: 0.")),
        Trace((), (("largest_chunk", 10, 0, 5, 9, 100),), why=say("Even without a chunk the step is too slow: 0.")),
        Trace((), (("largest_chunk", 10, 0, 1, 11, 1),)),
        Trace((), (("largest_chunk", 10, 0, 1, 10.5, 1),)),
        Trace((), (("largest_chunk", 10, 3, 1, 10, 100),), why=say("Exactly the limit is within it, and the last of "
                                                                   "those is wanted.")),
        Trace((), (("largest_chunk", 10, 0, 0, 10, 7),)),
        Trace((), (("num_calls", 1_000_000),), why=say("A million chunks are possible. Halve the range with each question.")),
        Trace((), (("of_many", 10**12),), why=say("The number of questions grows with `most`: ask until one chunk is left.")),
        Trace((), (("num_calls", 10**12),)),
    )  # fmt: skip

    class Oracle:
        """Tries every chunk, from the largest down."""

        def largest_chunk(self, fixed, free, each, limit, most):
            return next((c for c in range(most, 0, -1) if fixed + max(0, c - free) * each <= limit), 0)

        def of_many(self, most):
            return [most // 3 - 1, most, 0]

        def num_calls(self, most):
            return AtMost(2 * most.bit_length() + 4)

    def traces(self):
        return calls("largest_chunk", st.integers(0, 9), st.integers(0, 9), st.integers(0, 4), st.integers(0, 60),
                     st.integers(1, 40))  # fmt: skip

    def describe(self, op):
        if op[0] == "num_calls":
            return f"largest_chunk(seconds, limit, most={op[1]:,}), counted in calls of seconds(...),"
        if op[0] == "of_many":
            return (f"largest_chunk(seconds, limit, most={op[1]:,}) with a limit under which some chunks fit, then all, then "
                    "none,")  # fmt: skip
        _, fixed, free, each, limit, most = op
        grows = f"{fixed} + {each} for each token beyond {free}" if free else f"{fixed} + {each} for each token"
        return f"largest_chunk(seconds, limit={limit}, most={most}), where seconds(chunk) is {grows},"

    def explain(self, op, expected, got):
        if op[0] == "num_calls":
            return say("Each question halves what is possible, if you ask about the middle: 20 questions for a million. And "
                       "what you have been told you need not ask again.")  # fmt: skip
        if op[0] == "of_many":
            return say("Of a million chunks the answer is right: does your search end too early if there are more?")
        if not isinstance(got, int) or isinstance(got, bool):
            return say("Return a whole number of tokens, 0 if no chunk fits.")
        _, fixed, free, each, limit, most = op
        took = fixed + max(0, got - free) * each
        if got < 0:
            return say("A chunk has no fewer than 0 tokens. If no chunk fits, the answer is 0.")
        if got > most:
            return say("At most {most} tokens are asked for.", most=most)
        if got > expected:
            return say("With a chunk of {got} the step takes {took}: longer than {limit}. If no chunk fits, the answer is 0.",
                       got=got, took=took, limit=limit)  # fmt: skip
        return say("A chunk of {more} is within the limit as well. A step that takes exactly the limit is not too long.",
                   more=expected)  # fmt: skip


class ExpectedTokens(Exercise):
    """Drafts: tokens gained for tokens of the budget."""

    name, points, minutes, stretch, section = "expected_tokens", 2, 12, True, "L33 4.3"
    defines = ("expected_tokens",)
    ours = {"expected_tokens": "kvlab.sim.speculation:expected_tokens"}
    bars = ("kvlab.sim.speculation:Speculation",)
    hints = (
        say("When does the step bring at least 1 token? At least 2? At least 3? Write down each probability."),
        say("At least 1: always. At least 2: the first draft is accepted. At least 3: the first two are. The expected "
            "number is the sum of these probabilities."),
        say("sum(acceptance ** i for i in range(num_drafts + 1))"),
    )  # fmt: skip
    examples = (
        Trace((), (("expected_tokens", 0.5, 1),), why=say("One token for sure, a second one every other time.")),
        Trace((), (("expected_tokens", 0.5, 2),)),
        Trace((), (("expected_tokens", 0.8, 4),)),
        Trace((), (("expected_tokens", 0.7, 0),), why=say("No drafts: an ordinary decode.")),
        Trace((), (("expected_tokens", 0.0, 4),), why=say("No draft is ever right. The model's own token comes anyway.")),
        Trace((), (("expected_tokens", 1.0, 4),), why=say("All drafts are right, and one more token comes on top.")),
    )  # fmt: skip

    class Oracle:
        """The number of accepted drafts, weighed by its probability."""

        def expected_tokens(self, acceptance, num_drafts):
            expected = 0.0
            for accepted in range(num_drafts + 1):
                rejected_next = 1.0 if accepted == num_drafts else 1 - acceptance
                expected += acceptance**accepted * rejected_next * (accepted + 1)
            return Approx(expected)

    def traces(self):
        tenths = st.integers(0, 10).map(lambda tenth: tenth / 10)
        return calls("expected_tokens", tenths, st.integers(0, 8))

    def describe(self, op):
        return f"expected_tokens(acceptance={op[1]}, num_drafts={op[2]})"

    def explain(self, op, expected, got):
        if not isinstance(got, int | float):
            return say("Return a number, the tokens of a step on average.")
        if abs(got - expected.value) < 0.01 * expected.value:
            return say("That is close: is it rounded, or thrown by dice? The exact mean is wanted.")
        if got > expected.value:
            return say("A draft counts only if all drafts before it were accepted: the second with probability "
                       "acceptance ** 2, and so on.")  # fmt: skip
        if abs(expected.value - got - 1) < 1e-6:
            return say("One is missing: the model's own token. It comes in every step, behind the last accepted draft.")
        return say("Something is missing. There are at least 2 tokens if the first draft is right, at least 3 if the first "
                   "two are, and so on up to all of them, and 1 in any case. Every such case adds a token.")  # fmt: skip
