"""A run's directory and what it prints: for its user alone, through no link, over no other file, as plain text."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import yaml

from fivefold.config import RunConfig
from fivefold.files import with_umask
from fivefold.launch.lock import locked
from fivefold.launch.processes import MOST_FILES
from fivefold.launch.run_directory import check_run_directory
from fivefold.launch.start import start
from fivefold.observability.report import write_report
from fivefold.terminal import plain
from tests.support.commands import fivefold
from tests.support.whole_runs import make_model, write_run

RUN = """
policy: {backend: "megatron:d1", tokens_per_micro_batch: 64}
algorithm: {name: grpo, group_size: 2}
data: {prompts_per_step: 2, max_response_tokens: 4}
trainer: {steps: 1, save_every: 1, loggers: [console, tensorboard]}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("directory")
    make_model(root, rows=16)
    write_run(root, RUN)
    return root


def test_ranks_and_their_processes_may_open_as_many_files_as_the_machine_allows(root, tmp_path):
    """A shell starts with 1,024, and a rank has a connection for each request to a server."""
    told = tmp_path / "told"
    reward = tmp_path / "reward.py"
    reward.write_text(
        f"import resource\n\ndef score(response, **_):\n"
        f"    open({str(told)!r}, 'w').write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))\n    return 0.0\n"
    )
    overrides = [f"trainer.run_dir={tmp_path / 'run'}", f"reward.functions={{'{reward}:score': 1.0}}"]
    command = [sys.executable, "-m", "fivefold.cli", "train", str(root / "run.yaml"), *overrides]
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (256, hard))
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=few)
    assert done.returncode == 0, done.stderr
    assert int(told.read_text()) == (MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard))


def _modes(run_dir: Path) -> dict[str, int]:
    return {str(path): stat.S_IMODE(path.lstat().st_mode) for path in [run_dir, *run_dir.rglob("*")]}


