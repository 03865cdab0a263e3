"""Whose an error is: what a user can cause is one sentence, what we got wrong shows its traceback."""

from __future__ import annotations

import ast
import errno
import json
from pathlib import Path

import pytest

from fivefold import cli
from fivefold.config import RunConfig
from fivefold.errors import describe_error, sentence_of
from fivefold.files import read_json
from fivefold.keys.ranges import within


def caught(action) -> BaseException:
    try:
        action()
    except BaseException as error:
        return error
    raise AssertionError("it raised nothing")


def full_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def lost_connection() -> None:
    raise OSError(errno.EBADF, "Bad file descriptor")


@pytest.mark.parametrize(
    ("action", "says"),
    [
        (lambda: RunConfig.from_yaml("/none.yaml"), "no configuration file at /none.yaml"),
        (lambda: read_json(Path("/none.json")), "/none.json cannot be read: No such file or directory"),
        (lambda: Path("/none").read_text(), "/none: No such file or directory"),
        (full_disk, "the disk: No space left on device"),
        (lambda: int("x"), None),
        # Within this package, but not its refusal.
        (lambda: within("[a, b]"), None),
        (lambda: json.loads("{"), None),
        (lambda: {}["absent"], None),
        (lambda: [zip([1], [1, 2], strict=True)] and list(zip([1], [1, 2], strict=True)), None),
        (lost_connection, None),
    ],
)
def test_a_sentence_is_for_what_this_package_or_the_system_refused(action, says):
    error = caught(action)
    assert sentence_of(error) == says
    assert ("Traceback" in describe_error(error)) is (says is None)


PLAIN_ERRORS = {
    "fivefold/engines/servers/cuda_memory.py": "the caller has to know that torch has loaded CUDA",
    "fivefold/engines/servers/request_router.py": "a server breaks the protocol of this package",
    "fivefold/engines/transformers.py": "two tables of a model's tensors differ",
    "fivefold/data/bounded_template.py": "caught by the tokenizer, which knows the template's place",
    "fivefold/environments/adapters/openenv.py": "runs without this package; its errors are answers to the run",
    "fivefold/megatron/mesh.py": "two threads call models at once",
    "fivefold/backend/sharded_files.py": "caught in the same function",
    "fivefold/reward/code/plain.py": "caught where the answer of a program is read",
    "fivefold/reward/messages.py": "caught where the answer of a process is read",
    "fivefold/reward/tagged.py": "caught in the calling function",
    "fivefold/rollout/staleness.py": "the engine used weights that the bound does not admit",
    "fivefold/types.py": "a column is set with another type or shape",
    "fivefold_dialects/shell_words.py": "caught in the same function",
}
"""Modules that raise ValueError or RuntimeError itself: a fault of the program, or an error that is always caught."""


def raises_bare_errors(path: Path) -> bool:
    """Whether a module raises ValueError or RuntimeError with a message; argparse's converters have none."""
    raised = (node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise))
    return any(
        isinstance(raised_value, ast.Call) and ast.unparse(raised_value.func) in ("ValueError", "RuntimeError")
        for raised_value in raised
    )


def test_what_a_user_can_cause_is_raised_as_an_error_of_the_user():
    root = Path(cli.__file__).parents[1]
    paths = root.glob("fivefold*/**/*.py")
    assert {str(path.relative_to(root)) for path in paths if raises_bare_errors(path)} == set(PLAIN_ERRORS)


