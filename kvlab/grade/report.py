"""A notebook graded: every exercise of its lab, for people, for programs (JSON) and for CI (JUnit).

The files are written before grading begins, with nothing earned, and replaced at the end: whatever happens to
this process, there is a result to read.
"""

import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from kvlab.grade.child import walls
from kvlab.grade.definitions import notebook_cells
from kvlab.grade.exercise import SPECS, LabSpec, load_lab
from kvlab.grade.judge import Result, as_json, grade_exercise
from kvlab.grade.text import LANGUAGES, say


@dataclass
class Report:
    """The results of one notebook; `results` is empty while it is being graded."""

    path: Path
    lab: LabSpec
    lang: str = "en"
    results: list[Result] = field(default_factory=list)

    @property
    def points(self) -> int:
        """Of the core exercises; stretch ones are counted apart."""
        return sum(result.points for result in self.results if not result.exercise.stretch)

    @property
    def max_points(self) -> int:
        return sum(e.points for e in self.lab.exercises if not e.stretch)

    @property
    def stretch_points(self) -> int:
        return sum(result.points for result in self.results if result.exercise.stretch)

    @property
    def max_stretch_points(self) -> int:
        return sum(e.points for e in self.lab.exercises if e.stretch)

    def to_json(self) -> dict:
        done = {result.exercise.name: as_json(result, self.lang) for result in self.results}
        return {
            "notebook": str(self.path), "lab": self.lab.number, "points": self.points, "max_points": self.max_points,
            "stretch_points": self.stretch_points, "max_stretch_points": self.max_stretch_points,
            "isolation": "process, own namespace" if walls() else "process",
            "exercises": [done.get(e.name) or _nothing(e) for e in self.lab.exercises],
        }  # fmt: skip

    def to_junit(self) -> str:
        rows = self.to_json()["exercises"]
        suite = ElementTree.Element("testsuite", name=f"lab {self.lab.number}: {self.path.name}", tests=str(len(rows)),
                                    failures=str(sum(not row["passed"] for row in rows)))  # fmt: skip
        for row in rows:
            case = ElementTree.SubElement(suite, "testcase", classname=f"lab{self.lab.number}", name=row["name"],
                                          time=str(row["seconds"]))  # fmt: skip
            if not row["passed"]:
                failure = ElementTree.SubElement(case, "failure", message=_xml(row["message"].split("\n")[0]))
                failure.text = _xml(row["message"])
            if row["printed"]:
                ElementTree.SubElement(case, "system-out").text = _xml(row["printed"])
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)

    def to_text(self) -> str:
        """For a terminal."""
        lines = [f"{self.path}: lab {self.lab.number}"]
        width = max(len(e.name) for e in self.lab.exercises)
        for result in self.results:
            e = result.exercise
            mark = "passed" if result.passed else "failed"
            stretch = say("stretch").render(self.lang) if e.stretch else ""
            lines.append(f"  {e.name:{width}}  {result.points} / {e.points}  {mark}  {stretch}".rstrip())
            lines += [f"      {line}" for line in result.render(self.lang).splitlines()]
        total = say("{points} of {all} points", points=self.points, all=self.max_points)
        if self.max_stretch_points:
            total = say("{points} of {all} points, and {extra} of {all_extra} for what is optional", points=self.points,
                        all=self.max_points, extra=self.stretch_points, all_extra=self.max_stretch_points)  # fmt: skip
        lines.append(total.render(self.lang))
        return "\n".join(lines)


def _nothing(e) -> dict:
    return {"name": e.name, "title": e.title, "points": 0, "max_points": e.points, "stretch": e.stretch,
            "passed": False, "message": "not graded: grading ended early", "printed": "", "seconds": 0}  # fmt: skip


def _xml(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def lab_of(path: Path, metadata: dict) -> str:
    """The number of the lab that a notebook belongs to: it says so itself, or its file name begins with it."""
    own = metadata.get("kvlab")
    number = own.get("lab") if isinstance(own, dict) else None
    if isinstance(number, str):
        return number
    if digits := re.search(r"\d\d", path.stem):
        return digits.group()
    raise ValueError(
        f"{path} does not say which lab it is of: name the lab, or let its file name begin with the number"
    )


def grade_notebook(path: str | Path, *, lab: str | None = None, lang: str | None = None,
                   json_path: str | Path | None = None, junit_path: str | Path | None = None,
                   specs: Path = SPECS) -> Report:  # fmt: skip
    """Grade all exercises of the notebook at `path`. ValueError if it cannot be read or its lab is unknown."""
    path = Path(path)
    cells, metadata = notebook_cells(path)
    spec = load_lab(lab or lab_of(path, metadata), specs)
    own = metadata.get("kvlab")
    told = own.get("lang") if isinstance(own, dict) else None
    lang = lang or (told if told in LANGUAGES else "en")
    report = Report(path, spec, lang)
    _save(report, json_path, junit_path)
    for exercise in spec.exercises:
        report.results.append(grade_exercise(spec, exercise.name, cells, lang))
    _save(report, json_path, junit_path)
    return report


def _save(report: Report, json_path: str | Path | None, junit_path: str | Path | None) -> None:
    if json_path:
        _replace(Path(json_path), json.dumps(report.to_json(), indent=1, ensure_ascii=False) + "\n")
    if junit_path:
        _replace(Path(junit_path), report.to_junit())


def _replace(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    os.replace(file.name, path)