def test_no_other_user_reads_the_files_of_a_run_unless_its_umask_says_so(root, tmp_path, monkeypatch):
    before = os.umask(0o022)
    try:
        for given, mask in (([], 0o077), (["trainer.umask='027'"], 0o027)):
            run_dir = tmp_path / f"run-{mask}"
            done = fivefold("train", root / "run.yaml", f"trainer.run_dir={run_dir}", *given)
            assert done.returncode == 0, done.stderr
            modes = _modes(run_dir)
            assert len(modes) > 12
            assert not {path: oct(mode) for path, mode in modes.items() if mode & mask}
            assert mask == 0o077 or any(mode & 0o040 for mode in modes.values())
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("umasks", "mode"), [(["'077'"], 0o600), (["'027'"], 0o640), (["'027'", "'022'"], 0o640), (["[x]", "'000'"], 0o600)]
)
def test_a_report_is_read_by_those_who_read_all_its_runs(tmp_path, umasks, mode):
    for number, umask in enumerate(umasks):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "run.yaml").write_text(f"trainer: {{umask: {umask}}}")
        (tmp_path / str(number) / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with with_umask("000"):
        out = write_report([tmp_path / str(number) for number in range(len(umasks))])
    assert stat.S_IMODE(out.stat().st_mode) == mode


def test_a_directory_that_others_may_read_is_closed_to_them_with_a_line(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o2755)
    for umask, mode, line in (("027", 0o2750, True), ("077", 0o2700, True), ("027", 0o2700, False)):
        with with_umask(umask), locked(run_dir):
            assert stat.S_IMODE(run_dir.stat().st_mode) == mode
        assert (f": it is {mode:04o} now, as trainer.umask says" in capsys.readouterr().out) is line


def test_a_program_that_trains_keeps_its_own_umask(root, tmp_path, monkeypatch):
    config, seen = RunConfig.from_yaml(root / "run.yaml", [f"trainer.run_dir={tmp_path / 'run'}"]), []

    def spawn(*arguments: object) -> int:
        with with_umask("000") as in_force:
            seen.append((in_force, os.environ["FIVEFOLD_USERS_UMASK"]))
        return 0

    monkeypatch.setattr("fivefold.launch.local.spawn", spawn)
    monkeypatch.delenv("FIVEFOLD_USERS_UMASK", raising=False)
    with with_umask("022"):
        assert start(config) == 0
        with with_umask("000") as afterwards:
            assert afterwards == 0o022
    assert seen == [(0o077, "22")] and "FIVEFOLD_USERS_UMASK" not in os.environ


@pytest.mark.parametrize("name", ["lock", "run.yaml", "report.html", "metrics.jsonl", "logs", "checkpoints/latest"])
def test_nothing_is_written_through_a_link_in_a_run_directory(root, tmp_path, name):
    target, run_dir = tmp_path / "precious", tmp_path / "run"
    target.write_text("precious")
    (run_dir / name).parent.mkdir(parents=True)
    (run_dir / "lock").touch()
    (run_dir / name).unlink(missing_ok=True)
    (run_dir / name).symlink_to(target)
    done = fivefold("train", root / "run.yaml", f"trainer.run_dir={run_dir}")
    assert done.returncode == 2 and "is a symbolic link, to which a run does not write" in done.stderr
    assert "Traceback" not in done.stderr and str(run_dir / name) in done.stderr
    assert target.read_text() == "precious"


def test_a_report_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    run_dir, target = tmp_path / "run", tmp_path / "precious"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    target.write_text("precious")
    (run_dir / "report.html").symlink_to(target)
    done = fivefold("report", run_dir)
    assert done.returncode == 0, done.stderr
    assert target.read_text() == "precious" and not (run_dir / "report.html").is_symlink()


def test_a_directory_with_other_files_than_a_runs_is_refused(root, tmp_path):
    (tmp_path / "thesis.tex").touch()
    done = fivefold("train", root / "run.yaml", f"trainer.run_dir={tmp_path}")
    assert done.returncode == 2 and "holds files that are not a run's, thesis.tex; choose" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_run_continues_next_to_its_users_notes_and_in_what_a_scheduler_made(tmp_path):
    check_run_directory(tmp_path / "not there yet")
    for name in ("slurm-12.out", ".nfs0001", "run.yaml"):
        (tmp_path / name).touch()
    check_run_directory(tmp_path)
    for name in ("lock", "notes.txt"):
        (tmp_path / name).touch()
    check_run_directory(tmp_path)
    link = tmp_path.with_name(f"{tmp_path.name}-link")
    link.symlink_to(tmp_path)
    check_run_directory(link)


EVIL = "\x1b]0;taken\x07\x1b[2J\x9b31m\u202egnp.exe\rhidden\b"


def test_text_of_others_reaches_terminal_and_log_without_control_characters(root, tmp_path):
    (tmp_path / "evil.py").write_text(f"def digits(response):\n    raise ValueError({EVIL!r})\n")
    named = yaml.safe_dump({f"{tmp_path}/evil.py:digits": 1.0}, default_flow_style=True).strip()
    done = fivefold("train", root / "run.yaml", f"trainer.run_dir={tmp_path}/run", f"reward.functions={named}")
    output = done.stdout + done.stderr
    assert done.returncode != 0 and "\\u001b]0;taken" in output
    for text in (output, *(path.read_text() for path in (tmp_path / "run/logs").glob("*"))):
        assert not [char for char in text if char != "\n" and char != "\t" and (ord(char) < 32 or 127 <= ord(char) < 160)]
        assert "\u202e" not in text


def test_an_address_is_printed_without_its_password(root, tmp_path):
    judge = "reward.judge={url: ['http://someone:secret@judge:8000/v1'], model: m}"
    done = fivefold("check", root / "run.yaml", judge, "reward.functions={judge: 1.0}")
    output = done.stdout + done.stderr
    assert "http://...@judge:8000/v1" in output and "secret" not in output
    assert plain("at http://a:b@c:1 and ray://d:2") == "at http://...@c:1 and ray://d:2"


@pytest.mark.parametrize(
    "user", ["u:p", "u:p/w", "u:p@ss", "u:p@s/s@", "u:/", "u:", "ghp_token", "u%40x:p", ":p", "u:p:1/w", "u:1:2/w"]
)
def test_nothing_before_the_host_of_an_address_is_printed(user):
    assert plain(f"(http://{user}@h:1/x, wss://{user}@[::1])") == "(http://...@h:1/x, wss://...@[::1])"
    assert plain(f'["http://{user}@h","b@c",http://{user}@h]') == '["http://...@h","b@c",http://...@h]'


@pytest.mark.parametrize(
    "text",
    [
        "https://h/@user/x",
        "http://h:80/x@main",
        "http://[::1]:80/x@main",
        "hf://datasets/a@main",
        "a@b: c://d",
        "x://h?a=b@c",
    ],
)
def test_an_address_without_a_password_is_printed_as_it_is(text):
    assert plain(text) == text


def test_passwords_are_removed_in_a_time_that_is_linear_in_the_text():
    begin = time.monotonic()
    for piece in ("a://b:c", "a://b", "a://:", "a:", "://", "a://b:c@", "a://@"):
        plain(piece * 100_000)
    assert time.monotonic() - begin < 10
