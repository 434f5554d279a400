"""The small model that ships with kvlab: where it lies and the text it has memorised.

    glossary.jsonl --train.py--> model/    a Qwen2 of about 2M parameters, for kvlab and transformers alike

Plain Python: this module imports neither torch nor transformers, so any layer may ask where the model is.
"""

import json
from pathlib import Path

MODEL_DIR = Path(__file__).parent / "model"
GLOSSARY_PATH = Path(__file__).parent / "glossary.jsonl"
FIELDS = ("term", "zh", "section", "question", "answer")

# It fills several blocks of 16 tokens and opens every chat, so prefix caching (前缀缓存) finds something.
# The chat template inserts it where a conversation brings no system message of its own.
SYSTEM_PROMPT = (
    "You are the assistant of a course about serving large language models: KV cache, paging, batching, "
    "scheduling and prefix caching. You have memorised the glossary of this course. Answer each question in "
    "one or two precise sentences, give the Chinese term in brackets, and show the numbers when there are "
    "any. You know nothing else."
)


def load_glossary():
    """Return the glossary in file order: a list of dicts with the keys of FIELDS, all non-empty strings.

    `term` and `question` are unique; `zh` is the Chinese term, and it occurs in `answer`; `section` is the
    textbook's ("L33 2.2", "PAV 3.1"), or the paper or engine that the entry goes back to.
    Raises ValueError with the line number if a line is not such an entry.
    """
    entries = []
    for number, line in enumerate(GLOSSARY_PATH.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            good = tuple(entry) == FIELDS and all(isinstance(v, str) and v for v in entry.values())
        except (json.JSONDecodeError, TypeError, AttributeError):
            good = False
        if not good:
            raise ValueError(f"{GLOSSARY_PATH}:{number}: {line[:60]!r} is not an entry; write a JSON "
                             f"object with the keys {', '.join(FIELDS)}, in this order, non-empty strings")
        entries.append(entry)
    return entries
