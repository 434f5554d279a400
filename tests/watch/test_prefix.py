"""The view `prefix`, tree and chain: its surprises in the engine's numbers, and whose index is seen."""

from itertools import takewhile

import pytest

from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.prefix import HashChainIndex, RadixTreeIndex
from kvlab.sampling_params import SamplingParams
from kvlab.schedule.request import Request
from kvlab.watch import probe, views
from kvlab.watch.view import states_of

SCENARIOS = ("first_or_last", "time_first", "time_last", "split", "evict")


def rows(player, step=None):
    return player.states[player.question.reveal if step is None else step].rows


def chosen(player):
    right, why = player.answer()
    return player.ask()[1][right], why


@pytest.mark.parametrize("seed", range(4))
def test_the_first_word_changed_finds_nothing_the_last_all_but_a_block(seed):
    player = views.prefix("first_or_last", seed=seed)
    assert [rows(player)[name].found for name in "ABC"] == [0, 0, 12]
    assert chosen(player)[0] == "B 0, C 12"
    last = player.states[-1]
    assert last.rows["D"].words == last.rows["A"].words and last.rows["D"].found == 12  # the last token is computed
    assert last.rows["D"].names[-1] == "" and last.rows["A"].names[-1] != ""
    a, b = (set(last.rows[name].names) for name in "AB")
    assert len(a) == len(b) == 4 and not a & b  # three of their four blocks hold the same words


@pytest.mark.parametrize(("scenario", "found"), [("time_first", 0), ("time_last", 4)])
@pytest.mark.parametrize("seed", range(4))
def test_what_stands_before_the_time_is_found_and_behind_the_question_that_is_nearly_all(scenario, found, seed):
    player = views.prefix(scenario, seed=seed)
    assert rows(player)["B"].found == found and chosen(player)[0] == str(found)
    assert rows(player, -1)["D"].found == 12


@pytest.mark.parametrize("seed", range(6))
def test_small_blocks_find_to_the_token_large_ones_full_blocks(seed):
    player = views.prefix("split", seed=seed)
    at = 5 + seed % 3
    assert (rows(player)["B"].found_in_tree, rows(player)["B"].found) == (at, 4)
    assert chosen(player)[0] == f"tree {at}, chain 4" and "8 places" in chosen(player)[1]
    assert [(edge.depth, len(edge.places)) for edge in player.states[player.question.reveal].edges] == [
        (0, at), (at, 8 - at), (at, 8 - at)]  # fmt: skip
    c, d = rows(player, -1)["C"], rows(player, -1)["D"]
    assert (c.found_in_tree, c.found, d.found_in_tree, d.found) == (3, 0, 7, 4)


@pytest.mark.parametrize("seed", range(4))
def test_who_ended_first_is_given_up_first_from_its_end(seed):
    player = views.prefix("evict", seed=seed)
    full, now = (player.states[step] for step in (player.question.step, player.question.reveal))
    assert len(full.names) == 8 and len(full.books.queue) == 4
    assert now.evicted == ((4, 3, 8), (8, 7, 4))[seed % 2] == full.books.queue[:3]
    assert chosen(player)[0] == ("3, 4 and 8", "4, 7 and 8")[seed % 2] and len(player.ask()[1]) == 4
    assert {1, 2, 5, 6} <= set(now.names)  # the oldest ones are B's as well
    assert ">gone<" in player.svg(player.question.reveal) and ">gone<" not in player.svg()
    assert rows(player, -1)["A"].found == 8  # and it was 12 before D came


def test_what_differs_is_bold_before_it_is_asked_and_what_is_found_has_a_bar():
    def bars(player, step):
        return player.svg(step).count('height="5" fill="#111111"')

    player = views.prefix("first_or_last")
    b, c = (player.states[1].rows[name].words for name in "BC")
    assert f'font-weight="700">{b[0]}<' in player.svg() and f'font-weight="700">{c[-1]}<' in player.svg()
    assert f'font-weight="700">{b[1]}<' not in player.svg()
    assert [bars(player, step) for step in range(6)] == [0, 0, 0, 0, 1 + 3, 2 + 3]  # rows, and places in the tree


def test_edges_part_where_texts_do_and_an_only_child_is_joined():
    def shape(player, step):
        return [(edge.depth, [place.block_id for place in edge.places]) for edge in player.states[step].edges]

    player = views.prefix("first_or_last")
    assert shape(player, 2) == [(0, [1, 2, 3, 4])]
    assert shape(player, 4) == [(0, [1, 2, 3]), (3, [4]), (3, [9]), (0, [5, 6, 7, 8])]
    assert shape(views.prefix("evict"), 7)[0] == (0, [1, 2, 5, 6])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_tree_and_chain_are_each_others_oracle(scenario):
    for seed in range(3):
        last = views.prefix(scenario, seed=seed).states[-1]
        for name, row in last.rows.items():
            assert not last.differs(name) and (scenario == "split" or row.found_in_tree == row.found)
        if scenario != "split":
            assert {place.block_id for edge in last.edges for place in edge.places} == set(last.names)
        assert not last.books.wrong


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_state_is_a_pure_function_of_the_events(scenario, tmp_path):
    view = views.show("prefix").view
    events = list(view.scenarios[scenario].play(1, Parts()))
    assert states_of(view, events) == states_of(view, events) == views.prefix(scenario, seed=1).states
    recorder = Recorder()
    for event in events:
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "run.jsonl")
    assert views.prefix(trace=tmp_path / "run.jsonl").frames == views.prefix(scenario, seed=1).frames


