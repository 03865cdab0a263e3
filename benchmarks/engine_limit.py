"""How many tokens a second vLLM samples alone and in our engine, with random keys and log-probs, in one or more processes.

`python benchmarks/engine_limit.py --model DIRECTORY [GROUP ...]` on one GPU: the directory's model (its config.json is read,
its weights are random) and Qwen3-1.7B's shape; prompts of 100 tokens, 8 responses of 200 to each, 256 and 1,024 sequences.
Each line is printed as it comes; what does not fit into `--seconds` is reported as not measured. `--dry-run`: tiny, on CPUs.

Compare lines of one run only: hosts differ by a third. "Alone" is `vllm.LLM` with its scheduler in the same process, as in
our ranks, whose parts of a step are timed; "default" is `vllm.LLM` as it is, with its scheduler in a second process. Both
have the sizes of cache and graphs that ours has. "Ours" is our engine as it is in a rank, without a trainer. "before" is
our engine with vLLM's own objects for log-probs, "after" with collected ones. Several processes share the GPU, and each
samples its part of the sequences; "servers" are those of engine.processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

ROOT = Path(__file__).resolve().parents[1]
SEQUENCES = (256, 1024)
PLAIN = {"plain": (False, None), "seeds": (True, None), "log-probs": (False, "objects"), "both": (True, "objects")}
"""Row -> (a seed for each request, how log-probs are returned)."""
OURS = {"before": (True, "objects"), "after": (True, "collected"), "after, without log-probs": (True, None)}


@dataclass(frozen=True)
class Group:
    """Processes that are measured together, and their rows."""

    model: str
    kind: str
    processes: int
    rows: tuple[str, ...]
    sequences: tuple[int, ...] = SEQUENCES
    arguments: tuple[tuple[str, Any], ...] = ()
    """vLLM's own."""

    @property
    def are_servers(self) -> bool:
        """Whether the processes are servers of one engine, as `engine.processes` starts them."""
        return self.kind == "servers"


MANY = SEQUENCES[1:]
GROUPS = {
    "small-alone": Group("small", "alone", 1, tuple(PLAIN)),
    "small-ours": Group("small", "ours", 1, tuple(OURS)),
    "small-alone-2": Group("small", "alone", 2, ("plain", "both")),
    "small-default-2": Group("small", "default", 2, ("plain", "both")),
    "small-servers-2": Group("small", "servers", 2, ("after",)),
    "large-alone": Group("large", "alone", 1, ("plain", "both")),
    "large-ours": Group("large", "ours", 1, ("before", "after")),
    "large-alone-2": Group("large", "alone", 2, ("plain", "both"), MANY),
    "large-default-2": Group("large", "default", 2, ("plain",), MANY),
    "large-servers-2": Group("large", "servers", 2, ("after",), MANY),
    "small-servers-4": Group("small", "servers", 4, ("after",)),
    "small-default-4": Group("small", "default", 4, ("plain",)),
    "small-alone-4": Group("small", "alone", 4, ("plain", "both")),
    "small-ours-2": Group("small", "ours", 2, ("before", "after"), MANY),
    "small-blocks-64": Group("small", "ours", 1, ("after",), MANY, (("block_size", 64),)),
}
"""In the order of what decides; the last ones may not fit into the time."""

