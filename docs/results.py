"""Writes docs/results.md, its pictures and README's line from benchmarks/results/smollm2/*.json: every number from a file.

benchmarks/recipes.py and benchmarks/beside_trl.py write these files; `make docs` after a new one is all there is to do.
"""

from __future__ import annotations

import inspect
import json
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fivefold.config import RunConfig
from fivefold.observability.curve import Series, drawn

DOCS = Path(__file__).resolve().parent
FILES = DOCS.parent / "benchmarks" / "results" / "smollm2"
EXAMPLES = DOCS.parent / "examples" / "smollm2"
RECIPES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
TASKS = {"words": "arithmetic in words", "gsm8k": "GSM8K"}
GSM8K_PROBLEMS = "1,319"
"""Number of GSM8K's test problems."""
SIDES = {"beside-fivefold": "Fivefold", "beside-trl": "TRL"}
AT_ONCE = "at-once"
"""Tag of runs that shared their GPU, whose seconds are no measure."""
STAGES = ("time/rollout", "time/weight_sync", "time/logprobs", "time/train")
SAMPLED = "response/tokens_per_second"
NOT_MEASURED = "not measured"
ON_CPU = ("words-sft-cpu", "words-grpo-cpu")
"""Recipes as `make real` runs them, with numbers below 10."""
GOALS = {
    "words": ("from below 0.2 to above 0.7", lambda before, after: before < 0.2 and after > 0.7),
    "gsm8k": ("to at least 1.5 times that of the warm start", lambda before, after: after >= 1.5 * before > 0),
}
"""Task -> (what GRPO is to make of the sampled accuracy, whether it has)."""
HEADS = (
    "seed",
    "steps",
    "minutes",
    "s a step",
    "greedy: before",
    "after",
    "sampled: before",
    "after",
    "reward",
    "GiB",
    "on",
)
AT_ONCE_HEADS = ("seed", "steps", "reward: steps {0}", "{1}", "sampled: first", "last", "on")
BESIDE_HEADS = (
    *("model", "seed", "s a step", "rollout", "sync", "log-probs", "training", "sampled tokens/s", "GiB"),
    *("sampled: first", "last", "on"),
)
HEAD = """
    # Results

    {generated}

    SmolLM2-135M-Instruct, a published model that needs no hub, trained by the recipes of
    [`examples/smollm2`](../examples/README.md). `benchmarks/recipes.py` ran them; each row's numbers come from the file that
    it links, which has the whole curve, the versions, and the keys that were changed. A row without numbers has not been
    measured.

        python examples/smollm2/get_model.py runs/model
        python benchmarks/recipes.py runs/smollm2 --model runs/model --gsm8k DIR --seeds 3

    *Greedy* is the share of test problems that greedy decoding solves, *sampled* that of four samples for each problem at
    temperature 1 (mean@4), both with standard errors over the problems: of all test problems, or of so many of them. GSM8K
    has {problems}; evaluations during a run take 256 of them, and those are what its picture shows. *Before* is the warm
    start. *Reward* is the mean reward of the samples in the first and in the last ten steps of training. Steps *30 of 600*
    mean that the run was stopped there, before its last step and before the accuracy that its recipe stops at. Arithmetic
    in words stops at the first evaluation of at least 0.75, so that number is a little too high on average. Rows of `make
    real` are runs on a CPU with numbers below 10, evaluated on 50 problems.
"""
BESIDE = """
    ## TRL

    `benchmarks/beside_trl.py` runs a recipe by Fivefold and by TRL's GRPOTrainer with vLLM in its process: the same model,
    data, reward, batch, lengths, learning rate and share of memory for vLLM, one after the other on the same GPU. Seconds
    are medians of the steps after the second; the first two compile and allocate. A row of another model's shape has random
    weights and samples of equal length, so it has no accuracy; there Fivefold's attention was PyTorch's, since flash-attn-4
    could not be imported, and a micro-batch of TRL has half as many samples.

    The sides of SmolLM2-135M differ in more than the system. Fivefold samples by four processes of vLLM, skips samples
    that have no advantage, which changes no update, and packs 32,768 tokens into a micro-batch; TRL has 128 padded samples
    in one. Responses had 89 and 98 tokens: by sampled token the ratio is 0.31. GiB are those of all processes on the GPU;
    for the other model's shape they are torch's in the process that trains, which has vLLM in it with TRL.
    [h200-smollm2.txt](../benchmarks/results/h200-smollm2.txt) has each step.

    transformers leaves out the gradient of the pad token's embedding, and SmolLM2 ends responses with that token; the script
    trains it on both sides. Then both take the same updates on the same samples (`tests/environments/test_beside_trl.py`).
    For the curves below, three seeds of each side ran at the same time on one GPU: the rewards agree within the noise of the
    seeds, as those of nine seeds of Fivefold and four of TRL do on a CPU
    ([cpu-trl.txt](../benchmarks/results/cpu-trl.txt)).
"""
TRIED = """\
GRPO and PPO on GSM8K with two learning rates, of which the recipes have the larger one, and DAPO on all problems instead of
the easier ones. GRPO's runs share a warm start, which is not that of the tables above; PPO's and DAPO's have others. On a
CPU, arithmetic in words was trained with four updates in a step instead of one: the rewards of the first 20 steps are
higher, those of the next seven are not ([cpu-words.txt](../benchmarks/results/cpu-words.txt)).

"""
TRIED_HEADS = ("keys", "steps", "s a step", "sampled: before", "after", "reward", "on")
Curve = dict[str, Any]


