"""What is said to a student, in the language of the lab.

    say("block {id} was freed twice", id=7)  --render("zh", catalogues)-->  the Chinese sentence with 7 in it

The English template is the key into the catalogues (tests/labs/lab_NN/zh.json, and zh.json beside this file), so a
translation never touches code; what has no translation stays English.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

LANGUAGES = ("en", "zh")
Catalogue = Mapping[str, str]


class Text:
    """A template and its values; a value may be a Text again."""

    def __init__(self, template: str, values: Mapping[str, object]):
        self.template, self.values = template, dict(values)

    def render(self, lang: str = "en", catalogue: Catalogue | None = None) -> str:
        template = self.template
        if lang != "en":
            template = {**(catalogue or {}), **own_catalogue(lang)}.get(template, template)
        if not self.values:
            return template  # may hold braces of its own
        return template.format(**{
            name: value.render(lang, catalogue) if isinstance(value, Text) else value
            for name, value in self.values.items()
        })  # fmt: skip

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"say({self.template!r})"


def say(template: str, **values: object) -> Text:
    """A sentence for a student. Write it in English, with {name} where a value goes."""
    return Text(template, values)


@cache
def own_catalogue(lang: str) -> Catalogue:
    """The translations of what this package itself says."""
    return read_catalogue(Path(__file__).parent, lang)


def read_catalogue(folder: Path, lang: str) -> Catalogue:
    """`folder`/LANG.json: {English template: translation}, empty if there is none. ValueError: unknown language."""
    if lang not in LANGUAGES:
        raise ValueError(f"language {lang!r} is unknown: choose one of {', '.join(LANGUAGES)}")
    path = folder / f"{lang}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
