# %% [markdown]
# # Lab 00: Why a cache (KV 缓存)
#
# You know how a language model writes. It reads the text so far, it guesses the next token, the token joins the text,
# and it reads again. In this lab you find out what one such step costs, what may be kept from step to step, and why a
# chip that can do almost a thousand trillion operations a second writes only a couple of hundred tokens a second for
# you.
#
# It goes with L33 0 and 3.4, and with PAV 1. It takes about 80 minutes, and nothing comes before it.

# %%
from kvlab.lab import Lab

lab = Lab("00")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## A number that does not add up
#
# Qwen2.5-7B has about seven billion weights in its matrices. To make one token, each is used once: one multiplication,
# one addition. An H100 does 989 trillion operations a second. Divide.

# %%
from kvlab import primer
from kvlab.primer import GPUS
from kvlab.sizing import model_shape

QWEN, H100 = model_shape("Qwen2.5-7B"), GPUS["H100"]
one_user = [(1, 100)]  # one sequence: 1 new token, with 100 tokens before it
by_arithmetic = H100.peak_flops / primer.step_flops(QWEN, one_user)
print(f"by its arithmetic: {by_arithmetic:8,.0f} tokens a second")
print(f"at most, in truth: {1 / primer.step_seconds(H100, QWEN, one_user):8,.0f} tokens a second for a single user")

# %% [markdown]
# Almost 300 times less, with the best software that one can write. Where has the rest gone? You will compute the second
# number yourself, and say where the 300 comes from.
#
# And that is already *with* a cache. Without one it would be worse. So we begin there.

# %% [markdown]
# ## A picture
#
# A toy model is given five tokens and writes four more. In each step, some tokens go through the model. The toy model
# keeps a diary of that, and the figure shows the diary.
#
# **How to read it.** One row is one step. A filled box is a token that goes through all layers in this step. A box with
# only an outline is not computed again: the step just looks at what was kept of it. The numbers above are positions.

# %%
import matplotlib.pyplot as plt
from matplotlib.patches import Rectangle

from kvlab.primer import Cache, ToyDecoder, matvec

BLUE, RED, GREEN, INK = "#0072B2", "#D55E00", "#009E73", "#222222"


class Diary(ToyDecoder):
    """A toy decoder that writes down each step: (new tokens, tokens in the cache), and multiply-adds."""

    def __init__(self, step=primer.attend_next, **options):
        super().__init__(step=self.watched, max_len=200, seed=2, **options)
        self.inner, self.steps, self.costs, self.multiply_adds = step, [], [], 0

    def watched(self, layer, x, keys, values):
        found = self.inner(layer, x, keys, values)
        self.multiply_adds += 3 * len(x) ** 2  # q, k and v: a matrix each
        self.multiply_adds += 2 * len(x) * len(keys)  # q . k, and weight times value, for each position
        return found

    def forward(self, tokens, cache):
        self.steps.append((len(tokens), len(cache)))
        before = self.multiply_adds
        logits = super().forward(tokens, cache)
        self.costs.append(self.multiply_adds - before)
        return logits


def draw_steps(ax, steps, title, colour):
    """One row a step: filled boxes are computed in it, outlined ones were computed before."""
    for row, (new, computed) in enumerate(steps):
        for position in range(computed + new):
            filled = position >= computed
            ax.add_patch(Rectangle((position + 0.08, row + 0.1), 0.84, 0.8, facecolor=colour if filled else "white",
                                   edgecolor=colour if filled else "#999999", linewidth=1.2))  # fmt: skip
    width = max(computed + new for new, computed in steps)
    ax.set(xlim=(0, width), ylim=(len(steps), 0))
    ax.set_xticks([i + 0.5 for i in range(width)], range(width), fontsize=10)
    ax.set_yticks([i + 0.5 for i in range(len(steps))], [f"step {i + 1}" for i in range(len(steps))], fontsize=10)
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    for side in ax.spines.values():
        side.set_visible(False)
    total = sum(new for new, _ in steps)
    ax.set_title(f"{title}: {total} tokens go through the model", fontsize=11, loc="left", pad=10)


figure, axes = plt.subplots(1, 2, figsize=(10, 2.5), layout="constrained")
for ax, way, title, colour in ((axes[0], primer.decode_without_cache, "Without a cache", RED),
                               (axes[1], primer.decode_with_cache, "With a cache", BLUE)):  # fmt: skip
    diary = Diary()
    print(f"{title:15} writes", way(diary, [3, 1, 4, 1, 5], 4))
    draw_steps(ax, diary.steps, title, colour)
plt.show()

# %% [markdown]
# **What to look at.** Count filled boxes in the last row. Without a cache, step 4 computes eight tokens in order to
# learn one. With a cache it computes one. And the answers above the figure are the same.
#
# Two words to keep. The first step on the right, which takes the whole prompt, is the **prefill** (预填充). Each step
# after it takes one token, and is a **decode** (解码).

# %% [markdown]
# ## Your predictions
#
# Replace each `None` by a number, and run the cell. You can be wrong; you cannot be surprised without a guess.
#
# 1. A prompt of 100 tokens, an answer of 200. How many times as many tokens go through the model without a cache?
# 2. One user decodes on an H100. How much of the chip's arithmetic is used, at best, in percent?
# 3. 128 users decode together, each with 500 tokens before. How much is used now?

# %%
lab.predict("without a cache", None, unit="times as many tokens")
lab.predict("one user", None, unit="% of the arithmetic")
lab.predict("128 users", None, unit="% of the arithmetic")

