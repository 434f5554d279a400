"""The limits that a step is held against: bytes that must move, operations that must be done. Plain Python."""

from kvlab.sizing import ModelShape


def head_and_layer_bytes(shape: ModelShape, weight_bytes: int, dtype_bytes: int) -> int:
    """Bytes of the weights that every step reads: all but the embedding, of which it looks up a few rows.

    weight_bytes: all of the model's. A tied head is the embedding, and is read whole.
    """
    return weight_bytes - (0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size * dtype_bytes)


def decode_bytes(weights_read: int, kv_bytes_per_token: int, batch: int, mean_context: float) -> float:
    """Bytes that a step of `batch` decodes must move at least: the weights once, each sequence's K and V once.

    mean_context: tokens of a sequence, the new one included. Activations are left out: a few MB.
    """
    return weights_read + batch * mean_context * kv_bytes_per_token


def prefill_flops(shape: ModelShape, num_tokens: int) -> float:
    """Operations of one prompt of num_tokens: 2 for each weight and token, 4 x heads x head_dim for each pair that
    attends, and one row through the head."""
    head = shape.vocab_size * shape.hidden_size
    layers = shape.num_parameters - head * (1 if shape.tie_word_embeddings else 2)
    pairs = num_tokens * (num_tokens + 1) / 2
    attention = 4 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * pairs
    return 2 * layers * num_tokens + attention + 2 * head
