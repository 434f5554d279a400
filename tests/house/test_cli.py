"""The command line: quick, lazy, clear when something is wrong, and true to the engine's interface."""

import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import kvlab
from kvlab import SamplingParams, cli, machine
from kvlab.model import known

ROOT = Path(__file__).parents[2]
SMALL = dict(hidden_size=56, intermediate_size=64, num_attention_heads=7, num_key_value_heads=1, vocab_size=2304,
             max_position_embeddings=512)  # fmt: skip


def kvlab_command(*arguments: str, prelude: str = "", cwd: Path = ROOT) -> subprocess.CompletedProcess:
    code = f"{prelude}\nimport sys; sys.path.insert(0, {str(ROOT)!r}); sys.argv = {['kvlab', *arguments]!r}\n"
    code += "from kvlab.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


class FakeLLM:
    """Records what it is asked; answers every prompt with its own words in capitals."""

    made: list[dict]
    asked: list[tuple]
    error: str | None

    def __init__(self, **options):
        if options.get("block_size") == 0:
            raise ValueError("block_size is 0:\nuse a whole number >= 1")
        self.made.append(options)

    def generate(self, prompts, params):
        self.asked.append(("generate", prompts, params))
        return [self._answer(prompt, params) for prompt in prompts]

    def chat(self, conversations, params):
        self.asked.append(("chat", conversations, params))
        return [self._answer(conversation[-1]["content"], params) for conversation in conversations]

    def stream(self, prompt, params):
        self.asked.append(("stream", prompt, params))
        for piece in ("one ", "块", "[two]"):
            yield SimpleNamespace(text=piece, error=None)
        if self.error:
            yield SimpleNamespace(text="", error=self.error)

    def _answer(self, text, params):
        outputs = [SimpleNamespace(text=text.upper(), token_ids=[1, 2], finish_reason="stop") for _ in range(params.n)]
        return SimpleNamespace(outputs=outputs, num_cached_tokens=16, error=self.error)


@pytest.fixture
def fake(monkeypatch):
    FakeLLM.made, FakeLLM.asked, FakeLLM.error = [], [], None
    monkeypatch.setitem(vars(kvlab), "LLM", FakeLLM)  # setattr would load the real one to keep it
    return FakeLLM


def call(monkeypatch, *arguments: str) -> int:
    """main() in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["kvlab", *arguments])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code or 0


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("generate", "--help")])
def test_help_and_version_load_nothing_heavy(arguments):
    done = kvlab_command(*arguments)
    assert done.returncode == 0
    modules = done.stderr.split()
    assert "kvlab.cli" in modules
    heavy = {"torch", "triton", "numpy", "transformers", "kvlab.engine", "kvlab.machine", "kvlab.doctor"}
    assert heavy.isdisjoint(modules)


def test_version():
    assert kvlab_command("--version").stdout == f"kvlab {kvlab.__version__}\n"


def test_every_command_is_in_the_help():
    text = kvlab_command("--help").stdout
    names = "demo generate serve plan random-model simulate doctor grade lab test test-all lint labs solutions student"
    assert all(f" {name} " in text for name in names.split())


def test_the_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "kvlab", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == f"kvlab {kvlab.__version__}\n"


def test_generate_chats_by_default(fake, monkeypatch, capsys):
    assert call(monkeypatch, "generate", "a [b] c", "块 d") == 0
    ((kind, conversations, params),) = fake.asked
    assert kind == "chat"
    assert conversations == [[{"role": "user", "content": text}] for text in ("a [b] c", "块 d")]
    assert params == SamplingParams(temperature=0.0, max_tokens=128)
    shown = capsys.readouterr()
    assert shown.out == "A [B] C\n块 D\n"  # texts alone, so that they can be piped
    assert "2 tokens, 16 cached, ended by: stop" in shown.err and "a [b] c" in shown.err
    assert fake.made == [{"model": "tiny"}]  # what is not given is left to the engine's defaults


def test_the_log_is_shown_on_request(fake, monkeypatch, capsys):
    monkeypatch.setattr(FakeLLM, "__init__", lambda self, **_: logging.getLogger("kvlab").info("KV cache size"))
    monkeypatch.setattr(logging.getLogger("kvlab"), "handlers", [])
    assert call(monkeypatch, "generate", "x") == 0 and "KV cache size" not in capsys.readouterr().err
    assert call(monkeypatch, "generate", "x", "-v") == 0
    shown = capsys.readouterr()
    assert shown.out == "X\n" and re.search(r"^INFO .*KV cache size$", shown.err, re.MULTILINE)
    logging.getLogger("kvlab").setLevel(logging.NOTSET)


def test_a_random_model_of_a_known_shape(monkeypatch, tmp_path, capsys):
    folder = str(tmp_path / "m")
    monkeypatch.setitem(known.KNOWN, "Small", known.known_config("Qwen2.5-7B") | SMALL)
    assert call(monkeypatch, "random-model", folder, "--like", "Some/Small", "--layers", "1") == 0
    assert capsys.readouterr().out.startswith(f"{folder}: 1 layers of Some/Small, random")
    assert call(monkeypatch, "generate", "What is a KV cache?", "--model", folder, "--max-tokens", "3") == 0
    assert "3 tokens" in capsys.readouterr().err
    assert call(monkeypatch, "random-model", folder, "--like", "Some/Small") == 2
    assert "not empty" in capsys.readouterr().err


def test_generate_hands_everything_on(fake, monkeypatch, capsys):
    sampling = "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 40 --seed 3 --n 2".split()
    engine = "--block-size 4 --num-gpu-blocks 64 --max-num-seqs 5 --max-num-batched-tokens 32".split()
    rest = "--swap-space 0.25 --no-prefix-caching --no-chat --model folder".split()
    assert call(monkeypatch, "generate", "x", *sampling, *engine, *rest) == 0
    ((kind, prompts, params),) = fake.asked
    assert (kind, prompts) == ("generate", ["x"])
    assert params == SamplingParams(n=2, temperature=0.5, top_p=0.9, top_k=40, seed=3, max_tokens=7)
    (options,) = fake.made
    assert options == {
        "model": "folder",
        "block_size": 4,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 32,
        "swap_space": 0.25,
        "enable_prefix_caching": False,
    }
    kvlab.EngineConfig(**{name: value for name, value in options.items() if name != "model"})  # all real names
    assert capsys.readouterr().out == "X\nX\n"


@pytest.mark.parametrize(("flag", "prompt"), [("--no-chat", "x"), ("--chat", [{"role": "user", "content": "x"}])])
def test_stream_shows_the_text_as_it_comes(fake, monkeypatch, capsys, flag, prompt):
    assert call(monkeypatch, "generate", "x", "--stream", flag) == 0
    assert fake.asked[0][:2] == ("stream", prompt)
    assert capsys.readouterr().out == "one 块[two]\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "--top-p", "2"), "top_p is 2.0: "),
        (("generate", "x", "--n", "0"), "n is 0: "),
        (("generate", "x", "y", "--stream"), "one prompt and n = 1, not 2 and n = 1"),
        (("generate", "x", "--stream", "--n", "3"), "one prompt and n = 1, not 1 and n = 3"),
        (("generate", "x", "--block-size", "0"), "block_size is 0: use a whole number >= 1"),
    ],
)
def test_a_value_error_is_one_line_and_exit_code_2(fake, monkeypatch, capsys, arguments, message):
    assert call(monkeypatch, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err and shown.err.count("\n") == 1
    assert fake.asked == []


@pytest.mark.parametrize("stream", [(), ("--stream",)])
def test_a_request_that_failed_is_told_with_exit_code_1(fake, monkeypatch, capsys, stream):
    fake.error = "RuntimeError: the model broke"
    assert call(monkeypatch, "generate", "x", *stream) == 1
    assert "RuntimeError: the model broke" in capsys.readouterr().err


def test_other_errors_keep_their_traceback(fake, monkeypatch):
    monkeypatch.setattr(FakeLLM, "chat", lambda *_: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["kvlab", "generate", "x"])
    with pytest.raises(ZeroDivisionError):
        cli.main()


@pytest.mark.parametrize("command", [("generate", "x"), ("demo",)])
def test_without_the_engine_extra_the_pip_command_is_told(command):
    missing = """import sys, types
