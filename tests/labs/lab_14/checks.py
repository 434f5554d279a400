"""Lab 14, serving: its exercises."""

import re
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor

from hypothesis import strategies as st

from kvlab.grade import Approx, AtMost, Exercise, LabInfo, Trace, calls, say, walks

LAB = LabInfo(title=say("Serving"), sections="PAV 3.1, 5, 6", before=("03", "07"))
READING = "kvlab.serve.reading:"
TEXT = "kvlab.engine.text:"
CHARACTERS = st.sampled_from("ab é块表🙂")


def one(name, *arguments, why=None):
    return Trace((), ((name, *arguments),), why)


# ---- 1


class WholeBytes(Exercise):
    """Whole characters, by hand."""

    name, points, minutes, section = "whole_bytes", 2, 8, "PAV 5"
    defines = ("whole_bytes",)
    ours = {"whole_bytes": READING + "whole_bytes"}
    driver = "BytesDriver"
    hints = (
        say("Only the last character can be incomplete, and it has at most four bytes. Which of the last bytes begins it?"),
        say("Walk back over the bytes that go on with a character (0x80 to 0xBF) to the one that begins it. That one tells "
            "how many bytes the character has: below 0x80 one, from 0xC0 two, from 0xE0 three, from 0xF0 four."),
        say("Let start be the place of the first byte of the last character, and size its number of bytes. If start + size "
            "is more than len(data), the answer is start, and otherwise len(data)."),
    )  # fmt: skip
    examples = (
        one("whole_bytes", b""),
        one("whole_bytes", b"a"),
        one("whole_bytes", "块".encode()),
        one("whole_bytes", "块".encode()[:1]),
        one("whole_bytes", "块".encode()[:2]),
        one("whole_bytes", "a块".encode()[:3]),
        one("whole_bytes", "块表".encode()[:4]),
        one("whole_bytes", "块表".encode()),
        one("whole_bytes", "é".encode()),
        one("whole_bytes", "aé".encode()[:2], why=say("é has two bytes, c3 a9.")),
        one("whole_bytes", "a🙂".encode()[:4], why=say("🙂 has four bytes, f0 9f 99 82.")),
        one("whole_bytes", "🙂".encode()),
        one("whole_bytes", "块a".encode()),
        one("whole_bytes", "😀".encode()[:1]),
        one("whole_bytes", "ж".encode()),
        one("whole_bytes", "жߪж".encode()[:3]),
        one("whole_bytes", "ก".encode()[:2], why=say("ก has three bytes, e0 b8 81.")),
        one("whole_bytes", "aก".encode()),
        one("whole_bytes", "\U0010ffff".encode()[:3]),
        one("whole_bytes", "a\ufffd".encode(), why=say("U+FFFD itself is a character, of three bytes: ef bf bd.")),
    )  # fmt: skip

    class Oracle:
        """Cuts the end off until Python can read it."""

        def whole_bytes(self, data):
            for end in range(len(data), -1, -1):
                try:
                    data[:end].decode()
                except UnicodeDecodeError:
                    continue
                return end

    def traces(self):
        texts = st.text(CHARACTERS | st.characters(exclude_categories=["Cs"]), max_size=4)
        data = st.tuples(texts, st.integers(0, 3)).map(lambda t: t[0].encode()[: len(t[0].encode()) - t[1]])
        return calls("whole_bytes", data)

    def explain(self, op, expected, got):
        if type(got) is not int:
            return say("Return a whole number: how many bytes, from the beginning, are whole characters.")
        if got > expected:
            return say("The last character is not complete: its first byte announces more bytes than have come.")
        if got == expected - 1 or got < expected:
            return say("The last character is complete: it has as many bytes as its first byte announces, so nothing is held "
                       "back.")  # fmt: skip
        return None

    def explain_error(self, op, expected, error, message):
        if error == "IndexError":
            return say("There may be no byte at all.")
        return None


# ---- 2


class Decoded:
    """What the tokens so far decode to, all at once: the slow and obvious one."""

    def __init__(self, kind):
        self.kind, self.data, self.shown, self.is_over = kind, b"", "", False

    def add(self, pieces, final, got):
        self.data += b"".join(pieces)
        self.is_over = final
        data = self.data.removeprefix(b" ") if self.kind == "spaces" else self.data
        full = data.decode(errors="replace")
        if final or not full.endswith("\ufffd"):
            expected = full[len(self.shown) :]
        else:  # an incomplete end: what is whole before it may go out, or wait
            most = full.rstrip("\ufffd")[len(self.shown) :]
            expected = got if isinstance(got, str) and most.startswith(got) else ""
        self.shown += expected
        return expected

    def decoded(self, num_tokens, text):
        return AtMost(30 * num_tokens)

    def ops(self):
        if self.is_over:
            return []
        pieces = [[b"a"], [b" b"], [b"\xe5"], [b"\x9d"], [b"\x97"], ["块".encode()], [b"\xe5\x9d"], [b"\x97 c"],
                  [b"\xf0\x9f"], [b"\x99\x82"], ["\ufffd".encode()], [b" "], [b""], [], [b"x", b"\xe5"],
                  [b"\x9d", b"\x97", b" y"]]  # fmt: skip
        return [*(("add", piece, False) for piece in pieces), ("add", [], True), ("add", [b"z"], True),
                ("add", [b"\xe5"], True)]  # fmt: skip


