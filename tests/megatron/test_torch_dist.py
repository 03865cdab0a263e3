"""Megatron-Core's own checkpoints: what we write its code reads, and what it writes we read, on other layouts, bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed import distributed_c10d

from fivefold.config import RunConfig
from fivefold.config.learners import PolicyConfig
from fivefold.models.families import load_spec
from fivefold.models.torch_dist import check_torch_dist, find_torch_dist, has_value_head, read_index
from fivefold.plan.check import check
from tests.megatron.test_hugging_face import sample_batch
from tests.support.tiny_models import load_tensors, make_classifier, make_tokenizer
from tests.support.verl_converter import convert

POLICY = PolicyConfig(dtype="float32", sequence_parallel=False)


def write(mesh, directory: Path, out: Path) -> None:
    from fivefold.megatron.bridge.torch_dist import write_torch_dist
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh)
    out.mkdir()
    write_torch_dist(model.weights(), model.spec, out)


def read(mesh, directory: Path, checkpoint: Path) -> dict[str, torch.Tensor]:
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh, torch_dist=find_torch_dist(checkpoint))
    return {name: tensor.clone() for name, tensor in model.weights()}


def megatron_core(mesh, spec):
    """Megatron-Core's own model with its own layers, nothing of ours but the numbers of its configuration."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from fivefold.megatron.transformer_config import transformer_config

    config = transformer_config(spec, mesh, POLICY)
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    if spec.moe is not None:
        # As Megatron-LM has it where every layer has experts; with them the norm before is no part of a product.
        config.moe_layer_freq = 1
        layer.submodules.sharded_state_dict_keys_map.pop("pre_mlp_layernorm.")
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=spec.padded_vocab,
        max_sequence_length=spec.max_positions,
        pre_process=mesh.is_first_stage,
        post_process=mesh.is_last_stage,
        share_embeddings_and_output_weights=spec.tied,
        position_embedding_type="rope",
    )


def through_megatron_core(mesh, directory: Path, ours: Path, theirs: Path) -> dict[str, bool]:
    """Load our checkpoint into Megatron-Core's model, compare every parameter with the one we load from `directory`, and save
    what it has."""
    from megatron.core import dist_checkpointing

    from fivefold.megatron.chunks import named_weights
    from fivefold.megatron.model import MegatronModel

    spec = load_spec(directory)
    expected = named_weights(MegatronModel(directory, POLICY, mesh)._chunks)
    # Megatron-Core's own checkpoints exchange objects, which the ranks of a run refuse.
    with mesh.active(), patch.object(distributed_c10d, "_unpickler", pickle.Unpickler):
        model = megatron_core(mesh, spec)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        metadata = {"dp_cp_group": mesh.dp}
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict(metadata=metadata)}, str(ours))
        model.load_state_dict(loaded["model"], strict=False)
        first = mesh.pp.rank() * (spec.layers // mesh.layout.pp)
        local = 0 if spec.moe is None else spec.moe.num_experts // mesh.layout.ep
        same = {}
        for name, parameter in model.named_parameters():
            parts = name.split(".")
            if parts[1] == "layers":
                parts[2] = str(int(parts[2]) + first)
            if "local_experts" in parts:
                place = parts.index("local_experts")
                expert = int(parts[place + 1]) + local * mesh.ranks.coords.ep
                parts[place:] = [str(expert), parts[place + 2].replace("linear_", "")]
            name_in_file = ".".join(parts)
            wanted = expected[name_in_file]
            same[name_in_file] = torch.equal(parameter, wanted.reshape(parameter.shape))
        if mesh.ranks.is_main:
            theirs.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save({"model": model.sharded_state_dict(metadata=metadata)}, str(theirs))
    return same


CASES = [
    ("qwen2_tied", "t2", "p2"),
    ("qwen3_moe", "d2e2", "t2"),
    pytest.param("qwen3", "p2", "t2", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "written_on", "read_on"), CASES)
def test_megatron_core_reads_ours_and_we_read_its_on_other_layouts(cluster, models, tmp_path, name, written_on, read_on):
    directory, ours, theirs = models(name), tmp_path / "ours", tmp_path / "theirs" / "iter_0000100"
    cluster.run(write, "megatron:d1", directory, ours)
    for same in cluster.run(through_megatron_core, f"megatron:{written_on}", directory, ours / "release", theirs):
        assert same and all(same.values()), [name for name, equal in same.items() if not equal]
    (theirs.parent / "latest_checkpointed_iteration.txt").write_text("100")
    expected = load_tensors(directory)
    for weights in cluster.run(read, f"megatron:{read_on}", directory, theirs.parent):
        # A tied model may have its shared weight in the file twice.
        assert set(weights) == set(expected) - ({"lm_head.weight"} if "tied" in name else set())
        assert all(torch.equal(tensor, expected[key]) for key, tensor in weights.items())


def test_a_swapped_tensor_is_seen(cluster, models, tmp_path):
    """The comparison above is no empty promise: two layers' weights change places in one file of the checkpoint."""
    directory, ours = models("qwen3"), tmp_path / "ours"
    cluster.run(write, "megatron:d1", directory, ours)
    path = ours / "release/.metadata"
    metadata = pickle.loads(path.read_bytes())
    one, other = (
        (key, place) for key, place in metadata.storage_data.items() if "linear_proj.weight" in key.fqn and key.offset[0] < 2
    )
    metadata.storage_data[one[0]], metadata.storage_data[other[0]] = other[1], one[1]
    path.write_bytes(pickle.dumps(metadata))
    expected = load_tensors(directory)
    [weights] = cluster.run(read, "megatron:d1", directory, ours)
    wrong = {name for name, tensor in weights.items() if not torch.equal(tensor, expected[name])}
    assert wrong == {f"model.layers.{layer}.self_attn.o_proj.weight" for layer in (0, 1)}


@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        pytest.param("qwen3_moe_sparse", marks=pytest.mark.slow),
        pytest.param("glm4_moe", marks=pytest.mark.slow),
    ],
)
def test_experts_in_some_layers_and_latent_attention_come_back_bit_for_bit(cluster, models, tmp_path, name):
    directory, ours = models(name), tmp_path / "ours"
    cluster.run(write, "megatron:d1", directory, ours)
    expected = load_tensors(directory)
    for weights in cluster.run(read, "megatron:t2e2", directory, ours):
        assert set(weights) == set(expected)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in weights.items())


