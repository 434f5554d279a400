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


@dataclass(frozen=True)
class Usage:
    """What a request took, told once, when all its continuations have ended.

    prompt_tokens: counted once, whatever n is. completion_tokens: of all continuations, those of best_of that are not
    returned too. cached_tokens: prompt tokens found in the prefix cache. Preemption and recomputation change nothing.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass
class RequestOutput:
    """A prompt with its n continuations.

    prompt_logprobs: one dict per prompt token (None for the first, which nothing predicts), if asked for.
    num_cached_tokens: prompt tokens whose K/V was found in the prefix cache, or held by a branch. error: why it
        failed, if it did. usage: None until it has finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    usage: Usage | None = None


@dataclass
class StreamDelta:
    """What one step added to continuation `index`: its new text and tokens, and why it ended if it did.

    stop_reason: as in CompletionOutput. usage: in the very last delta of the request only.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    usage: Usage | None = None
    stop_reason: int | str | None = None
