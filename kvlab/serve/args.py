"""The server's own settings, checked when made. The engine's are kvlab.config's; `kvlab serve` has a flag for each."""

from dataclasses import dataclass

MIB = 2**20


@dataclass(kw_only=True)
class ServerArgs:
    """Names are vLLM's where it has one.

    host, port: where to listen; 127.0.0.1 is this machine only, port 0 any free one.
    served_model_name: the names that requests may use; the first is the one in answers and metrics.
    api_key: requests to /v1 and /debug must bring one of these; none is needed if there are none.
    max_waiting: prompts that may wait for a place in the batch before others get 429; None is no limit.
    max_body_bytes: of a request. drain_timeout: seconds that requests in flight have after SIGTERM.
    uvicorn_log_level: critical, error, warning, info, debug or trace; info logs each request.
    """

    served_model_name: tuple[str, ...] = ("tiny",)
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    max_waiting: int | None = None
    max_body_bytes: int = 4 * MIB
    drain_timeout: float = 60.0
    uvicorn_log_level: str = "warning"

    def __post_init__(self):
        self.served_model_name, self.api_key = tuple(self.served_model_name), tuple(self.api_key)
        levels = ("critical", "error", "warning", "info", "debug", "trace")
        checks = [
            ("served_model_name", self.served_model_name and all(self.served_model_name), "give at least one name"),
            ("port", 0 <= self.port < 2**16, "use a port from 1 to 65535, or 0 for any free one"),
            ("max_waiting", self.max_waiting is None or self.max_waiting >= 0, "use a whole number >= 0"),
            ("max_body_bytes", self.max_body_bytes >= 1, "use a number of bytes, such as 4194304"),
            ("drain_timeout", 0 <= self.drain_timeout < float("inf"), "use seconds >= 0"),
            ("uvicorn_log_level", self.uvicorn_log_level in levels, f"use one of {', '.join(levels)}"),
        ]
        for name, ok, remedy in checks:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}: {remedy}")
        if not all(self.api_key):
            raise ValueError("an api_key is empty: give a secret, or no key at all")