def stream(text, kind="bytes", why=None, tail=()):
    """One byte a token, one token a call."""
    return Trace((kind,), (*(("add", [bytes([byte])], False) for byte in text.encode()), *tail, ("add", [], True)), why)


class DetokenizerExercise(Exercise):
    """A detokenizer for a stream."""

    name, points, minutes, section = "detokenizer", 4, 20, "PAV 5"
    defines = ("Detokenizer",)
    ours = {"Detokenizer": TEXT + "Detokenizer"}
    part = {"detokenizer": "Detokenizer"}
    driver = "DetokenizerDriver"
    num_random = 120
    hints = (
        say("Keep all token ids, and two places in them: up to where the text has been shown, and where your window begins, "
            "some tokens earlier. What is new is the difference of two texts: of the window with the new tokens, and of the "
            "window without them."),
        say("known = decode(ids[window:shown]) and text = decode(ids[window:]). If text ends in U+FFFD and it is not the end, "
            "show nothing and move nothing. Otherwise show what text has beyond known, and let the window begin where the "
            "old text ended. If text is no longer than known, nothing is new: move nothing either."),
        say("When something is shown: window, shown = shown, len(ids). In this order: the new window is what has just been "
            "shown, so that the next token has a neighbour."),
    )  # fmt: skip
    examples = (
        Trace(("bytes",), (("add", [b"a"], False), ("add", [b" b"], False))),
        Trace(("bytes",), (("add", ["块".encode()], False),)),
        stream("块"),
        stream("a块b🙂"),
        Trace(("bytes",), (("add", [b"a", b"b"], False), ("add", [b"c", b"d", b"e"], False)),
              say("One call may bring several tokens.")),
        Trace(("bytes",), (("add", [b"a", b"\xe5"], False), ("add", [b"\x9d"], False), ("add", [b"\x97", b"b"], False)),
              say("A call may end within a character.")),
        Trace(("bytes",), (("add", [b"a\xe5\x9d"], False), ("add", [b"\x97\xe8\xa1"], False), ("add", [b"\xa8"], False)),
              say("A token may hold the end of one character and the beginning of the next.")),
        Trace(("bytes",), (("add", [b"a"], False), ("add", [b"\xe5"], False), ("add", [], True)),
              say("final: nothing more will come, so what is held is shown as it is. token_ids may be empty then.")),
        Trace(("bytes",), (("add", [b"a"], False), ("add", [], False), ("add", [b"b"], True))),
        Trace(("bytes",), (("add", [b"a"], False), ("add", [b""], False), ("add", [b"b"], False), ("add", [b""], True)),
              say("A special token has no text.")),
        Trace(("bytes",), (("add", [b"a"], False), ("add", ["\ufffd".encode()], False), ("add", [b"b"], False)),
              say("This U+FFFD is a character that the model wrote. It may wait, but it must not be lost.")),
        Trace(("bytes",), (("add", ["\ufffd".encode()], True),)),
        Trace(("bytes",), (("add", ["块".encode() * 2], False), ("add", ["块".encode() * 2], False), ("add", [b"\xe5"], False),
                           ("add", [b"\x9d"], False), ("add", [b"\x97"], False)), say("The same characters again.")),
        Trace(("bytes",), (("add", [b"\x9d"], False), ("add", [b"\x97"], False), ("add", [b"a"], False), ("add", [b"b"], True)),
              say("A model may write bytes that never become a character.")),
        stream("a b", "spaces", say("This decoder drops a space at the very beginning of what it decodes, as SentencePiece "
                                    "does. So it must not see a token without its neighbour.")),
        Trace(("spaces",), tuple(("add", [piece], False) for piece in (b" the", b" block", b" table"))),
        Trace(("spaces",), tuple(("add", [piece], False) for piece in (b" a", b" \xe5", b"\x9d", b"\x97", b" b", b" c"))),
        Trace(("spaces",), (("add", [b" a", b" b"], False), ("add", [b" c", b" d"], False), ("add", [b" e"], True))),
        Trace(("spaces",), (("add", [b" a"], False), ("add", [b" ", b" ", b" b"], False), ("add", [b" "], False))),
        Trace(("spaces",), (("add", [b" a"], False), ("add", [b""], False), ("add", [b" b"], False)),
              say("The second token is a special one, without text. Decoded behind it alone, b would lose its space: a window "
                  "moves only when something is shown.")),
        Trace(("spaces",), (("add", [b" a"], False), ("add", [], False), ("add", [b" b"], False), ("add", [b" c"], False))),
        Trace(("bytes",), (("decoded", 300, "a"),), say("decode may look at a window only, not at the whole text for each "
                                                        "token.")),
        Trace(("bytes",), (("decoded", 900, "a"),)),
        Trace(("bytes",), (("decoded", 300, "块"),)),
        Trace(("bytes",), (("decoded", 900, "🙂 "),)),
    )  # fmt: skip
    Oracle = Decoded

    def traces(self):
        return walks(Decoded, st.tuples(st.sampled_from(["bytes", "spaces"])), max_ops=10)

    def describe_init(self, init):
        return "Detokenizer(decode)" + (", whose decode drops a leading space" if init[0] == "spaces" else "")

    def describe(self, op):
        if op[0] == "decoded":
            return f"tokens given to decode for a text of {op[1]:,} tokens, one a call,"
        final = ", final=True" if op[2] else ""
        return f"add(tokens of the bytes [{', '.join(piece.hex(' ') or '-' for piece in op[1])}]{final})"

    def explain(self, op, expected, got):
        if op[0] == "decoded":
            return say("That grows with the square of the text: each call decodes everything again. Decode a window that moves "
                       "along: the last tokens that were shown, and what has come since.")  # fmt: skip
        if isinstance(got, str) and "has changed the list" in got:
            return say("The list belongs to the caller. Make a list of your own, and add to that one.")
        if not isinstance(got, str):
            return say("add returns text, and the empty text if there is nothing to show.")
        if "\ufffd" in got and "\ufffd" not in expected:
            return say("U+FFFD is shown to somebody whose next token would have completed the character. As long as more can "
                       "come, wait.")  # fmt: skip
        if got == "" and expected:
            if op[2]:
                return say("final: nothing more will come, so all that is held has to go out now.")
            if expected.isspace():
                return say("A space is lost. What a token decodes to may depend on what stands before it: decode it together "
                           "with the token before.")  # fmt: skip
            return say("All that has come is whole by now, and can be shown: nothing may wait without need.")
        if got.replace(" ", "") == expected.replace(" ", ""):
            return say("A space is lost or doubled. What a token decodes to may depend on what stands before it: decode it "
                       "together with the token before.")  # fmt: skip
        if len(got) > len(expected) and got.endswith(expected):
            return say("Part of this has been shown before. add returns what is new, and only that.")
        if len(got) > len(expected):
            return say("This is more than the tokens so far say.")
        return say("Something is missing: put together, the pieces are what all tokens decode to at once.")

    def explain_error(self, op, expected, error, message):
        if "decode wants a list" in message:
            return say("decode takes a list of token ids, also for a single one: decode([token_id]).")
        return None


