"""Turns of agents -> their answers, as OpenAI's API and vLLM write them. No sockets here."""

from __future__ import annotations

from typing import Any

from fivefold.data.dialog import Dialog
from fivefold.rollout.sessions import AgentTurn


class AgentAnswers:
    """Writes the answers to requests of agents, once a turn is sampled."""

    def __init__(self, dialog: Dialog, model: str, max_tokens: int) -> None:
        """`model`: the name in answers; `max_tokens`: maximum length of a context with its answer."""
        self._dialog, self._model, self._max_tokens = dialog, model, max_tokens

    def models(self) -> dict[str, Any]:
        """Return the list of models, which has one."""
        about = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "fivefold",
            "max_model_len": self._max_tokens,
        }
        return {"object": "list", "data": [about]}

    def chat(self, turn: AgentTurn, name: str, wants: Any, logprobs: Any) -> dict[str, Any]:
        """Return the answer to a request for a message."""
        assert turn.completion is not None
        message = {**turn.answer, "content": turn.answer["content"] or (None if turn.calls else ""), "refusal": None}
        choice = {"index": 0, "message": message, "finish_reason": turn.finish, "logprobs": logprobs}
        answer = {**self._begin(turn, name, "chat.completion"), "choices": [choice], "usage": _usage(turn)}
        if wants.get("return_token_ids"):
            choice["token_ids"] = turn.completion.token_ids
            answer["prompt_token_ids"] = turn.context
        return answer

    def chunks(self, turn: AgentTurn, name: str, wants: Any, logprobs: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed answer."""
        assert turn.completion is not None
        begin = self._begin(turn, name, "chat.completion.chunk")
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if turn.answer["content"]:
            deltas.append({"content": turn.answer["content"]})
        deltas += [
            {"tool_calls": [{"index": place, **call}]} for place, call in enumerate(turn.answer.get("tool_calls", ()))
        ]
        events = [{**begin, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        last: dict[str, Any] = {"index": 0, "delta": {}, "finish_reason": turn.finish, "logprobs": logprobs}
        events.append({**begin, "choices": [last]})
        if wants.get("return_token_ids"):
            events[0]["prompt_token_ids"] = turn.context
            last["token_ids"] = turn.completion.token_ids
        options = wants.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            events.append({**begin, "choices": [], "usage": _usage(turn)})
        return events

    def tokens(self, turn: AgentTurn, name: str, wants: Any) -> dict[str, Any]:
        """Return the answer to a request for tokens, as vLLM writes it."""
        assert turn.completion is not None
        pairs = zip(turn.completion.token_ids, turn.completion.logprobs, strict=True)
        content: list[dict[str, Any]] = [
            {"token_id": token, "logprob": value, "rank": None, "top_logprobs": []} for token, value in pairs
        ]
        choice = {
            "index": 0,
            "token_ids": turn.completion.token_ids,
            "finish_reason": turn.completion.finish_reason,
            "logprobs": {"content": content},
        }
        request = wants.get("request_id")
        return {
            "request_id": request if isinstance(request, str) else name,
            "model": self._model,
            "choices": [choice],
            "usage": _usage(turn),
            "prompt_logprobs": None,
            "kv_transfer_params": None,
        }

    def logprobs(self, turn: AgentTurn) -> dict[str, Any]:
        """Return the log-probs of the sampled tokens, each with its text."""
        assert turn.completion is not None
        texts = [self._dialog.text([token]) for token in turn.completion.token_ids]
        return {
            "content": [
                {"token": text, "logprob": value, "bytes": list(text.encode(errors="replace")), "top_logprobs": []}
                for text, value in zip(texts, turn.completion.logprobs, strict=True)
            ],
            "refusal": None,
        }

    def _begin(self, turn: AgentTurn, name: str, kind: str) -> dict[str, Any]:
        """Return the keys with which an answer to a request for a message begins."""
        return {"id": f"chatcmpl-{name}", "object": kind, "created": turn.created, "model": self._model}


def _usage(turn: AgentTurn) -> dict[str, int]:
    assert turn.completion is not None
    read, sampled = turn.context_length, len(turn.completion.token_ids)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
