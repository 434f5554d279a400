"""The address explorer: neighbours in the text are not neighbours in memory, and a wrong entry reads another's word."""

import pytest
import torch

from kvlab.config import EngineConfig
from kvlab.events import Recorder
from kvlab.parts import Parts
from kvlab.sampling_params import SamplingParams
from kvlab.schedule.request import Request
from kvlab.watch import probe, views
from kvlab.watch.address import DIM, HEADS, ITEM, TEXT, VIEW


@pytest.mark.parametrize("seed", range(6))
def test_scattered_the_next_token_is_not_in_the_next_slot(seed):
    player = views.address("scattered", seed=seed)
    before, now = (player.states[step] for step in (player.question.step, player.question.reveal))
    assert (before.token, now.token) == (3, 4) and (before.slot, now.slot) in {(11, 16), (7, 12)}
    assert player.ask()[1][player.answer()[0]] == f"slot {now.slot}" and len(player.ask()[1]) == 4


@pytest.mark.parametrize("seed", range(6))
def test_wrong_an_edited_entry_reads_a_word_of_b(seed):
    player = views.address("wrong", seed=seed)
    sound, now = player.states[player.question.step - 1], player.states[player.question.reveal]
    assert sound.found() == ("A", TEXT["A"][5]) and now.found() == ("B", TEXT["B"][5])
    assert player.ask()[1][player.answer()[0]] == "a word of B"
    assert not any(state.books.wrong for state in player.states), "the manager's own books stay right"
    assert player.states[-1].found() == ("A", TEXT["A"][8]), "the other entries are sound"


def test_right_entries_read_the_readers_own_words():
    for state in views.address("scattered", seed=1).states:
        if state.token >= 0:
            assert state.found() == ("A", TEXT["A"][state.token])


def test_the_byte_on_the_picture_is_where_the_tensor_has_it():
    player = views.address("scattered")
    layer = torch.zeros(2, 7, 4, HEADS, DIM, dtype=torch.float16)
    assert layer.itemsize == ITEM
    for step, state in enumerate(player.states):
        if state.token >= 0:
            token = layer[0, state.slot // 4, state.slot % 4]
            assert f"bytes = {token.storage_offset() * ITEM}," in player.svg(step)


def test_a_saved_trace_and_a_live_engine_can_be_watched(tmp_path):
    recorder = Recorder()
    for event in VIEW.scenarios["wrong"].play(1, Parts()):
        recorder.step = event.step
        recorder.emit(*event[1:])
    recorder.save(tmp_path / "run.jsonl")
    assert views.address(trace=tmp_path / "run.jsonl").frames == views.address("wrong", seed=1).frames
    live = Recorder()
    engine = Parts().make_engine(EngineConfig(num_gpu_blocks_override=16, block_size=4), recorder=live)
    engine.add_request(Request("A", [1, 2, 3, 4, 5, 6], SamplingParams(max_tokens=4)))
    while engine.has_unfinished_requests():
        engine.step()
        probe(engine.scheduler.manager, live)
    assert any(len(state.table) == 2 for state in views.address(trace=live).states)
