"""The engine's two ways to a token: the same text, and as many tokens through the model as the formula says."""

import pytest

from kvlab.lab.scenes import decode
from kvlab.primer import num_projected


def test_the_engine_is_available_where_its_libraries_are(monkeypatch):
    monkeypatch.setattr(decode, "find_spec", lambda name: object())
    assert decode.available()
    monkeypatch.setattr(decode, "find_spec", lambda name: None if name == "torch" else object())
    assert not decode.available()


def test_both_ways_make_the_same_tokens_and_threads_are_put_back():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    meter = decode.Meter()
    sent = meter.tokens(7, 5)
    assert sent == (num_projected(7, 5, False), num_projected(7, 5, True), True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # not the one that it measures with
    try:
        found = meter.times((8, 16), repeats=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert list(found) == [8, 16] and all(anew > 0 for anew, _ in found.values())
