"""What a request may ask of the sampler, checked when it is made; and the one source of randomness.

Names and defaults are vLLM's. Plain Python: the scheduler and the labs use this without torch.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    n: independent continuations of one prompt; they share its blocks by fork (L33 2.4).
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: in (0, 1], 1 is off.
    seed: child i of n draws from seed + i; None lets the engine give each request its own.
    stop: strings that end a continuation as soon as its text contains one.
    stop_token_ids: tokens that end a continuation besides the model's end-of-sequence tokens.
    include_stop_str_in_output: show what ended it, too.
    min_tokens: end-of-sequence and stop tokens cannot be drawn before this many outputs.
    max_tokens: outputs at most; None is as many as the context allows.
    ignore_eos: go on past end-of-sequence (stop_token_ids still stop).
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), Iterable):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        whole = lambda value: isinstance(value, int) and not isinstance(value, bool)  # noqa: E731
        real = lambda value: whole(value) or isinstance(value, float)  # noqa: E731
        checks = [
            ("n", whole(self.n) and self.n >= 1, "ask for n >= 1 continuations"),
            ("temperature", real(self.temperature) and 0 <= self.temperature < float("inf"),
             "use 0 for greedy decoding or a positive number"),
            ("top_k", whole(self.top_k) and self.top_k >= -1, "use k >= 1, or 0 to switch it off"),
            ("top_p", real(self.top_p) and 0 < self.top_p <= 1, "use a share in (0, 1]; 1 switches it off"),
            ("seed", self.seed is None or whole(self.seed), "use a whole number or None"),
            ("stop", isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
             "give non-empty strings"),
            ("stop_token_ids", isinstance(self.stop_token_ids, tuple) and all(whole(t) for t in self.stop_token_ids),
             "give whole numbers (token ids)"),
            ("min_tokens", whole(self.min_tokens) and self.min_tokens >= 0, "use a whole number >= 0"),
            ("max_tokens", self.max_tokens is None or (whole(self.max_tokens) and self.max_tokens >= 1),
             "ask for at least 1 token, or None for as many as fit"),
            ("min_tokens", self.max_tokens is None or self.min_tokens <= self.max_tokens,
             f"it must not exceed max_tokens ({self.max_tokens})"),
        ]  # fmt: skip
        for name, ok, remedy in checks:
            if not ok:
                raise ValueError(f"{name} is {getattr(self, name)!r}: {remedy}")

    def child(self, index: int) -> "SamplingParams":
        """The parameters of continuation `index` of this request: n = 1, seed + index."""
        return replace(self, n=1, seed=None if self.seed is None else self.seed + index)


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that output token `position` of a request with `seed` is drawn with.

    A pure function of its arguments: preemption, batching, forks and devices cannot shift it, because
    there is no generator whose state could be lost, restored or advanced in another order.
    """
    data = struct.pack("<QQ", seed % 2**64, position)
    return (int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53