# %% [markdown]
# ## By hand
#
# Take a pencil: a prompt of 3 tokens, and 4 tokens to write. How many tokens go *in* at each step?
#
# | step | without a cache | with a cache |
# |---|---|---|
# | 1 | 3 | 3 |
# | 2 | ? | ? |
# | 3 | ? | ? |
# | 4 | ? | ? |
# | sum | ? | ? |
#
# One thing is easily missed: what about the fourth token that comes out? Now write it down for any numbers. Try without
# a loop.

# %% ex="num_projected"
def num_projected(prompt, num_tokens, with_cache):
    """How many tokens go through the model to write num_tokens tokens.

    prompt: tokens in the prompt, 1 or more. num_tokens: tokens to write, one in each step, 0 or more. with_cache:
    whether what was computed is kept (True), or each step computes the whole text again (False).

    Returns a whole number: the tokens that go in, summed over the steps.
    """
    ### BEGIN SOLUTION
    if num_tokens == 0:
        return 0
    if with_cache:
        return prompt + (num_tokens - 1)
    return sum(range(prompt, prompt + num_tokens))
    ### END SOLUTION

# %% check="num_projected"
check("num_projected")

# %% [markdown]
# Stuck? `hint("num_projected")` gives a nudge, and more if you call it again. It works for every exercise.

# %%
count = lab.best("num_projected")  # yours if it is solved, else ours
lab.compare("without a cache", round(count(100, 200, False) / count(100, 200, True), 1))

# %% [markdown]
# ## The model: what depends on what
#
# Why may anything be kept at all? Look at one layer of attention (注意力) with one head (头). Position t comes in as a
# vector `x_t`. Three matrices make three vectors of it:
#
#     q_t = W_q · x_t           the query (查询): what position t asks
#     k_t = W_k · x_t           the key (键): what questions are compared with
#     v_t = W_v · x_t           the value (值): what is handed over
#
# Position t compares its query with the keys of all positions up to itself, and takes a mixture of their values. d is
# the length of q:
#
#     score     s_j = q_t · k_j / √d                                for each j from 0 to t
#     weight    w_j = exp(s_j) / (exp(s_0) + ... + exp(s_t))        together they are 1: a softmax
#     result    a_t = w_0 v_0 + w_1 v_1 + ... + w_t v_t
#
# Now read it with one question in mind: **who needs what, later?**
#
# - `k_j` and `v_j` are needed by position j and by *every position after it*.
# - `q_t` appears in `a_t` and nowhere else. Once position t is done, nobody asks for its query again.
# - Nothing of position j depends on a position after it. So `k_j` and `v_j`, once computed, never change.
#
# That is why one keeps K and V, and not Q. It is a KV cache, and not a QKV cache.
#
# A sanity check of the last point. We give a model five tokens, then change one thing, and ask at which positions the
# second layer's key is still the same.

# %%
def keys_of_layer_2(tokens):
    cache = Cache()
    ToyDecoder(num_layers=2, seed=2).forward(tokens, cache)
    return cache.keys[1]


TEXT = [3, 1, 4, 1, 5]
for what, other in (("a token more", [3, 1, 4, 1, 5, 9]), ("another last token", [3, 1, 4, 1, 7]),
                    ("another first token", [8, 1, 4, 1, 5])):  # fmt: skip
    marks = ["same" if a == b else "NEW" for a, b in zip(keys_of_layer_2(TEXT), keys_of_layer_2(other), strict=False)]
    print(f"{what:20} positions 0 to 4:  " + "  ".join(f"{mark:4}" for mark in marks))

# %% [markdown]
# The first line is what makes a cache possible: whatever follows, the keys stay. The last line is its limit. Everything
# behind a changed token is new, even where the token itself is the same. So a cache is good for a text with the *same
# beginning*. Lab 05 lives on that.
#
# ## Build 1: attention of one query
#
# Plain lists of floats, no library. One trap: exp(1000) is more than a float can hold. What can you subtract from all
# scores without changing any weight?

# %% ex="attend"
import math


def attend(q, keys, values):
    """Attention of one query over some positions.

    q: the query, a list of d floats. keys: one list of d floats for each position, 1 or more positions. values: one
    list for each position, all of one length, which need not be d.

    Returns the mixture of the values, a list as long as one value. The weights are the softmax of the scores
    q . k / sqrt(d). Scores may be as large as 1000 or as small as -1000.
    """
    ### BEGIN SOLUTION
    scale = 1 / math.sqrt(len(q))
    scores = [scale * sum(a * b for a, b in zip(q, key, strict=True)) for key in keys]
    largest = max(scores)
    exps = [math.exp(s - largest) for s in scores]
    norm = sum(exps)
    mixed = [0.0] * len(values[0])
    for e, value in zip(exps, values, strict=True):
        for i, number in enumerate(value):
            mixed[i] += e / norm * number
    return mixed
    ### END SOLUTION

# %% check="attend"
check("attend")

# %% [markdown]
# ## Build 2: one layer, one new position
#
# Here is the cache, as small as it can be: two lists for each layer. A new position arrives. What must be computed,
# what must be kept, what can be forgotten?
#
# `matvec(matrix, x)` multiplies; it is imported above. `attention(q, keys, values)` is your `attend`.

# %% ex="attend_next"
attention = lab.best("attend")  # yours if it is solved, else ours


def attend_next(layer, x, keys, values):
    """What one layer finds for the next position.

    layer: a dict with three matrices, layer["q"], layer["k"] and layer["v"], each d x d. x: the new position's input,
    a list of d floats. keys, values: the lists of k and of v of all positions before it, in order; both are empty for
    the first one.

    Appends the new position's k to `keys` and its v to `values`. Returns what attention finds for the new position, a
    list of d floats. A position attends to itself, too.
    """
    ### BEGIN SOLUTION
    for kept, name in ((keys, "k"), (values, "v")):
        kept.append(matvec(layer[name], x))
    return attention(matvec(layer["q"], x), keys, values)
    ### END SOLUTION

