"""Checks of an agent and of the address at which it samples. No torch here."""

from __future__ import annotations

import ipaddress
import re
import shlex
import shutil
import socket

from fivefold.config import RunConfig
from fivefold.config.environment import EndpointConfig, EnvironmentConfig
from fivefold.config.machine import elsewhere
from fivefold.keys.findings import Findings
from fivefold.plan.environment_code import code_of, defines
from fivefold.plan.hosts import ranks_of_machine
from fivefold.user_code import parameters_of

_CODE = re.compile(r"[^:]+\.py:\w+")
_LAST_PORT = 65535
_ARGUMENTS = 3
"""Number of arguments with which an agent is called."""


def check_agent(whole: Findings, config: RunConfig) -> None:
    """Check the agent, and the address at which it samples; `whole` collects for the whole configuration."""
    findings, environment, usual = whole.at("environment"), config.environment, EnvironmentConfig()
    agent, endpoint = environment.agent, environment.endpoint
    if agent is None:
        if endpoint != usual.endpoint:
            findings.ignore("endpoint", "environment.agent is not set")
        return
    for key, value in (("class", environment.class_), ("tools", environment.tools)):
        message = (
            f"must be left out with environment.{key}: an agent has an environment and tools of its own; take one of them"
        )
        findings.require(not value, "agent", message)
    of_answers = ("max_observation_tokens", "max_observation_characters", "cut_observations")
    for name in ("max_parallel_calls", *of_answers, "same_start", "step_seconds"):
        if getattr(environment, name) != getattr(usual, name):
            findings.ignore(name, "environment.agent decides what the model reads")
    algorithm = config.algorithm
    whole.require(
        not algorithm.resolved.turn_coef,
        "algorithm.turn_coef",
        f"must be 0 with environment.agent: {algorithm.name} compares turns that answer the same state, and the turns of an "
        "agent name none; set it to 0, or take grpo",
    )
    if _CODE.fullmatch(agent):
        _check_agent_function(findings, agent, environment)
    else:
        try:
            words = shlex.split(agent)
        except ValueError as error:
            words = []
            findings.error("agent", f": the command {agent!r} cannot be read: {error}")
        message = f"must be path/to/file.py:function or a command of this machine: got {agent!r}"
        findings.require(bool(words) and shutil.which(words[0]) is not None, "agent", message)
    _check_endpoint(findings, endpoint, config)


def _check_agent_function(findings: Findings, agent: str, environment: EnvironmentConfig) -> None:
    """Check that a function can be called with a task, an address and a key, without running its file."""
    path, _, function = agent.rpartition(":")
    if (code := code_of(findings, "agent", path, environment)) is None:
        return
    findings.require(defines(code, function), "agent", f": {path} defines no {function}")
    parameters = parameters_of(agent)
    if parameters is not None and not parameters.takes_any:
        named, needed = len(parameters.named), len(parameters.required)
        message = f"is called with (task, base_url, api_key): {agent} takes {', '.join(parameters.named) or 'nothing'}"
        findings.require(named >= _ARGUMENTS >= needed, "agent", message)


def _check_endpoint(findings: Findings, endpoint: EndpointConfig, config: RunConfig) -> None:
    """Check that the ranks can listen."""
    host, first, ranks = endpoint.host, endpoint.port, ranks_of_machine(config)
    if first is not None and first + ranks - 1 > _LAST_PORT:
        findings.error(
            "endpoint.port",
            f"must be at most {_LAST_PORT + 1 - ranks}: got {first}, and the {ranks} ranks of a machine take ports one "
            "after another",
        )
        return
    try:
        addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        findings.error("endpoint.host", f"must be an address of this machine: got {host!r}, {error}")
        return
    is_loopback = all(ipaddress.ip_address(str(address[4][0]).partition("%")[0]).is_loopback for address in addresses)
    if not is_loopback:
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
                # A run for other machines, or at an address of another one, may have the port there.
                starts_here = is_loopback and not elsewhere(config.launch) and config.launch.gpu is None
                (findings.error if starts_here else findings.lacks)("endpoint.port", message)
                return
