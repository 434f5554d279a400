# %% [markdown]
# # Lab 09: Preemption (抢占)
#
# The pool is full, and everybody who runs wants one more block. Somebody has to give way. In this lab you write the
# three decisions that follow: **who** goes, **how** (do its K and V wait on the CPU, or are they computed again?),
# and **when** it may come back. Then all three go into the engine.
#
# It goes with L33 5.1 to 5.4, 8.1-6, 8.2-4, 9.3-1 and A.2, and with PAV 7. (L33 is the course's lecture 33, on the
# memory of the KV cache; PAV is its lesson on PagedAttention as virtual memory.) From earlier labs you need three
# ideas: how many bytes a token's K and V take (lab 01), what a block is (lab 03), and that the engine works in steps
# with a token budget (labs 07 and 08). You do not need to have solved them.
#
# **Time.** The six core exercises take about 85 minutes, reading and looking at the figures another 40. A good
# place for a break is after exercise 3. A seventh exercise is extra. Cells that only draw or count are folded away:
# one click opens them, and you need not read them.

# %%
from kvlab.lab import Lab

lab = Lab("09")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## The job that is thrown out and thrown out
#
# A GPU serves chats (聊天). At night a long job is added: a prompt of 1,280 tokens, and an answer of 200. It has a low
# priority (优先级), so the chats go first. The pool has 160 blocks of 16 tokens, and the job alone needs 93 of them.
#
# The engine follows three rules, and each sounds sensible:
#
# - **Who?** The youngest of the lowest priority gives way.
# - **How?** Its K and V are dropped, and computed again when it comes back.
# - **When?** It comes back as soon as its *next chunk* finds blocks.
#
# This is the real scheduler of our engine, with a clock in the place of the GPU (an L4 that serves Qwen2.5-7B; its
# times are computed, not measured).

# %%
from kvlab.lab.scenes.pressure import JOB, crowd, job_and_chats, play, summary


def first_chunk(request, room):
    return True  # whoever finds blocks for one chunk comes in


night = play(job_and_chats(), num_blocks=160, may_resume=first_chunk)
print(f"tokens that had to be computed: {night.useful:8,}")
print(f"tokens that were computed:      {night.computed:8,}")
print(f"the job was thrown out {night.record(JOB).num_preemptions} times")

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.lab.draw import pressure as draw
from kvlab.lab.show import ledger, picture, sliders, table

figure, ax = plt.subplots(figsize=(9, 2.6), layout="constrained")
draw.pool(ax, night.starts, night.blocks, JOB, night.lanes[JOB], 160,
          "Blue: blocks of chats. Hatched: blocks of the job. A triangle: it is thrown out")
ax.set_xlabel("seconds")
picture(figure, "Blocks over 56 seconds. The job's blocks stand on the chats', up to the line at "
        "160, and fall to nothing at each of a dense row of triangles.")

# %% [markdown]
# **What to look at.** The hatched spikes. The job comes in, computes for a few steps, and reaches the black line.
# Then a chat needs a block, and all its work is gone. It comes back at once. Nobody has made a mistake that you
# could point at, and the engine does five times the work that it has to do. This is called **thrashing** (抖动).
#
# By the end of this lab your engine gets through the same night with far less waste. But first things first: was it
# right to *compute* all this again? The textbook (L33 5.4) has a formula for that.

# %% [markdown]
# ## Your predictions
#
# First: Qwen2.5-7B runs on one H100 behind PCIe 4.0. A victim is thrown out. The textbook's formula gives two
# times: to swap (换出) its K and V out and in again, and to recompute (重计算) them. Divide the second by the first.
# Below 1, recomputing wins; above 1, swapping. What comes out for this 7B?
#
# Second: our table has eleven well-known models, from 0.5B to 72B. For how many of them does the same formula say
# "recompute"?
#
# Third: 120 users, with short answers and long ones, and a pool that is too small. An engine that throws out the
# *youngest* request computes 100 tokens again. How many does an engine compute again that throws out the *largest*,
# which gives back the most blocks?
#
# Replace each `None` by a number and run the cell.

# %%
lab.predict("this 7B", None, unit="times as long to recompute as to swap")
lab.predict("models that recompute", None, unit="of 11")
lab.predict("largest first", None, unit="tokens, where youngest first computes 100 again")

# %% [markdown]
# ## Exercise 1: by hand
#
# The textbook's example, on paper. Llama-3-70B: 70 billion parameters, 320 KB of K and V for each token (the book
# takes it for 320,000 bytes). A link of 32 GB/s in each direction. A GPU that reaches 500 TFLOP/s. The victim has K
# and V for 1,000 tokens.
#
# 1. Bytes of K and V: 1,000 × 320,000 = 0.32 GB. They go out, and later they come in.
# 2. Each weight costs a token one multiplication and one addition.
#
# How many milliseconds for each? (The book's answers: 20 and 280.) Then write it down for any model and machine, in
# seconds.

# %% ex="by_the_book"
def by_the_book(tokens, kv_bytes_per_token, num_parameters, bandwidth, flops_rate):
    """What a preemption costs, as L33 5.4 counts.

    tokens: tokens of the victim that have K and V. kv_bytes_per_token: bytes of one token's K
    and V. num_parameters: weights of the model. bandwidth: bytes/s of the link, in each
    direction. flops_rate: FLOP/s that the GPU reaches.

    Returns two numbers, in this order: seconds to swap out and in again, seconds to recompute.
    """
    ### BEGIN SOLUTION
    num_bytes = tokens * kv_bytes_per_token
    num_flops = 2 * num_parameters * tokens
    return 2 * num_bytes / bandwidth, num_flops / flops_rate
    ### END SOLUTION

# %% check="by_the_book"
check("by_the_book")

# %% [markdown]
# Stuck? `hint("by_the_book")` gives a nudge, and more if you call it again. It works for every exercise.
#
# `lab.best("by_the_book")` is your function if it passes its check, and ours if not. So you can read on without
# having solved everything. It looks at the moment when its cell runs: if you solve an exercise later, run the cells
# below it again.

# %%
from kvlab.sizing import KIB, MODELS, model_shape

book = lab.best("by_the_book")
LINK, SPEED = 32e9, 500e12  # the textbook's: bytes/s each way, FLOP/s reached

swap, again = book(1000, 320_000, 70e9, LINK, SPEED)
print(f"70B, 1,000 tokens:  swap {1000 * swap:.0f} ms, recompute {1000 * again:.0f} ms")
ratios = {}
for name, shape in MODELS.items():
    of_tokens = [book(n, shape.kv_bytes_per_token(), shape.num_parameters, LINK, SPEED)
                 for n in (100, 10_000)]
    ratios[name], at_10_000 = (again / swap for swap, again in of_tokens)
    kib = shape.kv_bytes_per_token() // KIB
    print(f"{name:13} {kib:4} KiB a token: recompute / swap = {ratios[name]:5.2f} with 100 tokens, "
          f"{at_10_000:5.2f} with 10,000")
