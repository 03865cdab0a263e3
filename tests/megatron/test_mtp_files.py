"""What carries layers of multi-token prediction: exported directories and checkpoints of Megatron-Core."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fivefold.config.learners import PolicyConfig
from fivefold.models.families import is_of_mtp, load_spec, mtp_copies
from fivefold.models.tensor_files import find_mtp_tensors
from fivefold.models.torch_dist import check_torch_dist, find_torch_dist, read_index
from tests.support.tiny_models import MTP_VARIANTS, load_tensors

POLICY = PolicyConfig(dtype="float32", sequence_parallel=False)


def exported(mesh, directory: Path, moved: float, torch_dist: Path | None = None) -> dict[str, torch.Tensor]:
    """What an export writes of the model in `directory` whose weights have moved."""
    from fivefold.checkpoint.export import with_mtp
    from fivefold.megatron.bridge import SafetensorsSource, TorchDistSource
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh)
    source = SafetensorsSource(directory, model.spec, find_mtp_tensors(directory, model.spec))
    if torch_dist is not None:
        source = TorchDistSource(find_torch_dist(torch_dist), model.spec)
    weights = ((name, tensor + moved) for name, tensor in model.weights())
    return {name: tensor.clone() for name, tensor in with_mtp(weights, source, model.spec, {})}


@pytest.mark.parametrize("name", list(MTP_VARIANTS))
def test_an_export_has_every_tensor_of_the_files_and_copies_the_shared_ones(cluster, models, name):
    files, spec = load_tensors(models(name)), load_spec(models(name))
    for tensors in cluster.run(exported, "megatron:d1", models(name), 0.25):
        assert sorted(tensors) == sorted(files)
        copies = mtp_copies(spec)
        for hf, tensor in tensors.items():
            is_kept = is_of_mtp(hf, spec) and hf not in copies
            assert torch.equal(tensor, files[hf] if is_kept else files[hf] + 0.25), hf
        for hf, whole in copies.items():
            assert torch.equal(tensors[hf], tensors[whole])


def write(mesh, directory: Path, out: Path) -> None:
    from fivefold.megatron.bridge.torch_dist import write_torch_dist

    out.mkdir()
    write_torch_dist(exported(mesh, directory, 0.0).items(), load_spec(directory), out)


@pytest.mark.parametrize("name", ["mimo_two", "deepseek_v3_mtp", "glm4_moe_mtp"])
def test_a_checkpoint_of_megatron_core_carries_them_there_and_back(cluster, models, tmp_path, name):
    files, spec = load_tensors(models(name)), load_spec(models(name))
    cluster.run(write, "megatron:d1", models(name), tmp_path / "out")
    checkpoint = find_torch_dist(tmp_path / "out")
    check_torch_dist(checkpoint, spec)
    stored = read_index(checkpoint)
    first = "mtp.layers.0.transformer_layer.self_attention"
    assert stored["mtp.layers.0.eh_proj.weight"].shape == (64, 128)
    assert (f"{first}.linear_qkv.layer_norm_weight" if spec.mla is None else f"{first}.linear_kv_up_proj.weight") in stored
    if spec.moe is not None:
        experts = "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight"
        assert stored[experts].shape == (8, 64, 64)
    for tensors in cluster.run(exported, "megatron:d1", models(name), 0.0, checkpoint):
        # What they share with the model is no tensor of its own there.
        assert set(files) - set(tensors) == set(mtp_copies(spec))
        assert all(torch.equal(tensor, files[hf]) for hf, tensor in tensors.items())
