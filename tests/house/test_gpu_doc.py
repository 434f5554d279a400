"""docs/gpu.md shows what the commands print."""

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from kvlab import cli
from kvlab.model.known import KNOWN

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")


def test_the_plan_on_the_page_is_the_one_that_is_printed():
    command = next(line.strip() for line in PAGE.splitlines() if line.strip().startswith("kvlab plan"))
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    assert CliRunner().invoke(cli.app, command.split()[1:]).stdout == shown


def test_the_log_on_the_page_is_the_one_that_is_written():
    code = "from kvlab import LLMEngine, cli_labs; cli_labs.show_log(); LLMEngine('tiny', device='cpu')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    assert re.sub(r"\d\d-\d\d \d\d:\d\d:\d\d ", "", done.stderr) == shown, done.stderr


def test_every_command_on_the_page_has_its_options_and_every_known_model_is_named():
    for line in re.findall(r"^    (kvlab .*)$", PAGE, re.MULTILINE):
        command, *rest = line.split()[1:]
        text = re.sub(r"\s", "", CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [command, "--help"]).stdout)
        assert all(word in text for word in rest if word.startswith("--")), line
    assert all(name in PAGE for name in KNOWN)
