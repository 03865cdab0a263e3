"""Compare runs whose models have layouts and GPUs of their own with the same run on one layout, on two GPUs.

`python benchmarks/role_layouts.py [PART ...] [--seconds N]`: every part (`PARTS` below), or those named, each for N seconds
at most. What a part measures is printed as it comes. `--dry-run`: tiny models on ranks of CPUs. vLLM samples and judges;
where it is not installed, transformers samples, and the parts with a judge are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from benchmarks.harness import Part, peak_gib, run
from fivefold.columns import Column
from fivefold.config import RunConfig
from fivefold.models.families import load_spec
from fivefold.plan.memory import Other, Sharded, estimate_memory
from fivefold.plan.roles import memory_of
from tests.megatron.test_role_layouts import Case, differences, updates
from tests.support.commands import fivefold
from tests.support.gpu_models import random_batch
from tests.support.shards import shard_of_replica
from tests.support.tiny_models import make_classifier, make_model
from tests.support.two_steps import BOUNDS, OBJECTIVE, POLICY
from tests.support.whole_runs import REWARD, make_judge
from tests.support.whole_runs import make_model as make_model_and_data

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

ALONE = Case("d1", "d1", "d1")
PAIRS = [
    Case("t2", "d2", "t2"),
    Case("d2", "t2", "t2"),
    Case("t2", "t2", "t2"),
    Case("d1", "d1", "d1", first={"reference": 1}),
    Case("d1", "d1", "d1", first={"reference": 1, "critic": 1}),
]
"""Layouts that are compared: ROLL's pair (policy and reference on other layouts of the same GPUs), one layout for all
models, and
models on a GPU of their own."""
LOGPROB_BOUND = 4e-6
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
SAMPLED = {"backend": "transformers"}
"""Engine of the compared runs. vLLM batches requests as they come: two runs of one layout drew other samples in bfloat16."""
NEAR = 0.15
"""Largest difference between a measured peak of memory and its estimate, as a share of the estimate."""


# --- what runs on a rank ---------------------------------------------------------------------------------------------


def peak_of_roles(mesh: Mesh, case: Case, directory: Path, tokens: int, samples: int, length: int) -> float:
    """Return this rank's peak of memory in GiB: log-probs of the reference and an update of the policy, twice."""
    from fivefold.backends import Meshes
    from fivefold.distributed.redealing import on_replicas_of
    from fivefold.megatron.model import MegatronModel

    meshes = Meshes(mesh.ranks.on_layout(case.layout("policy")), mesh.device, 0, 10)
    settings = replace(POLICY, dtype="bfloat16", tokens_per_micro_batch=tokens)

    def model(role: str, **changes: Any) -> Any:
        role_mesh, there = meshes.of(case.layout(role), case.first.get(role, 0))
        made = None if there is None else MegatronModel(directory, settings, there, **changes)
        return on_replicas_of(meshes.ranks, made, role_mesh)

    policy, reference = model("policy", total_updates=2), model("reference")
    mine = shard_of_replica(meshes.ranks, range(samples))
    batch = random_batch(samples, length, load_spec(directory).vocab).select(mine)
    for _ in range(2):
        batch = batch.with_columns({Column.REF_LOGPROBS: reference.forward(batch)})
        policy.train_step(batch, OBJECTIVE.loss)
    return peak_gib(mesh)


# --- parts -----------------------------------------------------------------------------------------------------------


def equal(part: Part) -> None:
    """Claim that two PPO updates of tiny models in float32 are the same on each pair of layouts as in one process."""
    root = part.model("qwen3_1.7b").parent
    made = [make_model("qwen3", root / "tiny"), make_model("llama", root / "other"), make_classifier(root / "critic")]
    alone = part.measure("one process", "d1", updates, ALONE, *made)
    if alone is None:
        return
    for case in PAIRS:
        results = part.measure_all(str(case), f"d{case.world_size}", updates, case, *made)
        if results is not None:
            apart = differences(results, alone)
            # A GPU's products have other orders of summation than a CPU's, by which bounds grow a little.
            bounds = [bound * (4 if part.large else 1) for bound in (LOGPROB_BOUND, *BOUNDS)]
            names = ("log-probs and values", "losses", "norms", "parameters")
            shown = {name: float(f"{value:.1e}") for name, value in zip(names, apart, strict=True)}
            holds = all(value <= bound for value, bound in zip(apart, bounds, strict=True))
            part.claim(f"policy, reference, critic on {case}: two updates of one process", holds, shown)


