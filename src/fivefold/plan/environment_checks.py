"""Checks of the section `environment`: its files, and whether the chat template can write several turns. No torch here."""

from __future__ import annotations

import ast
import os
import re
import shutil
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from fivefold.config import RunConfig
from fivefold.config.environment import EnvironmentConfig
from fivefold.data.dialog import Dialog
from fivefold.data.light_tokenizer import LightTokenizer
from fivefold.environments.kinds import KINDS, VERL, is_server, kind_of
from fivefold.environments.pool import EnvironmentPool
from fivefold.errors import UserError
from fivefold.files import read_text
from fivefold.keys.findings import Findings
from fivefold.models.end_tokens import EndTokens
from fivefold.plan.agent_checks import check_agent
from fivefold.plan.environment_code import check_methods, check_tool, code_of, defines
from fivefold.user_code import DEFINED

_CODE = re.compile(r"[^:]+\.py:\w+")


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
    environment, section = config.environment, findings.at("environment")
    if not environment.is_active:
        usual = EnvironmentConfig()
        for name in (item.name for item in fields(usual) if getattr(environment, item.name) != getattr(usual, item.name)):
            section.ignore(name, "none of environment.class, environment.tools and environment.agent is set")
        return
    check_agent(findings, config)
    python = environment.python
    section.require(
        python is None or shutil.which(python) is not None, "python", f"must be a Python interpreter: got {python!r}"
    )
    for name in environment.variables:
        section.require(name in os.environ, "variables", f"names variables that are set here: got {name!r}")
    names = [*_check_class(section, environment), *_check_tools(section, environment)]
    is_without_tools = environment.agent is None and not names and not findings.errors
    if is_without_tools and environment.max_parallel_calls != EnvironmentConfig.max_parallel_calls:
        section.ignore("max_parallel_calls", "the class has no tools, and environment.tools names none")
    twice = [name for name in names if names.count(name) > 1]
    section.require(not twice, "tools", f"must have one tool of each name: got {', '.join(twice[:1])} twice; rename one")
    if tokenizer is not None and not findings.errors:
        _check_dialog(findings, config, tokenizer, names)


def _check_class(findings: Findings, environment: EnvironmentConfig) -> list[str]:
    """Check the class, and return the names of the tools that it has."""
    kind, name = kind_of(environment.class_ or "")
    library = KINDS.get(kind)
    if environment.options and library is None:
        findings.ignore(
            "options", "only environments of other libraries take arguments, and environment.class names none of them"
        )
    if environment.class_ is None:
        return []
    if library is not None and library.is_alone and environment.per_worker != EnvironmentConfig.per_worker:
        findings.ignore("per_worker", f"an environment of {kind} has a process of its own")
    if library is not None and not library.is_file:
        return _load(findings, environment, environment.class_, [])
    if not _CODE.fullmatch(name):
        forms = ", ".join(kind_of_library.form for kind_of_library in KINDS.values())
        findings.error("class", f"must be path/to/file.py:Class or one of {forms}: got {environment.class_!r}")
        return []
    path, _, class_name = name.rpartition(":")
    code = code_of(findings, "class", path, environment)
    if code is None:
        return []
    findings.require(defines(code, class_name), "class", f": {path} defines no class {class_name}")
    methods = check_methods(findings, "class", code, class_name, ("reset",) if kind == "trl" else ("reset", "step"))
    tools = [method for method in methods if method.name[0] != "_" and method.name not in ("reset", "get_reward")]
    if kind != "trl":
        return []
    for tool in tools:
        check_tool(findings, "class", code, tool, is_method=True)
    return [tool.name for tool in tools]


