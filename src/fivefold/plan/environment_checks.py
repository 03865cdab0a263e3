"""Checks of the section `environment`: its files, and whether the chat template can write several turns. No torch here."""

from __future__ import annotations

import ast
import ipaddress
import os
import re
import shlex
import shutil
import socket
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fivefold.config import RunConfig
from fivefold.config.environment import EndpointConfig, EnvironmentConfig
from fivefold.data.dialog import Dialog
from fivefold.data.light_tokenizer import LightTokenizer
from fivefold.errors import UserError
from fivefold.files import read_text
from fivefold.keys.findings import Findings
from fivefold.models.end_tokens import EndTokens
from fivefold.user_code import check_user_code, parameters_of

_CODE = re.compile(r"[^:]+\.py:\w+")
_ARGUMENTS = 3
"""Number of arguments with which an agent is called."""


@dataclass(frozen=True, eq=False)
class _Tokenizer:
    """A LightTokenizer with the methods of transformers that a dialog calls."""

    light: LightTokenizer

    @property
    def added_tokens_decoder(self) -> Any:
        return self.light.backend.get_added_tokens_decoder()

    @property
    def chat_template(self) -> Any:
        return self.light.template

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, tokenize: bool, add_generation_prompt: bool, **variables: Any
    ) -> str:
        assert not tokenize
        return self.light.apply_chat_template(messages, add_generation_prompt, variables)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.light.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return str(self.light.backend.decode(token_ids, skip_special_tokens=skip_special_tokens))


def check_environment(findings: Findings, config: RunConfig, tokenizer: LightTokenizer | None) -> None:
    """Check what `environment` names; `tokenizer` is None if its files are not on this machine."""
    environment, own = config.environment, findings.at("environment")
    if not environment.is_active:
        usual = EnvironmentConfig()
        for name in (item.name for item in fields(usual) if getattr(environment, item.name) != getattr(usual, item.name)):
            own.ignore(name, "none of environment.class, environment.tools and environment.agent is set")
        return
    _check_agent(own, environment, config.roles.world_size)
    if environment.class_ is not None:
        _check_class(own, environment.class_)
    names = [tool.rpartition(":")[2] for tool in environment.tools]
    for tool, name in zip(environment.tools, names, strict=True):
        _check_tool(own, tool)
        own.require(names.count(name) == 1, "tools", f"must have one function of each name: got {name} twice; rename one")
    python = environment.python
    own.require(
        python is None or shutil.which(python) is not None, "python", f"must be a Python interpreter: got {python!r}"
    )
    for name in environment.variables:
        own.require(name in os.environ, "variables", f"names variables that are set here: got {name!r}")
    if tokenizer is not None and not findings.errors:
        _check_dialog(findings, config, tokenizer, names)


def _check_agent(findings: Findings, environment: EnvironmentConfig, ranks: int) -> None:
    """Check the agent, and the address at which it samples; `ranks`: number of ranks of the run."""
    agent, endpoint, usual = environment.agent, environment.endpoint, EnvironmentConfig()
    if agent is None:
        if endpoint != usual.endpoint:
            findings.ignore("endpoint", "environment.agent is not set")
        return
    for key, value in (("class", environment.class_), ("tools", environment.tools)):
        message = (
            f"must be left out with environment.{key}: an agent has an environment and tools of its own; take one of them"
        )
        findings.require(not value, "agent", message)
    for name in ("max_parallel_calls", "max_observation_tokens", "cut_observations", "same_start", "step_seconds"):
        if getattr(environment, name) != getattr(usual, name):
            findings.ignore(name, "environment.agent decides what the model reads")
    if _CODE.fullmatch(agent):
        _check_agent_function(findings, agent)
    else:
        try:
            words = shlex.split(agent)
        except ValueError as error:
            words = []
            findings.error("agent", f": the command {agent!r} cannot be read: {error}")
        message = f"must be path/to/file.py:function or a command of this machine: got {agent!r}"
        findings.require(bool(words) and shutil.which(words[0]) is not None, "agent", message)
    _check_endpoint(findings, endpoint, ranks)


