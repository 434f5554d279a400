"""For the benchmarks of the server: `kvlab serve` as a process of its own, and its metrics."""

import os
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[1]


def where() -> dict:
    """What a result needs beside its figures: command, processor, versions, and how busy the machine was."""
    from offline import processor, versions  # imports torch, so not before the measurement

    found = versions() | {name: metadata.version(name) for name in ("uvicorn", "fastapi", "openai")}
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    command = " ".join(["benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]])
    return {"command": command, "processor": processor(), "versions": found, "load_average": load}


class ServerProcess:
    """`kvlab serve` on a free port, in a with statement, which ends it with SIGTERM. exit_code: known after that."""

    def __init__(self, *flags: str, threads: int = 1):
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        self.child = subprocess.Popen([sys.executable, "-m", "kvlab", "serve", "--port", "0", *flags], env=env,
                                      stderr=subprocess.PIPE, text=True)  # fmt: skip
        self.base, self.exit_code = "", None
        for line in self.child.stderr:
            if "http://" in line:
                self.base = line[line.index("http://") :].split()[0]
                break
        if not self.base:
            raise RuntimeError(f"the server has not started: exit code {self.child.wait()}")

    def metrics(self) -> dict[str, float]:
        """Each sample without its labels; of several with one name the sum."""
        found: dict[str, float] = {}
        for line in httpx.get(f"{self.base}/metrics", timeout=60).text.splitlines():
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def wait_until_idle(self, seconds: float = 60) -> dict[str, float]:
        """The metrics once nothing runs and nothing waits; after `seconds` as they are."""
        deadline = time.monotonic() + seconds
        while True:
            found = self.metrics()
            busy = found["vllm:num_requests_running"] + found["vllm:num_requests_waiting"]
            if not busy or time.monotonic() > deadline:
                return found
            time.sleep(0.1)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *error) -> None:
        self.child.send_signal(signal.SIGTERM)
        try:
            self.exit_code = self.child.wait(120)
        except subprocess.TimeoutExpired:
            self.child.kill()
            raise
        finally:
            self.child.stderr.close()
