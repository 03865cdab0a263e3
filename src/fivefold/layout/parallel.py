"""Layout strings (`megatron:d2t2p2c2e4`) and their meaning: str -> ParallelLayout -> Coordinates of a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from fivefold.errors import UserError

TRAINERS = ("megatron", "fsdp")
ENGINES = ("vllm", "sglang")
DIMENSIONS = {"d": "dp", "t": "tp", "p": "pp", "c": "cp", "e": "ep"}
_ATTENTION, _EXPERTS, _ENGINE = "dtpc", "dtpe", "dtpe"
_EXAMPLE = "write for example 'megatron:d2t2p1', 'fsdp:d4' or 'megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)'"
_HEAD = re.compile(r"(?P<backend>[^:\[\]]*)(?:\[(?P<name>[^\]]*)\])?:(?P<sizes>.*)", re.DOTALL)
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_MOST = 1 << 20


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of one rank in a layout; `ep`, `etp` and `edp` are those among the ranks that share experts."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int
    edp: int


NOWHERE = Coordinates(-1, -1, -1, -1, -1, -1, -1)
"""Coordinates of a rank outside the layout."""


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel dimensions of one model; raises ValueError if they do not fit together.

    Experts are placed on the same ranks as attention: world = dp · cp · tp · pp = edp · ep · etp · pp.

    Example: `megatron:d2t4` is 8 ranks, two replicas of four tensor-parallel ranks each;
    `megatron:(attn:d1p4t2c2|ffn:d1p4t1e4)` is 16 ranks, whose experts are divided over four instead of sharded over two.
    """

    backend: str = "megatron"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    """Tensor parallelism of experts: 1 regardless of `tp`, unless the string has an ffn part with another number."""
    name: str | None = None

    def __post_init__(self) -> None:
        if self.backend == "fsdp":
            self._check_fsdp()
        if self.world_size > _MOST:
            raise UserError(f"a layout must have at most {_MOST} ranks: got {self.world_size} in {self}")
        if self.world_size % (self.pp * self.etp * self.ep):
            raise UserError(
                f"the ranks must be divisible among experts: world size d·t·p·c = {self.world_size} is not a multiple of "
                f"p·etp·e = {self.pp}·{self.etp}·{self.ep} = {self.pp * self.etp * self.ep}; "
                f"choose an e that divides {self.world_size // self.pp // self.etp or 1}, or more ranks"
            )

    def _check_fsdp(self) -> None:
        if self.pp > 1:
            raise UserError(f"fsdp has no pipeline: got p{self.pp}; use megatron: for it")
        if self.etp > 1:
            raise UserError(
                f"fsdp does not shard single experts, so t in an ffn part must be 1: got {self}; use megatron: for it"
            )
        if self.ep > 1 and (self.ep % self.tp or self.dp * self.tp % self.ep):
            ranks = self.dp * self.tp
            fitting = sorted({1} | {size for size in range(self.tp, ranks + 1, self.tp) if ranks % size == 0})
            raise UserError(
                f"with fsdp, e must be 1 or a multiple of t that divides d·t: got e{self.ep} for d{self.dp} t{self.tp}; "
                f"choose one of {', '.join(map(str, fitting))}"
            )

    @classmethod
    def parse(cls, text: str) -> ParallelLayout:
        """Parse one layout: `backend:d?t?p?c?e?`, `backend[name]:...` or `backend:(attn:d?t?p?c?|ffn:d?t?p?e?)`.

        Order, white space, quotes and the parentheses do not matter. A dimension that is left out is 1; in `ffn`, p defaults
        to that of `attn`, and d follows from the rest. Raises ValueError with an example of a valid layout.
        """
        compact = _unquote("".join(text.split()))
        match = _HEAD.fullmatch(compact)
        if match is None:
            if "." in compact and ":" not in compact:
                raise UserError(f"a layout has a colon after its backend, not a dot: got {text!r}; {_EXAMPLE}")
            raise UserError(f"a layout names its backend before a colon: got {text!r}; {_EXAMPLE}")
        backend, name, sizes = match["backend"], match["name"], _unquote(match["sizes"])
        if not backend:
            raise UserError(f"a layout names its backend before a colon: got {text!r}; {_EXAMPLE}")
        if backend not in TRAINERS + ENGINES:
            close = f": did you mean {backend.lower()!r}?" if backend.lower() in TRAINERS + ENGINES else ""
            known = ", ".join(TRAINERS + ENGINES)
            raise UserError(f"unknown backend {backend!r} in layout {text!r}{close}; known: {known}; {_EXAMPLE}")
        if name is not None and not _NAME.fullmatch(name):
            raise UserError(f"a name in brackets is made of letters, digits and _: got {name!r} in layout {text!r}")
        if "attn:" in sizes or "ffn:" in sizes:
            if backend in ENGINES:
                raise UserError(f"an engine's layout has no attn and ffn parts: got {text!r}; write '{backend}:d2t2'")
            return cls(backend=backend, name=name, **_hybrid(sizes, text))
        letters = _ENGINE if backend in ENGINES else "".join(DIMENSIONS)
        return cls(
            backend=backend, name=name, **{DIMENSIONS[key]: size for key, size in _sizes(sizes, letters, text).items()}
        )

    def __str__(self) -> str:
        head = f"{self.backend}[{self.name}]" if self.name else self.backend
        stages = "" if self.backend == "fsdp" else f"p{self.pp}"
        attention = f"d{self.dp}t{self.tp}{stages}" + (f"c{self.cp}" if self.cp > 1 else "")
        if self.etp > 1:
            return f"{head}:(attn:{attention}|ffn:d{self.edp}t{self.etp}p{self.pp}e{self.ep})"
        return f"{head}:{attention}" + (f"e{self.ep}" if self.ep > 1 else "")

    def is_same(self, other: ParallelLayout) -> bool:
        """Whether two layouts place every rank alike, regardless of their names."""
        return replace(self, name=None) == replace(other, name=None)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replica_size(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.world_size // (self.pp * self.etp * self.ep)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank` in Megatron-Core's order: tensor fastest, then context, then data, then pipeline.

        Experts number the ranks of a pipeline stage separately: expert tensor fastest, then expert, then expert data.
        """
        assert 0 <= rank < self.world_size, f"rank must be in [0, {self.world_size}) for layout {self}: got {rank}"
        stage_size = self.tp * self.cp * self.dp
        inside = rank % stage_size
        return Coordinates(
            tp=inside % self.tp,
            cp=inside // self.tp % self.cp,
            dp=inside // (self.tp * self.cp),
            pp=rank // stage_size,
            etp=inside % self.etp,
            ep=inside // self.etp % self.ep,
            edp=inside // (self.etp * self.ep),
        )


def _unquote(text: str) -> str:
    while len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    return text


def _sizes(text: str, letters: str, layout: str) -> dict[str, int]:
    """Parse `d2t4` -> {"d": 2, "t": 4}; allows only these letters, each once."""
    if not text:
        raise UserError(f"layout {layout!r} names no dimension; {_EXAMPLE}")
    sizes: dict[str, int] = {}
    position = 0
    for match in re.finditer(r"([a-zA-Z])([0-9]+)", text):
        if match.start() != position:
            break
        letter, number = match.groups()
        if letter not in letters:
            known = ", ".join(f"{key} ({DIMENSIONS[key]})" for key in letters)
            raise UserError(f"unknown dimension {letter!r} in layout {layout!r}; valid here: {known}")
        if letter in sizes:
            raise UserError(f"dimension {letter!r} is given twice in layout {layout!r}: keep one")
        if number.startswith("0"):
            raise UserError(f"dimension sizes start at 1 and have no leading zero: got {letter}{number} in {layout!r}")
        if len(number) > 7 or int(number) > _MOST:
            raise UserError(f"dimension {letter!r} must be at most {_MOST}: got {number} in layout {layout!r}")
        sizes[letter] = int(number)
        position = match.end()
    if position != len(text):
        raise UserError(
            f"cannot read {text[position:]!r} in layout {layout!r}: expected a letter of {'/'.join(letters)} and a number; "
            f"{_EXAMPLE}"
        )
    return sizes


def _hybrid(text: str, layout: str) -> dict[str, int]:
    """Parse `(attn:d1p4t2c2|ffn:d1p4t1e4)`; the parentheses are optional."""
    inner = text[1:-1] if text.startswith("(") and text.endswith(")") else text
    first, bar, second = inner.partition("|")
    if not bar or not first.startswith("attn:") or not second.startswith("ffn:"):
        raise UserError(
            f"a layout with experts apart is written (attn:d?t?p?c?|ffn:d?t?p?e?): got {text!r} in layout {layout!r}; "
            f"{_EXAMPLE}"
        )
    attention = _sizes(first.removeprefix("attn:"), _ATTENTION, layout)
    experts = _sizes(second.removeprefix("ffn:"), _EXPERTS, layout)
    sizes = {name: attention.get(letter, 1) for letter, name in DIMENSIONS.items() if letter in _ATTENTION}
    sizes |= {"ep": experts.get("e", 1), "etp": experts.get("t", 1)}
    world = sizes["dp"] * sizes["tp"] * sizes["pp"] * sizes["cp"]
    if experts.get("p", sizes["pp"]) != sizes["pp"]:
        raise UserError(
            f"attn and ffn share the pipeline, so p must be the same in both: got p{sizes['pp']} and p{experts['p']} "
            f"in layout {layout!r}; leave it out of ffn"
        )
    if "d" in experts and experts["d"] * sizes["etp"] * sizes["ep"] * sizes["pp"] != world:
        raise UserError(
            f"attn and ffn must use the same ranks: attn has d·t·p·c = {world}, ffn has d·t·p·e = "
            f"{experts['d']}·{sizes['etp']}·{sizes['pp']}·{sizes['ep']} = "
            f"{experts['d'] * sizes['etp'] * sizes['ep'] * sizes['pp']} in {layout!r}; leave d out of ffn and it follows"
        )
    return sizes
