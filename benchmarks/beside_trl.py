"""GRPO of the same model by Fivefold and by TRL's GRPOTrainer with vLLM in its process, on one GPU.

    python benchmarks/beside_trl.py OUT [--recipe gsm8k-grpo] [--steps 40] [--sides fivefold,trl] [--seeds 1] [--minutes 8]
    python benchmarks/beside_trl.py OUT --seeds 3 --at-once                 # curves only: all share the GPU
    python benchmarks/beside_trl.py OUT --shape Qwen3-1.7B --steps 6        # random weights: time and memory only
    python benchmarks/beside_trl.py OUT --shape Qwen3-1.7B --turns 16 [--tool-seconds 0.2]     # conversations with a tool
    python benchmarks/beside_trl.py OUT --dry-run                           # on a CPU; TRL samples with transformers

OUT is a directory of benchmarks/recipes.py, whose --model and --gsm8k it takes too: both sides start from its warm start,
with the data, reward, batch, lengths, learning rate, clipping and options of vLLM of the recipe. TRL keeps float32
weights under autocast to bfloat16, as Fivefold's optimizer does. Gradient checkpointing and sleep mode are off, since the
model leaves room, and so is its correction by the engine's log-probs, which the recipe does not have either. The embedding
of the pad token is trained, which transformers leaves out otherwise: SmolLM2 ends its responses with that token.

With --turns the weights of --shape make it call a tool at the end of each turn of 64 tokens (talking_model.py). The tool
is a coroutine that sleeps for a drawn time: log-normal, its median --tool-seconds, sigma 1.

TRL 1.16 accepts vLLM 0.22 to 0.31 and needs no patch for 0.26. Without a package index these wheels bring it (14 MB;
transformers, numpy, pyarrow, psutil and tqdm are there with Fivefold):

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --platform manylinux_2_28_x86_64 \\
      --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest trl-wheels \\
      trl==1.16.0 accelerate==1.15.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19 xxhash==4.1.0 fsspec==2026.9.0 \\
      pandas==3.1.1 python-dateutil==2.9.0.post0 six==1.17.0
    for wheel in trl-wheels/*.whl; do python -m zipfile -e "$wheel" SITE; done        # there; then SITE is on PYTHONPATH
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks import recipes, talking_model
from fivefold.config import RunConfig
from fivefold.distributed.ports import free_port

AT_ONCE = "at-once"
"""Tag of curves whose runs shared the GPU: their seconds are no measure."""
LOSSES = {"seq-mean-token-mean": "grpo", "token-mean": "dapo", "constant-length": "dr_grpo"}
"""Aggregation -> TRL's loss_type."""
SHAPE = {
    "algorithm.group_size": 8,
    "algorithm.updates_per_step": 1,
    "data.prompts_per_step": 32,
    "data.max_response_tokens": 512,
    "policy.skip_zero_advantage": "false",
    "policy.tokens_per_micro_batch": 8704,
    "engine.sampling.ignore_eos": "true",
    "engine.memory_fraction": 0.4,
    "engine.max_num_seqs": 256,
}
"""Keys that --shape changes in the recipe: every response has the longest length, and all of them are trained on.

Two groups with their shared prompts fit a micro-batch; TRL has eight padded samples in one. Nothing is offloaded: a GPU of
141 GB has room.
"""
TURN_TOKENS, ANSWER_WORDS, ANSWER_TOKENS, FIRST_TOKENS = 64, 24, 80, 512
"""Sampled tokens of a turn; words of the tool's answer, and most tokens with what the template writes around them; the
longest first context with the tool's schema."""
TOOL = '''
import asyncio, random


async def look(place: str) -> str:
    """Look around at a place.

    Args:
        place: Name of the place.
    """
    await asyncio.sleep({seconds} * random.lognormvariate(0, 1))
    return "{answer}"


def drawn(response: str, ground_truth: str) -> float:
    """Return a reward that depends on nothing, so that every group has a gradient."""
    return random.random()
'''


