"""The data plane (数据面): the model's arithmetic over a paged KV cache, in plain torch.

    folder --loader--> weights + ModelConfig --decoder--> CausalLM.forward(batch, kv_cache) -> logits

    config.py     ModelConfig: the numbers of a checkpoint; no torch
    hub.py        a name -> a folder, or its config.json alone; no torch
    known.py      configurations of well-known models by name; no torch
    loader.py     a folder -> checked weights -> a model
    random_weights.py  a folder of random weights in a known model's shape
    layers.py     RMSNorm, RoPE, SwiGLU, Linear
    batch.py      FlatBatch: every token of a step in one line, without padding
    kv_cache.py   KVCache: the block pool's memory; copies and swaps blocks
    attention.py  backends that write K and V and read them through block tables
    backends.py   which of them by name, or the quickest
    ops.py        what stands between the matrix products, one object that can be replaced
    plain.py      RoPE and attention over pages for those who have a few tokens and no engine
    decoder.py    CausalLM: the forward pass

Nothing is imported here, so that what needs no torch works where there is none.
"""
