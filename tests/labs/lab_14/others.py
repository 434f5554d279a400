"""Lab 14: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, old: str, new: str) -> str:
    assert old in source, old
    return source.replace(old, new)


_CUTS = """
def whole_bytes(data):
    return len(data.decode("utf-8", errors="ignore").encode())
"""
_CODEC = """
import codecs

def whole_bytes(data):
    return len(codecs.getincrementaldecoder("utf-8")().decode(data).encode())
"""
_FORWARD = """
def whole_bytes(data):
    place = 0
    while place < len(data):
        byte = data[place]
        size = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
        if place + size > len(data):
            break
        place += size
    return place
"""

# All tokens of the last few shown pieces as a context, however many calls brought them.
_CONTEXT = """
class Detokenizer:
    def __init__(self, decode):
        self.decode, self.context, self.held = decode, [], []

    def add(self, token_ids, final=False):
        self.held = self.held + list(token_ids)
        old = self.decode(self.context)
        new = self.decode(self.context + self.held)[len(old):]
        if not new or (new.endswith("\\ufffd") and not final):
            return ""
        self.context = self.held
        self.held = []
        return new
"""
# Shows what is whole before an incomplete end, and remembers how much.
_EAGER = """
class Detokenizer:
    def __init__(self, decode):
        self.decode, self.before, self.now, self.given = decode, [], [], ""

    def add(self, token_ids, final=False):
        self.now = [*self.now, *token_ids]
        text = self.decode(self.before + self.now)[len(self.decode(self.before)):]
        whole = text if final else text.rstrip("\\ufffd")
        new = whole[len(self.given):]
        self.given += new
        if text and whole == text:
            self.before, self.now, self.given = self.now, [], ""
        return new
"""

_STOP = """
class StopChecker:
    def __init__(self, stop=(), include_stop=False):
        self.stop, self.include, self.buffer = stop, include_stop, ""

    def add(self, text, may_stop=True, final=False):
        old = len(self.buffer)
        self.buffer += text
        best = None
        for s in self.stop if may_stop else ():
            at = self.buffer.find(s)
            while at >= 0 and at + len(s) <= old:
                at = self.buffer.find(s, at + 1)
            if at >= 0:
                best = min(best or (at + len(s), at, s), (at + len(s), at, s))
        if best:
            end, begin, s = best
            return self.buffer[: end if self.include else begin], s
        keep = 0
        for s in self.stop if not final else ():
            for n in range(1, len(s)):
                if self.buffer.endswith(s[:n]):
                    keep = max(keep, n)
        cut = len(self.buffer) - keep
        out, self.buffer = self.buffer[:cut], self.buffer[cut:]
        return out, None
"""
# A character at a time, with the whole text.
_STEPS = """
class StopChecker:
    def __init__(self, stop=(), include_stop=False):
        self.stop, self.include = tuple(sorted(stop, key=len, reverse=True)), include_stop
        self.text, self.num_shown = "", 0

    def add(self, text, may_stop=True, final=False):
        for character in text:
            self.text += character
            for s in self.stop:
                if may_stop and self.text.endswith(s):
                    end = len(self.text) if self.include else len(self.text) - len(s)
                    return self.text[self.num_shown:end], s
        start = self.num_shown
        end = len(self.text)
        if not final:
            while start < end and not any(
                s.startswith(self.text[start:]) and len(s) > end - start for s in self.stop
            ):
                start += 1
            end = start
        out = self.text[self.num_shown:end]
        self.num_shown = end
        return out, None
"""

_EVENTS = """
class EventReader:
    def __init__(self):
        self.buffer = bytearray()
        self.lines = []

    def feed(self, piece):
        found = []
        for byte in piece:
            if byte != 10:
                self.buffer.append(byte)
                continue
            line = self.buffer.decode("utf-8")
            self.buffer.clear()
            if line.endswith("\\r"):
                line = line[:-1]
            if line == "":
                if self.lines:
                    found.append("\\n".join(self.lines))
                self.lines = []
            elif line[:5] == "data:":
                self.lines.append(line[6:] if line[5:6] == " " else line[5:])
        return found
"""
_DECODER = """
import codecs

class EventReader:
    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")()
        self.text = ""
        self.data = None

    def feed(self, piece):
        self.text += self.decoder.decode(piece)
        events = []
        while "\\n" in self.text:
            line, self.text = self.text.split("\\n", 1)
            field, colon, value = line.removesuffix("\\r").partition(":")
            if field == "data" and colon:
                value = value.removeprefix(" ")
                self.data = value if self.data is None else self.data + "\\n" + value
            elif field == "" and colon == "" and self.data is not None:
                events.append(self.data)
                self.data = None
        return events
