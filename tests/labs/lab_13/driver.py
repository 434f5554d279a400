"""Lab 13: drives the student's functions with plain values. Runs in the child process."""

import numpy as np

from kvlab.engine.engine_steps import Entry
from kvlab.schedule import SchedulerOutput


class DrawDriver:
    """pick, keep and sample; what they are given must be as it was afterwards."""

    def __init__(self, student):
        self.student = student

    def pick(self, weights, uniform):
        given = list(weights)
        found = self.student.pick(given, uniform)
        return found if given == weights else "pick has changed the list `weights`"

    def keep(self, weights, top_k, top_p):
        given = list(weights)
        found = self.student.keep(given, top_k, top_p)
        return found if given == weights else "keep has changed the list `weights`"

    def sample(self, logits, temperature, top_k, top_p, uniform):
        given = np.array(logits, np.float64)
        with np.errstate(all="ignore"):
            found = self.student.sample(given, temperature, top_k, top_p, uniform)
        return found if given.tolist() == logits else "sample has changed the array `logits`"

    def shares(self, weights, num):
        """How often each index is picked, over `num` uniforms on a grid."""
        found = [0] * len(weights)
        for i in range(num):
            found[self.student.pick(list(weights), i / num)] += 1
        return found


class CountDriver:
    def __init__(self, student):
        self.student = student

    def draws(self, *entries):
        given = [Entry(*entry) for entry in entries]
        found = self.student.draws(given)
        if given != [Entry(*entry) for entry in entries]:
            return "draws has changed the list `scheduled`"
        return [list(one) if isinstance(one, tuple) else one for one in found] if isinstance(found, list) else found

    def worst_batch(self, *limits):
        return self.student.worst_batch(*limits)


class StepDriver:
    """A scheduler and a runner that write down what is asked of them. steps: [names scheduled, names with a result]."""

    def __init__(self, student):
        self.student = student
        self.log, self.number = [], 0

    def step(self, scheduled, with_results):
        self.log.clear()
        output, sampled, results = _Thing("output"), _Thing("sampled"), list(with_results)
        output.scheduled = [(name, 1) for name in scheduled]
        output.block_ops = [] if scheduled else [("swap_out", 1, 2)]
        output.total_num_scheduled_tokens = len(scheduled)
        told = self.log.append

        class Scheduler:
            running = [name for name, _ in output.scheduled]
            waiting = ()

            def schedule(self):
                told("schedule()")
                return output

            def update_from_output(self, output, sampled):
                told(f"update_from_output({_told(output)}, {_told(sampled)})")
                return results

            def has_unfinished_requests(self):
                return True

        class Runner:
            def execute(self, output):
                told(f"execute({_told(output)})")
                return sampled

        found = self.student.step(Scheduler(), Runner())
        told("returned " + ("what update_from_output gave" if found is results else _told(found)))
        return list(self.log)

    def step_that_fails(self, where):
        """What comes out of a step in which the scheduler or the runner raises."""

        class Broken:
            def __getattr__(self, name):
                def call(*args, **kwargs):
                    if name == where:
                        raise OverflowError(name)
                    return _Thing("output")

                return call

        broken = Broken()
        self.student.step(broken, broken)
        return "nothing was raised"


class _Thing:
    """Something of which only the identity counts; a dict to those who look."""

    def __init__(self, name):
        self.name = name

    def get(self, key, default=None):
        return default


def _told(value):
    return f"the {value.name}" if isinstance(value, _Thing) else repr(value)[:40]


class _Request:
    def __init__(self, request_id):
        self.request_id = request_id


class CarefulDriver:
    """A runner with requests that cannot be computed, and one whose copies fail."""

    def __init__(self, student):
        self.student = student

    def careful_execute(self, names, bad, copies="none"):
        """copies: "none", "made" or "fail". bad: name -> what it raises, "" for an error without words."""
        asked, num_copied = [], 0
        requests = [_Request(name) for name in names]
        ops = [] if copies == "none" else [("copy", 1, 2)]
        output = SchedulerOutput(3, [(r, 1) for r in requests], [[r.request_id] for r in requests], ops)

        class Runner:
            def execute(self, output):
                nonlocal num_copied
                here = [request.request_id for request, _ in output.scheduled]
                asked.append(",".join(here))
                if [table[0] for table in output.block_tables] != here:
                    raise LookupError("tables of other requests")
                if not output.block_ops_done:
                    if copies == "fail":
                        raise ConnectionError("the copy")
                    num_copied += len(output.block_ops)
                    output.block_ops_done = bool(output.block_ops)
                for name in here:
                    if name in bad:
                        if bad[name] == "interrupt":
                            raise KeyboardInterrupt
                        raise ValueError(bad[name])
                return {name: [len(name) + ord(name[0])] for name in here if name != "silent"}

        try:
            found = self.student.careful_execute(Runner(), output)
        except KeyboardInterrupt:
            return ["interrupted", asked, num_copied]
        if not (isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(part, dict) for part in found)):
            return f"returned {found!r}"[:80]
        return [dict(found[0]), dict(found[1]), asked, num_copied]