lab.compare("this 7B", ratios["Qwen2.5-7B"])
lab.compare("models that recompute", sum(ratio < 1 for ratio in ratios.values()))

# %% [markdown]
# (The 70B was 14.0 by hand and is a little less in the list: there K and V are counted exactly, 320 × 1,024 bytes.)
#
# Two surprises.
#
# **The length cancels.** Both bills grow with S, the number of tokens, so it does not matter whether 100 or 10,000
# are thrown out. What is left is a law (L33 5.4): swapping wins when
#
# **bandwidth × parameters > K/V bytes of a token × FLOP/s.**
#
# **The 7B swaps.** The rule of thumb that goes with the formula says that small models recompute and large ones
# swap. The formula itself says something else: look at the KiB. What decides is the number of parameters *for each
# byte of K and V*. Models with grouped KV heads (分组查询注意力, GQA) have few bytes. Here is the law as a map:

# %% fold="yes"
from kvlab.costs.preemption import effective_bandwidth

POINTS = {name: (s.kv_bytes_per_token(), s.num_parameters) for name, s in MODELS.items()}
PIECES = {"whole": None, "1 MiB": 1024, "256 KiB": 256, "64 KiB": 64, "16 KiB": 16, "4 KiB": 4}
LATENCY = 10e-6  # seconds that each piece takes besides its bytes: an estimate


def show_map(GB_per_s, TFLOPs, pieces, found_percent):
    size, found = PIECES[pieces], found_percent / 100
    link, told = GB_per_s * 1e9, []
    if size:
        link = effective_bandwidth(size * KIB, link, LATENCY)
        told.append(f"in pieces of {pieces}, each 10 us more")
    if found:
        link *= (1 - found) / (1 - found / 2)  # recomputing: 1 - found; swapping: 2 - found
        told.append(f"{found_percent}% found on return (the link counts for less)")
    figure, ax = plt.subplots(figsize=(8.5, 4.8), layout="constrained")
    draw.regions(ax, POINTS, link, TFLOPs * 1e12, "; ".join(told))
    return figure


sliders(show_map, GB_per_s=(2, 128, 32), TFLOPs=(20, 1000, 500), pieces=(PIECES, "whole"),
        found_percent=(0, 98, 0),
        alt="A map of models by K/V bytes a token and parameters. A straight border: above it "
        "swapping wins, below it recomputing. Only Llama-2-7B lies below, Llama-2-13B on it.")

# %% [markdown]
# **What to look at.** The thick border, and which models lie below it. With the textbook's constants it is one, and
# Llama-2-13B sits on the border. These two have full multi-head attention: as many KV heads as query heads. Among
# such models the rule points the right way: the small one recomputes, and for the larger one both cost the same. All
# models with grouped heads swap, down to half a billion parameters.
#
# Now move the sliders (they need a running kernel), one at a time, and put it back:
#
# - `GB_per_s`: how slow must the link be before Qwen2.5-7B recomputes? Before Llama-3-70B does?
# - `pieces`: a block of 16 tokens of Qwen2.5-7B has 896 KiB. Sent in one piece per layer, for K and for V, it goes
#   in 56 pieces of 16 KiB. Who recomputes then? (The slider gives all models the same piece. What would change if
#   each had its own? A 70B's is 32 KiB.)
# - `found_percent`: part of the victim's K and V may still be in the prefix cache (前缀缓存) when it comes back. What
#   is found need not be computed, and not copied in. Why does the border move at all? (On the way *out* nobody
#   knows what will be found.)
# - `TFLOPs`: on the same link, does a faster GPU favour swapping or recomputing?

# %% fold="yes"
def own_pieces(shape, block_size=16):
    """Bytes of a block in one layer: its K, or its V."""
    return block_size * shape.kv_bytes_per_token() / (2 * shape.num_hidden_layers)


by_pieces = {name: ratios[name] * effective_bandwidth(own_pieces(shape), LINK, LATENCY) / LINK
             for name, shape in MODELS.items()}


def answers():
    two = ("Qwen2.5-7B", "Llama-3-70B")
    of_16 = effective_bandwidth(16 * KIB, LINK, LATENCY) / LINK
    kib = [own_pieces(shape) / KIB for shape in MODELS.values()]
    layers = [shape.num_hidden_layers for shape in MODELS.values()]
    fast = [name for name, (kv, parameters) in POINTS.items() if LINK * parameters < kv * 1000e12]
    print("GB_per_s: both cost the same at "
          + ", ".join(f"{LINK / ratios[name] / 1e9:.1f} for {name}" for name in two))
    print(f"pieces of 16 KiB: {sum(r * of_16 < 1 for r in ratios.values())} of {len(ratios)} recompute")
    print(f"pieces of a layer's K or V, {min(kib):.0f} to {max(kib):.0f} KiB, {min(layers)} to {max(layers)} layers: "
          f"{sum(r < 1 for r in by_pieces.values())} recompute. These swap: "
          + ", ".join(name for name, r in by_pieces.items() if r > 1))
    print("found_percent: both cost the same at "
          + ", ".join(f"{100 * (ratios[name] - 1) / (ratios[name] - 0.5):.0f} for {name}" for name in two))
    print(f"TFLOPs: a faster GPU favours recomputing, as the link stays. With 1,000, {len(fast)} recompute: "
          + ", ".join(fast))

# %% [markdown]
# Have you tried all four? Then compare.

# %%
answers()

# %% [markdown]
# The second answer is worth a second look. In such pieces (vLLM V0 copied like this; 10 us for each are an estimate)
# the rule of thumb comes true, for grouped heads as well: small models recompute, and the two of 70 billion swap. A
# block then costs two pieces a layer, nearly whatever is in them. Layers grow slowly from model to model, parameters
# quickly. So parameters decide, as the rule says.
#
# ## What the textbook leaves out
#
# A formula in which the length cancels cannot be the whole truth. Two things are missing:
#
# 1. **Pairs.** A token attends to (关注) all tokens before it and to itself. Token number i makes i query-key pairs. S
#    tokens make 1 + 2 + ... + S = S(S + 1)/2 of them: a quadratic term (二次项).
# 2. **Fixed costs.** A swap takes some time whatever it moves: the step must wait for the copy, twice.
#
# And one thing that the sliders had: **what is found again**. With `found` of the tokens in the cache, the others are
# new. The first new token sees found + 1 keys, the last one sees all of them. Draw it: a triangle when nothing is
# found. What is it when something is?
#
# A machine is four prices from here on, all in seconds:
#
# | `Prices` | |
# |---|---|
# | `move` | one token's K and V over the link, **one way** |
# | `compute` | one token's K and V computed again: the weights' part |
# | `pair` | one query-key pair |
# | `fixed` | one swap, **out and in together**, whatever it moves |
#
# A cost for each *piece* is not in `fixed`. It is the same for every token, so it only makes the link slower: that
# was the slider `pieces`.

