"""Log-probs that vLLM's workers collect, bit by bit against vLLM's own; wrong rows and positions are seen."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fivefold.engines.vllm.logprobs import LogprobCollector, logprobs_of
from fivefold.engines.vllm.parameters import TAG
from fivefold.errors import RunError
from tests.engines.test_vllm_engine import sized, vllm_engine  # noqa: F401
from tests.support.engines import OPTIONS, PROMPTS, SAMPLING, complete, requests
from tests.support.tiny_models import load_tensors

LONG = [7 + i % 90 for i in range(120)]
"""Close to the end of a cache block of 128 tokens, which the response needs a second one of."""
CASES = {
    "plain": {},
    "preempted": {"num_gpu_blocks_override": 9, "enable_prefix_caching": False},
    "speculative": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 2,
            "prompt_lookup_min": 1,
        }
    },
    "chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 64},
}


def vllm_s_own(engine, asked):
    """Tokens and log-probs of each request from vLLM's objects, which it makes for requests without a tag."""
    from vllm import SamplingParams

    from fivefold.engines.vllm.parameters import sampling_arguments, seed_of

    inner, drawn = engine._llm.llm_engine, {}
    for request in asked:
        parameters = SamplingParams(**sampling_arguments(request.sampling, engine._ends))
        parameters.seed = seed_of(request.seed)
        inner.add_request(str(request.id), {"prompt_token_ids": request.prompt_ids}, parameters)
    while inner.has_unfinished_requests():
        for output in inner.step():
            (one,) = output.outputs
            if output.finished:
                drawn[int(output.request_id)] = list(one.token_ids), list(one.logprobs.logprobs)
    return [drawn[request.id] for request in asked]


def both_ways(mesh, directory, options, samplings):
    """[(collected, vLLM's own)] for each sampling, how often vLLM preempted, and its steps."""
    from vllm.v1.core.sched.scheduler import Scheduler

    counts, preempt = {"preempted": 0, "steps": 0}, Scheduler._preempt_request

    def noted(*arguments, **named):
        counts["preempted"] += 1
        return preempt(*arguments, **named)

    engine = vllm_engine(mesh, directory, "d1", options)
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    step = engine._llm.llm_engine.step

    def stepped():
        counts["steps"] += 1
        return step()

    engine._llm.llm_engine.step = stepped
    Scheduler._preempt_request, pairs = noted, []
    try:
        for sampling in samplings:
            asked = requests(6, sampling, [*PROMPTS, LONG])
            collected = [(one.token_ids, one.logprobs) for one in complete(engine, asked)]
            pairs.append((collected, vllm_s_own(engine, asked)))
    finally:
        Scheduler._preempt_request = preempt
    return pairs, counts


@pytest.mark.vllm
@pytest.mark.parametrize("case", CASES)
def test_collected_log_probs_have_the_bits_of_vllm_s_own(cluster, sized, case):  # noqa: F811
    """With every option of sampling, preemption, tokens that are guessed ahead, and prompts that are read in pieces."""
    greedy = replace(SAMPLING, temperature=0.0)
    # vLLM does not repeat what it draws with guessed tokens or split prompts on a CPU.
    drawn = (
        []
        if case in ("speculative", "chunked")
        else [SAMPLING, *(replace(SAMPLING, **options) for options in OPTIONS.values())]
    )
    samplings = [greedy, *drawn]
    ((pairs, counts),) = cluster.run(both_ways, "megatron:d1", sized("qwen3"), CASES[case], samplings)
    for sampling, (collected, of_vllm) in zip(samplings, pairs, strict=True):
        assert collected == of_vllm, sampling
    tokens = sum(len(token_ids) for collected, _ in pairs for token_ids, _ in collected)
    assert tokens > 500 * len(samplings)
    assert (counts["preempted"] > 10) == (case == "preempted")
    if case == "speculative":
        assert counts["steps"] < 2 * 24, "no guess was taken"


def worker_of(engine):
    return engine._llm.llm_engine.model_executor.driver_worker.worker