# ---- 3


class Characters:
    """Looks at every end of the text, one after the other."""

    def __init__(self, stop, include_stop):
        self.stop, self.include, self.text, self.shown, self.is_over = stop, include_stop, "", 0, False

    def add(self, text, may_stop=True, final=False):
        start, self.text, self.is_over = len(self.text), self.text + text, final
        if may_stop:
            for end in range(start + 1, len(self.text) + 1):
                hits = [s for s in self.stop if self.text[:end].endswith(s)]
                if hits:
                    stop, self.is_over = max(hits, key=len), True
                    return [self.text[self.shown : end if self.include else end - len(stop)], stop]
        hold = 0
        if not final:
            starts = {s[:n] for s in self.stop for n in range(1, len(s))}
            hold = max((len(s) for s in starts if self.text.endswith(s)), default=0)
        out = self.text[self.shown : len(self.text) - hold]
        self.shown += len(out)
        return [out, None]

    def ops(self):
        if self.is_over:
            return []
        texts = ["a", "b", "c", "", "ab", "aab", "bc", "cab", "abcab"]
        return [*(("add", text) for text in texts), *(("add", text, False) for text in ("a", "ab", "b", "c", "bca")),
                ("add", "", True, True), ("add", "a", True, True), ("add", "ab", False, True)]  # fmt: skip


def stops(stop, *texts, include=False, why=None, final=None):
    ops = tuple(("add", text) for text in texts)
    return Trace((list(stop), include), ops if final is None else (*ops, ("add", final, True, True)), why)


