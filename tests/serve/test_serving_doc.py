"""docs/serving.md does what it says: its examples, its tables of fields, metrics and flags."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvlab import cli_serve
from kvlab.serve.fields import IGNORED, NEUTRAL
from kvlab.serve.protocol import ChatBody, CompletionBody, StreamOptions

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
PLACE = "http://127.0.0.1:8000"


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def paragraph(beginning: str) -> str:
    return next(each for each in PAGE.split("\n\n") if each.startswith(beginning))


def names_in(text: str) -> set[str]:
    return {name for quoted in re.findall(r"`([^`]+)`", text) for name in re.findall(r"\w+", quoted)}


def test_the_python_example_prints_what_the_page_says(server, capsys):
    code, output = re.findall(r"```(?:python|text)\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code.replace(PLACE, server.base), "docs/serving.md", "exec"), {})
    assert capsys.readouterr().out == output


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here")
def test_the_curl_examples_work(server):
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    commands = re.split(r"\n(?=curl)", block.strip())
    outputs = []
    for command in commands:
        done = subprocess.run(["sh", "-c", command.replace(PLACE, server.base)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        outputs.append(done.stdout)
    assert '"text":" (KV' in outputs[0] and "vllm:kv_cache_usage_perc{" in outputs[1] and '"schedule"' in outputs[2]


def test_the_tables_of_fields_are_the_codes():
    supported = set(CompletionBody.model_fields) | set(ChatBody.model_fields) | set(StreamOptions.model_fields)
    assert names_in(paragraph("Fields with an effect")) - {"SamplingParams", "0"} >= supported
    assert names_in(paragraph("Ignored, because")) == set(IGNORED)
    assert names_in(paragraph("Accepted only")) == set(NEUTRAL)


def test_every_metric_is_in_the_table(server):
    documented = set(re.findall(r"`(vllm:\w+)`", section("Metrics")))
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    served = {family.name for family in families if family.name.startswith("vllm:") and family.type != "unknown"}
    assert {name for name in served if not name.endswith("_created")} == documented


def test_every_flag_is_in_the_table():
    import typer

    app = typer.Typer()
    app.command()(cli_serve.serve)
    options = [option for parameter in typer.main.get_command(app).params for option in parameter.opts]
    documented = section("Flags").replace("--[no-]", "--")
    assert [option for option in options if option.startswith("--") and f"`{option}" not in documented] == [
        *(option for option in options if option in ("--help", "--install-completion", "--show-completion"))
    ]
