"""Train the small model: `python -m kvlab.tiny.train --out DIR`. Seeded, one CPU thread, well under an hour.

    glossary.jsonl --build_tokenizer--> byte-level BPE    --+
                   --conversation-----> (ids, weights)    --+--> train --> round to bf16 --> save --> check

The model is meant to memorise: there is no held-out text, and a loss near zero is the goal. What must
generalise a little is the way of asking (the bare term, lower case, a second turn, no system prompt), so only
that is varied.
"""

import argparse
import math
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from kvlab.tiny import SYSTEM_PROMPT, load_glossary

END_OF_TEXT, IM_START, IM_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 2048
MAX_POSITIONS = 2048
BATCH = 20            # conversations in a step
PEAK_LR = 2e-3
WARMUP_STEPS = 100
PROMPT_WEIGHT = 0.1   # loss weight of a question's tokens; an answer's tokens weigh 1

CHAT_TEMPLATE = (
    "{%- if not messages or messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\n" + SYSTEM_PROMPT + "<|im_end|>\n' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def build_tokenizer(entries):
    """Byte-level BPE (字节对编码) of VOCAB_SIZE tokens from the glossary, cut into words as Qwen2 does.

    Loaders give every checkpoint of model_type qwen2 Qwen2's own normaliser (NFC) and word pattern (each
    digit alone), whatever tokenizer.json says. Trained on other pieces, it would be asked in another tongue.
    """
    qwen2 = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = qwen2.normalizer
    tokenizer.pre_tokenizer = qwen2.pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [SYSTEM_PROMPT, "system", "user", "assistant"] * 20  # frequent, so that each word is one token
    for entry in entries:
        corpus += [entry["question"], entry["question"].lower(), entry["answer"], entry["term"], entry["zh"]]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=list(SPECIAL_TOKENS), show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(corpus, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the glossary gives only {tokenizer.get_vocab_size()} tokens of {VOCAB_SIZE}; "
                         "lower VOCAB_SIZE or write more entries")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=IM_END, pad_token=END_OF_TEXT, chat_template=CHAT_TEMPLATE,
        padding_side="left", model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False)


def build_model(tokenizer):
    """A fair Qwen2, about 2M parameters: q, k, v biases, 6 query and 2 KV heads (GQA), tied embeddings."""
    return Qwen2ForCausalLM(Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))


def ask(entry, rng):
    """The question as a reader may type it: as written, in lower case without its mark, or the bare term."""
    question = entry["question"]
    return rng.choices([question, question.rstrip("?？").lower(), entry["term"]], weights=[70, 15, 15])[0]


def conversation(entry, other, rng):
    """One text as [(piece, loss weight)]: plain or ChatML, with or without system prompt and first turn."""
    kind = rng.choices(["chat", "no system", "second turn", "plain"], weights=[50, 15, 25, 10])[0]
    if kind == "plain":
        return [(ask(entry, rng) + "\n", PROMPT_WEIGHT), (entry["answer"] + END_OF_TEXT, 1.0)]
    pieces = [] if kind == "no system" else [(f"{IM_START}system\n{SYSTEM_PROMPT}{IM_END}\n", 0.0)]
    for turn in [other, entry] if kind == "second turn" else [entry]:
        pieces += [(f"{IM_START}user\n", 0.0), (ask(turn, rng), PROMPT_WEIGHT),
                   (f"{IM_END}\n{IM_START}assistant\n", 0.0), (turn["answer"] + IM_END, 1.0), ("\n", 0.0)]
    return pieces


def epoch_batches(entries, tokenizer, rng):
    """Yield (ids [b, t] int64, weights [b, t] float32), right-padded; an epoch answers every entry once."""
    rows = []
    for entry in entries:
        ids, weights = [], []
        for piece, weight in conversation(entry, rng.choice(entries), rng):
            tokens = tokenizer.encode(piece)
            ids += tokens
            weights += [weight] * len(tokens)
        rows.append((ids, weights))
    rows.sort(key=lambda row: len(row[0]))  # neighbours of like length, so that little of a batch is padding
    batches = [rows[i:i + BATCH] for i in range(0, len(rows), BATCH)]
    rng.shuffle(batches)
    for batch in batches:
        width = max(len(ids) for ids, _ in batch)
        yield (torch.tensor([ids + [tokenizer.pad_token_id] * (width - len(ids)) for ids, _ in batch]),
               torch.tensor([weights + [0.0] * (width - len(weights)) for _, weights in batch]))


