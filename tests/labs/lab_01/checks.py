"""Lab 01, the missing 30 GB: its exercises."""

from fractions import Fraction

from hypothesis import strategies as st

from kvlab.grade import Approx, Exercise, LabInfo, OneOf, Trace, calls, say

CHANGED = "an answer, and a changed argument"  # what the driver says
LAB = LabInfo(title=say("The missing 30 GB"), sections="L33 0.1-0.2, 8.2; PAV 3.1, 6")


def config(model_type="llama", hidden=8, inner=10, layers=1, heads=2, vocab=7, kv=None, head_dim=None, tied=None):
    """As much of a config.json as counts, with the fields that it may leave out."""
    made = {"model_type": model_type, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "vocab_size": vocab}  # fmt: skip
    said = {"num_key_value_heads": kv, "head_dim": head_dim, "tie_word_embeddings": tied}
    return made | {name: value for name, value in said.items() if value is not None}


@st.composite
def configs(draw):
    """Small ones: query heads a multiple of the K/V heads, hidden_size a multiple of the query heads."""
    kv = draw(st.integers(1, 3))
    heads = kv * draw(st.integers(1, 3))
    return config(draw(st.sampled_from(["llama", "mistral", "qwen2"])), heads * draw(st.integers(1, 4)) * 2,
                  draw(st.integers(1, 20)), draw(st.integers(1, 4)), heads, draw(st.integers(1, 30)),
                  draw(st.sampled_from([kv, None])), draw(st.sampled_from([None, 4, 6])),
                  draw(st.sampled_from([None, False, True])))  # fmt: skip


def shape(made):
    """hidden, query heads, K/V heads, head_dim: the long way round, one field after the other."""
    heads = made["num_attention_heads"]
    kv = made["num_key_value_heads"] if "num_key_value_heads" in made else heads
    head_dim = made["head_dim"] if "head_dim" in made else made["hidden_size"] // heads
    return made["hidden_size"], heads, kv, head_dim


QWEN_7B = config("qwen2", 3584, 18_944, 28, 28, 152_064, kv=4, tied=False)
QWEN_HALF_B = config("qwen2", 896, 4864, 24, 14, 151_936, kv=2, tied=True)
LLAMA_13B = config("llama", 5120, 13_824, 40, 40, 32_000, tied=False)
NEMO_12B = config("mistral", 5120, 14_336, 40, 32, 131_072, kv=8, head_dim=128, tied=False)


def changed_config():
    return say("Leave the config as it was: others read it again. Keep what you work out in a variable, or work on a "
               "copy, dict(config).")  # fmt: skip


def told(made):
    """A config in one line, without what the exercise does not read."""
    return ", ".join(f"{name}={value!r}" for name, value in made.items())


