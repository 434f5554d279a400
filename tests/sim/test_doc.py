"""The examples of docs/simulator.md do what the page says, to the letter."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "simulator.md"


def test_the_examples_print_what_the_page_says(capsys):
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * (len(blocks) // 2) and blocks
    names = {}
    for (_, code), (_, output) in zip(blocks[::2], blocks[1::2], strict=True):
        exec(compile(code, str(PAGE), "exec"), names)
        assert capsys.readouterr().out == output
