"""Lab 09: drives the student's functions with plain values. Runs in the child process."""

from kvlab.costs.preemption_steps import Prices
from kvlab.schedule import Request
from kvlab.schedule.policies import Room


def told(value):
    return value if type(value) in (int, float, str, bool, type(None), list, tuple, dict) else f"returned {value!r}"[:80]


class BillsDriver:
    def __init__(self, student):
        self.student = student

    def two_bills(self, prices, tokens, found=None):
        more = () if found is None else (found,)
        return told(self.student.two_bills(Prices(*prices), tokens, *more))


class CrossingDriver:
    def __init__(self, student):
        self.student = student

    def swap_wins_from(self, prices):
        return told(self.student.swap_wins_from(Prices(*prices)))


class VictimDriver:
    """running: (name, priority, arrival, index among its siblings); gains: name -> blocks."""

    def __init__(self, student, running, gains):
        self.student, self.gains = student, gains
        self.running = []
        for name, priority, arrival, child_index in running:
            request = Request(name, [1, 2, 3], priority=priority)
            request.arrival, request.child_index = arrival, child_index
            self.running.append(request)

    def choose_victim(self, needy):
        given = list(self.running)
        [asking] = [request for request in given if request.request_id == needy]
        before = [self._state(request) for request in self.running]

        def gain(request):
            if not any(request is other for other in self.running):
                raise TypeError(f"gain was called with {request!r}: it takes one request of `running`")
            return self.gains[request.request_id]

        victim = self.student.choose_victim(given, asking, gain)
        if given != self.running or before != [self._state(request) for request in self.running]:
            return "choose_victim has changed `running`, or a request in it"
        if not any(victim is request for request in self.running):
            return f"returned {victim!r}"[:80]
        return victim.request_id

    def _state(self, request):
        return [request.sort_key, request.num_preemptions, request.status.value]


class HowDriver:
    def __init__(self, student):
        self.student = student

    def swap_or_recompute(self, computed, known, num_blocks, num_free_cpu_blocks, prices):
        request = Request("r", [1] * known)
        request.num_computed_tokens = computed
        how = self.student.swap_or_recompute(request, num_blocks, num_free_cpu_blocks, prices=Prices(*prices))
        if request.num_computed_tokens != computed or request.num_tokens != known:
            return "swap_or_recompute has changed the request"
        return told(how)


class ResumeDriver:
    def __init__(self, student):
        self.student = student

    def _asked(self, num_preemptions, room):
        request = Request("r", [1, 2, 3])
        request.num_preemptions = num_preemptions
        answer = self.student.may_resume(request, room)
        if request.num_preemptions != num_preemptions:
            return "may_resume has changed the request"
        return answer if isinstance(answer, bool) else f"returned {answer!r}"[:80]

    def may_resume(self, num_preemptions, needed, free, promised, num_growing):
        return self._asked(num_preemptions, Room(needed, free, promised, num_growing))

    def least_free(self, num_preemptions, needed, promised, num_growing):
        """The fewest free blocks with which it says yes: looked for by halving, then one by one around it."""

        def asked(free):
            return self._asked(num_preemptions, Room(needed, free, promised, num_growing))

        low, high = -1, 2 ** (num_preemptions + 8)
        if isinstance(answer := asked(high), str):
            return answer
        if not answer:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if asked(middle) is True else (middle, high)
        for free in [*range(min(200, high)), *range(max(0, high - 50), high + 50)]:
            if isinstance(answer := asked(free), str):
                return answer
            if answer != (free >= high):
                return f"says {'yes' if answer else 'no'} with {free} free blocks, and turns round again at {high}"
        return high


class WasteDriver:
    def __init__(self, student):
        self.student = student

    def wasted_tokens(self, log):
        given = [tuple(entry) for entry in log]
        answer = self.student.wasted_tokens(given)
        if given != [tuple(entry) for entry in log]:
            return "wasted_tokens has changed the list `log`"
        return told(answer if type(answer) is not dict else dict(answer))
