"""Lab 14: drives the student's code with plain values. Runs in the child process."""


class BytesDriver:
    def __init__(self, student):
        self.student = student

    def whole_bytes(self, data):
        return self.student.whole_bytes(data)


class Decoder:
    """Token ids to text, as the tokenizers do it. kind: "bytes": bytes to text, U+FFFD for what is no character.
    "spaces": the same, but a space at the very beginning is dropped, as SentencePiece's decoders do. A piece of no
    bytes is a special token, which is left out.
    """

    def __init__(self, kind):
        self.kind, self.pieces, self.ids, self.num_decoded, self.complaint = kind, [], {}, 0, ""

    def id_of(self, piece):
        """A number from 100 on, so that a token is not taken for a byte."""
        if piece not in self.ids:
            self.ids[piece] = 100 + len(self.pieces)
            self.pieces.append(piece)
        return self.ids[piece]

    def decode(self, token_ids):
        if not isinstance(token_ids, list):
            self.complaint = f"called decode with {type(token_ids).__name__}: decode wants a list of token ids"
            raise ValueError(self.complaint)
        self.num_decoded += len(token_ids)
        data = b"".join(self.pieces[token_id - 100] for token_id in token_ids)
        if self.kind == "spaces":
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")


class DetokenizerDriver:
    def __init__(self, student, kind):
        self.decoder = Decoder(kind)
        self.student = student
        self.mine = student.Detokenizer(self.decoder.decode)

    def add(self, pieces, final):
        given = [self.decoder.id_of(piece) for piece in pieces]
        before = list(given)
        # As the engine calls it: without `final` in the midst of a text.
        text = self.mine.add(given, final=True) if final else self.mine.add(given)
        if given != before:
            return "add has changed the list token_ids"
        given[:] = [100] * len(given)  # the caller goes on to use its list
        return text

    def decoded(self, num_tokens, text):
        """Tokens that decode was given in all, for a text of so many tokens, one byte each, one token at a time."""
        decoder = Decoder("bytes")
        mine = self.student.Detokenizer(decoder.decode)
        data = text.encode()
        for i in range(num_tokens):
            mine.add([decoder.id_of(bytes([data[i % len(data)]]))])
        return decoder.num_decoded


class StopDriver:
    def __init__(self, student, stop, include_stop):
        stop = tuple(stop)
        self.mine = student.StopChecker(stop, include_stop) if include_stop else student.StopChecker(stop)

    def add(self, text, may_stop=True, final=False):
        more = {} if may_stop else {"may_stop": False}
        if final:
            more["final"] = True
        return self.mine.add(text, **more)


class EventDriver:
    def __init__(self, student):
        self.mine = student.EventReader()

    def feed(self, piece):
        return self.mine.feed(piece)


NAMES = ("generation_tokens_total", "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count",
         "prefix_cache_hits_total", "prefix_cache_queries_total")  # fmt: skip


class MetricsDriver:
    def __init__(self, student):
        self.student = student

    def between(self, before, after, seconds):
        scrapes = [
            {f"vllm:{name}": value for name, value in zip(NAMES, values, strict=True)} for values in (before, after)
        ]
        # A scrape has more names than these, and a name may appear only when it is first counted.
        scrapes[0]["vllm:num_requests_running"] = scrapes[1]["vllm:num_requests_running"] = 3.0
        scrapes[1]["vllm:num_preemptions_total"] = 1.0
        copies = [dict(scrape) for scrape in scrapes]
        found = self.student.between(*scrapes, seconds)
        return found if copies == scrapes else "between has changed a scrape"

    def quantile(self, q, buckets):
        given = [(float(bound), count) for bound, count in buckets]
        before = list(given)
        found = self.student.quantile(q, given)
        return found if given == before else "quantile has changed the list `buckets`"
