"""AReaL's page about large mixtures of experts: its command, its strings and its settings, with the sizes of a toy."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from fivefold.layout import ParallelLayout
from tests.documents.pages import SETTINGS, check_change, for_a_toy, make_run, settings, text, train
from tests.eras.eras import nested
from tests.support.dialects import config

PAGE = "areal-megatron-moe"
REST = """
rollout: {{max_head_offpolicyness: 0}}
gconfig: {{n_samples: 2, max_new_tokens: 8}}
actor: {{ppo_n_minibatches: 2, recompute_logprob: true, optimizer: {{lr: 1.0e-6}}, reward_norm: {{mean_level: group, std_level: group}}, kl_ctl: 0.0}}
train_dataset: {{path: {root}/rows.jsonl, batch_size: 4, max_length: 32}}
total_train_steps: 2
saver: {{freq_epochs: 1}}
cluster: {{fileroot: {root}/runs}}
"""
"""The file that the page's command takes, which it leaves out."""


def command() -> list[str]:
    """The words of the page's command."""
    page = text(PAGE)
    words = page[page.index("python3 examples/math/gsm8k_rl.py") :].replace("\\\n", " ")
    return shlex.split(re.sub(r"[()|<>]", lambda match: "\\" + match[0], words))


def test_the_page_s_command_trains_in_small(tmp_path, monkeypatch):
    """Experts apart from attention, on a Ray cluster that the run starts, with servers on processes of their own."""
    monkeypatch.setenv("TMPDIR", "/tmp")
    make_run(tmp_path, "qwen3_moe")
    (tmp_path / "megatron_config.yaml").write_text(REST.format(root=tmp_path))
    small = {
        "<megatron_config.yaml>": f"{tmp_path}/megatron_config.yaml", "rollout.backend=sglang:d4t4": "rollout.backend=vllm:d1t1",
        "actor.backend=megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)": "actor.backend=megatron:(attn:d1p1t2c1|ffn:d1p1t1e2)",
        "cluster.n_nodes=4": "cluster.n_nodes=1", "cluster.n_gpus_per_node=8": "cluster.n_gpus_per_node=3",
        "actor.path=Qwen/Qwen3-30B-A3B": f"actor.path={tmp_path}/model",
    }  # fmt: skip
    words = [small.get(word, word) for word in command()]
    assert set(small) <= set(command())
    run_dir = f"trainer.run_dir={tmp_path}/runs/page"
    rows, run, told = train(tmp_path, "page", "areal", *words, *for_a_toy(tmp_path, "launch.ray={address: null}", run_dir))
    assert [row["step"] for row in rows if "policy/loss" in row] == [1, 2]
    assert (run["policy"]["backend"], run["engine"]["placement"]) == ("megatron:d1t2p1e2", "apart")
    assert (run["launch"]["backend"], run["trainer"]["deterministic"]) == ("ray", True)
    assert "2 expert x 1 expert-tensor" in told


def test_the_page_s_one_line_change_is_read():
    """`fsdp:d4` and `megatron:d4` are the trainers that they name; the run's directory is named by experiment and trial."""
    assert "from fsdp:d4 to megatron:d4" in " ".join(text(PAGE).split())
    tree = nested(
        {
            **SETTINGS["areal"]["run"],
            "experiment_name": "e",
            "trial_name": "t",
            "actor.path": "m",
            "rollout.backend": "vllm:d4",
        }
    )
    runs = [config("areal", f"actor.backend={backend}", tree=yaml.safe_dump(tree)) for backend in ("fsdp:d4", "megatron:d4")]
    assert [run.layout for run in runs] == [ParallelLayout.parse(text) for text in ("fsdp:d4", "megatron:d4")]
    assert all(run.trainer.run_dir.endswith("e/t") for run in runs), runs[0].trainer.run_dir


def test_the_page_s_string_of_layouts_has_its_sixteen_ranks():
    page = text(PAGE)
    layout = ParallelLayout.parse(re.search(r"^megatron:\(.*\)$", page, re.MULTILINE)[0])
    assert "This 16-GPU configuration uses PP=4" in page and (
        layout.world_size,
        layout.pp,
        layout.tp,
        layout.cp,
        layout.ep,
    ) == (16, 4, 2, 2, 4)


def test_the_settings_that_are_changed_are_those_of_the_page():
    printed = dict(word.split("=", 1) for word in command() if "=" in word)
    block = text(PAGE).partition("actor:\n")[2].partition("\n\n")[0]
    printed |= {
        f"actor.megatron.{key}": value for key, value in yaml.safe_load(f"actor:\n{block}")["actor"]["megatron"].items()
    }
    listed = {key: str(pair[0]) for key, pair in SETTINGS["areal"]["flips"].items()}
    assert listed == printed


@pytest.mark.parametrize("key", settings("areal"))
def test_every_setting_of_the_page_acts_or_the_report_says_why_not(key):
    check_change("areal", key)
