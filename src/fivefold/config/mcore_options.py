"""Megatron-Core's own options, checked by name and type against its dataclasses without importing it. No torch here.

Policy, critic and reward model each have a section `megatron`. mcore_options.yaml lists every field of the dataclasses with
what becomes of it; `{section}` in a reason is replaced by the model's section.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fivefold.errors import shown
from fivefold.keys.findings import Findings
from fivefold.keys.ranges import suggest

SECTIONS = ("transformer", "pipeline", "ddp", "optimizer")
"""Sections of `policy.megatron`: TransformerConfig, its pipeline fields, DistributedDataParallelConfig, OptimizerConfig."""

_CLASSES = {
    "transformer": (
        ("transformer/transformer_config.py", ("TransformerConfig", "MLATransformerConfig")),
        ("model_parallel_config.py", ("ModelParallelConfig",)),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", ("DistributedDataParallelConfig",)),),
    "optimizer": (("optimizer/optimizer_config.py", ("OptimizerConfig",)),),
}

REFUSED = {
    "ours": "{}",
    "transformer_engine": "it needs Transformer Engine, with which this project has not been run: {}",
    "package": "it needs {}",
}
"""Part of the table whose fields are refused -> the sentence around their reason."""


class Option(NamedTuple):
    """What becomes of one field of Megatron-Core."""

    part: str
    """acts, ours, transformer_engine, package or no_effect."""
    reason: str
    """What it changes, why it is refused, or why it has no effect."""
    is_pipeline: bool
    """Whether the option belongs in the section `pipeline`."""


LOSS_SCALE = {"initial_loss_scale": 2.0**32, "min_loss_scale": 1.0, "loss_scale_window": 1000, "hysteresis": 2}
"""Options of the dynamic loss scale in float16, with Megatron-Core's defaults."""
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
"""Options that each value of the key `recompute` sets."""
MESSAGES = ("batch_p2p_comm", "batch_p2p_sync", "overlap_p2p_comm_warmup_flush",
            "deallocate_pipeline_outputs")  # fmt: skip