class Clock:
    """Seconds of a step by stage; a stage ends when the device has finished its work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begun = self.now()
        yield
        self.seconds[name] += self.now() - begun

    def now(self) -> float:
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def train_with_trl(path: Path, changes: list[str], run_dir: Path) -> None:
    """Write the metrics of a run of TRL under Fivefold's names to `run_dir`/metrics.jsonl."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # TRL takes the first port that is free, and so do two runs that start at the same time.
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from trl.trainer import grpo_trainer

    from fivefold.reward.rules import BUILT_IN
    from fivefold.user_code import is_user_code, load_user_code

    config = RunConfig.from_yaml(path, changes)
    data, algorithm, optimizer = config.data, config.algorithm, config.policy.optimizer
    (name,) = config.reward.functions
    score: Any = load_user_code(name) if is_user_code(name) else BUILT_IN[name].function
    rows = {kind: _rows(files) for kind, files in (("train", data.train), ("val", data.val))}
    rows["val"] = rows["val"][: config.eval.max_prompts]
    clock, on_gpu = Clock(), config.trainer.device == "cuda"
    run_dir.mkdir(parents=True, exist_ok=True)
    assert config.trainer.steps is not None
    samples, updates = data.prompts_per_step * algorithm.group_size, algorithm.updates_per_step
    turns, tools = 1, None
    if config.environment.tools:
        turns, tools = config.environment.max_turns, [load_user_code(tool) for tool in config.environment.tools]
    limit = data.max_total_tokens or data.max_prompt_tokens + data.max_response_tokens
    # TRL pads a micro-batch: it has as many samples as have the tokens of Fivefold's, of a third of the limit on average.
    length = limit if config.engine.sampling.ignore_eos else -(-limit // 3)
    at_once = min(samples // updates, 2 ** int(math.log2(max(1, config.policy.tokens_per_micro_batch // length))))

    parse = grpo_trainer.parse_response

    def parsed(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> Any:
        """Read a response as TRL does, and a call that it misses.

        Next to vLLM the parser of transformers 5.17 misses the call of the second turn, and TRL ends the conversation.
        """
        response = parse(tokenizer, ids, prefix=prefix, tools=tools)
        if turns > 1 and not response.get("tool_calls"):
            response |= talking_model.called(tokenizer.decode(ids))
        return response

    grpo_trainer.parse_response = parsed

    def right(completions: list[list[dict[str, str]]], ground_truth: list[str], **_: Any) -> list[float]:
        with clock.stage("reward"):
            texts = ["\n".join(message.get("content") or "" for message in messages) for messages in completions]
            return [score(text, truth) for text, truth in zip(texts, ground_truth, strict=True)]

    class Timed(trl.GRPOTrainer):
        """Measures its stages, and evaluates as Fivefold does."""

        sampled: list[list[float | None]] | None = None
        """vLLM's log-probs of the last samples."""
        apart: float | None = None
        """How far they are from the trainer's on average."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with clock.stage("generation"):
                return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, *arguments: Any, **named: Any) -> Any:
            if self.use_vllm and self.state.global_step != self._last_loaded_step:  # type: ignore[has-type]
                with clock.stage("weight_sync"):
                    self.vllm_generation.sync_weights()
                self._last_loaded_step = self.state.global_step
            with clock.stage("rollout"):
                ids, self.sampled = super()._generate_single_turn(*arguments, **named)
            return ids, self.sampled

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                return super()._get_per_token_logps_and_entropies(*arguments, **named)
            with clock.stage("logprobs"):
                result = super()._get_per_token_logps_and_entropies(*arguments, **named)
            if self.sampled is not None and turns == 1:
                self.apart = mean_distance(self.sampled, result[0])
            return result

        def evaluated(self) -> dict[str, float]:
            """Accuracy of greedy decoding, and of as many samples as the recipe has."""
            scores, k = {}, config.eval.samples
            self.model.eval()
            for count, temperature, mean, error in (
                (1, 0.0, "accuracy", "accuracy_stderr"),
                (k, config.eval.temperature, f"mean@{k}", f"stderr@{k}"),
            ):
                prompts = [row["prompt"] for row in rows["val"] for _ in range(count)]
                ids, images, fields = self._tokenize_prompts(prompts)
                with self._temperature(temperature):
                    completions, _ = self._generate_single_turn(ids, images, fields, count)
                texts = self.processing_class.batch_decode(completions, skip_special_tokens=True)
                truths = [row["ground_truth"] for row in rows["val"] for _ in range(count)]
                right_PG = torch.tensor([score(*pair) for pair in zip(texts, truths, strict=True)]).view(-1, count)
                mean_P = (right_PG >= 1).double().mean(1)
                scores[f"val/{path.stem}/{mean}"] = float(mean_P.mean())
                scores[f"val/{path.stem}/{error}"] = float(mean_P.std() / len(mean_P) ** 0.5)
            self.model.train()
            return scores

        @contextmanager
        def _temperature(self, temperature: float) -> Iterator[None]:
            holder, key = (self.vllm_generation, "temperature") if self.use_vllm else (self.generation_config, "do_sample")
            value = temperature if self.use_vllm else temperature > 0
            before = getattr(holder, key)
            setattr(holder, key, value)
            yield
            setattr(holder, key, before)

    class Rows(transformers.TrainerCallback):
        """Writes a row after every step, which has as many optimizer steps as the recipe says."""

        def __init__(self) -> None:
            self.begun, self.tokens = 0.0, 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.write(0, trainer.evaluated() if config.trainer.eval_before_train and rows["val"] else {})

        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step % updates == 0:
                clock.seconds.clear()
                self.begun = clock.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step % updates:
                return
            step, whole, seconds = state.global_step // updates, clock.now() - self.begun, dict(clock.seconds)
            generation = seconds.pop("generation")
            row = {f"time/{name}": value for name, value in seconds.items()}
            row |= {"time/step": whole, "time/train": whole - generation, "time/pack": generation - sum(seconds.values())}
            row |= self.metrics(whole)
            every = config.trainer.eval_every
            if rows["val"] and (step == config.trainer.steps or (isinstance(every, int) and every and step % every == 0)):
                row |= trainer.evaluated()
            self.write(step, row)

        def metrics(self, whole: float) -> dict[str, float]:
            last_values = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
            names = {
                "reward": "reward/mean",
                "frac_reward_zero_std": "reward/frac_reward_zero_std",
                "completions/mean_length": "response/length_mean",
            }
            row = {ours: last_values[theirs] for theirs, ours in names.items()}
            if trainer.apart is not None:
                row["rollout/logprob_diff_mean"] = trainer.apart
            tokens = trainer.state.num_input_tokens_seen
            row["throughput/tokens_per_second"] = (tokens - self.tokens) / whole
            self.tokens = tokens
            if on_gpu:
                row["memory/peak_gb"] = torch.cuda.max_memory_allocated() / 2**30
                torch.cuda.reset_peak_memory_stats()
            return row

        def write(self, step: int, row: dict[str, float]) -> None:
            with (run_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, **row, "wall": time.time()}) + "\n")

    chosen = algorithm.resolved
    arguments = trl.GRPOConfig(
        output_dir=str(run_dir), max_steps=config.trainer.steps * updates, seed=config.trainer.seed,
        per_device_train_batch_size=at_once, gradient_accumulation_steps=samples // updates // at_once,
        steps_per_generation=samples // at_once, num_generations=algorithm.group_size,
        max_completion_length=limit - data.max_prompt_tokens, max_tool_calling_iterations=turns - 1,
        temperature=config.engine.sampling.temperature,
        learning_rate=optimizer.lr, lr_scheduler_type="constant_with_warmup", warmup_steps=int(optimizer.warmup_steps),
        weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.clip_grad, adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1], adam_epsilon=optimizer.eps, beta=chosen.kl.coef or 0.0,
        epsilon=chosen.clip_low, epsilon_high=chosen.clip_high, loss_type=LOSSES[chosen.aggregate],
        scale_rewards=chosen.normalize,
        bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False,
        use_vllm=config.engine.kind == "vllm", vllm_mode="colocate",
        vllm_gpu_memory_utilization=config.engine.memory_fraction, vllm_max_model_length=limit,
        vllm_importance_sampling_correction=False, save_strategy="no", report_to=[], logging_strategy="no",
        disable_tqdm=True,
        generation_kwargs={"ignore_eos": True} if config.engine.sampling.ignore_eos else None,
    )  # fmt: skip
    if arguments.use_vllm:
        from trl.generation import vllm_generation

        # TRL has no argument for vLLM's own options, such as the size of its cache where other runs share the GPU.
        vllm_generation.LLM = partial(vllm_generation.LLM, **config.engine.vllm)
    trainer = Timed(
        model=config.model.path, reward_funcs=right, args=arguments, train_dataset=Dataset.from_list(rows["train"]),
        callbacks=[Rows()], tools=tools,
    )  # fmt: skip
    # transformers leaves out the gradient of the pad token as an input; in SmolLM2 that token also ends responses.
    trainer.model.get_input_embeddings().padding_idx = None
    trainer.train()


def mean_distance(sampled: list[list[float | None]], logprobs_BT: Any) -> float:
    """Return how far vLLM's log-probs of its samples are from the trainer's on average: far if it has other weights.

    TRL has None where a log-prob of vLLM is no number.
    """
    import torch

    rows = [torch.tensor([math.nan if one is None else one for one in row]) for row in sampled]
    sampled_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=math.nan)
    distance_BT = (sampled_BT.to(logprobs_BT) - logprobs_BT[:, : sampled_BT.shape[1]]).abs()
    return float(distance_BT.nanmean())


def _rows(files: list[str]) -> list[dict[str, Any]]:
    """Return prompts with their truths, as TRL takes them."""
    rows = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    return [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]


def side(bench: recipes.Bench, which: str, options: argparse.Namespace, seed: int) -> recipes.Curve:
    """Run one side from the recipe's warm start."""
    path = bench.recipe(options.recipe)
    # What an earlier command has measured is not continued.
    curve = bench.new_curve(f"beside-{which}", seed)
    if options.at_once:
        curve.tag = AT_ONCE
    run_dir = run_directory(bench, curve)
    shutil.rmtree(run_dir, ignore_errors=True)
    every = 0 if options.shape else options.eval_every
    length = [f"trainer.steps={options.steps}", f"trainer.eval_every={every}"]
    curve.changes = [*changes(bench, options), *curve.changes, *length, *options.set]
    common = [*curve.changes, f"trainer.run_dir={run_dir}", f"trainer.seed={seed}"]
    print(f"\n{curve.name}: {' '.join(curve.changes)}", flush=True)
    if which == "trl":
        command = [sys.executable, __file__, "--trl", str(path), str(run_dir), *common]
    else:
        command = [*recipes.FIVEFOLD, "train", str(path), *common, "trainer.resume=never", "trainer.stop_at={}"]
    with GPUMemory() as memory:
        bench.follow(curve, run_dir, command)
    config = RunConfig.from_yaml(path, curve.changes)
    samples = config.data.prompts_per_step * config.algorithm.group_size
    curve.medians = medians(run_dir, samples) | memory.peak
    bench.write(curve)
    print(f"{curve.name}: {stages(curve.medians, samples)}", flush=True)
    return curve


class GPUMemory:
    """Largest memory that all processes together have on this command's first GPU, looked at twice a second."""

    COMMAND = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--loop-ms=500")

    def __init__(self) -> None:
        self.peak: dict[str, float] = {}

    def __enter__(self) -> GPUMemory:
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        with suppress(FileNotFoundError):
            self._process = subprocess.Popen([*self.COMMAND, f"--id={first}"], stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._watch, args=(self._process,), daemon=True).start()
        return self

    def _watch(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            used = round(float(line) / 1024, 1)
            self.peak["memory/gpu_gib"] = max(used, self.peak.get("memory/gpu_gib", 0.0))

    def __exit__(self, *error: object) -> None:
        if hasattr(self, "_process"):
            self._process.kill()
            self._process.wait()


def changes(bench: recipes.Bench, options: argparse.Namespace) -> list[str]:
    """Return the keys that both sides change in the recipe."""
    if options.shape is None:
        return [f"model.path={bench.warm(options.recipe.split('-')[0])}"]
    shaped = SHAPE | {"data.val": "[]"}
    if options.turns > 1:
        model = talking_model.write(bench.out, options.shape, turn_tokens(bench.dry), bench.dry)
        shaped |= turns(bench, options.turns, options.tool_seconds)
    else:
        model = shape(bench.out, options.shape)
    return [f"model.path={model}", *(f"{key}={value}" for key, value in shaped.items())]


def turn_tokens(dry: bool) -> int:
    return 8 if dry else TURN_TOKENS


def turns(bench: recipes.Bench, number: int, seconds: float) -> dict[str, Any]:
    """Return the keys of conversations with a tool, whose file is written."""
    file, tokens = bench.out / "tool.py", turn_tokens(bench.dry)
    # A dry run's tokenizer has few words.
    first, answer = (4 * FIRST_TOKENS, 4 * ANSWER_TOKENS) if bench.dry else (FIRST_TOKENS, ANSWER_TOKENS)
    file.write_text(TOOL.format(seconds=seconds, answer=" ".join(["cellar"] * ANSWER_WORDS)))
    return {
        "environment": f"{{tools: ['{file}:look'], max_turns: {number}}}",
        "reward.functions": f"{{'{file}:drawn': 1.0}}",
        "data.max_prompt_tokens": first,
        "data.max_response_tokens": tokens,
        "data.max_total_tokens": first + number * (tokens + answer),
        "engine.sampling.ignore_eos": "false",
    }


def shape(out: Path, name: str) -> Path:
    """Return a directory with a random model of a published model's sizes, and the tokenizer of the recipe's model."""
    import torch
    import transformers

    from tests.support.public_shapes import SHAPES, write_shape

    directory = out / name
    if not directory.exists():
        config = transformers.AutoConfig.from_pretrained(write_shape(out / f"{name}.config", name))
        torch.manual_seed(0)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(directory)
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
            if (out / recipes.MODEL / file).exists():
                shutil.copy(out / recipes.MODEL / file, directory)
    assert name in SHAPES
    return directory


def medians(run_dir: Path, samples: int) -> dict[str, float]:
    """Return medians over the steps of a run, without the first two, which compile and allocate."""
    rows, _ = recipes.grown(run_dir / "metrics.jsonl", 0)
    values: dict[str, list[float]] = defaultdict(list)
    for row in (row for row in rows if row["step"] > 2):
        for name, value in row.items():
            if name.startswith("time/") or name in ("memory/peak_gb", "response/length_mean"):
                values[name].append(value)
        values["response/tokens_per_second"].append(samples * row["response/length_mean"] / row["time/step"])
    return {name: round(statistics.median(of_steps), 4) for name, of_steps in values.items()}


def stages(medians: dict[str, float], samples: int) -> str:
    """Return the medians of a run as a line."""
    if not medians:
        return "not measured: no step after the second"
    whole = medians["time/step"]
    seconds = {name[5:]: value for name, value in medians.items() if name.startswith("time/") and name != "time/step"}
    parts = ", ".join(f"{name} {value:.2f}" for name, value in seconds.items() if value >= 0.005)
    length, rate = medians["response/length_mean"], medians["response/tokens_per_second"]
    return (
        f"{whole:.2f} s a step = {parts}; {samples / whole:.1f} samples/s, {length:.0f} sampled tokens each, "
        f"{rate:,.0f} tokens/s, peak {medians.get('memory/peak_gb', 0):.1f} GiB in the process that trains, "
        f"{medians.get('memory/gpu_gib', 0):.1f} on the GPU"
    )


def run_directory(bench: recipes.Bench, curve: recipes.Curve) -> Path:
    return bench.out / "beside" / curve.name.removeprefix("beside-")


def last_length(bench: recipes.Bench, curve: recipes.Curve) -> float:
    """Return the mean number of sampled tokens of a response in the last step."""
    rows, _ = recipes.grown(run_directory(bench, curve) / "metrics.jsonl", 0)
    return float(rows[-1]["response/length_mean"])


def compared(bench: recipes.Bench, curves: list[recipes.Curve], shaped: bool) -> str:
    """Return how long a step of Fivefold takes next to TRL's, without the first two steps.

    Random models of a shape sample the same number of tokens on both sides, or the comparison means nothing.
    """
    medians: dict[str, list[float]] = defaultdict(list)
    for curve in curves:
        if seconds := [row[3] for row in curve.rewards if row[0] > 2]:
            medians[curve.recipe].append(statistics.median(seconds))
    if len(medians) < 2:
        return ""
    lengths = {curve.recipe: last_length(bench, curve) for curve in curves}
    if shaped and max(lengths.values()) > min(lengths.values()):
        return f"not compared: the tokens that a sample has differ: {lengths}"
    ours, theirs = (statistics.median(medians[f"beside-{which}"]) for which in ("fivefold", "trl"))
    return f"a step of Fivefold takes {ours / theirs:.2f} of TRL's time"


def later_rewards(curves: list[recipes.Curve]) -> str:
    """Return each side's mean reward in the second half of the steps that all runs have, with its standard error over the
    seeds."""
    measured = [curve for curve in curves if curve.rewards]
    last = min((len(curve.rewards) for curve in measured), default=0)
    rewards: dict[str, list[float]] = defaultdict(list)
    for curve in measured:
        rewards[curve.recipe].append(statistics.fmean(row[2] for row in curve.rewards[last // 2 : last]))
    parts = []
    for recipe, of_seeds in rewards.items():
        error = statistics.stdev(of_seeds) / len(of_seeds) ** 0.5 if len(of_seeds) > 1 else math.nan
        mean, side = statistics.fmean(of_seeds), recipe.removeprefix("beside-")
        parts.append(f"{side} {mean:.4f} ± {error:.4f} ({len(of_seeds)} seeds)")
    return f"mean reward of steps {last // 2 + 1} to {last}: {', '.join(parts) or 'not measured'}"


def main() -> int:
    if sys.argv[1:2] == ["--trl"]:
        path, run_dir, *overrides = sys.argv[2:]
        train_with_trl(Path(path), overrides, Path(run_dir))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", type=Path, help="directory of the model, if OUT has none")
    parser.add_argument("--gsm8k", type=Path, help="directory with train.jsonl and test.jsonl, if OUT has no data")
    parser.add_argument("--recipe", default="gsm8k-grpo")
    parser.add_argument("--sides", default="fivefold,trl")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="the lowest of them")
    parser.add_argument("--at-once", action="store_true", help="run all sides and seeds at once, for curves without times")
    parser.add_argument("--minutes", type=float, default=8.0, help="that each side has, its start included")
    parser.add_argument("--shape", help="a model of tests/support/public_shapes.py with random weights instead")
    parser.add_argument("--turns", type=int, default=1, help="of a conversation with a tool; needs --shape")
    parser.add_argument("--tool-seconds", type=float, default=0.0, help="median of the time that the tool takes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of both sides")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    if options.turns > 1 and options.shape is None:
        parser.error("--turns needs --shape, whose model is written so that it calls the tool")
    if options.at_once and options.shape is not None:
        parser.error("--at-once is for curves, and --shape for times: leave out one")
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    about = recipes.described_machine()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    runs = [(seed, which) for seed in seeds for which in options.sides.split(",")]
    if options.at_once:
        about["hardware"] += f", shared by {len(runs)} runs"
        options.set = [*recipes.shares(len(runs)), *options.set]
    print(f"{about['hardware']}; commit {about['commit']}; {about['versions']}", flush=True)
    tag = "-".join(filter(None, [options.shape, f"turns-{options.turns}" if options.turns > 1 else ""]))
    bench = recipes.Bench(out, options.minutes, options.dry_run, False, {}, about, tag)
    signal.signal(signal.SIGTERM, lambda *_: bench.stopping.set())
    with recipes.alone(out / "data.lock"):
        bench.write_recipes()
        if not (out / recipes.MODEL).exists():
            recipes.write_data(out, options.model, options.gsm8k, options.dry_run)
    # Two commands at once would slow each other down.
    with recipes.alone(out / "beside.lock"):
        curves = recipes.at_once(lambda seed, which: side(bench, which, options, seed), runs, options.at_once)
    told = "" if options.shape else recipes.table(curves) + "\n"
    result = later_rewards(curves) if options.at_once else compared(bench, curves, options.shape is not None)
    print(f"\n{told}{result}", flush=True)
    well = all(curve.rewards for curve in curves) and not bench.failures
    return 128 + signal.SIGTERM if bench.stopping.is_set() else 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
