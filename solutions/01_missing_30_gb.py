# %% [markdown]
# # Lab 01: The missing 30 GB
#
# A GPU with 80 GB, a model of 26 GB, and a sum that says: 168 requests fit. It stops at 35. In this lab you do the sum
# yourself, one factor after the other, until you know which numbers agree and which one does not belong here.
#
# It goes with L33 0.1-0.2 and 8.2, and PAV 3.1 and 6. You need no GPU. It takes about 110 minutes: 76 for the six
# exercises, the rest to read, to guess and to look. A good place for a break is before "The second case". Two more
# exercises wait at the end, 12 minutes each, if you like.

# %%
from kvlab.lab import Lab

lab = Lab("01")
check, hint = lab.check, lab.hint

# %% [markdown]
# ## The case
#
# A chat model with 13 billion parameters is to run on a GPU with 80 GB. Every token that a request has read or
# written leaves two things behind in each layer, its key and its value. Together they are the KV cache (键值缓存). It
# must stay in memory as long as the request lives. So somebody does a sum on the back of an envelope:
#
# | | |
# |---|---|
# | the GPU | 80 GB |
# | weights (权重): 13 billion times 2 bytes | 26 GB |
# | left for the KV cache | 54 GB |
# | K/V of one token | 160 KB |
# | K/V of a request of 2048 tokens | 0.32 GB |
# | requests that fit: 54 / 0.32 | **168** |
#
# Then comes the load test. At **35** requests the process dies: out of memory. And the error message says that
# **29.80 GiB are free**.
#
# Two questions, then. Where did 133 requests go? And what are the 30 GB that are free and cannot be had?
#
# ## A picture of the envelope
#
# This is the GPU as the envelope sees it, at the moment when the 35th request has come in.
#
# **What to look at:** the white part. By this sum more than half of the memory is still empty.

# %% fold="yes"
import matplotlib.pyplot as plt

from kvlab.lab.show import picture, sliders

BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
YELLOW, RED, PINK = "#F0E442", "#D55E00", "#CC79A7"


def open_sides(ax, *sides):
    for side in sides:
        ax.spines[side].set_visible(False)


def draw_bar(ax, y, parts, height=0.6, unit="GB"):
    """One GPU as a bar. parts: (label, size, colour, hatch), from the left to the right."""
    x, whole = 0, sum(size for _, size, _, _ in parts)
    for label, size, colour, hatch in parts:
        ax.barh(y, size, height, left=x, color=colour, hatch=hatch, edgecolor="#222222")
        if size > 0.13 * whole:
            behind = {"facecolor": colour, "edgecolor": "none", "pad": 1} if hatch else None
            ax.text(x + size / 2, y, f"{label}\n{size:.1f} {unit}", ha="center", va="center",
                    fontsize=10, color="white" if colour in (BLUE, GREEN, RED) else "black",
                    bbox=behind)
        x += size
    ax.set_yticks([])
    open_sides(ax, "left", "right", "top")


figure, ax = plt.subplots(figsize=(9, 1.8), layout="constrained")
draw_bar(ax, 0, [("weights", 26, BLUE, None), ("35 requests", 35 * 0.32, ORANGE, None),
                 ("free, says the envelope", 80 - 26 - 35 * 0.32, "white", None)])
ax.set(xlim=(0, 80), xlabel="memory of the GPU, GB")
picture(figure, "80 GB as a bar: weights 26 GB, 35 requests 11.2 GB, free 42.8 GB")

# %% [markdown]
# ## Your prediction
#
# Three guesses before you count anything. Replace each `None` by a number and run the cell. A wrong guess teaches more
# than none.
#
# 1. The model is Llama-2-13B. How many **KiB** of K/V does one token keep in it? (The envelope says 160.)
# 2. How many requests of 2048 tokens really fit into those 54 GB?
# 3. Another engine sets 4096 tokens aside for every request. The users chat for 150 to 300 tokens. How many per cent
#    of what is set aside stays **empty**?

# %%
lab.predict("K/V of one token", None, unit="KiB")
lab.predict("requests in 54 GB", None, unit="requests")
lab.predict("stays empty", None, unit="%")

# %% [markdown]
# ## By hand
#
# Every model comes with a file `config.json`. Here is what two of them say about size:

# %%
from kvlab.capacity import model_config

for name in ("Llama-2-13B", "Qwen2.5-7B"):
    print(name)
    for field, value in model_config(name).items():
        print(f"    {field:20} {value}")

# %% [markdown]
# Take a pencil. Follow **one token** through **one layer**.
#
# The layer turns the token into query, key and value heads (头), each a short list of numbers. How short? The two
# files do not say it, and then the rule is `hidden_size` divided by `num_attention_heads`. Queries are used once
# and forgotten. Keys and values stay.
#
# In Llama-2-13B every query head has a K/V head of its own. That is multi-head attention (多头注意力, MHA), and the
# file need not mention it. In Qwen2.5-7B seven query heads share one K/V head: grouped-query attention (分组查询注意力,
# GQA).
#
# | | Llama-2-13B | Qwen2.5-7B |
# |---|---|---|
# | numbers in one head | ? | ? |
# | K/V heads in a layer | ? | ? |
# | numbers that a layer keeps of one token, K and V | ? | ? |
# | layers | ? | ? |
# | bytes of one number (bf16) | 2 | 2 |
# | **bytes that one token keeps** | ? | ? |
#
# Done? Then write down what your pencil did, for any config.
#
# ## Exercise 1: bytes of one token

# %% ex="token_bytes"
def token_bytes(config, dtype_bytes=2):
    """Bytes of K and V that one token keeps, in all layers together.

    config: a dict with the fields of a config.json, left as it is. It has hidden_size,
        num_hidden_layers and num_attention_heads.
        It may have num_key_value_heads; if not, there are as many K/V heads as attention heads.
        It may have head_dim, the numbers in one head; if not, it is
        hidden_size // num_attention_heads.
    dtype_bytes: bytes of one number. 2 for bf16 and fp16, 1 for fp8.

    Returns a whole number.
    """
    ### BEGIN SOLUTION
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    one_layer = 2 * kv_heads * head_dim  # K and V
    return config["num_hidden_layers"] * one_layer * dtype_bytes
    ### END SOLUTION

# %% check="token_bytes"
check("token_bytes")

# %% [markdown]
# Stuck? `hint("token_bytes")` gives a nudge, and more if you call it again. It works for every exercise.
#
# Now the pencil's table, filled in. Is it yours?

# %%
per_token = lab.best("token_bytes")  # yours if it is solved, else ours

for name in ("Llama-2-13B", "Qwen2.5-7B"):
    config = model_config(name)
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config["hidden_size"] // heads
    print(f"{name:12} numbers in one head {head_dim}, K/V heads {kv_heads}, kept in a layer "
          f"{per_token(config) // layers // 2:,}, layers {layers}: {per_token(config):,} bytes")