class StopCheckerExercise(Exercise):
    """Stop strings that come in pieces."""

    name, points, minutes, section = "stop_checker", 5, 22, "PAV 5"
    defines = ("StopChecker",)
    ours = {"StopChecker": TEXT + "StopChecker"}
    part = {"stop_checker": "StopChecker"}
    driver = "StopDriver"
    num_random = 150
    hints = (
        say("Put what you have held before the new text. First look for a stop string in it; of several, the one that ENDS "
            "first. If there is none, hold the longest end of the text that some stop string begins with."),
        say("Where does s end? text.find(s) + len(s), if text.find(s) is not -1. Of equal ends take the longest string. To "
            "hold: try the lengths from the longest to 1, and ask s.startswith(text[-length:]) for every s. An end as long as "
            "s itself is s, and no beginning."),
        say("With may_stop=False a stop string passes as text, but you hold as before. And later it must not be found in what "
            "was held: look from max(0, len(held) - len(s) + 1) on, so that a hit ends in the new text."),
    )  # fmt: skip
    examples = (
        stops([], "a", "b"),
        stops(["STOP"], "a", "bSTOPc"),
        stops(["STOP"], "abST", "OPc", why=say("The stop string is split over two pieces.")),
        stops(["STOP"], "S", "T", "O", "P"),
        stops(["STOP"], "a stop", " St", "Op", why=say("A stop string is found as it is written: small letters are not capital "
                                                      "ones.")),
        stops(["a.b"], "axb", "a.b", why=say("A stop string is a text, and no pattern: a dot is a dot.")),
        stops(["(1)", "?"], "1 (", "1", ") ?"),
        stops(["STOP"], "aS", "T", "x", "ST", why=say("ST was held, and x shows that no STOP comes of it.")),
        stops(["STOP"], "STSTOP"),
        stops(["STOP"], "SS", "TSTO", "P"),
        stops(["STOP"], "aSTO", final="", why=say("final: nothing more will come, so what was held is text.")),
        stops(["STOP"], "aSTO", final="P"),
        stops(["STOP"], "STOP", include=True),
        stops(["STOP"], "aST", "OPx", include=True, why=say("include_stop: the stop string is shown, and nothing behind it.")),
        stops(["\n\n"], "a\n", "b\n", "\nc"),
        stops([" b"], "a ", " ", "b", why=say("A space is a character like any other.")),
        stops(["é", "块表"], "e", "e\u0301", "块", "表"),
        stops(["aab"], "aa", "a", "b", why=say("Of aaa the last two a's may still begin the stop string, and the first may "
                                               "not.")),
        stops(["abab"], "ab", "aab", "ab"),
        stops(["b", "abc"], "xabc", why=say("b is complete before abc is: it counts.")),
        stops(["abc", "b"], "xabc"),
        stops(["cd", "abcde"], "abcde"),
        stops(["bcd", "abcd"], "xabcd", why=say("Both are complete at the same character: the longest counts, so that nothing "
                                                "of it is shown.")),
        stops(["abcd", "bcd"], "xab", "cd", include=True),
        stops(["b", "ab"], "aab"),
        stops(["xyz", "yab"], "xy", "a", "c", why=say("xy was held for xyz. With a behind it, ya is held for yab, and x is "
                                                     "text.")),
        stops(["ab", "b"], "a", "c"),
        stops(["a"], "bab", why=say("A stop string of one character is never held.")),
        stops(["STOP", "ST"], "aS", "T"),
        stops(["aXb"], "aXcaXb"),
        stops(["ab"], "b", "a", "", "b", why=say("A piece may be empty.")),
        Trace((["ab"], False), (("add", "xaby", False), ("add", "ab")), say("may_stop=False: a stop string is text like any "
                                                                           "other.")),
        Trace((["ab"], False), (("add", "xa", False), ("add", "b")), say("It is complete only in the second piece, where it "
                                                                        "may stop.")),
        Trace((["ab"], False), (("add", "xa", False), ("add", "b", False), ("add", "a", True, True))),
        Trace((["b", "abc"], False), (("add", "ab", False), ("add", "x")), say("ab is held, since abc may come. The b in it "
                                                                              "came while nothing could stop.")),
        Trace((["ab", "abc"], True), (("add", "ab", False), ("add", "c"))),
        Trace((["b", "abcd"], False), (("add", "ab", False), ("add", "cb"))),
        Trace((["ab"], False), (("add", "a", False), ("add", "", False, True))),
        Trace((["ab"], False), (("add", "ab", False, True),)),
    )  # fmt: skip
    Oracle = Characters

    def traces(self):
        strings = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)
        return walks(Characters, st.tuples(strings, st.booleans()), max_ops=6)

    def describe_init(self, init):
        include = ", include_stop=True" if init[1] else ""
        return f"StopChecker({tuple(init[0])!r}{include})"

    def describe(self, op):
        _, text, *more = op
        names = [f", {name}={value}" for name, value, usual in zip(("may_stop", "final"), more, (True, False), strict=False)
                 if value != usual]  # fmt: skip
        return f"add({text!r}{''.join(names)})"

    def explain(self, op, expected, got):
        if not (isinstance(got, list) and len(got) == 2 and isinstance(got[0], str)
                and (got[1] is None or isinstance(got[1], str))):  # fmt: skip
            return say("Return two things: the text to show, and the stop string that ended it, or None.")
        (text, stop), (shown, found) = expected, got
        may_stop, final = op[2] if len(op) > 2 else True, op[3] if len(op) > 3 else False
        if stop is None and found is not None:
            if not found:
                return say("As long as nothing has stopped, the second thing is None, and not an empty text.")
            if not may_stop:
                return say("may_stop is False: nothing can stop now, a stop string is text like any other.")
            return say("No stop string has been completed by this piece. One that came while may_stop was False is text for "
                       "good.")  # fmt: skip
        if stop is not None and not found:
            return say("A stop string is complete by now, with what was held. Look for it in the held text and the new text "
                       "together.")  # fmt: skip
        if found != stop:
            return say("Of several stop strings the one that is complete first counts, wherever it stands in the list and "
                       "wherever it begins. If two end at the same character, the longer one.")  # fmt: skip
        if stop is not None:
            if len(text) < len(shown) < len(text + stop) and (text + stop).startswith(shown):
                return say("Part of the stop string is shown. Without include_stop the text ends where the stop string begins, "
                           "and that is len(stop) characters before its end.")  # fmt: skip
            if shown.startswith(text) and len(shown) > len(text):
                return say("Nothing behind the stop string is shown, and without include_stop the stop string itself is not "
                           "shown either.")  # fmt: skip
            return say("Text before the stop string is text: it goes out together with the news that it has stopped. (With "
                       "include_stop, the stop string too.)")  # fmt: skip
        if final:
            return say("final: what was held did not become a stop string, so it is text and goes out.")
        if shown.startswith(text):
            return say("The end of this text may be the beginning of a stop string. Shown is shown: hold it until it is decided.")
        if text.startswith(shown):
            return say("Too much is held. Hold only the longest end with which some stop string begins, and show all before it.")
        return say("Put together, the pieces are the text, up to the stop string. What was held comes first.")


