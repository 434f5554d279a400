"""The forms that a prompt may have: text, token ids, vLLM's dicts, a held branch."""

from collections.abc import Sequence
from numbers import Integral

from kvlab.engine.branch import Branch

Prompt = str | Sequence[int] | Branch


def as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt, in any form, as a list of one."""
    if isinstance(prompts, str | dict | Branch) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
        return [prompts]
    return prompts


def bare(prompt: Prompt | dict) -> Prompt:
    """The prompt itself, out of {"prompt": text} or {"prompt_token_ids": token ids}."""
    return prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, dict) else prompt


def is_conversation(prompt) -> bool:
    """True for [{"role", "content"}, ...]."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)
