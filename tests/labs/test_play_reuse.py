"""Who talks to a cache, and what becomes of the pool: figures that lab 05 tells must come from what is said."""

import pytest

from kvlab.lab.scenes import reuse
from kvlab.lab.scenes.reuse import ask, make_engine, play
from kvlab.prefix import HashChainIndex, block_keys, new_keys


def index(size=16):
    return HashChainIndex(size)


def test_every_session_says_every_turn_and_the_cache_changes_no_output():
    sessions = reuse.chats()[:4]
    cached, plain = play(sessions, make_engine(60, index=index())), play(sessions, make_engine(60, caching=False))
    assert cached.outputs == plain.outputs
    assert set(cached.outputs) == {f"{i}.{t}" for i, (_, _, turns) in enumerate(sessions) for t in range(len(turns))}
    assert cached.hit_rate() > 0 == plain.hit_rate()
    assert cached.hit_rate([0]) == cached.found[0] / cached.asked[0]


def test_each_turn_asks_for_all_that_was_said_and_answered():
    opening, turns = list(range(20)), [([1, 2], 3, 5), ([4], 2, 0)]
    steps = []
    played = play([(7, opening, turns)], make_engine(20, index=index()), lambda engine: steps.append(engine))
    assert played.asked == {0: 22 + (22 + 3 + 1)}
    assert played.found == {0: 16}  # the second turn finds one full block
    assert len(steps) > 7 + 5


@pytest.mark.parametrize("make", [reuse.chats, reuse.agents, reuse.strangers])
def test_sessions_are_the_same_each_time_and_playing_leaves_them_so(make):
    sessions = make()
    assert sessions == make() and sessions != make(9)
    play(sessions[:3], make_engine(80, index=index()))
    assert sessions == make()


def test_a_letter_for_each_block():
    engine = make_engine(4, block_size=4, index=index(4))
    manager = engine.scheduler.manager
    ask(engine, "A", list(range(5)))
    assert sorted(reuse.pool_state(manager)) == ["c", "e", "e", "e"]
    manager.block_pool.get_new_blocks(4)
    assert reuse.pool_state(manager) == "oooo"


def test_an_index_without_parents_finds_too_much_and_answers_wrongly():
    asked, answers = [1, 2, 3, 4, 7, 7, 8, 8, 1], []
    for known in (index(4), reuse.WithoutParents(4)):
        engine = make_engine(20, block_size=4, index=known)
        ask(engine, "before", [7, 7, 8, 8, 1, 2, 3, 4, 5])
        answers.append(ask(engine, "R", asked))
    right, _ = ask(make_engine(20, block_size=4, caching=False), "R", asked)
    (good, none), (bad, some) = answers
    assert (good, none) == (right, 0) and bad != right and some == 8


def test_first_block_first_lets_children_outlive_their_parents():
    found = []
    for manager in (reuse.KVCacheManager, reuse.FirstBlockFirst):
        engine = make_engine(6, block_size=4, index=index(4), manager_class=manager)
        ask(engine, "A", list(range(17)), 1)
        ask(engine, "B", list(range(50, 59)), 1)
        found.append(ask(engine, "A again", list(range(17)), 1)[1])
    assert found == [12, 0]


def test_a_locking_cache_keeps_half_of_the_pool_for_itself():
    engine = make_engine(6, block_size=4, index=index(4), manager_class=reuse.LockingManager)
    for i in range(4):
        ask(engine, str(i), list(range(100 * i, 100 * i + 9)), 1)
    manager = engine.scheduler.manager
    assert reuse.pool_state(manager).count("l") == len(manager.locked) == 3
    assert manager.block_pool.get_num_free_blocks() == 3


def test_hit_rates_are_percent_for_each_size():
    small, large = reuse.hit_rates(reuse.agents()[:3], (60, 200), HashChainIndex)
    assert 0 <= small <= large <= 100 and large > 50
    engine = make_engine(200, index=index())
    assert large == 100 * play(reuse.agents()[:3], engine).hit_rate()


def test_tokens_are_counted_as_they_are_read():
    tokens = reuse.CountedTokens(range(10))
    assert (tokens[3], list(tokens[2:5]), tokens.reads) == (3, [2, 3, 4], 4)
    assert list(tokens) == list(range(10)) and tokens.reads >= 14


@pytest.mark.parametrize("pieces", [[17, 3, 0, 40], [1] * 50])
def test_a_growing_index_finds_the_same_and_reads_each_token_once(pieces):
    grown, reads = reuse.growing_index(new_keys)(4), 0
    whole, blocks, cursor, num = index(4), [reuse.KVCacheBlock(i) for i in range(20)], None, 0
    for piece in pieces:
        num += piece
        tokens = reuse.CountedTokens(range(num))
        keys, cursor = new_keys(tokens, 4, "a", cursor)
        reads += tokens.reads
    assert reads <= num
    cursor = None
    for end in range(0, num // 4 + 1, 3):
        cursor = grown.insert(list(range(num)), blocks[:end], "a", cursor)
    whole.insert(list(range(num)), [reuse.KVCacheBlock(i) for i in range(end)], "a")
    assert [b.block_id for b in grown.match(range(num), "a")] == [b.block_id for b in whole.match(range(num), "a")]
    assert list(grown.cached_block_hash_to_block) == block_keys(range(num), 4, "a")[:end]
    with pytest.raises(ValueError, match="do not fill"):
        grown.insert([1, 2, 3], blocks[:1])
