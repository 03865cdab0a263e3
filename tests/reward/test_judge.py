"""A judge that is a process of its own and speaks OpenAI's protocol: its verdicts, and everything that may go wrong."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fivefold.config import ConfigError, RunConfig, dump_yaml
from fivefold.config.scoring import JudgeConfig, RewardConfig
from fivefold.data.tokenizer import train_tokenizer
from fivefold.keys.findings import Findings
from fivefold.reward.choose import check_rewards
from fivefold.reward.judge import JudgeError, _text_of, read_verdict
from fivefold.reward.pool import RewardPool, clean_environment
from fivefold.types import Prompt, Sample
from tests.support.commands import wait_for

KEY = "sk-nobody-may-read-this"
SERVER = """
import http.server, json, sys, threading, time
state = {"requests": [], "now": 0, "most": 0, "seen": {}}
lock, gate = threading.Lock(), threading.Event()

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *arguments): pass
    def answer(self, code, body):
        data = json.dumps(body).encode() if not isinstance(body, bytes) else body
        self.send_response(code); self.send_header("Content-Length", str(len(data))); self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        if self.path == "/open": gate.set()
        self.answer(200, state)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = body["messages"][0]["content"]
        with lock:
            state["now"] += 1
            state["most"] = max(state["most"], state["now"])
            state["requests"].append({"path": self.path, "key": self.headers["Authorization"], **body})
            times = state["seen"][asked] = state["seen"].get(asked, 0) + 1
        if "together" in asked: gate.wait(60)
        if "hang" in asked: time.sleep(60)
        with lock: state["now"] -= 1
        if "busy" in asked and times == 1: return self.answer(429, {"error": "later"})
        if "broken" in asked: return self.answer(500, {"error": "broken"})
        if "unauthorized" in asked: return self.answer(401, {"error": "wrong key " + str(self.headers["Authorization"])})
        if "garbage" in asked: return self.answer(200, b"no json")
        if "cut" in asked: self.close_connection = True; return
        said = "Hm." if "unclear" in asked else "**NO**, yes would be wrong" if "wrong" in asked else "YES"
        if "think" in asked: said = "<think>no, no</think>\\nYes."
        if "score" in asked: said = "Score: 3 at first.\\nScore: 7.5"
        reason = "length" if "unfinished" in asked else "stop"
        if reason == "length": said = "The response says no. Is there no other reading? Let me"
        self.answer(200, {"choices": [{"message": {"role": "assistant", "content": said}, "finish_reason": reason}]})

server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture
def server():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
    process.kill()
    process.wait()


def state(server: str, path: str = "/state") -> dict:
    import urllib.request

    with urllib.request.urlopen(server.removesuffix("/v1") + path, timeout=30) as answer:
        return json.load(answer)


def config(server: str, prompt: str = "{prompt}|{response}|{ground_truth}", **settings) -> RewardConfig:
    of_rewards = {name: settings.pop(name) for name in ("wait_seconds", "functions", "max_failed") if name in settings}
    judge = JudgeConfig(url=[server], model="judge-7b", prompt=prompt, **{"retries": 1, **settings})
    return RewardConfig(**{"functions": {"judge": 2.0}, "workers": 1, **of_rewards}, judge=judge)


def samples(*texts: str) -> list[Sample]:
    return [Sample([1], [0.0], text, "answered", 0) for text in texts]


def scored(reward: RewardConfig, *texts: str, prompt: Prompt | None = None) -> tuple[list[Sample], str | None]:
    pool, scored_samples = RewardPool(reward), samples(*texts)
    prompt = prompt or Prompt(0, [1], "mine", "q", "truth", messages=[{"role": "user", "content": "asked"}])
    error = pool.wait([pool.submit(prompt, sample) for sample in scored_samples])
    pool.close()
    return scored_samples, error


def test_a_verdict_is_the_first_yes_or_no_and_what_has_none_fails_its_sample_only(server):
    texts = ["right", "wrong", "unclear", "think", "busy", "broken", "garbage", "cut", "unauthorized"]
    scored_samples, error = scored(config(server), *texts)
    rewards = dict(zip(texts, scored_samples, strict=True))
    assert {text: sample.reward for text, sample in rewards.items() if not sample.reward_failed} == {
        "right": 2.0, "wrong": 0.0, "think": 2.0, "busy": 2.0,
    }  # fmt: skip
    assert [sample.correct for sample in scored_samples[:2]] == [True, False]
    assert scored_samples[0].reward_parts == {"judge": 1.0}
    assert all(math.isnan(sample.reward) and not sample.correct for sample in scored_samples if sample.reward_failed)
    assert "a verdict says yes or no: got 'Hm.'" in error
    seen = state(server)["seen"]
    # What a server says of the request itself is not asked again.
    assert [seen[f"asked|{text}|truth"] for text in ("busy", "broken", "cut", "unauthorized")] == [2, 2, 2, 1]


