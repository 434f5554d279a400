"""Steps on paper (L33 4.2, 4.4; lab 08): who computes how many tokens in which step, and when tokens come out.

    chunks       one prompt beside others that decode: the sizes of its chunks
    timetable    many requests under one token budget, step by step: what the scheduler does when memory is ample

No blocks, no seats, no clock: a step is a step, however long it takes. The simulator gives the same steps.
"""

from collections import deque
from collections.abc import Callable, Sequence

Row = list[int]  # tokens that each request computes in a step, 0 for one that is not there
Plan = Callable[[Sequence[int], int, int], Sequence[int]]  # as policies.plan_tokens


def chunks(num_tokens: int, budget: int, num_decodes: int = 0) -> list[int] | None:
    """Sizes of the chunks of a prompt of `num_tokens`, while `num_decodes` others take a token each of every step.

    None if they leave nothing of the budget: the prompt would never be computed.
    """
    size = budget - num_decodes
    if size < 1:
        return None
    full, rest = divmod(num_tokens, size)
    return [size] * full + [rest] * (rest > 0)


def timetable(requests: Sequence[tuple[int, int, int]], plan: Plan, budget: int,
              limit: int) -> tuple[list[Row], list[list[int]]]:  # fmt: skip
    """Requests (arrival, prompt tokens, output tokens) in order of arrival, which is a step's number, from 0.

    In each step running requests get what plan(pending, budget, limit) gives them; then waiting ones enter, in order,
    with up to `limit` tokens, while any of the budget is left. Who has computed all its known tokens brings a new one.
    Returns the steps, a row each, and for each request the steps at whose end its tokens came.
    """
    pending = [prompt for _, prompt, _ in requests]
    came: list[list[int]] = [[] for _ in requests]
    running: list[int] = []
    waiting = deque(range(len(requests)))
    rows: list[Row] = []
    while running or waiting:
        row = [0] * len(requests)
        if running:
            given = plan([pending[i] for i in running], budget, limit)
            for i, tokens in zip(running, given, strict=True):
                row[i] = tokens
        left = budget - sum(row)
        while left > 0 and waiting and requests[waiting[0]][0] <= len(rows):
            i = waiting.popleft()
            running.append(i)
            row[i] = min(pending[i], limit, left)
            left -= row[i]
        for i in list(running):
            pending[i] -= row[i]
            if row[i] and not pending[i]:
                came[i].append(len(rows))
                pending[i] = 1
                if len(came[i]) == requests[i][2]:
                    running.remove(i)
        rows.append(row)
    return rows, came
