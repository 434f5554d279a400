"""One plain sentence for each step: what one sees in the pool right now, and why.

An event (a hit, a fork, a copy, a preemption) is worth a sentence for some steps; between events the
sentence states the situation. Everything said is read off the scheduler and the events of the step.
"""

HOLD = 10  # steps that a sentence about an event stays, unless a weightier event comes


class Narrator:
    """Speaks for one engine. setup: its Setup; letters: letter by sequence id; scheduler: the engine's."""

    def __init__(self, setup, letters: dict[str, str], scheduler):
        self._letters = letters
        self._scheduler = scheduler
        self._situation = {
            ("contiguous", "continuous"): self._reserved,
            ("paged", "static"): self._static,
            ("paged", "continuous"): self._paged,
        }[scheduler.config.reservation, scheduler.config.batching]
        self._held = (0, 0, "")  # weight, step of the event, sentence
        self._batch: set[str] = set()

    def sentence(self, counts: dict, cells, events) -> str:
        """What to say after a step. counts: the numbers of the frame; events: the Recorder's, of this step."""
        step = counts["step"]
        if not counts["running"] and not counts["waiting"]:
            return f"All answered after {step} steps. Nobody owns a block now."
        weight, since, text = self._held
        if step - since >= HOLD:
            weight = 0
        for new_weight, new_text in self._happened(events):
            if new_weight >= weight:
                weight, since, text = self._held = (new_weight, step, new_text)
        return text if weight else self._situation(counts, cells)

    def _happened(self, events):
        """(weight, sentence) for each event of the step that deserves one."""
        names = self._letters
        hits = [(names[e.request_id], e.values[0]) for e in events if e.kind == "schedule" and e.values[0]]
        if hits:
            who = ", ".join(letter for letter, _ in hits[:6]) + (" and others" if len(hits) > 6 else "")
            yield 1, f"Prefix hit: {who} found {sum(n for _, n in hits)} prompt tokens in the pool, computed already."
        for event in events:
            if event.kind == "fork" and event.request_id.endswith("#1"):
                parent = event.request_id.split("#")[0]
                family = [letter for name, letter in names.items() if name.split("#")[0] == parent]
                yield 2, f"Fork: {', '.join(family)} sample one prompt and share its blocks. Nothing was copied."
            elif event.kind == "copy":
                yield 3, f"Copy-on-write: {names[event.request_id]} was to write into a shared block, so it got a copy."
            elif event.kind == "preempt":
                who = names[event.request_id]
                yield 4, f"Preemption: no block was free. {who}, the youngest, gave its blocks up and waits again."

    def _reserved(self, counts: dict, cells) -> str:
        empty = 1 - counts["slots_filled"] / counts["slots_owned"]
        running, waiting = counts["running"], counts["waiting"]
        if waiting:
            first = self._letters[self._scheduler.waiting.peek().request_id]
            return (f"{first} and {waiting - 1} more wait although {empty:.0%} of the reserved slots are empty: "
                    f"no {self._blocks_each} free blocks in a row.")  # fmt: skip
        return f"Nobody waits any more. {running} run, and {empty:.0%} of what they reserved is empty."

    @property
    def _blocks_each(self) -> int:
        config = self._scheduler.config
        return -(-config.max_model_len // config.block_size)

    def _static(self, counts: dict, cells) -> str:
        running = {request.request_id for request in self._scheduler.running}
        if not running & self._batch:
            self._batch = running
        self._batch |= running
        idle = len(self._batch - running)
        waiting = counts["waiting"]
        if counts["prefill_tokens"]:
            return f"A batch of {len(running)} starts. All its prompts in one step: {counts['prefill_tokens']} tokens."
        if idle and waiting:
            return f"{idle} of {len(self._batch)} seats are idle, yet {waiting} wait: the door opens when the last ends."
        if idle:
            return f"{idle} of {len(self._batch)} seats are idle until the longest answer ends."
        return f"All {len(self._batch)} seats decode. {waiting} wait at the door."

    def _paged(self, counts: dict, cells) -> str:
        most = max((int(cell.text) for cell in cells if cell.kind == "shared"), default=0)
        if counts["prefill_tokens"] and counts["decode_tokens"]:
            return (f"One step: {counts['decode_tokens']} decodes first, then {counts['prefill_tokens']} prompt "
                    f"tokens fill the budget of {self._scheduler.config.max_num_batched_tokens}.")  # fmt: skip
        if most > 1:
            return f"The system prompt is stored once: {most} requests read the same blocks."
        return f"{counts['running']} run; each holds only the blocks that its tokens fill."