# ---- 4


class WholeStream:
    """Reads the whole stream anew, each time."""

    def __init__(self):
        self.data, self.num_known = b"", 0

    def feed(self, piece):
        self.data += piece
        whole = self.data[: self.data.rfind(b"\n") + 1].decode().replace("\r\n", "\n")
        events = []
        for block in re.split(r"\n(?=\n)", "\n" + whole)[:-1]:
            parts = [line[5:].removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
            if parts:
                events.append("\n".join(parts))
        new, self.num_known = events[self.num_known :], len(events)
        return new


def fed(*pieces, why=None):
    return Trace((), tuple(("feed", piece) for piece in pieces), why)


CUT = "data: 块\n\n".encode()
LINES = st.one_of(
    st.text(st.sampled_from("ab 块🙂:\u2028\x85\x0b\r"), max_size=5).map(lambda text: f"data: {text}"),
    st.sampled_from(["data:x", "data: {}", ": waiting", "event: a", "id: 7", "", "", "data:", "database: 1"]),
)


class EventReaderExercise(Exercise):
    """Server-sent events, out of bytes."""

    name, points, minutes, section = "event_reader", 4, 18, "PAV 5"
    defines = ("EventReader",)
    ours = {"EventReader": READING + "EventReader"}
    driver = "EventDriver"
    num_random = 100
    hints = (
        say("Collect bytes, not text: a piece may end within a character. The byte of a newline, 0x0a, is never part of "
            "another character, so lines can be cut before anything is decoded."),
        say("Keep two things: the bytes behind the last newline, and the data of the event that is not complete yet. The "
            "last part of (rest + piece).split(b\"\\n\") is the new rest; the others are whole lines."),
        say("For each whole line, without the carriage return at its end: begins with b\"data:\" -> its data, without one "
            "space in front, goes on the list; is empty and the list is not -> an event, and a new list; anything else -> "
            "nothing."),
    )  # fmt: skip
    examples = (
        fed(b"data: a\n\n"),
        fed(b"data: a\n\ndata: b\n\n", why=say("One piece may hold several events.")),
        fed(b"data: a\n", b"\n", why=say("An event is complete at its empty line, and not before.")),
        fed(b"da", b"ta: a", b"b\n\nda", b"ta: c\n\n"),
        fed(CUT[:7], CUT[7:], why=say("A piece may end within a character.")),
        fed(CUT[:8], CUT[8:9], CUT[9:]),
        fed(*(bytes([byte]) for byte in CUT)),
        fed(b""),
        fed(b"data: a\r\n\r\ndata: b\r\n\r\n", why=say("A line may end in CR LF.")),
        fed(b"data: a\r", b"\n\r", b"\n"),
        fed(b"data: a\r\r\n\r\n", why=say("Only one CR belongs to the end of the line. The one before it is data.")),
        fed(b"data: a\rb\n\r\r\n\n", why=say("A CR without LF behind it ends no line here, and a line that holds one is not "
                                             "empty.")),
        fed(b": ping\n\ndata: a\n\n", why=say("A line that begins with a colon is a comment: servers send it so that the "
                                              "connection is not taken for dead.")),
        fed(b"event: delta\ndata: a\nid: 3\n\n", why=say("Other fields are not asked for here.")),
        fed(b"data: a\ndata: b\n\n", why=say("Several data lines of one event are one text, with a newline between them.")),
        fed(b"data:a\n\n", why=say("The space behind the colon may be missing.")),
        fed(b"data:  a \n\n", why=say("One space is taken away, and no more, and none at the end.")),
        fed("data: a\u2028b\n\ndata: c\x0bd\x85e\n\n".encode(), why=say("U+2028 and others end a line for str.splitlines, and not "
                                                                      "here.")),
        fed(b"data: a ", b"b\n\n", why=say("What is kept for the next piece is kept as it is.")),
        fed(b"data:", b"  a \r", b"\n\n"),
        fed(b"data: a\n: ping\ndata: b\n\n", why=say("A comment may stand within an event, and does not end it.")),
        fed(b"data: a\nretry\ndata: b\n\n", why=say("A line that holds only a name is no empty line.")),
        fed(b'data: {"text": "data: x"}\n\n'),
        fed(b"data: [DONE]\n\n"),
        fed(b"\n\n\ndata: a\n\n\n\ndata: b\n\n"),
        fed(b"data:\n\n", b"data: \n\n", why=say("An event may be empty.")),
        fed(b"database: 1\n\n"),
        fed(b" data: a\n\ndata: b\n\n"),
    )  # fmt: skip
    Oracle = WholeStream

    def traces(self):
        @st.composite
        def cut(draw):
            end = draw(st.sampled_from(["\n", "\r\n"]))
            data = "".join(line + end for line in draw(st.lists(LINES, max_size=7))).encode()
            places = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
            return fed(*(data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)))

        return cut()

    def describe_init(self, init):
        return "EventReader()"

    def explain(self, op, expected, got):
        if not isinstance(got, list) or not all(isinstance(event, str) for event in got):
            return say("Return a list of texts, [] if no event is complete.")
        others = [line for line in op[1].split(b"\n") if b"data" in line and not line.startswith(b"data:")]
        if others and len(got) > len(expected):
            return say("A data line BEGINS with `data:`, colon and all. {line} does not, so it is left out.", line=repr(others[0]))
        if len(got) > len(expected):
            if expected == [event for event in got if event.strip()]:
                return say("Empty lines without data between them, comments and other fields are no events.")
            return say("An event is complete at its empty line, and not before; and each is told once.")
        if len(got) < len(expected):
            return say("An event is missing. A piece may complete several; the empty line may be split from the others, end in "
                       "CR LF, and come in a piece of its own.")  # fmt: skip
        if any("\ufffd" in event for event in got):
            return say("A character was cut in two. Decode whole lines, and keep the rest as bytes.")
        if [event.strip() for event in got] == [event.strip() for event in expected]:
            return say("Take away one space behind the colon, if there is one, and the carriage return at the end of the line. "
                       "Everything else is data.")  # fmt: skip
        return say("The data of an event are what its `data:` lines hold, with a newline between them. Nothing else ends a "
                   "line but a newline.")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "UnicodeDecodeError":
            return say("A piece may end within a character. Decode a line when all of it is there.")
        if error == "NotPlain" and "generator" in message:
            return say("Return a list, not a generator.")
        return None