"""

_BETWEEN = """
def between(before, after, seconds):
    names = ("generation_tokens_total", "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count",
             "prefix_cache_hits_total", "prefix_cache_queries_total")
    tokens, total, count, hits, queries = [after["vllm:" + name] - before["vllm:" + name] for name in names]
    ttft = share = None
    if count > 0:
        ttft = total / count
    if queries > 0:
        share = hits / queries
    return tokens / seconds, ttft, share
"""
_TRY = """
def between(before, after, seconds):
    delta = {name: after[name] - before[name] for name in before}

    def ratio(upper, lower):
        try:
            return delta["vllm:" + upper] / delta["vllm:" + lower]
        except ZeroDivisionError:
            return None

    return [delta["vllm:generation_tokens_total"] / seconds,
            ratio("time_to_first_token_seconds_sum", "time_to_first_token_seconds_count"),
            ratio("prefix_cache_hits_total", "prefix_cache_queries_total")]
"""

_QUANTILE = """
def quantile(q, buckets):
    total = buckets[-1][1]
    if total == 0:
        return None
    rank = q * total
    lows = [0.0] + [bound for bound, _ in buckets]
    befores = [0.0] + [count for _, count in buckets]
    for i, (bound, count) in enumerate(buckets):
        if count >= rank:
            if bound == float("inf"):
                return lows[i]
            return lows[i] + (bound - lows[i]) * (rank - befores[i]) / (count - befores[i])
"""
_BISECT = """
from bisect import bisect_left

def quantile(q, buckets):
    bounds, counts = zip(*buckets)
    if not counts[-1]:
        return None
    i = bisect_left(counts, q * counts[-1])
    if i == len(bounds) - 1:
        return bounds[-2]
    low, below = (bounds[i - 1], counts[i - 1]) if i else (0, 0)
    part = (q * counts[-1] - below) / (counts[i] - below)
    return (1 - part) * low + part * bounds[i]
"""

CORRECT = {
    "whole_bytes": {"decoded and encoded": _CUTS, "Python's own": _CODEC, "from the front": _FORWARD},
    "detokenizer": {
        "a context": _CONTEXT,
        "eager": _EAGER,
        "one token as the neighbour": _changed(_CONTEXT, "self.context = self.held", "self.context = self.held[-1:]"),
    },
    "stop_checker": {"a buffer": _STOP, "a character at a time": _STEPS},
    "event_reader": {"a byte at a time": _EVENTS, "a decoder": _DECODER},
    "between": {"named": _BETWEEN, "tries": _TRY},
    "quantile": {"shifted lists": _QUANTILE, "bisect": _BISECT},
}

_ALONE = """
class Detokenizer:
    def __init__(self, decode):
        self.decode = decode

    def add(self, token_ids, final=False):
        return self.decode(list(token_ids))
"""
_HELD_ONLY = """
class Detokenizer:
    def __init__(self, decode):
        self.decode, self.held = decode, []

    def add(self, token_ids, final=False):
        self.held += token_ids
        text = self.decode(self.held)
        if text.endswith("\\ufffd") and not final:
            return ""
        self.held = []
        return text
"""
_ALL = """
class Detokenizer:
    def __init__(self, decode):
        self.decode, self.ids, self.shown = decode, [], 0

    def add(self, token_ids, final=False):
        self.ids += token_ids
        text = self.decode(self.ids)
        if text.endswith("\\ufffd") and not final:
            return ""
        new = text[self.shown:]
        self.shown = len(text)
        return new
"""

WRONG = {
    "whole_bytes": {
        "all of it": "def whole_bytes(data):\n    return len(data)\n",
        "characters, not bytes": "def whole_bytes(data):\n    return len(data.decode(errors='ignore'))\n",
        "three bytes for all": _changed(_FORWARD, "2 if byte < 0xE0 else 3 if byte < 0xF0 else 4", "3"),
        "no four": _changed(_FORWARD, "3 if byte < 0xF0 else 4", "3"),
        "no two": _changed(_FORWARD, "2 if byte < 0xE0 else 3", "3"),
        "one too few": _changed(_FORWARD, "place + size > len(data)", "place + size >= len(data)"),
        "until the last plain byte": "def whole_bytes(data):\n    end = len(data)\n    while end and data[end - 1] >= 0x80:"
                                     "\n        end -= 1\n    return end\n",
        "by the replacement character": "def whole_bytes(data):\n    text = data.decode(errors='replace')\n"
                                        "    return len(text.rstrip('\\ufffd').encode())\n",
        "one byte held": "def whole_bytes(data):\n    try:\n        data.decode()\n        return len(data)\n"
                         "    except UnicodeDecodeError:\n        return len(data) - 1\n",
        "text": "def whole_bytes(data):\n    return data.decode(errors='ignore')\n",
    },
    "detokenizer": {
        "each call alone": _ALONE,
        "what is held alone": _HELD_ONLY,
        "everything each time": _ALL,
        "final is forgotten": _changed(_CONTEXT, ' and not final', ''),
        "nothing for no tokens": _changed(_CONTEXT, "        self.held =", "        if not token_ids:\n            return ''\n"
                                          "        self.held ="),
        "replacements dropped": _changed(_ALL, "return new", "return new.replace('\\ufffd', '')"),
        "everything again": _changed(_CONTEXT, "[len(old):]", ""),
        "the context moves without text": _changed(_CONTEXT, "if not new or (new", "if (new"),
        "spaces stripped": _changed(_CONTEXT, "return new", "return new.strip()"),
        "keeps the caller's list": """