# %% check="attend_next"
check("attend_next")

# %% [markdown]
# ## Build 3: decode, without and with
#
# Now the loop around it. A model has one method that you need:
#
#     logits = model.forward(tokens, cache)
#
# It computes `tokens` as the continuation of what is in `cache`, adds their K and V to the cache, and returns one
# number for each word of the vocabulary (词表). The largest is the model's guess. `Cache()` makes an empty one.
#
# Write both ways. They must give the same tokens, and the check counts how many tokens you send through the model.

# %% ex="decode"
def decode_without_cache(model, prompt, num_tokens):
    """The next num_tokens tokens, where every step computes the whole text again.

    model: see above. prompt: a list of 1 or more tokens; it is not changed. num_tokens: 0 or more.

    Returns the list of new tokens, without the prompt. In each step the next token is the index of the largest logit.
    """
    ### BEGIN SOLUTION
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        logits = model.forward(text, Cache())
        text.append(max(range(len(logits)), key=logits.__getitem__))
    return text[len(prompt):]
    ### END SOLUTION


def decode_with_cache(model, prompt, num_tokens):
    """The same tokens, where no token goes through the model twice, nor one that nobody needs.

    Arguments and result are those of decode_without_cache. Each call begins with an empty cache of its own.
    """
    ### BEGIN SOLUTION
    cache, text = Cache(), list(prompt)
    while len(text) < len(prompt) + num_tokens:
        logits = model.forward(text[len(cache):], cache)
        text.append(max(range(len(logits)), key=logits.__getitem__))
    return text[len(prompt):]
    ### END SOLUTION

# %% check="decode"
check("decode")

# %% [markdown]
# ## Watch it
#
# Your layer goes into the toy model, and your two loops drive it: 5 tokens of prompt, 60 tokens to write. The dots
# are every fourth step; the diary has counted its multiply-adds, call by call. The lines are the formula.

# %%
slow, fast = Diary(step=lab.best("attend_next")), Diary(step=lab.best("attend_next"))
without, with_it = lab.best("decode_without_cache")(slow, TEXT, 60), lab.best("decode_with_cache")(fast, TEXT, 60)
assert without == with_it, "the cache must not change a single token"
print("the same 60 tokens, both ways:", *without[:12], "...")


def multiply_adds(new, computed, dim=8, layers=2):
    """The formula: three matrices for each new token; two vectors for each pair of a new token and one it looks at."""
    pairs = sum(computed + i + 1 for i in range(new))
    return layers * (3 * dim**2 * new + 2 * dim * pairs)


figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
steps = range(1, 61)
for diary, colour, style, name in ((slow, RED, "--", "without a cache"), (fast, BLUE, "-", "with a cache")):
    costs = [cost / 1000 for cost in diary.costs]
    line = [multiply_adds(*step) / 1000 for step in diary.steps]
    axes[0].plot(steps, line, color=colour, linestyle=style, linewidth=1.5)
    axes[0].plot(steps[::4], costs[::4], "o", color=colour, markersize=4)
    axes[0].annotate(name, (44, costs[43]), xytext=(-8, 12), textcoords="offset points", color=colour, ha="right")
    sums = [sum(costs[: i + 1]) for i in range(60)]
    axes[1].plot(steps, sums, color=colour, linestyle=style, linewidth=2)
    axes[1].annotate(f"{sums[-1]:,.0f}", (60, sums[-1]), xytext=(-4, 6), textcoords="offset points", color=colour,
                     ha="right")  # fmt: skip
axes[0].set(xlabel="step", ylabel="multiply-adds of this step, thousands", title="Each step")
axes[1].set(xlabel="step", ylabel="multiply-adds so far, thousands", title="All steps so far", ylim=(0, None))
for ax in axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.title.set(fontsize=11, ha="left", x=0)
    ax.set_xlim(0, 61)
axes[0].set_ylim(0, None)
plt.show()

# %% [markdown]
# **What to look at.** On the left, the slope. Without a cache, each step is dearer than the one before it, and the line
# even bends upwards: n tokens are computed, and each looks at up to n others. With a cache the line is nearly flat. It
# is not quite flat: the one new token still looks at all others, and there is one more of them each time.
#
# So the cache turns a sum over the whole text into one token. What does it cost? Memory:

# %%
for num_tokens in (1, 1000, 32_000):
    kept = QWEN.kv_bytes_per_token() * num_tokens
    print(f"Qwen2.5-7B keeps {kept / 1e6:10,.2f} MB for {num_tokens:6,} tokens of one user")

# %% [markdown]
# That is the trade: arithmetic for memory. All the labs after this one are about that memory.
#
# And the trade has a second price, which is harder to see. The kept K and V must be *read* at every step. To see what
# that means, we need to know what a step costs on a real chip.
#
# ## What a step costs: operations
#
# A step serves several sequences at once, a batch (批). From here on we write a step as a list of pairs, one for each
# sequence:
#
#     (new tokens, tokens computed before)
#
# So `[(100, 0)]` is the prefill of a prompt of 100 tokens. `[(1, 500)] * 8` are eight users, each decoding with 500
# tokens before.
#
# A model is described by its shape. `TINY` is so small that you can count it by hand:

# %%
from kvlab.sizing import ModelShape

TINY = ModelShape(vocab_size=10, hidden_size=5, intermediate_size=6, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=1, head_dim=3)  # fmt: skip
print("weights in the layers' matrices:", TINY.num_layer_weights)
print("weights in the head, vocab_size x hidden_size:", TINY.vocab_size * TINY.hidden_size)
print("bytes of K and V for one token, all layers:", TINY.kv_bytes_per_token(2))