sys.modules.update({"torch": None, "kvlab.demo": types.ModuleType("kvlab.demo")})
sys.modules["kvlab.demo"].run = lambda **_: __import__("torch.nn")"""
    done = kvlab_command(*command, prelude=missing)
    assert done.returncode == 2
    assert "the engine needs torch" in done.stderr and 'install -c constraints.txt -e ".[engine]"' in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def ran(monkeypatch):
    """The commands that the twins of the make targets start."""
    started = []

    def run(command, cwd):
        started.append((command, cwd))
        return SimpleNamespace(returncode=5)

    monkeypatch.setattr(cli.subprocess, "run", run)
    monkeypatch.setattr(cli, "find_spec", lambda name: object())
    monkeypatch.setattr("kvlab.lab.work.start_missing", lambda root, lang: [])  # leave the repository's work/ alone
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    return started


@pytest.mark.parametrize(
    ("arguments", "module", "expected"),
    [
        (("test",), "pytest", ["-n", "2", "-m", "not slow"]),
        (("test", "-k", "arena", "--pdb"), "pytest", ["-n", "2", "-m", "not slow", "-k", "arena", "--pdb"]),
        (("test-all", "-x"), "pytest", ["-n", "2", "--hypothesis-profile", "new", "-x"]),
        (("lint", "--fix"), "ruff", ["check", ".", "--fix"]),
        (("lab",), "jupyterlab", ["--ServerApp.root_dir=work"]),
        (("lab", "--no-browser"), "jupyterlab", ["--ServerApp.root_dir=work", "--no-browser"]),
    ],
)
def test_the_twins_start_their_tool_in_the_repository(ran, arguments, module, expected):
    result = CliRunner().invoke(cli.app, list(arguments))
    assert ran == [([sys.executable, "-m", module, *expected], ROOT)]
    assert result.exit_code == 5  # the tool's own


@pytest.mark.parametrize(("given", "used"), [(None, "1"), ("3", "3")])
def test_torch_gets_one_thread_in_tests_unless_told_otherwise(ran, monkeypatch, given, used):
    monkeypatch.delenv("OMP_NUM_THREADS") if given is None else monkeypatch.setenv("OMP_NUM_THREADS", given)
    CliRunner().invoke(cli.app, ["test"])
    assert cli.os.environ["OMP_NUM_THREADS"] == used
    monkeypatch.setenv("OMP_NUM_THREADS", used)  # so that it is undone


def test_a_twin_whose_tool_is_missing_tells_the_pip_command(ran, monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert call(monkeypatch, "lint") == 2
    assert '".[lint]"' in capsys.readouterr().err and ran == []


def test_a_twin_away_from_the_repository_says_so(ran, monkeypatch, capsys):
    monkeypatch.setattr(machine, "checkout", lambda: None)
    assert call(monkeypatch, "test") == 2
    assert "clone it first" in capsys.readouterr().err and ran == []
