"""Ctrl-C waits for the end of a step."""

import signal

import pytest

from kvlab.engine.interrupts import interrupts_wait


def test_an_interrupt_is_delivered_after_the_block_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            done.append("the block goes on")
        done.append("never")
    assert done == ["the block goes on"] and signal.getsignal(signal.SIGINT) is before
