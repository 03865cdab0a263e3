"""Several turns in other systems' runs: their bounds count what ours count, and the rest is refused with its reason."""

from __future__ import annotations

import pytest

from fivefold.data.dialog import Dialog
from tests.support.dialects import config, translated

MULTI = "actor_rollout_ref.rollout.multi_turn."
VERL = [
    "data.train_files=/d/a.parquet", "actor_rollout_ref.model.path=m", "actor_rollout_ref.rollout.name=vllm",
    "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo", "data.max_prompt_length=100", "data.max_response_length=50",
]  # fmt: skip
TOOLS = [*VERL, f"{MULTI}enable=True", f"{MULTI}tool_config_path=tools.yaml"]
SKYRL = [
    "data.train_data=['/d/a.parquet']", "trainer.policy.model.path=m", "trainer.train_batch_size=16",
    "trainer.policy_mini_batch_size=16", "trainer.max_prompt_length=100", "generator.sampling_params.max_generate_length=50",
]  # fmt: skip
SEARCH = [*SKYRL, "environment.env_class=search", "generator.max_turns=4", "generator.max_input_length=300"]


def turns_of_verl(assistant: int | None, user: int | None) -> int:
    """Turns of the model in the state machine of verl's tool_agent_loop.py, if every turn calls a tool."""
    assistant_turns = user_turns = 0
    while assistant_turns < 50:
        assistant_turns += 1
        if assistant and assistant_turns >= assistant:
            break
        if user and user_turns >= user:
            break
        user_turns += 1
    return assistant_turns


@pytest.mark.parametrize("assistant", [None, 0, 1, 3, 8])
@pytest.mark.parametrize("user", [None, 0, 1, 3, 8])
def test_verls_two_bounds_of_turns_are_one_that_counts_the_models_turns(assistant, user):
    words = [f"{MULTI}{name}={count}" for name, count in (("max_assistant_turns", assistant), ("max_user_turns", user))]
    environment = config("verl", *TOOLS, *(word.replace("None", "null") for word in words)).environment
    assert min(environment.max_turns, 50) == turns_of_verl(assistant, user)
    # Without a bound the room ends a trajectory, not a number of turns.
    assert assistant or user or environment.max_turns == 10_000