def aborted(mesh, directory):
    engine = vllm_engine(mesh, directory, "d1")
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    asked = [*requests(3), replace(requests(1)[0], id=99, sampling=replace(SAMPLING, max_tokens=5))]
    undisturbed, cut = complete(engine, asked), []
    for completion in engine.generate(asked):
        cut.append(completion)
        engine.abort()
    return undisturbed, sorted(cut, key=lambda one: one.request_id), len(worker_of(engine)._requests)


@pytest.mark.vllm
def test_an_aborted_response_has_the_log_probs_of_its_own_tokens(cluster, sized):  # noqa: F811
    ((undisturbed, cut, left),) = cluster.run(aborted, "megatron:d1", sized("qwen3"))
    assert sum(one.finish_reason == "abort" for one in cut) > 6
    for one, same in zip(cut, undisturbed, strict=True):
        assert 0 < len(one.token_ids) == len(one.logprobs)
        assert one.token_ids == same.token_ids[: len(one.token_ids)]
        assert one.logprobs == same.logprobs[: len(one.logprobs)]
    assert left == 0


def with_a_fault(mesh, directory, fault):
    """What a run's reader sees of a fault in the adapter: an error, or log-probs that are not vLLM's own."""
    options = CASES["preempted"] if fault == "a preempted request begins again" else {}
    engine = vllm_engine(mesh, directory, "d1", options)
    engine.update_weights(iter(load_tensors(directory).items()), 0)
    worker = worker_of(engine)
    collect = worker._collect

    def faulty(output, scheduled, named, drawn):
        if drawn is not None and fault in ROWS:
            drawn = ROWS[fault](drawn)
        elif fault == "off by one position":
            cached = scheduled.scheduled_cached_reqs
            cached.num_output_tokens = [max(0, count - 1) for count in cached.num_output_tokens]
        elif fault == "a preempted request begins again":
            cached = scheduled.scheduled_cached_reqs
            resumed = cached.resumed_req_ids
            cached.num_output_tokens = [
                0 if name in resumed else count for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=True)
            ]
        return collect(output, scheduled, named, drawn)

    worker._collect = faulty
    asked = requests(6, SAMPLING, [*PROMPTS, LONG])
    try:
        collected = [(one.token_ids, one.logprobs) for one in complete(engine, asked)]
    except RunError as error:
        return str(error)
    worker._collect = collect
    pairs = zip(collected, vllm_s_own(engine, asked), strict=True)
    return sum(mine != other for (_, mine), (_, other) in pairs)


ROWS = {
    "a neighbor's row": lambda drawn: drawn.roll(1, 1),
    "a neighbor's log-probs alone": lambda drawn: torch.stack([drawn[0], drawn[1].roll(1)]),
}


@pytest.mark.vllm
@pytest.mark.parametrize("fault", [*ROWS, "off by one position", "a preempted request begins again"])
def test_a_wrong_row_position_or_preemption_is_seen(cluster, sized, fault):  # noqa: F811
    (seen,) = cluster.run(with_a_fault, "megatron:d1", sized("qwen3"), fault)
    if fault == "a neighbor's log-probs alone":
        assert seen > 25, "of 30 responses"
    else:
        assert re.match(
            r"vLLM's log-probs of request \d+ belong to other tokens than its response, from token \d", str(seen)
        )


# --- without an engine: what only GPUs do ----------------------------------------------------------------------------


class Runner:
    """A model runner that hands over what a test gives it, as copies from a GPU that are under way."""

    def __init__(self) -> None:
        self.output = None

    def execute_model(self, scheduled):
        return None

    def sample_tokens(self, grammar):
        output = self.output
        return SimpleNamespace(get_output=lambda: output)


