"""Find values in `config.json` that transformers would refuse, by the types in its source, as importing it takes seconds."""

from __future__ import annotations

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, shown

_TYPES: dict[str, type] = {
    "None": type(None), "bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict
}  # fmt: skip
_OF_ALL_FAMILIES = {"architectures": "list[str] | None", "id2label": "dict[str, str] | None"}
_NEVER_NULL = {
    "deepseek_v3": ("head_dim", "first_k_dense_replace"),
    "glm4_moe": ("head_dim",),
    "qwen3_moe": ("head_dim",),
}
"""Keys of which the family's code takes null for a number: its default is for a key that is absent."""
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_as_transformers(config: dict[str, Any], family: str) -> None:
    """Raise ValueError for a key that transformers would refuse when it builds the engine's model.

    It takes no whole number where it declares a float, and null only where it declares None.
    """
    for key, declared in _declared(family).items():
        if key in config and not _fits(config[key], declared):
            wanted = f"{ast.unparse(declared)}, as transformers declares it"
            raise UserError(f"{key} in config.json must be {wanted}: got {shown(config[key])}")
    for key in _NEVER_NULL.get(family, ()):
        if key in config and config[key] is None:
            raise UserError(f"{key} in config.json must be a number or left out for {family}: got null")
    if not all(str(key).isdecimal() for key in config.get("id2label") or {}):
        raise UserError(f"id2label in config.json must have whole numbers as its keys: got {shown(config['id2label'])}")
    pad, vocab = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(pad, int) and isinstance(vocab, int) and not -vocab <= pad < vocab:
        raise UserError(f"pad_token_id in config.json must be a token of the vocabulary of {vocab}: got {shown(pad)}")
    for key in ("dtype", "torch_dtype"):
        value = config.get(key)
        if value is not None and (not isinstance(value, str) or value.removeprefix("torch.") not in _DTYPES):
            raise UserError(f"{key} in config.json must be one of {', '.join(_DTYPES)}: got {shown(value)}")


@cache
def _declared(family: str) -> dict[str, ast.expr]:
    """Return the annotation of each key that is checked; few where the installed transformers has no file of that family."""
    declared = {key: ast.parse(text, mode="eval").body for key, text in _OF_ALL_FAMILIES.items()}
    package = find_spec("transformers")
    if package is None or package.origin is None or not family.isidentifier():
        return declared
    path = Path(package.origin).parent / "models" / family / f"configuration_{family}.py"
    for node in ast.parse(path.read_bytes()).body if path.is_file() else ():
        # A file may have several configurations, of parts that read images.
        if isinstance(node, ast.ClassDef) and _model_type(node) == family:
            declared |= _fields(node)
    return declared


def _model_type(node: ast.ClassDef) -> object:
    values = (one.value for one in node.body if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "model_type")
    return next((value.value for value in values if isinstance(value, ast.Constant)), None)


def _fields(node: ast.ClassDef) -> dict[str, ast.expr]:
    fields = (one for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name))
    return {ast.unparse(one.target): one.annotation for one in fields}


def _fits(value: Any, declared: ast.expr) -> bool:
    """Whether the value has the declared type; types that are not in `_TYPES` allow every value."""
    if isinstance(declared, ast.BinOp):
        return _fits(value, declared.left) or _fits(value, declared.right)
    inner = declared.slice if isinstance(declared, ast.Subscript) else None
    kind = _TYPES.get(ast.unparse(declared.value if isinstance(declared, ast.Subscript) else declared))
    if kind is None:
        return True
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return False
    return not isinstance(value, list) or inner is None or all(_fits(one, inner) for one in value)
