"""What a beam search brings its user: hypotheses with text, best first, and the memory that sharing saved (L33 2.4).

    LLM.beam_search -> beam_request -> Scheduler (kvlab.schedule.beam) -> BeamGroup.finished -> BeamSearchOutput
"""

from dataclasses import dataclass, field

from kvlab.engine.tokenizer import Tokenizer
from kvlab.schedule import Request
from kvlab.schedule.beam import BeamMemory


@dataclass
class BeamSearchSequence:
    """One hypothesis. token_ids: outputs only, the end-of-sequence token too, which the text leaves out.

    cumulative_logprob: summed over token_ids. score: that / len(token_ids) ** length_penalty. finish_reason: "stop"
    or "length".
    """

    text: str
    token_ids: list[int]
    cumulative_logprob: float
    score: float
    finish_reason: str


@dataclass
class BeamSearchOutput:
    """A prompt with its `beam_width` best continuations, best first; none if the search failed, and `error` says why.

    memory: blocks held, blocks that copying would have held, copies made.
    parents: for each step, whom each beam went on from (BeamGroup.parents).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence] = field(default_factory=list)
    memory: BeamMemory = field(default_factory=BeamMemory)
    parents: list[list[int]] = field(default_factory=list)
    error: str | None = None


def beam_output(request: Request, prompt: str | None, tokenizer: Tokenizer) -> BeamSearchOutput:
    """What the group of the finished `request` found."""
    group = request.group
    output = BeamSearchOutput(request.request_id, prompt, request.prompt_token_ids, memory=group.memory,
                              parents=group.parents, error=request.error)  # fmt: skip
    for hypothesis in group.finished if group.is_over else ():
        tokens = hypothesis.token_ids
        shown = tokens[:-1] if hypothesis.finish_reason == "stop" else tokens
        output.sequences.append(
            BeamSearchSequence(tokenizer.decode(shown), tokens, hypothesis.cumulative_logprob, hypothesis.score,
                               hypothesis.finish_reason)
        )  # fmt: skip
    return output
