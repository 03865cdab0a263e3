"""The section `reward`: what scores responses, a judge that is asked, what programs may take."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fivefold.config.identity import HARMLESS
from fivefold.config.learners import RewardModelConfig
from fivefold.config.ranges import Matches, above, within
from fivefold.layout import ParallelLayout

VARIABLE = re.compile(r"[A-Za-z_]\w*\*?")

JUDGE_PROMPT = """\
You compare a response with a reference answer. Both may be in any language and of any form: an option, a number, an
expression, a text. The response is right when its final answer says the same as the reference; a response that is not
finished, or gives no clear final answer, is wrong.

Question:
{prompt}

Response:
{response}

Reference answer:
{ground_truth}

Is the response right? Answer with one word, YES or NO.
"""


@dataclass(frozen=True)
class JudgeConfig:
    """A model that the reward `judge` asks, over OpenAI's HTTP API, or functions of the user's by themselves."""

    url: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Servers that are there, as `http://host:8000/v1`; requests go to them in turn."""
    model: str | None = None
    """The model's name, as those servers know it; with `backend` its Hugging Face directory or hub id."""
    backend: Annotated[str | None, HARMLESS] = None
    """Servers that the run starts instead, by a layout of vLLM (`vllm:d2t2`), on GPUs of their own: those behind the ranks'
    and the engine's servers' on each machine. For functions that ask, of SGLang too."""
    functions_ask: bool = False
    """Reward functions of the user's ask these servers by themselves: one that names `reward_router_address` gets the host
    and port of one of them, one that names `reward_model_tokenizer` the model's tokenizer of transformers, as with verl."""
    memory_fraction: Annotated[float, within("(0, 1)"), HARMLESS] = 0.9
    """Share of a GPU's memory for one of these servers."""
    max_model_len: Annotated[int | None, above(0), HARMLESS] = None
    """Longest sequence that these servers make room for; the judge's own when left out."""
    api_key_variable: Annotated[str | None, Matches(VARIABLE, "the name of a variable"), HARMLESS] = None
    """Environment variable with the servers' key. Ranks read it; reward functions and the run's files do not get it."""
    prompt: str = JUDGE_PROMPT
    """What the judge is told: {prompt} is the last user message, {response} the whole response, {ground_truth} the truth."""
    verdict: Literal["yes_no", "score"] = "yes_no"
    """How its answer is read: 1 or 0 for the first yes or no in it, or a number by `pattern`; one without fails."""
    pattern: str = r"[Ss]core:\s*([0-9.]+)"
    """Regular expression with one group, the number; the last match counts."""
    scale: Annotated[float, above(0)] = 10.0
    """The largest number, whose reward is 1."""
    temperature: Annotated[float, within("[0, 100]")] = 0.0
    max_tokens: Annotated[int, above(0)] = 1024
    """Of an answer."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request, as the servers take them: `{top_p: 0.8, chat_template_kwargs: {...}}`."""
    timeout_seconds: Annotated[float, within("(0, 3600]"), HARMLESS] = 60.0
    """Time that one verdict may take, with all attempts; over it the sample has failed."""
    retries: Annotated[int, within("[0, 100]"), HARMLESS] = 2
    """Further attempts where a server is not reached, is busy or fails."""
    concurrency: Annotated[int, within("[1, 4096]"), HARMLESS] = 64
    """Verdicts that each rank asks for at once."""


@dataclass(frozen=True)
class CodeConfig:
    """What a program may take that the reward `code` or `code_fraction` runs."""

    test_seconds: Annotated[float, within("(0, 3600]")] = 4.0
    """CPU time of one test; by the clock it may take three times as long. All tests of a sample share `timeout_seconds`."""
    memory_mb: Annotated[int, within("[64, 1048576]")] = 1024
    """Address space of a program; its files may have as many bytes together."""


@dataclass(frozen=True)
class RewardConfig:
    functions: dict[str, Annotated[float, within("[-1000000, 1000000]")]] = field(default_factory=dict)
    """Reward name (gsm8k, math, format, code, ifeval, judge, ...: docs/rewards.md) or `path.py:function` -> weight; empty:
    chosen by `data_source`."""
    by_source: dict[str, dict[str, Annotated[float, within("[-1000000, 1000000]")]]] = field(default_factory=dict)
    """data_source -> its own `functions`."""
    chosen_as: Literal["fivefold", "verl", "siirl"] = "fivefold"
    """Whose choice it is that a `data_source` without functions has: docs/rewards.md."""
    accuracy: str | None = None
    """Function that decides whether a response is correct (it gives 1 or more): accuracy, pass@k. When left out, and for a
    data_source that does not use it: the first by name of those that take a ground truth, or of all where none does."""
    timeout_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 10.0
    """Time one sample's rewards may take; over it they have failed."""
    wait_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 300.0
    """Time that a step waits for rewards once its last response is there; those not begun by then have failed."""
    max_failed: Annotated[float, within("[0, 1]"), HARMLESS] = 0.1
    """Largest share of a step's samples whose reward may fail (it raised, ran out of time, was not finite): above it the run
    ends with the first error. Samples that fail are left out of the step."""
    workers: Annotated[int | None, within("[1, 1024]"), HARMLESS] = None
    """Reward processes of each rank; when left out, as many as it has cores (2 to 32)."""
    memory_mb: Annotated[int, within("[256, 1048576]"), HARMLESS] = 4096
    """Address space of one reward process."""
    environment: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Environment variables that reward processes get besides the usual ones (PATH, HOME, ...), such as the key of a judge:
    they get no other of the trainer's."""
    code: CodeConfig = field(default_factory=CodeConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)

    @property
    def judge_layout(self) -> ParallelLayout | None:
        """Of the judge's servers that the run starts; None where it starts none. Raises ValueError where it is none."""
        asked = self.judge.functions_ask or any("judge" in own for own in (self.functions, *self.by_source.values()))
        return ParallelLayout.parse(self.judge.backend) if asked and self.judge.backend else None
