"""An endpoint that speaks OpenAI's API, with an address and a key for each trajectory: what agents sample through it is
trained, token for token, as the engine read and sampled it.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import hmac
import json
import re
import secrets
import socket
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from typing import Any

from fivefold.config.environment import EndpointConfig
from fivefold.errors import UserError
from fivefold.rollout.agent_answers import AgentAnswers
from fivefold.rollout.agent_requests import AgentRequest
from fivefold.rollout.http import Answer, Head, HttpError, HttpServer
from fivefold.rollout.sessions import AgentTurn, Dialogs, RefusedError, Session
from fivefold.types import Completion, Request, Sampling

_CHAT, _MODELS, _TOKENS = "/v1/chat/completions", "/v1/models", "/inference/v1/generate"
_METHODS = {_CHAT: "POST", _TOKENS: "POST", _MODELS: "GET"}
_PATH = re.compile(r"/(\d{1,15})(/[^?]*)(?:\?.*)?")
_THREADS = 2
"""Threads that tokenize: with more of them, the loop would wait for its turn among them."""
_LARGE = 64 << 10
"""Bytes of a body from which on it is parsed in a thread."""
_COMMENT_SECONDS = 15.0
"""Seconds between two signs of life in a stream that has nothing to say yet."""
_CLOSE_SECONDS = 10.0
Ask = Callable[[Request], Future[Completion]]
"""Requests a turn of a trajectory from the engine."""


@dataclass(frozen=True)
class Address:
    """Address and key with which an agent samples the turns of its trajectory."""

    number: int
    base_url: str
    """Address of the API, which ends in /v1."""
    api_key: str
    session: Session


class Endpoint:
    """Serves the trajectories of a rank, in a thread with an event loop of its own."""

    def __init__(self, dialogs: Dialogs, config: EndpointConfig, model: str, max_turns: int, max_tokens: int) -> None:
        """`model`: the name in answers; `max_tokens`: maximum length of a context with its answer."""
        self._dialogs, self._config = dialogs, config
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self._answers = AgentAnswers(dialogs.of(()), model, max_tokens)
        self._sessions: dict[int, tuple[Session, Ask]] = {}
        self._numbers = count()
        self._begun = 0
        self._secret = secrets.token_bytes(32)
        self._server = HttpServer(self._admit, self._handle)
        self._workers = ThreadPoolExecutor(_THREADS, thread_name_prefix="endpoint-tokens")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="endpoint", daemon=True)

    def start(self, place: int = 0) -> None:
        """Listen; `place` is that of the rank among those of its machine, which take ports one after another.

        Raises UserError if the port is in use.
        """
        # The garbage collector would look at what libraries have loaded again and again, and no turn is answered meanwhile.
        gc.collect()
        gc.freeze()
        self._thread.start()
        host, port = self._config.host, self._config.port + place if self._config.port else 0
        try:
            self.port = self._call(self._server.open(host, port)).result()
        except OSError as error:
            raise UserError(
                f"environment.endpoint must be a free address of this machine: got {host}:{port}, "
                f"{error.strerror or error}; take another port, or leave it out for a free one"
            ) from error
        self._name = socket.gethostname() if host in ("0.0.0.0", "::") else host  # noqa: S104 - a comparison
        if ":" in self._name:
            self._name = f"[{self._name}]"

    def open(self, draw: tuple[int, ...], sampling: Sampling, ask: Ask) -> Address:
        """Open a session for a trajectory; `draw` is the key of its random draws."""
        number = next(self._numbers)
        self._begun = number + 1
        session = Session(self._dialogs, sampling, draw, self._max_turns, self._max_tokens)
        self._sessions[number] = session, ask
        return Address(number, f"http://{self._name}:{self.port}/{number}/v1", self._key(number), session)

    def end(self, address: Address) -> Future[None]:
        """End a session: from now on its agent gets 409. The future is done once what was answered before is recorded."""

        async def run() -> None:
            self._sessions.pop(address.number, None)

        return self._call(run())

    def close(self) -> None:
        """Close the port and all connections."""

        async def run() -> None:
            self._server.close()

        if self._thread.is_alive():
            self._call(run()).result(_CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_SECONDS)
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _call(self, work: Any) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _key(self, number: int) -> str:
        return "fivefold-" + hmac.new(self._secret, str(number).encode(), hashlib.sha256).hexdigest()

    def _admit(self, head: Head) -> None:
        """Refuse a request with an unknown path, or without the key of its trajectory."""
        path = _PATH.fullmatch(head.path)
        if path is None or path[2] not in _METHODS:
            routes = ", ".join(_METHODS)
            raise HttpError(HTTPStatus.NOT_FOUND, f"the paths are TRAJECTORY and one of {routes}: got {head.path[:100]}")
        if (method := _METHODS[path[2]]) != head.method:
            message = f"{path[2]} takes {method}: got {head.method}"
            raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, message, headers={"allow": method})
        kind, _, key = head.headers.get("authorization", "").partition(" ")
        number = int(path[1])
        is_known = number < self._begun and hmac.compare_digest(key.strip().encode(), self._key(number).encode())
        if kind.lower() != "bearer" or not is_known:
            raise HttpError(HTTPStatus.UNAUTHORIZED, "the key is not that of this trajectory", "invalid_api_key")

    async def _handle(self, head: Head, body: bytes, answer: Answer) -> None:
        path = _PATH.fullmatch(head.path)
        assert path is not None
        number, route = int(path[1]), path[2]
        if (known := self._sessions.get(number)) is None:
            raise _ended()
        session, ask = known
        try:
            if route == _MODELS:
                await answer.send(self._answers.models())
                return
            wants = await self._parsed(body)
            turn = await self._turn(session, ask, route, head, body, wants)
            await self._answer(session, turn, f"{number}-{turn.number}", route, wants, answer)
        except RefusedError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, str(error), error.code) from error
        except UserError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from error
        except HttpError:
            raise
        except Exception as error:
            session.fault = traceback.format_exc()
            message = "a fault of the endpoint; the trajectory has failed"
            raise HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, message, headers=_NO_RETRY) from error

    async def _parsed(self, body: bytes) -> Any:
        if len(body) < _LARGE:
            return _json(body)
        return await self._loop.run_in_executor(self._workers, _json, body)

    async def _turn(self, session: Session, ask: Ask, route: str, head: Head, body: bytes, wants: Any) -> AgentTurn:
        """Return the turn of a request: a new one, or the one that it repeats."""
        retries = head.headers.get("x-stainless-retry-count", "0")
        digest = hashlib.blake2b(route.encode() + body, digest_size=16).digest()
        turn = session.retried(digest, retries.strip("0").isdecimal())
        if turn is None:
            read = AgentRequest.of_chat if route == _CHAT else AgentRequest.of_tokens
            turn = session.begin(read(wants, session.sampling), digest)
            turn.work = self._loop.create_task(self._sample(session, ask, turn))
            # If its client has left, no connection looks at an error.
            turn.work.add_done_callback(lambda work: work.cancelled() or work.exception())
        return turn

    async def _sample(self, session: Session, ask: Ask, turn: AgentTurn) -> None:
        """Sample the answer of a turn; it may be requested again meanwhile, and is sampled once."""

        def begin() -> Future[Completion]:
            context, sampling = session.render(turn)
            return ask(Request(0, context, sampling, turn.seed, turn=len(turn.lineage) - 1))

        try:
            sampling = await self._loop.run_in_executor(self._workers, begin)
            completion = await asyncio.wrap_future(sampling)
            await self._loop.run_in_executor(self._workers, session.read, turn, completion)
        except BaseException:
            turn.state = "failed"
            raise

    async def _answer(self, session: Session, turn: AgentTurn, name: str, route: str, wants: Any, answer: Answer) -> None:
        """Write the answer of a turn once it is there. A turn whose answer no connection took in full is unread."""
        turn.readers += 1
        is_stream = bool(wants.get("stream"))
        try:
            if is_stream and route == _TOKENS:
                raise UserError("stream must be false for tokens: a turn is answered as a whole")
            while not (turn.work.done() or answer.lost.done()):
                if turn.state == "unread":
                    turn.state = "running"
                await asyncio.wait(
                    {turn.work, answer.lost}, timeout=_COMMENT_SECONDS if is_stream else None, return_when="FIRST_COMPLETED"
                )
                if is_stream and not (turn.work.done() or answer.lost.done()):
                    if not answer.is_begun:
                        answer.begin_events()
                    answer.comment()
            if turn.work.done():
                await self._write(turn, name, route, wants, answer)
        except (HttpError, UserError) as error:
            if not answer.is_begun:
                raise
            refusal = error if isinstance(error, HttpError) else HttpError(HTTPStatus.BAD_REQUEST, str(error))
            await answer.end_events(refusal.payload)
        finally:
            turn.readers -= 1
            if turn.state not in ("failed", "read"):
                # What a connection took in full counts, whatever became of the others.
                turn.state = "read" if answer.is_whole else "unread" if not turn.readers else turn.state

    async def _write(self, turn: AgentTurn, name: str, route: str, wants: Any, answer: Answer) -> None:
        if turn.work.cancelled():
            raise _ended()
        turn.work.result()
        answer.on_reset = lambda: self._dropped(turn)
        if route == _TOKENS:
            await answer.send(self._answers.tokens(turn, name, wants))
            return
        logprobs = None
        if wants.get("logprobs"):
            logprobs = await self._loop.run_in_executor(self._workers, self._answers.logprobs, turn)
        if not wants.get("stream"):
            await answer.send(self._answers.chat(turn, name, wants, logprobs))
            return
        if not answer.is_begun:
            answer.begin_events()
        *chunks, last = self._answers.chunks(turn, name, wants, logprobs)
        for chunk in chunks:
            answer.event(chunk)
        await answer.end_events(last, "[DONE]")

    @staticmethod
    def _dropped(turn: AgentTurn) -> None:
        """Take back that an answer was read: its client dropped the connection with bytes unread."""
        if turn.state == "read" and not turn.children:
            turn.state = "unread"


_NO_RETRY = {"x-should-retry": "false"}


def _ended() -> HttpError:
    return HttpError(HTTPStatus.CONFLICT, "the trajectory has ended", "trajectory_ended", _NO_RETRY)


def _json(body: bytes) -> Any:
    try:
        parsed = json.loads(body, parse_constant=_no_constant)
        if b"\\u" in body:
            # A lone surrogate is no text that a tokenizer takes.
            json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body must be JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise UserError("the body must be a JSON object")
    return parsed


def _no_constant(name: str) -> float:
    raise UserError(f"{name} is not JSON")
