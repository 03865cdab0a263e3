"""Loading and exporting through our own tables, mbridge and Megatron-Bridge, on CPU ranks, in seconds of this rank's CPU.

`.venv-bridges/bin/python benchmarks/bridges.py [LAYOUT ...]` after `make test-bridges` has made the environment.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from fivefold.models.bridges import FAMILIES
from tests.support.cluster import Cluster
from tests.support.tiny_models import make_model
from tests.support.zygote import zygote

if TYPE_CHECKING:
    from fivefold.megatron.mesh import Mesh

MODELS = {
    "qwen3": {"vocab_size": 8000, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 24},
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 8, "num_experts": 64},
}
ROUNDS = 2


def seconds(mesh: Mesh, kind: Any, directory: Path) -> dict[str, float]:
    """Least CPU seconds of `ROUNDS` for building the model with its weights, and for streaming all of them."""
    from fivefold.config.learners import MegatronConfig, PolicyConfig
    from fivefold.megatron.model import MegatronModel

    policy = PolicyConfig(dtype="float32", megatron=MegatronConfig(bridge_type=kind))
    taken: dict[str, list[float]] = {"build and load": [], "export": []}
    for _ in range(ROUNDS):
        begun = time.process_time()
        model = MegatronModel(directory, policy, mesh)
        taken["build and load"].append(time.process_time() - begun)
        begun = time.process_time()
        tensors = sum(1 for _ in model.weights())
        taken["export"].append(time.process_time() - begun)
    return {"tensors": tensors, **{name: round(min(times), 2) for name, times in taken.items()}}


def main() -> None:
    """Print a line for each model, layout and bridge."""
    cluster = Cluster()
    try:
        with tempfile.TemporaryDirectory() as root:
            for name, sizes in MODELS.items():
                directory = make_model(name, Path(root) / name, **sizes)
                for layout in sys.argv[1:] or ["d1", "t2"]:
                    for kind in ("native", *FAMILIES):
                        print(name, layout, kind, cluster.run(seconds, f"megatron:{layout}", kind, directory)[0], flush=True)
    finally:
        zygote.close()


if __name__ == "__main__":
    # Ranks find functions in the module of this name only.
    from benchmarks import bridges

    bridges.main()