# %%
from kvlab.costs.preemption_steps import Prices, prices_of  # noqa: F401

FIXED = 2.5e-3  # seconds: an estimate
QWEN = prices_of(model_shape("Qwen2.5-7B"), LINK, SPEED, fixed=FIXED)
for name, seconds in QWEN._asdict().items():
    print(f"{name:8} {1e9 * seconds:15,.3f} ns")

# %% [markdown]
# A pair costs next to nothing. After how many tokens does it matter? Divide `compute` by `pair`: that is the number
# of keys that a token must see until attention costs as much as all the weights.
#
# ## Exercise 2: the two bills

# %% ex="two_bills"
def two_bills(prices, tokens, found=0):
    """What a preemption costs, by swapping and by recomputing.

    prices: a Prices. tokens: tokens of the victim that have K and V, at least 1. found: how many
    of them, the first ones, are in the prefix cache when it comes back, 0 <= found <= tokens.
    When it goes out, nobody knows that yet.

    Returns two numbers, in this order: seconds by swapping, seconds by recomputing.
    """
    ### BEGIN SOLUTION
    new = tokens - found
    pairs = new * found + new * (new + 1) / 2
    swap = prices.fixed + prices.move * tokens + prices.move * new
    return swap, prices.compute * new + prices.pair * pairs
    ### END SOLUTION

# %% check="two_bills"
check("two_bills")

# %% [markdown]
# A sanity check: without pairs, without a fixed cost, and with nothing found, it must be exercise 1 again. One
# difference is left. The book counts all parameters. Here only those of the layers count: the embedding computes
# nothing, and the head works for the last token alone. The smaller the model, the more this is, and it puts
# Llama-2-13B on the other side of the border.

# %%
both_bills = lab.best("two_bills")

by_layers = {}
for name in ("Qwen2.5-0.5B", "Llama-2-7B", "Llama-2-13B", "Qwen2.5-7B", "Llama-3-70B"):
    plain = prices_of(model_shape(name), LINK, SPEED)._replace(pair=0)
    swap, again = both_bills(plain, 1000)
    by_layers[name] = again / swap
    print(f"{name:12} recompute / swap: {by_layers[name]:5.2f}; by the book {ratios[name]:5.2f}")
print(f"compute / pair of Qwen2.5-7B: {QWEN.compute / QWEN.pair:,.0f} keys")

swap, again = both_bills(QWEN, 2000)
print(f"\nQwen2.5-7B, 2,000 tokens, nothing found: swap {1e3 * swap:.1f} ms, "
      f"recompute {1e3 * again:.1f} ms")
swap, again = both_bills(QWEN, 2000, found=1900)
print(f"Qwen2.5-7B, 2,000 tokens, 1,900 found:   swap {1e3 * swap:.1f} ms, "
      f"recompute {1e3 * again:.1f} ms")

# %% [markdown]
# With nearly everything found again, recomputing wins even here: the way out is paid in any case. Keep this in mind
# for the question why a real engine might not swap.
#
# ## Exercise 3: from how many tokens on?
#
# Nothing is found. From how many tokens on is swapping the cheaper one? By hand first. Swapping wins where
#
# recompute - swap = compute × S + pair × S(S + 1)/2 - 2 × move × S - fixed > 0.
#
# Sort it by powers of S: **a S² + b S - fixed > 0**. What are a and b? Then fill in the table:
#
# | pair | fixed | a token gains (b) | swapping wins |
# |---|---|---|---|
# | 0 | 0 | b > 0 | always: this is the textbook's law |
# | 0 | 0 | b ≤ 0 | ? |
# | 0 | some | b > 0 | from fixed / b tokens on |
# | 0 | some | b ≤ 0 | ? |
# | some | 0 | b ≥ 0 | ? |
# | some | 0 | b < 0 | ? |
# | some | some | any | from the positive root on: which of the two is it? |
#
# A number to try it on: for Qwen2.5-7B, leave the pairs out, and divide `fixed` by what a token gains.

# %% ex="swap_wins_from"
def swap_wins_from(prices):
    """The number of tokens from which on swapping is cheaper, with nothing found.

    prices: a Prices; move and compute are above 0, pair and fixed 0 or more.

    Returns a float, the length at which both bills are equal (it need not be whole, and may be
    below 1): for longer victims swapping is cheaper. 0.0 if swapping is cheaper at every length
    above 0, None if at none.
    """
    ### BEGIN SOLUTION
    a = prices.pair / 2
    b = prices.compute + prices.pair / 2 - 2 * prices.move
    if a == 0:
        return prices.fixed / b if b > 0 else None
    return (-b + (b**2 + 4 * a * prices.fixed) ** 0.5) / (2 * a)
    ### END SOLUTION

# %% check="swap_wins_from"
check("swap_wins_from")

# %%
wins_from = lab.best("swap_wins_from")


def told_crossing(crossing):
    if crossing is None:
        return "never"
    return "always" if crossing == 0 else f"from {crossing:,.0f} tokens"


rows, crossings = [], {}
for name, shape in MODELS.items():
    pure = prices_of(shape, LINK, SPEED)
    cases = {"no pairs, layers only": pure._replace(pair=0), "with pairs": pure,
             "pairs, 2.5 ms fixed": pure._replace(fixed=FIXED)}
    crossings[name] = {case: wins_from(prices) for case, prices in cases.items()}
    rows.append([name, *map(told_crossing, crossings[name].values())])
table(["swapping wins", *crossings[name]], rows)

# %% fold="yes"
figure, axes = plt.subplots(1, 3, figsize=(10, 3.3), layout="constrained")
chosen = ("Llama-2-7B", 0), ("Qwen2.5-7B", FIXED), ("Llama-3-70B", FIXED)
for ax, (name, fixed) in zip(axes, chosen, strict=True):
    prices = prices_of(model_shape(name), LINK, SPEED, fixed=fixed)
    draw.bills(ax, lambda tokens, prices=prices: both_bills(prices, tokens),
               [10 ** (i / 8) for i in range(41)], wins_from(prices),
               f"{name}, {1000 * fixed:g} ms fixed")
