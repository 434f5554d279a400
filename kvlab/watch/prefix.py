"""View 5, prefix reuse (前缀复用, L33 6.2 and 6.3, PAV 3.4): a radix tree and a hash chain of the same requests.

Left the tree, where blocks that touch are one edge; right each request's blocks with the names that the chain gives
them. Both are the real indexes, each over a pool of its own; a black bar is what was found in the cache.

Scenarios: "first_or_last"   one prompt with its first word changed, one with its last: what is still found?
           "time_first", "time_last"   the time of day at the start of the system prompt, or at its end
           "split"           a tree over blocks of one token beside a chain over blocks of four
           "evict"           the pool is full, three blocks are needed: which ones go?
"""

from collections.abc import Sequence
from random import Random

from kvlab.events import Event
from kvlab.parts import Parts
from kvlab.watch.books import listed, named
from kvlab.watch.prefix_picture import LEGEND, alt, draw
from kvlab.watch.twins import Shelf, Twins, after, common
from kvlab.watch.view import Question, Scenario, View

BOT = "you are a tutor be kind be brief".split()
ASK = "what is a page and who has it".split()


def _first_or_last(seed: int, parts: Parts) -> list[Event]:
    random, text = Random(seed), BOT + ASK
    prompts = {"A": text, "B": [random.choice(["they", "we", "who"]), *text[1:]],
               "C": [*text[:-1], random.choice(["me", "us", "one"])], "D": text}  # fmt: skip
    return _played(Twins(17, prompts, parts=parts), "ABCD")


def _time(last: bool):
    def play(seed: int, parts: Parts) -> list[Event]:
        minute = Random(seed).randrange(10, 50)
        times = {name: f"09:{minute + i}" for i, name in enumerate("ABCD")}
        bot = BOT[:6] + ["now"]
        prompts = {name: [*bot, at, *ASK] if last else [at, *bot, *ASK] for name, at in times.items()}
        prompts |= {name: [*bot, *ASK, times[name]] for name in "CD"}
        return _played(Twins(17, prompts, parts=parts), "ABCD")

    return play


def _split(seed: int, parts: Parts) -> list[Event]:
    text, at = "you are a bot be kind and calm".split(), 5 + seed % 3
    prompts = {"A": text, "B": text[:at] + "oh so sad".split()[at - 5 :],
               "C": text[:3] + "cat who has no time".split(), "D": text}  # fmt: skip
    return _played(Twins(9, prompts, tree_block_size=1, parts=parts), "ABCD")


def _evict(seed: int, parts: Parts) -> list[Event]:
    prompts = {"A": BOT + ASK, "B": BOT + "what is a leaf and who cut it".split(),
               "C": "tell me a joke and make it good".split(),
               "D": "sum up this text for my boss and use few words".split()}  # fmt: skip
    twins = Twins(9, prompts, parts=parts)
    for name in "ABC":
        twins.prompt(name)
    for name in ("AC", "CA")[seed % 2]:
        twins.finish(name)
    twins.prompt("D")
    twins.finish("D")
    return _played(twins, "CA")


def _played(twins: Twins, names: str) -> list[Event]:
    for name in names:
        twins.prompt(name)
    return twins.recorder.events()


# ---- the questions

ONE_CAME, FULL = 2, 6  # frames: A has been computed; every block holds something, and D is about to come
BOTH, TIMES = [(12, 12), (0, 12), (0, 15), (15, 15)], [0, 4, 7, 12]


def _index(options: Sequence, right: object) -> int:
    return list(options).index(right) if right in options else -1


def _ask_both(shelf: Shelf) -> tuple[str, Sequence[str]]:
    return "B is A's text with another first word, C with another last word. How many of 16 tokens are found?", [
        f"B {b}, C {c}" for b, c in BOTH]  # fmt: skip


def _both(states: Sequence[Shelf]) -> tuple[int | None, ...]:
    return tuple(states[ONE_CAME + 2].rows[name].found for name in "BC")