def converted(mesh, directory: Path, out: Path) -> list[str]:
    return convert(mesh, json.loads((directory / "config.json").read_text()), load_tensors(directory), out)


def numbers(mesh, directory: Path, checkpoint: Path | None):
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh, torch_dist=checkpoint and find_torch_dist(checkpoint))
    return model.forward(sample_batch()), {name: tensor.clone() for name, tensor in model.weights()}


FUSED = "self_attention.linear_qkv.layer_norm_weight"


@pytest.mark.parametrize(
    ("name", "layout", "norm"),
    [
        ("qwen3", "t2", "mlp.linear_fc1.layer_norm_weight"),
        ("qwen3_moe", "d2e2", "pre_mlp_layernorm.weight"),
        pytest.param("qwen2_tied", "p2", "mlp.linear_fc1.layer_norm_weight", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "p2", "pre_mlp_layernorm.weight", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_verls_converter_equals_the_models_files(cluster, models, tmp_path, name, layout, norm):
    directory, out = models(name), tmp_path / "dist_ckpt"
    [stored] = cluster.run(converted, "megatron:d1", directory, out)
    assert {f"decoder.layers.{FUSED}", f"decoder.layers.{norm}"} <= set(stored)
    expected = load_tensors(directory)
    ours = cluster.run(numbers, f"megatron:{layout}", directory, None)
    for (logprobs_T, weights), (expected_T, native) in zip(
        cluster.run(numbers, f"megatron:{layout}", directory, out), ours, strict=True
    ):
        assert torch.equal(logprobs_T, expected_T) and bool(expected_T.any())
        assert set(weights) == set(native)
        assert all(torch.equal(tensor, expected[key]) for key, tensor in weights.items())


@pytest.fixture(scope="module")
def of_verl(cluster, models, tmp_path_factory):
    out = tmp_path_factory.mktemp("verl") / "dist_ckpt"
    cluster.run(converted, "megatron:d1", models("qwen3_moe"), out)
    return out


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("no fused norm", "lacks 4 tensors of a qwen3_moe model, the first: ['decoder.layers.0.input_layernorm.weight'"),
        ("no experts", "lacks 32 tensors of a qwen3_moe model, the first: ['decoder.layers.0.mlp.experts.0.fc1'"),
        ("another width", "decoder.layers.self_attention.linear_proj.weight must have the shape (64, 128) of config.json"),
        ("fewer experts", "linear_fc2.weight must hold the 32 parts (layers x experts) of config.json: got (4, 7)"),
        ("more layers", "linear_qkv.weight must hold the 4 parts (layers x experts) of config.json: got (5,)"),
    ],
)
def test_tensors_that_verls_checkpoint_lacks_are_named(models, of_verl, tmp_path, how, says):
    root = tmp_path / "dist_ckpt"
    shutil.copytree(of_verl, root)
    spec = load_spec(models("qwen3_moe"))
    check_torch_dist(find_torch_dist(root), spec)
    metadata = pickle.loads((root / ".metadata").read_bytes())
    tensors = metadata.state_dict_metadata
    if how == "no fused norm":
        del tensors[f"decoder.layers.{FUSED}"]
    elif how == "no experts":
        del tensors["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    elif how == "another width":
        tensors["decoder.layers.self_attention.linear_proj.weight"].size = torch.Size((4, 64, 120))
    elif how == "fewer experts":
        tensors["decoder.layers.mlp.experts.experts.linear_fc2.weight"].size = torch.Size((4, 7, 64, 32))
    else:
        tensors["decoder.layers.self_attention.linear_qkv.weight"].size = torch.Size((5, 256, 64))
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=re.escape(says)):
        check_torch_dist(find_torch_dist(root), spec)


def scores(mesh, directory: Path, out: Path) -> tuple[bool, bool]:
    """A sequence classifier through a checkpoint: (it is known as one, its head comes back)."""
    from fivefold.megatron.bridge.torch_dist import write_torch_dist
    from fivefold.megatron.model import MegatronModel

    model = MegatronModel(directory, POLICY, mesh, value_head=True)
    out.mkdir()
    write_torch_dist(model.weights(), model.spec, out)
    again = MegatronModel(directory, POLICY, mesh, value_head=True, torch_dist=find_torch_dist(out))
    first, second = dict(model.weights()), dict(again.weights())
    equal = set(first) == set(second) and all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    return not again.value_head_is_new, equal and bool(first["score.weight"].any())


def test_a_reward_models_head_comes_back_and_a_language_model_has_none(cluster, models, written, tmp_path):
    judge = make_classifier(tmp_path / "judge")
    assert cluster.run(scores, "megatron:d1", judge, tmp_path / "out") == [(True, True)]
    spec = load_spec(judge, True)
    assert has_value_head(find_torch_dist(tmp_path / "out"), spec)
    assert not has_value_head(find_torch_dist(written), spec), "verl would draw it at random"
    make_tokenizer(judge)

    def errors(path: Path) -> list[str]:
        return check(
            RunConfig.of(
                model={"path": str(judge), "config": str(judge)}, reward={"model": {"path": str(path)}}, policy={"dtype": "float32"},
                data={"train": ["none.jsonl"], "max_prompt_tokens": 64, "max_response_tokens": 64}, trainer={"device": "cpu"},
            )
        ).errors  # fmt: skip

    assert not [error for error in errors(tmp_path / "out") if error.startswith("reward.model")]
    (error,) = [error for error in errors(written) if error.startswith("reward.model")]
    assert "has no value head (score.weight)" in error


@pytest.fixture(scope="module")
def written(cluster, models, tmp_path_factory):
    root = tmp_path_factory.mktemp("torch_dist") / "ours"
    cluster.run(write, "megatron:d1", models("qwen3"), root)
    return root


class Harm:
    """A pickle of it writes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def spoil(root: Path, how: str) -> None:
    release = root / "release"
    metadata = pickle.loads((release / ".metadata").read_bytes())
    first = next(iter(metadata.storage_data))
    if how == "a pickle that does harm":
        content: object = Harm(root / "harm")
    elif how == "harm beside the tensors":
        metadata.planner_data = Harm(root / "harm")
        content = metadata
    elif how == "a file elsewhere":
        for key in metadata.storage_data:
            metadata.storage_data[key].relative_path = "../../secret"
        content = metadata
    elif how == "no embedding":
        del metadata.state_dict_metadata["embedding.word_embeddings.weight"]
        content = metadata
    elif how == "a tensor too few":
        del metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"]
        content = metadata
    elif how == "a tensor too many":
        metadata.state_dict_metadata["decoder.layers.self_attention.linear_qkv.bias"] = metadata.state_dict_metadata[
            "decoder.final_layernorm.weight"
        ]
        from torch.distributed.checkpoint.metadata import MetadataIndex

        metadata.storage_data[MetadataIndex("decoder.layers.self_attention.linear_qkv.bias", torch.Size([0]))] = (
            metadata.storage_data[first]
        )
        content = metadata
    else:
        content = metadata
    (release / ".metadata").write_bytes(pickle.dumps(content))
    if how == "a file that is missing":
        next(release.glob("*.distcp")).unlink()
    if how == "cut off":
        (release / ".metadata").write_bytes((release / ".metadata").read_bytes()[:500])
    if how == "another backend":
        (release / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr"}))
    if how == "not finished":
        (release / ".metadata").unlink()
    if how == "gone":
        (root / "latest_checkpointed_iteration.txt").write_text("7")


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("a pickle that does harm", "is not a list of a checkpoint's tensors"),
        ("cut off", "is not a list of a checkpoint's tensors"),
        ("a file elsewhere", "in a way that is not read"),
        ("no embedding", "it must hold one embedding.word_embeddings.weight"),
        ("a tensor too few", "lacks 4 tensors of a qwen3 model"),
        ("a tensor too many", "holds 1 tensors that a qwen3 model of its config.json does not have"),
        ("a file that is missing", "which is not there: copy the checkpoint again"),
        ("another backend", "its metadata.json says 'zarr'"),
        ("not finished", "the checkpoint is unfinished, or an incomplete copy"),
        ("gone", "names iter_0000007, which is not there"),
    ],
)
def test_what_cannot_be_read_is_refused_in_a_sentence_and_nothing_of_it_is_run(models, written, tmp_path, how, says):
    root = tmp_path / "ours"
    shutil.copytree(written, root)
    spec = load_spec(models("qwen3"))
    check_torch_dist(find_torch_dist(root), spec)
    spoil(root, how)
    with pytest.raises(ValueError, match=re.escape(says)):
        check_torch_dist(find_torch_dist(root), spec)
    assert not (root / "harm").exists()


def test_harm_next_to_the_tensors_is_not_run(models, written, tmp_path):
    root = tmp_path / "ours"
    shutil.copytree(written, root)
    spoil(root, "harm beside the tensors")
    assert read_index(root / "release").keys() == read_index(written / "release").keys()
    check_torch_dist(root / "release", load_spec(models("qwen3")))
    assert not (root / "harm").exists()
    # The same file does harm to who trusts it.
    pickle.loads((root / "release/.metadata").read_bytes())
    assert (root / "harm").exists()


def test_old_formats_are_named(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(ValueError, match="pickles of ranks"):
        find_torch_dist(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/metadata.json").write_text('{"title": "of a Hugging Face directory"}')
    assert find_torch_dist(tmp_path / "other") is None


def test_check_reads_the_model_s_config_next_to_the_checkpoint_or_from_model_config(models, written, tmp_path):
    root = tmp_path / "ours"
    shutil.copytree(written, root)
    shutil.copytree(models("qwen3"), tmp_path / "model")
    make_tokenizer(tmp_path / "model")

    def findings(**model):
        config = RunConfig.of(
            model={"path": str(root), **model}, policy={"dtype": "float32"}, algorithm={"kl": {"coef": 0.1}},
            data={"train": ["none.jsonl"], "max_prompt_tokens": 64, "max_response_tokens": 64}, trainer={"device": "cpu"},
        )  # fmt: skip
        findings = check(config)
        return [error for error in findings.errors if not error.startswith("data.train")], findings.ignored

    needs = f"model.path: no config.json in the checkpoint of Megatron-Core {root} or above it"
    assert findings()[0][0] == f"{needs}: name the Hugging Face directory or hub id of its model in model.config"
    assert findings(config=str(tmp_path / "model")) == ([], [])
    assert findings(config="nowhere")[0][0].startswith("model.config: no config.json in nowhere")
    assert findings(path=str(tmp_path / "model"), config=str(tmp_path / "model"))[1][0][0] == "model.config"
    for file in (tmp_path / "model").glob("*.json"):
        shutil.copy(file, root)
    assert findings() == findings(path=str(root / "release")) == ([], [])
