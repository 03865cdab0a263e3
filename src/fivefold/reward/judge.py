"""A model that judges responses over OpenAI's HTTP API, with many concurrent requests as responses finish.

The calls run in one thread of the rank with its own event loop. Of a call, only the reason for a failure is logged, without
the key.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

from fivefold.config.scoring import JudgeConfig
from fivefold.reward.texts import after_thinking
from fivefold.special_tokens import USUAL, escape

if TYPE_CHECKING:
    from fivefold.types import Prompt

JUDGE = "judge"
"""Name of the judge among rewards."""
PLACEHOLDERS = ("prompt", "response", "ground_truth")
_PLACEHOLDER = re.compile(r"\{(" + "|".join(PLACEHOLDERS) + r")\}")
_YES_NO = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_BEGINS = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
_PAUSE = 0.5
"""Seconds before the second attempt; each further pause is twice as long."""
_LONGEST_VERDICT = 20_000
"""Number of characters of a verdict that are read, from its end."""
_BUSY = (408, 409, 425, 429)
"""HTTP status codes below 500 that may be retried."""


class JudgeError(Exception):
    """Raised with the reason why there is no verdict."""


class Judge:
    """Requests verdicts from judge servers; each rank creates one."""

    def __init__(self, config: JudgeConfig, environment: Mapping[str, str] = os.environ) -> None:
        self._config = config
        self._key = environment.get(config.api_key_variable or "", "")
        self._servers, self._turns = [url.rstrip("/") for url in config.url], itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()
        self._at_once = asyncio.Semaphore(config.concurrency)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=config.timeout_seconds)

    def submit(self, work: Coroutine[Any, Any, str | None]) -> Future[str | None]:
        """Run a coroutine in the judge's thread; cancelling the future ends the coroutine and its requests."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def settle(self) -> None:
        """Return once no cancelled coroutine runs any more."""
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()

    async def value(self, prompt: Prompt, response: str) -> float:
        """Return the verdict on a response as a number; raise JudgeError if there is none."""
        messages = [{"role": "user", "content": self._question(prompt, response)}]
        async with self._at_once:
            try:
                async with asyncio.timeout(self._config.timeout_seconds):
                    return read_verdict(self._config, await self._ask(messages))
            except TimeoutError:
                raise JudgeError(
                    f"no verdict within {self._config.timeout_seconds:g} s (reward.judge.timeout_seconds)"
                ) from None

    def close(self) -> None:
        """End all calls."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._client.aclose()

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _question(self, prompt: Prompt, response: str) -> str:
        questions = [message["content"] for message in prompt.messages or () if message["role"] == "user"]
        texts = {
            "prompt": questions[-1] if questions else prompt.text,
            "response": response,
            "ground_truth": prompt.ground_truth,
        }
        # A response that closes its turn and opens another one could give the judge a verdict.
        return _PLACEHOLDER.sub(lambda match: escape(texts[match[1]], USUAL), self._config.prompt)

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        config = self._config
        sampling = {"temperature": config.temperature, "max_tokens": config.max_tokens}
        body = {**config.request, "model": config.model, "messages": messages, **sampling}
        first, reason = next(self._turns), ""
        for attempt in range(config.retries + 1):
            if attempt:
                await asyncio.sleep(_PAUSE * 2 ** (attempt - 1))
            server = self._servers[(first + attempt) % len(self._servers)]
            try:
                answer = await self._client.post(f"{server}/chat/completions", json=body)
            except httpx.HTTPError as error:
                reason = f"{server}: {type(error).__name__}: {error}"
                continue
            if answer.status_code == 200:
                return _text_of(answer, server, config.verdict)
            reason = self._plain(f"{server} answers {answer.status_code}: {answer.text[:300]}")
            if answer.status_code < 500 and answer.status_code not in _BUSY:
                break
        raise JudgeError(self._plain(f"no verdict: {reason}"))

    def _plain(self, text: str) -> str:
        """Return the text without the API key, which a server may repeat."""
        return text.replace(self._key, "***") if self._key else text


def _text_of(answer: httpx.Response, server: str, verdict: str) -> str:
    """Return the text of an answer; raise JudgeError if there is none, or if the limit of tokens cut it off before the
    verdict could be complete: it is only where the answer begins with yes or no."""
    try:
        choice = answer.json()["choices"][0]
        text, is_cut_off = choice["message"]["content"], choice.get("finish_reason") == "length"
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        text, is_cut_off = None, False
    if is_cut_off and not (verdict == "yes_no" and _BEGINS.match(str(text))):
        raise JudgeError(f"{server} did not finish its verdict: raise reward.judge.max_tokens; got {str(text)[-200:]!r}")
    if not isinstance(text, str):
        raise JudgeError(f"{server} gave no text: {answer.text[:300]}")
    return text


def read_verdict(config: JudgeConfig, text: str) -> float:
    """Return the number in a verdict; raise JudgeError if it has none, or if it is a thought without an end."""
    verdict = after_thinking(text)
    if verdict.lstrip().startswith("<think>"):
        raise JudgeError(f"a verdict follows its </think>: got {verdict[:200]!r}")
    verdict = verdict[-_LONGEST_VERDICT:]
    if config.verdict == "yes_no":
        match = _YES_NO.search(verdict)
        if match is None:
            raise JudgeError(f"a verdict says yes or no: got {verdict[:200]!r}")
        return float(match[1].lower() == "yes")
    numbers = re.findall(config.pattern, verdict)
    try:
        score = float(numbers[-1]) / config.scale
    except (IndexError, ValueError):
        score = -1.0
    if not 0 <= score <= 1:
        raise JudgeError(f"a verdict has a score from 0 to {config.scale:g}, as {config.pattern}: got {verdict[:200]!r}")
    return score