lab.compare("K/V of one token", per_token(model_config("Llama-2-13B")) // 2**10)

# %% [markdown]
# ## The first suspect
#
# Now look at eight models. **What to look at:** first the two bars that stand out, then the number at their ends. A
# longer bar is not a larger model.

# %% fold="yes"
NAMES = ("Llama-2-7B", "Llama-2-13B", "Llama-3-8B", "Llama-3-70B", "Qwen2.5-0.5B", "Qwen2.5-7B",
         "Qwen2.5-14B", "Qwen2.5-72B")
MODELS = {name: model_config(name) for name in NAMES}

figure, ax = plt.subplots(figsize=(9, 3.6), layout="constrained")
for y, config in enumerate(MODELS.values()):
    heads, kib = config["num_attention_heads"], per_token(config) / 2**10
    kv_heads = config.get("num_key_value_heads", heads)
    is_mha = kv_heads == heads
    ax.barh(y, kib, 0.7, color=RED if is_mha else SKY, hatch="//" if is_mha else None,
            edgecolor="#222222")
    kind = "MHA" if is_mha else "GQA"
    ax.text(kib + 8, y, f"{kib:.0f} KiB   {kind}: {heads} query heads, {kv_heads} K/V heads",
            va="center", fontsize=10,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
ax.axvline(160, color="#222222", linestyle=":", linewidth=1.5, zorder=0)
ax.text(172, -0.95, "the envelope: 160", fontsize=10, va="center")
ax.set_yticks(range(len(MODELS)), MODELS, fontsize=10)
ax.set(xlim=(0, 1180), ylim=(len(MODELS) - 0.4, -1.4), xlabel="K/V of one token in bf16, KiB")
open_sides(ax, "right", "top")
picture(figure, "K/V of one token in KiB: " + ", ".join(
    f"{name} {per_token(config) / 2**10:.0f}" for name, config in MODELS.items()))

# %% [markdown]
# The 13B model keeps **800 KiB** of one token. The envelope was wrong by a factor of five.
#
# But 160 is too round to be a slip of the pen. Whose number is it? Let us ask for every 13B that could have it.

# %%
thirteen = MODELS["Llama-2-13B"]
for kv_heads in (1, 2, 4, 5, 8, 10, 20, 40):
    kib = per_token(thirteen | {"num_key_value_heads": kv_heads}) / 2**10
    mark = "   <--" if kib == 160 else ""
    print(f"40 layers, heads of 128, {kv_heads:2} K/V heads: {kib:5.0f} KiB{mark}")

NEMO = {"model_type": "mistral", "hidden_size": 5120, "intermediate_size": 14336,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131072, "tie_word_embeddings": False}
print(f"\nMistral-Nemo, a 12B of 2024: {per_token(NEMO) / 2**10:.0f} KiB")

# %% [markdown]
# A model of this size with 8 K/V heads, not 40. Such models exist: Mistral-Nemo is one. So 160 is the right number for
# another model. It is the easiest mistake of all: to carry a number from a GQA model to an MHA model.
#
# (A trap on the way: Nemo's `head_dim` is 128, although 5120 / 32 is 160. Believe the file, not the rule.)
#
# ## Exercise 2: the weights
#
# The next line of the envelope says 26 GB of weights. Is "13B times 2 bytes" good enough? Count one layer by hand. A
# matrix that turns `a` numbers into `b` numbers has `a * b` parameters (参数).
#
# | in one layer | from | to |
# |---|---|---|
# | q | hidden_size | query heads x head_dim |
# | k, and v | hidden_size | K/V heads x head_dim |
# | o | query heads x head_dim | hidden_size |
# | gate, and up | hidden_size | intermediate_size |
# | down | intermediate_size | hidden_size |
#
# Besides, a layer has two norms (归一化) with `hidden_size` parameters each. And if `model_type` is `"qwen2"`, then
# q, k and v have a bias (偏置) each, as long as their output. Llama and Mistral have no bias.
#
# Around the layers: an embedding (词嵌入) table of `vocab_size * hidden_size`, one more norm behind the last layer,
# and a head with a table of the same size. In small models the head *is* the embedding, used twice:
# `tie_word_embeddings`.

# %% ex="count_parameters"
def layer_parameters(config):
    """Parameters of one layer.

    config: as in token_bytes, and with intermediate_size and model_type, which is "llama",
    "mistral" or "qwen2". Returns a whole number.
    """
    ### BEGIN SOLUTION
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    q = heads * head_dim
    kv = config.get("num_key_value_heads", heads) * head_dim
    total = hidden * q + 2 * hidden * kv + q * hidden  # q, k and v, o
    total += 3 * hidden * config["intermediate_size"]  # gate, up, down
    total += 2 * hidden  # norms
    if config["model_type"] == "qwen2":
        total += q + 2 * kv
    return total
    ### END SOLUTION


def num_parameters(config):
    """Parameters of the whole model.

    config: as above, and with vocab_size and num_hidden_layers. tie_word_embeddings may be
    missing; then it is False. Returns a whole number.
    """
    ### BEGIN SOLUTION
    table = config["vocab_size"] * config["hidden_size"]
    num_tables = 1 if config.get("tie_word_embeddings") else 2
    layers = config["num_hidden_layers"] * layer_parameters(config)
    return num_tables * table + layers + config["hidden_size"]  # and the last norm
    ### END SOLUTION

# %% check="count_parameters"
check("count_parameters")

# %% [markdown]
# **What to look at:** the last column. 13 billion parameters are 26.0 GB and 24.2 GiB, both at once. The weights have
# an alibi.

# %%
count = lab.best("num_parameters")  # yours if it is solved, else ours

print(f"{'':14}{'parameters':>16}{'bf16, bytes':>18}{'GB':>8}{'GiB':>8}")
for name, config in (MODELS | {"Mistral-Nemo": NEMO}).items():
    n = count(config)
    print(f"{name:14}{n:16,}{2 * n:18,}{2 * n / 10**9:8.1f}{2 * n / 2**30:8.1f}")

# %% [markdown]
# ## Exercise 3: the units
#
# The envelope says GB. The error message says GiB. They are not the same:
#
# | decimal | | binary | |
# |---|---|---|---|
# | 1 KB | 1000 bytes | 1 KiB | 1024 bytes |
# | 1 MB | 1000 KB | 1 MiB | 1024 KiB |
# | 1 GB | 1000 MB | 1 GiB | 1024 MiB |
#
# Two per cent at K, seven per cent at G. Weights and datasheets are told in GB. PyTorch counts in GiB, and
# `nvidia-smi` in MiB. An "80 GB" GPU reports 79.35 GiB here, and that is 85.2 GB. There is only one safe way: turn
# everything into bytes at once, calculate in bytes, and turn it back when somebody wants to read it.

# %% ex="to_bytes"
def to_bytes(text):
    """How many bytes a text like "79.35 GiB" stands for: a number, one space, a unit.

    Units: B; KB, MB, GB (of 1000); KiB, MiB, GiB (of 1024), spelled exactly so. ValueError for
    any other unit.
    Returns a whole number, rounded to the nearest byte.
    """
    ### BEGIN SOLUTION
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9,
             "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    number, unit = text.split()
    if unit not in units:
        raise ValueError(f"{text!r}: no unit {unit!r}, give one of {', '.join(units)}")
    return round(float(number) * units[unit])
    ### END SOLUTION

# %% check="to_bytes"
check("to_bytes")

# %% [markdown]
# ## The second suspect: the error message
#
# Now read the message like a detective. It has five numbers. Does it add up?

# %%
size = lab.best("to_bytes")  # yours if it is solved, else ours

CASE = {"asked": "1.25 GiB", "total": "79.35 GiB", "allocated": "48.12 GiB",
        "free": "29.80 GiB", "reserved": "1.43 GiB"}
total = size(CASE["total"])
parts = {name: size(CASE[name]) for name in ("allocated", "free", "reserved")}
for name, value in parts.items():
    print(f"{name:12}{value:16,} bytes")
print(f"{'together':12}{sum(parts.values()):16,} bytes")
print(f"{'total':12}{total:16,} bytes")
print("difference:", total - sum(parts.values()), "bytes")

# %% [markdown]
# To the byte. That is the suspicious part.
#
# In PyTorch the three words do not stand side by side, they are nested. PyTorch takes memory from the driver in large
# pieces: what it has taken is *reserved*. From those pieces it serves your tensors: that is *allocated*. So allocated
# is a part of reserved, and never more. *Free* is what the driver could still give to anybody.
#
# Compare it with three messages that people have really got. (They are from public bug reports:
# CompVis/stable-diffusion 630 and 39, abacaj/fine-tune-mistral 3.)
#
# **What to look at:** the hatched part is reserved by PyTorch and not allocated. Holes live there, and only there.

# %% fold="yes"
SEEN = {
    "our case": CASE,
    "report 1": {"asked": "20.00 MiB", "total": "6.00 GiB", "allocated": "5.28 GiB",
                 "free": "0 B", "reserved": "5.34 GiB"},
    "report 2": {"asked": "1024.00 MiB", "total": "8.00 GiB", "allocated": "6.13 GiB",
                 "free": "0 B", "reserved": "6.73 GiB"},
    "report 3": {"asked": "732.00 MiB", "total": "24.00 GiB", "allocated": "20.62 GiB",
                 "free": "0 B", "reserved": "22.68 GiB"},
}


def draw_report(ax, y, line):
    n = {key: size(text) for key, text in line.items()}
    share = {key: 100 * value / n["total"] for key, value in n.items()}
    hole, ink = share["reserved"] - share["allocated"], "black"
    ax.barh(y, share["allocated"], 0.55, color=BLUE, edgecolor="#222222")
    ax.text(2, y, f"allocated {line['allocated']}", va="center", color="white", fontsize=10)
    if hole >= 0:
        ax.barh(y, hole, 0.55, left=share["allocated"], color=YELLOW, hatch="////",
                edgecolor="#222222")
        note = (f"hatched: {(n['reserved'] - n['allocated']) / 2**20:,.0f} MiB\n"
                f"asked for: {n['asked'] / 2**20:,.0f} MiB")
    else:
        free, ink = share["free"], RED
        ax.barh(y, share["reserved"], 0.55, left=share["allocated"], color="white",
                edgecolor=RED, linewidth=2)
        ax.barh(y, free, 0.55, left=100 - free, color="white", edgecolor="#222222")
        ax.text(100 - free / 2, y, f"free {line['free']}", ha="center", va="center",
                fontsize=10)
        note = f"reserved: {line['reserved']}?\nless than allocated"
    ax.text(103, y, note, va="center", fontsize=10, color=ink)


# %% fold="yes"
figure, ax = plt.subplots(figsize=(9, 3.4), layout="constrained")
for y, line in enumerate(SEEN.values()):
    draw_report(ax, y, line)
ax.set_yticks(range(len(SEEN)), SEEN, fontsize=11)
ax.set(xlim=(0, 132), ylim=(3.5, -0.5), xlabel="share of the GPU's memory, %")
ax.set_xticks(range(0, 101, 20))
open_sides(ax, "right", "top")
picture(figure, "four messages as bars. In the three real ones reserved is allocated and some "
        "holes, and nothing is free. In our case reserved is less than allocated")

# %% [markdown]
# Report 3 is what fragmentation (碎片) looks like. 2109 MiB are reserved and unused, 732 were asked for, so no
# single hole can have been large enough. And the driver has nothing left to give: what is blank belongs to
# somebody else. Report 2 failed for a plainer reason: even all its holes together are too small.
#
# Our case fits neither. With 29.80 GiB free at the driver, a request for 1.25 GiB is served, unless somebody has
# set a limit for this process. A GPU has an address translation of its own, so the driver can join free pages
# from anywhere. As a message of PyTorch the line cannot be right. As a *picture* it can, if "free" means holes
# inside one large region that an engine cuts up by itself. That is a contiguous arena, and lab 02 builds one.
#
# So we leave the message, and ask where 133 requests went.

# %% [markdown]
# ## The formal model
#
# An engine plans its memory before the first request comes. It may use a share of the GPU, `gpu_memory_utilization`.
# Of this budget it takes off all that is not K/V, and cuts the rest into blocks (块) of 16 tokens:
#
#     budget = total x utilization, cut off to whole bytes
#     blocks = (budget - weights - activations - graphs) / (bytes of one token x block size), rounded down
#
# *Activations* (激活) are what one step of the model needs while it computes, at its peak. *CUDA graphs* are recorded
# steps, kept for replay. The share that the budget leaves out is for everything else: the driver, other libraries, and
# what nobody has thought of.
#
# ## Exercise 4: how many blocks
#
# This function becomes a part of the engine. Two mistakes must not get past it. A utilization of `92` is a typo for
# `0.92`. And a pool without a single block is no pool. Better an error at the start than one at night.

# %% ex="num_gpu_blocks"
def num_gpu_blocks(total_bytes, gpu_memory_utilization, weight_bytes, activation_bytes,
                   cudagraph_bytes, block_bytes):
    """How many blocks of block_bytes there is room for.

    total_bytes: the whole memory of the GPU. gpu_memory_utilization: the share of it that may
    be used, more than 0 and at most 1. The next three are whole numbers of bytes, 0 or more;
    block_bytes is 1 or more.

    Returns a whole number, 1 or more. ValueError if the utilization is outside its range, or if
    not one block fits.
    """
    ### BEGIN SOLUTION
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization}: give a share")
    budget = int(total_bytes * gpu_memory_utilization)
    left = budget - weight_bytes - activation_bytes - cudagraph_bytes
    if left < block_bytes:
        raise ValueError(f"{left} bytes are left, and one block takes {block_bytes}")
    return left // block_bytes
    ### END SOLUTION

# %% check="num_gpu_blocks"
check("num_gpu_blocks")

# %% [markdown]
# ## Exercise 5: how many requests
#
# A request takes whole blocks. The last one may be filled in part; nobody else can use the rest.

# %% ex="max_concurrency"
def max_concurrency(num_blocks, block_size, tokens_per_request):
    """How many requests of tokens_per_request tokens hold their K/V at the same time.

    num_blocks: blocks in all. block_size: tokens a block holds. All three are 1 or more.
    Returns a whole number; 0 if not one fits.
    """
    ### BEGIN SOLUTION
    blocks_each = (tokens_per_request + block_size - 1) // block_size
    return num_blocks // blocks_each
    ### END SOLUTION

# %% check="max_concurrency"
check("max_concurrency")

# %% [markdown]
# A sanity check (合理性检查) before you trust it. All blocks must fit into the budget, and one block more must not:

# %%
# yours if they are solved, else ours
plan, fit = lab.best("num_gpu_blocks"), lab.best("max_concurrency")

block = 16 * per_token(thirteen)
blocks = plan(size("80 GB"), 1.0, size("26 GB"), 0, 0, block)
assert blocks * block <= size("54 GB") < (blocks + 1) * block
print(f"{blocks} blocks of {block / 2**20} MiB fit into 54 GB; one more would not")

# %% [markdown]
# ## The sum again
#
# Now with the right number of bytes. Three people do it, and each means something else by "80 less 26":

# %%
ways = {
    "54 GB, as on the envelope": size("54 GB"),
    "54 GiB, when G is read as GiB": size("54 GiB"),
    "79.35 GiB less 26 GB, what is really there": size("79.35 GiB") - size("26 GB"),
}
for name, room in ways.items():
    blocks = plan(room, 1.0, 0, 0, 0, block)
    print(f"{name:44} {room:15,} bytes   {fit(blocks, 16, 2048):3} requests of 2048 tokens")
blocks = plan(ways["54 GB, as on the envelope"], 1.0, 0, 0, 0, block)
lab.compare("requests in 54 GB", fit(blocks, 16, 2048))

# %% [markdown]
# So 168 was wrong by a factor of five. The right sum gives 32 to 35, by what you take for a GB. The 133 missing requests
# were never there, holes or none.
#
# Look at the last line, too: **35**, the number of the load test. It is tempting to stop here, and it is no proof. That
# line gives all the rest of the GPU to K/V, and an engine cannot: you will see 29 in a moment. And the message has
# 48.12 GiB allocated. Without the weights that is room for 15 such requests, not for 35. What the 35 do show: you need
# no hole to explain them. What really stopped that process at 35, the story does not tell.
#
# Here is the same GPU as an engine plans it. The activations and graphs are round guesses of ours; an engine measures
# its own when it starts.
#
# **What to look at:** the orange part, and how many requests it holds. The first two have about the same.

# %% fold="yes"
ACTIVATIONS, GRAPHS = size("1.5 GiB"), size("0.5 GiB")


def plan_bar(config, total, weight_bytes, kv_dtype_bytes=2, utilization=0.92, tokens=2048):
    """(parts of the bar in GiB, blocks, requests). If it does not fit: nothing, 0, 0."""
    block = 16 * per_token(config, kv_dtype_bytes)
    try:
        blocks = plan(total, utilization, weight_bytes, ACTIVATIONS, GRAPHS, block)
    except ValueError:
        return [], 0, 0
    sizes = [("weights", weight_bytes, BLUE, None),
             ("K/V blocks", blocks * block, ORANGE, None),
             ("activations, graphs", ACTIVATIONS + GRAPHS, PINK, "xx"),
             ("not for us", total - int(total * utilization), "#DDDDDD", None)]
    parts = [(name, value / 2**30, colour, hatch) for name, value, colour, hatch in sizes]
    return parts, blocks, fit(blocks, 16, tokens)


def plan_in_bf16(name):
    """The same for a model of MODELS on 79.35 GiB."""
    return plan_bar(MODELS[name], size("79.35 GiB"), 2 * count(MODELS[name]))


three = ("Llama-2-13B", "Qwen2.5-14B", "Llama-3-8B")
figure, ax = plt.subplots(figsize=(9, 4.2), layout="constrained")
for y, name in enumerate(three):
    parts, blocks, requests = plan_in_bf16(name)
    draw_bar(ax, y, parts, unit="GiB")
    ax.text(0, y - 0.42, f"{name}: {blocks:,} blocks, {requests} requests of 2048 tokens",
            fontsize=11, fontweight="bold", va="center")
ax.text(0, 2.5, "no label: activations and graphs (crossed), 2.0 GiB; "
        "outside the budget (grey), 6.3 GiB", fontsize=10)
ax.set(xlim=(0, 79.35), ylim=(2.65, -0.65), xlabel="memory of the GPU, GiB")
picture(figure, "weights, K/V blocks and the rest on 79.35 GiB; requests of 2048 tokens: " +
        ", ".join(f"{name} {plan_in_bf16(name)[2]}" for name in three))

# %% [markdown]
# Llama-2-13B and Qwen2.5-14B leave almost the same room. One serves 29 requests in it, the other four times as many.
# That is what 8 K/V heads are for.
#
# Now choose for yourself. (That needs a running kernel. Without one you see the textbook's own example: Qwen2.5-7B on a
# GPU with 24 GiB.) `weights` as AWQ puts the layers' matrices into 4 bits. `kv` as fp8 stores K and V in one byte a
# number. `context` counts thousands of tokens. Which of the two, AWQ or fp8, helps more on the small GPU? And on the
# large one? Try it before you read on.

# %% fold="yes"
from kvlab.sizing import model_shape

GPUS = {"24 GB (RTX 4090)": "24 GiB", "40 GB (A100)": "39.5 GiB", "80 GB (A100)": "79.35 GiB",
        "141 GB (H200)": "139.8 GiB"}


def weights_in(name, weights):
    awq = weights.startswith("AWQ")
    return model_shape(name).quantised_weight_bytes() if awq else 2 * count(MODELS[name])


def show(gpu, model, weights, kv, context):
    memory, weight_bytes = size(GPUS[gpu]), weights_in(model, weights)
    parts, blocks, requests = plan_bar(MODELS[model], memory, weight_bytes,
                                       1 if kv == "fp8" else 2, tokens=1000 * context)
    figure, ax = plt.subplots(figsize=(9, 2.2), layout="constrained")
    if blocks:
        found = (f"{blocks:,} blocks = {16 * blocks:,} tokens: "
                 f"{requests} requests of {context},000 tokens")
    else:
        parts = [("weights", weight_bytes / 2**30, RED, "//")]
        found = "does not fit: the black line is the end of the GPU"
        ax.axvline(memory / 2**30, color="#222222", linewidth=3)
    draw_bar(ax, 0, parts, unit="GiB")
    ax.set_title(f"{model}, weights {weights}, K/V {kv}, on {gpu}\n{found}", loc="left",
                 fontsize=11)
    ax.set(xlim=(0, max(memory, weight_bytes) / 2**30 * 1.01),
           xlabel="memory, GiB (crossed: activations and graphs; grey: outside the budget)")
    return figure


sliders(show, alt="the memory of the chosen GPU as a bar: weights, K/V blocks and the rest",
        gpu=(list(GPUS), "24 GB (RTX 4090)"), model=(NAMES, "Qwen2.5-7B"),
        weights=(("bf16", "AWQ"), "bf16"), kv=(("bf16", "fp8"), "bf16"), context=(1, 32, 4))

# %%
BOTH = ("24 GB (RTX 4090)", "80 GB (A100)")


def blocks_of(gpu, weights="bf16", kv_bytes=2, utilization=0.92):
    """Blocks for Qwen2.5-7B."""
    name = "Qwen2.5-7B"
    return plan_bar(MODELS[name], size(GPUS[gpu]), weights_in(name, weights), kv_bytes,
                    utilization)[1]


for gpu in BOTH:
    awq = blocks_of(gpu, "AWQ") / blocks_of(gpu)
    fp8 = blocks_of(gpu, kv_bytes=1) / blocks_of(gpu)
    print(f"Qwen2.5-7B on {gpu:17} {blocks_of(gpu):6,} blocks; "
          f"with AWQ {awq:.2f} times as many, with fp8 {fp8:.2f}")

# %% [markdown]
# fp8 halves a block, so there are twice as many, on any GPU. AWQ frees a fixed number of GiB. That is a lot where the
# weights fill the GPU, and little where they do not.
#
# Concurrency is a property of the context length as much as of the GPU. The next figure shows how many requests of one
# length fit on an 80 GB GPU, from 256 tokens to 128 thousand.
#
# **What to look at:** both axes are logarithmic, so a straight line down says "twice as long, half as many". Go
# up along the dotted line: from the lowest model to the highest it is a factor of almost 18. Then look at the two
# crosses. There a line ends: of longer requests not even one fits. Both are models with full multi-head attention.

# %% fold="yes"
figure, ax = plt.subplots(figsize=(9, 4.6), layout="constrained")
lengths = [round(256 * 2 ** (i / 8)) for i in range(73)]
styles = {"Qwen2.5-7B": (GREEN, "-"), "Llama-3-8B": (SKY, "--"), "Qwen2.5-14B": (ORANGE, "-"),
          "Llama-2-7B": (BLUE, "-."), "Llama-2-13B": (RED, "-")}
for name, (colour, style) in styles.items():
    _, blocks, _ = plan_in_bf16(name)
    points = [(tokens, fit(blocks, 16, tokens)) for tokens in lengths]
    points = [(tokens, requests) for tokens, requests in points if requests]
    if 16 * blocks < lengths[-1]:  # the longest request that fits
        points.append((16 * blocks, 1))
        ax.plot(16 * blocks, 1, "X", color=colour, markeredgecolor="black", markersize=10,
                zorder=3)
        ax.text(16 * blocks, 0.68, f"{16 * blocks:,}", ha="center", va="center", fontsize=10)
    ax.plot(*zip(*points, strict=True), color=colour, linestyle=style, linewidth=2.2)
    ax.text(240, points[0][1], name, ha="right", va="center", fontsize=10)
ax.axvline(2048, color="#222222", linestyle=":", linewidth=1.5)
ax.text(2250, 4200, "2048 tokens", fontsize=10)
ax.set(xscale="log", yscale="log", xlim=(85, 190_000), ylim=(0.5, 7000),
       xlabel="tokens of one request", ylabel="requests at the same time")
ax.set_xticks([256, 2048, 16_384, 131_072], ["256", "2,048", "16,384", "131,072"])
ax.set_xticks([], minor=True)
ax.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
open_sides(ax, "right", "top")
picture(figure, "requests at the same time against tokens of one request, falling lines; "
        "at 2048 tokens: " + ", ".join(f"{name} {plan_in_bf16(name)[2]}" for name in styles))
print("Blocks for a Llama-3-70B in bf16:", plan_in_bf16("Llama-3-70B")[1])

# %% [markdown]
# ## The second case: reserved and empty
#
# Another company, another night (L33 0.2). The engine allows 4096 tokens. Nobody knows how long an answer will be, so
# it sets 4096 slots aside for every request, in one piece. Most users chat for 150 to 300 tokens and leave. At 42
# requests the engine is full. After the change to paged blocks, the same machines carry 280.
#
# Two numbers are reported with it: the waste fell from 68% to 3.2%. You will check both.
#
# ## Exercise 6: what a reservation costs

# %% ex="compare_reservation"
def compare_reservation(lengths, max_len, block_size):
    """Hold the same requests in two ways, and compare.

    lengths: a list, the tokens of each request, each from 1 to max_len; at least one. It is
    left as it is. The first way sets max_len slots aside for each request. The second gives
    each the whole blocks, of block_size slots, that its tokens need.

    Returns three numbers, in a tuple:
        the share of all slots set aside that hold no token (first way), from 0 to 1,
        the share of all slots in the blocks that hold no token (second way), from 0 to 1,
        how many times as many slots the first way takes as the second. So many times as many
        requests fit.
    """
    ### BEGIN SOLUTION
    used = sum(lengths)
    reserved = max_len * len(lengths)
    blocks = sum((length + block_size - 1) // block_size for length in lengths)
    in_blocks = blocks * block_size
    return 1 - used / reserved, 1 - used / in_blocks, reserved / in_blocks
    ### END SOLUTION

# %% check="compare_reservation"
check("compare_reservation")

# %% [markdown]
# Twelve users, drawn to scale. **What to look at:** above, the blue slivers at the left are the tokens. Everything
# white is set aside for them alone. Below, the *same* twelve requests, one after the other, in blocks of 16.

# %% fold="yes"
import random

compare = lab.best("compare_reservation")  # yours if it is solved, else ours
people = random.Random(1)
users = [people.randint(150, 300) for _ in range(12)]

figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4.2), layout="constrained",
                                      height_ratios=(6, 1), sharex=True)