axes[0].set_ylabel("milliseconds")
told = "; ".join(f"{n} {told_crossing(c['pairs, 2.5 ms fixed'])}" for n, c in crossings.items())
picture(figure, f"Milliseconds by swapping and by recomputing for three models. Swapping wins, with "
        f"pairs and 2.5 ms fixed: {told}.")

# %% [markdown]
# **What to look at.** Where the dashed line crosses the solid one. The length has come back, in two ways:
#
# - For a model below the border (Llama-2-7B) the pairs bring swapping back, at contexts of 13 thousand tokens. (The
#   first panel has no fixed cost, so that the pairs act alone.)
# - For a model above it, the fixed cost hands *short* victims to recomputing. This is the true core of the book's
#   "short context: recompute". But short means some 110 tokens for this 7B, and 10 for the 70B, not 512.
#
# (A good place for a break.)

# %% [markdown]
# ## Exercise 4: who gives way
#
# Now to the decisions. A request called `needy` finds no free block. Who gives way? The scheduler asks:
#
#     choose_victim(running, needy, gain)
#
# | | |
# |---|---|
# | `running` | list of the requests that run, `needy` among them, in the order in which they were *last* let in |
# | `request.sort_key` | its place in the queue: `(priority, arrival, index among its siblings)`; smaller goes first |
# | `gain(request)` | how many blocks come free if it is thrown out; shared blocks do not |
#
# The rule of the textbook (L33 5.2, A.2) is **youngest first**: who came last has lost the least. Our engine adds two
# words to it:
#
# - **Never somebody who stands before needy.** Otherwise A throws out B, B comes back and throws out A, and so on.
# - **Whose blocks help.** Pass over those who free nothing. Of two samples of one prompt, for instance, neither may
#   have a block of its own.

# %% ex="choose_victim"
def choose_victim(running, needy, gain):
    """The request that is thrown out, so that `needy` gets a block.

    Of those that stand behind needy (a larger sort_key): the last one in the queue, the largest
    sort_key, among those whose gain is above 0. If none of them has a gain, the last of them all
    the same (the next one may have a gain then). If nobody stands behind needy: needy itself,
    whatever its gain. Changes nothing.
    """
    ### BEGIN SOLUTION
    victim = None
    for request in sorted(running, key=lambda request: request.sort_key):
        if request.sort_key <= needy.sort_key:
            continue
        if victim is None or gain(request) > 0 or gain(victim) <= 0:
            victim = request
    return needy if victim is None else victim
    ### END SOLUTION

# %% check="choose_victim"
check("choose_victim")

# %% [markdown]
# Is it a good rule? Let your scheduler meet a crowd: 120 users at random times, answers of 200 tokens on average
# and up to 1,500, and a pool of 250 blocks. Four rules, three crowds each, and everything else is equal (victims
# recompute).

# %%
youngest = lab.best("choose_victim")


def oldest(running, needy, gain):
    return min(running, key=lambda request: request.sort_key)


def largest(running, needy, gain):
    return max(running, key=gain)


def smallest(running, needy, gain):
    return min([request for request in running if gain(request) > 0], key=gain)


VICTIMS = {"youngest": youngest, "oldest": oldest, "largest": largest, "smallest": smallest}


def three_crowds(**options):
    return [play(crowd(seed, 120), 250, **options) for seed in (1, 2, 3)]


def mean(runs):
    figures = [summary(run) for run in runs]
    return {what: sum(each[what] for each in figures) / len(runs) for what in figures[0]}


crowds = {name: three_crowds(choose_victim=rule) for name, rule in VICTIMS.items()}
by_rule = {name: mean(runs) for name, runs in crowds.items()}

waste = {name: row["computed again"] for name, row in by_rule.items()}
lab.compare("largest first", 100 * waste["largest"] / waste["youngest"])

# %% fold="yes"
figure, axes = plt.subplots(1, 4, figsize=(10, 2.5), layout="constrained")
draw.bars(axes, by_rule, {"preemptions": "preemptions", "most of one": "most often, one request",
                          "computed again": "tokens computed again", "p99 s": "p99 of all, seconds"})
told = "; ".join(f"{name}: {row['preemptions']:.0f} preemptions, {row['computed again']:,.0f} tokens, "
                 f"p99 {row['p99 s']:.0f} s" for name, row in by_rule.items())
picture(figure, f"Four rules, means of three crowds. {told}.")

# %% [markdown]
# **What to look at.** Blue is the best of each panel. Take the first panel against the third. Throwing out the
# largest needs *fewer* preemptions, and wastes more than twice as many tokens. An engine that counts its preemptions
# would take the worse rule for the better one.
#
# The second panel tells why. The oldest, or the largest, is large because it has been at work for long, and when it
# comes back it is the largest again. So it is always the same one that pays: a single user is thrown out again and
# again, and the slowest answers (the last panel, p99: 99 of 100 are faster) become slower still.
#
# A fair word: the rule that throws out the smallest is as good as the youngest here. In a queue the youngest
# usually *is* small. What it does not have is the promise that nobody stands in a ring: it may throw out somebody
# older.

# %% [markdown]
# ## Exercise 5: swap or recompute
#
# The victim is chosen. The scheduler asks how it goes:
#
#     swap_or_recompute(request, num_blocks, num_free_cpu_blocks)
#
# Swap space (交换空间) is bounded, and half a victim cannot be swapped. So two questions: does it fit, and is it
# cheaper? The second one is for your bills. Ask for the tokens that *have* K and V, `request.num_computed_tokens`:
# a victim in the middle of its prompt has less to lose than it has tokens. What will be found later, nobody knows
# now.

# %% ex="swap_or_recompute"
def swap_or_recompute(request, num_blocks, num_free_cpu_blocks, prices=QWEN):
    """How the victim `request` goes.

    num_blocks: blocks that hold its K and V. num_free_cpu_blocks: free blocks of swap space.
    prices: a Prices. both_bills is your two_bills.

    Returns "swap" if its blocks fit and swapping costs less than recomputing, else "recompute".
    """
    ### BEGIN SOLUTION
    if num_blocks > num_free_cpu_blocks:
        return "recompute"
    swap, again = both_bills(prices, request.num_computed_tokens)
    return "swap" if swap < again else "recompute"
    ### END SOLUTION

# %% check="swap_or_recompute"
check("swap_or_recompute")

# %% [markdown]
# The same crowd, with room for 100 blocks on the CPU, and three ways to go. This GPU is an L4, so it gets prices of
# its own: 60% of its 121 TFLOP/s, and 80% of its link (both shares are estimates).

# %%
from functools import partial

from kvlab.costs import GPUCost

