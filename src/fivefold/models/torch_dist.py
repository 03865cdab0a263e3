"""Megatron-Core's `torch_dist` checkpoints: location, tensors, and whether they are those of a model. No torch.

Their list of tensors, `.metadata`, is a pickle of torch's distributed checkpoints. It is read without running any code:
every class or function that it names becomes a plain record. `common.pt`, a pickle of arguments, is not read at all.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fivefold.errors import UserError, first_line, shown
from fivefold.files import read_json_object, read_text
from fivefold.models.families import mtp_parameters_of, parameters_of
from fivefold.models.fused_names import FUSED, fused_name
from fivefold.models.headers import Shape
from fivefold.models.parameters import EMBEDDING, OUTPUT, VALUE_HEAD, MappedParameter, Sharding
from fivefold.models.shapes import file_shapes
from fivefold.models.spec import ModelSpec

METADATA, CONFIG, LATEST = ".metadata", "metadata.json", "latest_checkpointed_iteration.txt"
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Dtypes of tensors that are read as parameters."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_MTP_LAYER = re.compile(r"(mtp\.layers\.\d+\.transformer_layer)\.(.*)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.fc([12])")
_GATE, _UP = "_w", "_v"
"""Suffixes of the names if gate and up are separate tensors."""
_OF_A_MODEL = ("embedding.", "decoder.", "mtp.", "output_layer.")


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor and its place in a file."""

    offset: Shape
    size: Shape
    file: str
    begin: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the whole model, in chunks."""

    name: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Stored:
    """A part of a stored tensor, at `index` of its first axes, which number layers and experts."""

    tensor: StoredTensor
    index: Shape

    @property
    def shape(self) -> Shape:
        return self.tensor.shape[len(self.index) :]


def find_torch_dist(path: str | Path) -> Path | None:
    """Return the directory of the checkpoint itself, `path` or the latest one below it; None if `path` is no such
    checkpoint.

    Raises ValueError for Megatron-Core checkpoints in an unsupported format.
    """
    path = Path(path)
    if (backend := _backend(path)) is not None:
        if backend != "torch_dist":
            raise UserError(f"{path} must be a torch_dist checkpoint of Megatron-Core: its {CONFIG} says {shown(backend)}")
        if not (path / METADATA).is_file():
            raise UserError(f"{path} has no {METADATA}: the checkpoint is unfinished, or an incomplete copy")
        return path
    if not (path / LATEST).is_file():
        if any(path.glob("mp_rank_*")):
            raise UserError(
                f"{path} holds pickles of ranks (mp_rank_*), which are not read: convert it with Megatron-LM's "
                "--ckpt-convert-format torch_dist"
            )
        return None
    named = read_text(path / LATEST).strip()
    below = path / (f"iter_{int(named):07d}" if named.isdecimal() else named)
    if named != "release" and not named.isdecimal():
        raise UserError(f"{path / LATEST} must hold a number or release: got {shown(named)}")
    if not below.is_dir():
        raise UserError(f"{path / LATEST} names {below.name}, which is not there")
    return find_torch_dist(below)


def is_torch_dist(path: str | Path) -> bool:
    """Whether the path looks like a Megatron-Core checkpoint, readable or not."""
    return _backend(Path(path)) is not None or (Path(path) / LATEST).is_file()


def _backend(path: Path) -> Any:
    """Return the format of the checkpoint in this directory; a Hugging Face directory may have a different metadata.json."""
    try:
        return read_json_object(path / CONFIG).get("sharded_backend")
    except UserError:
        return None


def config_next_to(path: str | Path) -> Path | None:
    """Return the directory with the config.json in a checkpoint or above it."""
    checkpoint = Path(path)
    return next(
        (directory for directory in (checkpoint, checkpoint.absolute().parent) if (directory / "config.json").is_file()),
        None,
    )


class _Record:
    """Substitute for every class and function that the pickle names."""

    def __new__(cls, *arguments: Any) -> _Record:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        # TensorProperties has a tuple, the dtype first.
        self.__dict__.update(state if isinstance(state, dict) else {"dtype": state[0]})


class _Unpickler(pickle.Unpickler):
    """Unpickler that never imports or calls what the pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in DTYPES:
            return name
        return {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}.get((module, name), _Record)


