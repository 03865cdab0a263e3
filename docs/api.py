"""Writes api.md: the names that `from fivefold import ...` has, with their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import fivefold
from fivefold.columns import Column

HEAD = """
    # Python API

    {generated}

    What a program imports is `from fivefold import ...` with the names below; the modules behind them may change from one
    version to the next. Importing `fivefold` takes no torch: each name brings what it needs when it is asked for.

    ```python
    from fivefold import RunConfig, check, train


    def concise(response, ground_truth):  # a reward of your own, in this file
        return float(response.strip().endswith(ground_truth)) - 0.001 * len(response)


    if __name__ == "__main__":
        config = RunConfig.from_yaml("run.yaml", ["trainer.steps=10"])
        print(*check(config).errors, sep="\\n")
        directory = train(config)  # metrics.jsonl, samples.jsonl, checkpoints/
    ```

    **Functions of your own** are not registered: wherever the configuration names `path.py:function`, that function is
    loaded, and `RunConfig.of` takes the function itself: rewards (`reward.functions`), advantages, credit, ratios,
    surrogates, aggregation, KL estimators (`algorithm.*`), weights of old samples. [extending.md](extending.md) has the
    signature of each; what needs a file of ours (a method, a family, an engine, a dialect) has its recipe there too.

    ## A loop of your own

    The objectives work without the trainer: in any loop that can compute the log-probs of its samples. This program takes
    one GRPO step with a surrogate of its own on a model of transformers; the gradient is the one that `train` computes.

    ```python
    import torch
    from transformers import AutoModelForCausalLM

    from fivefold import TokenBatch, make_objective, prepare_update


    def clipped_above(log_ratio_T, logprobs_T, advantages_T, samples):  # of each token; the loss is minus its mean
        return log_ratio_T.exp().clamp(max=1.2) * advantages_T


    def logprobs_of(model, token_ids_NL, attention_NL):  # [N, L] of each token, given those before it
        positions_NL = (attention_NL.cumsum(1) - 1).clamp(min=0)
        logits = model(token_ids_NL, attention_mask=attention_NL, position_ids=positions_NL).logits.float()
        logprobs_NL = logits[:, :-1].log_softmax(-1).gather(2, token_ids_NL[:, 1:, None])[..., 0]
        return torch.nn.functional.pad(logprobs_NL, (1, 0))


    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    objective = make_objective("grpo", surrogate=clipped_above, kl={"coef": 0.0})  # without a reference model

    # Two prompts, [5, 6] and [7], with two responses each; 0 is padding.
    token_ids_NL = torch.tensor([[5, 6, 9, 8, 2], [5, 6, 4, 2, 0], [0, 7, 3, 3, 2], [0, 7, 8, 2, 0]])
    attention_NL = (token_ids_NL != 0).long()
    response_NL = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0]])
    batch = TokenBatch.from_padded(token_ids_NL, response_NL, attention_NL)
    batch = prepare_update(objective, batch, rewards=[1, 0, 0, 1], groups=[0, 0, 1, 1], max_response_tokens=8)

    # For a second step on the same batch: batch[Column.OLD_LOGPROBS] = logprobs_T.detach() before the first one.
    logprobs_T = logprobs_of(model, token_ids_NL, attention_NL)[attention_NL.bool()]
    loss = objective.loss(logprobs_T, torch.zeros_like(logprobs_T), batch).loss
    loss.backward()
    optimizer.step()
    ```

    Losses of parts of a batch (`batch.select([0, 1])`) add up to the loss of the whole, so that gradients accumulate.
"""

_METHODS = {
    "Column": (),
    "Objective": ("loss",),
    "RunConfig": ("of", "from_yaml"),
    "TokenBatch": ("from_padded", "select", "to"),
}
"""Methods that the page describes; others of these classes are internal."""


def api(generated: str, fields: Callable[[type[Any]], dict[str, str]]) -> str:
    """The page; `fields` gives a class's fields with the strings below them."""
    parts = []
    for name in fivefold.__all__:
        member = getattr(fivefold, name)
        parts.append("\n".join(_class(name, member, fields) if inspect.isclass(member) else _function(name, member, "##")))
    names = re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)).rstrip()
    return f"{inspect.cleandoc(HEAD).replace('{generated}', generated)}\n\n{names}\n"


def _function(name: str, function: Any, level: str) -> Iterator[str]:
    yield f"{level} `{name}`\n"
    yield f"```python\n{_signature(name, function)}\n```\n"
    yield f"{_text(function)}\n"


def _class(name: str, kind: type[Any], fields: Callable[[type[Any]], dict[str, str]]) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield f"{_text(kind)}\n"
    if name == "RunConfig":
        yield "Its sections and keys are those of [configuration.md](configuration.md).\n"
    elif name in ("Column", "TokenBatch"):
        rows = [
            f"| `{field}` | {text} |"
            for field, text in fields(kind).items()
            if name != "Column" or field in Column.__members__
        ]
        yield "| | |\n|---|---|\n" + "\n".join(rows) + "\n"
    for method in _METHODS.get(name, ()):
        yield from _function(f"{name}.{method}", getattr(kind, method), "###")


def _signature(name: str, function: Any) -> str:
    """As it is called: without self, and types as they are written."""
    signature = inspect.signature(function)
    parameters = [parameter for parameter in signature.parameters.values() if parameter.name not in ("self", "cls")]
    return name + re.sub(r"'([^']*)'", r"\1", str(signature.replace(parameters=parameters)))


def _text(documented: Any) -> str:
    return inspect.cleandoc(documented.__doc__)
