"""Our side of the child process: start it, ask it, give it up when it takes too long.

    Child(exercise, lab) --.load(definitions)--> .new(init) --> .do(op) --> Value | Raised      Lost: it is gone

What the student prints is drained all the time, and the first 20 KB are kept. A child is given up after
`exercise.seconds` without an answer, and all its processes with it.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.grade.exercise import CHECKOUT, Exercise, LabSpec, Op
from kvlab.grade.text import Text, say

KEEP = 20_000
LARGEST_REPLY = 8 << 20
PRELOAD = ("kvlab.arena", "kvlab.blocks", "kvlab.manager", "kvlab.prefix", "kvlab.sizing", "kvlab.schedule",
           "kvlab.contiguous", "kvlab.sim")  # fmt: skip


class Value(NamedTuple):
    value: Any


class Raised(NamedTuple):
    """An exception in the child: class names from its own to `object`, its message, the student's line."""

    names: list[str]
    message: str
    where: str


class Lost(BaseException):
    """The child is gone: too slow, or ended by the student's code. A BaseException, so that nothing shrinks it."""

    def __init__(self, text: Text):
        super().__init__(str(text))
        self.text = text


@cache
def walls() -> tuple[str, ...]:
    """A command that gives the child its own process numbers and no network, where the system allows it."""
    command = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--net", "--kill-child")
    if not sys.platform.startswith("linux") or shutil.which("unshare") is None:
        return ()
    try:
        works = subprocess.run([*command, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        works = False
    return command if works else ()


class Child:
    """A process with the lab's driver in it. Use it in a `with`.

    uses_numpy: have it there before the fence goes up, which would not let it load.
    """

    def __init__(self, exercise: Exercise, lab: LabSpec, uses_numpy: bool = False):
        self.exercise = exercise
        self._end = time.monotonic() + 60 + exercise.all_seconds
        self.printed, self.num_dropped = b"", 0
        self._answered = True
        self._socket, theirs = socket.socketpair()
        earlier = lab.exercises[: lab.exercises.index(exercise)]  # a later exercise may hold this one's answer
        fallback = {name: ours for e in earlier for name, ours in e.ours.items()}
        settings = {
            "fd": theirs.fileno(),
            "memory_mib": exercise.memory_mib,
            "cpu_seconds": 120,
            "sys_path": [str(CHECKOUT)],
            "preload": [*PRELOAD, *sorted({t.split(":")[0] for t in (*exercise.ours.values(), *exercise.bars)})],
            "optional": ["numpy"] if uses_numpy else [],
            "gives_part": bool(exercise.part),
            "driver": exercise.driver,
            "driver_path": str(lab.driver_path) if lab.driver_path else None,
            "fallback": fallback,
            "barred": sorted({*exercise.ours.values(), *exercise.bars}),
            "closed_folders": [str(CHECKOUT / n) for n in ("kvlab", "kernels", "tests", "solutions", "labs", "work")],
            "defines": list(exercise.defines),
        }
        read_end, write_end = os.pipe()
        environment = {"PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "HOME": "/nonexistent",
                       "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip
        self._process = subprocess.Popen(
            [*walls(), sys.executable, "-I", "-u", str(Path(__file__).with_name("worker.py")), json.dumps(settings)],
            stdin=subprocess.DEVNULL, stdout=write_end, stderr=write_end, pass_fds=[theirs.fileno()],
            env=environment, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        os.close(write_end)
        self._drain = threading.Thread(target=self._keep_draining, args=(read_end,), daemon=True)
        self._drain.start()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Is it there, and has it answered everything?"""
        return self._answered and self._process.poll() is None

    def close(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self._process.wait()
        self._socket.close()
        self._drain.join(1)

    @property
    def output(self) -> str:
        """What the student's code printed."""
        text = self.printed.decode("utf-8", "replace")
        return text + (f"\n... and {self.num_dropped} bytes more" if self.num_dropped else "")

    def load(self, source: Sequence[tuple[str, str]]) -> Value | Raised:
        # Starting Python and importing kvlab takes a while on a busy machine, and is not the student's time.
        answer = self._ask({"load": list(source)}, say("your definitions"), 60 + self.exercise.seconds)
        self._end = time.monotonic() + self.exercise.all_seconds
        return answer

    def new(self, init: Sequence[Any]) -> Value | Raised:
        return self._ask({"new": encode(init)}, say("{call}", call=self.exercise.describe_init(tuple(init))))

    def do(self, op: Op) -> Value | Raised:
        return self._ask({"op": [op[0], *encode(op[1:])]}, say("{call}", call=self.exercise.describe(op)))

    def _ask(self, request: dict, what: Text, seconds: float | None = None) -> Value | Raised:
        seconds = seconds or self.exercise.seconds
        if time.monotonic() > self._end:
            raise Lost(say("the whole check took more than {seconds:g} seconds: some operation is far too slow",
                           seconds=self.exercise.all_seconds))  # fmt: skip
        deadline = time.monotonic() + seconds
        self._answered = False
        data = json.dumps(request).encode()
        try:
            self._socket.sendall(len(data).to_bytes(4, "big") + data)
            length = int.from_bytes(self._receive(4, deadline, what, seconds), "big")
            if length > LARGEST_REPLY:
                raise Lost(say("{what} gave {mib} MiB of data back: far more than is asked for", what=what,
                               mib=length >> 20))  # fmt: skip
            reply = json.loads(self._receive(length, deadline, what, seconds))
            self._answered = True
            return Value(decode(reply["value"])) if "value" in reply else Raised(
                [str(name) for name in reply["raised"]], str(reply["message"]), str(reply["where"])
            )  # fmt: skip
        except (BrokenPipeError, ConnectionError):
            raise self._ended(what) from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Lost(say("{what}: your code has disturbed the grader's connection", what=what)) from None

    def _receive(self, n: int, deadline: float, what: Text, seconds: float) -> bytes:
        data = bytearray()
        while len(data) < n:
            if not select.select([self._socket], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise Lost(say("{what} had not ended after {seconds:g} seconds: is there a loop that never ends?",
                               what=what, seconds=seconds))  # fmt: skip
            part = self._socket.recv(min(n - len(data), 1 << 16))
            if not part:
                raise self._ended(what)
            data += part
        return bytes(data)

    def _ended(self, what: Text) -> Lost:
        code = self._process.wait()
        self._drain.join(1)
        if code == -signal.SIGXCPU or code == 128 + signal.SIGXCPU:
            return Lost(say("{what} used up its computing time: is there a loop that never ends?", what=what))
        return Lost(say("{what}: your code ended the Python process (exit code {code})", what=what, code=code))

    def _keep_draining(self, descriptor: int) -> None:
        while data := os.read(descriptor, 1 << 20):
            kept = data[: max(0, KEEP - len(self.printed))]
            self.printed += kept
            self.num_dropped += len(data) - len(kept)
        os.close(descriptor)


def encode(value: Any) -> Any:
    """Plain values to JSON, as worker.py decodes them."""
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, set | frozenset):
        return {"set": [encode(item) for item in sorted(value, key=repr)]}
    if isinstance(value, dict):
        return {"dict": [[encode(k), encode(v)] for k, v in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    return value


def decode(value: Any) -> Any:
    """JSON from worker.py to plain values. Lists and tuples are alike: lists."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        ((kind, items),) = value.items()
        if kind == "set":
            return {_hashable(decode(item)) for item in items}
        if kind == "bytes":
            return bytes.fromhex(items)
        return {_hashable(decode(k)): decode(v) for k, v in items}
    return value


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
