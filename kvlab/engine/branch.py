"""Branch (分支): a sequence that is held between calls, to be gone on with, forked, and gone back from (L33 2.4).

    trunk = llm.branch("...")          computed once
    a, b = trunk.fork(), trunk.fork()  share every block; one that writes into a shared block copies it
    llm.generate([a, b, "another"])    one batch; each output becomes part of its branch
    a.append("tool result")            tokens that nobody generated
    c = a.fork(num_tokens=120)         back to an earlier place, also amid a block
    a.free()                           or `with`; a branch that is forgotten without it only loses its blocks to others

A branch always keeps its tokens. Its K/V stays as long as nobody else needs the room (kvlab.schedule.held).
"""

from kvlab.engine.interrupts import interrupts_wait
from kvlab.engine.outputs import RequestOutput
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import EngineCoreOutput, HeldSequence

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


class Branch:
    """Made by `LLM.branch` and `Branch.fork`. Give it to `LLM.generate` and `LLM.stream` wherever a prompt may stand.

    ValueError, and nothing changed: for any use after `free`, for changing it while it is generating (forking is
    allowed then), and from inside a step (a recorder's listener, a policy): all of this is for between steps.
    """

    def __init__(self, llm, held: HeldSequence):
        self._llm = llm
        self._held = held

    # ---- reading

    @property
    def token_ids(self) -> list[int]:
        """All its tokens: prompt, outputs (also an end-of-sequence token), and what was appended."""
        return list(self._held.all_token_ids)

    @property
    def text(self) -> str:
        """What its tokens decode to, special tokens left out."""
        return self._llm.tokenizer.decode(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return self._held.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Of its tokens, how many have K/V right now. The last one of an output has none yet."""
        return self._held.current.num_computed_tokens

    @property
    def num_blocks(self) -> int:
        """KV blocks that it holds right now."""
        return len(self._blocks)

    @property
    def num_shared_blocks(self) -> int:
        """Of its blocks, how many some other branch or request holds as well."""
        return sum(block.ref_cnt > 1 for block in self._blocks)

    @property
    def is_generating(self) -> bool:
        return self._held.request is not None

    @property
    def is_freed(self) -> bool:
        return self._book.held.get(self._held.request_id) is not self._held

    # ---- changing

    def fork(self, num_tokens: int | None = None) -> "Branch":
        """A branch of the first `num_tokens` tokens (None: all). It shares their blocks; nothing is copied now.

        A branch that is generating can be forked, too: the child begins with what there is so far.
        """
        with interrupts_wait():
            return Branch(self._llm, self._book.fork(self._held, self._llm.next_id("branch"), num_tokens))

    def append(self, text: str | list[int]) -> None:
        """Add text, or token ids, behind the last token. Text is tokenised by itself, without special tokens.

        It is computed by the next `generate` or `compute`. ValueError if the branch would become too long.
        """
        token_ids = self._llm.token_ids_of(text, "append: ", add_special_tokens=False)
        with interrupts_wait():
            self._book.append(self._held, token_ids)

    def generate(self, sampling_params: SamplingParams | None = None, *, priority: int = 0) -> RequestOutput:
        """Go on with this branch alone. The tokens of the output become its own, whatever the finish reason."""
        return self._llm.generate(self, sampling_params, priority=priority)[0]

    def compute(self) -> None:
        """Compute the K/V of all its tokens now, so that forks share it. RuntimeError if the model fails at it."""
        if self.num_computed_tokens == self.num_tokens or not self._book.manager.can_share:
            return
        num_tokens = self.num_tokens
        try:
            output = self.generate(ONE_TOKEN)  # a token is sampled, and forgotten: it has no K/V yet
        finally:
            if self.num_tokens > num_tokens and not self.is_generating:
                self._book.truncate(self._held, num_tokens)
        if output.error:
            raise RuntimeError(f"branch {self._held.request_id!r} could not be computed: {output.error}")

    def free(self) -> None:
        """Give its blocks back and forget it, in any state; what it generates ends with "abort". Twice is harmless."""
        with interrupts_wait():
            ended = self._book.let_go(self._held)
            self._llm.deliver([EngineCoreOutput.ended(request) for request in ended])

    def __enter__(self) -> "Branch":
        return self

    def __exit__(self, *error) -> None:
        self.free()

    def __repr__(self) -> str:
        state = "freed" if self.is_freed else "generating" if self.is_generating else "idle"
        return f"Branch({self._held.request_id!r}, {state}, {self.num_computed_tokens}/{self.num_tokens} tokens)"

    def held_in(self, llm, where: str, cache_salt: str | None) -> HeldSequence:
        """For `llm`, which is to go on with it. ValueError if it is another's, or for another salt."""
        if llm is not self._llm:
            raise ValueError(f"{where}{self!r} belongs to another LLM: give the token ids of it")
        if cache_salt not in (None, self._held.cache_salt):
            raise ValueError(f"{where}cache_salt is {cache_salt!r}, but {self!r} has {self._held.cache_salt!r}")
        return self._held

    @property
    def _book(self):
        return self._llm.engine_core.scheduler

    @property
    def _blocks(self) -> list:
        return self._book.manager.req_to_blocks.get(self._held.current.request_id, [])
