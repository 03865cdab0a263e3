"""Sessions of agents: their requests -> turns, each with the tokens that the engine reads. No sockets and no engine here.

The turns of a trajectory form a tree. A request that repeats the messages of a turn and its answer is a child of that turn:
its context is the tokens held so far and those that the template writes for the new messages. Any other request is a root.
Branches of the tree become the trajectory's sequences.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

from fivefold.data.dialog import Dialog
from fivefold.data.histories import difference
from fivefold.data.tool_calls import ToolCall, writable
from fivefold.engines.sampling import request_seed
from fivefold.errors import UserError, shown
from fivefold.rollout.agent_requests import AgentRequest
from fivefold.rollout.trajectories import HeldSequence, Trajectory
from fivefold.special_tokens import escape_all, pattern_of
from fivefold.types import Completion, Sampling


class RefusedError(UserError):
    """Raised for a turn beyond a limit of the trajectory."""

    def __init__(self, end: str, code: str, message: str) -> None:
        super().__init__(message)
        self.end, self.code = end, code


State = Literal["running", "read", "unread", "failed"]


@dataclass(eq=False)
class AgentTurn:
    """A request of an agent and its answer: a node of the tree of turns."""

    number: int
    request: AgentRequest
    parent: AgentTurn | None
    cause: str | None
    """Why it does not extend a sequence, a row of BREAKS."""
    depth: int = 0
    """Number of messages of the conversation with the answer; 0 before there is one."""
    added: list[int] = field(default_factory=list)
    """Tokens that the engine reads after those of the parent; for a root its whole context."""
    completion: Completion | None = None
    state: State = "running"
    """`read`: the agent has all of the answer; `unread`: it left before."""
    answer: dict[str, Any] = field(default_factory=dict)
    """The answer as a message."""
    calls: list[ToolCall] = field(default_factory=list)
    """The calls that follow the turn in a template's rendering."""
    text: str = ""
    finish: str = "stop"
    children: list[AgentTurn] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    seed: int = 0
    hashed: Any = None
    """Digest of the context so far, which continues with the tokens of children."""
    conversation: list[dict[str, Any]] = field(default_factory=list)
    """The messages with the answer; empty if they are not known."""
    context_length: int = 0
    created: int = field(default_factory=lambda: int(time.time()))
    readers: int = 0
    """Connections that wait for the answer, or write it."""
    work: Any = None
    """What samples the answer."""

    @property
    def lineage(self) -> list[AgentTurn]:
        """The turns from the root to this one."""
        turns: list[AgentTurn] = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]

    @property
    def context(self) -> list[int]:
        """All tokens that the engine reads for the turn."""
        tokens: list[int] = []
        for turn in self.lineage:
            tokens += turn.added
            if turn is not self:
                assert turn.completion is not None
                tokens += turn.completion.token_ids
        return tokens

    @property
    def is_live(self) -> bool:
        """Whether the turn counts, or may still."""
        return self.state in ("running", "read")


class Dialogs:
    """Dialogs for the tools that requests name, each proven once."""

    def __init__(self, dialog: Dialog) -> None:
        self._dialog = dialog
        self._known: dict[str, Dialog | UserError] = {}
        self._lock = threading.Lock()

    def of(self, tools: Sequence[dict[str, Any]]) -> Dialog:
        """Return the dialog for these tools; raises UserError if the template cannot write or read their calls."""
        if not tools:
            return self._dialog
        key = json.dumps(tools, sort_keys=True)
        with self._lock:
            if key not in self._known:
                template = self._dialog.template
                try:
                    schemas = [_as_schema(tool) for tool in tools]
                    self._known[key] = Dialog.of(
                        template.tokenizer, template.arguments, template.ends, schemas, self._dialog.history
                    )
                except UserError as error:
                    self._known[key] = error
            known = self._known[key]
        if isinstance(known, UserError):
            raise UserError(str(known))
        return known