class Worker(LogprobCollector):
    """`by_us`: our sampler hands over the log-probs of all requests, and not vLLM."""

    def __init__(self, by_us: bool = False) -> None:
        self.model_runner, self.by_us, self.taken, self.most = Runner(), by_us, [], 0
        for _ in range(2):
            self.collect_logprobs(SimpleNamespace(take=lambda: self.taken.pop()))

    def collected(self, *names):
        """Tokens and log-probs of these requests."""
        pairs = self.give_logprobs(names)
        return [(np.frombuffer(one, np.int32).tolist(), np.frombuffer(other, np.float32).tolist()) for one, other in pairs]

    def step(self, drawn, *, new=(), cached=None, finished=()):
        """`drawn`: request -> its [(token, log-prob)] of the step; returns the function that fetches them."""
        asked = None if self.by_us else 0
        named = [
            SimpleNamespace(
                req_id=name,
                sampling_params=SimpleNamespace(
                    extra_args=None if name == "theirs" else {TAG: name.upper()}, logprobs=asked
                ),
                prompt_token_ids=[1, 2],
                prefill_token_ids=[1, 2, *sampled],
            )
            for name, sampled in dict(new).items()
        ]
        cached = cached or {}
        scheduled = SimpleNamespace(
            scheduled_new_reqs=named,
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_output_tokens=list(cached.values())),
            finished_req_ids=set(finished),
        )
        pairs, starts = [pair for row in drawn.values() for pair in row], [0]
        for row in drawn.values():
            starts.append(starts[-1] + len(row))
        lists = SimpleNamespace(
            logprob_token_ids=np.array([[token] for token, _ in pairs], dtype=np.int32).reshape(-1, 1),
            logprobs=np.array([[logprob] for _, logprob in pairs], dtype=np.float32).reshape(-1, 1),
            cu_num_generated_tokens=starts,
        )
        self.model_runner.output = SimpleNamespace(
            req_id_to_index={name: row for row, name in enumerate(drawn)},
            sampled_token_ids=[[token for token, _ in row] for row in drawn.values()],
            logprobs=None if self.by_us else lists,
        )
        # vLLM discards the tokens of rows that have none here.
        rows = [row[0] if row else (999, -9.0) for row in drawn.values()]
        numbers = np.array([token for token, _ in rows], np.int32), np.array([logprob for _, logprob in rows], np.float32)
        self.taken = [torch.from_numpy(np.stack([numbers[0], numbers[1].view(np.int32)])) if self.by_us else None]
        self.most = max(self.most, len(self._steps._drawn))
        self.model_runner.execute_model(scheduled)
        return self.model_runner.sample_tokens(None).get_output


@pytest.mark.parametrize("by_us", [False, True])
def test_a_token_that_is_drawn_again_after_new_weights_replaces_the_first_draw(by_us):
    """vLLM discards the token in flight where a server's weights change, and draws it again."""
    worker = Worker(by_us)
    worker.step({"a": [(4, -1.0)]}, new={"a": []})()
    in_flight = worker.step({"a": [(5, -2.0)]}, cached={"a": 1})
    in_flight()
    worker.step({"a": [(5, -3.0)]}, cached={"a": 1})()
    assert worker.collected("A") == [([4, 5], [-1.0, -3.0])]


def test_a_request_preempted_in_the_second_runner_keeps_what_it_has_drawn():
    worker = Worker()
    worker.step({"a": [(4, -1.0)], "b": [(8, -0.5)]}, new={"a": [], "b": []})()
    worker.step({"a": [(5, -2.0)]}, cached={"a": 1})()
    worker.step({"b": [(9, -0.25)], "a": [(6, -3.0)]}, cached={"a": 2}, new={"b": [8]})()
    assert worker.collected("B", "A") == [([8, 9], [-0.5, -0.25]), ([4, 5, 6], [-1.0, -2.0, -3.0])]


