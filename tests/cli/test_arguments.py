"""A run without a YAML file: its keys stand on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fivefold import cli
from fivefold.config import RunConfig
from fivefold.keys.findings import Findings


def complaints(capsys, *arguments: str) -> list[str]:
    assert cli.main(list(arguments)) == 2
    return capsys.readouterr().err.removeprefix("fivefold: ").splitlines()


@pytest.mark.parametrize("command", ["check", "train"])
def test_all_missing_and_misspelled_keys_are_named_at_once(capsys, command):
    assert complaints(capsys, command, "data.tran=[a.jsonl]", "trainer.stps=3") == [
        "unknown key 'data.tran': did you mean 'data.train'?",
        "unknown key 'trainer.stps': did you mean 'trainer.steps'?",
        "model.path is required: it has no default",
        "data.train is required: write data.train=[FILE.jsonl]",
    ]
    assert complaints(capsys, command, "model.path=m") == ["data.train is required: write data.train=[FILE.jsonl]"]
    assert complaints(capsys, command, "data.train=[a.jsonl]", "model.pth=m")[1:] == [
        "model.path is required: it has no default"
    ]


def test_keys_after_an_option_count_too(capsys):
    assert "override is written key=value" in complaints(capsys, "check", "model.path=m", "run.yaml")[0]
    with pytest.raises(SystemExit):
        cli.main(["check"])
    assert (
        "name the YAML file of the run, which `fivefold init` writes, its keys as in model.path=DIR"
        in capsys.readouterr().err
    )
    assert "eval needs the directory of a run, or its YAML file" in complaints(capsys, "eval", "model.path=m")[0]


def test_without_a_command_all_are_listed(capsys):
    assert cli.main([]) == 2
    output = capsys.readouterr().out
    assert all(f"    {command} " in output for command in ("init", "train", "check", "plan", "doctor"))


def test_a_directory_above_what_is_wanted_names_it(tmp_path, capsys):
    """Of runs the runs, of a run its checkpoint."""
    (tmp_path / "runs/first/checkpoints").mkdir(parents=True)
    (tmp_path / "runs/first/run.yaml").touch()
    (tmp_path / "runs/other").mkdir()
    for command in ("watch", "report"):
        assert complaints(capsys, command, str(tmp_path / "runs")) == [
            f"{tmp_path}/runs must be the directory of a run: those in it are {tmp_path}/runs/first"
        ]
    assert complaints(capsys, "export", str(tmp_path / "runs/first"), str(tmp_path / "out")) == [
        f"{tmp_path}/runs/first is a run without a checkpoint: it writes the first after trainer.save_every steps"
    ]


def test_a_directory_that_is_not_there_is_no_checkpoint(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: [a.jsonl], val: [b.jsonl]}\n")
    says = [f"checkpoint {tmp_path}/nope cannot be used: there is no such directory"]
    assert complaints(capsys, "export", str(tmp_path / "nope"), str(tmp_path / "out")) == says
    assert complaints(capsys, "eval", str(path), "--checkpoint", str(tmp_path / "nope")) == says


def test_eval_of_a_run_without_validation_files_is_refused_at_once(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: [a.jsonl]}\n")
    says = "nothing to evaluate: name validation files, as in data.val=[FILE.jsonl]"
    assert complaints(capsys, "eval", str(path)) == [says]


def test_a_file_may_have_an_equals_sign_in_its_name(tmp_path, capsys):
    path = tmp_path / "lr=1e-6.yaml"
    path.write_text("model: {path: m}\ntrainer: {stps: 1}\n")
    assert complaints(capsys, "check", str(path)) == ["unknown key 'trainer.stps': did you mean 'trainer.steps'?"]


@pytest.mark.parametrize(("option", "level"), [([], "debug"), (["--verbosity", "quiet"], "quiet")])
def test_verbosity_on_the_command_line_replaces_the_configurations(tmp_path, monkeypatch, option, level):
    started: list[RunConfig] = []
    monkeypatch.setattr("fivefold.cli._show_check", lambda config, quiet: Findings())
    monkeypatch.setattr("fivefold.launch.start.start", lambda config, *others: started.append(config) or 0)
    keys = ["model.path=m", "data.train=a.jsonl", "trainer.verbosity=debug", f"trainer.run_dir={tmp_path / 'run'}"]
    assert cli.main(["train", *option, *keys]) == 0
    assert [config.trainer.verbosity for config in started] == [level]


def test_ranks_read_the_run_that_the_command_line_describes(tmp_path, monkeypatch):
    """The same keys in a file describe the same run."""
    started = []
    monkeypatch.setattr("fivefold.cli._show_check", lambda config, quiet: Findings())
    monkeypatch.setattr("fivefold.launch.local.spawn", lambda words, *others: started.append(words) or 0)
    model = str(tmp_path / "m")
    Path(model).mkdir()
    keys = {
        "model.path": model,
        "data.train": "[a.jsonl, b.jsonl]",
        "algorithm.kl.coef": "1e-3",
        "trainer.run_dir": str(tmp_path / "run"),
    }
    assert cli.main(["train", *(f"{key}={value}" for key, value in keys.items())]) == 0
    [(module, requested)] = started
    nested = {
        "model": {"path": model},
        "data": {"train": ["a.jsonl", "b.jsonl"]},
        "algorithm": {"kl": {"coef": 1e-3}},
        "trainer": {"run_dir": str(tmp_path / "run")},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(nested))
    described = RunConfig.from_yaml(tmp_path / "run.yaml")
    assert module == "fivefold.launch.rank"
    # The command has checked and translated the run. Ranks only read it.
    for done in ("validate", "translate", "override"):
        monkeypatch.delattr(f"fivefold.config.run_config.{done}")
    assert RunConfig.restore(Path(requested)) == described