def test_an_answer_that_begins_with_its_verdict_may_be_cut_off():
    def cut(text):
        answer = {"choices": [{"message": {"content": text}, "finish_reason": "length"}]}
        return SimpleNamespace(json=lambda: answer, text=text)

    for text in ("Yes", "**No**, since"):
        assert _text_of(cut(text), "s", "yes_no") == text
        with pytest.raises(JudgeError, match="did not finish its verdict"):
            _text_of(cut(text), "s", "score")
    with pytest.raises(JudgeError, match="did not finish its verdict"):
        _text_of(cut("Nothing says yes"), "s", "yes_no")


def test_a_verdict_that_is_cut_off_fails_its_sample(server):
    (right, cut_off), error = scored(config(server), "right", "unfinished")
    assert right.reward == 2.0 and cut_off.reward_failed and math.isnan(cut_off.reward)
    assert "did not finish its verdict: raise reward.judge.max_tokens; got 'The response says no." in error


@pytest.mark.parametrize(
    "text", ["<think>\nIs there no other reading?", " <think>no", "<think>a</think>\n<think>yes. Score: 3"]
)
def test_a_thought_without_an_end_is_no_verdict(text):
    for judge in (JudgeConfig(), JudgeConfig(verdict="score")):
        with pytest.raises(JudgeError, match="a verdict follows its </think>"):
            read_verdict(judge, text)
    assert read_verdict(JudgeConfig(), "<think>no</think> Yes: it has a <think> and an answer.") == 1


def test_the_judge_reads_the_last_question_the_response_and_the_truth_unchanged(server):
    prompt = Prompt(0, [1], "s", "text", "{response}", messages=[
        {"role": "system", "content": "be brief"}, {"role": "user", "content": "first"},
        {"role": "assistant", "content": "so"}, {"role": "user", "content": "{ground_truth} {0.__class__}"},
    ])  # fmt: skip
    scored(config(server, temperature=0.5, max_tokens=7), "it {prompt}", prompt=prompt)
    (request,) = state(server)["requests"]
    assert request["path"] == "/v1/chat/completions"
    assert request["messages"] == [{"role": "user", "content": "{ground_truth} {0.__class__}|it {prompt}|{response}"}]
    assert (request["model"], request["temperature"], request["max_tokens"], request["key"]) == ("judge-7b", 0.5, 7, None)


def test_scores_are_read_by_their_pattern_and_divided_by_the_scale(server):
    scored_samples, _ = scored(config(server, verdict="score"), "score")
    assert scored_samples[0].reward == pytest.approx(2 * 0.75)
    judge = JudgeConfig(verdict="score", scale=5, pattern=r"\[(\d+)\]")
    assert read_verdict(judge, "[1] then [4]") == pytest.approx(0.8)
    for text in ("[6]", "none", "4", "<think>[3]</think> no"):
        with pytest.raises(JudgeError, match="a verdict has a score from 0 to 5"):
            read_verdict(judge, text)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Final Score: 7.5.", 0.75),
        ("Score: 8", 0.8),
        ("**Score:** 8/10", 0.8),
        ("Score: **.5**, low", 0.05),
        ("Score: 3.\nScore: 10.0", 1.0),
    ],
)
def test_the_default_pattern_reads_a_score_in_its_sentence(text, score):
    assert read_verdict(JudgeConfig(verdict="score"), text) == pytest.approx(score)


@pytest.mark.parametrize(
    "text", ["Score: 8,5", "Score: 1.2.3", "Score: -3", "Score: 1,000", "Score: .", "Score: ²", "Score: ٣"]
)
def test_the_default_pattern_reads_no_part_of_a_number(text):
    with pytest.raises(JudgeError, match="a verdict has a score from 0 to 10"):
        read_verdict(JudgeConfig(verdict="score"), text)


