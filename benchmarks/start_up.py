"""How long a run takes to its first response, by parts, and a rank until it has a million prompts.

    python benchmarks/start_up.py [1.7b] [8b] [8b-fsdp] [attention] [prompts] [--seconds N] [--rows ROWS]

`1.7b` and `8b` start the command twice with random weights: without compiled code, and with what the first run left in the
caches. They print the parts of the start, what vLLM says of its own, and the first three steps by stage; both models are
tiny on a CPU, where transformers samples unless vLLM is installed. `prompts` needs no GPU and writes a data set of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from benchmarks.engine_speed import grpo_run, write_data
from benchmarks.harness import Part, run
from fivefold.distributed.compiler_caches import VARIABLES
from fivefold.layout import ParallelLayout

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

FIRST_SAMPLE_SECONDS = 60.0
"""Goal: seconds from the command to the first response with warm caches."""
SECOND_STEP = 1.3
"""Goal: time of the second step over that of the third."""
SYNC_SECONDS = 1.0
"""Goal: seconds until vLLM in the ranks has new weights of 8B on `fsdp:`."""
ATTENTIONS = ((64, (9, 3), 64), (300, (9, 3), 64), (4, (16, 8), 128))
"""Sequences in a micro-batch, heads of queries and of keys, and their width, whose kernels FlashAttention compiles."""
VLLM_LINES = {
    "reading weights": r"Model loading took .* and ([\d.]+) seconds",
    "compiling": r"torch\.compile took ([\d.]+) s in total",
    "graphs": r"Graph capturing finished in ([\d.]+) secs",
    "profile, cache and warm-up": r"init engine \(profile, create kv cache, warmup model\) took ([\d.]+) s",
}
"""Part of vLLM's start -> its line in the log, with the seconds. The last one includes compiling and graphs."""


# --- the first response ----------------------------------------------------------------------------------------------


def first_sample(name: str, layout: str, engine: str) -> Callable[[Part], None]:
    def measure(part: Part) -> None:
        world = ParallelLayout.parse(f"megatron:{layout}").world_size
        if part.large and world > part.gpus:
            return part.say(name, f"not measured: needs {world} GPUs")
        root = part.model(name).parent
        write_data(root)
        chosen = engine_of(engine, 0.6)
        seconds_by_caches = {}
        for caches in ("cold", "warm"):
            settings = grpo_run(part, name, layout, root / f"{name}-{caches}", chosen)
            start = started(part, f"{name}, {layout}, {chosen['backend']}, {caches} caches", root, settings)
            if start is None:
                return None
            seconds_by_caches[caches] = start
        cold, warm = seconds_by_caches["cold"], seconds_by_caches["warm"]
        part.say(f"{name}, seconds to the first response, cold and warm", [cold["seconds"], warm["seconds"]])
        part.say(f"{name}, files in the caches of compilers", caches_of(root))
        if part.large and name == "qwen3_1.7b":
            is_soon = warm["seconds"] <= FIRST_SAMPLE_SECONDS
            part.claim(f"{name}: at most {FIRST_SAMPLE_SECONDS:.0f} s to the first response", is_soon, warm["seconds"])
        if part.large:
            ratio = round(warm["steps"][1] / warm["steps"][2], 2)
            part.claim(f"{name}: the second step takes at most {SECOND_STEP} of the third", ratio <= SECOND_STEP, ratio)
        return None

    measure.__doc__ = f"{name} on {layout}: from the command to the first response, and the first three steps."
    return measure


