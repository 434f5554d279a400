# %% [markdown]
# # Lab 14: Serving (在线服务)
# skeleton

# %%
from kvlab.lab import Lab

lab = Lab("14")
check, hint = lab.check, lab.hint

# %% ex="whole_bytes"
def whole_bytes(data):
    """How many bytes at the beginning of `data` are whole characters.

    data: bytes, the beginning of a text in UTF-8, cut anywhere. Returns a whole number from
    len(data) - 3 to len(data). Nothing is held back without need.
    """
    ### BEGIN SOLUTION
    start = len(data) - 1
    while start > 0 and 0x80 <= data[start] < 0xC0:
        start -= 1
    if start < 0:
        return 0
    first = data[start]
    size = 1 if first < 0x80 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    return len(data) if start + size == len(data) else start
    ### END SOLUTION

# %% check="whole_bytes"
check("whole_bytes")

# %% ex="detokenizer"
class Detokenizer:
    """The text of one growing list of tokens."""

    def __init__(self, decode):
        """decode: a function, from a list of token ids to text. U+FFFD stands for bytes that are
        no character. It may drop a space at the very beginning of what it is given."""
        ### BEGIN SOLUTION
        self.decode = decode
        self.ids = []
        self.window = self.shown = 0
        ### END SOLUTION

    def add(self, token_ids, final=False):
        """Take in new tokens; return the text that can be shown now and was not shown before.

        token_ids: a list of any length, the caller's. final: nothing more will come. All texts
        together are decode(all tokens). Before the end no text has the U+FFFD of a character
        that is not complete yet, and nothing else waits. Gives decode some tokens only, however
        long the text has become.
        """
        ### BEGIN SOLUTION
        self.ids.extend(token_ids)
        known = self.decode(self.ids[self.window : self.shown])
        text = self.decode(self.ids[self.window :])
        new = text[len(known) :]
        if new and (final or not text.endswith("\ufffd")):
            self.window, self.shown = self.shown, len(self.ids)
            return new
        return ""
        ### END SOLUTION

# %% check="detokenizer"
check("detokenizer")

# %% ex="stop_checker"
class StopChecker:
    """Watches the text of one answer for stop strings."""

    def __init__(self, stop=(), include_stop=False):
        """stop: a tuple of texts, none empty. include_stop: the one that stops is shown too."""
        ### BEGIN SOLUTION
        self.stop, self.include_stop = stop, include_stop
        self.held = ""
        ### END SOLUTION

    def add(self, text, may_stop=True, final=False):
        """Take in more text. Returns (text that can be shown now, the stop string or None).

        A stop string stops when its last character comes. Of several, the one that is complete
        first counts; of two that end together, the longer one. What could still become a stop
        string is held back, and nothing else. may_stop: False: stop strings that this piece
        completes are text, for good. final: nothing more will come. No call follows a stop.
        """
        ### BEGIN SOLUTION
        old, text = len(self.held), self.held + text
        found = []
        for s in self.stop:
            begin = text.find(s, max(0, old - len(s) + 1))
            if may_stop and begin >= 0:
                found.append((begin + len(s), begin, s))
        if found:
            end, begin, s = min(found)
            return text[: end if self.include_stop else begin], s
        hold = 0
        if not final:
            hold = max((n for s in self.stop for n in range(1, len(s)) if text.endswith(s[:n])),
                       default=0)
        self.held = text[len(text) - hold :]
        return text[: len(text) - hold], None
        ### END SOLUTION

# %% check="stop_checker"
check("stop_checker")

# %% ex="event_reader"
class EventReader:
    """Server-sent events, out of bytes that come in pieces of any size."""

    def __init__(self):
        ### BEGIN SOLUTION
        self.rest = b""
        self.data = []
        ### END SOLUTION

    def feed(self, piece):
        """Take in bytes. Returns a list: the data, as text, of each event that is now complete.

        A line ends in LF or in CR LF. An event ends with an empty line. Its data are what stands
        behind `data:` in its lines, without one space there if there is one; of several data
        lines, with a newline between them. All other lines are left out. An event without any
        data line is none.
        """
        ### BEGIN SOLUTION
        lines = (self.rest + piece).split(b"\n")
        self.rest = lines.pop()
        events = []
        for line in lines:
            name, colon, value = line.removesuffix(b"\r").decode().partition(":")
            if name == "data" and colon:
                self.data.append(value.removeprefix(" "))
            elif not name and not colon and self.data:
                events.append("\n".join(self.data))
                self.data = []
        return events
        ### END SOLUTION

# %% check="event_reader"
check("event_reader")

# %% ex="between"
def between(before, after, seconds):
    """Three figures of the interval between two scrapes.

    before, after: dicts, name -> value, with (each behind "vllm:") generation_tokens_total,
    time_to_first_token_seconds_sum and _count, prefix_cache_hits_total and
    prefix_cache_queries_total. seconds: between the two, more than 0. Changes neither.

    Returns (tokens generated a second, mean seconds to the first token, share of the prompt
    tokens that were found in the cache, 0 to 1). The second is None if no first token fell into
    the interval, the third if no prompt token was looked for.
    """
    ### BEGIN SOLUTION
    def rise(name):
        return after["vllm:" + name] - before["vllm:" + name]

    first = "time_to_first_token_seconds_"
    waited, firsts = rise(first + "sum"), rise(first + "count")
    hits, queries = rise("prefix_cache_hits_total"), rise("prefix_cache_queries_total")
    return (
        rise("generation_tokens_total") / seconds,
        waited / firsts if firsts else None,
        hits / queries if queries else None,
    )
    ### END SOLUTION

# %% check="between"
check("between")

# %% ex="quantile"
def quantile(q, buckets):
    """The q-quantile of values of which only a histogram is known.

    q: more than 0, at most 1. buckets: at least two pairs (upper bound, number of values that
    are at most so large), with rising bounds, the last one infinite.

    Returns where the rank, q times all values, lies: in the first bucket whose number reaches
    it, by a straight line from its lower bound to its own (the first begins at 0). If that is
    the infinite one, the largest finite bound. None without values. Changes nothing.
    """
    ### BEGIN SOLUTION
    rank = q * buckets[-1][1]
    low = below = 0.0
    for bound, count in buckets:
        if 0 < count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return None
    ### END SOLUTION

# %% check="quantile"
check("quantile")
