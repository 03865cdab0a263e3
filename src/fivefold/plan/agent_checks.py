"""Checks of an agent and of the address at which it samples. No torch here."""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import socket

from fivefold.config.environment import EndpointConfig, EnvironmentConfig
from fivefold.errors import UserError
from fivefold.keys.findings import Findings
from fivefold.user_code import check_user_code, parameters_of

_CODE = re.compile(r"[^:]+\.py:\w+")
_ARGUMENTS = 3
"""Number of arguments with which an agent is called."""


def check_agent(findings: Findings, environment: EnvironmentConfig, ranks: int) -> None:
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
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        findings.error("endpoint.host", f"must be an address of this machine: got {host!r}, {error}")
        return
    if not all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in addresses):
        findings.note(
            f"{findings.key('endpoint.host')} = {host} is not a loopback address: programs that reach it can try keys, and "
            "prompts and answers cross the network unencrypted; use a private network (docs/security.md)"
        )
    family, address = addresses[0][0], addresses[0][4]
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