def _as_schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the keys that templates and the check of arguments read."""
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return {"type": "function", "function": {"description": "", **function, "parameters": parameters}}


class Session:
    """The requests of one trajectory. Methods are called by one thread, except `render` and `read`."""

    def __init__(self, dialogs: Dialogs, sampling: Sampling, draw: tuple[int, ...], max_turns: int, max_tokens: int) -> None:
        """`draw`: key of the trajectory's random draws; `max_tokens`: maximum length of a context with its answer."""
        self._dialogs, self.sampling, self._draw = dialogs, sampling, draw
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self.turns: list[AgentTurn] = []
        self.fault: str | None = None
        """A fault of the program while it answered."""
        self._refused: tuple[str, int] | None = None
        """Limit that refused a turn most recently, and the number of turns before."""
        self.counts = {"endpoint/retries": 0.0, "endpoint/overridden": 0.0}
        self._bodies: dict[bytes, list[AgentTurn]] = {}
        self._contexts: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self._calls = count()

    @property
    def refused(self) -> str | None:
        """Limit that refused the agent's last turn; None if none did, or if the agent has read a later turn."""
        if self._refused is None:
            return None
        end, before = self._refused
        return None if any(turn.state == "read" for turn in self.turns[before:]) else end

    def retried(self, body: bytes, is_retry: bool) -> AgentTurn | None:
        """Return the turn that a request repeats; None if it is a new one. Raises RefusedError as `begin` does.

        It is the first with this body of which the agent has no answer, or the latest if the client says that it retries.
        """
        same = [turn for turn in self._bodies.get(body, ()) if turn.state != "failed"]
        unread = [turn for turn in same if turn.state == "unread"]
        repeated = unread[0] if unread else same[-1] if same and is_retry else None
        if repeated is not None:
            self._check_room([] if repeated.is_live else [repeated])
            self._count("endpoint/retries")
        return repeated

    def begin(self, request: AgentRequest, body: bytes) -> AgentTurn:
        """Return a new turn for a request; raises RefusedError at the trajectory's limit of turns."""
        parent, cause = self._place(request)
        turn = AgentTurn(len(self.turns), request, parent, cause)
        repeated = turn.lineage[:-1]
        self._check_room([*(earlier for earlier in repeated if not earlier.is_live), turn])
        self._count("endpoint/overridden", request.overridden)
        self.turns.append(turn)
        self._bodies.setdefault(body, []).append(turn)
        for earlier in repeated:
            # What a request repeats, the agent has read.
            earlier.state = "read"
        if parent is not None:
            parent.children.append(turn)
        return turn

    def _check_room(self, more: Sequence[AgentTurn]) -> None:
        """Raise RefusedError if the trajectory would have too many turns with these; an unread answer is no turn."""
        if more and sum(turn.is_live for turn in self.turns) + len(more) > self._max_turns:
            raise self._refuse("turns", "max_turns", f"the trajectory has taken its {self._max_turns} turns (max_turns)")

    def render(self, turn: AgentTurn) -> tuple[list[int], Sampling]:
        """Set the tokens and the seed of a turn, and return its context and sampling. Called by any thread.

        Raises UserError for messages that the template refuses, and RefusedError where too little room is left.
        """
        dialog, request, parent = self._dialogs.of(turn.request.tools), turn.request, turn.parent
        if outside := [token for token in request.stop_token_ids if token >= len(dialog.template.tokenizer)]:
            raise UserError(f"stop_token_ids must be tokens of the vocabulary: got {shown(outside)}")
        if request.messages is None:
            turn.added = request.token_ids[len(_tokens(parent)) :] if parent else request.token_ids
        elif parent is None or not dialog.appends:
            turn.added = dialog.begin(dialog.separated(_for_template(request.messages, dialog)))[0]
            if parent is not None:
                held = _tokens(parent)
                added = dialog.continued(held, turn.added)
                if added is None:
                    turn.parent, turn.cause = None, "template"
                else:
                    turn.added = added
                    if held[-1] not in dialog.template.ends:
                        self._count("turns/inserted_ends")
        else:
            turn.added = self._follow(
                parent, _for_template(request.messages[parent.depth :], dialog, request.messages), dialog
            )
        self._draw_of(turn)
        context = turn.context
        length = turn.context_length = len(context)
        room = self._max_tokens - length
        limit = min(self.sampling.max_tokens, room, request.max_tokens or room)
        if limit < max(1, self.sampling.min_tokens):
            raise self._refuse(
                "context",
                "context_length_exceeded",
                f"the context has {length} tokens, which leaves no room for an answer below {self._max_tokens} "
                "(data.max_total_tokens)",
            )
        stop = tuple(dict.fromkeys((*self.sampling.stop, *request.stop)))
        tokens = tuple(dict.fromkeys((*self.sampling.stop_token_ids, *request.stop_token_ids)))
        return context, replace(self.sampling, max_tokens=limit, stop=stop, stop_token_ids=tokens)

    def read(self, turn: AgentTurn, completion: Completion) -> None:
        """Set the answer of a turn. Called by any thread."""
        dialog = self._dialogs.of(turn.request.tools)
        turn.text = dialog.text(completion.token_ids)
        answer = dialog.read(completion.token_ids)
        content, calls = str(answer.message["content"]), answer.calls
        if any(call.error is not None for call in calls):
            # The agent gets what the model said; a call that cannot be read has no other form.
            self._count("tools/malformed", sum(call.error is not None for call in calls))
            content, calls = turn.text, []
        for stop in turn.request.stop:
            content = content.partition(stop)[0]
        turn.calls = list(calls)
        turn.answer = {"role": "assistant", "content": content}
        if calls:
            turn.answer["tool_calls"] = [
                {
                    "id": f"call{next(self._calls):05}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for call in calls
            ]
        turn.finish = "tool_calls" if calls and completion.finish_reason == "stop" else completion.finish_reason
        if turn.request.messages is not None:
            turn.conversation = [*turn.request.messages, turn.answer]
            turn.depth = len(turn.conversation)
        turn.seconds = time.monotonic() - turn.began
        turn.completion = completion

    def record(self, held: Trajectory) -> None:
        """Write the turns that the agent has read to a trajectory, as sequences."""
        sequences: dict[AgentTurn, HeldSequence] = {}
        """The last turn of each sequence -> the sequence."""
        held.turns = 0
        for turn in (turn for turn in self.turns if turn.state == "read"):
            assert turn.completion is not None
            sequence = None if turn.parent is None else sequences.pop(turn.parent, None)
            if sequence is not None:
                sequence.observe(turn.added)
            else:
                cause = (turn.cause or "shorter") if held.sequences else None
                sequence = HeldSequence(turn.context, cause)
                held.sequences.append(sequence)
            sequences[turn] = sequence
            held.sampled(sequence, turn.completion, turn.text, None, turn.seconds)
        for name, number in self.counts.items():
            held.count(name, number)
        held.count("endpoint/unread", sum(turn.state == "unread" for turn in self.turns))

    def _place(self, request: AgentRequest) -> tuple[AgentTurn | None, str | None]:
        """Return the turn that a request continues, and why it begins a sequence; None if it extends one."""
        answered = [turn for turn in self.turns if turn.completion is not None and turn.state != "failed"]
        if request.messages is None:
            return self._place_tokens(request.token_ids, answered)
        best: AgentTurn | None = None
        for turn in reversed(answered):
            # Turns that another one continues are among the lineage of that one.
            if (
                turn.request.messages is None
                or turn.request.tools != request.tools
                or any(child.depth for child in turn.children)
            ):
                continue
            same = _repeated(turn.conversation, request.messages)
            known = [earlier for earlier in turn.lineage if earlier.depth <= same and earlier.depth < len(request.messages)]
            if known and (best is None or known[-1].depth > best.depth):
                best = known[-1]
        if best is not None and not any(child.is_live for child in best.children):
            return best, None
        others = [turn for turn in self.turns if turn.is_live and turn.request.messages is not None]
        if not others:
            return best, None
        # The branch that it leaves, or else the latest conversation.
        latest = others[-1]
        if best is not None:
            latest = next(child for child in reversed(best.children) if child.is_live)
        return best, self._cause(latest, request)

    def _cause(self, turn: AgentTurn, request: AgentRequest) -> str:
        """Return in what a request differs from a conversation."""
        assert request.messages is not None and turn.request.messages is not None
        if turn.request.tools != request.tools:
            return "tools"
        return difference(turn.conversation or turn.request.messages, request.messages) or "shorter"

    @staticmethod
    def _place_tokens(token_ids: list[int], answered: Sequence[AgentTurn]) -> tuple[AgentTurn | None, str | None]:
        best: AgentTurn | None = None
        longest = 0
        for turn in answered:
            held = _tokens(turn)
            if longest < len(held) < len(token_ids) and token_ids[: len(held)] == held:
                best, longest = turn, len(held)
        if not answered or (best is not None and not any(child.is_live for child in best.children)):
            return best, None
        last = _tokens(answered[-1])
        return best, "shorter" if last[: len(token_ids)] == token_ids else "content"

    def _follow(self, parent: AgentTurn, messages: list[dict[str, Any]], dialog: Dialog) -> list[int]:
        """Return the tokens between a turn and the next; the end token of the turn is the first unless it was sampled."""
        assert parent.completion is not None
        follow = dialog.follow(messages, parent.calls)
        if parent.completion.token_ids and parent.completion.token_ids[-1] == follow[0]:
            return follow[1:]
        self._count("turns/inserted_ends")
        return follow

    def _draw_of(self, turn: AgentTurn) -> None:
        """Set the seed: a digest of the context, and how often the trajectory asked with the same one before."""
        if turn.parent is None:
            turn.hashed = hashlib.blake2b(digest_size=8)
        else:
            assert turn.parent.completion is not None
            turn.hashed = turn.parent.hashed.copy()
            turn.hashed.update(_bytes(turn.parent.completion.token_ids))
        turn.hashed.update(_bytes(turn.added))
        digest = turn.hashed.digest()
        with self._lock:
            before = self._contexts.get(digest, 0)
            self._contexts[digest] = before + 1
        turn.seed = request_seed((*self._draw, int.from_bytes(digest, "little"), before))

    def _refuse(self, end: str, code: str, message: str) -> RefusedError:
        self._refused = end, len(self.turns)
        return RefusedError(end, code, message)

    def _count(self, name: str, number: float = 1.0) -> None:
        with self._lock:
            self.counts[name] = self.counts.get(name, 0.0) + number


def _repeated(conversation: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]]) -> int:
    """Return with how many messages of a conversation the given ones begin."""
    if messages[: len(conversation)] == conversation:
        return len(conversation)
    for place, (message, other) in enumerate(zip(conversation, messages, strict=False)):
        if message != other and difference([message], [other]) is not None:
            return place
    return min(len(conversation), len(messages))