LARGE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16, "head_dim": 128}
LARGE |= {"num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 40960}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
TINY |= {"num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512}


# --- one process -----------------------------------------------------------------------------------------------------


class Timers:
    """Seconds in the parts of a step that the host does, summed over the steps of a row; none of servers."""

    def __init__(self, inner: Any) -> None:
        self.seconds: dict[str, float] = {}
        self.steps = 0
        if inner is None:
            return
        core = getattr(inner.engine_core, "engine_core", None)
        parts = {"schedule": (getattr(core, "scheduler", None), "schedule")}
        parts |= {"update": (getattr(core, "scheduler", None), "update_from_output")}
        parts |= {"outputs": (inner.output_processor, "process_outputs"), "step": (inner, "step")}
        for name, (owner, method) in parts.items():
            if owner is not None:
                self._watch(name, owner, method)
        gc.callbacks.append(self._collected)

    def _collected(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        self.seconds["garbage"] = self.seconds.get("garbage", 0.0) + (now if phase == "stop" else -now)

    def _watch(self, name: str, owner: Any, method: str) -> None:
        original = getattr(owner, method)

        def timed(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*given, **named)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
                self.steps += name == "step"

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        """Milliseconds a step of each part since the last call."""
        times = {name: round(1e3 * seconds / max(1, self.steps), 2) for name, seconds in self.seconds.items()}
        self.seconds, self.steps = {}, 0
        return times


def child(given: dict[str, Any]) -> None:
    """Start an engine, then measure the rows that arrive as lines of JSON."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    if given["kind"] in ("alone", "ours"):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    large = not given["dry"]
    if not large:
        from fivefold.engines.vllm.arguments import ON_CPU

        os.environ |= ON_CPU
        torch.set_num_threads(1)
        torch._dynamo.config.disable = True
    engine = inner = None
    device = torch.device("cuda", 0) if large else torch.device("cpu")
    if given["kind"] == "servers":
        engine = servers(given, device)
    elif given["kind"] == "ours":
        engine = ours(given, device)
        inner = engine._llm.llm_engine
    else:
        import vllm

        inner = vllm.LLM(given["model"], load_format="dummy", **given["arguments"]).llm_engine
    timers = Timers(inner)
    print("@@ready", flush=True)
    for line in sys.stdin:
        row = json.loads(line)
        measure(engine, inner, {**row, "tokens": 2}, prompts_of(row["number"] + 500, row, given["vocab"]))
        prompts = prompts_of(row["number"], row, given["vocab"])
        timers.take()
        begin, tokens = time.time(), measure(engine, inner, row, prompts)
        print("@@" + json.dumps({"begin": begin, "end": time.time(), "tokens": tokens, "host": timers.take()}), flush=True)


def become_rank(device: Any) -> None:
    """Start the process group of a run with one rank."""
    from fivefold.distributed.ports import free_port
    from fivefold.megatron.mesh import init_process_group

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    init_process_group(device, timeout_minutes=10)


def servers(given: dict[str, Any], device: Any) -> Any:
    """Our engine of several servers on the rank's device, which have got random weights from it."""
    import torch
    import transformers

    from fivefold.distributed.ranks import Ranks
    from fivefold.engines.servers.server_engine import ServerEngine
    from fivefold.engines.vllm.client import VLLMServer
    from fivefold.engines.vllm.probe import answers
    from fivefold.engines.vllm.serve import server_process
    from fivefold.layout import ParallelLayout

    become_rank(device)
    directory, most = Path(given["model"]), given["arguments"]["max_num_seqs"]
    arguments = {"model": str(directory), "load_format": "dummy", **given["arguments"]}
    logs = Path(tempfile.mkdtemp())
    processes = {
        number: server_process(arguments, device, 1, logs / f"{number}.log", answers) for number in range(given["processes"])
    }
    engine = ServerEngine(
        directory, Ranks(ParallelLayout.parse("megatron:d1"), 10), device, partial(VLLMServer, ends=set(), run="benchmark"),
        lambda line: None, processes=processes, window=-(-most * 5 // 4), bucket_bytes=256 << 20, verify_every=0,
        can_sleep=False,
    )  # fmt: skip
    config = transformers.AutoConfig.from_pretrained(directory)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments["dtype"]))
    weights = {name: one.detach() for name, one in model.state_dict().items() if name in engine._expected}
    for version in range(2):
        begin = time.perf_counter()
        engine.update_weights(iter(weights.items()), version)
        print("@@" + json.dumps({"sync_seconds": round(time.perf_counter() - begin, 3)}), flush=True)
    return engine


def ours(given: dict[str, Any], device: Any) -> Any:
    """Our engine as it is in a rank, ready to sample with random weights."""
    from fivefold.engines.vllm.engine import VLLMEngine
    from fivefold.interfaces import EngineState
    from fivefold.layout import ParallelLayout

    become_rank(device)
    layout, tokenizer = ParallelLayout.parse("vllm:d1"), SimpleNamespace(eos_token_id=None)
    settings: dict[str, Any] = {"verify_every": 0, "can_sleep": False}
    engine = VLLMEngine(Path(given["model"]), tokenizer, layout, 0, device, given["arguments"], **settings)
    engine.state = EngineState.READY
    return engine


def prompts_of(number: int, row: dict[str, Any], vocabulary: int) -> list[list[int]]:
    """The prompts of a row, eight requests to each."""
    draw = random.Random(number)
    texts = [[draw.randrange(10, vocabulary - 10) for _ in range(row["prompt"])] for _ in range(row["sequences"] // 8)]
    return [text for text in texts for _ in range(8)]


def measure(engine: Any, inner: Any, row: dict[str, Any], prompts: list[list[int]]) -> int:
    """Sample the requests of a row; returns the number of tokens."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from fivefold.types import Request, Sampling

    draw = random.Random(row["number"])
    if row["logprobs"] == "collected" or (engine is not None and row["logprobs"] is None):
        sampling = Sampling(max_tokens=row["tokens"], ignore_eos=True, logprobs=row["logprobs"] is not None)
        requests = [Request(i, prompt, sampling, draw.getrandbits(62)) for i, prompt in enumerate(prompts)]
        completions = list(engine.generate(requests))
        if ends := sorted({one.finish_reason for one in completions} - {"length"}):
            raise RuntimeError(f"responses ended as {', '.join(ends)}, not by their length")
        assert all(len(one.logprobs) == (row["tokens"] if sampling.logprobs else 0) for one in completions)
        return sum(len(one.token_ids) for one in completions)
    options: dict[str, Any] = {} if row["logprobs"] is None else {"logprobs": 0, "flat_logprobs": True}
    options |= {"max_tokens": row["tokens"], "ignore_eos": True, "detokenize": False}
    for i, prompt in enumerate(prompts):
        seed = draw.getrandbits(62) if row["seeds"] else None
        params = SamplingParams(seed=seed, output_kind=RequestOutputKind.FINAL_ONLY, **options)
        inner.add_request(str(i), {"prompt_token_ids": prompt}, params)
    count = 0
    while inner.has_unfinished_requests():
        for output in inner.step():
            count += len(output.outputs[0].token_ids)
            if row["logprobs"] is not None:
                assert len(list(output.outputs[0].logprobs.logprobs)) == row["tokens"]
    return count


# --- all of them -----------------------------------------------------------------------------------------------------


@contextmanager
def children(group: Group, given: dict[str, Any], logs: Path, deadline: float) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes of a group, ready to measure; ended afterwards."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(given)]
    started: list[subprocess.Popen[str]] = []
    try:
        for number in range(1 if group.are_servers else group.processes):
            log = (logs / f"{number}.log").open("w")
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log, "text": True}
            started.append(subprocess.Popen(command, **pipes))
        for number, one in enumerate(started):
            while (line := answer(one, deadline)) is not None and line != "ready":
                print(f"    {line}", flush=True)
            if line is None:
                lines = (logs / f"{number}.log").read_text().strip().splitlines()
                raise RuntimeError(f"process {number} did not start: {' / '.join(lines[-2:])}")
        yield started
    finally:
        for one in started:
            one.kill()
            one.wait()


def answer(process: subprocess.Popen[str], deadline: float) -> str | None:
    """The next answer of a child, which vLLM's own lines surround; None if it ends or the time is over."""
    import select

    assert process.stdout is not None
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([process.stdout], [], [], min(left, 1.0))[0]:
            continue
        if not (line := process.stdout.readline()):
            return None
        if line.startswith("@@"):
            return line[2:].strip()
    return None


def arguments_of(config: dict[str, Any], group: Group, dry: bool, tokens: int) -> dict[str, Any]:
    """vLLM's arguments; each process has a cache for its part of the sequences, and what is left over is a tenth."""
    most = -(-max(group.sequences) // group.processes)
    heads, width = config["num_key_value_heads"], config.get("head_dim")
    width = width or config["hidden_size"] // config["num_attention_heads"]
    token = 2 * config["num_hidden_layers"] * heads * width * (4 if dry else 2)
    # The last block of a sequence may be filled in part; blocks have 128 tokens on a CPU.
    block = 128 if dry else 64
    longest = -(-tokens // block) * block
    cache = int(1.1 * most * longest * token)
    options: dict[str, Any] = {"dtype": "float32" if dry else "bfloat16", "max_model_len": longest, "max_num_seqs": most}
    options |= {"skip_tokenizer_init": True, "seed": 0, "kv_cache_memory_bytes": cache}
    if dry:
        return options | {"enforce_eager": True, "enable_chunked_prefill": False, "max_num_batched_tokens": 4096}
    captured = sorted({1, 8, 32, 64, 128, 256, 384, 512, 768, 1024})
    options |= {"gpu_memory_utilization": round(0.8 / group.processes, 2)}
    graphs = [size for size in captured if size <= most] + ([most] if most not in captured else [])
    return options | {"compilation_config": {"cudagraph_capture_sizes": graphs}} | dict(group.arguments)


def measured(name: str, group: Group, directory: Path, scale: Any, logs: Path, deadline: float) -> Iterator[dict[str, Any]]:
    """Yields the rows of a group as they come."""
    config = json.loads((directory / "config.json").read_text())
    given = {"kind": group.kind, "model": str(directory), "dry": scale.dry, "vocab": config["vocab_size"]}
    given["processes"] = group.processes
    given["arguments"] = arguments_of(config, group, scale.dry, scale.prompt + scale.tokens)
    begin = time.monotonic()
    with children(group, given, logs, deadline) as processes:
        yield {"group": name, "row": "start", "seconds": round(time.monotonic() - begin, 1)}
        for sequences in group.sequences:
            for number, row in enumerate(group.rows):
                seeds, logprobs = (PLAIN | OURS)[row]
                asked = {"sequences": sequences // len(processes), "prompt": scale.prompt, "tokens": scale.tokens}
                asked |= {"seeds": seeds, "logprobs": logprobs}
                for place, one in enumerate(processes):
                    assert one.stdin is not None
                    one.stdin.write(json.dumps({**asked, "number": 1000 * sequences + 50 * number + place}) + "\n")
                    one.stdin.flush()
                answers = [answer(one, deadline) for one in processes]
                if None in answers:
                    lines = (logs / f"{answers.index(None)}.log").read_text().strip().splitlines()
                    raise RuntimeError(f"{row} at {sequences}: {' / '.join(lines[-2:]) or 'the time is over'}")
                results = [json.loads(answer_line) for answer_line in answers if answer_line is not None]
                seconds = max(one["end"] for one in results) - min(one["begin"] for one in results)
                rate = round(sum(one["tokens"] for one in results) / seconds)
                yield {
                    "group": name, "row": row, "sequences": sequences, "processes": group.processes,
                    "tokens_per_second": rate, "host_ms_a_step": results[0]["host"],
                }  # fmt: skip


def compared(rows: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What ours reaches of the best that vLLM alone reaches without seeds and log-probs, and of our engine before."""
    for model in ("small", "large"):
        for sequences in SEQUENCES:
            of = [row for row in rows if row["group"].startswith(model) and row.get("sequences") == sequences]
            rated = {what: [row for row in of if row["row"] == what] for what in RATED}
            if all(rated.values()):
                best = {what: max(rows_of, key=_rate) for what, rows_of in rated.items()}
                before = min(rated["before"], key=lambda row: row["processes"])
                yield f"{model}, {sequences} sequences", {
                    "vllm_alone": _rate(best["plain"]), "with": best["plain"]["group"],
                    "ours": _rate(best["after"]), "of": best["after"]["group"],
                    "of_alone": round(_rate(best["after"]) / _rate(best["plain"]), 3),
                    "of_before": round(_rate(best["after"]) / _rate(before), 2),
                }  # fmt: skip


def _rate(row: dict[str, Any]) -> int:
    return int(row["tokens_per_second"])


RATED = ("plain", "before", "after")


def hardware(dry: bool) -> str:
    import torch

    commit = os.environ.get("FIVEFOLD_COMMIT") or subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout  # fmt: skip
    device = "CPU" if dry else torch.cuda.get_device_name()
    return f"{device}, {os.cpu_count()} cores; torch {torch.__version__}; commit {commit.strip() or 'unknown'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all of them if none is named")
    parser.add_argument("--model", type=Path, help="directory of the small model (default: SmolLM2-135M's shape)")
    parser.add_argument("--seconds", type=float, default=470.0, help="for all groups together (default: 470)")
    parser.add_argument("--group-seconds", type=float, default=120.0, help="for each group (default: 120)")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on a CPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        child(json.loads(chosen.child))
        return 0
    if unknown := set(chosen.groups) - set(GROUPS):
        parser.error(f"there is no group {', '.join(sorted(unknown))}: choose from {', '.join(GROUPS)}")
    scale = SimpleNamespace(dry=chosen.dry_run, prompt=8 if chosen.dry_run else 100, tokens=8 if chosen.dry_run else 200)
    print(f"hardware: {hardware(chosen.dry_run)}", flush=True)
    end, rows, failed = time.monotonic() + chosen.seconds, [], 0
    with tempfile.TemporaryDirectory() as scratch:
        models = {"small": chosen.model or shape_of(Path(scratch) / "small", SMALL), "large": Path(scratch) / "large"}
        shape_of(models["large"], LARGE)
        if chosen.dry_run:
            models = dict.fromkeys(models, shape_of(Path(scratch) / "tiny", TINY))
        for name in chosen.groups or GROUPS:
            deadline = min(end, time.monotonic() + chosen.group_seconds)
            if end - time.monotonic() < 20:
                print(f"{name}: not measured, the time is over", flush=True)
                continue
            try:
                logs = Path(tempfile.mkdtemp(dir=scratch))
                for row in measured(name, GROUPS[name], models[GROUPS[name].model], scale, logs, deadline):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
            except RuntimeError as error:
                failed += 1
                print(f"{name}: not measured: {error}", flush=True)
        for what, best in compared(rows):
            print(f"{what}: {json.dumps(best)}", flush=True)
    return 1 if failed else 0


SMALL = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "head_dim": 64}
SMALL |= {"num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}


def shape_of(directory: Path, sizes: dict[str, Any]) -> Path:
    """A directory with the config.json of these sizes: Llama's for SmolLM2, Qwen3's otherwise. Weights are random."""
    family = ("llama", "LlamaForCausalLM") if sizes is SMALL else ("qwen3", "Qwen3ForCausalLM")
    config = {"model_type": family[0], "architectures": [family[1]], "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "torch_dtype": "bfloat16", **sizes}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


if __name__ == "__main__":
    sys.exit(main())