L4 = GPUCost.of("L4", "Qwen2.5-7B")
l4_prices = prices_of(L4.shape, L4.gpu.pcie_bandwidth * L4.pcie_efficiency, L4.flops_rate, fixed=2e-3)
how = lab.best("swap_or_recompute")

WAYS = {
    "always recompute": lambda request, num_blocks, num_free: "recompute",
    "swap if it fits": lambda request, num_blocks, num_free: (
        "swap" if num_blocks <= num_free else "recompute"),
    "by your bills": partial(how, prices=l4_prices),
}
print(f"on this L4 swapping wins: {told_crossing(wins_from(l4_prices))}\n")
for name, way in WAYS.items():
    runs = three_crowds(cpu_blocks=100, swap_or_recompute=way)
    row, busy = mean(runs), sum(sum(run.result.step_columns["duration_ns"]) for run in runs) / 3e9
    bill = row["computed again"] * l4_prices.compute + row["blocks swapped"] * 16 * l4_prices.move
    print(f"{name:16} {row['computed again']:5,.0f} tokens again, {row['blocks swapped']:3.0f} blocks moved: "
          f"a bill of {bill:.2f} s; GPU busy {busy:.1f} s, p99 {row['p99 s']:.1f} s")

# %% [markdown]
# On this slow GPU swapping wins from a dozen tokens on. So a rule with your bills swaps whatever fits, and the last two
# rows are the same. (What they still compute again is a single victim that did not fit: the CPU's blocks were full.)
# On another machine the two differ:

# %%
from types import SimpleNamespace

from kvlab.primer import GPUS

H100_SPEED = 0.6 * GPUS["H100"].peak_flops
in_pieces = dict(piece_bytes=16 * KIB, latency=LATENCY)
qwen7 = model_shape("Qwen2.5-7B")
machines = {
    "L4, a block at once": l4_prices,
    "H100 with PCIe 4.0, a block at once": prices_of(qwen7, LINK, H100_SPEED, fixed=FIXED),
    "the same, a block in 56 pieces": prices_of(qwen7, LINK, H100_SPEED, fixed=FIXED, **in_pieces),
}
victims = {n: SimpleNamespace(num_computed_tokens=n) for n in (50, 500, 5000)}
rows = [[name, *(how(victim, 1, 1, prices=prices) for victim in victims.values())]
        for name, prices in machines.items()]
table(["victim with K and V for", *(f"{n:,} tokens" for n in victims)], rows)

# %% [markdown]
# Now look at the seconds above. Thousands of tokens are no longer computed twice, and the *bill* falls to a few
# percent. And yet the GPU is busy for nearly as long as before, and nobody gets an answer much earlier. Even the
# small difference is only a part of what the bill promised. Where has the rest gone?
#
# ## What a recomputation really costs
#
# The bill prices a prefill (预填充) that is *alone* on the GPU. But V1 of vLLM, and our scheduler, mix: the tokens to
# be computed again go into steps in which others decode (解码). A decode step reads all weights for a handful of
# tokens. It waits for memory, and its arithmetic units idle (lab 00). What fills them costs nearly nothing. So:
# 1,000 tokens, alone in one step, and in eight steps of 125 beside sequences that decode. For a 7B, and for the 70B
# of the textbook on two H100, which it needs to fit at all:

# %%
from kvlab.costs import work_of_step


def in_a_step(cost):
    """Milliseconds for 1,000 tokens: to swap, to recompute alone, beside 64 and 256 decodes."""
    def ms(step):
        return 1e3 * cost.step_seconds(work_of_step(step))

    def longer(decodes):
        others = [(1, 500)] * decodes
        return sum(ms([*others, (125, done)]) - ms(others) for done in range(0, 1000, 125))

    link = cost.gpu.pcie_bandwidth * cost.pcie_efficiency * cost.num_gpus
    swap, _ = both_bills(prices_of(cost.shape, link, cost.flops_rate), 1000)
    return [1e3 * swap, ms([(1000, 0)]), longer(64), longer(256)]


in_ms = {f"{name} on {n} H100": in_a_step(GPUCost.of("H100", name, num_gpus=n))
         for name, n in (("Qwen2.5-7B", 1), ("Llama-3-70B", 2))}
table(["1,000 tokens, ms", "swap, out and in", "recompute alone", "beside 64 decodes",
       "beside 256 decodes"],
      [[name, *(f"{value:.2f}" for value in row)] for name, row in in_ms.items()])
H100 = GPUCost.of("H100", "Qwen2.5-7B")
print(f"a weight takes 2 bytes and 2 FLOP a token: arithmetic binds from "
      f"{H100.flops_rate / H100.memory_rate:.0f} tokens a step on")

# %% [markdown]
# This is how two sentences of the textbook can both be right. L33 5.4 prices a prefill alone: swapping wins by far.
# PAV 7 notes that V1 recomputes, and has dropped swapping. Beside 64 decodes the recomputation is cheaper by an
# order of magnitude than the swap: 64 + 125 tokens a step are fewer than the number under the table. 256 + 125 are
# more. Then the arithmetic is busy already, and the book's bill is right again. (The times are computed, from data
# sheets and estimated efficiencies.)
#
# Two things more. What the prefix cache finds again spares all of the recomputation, but only half of the swap: the
# way out is paid already. And code that is not there has no bugs. So V1 has chosen well for an engine that is bound by
# memory. (To be fair to swapping: copies can run while the GPU computes for others, and then nobody waits for them
# either. Our clock, like our engine, makes them before the step.)
#
# ## Exercise 6: when may it come back?
#
# Back to the night in which the job was thrown out 186 times. It was let in whenever *one chunk* found blocks. The
# scheduler offers more to know:
#
#     may_resume(request, room)
#
# | | |
# |---|---|
# | `request.num_preemptions` | how often it has been thrown out |
# | `room.needed` | blocks that it must get for **all** its tokens (a shared prefix that others hold is not counted) |
# | `room.free` | blocks that nobody owns |
# | `room.promised` | blocks that the others' prompts will still take, those that are not computed to the end |
# | `room.num_growing` | how many run; each may need another block soon |
#
# It is asked for new requests too, which have never been thrown out. Three ideas:
#
# 1. **Count the whole.** Who comes in needs `needed`, not a chunk. And what is promised to others is not free.
# 2. **Hysteresis** (迟滞). Go out when the pool is full, but come in only when it is *well below* full. Otherwise the
#    next step throws it out again. A natural width: one spare block for each request that grows.
# 3. **Back-off** (退避). If it was thrown out all the same, the width was too small. Nobody knows the right one. So ask
#    for more each time: `num_growing` blocks more, or twice as many as before.
#
# And one thing must never happen. Who waits for room while nobody runs, waits for ever.
#
# A prediction first: 186 times, when a chunk was enough. Which of the three ideas saves most? And how often is the job
# thrown out with all three?

