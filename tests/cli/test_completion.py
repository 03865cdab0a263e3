"""What shells complete, asked of the shell itself."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from fivefold import cli
from fivefold.commands.completion import keys
from fivefold.config import ConfigError, load_config
from fivefold.config.methods import METHODS


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "fivefold.bash"
    path.write_text(written("bash"))
    return path


def written(shell: str) -> str:
    from fivefold.commands.completion import completion

    return completion(cli._parser(), shell)


def complete(script, line: str, breaks: str = " \t\n\"'><=;|&(:", directory: object = ".") -> list[str]:
    """What bash would offer behind a line."""
    ask = f'source {script}; COMP_LINE=$1; COMP_POINT=${{#1}}; COMP_WORDBREAKS=$2; _fivefold; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", ask, "bash", line, breaks], capture_output=True, text=True, check=True, cwd=directory
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_subcommands_options_and_their_values(script):
    assert {"train", "check", "init", "doctor", "export", "--version"} <= set(complete(script, "fivefold "))
    assert complete(script, "fivefold exp") == ["export"]
    assert complete(script, "fivefold export run out --mod") == ["--model"]
    assert complete(script, "fivefold export run out --model ") == ["policy", "critic"]
    assert complete(script, "fivefold export run out --to meg") == ["megatron"]
    assert complete(script, "fivefold data gs") == ["gsm8k"]


def test_keys_and_their_values(script, tmp_path):
    assert complete(script, "fivefold train run.yaml algorithm.nam", directory=tmp_path) == ["algorithm.name="]
    assert complete(script, "fivefold check algorithm.name=") == list(METHODS)
    assert complete(script, "fivefold check algorithm.name=gr") == ["grpo"]
    assert complete(script, "fivefold check algorithm.name=gr", breaks=" \t\n") == ["algorithm.name=grpo"]
    assert complete(script, "fivefold train policy.offload.parameters=") == ["true", "false"]
    assert complete(script, "fivefold train engine.mode=i") == ["in_process"]
    assert complete(script, "fivefold report algorithm.nam", directory=tmp_path) == []


def test_files_with_blanks_and_values_that_are_files(script, tmp_path):
    (tmp_path / "my run.yaml").touch()
    (tmp_path / "rows.jsonl").touch()
    assert complete(script, "fivefold train my", directory=tmp_path) == ["my run.yaml"]
    assert complete(script, "fivefold train data.train=ro", directory=tmp_path) == ["rows.jsonl"]


def test_every_completed_key_and_value_is_one_of_the_configuration(tmp_path):
    """All keys at once: of those with values the first one; the others are known to be missing nothing but a value."""
    known = keys()
    assert len(known) > 150 and len({key.name for key in known}) == len(known)
    (tmp_path / "run.yaml").write_text("")
    for key in known:
        for value in (key.values or ("[]",))[:1]:
            try:
                load_config(tmp_path / "run.yaml", ["model.path=m", f"{key.name}={value}"])
            except ConfigError as error:
                assert not any("unknown key" in fault for fault in error.faults), key
                assert not (key.values and any(fault.startswith(f"{key.name} must be one of") for fault in error.faults)), (
                    key
                )


def test_bash_answers_at_once(script):
    ask = f'source {script}; for i in 1 2 3 4 5 6 7 8 9 10; do COMP_LINE="fivefold train al"; COMP_POINT=17; _fivefold; done; times'
    done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, check=True)
    # user and system seconds of the shell and of its children, of ten answers and of reading the script
    spent = [
        sum(float(part) * weight for part, weight in zip(each[:-1].split("m"), (60, 1), strict=True))
        for each in done.stdout.split()
    ]
    assert sum(spent) < 10 * 0.1


@pytest.mark.parametrize(("shell", "checked"), [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "-n"])])
def test_scripts_are_of_their_shell(tmp_path, shell, checked):
    text = written(shell)
    assert "algorithm.name=" in text and "--shard-gb" in text.replace("-l ", "--")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    subprocess.run([*checked, tmp_path / "script"], check=True)
