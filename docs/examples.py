"""Writes examples/README.md: a table of all examples, with the memory and time that `check` and `plan` estimate."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from pathlib import Path

from fivefold.config import RunConfig
from fivefold.models.families import load_spec
from fivefold.plan.efficiency import Efficiencies
from fivefold.plan.estimate import Lengths, step_estimate
from fivefold.plan.hardware import Cluster
from fivefold.plan.measured import MEASURED
from fivefold.plan.processes import decided
from tests.support.public_shapes import write_shape

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
GPU = "h100-80g"
"""The GPU that memory and times are estimated for."""
RECIPES = {
    "qwen3-0.6b-gsm8k.yaml": "GRPO",
    "own_reward.yaml": "GRPO with a reward of your own (`own_reward.py`)",
    "smollm2/words-sft.yaml": "warm start on arithmetic in words (`words.py`) of a model that needs no hub (`get_model.py`)",
    "smollm2/words-grpo.yaml": "GRPO from that warm start",
    "smollm2/gsm8k-sft.yaml": "warm start on GSM8K (`gsm8k.py`) of the same model",
    "smollm2/gsm8k-grpo.yaml": "GRPO from that warm start",
    "smollm2/gsm8k-dapo.yaml": "DAPO from the same",
    "smollm2/gsm8k-ppo.yaml": "PPO with a critic from the same",
    "smollm2/gsm8k-lora.yaml": "GRPO with low-rank adapters from the same",
    "smollm2/gsm8k-async.yaml": "GRPO from the same, sampling ahead on a GPU of its own",
    "qwen3-8b-lora.yaml": "GRPO with low-rank adapters",
    "qwen3-8b-grpo-megatron.yaml": "GRPO on tensor and pipeline parallel ranks; siiRL's run",
    "verl/run.yaml": "GRPO, converted from verl's script `verl/run_qwen3_8b.sh`",
    "qwen3-dapo.yaml": "DAPO",
    "qwen3-ppo.yaml": "PPO with a critic",
    "qwen3-prime.yaml": "PRIME with a process reward model",
    "qwen3-8b-apart.yaml": "GRPO, sampling ahead on GPUs of its own",
    "qwen1.5-moe-grpo.yaml": "GRPO of a model with experts",
    "qwen3-30b-a3b-roll-two-layouts.yaml": "GRPO, policy and reference on two layouts; ROLL's run",
    "qwen3-30b-a3b-areal-32gpus.yaml": "GRPO on a Ray cluster, experts on a layout of their own; AReaL's run",
    "qwen3-sft.yaml": "SFT",
    "qwen3-dpo.yaml": "DPO",
}
"""GPU recipe -> what it shows, in the order of the table."""
OTHERS = {
    "demo/demo.sh": "`make demo`: SFT, then GRPO of a tiny model that learns to add",
    "guessing/guessing.sh": "GRPO over several turns: a tiny model learns a guessing game with hints (`guessing/envs.py`)",
    "agent/agent.sh": "the same game, played by an agent that asks the run's endpoint (`agent/agent.py`)",
    "frozenlake/frozenlake.sh": "GRPO over several turns: a tiny model learns to cross a frozen lake (`frozenlake/envs.py`)",
    "calculator/calculator.sh": "SFT, then GRPO over several turns with a tool (`calculator/tools.py`)",
    "quickstart.ipynb": "SFT, then GRPO with a reward of your own, from a notebook on a CPU",
    "gsm8k_tiny.sh": "every stage on real text: GSM8K, a new tokenizer, a small random model",
    "ray/sums.sh": "four ranks on a Ray cluster",
    "slurm/train.sbatch": "a run on two nodes under Slurm",
    "kubernetes/job.yaml": "a run on one node as a Job",
    "kubernetes/rayjob.yaml": "a run on two nodes under KubeRay",
}
"""Example without a table of memory -> what it shows."""
HEAD = """
    # Examples

    {generated}

    Copy one, change `model.path` and `data`, and run `fivefold check FILE` and `fivefold train FILE` from the
    repository's root. The first lines of a file name the command that writes its data.

    Memory is that of the fullest GPU in the largest phase of a step, as `fivefold check` estimates it; with vLLM it includes
    its cache, which takes what `engine.memory_fraction` allows. The time of a step is what `fivefold plan` estimates for
    {gpu} with prompts and responses half as long as their limits. Most recipes have not run on these GPUs and models:
    [status](../docs/status.md) lists what has.

    | file | shows | model | GPUs | GiB a GPU | s a step |
    |---|---|---|---|---|---|
"""


def examples(generated: str) -> str:
    """Return the page."""
    lines = [f"| [`{name}`]({name}) | {shows} | {_numbers(name)} |" for name, shows in RECIPES.items()]
    lines += [f"| [`{name}`]({name}) | {shows} | | | | |" for name, shows in OTHERS.items()]
    return inspect.cleandoc(HEAD).format(generated=generated, gpu=GPU) + "\n" + "\n".join(lines) + "\n"


def with_stand_ins(name: str, write: Callable[[str], Path], *overrides: str) -> RunConfig:
    """Return the configuration of a recipe on GPUs of the kind `GPU`; `write` makes a directory for each of its models."""
    path = EXAMPLES / name
    config = RunConfig.from_yaml(path)
    models = {"model.path": config.model.path}
    models |= {role.path_key: role.path for role in config.roles.models.values() if role.path != config.model.path}
    here = [f"{key}={write(model)}" for key, model in models.items()]
    return RunConfig.from_yaml(path, [*here, f"launch.gpu={GPU}", "trainer.device=cuda", *overrides])


def _numbers(name: str) -> str:
    """Return the model, GPUs, GiB and seconds of a recipe as cells."""
    model = RunConfig.from_yaml(EXAMPLES / name).model.path
    with tempfile.TemporaryDirectory() as directory:
        config = with_stand_ins(name, lambda path: write_shape(Path(directory) / path, Path(path).name))
        engine = config.engine.layout
        gpus = config.roles.world_size + (engine.world_size if engine is not None and config.engine.is_apart else 0)
        spec, cluster = load_spec(config.model.path), Cluster(GPU, gpus)
        config, _ = decided(config, spec)
        step = step_estimate(config, spec, cluster, Efficiencies(MEASURED, GPU), Lengths.of(config.data))
    return f"{Path(model).name} | {gpus} | {step.memory.total / 2**30:.1f} | {step.seconds:.1f}"