class Characters:
    """A chat template whose tokens are characters."""

    def encode(self, text: str) -> list[int]:
        return list(map(ord, text))

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize("side", [None, "left", "middle", "right"])
@pytest.mark.parametrize("limit", [None, 4, 5])
def test_an_answer_of_a_tool_is_cut_as_verl_cuts_it_in_characters(side, limit):
    words = [f"{MULTI}{name}={value}" for name, value in
             (("max_tool_response_length", limit), ("tool_response_truncate_side", side)) if value is not None]  # fmt: skip
    environment = config("verl", *TOOLS, *words).environment
    text = "".join(chr(0x4E00 + number) for number in range(limit or 600))
    length = limit or 256
    longer = text + text[::-1]
    # tool_agent_loop.py, with our mark in the place of verl's.
    if side == "left":
        expected = "..." + longer[-length:]
    elif side == "right":
        expected = longer[:length] + "..."
    else:
        expected = longer[: length // 2] + "..." + longer[-(length // 2) :]
    dialog = Dialog(Characters())  # type: ignore[arg-type]
    limits = 10**6, environment.cut_observations, environment.max_observation_characters
    assert dialog.cut(longer, *limits) == (expected, True)
    assert dialog.cut(text[:length], *limits) == (text[:length], False)
    assert environment.max_observation_tokens == 150


def test_a_verl_run_with_tools_has_its_files_bounds_and_servers():
    run = config("verl", *TOOLS, f"{MULTI}function_tool_path=~/tools.py")
    assert run.environment.tools == ["verl:tools.yaml", "verl:/home/me/tools.py"]
    # A turn may be as long as the response, and prompt and response bound the trajectory (vllm_async_server.py).
    assert (run.data.max_response_tokens, run.data.max_total_tokens) == (50, 150)
    assert (run.environment.max_parallel_calls, run.environment.history) == (1, "append")
    # The default layout has t2, of which only servers take an environment.
    assert (run.engine.mode, str(run.engine.layout)) == ("server", "vllm:d4t2p1")
    assert config("verl", *TOOLS, "actor_rollout_ref.rollout.name=hf").engine.backend == "transformers"


@pytest.mark.parametrize(
    "words",
    [
        [f"{MULTI}enable=False"],
        [f"{MULTI}enable=True"],
        ["actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent", f"{MULTI}max_assistant_turns=3"],
        [f"{MULTI}format=hermes", f"{MULTI}tokenization_sanity_check_mode=strict", f"{MULTI}tool_config_path=null"],
    ],
)
def test_a_verl_run_without_tools_has_one_turn(words):
    assert config("verl", *VERL, *words) == config("verl", *VERL)


def test_verls_agent_loop_says_the_same_as_its_switch():
    words = [f"{MULTI}tool_config_path=tools.yaml", "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"]
    assert config("verl", *VERL, *words) == config("verl", *TOOLS)
    assert config("siirl", *TOOLS).environment == config("verl", *TOOLS).environment


def test_skyrls_environments_have_its_bounds_and_options():
    run = config("skyrl", *SEARCH, "environment.skyrl_gym.search.topk=5")
    environment = run.environment
    assert (environment.class_, environment.max_turns, environment.history) == ("skyrl_gym:search", 4, "append")
    assert environment.options == {
        "topk": 5,
        "search_url": "http://127.0.0.1:8000/retrieve",
        "log_requests": False,
        "timeout": 30,
    }
    # A turn begins with at most max_input_length tokens.
    assert (run.data.max_response_tokens, run.data.max_total_tokens, environment.max_observation_tokens) == (
        50,
        350,
        350,
    )
    assert run.reward.functions == {"environment": 1.0}
    assert run.engine.mode == "server"
    again = config("skyrl", *SEARCH, "generator.step_wise_trajectories=true", "trainer.algorithm.use_kl_loss=false")
    assert again.environment.history == "template"


@pytest.mark.parametrize("words", [["generator.max_turns=3"], ["generator.use_conversation_multi_turn=false"]])
def test_an_environment_of_skyrl_that_ends_after_a_turn_is_a_reward(words):
    assert config("skyrl", *SKYRL, "environment.env_class=gsm8k", *words) == config("skyrl", *SKYRL)


@pytest.mark.parametrize(
    ("system", "words", "refusal"),
    [
        ("verl", [*TOOLS, f"{MULTI}interaction_config_path=a.yaml"], "an interaction, which answers turns: environment.class"),
        ("verl", [*VERL, f"{MULTI}tool_config_path=a.yaml"], "tools that the model reads and that no turn can call"),
        ("verl", [*VERL, "data.function_tool_path=a.py"], "tools that the model reads and that no turn can call"),
        ("verl", [*VERL, "actor_rollout_ref.rollout.agent.default_agent_loop=react"], "the agent loop react: known here are"),
        ("verl", [*VERL, "actor_rollout_ref.rollout.agent.agent_loop_config_path=a.yaml"], "an agent loop of your own"),
        ("verl", [*VERL, "actor_rollout_ref.rollout.agent.agent_loop_manager_class=a.B"], "an agent loop of your own"),
        ("verl", [*TOOLS, f"{MULTI}tool_response_truncate_side=both"], "the side both: known here are left, middle, right"),
        ("skyrl", [*SEARCH, "generator.use_conversation_multi_turn=false"], "turns that are joined in one message"),
        ("skyrl", [*SEARCH, "generator.batched=true"], "turns of a batch, of which SkyRL takes the first only"),
        ("skyrl", [*SEARCH, "generator.append_eos_token_after_stop_str_in_multi_turn=false"], "no end token follows"),
        ("skyrl", [*SEARCH, "generator.zero_reward_on_non_stop=true"], "no reward for responses that were cut off"),
        ("skyrl", [*SEARCH, "generator.step_wise_trajectories=true"], "a mean of the KL over turns"),
        ("skyrl", [*SEARCH, "generator.step_wise_trajectories=true", "trainer.algorithm.loss_reduction=sequence_mean"],
         "a mean of the loss over turns"),
        ("skyrl", [*SEARCH, 'generator.eval_sampling_params.stop=["</a>"]'], "stop strings for evaluation only"),
        ("skyrl", [*SKYRL, "environment.env_class=openenv"], "the environment openenv: known here are gsm8k"),
        ("skyrl", [*SKYRL, "environment.env_class=gsm8k_multi_turn", "generator.step_wise_trajectories=true"], "counts the last only"),
        ("areal", ["rollout.agent.mode=online"], "learning from sessions of users: environment.agent takes an agent"),
        ("areal", ["rollout.openai.mode=online"], "learning from sessions of users: environment.agent takes an agent"),
        ("areal", ["workflow=areal.workflow.openai.math_agent.MathAgent"], "environment.agent takes a function that calls it"),
        ("areal", ["export_style=concat"], "environment.history says what a turn reads"),
        ("areal", ["tir.max_turns=2"], "environment.tools takes functions"),
        ("roll", ["custom_envs.A.env_type=frozen_lake"], "environment.class takes a class with reset and step"),
        ("roll", ["train_env_manager.num_env_groups=128"], "data.train has a row for each task"),
        ("roll", ["max_actions_per_traj=5"], "environment.max_turns counts turns"),
        ("roll", ["step_reward_gamma=0.95"], "algorithm.name: gigpo"),
    ],
)  # fmt: skip
def test_turns_that_are_others_are_refused_with_their_reason_and_cure(system, words, refusal):
    refusals = translated(system, *words).refusals
    assert any(refusal in text for text in refusals), refusals


def test_evaluation_with_the_stop_strings_of_training_is_taken():
    stop = '["</search>"]'
    words = [f"generator.sampling_params.stop={stop}", f"generator.eval_sampling_params.stop={stop}"]
    assert config("skyrl", *SEARCH, *words).engine.sampling.stop == ["</search>"]
