"""A judge that the run starts itself: a real server of vLLM, asked over OpenAI's protocol, and gone with the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.engines.test_vllm_engine import SIZES
from tests.support.tiny_models import make_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    from fivefold.data.tokenizer import train_tokenizer

    directory = make_model("qwen3_tied", tmp_path_factory.mktemp("model") / "judge", **SIZES)
    train_tokenizer("char", ["0123456789abcdefghijklmnopqrstuvwxyz ="], directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def judged(mesh, directory: Path, run_dir: Path):
    """(reward, what the server itself says to the same words, processes that are left) of a judge that can say 7 only."""
    import httpx2 as httpx
    import torch

    from fivefold.build_engine import start_judges
    from fivefold.config import RunConfig
    from fivefold.data.tokenizer import load_tokenizer
    from fivefold.reward.pool import RewardPool
    from fivefold.types import Prompt, Sample

    (seven,) = load_tokenizer(str(directory)).encode("7", add_special_tokens=False)
    # Twice as likely as anything that the model could say by itself; it ends by itself, before its limit of tokens.
    only = {"logit_bias": {str(seven): 100}, "top_p": 0.9, "stop": ["777"], "include_stop_str_in_output": True}
    judge = {
        "model": str(directory), "backend": "vllm:d2t1", "verdict": "score", "pattern": r"(\d)", "scale": 8, "max_tokens": 4,
        "prompt": "{prompt}={response}", "max_model_len": 64, "timeout_seconds": 600, "request": only,
    }  # fmt: skip
    config = RunConfig.of(
        {
            "model": {"path": str(directory)},
            "data": {"train": ["x.jsonl"]},
            "reward": {"functions": {"judge": 2.0}, "judge": judge},
            "trainer": {"device": "cpu", "run_dir": str(run_dir)},
        }
    )
    started, urls = start_judges(config, directory, mesh.ranks, torch.device("cpu"))
    family = [process for server in started for process in server._family()]
    pool = RewardPool(replace(config.reward, judge=replace(config.reward.judge, url=urls)), directory)
    samples = [Sample([1], [0.0], str(number), "answered", 0) for number in range(4)]
    prompt = Prompt(0, [1], "s", "1", "", messages=[{"role": "user", "content": "1 1"}])
    error = pool.wait([pool.submit(prompt, sample) for sample in samples])
    verdicts = []
    for url in urls:
        body = {
            "model": str(directory),
            "messages": [{"role": "user", "content": "1 1=0"}],
            "temperature": 0.0,
            "max_tokens": 4,
        }
        answer = httpx.post(f"{url}/chat/completions", json={**only, **body}, timeout=600)
        verdicts.append(json.loads(answer.text)["choices"][0]["message"]["content"])
    pool.close()
    for server in started:
        server.close()
    left = [process.pid for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    logs = sorted(path.name for path in (run_dir / "logs").iterdir())
    return error, [sample.reward for sample in samples], verdicts, urls, left, logs


def test_a_judge_s_servers_are_started_asked_and_ended(cluster, model, tmp_path):
    ((error, rewards, verdicts, urls, left, logs),) = cluster.run(judged, "megatron:d1", model, tmp_path, seconds=900)
    assert error is None and len(urls) == 2
    # 2 x 7/8, and that is what each of the servers says when it is asked directly.
    assert rewards == [1.75] * 4 and verdicts == ["777", "777"]
    assert left == [] and logs == ["judge-0.log", "judge-1.log"]
