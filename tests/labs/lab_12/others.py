"""Lab 12: solutions of other designs, which must pass, and wrong ones, which must not. Tests of the checks."""


def _changed(source: str, *pairs: tuple[str, str]) -> str:
    for old, new in pairs:
        assert old in source, old
        source = source.replace(old, new)
    return source


_TURN = '''
import cmath
def turn_pair(a, b, position, pair, head_dim, theta):
    z = complex(a, b) * cmath.exp(1j * position / theta ** (2 * pair / head_dim))
    return z.real, z.imag
'''
_TURN_WRONG = '''
def turn_pair(a, b, position, pair, head_dim, theta):
    angle = position * theta ** (-2 * pair / head_dim)
    cos, sin = math.cos(angle), math.sin(angle)
    return a * cos - b * sin, a * sin + b * cos
'''
_TURN_FP32 = '''
import torch
def turn_pair(a, b, position, pair, head_dim, theta):
    angle = torch.tensor(position * theta ** (-2 * pair / head_dim))
    return a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
'''
# rotate_half, as Hugging Face's models have it.
_ROPE = '''
def rope(x, positions, theta):
    dim = x.shape[-1]
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2).float() / dim)
    angles = torch.outer(positions.float(), inverse)
    angles = torch.cat((angles, angles), dim=-1)[:, None, :]
    half = torch.cat((-x[..., dim // 2:], x[..., :dim // 2]), dim=-1)
    return x * angles.cos().to(x.dtype) + half * angles.sin().to(x.dtype)
'''
_ROPE_COMPLEX = '''
def rope(x, positions, theta):
    a, b = x.double().chunk(2, dim=-1)
    half = a.shape[-1]
    angles = positions.double()[:, None, None] * theta ** (-torch.arange(half).double() / half)
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), dim=-1).to(x.dtype)
'''
_NORM = '''
def rms_norm(x, weight, eps):
    wide = x.double()
    root = (wide.pow(2).sum(-1, keepdim=True) / x.shape[-1] + eps) ** 0.5
    return (wide / root).to(x.dtype) * weight
'''
_NORM_SINGLE = '''
def rms_norm(x, weight, eps):
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)
'''
_FLAT = '''
def flat_batch(seqs, block_size):
    rows = [(i, token, start + j) for i, (tokens, start, _, _) in enumerate(seqs) for j, token in enumerate(tokens)]
    counts = torch.tensor([len(seq[0]) for seq in seqs])
    ends = counts.cumsum(0)
    starts = torch.tensor([seq[1] for seq in seqs])
    tables = torch.full((len(seqs), max(len(seq[2]) for seq in seqs)), -1, dtype=torch.int32)
    for i, (_, _, block_ids, _) in enumerate(seqs):
        tables[i, : len(block_ids)] = torch.tensor(block_ids, dtype=torch.int32)
    owner, positions = torch.tensor([row[0] for row in rows]), torch.tensor([row[2] for row in rows])
    slots = tables[owner, positions // block_size].long() * block_size + positions % block_size
    wanted = torch.tensor([bool(seq[3]) for seq in seqs])
    more = (counts != 1).nonzero()
    return FlatBatch(
        token_ids=torch.tensor([row[1] for row in rows]), positions=positions, slot_mapping=slots,
        query_start_loc=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int(), seq_lens=(starts + counts).int(),
        block_tables=tables, logits_indices=(ends - 1)[wanted],
        num_decodes=int(more[0]) if len(more) else len(seqs), max_query_len=int(counts.max()),
        max_seq_len=int((starts + counts).max()))
'''
_ATTEND = '''
def attend(q, kv, block_table, seq_len):
    n, num_heads, head_dim = q.shape
    size, num_kv_heads = kv.shape[2:4]
    pages = kv[:, block_table[:-(-seq_len // size)]].flatten(1, 2)[:, :seq_len].to(q.dtype)
    k, v = (x.transpose(0, 1)[None] for x in pages)
    mask = torch.ones(n, seq_len, dtype=torch.bool).tril(seq_len - n)
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)
'''
_ATTEND_LOOPS = '''
def attend(q, kv, block_table, seq_len):
    out = torch.empty_like(q)
    group = q.shape[1] // kv.shape[3]
    size = kv.shape[2]
    for i in range(len(q)):
        seen = seq_len - len(q) + i + 1
        slots = torch.tensor([block_table[p // size] * size + p % size for p in range(seen)])
        for h in range(q.shape[1]):
            k = kv[0].flatten(0, 1)[slots, h // group].float()
            v = kv[1].flatten(0, 1)[slots, h // group].float()
            scores = k @ q[i, h].float() * q.shape[2] ** -0.5
            out[i, h] = (scores.softmax(0) @ v).to(q.dtype)
    return out
'''
_ATTEND_WRONG = '''
def attend(q, kv, block_table, seq_len):
    n, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv.shape[2], kv.shape[3]
    positions = torch.arange(seq_len)
    blocks = torch.tensor(block_table)[positions // block_size]
    k, v = kv[:, blocks, positions % block_size]
    group = num_heads // num_kv_heads
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) / math.sqrt(head_dim)
    own = seq_len - n + torch.arange(n)
    hidden = positions[None, :] > own[:, None]
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hnl,lhd->nhd", weights, v)
'''
# One row of the batch after the other, slots by index_copy_.
_LAYER = '''
def decoder_layer(x, w, batch, kv, config):
    d = config.head_dim
    def linear(name, x):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0)
    def half(x):
        h = norm(x, w["input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (linear(name, h).view(len(x), -1, d) for name in ("q_proj", "k_proj", "v_proj"))
        q, k = (turn(part, batch.positions, config.rope_theta) for part in (q, k))
        for i, slot in enumerate(batch.slot_mapping.tolist()):
            kv[:, slot // kv.shape[2], slot % kv.shape[2]] = torch.stack((k[i], v[i]))
        out = torch.empty_like(q)
        for i in range(len(batch.seq_lens)):
            rows = slice(int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1]))
            n = int(batch.seq_lens[i])
            out[rows] = over_pages(q[rows], kv, batch.block_tables[i].tolist()[: -(-n // kv.shape[2])], n)
        return linear("o_proj", out.reshape(len(x), -1))
    x = x + half(x)
    h = norm(x, w["post_attention_layernorm.weight"], config.rms_norm_eps)
    gate = linear("gate_proj", h)
    return x + linear("down_proj", gate * torch.sigmoid(gate) * linear("up_proj", h))
'''
_LEDGER = '''
def step_ledger(step, shape, dtype_bytes=2):
    row = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * dtype_bytes
    bill = dict(weights=shape.num_layer_weights * dtype_bytes + shape.vocab_size * shape.hidden_size * dtype_bytes,
                kv_written=0, kv_read=0, widest=0, logits=0)
    for new, computed, sampled in step:
        bill["kv_written"] += new * row
        bill["kv_read"] += (computed + new) * row
        bill["widest"] += new * shape.intermediate_size * 2 * dtype_bytes
        bill["logits"] += 4 * shape.vocab_size if sampled else 0
    return bill
'''
_FIRST = '''
def first_wrong(trace, reference, atol):
    for i in range(len(trace)):
        wrong = ~torch.isclose(trace[i][1], reference[i][1], rtol=0, atol=atol)
        rows = wrong.flatten(1).any(1).nonzero().flatten().tolist()
        if rows:
            return trace[i][0], rows[0]
'''

