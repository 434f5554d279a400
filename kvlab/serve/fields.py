"""What a request may bring besides the fields that are supported.

    IGNORED   changes no token of the answer: taken and forgotten
    NEUTRAL   has values that change nothing: those are taken, any other is refused
    the rest  is refused by name: it would change the answer, or is a misspelt field that would have

null is as good as absent, always. docs/serving.md shows these tables.
"""

from typing import Any

IGNORED = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("prediction", "parallel_tool_calls"),  # a hint for speed; there are no tools to call
)
NEUTRAL: dict[str, list[Any]] = {
    "suffix": [""],
    "tools": [[]],
    "tool_choice": ["none", "auto"],  # without tools both mean none
    "functions": [[]],
    "function_call": ["none", "auto"],
    "modalities": [["text"]],
    "response_format": [{"type": "text"}],
    "use_beam_search": [False],
    "length_penalty": [1],
    "skip_special_tokens": [True],
    "spaces_between_special_tokens": [True],
    "add_special_tokens": [True],
    "add_generation_prompt": [True],
    "continue_final_message": [False],
    "return_token_ids": [False],
    "return_tokens_as_token_ids": [False],
    "echo": [False],  # of chats; completions know it
}
INSTEAD = {
    "suffix": "the models here only continue a text",
    "tools": "no tools are called here",
    "functions": "no functions are called here",
    "response_format": "the answer is plain text, bound to no form",
    "use_beam_search": "LLM.beam_search does it, in Python",
    "max_completion_tokens": "completions call it max_tokens",
    "prompt": "chats bring messages; /v1/completions takes a prompt",
    "messages": "completions bring a prompt; /v1/chat/completions takes messages",
    "add_special_tokens": "give token ids to say exactly what is computed",
}


class FieldError(ValueError):
    """A field is to blame; `param` is its name."""

    def __init__(self, param: str, message: str):
        super().__init__(message)
        self.param = param


def without_harmless(body: dict[str, Any], supported: set[str]) -> dict[str, Any]:
    """`body` without what is null, ignored or neutral. FieldError at the first field that would change the answer."""
    kept = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in supported:
            kept[name] = value
        elif value not in NEUTRAL.get(name, []):
            why = INSTEAD.get(name, "leave it out")
            shown = name if len(name) <= 60 else name[:57] + "..."
            value_is = "with this value " if name in NEUTRAL else ""
            raise FieldError(shown, f"{shown} is not supported {value_is}by this server: {why}")
    return kept
