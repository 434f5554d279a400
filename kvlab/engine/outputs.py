"""What users get back. Names are vLLM's."""

from dataclasses import dataclass, field

from kvlab.engine.logits import Logprob


@dataclass
class CompletionOutput:
    """One continuation.

    finish_reason: "stop", "length", "abort" or "error". stop_reason: the stop token id or stop string that ended it;
    None for end-of-sequence. The text leaves it out unless include_stop_str_in_output; token_ids are all there.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # one dict per token, the token itself first
    cumulative_logprob: float = 0.0  # summed over token_ids, where log-probabilities (or best_of) were asked for


@dataclass
class RequestOutput:
    """A prompt with its n continuations.

    prompt_logprobs: one dict per prompt token (None for the first, which nothing predicts), if asked for.
    num_cached_tokens: prompt tokens whose K/V was found in the prefix cache. error: why it failed, if it did.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass
class StreamDelta:
    """What one step added to continuation `index`: its new text and tokens, and why it ended if it did."""

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