# %% [markdown]
# Three things take operations. A multiplication and an addition count as two, and are called FLOP (浮点运算).
#
# 1. **Matrices.** Each new token passes every weight of the layers once: 2 FLOP a weight.
# 2. **The head.** It makes logits, for one token of each sequence (its last): 2 FLOP for each of its weights.
# 3. **Attention.** In every layer and every head, each new token looks at all tokens computed before, at the new ones
#    before it, and at itself. One token looking at one token is a *pair*. A pair costs 2 FLOP for each of the head_dim
#    numbers in q · k, and 2 more for each in weight times value.
#
# Count `[(3, 0)]` on `TINY` before you go on. The pairs: 1 + 2 + 3 = 6. Matrices: 2 · 720 · 3 = 4320. The head: 2 · 50.
# Attention: 4 · 3 layers · 4 heads · 3 numbers · 6 pairs = 864. In all 5284.

# %% ex="step_flops"
def step_flops(shape, step):
    """Floating-point operations of one step.

    shape: a ModelShape, as TINY: use its num_layer_weights, vocab_size, hidden_size, num_hidden_layers,
    num_attention_heads and head_dim. step: a list of pairs (new tokens, tokens computed before), one a sequence.

    Returns a whole number: matrices, head and attention, as counted above. Everything else is left out; it is small.
    """
    ### BEGIN SOLUTION
    total = 0
    per_pair = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim
    for new, computed in step:
        total += 2 * (new * shape.num_layer_weights + shape.vocab_size * shape.hidden_size)
        total += per_pair * sum(range(computed + 1, computed + new + 1))
    return total
    ### END SOLUTION

# %% check="step_flops"
check("step_flops")

# %% [markdown]
# ## What a step costs: bytes
#
# Before a weight can be multiplied it must travel from the chip's memory (显存) to where the arithmetic is. That takes
# time, too. Count the bytes:
#
# 1. **Weights.** All weights of the layers and of the head are read **once for the whole step**, whoever is in the
#    batch.
# 2. **Embedding.** Each new token reads one row of it: hidden_size numbers.
# 3. **K and V.** For each sequence, those of the tokens before are read, and those of the new ones are written. Nobody
#    shares them. `shape.kv_bytes_per_token(dtype_bytes)` is what one token has, in all layers.
#
# The words to weigh are *once for the whole step* and *nobody shares them*.

# %% ex="step_bytes"
def step_bytes(shape, step, dtype_bytes=2):
    """Bytes that one step must move.

    shape, step: as in step_flops. dtype_bytes: bytes of one number: 2 for bf16, 1 for fp8.

    Returns a whole number: weights, rows of the embedding, K and V, as listed above.
    """
    ### BEGIN SOLUTION
    num_new = sum(new for new, _ in step)
    numbers = shape.num_layer_weights + shape.hidden_size * (shape.vocab_size + num_new)
    in_cache = num_new + sum(computed for _, computed in step)
    return numbers * dtype_bytes + in_cache * shape.kv_bytes_per_token(dtype_bytes)
    ### END SOLUTION

# %% check="step_bytes"
check("step_bytes")

# %% [markdown]
# Divide one by the other and you have the arithmetic intensity (算术强度): how many operations each byte is good for.

# %%
flops_of, bytes_of = lab.best("step_flops"), lab.best("step_bytes")  # yours if they are solved, else ours


def intensity(shape, step, dtype_bytes=2):
    """FLOP per byte."""
    return flops_of(shape, step) / bytes_of(shape, step, dtype_bytes)


for what, step in (("prefill of 2000 tokens", [(2000, 0)]), ("one decode", [(1, 500)]),
                   ("8 decodes", [(1, 500)] * 8), ("128 decodes", [(1, 500)] * 128)):  # fmt: skip
    print(f"{what:22} {flops_of(QWEN, step) / 1e9:9,.0f} GFLOP {bytes_of(QWEN, step) / 1e9:6.1f} GB "
          f"{intensity(QWEN, step):8.1f} FLOP per byte")

# %% [markdown]
# A decode brings **one** operation for each byte. No accident: it uses each weight once, for 2 FLOP, and a weight is 2
# bytes. A prefill uses each weight for 2000 tokens.
#
# ## What the chip makes of it: the roofline (屋顶线)
#
# A chip has two limits: operations a second, and bytes a second. Both work at the same time, so the slower one decides.
# Where they meet is the chip's balance (平衡点): `peak_flops / bandwidth`.

# %%
for name, gpu in GPUS.items():
    print(f"{name:9} {gpu.peak_flops / 1e12:5.0f} TFLOP/s  {gpu.bandwidth / 1e12:5.2f} TB/s  "
          f"balance {gpu.balance:4.0f} FLOP per byte")

# %% ex="roofline"
def attainable_flops(gpu, flop_per_byte):
    """Operations a second that work of this intensity can reach at most.

    gpu: has peak_flops (FLOP/s) and bandwidth (bytes/s). flop_per_byte: the work's arithmetic intensity.
    """
    ### BEGIN SOLUTION
    return min(gpu.bandwidth * flop_per_byte, gpu.peak_flops)
    ### END SOLUTION


def step_seconds(gpu, shape, step, dtype_bytes=2):
    """The least time that a step can take, in seconds. Computing and moving go on at the same time.

    gpu: as above. shape, step, dtype_bytes: as in step_bytes. Use flops_of(shape, step) and
    bytes_of(shape, step, dtype_bytes): your two functions.
    """
    ### BEGIN SOLUTION
    computing = flops_of(shape, step) / gpu.peak_flops
    moving = bytes_of(shape, step, dtype_bytes) / gpu.bandwidth
    return max(computing, moving)
    ### END SOLUTION

