"""A model of a published model's sizes which calls a tool at the end of each turn, whatever it reads.

Its next token depends on the last one only: attention and feed-forward layers add nothing to the hidden state, though they
are computed, and the head has for each token of a turn the normed embedding of the token before it. So conversations have
the length that a measurement wants, without training a model to call tools.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
from pathlib import Path
from typing import Any

from benchmarks import recipes

FUNCTION = {"name": "look", "arguments": {"place": "cellar"}}
CALL = f"\n<tool_call>\n{json.dumps(FUNCTION)}\n</tool_call>"
TEMPLATE = "qwen3_instruct_2507.jinja"
"""Chat template in TRL's package, which knows how to read its tool calls."""
LOGIT = 60.0
"""Logit of the next token; those of all other tokens are below a tenth of it."""
TINY = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}
TINY |= {"num_key_value_heads": 2, "vocab_size": 1024}
"""Sizes of a dry run."""


def write(out: Path, name: str, tokens: int, dry: bool) -> Path:
    """Return a directory with the model and the tokenizer of the recipe's model, in which the call is one token."""
    import torch
    import transformers
    from tokenizers import AddedToken

    from tests.support.public_shapes import write_shape

    directory = out / f"{name}-talking"
    if directory.exists():
        return directory
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / recipes.MODEL)
    ends = {
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
    }
    tokenizer.add_special_tokens(ends)
    tokenizer.add_tokens([AddedToken(CALL, normalized=False)])
    tokenizer.chat_template = template()
    follows = turn(tokenizer, tokens)
    sizes: dict[str, Any] = {
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    sizes |= TINY if dry else {}
    config = transformers.AutoConfig.from_pretrained(write_shape(out / f"{name}-talking.config", name, **sizes))
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        head = torch.zeros_like(model.lm_head.weight)
        for token, following in follows.items():
            hidden = model.model.norm(model.model.embed_tokens.weight[token])
            head[following] += LOGIT * hidden / hidden.float().square().sum()
        model.lm_head.weight.copy_(head)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def called(text: str) -> dict[str, Any]:
    """Return a turn's content and call, as a chat has them; nothing if the call is not whole."""
    content, call, _ = text.partition(CALL)
    return {"content": content, "tool_calls": [{"type": "function", "function": FUNCTION}]} if call else {}


def template() -> str:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None, "install trl==1.16.0, whose chat template is used"
    return (Path(spec.origin).parent / "chat_templates" / TEMPLATE).read_text()


def turn(tokenizer: Any, tokens: int) -> dict[int, int]:
    """Return the token that follows each token of a turn, whose first one follows the end of a generation prompt."""
    (call,) = tokenizer.encode(CALL, add_special_tokens=False)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False)
    words = [
        number
        for text, number in sorted(tokenizer.get_vocab().items())
        if text.isascii() and text.isalpha() and tokenizer.decode([number]) == text
    ]
    last = tokenizer.encode(prompt, add_special_tokens=False)[-1]
    chain = [last, *words[: tokens - 2], call, tokenizer.eos_token_id]
    assert len(chain) == tokens + 1, f"the tokenizer has {len(words)} tokens of letters only: a turn needs {tokens - 2}"
    return dict(itertools.pairwise(chain))