def memory(part: Part) -> None:
    """Compare the fullest GPU's peak of memory with the estimate of `plan`, for Qwen3-1.7B's shape as policy and
    reference."""
    directory = part.model("qwen3_1.7b")
    tokens, samples, length = (16384, 64, 1024) if part.large else (64, 8, 24)
    spec = load_spec(directory)
    for case in PAIRS[:4]:
        what = f"policy, reference on {case.policy}, {case.reference}{'@1' if case.first else ''}"
        world = max(case.layout("policy").world_size, case.first.get("reference", 0) + case.layout("reference").world_size)
        peaks = part.measure_all(what, f"d{world}", peak_of_roles, case, directory, tokens, samples, length)
        if peaks is None:
            continue
        beside = Other(Sharded(spec, case.layout("reference")), case.first.get("reference", 0))
        guess = estimate_memory(
            Sharded(spec, case.layout("policy"), tokens_per_micro_batch=tokens), dtype="bfloat16", engine_sequences=0,
            max_sequence_tokens=2 * length, others={"reference": beside},
        ).total / 2**30  # fmt: skip
        holds = abs(max(peaks) / guess - 1) < NEAR or not part.large
        part.claim(what, holds, {"peak_gib": [round(peak, 2) for peak in peaks], "estimated_gib": round(guess, 2)})


def make_files(part: Part) -> Path:
    """Write the files of a run: policy, reference, reward model and judge with one tokenizer, prompts, and a reward
    function."""
    root = part.model("qwen3_1.7b").parent / "runs"
    if not root.exists():
        root.mkdir()
        sizes = {"hidden": 1024, "heads": 16, "layers": 8, "ffn": 2816} if part.large else {"hidden": 64, "heads": 2}
        make_model_and_data(root, **sizes, rows=512 if part.large else 64)
        flags = [word for name, size in sizes.items() for word in (f"--{name}", size)]
        for seed, name in enumerate(("reference", "judge-words"), 1):
            command = ["init-model", "qwen3", "--tokenizer", root / "tokenizer", "--seed", seed, "--out", root / name]
            done = fivefold(*command, *flags)
            if done.returncode:
                raise RuntimeError(done.stderr)
        make_judge(root)
        (root / "judge-words/chat_template.jinja").write_text(
            "{% for message in messages %}{{ message.content }}{% endfor %}"
        )
        (root / "reward.py").write_text(REWARD)
    return root


SAME = ("policy/loss", "policy/grad_norm", "policy/kl_reference", "reward/mean", "response/length_mean")
WANTED = (*SAME, "reward/judge", "rollout/logprob_diff_mean", "memory/peak_gb", "time/step", "time/rollout")


