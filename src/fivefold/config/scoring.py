"""The configuration section `reward`: scoring of responses, the judge, and limits for programs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fivefold.config.learners import RewardModelConfig
from fivefold.keys.identity import HARMLESS
from fivefold.keys.ranges import Matches, above, within
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
    """Model that the reward `judge` queries over OpenAI's HTTP API; user functions can also send requests to its servers."""

    url: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Running servers, as `http://host:8000/v1`; requests go to them in turn."""
    model: str | None = None
    """Name of the model on those servers; with `backend`, its Hugging Face directory or hub id."""
    backend: Annotated[str | None, HARMLESS] = None
    """Layout of vLLM servers that the run starts instead (`vllm:d2t2`). They have GPUs of their own: the next ones after
    those of the ranks and the engine's servers on each machine. With `functions_ask`, SGLang is also supported."""
    functions_ask: bool = False
    """Let user reward functions send requests to these servers, as with verl. A function with a parameter
    `reward_router_address` gets host and port of one server, one with `reward_model_tokenizer` the model's transformers
    tokenizer."""
    memory_fraction: Annotated[float, within("(0, 1)"), HARMLESS] = 0.9
    """Fraction of GPU memory for each of the judge's servers."""
    max_model_len: Annotated[int | None, above(0), HARMLESS] = None
    """Maximum sequence length of the judge's servers; the model's own if left out."""
    api_key_variable: Annotated[str | None, Matches(VARIABLE, "the name of a variable"), HARMLESS] = None
    """Environment variable with the servers' key. Only ranks read it: reward functions and the run's files do not contain
    it."""
    prompt: str = JUDGE_PROMPT
    """Prompt for the judge: {prompt} is the last user message, {response} the whole response, {ground_truth} the truth."""
    verdict: Literal["yes_no", "score"] = "yes_no"
    """Parsing of the answer: 1 or 0 for the first yes or no in it, or a number by `pattern`. An answer without one fails."""
    pattern: str = r"[Ss]core:[\s*]*([0-9]*\.?[0-9]+)(?![.,]?[0-9])"
    """Regular expression with one group, the number; the last match counts."""
    scale: Annotated[float, above(0)] = 10.0
    """The largest number, which gives reward 1."""
    temperature: Annotated[float, within("[0, 100]")] = 0.0
    max_tokens: Annotated[int, above(0)] = 1024
    """Maximum number of tokens in an answer; a longer one fails, unless it begins with its yes or no."""
    request: dict[str, Any] = field(default_factory=dict)
    """Further fields of each request: `{top_p: 0.8, chat_template_kwargs: {...}}`."""
    timeout_seconds: Annotated[float, within("(0, 3600]"), HARMLESS] = 60.0
    """Maximum time for one verdict, with all attempts; after it the sample has failed."""
    retries: Annotated[int, within("[0, 100]"), HARMLESS] = 2
    """Number of further attempts if a server is unreachable, busy or fails."""
    concurrency: Annotated[int, within("[1, 4096]"), HARMLESS] = 64
    """Maximum number of verdicts that each rank requests at once."""


@dataclass(frozen=True)
class CodeConfig:
    """Limits for a program that the reward `code` or `code_fraction` runs."""

    test_seconds: Annotated[float, within("(0, 3600]")] = 4.0
    """CPU time of one test; wall-clock time may be three times as long. All tests of a sample share `timeout_seconds`."""
    memory_mb: Annotated[int, within("[64, 1048576]")] = 1024
    """Address space of a program, in MB; its files together may have as many bytes."""
    trusted_tests: bool = False
    """Run assertions in the program's own process, where it can cheat them, if they need more than plain values from it
    (objects of its classes, functions passed to it). Otherwise such rows are refused."""


@dataclass(frozen=True)
class RewardConfig:
    functions: dict[str, Annotated[float, within("[-1000000, 1000000]")]] = field(default_factory=dict)
    """Reward name (gsm8k, math, format, code, ifeval, judge, ...: docs/rewards.md) or `path.py:function` -> weight; if
    empty, chosen by `data_source`."""
    by_source: dict[str, dict[str, Annotated[float, within("[-1000000, 1000000]")]]] = field(default_factory=dict)
    """data_source -> its own `functions`."""
    chosen_as: Literal["fivefold", "verl", "siirl"] = "fivefold"
    """System whose default applies to a `data_source` without functions: docs/rewards.md."""
    accuracy: str | None = None
    """Function that decides whether a response is correct (it returns 1 or more), for accuracy and pass@k. If left out, or
    not used by a data_source: the first by name of those that take a ground truth, or of all if none does."""
    timeout_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 10.0
    """Maximum time for one sample's rewards; after it they have failed."""
    wait_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 300.0
    """Maximum time that a step waits for rewards after its last response; rewards not begun by then have failed."""
    max_failed: Annotated[float, within("[0, 1]"), HARMLESS] = 0.1
    """Maximum share of a step's samples whose reward may fail (exception, timeout, not finite). Above it the run ends with
    the first error. Failed samples are left out of the step."""
    workers: Annotated[int | None, within("[1, 1024]"), HARMLESS] = None
    """Number of reward processes per rank; the number of its cores (2 to 32) if left out."""
    memory_mb: Annotated[int, within("[256, 1048576]"), HARMLESS] = 4096
    """Address space of one reward process, in MB."""
    environment: Annotated[list[str], HARMLESS] = field(default_factory=list)
    """Environment variables for reward processes in addition to the usual ones (PATH, HOME, ...), for example a judge's key.
    They get no other variables of the trainer."""
    code: CodeConfig = field(default_factory=CodeConfig)
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    model: RewardModelConfig = field(default_factory=RewardModelConfig)

    @property
    def judge_layout(self) -> ParallelLayout | None:
        """Layout of the judge's servers that the run starts; None if it starts none. Raises ValueError if `backend` is not a
        layout."""
        uses_judge = self.judge.functions_ask or any(
            "judge" in weights for weights in (self.functions, *self.by_source.values())
        )
        return ParallelLayout.parse(self.judge.backend) if uses_judge and self.judge.backend else None