def started(part: Part, title: str, root: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Run three steps with caches below `root`; print and return what the start took and the seconds of each step."""
    run_dir, begin = Path(settings["trainer"]["run_dir"]), time.perf_counter()
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    environment |= {"XDG_CACHE_HOME": str(root / "caches"), "VLLM_LOGGING_LEVEL": "INFO"}
    rows = part.train(title, settings, ("time/",), environment, steps=settings["trainer"]["steps"])
    # A run that was cut off may have sampled before.
    if not (file := run_dir / "trace/start.json").exists():
        return None
    start = json.loads(file.read_text())
    part.say(f"{title}: {start['seconds']} s to the first response, by parts", start["parts"])
    if seconds_of_parts := vllm_parts(run_dir.with_name(f"{run_dir.name}.out").read_text()):
        part.say(f"{title}: of the engine's part, by vLLM's log", seconds_of_parts)
    if not rows:
        return None
    part.say(f"{title}, seconds until the third step has ended", round(time.perf_counter() - begin, 1))
    stages = {name: [row.get(f"time/{name}", 0.0) for row in rows] for name in ("step", "weight_sync")}
    return start | {"steps": stages["step"], "syncs": stages["weight_sync"]}


def sync_of_fsdp(part: Part) -> None:
    """Qwen3-8B's shape on fsdp:d2 with vLLM in its ranks: three steps, and the seconds until vLLM has the new weights."""
    if part.large and part.gpus < 2:
        return part.say("8b-fsdp", "not measured: needs 2 GPUs")
    name, layout = "qwen3_8b", "fsdp:d2"
    root = part.model(name).parent
    write_data(root)
    # Rollouts are short and without CUDA graphs: only `weight_sync` is looked at.
    engine = engine_of("vllm:d1t2", 0.3)
    if engine["backend"] != "transformers":
        engine["vllm"] = {"enforce_eager": True}
    settings = grpo_run(part, name, layout, root / "fsdp", engine)
    settings["data"]["max_response_tokens"] = min(256, settings["data"]["max_response_tokens"])
    # Next to 61 GiB of parameters, gradients and moments, activations of 16,384 tokens do not fit 80 GB. Moments stay on
    # the GPU, since `weight_sync` includes the time of copying them to the host.
    settings["policy"] |= {"tokens_per_micro_batch": 4096, "offload": {"gradients": True}}
    start = started(part, f"{name}, {layout}, {settings['engine']['backend']}", root, settings)
    if start is not None and part.large:
        sync = round(start["syncs"][-1], 2)
        part.claim(f"{name}: its weights are in vLLM after at most {SYNC_SECONDS} s", sync <= SYNC_SECONDS, sync)
    return None


def engine_of(backend: str, memory: float) -> dict[str, Any]:
    """Return the settings of vLLM in the ranks, or of transformers where it is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return {"backend": "transformers"}
    return {"backend": backend, "mode": "in_process", "memory_fraction": memory}


def vllm_parts(log: str) -> dict[str, float]:
    """Return the seconds of each part that vLLM's log names; several compilations or captures add up."""
    seconds_by_line = {name: [float(text) for text in re.findall(line, log)] for name, line in VLLM_LINES.items()}
    return {name: round(sum(seconds), 2) for name, seconds in seconds_by_line.items() if seconds}


def caches_of(root: Path) -> dict[str, str]:
    """Return the number of files and their MiB by library."""
    contents = {}
    for name in VARIABLES.values():
        sizes = [path.stat().st_size for path in (root / "caches/fivefold/compiled" / name).rglob("*") if path.is_file()]
        contents[name] = f"{len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
    return contents


# --- FlashAttention's kernels ------------------------------------------------------------------------------------------


def first_attention(mesh: Mesh, cache: str) -> dict[str, Any]:
    """Seconds of the first and the second forward and backward pass by shape, and what they compute, in a new process.

    `cache`: directory in which FlashAttention 4 keeps its kernels; empty: it keeps none.
    """
    import torch

    from tests.support.gpu_models import timed

    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] = "1" if cache else "0"
    os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"] = cache or "/nonexistent"
    from fivefold.backend.kernels import flash

    seconds, computed = {}, {}
    for pieces, (heads, groups), width in ATTENTIONS:
        torch.manual_seed(0)
        tokens = 16384 // pieces * pieces
        query, key, value = (
            torch.randn(tokens, number, width, device=mesh.device, dtype=torch.bfloat16, requires_grad=True)
            for number in (heads, groups, groups)
        )
        most = tokens // pieces
        ends = torch.arange(0, tokens + 1, most, device=mesh.device, dtype=torch.int32)

        def both(of: tuple[Any, ...] = (query, key, value, (ends, ends), (most, most), None, width**-0.5)) -> Any:
            output = flash.attention(*of)
            return output, torch.autograd.grad(output.float().pow(2).sum(), of[:3])

        name = f"{pieces} sequences, {heads} heads of {width}"
        (first, _), (second, (output, gradients)) = timed(mesh, both), timed(mesh, both)
        seconds[name] = [round(first, 2), round(second, 5)]
        digest = hashlib.sha256(output.detach().view(torch.int16).cpu().numpy().tobytes()).hexdigest()
        computed[name] = [digest, *(float(one.double().norm()) for one in gradients)]
    return {"seconds": seconds, "computed": computed}