def test_as_many_as_allowed_are_asked_at_once_while_others_are_still_sampled(server):
    reward = config(server, concurrency=5, timeout_seconds=600)
    pool, prompt = RewardPool(reward), Prompt(0, [1], "mine", "q", "t")
    scoring = [pool.submit(prompt, sample) for sample in samples(*(f"together {n}" for n in range(12)))]
    wait_for(lambda: state(server)["now"] == 5)
    assert not any(future.done() for future in scoring)
    state(server, "/open")
    assert pool.wait(scoring) is None
    assert state(server)["most"] == 5 and len(state(server)["requests"]) == 12
    pool.close()


def test_a_verdict_that_takes_too_long_fails_and_the_wait_ends_all_that_are_left(server):
    scored_samples, error = scored(config(server, timeout_seconds=0.5), "hang", "right")
    assert [sample.reward_failed for sample in scored_samples] == [True, False]
    assert "no verdict within 0.5 s (reward.judge.timeout_seconds)" in error
    begin = time.monotonic()
    scored_samples, error = scored(config(server, concurrency=1, wait_seconds=1.0), *["hang"] * 20)
    assert all(sample.reward_failed for sample in scored_samples) and "reward.wait_seconds" in error
    assert time.monotonic() - begin < 50, "one of them alone hangs for a minute"


def test_verdicts_and_functions_make_one_reward_and_either_can_fail(server, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def count(response):\n    if 'raise' in response: raise RuntimeError('as asked')\n    return len(response)\n"
    )
    reward = config(server, functions={"judge": 1.0, f"{path}:count": 0.25, "repetition": -0.5})
    scored_samples, error = scored(reward, "four", "wrong", "raise", "unclear")
    assert [sample.reward for sample in scored_samples[:2]] == [1 + 0.25 * 4, 0.25 * 5]
    assert (
        scored_samples[0].reward_parts == {"judge": 1.0, f"{path}:count": 4.0, "repetition": 0.0}
        and scored_samples[0].correct
    )
    assert [sample.reward_failed for sample in scored_samples] == [False, False, True, True] and "as asked" in error


def test_servers_are_asked_in_turn_and_one_that_is_gone_costs_an_attempt_only(server):
    reward = config(server)
    reward = replace(reward, judge=replace(reward.judge, url=["http://127.0.0.1:9/v1", server]))
    scored_samples, error = scored(reward, *(f"right {n}" for n in range(6)))
    assert error is None and [sample.reward for sample in scored_samples] == [2.0] * 6


ASKING = """
import asyncio, json, urllib.request

async def ask(solution_str, reward_router_address, reward_model_tokenizer):
    ids = reward_model_tokenizer.encode(solution_str, add_special_tokens=False)
    body = json.dumps({"messages": [{"content": f"{len(ids)} score"}]}).encode()
    request = urllib.request.Request(f"http://{reward_router_address}/v1/chat/completions", body)
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request)))
    score = len(ids) + float(answer["choices"][0]["message"]["content"].rpartition(" ")[2])
    return {"score": score + 0.25 * reward_router_address.startswith("localhost:")}
"""


def test_a_function_asks_the_judge_s_servers_by_itself(server, tmp_path):
    """An asynchronous one, as verl's: the servers in turn, and the tokenizer of their model."""
    path = tmp_path / "asking.py"
    path.write_text(ASKING)
    train_tokenizer("char", ["1+=user"], tmp_path / "judge")
    judge = JudgeConfig(
        url=[server, server.replace("127.0.0.1", "localhost")], model=str(tmp_path / "judge"), functions_ask=True
    )
    scored_samples, error = scored(
        RewardConfig(functions={f"{path}:ask": 1.0}, workers=1, timeout_seconds=120, judge=judge), "1+1=", "11"
    )
    assert error is None and [sample.reward for sample in scored_samples] == [4 + 7.5, 2 + 7.5 + 0.25]
    questions = [request["messages"][0]["content"] for request in state(server)["requests"]]
    assert questions == ["4 score", "2 score"]


def asks(response, reward_router_address): ...


def test_a_judge_of_functions_alone_is_asked_as_they_like():
    for judge, says in (
        ({"backend": "sglang:d2t1"}, None),
        ({"backend": "megatron:d2"}, "layout of vllm or sglang with d and t"),
    ):
        findings = Findings()
        config = RewardConfig(
            functions={"tests/reward/test_judge.py:asks": 1.0},
            judge=JudgeConfig(model="m", functions_ask=True, scale=5, **judge),
        )
        check_rewards(findings, config)
        assert [error for error in findings.errors if says is None or says not in error] == []
        assert bool(findings.errors) == (says is not None)
        assert ("judge.scale", "functions ask by themselves") in findings.ignored
        assert config.judge_layout is not None
    findings = Findings()
    check_rewards(
        findings,
        RewardConfig(functions={"math": 1.0}, judge=JudgeConfig(url=["http://h/v1"], model="m", functions_ask=True)),
    )
    assert any("judge.functions_ask needs a function of yours" in error for error in findings.errors)


