"""Lab 13: drives the student's functions with plain values. Runs in the child process."""

import numpy as np

from kvlab.engine.engine_steps import Entry
from kvlab.schedule import SampledTokens, SchedulerOutput


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


class Request:
    def __init__(self, request_id):
        self.request_id = request_id

    def __repr__(self):
        return self.request_id


def _step_of(names, ops=()):
    """A real SchedulerOutput with a token of each."""
    return SchedulerOutput(3, [(Request(name), 1) for name in names], [[name] for name in names], list(ops))


class StepDriver:
    """A scheduler and a runner that write down what is asked of them."""

    def __init__(self, student):
        self.student = student
        self.log = []

    def step(self, scheduled, with_results):
        """scheduled: names in the step; with_results: who draws a token in it."""
        self.log.clear()
        output = _step_of(scheduled, () if scheduled else [("swap_out", 1, 2)])
        sampled, results = SampledTokens(), [(name, [5]) for name in with_results]
        sampled.update((name, [5]) for name in with_results)
        told = self.log.append

        def named(value):
            for name, known in (("the output", output), ("the sampled", sampled)):
                if value is known:
                    return name
                if type(value) is type(known) and value == known:
                    return f"a copy of {name}"
            return repr(value)[:40]

        class Scheduler:
            running = [request for request, _ in output.scheduled]
            waiting = ()

            def schedule(self):
                told("schedule()")
                return output

            def update_from_output(self, output, sampled):
                told(f"update_from_output({named(output)}, {named(sampled)})")
                return results

            def has_unfinished_requests(self):
                return True

        class Runner:
            def execute(self, output):
                told(f"execute({named(output)})")
                return sampled

        found = self.student.step(Scheduler(), Runner())
        told("returned " + ("what update_from_output gave" if found is results else named(found)))
        return list(self.log)

    def step_that_fails(self, where):
        """Who is called in a step in which the scheduler or the runner raises, and what comes out of it."""
        calls, raised = [], OverflowError(where)

        class Broken:
            def __getattr__(self, name):
                def call(*args, **kwargs):
                    calls.append(name)
                    if name == where:
                        raise raised
                    return _step_of("a") if name == "schedule" else SampledTokens()

                return call

        broken = Broken()
        try:
            found = self.student.step(broken, broken)
        except OverflowError as error:
            if error is not raised:
                raise
            return [*calls, "the error came out"]
        return [*calls, f"returned {found!r}"[:40]]


class CarefulDriver:
    """A runner with requests that cannot be computed, and one whose copies fail."""

    def __init__(self, student):
        self.student = student

    def careful_execute(self, names, bad, copies="none"):
        """copies: "none", "made" or "fail".

        bad: name -> what it raises, "" for an error without words; "interrupt" is Ctrl-C, "interrupt alone" an error
        in the first forward and Ctrl-C in the next that has this name.
        """
        asked, num_copied = [], 0
        output = _step_of(names, [] if copies == "none" else [("copy", 1, 2)])

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
                        if bad[name] == "interrupt" or (bad[name] == "interrupt alone" and len(asked) > 1):
                            raise KeyboardInterrupt
                        raise ValueError(bad[name])
                return {name: [len(name) + ord(name[0])] for name in here if name != "silent"}

        try:
            found = self.student.careful_execute(Runner(), output)
        except KeyboardInterrupt:
            return ["interrupted", asked, num_copied]
        if not (isinstance(found, tuple | list) and len(found) == 2 and all(isinstance(part, dict) for part in found)):
            return f"returned {found!r}"[:80]
        sampled, failed = ({_plain(key): value for key, value in part.items()} for part in found)
        return [sampled, {name: _plain(words) for name, words in failed.items()}, asked, num_copied]


def _plain(value):
    """Text as it is, anything else by its class in brackets, so that it can be told."""
    return value if isinstance(value, str) else f"(an object of class {type(value).__name__})"
