"""This rank's chunks of the model, one per virtual stage, and their weights by their names in the whole model."""

from __future__ import annotations

from itertools import groupby

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from fivefold.config.learners import PolicyConfig
from fivefold.config.mcore_options import recompute_fault
from fivefold.errors import UserError
from fivefold.layout import Coordinates
from fivefold.megatron.layers.adapters import ExpertAdapters, LostToRounding, adapt, adapt_experts, adapters_in, is_adapter
from fivefold.megatron.layers.layer_spec import PolicyModel, block_spec, mtp_block_spec
from fivefold.megatron.layers.moe import GroupedExperts, Router
from fivefold.megatron.mesh import Mesh
from fivefold.megatron.patches.quiet import quiet
from fivefold.models.adapters import LoraSpec, adapters_of
from fivefold.models.fused_names import SEPARATE
from fivefold.models.parameters import Sharding
from fivefold.models.spec import ModelSpec


def build_chunks(
    config: TransformerConfig, spec: ModelSpec, mesh: Mesh, policy: PolicyConfig, embedding_scale: float | None = None
) -> list[PolicyModel]:
    """Build this rank's chunks of the model on its device, one per virtual stage; weights are not set yet."""
    split = policy.megatron.pipeline_split.split_layers(spec.layers, mesh.layout)
    if fault := recompute_fault(vars(config), (len(layers) for stage in split for layers in stage)):
        raise UserError(f"megatron.transformer: {fault}")
    stages = split[mesh.pp.rank()]
    virtual = config.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(virtual)
    ahead = None
    if policy.mtp.train:
        ahead = mtp_block_spec(config, spec.has_experts(spec.layers), policy.mtp.detach_encoder)
    chunks: list[PolicyModel] = []
    for number, layers in enumerate(stages):
        stage = number if virtual else None
        first = get_transformer_layer_offset(config, vp_stage=stage)
        assert not layers or first == layers[0], f"Megatron-Core starts chunk {number} at layer {first}, not {layers[0]}"
        # Megatron-Core warns about every layer whose mixture of experts is not its own class.
        with quiet("megatron.core.transformer.transformer_layer"):
            chunk = PolicyModel(
                config=config,
                transformer_layer_spec=block_spec(config, layers),
                vocab_size=spec.padded_vocab,
                max_sequence_length=spec.max_positions,
                pre_process=mesh.is_first_stage and number == 0,
                post_process=mesh.is_last_stage and number == len(stages) - 1,
                share_embeddings_and_output_weights=spec.tied,
                position_embedding_type="rope",
                rotary_base=spec.rope_theta,
                rotary_percent=spec.rotary_fraction,
                rope_scaling=spec.rope_llama3_factor is not None,
                rope_scaling_factor=spec.rope_llama3_factor or 1.0,
                seq_len_interpolation_factor=spec.rope_linear_factor,
                vp_stage=stage,
                value_head=spec.value_head,
                embedding_scale=embedding_scale,
                mtp_block_spec=ahead if mesh.is_last_stage and number == len(stages) - 1 else None,
            ).to(mesh.device)
        assert len(chunk.decoder.layers) == len(layers)
        chunk.layers_of_model = layers
        chunks.append(chunk)
    return chunks


def add_adapters(chunks: list[PolicyModel], spec: ModelSpec, lora: LoraSpec, mesh: Mesh) -> None:
    """Add adapters to the linear modules of these chunks, values not set yet; freeze everything else but a value head."""
    adapters = adapters_of(spec, lora)
    wanted = {linear: list(maps) for linear, maps in groupby(adapters, key=lambda adapter: adapter.linear)}
    # All experts of a layer have the same adapters.
    experts = {
        layer: [adapter for adapter in adapters if (adapter.layer, adapter.expert) == (layer, 0)]
        for layer in range(spec.layers)
    }
    for chunk in chunks:
        chunk.has_adapters = True
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(chunk.is_trained(name))
        for name in [name.removesuffix(".weight") for name, _ in chunk.named_parameters()]:
            if maps := wanted.get(_whole_name(f"{name}.weight", chunk).removesuffix(".weight")):
                groups = spec.kv_heads // mesh.layout.tp if maps[0].sharding is Sharding.QKV else 1
                adapt(chunk.get_submodule(name), maps, lora, groups, mesh.tp)
        for layer, module in zip(chunk.layers_of_model, chunk.decoder.layers, strict=True):
            if experts[layer]:
                adapt_experts(module.mlp.experts, experts[layer], lora)


def adapter_weights(chunks: list[PolicyModel]) -> dict[str, torch.Tensor]:
    """Return A and B of the adapters by name, with layer and expert numbers of the whole model; for experts, views."""
    weights: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, adapters in adapters_in(chunk):
            start = _whole_name(f"{name}.", chunk)
            if isinstance(adapters, ExpertAdapters):
                weights.update((f"{start}{part}", view) for part, view in adapters.by_expert())
            else:
                weights.update((f"{start}adapters.{part}", parameter) for part, parameter in adapters.named_parameters())
    return weights


class MergedWeights(dict[str, torch.Tensor]):
    """Weights by name; a weight that has an adapter is merged with it when it is read."""

    def __init__(self, chunks: list[PolicyModel], place: Coordinates, lost: LostToRounding) -> None:
        super().__init__(named_weights(chunks))
        self._lost = lost
        self._merges = {
            _whole_name(f"{name}.{part}", chunk): merge
            for chunk in chunks
            for name, adapters in adapters_in(chunk)
            for part, merge in adapters.merges(place)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        weight = super().__getitem__(name)
        return self._merges[name](weight, self._lost) if name in self._merges else weight


def named_weights(chunks: list[PolicyModel]) -> dict[str, torch.Tensor]:
    """Return parameters and router biases by name, with layer and expert numbers of the whole model.

    Adapters are not included. The stacked weights of experts appear as `decoder.layers.3.mlp.experts.7.fc1`. These are
    views: call this again after anything that moves parameters.
    """
    weights: dict[str, torch.Tensor] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if isinstance(module, GroupedExperts):
                weights.update((_whole_name(f"{name}.{part}", chunk), weight) for part, weight in module.by_expert())
            elif isinstance(module, Router) and module.expert_bias is not None:
                weights[_whole_name(f"{name}.expert_bias", chunk)] = module.expert_bias
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." not in name and not is_adapter(name):
                weights[_whole_name(name, chunk)] = parameter
    return weights


def _whole_name(name: str, chunk: PolicyModel) -> str:
    if not name.startswith("decoder.layers."):
        return name
    _, _, layer, rest = name.split(".", 3)
    return f"decoder.layers.{chunk.layers_of_model[int(layer)]}.{SEPARATE.get(rest, rest)}"