ARITHMETIC = ["data", "arithmetic", "--out", "{tmp}/sums"]
COMMANDS = [
    (["check", "{tmp}/none.yaml"], "no configuration file at"),
    (["check", "{tmp}"], "no configuration file at"),
    (["check", "{tmp}/binary.yaml"], "binary.yaml is not UTF-8 text"),
    (["check", "{tmp}/deep.yaml"], "nested too deeply"),
    (["check", "{tmp}/bomb.yaml"], "must have at most 100000 values"),
    (["check", "{tmp}/loop.yaml"], "nested at most 30 deep"),
    (["check", "{tmp}/date.yaml"], "not valid YAML: month must be in 1..12"),
    (["check", "{tmp}/key.yaml"], "not valid YAML"),
    (["train", "{tmp}/none.yaml"], "no configuration file at"),
    (["report", "{tmp}/none"], "must be the directory of a run: there is none"),
    (["report", "{tmp}/run"], "run/metrics.jsonl, line 1 is not JSON"),
    (["data", "gsm8k", "--out", "{tmp}/out"], "have all of it; or name local files with --source"),
    (["data", "gsm8k", "--source", "{tmp}/none.jsonl", "--out", "{tmp}/out"], "no source file at"),
    (["data", "gsm8k", "--source", "{tmp}/rows.jsonl", "--out", "{tmp}/out"], "rows.jsonl, row 0: column 'question' must be a text"),
    (["data", "math", "--source", "{tmp}/binary.yaml", "--out", "{tmp}/out"], "is not UTF-8 text"),
    (["data", "gsm8k", "--source", "{tmp}/empty.jsonl", "--out", "{tmp}/out"], "no rows in"),
    ([*ARITHMETIC, "--limit", "0"], "--limit must be at least 1"),
    ([*ARITHMETIC, "--below", "1"], "--below must be in [2, 2000]"),
    (["data", "arithmetic", "--out", "{tmp}/rows.jsonl/out"], "Not a directory"),
    (["train-tokenizer", "char", "--data", "{tmp}/none.jsonl", "--out", "{tmp}/out"], "no data file at"),
    (["train-tokenizer", "char", "--data", "{tmp}/numbers.jsonl", "--out", "{tmp}/out"], "column 'prompt'"),
    (["init-model", "qwen3", "--tokenizer", "{tmp}/none", "--out", "{tmp}/out"], "the tokenizer in"),
    (["init-model", "qwen3", "--tokenizer", "{tmp}", "--out", "{tmp}/out", "--heads", "3"], "--hidden must be a multiple of --heads"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "says"), COMMANDS)
def test_no_command_shows_a_traceback_for_what_a_user_can_cause(tmp_path, capsys, arguments, says):
    (tmp_path / "binary.yaml").write_bytes(b"model: {path: caf\xe9}\n")
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 3000)
    levels = [f"x{n}: &x{n} [{', '.join([f'*x{n - 1}'] * 10)}]" for n in range(1, 9)]
    (tmp_path / "bomb.yaml").write_text("\n".join(["x0: &x0 [1]", *levels]))
    (tmp_path / "loop.yaml").write_text("a: &a [*a]")
    (tmp_path / "date.yaml").write_text("a: 2020-13-45")
    (tmp_path / "key.yaml").write_text("? [a]\n: b")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "numbers.jsonl").write_text('{"prompt": 1}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("{\n{}\n")
    assert cli.main([argument.replace("{tmp}", str(tmp_path)) for argument in arguments]) == 2
    message = capsys.readouterr().err
    assert says in message and message.startswith("fivefold: ") and "Traceback" not in message


@pytest.mark.parametrize("arguments", [["train-tokenizer", "bpe", "--data", "a", "--out", "b", "--vocabulary", "-5"], ["export", "a", "b", "--shard-gb", "nan"], ["init-model", "qwen3", "--tokenizer", "a", "--out", "b", "--hidden", "0"]])  # fmt: skip
def test_numbers_of_the_command_line_must_be_above_0(capsys, arguments):
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert "above 0 value" in capsys.readouterr().err


def test_a_bug_shows_its_traceback(tmp_path, monkeypatch):
    def wrong(path, overrides):
        return {}["absent"]

    monkeypatch.setattr("fivefold.config.RunConfig.from_yaml", wrong)
    with pytest.raises(KeyError):
        cli.main(["check", str(tmp_path)])


def test_a_hub_that_does_not_answer_is_asked_once(tmp_path, monkeypatch):
    """Its own client would ask five times, half a minute long, for each file; nothing listens on this port."""
    import time

    from huggingface_hub import constants

    from fivefold.distributed.ports import free_port
    from fivefold.hub import model_snapshot

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"'nobody/nothing' is no directory here, .*: it does not answer"):
        model_snapshot("nobody/nothing", ["*.json"])
    assert time.monotonic() - begin < 25, "its own client takes half a minute"
