"""Drives the made-up lab."""


class StackDriver:
    def __init__(self, student, n):
        self.stack = student.Stack()
        for i in range(n):
            self.stack.push(i)

    def push(self, x):
        self.stack.push(x)

    def pop(self):
        return self.stack.pop()

    def any(self):
        return self.stack.items[0] if self.stack.items else None

    def work(self):
        return getattr(self.stack, "work", 0)
