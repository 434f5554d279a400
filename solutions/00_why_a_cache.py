# %% [markdown]
# # Lab 00: Why a cache (KV 缓存)
#
# You know how a language model writes. It reads the text so far, it guesses the next token, the token joins the text,
# and it reads again. In this lab you find out what one such step costs, what may be kept from step to step, and why a
# chip that can do almost a thousand trillion operations a second writes only a couple of hundred tokens a second for
# you.
#
# It goes with L33 0 and 3.4, and with PAV 1, and nothing comes before it. Plan two hours and a quarter: some 90 minutes
# for exercises 1 to 7, the rest to read and look. A last one, which is optional, takes 25 minutes more.

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
in_truth = 1 / primer.step_seconds(H100, QWEN, one_user)
print(f"by its arithmetic: {by_arithmetic:8,.0f} tokens a second")
print(f"at most, in truth: {in_truth:8,.0f} tokens a second for a single user")

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
from kvlab.lab.draw import costs
from kvlab.lab.draw.costs import Diary
from kvlab.lab.show import picture
from kvlab.primer import Cache, ToyDecoder, matvec

slow, fast = Diary(), Diary()
print("Without a cache it writes", primer.decode_without_cache(slow, [3, 1, 4, 1, 5], 4))
print("With a cache it writes   ", primer.decode_with_cache(fast, [3, 1, 4, 1, 5], 4))
picture(costs.two_ways(slow.steps, fast.steps),
        "Four steps as rows of boxes. Without a cache 5, 6, 7 and 8 tokens are computed, "
        "26 in all; with a cache 5, 1, 1 and 1, which is 8.")

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
# ### Exercise 1: tokens that go through the model
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

    prompt: tokens in the prompt, 1 or more. num_tokens: tokens to write, one in each step, 0 or
    more. with_cache: whether what was computed is kept (True), or each step computes the whole
    text again (False).

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
others = {"a token more": [3, 1, 4, 1, 5, 9], "another last token": [3, 1, 4, 1, 7],
          "another first token": [8, 1, 4, 1, 5]}
for what, other in others.items():
    pairs = zip(keys_of_layer_2(TEXT), keys_of_layer_2(other), strict=False)
    marks = ["same" if a == b else "NEW" for a, b in pairs]
    print(f"{what:20} positions 0 to 4:  " + "  ".join(f"{mark:4}" for mark in marks))

# %% [markdown]
# The first line is what makes a cache possible: whatever follows, the keys stay. The last line is its limit. Everything
# behind a changed token is new, even where the token itself is the same. So a cache is good for a text with the *same
# beginning*. Lab 05 lives on that.
#
# ## Exercise 2: attention of one query
#
# Plain lists of floats, no library. One trap: exp(1000) is more than a float can hold. What can you subtract from all
# scores without changing any weight?

# %% ex="attend"
import math


