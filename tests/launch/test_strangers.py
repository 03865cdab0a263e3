"""What users of other systems do first, word for word as the pages print it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.commands import fivefold, python
from tests.support.whole_runs import make_model, metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_program_on_the_page_of_trl_trains(tmp_path):
    pytest.importorskip("datasets")
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/coming-from/trl.md").read_text(), re.S)
    make_model(tmp_path)
    (tmp_path / "Qwen").mkdir()
    model = (tmp_path / "model").rename(tmp_path / "Qwen/Qwen3-0.6B")
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"max_position_embeddings": 40960}))
    rows = [{"prompt": [{"role": "user", "content": f"{a}+{a}="}], "answer": str(2 * a)} for a in range(32)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "train.py").write_text(program)
    done = python("train.py", env={"PYTHONPATH": str(ROOT / "src")}, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    trained = [row for row in metrics(tmp_path, "first") if row["step"] > 0]
    assert [row["step"] for row in trained] == [1, 2] and all("reward/mean" in row for row in trained)


@pytest.mark.slow
def test_the_first_command_of_the_readme_runs_the_script_on_the_page_of_verl(tmp_path, monkeypatch):
    [line] = re.findall(r"^    (fivefold train --from verl .*?) +#", (ROOT / "README.md").read_text(), re.M)
    (script,) = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/coming-from/verl.md").read_text(), re.S)
    make_model(tmp_path)
    (tmp_path / "run.sh").write_text(script)
    monkeypatch.chdir(tmp_path)
    done = fivefold(*shlex.split(line)[1:], f"--env=HOME={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "0 not supported, 0 unknown" in done.stdout
    assert [row["step"] for row in metrics(tmp_path, "verl")] == [0, 1, 2]
