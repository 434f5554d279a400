"""One sequence on its way through the engine, and the states it can be in (L33 3.2).

    WAITING --> RUNNING --> FINISHED_*          all_token_ids = prompt + outputs, the one list of what is known
                |    ^                          num_computed_tokens = how many of them have K/V
                v    |
        PREEMPTED / SWAPPED                     The last sampled token has no K/V yet, so while decoding
                                                num_computed_tokens == num_tokens - 1.

There is no other difference between prefill and decode: a step computes some of the tokens that have no K/V.
"""

from collections.abc import Sequence
from enum import Enum

from kvlab.sampling_params import SamplingParams


class RequestStatus(Enum):
    """Where a request is; the value of a finished one is the `finish_reason` that users see."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"  # K/V dropped: it will be computed again (L33 5.3)
    SWAPPED = "swapped"  # K/V waits in swap space (L33 5.2)
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH_CAPPED = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, value: str):
        # A plain attribute: it is asked for every token, and an enum's own `name` and `value` are slow.
        self.finish_reason = value if value in ("stop", "length", "abort", "error") else None

    @staticmethod
    def is_finished(status: "RequestStatus") -> bool:
        return status.finish_reason is not None


class Request:
    """A prompt and what has been generated for it.

    request_id: unique among the requests in an engine. priority: smaller goes first.
    cache_salt: requests with different salts never share cached blocks.
    With sampling_params.n > 1 the request is one sequence until its prompt is computed; then it becomes
    child 0 and n - 1 children are forked from it.
    """

    def __init__(self, request_id: str, prompt_token_ids: Sequence[int], sampling_params: SamplingParams | None = None,
                 *, eos_token_ids: Sequence[int] = (), priority: int = 0, cache_salt: str | None = None):  # fmt: skip
        self.request_id = request_id
        self.sampling_params = sampling_params or SamplingParams()
        self.eos_token_ids = frozenset(eos_token_ids)
        own = self.sampling_params
        self.ender_ids = frozenset(own.stop_token_ids) | (frozenset() if own.ignore_eos else self.eos_token_ids)
        self.priority = priority
        self.cache_salt = cache_salt
        self.all_token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_computed_tokens = 0
        self.status = RequestStatus.WAITING
        self.stop_reason: int | None = None  # the stop token id, if one of stop_token_ids ended it
        self.error: str | None = None
        self.parent_id = request_id
        self.child_index = 0
        self.num_to_fork = self.sampling_params.num_sequences - 1  # children still to come
        self.group = None  # its BeamGroup, if it is a beam (kvlab.schedule.beam)
        self.held = None  # the HeldSequence that it goes on with, if it does (kvlab.schedule.held)
        self.num_logprobs = self.sampling_params.num_logprobs  # alternatives to report beside each output token
        self.prompt_logprobs: dict[int, object] = {}  # by position, filled by the runner
        self.seed = self.sampling_params.seed  # the scheduler gives one to a request that brings none
        self.arrival = 0  # position in the order of arrival, set by the scheduler
        self.max_num_tokens = 0  # prompt and outputs at most, set by the scheduler
        self.num_cached_tokens: int | None = None  # prompt tokens that had K/V at first admission: cached, or held
        self.num_preemptions = 0
        self.num_lost_tokens = 0  # tokens whose K/V the last preemption dropped, until they are computed again

    def check(self) -> None:
        """ValueError unless this is a new and well-formed request: what else would fail in the midst of a step."""
        name = f"request {self.request_id!r}"
        if self.status is not RequestStatus.WAITING:
            raise ValueError(f"{name}: it has run already ({self.status.value}); make a new Request for another run")
        if not self.all_token_ids:
            raise ValueError(f"{name}: the prompt is empty; give at least one token")
        for token in self.all_token_ids:
            if not isinstance(token, int) or not 0 <= token < 2**63:
                raise ValueError(f"{name}: {token!r} is not a token id; give whole numbers from 0 on")
        if not isinstance(self.priority, int):
            raise ValueError(f"{name}: priority is {self.priority!r}; use a whole number, smaller goes first")
        if not isinstance(self.cache_salt, str | None):
            raise ValueError(f"{name}: cache_salt is {self.cache_salt!r}; use a string, or None to share with all")
        if self.cache_salt and not self.cache_salt.isprintable():
            raise ValueError(f"{name}: cache_salt is {self.cache_salt!r}; use printable characters")

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def num_seats(self) -> int:
        """Seats that it needs to come in: children to come included, or its whole beam group."""
        return 1 + self.num_to_fork if self.group is None else self.group.width

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while log-probabilities of its prompt are missing: every prompt token must be computed then."""
        asked = self.child_index == 0 and self.sampling_params.prompt_logprobs is not None
        return asked and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.all_token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Its place in every queue: by priority, then arrival, then index among its siblings."""
        return (self.priority, self.arrival, self.child_index)

    def is_finished(self) -> bool:
        return self.status.finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        """ "stop", "length", "abort" or "error"; None while it is unfinished."""
        return self.status.finish_reason

    def make_child(self, index: int) -> "Request":
        """Continuation `index` of the same prompt, with nothing computed and nothing generated yet."""
        params = self.sampling_params.child(index)
        child = Request(f"{self.parent_id}#{index}", self.prompt_token_ids, params, eos_token_ids=self.eos_token_ids,
                        priority=self.priority, cache_salt=self.cache_salt)  # fmt: skip
        child.parent_id, child.child_index = self.parent_id, index
        child.seed = self.seed + index
        child.arrival, child.max_num_tokens = self.arrival, self.max_num_tokens
        child.num_cached_tokens = self.num_cached_tokens
        child.num_logprobs = self.num_logprobs
        child.group = self.group
        return child

    def append_output_token(self, token_id: int) -> bool:
        """Add a sampled token; True, with the status set, if the request ends with it."""
        self.all_token_ids.append(token_id)
        if token_id in self.ender_ids and self.num_output_tokens >= self.sampling_params.min_tokens:
            is_eos = token_id in self.eos_token_ids and not self.sampling_params.ignore_eos
            self.status, self.stop_reason = RequestStatus.FINISHED_STOPPED, None if is_eos else token_id
            return True
        if len(self.all_token_ids) >= self.max_num_tokens:
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens})"