def test_the_key_reaches_the_judge_alone(server, monkeypatch, capfd):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    reward = config(server, api_key_variable="JUDGE_KEY")
    _, error = scored(reward, "unauthorized")
    assert state(server)["requests"][0]["key"] == f"Bearer {KEY}"
    assert "answers 401" in error and "***" in error and KEY not in error
    assert KEY not in repr(clean_environment(reward.environment))
    written = {"functions": {"judge": 1.0}, "judge": {"url": [server], "model": "m", "api_key_variable": "JUDGE_KEY"}}
    assert KEY not in dump_yaml(RunConfig.of({"model": {"path": "m"}, "data": {"train": ["x"]}, "reward": written}))
    out, err = capfd.readouterr()
    assert KEY not in out + err
    findings = Findings()
    monkeypatch.delenv("JUDGE_KEY")
    check_rewards(findings, reward)
    assert any("judge.api_key_variable names a variable that is set: got 'JUDGE_KEY'" in text for text in findings.errors)


def test_a_judge_that_does_not_answer_ends_the_run_before_it_starts(server):
    trial = (Prompt(0, [1], "mine", "q", "t"), *samples("t"))
    pool = RewardPool(config("http://127.0.0.1:9/v1", retries=0))
    with pytest.raises(ValueError, match=r"reward\.judge: no verdict: http://127\.0\.0\.1:9/v1: ConnectError"):
        pool.start([trial])
    pool.close()
    pool = RewardPool(config(server))
    assert pool.start([trial]) is None
    pool.close()


def test_nothing_is_left_of_a_judge_when_the_pool_is_closed(server):
    before = threading.active_count()
    pool = RewardPool(config(server))
    scoring = pool.submit(Prompt(0, [1], "mine", "q", "t"), *samples("hang"))
    wait_for(lambda: state(server)["now"] == 1)
    pool.close()
    assert scoring.cancelled() and threading.active_count() == before


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        ({"model": "m"}, "judge.url must name the judge's servers"),
        ({"url": ["host:8000"], "model": "m"}, "judge.url must be an address as http://host:8000/v1: got 'host:8000'"),
        ({"url": ["http://user:secret@host/v1"], "model": "m"}, "judge.url must be an address"),
        ({"url": ["http://host/v1"]}, "judge.model must name the judge's model"),
        ({"url": ["http://host/v1"], "model": "m", "backend": "vllm:d1"}, "judge.url and judge.backend are two places"),
        ({"backend": "sglang:d1", "model": "m"}, "judge.backend must be a layout of vllm with d and t: got sglang:d1"),
        ({"backend": "vllm:d1p2", "model": "m"}, "judge.backend must be a layout of vllm with d and t: got vllm:d1p2"),
        ({"url": ["http://host/v1"], "model": "m", "prompt": "right?"}, "judge.prompt must hold {response}"),
        ({"url": ["http://host/v1"], "model": "m", "pattern": "("}, "judge.pattern must be a regular expression"),
        ({"url": ["http://host/v1"], "model": "m", "pattern": "a"}, "judge.pattern must have one group"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_refused(judge, says):
    findings = Findings()
    check_rewards(findings, RewardConfig(functions={"judge": 1.0}, judge=JudgeConfig(**judge)))
    assert any(says in error for error in findings.errors), findings.errors


def test_a_judge_that_no_one_asks_is_said_to_be_without_effect():
    findings = Findings()
    check_rewards(findings, RewardConfig(functions={"math": 1.0}, judge=JudgeConfig(model="m")))
    assert ("judge", "no reward is named judge") in findings.ignored
    findings = Findings()
    judge = JudgeConfig(url=["http://host/v1"], model="m", memory_fraction=0.5, scale=5)
    check_rewards(findings, RewardConfig(functions={"judge": 1.0}, judge=judge))
    assert not findings.errors and [key for key, _ in findings.ignored] == ["judge.memory_fraction", "judge.scale"]
    with pytest.raises(ConfigError, match="api_key_variable must be the name of a variable"):
        RunConfig.of({"model": {"path": "m"}, "data": {"train": ["x"]}, "reward": {"judge": {"api_key_variable": "sk-1 2"}}})