def curves() -> list[Curve]:
    return [{"tag": ""} | json.loads(path.read_text()) | {"file": path.name} for path in sorted(FILES.glob("*.json"))]


def results(generated: str, recorded: list[Curve] | None = None) -> str:
    """Return the page; `found` are the curves, by default those of the repository."""
    recorded = curves() if recorded is None else recorded
    parts = [inspect.cleandoc(HEAD).format(generated=generated, problems=GSM8K_PROBLEMS)]
    for task, shown in TASKS.items():
        parts += [f"## {shown[0].upper()}{shown[1:]}", _goal(task, recorded), _task(task, recorded)]
        if _series(task, recorded):
            parts.append(f"![Share of correct samples over the steps]({picture(task).name})")
    parts += ["## What was tried", TRIED + _tried(recorded), inspect.cleandoc(BESIDE), _beside(recorded), _at_once(recorded)]
    return "\n\n".join(filter(None, parts)) + "\n"


def picture(task: str) -> Path:
    return DOCS / f"results-{task}.svg"


def drawing(task: str, recorded: list[Curve] | None = None) -> str | None:
    """Return the picture of a task's curves: sampled accuracy of each run over its steps; None if nothing is measured."""
    recorded = curves() if recorded is None else recorded
    series = _series(task, recorded)
    return drawn(series, f"SmolLM2-135M, {_pictured(task, recorded)}").svg if series else None


def _pictured(task: str, recorded: list[Curve]) -> str:
    """Return the task of a picture, with the number of test problems of its points if evaluations took part of them."""
    recipes = filter(None, map(_recipe, _pictured_curves(task, recorded)))
    counts = sorted({recipe.eval.max_prompts for recipe in recipes if recipe.eval.max_prompts is not None})
    return TASKS[task] + "".join(f", {count} test problems" for count in counts)


def readme(page: str, recorded: list[Curve] | None = None) -> str:
    """Return README with its line on these results."""
    begin, end = "<!-- results: begin (written by `make docs`) -->\n", "<!-- results: end -->\n"
    recorded = curves() if recorded is None else recorded
    shows = "share of correct samples over the steps"
    pictures = [
        f'<img src="docs/{picture(task).name}" width="520" alt="{_pictured(task, recorded)}: {shows}">\n'
        for task in TASKS
        if _series(task, recorded)
    ]
    before, _, rest = page.partition(begin)
    text = "".join(pictures) + ("\n" if pictures else "") + _sentence(recorded) + "\n"
    return before + begin + text + end + rest.partition(end)[2]


def _sentence(recorded: list[Curve]) -> str:
    """Return what GRPO reaches on all test problems of each task, with the range over its seeds."""
    parts, hardware = [], dict[str, None]()
    for task, shown in TASKS.items():
        ends = [(curve, *_ends(curve, recorded)) for curve in _of(recorded, f"{task}-grpo")]
        whole = [(curve, before, after) for curve, before, after, problems in ends if problems is None]
        # How many runs shared a GPU changes times only.
        hardware |= dict.fromkeys(curve["hardware"].partition(", ")[0] for curve, _, _ in whole)
        first, last = ([_sampled(row[place])[0] for row in whole] for place in (1, 2))
        between = f"{_span(first)} to {_span(last)} with {_seeds(len(whole))}" if whole else NOT_MEASURED
        parts.append(f"{shown}: {between}{_stopped([curve for curve, _, _ in whole])}")
    where = f" ({' or '.join(hardware)})" if hardware else ""
    text = f"GRPO of SmolLM2-135M-Instruct, a published model of 135M parameters{where}; share of correct samples: "
    return textwrap.fill(f"{text}{'; '.join(parts)} ([results](docs/results.md)).", 120)