# ---- 5


@dataclass(frozen=True)
class Figures:
    """Numbers, about, and None where there is none."""

    values: list

    def accepts(self, value):
        return isinstance(value, list) and len(value) == len(self.values) and not self.wrong(value)

    def wrong(self, value):
        """The places of what is wrong."""
        return [i for i, (mine, theirs) in enumerate(zip(self.values, value, strict=True))
                if not (theirs is None if mine is None else Approx(mine).accepts(theirs))]  # fmt: skip

    def __str__(self):
        return "(" + ", ".join("None" if value is None else f"about {value:.6g}" for value in self.values) + ")"


def scrape(*values):
    return list(map(float, values))


class Between(Exercise):
    """What happened between two scrapes."""

    name, points, minutes, section = "between", 2, 10, "PAV 5"
    defines = ("between",)
    ours = {"between": READING + "between"}
    driver = "MetricsDriver"
    hints = (
        say("Counters only rise, from the start of the server. What happened in the interval is what they have risen by."),
        say("A histogram has a _sum and a _count. The mean of what happened in the interval is the rise of the one over the "
            "rise of the other."),
        say("def rise(name): return after[name] - before[name]. If the rise of the count is 0, there is no mean: None. The "
            "same for the share of hits."),
    )  # fmt: skip
    examples = (
        one("between", scrape(0, 0, 0, 0, 0), scrape(100, 2, 4, 30, 40), 10.0),
        one("between", scrape(100, 10, 10, 90, 100), scrape(300, 11, 20, 90, 200), 4.0,
            why=say("Before the interval, the server was slow and found nearly everything. That is past.")),
        one("between", scrape(100, 10, 10, 90, 100), scrape(100, 10, 10, 90, 100), 5.0, why=say("Nothing happened.")),
        one("between", scrape(100, 10, 10, 90, 100), scrape(150, 10, 10, 90, 100), 5.0,
            why=say("Tokens came, and nobody's first one.")),
        one("between", scrape(5, 1, 2, 0, 10), scrape(6, 1.5, 3, 0, 30), 0.5, why=say("Nothing was found. That is a share, 0.")),
        one("between", scrape(0, 0, 0, 0, 0), scrape(7, 0, 3, 5, 5), 2.0),
        one("between", scrape(5, 1, 2, 0, 10), scrape(9, 1, 2, 4, 18), 1.0,
            why=say("A prompt was looked up, and its first token is yet to come: each figure has a None of its own.")),
    )  # fmt: skip

    class Oracle:
        """In fractions."""

        def between(self, before, after, seconds):
            tokens, total, count, hits, queries = (b - a for a, b in zip(before, after, strict=True))
            return Figures([tokens / seconds, *(x / y if y else None for x, y in ((total, count), (hits, queries)))])

    def traces(self):
        number = st.integers(0, 400)
        values = st.lists(number, min_size=5, max_size=5)

        def trace(parts):
            start, more, seconds = parts
            more[1] = more[1] if more[2] else 0
            more[3] = min(more[3], more[4])
            begin = [start[0], start[1] / 8, start[2], start[3], start[3] + start[4]]
            rise = [more[0], more[1] / 8, *more[2:]]
            return one("between", scrape(*begin), scrape(*(a + b for a, b in zip(begin, rise, strict=True))), seconds / 4)

        return st.tuples(values, values, st.integers(1, 40)).map(trace)

    def describe(self, op):
        names = ("generation_tokens_total", "..first_token_seconds_sum", "..first_token_seconds_count",
                 "prefix_cache_hits_total", "prefix_cache_queries_total")  # fmt: skip
        rows = ", ".join(f"{name}: {a:g} -> {b:g}" for name, a, b in zip(names, op[1], op[2], strict=True))
        return f"between(before, after, seconds={op[3]}), where {rows}"

    def explain(self, op, expected, got):
        if isinstance(got, str):
            return say("The scrapes belong to the caller: leave them as they are.")
        if not isinstance(got, list) or len(got) != 3:
            return say("Return three things: tokens a second, the mean time to the first token, the share found.")
        names = say("tokens a second"), say("the mean time to the first token"), say("the share found")
        wrong = expected.wrong(got)[0]
        totals = op[2][0] / op[3], op[2][1] / op[2][2] if op[2][2] else None, op[2][3] / op[2][4] if op[2][4] else None
        if got[wrong] is not None and got[wrong] == totals[wrong] and any(op[1]):
            return say("{what}: these are the totals since the server's start. What happened in the interval is the "
                       "difference of the two scrapes.", what=names[wrong])  # fmt: skip
        if expected.values[wrong] is None:
            return say("{what}: nothing of it fell into the interval, so there is no such figure: None, and not 0.",
                       what=names[wrong])  # fmt: skip
        if got[wrong] is None:
            return say("{what}: there is one. 0 is a figure, too.", what=names[wrong])
        return say("{what} is wrong: which rise is divided by which?", what=names[wrong])

    def explain_error(self, op, expected, error, message):
        if error == "KeyError":
            return say("A scrape holds other names, too, and not always the same ones: ask for the five alone, each with vllm: in "
                       "front.")  # fmt: skip
        if error == "ZeroDivisionError":
            return say("It may be that nothing happened in the interval: then there is no mean and no share. Return None for it.")
        return None


