# %% [markdown]
# # Lab 14: Serving (在线服务)
#
# An engine makes token ids. A user reads text, while it is being written, and may leave at any time. What stands
# between the two is small: a detokenizer, stop strings, a protocol, and figures that say how it goes. You build all of
# that here. Then you put a server up in this notebook, send it a crowd, and watch its block pool breathe.
#
# It goes with PAV 5, and with PAV 3.1 and 6. You need the ideas of lab 03 (blocks are free, held or cached) and lab 07
# (seats). You do not need to have solved them.
#
# **Time.** The six exercises take about 93 minutes, reading and watching another 40. A good place for a break is after
# exercise 3. Cells that only draw or count are folded away: one click opens them, and you need not read them.

# %%
from kvlab.lab import Lab

lab = Lab("14")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## Half a character
#
# One token comes, it is decoded, it is sent. What could be simpler? Here is a question to our small model, its answer,
# and the same tokens decoded one by one:

# %%
from kvlab import LLM, SamplingParams

llm = LLM("tiny", num_gpu_blocks_override=129)
decode = llm.tokenizer.decode

QUESTION = "Why can a language model not write all its tokens at once?"
answer = llm.chat([{"role": "user", "content": QUESTION}])[0].outputs[0]
one_by_one = "".join(decode([token]) for token in answer.token_ids)
print(answer.text, one_by_one, sep="\n\n")

# %% [markdown]
# The tokens are the same. No bit was lost on the way. And yet the second text is broken, in a place where the first is
# Chinese.
#
# ## A picture
#
# The tokenizer of our model, like those of Qwen and Llama 3, is a **byte-level BPE** (字节级 BPE). Its tokens are runs of
# *bytes*, not of characters. In UTF-8, "a" is one byte, "块" is three, "🙂" is four. Words that the tokenizer has seen
# often are one token. What it has rarely seen falls into bytes, and then one character is two, three or four tokens:

# %% fold="yes"
from kvlab.lab.show import table

TEXT = "A block (块表) 用 🙂"
tokens = llm.tokenizer.encode(TEXT)


def bytes_up_to(n):
    """The bytes of the first n tokens: those of the text, as far as n tokens go."""
    whole = decode(tokens[:n]).rstrip("\ufffd")
    rest = TEXT.encode()[len(whole.encode()):]
    # Tokens that end within a character: the tokenizer of this model cuts it into single bytes.
    held = 0
    while decode(tokens[: n - held]) != whole and held < 3:
        held += 1
    return whole.encode() + rest[:held]


rows, shown = [], ""
for i in range(len(tokens)):
    own = bytes_up_to(i + 1)[len(bytes_up_to(i)):]
    text = decode(tokens[: i + 1]).rstrip("\ufffd")
    rows.append((i + 1, own.hex(" "), decode([tokens[i]]).replace(" ", "␣"),
                 text[len(shown):].replace(" ", "␣") or "(wait)"))
    shown = text
table(("token", "its bytes", "decoded alone", "can be shown when it has come"), rows)

# %% [markdown]
# **How to read it.** Each row is one token. "�" is U+FFFD, the **replacement character** (替换字符): a decoder puts it
# where bytes make no character. The last column is what a good server sends. It waits, and then it sends the whole
# character.
#
# ## Your predictions
#
# First: a Chinese sentence of 20 characters, with an emoji at its end. Our tokenizer makes 30 tokens of it. How many of
# the 30, decoded alone, give text without "�"?
#
# Second: somebody repairs the stream in the obvious way: for each new token, decode *all* tokens so far, and send what is
# new. The answer has 500 tokens. How many tokens does the decoder decode in all?
#
# Third: a client asks for 900 tokens. After 10 pieces it closes the connection. How many tokens does the server compute
# for it in all?
#
# Fourth: a server has 8 seats, and 8 clients who each ask again as soon as they are answered. Then there are 16 such
# clients. By what factor do the tokens a second grow?
#
# Replace each `None` by a number, in digits, and run the cell.

# %%
lab.predict("alone", None, unit="of 30 tokens")
lab.predict("decoded", None, unit="tokens decoded")
lab.predict("hangs up", None, unit="tokens computed")
lab.predict("twice the clients", None, unit="times the tokens a second")

# %%
SENTENCE = "每个序列的缓存切成小块，谁用完谁归还。🙂"
sentence = llm.tokenizer.encode(SENTENCE)
readable = ["\ufffd" not in decode([token]) for token in sentence]
print(f"{len(SENTENCE)} characters, {len(sentence)} tokens")
lab.compare("alone", sum(readable))

# %% [markdown]
# ## Exercise 1: by hand
#
# The first byte of a character tells how many bytes it has. All others of it lie between 0x80 and 0xBF:
#
# | first byte | bytes | example |
# |---|---|---|
# | 0x00 to 0x7F | 1 | `61` is a |
# | 0xC2 to 0xDF | 2 | `c3 a9` is é |
# | 0xE0 to 0xEF | 3 | `e5 9d 97` is 块 |
# | 0xF0 to 0xF4 | 4 | `f0 9f 99 82` is 🙂 |
#
# Take a pencil. How many bytes at the beginning of each of these are whole characters?
#
# | bytes | whole |
# |---|---|
# | `61 e5 9d` | 1 |
# | `61 e5 9d 97` | ? |
# | `e5 9d 97 f0 9f 99` | ? |
# | `c3 a9 c3` | ? |
#
# Write down what you did, for any bytes. The function is called `whole_bytes`.

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