def _disagree(shelf: Shelf) -> str:
    """For a student's index: what is to be said in place of a reason that would not hold."""
    found = (f"{name} {row.found_in_tree} and {row.found}" for name, row in shelf.rows.items() if shelf.differs(name))
    return f"Tree and chain disagree, so one of them is wrong: {', '.join(found)}."


def _why_both(states: Sequence[Shelf]) -> str:
    b, c = _both(states)
    if any(map(states[ONE_CAME + 2].differs, "BC")):
        return _disagree(states[ONE_CAME + 2])
    return f"B {b}, C {c}: a name is made of its tokens and of the name before it, so a change renames all behind it."


def _at(shelf: Shelf) -> int:
    """How many tokens of B are A's."""
    return common(shelf.rows["A"].words, shelf.rows["B"].words)


def _ask_time(shelf: Shelf) -> tuple[str, Sequence[str]]:
    return (f"A minute later B asks the same. Only token {_at(shelf)}, the time, differs. How many of 16 are found?",
            list(map(str, TIMES)))  # fmt: skip


def _why_time(states: Sequence[Shelf]) -> str:
    at, found = _at(states[ONE_CAME]), states[ONE_CAME + 1].rows["B"].found
    if states[ONE_CAME + 1].differs("B"):
        return _disagree(states[ONE_CAME + 1])
    return f"{found}: the time stands in block {at // 4}; its name is a new one, and so is every name behind it."