"""Pipeline options about what stages send."""
_RECOMPUTED = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that `selective` may name."""
_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "transformer": {
        "recompute_granularity": (
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "distribute_saved_activations",
            "num_microbatches_with_partial_activation_checkpoints",
        ),
        "bias_activation_fusion": ("activation_func_fp8_input_store",),
    },
    "optimizer": {
        "optimizer_cpu_offload": (
            "optimizer_offload_fraction",
            "overlap_cpu_optimizer_d2h_h2d",
            "pin_cpu_grads",
            "pin_cpu_params",
        )
    },
}
"""Options without which the listed ones have no effect."""
_NARROWER = {"pipeline_model_parallel_layout": "Optional[str]"}
"""Types of options for which Megatron-Core accepts other forms too."""
DTYPE_NAMES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16",
               "fp16": "float16"}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Raw Megatron-Core options of one model, by section, as in the configuration."""

    transformer: dict[str, Any]
    pipeline: dict[str, Any]
    ddp: dict[str, Any]
    optimizer: dict[str, Any]

    def check(self, findings: Findings) -> None:
        """Record errors for unusable options and combinations; `findings` are at the model's section."""
        alone = findings.at("megatron")
        before = len(alone.errors)
        for section in SECTIONS:
            for name, value in getattr(self, section).items():
                _check_option(alone, section, name, value)
        if len(alone.errors) == before:
            self._check_conflicts(alone)

    def _check_conflicts(self, findings: Findings) -> None:
        transformer, optimizer, ddp = (findings.at(section) for section in ("transformer", "optimizer", "ddp"))
        balancing = self.transformer.get("moe_router_load_balancing_type", "none")
        kinds = balancing if isinstance(balancing, list) else [balancing]
        if unknown := [kind for kind in kinds if kind not in ("none", "seq_aux_loss", "aux_loss")]:
            transformer.error(
                "moe_router_load_balancing_type",
                "must be none, seq_aux_loss (of each sequence, however a step is split) or aux_loss (of each micro-batch): "
                f"got {unknown[0]!r}",
            )
        coefficients = self.transformer.get("moe_aux_loss_coeff", 0.0)
        if isinstance(balancing, list) != isinstance(coefficients, list) or (
            isinstance(balancing, list) and len(balancing) != len(coefficients)
        ):
            transformer.error("moe_aux_loss_coeff", "must have one number for each moe_router_load_balancing_type")
        transformer.require(
            self.transformer.get("moe_token_dispatcher_type", "alltoall") != "flex",
            "moe_token_dispatcher_type",
            "must be alltoall or allgather: flex needs the package deep_ep",
        )
        aware = self.optimizer.get("use_precision_aware_optimizer", False)
        optimizer.require(
            self.optimizer.get("decoupled_weight_decay", True)
            or not (aware or self.optimizer.get("optimizer_cpu_offload", False)),
            "decoupled_weight_decay",
            "must be true with use_precision_aware_optimizer or optimizer_cpu_offload, which have AdamW only",
        )
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
            dtype = DTYPE_NAMES[self.optimizer.get(name, "float32")]
            message = "must be float32 or bfloat16: small moments vanish in float16"
            optimizer.require(dtype != "float16", name, message)
            optimizer.require(dtype == "float32" or aware, name, "needs use_precision_aware_optimizer: true")
        constant = self.optimizer.get("loss_scale")
        optimizer.require(constant is None or constant > 0, "loss_scale", f"must be above 0: got {constant}")
        scale = {name: self.optimizer.get(name, default) for name, default in LOSS_SCALE.items()}
        for name, value in scale.items():
            optimizer.require(value > 0, name, f"must be above 0: got {value}")
        optimizer.require(
            scale["min_loss_scale"] <= scale["initial_loss_scale"],
            "min_loss_scale",
            f"must not be above initial_loss_scale = {scale['initial_loss_scale']:g}: got {scale['min_loss_scale']:g}",
        )
        distributed = self.ddp.get("use_distributed_optimizer", True)
        if not distributed and aware:
            optimizer.error("use_precision_aware_optimizer", "needs ddp.use_distributed_optimizer: true")
        if self.ddp.get("overlap_param_gather", False):
            ddp.require(distributed, "overlap_param_gather", "needs use_distributed_optimizer: true")
            ddp.require(
                self.ddp.get("overlap_grad_reduce", False), "overlap_param_gather", "needs overlap_grad_reduce: true"
            )

    def check_recompute(self, findings: Findings, recompute: str, is_sequence_parallel: bool) -> None:
        """Record errors for contradictory recomputation options, some of which the model's key `recompute` sets; `findings`
        are at the model's section."""
        findings, chosen = findings.at("megatron.transformer"), RECOMPUTE[recompute] | self.transformer
        kind, layers = chosen.get("recompute_granularity"), chosen.get("recompute_num_layers")
        modules = chosen.get("recompute_modules") or []
        unknown = [module for module in modules if module not in _RECOMPUTED]
        message = f"must be of {', '.join(_RECOMPUTED)}: got {shown(unknown[:1])[1:-1]}"
        findings.require(not unknown, "recompute_modules", message)
        if kind == "full":
            lacking = [name for name in ("recompute_method", "recompute_num_layers") if chosen.get(name) is None]
            message = f": full needs {' and '.join(lacking)}, for example uniform and 1"
            findings.require(not lacking, "recompute_granularity", message)
            findings.require(layers is None or layers > 0, "recompute_num_layers", f"must be at least 1: got {layers}")
        message = f"must be left out with recompute_granularity: selective, which names modules: got {layers}"
        findings.require(kind != "selective" or layers is None, "recompute_num_layers", message)
        message = "must be false where t > 1 with sequence parallelism: what is saved is divided there already"
        divides = kind is not None and is_sequence_parallel and chosen.get("distribute_saved_activations", False)
        findings.require(not divides, "distribute_saved_activations", message)

    @property
    def has_router_terms(self) -> bool:
        """Whether routers add losses or update biases based on the choices of all tokens in an update."""
        names = ("moe_z_loss_coeff", "moe_router_bias_update_rate")
        balanced = self.transformer.get("moe_router_load_balancing_type", "none") != "none"
        return balanced or any(self.transformer.get(name) for name in names)

    @property
    def balances_by_micro_batch(self) -> bool:
        """Whether routers have a loss over each micro-batch."""
        kinds = self.transformer.get("moe_router_load_balancing_type", "none")
        return "aux_loss" in (kinds if isinstance(kinds, list) else [kinds])

    def report_ignored(self, findings: Findings, experts: bool, recompute: str, balanced: bool = False) -> None:
        """Report the options that have no effect for a model with or without `experts`; `findings` are at the model's
        section.

        The key `recompute` sets some options; `balanced`: routers have a balance loss without these options.
        """
        findings = findings.at("megatron")
        for section in SECTIONS:
            for name in getattr(self, section):
                if (reason := without_effect(section, name)) is not None:
                    findings.ignore(f"{section}.{name}", reason)
        for section, needed in _NEEDED.items():
            options: dict[str, Any] = getattr(self, section)
            for needs, names in needed.items():
                for name in names if not options.get(needs) else ():
                    if name in options and not (needs == "recompute_granularity" and recompute != "none"):
                        findings.ignore(f"{section}.{name}", f"{needs} is not set")
        for name in LOSS_SCALE:
            if name in self.optimizer and self.optimizer.get("loss_scale") is not None:
                findings.ignore(f"optimizer.{name}", "loss_scale never moves")
        balancing = self.transformer.get("moe_router_load_balancing_type", "none")
        if balancing == "none" and not balanced and self.transformer.get("moe_aux_loss_coeff"):
            findings.ignore("transformer.moe_aux_loss_coeff", "moe_router_load_balancing_type is none")
        if not experts and (named := [name for name in self.transformer if name.startswith("moe_")]):
            findings.ignore(f"transformer.{named[0]}", "the model has no experts")

    def effective(self, section: str) -> dict[str, Any]:
        """Return the options of a section that are passed to Megatron-Core."""
        options: dict[str, Any] = getattr(self, section)
        return {name: value for name, value in options.items() if without_effect(section, name) is None}


