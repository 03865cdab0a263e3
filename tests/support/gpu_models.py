"""Random models and batches of a size for GPUs, and tiny ones for a CPU: of the GPU tests and of `benchmarks/`."""

from __future__ import annotations

import gc
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from fivefold.algo.advantages import AdvantageInputs
from fivefold.columns import Column
from fivefold.types import TokenBatch
from tests.support.public_shapes import SHAPES
from tests.support.shards import shard_of_replica
from tests.support.two_steps import OBJECTIVE, POLICY

if TYPE_CHECKING:
    from fivefold.fsdp.mesh import Mesh as FSDPMesh
    from fivefold.megatron.mesh import Mesh
    from fivefold.megatron.model import MegatronModel

T = TypeVar("T")


def is_large(mesh: Mesh | FSDPMesh) -> bool:
    return mesh.device.type == "cuda"


def sizes(large: bool) -> dict[str, tuple[str, dict[str, Any]]]:
    """(family, settings) by name."""
    size: dict[str, Any] = {
        "max_position_embeddings": 8192,
        "vocab_size": 500,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
    }
    size |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    # DeepSeek-V3's own sizes of the latent: kernels of inference know no others.
    latent = {"q_lora_rank": 24, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 16, "v_head_dim": 16}
    head_dim, expert_ffn = 32, 32
    if large:
        size |= {"vocab_size": 32000, "num_hidden_layers": 8}
        size |= {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16}
        latent |= {"q_lora_rank": 768, "qk_nope_head_dim": 128, "v_head_dim": 128}
        head_dim, expert_ffn = 64, 512
    experts = {"moe_intermediate_size": expert_ffn, "num_experts_per_tok": 4}
    grouped = {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    variants = {
        "qwen3": ("Qwen3", {**size, "head_dim": head_dim}),
        "qwen3_moe": ("Qwen3Moe", {**size, "head_dim": head_dim, **experts, "num_experts": 16, "norm_topk_prob": True}),
        "deepseek_v3": (
            "DeepseekV3",
            {**size, **latent, **experts, **grouped, "num_key_value_heads": size["num_attention_heads"]},
        ),
    }
    if not large:
        tiny = {**size, "head_dim": head_dim}
        tied = {**tiny, "vocab_size": 1000, "tie_word_embeddings": True}
        return variants | {
            "smollm2_135m": ("Llama", {key: value for key, value in tied.items() if key != "head_dim"}),
            "qwen3_0.6b": ("Qwen3", tied),
            "qwen3_1.7b": ("Qwen3", tiny),
            "qwen3_4b": ("Qwen3", tiny),
            "qwen3_8b": ("Qwen3", tiny),
            "qwen3_14b": ("Qwen3", tiny),
            "qwen3_30b_a3b": variants["qwen3_moe"],
        }
    real: dict[str, Any] = {
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "head_dim": 128,
        "num_attention_heads": 16,
    }
    real |= {
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    small = {"hidden_size": 1024, "intermediate_size": 3072, "tie_word_embeddings": True}
    a3b = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4}
    # 8 of its 48 layers.
    a3b |= {"num_hidden_layers": 8, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    smollm2 = {key: value for key, value in SHAPES["SmolLM2-135M-Instruct"].items() if key != "model_type"}
    return variants | {
        "smollm2_135m": ("Llama", smollm2),
        "qwen3_0.6b": ("Qwen3", {**real, **small}),
        # Untied, so that a critic next to it has the same body.
        "qwen3_1.7b": ("Qwen3", {**real, "hidden_size": 2048, "intermediate_size": 6144}),
        "qwen3_4b": (
            "Qwen3",
            {**real, "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
        ),
        "qwen3_8b": (
            "Qwen3",
            {**real, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
        ),
        "qwen3_14b": (
            "Qwen3",
            {**real, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
        ),
        "qwen3_30b_a3b": ("Qwen3Moe", {**real, **a3b, "norm_topk_prob": True}),
    }


def write_model(mesh: Mesh, name: str, directory: Path) -> None:
    """A random model of a name in `sizes`, in bfloat16."""
    import transformers

    family, settings = sizes(is_large(mesh))[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    with mesh.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def write_classifier(mesh: Mesh, name: str, directory: Path) -> None:
    """A sequence classifier with one label, whose head is large enough to matter."""
    import transformers

    family, settings = sizes(is_large(mesh))[name]
    config = getattr(transformers, f"{family}Config")(**settings, num_labels=1)
    torch.manual_seed(1)
    with mesh.device:
        model = transformers.AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        torch.nn.init.normal_(model.score.weight, std=0.02)
    model.save_pretrained(directory)


def random_batch(samples: int, mean_length: int, vocab: int, spread: float = 0.5) -> TokenBatch:
    """GRPO's inputs for `samples` sequences of lengths around the mean, the first quarter of each a prompt.

    `spread` is the share of the mean by which a length differs from it at most.
    """
    generator = torch.Generator().manual_seed(1)
    lengths = (mean_length * (1 - spread + 2 * spread * torch.rand(samples, generator=generator))).long().tolist()
    tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
    mask = torch.cat([torch.arange(n) >= max(1, n // 4) for n in lengths])
    batch = TokenBatch(tokens, mask, lengths, temperature=1.0)
    responses_N = torch.tensor([n - max(1, n // 4) for n in lengths])
    rewards_N = torch.rand(samples, generator=generator)
    advantages_N = OBJECTIVE.advantage.comparison(AdvantageInputs(rewards_N, torch.arange(samples) // 4, responses_N))
    noise = torch.randn(2, len(tokens), generator=generator) * mask
    return replace(
        batch.with_columns(
            {
                Column.ADVANTAGES: batch.expand_to_tokens(advantages_N),
                Column.LOSS_WEIGHTS: batch.expand_to_tokens(OBJECTIVE.loss_weights(responses_N, 2 * mean_length)),
                Column.OLD_LOGPROBS: 0.1 * noise[0],
                Column.REF_LOGPROBS: noise[1] - torch.log(torch.tensor(float(vocab))) * mask,
            }
        ),
        update_tokens=int(responses_N.sum()),
    )


def group_batch(groups: int, samples: int, prompt: int, response: int, vocab: int) -> TokenBatch:
    """GRPO's inputs for groups of so many samples: prompts of one length, responses of lengths around the mean."""
    draw = torch.Generator().manual_seed(2)
    responses_batch = random_batch(groups * samples, response, vocab)
    lengths_N = [prompt + length for length in responses_batch.lengths_N]
    prompts = torch.randint(0, vocab, (groups, prompt), generator=draw)
    responses = responses_batch.token_ids_T.split(responses_batch.lengths_N)
    tokens = torch.cat([torch.cat([prompts[n // samples], response_ids]) for n, response_ids in enumerate(responses)])
    mask = torch.cat([torch.arange(length) >= prompt for length in lengths_N])
    batch = TokenBatch(tokens, mask, lengths_N, temperature=1.0)
    responses_N = torch.tensor(responses_batch.lengths_N)
    noise = torch.randn(2, len(tokens), generator=draw) * mask
    return replace(
        batch.with_columns(
            {
                Column.ADVANTAGES: batch.expand_to_tokens(torch.randn(groups * samples, generator=draw)),
                Column.LOSS_WEIGHTS: batch.expand_to_tokens(OBJECTIVE.loss_weights(responses_N, 2 * response)),
                Column.OLD_LOGPROBS: 0.1 * noise[0],
                Column.REF_LOGPROBS: noise[1] - torch.log(torch.tensor(float(vocab))) * mask,
            }
        ),
        update_tokens=int(responses_N.sum()),
    )


def step_batch(mesh: Mesh, vocab: int) -> TokenBatch:
    """The batch of the steps that are compared."""
    return random_batch(16, 512, vocab) if is_large(mesh) else random_batch(8, 24, vocab)


def finite(value: float) -> float:
    """What is not a number is not equal, and `max` would pass over it."""
    return math.inf if math.isnan(value) else value


def build(mesh: Mesh, directory: Path, dtype: Any, tokens: int, value_head: bool = False, **changes: Any) -> MegatronModel:
    """A model that trains, with micro-batches of so many tokens."""
    from fivefold.megatron.model import MegatronModel

    policy = replace(POLICY, dtype=dtype, tokens_per_micro_batch=tokens, **changes)
    return MegatronModel(directory, policy, mesh, total_updates=100, value_head=value_head)


def layer_of_experts(mesh: Mesh):
    """(configuration, experts, inputs, tokens of each, their weights): those of a layer of Qwen3-30B-A3B, one without tokens."""
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    from fivefold.megatron.layers.moe import GroupedExperts

    large = is_large(mesh)
    count, width, ffn, tokens = (128, 2048, 768, 65536) if large else (8, 64, 32, 256)
    dtype = torch.bfloat16 if large else torch.float32
    generator = torch.Generator(mesh.device).manual_seed(3)
    config: Any = SimpleNamespace(
        moe_ffn_hidden_size=ffn, hidden_size=width, params_dtype=dtype, use_cpu_initialization=not large,
        recompute_granularity=None, moe_grouped_gemm=True,
    )  # fmt: skip
    with mesh.active():
        experts = GroupedExperts(count, config, get_default_pg_collection()).to(mesh.device)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.02, generator=generator)
    host = torch.Generator().manual_seed(3)
    counts = torch.multinomial(torch.rand(count, generator=host), tokens, True, generator=host).bincount(minlength=count)
    counts[5], counts[6] = 0, counts[5] + counts[6]
    x = torch.randn(tokens, width, generator=generator, device=mesh.device).to(dtype).requires_grad_()
    weights = torch.rand(tokens, generator=generator, device=mesh.device).requires_grad_()
    return config, experts, x, counts, weights


def timed(mesh: Mesh | FSDPMesh, work: Callable[[], T]) -> tuple[float, T]:
    """Seconds until the device has done it, and what it returned."""
    synchronize(mesh)
    begin = time.perf_counter()
    result = work()
    synchronize(mesh)
    return time.perf_counter() - begin, result


def synchronize(mesh: Mesh | FSDPMesh) -> None:
    if is_large(mesh):
        torch.cuda.synchronize()


def same_bits(mesh: Mesh, directory: Path, deterministic: bool) -> tuple[bool, float]:
    """Whether two runs of three steps give the same losses, norms and parameters, and seconds of the last step."""
    # Read when the libraries start, as a run sets them: the first use of cuBLAS and NCCL in this process is below.
    os.environ.update(CUBLAS_WORKSPACE_CONFIG=":4096:8", NCCL_ALGO="Ring")
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    samples, length, tokens = (32, 1024, 8192) if is_large(mesh) else (4, 24, 64)
    runs, seconds = [], 0.0
    for _ in range(2):
        model = build(mesh, directory, "bfloat16", tokens)
        mine = random_batch(samples, length, model.spec.vocab).select(shard_of_replica(mesh.ranks, range(samples)))
        numbers = []
        for _ in range(3):
            seconds, report = timed(mesh, lambda model=model, mine=mine: model.train_step(mine, OBJECTIVE.loss))
            numbers.append((report.loss, report.grad_norm))
        runs.append((numbers, [tensor.to("cpu", copy=True) for _, tensor in model.weights()]))
        del model
        gc.collect()
    (numbers, weights), (others, other_weights) = runs
    same = numbers == others and all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True))
    return same, seconds


def scratch(large: bool) -> tempfile.TemporaryDirectory[str]:
    """A directory for gigabytes of weights: in memory where there is room."""
    memory = Path("/dev/shm")
    roomy = large and memory.is_dir() and shutil.disk_usage(memory).free > 32 * 2**30
    return tempfile.TemporaryDirectory(dir=memory if roomy else None)
