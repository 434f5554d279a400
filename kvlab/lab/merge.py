"""A corrected lab and a student's copy of an older one, to one notebook in which nothing that was typed is lost.

    the student's cells --_places--> each belongs to a cell of the new lab (a slot), or to none
      slot: an exercise           the student's answer, else the new stub
            a check               the new one; what the student wrote over it becomes a cell of its own
            prose, other code     the student's version, else the new one
      none: as we once made it    dropped
            an answer             its exercise is gone: kept at the end, under a heading
            the student's own     kept, beside the cell that it stood beside

The student's cells keep their order among themselves, so that of two definitions the same one counts as before.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.lab.cells import (
    OURS,
    Cell,
    Notebook,
    as_type,
    defined_names,
    digest,
    free_id,
    grade_id,
    is_solution,
    stub_digest,
)

KEPT = "kept-answers"
KEPT_HEADING = {
    "en": "## Kept from an earlier version\n\nAnswers to exercises that this lab does not have any more.",
    "zh": "## 旧版本中保留的内容\n\n以下答案所属的练习已不在本实验中。",
}


@dataclass
class Merged:
    """The notebook, and what became of the student's work."""

    notebook: Notebook
    answers: list[str] = field(default_factory=list)  # exercises whose answer was carried over
    new_stub: list[str] = field(default_factory=list)  # those of them whose given code has changed since
    gone: list[str] = field(default_factory=list)  # exercises that are gone and whose answer is at the end
    own: int = 0  # other cells that the student wrote or changed


def merge(mine: Notebook, new: Notebook) -> Merged:
    """The new lab with everything in it that the student typed into `mine`."""
    metadata = new.metadata | mine.metadata | {"kvlab": new.metadata["kvlab"]}  # the student may have chosen a kernel
    merged = Merged(Notebook(metadata, []))
    places = _places(mine.cells, new.cells)
    chosen = [
        _choose(mine.cells, [i for i, place in enumerate(places) if place == index], cell)
        for index, cell in enumerate(new.cells)
    ]
    before, after = _extras(mine.cells, new.cells, places, chosen, merged)
    taken, end = {cell["id"] for cell in new.cells}, len(new.cells)
    cells = [_own(cell, taken) for cell in after[-1]]
    for index, cell in enumerate(new.cells):
        cells += [_own(own, taken) for own in before[index]]
        cells.append(cell if chosen[index] is None else _in_slot(mine.cells[chosen[index]], cell, merged))
        cells += [_own(own, taken) for own in after[index]]
    cells += [_own(own, taken) for own in before[end]]
    if after[end] and not any(cell["id"] == KEPT for cell in cells):
        heading = KEPT_HEADING.get(str(new.about.get("lang")), KEPT_HEADING["en"])
        cells.append({"cell_type": "markdown", "id": KEPT, "metadata": {}, "source": heading})
    merged.notebook.cells = cells + [_own(own, taken) for own in after[end]]
    return merged


# --- which cell is which -------------------------------------------------------------------------------------


def _places(mine: Sequence[Cell], new: Sequence[Cell]) -> list[int | None]:
    """For each of the student's cells the index of the new lab's cell that it is a version of."""
    by_grade = {grade_id(cell): i for i, cell in enumerate(new) if grade_id(cell)}
    by_id = {cell["id"]: i for i, cell in enumerate(new)}
    places = [by_grade.get(grade_id(cell), by_id.get(cell["id"])) for cell in mine]
    for index, cell in enumerate(new):  # ids were lost: the same words are the same cell
        same = [i for i, own in enumerate(mine) if places[i] is None and _says(own) == _says(cell)]
        if index not in places and same:
            places[same[0]] = index
    for index, cell in enumerate(new):  # tags were lost: who defines what the exercise asks for is its answer
        if is_solution(cell) and index not in places:
            names = defined_names(cell["source"])
            free = [i for i, own in enumerate(mine) if places[i] is None and own["cell_type"] == "code"]
            free = [i for i in free if names & defined_names(mine[i]["source"]) and not _as_made(mine[i])]
            if free:
                places[free[0]] = index
    return places