# %% check="roofline"
check("roofline")

# %% [markdown]
# Now the picture that everybody draws, with your numbers. The roof is the H100's. Each dot is one step of Qwen2.5-7B.

# %%
roof, seconds = lab.best("attainable_flops"), lab.best("step_seconds")


def draw_roof(ax, gpu, name, steps, shape=QWEN):
    """The roofline of a GPU, and steps on it, each a pair (label, step)."""
    xs = [10 ** (i / 40) for i in range(-12, 160)]
    ax.plot(xs, [roof(gpu, x) / 1e12 for x in xs], color=INK, linewidth=2)
    ax.axvline(gpu.balance, color=INK, linewidth=1, linestyle=":")
    ax.text(gpu.balance * 1.08, 0.9, f"balance\n{gpu.balance:.0f}", fontsize=10, va="bottom")
    peak, slope = gpu.peak_flops / 1e12, gpu.bandwidth / 1e12
    ax.text(gpu.balance * 0.8, peak, f"{name}: {peak:.0f} TFLOP/s", fontsize=10, ha="right", va="center")
    ax.text(2.2, 2.8 * slope, f"{slope:.2f} TB/s", fontsize=10, rotation=36, rotation_mode="anchor")
    for label, step in steps:
        x = intensity(shape, step)
        y, colour = roof(gpu, x) / 1e12, BLUE if max(new for new, _ in step) == 1 else RED
        used = 100 * y / peak
        place = ((0, -18), "center") if x >= gpu.balance else ((12, -4), "left") if x < 30 else ((-12, 4), "right")
        ax.plot(x, y, "o" if colour == BLUE else "s", color=colour, markersize=9, markeredgecolor=INK)
        ax.annotate(f"{label}: {used:.0f}%" if used >= 1 else f"{label}: {used:.2f}%", (x, y), xytext=place[0],
                    textcoords="offset points", fontsize=10, color=colour, ha=place[1], va="center")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlim=(0.5, 10_000), ylim=(0.8, 2500),
           xlabel="arithmetic intensity, FLOP per byte", ylabel="attainable TFLOP/s")  # fmt: skip
    ax.set_xticks([1, 10, 100, 1000, 10_000], ["1", "10", "100", "1,000", "10,000"])
    ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    ax.minorticks_off()
    ax.spines[["top", "right"]].set_visible(False)


figure, ax = plt.subplots(figsize=(9, 4.8), layout="constrained")
draw_roof(ax, H100, "H100", [
    ("1 decode", [(1, 500)]), ("8 decodes", [(1, 500)] * 8), ("64 decodes", [(1, 500)] * 64),
    ("128 decodes", [(1, 500)] * 128), ("prefill, 2000 tokens", [(2000, 0)]),
])  # fmt: skip
plt.show()
lab.compare("one user", round(100 * roof(H100, intensity(QWEN, [(1, 500)])) / H100.peak_flops, 2))
lab.compare("128 users", round(100 * roof(H100, intensity(QWEN, [(1, 500)] * 128)) / H100.peak_flops, 1))

# %% [markdown]
# **What to look at.** How far each dot is below the flat part of the roof, and in which direction it moves. One decode
# sits at the far left, at a third of a percent. More sequences move it to the right and up the slope: each byte of
# weights now serves all of them. A prefill is on the flat part from the start.
#
# And here is the number from the beginning:

# %%
per_second = 1 / seconds(H100, QWEN, one_user)
print(f"a single user, at most: {per_second:,.0f} tokens a second; by arithmetic alone {by_arithmetic:,.0f}")
print(f"factor {by_arithmetic / per_second:.0f} = balance {H100.balance:.0f} / intensity "
      f"{intensity(QWEN, one_user):.2f}")

# %% [markdown]
# There it went, the factor of 300. To make one token, 14 GB of weights must be read, and for that time almost all
# arithmetic waits.
#
# Move the sliders. (They need a running kernel; without one you see 128 decodes with 1000 tokens each.) Put `batch` to
# 256. Then make the context longer. What happens to the dot, and why can no batch bring it back?

# %%
from kvlab.lab.show import sliders


def show(batch, context):
    figure, ax = plt.subplots(figsize=(8.5, 4.2), layout="constrained")
    step = [(1, context)] * batch
    draw_roof(ax, H100, "H100", [(f"{batch} decodes, {context} tokens each", step)])
    weights, kv = bytes_of(QWEN, [(1, 0)]), batch * context * QWEN.kv_bytes_per_token()
    title = f"Bytes of this step: weights {weights / 1e9:.1f} GB, K and V {kv / 1e9:.1f} GB"
    ax.set_title(title, fontsize=11, loc="left")
    return figure


sliders(show, batch=(1, 512, 128), context=(10, 8000, 1000))

# %% [markdown]
# ## What a batch shares, and what it does not
#
# B sequences share the weights, W bytes. Each brings b bytes of K and V that are read for it alone, and f operations:
#
#     bytes        W + B · b
#     operations   B · f
#     intensity    B · f / (W + B · b)
#
# While B · b is small beside W, the intensity is about B. When it is not, more sequences help less and less. However
# many there are, the intensity never passes f / b.
#
# How large b is depends on the model. Llama-2-7B has full multi-head attention: each of its 32 heads has K and V. In
# Qwen2.5-7B seven heads share one K and V (grouped-query attention, GQA, 分组查询注意力).

