"""The last step of a lab: the engine with the student's parts beside the engine with ours, on the same requests.

    parts --> engine --> tokens, events --.
                                           > Comparison: the same tokens? what did each do? where do they part ways?
    ours  --> engine --> tokens, events --'

With torch it is the engine that serves, with the model we ship; without, the slot-echo model behind the same scheduler,
which turns every fault of bookkeeping into a wrong token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from kvlab.config import EngineConfig
from kvlab.events import Event, Recorder
from kvlab.sampling_params import SamplingParams

COUNTED = {
    "alloc": "blocks handed out",
    "free": "blocks given back",
    "fork": "forks",
    "copy": "blocks copied",
    "touch": "blocks shared, hit or reserved",
    "publish": "blocks published",
    "evict": "cached blocks evicted",
    "preempt": "preemptions",
    "step_begin": "steps",
}


@dataclass
class Run:
    """One engine's run: tokens of each sequence, its text if there is a model, and what happened."""

    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    error: str = ""

    def count(self, kind: str) -> int:
        """How many blocks (or steps, forks, preemptions) the events of a kind speak of."""
        per_block = kind in ("alloc", "free", "touch", "publish", "evict")
        return sum(len(e.values) if per_block else 1 for e in self.events if e.kind == kind)


@dataclass
class Comparison:
    """Yours beside ours."""

    yours: Run
    ours: Run
    replaced: list[str]  # the parts that are not ours

    @property
    def same_tokens(self) -> bool:
        return not self.yours.error and self.yours.tokens == self.ours.tokens

    @property
    def same_texts(self) -> bool:
        """Also where tokens are the same a part may have made another text of them (lab 14)."""
        return not self.yours.error and self.yours.texts == self.ours.texts

    @property
    def first_difference(self) -> tuple[Event | None, Event | None] | None:
        """The first events at which the two runs differ; None if they never do."""
        mine, theirs = self.yours.events, self.ours.events
        for a, b in zip(mine, theirs, strict=False):
            if a != b:
                return a, b
        longer = len(mine) != len(theirs)
        n = min(len(mine), len(theirs))
        return (mine[n] if len(mine) > n else None, theirs[n] if len(theirs) > n else None) if longer else None

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, yours, ours) for a table."""
        same = sum(a == b for a, b in zip(self.yours.tokens, self.ours.tokens, strict=False))
        total = len(self.ours.tokens)
        rows = [("sequences with the right tokens", f"{same} of {total}", f"{total} of {total}")]
        rows += [
            (text, str(self.yours.count(kind)), str(self.ours.count(kind)))
            for kind, text in COUNTED.items()
            if self.yours.count(kind) or self.ours.count(kind)
        ]
        return rows


def run_beside_ours(parts: Any, *, num_requests: int = 6, num_samples: int = 3, max_tokens: int | Sequence[int] = 24,
                    stand_in: bool | None = None, **options: Any) -> Comparison:  # fmt: skip
    """Run the same requests twice: with `parts` (a kvlab.parts.Parts) and with ours.

    num_requests chats share a system prompt; the first one is sampled num_samples times, which forks it. max_tokens: of
    all, or of each.
    options: fields of kvlab.EngineConfig, for both. stand_in: True runs the slot-echo model even where torch is.
    """
    from kvlab.parts import Parts

    if stand_in is None:
        stand_in = find_spec("torch") is None or find_spec("transformers") is None
    run = _run_stand_in if stand_in else _run_model
    limits = [max_tokens] * num_requests if isinstance(max_tokens, int) else list(max_tokens)
    if len(limits) != num_requests:
        raise ValueError(f"max_tokens has {len(limits)} numbers for {num_requests} requests: give one for each")
    params = [SamplingParams(n=num_samples if i == 0 else 1, temperature=0.8 if i == 0 else 0.0, seed=7,
                             max_tokens=limit) for i, limit in enumerate(limits)]  # fmt: skip
    small = {"block_size": 16, "num_gpu_blocks_override": 96, "max_num_batched_tokens": 128, "max_model_len": 384}
    options = small | options
    ours = run(Parts(), params, options)
    try:
        yours = run(parts, params, options)
    except Exception as error:
        yours = Run(error=f"{type(error).__name__}: {error}")
    return Comparison(yours, ours, list(parts.replaced))


def _run_model(parts: Any, params: Sequence[SamplingParams], options: dict[str, Any]) -> Run:
    from kvlab.engine import LLM
    from kvlab.tiny import load_glossary

    recorder = Recorder()
    llm = LLM("tiny", parts=parts, recorder=recorder, **options)
    questions = [entry["question"] for entry in load_glossary()][: len(params)]
    prompts = [llm.tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in questions]
    outputs = llm.generate(prompts, params)
    if errors := [output.error for output in outputs if output.error]:
        raise RuntimeError(errors[0])
    completions = [completion for output in outputs for completion in output.outputs]
    return Run([list(c.token_ids) for c in completions], [c.text for c in completions], recorder.events())


def _run_stand_in(parts: Any, params: Sequence[SamplingParams], options: dict[str, Any]) -> Run:
    from kvlab.schedule import Request

    recorder = Recorder()
    core = parts.make_engine(EngineConfig(**options), recorder=recorder)
    shared = list(range(1, 40))
    for i, param in enumerate(params):
        core.add_request(Request(str(i), [*shared, *range(40 + 7 * i, 60 + 10 * i)], param))
    got: dict[str, list[int]] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            if output.request.error:
                raise RuntimeError(output.request.error)
            got.setdefault(output.request.request_id, []).extend(output.new_token_ids)
    return Run([got[key] for key in sorted(got)], [], recorder.events())