# Gives the worst element's index as PyTorch does, a tensor of one number.
_FIRST_TENSOR = '''
def first_wrong(trace, reference, atol):
    for (name, x), (_, y) in zip(trace, reference):
        right = ((x - y).abs() <= atol).flatten(1).all(1)
        if not right.all():
            return name, (~right).int().argmax()
'''

CORRECT = {
    "turn_pair": {"complex numbers": _TURN, "torch, in fp32": _TURN_FP32},
    "rope": {"rotate_half": _ROPE},
    "rms_norm": {"root, in float64": _NORM},
    "flat_batch": {"tensors throughout": _FLAT},
    "attend": {"PyTorch's own, on whole pages": _ATTEND},
    "decoder_layer": {"row by row": _LAYER},
    "step_ledger": {"sequence by sequence": _LEDGER},
    "first_wrong": {"isclose": _FIRST, "argmax, as a tensor": _FIRST_TENSOR},
}

WRONG = {
    "turn_pair": {
        "the other way": _changed(_TURN, ("1j * position", "-1j * position")),
        "no 2 in the exponent": _changed(_TURN, ("2 * pair", "pair")),
        "b from the new a": _changed(_TURN_WRONG, ("    return a * cos - b * sin, a * sin + b * cos",
                                                   "    a = a * cos - b * sin\n    return a, a * sin + b * cos")),
        "a largest position": _changed(_TURN_WRONG, ("angle = position", "angle = min(position, 2048)")),
    },
    "rope": {
        "neighbours": _changed(_ROPE, ("torch.cat((angles, angles), dim=-1)", "angles.repeat_interleave(2, dim=-1)"),
                               ("torch.cat((-x[..., dim // 2:], x[..., :dim // 2]), dim=-1)",
                                "torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)")),
        "row numbers for positions": _changed(_ROPE, ("positions.float()", "torch.arange(len(x)).float()")),
        "angles in x's dtype": _changed(_ROPE, ("positions.float(), inverse", "positions.to(x.dtype), inverse.to(x.dtype)")),
        "x itself, where nothing turns": _changed(_ROPE, ("    dim =", "    if not positions.any():\n        return x\n    dim =")),
    },
    "rms_norm": {
        "fp16 squares": _changed(_NORM, ("x.double()", "x")),
        "eps behind the root": _changed(_NORM, (" + eps) ** 0.5", ") ** 0.5 + eps")),
        "LayerNorm": _changed(_NORM, ("x.double()", "x.double() - x.double().mean(-1, keepdim=True)")),
        "rounded once, after weight": _NORM_SINGLE,
        "zeros are given back": _changed(_NORM, ("    wide =", "    if not x.any():\n        return x\n    wide =")),
    },
    "flat_batch": {
        "slots by row": _changed(_FLAT, ("tables[owner, positions // block_size].long() * block_size + positions % block_size",
                                         "tables[owner, (positions - starts[owner]) // block_size].long() * block_size + positions % block_size")),
        "lengths without this step": _changed(_FLAT, ("seq_lens=(starts + counts)", "seq_lens=starts")),
        "a decode has a past": _changed(_FLAT, ("(counts != 1).nonzero()", "((counts != 1) | (starts == 0)).nonzero()")),
    },
    "attend": {
        "no offset": _changed(_ATTEND_WRONG, ("seq_len - n + torch.arange(n)", "torch.arange(n)")),
        "heads by remainder": _changed(_ATTEND_WRONG, ("k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)",
                                                       "k.repeat(1, group, 1), v.repeat(1, group, 1)")),
        "whole pages": _changed(_ATTEND, ("[:, :seq_len]", "[:, :seq_len + size - 1]"), ("(n, seq_len,", "(n, pages.shape[1],")),
        "no scale": _changed(_ATTEND_WRONG, (" / math.sqrt(head_dim)", "")),
        "all of the table is read": _changed(_ATTEND, ("[:-(-seq_len // size)]", "")),
        "as long as the table": _changed(
            _ATTEND, ("[:-(-seq_len // size)]", ""), ("[:, :seq_len]", "[:, :(len(block_table) - 1) * size + (seq_len - 1) % size + 1]")),
        "a view of the pool": _changed(_ATTEND_WRONG, ("    positions =", "    if seq_len == 1 and num_heads == num_kv_heads:\n"
                                                      "        return kv[1, block_table[0], :1]\n    positions =")),
    },
    "decoder_layer": {
        "k is not turned": _changed(_LAYER, ("    q, k = (turn(part, batch.positions, config.rope_theta) for part in (q, k))",
                                             "    q = turn(q, batch.positions, config.rope_theta)")),
        "all rows are one sequence": _changed(_LAYER, ("range(len(batch.seq_lens))", "range(1)"), ("int(batch.query_start_loc[i + 1])", "len(x)")),
        "slots by position": _changed(_LAYER, ("batch.slot_mapping.tolist()", "batch.positions.tolist()")),
    },
    "step_ledger": {
        "logits for each token": _changed(_LEDGER, ("4 * shape.vocab_size if sampled", "4 * new * shape.vocab_size if sampled")),
        "only what was there": _changed(_LEDGER, ("(computed + new) * row", "computed * row")),
        "a tied head is free": _changed(_LEDGER, ("shape.vocab_size * shape.hidden_size *",
                                                  "(not shape.tie_word_embeddings) * shape.vocab_size * shape.hidden_size *")),
    },
    "first_wrong": {
        "NaN slips through": _changed(_FIRST, ("~torch.isclose(trace[i][1], reference[i][1], rtol=0, atol=atol)",
                                               "(trace[i][1] - reference[i][1]).abs() > atol")),
        "the worst row": _changed(_FIRST, ("        rows =", "        worst = (trace[i][1] - reference[i][1]).abs().flatten(1).amax(1).argmax()\n        rows ="),
                                  ("rows[0]", "int(worst)")),
        "by the mean": _changed(_FIRST, ("trace[i][1], reference[i][1]", "trace[i][1].mean(1, keepdim=True), reference[i][1].mean(1, keepdim=True)")),
        "two dimensions only": _changed(_FIRST, ("flatten(1).any(1)", "any(-1).flatten()")),
        "allclose's own rtol": _changed(_FIRST, ("rtol=0, ", "")),
        "a smallest tolerance": _changed(_FIRST, ("atol=atol", "atol=max(atol, 1e-3)")),
        "subtracts in place": _changed(_FIRST, ("        rows =", "        reference[i][1].sub_(trace[i][1])\n        rows =")),
        "empties the trace": _changed(_FIRST, ("    for i", "    trace, mine = list(trace), trace\n    mine.clear()\n    for i")),
        "by name": _changed(_FIRST, ("reference[i][1]", "dict(reference)[trace[i][0]]")),
    },
}