# ---- 6


def at_rank(rank, buckets):
    """The value with this rank, counted from the top of its bucket."""
    counts = [count for _, count in buckets]
    i = bisect_left(counts, rank)
    lows = [0.0, *(bound for bound, _ in buckets)]
    if buckets[i][0] == float("inf"):
        return lows[i]
    own = counts[i] - (counts[i - 1] if i else 0.0)
    return buckets[i][0] - (counts[i] - rank) / own * (buckets[i][0] - lows[i])


class Quantile(Exercise):
    """The 95th percentile out of buckets."""

    name, points, minutes, section = "quantile", 4, 15, "PAV 5"
    defines = ("quantile",)
    ours = {"quantile": READING + "quantile"}
    driver = "MetricsDriver"
    num_random = 100
    hints = (
        say("How many values lie at or below the one that is sought? That number is the rank: q times all of them. In which "
            "bucket is the rank reached for the first time?"),
        say("The bucket goes from the bound before it (0 for the first) to its own. Of its own values, count - count before, "
            "the rank is the (rank - count before)th. Take the same share of the bucket's width."),
        say("low + (bound - low) * (rank - below) / (count - below), where low and below belong to the bucket before. If bound "
            "is infinite: low. If there are no values at all: None."),
    )  # fmt: skip
    examples = (
        one("quantile", 0.5, [[1.0, 10.0], [float("inf"), 10.0]], why=say("The first bucket begins at 0.")),
        one("quantile", 0.95, [[1.0, 10.0], [float("inf"), 10.0]]),
        one("quantile", 0.5, [[1.0, 5.0], [2.0, 15.0], [4.0, 20.0], [float("inf"), 20.0]],
            why=say("Counts are cumulative: 15 are at most 2, so 10 lie in the bucket from 1 to 2.")),
        one("quantile", 0.95, [[1.0, 5.0], [2.0, 15.0], [4.0, 20.0], [float("inf"), 20.0]]),
        one("quantile", 0.25, [[1.0, 5.0], [2.0, 15.0], [4.0, 20.0], [float("inf"), 20.0]],
            why=say("The rank is 5, and five values are at most 1.")),
        one("quantile", 1.0, [[1.0, 5.0], [2.0, 15.0], [4.0, 20.0], [float("inf"), 20.0]]),
        one("quantile", 0.5, [[1.0, 0.0], [2.0, 0.0], [4.0, 8.0], [float("inf"), 8.0]], why=say("The first buckets are empty.")),
        one("quantile", 0.75, [[1.0, 4.0], [2.0, 4.0], [4.0, 8.0], [float("inf"), 8.0]],
            why=say("A bucket in between is empty.")),
        one("quantile", 0.5, [[1.0, 4.0], [2.0, 4.0], [4.0, 8.0], [float("inf"), 8.0]]),
        one("quantile", 0.9, [[1.0, 5.0], [2.0, 5.0], [float("inf"), 20.0]],
            why=say("The rank lies above all bounds. All that is known is: more than 2.")),
        one("quantile", 0.95, [[1.0, 0.0], [float("inf"), 0.0]], why=say("No values.")),
        one("quantile", 0.5, [[0.25, 1.0], [float("inf"), 1.0]]),
        one("quantile", 1.0, [[1.0, 3.0], [2.0, 3.0], [float("inf"), 3.0]],
            why=say("The buckets behind the last value are empty.")),
        one("quantile", 0.5, [[1.0, 0.0], [float("inf"), 3.0]]),
    )  # fmt: skip

    class Oracle:
        """Lays every value out evenly in its bucket, as a line of 1,000 steps would."""

        def quantile(self, q, buckets):
            return Approx(at_rank(q * buckets[-1][1], buckets), abs=1e-9) if buckets[-1][1] else None

    def traces(self):
        rises = st.lists(st.integers(0, 6), min_size=2, max_size=5)
        bounds = [0.5, 1.0, 2.0, 5.0]

        def trace(parts):
            q, rises = parts
            counts = list(accumulate(map(float, rises)))
            return one("quantile", q, [[b, c] for b, c in zip([*bounds[: len(rises) - 1], float("inf")], counts, strict=True)])

        return st.tuples(st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0]), rises).map(trace)

    def explain(self, op, expected, got):
        _, q, buckets = op
        if isinstance(got, str):
            return say("The list belongs to the caller: leave it as it is.")
        if expected is None:
            return say("There are no values, so there is no quantile: None.")
        if isinstance(got, int | float) and got == float("inf"):
            return say("Nobody knows how far the last bucket goes. The largest finite bound is the answer: at least that.")
        total = buckets[-1][1]
        rank = q * total
        reached = say("The rank is {rank}. It lies in the first bucket whose number REACHES it, that is: is as large or larger. "
                      "The last one always does.", rank=f"{rank:g}")  # fmt: skip
        if got is None:
            return reached
        if not isinstance(got, int | float):
            return say("Return a number, in the unit of the bounds; None only if there are no values.")
        if rank > buckets[-2][1]:
            return say("The rank, {rank}, lies in the last bucket, and nobody knows how far that one goes. The answer is the "
                       "bound before it, {bound}: at least that.", rank=f"{rank:g}", bound=f"{buckets[-2][0]:g}")  # fmt: skip
        rounded = [at_rank(whole, buckets) for whole in (floor(rank), ceil(rank)) if 0 < whole != rank]
        if any(Approx(value, abs=1e-9).accepts(got) for value in rounded):
            return say("The rank is {rank}, and it is not rounded: it is a place on a line, not one of the values.",
                       rank=f"{rank:g}")  # fmt: skip
        if rank in [count for _, count in buckets] and got in [bound for bound, _ in buckets]:
            return reached
        if got in [bound for bound, _ in buckets]:
            return say("This is a bound. Within a bucket go on by a straight line: as far into it as the rank is into its values.")
        return say("The rank is q times the last count. It lies in the first bucket whose count reaches it, as far into it as "
                   "(rank - count before) of its own values (count - count before).")  # fmt: skip

    def explain_error(self, op, expected, error, message):
        if error == "ZeroDivisionError":
            return say("A bucket without values of its own never holds the rank; and there may be no values at all.")
        return None

