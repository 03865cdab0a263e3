"""Which statistic of the engine's and the trainer's log-probs tells rounding from another model: for `engine.max_kl`.

`python benchmarks/gate_statistics.py [--gguf FILE] [PART ...] [--seconds N] [--models DIRECTORY]`: every part (`PARTS`
below), or those named, each for N seconds at most. A part samples with an engine that has the trainer's weights, then with
engines that have a fault, and prints a row of statistics for each. On a CPU the random models are tiny. `--gguf` is a
published model of the Llama family in llama.cpp's format (package gguf); without it the part `published` is left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from benchmarks.harness import Part, run
from fivefold.engines.sampling import request_seed
from fivefold.types import Completion, Request, Sampling, TokenBatch
from tests.support.gpu_models import is_large, sizes, write_model
from tests.support.two_steps import POLICY

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh
    from fivefold.megatron.model import MegatronModel

TEXTS = (
    "What is the capital of France, and which river flows through it?",
    "Natalia sold clips to 48 of her friends in April, and half as many in May. How many did she sell?",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Translate into German: the cat sits on the table.",
    "List five animals that live in the sea.",
    "A train travels 120 km in one and a half hours. How fast is it?",
    "Write a short story about a robot that learns to paint.",
)
WITHIN = 256
"""Tokens of the smallest step that a statistic should decide on."""

Weights = Any
Fault = Callable[[Weights, int], Weights]
"""Stream of (name, tensor), number of layers -> the stream that an engine gets."""


# --- faults ----------------------------------------------------------------------------------------------------------


def stale_layer(weights: Weights, layers: int) -> Weights:
    """The middle layer keeps the weights that the engine had before: here those of an older and other model."""
    draw = torch.Generator().manual_seed(5)
    for name, tensor in weights:
        if f".layers.{layers // 2}." in name and tensor.dim() == 2:
            tensor = tensor.flatten()[torch.randperm(tensor.numel(), generator=draw).to(tensor.device)].view_as(tensor)
        yield name, tensor


def noisy_layer(weights: Weights, layers: int, share: float) -> Weights:
    """The middle layer's matrices are off by a share of their norm: an older state of the same training."""
    for name, tensor in weights:
        if f".layers.{layers // 2}." in name and tensor.dim() == 2:
            noise = torch.randn(tensor.shape, device=tensor.device, generator=torch.Generator(tensor.device).manual_seed(7))
            tensor = (tensor.float() + share * tensor.float().std() * noise).to(tensor.dtype)
        yield name, tensor


def all_weights(weights: Weights, layers: int) -> Weights:
    return weights