def answer_loss(model, ids, weights):
    """Weighted mean cross-entropy, nats. No mask: causal attention never looks at padding on the right."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    targets, weights = ids[:, 1:], weights[:, 1:]
    kept = weights > 0  # the head runs only where there is a loss
    losses = F.cross_entropy(model.lm_head(hidden[kept]), targets[kept], reduction="none")
    return (losses * weights[kept]).sum() / weights.sum()


def train(model, tokenizer, entries, epochs, rng):
    """Train in place with AdamW, a linear warm-up and a cosine to zero; print about 20 lines of progress."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.01)
    steps = epochs * math.ceil(len(entries) / BATCH)
    warmup = min(WARMUP_STEPS, steps // 10 + 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps))))
    started = time.monotonic()
    model.train()
    for epoch in range(1, epochs + 1):
        losses = []
        for ids, weights in epoch_batches(entries, tokenizer, rng):
            loss = answer_loss(model, ids, weights)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        if epoch % max(1, epochs // 20) == 0 or epoch == epochs:
            print(f"epoch {epoch:4d}/{epochs}  loss {sum(losses) / len(losses):.4f}  "
                  f"{(time.monotonic() - started) / 60:.1f} min", flush=True)


@torch.inference_mode()
def recall(model, tokenizer, entries):
    """Greedy answers against the glossary: (number word for word right, [(term, wrong answer)], margin).

    The margin is the smallest gap between the two largest logits over all tokens of all right answers. Where
    it is well above rounding error, batching, paging and data types cannot change the text.
    """
    model.eval()
    right, wrong, margin = 0, [], math.inf
    for entry in entries:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": entry["question"]}], add_generation_prompt=True, return_tensors="pt")
        output = model.generate(**prompt, do_sample=False, max_new_tokens=96, output_logits=True,
                                return_dict_in_generate=True)
        text = tokenizer.decode(output.sequences[0, prompt["input_ids"].shape[1]:], skip_special_tokens=True)
        if text != entry["answer"]:
            wrong.append((entry["term"], text))
            continue
        right += 1
        top = torch.cat(output.logits).topk(2).values
        margin = min(margin, (top[:, 0] - top[:, 1]).min().item())
    return right, wrong, margin


def check(folder):
    """Load a saved folder in float32; print its size, its recall and up to ten wrong answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    entries = load_glossary()
    right, wrong, margin = recall(model, tokenizer, entries)
    for term, text in wrong[:10]:
        print(f"wrong  {term}: {text!r}")
    print(f"{model.num_parameters():,} parameters, {(folder / 'model.safetensors').stat().st_size:,} bytes; "
          f"recall {right} of {len(entries)}, smallest margin {margin:.2f}")


def main():
    parser = argparse.ArgumentParser(description="Train kvlab's small model, or check one that is there.")
    parser.add_argument("--out", type=Path, help="folder to write the model to")
    parser.add_argument("--check", type=Path, help="folder whose recall to measure; trains nothing")
    parser.add_argument("--epochs", type=int, default=300, help="passes over the glossary")
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; the number changes the rounding")
    args = parser.parse_args()
    if (args.out is None) == (args.check is None):
        parser.error("give either --out DIR to train or --check DIR to measure")
    if args.epochs < 1 or args.threads < 1:
        parser.error(f"--epochs and --threads must be at least 1, got {args.epochs} and {args.threads}")
    torch.set_num_threads(args.threads)
    if args.check:
        check(args.check)
        return
    torch.manual_seed(args.seed)
    torch.use_deterministic_algorithms(True)
    entries = load_glossary()
    tokenizer = build_tokenizer(entries)
    model = build_model(tokenizer)
    train(model, tokenizer, entries, args.epochs, random.Random(args.seed))
    model.to(torch.bfloat16)  # what is shipped is what is checked: reloaded, after rounding
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([IM_END, END_OF_TEXT])
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    check(args.out)


if __name__ == "__main__":
    main()