# %% [markdown]
# Stuck? `hint("whole_bytes")` gives a nudge, and more if you call it again. It works for every exercise.
#
# `lab.best("whole_bytes")` is your function if it passes its check, and ours if not. So you can read on without having
# solved everything.

# %%
whole = lab.best("whole_bytes")
for data in (b"\x61\xe5\x9d", b"\x61\xe5\x9d\x97", b"\xe5\x9d\x97\xf0\x9f\x99", b"\xc3\xa9\xc3"):
    print(f"{data.hex(' '):20} {whole(data)} of {len(data)}")
longest = max(len(SENTENCE.encode()[:n]) - whole(SENTENCE.encode()[:n])
              for n in range(len(SENTENCE.encode())))
print(f"the sentence, cut anywhere: at most {longest} bytes are held back")

# %% [markdown]
# Never more than three bytes wait. That is the price of a stream without "�": three bytes, a fraction of a second.
#
# ## The model, in five rules
#
# 1. **Shown is shown.** What has been sent can never be taken back. So nothing is sent that could still change.
# 2. **The pieces are the text.** Put together, they are what the whole answer decodes to.
# 3. **Nothing waits without need.** What cannot change any more goes out at once.
# 4. **The end is news, too.** When nothing more can come, what was held goes out as it is.
# 5. **Work grows with what is new**, not with what there is already.
#
# Rule 1 is the same for half a character, for half a stop string and for half an event. Exercises 2, 3 and 4 are one
# idea, three times.
#
# ## Exercise 2: a detokenizer
#
# The engine does not see bytes. It has `decode`, from token ids to text. So you look at the end of the text: as long as
# it is "�", wait.
#
# And rule 5? Decoding all for each token is right, but let us count what it costs:

# %%
num_decoded = sum(n for n in range(1, 501))
print(f"1 + 2 + ... + 500 = {num_decoded:,} tokens decoded, for 500 tokens of text")
lab.compare("decoded", num_decoded)

# %% [markdown]
# So decode only the new tokens? That is too little. Some decoders look at the neighbours. SentencePiece, the tokenizer
# of Llama 2, writes " block" as one token, and drops the space if the token is the first that it decodes. Its text,
# decoded token by token, is onewordlikethis.
#
# What helps is a **window** (窗口): some tokens that were shown already, and then the new ones.
#
#     all tokens     [ 0  1  2  3  4  5  6  7 ]
#                               '--window-----'        decode it with the new tokens: "block table (块"
#                               '-shown-'              decode it without them:         "block table"
#                                                      the difference is new:          " (块"
#
# When something has been shown, the window moves: now it begins where the last difference began.

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
        that is not complete yet. What stands before it in the same call may wait with it, and
        nothing else waits. Gives decode some tokens only, however long the text has become.
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

# %%
Mine = lab.best("Detokenizer")


def streamed(make, token_ids, decode=decode):
    """(pieces, tokens decoded) of a text that comes token by token."""
    count = 0

    def counting(ids):
        nonlocal count
        count += len(ids)
        return decode(ids)

    detokenizer = make(counting)
    pieces = [detokenizer.add([token]) for token in token_ids]
    return [*pieces, detokenizer.add([], final=True)], count


pieces, _ = streamed(Mine, answer.token_ids)
print("|".join(pieces))
pieces, _ = streamed(Mine, sentence)
print("|".join(pieces))

# %% [markdown]
# Two bars side by side mean that a token brought nothing to show. Put together, nothing is missing.
#
# Now rule 5, for longer and longer answers:

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.lab.show import picture


class Everything:
    """The obvious repair: decode all of it, each time."""

    def __init__(self, decode):
        self.decode, self.ids, self.shown = decode, [], 0

    def add(self, token_ids, final=False):
        self.ids = self.ids + token_ids
        text = self.decode(self.ids)
        if text.endswith("\ufffd") and not final:
            return ""
        new, self.shown = text[self.shown:], len(text)
        return new


long_text = (answer.token_ids + sentence) * 13
lengths = (125, 250, 500, 1000)
costs = {name: [streamed(make, long_text[:n])[1] for n in lengths]
         for name, make in (("all of it, each time", Everything), ("a window", Mine))}
figure, ax = plt.subplots(figsize=(8, 3), layout="constrained")
looks = (("#D55E00", "--", "s"), ("#0072B2", "-", "o"))
for (name, counts), (colour, line, mark) in zip(costs.items(), looks, strict=True):
    ax.plot(lengths, counts, line, color=colour, marker=mark, linewidth=2)
    ax.annotate(f"{name}: {counts[-1]:,}", (lengths[-1], counts[-1]), xytext=(-12, 8),
                textcoords="offset points", ha="right", fontsize=11)
ax.set(xlabel="tokens of the answer", ylabel="tokens decoded", xticks=lengths, ylim=(0, None))
ax.yaxis.set_major_formatter("{x:,.0f}")
for side in ("top", "right"):
    ax.spines[side].set_visible(False)
told = "; ".join(f"{name}: {counts[-1]:,} tokens decoded" for name, counts in costs.items())
picture(figure, f"Tokens decoded over the length of the answer. For 1,000 tokens: {told}.")
for name, counts in costs.items():
    print(f"{name:22} twice the tokens, {counts[-1] / counts[-2]:.1f} times the work")