def _choose(mine: Sequence[Cell], candidates: Sequence[int], new: Cell) -> int | None:
    """Which of the student's cells stands in the new lab's place; None: none does."""
    same = [i for i in candidates if _says(mine[i]) == _says(new)]
    if is_solution(new):  # the last answer is the one that counts in a notebook that was run from the top
        typed = [i for i in candidates if not _is_stub(mine[i], new)][-1:]
    else:
        typed = [] if grade_id(new) else [i for i in candidates if i not in same]
    return next(iter(typed + same), None)


def _says(cell: Cell) -> tuple[str, str]:
    return cell["cell_type"], cell["source"]


def _repeats(cell: Cell, new: Cell) -> bool:
    """Whether nothing is lost with this version of a cell, beside the new one."""
    return _says(cell) == _says(new) or (is_solution(new) and _is_stub(cell, new))


def _is_stub(cell: Cell, new: Cell) -> bool:
    return cell["source"] == new["source"] or digest("code", cell["source"]) == stub_digest(cell)


def _as_made(cell: Cell) -> bool:
    """Whether it is a cell of some version of the lab, untouched: its id, or its stub's digest, fits what it says."""
    name, made = grade_id(cell), digest(*_says(cell))
    if is_solution(cell):
        return made == stub_digest(cell)
    if name is not None:
        return cell["source"] == f'check("{name.removeprefix("check-")}")'
    return cell["id"].partition("-")[0] == made


# --- putting together ----------------------------------------------------------------------------------------


def _in_slot(mine: Cell, new: Cell, merged: Merged) -> Cell:
    """The student's cell under the new lab's name and tags."""
    if is_solution(new) and not _is_stub(mine, new):
        merged.answers.append(grade_id(new))
        if stub_digest(mine) not in (None, stub_digest(new)):
            merged.new_stub.append(grade_id(new))
    elif _says(mine) != _says(new):
        merged.own += 1
    metadata = {key: value for key, value in mine["metadata"].items() if key not in OURS} | new["metadata"]
    return as_type(mine | {"id": new["id"], "metadata": metadata}, "code" if grade_id(new) else mine["cell_type"])


def _extras(
    mine: Sequence[Cell],
    new: Sequence[Cell],
    places: Sequence[int | None],
    chosen: Sequence[int | None],
    merged: Merged,
) -> tuple[dict[int, list[Cell]], dict[int, list[Cell]]]:
    """The student's cells that stand in no slot: (before, after) a slot. -1: the top; the number of slots: the end."""
    before: dict[int, list[Cell]] = defaultdict(list)
    after: dict[int, list[Cell]] = defaultdict(list)
    asked = {name for cell in new if is_solution(cell) for name in defined_names(cell["source"])}
    last, here = -1, after[-1]  # the slot passed last, and where a cell of the student's would go now
    for i, cell in enumerate(mine):
        place = places[i]
        if place is not None:
            counts = chosen[place]
            if counts is None or i <= counts:
                last, here = place, before[place] if counts is not None and i < counts else after[place]
            if i == counts or _repeats(cell, new[place]):
                continue
        elif _as_made(cell):  # a cell that was corrected or taken out: what stood after it stands before the next one
            following = next((p for p in places[i + 1 :] if p is not None), len(new))
            here = before[following] if following > last else here
            continue
        # An old answer at the end must not define again what another exercise asks for.
        elif is_solution(cell) and not asked & defined_names(cell["source"]):
            merged.gone.append(grade_id(cell))
            after[len(new)].append(cell)
            continue
        merged.own += 1
        here.append(cell)
    return before, after


def _own(cell: Cell, taken: set[str]) -> Cell:
    """The student's cell without our tags; one without an id gets one that we never make."""
    metadata = {key: value for key, value in cell["metadata"].items() if key not in OURS}
    return cell | {"metadata": metadata, "id": free_id(cell["id"] or "own-" + digest(*_says(cell)), taken)}
