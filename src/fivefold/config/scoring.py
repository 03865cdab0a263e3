"""Sections of `reward` that stand by themselves: a judge that is asked, and what programs may take."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fivefold.config.identity import HARMLESS
from fivefold.config.ranges import Matches, above, within

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
