"""The example of docs/simulator.md does what the page says, to the letter."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_the_example_prints_what_the_page_says(capsys):
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, str(PAGE), "exec"), {})
    assert capsys.readouterr().out == output