def _check_tools(findings: Findings, environment: EnvironmentConfig) -> list[str]:
    """Check the tools, and return their names."""
    servers = [tool for tool in environment.tools if is_server(tool)]
    files = [tool for tool in environment.tools if tool.startswith(VERL)]
    functions = [tool for tool in environment.tools if tool not in servers and tool not in files]
    for function in functions:
        _check_tool(findings, function, environment)
    names = [function.rpartition(":")[2] for function in functions]
    names += [name for file in files for name in _check_file(findings, file.removeprefix(VERL), environment)]
    return [*names, *(_load(findings, environment, None, servers) if servers else [])]


def _check_file(findings: Findings, path: str, environment: EnvironmentConfig) -> list[str]:
    """Check a file of tools for verl, without running it, and return their names."""
    file = Path(path)
    if file.suffix not in (".py", ".yaml", ".yml") or not file.is_file():
        findings.error("tools", f"must name a file for verl as {VERL}FILE.py or {VERL}FILE.yaml: no such file at {path}")
        return []
    try:
        if file.suffix == ".py":
            # Its process has a stand-in for verl.
            if (code := code_of(findings, "tools", path, environment, given=("verl",))) is None:
                return []
            names = [name for node in code for name in _decorated(node)]
        else:
            listed = yaml.safe_load(read_text(file))["tools"]
            schemas = [entry["tool_schema"] for entry in listed if entry.get("tool_schema")]
            names = [schema["function"]["name"] for schema in schemas]
    except (yaml.YAMLError, KeyError, TypeError) as error:
        findings.error("tools", f": {path} is no file of tools for verl: {type(error).__name__}: {error}")
        return []
    is_bare = file.suffix == ".py" and not names
    findings.require(not is_bare, "tools", f": {path} must have functions with the decorator function_tool")
    return names


def _decorated(node: ast.stmt) -> list[str]:
    """Return the name of the tool that a function with verl's decorator is."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    for decorator in node.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        target = decorator if call is None else call.func
        if getattr(target, "id", getattr(target, "attr", None)) == "function_tool":
            arguments = (
                [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
                if call is not None
                else []
            )
            texts = [
                argument.value
                for argument in arguments
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            return texts[:1] or [node.name]
    return []


def _load(findings: Findings, environment: EnvironmentConfig, name: str | None, tools: list[str]) -> list[str]:
    """Load what is not a user's code in a process as the run will, and return the names of its tools."""
    if findings.errors:
        return []
    pool = EnvironmentPool(replace(environment, class_=name, tools=tools))
    try:
        return [schema["function"]["name"] for schema in pool.start()]
    except UserError as error:
        findings.errors.append(str(error))
        return []
    finally:
        pool.close()


def _check_tool(findings: Findings, name: str, environment: EnvironmentConfig) -> None:
    """Check that a tool is a function whose arguments have annotations, without running its file."""
    if not _CODE.fullmatch(name):
        forms = f"path/to/file.py:function, mcp:COMMAND, mcp+http://ADDRESS or {VERL}FILE"
        findings.error("tools", f"must be {forms}: got {name!r}")
        return
    path, _, function_name = name.rpartition(":")
    if (code := code_of(findings, "tools", path, environment)) is None:
        return
    functions = [node for node in code if isinstance(node, DEFINED) and node.name == function_name]
    findings.require(defines(code, function_name), "tools", f": {path} defines no {function_name}")
    for function in functions[-1:]:
        check_tool(findings, "tools", code, function)


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
        tokenizer, history = _Tokenizer(light), config.environment.history
        dialog = Dialog.of(tokenizer, data.chat_template_kwargs, ends | stops, about, history)
        difference = dialog.history_difference()
    except UserError as error:
        findings.errors.append(str(error))
        return
    if not dialog.appends:
        findings.note(
            "environment.history: template: "
            + (
                "the chat template keeps all of earlier turns, so append would give the same contexts"
                if difference is None
                else f"the chat template changes earlier turns, {difference}; a new sequence of the trajectory begins "
                "there, whose context is computed again"
            )
        )
    elif difference is not None:
        findings.note(
            "environment: a trajectory keeps what was sampled, and the chat template would render the same conversation in "
            f"another way, {difference}"
        )