def attend(q, keys, values):
    """Attention of one query over some positions.

    q: the query, a list of d floats. keys: one list of d floats for each position, 1 or more
    positions. values: one list for each position, all of one length, which need not be d. None
    of them is changed.

    Returns the mixture of the values, a new list as long as one value. The weights are the
    softmax of the scores q . k / sqrt(d). Scores may be as large as 1000 or as small as -1000.
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
# ## Exercise 3: one layer, one new position
#
# Here is the cache, as small as it can be: two lists for each layer. A new position arrives. What must be computed,
# what must be kept, what can be forgotten?
#
# `matvec(matrix, x)` multiplies; it is imported above. `attention(q, keys, values)` is your `attend`.

# %% ex="attend_next"
attention = lab.best("attend")  # yours if it is solved, else ours


def attend_next(layer, x, keys, values):
    """What one layer finds for the next position.

    layer: a dict with three matrices, layer["q"], layer["k"] and layer["v"], each d x d. x: the
    new position's input, a list of d floats. keys, values: the lists of k and of v of all
    positions before it, in order; both are empty for the first one.

    Appends the new position's k to `keys` and its v to `values`. Returns what attention finds
    for the new position, a list of d floats. A position attends to itself, too.
    """
    ### BEGIN SOLUTION
    for kept, name in ((keys, "k"), (values, "v")):
        kept.append(matvec(layer[name], x))
    return attention(matvec(layer["q"], x), keys, values)
    ### END SOLUTION

# %% check="attend_next"
check("attend_next")

# %% [markdown]
# ## Exercise 4: decode, without and with
#
# Now the loop around it. A model has one method that you need:
#
#     logits = model.forward(tokens, cache)
#
# It computes `tokens` as the continuation of what is in `cache`, adds their K and V to the cache, and returns one
# number for each word of the vocabulary (词表). The largest is the model's guess. `Cache()` makes an empty one.
#
# Write both ways. They must give the same tokens, and the check counts how many tokens you send through the model,
# and in how many calls.

# %% ex="decode"
def decode_without_cache(model, prompt, num_tokens):
    """The next num_tokens tokens, where every step computes the whole text again.

    model: see above. prompt: a list of 1 or more tokens; it is not changed. num_tokens: 0 or
    more: exactly as many steps, each with one call of model.forward. No token ends the text.

    Returns the list of new tokens, without the prompt. In each step the next token is the index
    of the largest logit.
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

    Arguments and result are those of decode_without_cache. Each call begins with an empty cache
    of its own. The first step is the prefill: it takes the whole prompt at once.
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
without = lab.best("decode_without_cache")(slow, TEXT, 60)
with_it = lab.best("decode_with_cache")(fast, TEXT, 60)
assert without == with_it, "the cache must not change a single token"
print("the same 60 tokens, both ways:", *without[:12], "...")


def multiply_adds(new, computed, dim=8, layers=2):
    """Three matrices for each new token; two vectors for each new token and one it looks at."""
    pairs = sum(computed + i + 1 for i in range(new))
    return layers * (3 * dim**2 * new + 2 * dim * pairs)


picture(costs.step_costs(slow, fast, multiply_adds),
        "Without a cache, a step's multiply-adds rise from 2 to 91 thousand in 60 steps; the "
        "sum is 2,259 thousand. With a cache they stay below 3; the sum is 91.")

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
# A model is described by its shape. `TINY` is so small that you can count it by hand. Its attention heads have 4 · 3 =
# 12 numbers, which is not its hidden_size: that is on purpose, and some real models are made so.

# %%
from kvlab.sizing import ModelShape

TINY = ModelShape(vocab_size=10, hidden_size=5, intermediate_size=6, num_hidden_layers=3,
                  num_attention_heads=4, num_key_value_heads=1, head_dim=3)
print("weights in the layers' matrices:", TINY.num_layer_weights)
print("weights in the output matrix:", TINY.vocab_size * TINY.hidden_size)
print("bytes of K and V for one token, all layers:", TINY.kv_bytes_per_token(2))

# %% [markdown]
# ### Exercise 5: the operations of a step
#
# Three things take operations. A multiplication and an addition count as two, and are called FLOP (浮点运算).
#
# 1. **Matrices.** Each new token passes every weight of the layers once: 2 FLOP a weight.
# 2. **The output matrix** (the LM head, vocab_size x hidden_size). It makes logits, for one token of each sequence
#    (its last): 2 FLOP for each of its weights.
# 3. **Attention.** In every layer and every attention head, each new token looks at all tokens computed before, at the new ones
#    before it, and at itself. One token looking at one token is a *pair*. A pair costs 2 FLOP for each of the head_dim
#    numbers in q · k, and 2 more for each in weight times value.
#
# Count `[(3, 0)]` on `TINY` before you go on. The pairs: 1 + 2 + 3 = 6. Matrices: 2 · 720 · 3 = 4320. The output
# matrix: 2 · 50.
# Attention: 4 · 3 layers · 4 heads · 3 numbers · 6 pairs = 864. In all 5284.

