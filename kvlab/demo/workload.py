"""The demo's requests: 24 of them, the same in every run, named A to X.

    questions from the glossary   most of them; the chat template gives all the same system prompt
    long chats                    they bring an earlier conversation along, up to 220 tokens of it
    short answers                 stopped by max_tokens: what a static batch idles on
    plain text                    no chat, so no system prompt: nothing to share
    three samples of one prompt   n = 3: one prompt, forked (分叉), then copy-on-write (写时复制)
"""

from typing import NamedTuple

from kvlab.sampling_params import SamplingParams
from kvlab.tiny import load_glossary

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # 24 requests, and two more sequences that the fork brings


class Ask(NamedTuple):
    """A request as a user would make it. question and history: glossary terms.

    plain: send the bare question, not a chat. n, max_tokens: as in SamplingParams; n > 1 samples.
    """

    question: str
    history: tuple[str, ...] = ()
    plain: bool = False
    n: int = 1
    max_tokens: int = 96


CHAT = ("KV cache", "PagedAttention", "block table")
ASKS = (
    Ask("KV cache"),
    Ask("holes in memory"),
    Ask("preemption", max_tokens=12),
    Ask("block size", history=CHAT),
    Ask("why paging raises throughput"),
    Ask("temperature", n=3),
    Ask("idle seats"),
    Ask("slot", max_tokens=8),
    Ask("Orca"),
    Ask("static utilisation"),
    Ask("PCIe", max_tokens=16),
    Ask("multi-head attention", plain=True),
    Ask("prefix caching", history=CHAT[:2]),
    Ask("paging and batching"),
    Ask("decode", max_tokens=8),
    Ask("block boundary"),
    Ask("SwiGLU"),
    Ask("swap", max_tokens=12),
    Ask("copy-on-write", history=CHAT),
    Ask("capacity example"),
    Ask("who I am", plain=True),
    Ask("balance point"),
    Ask("KV of Qwen2.5-7B"),
    Ask("caching keeps the answer"),
)


class Job(NamedTuple):
    """One request, ready for an engine: its letter, the prompt as tokens, how to sample, what was asked."""

    letter: str
    prompt_token_ids: list[int]
    params: SamplingParams
    question: str


def make_jobs(tokenizer) -> list[Job]:
    """The 24 requests, tokenized. tokenizer: a kvlab.engine.tokenizer.Tokenizer with a chat template."""
    entries = {entry["term"]: entry for entry in load_glossary()}
    jobs = []
    for letter, ask in zip(LETTERS, ASKS, strict=False):
        question = entries[ask.question]["question"]
        if ask.plain:
            prompt = tokenizer.encode(question + "\n")
        else:
            messages = []
            for term in ask.history:
                messages.append({"role": "user", "content": entries[term]["question"]})
                messages.append({"role": "assistant", "content": entries[term]["answer"]})
            prompt = tokenizer.apply_chat_template([*messages, {"role": "user", "content": question}])
        temperature = 1.0 if ask.n > 1 else 0.0
        params = SamplingParams(n=ask.n, temperature=temperature, max_tokens=ask.max_tokens, seed=33)
        jobs.append(Job(letter, prompt, params, question))
    return jobs


def letters_of(jobs: list[Job]) -> dict[str, str]:
    """Letter by sequence id: a request's own, and the next free ones for what it forks."""
    spare = iter(LETTERS[len(jobs) :])
    letters = {job.letter: job.letter for job in jobs}
    for job in jobs:
        letters |= {f"{job.letter}#{child}": next(spare) for child in range(1, job.params.n)}
    return letters
