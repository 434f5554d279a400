"""From tokens to text while they come: whole characters only, and nothing that a stop string may still take back.

    token ids --Detokenizer--> characters --StopChecker--> what may be shown

A character of UTF-8 can be split over tokens (Chinese, emoji), so text that ends in an incomplete one waits.
A stop string can be split too: the longest end of the text that could begin one waits until it is decided.
Concatenated, the pieces are the text that the whole output decodes to, cut at the stop string.
"""

from collections.abc import Callable


class Detokenizer:
    """The characters of one growing list of tokens (lab 14). Decodes a short window, not the whole output, each time.

    decode: token ids to text, U+FFFD for bytes that are no character (yet).
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._token_ids: list[int] = []
        self._shown = 0  # tokens whose text has been given out
        self._window = 0  # where decoding starts: some tokens earlier, for decoders that look at their neighbours

    def add(self, token_ids: list[int], final: bool = False) -> str:
        """The text that `token_ids` complete; with `final`, also what stays incomplete."""
        self._token_ids += token_ids
        known = self._decode(self._token_ids[self._window : self._shown])
        text = self._decode(self._token_ids[self._window :])
        if (text.endswith("\ufffd") and not final) or len(text) <= len(known):
            return ""  # nothing new: the window stays where it has text to lean on
        self._window, self._shown = self._shown, len(self._token_ids)
        return text[len(known) :]


class StopChecker:
    """Watches text for the first of some stop strings, and holds back what could become one (lab 14)."""

    def __init__(self, stop: tuple[str, ...] = (), include_stop: bool = False):
        self._stop = stop
        self._include_stop = include_stop
        self._longest_hold = max((len(s) for s in stop), default=1) - 1
        self._held = ""

    def add(self, text: str, may_stop: bool = True, final: bool = False) -> tuple[str, str | None]:
        """(text that may be shown, the stop string that ended it or None).

        may_stop: False before min_tokens, when a stop string is text like any other.
        Of several, the one that is complete first counts, however the text was cut into pieces.
        """
        was_there, text = len(self._held), self._held + text
        self._held = ""
        # One that was complete before is not asked about again: it came while nothing could stop.
        begins = {s: text.find(s, max(0, was_there - len(s) + 1)) for s in self._stop} if may_stop else {}
        hits = [(begin + len(s), -len(s), s) for s, begin in begins.items() if begin >= 0]
        if hits:
            end, _, stop = min(hits)
            return text[: end if self._include_stop else end - len(stop)], stop
        if not final:
            for length in range(min(len(text), self._longest_hold), 0, -1):
                if any(s.startswith(text[-length:]) for s in self._stop):
                    self._held = text[-length:]
                    return text[:-length], None
        return text, None