# %%
lab.predict("with all three ideas", None, unit="times")

# %% ex="may_resume"
def may_resume(request, room):
    """May `request` come in?

    True if nobody runs (room.num_growing is 0), whatever else. Otherwise True exactly if enough
    blocks are free for what it needs, for what was promised to others, and for spare ones:
    num_growing of them if it was never thrown out; and for each time that it was,
    num_growing more, or twice as many (both pass, as does anything between), without an end.
    Decides by its arguments alone and changes nothing.
    """
    ### BEGIN SOLUTION
    spare = room.num_growing * (1 + request.num_preemptions)
    return room.num_growing == 0 or room.free >= room.needed + room.promised + spare
    ### END SOLUTION

# %% check="may_resume"
check("may_resume")

# %% [markdown]
# The same night, with four rules. Each of the first three has one idea less than yours.

# %%
yours = lab.best("may_resume")


def whole(request, room):
    return room.num_growing == 0 or room.needed + room.promised <= room.free


def hysteresis(request, room):
    return room.num_growing == 0 or room.needed + room.promised + room.num_growing <= room.free


RULES = {"first chunk": first_chunk, "the whole": whole, "+ hysteresis": hysteresis,
         "+ back-off": yours}
nights = {name: play(job_and_chats(), 160, may_resume=rule) for name, rule in RULES.items()}
for name, run in nights.items():
    job = run.record(JOB)
    print(f"{name:12} job out {job.num_preemptions:3} times, {run.computed - run.useful:7,} tokens again, "
          f"job done at {job.e2e_ns / 1e9:.0f} s; chats: p99 {run.waits(0.99, True):.2f} s")
one_by_one = [max(row) for name, row in nights["+ back-off"].blocks.items() if name != JOB]
steps = nights["+ back-off"].result.steps
lab.compare("with all three ideas", nights["+ back-off"].record(JOB).num_preemptions)
print(f"\non average {steps['num_running'].mean():.1f} run at a time, and a chat takes "
      f"{sum(one_by_one) / len(one_by_one):.0f} blocks")

# %% fold="yes"
figure, axes = plt.subplots(4, 1, figsize=(9, 7), sharex=True, layout="constrained")
for ax, (name, run) in zip(axes, nights.items(), strict=True):
    draw.pool(ax, run.starts, run.blocks, JOB, run.lanes[JOB], 160,
              f"{name}: the job is thrown out {run.record(JOB).num_preemptions} times", 56)
axes[-1].set_xlabel("seconds")
picture(figure, "Four panels, blocks over time. " + "; ".join(
    f"{name}: thrown out {run.record(JOB).num_preemptions} times" for name, run in nights.items()))

# %% [markdown]
# **What to look at.** The triangles, from top to bottom. Most of them are gone once the *whole* request is counted:
# a job that comes in with a chunk cannot even finish its prompt. Hysteresis alone changes nothing here. Its width is
# one block for each that runs, and a single chat that comes in takes twice as many. Back-off widens it, but it learns
# by being thrown out: it takes several times until the width holds.
#
# And the price: the job is done later than with the second rule. It waits outside more, and while it waits, blocks
# lie idle that it could have used for a moment. The chats do not mind. Who has a low priority pays, and that is
# what priorities are for.
#
# ## Is there a bound?
#
# One night is an anecdote. Your rule makes a promise, and it can be counted. The job holds at least 80 blocks (its
# prompt), and the pool has 160. After k times out, it comes in beside g others only if 80 + g × (1 + k) ≤ 160; with
# doubling instead of adding, only if 80 + g × 2^k ≤ 160. Take five others: what is the largest k, for each of the two?
# Take one other: which of the two bounds has moved far?

# %%
for g in (5, 2, 1):
    adding = max(k for k in range(200) if 80 + g * (1 + k) <= 160)
    twice = max(k for k in range(200) if 80 + g * 2**k <= 160)
    print(f"beside {g}: it comes in again after at most {adding:2} times out, with doubling {twice}")

# %% [markdown]
# Without back-off there is no such line: as long as the rush goes on, so does the thrashing. So let the rush go on.
# The job now has an answer of 800 tokens, and more and more chats come:

# %%
def times_out(rule, num_chats, seed=1, **options):
    return play(job_and_chats(num_chats, seed, **options), 160, may_resume=rule).most


def doubling(request, room):
    spare = room.num_growing * 2**request.num_preemptions
    return room.num_growing == 0 or room.needed + room.promised + spare <= room.free


FIVE = {**RULES, "+ doubling": doubling}
RUSH = (50, 100, 200, 400)
longer = {name: [times_out(rule, n, gap_s=0.3, answer=800) for n in RUSH]
          for name, rule in FIVE.items()}
print("the one who was thrown out most, how often:")
table(["chats in the rush", *map(str, RUSH)], [[name, *row] for name, row in longer.items()])

many = {name: [times_out(rule, 60, seed) for seed in range(1, 21)] for name, rule in FIVE.items()}
print("20 other nights, 60 chats each; the one who was thrown out most, how often:")
for name, counts in many.items():
    print(f"  {name:13} {sum(counts) / len(counts):5.1f} on average, at most {max(counts)}")

# %% [markdown]
# Without back-off, twice the rush means far more preemptions, and there is no end to it. With back-off the row grows
# far more slowly; with doubling it stands nearly still. This answers L33 9.3-1. (The book asks for a *time* that a
# victim must stay out. Ours is counted in blocks: they say directly whether there is room, where a time must be
# guessed for each load.)
#
# ## Watch it: requests by step
#
# A small pool that one can follow by hand: twelve requests of 20 + 20 tokens, blocks of 4, and 24 blocks in all.
# That is room for two and a half of them at full length. A step costs one unit of time. Change the rule, the
# victim, and the number of CPU blocks. (The lists need a running kernel. Without one you see the first rule.)

# %% fold="yes"
from kvlab.sim import ConstantCost, closed_batch

TWELVE = closed_batch([(20, 20)] * 12)


def small_pool(when, who, cpu_blocks):
    return play(TWELVE, 24, cpu_blocks=cpu_blocks, block_size=4, budget=16, costs=ConstantCost(1.0),
                may_resume=FIVE[when], choose_victim=VICTIMS[who])


def show_lanes(when, who, cpu_blocks):
    run = small_pool(when, who, cpu_blocks)
    figure, ax = plt.subplots(figsize=(9, 4.6), layout="constrained")
    figures = summary(run)
    draw.lanes(ax, run.lanes, f"{figures['preemptions']} preemptions, {figures['computed again']} tokens "
               f"again, {figures['blocks swapped']} blocks moved, {len(run.starts)} steps")
    return figure


