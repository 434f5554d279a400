"""Lab 08: drives the student's functions with plain values. Runs in the child process.

Plans are told by name: they are not the student's, so that a timetable is judged without a plan_tokens.
"""


def in_turn(pending, budget, limit, first):
    """Serve those for whom first(tokens) is true, then the others, each in order."""
    plan = [0] * len(pending)
    for turn in (True, False):
        for i, tokens in enumerate(pending):
            if first(tokens) is turn:
                plan[i] = min(tokens, limit, budget)
                budget -= plan[i]
    return plan


PLANS = {
    "decodes first": lambda pending, budget, limit: in_turn(pending, budget, limit, lambda tokens: tokens == 1),
    "chunks first": lambda pending, budget, limit: in_turn(pending, budget, limit, lambda tokens: tokens != 1),
    "in order": lambda pending, budget, limit: in_turn(pending, budget, limit, lambda tokens: True),
    "one each": lambda pending, budget, limit: [int(i < budget) for i in range(len(pending))],
    "the first alone": lambda pending, budget, limit: [
        0 if i else min(tokens, limit, budget) for i, tokens in enumerate(pending)
    ],
}


class PlanDriver:
    def __init__(self, student):
        self.student = student

    def plan_tokens(self, pending, budget, limit):
        given = list(pending)
        plan = self.student.plan_tokens(given, budget, limit)
        if given != list(pending):
            return "a plan, and a changed list `pending`"
        if plan is given:
            return "the very list `pending`"
        if isinstance(plan, list) and self.student.plan_tokens([1, 1], 2, 2) is plan:
            return "a list that the next call of plan_tokens writes to"
        return plan


class TimetableDriver:
    def __init__(self, student):
        self.student = student

    def timetable(self, requests, plan, budget, limit):
        given = [tuple(request) for request in requests]
        kept, asked = list(given), []

        def asking(pending, budget_given, limit_given):
            asked.append((budget_given, limit_given))
            if not isinstance(pending, list) or any(type(tokens) is not int or tokens < 1 for tokens in pending):
                raise ValueError(f"plan was asked about {pending!r}: give it a list of the tokens pending, 1 or more each")
            return PLANS[plan](pending, budget_given, limit_given)

        told = self.student.timetable(given, asking, budget, limit)
        if given != kept:
            return "a timetable, and a changed list `requests`"
        if any(one != (budget, limit) for one in asked):
            return "a timetable, for which plan was asked with another budget or limit"
        return told


class WorkDriver:
    def __init__(self, student):
        self.student = student

    def chunk_work(self, sizes):
        given = list(sizes)
        found = self.student.chunk_work(given)
        return found if given == list(sizes) else "an answer, and a changed list `sizes`"


class ChunkDriver:
    """seconds(chunk) is fixed + (chunk - free) * each, where chunks of up to `free` tokens cost nothing."""

    def __init__(self, student):
        self.student = student

    def largest_chunk(self, fixed, free, each, limit, most):
        return self._ask(fixed, free, each, limit, most)[0]

    def of_many(self, most):
        """Some fit, all fit, none fits."""
        return [self._ask(1, 0, 1, limit, most)[0] for limit in (most // 3, 2 * most, 0)]

    def num_calls(self, most):
        """The most of the three, since an answer "yes" may cost more calls than a "no"."""
        return max(self._ask(1, 0, 1, limit, most)[1] for limit in (most // 3, 2 * most, 0))

    def _ask(self, fixed, free, each, limit, most):
        calls = 0

        def seconds(chunk):
            nonlocal calls
            calls += 1
            if type(chunk) is not int or not 0 <= chunk <= most:
                raise ValueError(f"seconds({chunk!r}) was asked: a chunk is a whole number from 0 to {most}")
            return fixed + max(0, chunk - free) * each

        found = self.student.largest_chunk(seconds, limit, most)
        return found, calls