def rounded_routers(engine: Any) -> None:
    """A router's scores have bfloat16's digits."""

    def rounded(_: Any, __: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(tensor.bfloat16().to(tensor.dtype) if tensor.is_floating_point() else tensor for tensor in output)

    for module in engine._model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(rounded)


# --- what runs on a rank ---------------------------------------------------------------------------------------------


def other_rope(directory: Path) -> Path:
    """The model with a base of the rotary embedding that is a hundredth of its own."""
    copy = directory.with_name(directory.name + "-rope")
    if not copy.exists():
        copy.mkdir()
        for file in directory.iterdir():
            (copy / file.name).symlink_to(file.resolve())
        config = json.loads((directory / "config.json").read_text())
        places = [config, config.get("rope_parameters") or {}, config.get("rope_scaling") or {}]
        for place in places:
            if "rope_theta" in place:
                place["rope_theta"] /= 100
        (copy / "config.json").unlink()
        (copy / "config.json").write_text(json.dumps(config))
    return copy


def prompts_of(directory: Path, vocab: int, large: bool) -> list[list[int]]:
    if (directory / "prompts.json").is_file():
        return json.loads((directory / "prompts.json").read_text())
    draw, count, length = random.Random(3), 16 if large else 8, 64 if large else 8
    return [[draw.randrange(10, vocab - 10) for _ in range(length)] for _ in range(count)]


def requests_of(prompts: list[list[int]], responses: int, tokens: int) -> list[Request]:
    sampling = Sampling(max_tokens=tokens)
    rows = [prompt for prompt in prompts for _ in range(responses)]
    return [Request(i, prompt, sampling, request_seed((i,))) for i, prompt in enumerate(rows)]


def transformers_engine(mesh: Mesh, directory: Path, dtype: str) -> Any:
    from fivefold.engines.transformers import TransformersEngine

    tokenizer = SimpleNamespace(eos_token_id=None)
    return TransformersEngine(directory, tokenizer, mesh.device, getattr(torch, dtype), 128)


def vllm_engine(mesh: Mesh, directory: Path, dtype: str) -> Any:
    from benchmarks.engine_speed import TOKENIZER, arguments
    from fivefold.engines.vllm.engine import VLLMEngine
    from fivefold.layout import ParallelLayout

    settings = arguments(directory, is_large(mesh)) | {"dtype": dtype, "enforce_eager": True}
    if is_large(mesh):
        settings["gpu_memory_utilization"] = 0.5
    return VLLMEngine(
        directory, TOKENIZER, ParallelLayout.parse("vllm:d1t1"), 0, mesh.device, settings, verify_every=0, can_sleep=False
    )


def measured(model: MegatronModel, requests: list[Request], completions: list[Completion]) -> dict[str, Any]:
    """Statistics of the engine's log-probs next to the trainer's."""
    completion_of = {one.request_id: one for one in completions}
    tokens, mask, engine, lengths = [], [], [], []
    for request in requests:
        completion = completion_of[request.id]
        tokens += request.prompt_ids + completion.token_ids
        mask += [False] * len(request.prompt_ids) + [True] * len(completion.token_ids)
        engine += completion.logprobs
        lengths.append(len(request.prompt_ids) + len(completion.token_ids))
    batch = TokenBatch(torch.tensor(tokens), torch.tensor(mask), lengths)
    engine_S = torch.tensor(engine).double()
    trainer_S = model.forward(batch)[batch.loss_mask_T].double()
    return statistics(trainer_S - engine_S, engine_S)


def statistics(gap_S: Tensor, engine_S: Tensor) -> dict[str, Any]:
    """Candidates, from log trainer - log engine of tokens that the engine sampled."""
    size_S, likely_S = gap_S.abs(), engine_S.exp() > 0.5
    kl_S, bounded_S = gap_S.clamp(-20, 20).expm1() - gap_S, gap_S.clamp(-1, 1)
    bounded_S = bounded_S.expm1() - bounded_S
    parts = bounded_S.split(WITHIN)[: max(1, len(kl_S) // WITHIN)]
    within = [float(part.mean()) for part in parts]
    return {
        "tokens": len(gap_S),
        "entropy": round(float(-engine_S.mean()), 2),
        "mean": digits(size_S.mean()),
        "kl": digits(kl_S.mean()),
        "bounded_kl": digits(bounded_S.mean()),
        f"bounded_kl_of_{WITHIN}": [digits(min(within)), digits(max(within))],
        "k2": digits(gap_S.square().mean() / 2),
        "relative": digits(gap_S.square().mean().sqrt() / engine_S.std()),
        "total_variation": digits(gap_S.clamp(max=20).expm1().abs().mean() / 2),
        "median": digits(size_S.median()),
        "likely": digits(likely_S.double().mean()),
        "mean_of_likely": digits(size_S[likely_S].mean()) if likely_S.any() else None,
        "max": digits(size_S.max()),
    }


def digits(value: Any) -> float:
    return float(f"{float(value):.3g}")


def rows(mesh: Mesh, directory: Path, dtype: Any, names: list[str], seconds: float) -> None:
    """Print the statistics of each fault, as far as time allows."""
    from dataclasses import replace

    from fivefold.megatron.model import MegatronModel

    ends = time.monotonic() + seconds
    policy = replace(POLICY, dtype=dtype, tokens_per_micro_batch=8192)
    model = MegatronModel(directory, policy, mesh)
    large = is_large(mesh)
    requests = requests_of(prompts_of(directory, model.spec.vocab, large), 4, 160 if large else 32)
    for name in names:
        if time.monotonic() > ends:
            print(f"    {dtype}, {name}: not measured: the time of this part is over", flush=True)
            continue
        begun, (make, fault, where, change) = time.monotonic(), FAULTS[name]
        if make is vllm_engine and not has_vllm():
            print(f"    {dtype}, {name}: not measured: vLLM is not installed", flush=True)
            continue
        engine = make(mesh, where(directory), dtype)
        change(engine)
        engine.wake()
        engine.update_weights(fault(model.weights(), model.spec.layers), 0)
        statistics_of_run = measured(model, requests, list(engine.generate(requests)))
        statistics_of_run["seconds"] = round(time.monotonic() - begun, 1)
        print(f"    {dtype}, {name}: {json.dumps(statistics_of_run)}", flush=True)
        engine.close()
        del engine
        gc.collect()
        if large:
            torch.cuda.empty_cache()


def has_vllm() -> bool:
    try:
        import vllm  # noqa: F401
    except ImportError:
        return False
    return True


def write_peaked(mesh: Mesh, name: str, directory: Path) -> None:
    """A random model whose distributions are as peaked as those of published ones."""
    import transformers

    family, settings = sizes(is_large(mesh))[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    with mesh.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.5 / (0.02 * config.hidden_size**0.5))
    model.save_pretrained(directory)


def same(directory: Path) -> Path:
    return directory


def nothing(engine: Any) -> None: ...


FAULTS: dict[str, tuple[Callable[..., Any], Fault, Callable[[Path], Path], Callable[[Any], None]]] = {
    "healthy": (transformers_engine, all_weights, same, nothing),
    "a layer's weights stale": (transformers_engine, stale_layer, same, nothing),
    "a layer's weights off by 30 %": (transformers_engine, partial(noisy_layer, share=0.3), same, nothing),
    "a layer's weights off by 10 %": (transformers_engine, partial(noisy_layer, share=0.1), same, nothing),
    "rope base / 100": (transformers_engine, all_weights, other_rope, nothing),
    "routers' scores rounded": (transformers_engine, all_weights, same, rounded_routers),
    "healthy, vLLM": (vllm_engine, all_weights, same, nothing),
}
"""(engine, its weights, its configuration, what is done to it) by name."""
DENSE = [name for name in FAULTS if not name.startswith("routers")]


def convert(mesh: Mesh, gguf: str, directory: Path) -> None:
    """A published model as Hugging Face files in bfloat16, with prompts of its chat."""
    import transformers

    file = Path(gguf)
    quantized = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = quantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    texts = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in TEXTS]
    (directory / "prompts.json").write_text(json.dumps([tokenizer(text)["input_ids"] for text in texts]))


# --- parts -----------------------------------------------------------------------------------------------------------


def random_weights(
    name: str, dtypes: dict[str, list[str]], write: Callable[..., None] = write_model
) -> Callable[[Part], None]:
    def measure(part: Part) -> None:
        for dtype, names in dtypes.items():
            part.measure(name, "d1", rows, part.model(name, write), dtype, names, part.left - 5)

    measure.__doc__ = f"Random weights of {name}'s shape{', peaked' if write is write_peaked else ''}."
    return measure


def published(gguf: Path) -> Callable[[Part], None]:
    def measure(part: Part) -> None:
        _published(gguf, part)

    measure.__doc__ = f"Published weights: {gguf.name}."
    return measure


def _published(gguf: Path, part: Part) -> None:
    directory = part._root / "published"
    if not directory.exists():
        part._cluster.run(convert, "megatron:d1", str(gguf), directory)
    for dtype, names in {"bfloat16": DENSE, "float16": DENSE[:2], "float32": [*DENSE[:2], *DENSE[3:5]]}.items():
        part.measure("published", "d1", rows, directory, dtype, names, part.left - 5)


EXPERTS = {"float32": ["healthy", "routers' scores rounded", "a layer's weights stale"], "bfloat16": DENSE[:2]}

PARTS: dict[str, Callable[[Part], None]] = {
    "experts": random_weights("qwen3_moe", EXPERTS),
    "peaked-experts": random_weights("qwen3_moe", EXPERTS, write_peaked),
    "0.6b": random_weights("qwen3_0.6b", {"bfloat16": DENSE, "float32": ["healthy", "rope base / 100", "healthy, vLLM"]}),
    "1.7b": random_weights("qwen3_1.7b", {"bfloat16": DENSE}),
    "8b": random_weights("qwen3_8b", {"bfloat16": DENSE}),
}


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--gguf", type=Path)
    given, rest = options.parse_known_args()
    parts = ({} if given.gguf is None else {"published": published(given.gguf)}) | PARTS
    return run(__doc__, parts, rest)


if __name__ == "__main__":
    # Ranks find functions by the name of their module.
    from benchmarks import gate_statistics

    sys.exit(gate_statistics.main())
