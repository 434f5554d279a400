"""Lab 01: calls the student's function, and tells if it changed what it was given. Runs in the child process."""

from copy import deepcopy


class Keeps:
    """An operation is a call of what is defined. Its arguments must come back as they were."""

    def __init__(self, student):
        self.student = student

    def __getattr__(self, name):
        function = getattr(self.student, name)

        def call(*arguments):
            before = deepcopy(arguments)
            answer = function(*arguments)
            return answer if arguments == before else "an answer, and a changed argument"

        return call
