"""work/: the student's own copies of the labs, which no command overwrites and git ignores.

    labs/03_name.ipynb  --start-->  work/03_name.ipynb  --the student writes; update-->  the same, the lab corrected
                                                                        (as it was:  work/backup/03_name-1.ipynb)

Plain JSON in and out: neither Jupyter nor nbformat is needed.
"""

import shutil
from pathlib import Path

from kvlab.lab.cells import Notebook, read_notebook, write_text
from kvlab.lab.merge import Merged, merge

LABS, WORK, BACKUP = "labs", "work", "backup"


def lab_file(root: Path, number: str, lang: str) -> Path:
    """The lab's notebook in labs/. ValueError if there is no such lab, or not in that language."""
    found = {path.name[:2]: path for path in sorted((root / LABS).glob("*.ipynb")) if _language(path) == lang}
    if number.zfill(2) not in found:
        language = "" if lang == "en" else f" in {lang!r}"
        raise ValueError(
            f"there is no lab {number}{language} in {root / LABS}; there is: {', '.join(found) or 'none'}"
        )
    return found[number.zfill(2)]


def _language(path: Path) -> str:
    return path.suffixes[-2][1:] if len(path.suffixes) > 1 else "en"


def start(root: Path, number: str, lang: str = "en") -> tuple[Path, bool]:
    """(the student's copy of a lab, whether it was made now); one that exists is left as it is."""
    source = lab_file(root, number, lang)
    path = root / WORK / source.name
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        return path, False
    shutil.copyfile(source, path)
    return path, True


def start_missing(root: Path, lang: str = "en") -> list[Path]:
    """Copies of all labs that work/ has in no language yet; in English where there is none in `lang`."""
    (root / WORK).mkdir(exist_ok=True)  # JupyterLab opens there
    there = {path.name[:2] for path in (root / WORK).glob("*.ipynb")}
    numbers = {path.name[:2] for path in (root / LABS).glob("*.ipynb")}
    made = []
    for number in sorted(numbers - there):
        has_it = any((root / LABS).glob(f"{number}_*.{lang}.ipynb"))
        made.append(start(root, number, lang if has_it else "en")[0])
    return made


def copies(root: Path, number: str | None = None) -> list[Path]:
    """The notebooks in work/, of one lab or of all. ValueError if there is none of that lab."""
    paths = sorted((root / WORK).glob("*.ipynb"))
    if number is None:
        return paths
    found = [path for path in paths if _is_of(path, number.zfill(2))]
    if not found:
        raise ValueError(f"lab {number} is not in {root / WORK} yet. Type: kvlab lab start {number}")
    return found


def _is_of(path: Path, number: str) -> bool:
    try:
        return _about(path, read_notebook(path))[0] == number
    except ValueError:  # update() will say what is wrong with it
        return path.name[:2] == number


def _about(path: Path, notebook: Notebook) -> tuple[str, str]:
    """Which lab a copy is of and its language: by its metadata, else (they were lost) by its name."""
    lab, lang = notebook.about.get("lab"), notebook.about.get("lang")
    return (lab, lang) if isinstance(lab, str) and isinstance(lang, str) else (path.name[:2], _language(path))


def update(root: Path, path: Path) -> tuple[Merged, Path | None]:
    """Bring the lab's newest version into a copy.

    Returns what became of the student's work, and where the copy as it was is kept; None if nothing was new, and
    nothing was written. ValueError if it is no notebook, or of no lab that we have.
    """
    mine = read_notebook(path)
    merged = merge(mine, read_notebook(lab_file(root, *_about(path, mine))))
    if merged.notebook == mine:
        return merged, None
    backup = _free_name(root / WORK / BACKUP, path)
    backup.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, backup)
    write_text(path, merged.notebook.text())
    return merged, backup


def _free_name(folder: Path, path: Path) -> Path:
    number = 1
    while (folder / f"{path.stem}-{number}.ipynb").exists():
        number += 1
    return folder / f"{path.stem}-{number}.ipynb"
