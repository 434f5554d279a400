"""`kvlab labs`: all notebooks of labs/ from the sources in solutions/, or a list of those that are not what they make.

    solutions/NN_name.py + the points of tests/labs/lab_NN/checks.py  ->  labs/NN_name.ipynb, labs/NN_name.zh.ipynb
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from kvlab.lab.cells import write_text
from kvlab.lab.source import Source


def made_from(sources: Iterable[Source]) -> dict[str, str]:
    """File name in labs/ -> its text."""
    return {
        source.file_name(lang): source.notebook(lang).text() for source in sources for lang in source.languages
    }


def stale(root: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """What differs in labs/ from `texts`: file name -> how."""
    found = {}
    for name, text in texts.items():
        path = root / "labs" / name
        if not path.exists():
            found[name] = "is missing"
        elif path.read_text(encoding="utf-8") != text:
            found[name] = "is not what its source makes"
    others = {path.name for path in (root / "labs").glob("*.ipynb")} - set(texts)
    return found | dict.fromkeys(sorted(others), "has no source: delete it, or move it to work/")


def write(root: Path, texts: Mapping[str, str]) -> dict[str, str]:
    """Bring labs/ up to date: file name -> what was done. A file without a source is named, and left alone."""
    found = stale(root, texts)
    for name in found.keys() & texts.keys():
        write_text(root / "labs" / name, texts[name])
    return {name: "written" if name in texts else how for name, how in found.items()}