# %% ex="step_flops"
def step_flops(shape, step):
    """Floating-point operations of one step.

    shape: a ModelShape, as TINY: use its num_layer_weights, vocab_size, hidden_size,
    num_hidden_layers, num_attention_heads and head_dim. step: a list of one or more pairs
    (new tokens, 1 or more; tokens computed before), one a sequence.

    Returns a whole number: matrices, output matrix and attention, as counted above. Everything
    else is left out; it is small.
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
# ## Exercise 6: the bytes of a step
#
# Before a weight can be multiplied it must travel from the chip's memory (显存) to where the arithmetic is. That takes
# time, too. Count the bytes:
#
# 1. **Weights.** All weights of the layers and of the output matrix are read **once for the whole step**, whoever is in the
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
flops_of = lab.best("step_flops")  # yours if it is solved, else ours
bytes_of = lab.best("step_bytes")


def intensity(shape, step, dtype_bytes=2):
    """FLOP per byte."""
    return flops_of(shape, step) / bytes_of(shape, step, dtype_bytes)


decode = [(1, 500)]
for what, step in (("prefill of 2000 tokens", [(2000, 0)]), ("one decode", decode),
                   ("8 decodes", decode * 8), ("128 decodes", decode * 128)):
    gflop, gb = flops_of(QWEN, step) / 1e9, bytes_of(QWEN, step) / 1e9
    print(f"{what:22} {gflop:9,.0f} GFLOP {gb:6.1f} GB {gflop / gb:8.1f} FLOP per byte")

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

# %% [markdown]
# ### Exercise 7: the roofline
#
# Two short functions: what work of a given intensity can reach, and how long a step takes at least.

# %% ex="roofline"
def attainable_flops(gpu, flop_per_byte):
    """Operations a second that work of this intensity can reach at most.

    gpu: has peak_flops (FLOP/s) and bandwidth (bytes/s). flop_per_byte: the work's arithmetic
    intensity.
    """
    ### BEGIN SOLUTION
    return min(gpu.bandwidth * flop_per_byte, gpu.peak_flops)
    ### END SOLUTION


def step_seconds(gpu, shape, step, dtype_bytes=2):
    """The least time a step can take, in seconds. Computing and moving go on at the same time.

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
roofline = costs.Roofline(roof, intensity)
decodes = {f"{b} decode" + "s" * (b > 1): [(1, 500)] * b for b in (1, 8, 64, 128)}
steps = decodes | {"prefill, 2000 tokens": [(2000, 0)]}
picture(roofline.draw(H100, "H100", QWEN, steps),
        "The H100's roof: 3.35 TB/s up to 295 FLOP per byte, then 989 TFLOP/s. 1 decode can "
        "reach 0.34% of it, 8 decodes 3%, 64 decodes 19%, 128 decodes 35%, a prefill 100%.")


def percent(batch):
    """How much of the arithmetic can be used at most, with 500 tokens before each decode."""
    return 100 * roof(H100, intensity(QWEN, [(1, 500)] * batch)) / H100.peak_flops


lab.compare("one user", round(percent(1), 2))
lab.compare("128 users", round(percent(128), 1))

# %% [markdown]
# **What to look at.** How far each dot is below the flat part of the roof, and in which direction it moves. One decode
# sits at the far left, at a third of a percent. More sequences move it to the right and up the slope: each byte of
# weights now serves all of them. A prefill is on the flat part from the start.
#
# And here is the number from the beginning:

# %%
per_second = 1 / seconds(H100, QWEN, one_user)
print(f"a single user, at most: {per_second:,.0f} tokens a second; "
      f"by arithmetic alone {by_arithmetic:,.0f}")
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
    step = {f"{batch} decodes, {context} tokens each": [(1, context)] * batch}
    weights, kv = bytes_of(QWEN, [(1, 0)]), batch * context * QWEN.kv_bytes_per_token()
    title = f"Bytes of this step: weights {weights / 1e9:.1f} GB, K and V {kv / 1e9:.1f} GB"
    return roofline.draw(H100, "H100", QWEN, step, title)


sliders(show, "One dot under the H100's roof: 128 decodes with 1000 tokens each.",
        batch=(1, 512, 128), context=(10, 8000, 1000))

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
chips = {"H100": H100, "A100": GPUS["A100"]}
picture(costs.batches(intensity, {"Llama-2-7B": LLAMA2, "Qwen2.5-7B": QWEN}, chips),
        "Intensity over the batch. With 16 tokens each it keeps rising in both models. With "
        "4000, Llama-2-7B stops near 7 and Qwen2.5-7B near 65; the balances are 153 and 295.")

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
from kvlab.lab.scenes.decode import Meter, available