# ---- a student's index


class Forgetful(HashChainIndex):
    """Never compares: whatever was published first is found."""

    def match(self, tokens, salt=None):
        return list(self.cached_block_hash_to_block.values())[: len(tokens) // self.block_size]


class Short(RadixTreeIndex):
    """A tree whose walk ends a block too early."""

    def match(self, tokens, salt=None):
        return super().match(tokens, salt)[:-1]


def test_a_chain_that_finds_too_much_is_ringed():
    player = views.prefix(parts=Parts(prefix_index=Forgetful))
    after_b = player.states[3]
    assert (after_b.rows["B"].found_in_tree, after_b.rows["B"].found) == (0, 12) and after_b.differs("B")
    assert "one of the two is wrong" in player.frames[3].say
    ring = 'height="70" fill="none" stroke="#111111" stroke-width="5"'
    assert [ring in player.svg(step) for step in (2, 3)] == [False, True]
    assert player.answer() == (0, "Tree and chain disagree, so one of them is wrong: B 0 and 12.")  # it did B 12, C 12
    assert "parts=parts" in player.line and "B 0 and 12" in views.prefix("time_first", parts=Parts(
        prefix_index=Forgetful)).answer()[1]  # fmt: skip


def test_a_tree_takes_the_left_side_and_is_compared_with_our_chain():
    player = views.prefix(parts=Parts(prefix_index=Short))
    c = player.states[4].rows["C"]
    assert (c.found_in_tree, c.found) == (8, 12) and player.states[4].differs("C")
    assert views.prefix(parts=Parts(prefix_index=RadixTreeIndex)).frames == views.prefix().frames


class WholeTexts(HashChainIndex):
    """Names are no keys but the prefixes themselves."""

    def _known(self, tokens, salt, number):
        return [(salt, *tokens[: (i + 1) * self.block_size]) for i in range(number)]

    def match(self, tokens, salt=None):
        found = map(self.cached_block_hash_to_block.get, self._known(tokens, salt, len(tokens) // self.block_size))
        return list(takewhile(lambda block: block is not None, found))

    def insert(self, tokens, blocks, salt=None, cursor=None):
        for block, name in zip(blocks, self._known(tokens, salt, len(blocks)), strict=True):
            if block.block_hash is None and name not in self.cached_block_hash_to_block:
                block.block_hash, self.cached_block_hash_to_block[name] = name, block


def test_names_of_any_kind_are_told_apart():
    ours, theirs = views.prefix("evict"), views.prefix("evict", parts=Parts(prefix_index=WholeTexts))
    assert [frame.say for frame in ours.frames] == [frame.say for frame in theirs.frames]
    for one, other in zip(ours.states, theirs.states, strict=True):
        for name, row in one.rows.items():
            for i in range(len(row.block_ids)):
                assert one.finds(name, i) == other.finds(name, i)


class Unwritten(HashChainIndex):
    def insert(self, tokens, blocks, salt=None, cursor=None):
        raise NotImplementedError("Lab 05, exercise 3: insert")


def test_an_index_that_raises_ends_the_play_with_its_words():
    player = views.prefix(parts=Parts(prefix_index=Unwritten))
    assert len(player.frames) == 3 and "not written yet" in player.frames[-1].say


# ---- the engine


def run(index=None, block_size=4, **options):
    recorder = Recorder()
    config = EngineConfig(num_gpu_blocks_override=40, block_size=block_size, **options)
    engine = Parts(prefix_index=index).make_engine(config, recorder=recorder)
    for name in "ABCDE":
        engine.add_request(Request(name, [*range(20, 32), ord(name), 5, 6, 7, 8], SamplingParams(max_tokens=3)))
        while engine.has_unfinished_requests():
            engine.step()
            probe(engine.scheduler.manager, recorder)
    return recorder


@pytest.mark.parametrize("index", [None, RadixTreeIndex])
def test_a_live_engine_can_be_watched(index):
    player = views.prefix(trace=run(index))
    last = player.states[-1]
    assert [row.found for row in last.rows.values()] == [0, 12, 12, 12, 12]
    assert "12/17" in player.svg(len(player.frames) - 1)
    assert "B starts and finds 12 of its 17 tokens in the cache." in [frame.say for frame in player.frames]
    assert ("keeps no tree" in player.svg(len(player.frames) - 1)) == (index is None) == (not last.edges)
    for frame in player.frames:
        assert 0 < len(frame.say) <= 140


def test_what_is_published_in_the_step_in_which_a_request_ends_is_found_as_well():
    recorder = Recorder()
    engine = Parts().make_engine(EngineConfig(num_gpu_blocks_override=40, block_size=4), recorder=recorder)
    engine.add_request(Request("A", list(range(9)), SamplingParams(max_tokens=4)))
    while engine.has_unfinished_requests():
        engine.step()
        probe(engine.scheduler.manager, recorder)
    last = views.prefix(trace=recorder).states[-1]
    assert last.books.tables == {} and last.rows["A"].block_ids == (1, 2, 3)
    assert [last.finds("A", i) for i in range(3)] == [True, True, True] == [bool(n) for n in last.rows["A"].names]


def test_a_run_without_prefix_caching_has_nothing_to_show():
    with pytest.raises(ValueError, match="index, names"):
        views.prefix(trace=run(enable_prefix_caching=False))
