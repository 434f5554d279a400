"""Too little memory: what the diary of a run says, and that lab 09's surprises are there in the real scheduler."""

import pytest

from kvlab.costs.preemption_steps import wasted_tokens
from kvlab.lab.scenes.pressure import JOB, crowd, job_and_chats, play, summary
from kvlab.schedule.policies import choose_victim
from kvlab.sim import ConstantCost, closed_batch

TWELVE = closed_batch([(20, 20)] * 12)


def small(cpu_blocks=0, **policies):
    return play(TWELVE, 24, cpu_blocks=cpu_blocks, block_size=4, budget=16, costs=ConstantCost(1.0), **policies)


def always(request, room):
    return True


def whole(request, room):
    return room.num_growing == 0 or room.needed + room.promised <= room.free


def largest(running, needy, gain):
    return max(running, key=gain)


@pytest.mark.parametrize("cpu_blocks", [0, 9, 100])
def test_a_diary_agrees_with_the_schedulers_own_counters(cpu_blocks):
    played = small(cpu_blocks, may_resume=always)
    stats = played.result.stats
    assert sum(wasted_tokens(played.log).values()) == stats.num_recomputed_tokens == played.computed - played.useful
    assert played.computed == stats.num_scheduled_tokens and len(played.starts) == stats.num_steps
    outs = "".join(played.lanes.values()).count("!")
    assert outs == stats.num_preemptions_recompute + stats.num_preemptions_swap == summary(played)["preemptions"]


def test_lanes_and_blocks_have_an_entry_for_each_step():
    played = small(9, may_resume=always)
    steps = len(played.starts)
    assert {len(lane) for lane in played.lanes.values()} == {len(row) for row in played.blocks.values()} == {steps}
    for step in range(steps):
        assert sum(row[step] for row in played.blocks.values()) <= 24
        for name, row in played.blocks.items():
            assert (row[step] > 0) == (played.lanes[name][step] in "pdr-")


def test_letters_say_what_becomes_of_a_victim():
    dropped, swapped = small(may_resume=always), small(100, may_resume=always)
    letters = lambda played: set("".join(played.lanes.values()))  # noqa: E731
    assert letters(dropped) >= set("pdrwx!") and "s" not in letters(dropped)
    assert letters(swapped) >= set("pdws!") and not letters(swapped) & set("rx")


def test_traffic_is_the_same_from_the_same_seed():
    assert job_and_chats(20, 3).arrivals == job_and_chats(20, 3).arrivals != job_and_chats(20, 4).arrivals
    assert crowd(3, 20).arrivals == crowd(3, 20).arrivals != crowd(4, 20).arrivals


def test_a_job_that_is_let_in_by_the_chunk_thrashes():
    """L33 9.3-1: five times the work; counting the whole request ends most of it, back-off more."""
    chunk, by_whole, ours = (play(job_and_chats(), 160, may_resume=rule) for rule in (always, whole, None))
    assert chunk.record(JOB).num_preemptions > 100 and chunk.computed > 4 * chunk.useful
    assert by_whole.record(JOB).num_preemptions < 30
    assert ours.record(JOB).num_preemptions < by_whole.record(JOB).num_preemptions
    assert chunk.waits(0.99, chats_only=True) > 1.2 * ours.waits(0.99, chats_only=True)


def test_back_off_flattens_what_grows_with_the_rush():
    outs = lambda rule: [play(job_and_chats(n, gap_s=0.3, answer=800), 160, may_resume=rule).most for n in (50, 400)]  # noqa: E731
    without, ours = outs(whole), outs(None)
    assert without[1] - without[0] > 2 * (ours[1] - ours[0]) and without[1] > 2 * ours[1]


def test_the_largest_as_victim_wastes_more_with_fewer_preemptions():
    """L33 8.1-6, A.2."""
    young, large = (summary(play(crowd(1, 120), 250, choose_victim=rule)) for rule in (choose_victim, largest))
    assert large["computed again"] > 1.5 * young["computed again"] and large["preemptions"] <= young["preemptions"]
    assert large["most of one"] > 3 * young["most of one"] and large["p99 s"] > young["p99 s"]
