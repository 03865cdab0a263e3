"""Loads tokenizers, trains small ones, and creates small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from fivefold.data.rows import as_messages
from fivefold.errors import UserError, first_line
from fivefold.models.families import runs_own_code

END, PAD, UNKNOWN = "<|end|>", "<|pad|>", "<|unknown|>"


def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer from a directory or by hub id."""
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:
        # Three libraries raise different errors for different kinds of damage.
        raise UserError(f"the tokenizer in {path} cannot be read: {first_line(error)}") from error


def check_config(directory: Path, trust_remote_code: bool = False) -> None:
    """Raise ValueError if transformers cannot read a model's configuration, where it checks more keys than we do."""
    import transformers

    try:
        trusted = runs_own_code(directory, trust_remote_code)
        transformers.AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
        if (directory / "generation_config.json").is_file():
            transformers.GenerationConfig.from_pretrained(directory)
    except Exception as error:
        raise UserError(f"transformers refuses the configuration of {directory}: {first_line(error)}") from error


def train_tokenizer(kind: Literal["char", "bpe"], texts: list[str], out: Path, vocabulary: int = 1024) -> int:
    """Train a tokenizer on `texts`, write it to `out` in the format of transformers, and return its size.

    `char` has one token per character; `bpe` is byte-level and can encode every text.
    """
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if kind == "char":
        alphabet = sorted(set("".join(texts)))
        names = [PAD, END, UNKNOWN, *alphabet]
        tokenizer = tokenizers.Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=UNKNOWN))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.train_from_iterator(
            texts,
            trainers.BpeTrainer(
                vocab_size=vocabulary,
                special_tokens=[PAD, END],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
    unknown = {"unk_token": UNKNOWN} if kind == "char" else {}
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, **unknown)
    out.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(out)
    return len(fast)


def texts_of(row: dict[str, Any]) -> list[str]:
    """Return the texts of a data row that a model will read or write, with the line breaks of the plain template."""
    prompts = {"prompt": row.get("prompt")} | {
        key: row[key] for key in ("messages", "chosen", "rejected") if isinstance(row.get(key), list)
    }
    turns = [message for key, value in prompts.items() if value is not None for message in as_messages(value, key)]
    answers = [row[key] for key in ("response", "chosen", "rejected") if isinstance(row.get(key), str)]
    return [message["content"] + "\n" for message in turns] + answers


def make_model(
    family: str,
    tokenizer: str,
    out: Path,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    positions: int,
    tied: bool,
    seed: int,
) -> int:
    """Write a Hugging Face directory with random weights and the tokenizer's vocabulary; return the number of parameters."""
    import torch
    import transformers

    if hidden % heads or hidden // heads % 2 or heads % kv_heads:
        raise UserError(
            f"--hidden must be a multiple of --heads with an even quotient, and --heads of --kv-heads: "
            f"got {hidden}, {heads} and {kv_heads}"
        )
    torch.manual_seed(seed % 2**63)
    words = load_tokenizer(tokenizer)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=len(words),
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=positions,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
        **({"sliding_window": None} if family == "mistral" else {}),
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    words.save_pretrained(out)
    return int(model.num_parameters())