class Detokenizer:
    def __init__(self, decode):
        self.decode, self.ids, self.window, self.shown = decode, None, 0, 0

    def add(self, token_ids, final=False):
        if self.ids is None:
            self.ids = token_ids
        else:
            self.ids += token_ids
        known = self.decode(self.ids[self.window:self.shown])
        text = self.decode(self.ids[self.window:])
        if (text.endswith("\\ufffd") and not final) or len(text) <= len(known):
            return ""
        self.window, self.shown = self.shown, len(self.ids)
        return text[len(known):]
""",
        "adds to the caller's list": _changed(_CONTEXT, "self.held = self.held + list(token_ids)",
                                              "token_ids[:0] = self.held\n        self.held = token_ids"),
        "no neighbour": _changed(_CONTEXT, "self.context = self.held", "self.context = []"),
        "the neighbour grows": _changed(_CONTEXT, "self.context = self.held", "self.context = self.context + self.held"),
        "anywhere in the text": _changed(_CONTEXT, 'new.endswith("\\ufffd")', '"\\ufffd" in new'),
        "None for nothing": _changed(_CONTEXT, 'return ""', "return None"),
        "shared by all": "IDS = []\n" + _changed(_ALL, "decode, [], 0", "decode, IDS, 0"),
        "whole at once only at the end": _changed(_CONTEXT, "if not new or (", "if not final or not new or ("),
        "three tokens at most are held": _changed(_CONTEXT, 'and not final)', 'and not final and len(self.held) < 3)'),
    },
    "stop_checker": {
        "shows at once": _changed(_STOP, "keep = max(keep, n)", "keep = 0"),
        "holds the longest stop string's length": _changed(_STOP, "if self.buffer.endswith(s[:n]):",
                                                           "if n <= len(self.buffer):"),
        "in the list's order": _changed(_STOP, "best = min(best or (at + len(s), at, s), (at + len(s), at, s))",
                                        "best = best or (at + len(s), at, s)"),
        "the one that begins first": _changed(_changed(_STOP, "best = min(best or (at + len(s), at, s), (at + len(s), at, s))",
                                              "best = min(best or (at, at + len(s), s), (at, at + len(s), s))"),
                                              "end, begin, s = best", "begin, end, s = best"),
        "the shortest of equals": _changed(_STOP, "(at + len(s), at, s), (at + len(s), at, s)",
                                           "(at + len(s), -at, s), (at + len(s), -at, s)")
                                  .replace("end, begin, s = best", "end, begin, s = best[0], -best[1], best[2]"),
        "include is ignored": _changed(_STOP, "end if self.include else begin", "begin"),
        "include shows all": _changed(_STOP, "self.buffer[: end if self.include else begin]",
                                      "self.buffer if self.include else self.buffer[:begin]"),
        "holds at the end": _changed(_STOP, "for s in self.stop if not final else ():", "for s in self.stop:"),
        "min_tokens are ignored": _changed(_STOP, "for s in self.stop if may_stop else ():", "for s in self.stop:"),
        "found later": _changed(_STOP, "while at >= 0 and at + len(s) <= old:", "while False:"),
        "holds nothing while nothing may stop": _changed(_STOP, "for s in self.stop if not final else ():",
                                                         "for s in self.stop if may_stop and not final else ():"),
        "holds the shortest": _changed(_STOP, "keep = max(keep, n)", "keep = keep or n"),
        "holds the longest of the last string": _changed(_STOP, "keep = max(keep, n)", "keep = n"),
        "only the whole piece is held": _changed(_STOP, "if self.buffer.endswith(s[:n]):", "if self.buffer == s[:n]:"),
        "forgets what it held": _changed(_STOP, "self.buffer += text", "self.buffer = text"),
        "looks in the new piece only": _changed(_STOP, "at = self.buffer.find(s)\n",
                                                "at = self.buffer.find(s, old)\n"),
        "text before the stop is lost": _changed(_STOP, "self.buffer[: end if self.include else begin], s", '"", s'),
        "True for the stop string": _changed(_STOP, "if self.include else begin], s", "if self.include else begin], True"),
        "holds what is complete": _changed(_STOP, "range(1, len(s))", "range(1, len(s) + 1)"),
        "holds too little by one": _changed(_STOP, "range(1, len(s))", "range(1, len(s) - 1)"),
        "text alone": _changed(_STOP, "return out, None", "return out"),
        "the last one": _changed(_STOP, "at = self.buffer.find(s)\n", "at = self.buffer.rfind(s)\n"),
        "in any case of letters": _changed(_STOP, "at = self.buffer.find(s)\n", "at = self.buffer.lower().find(s.lower())\n"),
        "as a pattern": "import re\n" + _changed(_STOP, "at = self.buffer.find(s)\n",
                                                 "at = next((m.start() for m in re.finditer(s, self.buffer)), -1)\n"),
        "spaces in front do not count": _changed(_STOP, "self.stop, self.include, self.buffer = stop,",
                                                 "self.stop, self.include, self.buffer = [s.strip(' ') for s in stop],"),
        "an empty text for no stop": _changed(_STOP, "return out, None", 'return out, ""'),
    },
    "event_reader": {
        "a piece is an event": """