def _check_option(findings: Findings, section: str, name: str, value: Any) -> None:
    """Record an error for an unusable option; `findings` are at the `megatron` of the model's section."""
    key, model = f"{section}.{name}", findings.section.removesuffix(".megatron")
    options, fields = table(section), _fields(section)
    if name not in fields:
        known = [field for field in fields if field in options and options[field].is_pipeline == (section == "pipeline")]
        findings.unknown(key, suggest(name, known) or f"; see Megatron-Core {_version()}'s dataclass")
    elif name not in options:
        findings.error(key, f"is new in Megatron-Core {_version()}, and this project has not been run with it: leave it out")
    elif section in ("transformer", "pipeline") and options[name].is_pipeline != (section == "pipeline"):
        findings.error(key, f"belongs into {findings.key(section_of(name))}")
    elif reason := refusal(section, name):
        findings.error(key, f"cannot be set: {reason.replace('{section}', model)}")
    elif not _fits(fields[name], value):
        findings.error(key, f"must be {' or '.join(_described(fields[name]))}, got {shown(value)}")
    elif isinstance(value, (int, float)) and value < 0:
        findings.error(key, f"must be at least 0: got {shown(value)}")


def with_numbers(section: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options in which texts are numbers where Megatron-Core takes numbers: YAML reads 1e-3 as a text."""

    def number(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [number(name, item) for item in value]
        if isinstance(value, str) and name in _fields(section):
            with suppress(ValueError):
                is_float = any(
                    isinstance(node, ast.Name) and node.id == "float" for node in ast.walk(_fields(section)[name])
                )
                return float(value) if is_float else value
        return value

    return {name: number(name, value) for name, value in options.items()}


def is_option(section: str, name: str) -> bool:
    """Whether Megatron-Core has this option."""
    return name in _fields(section)


def section_of(name: str) -> str:
    """Return the section of `policy.megatron` that a field of TransformerConfig belongs into."""
    option = table("transformer").get(name)
    return "pipeline" if option is not None and option.is_pipeline else "transformer"


def refusal(section: str, name: str) -> str | None:
    """Return why an option of Megatron-Core cannot be set here; None if it can."""
    option = table(section).get(name)
    return None if option is None or option.part not in REFUSED else REFUSED[option.part].format(option.reason)


def without_effect(section: str, name: str) -> str | None:
    """Return why an option that is accepted changes nothing; None if it acts."""
    option = table(section).get(name)
    return option.reason if option is not None and option.part == "no_effect" else None


@cache
def table(section: str) -> Mapping[str, Option]:
    """Return field -> what becomes of it; `pipeline` and `transformer` are sections of one dataclass."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(files(__package__).joinpath("mcore_options.yaml").read_text(), loader)  # noqa: S506
    pipeline = content["pipeline"].split()

    def rows() -> Iterator[tuple[str, Option]]:
        for part, reasons in content[_dataclass(section)].items():
            for reason, names in reasons.items():
                yield from ((name, Option(part, reason, name in pipeline)) for name in names.split())

    return dict(rows())


def _dataclass(section: str) -> str:
    return "transformer" if section == "pipeline" else section


@cache
def _fields(section: str) -> dict[str, ast.expr]:
    """Return field -> annotation, read from the source of the installed package."""
    types_of_fields: dict[str, ast.expr] = {}
    for file, classes in _CLASSES[_dataclass(section)]:
        tree = ast.parse((_root() / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                types_of_fields.update(
                    (item.target.id, item.annotation)
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                )
    return types_of_fields | {
        name: ast.parse(text, mode="eval").body for name, text in _NARROWER.items() if name in types_of_fields
    }


def recompute_fault(options: Mapping[str, Any], chunks: Iterable[int]) -> str | None:
    """Return what is wrong with `recompute_num_layers` for chunks of these sizes, one per virtual stage; None if nothing
    is."""
    layers, method = options.get("recompute_num_layers"), options.get("recompute_method")
    if options.get("recompute_granularity") != "full" or layers is None:
        return None
    sizes = sorted({count for count in chunks if count})
    if method == "uniform" and any(layers < 1 or count % layers for count in sizes):
        return f"recompute_num_layers must divide the layers of each stage where uniform: got {layers} for {sizes}"
    # With `block`, a stage of fewer layers recomputes all that it has.
    return f"recompute_num_layers must be at least 1: got {layers}" if layers < 1 else None


def messages_fault(options: Mapping[str, Any], virtual: int) -> tuple[str, str] | None:
    """Return the pipeline option that does not fit so many virtual stages, and what must hold; None if all fit."""
    if virtual > 1 and options.get("batch_p2p_comm", False):
        return "batch_p2p_comm", "must be false with virtual stages: they would mix up forward and backward messages"
    if virtual == 1 and options.get("overlap_p2p_comm_warmup_flush", False):
        return "overlap_p2p_comm_warmup_flush", "needs virtual stages: set virtual_pipeline_model_parallel_size"
    return None


def _root() -> Path:
    return Path(str(importlib.metadata.distribution("megatron-core").locate_file("megatron/core")))


def _version() -> str:
    return importlib.metadata.version("megatron-core")


_WORDS = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "text", "dict": "a mapping",
          "list": "a list"}  # fmt: skip


def _described(annotation: ast.expr) -> list[str]:
    """Return the kinds of values that fit an annotation; see `_fits`."""
    if isinstance(annotation, ast.Constant) and annotation.value is None:
        return ["null"]
    if isinstance(annotation, ast.BinOp):
        return [*_described(annotation.left), *_described(annotation.right)]
    if ast.unparse(annotation) == "torch.dtype":
        return [*dict.fromkeys(DTYPE_NAMES.values())]
    if isinstance(annotation, ast.Name) and annotation.id in _WORDS:
        return [_WORDS[annotation.id]]
    if isinstance(annotation, ast.Subscript):
        outer, inner = ast.unparse(annotation.value), annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer in ("Optional", "Union"):
            return [word for part in parts for word in _described(part)] + ["null"] * (outer == "Optional")
        if outer == "Literal":
            return [str(part.value) for part in parts if isinstance(part, ast.Constant)]
        if outer in ("List", "list", "Tuple", "tuple"):
            count = f"{len(parts)} " if outer in ("Tuple", "tuple") else ""
            return [f"a list of {count}values, each {' or '.join(_described(parts[0]))}"]
    return [f"a value of Megatron-Core's type {ast.unparse(annotation)}, which no file can hold"]


def _fits(annotation: ast.expr, value: Any) -> bool:
    """Whether a value from a YAML file fits an annotation; a type that no file can hold (functions) never fits."""
    if isinstance(annotation, ast.Constant):
        return value is None if annotation.value is None else False
    if isinstance(annotation, ast.BinOp):
        return _fits(annotation.left, value) or _fits(annotation.right, value)
    if isinstance(annotation, ast.Attribute):
        return ast.unparse(annotation) == "torch.dtype" and isinstance(value, str) and value in DTYPE_NAMES
    if isinstance(annotation, ast.Name):
        if annotation.id == "float":
            return isinstance(value, (int, float)) and not isinstance(value, bool)
        if annotation.id == "int":
            return isinstance(value, int) and not isinstance(value, bool)
        plain: type | None = {"bool": bool, "str": str, "list": list, "dict": dict}.get(annotation.id)
        return plain is not None and isinstance(value, plain)
    if isinstance(annotation, ast.Subscript):
        outer, inner = ast.unparse(annotation.value), annotation.slice
        parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if outer == "Optional":
            return value is None or _fits(inner, value)
        if outer == "Union":
            return any(_fits(part, value) for part in parts)
        if outer == "Literal":
            return any(isinstance(part, ast.Constant) and part.value == value for part in parts)
        if outer in ("List", "list"):
            return isinstance(value, list) and all(_fits(inner, item) for item in value)
        if outer in ("Tuple", "tuple"):
            return isinstance(value, (list, tuple)) and len(value) == len(parts)
    return False
