"""Lab 07: drives the student's functions with plain values. Runs in the child process."""

from kvlab.primer import GPUS
from kvlab.schedule.on_paper import Stuck
from kvlab.sizing import model_shape

POLICIES = {
    "continuous": lambda n, seats, forming: n < seats,
    "static": lambda n, seats, forming: forming and n < seats,
    "one by one": lambda n, seats, forming: n == 0,
    "half of the seats": lambda n, seats, forming: n < seats // 2,
    "two to a batch": lambda n, seats, forming: forming and n < 2,
    "never first": lambda n, seats, forming: not forming and n < seats,
    "everybody": lambda n, seats, forming: True,
    "nobody": lambda n, seats, forming: False,
}
SCRIPTS = {  # the first answers, and all that follow
    "no to the first question": ([False], True),
    "no to the second question": ([True, False], True),
    "only once": ([True], False),
}


class PaperDriver:
    """The calculations on paper: `lengths` must be left as they were."""

    def __init__(self, student):
        self.student = student

    def _call(self, name, lengths, *more):
        given = list(lengths)
        found = getattr(self.student, name)(given, *more)
        return found if given == lengths else f"{name} has changed the list `lengths`"

    def ghost_idle(self, lengths):
        return self._call("ghost_idle", lengths)

    def static_schedule(self, lengths, num_seats):
        return self._call("static_schedule", lengths, num_seats)

    def continuous_schedule(self, lengths, num_seats):
        return self._call("continuous_schedule", lengths, num_seats)

    def step_bounds(self, lengths, num_seats):
        return self._call("step_bounds", lengths, num_seats)


class ServeDriver:
    """The loop, under a policy of ours that looks at what it is asked with."""

    def __init__(self, student):
        self.student, self.complaint = student, ""

    def serve(self, requests, num_seats, policy):
        first, rest = SCRIPTS.get(policy, ((), None))
        answers = iter(first)

        def admit(num_running, max_num_seqs, batch_is_forming):
            if type(num_running) is not int or type(batch_is_forming) is not bool or max_num_seqs != num_seats:
                asked = f"admit({num_running!r}, {max_num_seqs!r}, {batch_is_forming!r})"
                self.complaint = self.complaint or f"asked {asked}"[:120]
                return True
            if policy in SCRIPTS:
                return next(answers, rest)
            return POLICIES[policy](num_running, max_num_seqs, batch_is_forming)

        before = [tuple(request) for request in requests]
        given = list(before)
        try:
            found = self.student.serve(given, num_seats, admit)
        except Exception as error:
            if type(error).__name__ == "Stuck" and not isinstance(error, Stuck):
                return "raised another Stuck than the one that was imported"
            raise
        return self.complaint or (found if given == before else "serve has changed the list `requests`")


class StatusDriver:
    def __init__(self, student):
        self.student = student

    def next_status(self, status, event):
        try:
            return self.student.next_status(status, event)
        except ValueError as error:
            if missing := [word for word in (status, event) if word not in str(error)]:
                return f"ValueError({str(error)!r}), which does not name {' and '.join(missing)}"[:200]
            raise


class MemoryDriver:
    def __init__(self, student):
        self.student = student

    def full_memory(self, gpu, model, kv_bytes, context, reserve):
        return self.student.full_memory(GPUS[gpu], model_shape(model), kv_bytes, context, reserve)