def _tokens(turn: AgentTurn) -> list[int]:
    """Return all tokens of a turn's context and answer."""
    assert turn.completion is not None
    return turn.context + turn.completion.token_ids


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _for_template(
    messages: Sequence[dict[str, Any]], dialog: Dialog, before: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return messages as a chat template takes them: no special tokens in their texts, and tools named in their answers."""
    pattern = pattern_of(dialog.template.tokenizer)
    places = dict(_places([*before, *messages]))
    written = []
    for message in messages:
        plain = dict(message)
        if calls := message.get("tool_calls"):
            plain["tool_calls"] = dialog.template.written([ToolCall(*_name_and_arguments(call)) for call in calls])
        if message["role"] == "tool":
            name, number = places.get(message.get("tool_call_id", ""), (message.get("name", "unknown"), 0))
            plain |= {"name": name, "tool_call_id": f"call{number:05}"}
        written.append(escape_all(plain, pattern))
    return written


def _places(messages: Sequence[dict[str, Any]]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the id of each call, the name of its tool and its number within its turn."""
    for message in messages:
        for number, call in enumerate(message.get("tool_calls", ())):
            yield call["id"], (call["function"]["name"], number)


def _name_and_arguments(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise UserError(f"the arguments of a call are a JSON object: got {shown(call['function']['arguments'])}")
    if error := writable(ToolCall(call["function"]["name"], arguments)).error:
        raise UserError(error)
    return call["function"]["name"], arguments
