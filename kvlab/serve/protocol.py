"""The bodies of requests: OpenAI's fields, vLLM's extras (extra_body), and the limits that keep one client from all.

    JSON -> CompletionBody | ChatBody (types, limits) -> sampling_params() -> SamplingParams (ranges)

What is not a field here: kvlab.serve.fields.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvlab.sampling_params import SamplingParams
from kvlab.serve.fields import FieldError, without_harmless

# A limit is what one request may ask of a server that others use too; the engine itself has none of these.
MAX_CHOICES = 128  # n and best_of, OpenAI's limit
MAX_SEQUENCES = 1024  # prompts times best_of
MAX_LOGPROBS = 20  # vLLM's --max-logprobs and OpenAI's top_logprobs
MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
MAX_BIASES = 1024

Count = Annotated[int, Field(ge=1, le=MAX_CHOICES)]
TokenIds = list[int]


class Body(BaseModel):
    """What completions and chats have in common. Unsupported fields: FieldError, unless they change nothing."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    model: str | None = None
    n: Count = 1
    temperature: float = 1.0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    max_tokens: int | None = Field(None, ge=0)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: "StreamOptions | None" = None
    # vLLM's
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)  # beyond, logits overflow, and a step must be made twice
    stop_token_ids: list[int] | None = Field(None, max_length=MAX_BIASES)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: str | None = Field(None, min_length=1, max_length=1000)
    request_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_is_harmless(cls, body: Any) -> Any:
        return without_harmless(body, set(cls.model_fields)) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in stops):
            raise FieldError("stop", f"stop: use at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters")
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options without stream: set stream to true, or leave it out")
        asked = self.asked_max_tokens
        self.sampling_params(self.default_max_tokens if asked is None else asked)  # its checks name field and remedy
        return self

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """The engine's parameters. ValueError names a value out of range."""
        try:
            bias = {int(token): value for token, value in (self.logit_bias or {}).items()}
        except ValueError:
            raise FieldError("logit_bias", "logit_bias: the keys are token ids, whole numbers in quotes") from None
        return SamplingParams(
            n=self.n, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p,
            presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty, logit_bias=bias or None, seed=self.seed, stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()), max_tokens=max_tokens, min_tokens=self.min_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output, ignore_eos=self.ignore_eos,
            **self._more_params(),
        )  # fmt: skip

    def _more_params(self) -> dict[str, Any]:
        return {}

    @property
    def asked_max_tokens(self) -> int | None:
        """How many outputs the client asks for; None where it does not say."""
        return self.max_tokens

    @property
    def default_max_tokens(self) -> int | None:
        """How many there are at most where it does not say; None is as many as the context allows."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """vLLM's: every chunk brings the counts so far."""
        return self.include_usage and self.stream_options.continuous_usage_stats


class StreamOptions(BaseModel):
    """include_usage: one more chunk at the end, without choices, has the counts."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool = False
    continuous_usage_stats: bool = False


def _prompt_form(prompt: Any) -> Any:
    items = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], list):
        items = [item for ids in prompt for item in (ids if isinstance(ids, list) else [None])]
        is_one_kind = all(type(item) is int for item in items)
    else:
        is_one_kind = all(type(item) is str for item in items) or (
            isinstance(prompt, list) and all(type(item) is int for item in items)
        )
    if not is_one_kind:
        raise FieldError("prompt", "prompt: give a string, a list of token ids, or a list of either")
    return prompt


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: Annotated[str | list[str] | TokenIds | list[TokenIds], BeforeValidator(_prompt_form)]
    best_of: Count | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)  # vLLM's

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """One or more, in the form in which they came."""
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return [self.prompt] if is_one else self.prompt

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if not self.prompts or any(len(prompt) == 0 for prompt in self.prompts):
            raise FieldError("prompt", "the prompt is empty; give at least one token of text")
        if len(self.prompts) * (self.best_of or self.n) > MAX_SEQUENCES:
            raise FieldError("prompt", f"{len(self.prompts)} prompts with {self.best_of or self.n} continuations each: "
                             f"ask for at most {MAX_SEQUENCES} in all")  # fmt: skip
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "max_tokens is 0: ask for at least 1, or for the prompt alone with echo")
        if self.stream:
            for name in ("best_of", "prompt_logprobs"):
                if getattr(self, name) is not None and (name, self.best_of) != ("best_of", self.n):
                    raise FieldError(name, f"{name} is known at the end only: do without it, or without stream")
            if self.echo and (self.logprobs is not None or self.max_tokens == 0):
                raise FieldError("echo", "echo with logprobs or max_tokens 0 has one answer: do without stream")
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        return 1 if self.max_tokens == 0 else self.max_tokens  # a step makes one; the answer leaves it out

    @property
    def default_max_tokens(self) -> int:
        return 16  # OpenAI's

    def _more_params(self) -> dict[str, Any]:
        of_prompt = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            of_prompt = max(self.logprobs, of_prompt or 0)
        return {"best_of": self.best_of, "logprobs": self.logprobs, "prompt_logprobs": of_prompt}


class TextPart(BaseModel):
    """A part of a message's content; other types than text are refused."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    tool_calls: list | None = Field(None, max_length=0)

    def plain(self) -> dict[str, str]:
        """As chat templates want it. OpenAI's newer name for system is developer."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs without logprobs: set logprobs to true")
        return self

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _more_params(self) -> dict[str, Any]:
        return {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
