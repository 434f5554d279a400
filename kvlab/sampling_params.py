"""What a request may ask of the sampler, checked when it is made; and the one source of randomness.

Names and defaults are vLLM's. Plain Python: the scheduler and the labs use this without torch.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from numbers import Integral, Real

# Numbers that the sampler works on together, with 64 bytes for each at the most: 27 rows of 152,064 words. Further rows
# take their turn. It stands here because who plans a GPU's memory without torch must know it too.
SAMPLED_AT_ONCE = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose the next token, and when to stop.

    n: independent continuations of one prompt; they share its blocks by fork (L33 2.4).
    best_of: draw so many, return the n whose tokens have the highest summed log-probability.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: in (0, 1], 1 is off.
    min_p: drop tokens less likely than min_p times the likeliest; 0 is off.
    repetition_penalty: > 1 makes tokens of the prompt and the output less likely, by factor; 1 is off.
    presence_penalty, frequency_penalty: taken from the logit of a token that the output holds: once, and for
        each time it does; 0 is off, from -2 to 2.
    logit_bias: added to the logits of some tokens, {token id: -100 to 100}.
    logprobs: also return the log-probabilities of each output token and of the k likeliest beside it.
    prompt_logprobs: the same for the tokens of the prompt. Both are of the model's own distribution, before
        temperature, penalties and filters.
    seed: child i of n draws from seed + i; None lets the engine give each request its own.
    stop: strings that end a continuation as soon as its text contains one.
    stop_token_ids: tokens that end a continuation besides the model's end-of-sequence tokens.
    include_stop_str_in_output: show what ended it, too.
    min_tokens: end-of-sequence and stop tokens cannot be drawn before this many outputs.
    max_tokens: outputs at most; None is as many as the context allows.
    ignore_eos: go on past end-of-sequence (stop_token_ids still stop).
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False

    def __post_init__(self):
        if isinstance(self.stop, str | None):
            object.__setattr__(self, "stop", () if self.stop is None else (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if isinstance(getattr(self, name), Iterable):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        whole = lambda value: isinstance(value, Integral) and not isinstance(value, bool)  # noqa: E731
        real = lambda value: isinstance(value, Real) and not isinstance(value, bool)  # noqa: E731
        checks = [
            ("n", whole(self.n) and self.n >= 1, "ask for n >= 1 continuations"),
            ("best_of", self.best_of is None or (whole(self.best_of) and self.best_of >= self.n),
             f"draw at least as many as are returned (n = {self.n})"),
            ("temperature", real(self.temperature) and 0 <= self.temperature < float("inf"),
             "use 0 for greedy decoding or a positive number"),
            ("top_k", whole(self.top_k) and self.top_k >= -1, "use k >= 1, or 0 to switch it off"),
            ("top_p", real(self.top_p) and 0 < self.top_p <= 1, "use a share in (0, 1]; 1 switches it off"),
            ("min_p", real(self.min_p) and 0 <= self.min_p <= 1, "use a share in [0, 1]; 0 switches it off"),
            ("repetition_penalty", real(self.repetition_penalty) and 0 < self.repetition_penalty < float("inf"),
             "use a positive number; 1 switches it off"),
            ("presence_penalty", real(self.presence_penalty) and -2 <= self.presence_penalty <= 2,
             "use a number from -2 to 2; 0 switches it off"),
            ("frequency_penalty", real(self.frequency_penalty) and -2 <= self.frequency_penalty <= 2,
             "use a number from -2 to 2; 0 switches it off"),
            ("logit_bias", self.logit_bias is None or (isinstance(self.logit_bias, dict) and all(
                whole(t) and t >= 0 and real(b) and -100 <= b <= 100 for t, b in self.logit_bias.items())),
             "give {token id: bias from -100 to 100}"),
            ("logprobs", self.logprobs is None or (whole(self.logprobs) and self.logprobs >= 0),
             "ask for k >= 0 alternatives, or None"),
            ("prompt_logprobs", self.prompt_logprobs is None or (whole(self.prompt_logprobs)
             and self.prompt_logprobs >= 0), "ask for k >= 0 alternatives, or None"),
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

    @property
    def num_sequences(self) -> int:
        """How many continuations are generated, whether or not all are returned."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to report beside each output token; None if no log-probability is needed."""
        return 0 if self.logprobs is None and self.num_sequences > self.n else self.logprobs

    @property
    def has_penalties(self) -> bool:
        """True if a token's logit depends on the tokens before it, past what the model makes of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def child(self, index: int) -> "SamplingParams":
        """The parameters of continuation `index` of this request: n = 1, seed + index."""
        return replace(self, n=1, best_of=None, seed=None if self.seed is None else self.seed + index)


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """How to search for the likeliest continuations (束搜索, L33 2.4). Names and defaults are vLLM's and transformers'.

    beam_width: continuations that are followed, and returned. max_tokens: outputs at most.
    length_penalty: a finished continuation scores its summed log-probability / length ** length_penalty; above 0
        favours longer ones. early_stopping: stop as soon as `beam_width` have finished, though a better may come.
    ignore_eos: go on past end-of-sequence.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    ignore_eos: bool = False

    def __post_init__(self):
        for name in ("beam_width", "max_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}: use a whole number >= 1")
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or isinstance(penalty, bool) or not abs(penalty) < float("inf"):
            raise ValueError(f"length_penalty is {penalty!r}: use a number; 0 ranks by log-probability alone")
        for name in ("early_stopping", "ignore_eos"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: use True or False")


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that output token `position` of a request with `seed` is drawn with.

    A pure function of its arguments: preemption, batching, forks and devices cannot shift it, because
    there is no generator whose state could be lost, restored or advanced in another order.
    """
    data = struct.pack("<QQ", seed % 2**64, position)
    return (int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53