# %%
LLAMA2 = model_shape("Llama-2-7B")
batches = [2 ** (i / 4) for i in range(0, 41)]
figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained", sharey=True)
for ax, shape, name in ((axes[0], LLAMA2, "Llama-2-7B"), (axes[1], QWEN, "Qwen2.5-7B")):
    for context, colour, style in ((16, BLUE, "-"), (500, GREEN, "--"), (4000, RED, "-.")):
        at = [round(b) for b in batches]
        line = [intensity(shape, [(1, context)] * b) for b in at]
        ax.plot(at, line, color=colour, linestyle=style, linewidth=2)
        ax.text(1150, line[-1], f"{context} tokens", color=colour, va="center", fontsize=10)
    for gpu in ("H100", "A100"):
        ax.axhline(GPUS[gpu].balance, color=INK, linewidth=1, linestyle=":")
        ax.text(1.1, GPUS[gpu].balance * 1.07, f"balance of an {gpu}: {GPUS[gpu].balance:.0f}", fontsize=10)
    ax.set(xscale="log", yscale="log", xlim=(1, 1024), ylim=(0.8, 1200), xlabel="sequences in the batch")
    ax.set_xticks([1, 4, 16, 64, 256, 1024], ["1", "4", "16", "64", "256", "1024"])
    ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    ax.minorticks_off()
    ax.set_title(f"{name}: {shape.kv_bytes_per_token() // 1024} KiB of K and V a token", loc="left", fontsize=11)
    ax.spines[["top", "right"]].set_visible(False)
axes[0].set_ylabel("intensity of a decode step, FLOP per byte")
plt.show()

# %% [markdown]
# **What to look at.** Where the lines leave the diagonal and become flat. With 16 tokens each, intensity is nearly the
# number of sequences, in both models. With 500 tokens each, Llama-2-7B stops near 50: no batch gets it even to a third
# of an A100's balance. Fewer K and V per token move the bend to the right. That is what GQA is for.
#
# ## Into the engine
#
# Now a real model, small as it is. We measure one token in two ways:
#
# - *computed anew*: a prompt of n tokens, one token out, nothing kept from before;
# - *decoded*: the same token, when the n tokens before it are in the cache.
#
# We count processor time, because other programs on your machine should not count. Milliseconds on your machine mean
# little; the ratio means a lot.

# %%
import time
from importlib.util import find_spec

has_model = find_spec("torch") is not None and find_spec("transformers") is not None
LENGTHS = (32, 64, 128, 256, 512, 1024)
measured = {}
if has_model:
    import torch

    from kvlab import LLM, SamplingParams
    from kvlab.tiny import load_glossary

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that processor time is the time of one core
    llm = LLM("tiny", dtype="float32", enable_prefix_caching=False, max_num_batched_tokens=2048,
              num_gpu_blocks_override=100)  # fmt: skip
    WORDS = [t for entry in load_glossary() for t in llm.tokenizer.encode(entry["question"] + " " + entry["answer"])]

    def generate(num_prompt, num_tokens):
        """(tokens, seconds of processor time, tokens that went through the model)."""
        before, began = llm.engine.scheduler.stats.num_scheduled_tokens, time.process_time()
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        output = llm.generate([WORDS[:num_prompt]], params)[0]
        used = time.process_time() - began
        return output.outputs[0].token_ids, used, llm.engine.scheduler.stats.num_scheduled_tokens - before

    generate(32, 4)  # the first call pays for things that no later one does
    for n in LENGTHS:
        anew = min(generate(n, 1)[1] for _ in range(3))
        decoded = (min(generate(n, 33)[1] for _ in range(3)) - anew) / 32
        measured[n] = anew, decoded

    kept, _, sent_kept = generate(20, 40)
    text = WORDS[:20]
    before = llm.engine.scheduler.stats.num_scheduled_tokens
    for _ in range(40):
        output = llm.generate([text], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))[0]
        text = text + list(output.outputs[0].token_ids)
    sent_anew = llm.engine.scheduler.stats.num_scheduled_tokens - before
    print("40 tokens after a prompt of 20, the same both ways:", text[20:] == list(kept))
    print(f"through the model: {sent_anew} tokens without reuse, {sent_kept} with; your formula says "
          f"{count(20, 40, False)} and {count(20, 40, True)}")
    torch.set_num_threads(threads)
else:
    print("torch is not installed, so there is no engine to measure. Your formula says "
          f"{count(20, 40, False)} tokens without reuse and {count(20, 40, True)} with, for 40 after 20.")

# %%
if measured:
    figure, ax = plt.subplots(figsize=(8.5, 3.8), layout="constrained")
    unit = measured[LENGTHS[0]][1]  # a decode after 32 tokens is 1
    for i, (name, colour, style) in enumerate((("computed anew", RED, "o--"), ("decoded", BLUE, "s-"))):
        line = [measured[n][i] / unit for n in LENGTHS]
        ax.plot(LENGTHS, line, style, color=colour, linewidth=2)
        ax.annotate(f"{name}: {line[-1]:.1f}", (LENGTHS[-1], line[-1]), xytext=(8, 0), textcoords="offset points",
                    color=colour, va="center")  # fmt: skip
    ax.set(xscale="log", yscale="log", xlabel="tokens before the one that is made",
           ylabel="processor time of one token\n(a decode after 32 tokens = 1)")  # fmt: skip
    ax.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    ax.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    ax.minorticks_off()
    ax.set_xlim(28, 2600)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title("kvlab's engine on one core, measured just now", loc="left", fontsize=11)
    plt.show()

# %% [markdown]
# **What to look at.** The lower line: a decode hardly notices how long the text is. The upper line climbs with it. Now
# a riddle that you can solve. At 1024 tokens the upper line has 1024 times the tokens, but it is far from 1024 times as
# high. Why?
#
# Because the 1024 tokens go through *together*. They use each weight as it comes by, 1024 times; and what a step costs
# whatever it does, it costs only once. A decode pays both for a single token. It is the roofline again, on a processor.