for y, tokens in enumerate(users):
    above.barh(y, 4096, 0.8, color="white", edgecolor="#222222", linewidth=0.8)
    above.barh(y, tokens, 0.8, color=BLUE, edgecolor="#222222", linewidth=0.8)
above.set(ylim=(11.6, -0.6), title="12 reservations of 4096 slots")
x = 0
for tokens in users:
    slots = -(-tokens // 16) * 16
    below.barh(0, slots, 0.8, left=x, color="white", edgecolor="#222222", linewidth=0.8)
    below.barh(0, tokens, 0.8, left=x, color=BLUE, edgecolor="#222222", linewidth=0.8)
    x += slots
below.text(x + 40, 0, f"{x} slots for all twelve", va="center", fontsize=10)
below.set(title="the same 12 requests in whole blocks", xlabel="slots of K/V, one token each",
          xlim=(0, 4110))
for ax in (above, below):
    ax.set_yticks([])
    open_sides(ax, "left", "right", "top")
picture(figure, f"above, twelve long bars with a few tokens each; below, the same in {x} slots")

# %%
everybody = list(range(150, 301))  # every length once
idle, idle_paged, gain = compare(everybody, 4096, 16)
print(f"lengths from 150 to 300: {100 * idle:.1f}% of a reservation is empty, "
      f"{100 * idle_paged:.1f}% of the blocks, and {gain:.1f} times as many requests fit")
lab.compare("stays empty", round(100 * idle, 1))

# %% [markdown]
# Blocks waste 3.2%: that is the report's number, to the digit. But a reservation wastes 94.5%, not 68%. And 17.6
# times as many requests should fit, not 6.7 times. So is the report wrong?
#
# Not so fast. It says that *most* users write 150 to 300 tokens. What do the others do? Suppose that a share of the
# users goes all the way to 4096. A few of them hold a lot of memory.
#
# **What to look at:** the dot in each picture is the report's number. Below it you read how many users must write
# long chats for that number to be true. The two dots do not stand above each other.

# %% fold="yes"
def mixture(share):
    """1000 users, of whom a share writes 4096 tokens, and the others 150 to 300."""
    longs = round(1000 * share)
    return [4096] * longs + [150 + i % 151 for i in range(1000 - longs)]


shares = [i / 1000 for i in range(401)]
results = [compare(mixture(share), 4096, 16) for share in shares]
at_gain = min(shares, key=lambda s: abs(compare(mixture(s), 4096, 16)[2] - 280 / 42))
at_waste = min(shares, key=lambda s: abs(compare(mixture(s), 4096, 16)[0] - 0.68))

figure, axes = plt.subplots(2, 1, figsize=(9, 5.2), layout="constrained", sharex=True)
percent = [100 * share for share in shares]
graphs = (
    (2, 1, 280 / 42, at_gain, BLUE, "o", 18, "times as many\nrequests in blocks",
     "280 / 42 = 6.67 times"),
    (0, 100, 68, at_waste, RED, "s", 100, "empty part of a\nreservation, %", "68% empty"),
)
for ax, graph in zip(axes, graphs, strict=True):
    which, times, said, share, colour, marker, top, label, text = graph
    ax.plot(percent, [times * result[which] for result in results], color=colour, linewidth=2.5)
    ax.plot([100 * share] * 2, [0, said], color=colour, linestyle=":", linewidth=1.5)
    ax.plot(100 * share, said, marker, color=colour, markersize=9)
    left, up = (0.8, 0.06) if share < 0.2 else (-0.8, -0.14)
    ax.text(100 * share + left, said + up * top,
            f"{text}, if {100 * share:.1f}% write 4096 tokens", fontsize=11,
            ha="left" if share < 0.2 else "right")
    ax.set(xlim=(0, 40), ylim=(0, top), ylabel=label)
    open_sides(ax, "right", "top")
axes[1].set_xlabel("users who write 4096 tokens, % (the others: 150 to 300)")
picture(figure, f"two falling curves over the share of long chats: the gain is 6.67 at "
        f"{100 * at_gain:.1f}%, the waste is 68% at {100 * at_waste:.1f}%")

# %%
for share in (at_gain, at_waste):
    idle_now, _, gain_now = compare(mixture(share), 4096, 16)
    print(f"{100 * share:4.1f}% long chats: {100 * idle_now:.0f}% of a reservation is empty, "
          f"{gain_now:.1f} times as many requests fit")

# %% [markdown]
# 6.7 times as many is quite possible: about one long chat in ten is enough. 68% empty is possible too, with almost
# three in ten. Both at once are not, if memory alone decides. (It need not. A limit on seats, or on the time of a
# step, may stop you at 280 before the memory does.)
#
# The lesson stands, whatever the digits: **the second culprit is the reservation.**

# %% [markdown]
# ## Into the engine
#
# The engine of this project can do both. It runs the real scheduler; in place of a model there is the slot-echo model,
# which makes each next token out of all that it reads back. A pool with room for five reservations of 4096 tokens, and
# 120 users of 150 to 300 tokens:

# %%
from kvlab.config import EngineConfig
from kvlab.sampling_params import SamplingParams
from kvlab.schedule import Request


def serve(reservation, num_blocks=5 * 256, num_requests=120, num_outputs=40):
    """Everybody arrives at once. Returns what the scheduler has counted."""
    config = EngineConfig(reservation=reservation, num_gpu_blocks_override=num_blocks + 1,
                          max_model_len=4096, max_num_seqs=512, max_num_batched_tokens=8192,
                          enable_prefix_caching=False)
    core, chats = lab.parts().make_engine(config), random.Random(1)
    for i in range(num_requests):
        num_prompt = chats.randint(150, 300) - num_outputs
        prompt = range(1000 * i, 1000 * i + num_prompt)
        core.add_request(Request(str(i), prompt, SamplingParams(max_tokens=num_outputs)))
    while core.has_unfinished_requests():
        core.step()
    return core.scheduler.stats


served = {reservation: serve(reservation) for reservation in ("contiguous", "paged")}
for reservation, stats in served.items():
    print(f"{reservation:11} at most {stats.peak_running:3} at the same time, "
          f"{stats.num_steps:4} steps for all, {stats.num_preemptions_recompute} preemptions")

# %% [markdown]
# 5 requests at a time, or about 95. (That is even more than 17.6 times as many: they do not all reach their full
# length at once. It is a bet. The preemptions (抢占) count how often the engine lost it and sent somebody back: lab
# 09.)
#
# Your `num_gpu_blocks` is the part called `sizing`. An engine asks it once, when it starts. Here we ask in the engine's
# place, because we want a tiny GPU: 16 MiB for the model that comes with this project, in fp32. Then the engine serves
# six chats with exactly the blocks of the answer. And then again, on a GPU of 11.4 MiB. How many blocks will that be?

# %%
TINY = {"model_type": "qwen2", "hidden_size": 192, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2,
        "vocab_size": 2048, "tie_word_embeddings": True}
toy_block = 16 * per_token(TINY, dtype_bytes=4)


def run_on(memory):
    """Ask as an engine does at its start, then serve with the answer."""
    question = (size(memory), 0.92, 4 * count(TINY), size("2 MiB"), size("0.5 MiB"), toy_block)
    planned = lab.parts().num_gpu_blocks(*question)
    print(f"num_gpu_blocks{question} = {planned}")
    return lab.run_engine(num_gpu_blocks_override=planned, num_samples=1, max_model_len=128,
                          enable_prefix_caching=False)


large = run_on("16 MiB")

# %%
small = run_on("11.4 MiB")

# %% [markdown]
# Seven tenths of the memory, and a tenth of the blocks: weights, activations and graphs take what they take. The answers
# are the same, token by token. But look at the steps: with so few blocks the chats wait for each other, and sometimes
# one gives its blocks back and starts again. So an answer that is too small costs time. One that is too large costs the
# engine: it plans with memory that is not there.

# %% [markdown]
# ## More, if you like
#
# ### Exercise 7: four bits are not a quarter of sixteen
#
# AWQ and GPTQ store a weight in 4 bits. But 16 steps alone do not say how large a weight is. So the weights stand
# in groups (组), usually of 128, and each group has a scale (缩放因子) in full precision and a zero point (零点) of 4
# bits.

# %% ex="quantised_bytes"
def quantised_bytes(num_weights, bits=4, group_size=128, rest_bytes=2):
    """Bytes of num_weights weights, in groups of group_size; the last group may be smaller.

    bits: of one weight, and of the zero point of one group. rest_bytes: bytes of the scale of
    one group. Weights and zero points are packed together without gaps; their bits are rounded
    up to whole bytes once, at the end. Returns a whole number.
    """
    ### BEGIN SOLUTION
    num_groups = (num_weights + group_size - 1) // group_size
    num_bits = (num_weights + num_groups) * bits
    return (num_bits + 7) // 8 + num_groups * rest_bytes
    ### END SOLUTION

# %% check="quantised_bytes"
check("quantised_bytes")

# %% [markdown]
# And the embedding, the head, the norms and the biases stay as they were. In a small model that is most of it:

# %%
quantised = lab.best("quantised_bytes")  # yours if it is solved, else ours


def awq_bytes(name):
    """A whole model: the layers' matrices in 4 bits, the rest in 2 bytes a number."""
    matrices = model_shape(name).num_layer_weights
    return quantised(matrices) + 2 * (count(MODELS[name]) - matrices)


for name in ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-72B"):
    now, before = awq_bytes(name), 2 * count(MODELS[name])
    print(f"{name:13} {before / 2**30:6.1f} GiB in bf16, {now / 2**30:5.1f} GiB in 4 bits: "
          f"{100 * now / before:.0f}%")

# %% [markdown]
# ### Exercise 8: what if nothing had to be kept?
#
# Linear attention (线性注意力) and its relatives keep no K and V. They keep a state of constant size for each request,
# however long it gets. When is that less memory?

# %% ex="break_even_tokens"
def break_even_tokens(state_bytes, bytes_per_token, block_size):
    """The smallest number of tokens whose K/V takes more bytes than a state of state_bytes.

    K/V is held in whole blocks of block_size tokens, at bytes_per_token for each slot.
    Returns a whole number.
    """
    ### BEGIN SOLUTION
    whole_blocks = state_bytes // (block_size * bytes_per_token)
    return whole_blocks * block_size + 1
    ### END SOLUTION

# %% check="break_even_tokens"
check("break_even_tokens")

# %%
break_even = lab.best("break_even_tokens")  # yours if it is solved, else ours


def state_bytes(config):
    """A plain linear attention: head_dim x head_dim numbers a query head, 2 bytes each."""
    heads = config["num_attention_heads"]
    return config["num_hidden_layers"] * heads * (config["hidden_size"] // heads) ** 2 * 2


for name in ("Llama-2-7B", "Llama-3-8B", "Qwen2.5-7B"):
    tokens = break_even(state_bytes(MODELS[name]), per_token(MODELS[name]), 16)
    mib = state_bytes(MODELS[name]) / 2**20
    print(f"a linear {name:11} would keep {mib:.1f} MiB a request: "
          f"less than K/V from {tokens} tokens on")

# %% [markdown]
# Then every request takes the same room, known beforehand. There is nothing to page: a list of free places of one size
# would do. But who may come in, and who must wait, is still decided at every step.

# %% [markdown]
# ## What the textbook says, and what we measured
#
# Each line of the table below is computed by this notebook; the verdicts, too. "Holds if" names the condition. The
# cells that compute it are folded away: open one if you doubt its line. First the envelope of the first case.

# %% fold="yes"
ledger = []


def claim(where, says, we_find, verdict):
    ledger.append((where, says, we_find, verdict))


def near(value, said, digits=0):
    """Is `value` what the text says, at the text's own precision?"""
    return round(value, digits) == said


weights, mha = 2 * count(thirteen), per_token(thirteen)
gqa = per_token(thirteen | {"num_key_value_heads": 8})

claim("L33 0.1", "the weights of a 13B take 26 GB of 80",
      f"{weights / 10**9:.2f} GB, {weights / 2**30:.2f} GiB",
      "holds in GB" if near(weights / 10**9, 26) else "contradicted")
claim("L33 0.1", "one token of a 13B keeps about 160 KB",
      f"{mha / 2**10:.0f} KiB with full multi-head attention; "
      f"{gqa / 2**10:.0f} KiB with 8 K/V heads",
      "holds" if mha == size("160 KiB") else
      "holds if the 13B has 8 K/V heads of 128 in 40 layers" if gqa == size("160 KiB") else
      "contradicted")
decimal, binary = (size("54 GB") / (2048 * size(text)) for text in ("160 KB", "160 KiB"))
right, all_that_fit = (fit(plan(ways[name], 1.0, 0, 0, 0, block), 16, 2048) for name in (
    "54 GB, as on the envelope", "79.35 GiB less 26 GB, what is really there"))
claim("L33 0.1", "168 requests of 2048 tokens fit into 54 GB",
      f"{54 / 0.32:.1f} from the rounded 0.32 GB; {decimal:.1f} from 160 KB, {binary:.1f} from "
      f"160 KiB; {right} from 800 KiB",
      "holds with 160 KB, up to rounding (at least 150, as it goes on)" if binary >= 150 else
      "contradicted")
in_engine = plan_in_bf16("Llama-2-13B")[2]
claim("L33 0.1", "fragmentation stopped it at 35",
      f"with 800 KiB a token at most {all_that_fit} requests of 2048 fit, holes or none, and "
      f"{in_engine} beside activations and graphs",
      "may hold if the model keeps 160 KB; not needed if it is a multi-head 13B"
      if in_engine <= 35 <= all_that_fit else "holds")

# %% [markdown]
# Then the error message, and the second case.

# %% fold="yes"
adds_up = total == sum(size(CASE[name]) for name in ("allocated", "free", "reserved"))
real = [line for line in SEEN.values() if line is not CASE]
nested = sum(size(line["reserved"]) >= size(line["allocated"]) for line in real)
claim("L33 0.1", "48.12 allocated, 29.80 free, 1.43 reserved, of 79.35 GiB",
      f"side by side they are {'' if adds_up else 'not '}the total, to the byte. But "
      f"reserved contains allocated, in {nested} of {len(real)} real reports, and 1.43 is less "
      "than 48.12",
      "holds" if size(CASE["reserved"]) >= size(CASE["allocated"]) else
      "holds as a picture of holes in an engine's own region; contradicted as a message of "
      "PyTorch")
kv_there = size(CASE["allocated"]) - weights
claim("L33 0.1", "at 35 requests, 48.12 GiB are allocated",
      f"{kv_there / 2**30:.1f} GiB without the weights: {kv_there // (2048 * mha)} requests of "
      f"2048 at 800 KiB, {kv_there // (2048 * gqa)} at 160 KiB",
      f"holds if the 35 have {kv_there / 35 / mha:.0f} tokens each (800 KiB) or "
      f"{kv_there / 35 / gqa:,.0f} (160 KiB)")

claim("L33 0.2", "42 to 280 requests is 6.6 times", f"{280 / 42:.2f}",
      "holds, cut off instead of rounded" if int(10 * 280 / 42) == 66 else "contradicted")
claim("L33 0.2", "with blocks 3.2% is wasted",
      f"{100 * idle_paged:.2f}% for lengths of 150 to 300 and blocks of 16",
      "holds" if near(100 * idle_paged, 3.2, 1) else "contradicted")
claim("L33 0.2", "with reservations of 4096, 68% is wasted",
      f"{100 * idle:.1f}% for lengths of 150 to 300",
      "holds" if near(100 * idle, 68) else
      f"holds if {100 * at_waste:.0f}% of the users write all 4096 tokens")
apart = "; not together with the 68%" if abs(at_gain - at_waste) > 0.05 else ""
claim("L33 0.2", "6.6 times as many requests",
      f"{gain:.1f} times for lengths of 150 to 300; in the engine "
      f"{served['paged'].peak_running} for {served['contiguous'].peak_running}",
      "holds" if near(gain, 6.7, 1) else
      f"holds if {100 * at_gain:.0f}% write all 4096 tokens, or if something else than memory "
      f"stops you{apart}")

# %% [markdown]
# Last the formula, on Qwen2.5-7B, and the question about linear attention.

# %% fold="yes"
from kvlab import sizing


def each(numbers, form):
    pairs = zip(numbers, BOTH, strict=True)
    return "; ".join(f"{format(number, form)} on {gpu[:5]}" for number, gpu in pairs)


qwen, small_gpu = MODELS["Qwen2.5-7B"], BOTH[0]
ours = sizing.num_gpu_blocks(size("24 GiB"), 0.92, 2 * count(qwen), ACTIVATIONS, GRAPHS,
                             16 * per_token(qwen))
claim("PAV 3.1", "0.92 x VRAM less weights, activations and graphs, by the bytes of a block",
      f"Qwen2.5-7B on 24 GB: {blocks_of(small_gpu):,} blocks in bf16, "
      f"{blocks_of(small_gpu, 'AWQ'):,} with AWQ, {blocks_of(small_gpu, kv_bytes=1):,} with "
      f"fp8 K/V, {blocks_of(small_gpu, 'AWQ', 1):,} with both",
      "holds: our engine plans the same (the 2 GiB of activations and graphs are a guess)"
      if ours == blocks_of(small_gpu) else "contradicted by our engine")
twice = [blocks_of(gpu, kv_bytes=1) / blocks_of(gpu) for gpu in BOTH]
claim("PAV 3.1", "fp8 K/V holds twice the tokens", "times " + each(twice, ".4f"),
      "holds" if all(near(ratio, 2, 3) for ratio in twice) else "contradicted")
more = [blocks_of(gpu, "AWQ") / blocks_of(gpu) for gpu in BOTH]
claim("PAV 3.1, 9", "smaller weights give more blocks", "AWQ: times " + each(more, ".2f"),
      "holds; much where weights fill the GPU, little where they do not"
      if min(more) > 1 else "contradicted")
gained = [blocks_of(gpu) / blocks_of(gpu, utilization=0.90) - 1 for gpu in BOTH]
claim("L33 8.2, PAV 3.1", "a utilization of 0.90 is advised; 0.92 is the default",
      "0.92 gives more blocks: " + each(gained, ".1%"),
      "both hold: advice and a default. The 2% matter on a small GPU"
      if gained[0] > 2 * gained[1] else "both hold")

# %% fold="yes"
outside = [0.1 * size(GPUS[gpu]) / 10**9 for gpu in BOTH]
inside = (ACTIVATIONS + GRAPHS) / 10**9
claim("L33 8.2", "0.90 keeps at least 6 GB for what is not K/V",
      "GB outside the budget: " + each(outside, ".1f") +
      f"; {inside:.1f} GB of activations and graphs inside it",
      "holds" if outside[0] >= 6 else f"holds from a GPU of {6 / 0.1:.0f} GB on; of "
      f"{(6 - inside) / 0.1:.0f} GB if the inside is counted")
tokens = {name: break_even(state_bytes(MODELS[name]), per_token(MODELS[name]), 16)
          for name in ("Llama-2-7B", "Llama-3-8B")}
claim("L33 9.3", "without a KV cache, is paging still needed? (a question)", "; ".join(
      f"{name}: a state is less from {number} tokens on" for name, number in tokens.items()),
      "paging is not, since all requests have one size; scheduling is")

# %%
from kvlab.lab.show import table as show_table

show_table(["where", "the text says", "we find", "verdict"], ledger)

# %% [markdown]
# ## Case closed: the two questions
#
# **Where did 133 requests go?** They were never there. 160 KB belongs to a model with 8 K/V heads; Llama-2-13B has 40,
# and keeps 800 KiB of a token. So 54 GB hold 32 requests of 2048 tokens, and as an engine plans it 29. One number of
# the envelope was wrong, and two more followed from it.
#
# **What are the 30 GB that are free and cannot be had?** If the message is PyTorch's, no such thing exists: what the
# driver has free can be had, and reserved is never less than allocated. If "free" means holes inside one region that an
# engine cuts up by itself, they are real. That is external fragmentation (外部碎片), and lab 02 makes 4.5 GB of it. The
# story does not tell which.
#
# So before you blame a hole, do the sum. In the first case one wrong factor makes 35 requests a lot, not few. In the
# second a reservation leaves 94.5% of its own slots empty, before there is any hole between two of them.
#
# ## What to remember
#
# - One token keeps 2 x layers x K/V heads x head size x bytes. K/V heads, not query heads: it is a factor of 5 in a
#   13B.
# - GB are not GiB. Turn everything into bytes first.
# - blocks = (total x utilization - all that is not K/V) / bytes of a block, rounded down. Requests take whole blocks.
# - Setting the longest length aside for everybody wastes what nobody uses: 94.5% where people write 225 of 4096
#   tokens.
# - fp8 K/V doubles the tokens on every GPU. Small weights help most where weights fill the GPU.
#
# ## Questions to think about
#
# 1. The message says that 1.25 GiB was asked for. For which number of tokens is that a whole request, at 160 KiB and
#    at 800 KiB? And what is K and V of *one* layer, for a batch of 32 requests of 2048 tokens, in the multi-head 13B?
# 2. PAV 9 also names a smaller `max_model_len` as a way to more blocks. Which term of the formula would it change?
# 3. Llama-3-70B in bf16 is split over 8 GPUs, each with an eighth of the layers' matrices and one of the 8 K/V heads.
#    How many blocks does each GPU have? What would happen on 16 GPUs?
# 4. The budget left out 8% of the GPU. Somebody wants to use it. What would you have to measure before you say yes?
# 5. fp8 halves the bytes of a block. Does it also halve the time that attention takes to read it?
#
# ## Where this lives in real engines
#
# - **vLLM** runs the model once with the largest batch it allows, measures the peak, and divides what is left by the
#   bytes of a block: `determine_available_memory` in `vllm/v1/worker/gpu_worker.py`, and
#   `vllm/v1/core/kv_cache_utils.py`. It logs the size of the KV cache in tokens, and how many requests of
#   `max_model_len` fit.
# - **SGLang** has `--mem-fraction-static`: the share for weights and K/V together.
# - **kvlab**: `kvlab/sizing.py` is your formula, `kvlab/engine/memory.py` asks it at the start, `kvlab/capacity.py` has
#   the rest of what you wrote.