class TokenBytes(Exercise):
    """K/V bytes of one token, from config.json."""

    name, points, minutes, section = "token_bytes", 3, 15, "L33 0.1"
    defines, driver = ("token_bytes",), "Keeps"
    ours = {"token_bytes": "kvlab.capacity:token_bytes", "kv_bytes_per_token": "kvlab.sizing:kv_bytes_per_token",
            "ModelShape": "kvlab.sizing:ModelShape"}  # fmt: skip
    hints = (
        say("Count one layer first. How many K/V heads does it have, and how many numbers does one head keep of one "
            "token? Then: K and V. Then: all layers. Then: bytes."),
        say("config.get(name, default) reads a field that may be missing. Without num_key_value_heads there are as "
            "many K/V heads as query heads. Without head_dim it is hidden_size // num_attention_heads."),
        say("2 (K and V) x num_hidden_layers x K/V heads x head_dim x dtype_bytes."),
    )  # fmt: skip
    examples = (
        Trace((), (("token_bytes", config(heads=4, hidden=12, kv=4, head_dim=3), 1),)),
        Trace((), (("token_bytes", config(heads=4, hidden=12, kv=4, head_dim=3, layers=3), 1),)),
        Trace((), (("token_bytes", config(heads=4, hidden=12, kv=4, head_dim=3, layers=3), 2),)),
        Trace((), (("token_bytes", config(heads=4, hidden=12, kv=4), 1),), why=say("This config leaves head_dim out.")),
        Trace((), (("token_bytes", config(heads=4, hidden=12, head_dim=3), 1),),
              why=say("This config leaves num_key_value_heads out.")),
        Trace((), (("token_bytes", config(heads=4, hidden=12, layers=3), 2),)),
        Trace((), (("token_bytes", config(heads=4, hidden=8, kv=1), 1),)),
        Trace((), (("token_bytes", config(heads=2, hidden=8, head_dim=6), 1),)),
        Trace((), (("token_bytes", QWEN_7B, 2),)),
        Trace((), (("token_bytes", NEMO_12B, 2),)),
        Trace((), (("token_bytes", LLAMA_13B),), why=say("dtype_bytes was not given: it is 2 then, for bf16.")),
    )  # fmt: skip

    class Oracle:
        """Goes through layers and heads one by one."""

        def token_bytes(self, made, dtype_bytes=2):
            _, _, kv, head_dim = shape(made)
            total = 0
            for _ in range(made["num_hidden_layers"]):
                for _ in ("K", "V"):
                    total += kv * head_dim * dtype_bytes
            return total

    def traces(self):
        return calls("token_bytes", configs(), st.sampled_from([1, 2, 4]))

    def describe(self, op):
        hidden = ("model_type", "intermediate_size", "vocab_size", "tie_word_embeddings")
        made = {name: value for name, value in op[1].items() if name not in hidden}
        return f"token_bytes(config with {told(made)}{''.join(f'; dtype_bytes={b}' for b in op[2:])})"

    def explain(self, op, expected, got):
        if got == CHANGED:
            return changed_config()
        if isinstance(got, float) and got == expected:
            return say("The number is right. Bytes are whole: divide with //, so that it is an int.")
        if isinstance(got, bool) or not isinstance(got, int | float) or got <= 0:
            return say("Return the bytes as a whole number.")
        made, dtype_bytes = op[1], (*op[2:], 2)[0]
        hidden, heads, kv, head_dim = shape(made)
        layers = made["num_hidden_layers"]
        ratio = Fraction(got) / expected
        if kv != heads and ratio == Fraction(heads, kv) and "head_dim" not in made:  # two mistakes, one number
            return say("Only K/V heads leave something behind. There are {heads} query heads, but K/V heads: {kv}. If "
                       "it is K/V heads that you count: did you divide hidden_size by them? It is divided by the query "
                       "heads.", heads=heads, kv=kv)  # fmt: skip
        if kv != heads and ratio == Fraction(heads, kv):
            return say("Only K/V heads leave something behind. There are {heads} query heads, but K/V heads: {kv}.",
                       heads=heads, kv=kv)  # fmt: skip
        if "num_key_value_heads" not in made and heads > 2 and ratio == Fraction(1, heads):
            return say("This config does not name its K/V heads. Then there are as many as query heads: {heads}.",
                       heads=heads)  # fmt: skip
        if "head_dim" in made and ratio == Fraction(hidden // heads, head_dim):
            return say("This config says head_dim itself: {d}. It need not be hidden_size // num_attention_heads.",
                       d=head_dim)  # fmt: skip
        if kv != heads and ratio == Fraction(hidden, kv * head_dim):
            return say("hidden_size is the width of a token in the layer. What is kept is {kv} K/V heads of {d} "
                       "numbers.", kv=kv, d=head_dim)  # fmt: skip
        if layers != 1 and ratio == Fraction(1, layers):
            return say("That is one layer. Each of the {layers} layers keeps K and V of its own.", layers=layers)
        if dtype_bytes > 1 and ratio == Fraction(1, dtype_bytes):
            return say("That many numbers are kept. Each takes {b} bytes.", b=dtype_bytes)
        if ratio == Fraction(1, 2):
            return say("Half of it. Each K/V head keeps two vectors of a token: its K and its V.")
        if ratio == Fraction(2, dtype_bytes):
            return say("dtype_bytes is {b} here, not always 2.", b=dtype_bytes)
        return say("Layers: {layers}. In each, K/V heads: {kv}. Numbers in a head: {d}, for K and again for V. Bytes "
                   "of a number: {b}.", kv=kv, d=head_dim, b=dtype_bytes, layers=layers)  # fmt: skip


class CountParameters(Exercise):
    """Parameters, one layer by hand, then the model."""

    name, points, minutes, section = "count_parameters", 4, 22, "L33 0.1"
    defines, driver = ("layer_parameters", "num_parameters"), "Keeps"
    ours = {"layer_parameters": "kvlab.capacity:layer_parameters", "num_parameters": "kvlab.capacity:num_parameters",
            "shape": "kvlab.sizing:ModelShape"}  # fmt: skip
    hints = (
        say("A matrix from a numbers to b numbers has a x b parameters, and a bias on its output has b. Write one line "
            "for each of the seven matrices, then add."),
        say("q: hidden to heads x head_dim. k and v: hidden to kv_heads x head_dim. o: heads x head_dim back to "
            "hidden. gate and up: hidden to intermediate; down: back. And two norms. A qwen2 has a bias on "
            "q, k and v, as long as their outputs."),
        say("The model: vocab_size x hidden_size once if the head is tied, else twice; all layers; one more norm of "
            "hidden_size. tie_word_embeddings may be missing: then it is False."),
    )  # fmt: skip
    examples = (
        Trace((), (("layer_parameters", config(hidden=8, inner=10, heads=2, kv=2, head_dim=4)),)),
        Trace((), (("layer_parameters", config(hidden=8, inner=10, heads=2)),),
              why=say("This config leaves num_key_value_heads and head_dim out.")),
        Trace((), (("layer_parameters", config(hidden=8, inner=10, heads=4, kv=1)),)),
        Trace((), (("layer_parameters", config(hidden=8, inner=10, heads=2, head_dim=6)),)),
        Trace((), (("layer_parameters", config("qwen2", hidden=8, inner=10, heads=4, kv=1)),)),
        Trace((), (("num_parameters", config(tied=False)),)),
        Trace((), (("num_parameters", config(layers=3, tied=True)),)),
        Trace((), (("num_parameters", config(layers=3)),), why=say("This config leaves tie_word_embeddings out.")),
        Trace((), (("num_parameters", LLAMA_13B), ("num_parameters", QWEN_HALF_B), ("num_parameters", NEMO_12B))),
    )

    class Oracle:
        """A list of every tensor's shape, as a checkpoint has them."""

        def layer(self, made):
            hidden, heads, kv, head_dim = shape(made)
            inner, q, k = made["intermediate_size"], heads * head_dim, kv * head_dim
            tensors = [(hidden, q), (hidden, k), (hidden, k), (q, hidden)]
            tensors += [(hidden, inner), (hidden, inner), (inner, hidden), (hidden,), (hidden,)]
            return tensors + ([(q,), (k,), (k,)] if made["model_type"] == "qwen2" else [])

        def count(self, tensors):
            total = 0
            for tensor in tensors:
                size = 1
                for side in tensor:
                    size *= side
                total += size
            return total

        def layer_parameters(self, made):
            return self.count(self.layer(made))

        def num_parameters(self, made):
            table = (made["vocab_size"], made["hidden_size"])
            tensors = [table, (made["hidden_size"],)]
            if made.get("tie_word_embeddings") is not True:
                tensors.append(table)
            return self.count(tensors) + made["num_hidden_layers"] * self.layer_parameters(made)

    def traces(self):
        function = st.sampled_from(["layer_parameters", "num_parameters"])
        return st.tuples(function, configs()).map(lambda op: Trace((), (op,)))

    def describe(self, op):
        hidden = ("num_hidden_layers", "vocab_size", "tie_word_embeddings") if op[0] == "layer_parameters" else ()
        return f"{op[0]}(config with {told({name: v for name, v in op[1].items() if name not in hidden})})"

    def explain(self, op, expected, got):
        if got == CHANGED:
            return changed_config()
        if isinstance(got, float) and got == expected:
            return say("The number is right. Parameters are counted: return an int.")
        if isinstance(got, bool) or not isinstance(got, int | float):
            return say("Return a whole number.")
        made, off = op[1], got - expected
        hidden, heads, kv, head_dim = shape(made)
        inner, q, k = made["intermediate_size"], heads * head_dim, kv * head_dim
        if op[0] == "num_parameters":
            return self.explain_model(made, off, expected - got)
        if heads != kv and off == 2 * hidden * (q - k):
            return say("k and v are narrower than q: {k} numbers, not {q}. They have K/V heads only.", k=k, q=q)
        if heads != kv and off == hidden * (q - k):
            return say("Both k and v have K/V heads only: {k} numbers each, not {q}.", k=k, q=q)
        if "head_dim" in made and off == (2 * heads + 2 * kv) * hidden * (hidden // heads - head_dim):
            return say("This config says head_dim itself: {d}. Read it before you divide.", d=head_dim)
        if "head_dim" in made and off == hidden * hidden - q * hidden:
            return say("o goes from heads x head_dim to hidden_size. The two differ here: {q} and {hidden}.",
                       q=q, hidden=hidden)  # fmt: skip
        missing = {
            2 * hidden: say("Two norms are missing: one before the attention, one before the MLP, {n} numbers each.",
                            n=hidden),
            hidden: say("There are two norms in a layer, of {n} numbers each.", n=hidden),
            q + 2 * k: say("A qwen2 has a bias on q, k and v, as long as their outputs: {q} + {k} + {k}.", q=q, k=k)
            if made["model_type"] == "qwen2" else None,
            hidden * inner: say("The MLP has three matrices: gate, up and down."),
            q * hidden: say("After the attention comes one more matrix, o, from {q} numbers back to {hidden}.", q=q,
                            hidden=hidden),
        }  # fmt: skip
        if found := missing.get(-off):
            return found
        if made["model_type"] != "qwen2" and off == q + 2 * k:
            return say("Only qwen2 has biases. This is a {kind}: none.", kind=made["model_type"])
        if made["model_type"] == "qwen2" and off == hidden:
            return say("A qwen2 has a bias on q, k and v, and none on o.")
        return say("In pieces: q {q}, k {k}, v {k}, o {o}; gate, up and down {mlp} each; two norms {norm} each{bias}.",
                   q=hidden * q, k=hidden * k, o=q * hidden, mlp=hidden * inner, norm=hidden,
                   bias=f"; biases {q} + {k} + {k}" if made["model_type"] == "qwen2" else "")  # fmt: skip

    def explain_model(self, made, off, short):
        hidden, table = made["hidden_size"], made["vocab_size"] * made["hidden_size"]
        layers, layer = made["num_hidden_layers"], self.Oracle().layer_parameters(made)
        if made.get("tie_word_embeddings") and off == table:
            return say("tie_word_embeddings is True: the head is the embedding again. Count the table once.")
        if not made.get("tie_word_embeddings") and short == table:
            return say("The head is a table of its own here, as large as the embedding: tie_word_embeddings is {tied}.",
                       tied=made.get("tie_word_embeddings", "missing, so False"))  # fmt: skip
        if short == hidden:
            return say("One more norm stands behind the last layer, before the head.")
        if layers > 1 and short == (layers - 1) * layer:
            return say("There are {layers} layers.", layers=layers)
        return say("In pieces: {layers} layers of {layer}, a table of {table} {times}, and a last norm of {hidden}.",
                   layers=layers, layer=layer, table=table, hidden=hidden,
                   times="once" if made.get("tie_word_embeddings") else "twice")  # fmt: skip


class ToBytes(Exercise):
    """GB and GiB."""

    name, points, minutes, section = "to_bytes", 2, 10, "L33 0.1"
    defines = ("to_bytes",)
    ours = {"to_bytes": "kvlab.capacity:to_bytes"}
    hints = (
        say("text.split() gives two words: a number and a unit. What do you multiply by for GB, and what for GiB?"),
        say("A dict of units: KB, MB, GB are 10**3, 10**6, 10**9; KiB, MiB, GiB are 2**10, 2**20, 2**30; B is 1. A "
            "unit that is not in it: raise ValueError."),
        say("round(float(number) * UNITS[unit]) and not int(...): 0.29 * 10**9 may come out a hair below the whole "
            "number, and int cuts it off."),
    )  # fmt: skip
    examples = (
        Trace((), (("to_bytes", "7 B"),)),
        Trace((), (("to_bytes", "1 KB"), ("to_bytes", "1 KiB"))),
        Trace((), (("to_bytes", "3 MB"), ("to_bytes", "3 MiB"))),
        Trace((), (("to_bytes", "54 GB"), ("to_bytes", "54 GiB"))),
        Trace((), (("to_bytes", "1.5 KiB"),), why=say("float() reads a number with a point; int() does not.")),
        Trace((), (("to_bytes", "0.32 GB"), ("to_bytes", "0.125 KiB"))),
        Trace((), (("to_bytes", "2.01 GB"),)),
        Trace((), (("to_bytes", "79.35 GiB"),), why=say("Round to the nearest byte.")),
        Trace((), (("to_bytes", "8 TB"),)),
        Trace((), (("to_bytes", "54 Gb"),), why=say("Gb is gigabit. Nobody means it here, and guessing is how requests "
                                                     "get lost.")),
    )  # fmt: skip

    class Oracle:
        """Exact, with fractions."""

        def to_bytes(self, text):
            number, unit = text.split()
            letters = ["B", "KB", "MB", "GB"], ["B", "KiB", "MiB", "GiB"]
            for base, names in zip((1000, 1024), letters, strict=True):
                if unit in names:
                    exact = Fraction(number) * base ** names.index(unit)
                    below = exact.numerator // exact.denominator
                    if exact - below == Fraction(1, 2):
                        return OneOf((below, below + 1))
                    return below + (exact - below > Fraction(1, 2))
            raise ValueError

    def traces(self):
        digits = st.integers(0, 9999)
        point = digits.map(lambda n: f"{n / 100:.2f}") | digits.map(lambda n: f"{n / 1000:.3f}")
        number = st.integers(0, 200).map(str) | point
        unit = st.sampled_from(["B", "KB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "kb", "Mb", "bytes"])
        return st.tuples(number, unit).map(lambda part: Trace((), (("to_bytes", " ".join(part)),)))

    def explain(self, op, expected, got):
        number, unit = op[1].split()
        if expected == "ValueError":
            return say("{unit} is none of the seven units: raise ValueError, and do not guess.", unit=unit)
        if got is None:
            return say("Return the number of bytes.")
        if isinstance(got, float):
            return say("Bytes are whole: return an int.")
        if not isinstance(got, int):
            return say("Return a whole number.")
        if isinstance(expected, int) and got == expected - 1:
            return say("One byte short: round to the nearest one. int() only cuts off what stands behind the point.")
        if isinstance(expected, int) and got == expected + 1:
            return say("One byte too many: round to the nearest one, and not always up.")
        power = 1 + "KMG".find(unit[0])
        if unit.endswith("iB") and "." not in number and got == int(number) * 1000**power:
            return say("The i in {unit} says binary: 1024, not 1000.", unit=unit)
        if unit != "B" and not unit.endswith("iB") and "." not in number and got == int(number) * 1024**power:
            return say("{unit} without an i is decimal: 1000, not 1024.", unit=unit)
        if "." in number:
            return say("The number may have a point: {number}. Cut nothing off and round nothing before you "
                       "multiply.", number=number)  # fmt: skip
        if unit == "B":
            return say("B is one byte: there is nothing to multiply by.")
        return say("{unit} is {base} to the power of {power} bytes.", unit=unit, power=power,
                   base=1024 if unit.endswith("iB") else 1000)  # fmt: skip


_24_GIB = 24 * 2**30


class NumGpuBlocks(Exercise):
    """num_gpu_blocks: how many blocks a GPU has room for."""

    name, points, minutes, section = "num_gpu_blocks", 4, 12, "PAV 3.1"
    defines = ("num_gpu_blocks",)
    ours = {"num_gpu_blocks": "kvlab.sizing:num_gpu_blocks"}
    part = {"sizing": "num_gpu_blocks"}
    hints = (
        say("Two steps. First the budget: what share of the whole GPU may the engine use? Then what is left of the "
            "budget for K/V, in whole blocks."),
        say("int(total_bytes * gpu_memory_utilization) is the budget. Take weights, activations and graphs from it, "
            "then divide with //. If the result is less than 1, raise ValueError. Look at the utilization before all "
            "that."),
        say("if not 0 < gpu_memory_utilization <= 1: raise ValueError(...). blocks = (budget - weight_bytes - "
            "activation_bytes - cudagraph_bytes) // block_bytes. if blocks < 1: raise ValueError(...)."),
    )  # fmt: skip
    examples = (
        Trace((), (("num_gpu_blocks", 1000, 1.0, 0, 0, 0, 100),), why=say("A share of 1.0 is allowed.")),
        Trace((), (("num_gpu_blocks", 1000, 0.5, 0, 0, 0, 100),)),
        Trace((), (("num_gpu_blocks", 1000, 1.0, 250, 0, 0, 100),)),
        Trace((), (("num_gpu_blocks", 1000, 0.5, 200, 0, 0, 100),)),
        Trace((), (("num_gpu_blocks", 1999, 0.5, 0, 0, 0, 100),)),
        Trace((), (("num_gpu_blocks", 1000, 1.0, 100, 200, 300, 100),)),
        Trace((), (("num_gpu_blocks", 1050, 0.5, 400, 20, 5, 100),), why=say("Room for exactly one block.")),
        Trace((), (("num_gpu_blocks", 1000, 0.5, 400, 20, 5, 100),), why=say("75 bytes are left; a block takes 100.")),
        Trace((), (("num_gpu_blocks", 1000, 0.9, 2000, 0, 0, 100),), why=say("The weights alone are too large.")),
        Trace((), (("num_gpu_blocks", 1000, 0.0, 0, 0, 0, 100),)),
        Trace((), (("num_gpu_blocks", 1000, 92, 0, 0, 0, 100),), why=say("Somebody wrote 92 and meant 92%.")),
        Trace((), (("num_gpu_blocks", 1000, 1.01, 0, 0, 0, 100),)),
        Trace((), (("num_gpu_blocks", 1000, -0.5, 0, 0, 0, 100),)),
        Trace((), (("num_gpu_blocks", _24_GIB, 0.92, 15_231_233_024, 3 * 2**29, 2**29, 917_504),)),
    )  # fmt: skip

    class Oracle:
        """Counts in fractions; where a float may fall either side of a whole byte, both answers are right."""

        def num_gpu_blocks(self, total, share, weights, activations, graphs, block):
            if not 0 < share <= 1:
                raise ValueError
            found = set()
            for budget in (int(total * share), int(Fraction(str(share)) * total), int(Fraction(share) * total)):
                found.add((budget - weights - activations - graphs) // block)
            if max(found) < 1:
                raise ValueError
            return OneOf(tuple(found)) if len(found) > 1 else found.pop()

    def traces(self):
        part = st.integers(0, 400)
        return calls("num_gpu_blocks", st.integers(500, 3000), st.sampled_from([0.5, 0.75, 0.25, 1.0, 0.875]), part,
                     part, part, st.integers(1, 200))  # fmt: skip

    def describe(self, op):
        _, total, share, weights, activations, graphs, block = op
        return (f"num_gpu_blocks(total_bytes={total}, gpu_memory_utilization={share}, weight_bytes={weights}, "
                f"activation_bytes={activations}, cudagraph_bytes={graphs}, block_bytes={block})")  # fmt: skip

    def explain(self, op, expected, got):
        _, total, share, weights, activations, graphs, block = op
        if expected == "ValueError":
            if not 0 < share <= 1:
                return say("gpu_memory_utilization is a share, more than 0 and at most 1. {share} is none: raise "
                           "ValueError.", share=share)  # fmt: skip
            if isinstance(got, str):
                return say("Not one block fits: raise ValueError, and no other exception.")
            return say("Not one block fits. Raise ValueError now; with {got} for an answer the engine would start, and "
                       "fail at its first request.", got=got)  # fmt: skip
        if got is None:
            return say("Return the number of blocks.")
        if isinstance(got, float):
            return say("Blocks are whole: return an int. // on a float gives a float.")
        if not isinstance(got, int) or not isinstance(expected, int):
            return None
        budget, taken = int(total * share), weights + activations + graphs
        if share < 1 and got == (total - taken) // block:
            return say("The engine may use a share of {share} of the GPU: a budget of {budget} bytes, not {total}.",
                       share=share, budget=budget, total=total)  # fmt: skip
        if share < 1 and got == int((total - taken) * share) // block:
            return say("The share is of the whole GPU: {budget} bytes. Weights and the rest come out of that budget.",
                       budget=budget)  # fmt: skip
        if taken and got == budget // block:
            return say("Weights, activations and graphs live in the budget too: {taken} bytes of it.", taken=taken)
        for left_out, name in ((weights, "weights"), (activations, "activations"), (graphs, "CUDA graphs")):
            if left_out and got == (budget - taken + left_out) // block:
                return say("The {name} are not taken off.", name=name)
        rounded_up = -(-Fraction(share) * total // 1)
        if budget < rounded_up and got == (rounded_up - taken) // block:
            return say("The budget is {exact} bytes, cut off to whole ones: {budget}. Neither rounded nor rounded up.",
                       exact=total * share, budget=budget)  # fmt: skip
        if got == expected - 1:
            return say("One block fewer than fits. (The engine takes its null block out of these, not you.)")
        if got == expected + 1:
            return say("One block more than fits: the last one is not whole.")
        return say("The budget is {budget} bytes, {taken} are taken, {left} are left, and a block is {block}.",
                   budget=budget, taken=taken, left=budget - taken, block=block)  # fmt: skip


class MaxConcurrency(Exercise):
    """How many requests fit, in whole blocks."""

    name, points, minutes, section = "max_concurrency", 2, 5, "PAV 3.1"
    defines = ("max_concurrency",)
    ours = {"max_concurrency": "kvlab.sizing:max_concurrency"}
    hints = (
        say("How many blocks does one request take? A block that is filled in part is taken all the same."),
        say("Round up: -(-a // b) is a / b rounded up, in whole numbers."),
        say("num_blocks // -(-tokens_per_request // block_size)"),
    )
    examples = (
        Trace((), (("max_concurrency", 10, 16, 16),)),
        Trace((), (("max_concurrency", 10, 16, 1),), why=say("A request of 1 token takes a block too, a whole one.")),
        Trace((), (("max_concurrency", 10, 16, 17),)),
        Trace((), (("max_concurrency", 11, 16, 32),)),
        Trace((), (("max_concurrency", 3, 16, 64),), why=say("Not one fits, and that is an answer: 0.")),
        Trace((), (("max_concurrency", 6898, 16, 4096),)),
    )  # fmt: skip

    class Oracle:
        """Lets one request after the other in."""

        def max_concurrency(self, num_blocks, block_size, tokens):
            inside, free = 0, num_blocks
            while True:
                for _ in range(0, tokens, block_size):
                    free -= 1
                if free < 0:
                    return inside
                inside += 1

    def traces(self):
        return calls("max_concurrency", st.integers(1, 60), st.integers(1, 8), st.integers(1, 40))

    def describe(self, op):
        return f"max_concurrency(num_blocks={op[1]}, block_size={op[2]}, tokens_per_request={op[3]})"

    def explain(self, op, expected, got):
        _, num_blocks, block_size, tokens = op
        if got is None:
            return say("Return the number of requests.")
        if isinstance(got, float):
            return say("Requests are whole: return an int.")
        each = -(-tokens // block_size)
        if got == num_blocks * block_size // tokens:
            return say("You have shared out all {all} slots. But two requests never share a block: with {tokens} "
                       "used, one takes {slots}.", all=num_blocks * block_size, tokens=tokens,
                       slots=each * block_size)  # fmt: skip
        if tokens % block_size == 0 and got == num_blocks // (each + 1):
            return say("{tokens} tokens fill their last block exactly. No block more.", tokens=tokens)
        return say("One request takes {each} of the {num_blocks} blocks.", each=each, num_blocks=num_blocks)


class CompareReservation(Exercise):
    """The second culprit: what a reservation wastes."""

    name, points, minutes, section = "compare_reservation", 3, 12, "L33 0.2"
    defines, driver = ("compare_reservation",), "Keeps"
    ours = {"compare_reservation": "kvlab.capacity:compare_reservation"}
    hints = (
        say("Three sums of slots: those that hold a token, those that a reservation sets aside, those in whole blocks. "
            "The three answers are ratios of them."),
        say("used = sum(lengths); reserved = len(lengths) * max_len; paged = sum of each length rounded up to a "
            "multiple of block_size. Idle is one minus used over held."),
        say("Return (1 - used / reserved, 1 - used / paged, reserved / paged). Sum first, divide once."),
    )  # fmt: skip
    examples = (
        Trace((), (("compare_reservation", [4], 16, 4),)),
        Trace((), (("compare_reservation", [3], 16, 4),)),
        Trace((), (("compare_reservation", [5], 16, 4),)),
        Trace((), (("compare_reservation", [3], 10, 4),), why=say("A reservation is max_len slots, not whole blocks.")),
        Trace((), (("compare_reservation", [8, 1], 16, 4),)),
        Trace((), (("compare_reservation", [16, 16], 16, 4),)),
        Trace((), (("compare_reservation", [150, 225, 300], 4096, 16),)),
    )  # fmt: skip

    class Oracle:
        """Slot by slot."""

        def compare_reservation(self, lengths, max_len, block_size):
            reserved = paged = used = 0
            for length in lengths:
                for slot in range(max_len + block_size):
                    reserved += slot < max_len
                    used += slot < length
                    paged += slot - slot % block_size < length
            return Approx([1 - used / reserved, 1 - used / paged, reserved / paged])

    def traces(self):
        lengths = st.lists(st.integers(1, 12), min_size=1, max_size=4)
        return calls("compare_reservation", lengths, st.integers(12, 20), st.sampled_from([1, 2, 4, 8]))

    def describe(self, op):
        return f"compare_reservation(lengths={op[1]}, max_len={op[2]}, block_size={op[3]})"

    def explain(self, op, expected, got):
        _, lengths, max_len, block_size = op
        if got == CHANGED:
            return say("Leave lengths as it was: others read it again. sorted(lengths) or list(lengths) is a copy.")
        if not isinstance(got, list) or len(got) != 3 or any(
            isinstance(part, bool) or not isinstance(part, int | float) for part in got
        ):  # fmt: skip
            return say("Return three numbers: idle with a reservation, idle with blocks, times as many requests.")
        right = [Approx(value).accepts(mine) for value, mine in zip(expected.value, got, strict=True)]
        used, reserved = sum(lengths), len(lengths) * max_len
        rounded = [-(-length // block_size) * block_size for length in lengths]
        paged = sum(rounded)
        if not right[0]:
            if Approx(got[0]).accepts(used / reserved):
                return say("That is the share in use. The first answer is the share that stays idle.")
            if Approx(100 * expected.value[0]).accepts(got[0]):
                return say("A share is between 0 and 1, not in per cent.")
            return say("A reservation sets {reserved} slots aside, and {used} hold a token.", reserved=reserved,
                       used=used)  # fmt: skip
        if not right[1]:
            if Approx(got[1]).accepts(used / paged):
                return say("That is the share in use. The second answer is the share that stays idle.")
            if Approx(got[1]).accepts(1 - paged / reserved):
                return say("The second answer is about the slots in the blocks that are held: how many of those are "
                           "idle?")  # fmt: skip
            one_more = sum(length // block_size + 1 for length in lengths) * block_size
            if one_more != paged and Approx(got[1]).accepts(1 - used / one_more):
                return say("A length that is a multiple of {block_size} fills its last block. No block more.",
                           block_size=block_size)  # fmt: skip
            if Approx(got[1]).accepts((paged - used) / reserved):
                return say("The empty slots are right. They are a share of the {paged} slots in blocks, not of the "
                           "reservation.", paged=paged)  # fmt: skip
            if got[1] == 0 and used != paged:
                return say("Blocks waste a little too: the empty slots of each request's last block.")
            return say("In whole blocks the requests hold {parts}: {paged} slots for {used} tokens. Memory is shared "
                       "by all, so add up first and divide once.", parts=" + ".join(map(str, rounded[:6])), paged=paged,
                       used=used)  # fmt: skip
        if Approx(got[2]).accepts(paged / reserved):
            return say("Turned round: the third answer is above 1 when blocks let more requests in.")
        if Approx(got[2]).accepts(reserved / used):
            return say("That would be tokens without any block. Requests hold whole blocks: {paged} slots.",
                       paged=paged)  # fmt: skip
        return say("The same memory, {reserved} slots or {paged}: how many times does the smaller one fit?",
                   reserved=reserved, paged=paged)  # fmt: skip


class QuantisedBytes(Exercise):
    """Four bits are not a quarter of sixteen."""

    name, points, minutes, section, stretch = "quantised_bytes", 2, 12, "PAV 3.1", True
    defines = ("quantised_bytes",)
    ours = {"quantised_bytes": "kvlab.capacity:quantised_bytes"}
    hints = (
        say("How many groups are there? The last one may be smaller, and needs its scale all the same."),
        say("Bits: one for each weight's `bits`, and `bits` for each group's zero point. Round them up to whole bytes "
            "together. Then rest_bytes for each group's scale."),
    )  # fmt: skip
    examples = (
        Trace((), (("quantised_bytes", 128, 8, 128, 2),)),
        Trace((), (("quantised_bytes", 128, 4, 128, 2),)),
        Trace((), (("quantised_bytes", 256, 4, 128, 2),)),
        Trace((), (("quantised_bytes", 129, 4, 128, 2),), why=say("129 weights are two groups.")),
        Trace((), (("quantised_bytes", 255, 8, 128, 4),)),
        Trace((), (("quantised_bytes", 64, 3, 32, 2),)),
        Trace((), (("quantised_bytes", 6_525_288_448,),),
              why=say("bits is 4, group_size 128 and rest_bytes 2 if they are not given.")),
    )  # fmt: skip

    class Oracle:
        """Group by group; the largest example by whole groups."""

        def quantised_bytes(self, num_weights, bits=4, group_size=128, rest_bytes=2):
            whole, left = divmod(num_weights, group_size)
            num_bits, scales = whole * (group_size * bits + bits), whole * rest_bytes
            if left:
                num_bits, scales = num_bits + left * bits + bits, scales + rest_bytes
            while num_bits % 8:
                num_bits += 1
            return num_bits // 8 + scales

    def traces(self):
        return calls("quantised_bytes", st.integers(1, 600), st.sampled_from([2, 3, 4, 8]),
                     st.sampled_from([32, 64, 128]), st.sampled_from([2, 4]))  # fmt: skip

    def explain(self, op, expected, got):
        num_weights, bits, group_size, rest = (*op[1:], *(4, 128, 2)[len(op) - 2 :])
        groups = -(-num_weights // group_size)
        if isinstance(got, float):
            return say("Bytes are whole: return an int.")
        if got == expected - 1 and (num_weights + groups) * bits % 8:
            return say("One byte short: round the bits up to whole bytes, after adding them all.")
        apart = {
            -(-num_weights * bits // 8) + -(-groups * bits // 8) + groups * rest,
            -(-num_weights * bits // 8) + groups * -(-bits // 8) + groups * rest,
            sum(-(-(min(group_size, num_weights - i) + 1) * bits // 8) + rest
                for i in range(0, num_weights, group_size)) if num_weights < 10_000 else None,
        }  # fmt: skip
        if got in apart:
            return say("Add the bits of all weights and all zero points, then round up, once.")
        if got == -(-(groups * group_size + groups) * bits // 8) + groups * rest:
            return say("The last group has fewer weights here. What it lacks takes no bits: {n} weights, not {all}.",
                       n=num_weights, all=groups * group_size)  # fmt: skip
        if bits != 4 and got == -(-(num_weights * bits + groups * 4) // 8) + groups * rest:
            return say("A zero point has as many bits as a weight: {bits} here.", bits=bits)
        if got == -(-num_weights * bits // 8):
            return say("Weights alone do not tell what they mean: each group has a scale and a zero point.")
        if got == -(-num_weights * bits // 8) + groups * rest:
            return say("Each group has a zero point too, of {bits} bits.", bits=bits)
        if got == -(-(num_weights + groups) * bits // 8):
            return say("Each group has a scale of {rest} bytes.", rest=rest)
        return say("Groups: {groups}. Numbers of {bits} bits, weights and zero points together: {all}. Scales of "
                   "{rest} bytes: {groups}.", groups=groups, all=num_weights + groups, bits=bits,
                   rest=rest)  # fmt: skip


class BreakEvenTokens(Exercise):
    """A state of constant size against K/V that grows."""

    name, points, minutes, section, stretch = "break_even_tokens", 2, 12, "L33 9.3", True
    defines = ("break_even_tokens",)
    ours = {"break_even_tokens": "kvlab.capacity:break_even_tokens"}
    hints = (
        say("K/V grows in steps: it jumps at the first token of each block. How many whole blocks are still no larger "
            "than the state?"),
        say("blocks = state_bytes // (bytes_per_token * block_size) blocks are not larger. The first token of the next "
            "block is the answer."),
    )  # fmt: skip
    examples = (
        Trace((), (("break_even_tokens", 100, 10, 1),)),
        Trace((), (("break_even_tokens", 105, 10, 1),)),
        Trace((), (("break_even_tokens", 100, 10, 4),)),
        Trace((), (("break_even_tokens", 80, 10, 4),), why=say("Two blocks take as much as the state: not more.")),
        Trace((), (("break_even_tokens", 5, 10, 4),)),
    )  # fmt: skip

    class Oracle:
        """One token after the other."""

        def break_even_tokens(self, state_bytes, bytes_per_token, block_size):
            tokens, held = 0, 0
            while held <= state_bytes:
                if tokens % block_size == 0:
                    held += block_size * bytes_per_token
                tokens += 1
            return tokens

    def traces(self):
        return calls("break_even_tokens", st.integers(0, 300), st.integers(1, 20), st.integers(1, 6))

    def describe(self, op):
        return f"break_even_tokens(state_bytes={op[1]}, bytes_per_token={op[2]}, block_size={op[3]})"

    def explain(self, op, expected, got):
        _, state, per_token, block_size = op
        if isinstance(got, float):
            return say("Tokens are whole: return an int.")
        if not isinstance(got, int):
            return say("Return the number of tokens.")

        def held(tokens):
            return -(-tokens // block_size) * block_size * per_token

        if held(got) <= state:
            return say("With {got} tokens the blocks take {held} bytes, and the state {state}: not more yet.", got=got,
                       held=held(got), state=state)  # fmt: skip
        return say("Token number {n} is enough: a block is taken whole at its first token, so {held} bytes are "
                   "held then.", n=expected, held=held(expected))  # fmt: skip