@pytest.mark.parametrize("by_us", [False, True])
def test_log_probs_are_those_of_their_step_though_the_next_has_begun(by_us):
    """vLLM may draw several tokens of a request in a step, our sampler does not."""
    worker = Worker(by_us)
    begun = {"a": [(4, -1.0)] if by_us else [(4, -1.0), (5, -2.0)], "b": []}
    first = worker.step(begun, new={"a": [], "b": []})
    second = worker.step({"b": [(8, -0.5)], "a": [(6, -3.0)]}, cached={"b": 0, "a": len(begun["a"])})
    first(), second()
    wanted = [([4, 6], [-1.0, -3.0]) if by_us else ([4, 5, 6], [-1.0, -2.0, -3.0]), ([8], [-0.5])]
    assert worker.collected("A", "B") == wanted


def test_requests_of_other_clients_get_vllm_s_own_objects():
    worker = Worker()
    output = worker.step({"a": [(4, -1.0)], "theirs": [(5, -2.0)]}, new={"a": [], "theirs": []})()
    assert output.logprobs is not None
    assert worker.step({"a": [(6, -3.0)]}, cached={"a": 1})().logprobs is None
    assert worker.collected("A", "THEIRS") == [([4, 6], [-1.0, -3.0]), ([], [])]


def random_steps(worker, seed: int) -> dict[str, list[tuple[int, float]]]:
    """Steps as a scheduler makes them, most of them like the one before; returns what each request has drawn."""
    draw = random.Random(seed)
    drawn: dict[str, list[tuple[int, float]]] = {}
    running: list[str] = []
    finished: list[str] = []
    for step in range(400):
        new = []
        if step == 0 or draw.random() < 0.03:
            new = [f"a{len(drawn) + number}" for number in range(draw.randrange(1, 4))]
            drawn |= {name: [] for name in new}
        taken_back = draw.choice(running) if running and draw.random() < 0.03 else None
        if taken_back:
            # A draw in flight is discarded where weights change.
            drawn[taken_back] = drawn[taken_back][:-1]
        cached = {name: len(drawn[name]) for name in running}
        running += new
        rows = draw.sample(running, len(running)) if draw.random() < 0.03 else running
        without = draw.choice(rows) if draw.random() < 0.03 else None
        tokens = {name: [] if name == without else [(draw.randrange(9999), float(draw.randrange(-900, 0)))] for name in rows}
        for name, pairs in tokens.items():
            drawn[name] += pairs
        worker.step(tokens, new=dict.fromkeys(new, ()), cached=cached, finished=finished)()
        finished = [name for name in running if draw.random() < 0.004 and len(running) > 1][:1]
        running = [name for name in running if name not in finished]
        if draw.random() < 0.02:
            gone = draw.choice([name for name in drawn if name not in running] or [None])
            if gone is not None and drawn[gone]:
                assert worker.collected(gone.upper()) == [tuple(map(list, zip(*drawn.pop(gone), strict=True)))]
                drawn[gone] = []
    return {name: drawn[name] for name in running}


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_are_divided_at_once_give_each_request_what_it_has_drawn(seed):
    worker = Worker(by_us=True)
    for name, pairs in random_steps(worker, seed).items():
        assert worker.collected(name.upper()) == [([token for token, _ in pairs], [logprob for _, logprob in pairs])]
    assert worker.most > 1, "no step was like the one before"


def test_log_probs_that_no_client_takes_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("fivefold.engines.vllm.logprobs._MOST_UNTAKEN", 10)
    worker = Worker()
    for number in range(100):
        worker.step({f"a{number}": [(4, -1.0)]}, new={f"a{number}": []}, finished=[f"a{number - 1}"])()
    assert len(worker._requests) == 10
    assert worker.collected("A99") == [([4], [-1.0])]


def test_a_response_longer_than_its_log_probs_is_refused():
    def drawn(tokens, logprobs):
        return np.array(tokens, np.int32).tobytes(), np.array(logprobs, np.float32).tobytes()

    assert logprobs_of("7", [4], [drawn([], []), drawn([4, 5], [-1.0, -2.0])]).tolist() == [-1.0]
    with pytest.raises(RunError, match="of request 7 belong to other tokens than its response, from token 1 of 2 on"):
        logprobs_of("7", [4, 5], [drawn([4], [-1.0])])
