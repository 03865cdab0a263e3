from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.config import load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/**/*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_valid_configuration(path):
    load_config(path)


def test_the_readme_s_configuration_is_valid(tmp_path):
    block = (ROOT / "README.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "run.yaml").write_text(block)
    config = load_config(tmp_path / "run.yaml")
    assert (config.layout.dp, config.layout.tp, config.samples_per_step) == (2, 4, 1024)


def test_the_siirl_page_s_arithmetic_comes_out():
    config = load_config(ROOT / "examples/qwen3-8b-grpo-megatron.yaml")
    assert config.layout.world_size == 8
    assert config.samples_per_step == 1024
    assert config.samples_per_step // config.algorithm.updates_per_step == 128
