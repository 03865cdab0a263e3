"""What shells complete, asked of the shell itself."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import time

import pytest

from fivefold import cli
from fivefold.algo.methods import METHODS
from fivefold.commands.completion import keys
from fivefold.config import ConfigError, RunConfig
from tests.support.commands import LONGEST


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "fivefold.bash"
    path.write_text(written("bash"))
    return path


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


def written(shell: str) -> str:
    from fivefold.commands.completion import completion

    return completion(cli._parser(), shell)


def complete(script, line: str, breaks: str = " \t\n\"'><=;|&(:", directory: object = ".") -> list[str]:
    """What bash would offer after a line."""
    ask = f'source {script}; COMP_LINE=$1; COMP_POINT=${{#1}}; COMP_WORDBREAKS=$2; _fivefold; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(
        ["bash", "-c", ask, "bash", line, breaks], capture_output=True, text=True, check=True, cwd=directory
    )
    assert done.stderr == ""
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_subcommands_options_and_their_values(script):
    assert {"train", "check", "init", "doctor", "export"} <= set(complete(script, "fivefold "))
    assert "--version" in complete(script, "fivefold --")
    assert complete(script, "fivefold exp") == ["export"]
    assert complete(script, "fivefold export run out --mod") == ["--model"]
    assert complete(script, "fivefold export run out --model ") == ["policy", "critic", "prm"]
    assert complete(script, "fivefold export run out --to meg") == ["megatron"]
    assert complete(script, "fivefold data gs") == ["gsm8k"]


def test_keys_and_their_values(script, tmp_path):
    assert complete(script, "fivefold train run.yaml algorithm.nam", directory=tmp_path) == ["algorithm.name="]
    assert complete(script, "fivefold check algorithm.name=") == list(METHODS)
    assert complete(script, "fivefold check algorithm.name=gr") == ["grpo"]
    assert complete(script, "fivefold check algorithm.name=gr", breaks=" \t\n") == ["algorithm.name=grpo"]
    assert complete(script, "fivefold train policy.offload.parameters=") == ["true", "false"]
    assert complete(script, "fivefold train engine.mode=i") == ["in_process"]
    assert complete(script, "fivefold train run.yaml trainer.steps=1 engine.mode=i") == ["in_process"]
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
                RunConfig.from_yaml(tmp_path / "run.yaml", ["model.path=m", f"{key.name}={value}"])
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
        sum(float(part) * weight for part, weight in zip(minutes[:-1].split("m"), (60, 1), strict=True))
        for minutes in done.stdout.split()
    ]
    assert sum(spent) < 10 * 0.1


def zsh(directory, line: str, source: str) -> str:
    """What is on the command line of an interactive zsh after these keys."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(directory)
        os.environ |= {"TERM": "dumb", "ZDOTDIR": str(directory)}
        os.execvp("zsh", ["zsh", "-f", "-i"])

    def read(mark: bytes) -> bytes:
        output, deadline = b"", time.monotonic() + LONGEST
        while mark not in output:
            ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"zsh hangs: {output!r}"
            output += os.read(terminal, 1 << 16)
        return output

    try:
        # What it echoes of this is not the mark itself.
        show = """show() { print -r -- "shown <$BUFFER>"; }; zle -N show; bindkey '^X' show; unsetopt zle_bracketed_paste"""
        os.write(terminal, f"PS1=; {source}; {show}; print rea''dy\n".encode())
        read(b"ready\r\n")
        os.write(terminal, f"{line}\x18".encode())
        return read(b">").rpartition(b"shown <")[2].partition(b">")[0].decode()
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


