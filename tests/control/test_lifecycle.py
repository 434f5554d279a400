"""The table of what can happen to a request: random runs make no other move, and make those."""

from collections import Counter

import fuzz
import pytest

from kvlab.schedule import Request, RequestStatus
from kvlab.schedule.lifecycle import EVENTS, LIVE, next_status, transitions


@pytest.fixture
def moves(monkeypatch):
    """Counts (status before, status after) of all requests; a sibling's first token came while its parent ran."""
    seen = Counter()

    def write(request, status):
        before = request.__dict__.get("_status")
        born_with_it = request.child_index > 0 and request.num_output_tokens <= 1 if before else False
        if before is RequestStatus.WAITING and born_with_it and status.finish_reason in ("stop", "length"):
            before = RequestStatus.RUNNING
        seen[before, status] += 1
        request.__dict__["_status"] = status

    monkeypatch.setattr(Request, "status", property(lambda request: request.__dict__["_status"], write), raising=False)
    return seen


def test_the_engine_makes_no_other_move_than_the_tables(moves):
    fuzz.run_range(0, 400)
    legal = {(before, after) for (before, _), after in transitions().items()}
    changes = {move for move in moves if move[0] is not None and move[0] is not move[1]}
    assert changes <= legal, changes - legal
    rare = {(status, RequestStatus.FINISHED_ERROR) for status in LIVE if status is not RequestStatus.RUNNING}
    assert legal - rare <= changes, legal - rare - changes
    assert {status for before, status in moves if before is None} == {RequestStatus.WAITING}, "all begin by waiting"


def test_every_pair_is_a_move_or_an_error_that_names_both():
    for status in RequestStatus:
        for event in [*EVENTS, "dance"]:
            after = transitions().get((status, event))
            if after is not None:
                assert next_status(status.value, event) == after.value
            else:
                with pytest.raises(ValueError, match=f"(?s)(?=.*{event})(?=.*{status.value})"):
                    next_status(status.value, event)


def test_nothing_happens_to_who_is_finished():
    assert not any(RequestStatus.is_finished(status) for status, _ in transitions())
    assert len(transitions()) == 16
