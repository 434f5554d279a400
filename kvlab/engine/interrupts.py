"""Ctrl-C between steps, never in their midst.

A step moves blocks from list to list; cut off half way, the lists would disagree for ever. So an interrupt waits
for the end of the step, which is short, and only then stops the call that made it.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold SIGINT back until the block is left. (Other threads than the main one never get it.)"""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught = []
    signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])