# %% [markdown]
# ## Exercise 3: stop strings
#
# A client may name **stop strings** (停止字符串): when one of them has been written, the answer ends before it. The model
# knows nothing of them. They are found in the text, and text comes in pieces. So again, part of it must wait:
#
#     stop="STOP"      piece    can be shown    held
#                      "aS"     "a"             "S"     could become STOP
#                      "T"      ""              "ST"
#                      "x"      "STx"           ""      it did not: now it is text
#                      "ST"     ""              "ST"
#                      "OP!"    ""                      STOP: the end. "!" is never shown
#
# Three questions before you begin, from what goes wrong in real servers:
#
# - Stop strings are `"b"` and `"abc"`, and the text is "abc". Which of the two stops it? (The one that is complete
#   first. Otherwise the answer would depend on how the text was cut into pieces.)
# - How much is held of "aaa", if the stop string is "aab"? (Two characters. Not three, and not one.)
# - `min_tokens=10` says: no stop before ten tokens. Until then a stop string is text. May it be found afterwards, in
#   what was held? (No.)

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
        completes are text, for good. final: nothing more will come. No call follows a stop, and
        none follows final. A stop string is a text, found exactly as it is written.
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

# %% [markdown]
# Move the sliders. The pieces are the tokens of one answer. Where does the text wait, and for how long?

# %% fold="yes"
from matplotlib.patches import Rectangle

from kvlab.lab.show import sliders

Checker = lab.best("StopChecker")
PIECES = ["A", " block", " table", " list", "s", " the", " physical", " blocks", " of", " one", " request"]
STOPS = {"a word": ("physical",), "over three tokens": ("s the phys",), "nearly: 'block o'": ("block o",),
         "two": ("the physical blocks", "block"), "none of it": ("stop",)}


def show_stop(stop, include):
    """The pieces, what each makes visible, and what is held behind it."""
    checker = Checker(STOPS[stop], include == "yes")
    figure, ax = plt.subplots(figsize=(10, 2.3), layout="constrained")
    x, held, found = 0.0, "", None
    for piece in PIECES:
        if found is None:
            text, found = checker.add(piece)
            held = "" if found else (held + piece)[len(text):]
            cells = (piece, text, held)
        else:
            cells = (piece, None, None)
        width = 0.11 * max(4, *(len(cell or "") for cell in cells)) + 0.25
        for y, cell, fill, hatch in zip((2, 1, 0), cells, ("white", "#56B4E9", "#F7DDA4"),
                                        (None, None, "///"), strict=True):
            if cell is None:
                continue
            ax.add_patch(Rectangle((x, y + 0.1), width, 0.8, edgecolor="#222222",
                                   facecolor=fill if cell else "white",
                                   hatch=hatch if cell else None, linestyle="-" if cell else ":"))
            ax.text(x + width / 2, y + 0.5, cell.replace(" ", "␣"), ha="center", va="center",
                    fontsize=10, bbox=dict(facecolor=fill, edgecolor="none", pad=1) if cell else None)
        x += width + 0.06
        if found and cells[1] is not None:
            ax.axvline(x - 0.03, color="#D55E00", linewidth=3)
    for y, label in ((2.5, "piece"), (1.5, "shown"), (0.5, "held")):
        ax.text(-0.1, y, label, ha="right", va="center", fontsize=11)
    ax.set_title(f"stop = {STOPS[stop]}, include = {include}: "
                 + (f"stopped by {found!r}" if found else "not stopped"), loc="left", fontsize=11)
    ax.set(xlim=(-0.9, x), ylim=(0, 3))
    ax.axis("off")
    return figure


sliders(show_stop, alt="The tokens of an answer in three rows: each piece, what it makes visible, and what is held behind "
        "it. A thick line where a stop string ends it.",
        stop=(list(STOPS), "nearly: 'block o'"), include=(("no", "yes"), "no"))

# %% [markdown]
# Both are parts of the engine, `detokenizer` and `stop_checker`. Here the engine runs on yours, and on ours. The model's
# tokens must be the same, and the texts too:

# %%
result = lab.run_engine()

# %%
SYSTEM = [{"role": "user", "content": "What does a block table store?"}]
plain = llm.chat(SYSTEM)[0].outputs[0].text
STRINGS = [plain[i : i + 5] for i in range(0, len(plain) - 5, 9)]
params = [SamplingParams(temperature=0, max_tokens=80, stop=(stop, "zzz")) for stop in STRINGS]
yours = LLM("tiny", num_gpu_blocks_override=129, parts=lab.parts())
texts = [[output.outputs[0].text for output in engine.chat([SYSTEM] * len(params), params)]
         for engine in (yours, llm)]
print(f"{len(params)} stop strings; the same texts: {texts[0] == texts[1]}")
print("all cut at the first one:",
      texts[0] == [plain[: plain.index(stop)] for stop in STRINGS])

# %% [markdown]
# ## A server in this notebook
#
# `kvlab serve` is a process of its own. Here we want to look into it, so it runs on a thread of this one, on a port that
# happens to be free. It is the same server: OpenAI's protocol (协议), vLLM's metrics. It runs on your parts.
#
# It lives as long as this kernel, or until it is stopped at the end of the lab. After that a request finds nobody
# (`ConnectError`, "connection refused"): run the next cell again. After a restart of the kernel, run all cells from the
# top.

# %%
import time

import torch

from kvlab.serve import serving

torch.set_num_threads(1)
SEATS, BLOCKS = 8, 96
server = serving("tiny", max_num_seqs=SEATS, num_gpu_blocks_override=BLOCKS + 1,
                 parts=lab.parts())
print(server.url, server.get("/health"))
print("blocks held, cached, free:", server.pool())

# %% [markdown]
# Now ask it for a stream, and look at the bytes that come over the wire:

# %%
import httpx

