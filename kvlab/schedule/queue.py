"""The one waiting queue: new, preempted and swapped requests, each at its own place by (priority, arrival).

A heap with lazy removal, so that a hundred thousand waiting requests cost log n each and an abort costs nothing.
"""

import heapq
from collections.abc import Iterator

from kvlab.schedule.request import Request


class RequestQueue:
    """Requests ordered by `sort_key`, smallest first."""

    def __init__(self):
        self._heap: list[tuple[tuple[int, int, int], int, Request]] = []
        self._num_added = 0  # breaks ties between an entry and a stale one of the same request
        self._members: dict[str, Request] = {}

    def add(self, request: Request) -> None:
        """ValueError if a request of that id is waiting already."""
        if request.request_id in self._members:
            raise ValueError(f"request {request.request_id!r} is waiting already")
        self._members[request.request_id] = request
        self._num_added += 1
        heapq.heappush(self._heap, (request.sort_key, self._num_added, request))

    def peek(self) -> Request:
        """The first request. IndexError if there is none."""
        while self._heap[0][2] not in self:
            heapq.heappop(self._heap)  # was removed
        return self._heap[0][2]

    def pop(self) -> Request:
        """Take the first request. IndexError if there is none."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._members[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take `request` out. KeyError if it is not waiting."""
        del self._members[request.request_id]

    def __contains__(self, request: Request) -> bool:
        return self._members.get(request.request_id) is request

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        """All requests in order; O(n log n), for tests and views."""
        return iter(sorted(self._members.values(), key=lambda request: request.sort_key))