def _goal(task: str, recorded: list[Curve]) -> str:
    """Return what GRPO is to reach on a task, and what it has with each seed."""
    goal, is_reached = GOALS[task]
    parts = []
    for curve in _of(recorded, f"{task}-grpo"):
        before, after, problems = _ends(curve, recorded)
        first, last = (_sampled(row)[0] for row in (before, after))
        verdict = "reached" if is_reached(first, last) else "not reached"
        if _is_cut(curve):
            verdict += f"{'' if is_reached(first, last) else ' yet'}: the run was stopped after {_steps(curve)} steps"
        step, of = after.get("step", len(curve["rewards"])), f" of {problems} problems" if problems else ""
        parts.append(f"{first:.4f} to {last:.4f}{of} at step {step:.0f} with seed {curve['seed']} ({verdict})")
    measured = f"Measured: {'; '.join(parts)}." if parts else "It is not measured."
    return textwrap.fill(
        f"The goal of GRPO is to bring the sampled accuracy {goal}. {measured}", 120, break_on_hyphens=False
    )


def _recipe(curve: Curve) -> RunConfig | None:
    """Return the configuration of a recipe's run, without the device that it was run on; None for other scripts' runs."""
    path = EXAMPLES / f"{curve['recipe'].removesuffix('-cpu')}.yaml"
    return RunConfig.from_yaml(path, curve["changes"]) if path.exists() else None


def _is_cut(curve: Curve) -> bool:
    """Return whether a run was stopped before its last step and before the metrics that its recipe stops at.

    The steps of whole epochs depend on the data, which are not in the repository."""
    recipe = _recipe(curve)
    if recipe is None or recipe.trainer.steps is None or len(curve["rewards"]) >= recipe.trainer.steps:
        return False
    goal, last = recipe.trainer.stop_at, curve["evaluations"][-1]
    return not goal or any(last[name.rpartition("/")[2]] < least for name, least in goal.items())


def _steps(curve: Curve) -> str:
    """Return the number of steps, with that of the recipe if the run was stopped before."""
    recipe, count = _recipe(curve), len(curve["rewards"])
    return f"{count} of {recipe.trainer.steps}" if recipe is not None and _is_cut(curve) else f"{count}"


def _stopped(of_seeds: list[Curve]) -> str:
    """Return how many of a recipe's runs were stopped before their end, and where; an empty text if none was."""
    cut = [curve for curve in of_seeds if _is_cut(curve)]
    if not cut:
        return ""
    counts = sorted(len(curve["rewards"]) for curve in cut)
    steps = "-".join(dict.fromkeys(str(count) for count in (counts[0], counts[-1])))
    part = "" if len(cut) == len(of_seeds) else f"{len(cut)} of them "
    return f", {part}stopped after {steps} of {_steps(cut[0]).rpartition(' ')[2]} steps"


def _seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds"


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low}-{high}"


def _of(recorded: Iterable[Curve], recipe: str) -> list[Curve]:
    return [curve for curve in recorded if curve["recipe"] == recipe and curve["evaluations"] and not curve["tag"]]


def _before(curve: Curve, recorded: list[Curve]) -> tuple[dict[str, float] | None, int | None]:
    """Return the evaluation of the warm start, and its number of test problems if that was not all: the run's own first one,
    or, if that took part of the problems and the last checkpoint all of them, the last of the SFT that it began with.
    """
    task, kind, *device = curve["recipe"].split("-")
    if kind == "sft":
        return None, None
    sft = _of(recorded, "-".join([task, "sft", *device])) if curve["whole"] else []
    warm = [one for one in sft if one["commit"] == curve["commit"]]
    return (_after(warm[0]), _part(warm[0])) if warm else (curve["evaluations"][0], _evaluated(curve))