BODY = {"model": server.model, "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0, "stream": True}
with httpx.stream("POST", server.url + "/v1/chat/completions", json=BODY, timeout=60) as response:
    print(response.headers["content-type"])
    raw = b"".join(response.iter_raw())
print(raw[:420].decode(errors="replace"), "...", raw[-40:].decode(errors="replace"), sep="\n")

# %% [markdown]
# ## Exercise 4: server-sent events
#
# This is a stream of **server-sent events** (SSE, 服务器推送事件). An event is some lines of the form `data: ...`, and an
# empty line ends it. In the data stands JSON, and after the last piece the word `[DONE]`.
#
# The network knows nothing of events. It delivers bytes, in pieces of any size. A piece may hold three events, or a
# third of one, and it may end in the midst of a character: rule 1 again.
#
# Read the docstring with care. Each sentence in it has been somebody's bug.

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

        A line ends in LF or in CR LF, and in nothing else. An event ends with an empty line. Its
        data are what stands behind `data:` in its lines, without one space there if there is
        one; of several data lines, with a newline between them. All other lines are left out. An
        event without any data line is none.
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

# %% [markdown]
# The answer from above, cut into pieces of 7 bytes:

# %%
import json

Reader = lab.best("EventReader")


def read_in_pieces(data, size):
    """The events of a stream that comes in pieces of `size` bytes."""
    reader = Reader()
    return [event for i in range(0, len(data), size) for event in reader.feed(data[i : i + size])]


events = read_in_pieces(raw, 7)
text = "".join(json.loads(event)["choices"][0]["delta"].get("content") or ""
               for event in events if event != "[DONE]")
print(f"{len(raw):,} bytes, {len(events)} events, the last one {events[-1]}")
print(text)
print("as without a server:", text == answer.text)
for size in (1, 2, 3, 1000):
    assert read_in_pieces(raw, size) == events

# %% [markdown]
# How many bytes of these are the answer? And the official client does all this for you. If it is installed, here it is.
# It needs nothing but an address. Try it with a server in a process of its own, too. Type this in a terminal, and then
# write `http://127.0.0.1:8714/v1` as the `base_url` below:
#
#     kvlab serve tiny --port 8714

# %%
print(f"{len(text.encode())} bytes of text in {len(raw):,} bytes of stream")
try:
    from openai import OpenAI
except ImportError:
    print("The client is not installed (pip install openai); nothing below needs it.")
else:
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = client.chat.completions.create(
        model=server.model, messages=BODY["messages"], temperature=0, stream=True)
    print("|".join(chunk.choices[0].delta.content or "" for chunk in stream))

# %% [markdown]
# ## Somebody hangs up
#
# A client asks for 900 tokens, and after 10 pieces it closes the connection. The server's counter says how many tokens it
# has computed for it. `Load` sends clients from a thread of its own. They read with your `EventReader`.

# %%
from kvlab.lab.scenes.serving import Ask, Load, Watch, asks, rounds

before = server.metrics()
with Watch(server, every=0.002) as watch:
    visit, = Load(server, [Ask(0, QUESTION, 900, leave_after=10)], Reader).join()
    server.wait_until_idle()
computed = server.metrics()["vllm:generation_tokens_total"] - before["vllm:generation_tokens_total"]
print(f"asked for 900 tokens, read {visit.num_pieces} pieces, then left: {visit.left}")
print("most blocks held meanwhile:", max(moment.held for moment in watch.moments))
print("blocks held, cached, free now:", server.pool())
lab.compare("hangs up", int(computed))

# %% [markdown]
# The server watches each connection. When it closes, the request is aborted between two steps, and its blocks go back.
# This is not politeness. A user who presses "stop", or closes the tab, would otherwise keep a seat and blocks for as long
# as the longest answer takes. Count what that would cost, if a third of the users do so.
#
# ## Exercise 5: what happened in between
#
# A server shows figures at `/metrics`, and Prometheus (a program that collects such figures) reads them every few
# seconds. This is a **scrape** (抓取):

# %%
lines = server.get("/metrics").splitlines()
for line in lines:
    if line.startswith(("vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_sum",
                        "vllm:time_to_first_token_seconds_count", "vllm:kv_cache_usage",
                        "vllm:num_requests_running", 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.0')):
        print(line)

# %% [markdown]
# There are three kinds of figures:
#
# - A **gauge** (瞬时值) is what is now: requests that run, the share of blocks in use.
# - A **counter** (计数器) only rises, from the start of the server: tokens generated. Its value says little. By how much
#   it has *risen* says all.
# - A **histogram** (直方图) is a family of counters: the sum of all values, how many there were, and how many were at most
#   0.001, at most 0.005, and so on.
#
# `server.metrics()` gives a scrape as a dictionary, name -> value.

# %% ex="between"
def between(before, after, seconds):
    """Three figures of the interval between two scrapes.

    before, after: dicts, name -> value, with (each behind "vllm:") generation_tokens_total,
    time_to_first_token_seconds_sum and _count, prefix_cache_hits_total and
    prefix_cache_queries_total. Other names may stand in one of them or in both. seconds: between
    the two, more than 0. Changes neither.

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

# %% [markdown]
# Why not simply use the totals? Because a server that ran well for a week, and has been ill for a minute, looks well.
#
# ## Exercise 6: the 95th percentile
#
# A mean hides who waits. The **95th percentile** (P95) says: 95 of 100 did not wait longer. But the values are gone. All
# that is left are the buckets (桶). Prometheus takes a straight line within a bucket, and so do you:
#
# | at most | values | of these in the bucket |
# |---|---|---|
# | 1 s | 5 | 5 |
# | 2 s | 15 | 10 |
# | 4 s | 20 | 5 |
# | infinity | 20 | 0 |
#
# The median: the rank is 0.5 × 20 = 10. It lies in the bucket from 1 to 2, where it is number 10 - 5 = 5 of 10. So the
# answer is 1 + (2 - 1) × 5/10 = 1.5 s. What is the 95th percentile? (The rank is 19.)

# %% ex="quantile"
def quantile(q, buckets):
    """The q-quantile of values of which only a histogram is known.

    q: more than 0, at most 1. buckets: at least two pairs (upper bound, number of values that
    are at most so large), with rising bounds, the last one infinite.

    Returns where the rank, q times all values, lies: in the first bucket whose number reaches
    it, by a straight line from its lower bound to its own (the first begins at 0). The rank is
    not rounded. If that bucket is the infinite one, the largest finite bound. None without
    values. Changes nothing.
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

# %%
p = lab.best("quantile")
BUCKETS = [(1.0, 5.0), (2.0, 15.0), (4.0, 20.0), (float("inf"), 20.0)]
print("median:", p(0.5, BUCKETS), "s; 95th percentile:", round(p(0.95, BUCKETS), 3), "s")

# %% [markdown]
# ## A crowd, and the pool breathes
#
# Now for some traffic. Clients come at random, some moments quiet and some crowded: a **Poisson process** (泊松过程). A
# third of them hangs up before the end. How many come depends on your machine: it is measured first, and then half as
# many come as it can bear. While they come, the figure below is drawn anew, about four times a second. The drawing takes
# time from the server. So does all else that runs on your machine, and then a queue may form. At the end the figure shows
# the moment with the most blocks held.
#
# The cell is folded, but run it: all that follows up to "Twice the clients" is about this crowd.
#
# **How to read it.** On the left each square is a block of the pool, with the letter of the request that holds it; "2+"
# is shared by several. Hatched blocks are cached: nobody holds them, and they can still be found. On the right, the same
# over time.

# %% fold="yes"
from kvlab.lab.draw.serving import breath, crowd, lanes, saturation, squares
from kvlab.lab.show import live

SECONDS = 4
BEARS = len(rounds(server, SEATS, 0.6)) / 0.6  # answers a second, with all seats taken
RATE = 0.5 * BEARS
server.ask(server.llm.engine.scheduler.manager.reset_prefix_cache)  # all blocks free again
letter_of = {}


def letters_for(moment):
    """A letter for each request that holds blocks now; it keeps its letter as long as it does."""
    holding = {owner for owner in moment.owners if owner not in ("", "cached", "shared")}
    for gone in set(letter_of) - holding:
        del letter_of[gone]
    for new in sorted(holding - set(letter_of)):
        letter_of[new] = min(set("ABCDEFGHIJKLMNOPQRSTUVWXYZ") - set(letter_of.values()))
    return letter_of


def draw_now():
    now = watch.look() if load.is_running else max(watch.moments, key=lambda m: m.held)
    figure, axes = plt.subplots(1, 2, figsize=(10.5, 2.6), layout="constrained", width_ratios=(4, 5))
    squares(axes[0], now.owners, letters_for(now))
    axes[0].set_title(f"after {now.time:.1f} s: running {now.running}, waiting {now.waiting}; held {now.held}, "
                      f"cached {now.cached}", loc="left", fontsize=10)
    breath(axes[1], sorted(watch.moments, key=lambda m: m.time))
    axes[1].set_xlabel("seconds")
    return figure


before, began = server.metrics(), time.monotonic()
with Watch(server) as watch:
    load = Load(server, asks(RATE, SECONDS, seed=3), Reader)
    num_pictures = live(draw_now, lambda: load.is_running, every=0.25,
                        alt="The block pool under load: squares with the letters of the requests that hold them, and "
                            "how many blocks are held, cached and free over time")
    visits = load.join()
    server.wait_until_idle()
seconds = time.monotonic() - began
after = server.metrics()
moments = sorted(watch.moments, key=lambda m: m.time)
print(f"{num_pictures} pictures; {len(visits)} clients, {RATE:.0f} a second, "
      f"{sum(v.left for v in visits)} hung up")

# %% [markdown]
# The same run again, until the last client has gone, with each client as a bar. Dotted: it has no token yet. A cross: it
# hung up.

# %% fold="yes"
figure, axes = plt.subplots(3, 1, figsize=(10, 8), layout="constrained", sharex=True, height_ratios=(4, 2, 2))
lanes(axes[0], visits)
breath(axes[1], moments)
crowd(axes[2], moments, SEATS)
axes[2].set_xlim(0, moments[-1].time)
picture(figure, f"Three panels over {seconds:.1f} seconds. {len(visits)} clients as bars, {sum(v.left for v in visits)} of them "
        f"end in a cross. Blocks held, cached and free: at most {max(m.held for m in moments)} held. Requests that run, at "
        f"most {max(m.running for m in moments)}, and that wait, at most {max(m.waiting for m in moments)}.")

# %% [markdown]
# **What to look at.**
#
# - The dark area breathes: it rises with the crowd and falls with it. Every cross gives blocks back.
# - The hatched area grows with the answers, until few blocks are empty. A block that is given back is not erased. It stays
#   findable until somebody needs it: that is PAV 6's "freed does not mean gone".
# - At the end nobody holds anything. No block is lost.
#
# Now with your two functions:

# %%
from kvlab.serve.reading import buckets

buckets_name = "vllm:time_to_first_token_seconds"
tokens_a_second, ttft, hit_rate = lab.best("between")(before, after, seconds)
risen = {name: value - before.get(name, 0) for name, value in after.items()}
p95 = p(0.95, buckets(risen, buckets_name))
print(f"{tokens_a_second:,.0f} tokens a second; the first token came after {1000 * ttft:.0f} ms on average, "
      f"P95 {1000 * p95:.0f} ms;\n{100 * hit_rate:.0f}% of the prompt tokens were in the cache")
at_clients = sorted(v.ttft for v in visits if v.ttft is not None)
print(f"as the clients saw it: mean {1000 * sum(at_clients) / len(at_clients):.0f} ms, "
      f"P95 {1000 * at_clients[int(0.95 * (len(at_clients) - 1))]:.0f} ms")

# %% [markdown]
# On average the clients wait a bit longer than the server says. Between the two lies the way of the bytes, and here also
# the queue for the one Python interpreter that they share with the server. And P95 from buckets is only as fine as the
# buckets are: it may lie on either side of the true one, anywhere in the same bucket. These are the bounds:

# %%
found = buckets(risen, buckets_name)
lower = max((bound for bound, _ in found if bound < p95), default=0.0)
upper = min(bound for bound, _ in found if bound >= p95)
print(f"P95 of {1000 * p95:.0f} ms lies in the bucket from {1000 * lower:.0f} to {1000 * upper:.0f} ms")

# %% [markdown]
# ### Little's law (利特尔法则)
#
# How many requests are in the system, on average? There is a law of three words, and it holds for every system in which
# whoever comes also goes, whatever happens in between:
#
# **mean number inside = arrivals a second × mean seconds that each stays**
#
# Both sides, measured by different clocks. On the left, somebody who looks at the engine's queues every 20 ms. On the
# right, the clients, who know when they came and went:

# %%
inside = watch.mean(lambda m: m.running + m.waiting)
stay = sum(v.latency for v in visits) / len(visits)
little = len(visits) / moments[-1].time * stay
print(f"seen inside: {inside:.2f} requests on average")
print(f"{len(visits) / moments[-1].time:.1f} a second × {stay:.3f} s = {little:.2f} requests")

# %% [markdown]
# The right side is a bit larger, for the same reason as above: a client counts the way, too. If somebody tells you two
# of the three numbers, you know the third. How many seats does a server need for 50 requests a second that take 4 s each?
#
# ### Twice the clients
#
# Now clients of another kind: each asks again as soon as it is answered. So the number of clients is fixed, and the server
# decides how fast they go. We double them, up to twice the seats. Two scrapes, most of a second apart, fall into the time
# in which all of them are there. All is done twice, and the better rate counts: whatever else runs on the machine can
# only take away from it.

# %%
from concurrent.futures import ThreadPoolExecutor


def level(num_clients):
    """(tokens a second, seconds a request) with so many clients."""
    with ThreadPoolExecutor(1) as other_thread:
        job = other_thread.submit(rounds, server, num_clients, 1.1)
        time.sleep(0.3)
        first, start = server.metrics(), time.monotonic()
        time.sleep(0.8)
        second, stop = server.metrics(), time.monotonic()
        answered = job.result()
    rate, _, _ = lab.best("between")(first, second, stop - start)
    return rate, sum(v.latency for v in answered) / len(answered)


NUMBERS = (1, 2, 4, SEATS, 2 * SEATS)
both = [[level(num_clients) for num_clients in NUMBERS] for _ in range(2)]
levels = [(num_clients, *max(pair)) for num_clients, *pair in zip(NUMBERS, *both, strict=True)]
gain = levels[-1][1] / levels[-2][1]
lab.compare("twice the clients", round(gain, 2))
if not 0.7 < gain < 1.3:
    print("That is far from 1. Most likely something else runs on this machine: run the cell again.")

# %% fold="yes"
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout="constrained")
saturation(axes, levels, SEATS)
told = "; ".join(f"{n} clients: {rate:,.0f} tokens a second, {wait:.2f} s a request" for n, rate, wait in levels)
picture(figure, f"Tokens a second and seconds a request over the number of clients. {told}.")

# %% [markdown]
# If nothing else runs on your machine, the tokens a second grow with each client at first: in a step, the second
# sequence costs little (that was lab 00 and lab 07). Beyond the seats, next to nothing is gained: those who come on top
# wait, and the seconds for each request grow. (A little may be gained, since a seat is now taken again at once, and not
# when an answered client has asked anew. Some may be lost, since clients and server share one Python interpreter.)
# This bend is what **saturation** (饱和) means. Little's law says the rest: at a fixed rate, more inside means longer stays.
#
# So what should a full server do with those who come? It can let them wait, longer and longer, until they give up. Or it
# can say so at once. `--max-waiting 4` is such a limit:

# %%
with serving("tiny", max_num_seqs=4, num_gpu_blocks_override=129, max_waiting=4) as small:
    crowd_of_24 = Load(small, [Ask(0, QUESTION, 60) for _ in range(24)], Reader).join()
    refused = [v for v in crowd_of_24 if v.refused]
    print(f"24 come at once; {24 - len(refused)} are served, {len(refused)} are told {refused[0].refused}")
    print(f"a refusal takes {1000 * max(v.latency for v in refused):.0f} ms at most, an answer "
          f"{max(v.latency for v in crowd_of_24 if not v.refused):.2f} s")
    print("counted as refused:", int(small.metrics()["vllm:admission_rejections_total"]))

# %% [markdown]
# 429 means "too many requests", and with it comes the header `Retry-After`. A client that is refused can go elsewhere.
# One that waits cannot.
#
# ## PAV 5: what to observe
#
# PAV 5 gives three things to look for in a server. Here they are on our engine. First the last one, since it can be seen
# on any machine: **blocks are handed out on demand**. A long request and a short one come together. Nobody else is
# there. What do they hold?

# %%
from kvlab.blocks import cdiv


def observe(server, long=320, short=48):
    """A long and a short request, side by side: what the pool does meanwhile."""
    server.wait_until_idle()
    with Watch(server, every=0.005) as watch:
        Load(server, [Ask(0.0, QUESTION, long), Ask(0.0, "What is a KV cache?", short)]).join()
        server.wait_until_idle()
    config = server.llm.config
    rows = sorted(watch.moments, key=lambda m: m.time)
    peak, end = max(m.held for m in rows), rows[-1]
    reserved = 2 * cdiv(config.max_model_len, config.block_size)
    figure, ax = plt.subplots(figsize=(10, 2.6), layout="constrained")
    ax.step([m.time for m in rows], [m.held for m in rows], where="post", color="#0072B2", linewidth=2)
    ax.text(0.02, 0.97, f"Both reserved at max_model_len = {config.max_model_len:,} would be {reserved} blocks:\n"
            f"{reserved / (1.4 * peak):.0f} times the height of this figure.", va="top", fontsize=11,
            transform=ax.transAxes)
    ax.set(xlabel="seconds", ylabel="blocks held", ylim=(0, 1.4 * peak), xlim=(0, None))
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    picture(figure, f"Blocks held over time: a staircase up to {peak}, with a step down where the short request ends, and 0 at "
            f"the end. Both reserved at full length would be {reserved}.")
    print(f"held: {rows[0].held} at first, {peak} at most, {end.held} at the end; cached at the end: {end.cached}")
    return peak, end, reserved


peak, end, reserved = observe(server)

# %% [markdown]
# A staircase. A block is taken when the one before it is full. Where the short one ends, its blocks leave at once. A
# contiguous engine (lab 02) would have reserved the many blocks of the inscription from the beginning.
#
# The other two are about how large the pool is. On a GPU the engine finds that out at its start, from the memory and
# `gpu_memory_utilization`. On a CPU it does not ask. So this is a *calculation*, with the functions of lab 01, for the GPU
# and the model of PAV: 24 GB, Qwen2.5-7B. What activations and CUDA graphs take is an estimate, 1.5 GiB; a real engine
# measures it.

# %%
from kvlab.sizing import GIB, model_shape, num_gpu_blocks

shape = model_shape("Qwen2.5-7B")
WEIGHTS = {"bf16": shape.weight_bytes(), "AWQ (4 bit)": shape.quantised_weight_bytes()}
plan = {}
for weights, num_bytes in WEIGHTS.items():
    for share in (0.80, 0.90, 0.92):
        plan[weights, share] = num_gpu_blocks(24 * GIB, share, num_bytes, int(1.5 * GIB), 0,
                                              16 * shape.kv_bytes_per_token())
table(("weights", "their GiB", *(f"blocks at {share:.2f}" for share in (0.80, 0.90, 0.92))),
      [(weights, f"{num_bytes / GIB:.1f}", *(f"{plan[weights, share]:,}" for share in (0.80, 0.90, 0.92)))
       for weights, num_bytes in WEIGHTS.items()])

# %% [markdown]
# And what does a smaller pool do? That can be measured here. The same 8 clients, on a pool of 96 blocks and on one with a
# third of it:

# %%
for num_blocks in (BLOCKS, BLOCKS // 3):
    with serving("tiny", max_num_seqs=SEATS, num_gpu_blocks_override=num_blocks + 1) as other:
        with Watch(other) as seen:
            answered = rounds(other, SEATS, 1.0, max_tokens=80)
        figures = other.metrics()
        print(f"{num_blocks} blocks: {seen.mean(lambda m: m.running):.1f} of {SEATS} clients run on average, "
              f"{len(answered)} answers, {figures['vllm:num_preemptions_total']:.0f} preemptions")

# %% [markdown]
# Fewer blocks, a lower ceiling (天花板) for those who run at the same time. That is PAV 5's chain, from the knob to the
# users.
#
# ## A real model
#
# The same cells run on a model that people use. Qwen2.5-0.5B-Instruct answers on a CPU, slowly. It is a download of about
# 1 GB, so you are asked first: write `True`, and run the cell again. In China, set the environment variable `KVLAB_HUB`
# before you start Jupyter: to `modelscope`, or to the address of a mirror (镜像).

# %%
WANT_REAL_MODEL = False

from kvlab.model.loader import resolve_model

real, why = None, "WANT_REAL_MODEL is False"
if WANT_REAL_MODEL:
    try:
        real = str(resolve_model("Qwen/Qwen2.5-0.5B-Instruct"))
    except ValueError as error:
        why = str(error)
print(f"Serving {real}." if real else f"Skipped, and nothing below needs it: {why}.")

# %%
if real:
    with serving(real, max_num_seqs=4, num_gpu_blocks_override=257, max_model_len=2048,
                 parts=lab.parts()) as big:
        print("bytes of K and V for a token:", model_shape("Qwen2.5-0.5B").kv_bytes_per_token(4), "(fp32)")
        observe(big, long=96, short=16)
        body = {"model": big.model, "messages": [{"role": "user", "content": "用一句话解释 PagedAttention。🙂"}],
                "max_tokens": 60, "stream": True}
        reader = Reader()
        with httpx.stream("POST", big.url + "/v1/chat/completions", json=body, timeout=600) as response:
            for piece in response.iter_raw():
                for event in reader.feed(piece):
                    if event != "[DONE]":
                        print(json.loads(event)["choices"][0]["delta"].get("content") or "", end="|", flush=True)

# %% [markdown]
# **With a GPU** (显卡). This notebook has measured nothing on one. Here is what to do, and what to look for. With 24 GB:
#
#     kvlab serve Qwen/Qwen2.5-7B-Instruct --gpu-memory-utilization 0.90 --max-model-len 4096
#     vllm serve Qwen/Qwen2.5-7B-Instruct-AWQ --quantization awq --gpu-memory-utilization 0.90 --max-model-len 4096
#
# - **The pool.** vLLM prints its size when it starts, kvlab shows it with `curl .../metrics`. Try 0.80 and 0.90. Compare
#   with the table above: the difference of the two should be close to ours, since what activations take cancels out.
# - **The weights.** Compare bf16 with AWQ. By how many GiB do the pools differ? By as much as the weights in the table?
# - **On demand.** Send a long request and a short one, and read `vllm:kv_cache_usage_perc` every second. On a large
#   pool one request is a fraction of a percent: ask for a long answer, or watch the pool's blocks, not the percentage.
# - **Saturation.** Double the clients, beginning with one. On a GPU the bend comes much later than at 8: find it.
#
# One thing in PAV 5's listing will not run as it stands: it names `Qwen/Qwen2.5-7B-Instruct` with `quantization="awq"`.
# That option does not quantise. It reads weights that *have been* quantised, and those are in the repository with `-AWQ`
# at the end of its name.

# %%
server.stop()
print("stopped:", not server.is_running, "(to go on, run the cell again that starts it)")

# %% [markdown]
# ## What the textbook says, and what we measured

# %% fold="yes"
from kvlab.lab.show import ledger

less, more = plan["bf16", 0.80], plan["bf16", 0.90]
awq = plan["AWQ (4 bit)", 0.90]
ledger(
    ("where", "the text says", "we find", "verdict", "condition"),
    ("holds", "holds if", "contradicted here"),
    [
        ("PAV 5, 3.1", "utilisation from 0.90 to 0.80: fewer blocks",
         f"{more:,} -> {less:,} blocks (calculated)", less < more, ""),
        ("PAV 5", "AWQ frees budget: more blocks", f"{more:,} -> {awq:,} blocks at 0.90 (calculated)", awq > more,
         "on a GPU that the weights nearly fill; see lab 01 for one of 80 GB"),
        ("PAV 5", "blocks are handed out as a sequence grows and come back at its end",
         f"at most {peak} held, {end.held} at the end", peak < reserved and end.held == 0, ""),
        ("PAV 5", "nothing is reserved for max_model_len", f"{peak} of {reserved} blocks",
         peak < reserved, ""),
        ("PAV 6", "freed does not mean gone", f"{end.cached} blocks cached, nobody holds them", end.cached > 0,
         "with prefix caching on"),
        ("PAV 5", 'quantization="awq" for Qwen2.5-7B-Instruct', "that repository holds bf16 weights (read, not run)",
         False, "name the repository that ends in -AWQ"),
    ],
)

# %% [markdown]
# ## What to remember
#
# - A token is bytes. A stream shows whole characters, and holds three bytes at most.
# - Shown is shown. Half a character, half a stop string, half an event: hold what may still change, and nothing else.
# - A window makes the work linear. A window that is too short loses spaces.
# - Who leaves must be noticed. The blocks of a closed connection go back within a step.
# - Counters are for differences. Totals and means hide the minute that hurts.
# - Number inside = rate × stay. Beyond saturation, more clients buy only more waiting.
#
# ## Questions to think about
#
# 1. A model with random weights may write bytes that never become a character. What does your detokenizer show of it,
#    when, and what does it cost? How would you put an end to that?
# 2. A stop string is found in the text, a stop token in the ids. Which of the two costs less, and which can the
#    *scheduler* see? What has been computed for nothing when a stop string is found?
# 3. Two stop strings, and speculative decoding (投机解码) brings five tokens in one step. Does your `StopChecker` still
#    find the right one? And what must be taken back in the K/V?
# 4. A proxy between server and client collects 4 KiB before it sends. What do users see, and which of your figures
#    shows it? Which does not?
# 5. Our clients read as fast as they can. Where do the tokens wait if one of them reads a byte a minute? Who should
#    notice?
# 6. Hit rates come from counters too. A server is restarted every night. What does the rise of a counter look like that
#    night, and what does Prometheus do about it?
#
# ## Where this lives in real engines
#
# | here | vLLM V1 | kvlab |
# |---|---|---|
# | `Detokenizer` | `v1/engine/detokenizer.py` (prefix and read offset) | `kvlab/engine/text.py` |
# | `StopChecker` | the same file, `check_stop_strings` | `kvlab/engine/text.py` |
# | `EventReader` | the client: `openai`, `httpx-sse` | `kvlab/serve/reading.py` |
# | the server | `entrypoints/openai/api_server.py` | `kvlab/serve/app.py`, `answer.py` |
# | the queue between HTTP and engine | `v1/engine/async_llm.py`, a process of its own | `engine_thread.py`, `desk.py` |
# | metrics | `v1/metrics/loggers.py` | `kvlab/serve/metrics.py` |
# | `quantile` | PromQL's `histogram_quantile` | `kvlab/serve/reading.py` |
#
# The rules of UTF-8 are RFC 3629; server-sent events are a chapter of the HTML standard; Little's law is from "A Proof for
# the Queuing Formula L = λW" (Operations Research, 1961). `docs/serving.md` describes the server.
