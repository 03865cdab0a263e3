"""The configuration section `environment`: trajectories of several turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fivefold.config.scoring import VARIABLE
from fivefold.keys.identity import HARMLESS
from fivefold.keys.ranges import Matches, above, within

REWARD = "environment"
"""Name of the reward that the environment's class or the agent gives."""


@dataclass(frozen=True)
class EndpointConfig:
    """Address at which agents sample their turns."""

    host: str = "127.0.0.1"
    """Address on which each rank listens. Agents on other machines need another one than loopback."""
    port: Annotated[int | None, within("[1024, 65535]")] = None
    """Port of the first rank of a machine; the next ones take the ports after it. A free one if left out."""


@dataclass(frozen=True)
class EnvironmentConfig:
    """Trajectories of several turns: an environment or tools answer each turn of the model; see docs/environments.md."""

    class_: str | None = None
    """Class of the environment, as `path/to/file.py:Class`, or an environment of another library: `gymnasium:ID`,
    `textarena:ID`, `trl:FILE:CLASS`, `skyrl_gym:ID`, `openenv:URL`."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments for an environment of another library, such as `{is_slippery: false}`."""
    tools: list[str] = field(default_factory=list)
    """What the model may call: functions as `path/to/file.py:function`, which annotations and docstring describe, MCP
    servers as `mcp:COMMAND` or `mcp+http://ADDRESS`, and files of tools for verl as `verl:FILE`."""
    agent: str | None = None
    """Agent that samples the turns itself, through an endpoint that speaks OpenAI's API: `path/to/file.py:function`, called
    with (task, base_url, api_key), or a command."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    history: Literal["append", "template"] = "append"
    """What a turn reads of earlier ones. `append`: all that was read and sampled. `template`: what the chat template renders
    of the conversation, which may drop earlier thinking; where it differs, a new sequence of the trajectory begins."""
    max_turns: Annotated[int, within("[1, 10000]")] = 10
    """Maximum number of turns of the model in a trajectory."""
    max_parallel_calls: Annotated[int, within("[1, 1000]")] = 8
    """Maximum number of tool calls in one turn; further ones are answered with an error."""
    max_observation_tokens: Annotated[int, above(3)] = 1024
    """Maximum length of an answer that the model reads, in tokens. Longer ones are cut, with a mark."""
    max_observation_characters: Annotated[int | None, above(0)] = None
    """Maximum length of an answer that the model reads, in characters without the mark; no limit if left out."""
    cut_observations: Literal["start", "middle", "end"] = "end"
    """Part of a long answer that is left out."""
    same_start: bool = True
    """Stop the run if the trajectories of a group begin with different contexts."""
    per_worker: Annotated[int, within("[1, 65536]"), HARMLESS] = 64
    """Number of environments that one process serves. 1 for libraries with random state of their own."""
    max_processes: Annotated[int, within("[1, 4096]"), HARMLESS] = 64
    """Maximum number of environment processes of a rank; further trajectories wait until others have ended."""
    max_running: Annotated[int, within("[1, 1048576]"), HARMLESS] = 1024
    """Maximum number of trajectories of a rank that run at once, if its processes can serve them; the others wait."""
    reset_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 60.0
    """Maximum time for `reset`; after it the trajectory has failed."""
    step_seconds: Annotated[float, within("(0, 86400]"), HARMLESS] = 60.0
    """Maximum time for `step`, after which the trajectory has failed, and for a tool call, whose answer is then an error."""
    trajectory_seconds: Annotated[float, within("(0, 864000]"), HARMLESS] = 3600.0
    """Time of a trajectory, without its waiting for the engine, after which it takes no further turn."""
    memory_mb: Annotated[int, within("[64, 1048576]"), HARMLESS] = 4096
    """Address space of one environment process, in MB."""
    python: Annotated[str | None, HARMLESS] = None
    """Python interpreter of the environment processes, with the libraries that they need; the run's own if left out."""
    variables: Annotated[list[Annotated[str, Matches(VARIABLE, "the name of a variable")]], HARMLESS] = field(
        default_factory=list
    )
    """Environment variables for environment processes in addition to the usual ones (PATH, HOME, ...). They get no other
    variables of the trainer."""

    @property
    def is_active(self) -> bool:
        """Whether trajectories may have several turns."""
        return self.class_ is not None or bool(self.tools) or self.agent is not None

    @property
    def has_one_sequence(self) -> bool:
        """Whether each trajectory is one sequence, in which every turn reads all that was read and sampled before it."""
        return self.agent is None and self.history == "append"

    @property
    def reads_rows(self) -> bool:
        """Whether the environment's class or an agent takes the rows of the data."""
        return self.class_ is not None or self.agent is not None


def rewarded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of a configuration in which the reward of the environment's class or of the agent counts, with weight
    1 if none is given."""
    environment, reward = tree.get("environment"), tree.get("reward") or {}
    if not isinstance(environment, dict) or not isinstance(reward, dict):
        return dict(tree)
    if environment.get("class") is None and environment.get("agent") is None:
        return dict(tree)
    functions, by_source = reward.get("functions") or {}, reward.get("by_source") or {}
    if not isinstance(functions, dict) or not isinstance(by_source, dict):
        return dict(tree)
    by_source_with_reward = {
        source: {REWARD: 1.0, **weights} if isinstance(weights, dict) else weights for source, weights in by_source.items()
    }
    return {**tree, "reward": {**reward, "functions": {REWARD: 1.0, **functions}, "by_source": by_source_with_reward}}
