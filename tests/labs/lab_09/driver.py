"""Lab 09: drives the student's functions with plain values. Runs in the child process."""

from kvlab.costs.preemption_steps import Prices
from kvlab.schedule import Request
from kvlab.schedule.policies import Room


class HasChanged(Exception):
    """The student's function has changed what it was given."""


class NotARequest(Exception):
    """Something else than one of the requests was returned."""


class NeitherTrueNorFalse(Exception):
    """Something else than a bool was returned."""


class YesThenNo(Exception):
    """More free blocks turned yes to no."""


def state(request):
    return (request.sort_key, request.status.value, request.num_preemptions, request.num_computed_tokens,
            request.num_tokens, request.request_id)  # fmt: skip


class BookDriver:
    def __init__(self, student):
        self.student = student

    def by_the_book(self, *arguments):
        return self.student.by_the_book(*arguments)


class BillsDriver:
    def __init__(self, student):
        self.student = student

    def two_bills(self, prices, tokens, found=None):
        more = () if found is None else (found,)
        return self.student.two_bills(Prices(*prices), tokens, *more)


class CrossingDriver:
    def __init__(self, student):
        self.student = student

    def swap_wins_from(self, prices):
        return self.student.swap_wins_from(Prices(*prices))


class VictimDriver:
    """running: (name, priority, arrival, index among its siblings); gains: name -> blocks."""

    def __init__(self, student, running, gains):
        self.student, self.gains = student, gains
        self.running = []
        for name, priority, arrival, child_index in running:
            request = Request(name, [1, 2, 3], priority=priority)
            request.arrival, request.child_index = arrival, child_index
            request.num_preemptions, request.num_computed_tokens = 1, 2
            self.running.append(request)

    def choose_victim(self, needy):
        given = list(self.running)
        [asking] = [request for request in given if request.request_id == needy]
        before = [state(request) for request in self.running]

        def gain(request):
            if not any(request is other for other in self.running):
                raise TypeError(f"gain was called with {request!r}: it takes one request of `running`")
            return self.gains[request.request_id]

        victim = self.student.choose_victim(given, asking, gain)
        if given != self.running:
            raise HasChanged("the list `running`")
        if before != [state(request) for request in self.running]:
            raise HasChanged("a request in `running`")
        if not any(victim is request for request in self.running):
            raise NotARequest(f"{victim!r}"[:80])
        return victim.request_id


class HowDriver:
    def __init__(self, student):
        self.student = student

    def swap_or_recompute(self, computed, known, num_blocks, num_free_cpu_blocks, prices):
        request = Request("r", [1] * known)
        request.num_computed_tokens = computed
        before = state(request)
        how = self.student.swap_or_recompute(request, num_blocks, num_free_cpu_blocks, prices=Prices(*prices))
        if state(request) != before:
            raise HasChanged("the request")
        return how


class ResumeDriver:
    def __init__(self, student):
        self.student = student

    def _asked(self, num_preemptions, room):
        request = Request("r", [1, 2, 3])
        request.num_preemptions = num_preemptions
        before = state(request)
        answer = self.student.may_resume(request, room)
        if state(request) != before:
            raise HasChanged("the request")
        if not isinstance(answer, bool):  # the engine refuses numpy's too
            raise NeitherTrueNorFalse(f"{answer!r}"[:80])
        return answer

    def may_resume(self, num_preemptions, needed, free, promised, num_growing):
        return self._asked(num_preemptions, Room(needed, free, promised, num_growing))

    def least_free(self, num_preemptions, needed, promised, num_growing):
        """The fewest free blocks with which it says yes: looked for by halving, then one by one around it."""

        def asked(free):
            return self._asked(num_preemptions, Room(needed, free, promised, num_growing))

        low, high = -1, (needed + promised + num_growing + 1) * 2 ** (num_preemptions + 1)
        if not asked(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if asked(middle) else (middle, high)
        for free in [*range(min(200, high)), *range(max(0, high - 50), high + 50)]:
            if asked(free) != (free >= high):
                yes, no = (free, high - 1) if free < high else (high, free)
                raise YesThenNo(f"True with {yes} free blocks, but False with {no}")
        return high

    def asks_more(self, num_preemptions, needed, promised, num_growing):
        """Its border after so many times out, and by how much one time more moves it."""
        least = self.least_free(num_preemptions, needed, promised, num_growing)
        after = self.least_free(num_preemptions + 1, needed, promised, num_growing)
        return [least, None if least is None or after is None else after - least]


class WasteDriver:
    def __init__(self, student):
        self.student = student

    def wasted_tokens(self, log):
        given = [tuple(entry) for entry in log]
        answer = self.student.wasted_tokens(given)
        if given != [tuple(entry) for entry in log]:
            raise HasChanged("the list `log`")
        return answer