def _ends(curve: Curve, recorded: list[Curve]) -> tuple[dict[str, float], dict[str, float], int | None]:
    """Return an evaluation before a run and one after it, of the same test problems, and their number if that is not all.

    These are the last one of the SFT that it began with and its own last one; or, if they are of different problems, its own
    first and last one during the run."""
    before, problems = _before(curve, recorded)
    if before is not None and problems == _part(curve):
        return before, _after(curve), problems
    return curve["evaluations"][0], curve["evaluations"][-1], _evaluated(curve)


def _part(curve: Curve) -> int | None:
    """Return the number of test problems of a run that has not evaluated all of them; None if it has."""
    return None if curve["whole"] else _evaluated(curve)


def _evaluated(curve: Curve) -> int | None:
    """Return the number of test problems of a run's evaluations; None if they are all problems."""
    recipe = _recipe(curve)
    return None if recipe is None else recipe.eval.max_prompts


def _after(curve: Curve) -> dict[str, float]:
    return curve["whole"] or curve["evaluations"][-1]


def _greedy(row: dict[str, float]) -> tuple[float, float]:
    """Return the accuracy of greedy decoding and its standard error."""
    return row["accuracy"], row.get("accuracy_stderr", 0.0)


def _sampled(row: dict[str, float]) -> tuple[float, float]:
    """Return mean@k and its standard error."""
    (k,) = [name.removeprefix("mean@") for name in row if name.startswith("mean@")]
    return row[f"mean@{k}"], row.get(f"stderr@{k}", 0.0)


def _series(task: str, recorded: list[Curve]) -> Series:
    """Return sampled accuracy over steps for each run that samples to learn."""
    return [
        (
            f"{curve['recipe'].split('-', 1)[1]}, seed {curve['seed']}",
            [(int(row["step"]), _sampled(row)[0]) for row in curve["evaluations"]],
        )
        for curve in _pictured_curves(task, recorded)
    ]


def _pictured_curves(task: str, recorded: list[Curve]) -> list[Curve]:
    """Return the runs of a task that sample to learn, and were evaluated more than once."""
    recipes = [recipe for recipe in RECIPES if recipe.startswith(f"{task}-") and recipe != f"{task}-sft"]
    return [curve for recipe in recipes for curve in _of(recorded, recipe) if len(curve["evaluations"]) > 1]


def _task(task: str, recorded: list[Curve]) -> str:
    lines = _head("recipe", *HEADS)
    for recipe in (name for name in [*RECIPES, *ON_CPU] if name.startswith(f"{task}-")):
        file = recipe.removesuffix("-cpu")
        name = f"[`{file}`](../examples/smollm2/{file}.yaml)" + (", `make real`" if recipe in ON_CPU else "")
        rows = [f"| {name} | {' | '.join(_cells(curve, recorded))} |" for curve in _of(recorded, recipe)]
        lines += rows or [f"| {name} | {NOT_MEASURED} |" + " |" * 10]
    return "\n".join(lines)


def _tried(recorded: list[Curve]) -> str:
    lines = _head("recipe", *TRIED_HEADS)
    for curve in recorded:
        if curve["tag"] and curve["evaluations"] and curve["recipe"] not in SIDES:
            _, steps, _, seconds, _, _, before, after, reward, _, source = _cells(curve, recorded)
            keys = " ".join(f"`{change}`" for change in curve["changes"])
            lines.append(f"| `{curve['recipe']}` | {' | '.join([keys, steps, seconds, before, after, reward, source])} |")
    return "\n".join(lines if len(lines) > 2 else [*lines, f"| {NOT_MEASURED} |" + " |" * len(TRIED_HEADS)])