def _check_agent_function(findings: Findings, agent: str) -> None:
    """Check that a function can be called with a task, an address and a key, without running its file."""
    try:
        check_user_code(agent)
        parameters = parameters_of(agent)
    except UserError as error:
        findings.error("agent", f": {error}")
        return
    if parameters is not None and not parameters.takes_any:
        named, needed = len(parameters.named), len(parameters.required)
        message = f"is called with (task, base_url, api_key): {agent} takes {', '.join(parameters.named) or 'nothing'}"
        findings.require(named >= _ARGUMENTS >= needed, "agent", message)


def _check_endpoint(findings: Findings, endpoint: EndpointConfig, ranks: int) -> None:
    """Check that the ranks can listen."""
    host, first = endpoint.host, endpoint.port
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        findings.error("endpoint.host", f"must be an address of this machine: got {host!r}, {error}")
        return
    if not all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in found):
        findings.note(
            f"{findings.key('endpoint.host')} = {host} is not a loopback address: programs that reach it can try keys, and "
            "prompts and answers cross the network unencrypted; use a private network (docs/security.md)"
        )
    family, address = found[0][0], found[0][4]
    # Ranks of other machines have the same ports there.
    for port in () if first is None else range(first, first + ranks):
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address[0], port, *address[2:]))
            except OSError as error:
                message = (
                    f": port {port} of {host} cannot be used: {error.strerror or error}; take another one, or leave it out"
                )
                findings.lacks("endpoint.port", message)
                return


def _check_class(findings: Findings, name: str) -> None:
    if not _CODE.fullmatch(name):
        findings.error("class", f"must be path/to/file.py:Class: got {name!r}")
        return
    path, _, own = name.rpartition(":")
    if not Path(path).is_file():
        findings.error("class", f": no file at {path}")
        return
    pattern = rf"^\s*class\s+{own}\b|^{own}\s*=|^from\s.*\b{own}\b"
    findings.require(bool(re.search(pattern, read_text(Path(path)), re.M)), "class", f": {path} defines no class {own}")


def _check_tool(findings: Findings, name: str) -> None:
    """Check that a tool is a function whose arguments have annotations, without running its file."""
    if not _CODE.fullmatch(name):
        findings.error("tools", f"must be functions as path/to/file.py:function: got {name!r}")
        return
    try:
        check_user_code(name)
        tree = ast.parse(read_text(Path(name.rpartition(":")[0])))
    except (UserError, SyntaxError, RecursionError) as error:
        findings.error("tools", f": {error}")
        return
    own = name.rpartition(":")[2]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == own:
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [each.arg for each in arguments if each.annotation is None]
            message = f": the argument {bare[0]!r} of {own} needs an annotation, which the model reads" if bare else ""
            findings.require(not bare, "tools", message)


def _check_dialog(findings: Findings, config: RunConfig, light: LightTokenizer, tools: list[str]) -> None:
    """Check that turns can be appended with the chat template, and that the calls of tools can be read."""
    data = config.data
    try:
        ends = EndTokens.of(Path(config.model.described_by(config.model.path)), light.eos_token_id).used
        if data.chat_template is not None:
            light = light.with_template(data.chat_template, "data.chat_template")
        about = [
            {"type": "function", "function": {"name": name, "description": "", "parameters": {"properties": {}}}}
            for name in tools
        ]
        stops = {*config.engine.sampling.stop_token_ids}
        dialog = Dialog.of(_Tokenizer(light), data.chat_template_kwargs, ends | stops, about)
        difference = dialog.history_difference()
    except UserError as error:
        findings.errors.append(str(error))
        return
    if difference is not None:
        findings.note(
            "environment: a trajectory keeps what was sampled, and the chat template would render the same conversation in "
            f"another way, {difference}"
        )