COMPLETED = [
    ("fivefold exp\t", "fivefold export "),
    ("fivefold export run out --mod\tc\t", "fivefold export run out --model critic "),
    ("fivefold export run out --to meg\t", "fivefold export run out --to megatron "),
    ("fivefold data gs\t", "fivefold data gsm8k "),
    # A key is not over where its name is, and has values of its own.
    ("fivefold train run.yaml algorithm.nam\tgr\t", "fivefold train run.yaml algorithm.name=grpo "),
    (
        "fivefold train run.yaml trainer.steps=1 algorithm.nam\tgr\t",
        "fivefold train run.yaml trainer.steps=1 algorithm.name=grpo ",
    ),
    ("fivefold train policy.offload.parameters=t\t", "fivefold train policy.offload.parameters=true "),
    ("fivefold train my\t", r"fivefold train my\ run.yaml "),
    ("fivefold train data.train=ro\t", "fivefold train data.train=rows.jsonl "),
    ("fivefold report algorithm.nam\t", "fivefold report algorithm.nam"),
]


@needs("zsh")
@pytest.mark.parametrize("line", COMPLETED)
def test_zsh_completes_what_is_typed(tmp_path, line):
    (tmp_path / "script").write_text(written("zsh"))
    (tmp_path / "my run.yaml").touch()
    (tmp_path / "rows.jsonl").touch()
    assert zsh(tmp_path, line[0], 'eval "$(< ./script)"') == line[1]


@needs("zsh")
def test_zsh_loads_the_script_at_the_first_tab(tmp_path):
    (tmp_path / "_fivefold").write_text(written("zsh"))
    source = "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u"
    assert zsh(tmp_path, "fivefold data gs\t", source) == "fivefold data gsm8k "


def fish(directory, line: str) -> list[str]:
    """What fish offers after a line, without descriptions."""
    done = subprocess.run(
        ["fish", "--no-config", "-c", "source script; complete -C $argv[1]", line],
        capture_output=True, text=True, check=True, cwd=directory, env={**os.environ, "HOME": str(directory)},
    )  # fmt: skip
    assert done.stderr == ""
    return [offered.partition("\t")[0] for offered in done.stdout.splitlines()]


@needs("fish")
def test_fish_completes_what_is_typed(tmp_path):
    (tmp_path / "script").write_text(written("fish"))
    (tmp_path / "my run.yaml").touch()
    (tmp_path / "rows.jsonl").touch()
    assert {"train", "check", "init", "doctor", "export"} <= set(fish(tmp_path, "fivefold "))
    assert fish(tmp_path, "fivefold exp") == ["export"]
    assert fish(tmp_path, "fivefold export run out --mod") == ["--model"]
    assert sorted(fish(tmp_path, "fivefold export run out --model ")) == ["critic", "policy", "prm"]
    assert fish(tmp_path, "fivefold export run out --to meg") == ["megatron"]
    assert fish(tmp_path, "fivefold data gs") == ["gsm8k"]
    assert set(fish(tmp_path, "fivefold check algorithm.name=")) == {f"algorithm.name={name}" for name in METHODS}
    assert fish(tmp_path, "fivefold train run.yaml engine.mode=i") == ["engine.mode=in_process"]
    # Where values are known files are none, and where they are not they are.
    assert sorted(fish(tmp_path, "fivefold train policy.offload.parameters=")) == [
        "policy.offload.parameters=false",
        "policy.offload.parameters=true",
    ]
    assert fish(tmp_path, "fivefold train run.yaml trainer.steps=1 engine.mode=i") == ["engine.mode=in_process"]
    assert fish(tmp_path, "fivefold train my") == ["my run.yaml"]
    assert fish(tmp_path, "fivefold train data.train=ro") == ["data.train=rows.jsonl"]
    assert fish(tmp_path, "fivefold report algorithm.nam") == []


@pytest.mark.parametrize(("shell", "checked"), [("bash", ["bash", "-n"]), ("zsh", ["zsh", "-n"]), ("fish", ["fish", "-n"])])
def test_scripts_are_of_their_shell(tmp_path, shell, checked):
    text = written(shell)
    assert "algorithm.name=" in text and "--shard-gb" in text.replace("-l ", "--")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(text)
    subprocess.run([*checked, tmp_path / "script"], check=True)
