"""Checks SGLang's own arguments: the installed release must have them, with values of their type. No torch, no SGLang
here."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fivefold.config.engine import SamplingConfig
from fivefold.engines.arguments import check_arguments, check_release, declared_fields, dotted, release_of
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.layout import ParallelLayout

VERSIONS = ((0, 5, 16), (0, 5, 23))
"""First and last version that this package supports."""
SUSPENDING = (0, 5, 21)
"""First version that can drop the keys of old weights while requests are suspended."""
LOADER = "fivefold.engines.sglang.receiver.receive"
"""Function that SGLang calls with the received weights (`--custom-weight-loader`)."""
MARGIN = 8
"""Tokens of its context that SGLang leaves unused; a request that needs them would silently end early."""
OURS = {
    "model_path": "model.path",
    "tokenizer_path": "model.tokenizer",
    "trust_remote_code": "model.trust_remote_code",
    "tp_size": "the t of engine.backend",
    "dp_size": "the d of engine.backend",
    "pp_size": "the p of engine.backend",
    "ep_size": "the e of engine.backend",
    "dtype": "engine.dtype",
    "random_seed": "trainer.seed",
    "context_length": "engine.max_model_len",
    "max_running_requests": "engine.max_num_seqs",
    "mem_fraction_static": "engine.memory_fraction",
    "enable_memory_saver": "engine.sleep",
    "device": "trainer.device",
}
"""Arguments that have their own configuration key, for every engine."""
_STARTED = "servers are started by the trainer's ranks"
_SAMPLED = "engine.sampling says how tokens are drawn"
FIXED = {
    "custom_weight_loader": "it takes the policy's weights",
    "load_format": "weights come from the policy",
    "weight_version": "it names the policy's version",
    "skip_tokenizer_init": "tokens go in and come out",
    "sampling_defaults": _SAMPLED,
    "preferred_sampling_params": _SAMPLED,
    "host": _STARTED,
    "port": _STARTED,
    "nnodes": _STARTED,
    "node_rank": _STARTED,
    "dist_init_addr": _STARTED,
    "base_gpu_id": _STARTED,
    "tokenizer_worker_num": _STARTED,
    "enable_http2": _STARTED,
}
"""Arguments that cannot be changed, with the reason."""


MOST_TOP_K = 4096
"""Largest top-k for which SGLang returns the set of tokens with a sample."""


def refusals(sampling: SamplingConfig) -> Iterator[tuple[str, str]]:
    """Yields (key of engine.sampling, reason) for settings that SGLang draws or scores differently from the other
    engines."""
    is_cut = sampling.top_p < 1 or sampling.min_p > 0 or sampling.top_k > 0
    if is_cut and not 1 < sampling.top_k <= MOST_TOP_K:
        yield (
            "top_k",
            f"must be 2 to {MOST_TOP_K} with top_p or min_p: SGLang gives log-probs of what it drew from only then",
        )
    if sampling.repetition_penalty != 1:
        yield "repetition_penalty", "must be 1: SGLang's leaves the prompt's tokens out"
    if sampling.min_tokens:
        yield "min_tokens", "must be 0: SGLang's servers have no tokenizer, which it needs for it"
    if sampling.stop:
        yield "stop", "must be left out: SGLang's servers have no tokenizer, which it needs for it"
    if sampling.ignore_eos and sampling.stop_token_ids:
        yield "stop_token_ids", "must be left out with ignore_eos: SGLang ignores both then"


def installed_version() -> str | None:
    """Returns the version of SGLang that is installed; None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def why_responses_must_end() -> str | None:
    """Returns why responses in flight cannot continue under new weights with the installed release; None if they can, or if
    none is installed."""
    version = installed_version()
    if version is None or release_of(version, len(SUSPENDING)) >= SUSPENDING:
        return None
    return (
        f"SGLang {version} keeps the keys of the old weights while responses are in flight, {dotted(SUSPENDING)} drops them"
    )


def check_sglang(findings: Findings, arguments: dict[str, Any], layout: ParallelLayout) -> None:
    """Adds errors if SGLang is too old or too new or lacks an argument, and records if it is missing; `findings` are at
    `engine`."""
    version, package = installed_version(), importlib.util.find_spec("sglang")
    if version is None or package is None or package.origin is None:
        other = replace(layout, backend="vllm")
        findings.lacks(
            "backend",
            f": SGLang is not installed here: `pip install sglang` (docs/engines.md), or {findings.key('backend')}={other}, "
            "which samples from the same distribution",
        )
        return
    if not check_release(findings, "sglang", "SGLang", version, VERSIONS):
        return
    known = server_arguments(Path(package.origin).parent / "srt")
    check_arguments(findings.at("sglang"), f"SGLang {version}", arguments, known, OURS, FIXED)


def server_arguments(directory: Path) -> dict[str, str]:
    """Returns name -> declared type of SGLang's server arguments, read from its source."""
    parts = sorted((directory / "arg_groups" / "fields").glob("*.py"))
    fields = declared_fields([directory / "server_args.py"], "ServerArgs".__eq__) | declared_fields(parts, str.isidentifier)
    if "tp_size" not in fields:
        raise UserError(f"{directory} declares no server arguments: this release of SGLang is not one that fivefold knows")
    return {name: _declared(kind) for name, kind in fields.items()}


def _declared(annotation: ast.expr) -> str:
    """Returns the declared type: `A[Optional[int], "what it is for"]` -> int | None."""
    if isinstance(annotation, ast.Subscript):
        outer, inner = ast.unparse(annotation.value), annotation.slice
        if outer == "A" and isinstance(inner, ast.Tuple):
            return _declared(inner.elts[0])
        if outer == "Optional":
            return f"{_declared(inner)} | None"
    return ast.unparse(annotation)