count = lab.best("num_projected")
says = f"your formula says {count(20, 40, False)} and {count(20, 40, True)}"
if available():
    meter = Meter()
    sent = meter.tokens(20, 40)
    print("40 tokens after a prompt of 20, the same both ways:", sent.same)
    print(f"through the model: {sent.anew} tokens without reuse, {sent.decoded} with; {says}")
    measured = meter.times((32, 64, 128, 256, 512, 1024))
    picture(costs.engine_times(measured),
            "Processor time of one token. Decoded it stays about the same from 32 to 1,024 "
            "tokens; computed anew it grows with the text.")
else:
    print("torch is not installed: no engine to measure. For 40 tokens after 20,", says)

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
# step takes. It is an upper bound: a real step takes longer. One line gives away an answer of exercise 8, which is
# optional and comes after the table; the cells that compute the table are folded.

# %% fold="yes"
from kvlab.lab.show import table as show_table

LLAMA3, A100, RTX = model_shape("Llama-3-8B"), GPUS["A100"], GPUS["RTX 4090"]
ledger = []


def claim(where, says, we_find, verdict):
    ledger.append((where, says, we_find, verdict))


def share(gpu, shape, *steps):
    """% of the arithmetic that these steps, one after the other, can use at most."""
    work = sum(flops_of(shape, step) for step in steps)
    return 100 * work / (sum(seconds(gpu, shape, step) for step in steps) * gpu.peak_flops)


def life(batch, num_prompt, num_tokens=100):
    """The steps of a batch: prefill, then all decodes."""
    decodes = [[(1, num_prompt + i)] * batch for i in range(num_tokens - 1)]
    return [[(num_prompt, 0)] * batch, *decodes]


def last(holds, upto=100_000):
    """The largest number for which `holds`, or 0; it holds up to somewhere, and not beyond."""
    low, high = 0, upto
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def span(values):
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return f"{low}%" if low == high else f"{low}-{high}%"

# %% fold="yes"
claim("L33 3.4", "an H100 balances at 295 FLOP per byte",
      f"{H100.balance:.1f} (989 TFLOP/s, 3.35 TB/s)",
      "holds for dense bf16 on the SXM card" if abs(H100.balance - 295) < 1 else "contradicted")

told = []
for name, shape in (("Qwen2.5-7B", QWEN), ("Llama-2-7B", LLAMA2)):
    for b in (8, 64, 128):
        n = last(lambda n, s=shape, b=b: intensity(s, [(1, n)] * b) >= 0.9 * b)
        told.append(f"{name} {n if n < 100_000 else 'any'} (B={b})")
claim("L33 3.4", "the intensity of B decodes is about B",
      "within 10% of B up to this many tokens each: " + ", ".join(told),
      "holds while the K and V of the batch are small beside the weights")

alone = [share(H100, LLAMA3, [(1, 500)] * b) for b in (4, 8)]
short, long = (share(H100, LLAMA3, *life(8, n)) for n in (150, 1000))
claim("L33 3.4", "a static batch of 4-8: 20-30% of the arithmetic",
      f"decodes alone: {span(alone)}; 8 requests with answers of 100, prefill counted: "
      f"{short:.0f}% (prompt 150), {long:.0f}% (prompt 1000)",
      "holds if prefill is counted and prompts are some 10 times the answers; contradicted for "
      "decodes" if max(alone) < 20 <= long <= 30 else
      "holds" if min(alone) >= 20 else "contradicted")