def attention(part: Part) -> None:
    """FlashAttention 4's first passes in three new processes: no cache, an empty one, and what that process left there."""
    if not part.large:
        return part.say("attention", "not measured: needs a GPU")
    cache = str(part.directory("attention"))
    runs = {}
    for what, directory in (("no cache", ""), ("empty cache", cache), ("filled cache", cache)):
        result = part.measure(what, "d1", first_attention, directory)
        if result is not None:
            runs[what] = result
            part.say(f"{what}, seconds of the first and the second pass", result["seconds"])
    if len(runs) == 3:
        plain, kept = runs["no cache"]["computed"], runs["filled cache"]["computed"]
        same = all(plain[name][0] == kept[name][0] for name in plain)
        part.claim("kernels from the cache give the same output, bit for bit", same, len(plain))
        # Sums of gradients by atomics come in another order each time.
        apart = max(abs(a / b - 1) for name in plain for a, b in zip(plain[name][1:], kept[name][1:], strict=True))
        part.claim("and gradients of the same norm", apart < 1e-4, apart)
    return None


# --- a million prompts -----------------------------------------------------------------------------------------------


def write_rows(path: Path, rows: int) -> None:
    """Questions of 20 to 60 words as messages, with a ground truth."""
    draw = random.Random(0)
    words = [f"word{number}" for number in range(2000)]
    with path.open("w") as file:
        for number in range(rows):
            text = " ".join(draw.choices(words, k=draw.randint(20, 60)))
            row = {
                "prompt": [{"role": "user", "content": f"{text} What is {number} + 1?"}],
                "data_source": f"source-{number % 4}",
                "reward_model": {"ground_truth": str(number + 1)},
                "extra_info": {"index": number},
            }
            file.write(json.dumps(row) + "\n")


def read_prompts(data: str, tokenizer: str, cache: str) -> None:
    """What a rank does with its data, in a process of its own."""
    from fivefold.data.prompt_cache import open_prompts, store_prompts
    from fivefold.data.prompt_loader import PromptLoader
    from fivefold.data.prompts import Reading

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    path = store_prompts([data], (Path(tokenizer), False), Reading(512), Path(cache), lambda line: print(line, flush=True))
    store = open_prompts(path)
    sources = {source for _, source, _ in store.ground_truths()}
    ready = time.perf_counter() - begin
    loader = PromptLoader(store.prompts, 256, 0, True)
    begin = time.perf_counter()
    taken = loader.take(0, 256)
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    tokens = sum(len(prompt.token_ids) for prompt in loader.take(256, 256)) / 256
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        f"{len(store.prompts):,} prompts of {len(sources)} sources, about {tokens:.0f} tokens each: ready after {ready:.1f} "
        f"s; 256 of them in {first * 1000:.0f} ms, the next 256 in {(time.perf_counter() - begin) * 1000:.0f} ms; "
        f"{before / 1024:.0f} MiB before, {after / 1024:.0f} MiB at most ({len(taken)} prompts taken)",
        flush=True,
    )


def prompts(rows: int, part: Part) -> None:
    """A rank's start on many prompts: the first time, which tokenizes them, and afterwards."""
    from fivefold.data.tokenizer import train_tokenizer

    print(f"{rows:,} rows, {len(os.sched_getaffinity(0))} cores", flush=True)
    directory = part.directory("prompts")
    data, tokenizer, cache = (str(directory / name) for name in ("data.jsonl", "tokenizer", "cache"))
    write_rows(Path(data), rows)
    with Path(data).open() as file:
        train_tokenizer("bpe", list(islice(file, 2000)), Path(tokenizer), 4096)
    print(f"data {Path(data).stat().st_size / 2**20:.0f} MiB", flush=True)
    for name in ("first", "second"):
        print(f"{name} start:", flush=True)
        subprocess.run([sys.executable, __file__, "--start", data, tokenizer, cache], check=True)
    (path,) = Path(cache).glob("*.arrow")
    print(f"cache {path.stat().st_size / 2**20:.0f} MiB", flush=True)


def parts_of(rows: int) -> dict[str, Callable[[Part], None]]:
    prompts_part = partial(prompts, rows)
    prompts_part.__doc__ = prompts.__doc__
    return {
        "1.7b": first_sample("qwen3_1.7b", "d1", "vllm:d1"),
        "8b": first_sample("qwen3_8b", "t2", "vllm:d1t2"),
        "8b-fsdp": sync_of_fsdp,
        "attention": attention,
        "prompts": prompts_part,
    }


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=1_000_000)
    given, rest = parser.parse_known_args()
    return run(__doc__, parts_of(given.rows), rest)


if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import start_up

    if sys.argv[1:2] == ["--start"]:
        start_up.read_prompts(*sys.argv[2:])
    else:
        sys.exit(start_up.main())
