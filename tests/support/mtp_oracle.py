"""Two optimizer steps with layers of multi-token prediction, written out with transformers' layers and torch.optim.AdamW.

DeepSeek-V3 (2412.19437), section 2.2: layer d (from 0) takes [norm(Emb(t_{i+1+d})); norm(h_i)] through a projection (eq. 21)
and a transformer layer (eq. 22), and the model's own output layer makes of its norm the distribution of t_{i+2+d} (eq. 23);
the loss is the factor times the mean over the layers of their mean cross-entropies (eq. 24-25), here over response tokens.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fivefold.config.learners import MTPConfig
from fivefold.types import LossOutput, TokenBatch
from tests.support.tiny_models import MTP_PARTS, MTP_VARIANTS, load_tensors
from tests.support.two_steps import LENGTHS, OPTIMIZER, PROMPTS, TEMPERATURE, whole_batch

SCALE = 0.02
"""Of the main loss a response token: Σ over all of them of this times its negative log-prob."""


def main_loss(logprobs_T: torch.Tensor, entropy_T: torch.Tensor, micro: TokenBatch) -> LossOutput:
    return LossOutput(loss=-SCALE * logprobs_T.sum(), sums={})


def as_longer_model(directory: Path, variant: str, out: Path) -> Any:
    """The model with its layers of multi-token prediction as ordinary ones after its own, and the tensors left over."""
    import transformers
    from safetensors.torch import save_file

    base, depths = MTP_VARIANTS[variant]
    config, state = json.loads((directory / "config.json").read_text()), load_tensors(directory)
    layers_of_model = config["num_hidden_layers"]
    if base == "qwen2":
        config |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "layer_types": None}
        state = {
            re.sub(r"mtp_layers\.(\d+)", lambda match: f"layers.{layers_of_model + int(match[1])}", name): tensor
            for name, tensor in state.items()
        }
    config |= {"num_hidden_layers": layers_of_model + depths, "num_nextn_predict_layers": 0}
    parts = tuple(f".{part}.weight" for part in MTP_PARTS["mimo" if base == "qwen2" else "deepseek_v3"])
    rest = {name: state.pop(name) for name in list(state) if name.endswith(parts)}
    rest = {name: tensor for name, tensor in rest.items() if not name.endswith("model.norm.weight")}
    state = {
        name: tensor
        for name, tensor in state.items()
        if not name.endswith((f".{layers_of_model}.embed_tokens.weight", "shared_head.head.weight"))
    }
    state = {name: tensor for name, tensor in state.items() if not re.search(r"layers\.\d+\.embed_tokens", name)}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(out).float()
    return (
        model,
        {name: torch.nn.Parameter(tensor.float()) for name, tensor in rest.items()},
        layers_of_model,
        base == "qwen2",
    )


def mtp_steps(directory: Path, variant: str, mtp: MTPConfig, steps: int = 2):
    """([(main loss, mean of the layers' losses, gradient norm)], parameters by the names of the files)."""
    depths = MTP_VARIANTS[variant][1]
    with tempfile.TemporaryDirectory() as scratch:
        model, rest, layers_of_model, is_mimo = as_longer_model(directory, variant, Path(scratch))
    before, after, projection, last = MTP_PARTS["mimo" if is_mimo else "deepseek_v3"]
    inner, layers = model.model, list(model.model.layers)
    eps = model.config.rms_norm_eps
    batch = whole_batch()
    named = [*model.named_parameters(), *rest.items()]
    adam = torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.ndim > 1], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=OPTIMIZER.lr,
        betas=(OPTIMIZER.betas[0], OPTIMIZER.betas[1]),
        eps=OPTIMIZER.eps,
    )

    def norm(hidden: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], rest[name], eps)

    def losses() -> tuple[torch.Tensor, list[torch.Tensor], list[int]]:
        main, ahead, counts, start = torch.zeros(()), [torch.zeros(()) for _ in range(depths)], [0] * depths, 0
        for length, prompt in zip(LENGTHS, PROMPTS, strict=True):
            tokens = batch.token_ids_T[start : start + length]
            start += length
            inner.layers = torch.nn.ModuleList(layers[:layers_of_model])
            hidden = inner(tokens[None]).last_hidden_state
            logp = torch.log_softmax(model.lm_head(hidden)[0] / TEMPERATURE, -1)
            main = main - SCALE * logp[prompt - 1 : -1].gather(1, tokens[prompt:, None]).sum()
            for depth in range(depths):
                size = length - 1 - depth
                if size < 1:
                    break
                embedded, previous = inner.embed_tokens(tokens[1 + depth :])[None], hidden[:, :size]
                if mtp.detach_encoder:
                    embedded, previous = embedded.detach(), previous.detach()
                name = f"model.layers.{layers_of_model + depth}."
                halves = [norm(embedded, f"{name}{before}.weight"), norm(previous, f"{name}{after}.weight")]
                joined = torch.cat(halves[::-1] if is_mimo else halves, -1) @ rest[f"{name}{projection}.weight"].t()
                positions = torch.arange(size)[None]
                angles = inner.rotary_emb(joined, positions)
                output = layers[layers_of_model + depth](
                    joined, attention_mask=None, position_ids=positions, position_embeddings=angles
                )
                hidden = norm(output, f"{name}{last}.weight")
                logp = torch.log_softmax(model.lm_head(hidden)[0], -1)
                for target in range(max(prompt, 2 + depth), length):
                    ahead[depth] = ahead[depth] - logp[target - 2 - depth, tokens[target]]
                    counts[depth] += 1
        return main, ahead, counts

    results = []
    for _ in range(steps):
        main, ahead, counts = losses()
        mean = torch.stack([loss / count for loss, count in zip(ahead, counts, strict=True)]).mean()
        adam.zero_grad()
        (main + mtp.loss_scaling_factor * mean).backward()
        total = torch.nn.utils.clip_grad_norm_([p for _, p in named], OPTIMIZER.clip_grad)
        adam.step()
        results.append((main.item(), mean.item(), total.item()))
    inner.layers = torch.nn.ModuleList(layers)
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        state = load_tensors(Path(saved)) | {name: tensor.detach().clone() for name, tensor in rest.items()}
    if is_mimo:
        ahead_of = re.compile(rf"layers\.({'|'.join(str(layers_of_model + depth) for depth in range(depths))})\.")
        state = {
            ahead_of.sub(lambda match: f"mtp_layers.{int(match[1]) - layers_of_model}.", name): t
            for name, t in state.items()
        }
    return results, state
