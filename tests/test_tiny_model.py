"""The model we ship: small, loads in transformers, byte-exact tokenizer, word for word in its answers."""

import json
import random
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvlab.tiny
from kvlab.tiny import MODEL_DIR, SYSTEM_PROMPT, load_glossary

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MAX_NEW_TOKENS = 96


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODEL_DIR, local_files_only=True)


@pytest.fixture(scope="module")
def model():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers.AutoModelForCausalLM.from_pretrained(
        MODEL_DIR, dtype=torch.float32, local_files_only=True).eval()
    torch.set_num_threads(before)


def answers(model, tokenizer, conversations, batch=35):
    """Greedy replies to lists of messages, in left-padded batches."""
    replies = []
    for i in range(0, len(conversations), batch):
        prompts = tokenizer.apply_chat_template(
            conversations[i:i + batch], add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True)
        with torch.inference_mode():
            output = model.generate(**prompts, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        replies += tokenizer.batch_decode(output[:, prompts["input_ids"].shape[1]:], skip_special_tokens=True)
    return replies


def share_right(replies, entries):
    return sum(reply == entry["answer"] for reply, entry in zip(replies, entries, strict=True)) / len(entries)


# ---- the text

def test_package_is_plain():
    """kvlab.tiny must import where torch and transformers do not exist."""
    code = ("import sys; sys.modules.update(torch=None, transformers=None, tokenizers=None); "
            "import kvlab.tiny as t; assert t.load_glossary() and t.MODEL_DIR.is_dir()")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=MODEL_DIR.parents[2])


def test_glossary_is_well_formed():
    entries = load_glossary()
    assert 100 <= len(entries) <= 140
    for key in ("term", "zh", "question", "answer"):
        values = [entry[key] for entry in entries]
        assert len(set(values)) == len(values), f"{key} is not unique"
    # bare terms and lower-case questions are trained too, so they must be unambiguous
    for key in ("term", "question"):
        assert len({entry[key].lower() for entry in entries}) == len(entries)
    chinese = [entry for entry in entries if any("\u4e00" <= c <= "\u9fff" for c in entry["question"])]
    assert 10 <= len(chinese) <= 15
    for entry in entries:
        assert all(value == value.strip() and "\n" not in value for value in entry.values())
        assert entry["zh"] in entry["answer"], f"{entry['term']}: the answer lacks {entry['zh']}"
        assert entry["question"][-1] in "?？" and entry["answer"][-1] in ".。"
        if entry in chinese:
            assert 25 <= len(entry["answer"]) <= 60
        else:
            assert 15 <= len(entry["answer"].split()) <= 45


@pytest.mark.parametrize("line", [
    "not JSON",
    '["a", "list"]',
    '{"term": "x"}',
    '{"term": "x", "zh": "x", "section": "x", "question": "", "answer": "x"}',
    '{"term": "x", "zh": "x", "section": "x", "question": 5, "answer": "x"}',
])
def test_broken_glossary_line_is_named(tmp_path, monkeypatch, line):
    path = tmp_path / "glossary.jsonl"
    path.write_text(json.dumps(load_glossary()[0], ensure_ascii=False) + "\n" + line + "\n", encoding="utf-8")
    monkeypatch.setattr(kvlab.tiny, "GLOSSARY_PATH", path)
    with pytest.raises(ValueError, match="glossary.jsonl:2: .*keys term, zh, section, question, answer"):
        load_glossary()


# ---- the model's size and shape

def test_size_limits(model):
    assert model.num_parameters() <= 4_000_000
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 10_000_000


def test_is_a_fair_qwen2_in_bf16(model):
    config = model.config
    assert type(model).__name__ == "Qwen2ForCausalLM" and config.tie_word_embeddings
    assert 1 < config.num_key_value_heads < config.num_attention_heads  # neither multi-head nor multi-query
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias is not None and attention.o_proj.bias is None
    stored = transformers.AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype="auto", local_files_only=True)
    assert {parameter.dtype for parameter in stored.parameters()} == {torch.bfloat16}
    assert all(parameter.isfinite().all() for parameter in stored.parameters())


def test_glossary_states_the_models_own_kv_bytes(model):
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    in_bf16 = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 2
    answer = next(entry["answer"] for entry in load_glossary() if entry["term"] == "KV of this model")
    assert f"= {in_bf16:,} bytes" in answer


# ---- the tokenizer and the chat template

def test_special_tokens(model, tokenizer):
    im_end, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert len(tokenizer) == model.config.vocab_size  # no id that the tokenizer cannot name
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (im_end, end_of_text)
    assert tokenizer.bos_token_id is None
    assert model.generation_config.eos_token_id == [im_end, end_of_text]
    assert tokenizer.decode([im_end], skip_special_tokens=True) == ""


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_round_trips(tokenizer, text):
    """Up to Unicode's canonical composition, which every Qwen2 tokenizer applies first."""
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("text", [
    "分页注意力", "龘靐齉，KV 缓存！", "🧑‍🚀 pages 📄📄", "e\u0301 is not \u00e9", " a  b\t\n\nc ",
])
def test_chosen_texts_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_every_loader_cuts_text_as_in_training(tokenizer):
    """Loaders replace a qwen2 checkpoint's normaliser and word pattern: they must be the same beforehand."""
    stored = transformers.PreTrainedTokenizerFast(tokenizer_file=str(MODEL_DIR / "tokenizer.json"))
    for entry in load_glossary():
        for text in (entry["question"], entry["answer"]):
            assert tokenizer.encode(text) == stored.encode(text)


