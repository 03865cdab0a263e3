"""Measures how much of merged adapters is left in an engine in bfloat16, by rounding to the nearest and stochastically.

    python benchmarks/adapter_rounding.py MODEL

MODEL is the directory of a model whose weights are bfloat16 numbers, such as examples/smollm2/get_model.py writes. It
learns answers to examples/smollm2/words.py with new adapters (rank 32, alpha 64, every linear layer), in float32. After
some updates its merged weights are rounded in each way, and the models, computed in float32, are compared with the exact
one on other problems:

- `arrives`: projection of the difference that adapters make to the weights onto what they add; 1 is all of it
- `log-probs`: mean distance of the answers' tokens
- `KL`: of the exact model's next token to the rounded one's, mean over these tokens
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from benchmarks.recipes import described_machine
from examples.smollm2.words import problems, row
from fivefold.megatron.layers.adapters import stochastically_rounded

RANK, SCALE, PROMPTS, TEST = 32, 2.0, 32, 64
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "none": lambda merged, base: base,
    "nearest": lambda merged, base: merged.to(torch.bfloat16).float(),
    "Fivefold's": lambda merged, base: stochastically_rounded(merged, base.to(torch.bfloat16), 1).float(),
}
"""Merged and base weight in float32 -> the engine's weight; the first has no adapters at all."""


class Learner:
    """A model with adapters on every linear layer but the output."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.model.requires_grad_(requires_grad=False)
        linear = {name: module for name, module in self.model.named_modules() if isinstance(module, torch.nn.Linear)}
        self.linear = {name: module for name, module in linear.items() if name != "lm_head"}
        self.base = {name: module.weight.detach().clone() for name, module in self.linear.items()}
        if any(not torch.equal(weight, weight.bfloat16().float()) for weight in self.base.values()):
            sys.exit(f"the weights of {directory} must be bfloat16 numbers: save it in bfloat16")
        self.a = {name: torch.nn.Parameter(torch.empty(RANK, one.in_features)) for name, one in self.linear.items()}
        self.b = {name: torch.nn.Parameter(torch.zeros(one.out_features, RANK)) for name, one in self.linear.items()}
        for a in self.a.values():
            torch.nn.init.kaiming_uniform_(a, a=5**0.5)

    @contextmanager
    def adapted(self) -> Iterator[None]:
        def added(name: str) -> Callable[..., Tensor]:
            return lambda _, given, output: output + SCALE * F.linear(F.linear(given[0], self.a[name]), self.b[name])

        hooks = [module.register_forward_hook(added(name)) for name, module in self.linear.items()]
        yield
        for hook in hooks:
            hook.remove()

    def answers(self, rows: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Return the tokens [T, 1] of the answers, with their ends, and the log-probs [T, vocabulary] there."""
        texts = [
            self.tokenizer.apply_chat_template(one["prompt"], tokenize=False, add_generation_prompt=True) for one in rows
        ]
        prompts = [self.tokenizer(text)["input_ids"] for text in texts]
        answers = [[*self.tokenizer(one["response"])["input_ids"], self.tokenizer.eos_token_id] for one in rows]
        length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True))
        ids_BT = torch.full((len(rows), length), self.tokenizer.eos_token_id)
        wanted_BT = torch.zeros(len(rows), length, dtype=torch.bool)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            ids_BT[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            wanted_BT[i, len(prompt) : len(prompt) + len(answer)] = True
        hidden_BTH = self.model.model(ids_BT).last_hidden_state[:, :-1][wanted_BT[:, 1:]]
        return ids_BT[wanted_BT][:, None], self.model.lm_head(hidden_BTH).log_softmax(-1)

    def train(self, rows: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> None:
        with self.adapted():
            tokens_T1, logprobs_TV = self.answers(rows)
        optimizer.zero_grad()
        (-logprobs_TV.gather(1, tokens_T1).mean()).backward()
        optimizer.step()

    @torch.no_grad()
    def compared(self, rows: list[dict[str, Any]]) -> Iterator[tuple[str, float, float, float]]:
        """Yield each way with the share that arrives, the distance of log-probs, and the KL."""
        with self.adapted():
            tokens_T1, exact_TV = self.answers(rows)
        for way, rounded in WAYS.items():
            products = torch.zeros(2, dtype=torch.float64)
            for name, module in self.linear.items():
                base, share = self.base[name], SCALE * (self.b[name] @ self.a[name])
                module.weight.copy_(rounded(base + share, base))
                products += torch.stack([(part * share).sum(dtype=torch.float64) for part in (module.weight - base, share)])
            _, found_TV = self.answers(rows)
            at = [logprobs_TV.gather(1, tokens_T1) for logprobs_TV in (exact_TV, found_TV)]
            kl = (exact_TV.exp() * (exact_TV - found_TV)).sum(1).mean()
            yield way, float(products[0] / products[1]), float((at[0] - at[1]).abs().mean()), float(kl)
        for name, module in self.linear.items():
            module.weight.copy_(self.base[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4], help="learning rates")
    parser.add_argument("--updates", type=int, nargs="+", default=[1, 10], help="after which models are compared")
    options = parser.parse_args()
    machine = described_machine()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{machine['hardware']}; commit {machine['commit']}; {versions}")
    for rate in options.rates:
        torch.manual_seed(0)
        learner, rows = Learner(options.model), [row(*problem) for problem in problems()]
        random.Random(0).shuffle(rows)
        optimizer = torch.optim.AdamW([*learner.a.values(), *learner.b.values()], lr=rate, weight_decay=0)
        for update in range(1, max(options.updates) + 1):
            learner.train(rows[TEST + PROMPTS * update :][:PROMPTS], optimizer)
            if update in options.updates:
                for way, arrives, distance, kl in learner.compared(rows[:TEST]):
                    measured = f"arrives {arrives:6.3f}  log-probs {distance:.5f}  KL {kl:.2e}"
                    print(f"lr {rate:g}, {update} updates, {way:10}  {measured}", flush=True)


if __name__ == "__main__":
    main()