def run_of(part: Part, root: Path, what: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a GRPO run of two steps with a KL to another model; `sections` add keys to sections of the same
    name."""
    base: dict[str, dict[str, Any]] = {
        "model": {"path": f"{root}/model"},
        "policy": {"dtype": "float32", "tokens_per_micro_batch": 8192 if part.large else 256,
                   "optimizer": {"lr": 1.0e-3, "eps": 1.0e-4}},
        "reference": {"path": f"{root}/reference"},
        # The engine samples the same on both layouts: what differs is what the trainer computes of that.
        "engine": {"dtype": "bfloat16" if part.large else "float32", "memory_fraction": 0.3},
        "algorithm": {"name": "grpo", "group_size": 8, "kl": {"coef": 0.1}},
        "data": {"train": [f"{root}/data/train.parquet"], "prompts_per_step": 32 if part.large else 4,
                 "max_prompt_tokens": 16, "max_response_tokens": 64 if part.large else 12},
        "reward": {"functions": {f"{root}/reward.py:digits": 1.0}},
        "trainer": {"run_dir": f"{root}/{what}", "steps": 2, "save_every": 0, "device": "cuda" if part.large else "cpu",
                    "loggers": ["console"], "logged_samples_per_step": 64},
    }  # fmt: skip
    return base | {name: base.get(name, {}) | section for name, section in sections.items()}


def compared(part: Part, root: Path, runs: dict[str, dict[str, Any]], extra: tuple[str, ...] = ()) -> None:
    """Train all runs and claim that the first step of each equals that of the last."""
    rows = {what: part.train(what, run, WANTED) for what, run in runs.items()}
    for what, asked in runs.items():
        phases = memory_of(RunConfig.of(asked), load_spec(root / "model")).phases
        sizes = {phase: round(sum(parts.values()) / 2**30, 2) for phase, parts in phases.items()}
        peak = max((row["memory/peak_gb"] for row in rows[what] if "memory/peak_gb" in row), default=0.0)
        part.say(f"{what}: memory", {"peak_gib": round(peak, 2), "estimated_gib": sizes})
    *others, base = rows
    for what in others:
        if not (rows[what] and rows[base]):
            part.say(f"{what} beside {base}", "not compared: one of them is missing")
            continue
        (one,), (other,) = ([row for row in rows[name] if row["step"] == 1] for name in (what, base))
        values = {name: (one[name], other[name]) for name in (*SAME, *extra)}
        near = all(abs(a - b) <= (4 if part.large else 1) * (2e-5 * abs(b) + 1e-6) for a, b in values.values())
        shown = {name: [float(f"{value:.6g}") for value in both] for name, both in values.items()}
        ours, theirs = samples_of(root / what), samples_of(root / base)
        part.claim(f"{what}: the samples of {base}", ours == theirs != [], len(ours))
        part.claim(f"{what}: the first step of {base}", near, shown)
        if other["policy/kl_reference"] < 1e-3 or other["policy/grad_norm"] == 0:
            part.claim("the step has something to compare", False, shown)


def samples_of(run_dir: Path) -> list[str]:
    """Return the responses that a run sampled in its first step."""
    rows = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    return [row["response"] for row in rows if row["step"] == 1]


def roll(part: Part) -> None:
    """Compare whole runs with ROLL's pair of layouts: policy on t2, reference on d2 or on the policy's layout."""
    if part.large and part.gpus < 2:
        return part.say("whole runs", "needs 2 GPUs")
    root = make_files(part)
    common = {"policy": {"backend": "megatron:t2"}, "engine": SAMPLED}
    runs = {
        "two-layouts": run_of(part, root, "two-layouts", **common, reference={"backend": "megatron:d2"}),
        "one-layout": run_of(part, root, "one-layout", **common),
    }
    return compared(part, root, runs)


@contextmanager
def judge_server(part: Part, directory: Path, log: Path) -> Iterator[str]:
    """Start the server of a judge on the last GPU, apart from the run, and yield its address."""
    from fivefold.engines.vllm.probe import answers
    from fivefold.engines.vllm.serve import server_process

    device = torch.device("cuda", part.gpus - 1) if part.large else torch.device("cpu")
    given = {"model": str(directory), "served_model_name": str(directory), "max_model_len": 128, "seed": 0}
    given |= (
        {"kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.3}
        if part.large
        else {"kv_cache_memory_bytes": 64 << 20}
    )
    server = server_process(given, device, 1, log, answers, "127.0.0.1")
    try:
        server.start()
        server.wait()
        yield f"{server.address}/v1"
    finally:
        server.close()


def judged(part: Part) -> None:
    """Compare a run with the policy on one GPU, and reference, reward model and a vLLM judge on the other, with a run of all
    models on one GPU and the judge alone on the other."""
    if find_spec("vllm") is None:
        return part.say("judge", "skipped: vLLM is not installed")
    if part.large and part.gpus < 2:
        return part.say("judge", "needs 2 GPUs")
    from fivefold.data.tokenizer import load_tokenizer

    root = make_files(part)
    words = root / "judge-words"
    # It can say digits only, and which ones follows from its prompt.
    digits = [load_tokenizer(str(words)).encode(digit, add_special_tokens=False)[0] for digit in "0123456789"]
    judge = {
        "model": str(words), "verdict": "score", "pattern": r"(\d)", "scale": 9, "max_tokens": 2, "max_model_len": 128,
        "prompt": "{prompt}={response}", "timeout_seconds": 300,
        # One verdict at a time: in 16 bits a verdict can depend on those that the judge gives with it.
        "concurrency": 1, "request": {"logit_bias": {str(digit): 100 for digit in digits}},
    }  # fmt: skip
    functions = {f"{root}/reward.py:digits": 1.0, "judge": 1.0}

    def reward(judge: dict[str, Any], first_rank: int) -> dict[str, Any]:
        model = {"path": f"{root}/judge", "first_rank": first_rank} | ({"backend": "megatron:d1"} if first_rank else {})
        return {"functions": functions, "timeout_seconds": 300, "wait_seconds": 600, "judge": judge, "model": model}

    judge_engine = {"backend": "vllm:d1t1", "memory_fraction": 0.3}
    apart = {"backend": "megatron:d1", "first_rank": 1}
    with judge_server(part, words, root / "judge.log") as url:
        runs = {
            "apart": run_of(
                part, root, "apart", engine=SAMPLED, reference=apart, reward=reward(judge | {"url": [url]}, 1)
            ),
            "together": run_of(part, root, "together", engine=SAMPLED, reward=reward(judge | judge_engine, 0)),
        }  # fmt: skip
        compared(part, root, runs, ("reward/judge",))
    return None


PARTS: dict[str, Callable[[Part], None]] = {"equal": equal, "memory": memory, "roll": roll, "judged": judged}

if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import role_layouts

    sys.exit(run(role_layouts.__doc__, role_layouts.PARTS))