def _splits(at: int) -> list[tuple[int, int]]:
    return [(at, at), (at, at // 4 * 4), (at // 4 * 4, at // 4 * 4), (at, 8)]


def _ask_split(shelf: Shelf) -> tuple[str, Sequence[str]]:
    at = _at(shelf)
    return f"B leaves A's text after {at} tokens. The tree has blocks of 1 token, the chain of 4. What do they find?", [
        f"tree {tree}, chain {chain}" for tree, chain in _splits(at)]  # fmt: skip


def _split_found(states: Sequence[Shelf]) -> tuple[int | None, int | None]:
    row = states[ONE_CAME + 1].rows["B"]
    return row.found_in_tree, row.found


def _why_split(states: Sequence[Shelf]) -> str:
    tree, chain = _split_found(states)
    num, names = sum(len(edge.places) for edge in states[ONE_CAME].edges), len(states[ONE_CAME].names)
    return (f"Tree {tree}, chain {chain}: only full blocks are found. The price of small ones: A takes {num} places "
            f"there, {names} names here.")  # fmt: skip


def _victims(shelf: Shelf) -> list[tuple[int, ...]]:
    """Threes that one may expect to go: the head of the queue, its tail, a request's first block first, the oldest."""
    queue = shelf.books.queue
    first = [*queue[1::-1], *queue[:1:-1]]
    guesses = {tuple(sorted(ids)) for ids in (queue[:3], queue[-3:], first[:3], (1, 2, 3))}
    return sorted(guesses)


def _ask_evict(shelf: Shelf) -> tuple[str, Sequence[str]]:
    first = next(name for name, row in shelf.rows.items() if shelf.books.queue[0] in row.block_ids)
    return f"D needs 3 blocks, and all 8 hold something. {first} ended first. Which three are given up?", [
        listed(ids) for ids in _victims(shelf)]  # fmt: skip


def _why_evict(states: Sequence[Shelf]) -> str:
    gone, queue = states[FULL + 1].evicted, states[FULL].books.queue
    if gone != queue[:3]:
        return f"{named(gone)} went; the head of the queue was {named(queue[:3])}.".capitalize()
    return (f"{named(gone).capitalize()}: who ended first goes first, of each the last block first. "
            f"{named(queue[3:]).capitalize()} is still found, and what B holds is safe.")  # fmt: skip


# ---- the sentence


def say(shelf: Shelf) -> str:
    books, name = shelf.books, shelf.acting
    kind = books.move.kind
    if books.error:
        return f"This move failed: {books.error}"[:140]
    if books.refused:
        return f"{name} needs more blocks than are free, so it is refused."
    if kind == "stage":
        num = len(books.queue)
        return f"A tree and a chain, each over a pool of its own: {num} free blocks of {books.block_size} tokens."
    if kind == "coming":
        return f"{listed(books.move.values)} will come, in this order. Bold: where a text differs from one before it."
    if kind == "finish":
        kept, num = [id_ for id_ in books.freed if id_ in shelf.names], len(books.freed)
        if num > 5:
            return f"{name[:20]} ends and frees {num} blocks. Found until taken: {len(kept)} of them."
        still = "all of them" if len(kept) == num > 1 else named(kept)
        return f"{name[:20]} ends. Free, in this order: {named(books.freed)}. Found until taken: {still}."
    if kind == "prompt":
        return _say_prompt(shelf, name)
    if kind == "schedule":
        row = shelf.rows[name]
        return f"{name[:20]} starts and finds {row.found} of its {row.num_tokens} tokens in the cache."
    return f"Requests that hold blocks: {len(books.tables)}. Names that the index knows: {len(shelf.names)}."


def _say_prompt(shelf: Shelf, name: str) -> str:
    row, size, gone = shelf.rows[name], shelf.books.block_size, shelf.evicted
    num, found, in_tree = row.num_tokens, row.found, row.found_in_tree
    came = {one: common(r.words, row.words) for one, r in shelf.rows.items() if one != name and r.found is not None}
    if shelf.differs(name):
        return f"The tree finds {in_tree} tokens of {name}, the chain {found}: one of the two is wrong."
    if shelf.again:
        why = "the last block is always computed" if found == (num - 1) // size * size else "the rest was given up"
        return f"{name}'s text comes again and finds {found} of {num} tokens: {why}."
    if gone:
        taken = len(shelf.books.new)
        return f"{name} finds {found or 'nothing'} and takes {taken} blocks: {named(gone)} lose their names."
    if not came:
        return f"{name} finds nothing: all {num} tokens are computed, and each full block gets a name."
    other = max(came, key=came.__getitem__)
    same = came[other]
    if shelf.tree_block_size != size:
        parts = f"repeats {other}'s text" if same == num else f"leaves {other}'s text after {same} tokens"
        why = "the last token is always computed" if same == num else "no block is found in part"
        return f"{name} {parts}: the tree finds {in_tree}, the chain {found}, for {why}."
    if same == num:
        return (f"{name} is {other}'s text to the end and finds {found} of {num}: the last block is always computed; "
                f"{other}'s keeps the name.")  # fmt: skip
    if not same:
        return f"{name} finds nothing: its first token differs, so its first name does, and so do all behind it."
    until = f"{name} is {other}'s text up to token {same}, \"{row.words[same]}\""
    return f"{until}: it finds {found} tokens, the full blocks before."


VIEW = View(
    name="prefix",
    title="Prefix reuse (前缀复用)",
    begin=Shelf(),
    after=after,
    draw=draw,
    say=say,
    alt=alt,
    kinds=frozenset({"refs", "queue", "index", "names"}),
    legend=LEGEND,
    scenarios={
        "first_or_last": Scenario(_first_or_last, Question(
            ONE_CAME, ONE_CAME + 2, _ask_both, lambda states: _index(BOTH, _both(states)), _why_both)),
        **{name: Scenario(_time(name == "time_last"), Question(
            ONE_CAME, ONE_CAME + 1, _ask_time,
            lambda states: _index(TIMES, states[ONE_CAME + 1].rows["B"].found), _why_time))
           for name in ("time_first", "time_last")},
        "split": Scenario(_split, Question(
            ONE_CAME, ONE_CAME + 1, _ask_split,
            lambda states: _index(_splits(_at(states[ONE_CAME])), _split_found(states)), _why_split)),
        "evict": Scenario(_evict, Question(
            FULL, FULL + 1, _ask_evict,
            lambda states: _index(_victims(states[FULL]), tuple(sorted(states[FULL + 1].evicted))), _why_evict)),
    },
)  # fmt: skip
