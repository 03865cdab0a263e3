"""Requests of agents, as OpenAI's API writes them -> what they ask for, read and checked. No torch here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fivefold.data.rows import ROLES
from fivefold.errors import UserError, shown
from fivefold.types import Sampling

_DISTRIBUTION = "it would change the distribution that is trained"
_GRAMMAR = "a grammar would change the distribution that is trained"
_ONE = "a turn has one answer: send several requests"
_REFUSED = {
    "n": (None, 1, _ONE),
    "best_of": (None, 1, _ONE),
    "logit_bias": (None, {}, _DISTRIBUTION),
    "bad_words": (None, [], _DISTRIBUTION),
    "allowed_token_ids": (None, [], _DISTRIBUTION),
    "response_format": (None, {"type": "text"}, _GRAMMAR),
    "structured_outputs": (None, {}, _GRAMMAR),
    "guided_json": (None, None, _GRAMMAR),
    "guided_regex": (None, None, _GRAMMAR),
    "guided_choice": (None, None, _GRAMMAR),
    "guided_grammar": (None, None, _GRAMMAR),
    "use_beam_search": (None, False, "a turn is sampled"),
    "functions": (None, [], "name them in tools"),
    "function_call": (None, "auto", "the model chooses its calls itself"),
    "top_logprobs": (None, 0, "only the log-probs of sampled tokens are known"),
    "continue_final_message": (None, False, "a turn is sampled from its beginning"),
    "chat_template": (None, None, "the run has one chat template, data.chat_template"),
    "echo": (None, False, "the answer is what was sampled"),
    "add_generation_prompt": (None, True, "a turn of the model is sampled"),
    "truncate_prompt_tokens": (None, "the engine reads what the messages say"),
    "documents": (None, [], "write them into messages"),
}
"""Key of a request -> the values that change nothing, and why another one is refused."""
_OF_RUN = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
}
"""Key of a request -> parameter of `Sampling` that holds instead."""
_NEUTRAL: dict[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "seed": None,
    "chat_template_kwargs": {},
    "reasoning_effort": None,
    "parallel_tool_calls": True,
    "include_stop_str_in_output": False,
    "length_penalty": 1,
}
"""Further keys that are overridden, and the value that changes nothing."""


@dataclass(frozen=True)
class AgentRequest:
    """Request of an agent, after it was read and checked."""

    messages: list[dict[str, Any]] | None
    """The conversation in one form; None if the context is given as tokens."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """The context, if there are no messages."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    overridden: int = 0
    """Number of parameters that the run's sampling replaces."""

    @classmethod
    def of_chat(cls, body: Any, sampling: Sampling) -> AgentRequest:
        """Read the body of a chat completion; raises UserError for what cannot be answered."""
        body = _checked(body)
        tools, choice = body.get("tools") or [], body.get("tool_choice")
        if choice not in (None, "auto") and not (choice == "none" and not tools):
            raise UserError(
                "tool_choice must be auto: the model chooses its calls itself, or another distribution would be trained; "
                f"got {shown(choice)}"
            )
        for tool in tools if isinstance(tools, list) else [tools]:
            _check_tool(tool)
        limits = [_limit(body.get(key), key, sampling) for key in ("max_completion_tokens", "max_tokens")]
        return cls(
            plain_messages(body.get("messages")),
            list(tools),
            max_tokens=min((limit for limit in limits if limit is not None), default=None),
            stop=_stops(body.get("stop")),
            stop_token_ids=_tokens(body.get("stop_token_ids") or [], "stop_token_ids"),
            overridden=_overridden(body, sampling),
        )

    @classmethod
    def of_tokens(cls, body: Any, sampling: Sampling) -> AgentRequest:
        """Read the body of a request for tokens; raises UserError for what cannot be answered."""
        body = _checked(body)
        parameters = _checked(body.get("sampling_params") or {})
        tokens = _tokens(body.get("token_ids"), "token_ids")
        if not tokens:
            raise UserError("token_ids must be a list of tokens that is not empty")
        return cls(
            None,
            token_ids=[*tokens],
            max_tokens=_limit(parameters.get("max_tokens"), "sampling_params.max_tokens", sampling),
            stop=_stops(parameters.get("stop")),
            stop_token_ids=_tokens(parameters.get("stop_token_ids") or [], "sampling_params.stop_token_ids"),
            overridden=_overridden(parameters, sampling),
        )


def _checked(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise UserError(f"a request is a JSON object: got {shown(body)}")
    for key, (*neutral, reason) in _REFUSED.items():
        if key in body and body[key] not in neutral:
            raise UserError(f"{key} is not supported: {reason}; got {shown(body[key])}")
    return body


def _check_tool(tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(
            f'a tool is {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}: got {shown(tool)}'
        )
    parameters = function.get("parameters")
    if parameters is not None and not (isinstance(parameters, dict) and isinstance(parameters.get("properties", {}), dict)):
        raise UserError(f"the parameters of a tool are a JSON schema of an object: got {shown(parameters)}")


def _limit(value: Any, key: str, sampling: Sampling) -> int | None:
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise UserError(f"{key} must be a number of tokens above 0: got {shown(value)}")
    if value < sampling.min_tokens:
        raise UserError(f"{key} must be at least engine.sampling.min_tokens = {sampling.min_tokens} of the run: got {value}")
    return value


def _tokens(value: Any, key: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise UserError(f"{key} must be a list of tokens: got {shown(value)}")
    return tuple(value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise UserError(f"stop must be a text or a list of texts: got {shown(value)}")
    return tuple(stops)


def _overridden(body: Mapping[str, Any], sampling: Sampling) -> int:
    """Return the number of parameters that the run's sampling replaces with other values."""
    held = {key: getattr(sampling, name) for key, name in _OF_RUN.items()} | _NEUTRAL
    return sum(body.get(key) is not None and body[key] != value for key, value in held.items())


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return messages of OpenAI's API in one form: texts as contents, no empty keys; raises UserError for others."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"messages must be a list that is not empty: got {shown(messages)}")
    return [_plain(message) for message in messages]


def _plain(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise UserError(f"a message has one of the roles {', '.join(ROLES)}: got {shown(message)}")
    plain = {"role": message["role"], "content": _text(message)}
    if calls := message.get("tool_calls"):
        if message["role"] != "assistant" or not isinstance(calls, list):
            raise UserError(f"tool_calls are a list in a message of the assistant: got {shown(message)}")
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    for key in ("reasoning_content", "reasoning", "tool_call_id", "name"):
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                raise UserError(f"{key} of a message is a text: got {shown(value)}")
            plain["reasoning_content" if key == "reasoning" else key] = value
    return plain


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message["role"] == "assistant":
        return ""
    texts = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        for part in (content if isinstance(content, list) and content else [content])
    ]
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"the content of a message is a text, or parts of type text: got {shown(content)}")
    return "\n".join(map(str, texts))


def _plain_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UserError(f'a call is {{"id": ..., "function": {{"name": ..., "arguments": ...}}}}: got {shown(call)}')
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": str(call.get("id")), "type": "function", "function": {"name": function["name"], "arguments": text}}
