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
SCRIPT = """\
set -x
MODEL=$HOME/model

python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/train.parquet \\
    data.val_files=$HOME/data/test.parquet \\
    data.train_batch_size=8 \\
    data.max_prompt_length=16 \\
    data.max_response_length=8 \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.fsdp_config.dtype=float32 \\
    actor_rollout_ref.rollout.name=hf \\
    actor_rollout_ref.rollout.n=4 \\
    trainer.logger='["console"]' \\
    trainer.n_gpus_per_node=2 \\
    trainer.nnodes=1 \\
    trainer.test_freq=-1 \\
    trainer.total_training_steps=2 \\
    trainer.default_local_dir=runs/verl $@
"""


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
    found = [row for row in metrics(tmp_path, "first") if row["step"] > 0]
    assert [row["step"] for row in found] == [1, 2] and all("reward/mean" in row for row in found)


@pytest.mark.slow
def test_the_first_command_of_the_readme_runs_a_script_of_verl(tmp_path, monkeypatch):
    [line] = re.findall(r"^    (fivefold train --from verl .*?) +#", (ROOT / "README.md").read_text(), re.M)
    make_model(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    done = fivefold(*shlex.split(line)[1:], f"--env=HOME={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "0 not supported, 0 unknown" in done.stdout
    assert [row["step"] for row in metrics(tmp_path, "verl")] == [0, 1, 2]