# %% fold="yes"
short, long = ([share(H100, LLAMA3, [(1, n)] * b) for b in (64, 128)] for n in (16, 500))
on_a100 = [share(A100, LLAMA3, [(1, 16)] * b) for b in (64, 128)]
mixed = [share(H100, LLAMA3, [(1, 500)] * b + [(256, 0)]) for b in (64, 128)]
served = [share(H100, LLAMA3, *life(b, 1000)) for b in (64, 128)]
claim("L33 3.4", "B = 64-128: 75-85% of an H100's arithmetic",
      f"decodes alone: {span(short)} (16 tokens each), {span(long)} (500 each); prefill "
      f"counted (prompt 1000, answers 100): {span(served)}; with 256 prompt tokens in each "
      f"step: {span(mixed)}; decodes on an A100, 16 tokens each: {span(on_a100)}",
      "contradicted for decodes on an H100: 128/295 bounds it. Holds if prompts run in the "
      "same steps (chunked prefill)" if max(short) < 75 <= min(mixed) else
      "holds" if min(short) >= 75 else "contradicted")

fill = lab.best("batch_for_balance")
needed = {n: fill(H100, LLAMA3, n) for n in (16, 100, 500, 1000)}
at_128 = 100 * intensity(LLAMA3, [(1, 16)] * 128) / H100.balance
claim("L33 3.4", "such batches come near the balance",
      f"Llama-3-8B: {at_128:.0f}% of it at B=128, 16 tokens each; to reach it takes "
      + ", ".join(f"{b or 'none'} ({n} tokens each)" for n, b in needed.items()),
      "contradicted for decodes alone; where contexts are long no batch is large enough"
      if min(b for b in needed.values() if b) > 128 and None in needed.values() else "holds")

# %% fold="yes"
bound = {name: last(lambda b, g=gpu: not b or intensity(LLAMA3, decode * b) < g.balance, 4096)
         for name, gpu in GPUS.items()}
claim("L33, opening", "decode is limited by memory",
      "largest batch for which it is (Llama-3-8B, 500 tokens each): "
      + ", ".join(f"{name} {'any' if b == 4096 else b}" for name, b in bound.items()),
      "holds" if min(bound.values()) == 4096 else "holds up to that batch")

base, guessed = intensity(LLAMA3, decode), intensity(LLAMA3, [(5, 500)])
claim("L33, opening", "a larger batch is the only way to use the chip better",
      f"one user: {base:.1f} FLOP per byte; checking 5 guessed tokens at once {guessed:.1f}; "
      f"everything in 1 byte {intensity(LLAMA3, decode, 1):.1f}",
      "holds for one token a step and fixed formats; there are other ways"
      if guessed > 2 * base else "holds")

room = int(0.92 * RTX.memory) - QWEN.weight_bytes()


def fits(n):
    return room // (n * QWEN.kv_bytes_per_token())


def full(n):
    return share(RTX, QWEN, [(1, n)] * fits(n))


start = last(lambda n: n == 0 or full(n) > 99.99, 4000) + 1
claim("PAV 1", "memory, not arithmetic, is the ceiling of concurrency (4090, Qwen2.5-7B)",
      "when memory is full, the arithmetic is used by "
      + ", ".join(f"{full(n):.0f}% ({fits(n)} users of {n} tokens)" for n in (128, 512, 2048)),
      f"holds from about {start} tokens each on; with shorter ones arithmetic ends first"
      if start > 1 else "holds")

few, many = (b / seconds(RTX, QWEN, [(1, 128)] * b) for b in (4, 13))
claim("PAV 1, 4", "13 sequences for 4: decode is shared out better",
      f"{many / few:.2f} times the tokens a second; {13 / 4:.2f} would be all",
      "holds" if many / few > 0.95 * 13 / 4 else "holds in part")

# %%
show_table(["where", "the text says", "we find", "verdict"], ledger)

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
# ### Exercise 8, optional: how large a batch fills the chip?
#
# The slider showed that sometimes no batch does. Say when.

# %% ex="batch_for_balance"
def batch_for_balance(gpu, shape, computed, dtype_bytes=2):
    """The fewest decodes whose step reaches the GPU's balance.

    gpu: has balance (FLOP per byte). shape: a ModelShape. computed: tokens before, the same for
    every sequence. dtype_bytes: bytes of one number.

    Returns a whole number B, the smallest for which a step [(1, computed)] * B has an intensity
    of at least gpu.balance; None if no batch has, however large. Use flops_of(shape, step) and
    bytes_of(shape, step, dtype_bytes); a step has one sequence or more. B can be large: do not
    try one after the other.
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