sliders(show_lanes, when=(list(FIVE), "first chunk"), who=(list(VICTIMS), "youngest"),
        cpu_blocks=(0, 30, 0),
        alt="Twelve requests by step. Some are thrown out several times in a row, and compute again.")

# %% [markdown]
# **What to look at.** A triangle, and what follows it. Hatched boxes right behind it: it came back at once, computed
# again, and was thrown out again. Now choose `the whole`: what has become of the repeated triangles? Choose
# `+ hysteresis`: here it does what it did not do in the night. Nobody is thrown out twice, and so back-off, which
# counts the times, adds nothing to it. (A request grows by one block at a time here, and a new one is small: one
# spare block for each is the right width.) Choose `oldest` as the victim, and see who is thrown out most: 0, the first
# in the queue. Give it CPU blocks: crossed becomes dotted, and the hatched boxes go.

# %% [markdown]
# ## Exercise 7 (extra): who pays?
#
# The scheduler counts recomputed tokens in its own way: when somebody comes back, it adds what was lost. Count in
# another way, from a log of what was really computed: two ways to one number are the best test that there is.
#
# The log has an entry for each chunk and each decode, in order: `(request id, first position, number of tokens)`. A
# token is wasted if its position was computed before.

# %% ex="wasted_tokens"
def wasted_tokens(log):
    """How many tokens each request computed a second time, or oftener.

    log: a list of (request id, first position, number of tokens), in order. A request begins at
    0. After its K and V were dropped it begins again at 0, or later, if some were found; never
    beyond what it has computed before.

    Returns a dict, request id -> tokens: an entry for every request in the log, 0 for one that
    repeated nothing. A token that is computed three times was wasted twice. Changes nothing.
    """
    ### BEGIN SOLUTION
    reached, wasted = {}, {}
    for name, first, num_tokens in log:
        end, before = first + num_tokens, reached.get(name, 0)
        repeated = min(end, before) - first
        wasted[name] = wasted.get(name, 0) + repeated
        reached[name] = max(end, before)
    return wasted
    ### END SOLUTION

# %% check="wasted_tokens"
check("wasted_tokens")

# %%
count_waste = lab.best("wasted_tokens")

for name, run in nights.items():
    wasted, counted = count_waste(run.log), run.result.stats.num_recomputed_tokens
    print(f"{name:12} {sum(wasted.values()):7,} wasted, the scheduler says {counted:7,}")

# %% [markdown]
# In that night there is only one who pays. Now the four victim rules of exercise 4: how much of the waste falls on
# the six users of 120 that it hits most?

# %%
for name, runs in crowds.items():
    shares = []
    for run in runs:
        wasted = sorted(count_waste(run.log).values())
        shares.append(100 * sum(wasted[-6:]) / max(1, sum(wasted)))
    print(f"{name:9} 6 of 120 users pay {sum(shares) / 3:.0f}% of the waste")

# %% [markdown]
# So "the young are thrown out" is not unfair, as it may sound. It spreads the waste. The two rules that look for
# the old or the large load nearly all of it on the same few, who were unlucky enough to be nearly done.
#
# ## Into the engine
#
# Your three decisions are parts of the engine: `choose_victim`, `swap_or_recompute`, `may_resume`. Twelve chats, a
# pool of 16 blocks, and 8 blocks on the CPU. The tokens must be the same as with ours, for **a policy changes when
# things happen, never what a request generates**. What may differ: who goes how. Ours swaps whatever fits. Yours
# asks what it costs. (Two engines run: up to half a minute.)

# %%
result = lab.run_engine(num_requests=12, num_samples=1, max_tokens=32, num_gpu_blocks_override=16,
                        num_cpu_blocks_override=8, max_model_len=160)
for whose, run in (("yours", result.yours), ("ours", result.ours)):
    ways = [event.values[0] for event in run.events if event.kind == "preempt"]
    print(f"{whose:5} swapped out: {ways.count('swapped')}, dropped: {ways.count('preempted')}")

# %% [markdown]
# ## What the textbook says, and what we measured
#
# Each line is computed by this notebook. The first question is always under which conditions the text is right.

# %% fold="yes"
from kvlab.sizing import GB, GIB

llama70 = model_shape("Llama-3-70B")
size_16k = 16_384 * llama70.kv_bytes_per_token()
swap_70, again_70 = book(1000, 320_000, 70e9, LINK, SPEED)
weights = llama70.weight_bytes() / GB
fits_one = GPUCost.of("H100", llama70).weights_fit
mha = {name for name in MODELS if name.startswith("Llama-2")}
huge = {name for name in MODELS if model_shape(name).num_parameters > 50e9}
swapping = {name for name, ratio in ratios.items() if ratio > 1}
grouped = set(MODELS) - mha
small = crossings["Qwen2.5-7B"]["pairs, 2.5 ms fixed"]
at_512 = both_bills(QWEN._replace(fixed=0), 512)
fixed_512 = at_512[1] - at_512[0]  # the fixed cost with which the 7B's border is 512
in_64k = wins_from(prices_of(qwen7, LINK, SPEED, fixed=FIXED, piece_bytes=64 * KIB, latency=LATENCY))

# L33 8.2-4: is one preemption a minute too many? A pool that preempts, beside one that never does.
ample, alarm = play(crowd(1), 4000), {}
for num_blocks in (400, 250):
    tight = play(crowd(1), num_blocks)
    a_minute = summary(tight)["preemptions"] / (tight.result.makespan_s / 60)
    alarm[a_minute] = max(0.0, 100 * (tight.waits(0.99) / ample.waits(0.99) - 1))

