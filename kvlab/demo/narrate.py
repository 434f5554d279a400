"""One plain sentence for each step: what one sees in the pool right now, and why.

    events of the step  --> a sentence that stays for HOLD steps, unless a weightier event comes
    otherwise           --> the situation, from the scheduler and the frame's numbers
"""

from collections.abc import Iterator

from kvlab.blocks import cdiv

HOLD = 8  # steps
SITUATION, MIXED, RETURN, HIT, FORK, COPY, PREEMPTION = range(7)  # what weighs more speaks first
ENTRY, END = 1, 2  # of a static batch


class Narrator:
    """Speaks for one engine. letters: letter by sequence id; scheduler: the engine's."""

    def __init__(self, letters: dict[str, str], scheduler):
        self._letters = letters
        self._scheduler = scheduler
        self._config = scheduler.config
        self._batch: set[str] = set()
        self._held = (SITUATION, 0, "")  # weight, step of the event, sentence
        self._told: set[int] = set()
        self.is_news = False  # the last sentence told of an event of a kind not seen before
        self._story = self._paged
        if self._config.reservation == "contiguous":
            self._story = self._contiguous
        elif self._config.batching == "static":
            self._story = self._static

    def sentence(self, counts: dict, events: list) -> str:
        """What to say after a step. counts: the numbers of its Frame; events: what the Recorder heard in it."""
        step = counts["step"]
        self.is_news = False
        if not counts["running"] and not counts["waiting"]:
            return f"All are answered, after {step} steps. Nobody owns a block any more."
        weight, since, text = self._held
        if step - since >= HOLD:
            weight = SITUATION
        for new_weight, new_text in self._story(counts, events):
            if new_weight >= weight:
                weight, since, text = new_weight, step, new_text
        self._held = (weight, since, text)
        self.is_news = since == step and weight > SITUATION and weight not in self._told
        self._told.add(weight)
        return text

    def _contiguous(self, counts: dict, events: list) -> Iterator[tuple[int, str]]:
        empty = 1 - counts["slots_filled"] / counts["slots_owned"] if counts["slots_owned"] else 0
        waiting = counts["waiting"]
        if waiting:
            first = self._letters[self._scheduler.waiting.peek().request_id]
            who = f"{first} waits" if waiting == 1 else f"{first} and {waiting - 1} more wait"
            blocks = cdiv(self._config.max_model_len, self._config.block_size)
            why = f"no {blocks} blocks free in a row"
            yield SITUATION, f"{who}, though {empty:.0%} of what is reserved is empty: {why}."
        else:
            yield SITUATION, f"Nobody waits any more, and {empty:.0%} of what is reserved is empty."

    def _static(self, counts: dict, events: list) -> Iterator[tuple[int, str]]:
        running = {request.request_id for request in self._scheduler.running}
        if not running & self._batch:
            self._batch = set()
        self._batch |= running
        seats, idle, waiting = len(self._batch), len(self._batch - running), counts["waiting"]
        if counts["prefill_tokens"]:
            yield ENTRY, f"A batch enters. All its prompts are one step of {counts['prefill_tokens']} tokens."
        elif not running:
            yield END, f"The batch has ended. Only now may others enter ({waiting} waiting)."
        elif idle:
            yield SITUATION, f"Idle seats: {idle} of {seats}, until the longest answer ends. Waiting: {waiting}."
        else:
            yield SITUATION, f"The whole batch of {seats} decodes. Waiting for its end: {waiting}."

    def _paged(self, counts: dict, events: list) -> Iterator[tuple[int, str]]:
        names = self._letters
        pool = self._scheduler.manager.block_pool
        readers = max(block.ref_cnt for block in pool.blocks)
        if readers > 2:
            yield SITUATION, f"The system prompt is stored once: {readers} block tables point to its blocks."
        else:
            yield SITUATION, f"Running: {counts['running']}. They own no more blocks than their tokens fill."
        if counts["prefill_tokens"] and counts["decode_tokens"]:
            yield MIXED, (f"One step: {counts['decode_tokens']} decodes first, then {counts['prefill_tokens']} prompt "
                          f"tokens, up to the budget of {self._config.max_num_batched_tokens}.")  # fmt: skip
        hits = [(event.request_id, event.values[0]) for event in events if event.kind == "schedule" and event.values[0]]
        if hits and HIT not in self._told:
            who = ", ".join(names[request_id] for request_id, _ in hits)
            yield HIT, f"Prefix hit: {who} found {sum(n for _, n in hits)} tokens computed already."
        for request_id, num_tokens in hits:
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.num_preemptions:
                who = names[request_id]
                yield RETURN, f"{who} is back and computes its tokens again, but for {num_tokens} still here."
        for event in events:
            if event.kind == "fork" and event.request_id.endswith("#1"):
                parent = event.request_id.split("#")[0]
                family = [letter for name, letter in names.items() if name.split("#")[0] == parent]
                yield FORK, f"Fork: {', '.join(family)} sample one prompt and share its blocks. Nothing is copied."
            elif event.kind == "copy":
                who = names[event.request_id]
                yield COPY, f"Copy-on-write: before {who} writes into a shared block, it gets a copy."
            elif event.kind == "preempt":
                who = names[event.request_id]
                yield PREEMPTION, f"Preemption: no block is free. {who}, the youngest, loses its blocks and waits."