def test_some_characters_span_tokens(tokenizer):
    """The streaming detokenizer needs real work: answers in which single tokens are not valid UTF-8."""
    split = [entry for entry in load_glossary()
             if any("\ufffd" in tokenizer.decode([i]) for i in tokenizer.encode(entry["answer"]))]
    assert len(split) >= 10


def render(tokenizer, messages, **kwargs):
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def test_chat_template_is_chatml(tokenizer):
    user, assistant = {"role": "user", "content": "问？"}, {"role": "assistant", "content": "Answer."}
    head = f"<|im_start|>system\n{SYSTEM_PROMPT}<|im_end|>\n"
    asked = "<|im_start|>user\n问？<|im_end|>\n"
    assert render(tokenizer, [user]) == head + asked
    assert render(tokenizer, [user], add_generation_prompt=True) == head + asked + "<|im_start|>assistant\n"
    assert render(tokenizer, [user, assistant, user], add_generation_prompt=True) == (
        head + asked + "<|im_start|>assistant\nAnswer.<|im_end|>\n" + asked + "<|im_start|>assistant\n")
    own = {"role": "system", "content": "Be brief."}
    assert render(tokenizer, [own, user]) == "<|im_start|>system\nBe brief.<|im_end|>\n" + asked


def test_chats_share_four_full_blocks(tokenizer):
    first, second = (tokenizer.apply_chat_template([{"role": "user", "content": text}], return_dict=False)
                     for text in ("What is a slot?", "你是谁？"))
    shared = next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    assert shared // 16 >= 4


# ---- what it has memorised

def test_greedy_recall(model, tokenizer):
    entries = load_glossary()
    conversations = [[{"role": "user", "content": entry["question"]}] for entry in entries]
    replies = answers(model, tokenizer, conversations)
    assert share_right(replies, entries) >= 0.9


def test_second_turn_is_answered_too(model, tokenizer):
    entries = random.Random(0).sample(load_glossary(), 20)
    conversations = [[{"role": "user", "content": first["question"]},
                      {"role": "assistant", "content": first["answer"]},
                      {"role": "user", "content": second["question"]}]
                     for first, second in zip(entries, entries[1:] + entries[:1], strict=True)]
    replies = answers(model, tokenizer, conversations)
    assert share_right(replies, entries[1:] + entries[:1]) >= 0.9


# ---- the training script

def test_padding_changes_no_loss(model, tokenizer):
    """The batch's loss is the weighted mean over its rows, each alone: padding on the right leaks nothing."""
    from kvlab.tiny.train import answer_loss, epoch_batches
    ids, weights = next(epoch_batches(load_glossary()[:8], tokenizer, random.Random(1)))
    assert (ids[:, -1] == tokenizer.pad_token_id).any()  # there is padding to ignore
    total = 0.0
    with torch.inference_mode():
        for row_ids, row_weights in zip(ids, weights, strict=True):
            length = int((row_weights > 0).nonzero().max()) + 1
            logits = model(input_ids=row_ids[None, :length]).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, row_ids[1:length], reduction="none")
            total += (losses * row_weights[1:length]).sum()
        batch_loss = answer_loss(model, ids, weights)
    assert batch_loss > 0
    torch.testing.assert_close(batch_loss, total / weights[:, 1:].sum(), rtol=1e-3, atol=1e-5)


def test_answers_carry_the_loss(tokenizer):
    """The answer and its end weigh 1, the question little, markers and system prompt nothing."""
    from kvlab.tiny.train import IM_END, PROMPT_WEIGHT, conversation
    first, second = load_glossary()[:2]
    kinds = set()
    for seed in range(40):
        pieces = conversation(first, second, random.Random(seed))
        kinds.add((pieces[0][0].startswith("<|im_start|>system"), len(pieces)))
        heavy = [piece for piece, weight in pieces if weight == 1]
        assert heavy[-1] in (first["answer"] + IM_END, first["answer"] + "<|endoftext|>")
        assert {weight for _, weight in pieces} <= {0.0, PROMPT_WEIGHT, 1.0}
        assert all(weight == 0 for piece, weight in pieces if "<|im_start|>" in piece)
    assert len(kinds) == 4  # chat, no system prompt, second turn, plain text


@pytest.mark.parametrize(("arguments", "message"), [
    ([], "give either --out DIR"),
    (["--out", "a", "--check", "b"], "give either --out DIR"),
    (["--out", "a", "--epochs", "0"], "got 0 and 1"),
])
def test_train_refuses_bad_arguments(monkeypatch, capsys, arguments, message):
    from kvlab.tiny import train
    monkeypatch.setattr(sys, "argv", ["train", *arguments])
    with pytest.raises(SystemExit) as stop:
        train.main()
    assert stop.value.code == 2 and message in capsys.readouterr().err