# %% [markdown]
# ## What the textbook says, and what we measured
#
# Each line is computed by this notebook from your functions. "Holds if" names the condition. By the share of the
# arithmetic, often called MFU, we mean operations of the step over what the chip could do in the least time that the
# step takes. It is an upper bound: a real step takes longer.

# %%
import pandas as pd

ledger = []


def claim(where, says, we_find, verdict):
    ledger.append({"where": where, "the text says": says, "we find": we_find, "verdict": verdict})


LLAMA3 = model_shape("Llama-3-8B")
A100 = GPUS["A100"]


def share(gpu, shape, step):
    """% of the arithmetic that a step can use at most."""
    return 100 * flops_of(shape, step) / (seconds(gpu, shape, step) * gpu.peak_flops)


def share_of_a_batch(gpu, shape, batch, num_prompt, num_tokens):
    """% over the whole life of a batch: prefill, then all decodes."""
    steps = [[(num_prompt, 0)] * batch] + [[(1, num_prompt + i)] * batch for i in range(num_tokens - 1)]
    return 100 * sum(flops_of(shape, s) for s in steps) / (sum(seconds(gpu, shape, s) for s in steps) * gpu.peak_flops)


def last(holds, upto=100_000):
    """The largest number up to which `holds` is true, or 0; it is true up to somewhere, and false from there on."""
    low, high = 0, upto
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def bounds(values):
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return f"{low}%" if low == high else f"{low}-{high}%"


# C16: the balance, and I = B
claim("L33 3.4", "an H100 balances at 295 FLOP per byte", f"{H100.balance:.1f} (989 TFLOP/s, 3.35 TB/s)",
      "holds for dense bf16 on the SXM card" if abs(H100.balance - 295) < 1 else "contradicted")
reach = {name: {b: last(lambda n, s=s, b=b: intensity(s, [(1, n)] * b) >= 0.9 * b) for b in (8, 64, 128)}
         for name, s in (("Qwen2.5-7B", QWEN), ("Llama-2-7B", LLAMA2))}
told = "; ".join(f"{name} " + ", ".join(f"{n if n < 100_000 else 'any'} (B={b})" for b, n in found.items())
                 for name, found in reach.items())
claim("L33 3.4", "the intensity of B decodes is about B", f"within 10% of B up to this many tokens each: {told}",
      "holds while the K and V of the batch are small beside the weights")

# C16: small batches
alone = [share(H100, LLAMA3, [(1, 500)] * b) for b in (4, 8)]
whole = {p: share_of_a_batch(H100, LLAMA3, 8, p, 100) for p in (150, 1000)}
claim("L33 3.4", "a static batch of 4-8: 20-30% of the arithmetic", f"decodes alone: {bounds(alone)}; 8 requests, "
      f"prefill counted: {whole[150]:.0f}% (prompt 150, answers 100), {whole[1000]:.0f}% (prompt 1000, answers 100)",
      "holds if prefill is counted and prompts are some 10 times the answers; contradicted for decodes"
      if max(alone) < 20 <= whole[1000] <= 30 else "holds" if min(alone) >= 20 else "contradicted")

# C16: large batches
short, longer = ([share(H100, LLAMA3, [(1, n)] * b) for b in (64, 128)] for n in (16, 500))
on_a100 = [share(A100, LLAMA3, [(1, 16)] * b) for b in (64, 128)]
mixed = [share(H100, LLAMA3, [(1, 500)] * b + [(256, 0)]) for b in (64, 128)]
served = [share_of_a_batch(H100, LLAMA3, b, 1000, 100) for b in (64, 128)]
claim("L33 3.4", "B = 64-128: 75-85% of an H100's arithmetic", f"decodes alone: {bounds(short)} (16 tokens each), "
      f"{bounds(longer)} (500 each); prefill counted (prompt 1000, answers 100): {bounds(served)}; with 256 prompt "
      f"tokens in each step: {bounds(mixed)}; decodes on an A100, 16 tokens each: {bounds(on_a100)}",
      "contradicted for decodes on an H100: 128/295 bounds it. Holds if prompts run in the same steps (chunked prefill)"
      if max(short) < 75 <= min(mixed) else "holds" if min(short) >= 75 else "contradicted")
fill = lab.best("batch_for_balance")
needed = {n: fill(H100, LLAMA3, n) for n in (16, 100, 500, 1000)}
at_128 = 100 * intensity(LLAMA3, [(1, 16)] * 128) / H100.balance
claim("L33 3.4", "such batches come near the balance", f"Llama-3-8B: {at_128:.0f}% of it at B=128, 16 tokens each; to "
      "reach it takes " + ", ".join(
      f"{b or 'none'} ({n} tokens each)" for n, b in needed.items()),
      "contradicted for decodes alone; where contexts are long no batch is large enough"
      if min(b for b in needed.values() if b) > 128 and None in needed.values()
      else "holds")

# the lecture's opening
memory_bound = {name: last(lambda b, gpu=gpu: b == 0 or intensity(LLAMA3, [(1, 500)] * b) < gpu.balance, 4096)
                for name, gpu in GPUS.items()}
claim("L33, opening", "decode is limited by memory", "largest batch for which it is (Llama-3-8B, 500 tokens each): " +
      ", ".join(f"{name} {'any' if b == 4096 else b}" for name, b in memory_bound.items()),
      "holds" if min(memory_bound.values()) == 4096 else "holds up to that batch")