def _head(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


def _cells(curve: Curve, recorded: list[Curve]) -> list[str]:
    (before, problems), after, rewards = _before(curve, recorded), _after(curve), [row[2] for row in curve["rewards"]]
    samples = before is not None
    ends = [statistics.fmean(part) for part in (rewards[:10], rewards[-10:])] if rewards and samples else []
    shares = [
        _share(*values(row), of) if row else ""
        for values in (_greedy, _sampled)
        for row, of in ((before, problems), (after, _part(curve)))
    ]
    seconds = max([row["seconds"] for row in curve["evaluations"]] + [row[1] for row in curve["rewards"]])
    return [
        f"{curve['seed']}", _steps(curve), f"{seconds / 60:.1f}", f"{_median(curve):.2f}", *shares,
        " to ".join(f"{end:.3f}" for end in ends), f"{curve['peak_gib']:.1f}", _source(curve),
    ]  # fmt: skip


def _share(value: float, error: float, problems: int | None = None) -> str:
    return f"{value:.4f} ± {error:.4f}" + (f" (of {problems})" if problems else "")


def _median(curve: Curve) -> float:
    """Return the median seconds of a step, without the first two, which compile and allocate."""
    return statistics.median([row[3] for row in curve["rewards"][2:]] or [0.0])


def _source(curve: Curve) -> str:
    return f"[{curve['hardware']}, {curve['commit']}](../benchmarks/results/smollm2/{curve['file']})"


def _beside(recorded: list[Curve]) -> str:
    lines = _head("", *BESIDE_HEADS)
    timed = [curve for curve in recorded if curve["rewards"] and curve["tag"] != AT_ONCE]
    sides = {recipe: [curve for curve in timed if curve["recipe"] == recipe] for recipe in SIDES}
    seconds: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for recipe, shown in SIDES.items():
        rows = [f"| {shown} {_side(curve)}" for curve in sides[recipe]]
        lines += rows or [f"| {shown} | {NOT_MEASURED} |" + " |" * 11]
        for curve in sides[recipe]:
            seconds[_model(curve), curve["hardware"], curve["commit"]][recipe].append(_median(curve))
    # Sides are compared on one kind of machine and at one commit only.
    for (model, hardware, commit), of_sides in seconds.items():
        if len(of_sides) == len(SIDES):
            ours, theirs = (statistics.median(of_sides[recipe]) for recipe in SIDES)
            lines += ["", f"{model}: a step of Fivefold takes {ours / theirs:.2f} of TRL's time on {hardware} ({commit})."]
    return "\n".join(lines)


def _at_once(recorded: list[Curve]) -> str:
    """Return the curves of runs of both sides that shared a GPU, and their rewards over the seeds; "" if there are none.

    Rewards are those of the steps that all of these runs have; runs with one step are left out.
    """
    shared = [
        curve for curve in recorded if curve["recipe"] in SIDES and curve["tag"] == AT_ONCE and len(curve["rewards"]) > 1
    ]
    if not shared:
        return ""
    last = min(len(curve["rewards"]) for curve in shared)
    parts = [slice(0, last // 2), slice(last // 2, last)]
    named = [f"{part.start + 1} to {part.stop}" for part in parts]
    lines, means = _head("", *(head.format(*named) for head in AT_ONCE_HEADS)), []
    for recipe, shown in SIDES.items():
        later = []
        for curve in (curve for curve in shared if curve["recipe"] == recipe):
            halves = [statistics.fmean(row[2] for row in curve["rewards"][part]) for part in parts]
            later.append(halves[1])
            ends = [_share(*_sampled(curve["evaluations"][place])) for place in (0, -1)]
            steps = str(len(curve["rewards"]))
            cells = [str(curve["seed"]), steps, *(f"{half:.4f}" for half in halves), *ends, _source(curve)]
            lines.append(f"| {shown} | {' | '.join(cells)} |")
        if len(later) > 1:
            error = statistics.stdev(later) / len(later) ** 0.5
            means.append(f"{shown}'s {len(later)} seeds {statistics.fmean(later):.4f} ± {error:.4f}")
    told = f"\n\nMean reward of steps {named[1]}: {', '.join(means)}." if means else ""
    return "\n".join(lines) + told


def _model(curve: Curve) -> str:
    return f"{curve['tag']}'s shape" if curve["tag"] else "SmolLM2-135M"


def _side(curve: Curve) -> str:
    medians = curve.get("medians", {})
    stages = [f"{medians[name]:.2f}" if name in medians else "" for name in STAGES]
    evaluations = curve["evaluations"]
    accuracies = [_share(*_sampled(evaluations[place])) if evaluations else "" for place in (0, -1)]
    tokens = f"{medians[SAMPLED]:,.0f}" if SAMPLED in medians else ""
    cells = [
        _model(curve),
        str(curve["seed"]),
        f"{_median(curve):.2f}",
        *stages,
        tokens,
        f"{medians.get('memory/gpu_gib', curve['peak_gib']):.1f}",
        *accuracies,
    ]
    return "| " + " | ".join([*cells, _source(curve)]) + " |"