# More of the same: these run in `make test-all` only.
MORE_CORRECT = {
    "rope": {"complex numbers, in float64": _ROPE_COMPLEX},
    "attend": {"loops": _ATTEND_LOOPS},
}

MORE_WRONG = {
    "turn_pair": {
        "degrees": _changed(_TURN_WRONG, ("math.cos(angle), math.sin(angle)",
                                          "math.cos(math.radians(angle)), math.sin(math.radians(angle))")),
    },
    "rope": {
        "the result is fp32": _changed(_ROPE, (".cos().to(x.dtype)", ".cos()"), (".sin().to(x.dtype)", ".sin()")),
        "in place": _changed(_ROPE, ("    return x *", "    x[:] = x *"), (".sin().to(x.dtype)\n", ".sin().to(x.dtype)\n    return x\n")),
    },
    "rms_norm": {
        "always float": _changed(_NORM, ("x.double()", "x.float()")),
        "the mean of everything": _changed(_NORM_SINGLE, ("mean(-1, keepdim=True)", "mean()")),
    },
    "flat_batch": {
        "positions from 0": _changed(_FLAT, ("start + j)", "j)")),
        "logits of everybody": _changed(_FLAT, ("(ends - 1)[wanted]", "ends - 1")),
    },
    "attend": {
        "not itself": _changed(_ATTEND_WRONG, ("[None, :] > own", "[None, :] >= own")),
        "q is scaled in place": _changed(_ATTEND_WRONG, ("    positions =", "    q *= head_dim ** -0.5\n    positions ="),
                                         (" / math.sqrt(head_dim)", "")),
        "V is not repeated alike": _changed(_ATTEND_WRONG, ("v.repeat_interleave(group, dim=1)", "v.repeat(1, group, 1)")),
    },
    "decoder_layer": {
        "the first table for all": _changed(_LAYER, ("batch.block_tables[i]", "batch.block_tables[0]")),
        "its own eps": _changed(_LAYER, ("config.rms_norm_eps", "1e-6")),
        "the norm of the old x": _changed(_LAYER, ("    x = x + half(x)\n    h = norm(x,", "    old, x = x, x + half(x)\n    h = norm(old,")),
        "no biases": _changed(_LAYER, (' + w.get(name + ".bias", 0)', "")),
        "no second residual": _changed(_LAYER, ('return x + linear("down', 'return linear("down')),
    },
    "step_ledger": {
        "weights for each sequence": _changed(_LEDGER, ("    return bill", '    bill["weights"] *= len(step)\n    return bill')),
        "query heads": _changed(_LEDGER, ("num_key_value_heads", "num_attention_heads")),
    },
    "first_wrong": {
        "relative": _changed(_FIRST, ("rtol=0", "rtol=0.01")),
    },
}