base = intensity(LLAMA3, [(1, 500)])
claim("L33, opening", "a larger batch is the only way to use the chip better", f"one user: {base:.1f} FLOP per byte; "
      f"checking 5 guessed tokens at once {intensity(LLAMA3, [(5, 500)]):.1f}; everything in 1 byte "
      f"{intensity(LLAMA3, [(1, 500)], 1):.1f}", "holds for one token a step and fixed formats; there are other ways"
      if intensity(LLAMA3, [(5, 500)]) > 2 * base else "holds")

# PAV 1
RTX = GPUS["RTX 4090"]
room = int(0.92 * RTX.memory) - QWEN.weight_bytes()


def fits(context):
    return room // (context * QWEN.kv_bytes_per_token())


busy = {n: share(RTX, QWEN, [(1, n)] * fits(n)) for n in (128, 512, 2048)}
from_here = last(lambda n: n == 0 or share(RTX, QWEN, [(1, n)] * fits(n)) > 99.99, 4000) + 1
claim("PAV 1", "memory, not arithmetic, is the ceiling of concurrency (4090, Qwen2.5-7B)", "when memory is full, the "
      "arithmetic is used by " + ", ".join(f"{busy[n]:.0f}% ({fits(n)} users of {n} tokens)" for n in busy),
      f"holds from about {from_here} tokens each on; with shorter ones arithmetic ends first" if from_here > 1
      else "holds")
few, many = (b / seconds(RTX, QWEN, [(1, 128)] * b) for b in (4, 13))
claim("PAV 1, 4", "13 sequences for 4: decode is shared out better", f"{many / few:.2f} times the tokens a second; "
      f"{13 / 4:.2f} would be all", "holds" if many / few > 0.95 * 13 / 4 else "holds in part")

pd.DataFrame(ledger).style.hide(axis="index").set_properties(
    **{"text-align": "left", "white-space": "normal", "vertical-align": "top"}
).set_table_styles([{"selector": "th", "props": "text-align: left"}])

# %% [markdown]
# **The 75-85%.** A decode of 128 sequences has an intensity of at most 128, and the H100 wants 295. So 43% is the roof
# for decodes alone, before anything goes wrong. One comes near the figure, though, in
# three ways that the sentence does not name: count the prefill, the more the longer the prompts are; let chunks of
# prompts ride in the same steps (lab 08); or take a chip with a lower balance.
#
# **What stays true** is the direction. A larger batch moves a decode up the slope, nearly in proportion, as long as
# the K and V of the batch are small beside the weights. A larger batch needs more memory for K and V. That memory is
# what the next labs hunt for.

# %% [markdown]
# ## More, if you like
#
# ### How large a batch fills the chip?
#
# The slider showed that sometimes no batch does. Say when.

# %% ex="batch_for_balance"
def batch_for_balance(gpu, shape, computed, dtype_bytes=2):
    """The fewest decodes whose step reaches the GPU's balance.

    gpu: has balance (FLOP per byte). shape: a ModelShape. computed: tokens before, the same for every sequence.
    dtype_bytes: bytes of one number.

    Returns a whole number B, the smallest for which a step [(1, computed)] * B has an intensity of at least
    gpu.balance; None if no batch has, however large. Use flops_of(shape, step) and bytes_of(shape, step, dtype_bytes).
    B can be large: do not try one after the other.
    """
    ### BEGIN SOLUTION
    f = flops_of(shape, [(1, computed)])
    first = bytes_of(shape, [(1, computed)], dtype_bytes)
    b = bytes_of(shape, [(1, computed), (1, computed)], dtype_bytes) - first
    gain = f - gpu.balance * b
    if gain <= 0:
        return None
    return math.ceil(gpu.balance * (first - b) / gain)
    ### END SOLUTION

# %% check="batch_for_balance"
check("batch_for_balance")

# %% [markdown]
# ## What to remember
#
# - K and V of a token depend on nothing that comes after it, and every later token needs them. Keep those. The query is
#   used once.
# - The cache turns each step from the whole text into one token. Its price is memory, and reading that memory each
#   step.
# - A decode uses each weight once: about one operation for each byte. A prefill uses it for every token of the prompt.
# - A batch shares the weights, so the intensity grows like B. It does not share K and V, so it stops at f / b.
# - Whoever wants a large batch needs room for its K and V. That is what all this is about.
#
# ## Questions to think about
#
# 1. One could keep each layer's input x in place of K and V. Is that less memory for Llama-2-7B? For Qwen2.5-7B? What
#    would have to be computed again at each step?
# 2. The first token of an answer takes longer than the others, and on an idle machine it is *cheaper* per token. Which
#    two numbers of this lab say so?
# 3. Weights in 4 bits, arithmetic and K/V still in bf16: what happens to W and to b? Which users gain most, those with
#    short texts or those with long ones?
# 4. A provider asks less money for tokens that you send than for tokens that you get. Is that fair, by the roofline?
#    And for a prompt that begins like yesterday's?
#
# ## Where this lives in real engines
#
# - **transformers**: `use_cache=False` is the left half of the first picture; `DynamicCache` is two growing tensors a
#   layer, in place of your two lists.
# - **vLLM** and **SGLang** have no way without a cache. A step there is what you wrote: for each request, new tokens
#   and tokens computed before (`num_scheduled_tokens` and `num_computed_tokens` in vLLM's scheduler).
# - **Fewer K and V**: multi-query attention (Shazeer, 2019), grouped-query attention (Ainslie and others, 2023). The
#   roofline is by Williams, Waterman and Patterson (2009).
# - **kvlab**: `kvlab/primer.py` has everything of this lab; `kvlab/model/attention.py` is attention over pages, and
#   `kvlab/sizing.py` counts the memory, which is lab 01.
