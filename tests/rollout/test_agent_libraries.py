"""Unmodified clients of others with the endpoint, in an interpreter of their own: `make test-agents`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.rollout.test_agents import assert_exact, sample
from tests.rollout.test_conversations import Streamed
from tests.support.tiny_models import make_tokenizer

pytestmark = pytest.mark.agents

PYTHON = Path(os.environ.get("AGENTS_PYTHON", Path(__file__).parents[2] / ".venv-agents/bin/python")).absolute()
CODE = '''
import os, re
import openai


async def plain(task, base_url, api_key):
    """Turns of several kinds with OpenAI's asynchronous client, one of them streamed."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        assert [model.id async for model in await client.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": task["prompt"][0]["content"]}]
        for turn in range(3):
            if turn == 1:
                stream = await client.chat.completions.create(
                    model="tiny", messages=messages, stream=True, stream_options={"include_usage": True})
                chunks = [chunk async for chunk in stream]
                said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
                assert chunks[-1].usage.completion_tokens > 0
                messages.append({"role": "assistant", "content": said})
            else:
                answer = await client.chat.completions.create(
                    model="tiny", messages=messages, logprobs=True, extra_body={"return_token_ids": True})
                assert len(answer.choices[0].token_ids) == len(answer.choices[0].logprobs.content)
                messages.append(answer.choices[0].message.model_dump())
            messages.append({"role": "user", "content": "b"})
        try:
            await client.chat.completions.create(model="tiny", messages=messages, n=2)
        except openai.BadRequestError as error:
            assert "a turn has one answer" in str(error)
        return 1.0


def impatient(task, base_url, api_key):
    """OpenAI's client gives up waiting and tries again by itself, until the answer is there."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key, timeout=0.3, max_retries=30)
    messages = [{"role": "user", "content": "a"}]
    for turn in range(2):
        answer = client.chat.completions.create(model="tiny", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "b"}]
    return 1.0


async def taskset(task, base_url, api_key):
    """A task of verifiers by an agent of verifiers, whose requests pass through a proxy of its own."""
    import talking
    import verifiers.v1 as vf

    variable = "KEY_" + re.sub("[^0-9]", "_", base_url)
    os.environ[variable] = api_key
    (one,) = (each for each in talking.Texts(vf.TasksetConfig(id="talking")) if each.data.prompt == task["prompt"][0]["content"])
    client = {"type": "eval", "base_url": base_url, "api_key_var": variable}
    agent = vf.Agent(vf.AgentConfig(harness={"id": "talking"}, runtime={"type": "subprocess"}, model="tiny", client=client))
    trace = await agent.run(one)
    assert trace.ok, trace.errors
    return trace.reward
'''
TALKING = '''
import sys
import verifiers.v1 as vf

__all__ = ["Talking", "Texts"]
PROGRAM = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
messages = [{"role": "user", "content": sys.argv[4]}]
for turn in range(3):
    said = client.chat.completions.create(model=sys.argv[3], messages=messages).choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "b"}]
"""


class TalkingConfig(vf.HarnessConfig):
    pass


class Talking(vf.Harness[TalkingConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        _, prompt = self.resolve_prompt(data)
        return await runtime.run_program([sys.executable, "-c", PROGRAM, endpoint, secret, ctx.model, prompt], {})


class Said(vf.Task):
    @vf.reward(weight=1.0)
    async def size(self, trace) -> float:
        return len(trace.nodes) / 8


class Texts(vf.Taskset[Said, vf.TasksetConfig]):
    def load(self):
        for text in ("ab", "c", "d"):
            yield Said(vf.TaskData(prompt=text), vf.TaskConfig())
'''


@pytest.fixture(scope="module")
def files(tmp_path_factory, models) -> tuple[str, str, str]:
    """(model, tokenizer, agents)."""
    assert PYTHON.is_file(), f"no interpreter at {PYTHON}: make test-agents makes it"
    root = tmp_path_factory.mktemp("agents")
    (root / "agents.py").write_text(CODE)
    (root / "talking.py").write_text(TALKING)
    return str(models("qwen3")), str(make_tokenizer(root / "tokenizer")), str(root / "agents.py")


class Slow(Streamed):
    """An engine that takes its time, so that clients give up."""

    def generate(self, requests):
        import time

        time.sleep(0.2)
        yield from super().generate(requests)


def batch_of(mesh, files, agent: str, python: str, kind):
    from fivefold.rollout.packing import pack
    from fivefold.rollout.stats import BatchPlan, gather_stats

    groups, seen, metrics = sample(mesh, files, agent, kind=kind, python=python, memory_mb=8192)
    plan = BatchPlan(1, 1, max_response_tokens=12)
    return groups, seen, pack(groups, gather_stats(groups, mesh.ranks, plan), mesh.ranks, plan), metrics


@pytest.mark.parametrize(("agent", "kind", "turns"), [("plain", Streamed, 3), ("impatient", Slow, 2)])
def test_openai_s_client_samples_turns_that_are_trained_exactly(cluster, files, agent, kind, turns):
    work = partial(batch_of, files=files, agent=agent, python=str(PYTHON), kind=kind)
    ((groups, seen, batch, metrics),) = cluster.run(work, "megatron:d1")
    assert {len(one.turns) for group in groups for one in group.samples} == {turns}
    assert len(seen) == 12 * turns and metrics["endpoint/unread"] == 0
    assert (metrics["endpoint/retries"] > 0) == (agent == "impatient")
    assert_exact(groups, seen, batch)


def test_a_taskset_of_verifiers_is_trained_exactly_with_its_own_reward(cluster, files):
    work = partial(batch_of, files=files, agent="taskset", python=str(PYTHON), kind=Streamed)
    ((groups, seen, batch, metrics),) = cluster.run(work, "megatron:d1")
    assert {len(one.turns) for group in groups for one in group.samples} == {3}
    assert {one.reward for group in groups for one in group.samples} == {6 / 8}
    assert len(seen) == 36 and metrics["endpoint/unread"] == 0
    assert_exact(groups, seen, batch)