rows = [
    ("L33 5.2", "16K tokens hold about 5 GB; 156 ms over PCIe 4.0",
     f"70B: {size_16k / GIB:.2f} GiB = {size_16k / GB:.2f} GB, {1e3 * size_16k / LINK:.0f} ms one way",
     True, "for a 70B with 8 KV heads; 32 GB/s is one direction, not both"),
    ("L33 5.4", "S cancels: bandwidth x W = KV x FLOP/s",
     "Llama-2-7B, pairs: " + told_crossing(crossings["Llama-2-7B"]["with pairs"])
     + "; Qwen2.5-7B, 2.5 ms fixed: " + told_crossing(small),
     True, "without the quadratic term and without fixed costs"),
    ("L33 5.4", "70B, 1,000 tokens: recompute 280 ms, swap 20 ms",
     f"{1e3 * again_70:.0f} ms and {1e3 * swap_70:.0f} ms; weights {weights:.0f} GB of 80"
     f" (fit: {fits_one})",
     True, "alone, and on GPUs that hold the weights: two H100, or one byte a weight"),
    ("L33 5.4, A.2", "small models recompute",
     f"{len(grouped & swapping)} of {len(grouped)} models with grouped heads swap, and Llama-2-7B does not; "
     f"in pieces of a layer's K or V, {sum(r < 1 for r in by_pieces.values())} of {len(MODELS)} recompute",
     ratios["Llama-2-7B"] < 1 and all(by_pieces[name] < 1 for name in set(MODELS) - huge),
     "with full multi-head attention, or over a link that takes its time for each small piece"),
    ("L33 5.4, A.2", "large models swap, by an order of magnitude",
     f"70B: {ratios['Llama-3-70B']:.1f} times; 13B with full heads: {ratios['Llama-2-13B']:.2f}, "
     f"by its layers {by_layers['Llama-2-13B']:.2f}",
     ratios["Llama-3-70B"] > 10, "with grouped heads, in large pieces, and for a prefill that is alone"),
    ("L33 A.2", "a 70B above 2K tokens swaps, a 7B below 512 recomputes",
     "with 2.5 ms fixed: " + ", ".join(f"{n} {told_crossing(crossings[n]['pairs, 2.5 ms fixed'])}"
                                     for n in ("Qwen2.5-7B", "Llama-3-70B"))
     + f"; the 7B from 512 with {1e3 * fixed_512:.1f} ms, or {told_crossing(in_64k)} in pieces of 64 KiB",
     crossings["Llama-3-70B"]["pairs, 2.5 ms fixed"] < 2048 and small > 0,
     "the 70B: yes. The 7B: if a swap has several ms fixed, or goes in pieces; each machine has its own border"),
]

# %% fold="yes"
of_70 = in_ms["Llama-3-70B on 2 H100"]
without, bounded = longer["the whole"], longer["+ back-off"]
rows += [
    ("L33 8.1-6, A.2", "the longest is the worst to give up; prefer the young and short",
     "; ".join(f"{name} {row['computed again']:,.0f}" for name, row in by_rule.items()) + " tokens again",
     max(waste["youngest"], waste["smallest"]) < min(waste["largest"], waste["oldest"]), ""),
    ("L33 9.3-1", "out, in, out again: thrashing",
     f"{nights['first chunk'].most} times for one job", nights["first chunk"].most > 20,
     "if admission looks at a chunk only"),
    ("L33 9.3-1", "hysteresis and back-off break it",
     f"rush of {RUSH[0]} to {RUSH[-1]} chats: {without[0]} to {without[-1]} times without, "
     f"{bounded[0]} to {bounded[-1]} with back-off",
     bounded[-1] - bounded[0] < (without[-1] - without[0]) / 2,
     "together; hysteresis alone did nothing in the night, and helps in the small pool"),
    ("L33 5.4 and PAV 7", "for a 70B swapping is cheaper; V1 recomputes",
     f"1,000 tokens of a 70B on two H100: swap {of_70[0]:.1f} ms, recompute alone "
     f"{of_70[1]:.0f} ms, beside 64 decodes {of_70[2]:.2f} ms",
     of_70[2] < of_70[0] < of_70[1],
     "both: alone the one, beside decodes that wait for memory the other"),
    ("L33 8.2-4", "more than 0 preemptions a minute: scale out at once",
     "; ".join(f"{often:.1f} a minute: p99 {slower:.0f}% slower than with an ample pool"
               for often, slower in alarm.items()),
     min(alarm.values()) > 1, "worth an alarm; whether it hurts, the latencies say"),
]
ledger(["where", "the text says", "we find", "verdict", "condition"],
       ["holds", "holds if", "contradicted here"], rows)

# %% [markdown]
# **The constants.** 500 TFLOP/s and 32 GB/s belong to two generations: an H100 has PCIe 5.0, with twice the
# bandwidth. So with the book's GPU, swapping gains even more. Put 64 into the map above.
#
# **The rule.** It fits models with full multi-head attention, and links that are slow with small pieces. The formula
# fits all. Take the formula, with your own link.
#
# **The engines.** L33 5.4 says that engines prefer swapping at 70B, and 8.2-4 that one should set the mode. That was
# vLLM V0, in part: it had the setting (`preemption_mode`), but without it V0 looked at the number of sequences of a
# request, not at the size of the model. V1 has neither. It recomputes.
#
# ## What to remember
#
# - Swap against recompute is parameters for each byte of K and V, times a ratio of the machine. Grouped heads swap.
# - The length comes back through pairs, fixed costs, and what is found again.
# - A recomputation beside decodes that wait for memory costs nearly nothing: price a decision in the step it is
#   made in.
# - Youngest first, and never somebody who stands before the one in need. Count the waste, not the preemptions.
# - Thrashing is a matter of admission. Count the whole request, leave room to grow, and ask for more each time.
# - Whoever may say no must say yes when nobody runs.
#
# ## Questions to think about
#
# 1. A step reads all weights, however few tokens it computes. So a recomputation *alone* has a floor. For which
#    lengths does this floor change your answer of exercise 3? (There may be two crossings then. Why does
#    `swap_wins_from` not see them?)
# 2. With back-off the job may wait until the rush is over. Write a rule with a bound on the *waiting time* as well.
#    Which of the two bounds do you give up when both cannot be kept?
# 3. Two samples of one prompt share all their blocks but the last. What is the gain of each? And of both?
# 4. The CPU memory fills up with victims that wait. Who should leave swap space first?
# 5. PAV 7 speaks of the knobs that prevent preemption. Which settings would have spared the job its night, and what
#    would each of them have cost the chats?
#
# ## Where this lives in real engines
#
# | here | vLLM V0 | vLLM V1, `v1/core/sched/scheduler.py` |
# |---|---|---|
# | `choose_victim` | the last of the running queue | first come, first served: `running.pop()`; by priority: the largest (priority, arrival time) |
# | never somebody before needy | the same | the same: needy is in the list, and ends the loop when it is its turn |
# | `swap_or_recompute` | swap for groups of several sequences, else recompute; or as configured | recompute; blocks can go to the CPU through a KV connector |
# | `may_resume` | the whole prompt, and a watermark of free blocks (1%) | blocks for the next chunk; nobody enters in a step with a preemption |
# | back-off | none | none |
#
# In kvlab: `kvlab/schedule/policies.py` are the decisions, `kvlab/schedule/pressure.py` carries them out,
# `kvlab/costs/preemption.py` are the bills, and `kvlab/costs/preemption_steps.py` is what you wrote. The paper is Kwon
# et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), section 4.5.