class EventReader:
    def feed(self, piece):
        return [line[6:] for line in piece.decode().split("\\n") if line.startswith("data: ")]
""",
        "pieces decoded": """
class EventReader:
    def __init__(self):
        self.text = ""

    def feed(self, piece):
        self.text += piece.decode(errors="replace")
        *blocks, self.text = self.text.replace("\\r\\n", "\\n").split("\\n\\n")
        found = [[l[5:].removeprefix(" ") for l in b.split("\\n") if l.startswith("data:")] for b in blocks]
        return ["\\n".join(lines) for lines in found if lines]
""",
        "splitlines": _changed(_DECODER, 'while "\\n" in self.text:\n            line, self.text = self.text.split("\\n", 1)',
                               '*lines, self.text = (self.text + "x").splitlines()\n        self.text = self.text[:-1]\n'
                               '        for line in lines:'),
        "all CRs": _changed(_EVENTS, 'if line.endswith("\\r"):\n                line = line[:-1]', 'line = line.rstrip("\\r")'),
        "a lone CR is an end": _changed(_EVENTS, "        for byte in piece:", "        for byte in piece.replace(b'\\r\\n', b'\\n')"
                                        ".replace(b'\\r', b'\\n'):"),
        "CRs are no data": _changed(_EVENTS, "            if byte != 10:", "            if byte == 13:\n                continue\n"
                                    "            if byte != 10:"),
        "LF only": _changed(_EVENTS, 'if line.endswith("\\r"):', "if False:"),
        "the space must be there": _changed(_EVENTS, 'line[6:] if line[5:6] == " " else line[5:]', "line[6:]"),
        "stripped": _changed(_EVENTS, 'line[6:] if line[5:6] == " " else line[5:]', "line[5:].strip()"),
        "all spaces in front": _changed(_EVENTS, 'line[6:] if line[5:6] == " " else line[5:]', 'line[5:].lstrip(" ")'),
        "the last line only": _changed(_EVENTS, '"\\n".join(self.lines)', "self.lines[-1]"),
        "joined without a newline": _changed(_EVENTS, '"\\n".join', '"".join'),
        "an event a line": _changed(_changed(_EVENTS, "self.lines.append(", "found.append("), "if self.lines:", "if False:"),
        "empty events for empty lines": _changed(_EVENTS, "if self.lines:", "if True:"),
        "no empty events": _changed(_EVENTS, "if self.lines:", "if any(self.lines):"),
        "any field that begins with data": _changed(_EVENTS, 'line[:5] == "data:"', 'line[:4] == "data"'),
        "told again": _changed(_EVENTS, "found = []", "found = self.__dict__.setdefault('found', [])"),
        "data not cleared": _changed(_EVENTS, "                self.lines = []\n", ""),
        "anywhere in the line": _changed(_DECODER, "field, colon, value = line",
                                         'field, colon, value = line[max(line.find("data:"), 0):]'),
        "the end is an end": _changed(_EVENTS, "        return found", "        if self.lines:\n            found.append("
                                      '"\\n".join(self.lines))\n            self.lines = []\n        return found'),
        "bytes": _changed(_EVENTS, 'found.append("\\n".join(self.lines))', 'found.append("\\n".join(self.lines).encode())'),
        "the rest is stripped": _changed(_DECODER, "while ", "self.text = self.text.strip(' ')\n        while "),
        "a comment ends an event": _changed(_DECODER, 'field == "" and colon == ""', 'field == ""'),
        "a bare name ends an event": _changed(_DECODER, 'field == "" and colon == ""', 'colon == ""'),
        "stops at DONE": _changed(_EVENTS, 'elif line[:5] == "data:":', 'elif line[:5] == "data:" and "[DONE]" not in line:'),
    },
    "between": {
        "two figures": _changed(_BETWEEN, "return tokens / seconds, ttft, share", "return tokens / seconds, ttft"),
        "totals": _changed(_BETWEEN, 'after["vllm:" + name] - before["vllm:" + name]', 'after["vllm:" + name]'),
        "mean of the totals": _changed(_BETWEEN, "ttft = total / count",
                                       'ttft = after["vllm:" + names[1]] / after["vllm:" + names[2]]'),
        "share of the totals": _changed(_BETWEEN, "share = hits / queries",
                                        'share = after["vllm:" + names[3]] / after["vllm:" + names[4]]'),
        "difference of the means": _changed(_BETWEEN, "ttft = total / count",
                                            'ttft = after["vllm:" + names[1]] / after["vllm:" + names[2]] - '
                                            'before["vllm:" + names[1]] / max(before["vllm:" + names[2]], 1)'),
        "zero for none": _changed(_BETWEEN, "ttft = share = None", "ttft = share = 0.0"),
        "none for zero": _changed(_BETWEEN, "share = hits / queries", "share = hits / queries or None"),
        "divides by nothing": _changed(_BETWEEN, "if count > 0", "if True"),
        "percent": _changed(_BETWEEN, "share = hits / queries", "share = 100 * hits / queries"),
        "not a rate": _changed(_BETWEEN, "tokens / seconds", "tokens"),
        "upside down": _changed(_BETWEEN, "total / count", "count / total"),
        "the other way": _changed(_BETWEEN, 'after["vllm:" + name] - before["vllm:" + name]',
                                  'before["vllm:" + name] - after["vllm:" + name]'),
        "one guard for both": _changed(_BETWEEN, "if queries > 0:", "if count > 0:"),
        "of all names": _changed(_TRY, "for name in before}", "for name in after}"),
        "changes the scrape": _changed(_BETWEEN, "    ttft = share", "    after.clear()\n    ttft = share"),
    },
    "quantile": {
        "the bound": _changed(_QUANTILE, "return lows[i] + (bound - lows[i]) * (rank - befores[i]) / (count - befores[i])",
                              "return bound"),
        "counts are not cumulative": _changed(_QUANTILE, "total = buckets[-1][1]", "total = sum(c for _, c in buckets)"),
        "the whole count": _changed(_QUANTILE, "/ (count - befores[i])", "/ count"),
        "from zero": _changed(_QUANTILE, "lows[i] + (bound - lows[i]) *", "bound *"),
        "rank from zero": _changed(_QUANTILE, "(rank - befores[i])", "rank"),
        "infinite": _changed(_QUANTILE, 'if bound == float("inf"):', "if False:"),
        "more than": _changed(_QUANTILE, "if count >= rank:", "if count > rank:"),
        "zero without values": _changed(_QUANTILE, "return None", "return 0.0"),
        "no guard": _changed(_QUANTILE, "if total == 0:", "if False:"),
        "rounded rank": _changed(_QUANTILE, "rank = q * total", "rank = round(q * total)"),
        "rank rounded up": "import math\n" + _changed(_QUANTILE, "rank = q * total", "rank = math.ceil(q * total)"),
        "the first bound of all": _changed(_QUANTILE, "return lows[i]\n", "return buckets[0][0]\n"),
        "the nearest bound": _changed(_QUANTILE, "lows = [0.0] +", "lows = [buckets[0][0]] +"),
        "percent": _changed(_QUANTILE, "rank = q * total", "rank = q * total / 100"),
        "the middle of the bucket": _changed(_QUANTILE, "(rank - befores[i]) / (count - befores[i])", "0.5"),
        "drops the infinite one": _changed(_QUANTILE, "    total =", "    buckets = buckets[:-1]\n    total ="),
        "takes it off the caller's list": _changed(_QUANTILE, "    if total == 0", "    last = buckets.pop()\n    buckets = buckets "
                                                   "+ [last]\n    if total == 0"),
    },
}