def read_index(directory: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a checkpoint by Megatron-Core's model names, without the optimizer's; raises ValueError if the
    list cannot be read."""
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        tensors = {name: stored for name, stored in metadata.state_dict_metadata.items() if hasattr(stored, "chunks")}
        places = {
            (key.fqn, tuple(key.offset)): stored
            for key, stored in metadata.storage_data.items()
            if key.fqn in tensors and key.offset is not None
        }
        prefix = _prefix(tensors)
        return {
            name.removeprefix(prefix): _tensor(directory, name, stored, places)
            for name, stored in tensors.items()
            if name.startswith(prefix) and name.removeprefix(prefix).startswith(_OF_A_MODEL)
        }
    except OSError:
        raise
    except Exception as error:
        # A damaged pickle can raise any error; a malicious one becomes a record without these fields.
        raise UserError(f"{path} is not a list of a checkpoint's tensors: {first_line(error)}") from error


def _prefix(names: Mapping[str, Any]) -> str:
    """Return the prefix that some trainers put before the names of the model."""
    embeddings = [name for name in names if name.endswith(EMBEDDING.mcore) and "optimizer" not in name]
    if len(embeddings) != 1:
        raise UserError(f"it must hold one {EMBEDDING.mcore}: got {embeddings or 'none'}")
    return embeddings[0].removesuffix(EMBEDDING.mcore)


def _tensor(directory: Path, name: str, stored: Any, places: Mapping[tuple[str, Shape], Any]) -> StoredTensor:
    chunks = []
    for chunk in stored.chunks:
        place = places[name, tuple(chunk.offsets)]
        if Path(place.relative_path).name != place.relative_path or getattr(place, "transform_descriptors", None):
            raise UserError(f"{name} lies in {shown(place.relative_path)}, in a way that is not read")
        chunks.append(Chunk(tuple(chunk.offsets), tuple(chunk.sizes), place.relative_path, place.offset, place.length))
    return StoredTensor(name, str(stored.properties.dtype), tuple(stored.size), tuple(chunks))


@dataclass(frozen=True)
class TorchDistNames:
    """Tensors of a checkpoint by the parameters of a model."""

    directory: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def read(cls, directory: Path) -> TorchDistNames:
        return cls(directory, read_index(directory))

    def find(self, item: MappedParameter) -> list[Stored]:
        """Return the part that is this parameter, or gate and up if they are separate; empty if there is none."""
        for name, index in _spellings(item):
            if (tensor := self.tensors.get(name)) is not None:
                return [Stored(tensor, index)]
            if f"{name}{_GATE}" in self.tensors and f"{name}{_UP}" in self.tensors:
                return [Stored(self.tensors[f"{name}{end}"], index) for end in (_GATE, _UP)]
        return []

    @cached_property
    def has_output(self) -> bool:
        return OUTPUT.mcore in self.tensors


def has_value_head(directory: Path, spec: ModelSpec) -> bool:
    """Whether the last layer of a checkpoint has one output per token, and not one per word."""
    head = next((item for item in parameters_of(spec) if item.hf == VALUE_HEAD.hf), None)
    heads = [] if head is None else TorchDistNames.read(directory).find(head)
    return bool(heads) and heads[0].shape[0] == 1


def _spellings(item: MappedParameter) -> Iterator[tuple[str, Shape]]:
    """Yield (name, index along the axes before its own) under which a checkpoint may store a parameter."""
    match = _LAYER.fullmatch(item.mcore) or _MTP_LAYER.fullmatch(item.mcore)
    if match is None:
        yield item.mcore, ()
        return
    rest = match[2]
    if (expert := _EXPERT.fullmatch(rest)) is not None:
        name = f"linear_fc{expert[2]}.weight"
        ways = [(f"mlp.experts.experts.{name}", (int(expert[1]),)), (f"mlp.experts.experts.{expert[1]}.{name}", ())]
    else:
        ways = [(rest, ()), *([(FUSED[rest], ())] if rest in FUSED else [])]
    for name, index in ways:
        if match.re is _MTP_LAYER:
            yield f"{match[1]}.{name}", index
        else:
            yield f"decoder.layers.{match[1]}.{name}", index
            yield f"decoder.layers.{name}", (int(match[1]), *index)


def stored_name(item: MappedParameter, spec: ModelSpec) -> tuple[str, Shape, Shape]:
    """Return (name, index, sizes of the axes before its own) under which a parameter is written, as with Transformer Engine
    layers.

    Layers are one tensor if all are alike; the same holds for experts.
    """
    match = _LAYER.fullmatch(item.mcore) or _MTP_LAYER.fullmatch(item.mcore)
    if match is None or item.layer is None:
        return item.mcore, (), ()
    layer, rest = item.layer, match[2]
    place: Shape = ()
    sizes: Shape = ()
    if (expert := _EXPERT.fullmatch(rest)) is not None:
        assert spec.moe is not None
        rest, place, sizes = f"mlp.experts.experts.linear_fc{expert[2]}.weight", (int(expert[1]),), (spec.moe.num_experts,)
    else:
        rest = fused_name(rest, spec, layer)
    if match.re is _MTP_LAYER:
        return f"{match[1]}.{rest}", place, sizes
    if spec.moe is None or all(spec.has_experts(number) for number in range(spec.layers)):
        return f"decoder.layers.{rest}", (layer, *place), (spec.layers, *sizes)
    return f"decoder.layers.{layer}.{rest}", place, sizes


def check_torch_dist(directory: Path, spec: ModelSpec, has_mtp: bool = False) -> None:
    """Raise ValueError if checkpoint files are missing, or its tensors are not those of the model.

    With `has_mtp` it must also have multi-token prediction layers.
    """
    names, missing = TorchDistNames.read(directory), []
    seen: dict[str, set[Shape]] = {}
    ahead = mtp_parameters_of(spec)
    for item in parameters_of(spec) + [item for item in ahead if has_mtp or names.find(item)]:
        parts_of_item = names.find(item)
        for part in parts_of_item:
            seen.setdefault(part.tensor.name, set()).add(part.index)
        if not parts_of_item and not (item.row == OUTPUT.mcore and spec.value_head):
            missing.append(item.mcore)
        for part in parts_of_item:
            _check_tensor(directory, item, part, spec, len(parts_of_item))
    if missing:
        raise UserError(f"{directory} lacks {len(missing)} tensors of a {spec.family} model, the first: {missing[:3]}")
    for name, parts in seen.items():
        stacked = next(tensor for tensor in names.tensors.values() if tensor.name == name).shape[: len(next(iter(parts)))]
        if math.prod(stacked) != len(parts):
            raise UserError(
                f"{directory}: {name} must hold the {len(parts)} parts (layers x experts) of config.json: got {stacked}"
            )
    # A critic does not use a language model's head, and a tied model may have a copy of it.
    known = {tensor.name for name, tensor in names.tensors.items() if name != OUTPUT.mcore and not name.startswith("mtp.")}
    extra = sorted(known - seen.keys())
    if extra:
        raise UserError(
            f"{directory} holds {len(extra)} tensors that a {spec.family} model of its config.json does not have, "
            f"the first: {extra[:3]}"
        )


def _check_tensor(directory: Path, item: MappedParameter, stored: Stored, spec: ModelSpec, parts: int) -> None:
    tensor = stored.tensor
    if tensor.dtype not in DTYPES:
        raise UserError(f"{directory}: {tensor.name} is stored as {shown(tensor.dtype)}, read are {', '.join(DTYPES)}")
    for file in {chunk.file for chunk in tensor.chunks}:
        if not (directory / file).is_file():
            raise UserError(f"{directory} names {file}, which is not there: copy the checkpoint again")
    shapes = file_shapes(spec, item)
    if None in shapes or (item.row == OUTPUT.mcore and spec.value_head):
        return
    rows = sum(shape[0] for shape in shapes if shape) // parts
    wanted = (rows, *(shapes[0] or ())[1:])
    padded = item.sharding is Sharding.VOCABULARY and stored.shape[1:] == wanted[1:] and stored.shape[0] >= rows
    if stored.shape != wanted and not padded:
        raise UserError(f"{directory}: {tensor.name} must have the shape {wanted} of config.json: got {stored.shape}")
