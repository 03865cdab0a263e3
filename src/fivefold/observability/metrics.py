"""Table of every metric that a run writes, with one sentence on each: the text of docs/metrics.md and the report's
tooltips."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from fivefold.algo.surrogates import SURROGATES
from fivefold.algo.terms import TERMS
from fivefold.algo.terms.process_reward import ProcessReward
from fivefold.config.roles import LEARNERS
from fivefold.reward.rules import BUILT_IN
from fivefold.types import BREAKS, ENDS


@dataclass(frozen=True)
class Metric:
    """One metric of metrics.jsonl."""

    name: str
    """Name in metrics.jsonl; the run fills in `<...>`, see PLACEHOLDERS."""
    unit: str
    meaning: str
    label: str = ""
    """Name in the console's line of a step and in the report, for a model other than the policy; empty if not shown."""


@dataclass(frozen=True)
class Placeholder:
    """Variable part of a metric's name, such as `<tool>`, and the values that a run writes there."""

    pattern: str
    stands_for: str


PLACEHOLDERS = {
    # A strict pattern, so that a new metric of a step's rewards does not match as a part of the reward.
    "<part>": Placeholder(
        rf"(?:{'|'.join(BUILT_IN)}|model|.+:.+)",
        "a part of the reward (a built-in function, `path.py:function`, or `model`)",
    ),
    "<name>": Placeholder(r".+", "a name that an agent gives one of its rewards"),
    "<source>": Placeholder(r".+", "a `data_source`"),
    "<k>": Placeholder(r"\d+", "a number of samples, or of steps"),
    "<layer>": Placeholder(r"\d+", "a layer, counted from 0"),
    "<tool>": Placeholder(r"[^/]+", "a tool"),
    "<cause>": Placeholder(f"(?:{'|'.join(BREAKS)})", "why a sequence begins"),
    "<end>": Placeholder(f"(?:{'|'.join(ENDS)})", "how a trajectory ends"),
    "<sampled>": Placeholder(r"(?:reward|response)/.+", "a metric of the samples"),
    "<model>": Placeholder(
        f"(?:{'|'.join(name for name in LEARNERS if name != 'policy')})",
        "the section of a model that learns besides the policy",
    ),
}

METRICS: dict[str, tuple[Metric, ...]] = {
    "Reward": (
        Metric(
            "reward/mean",
            "reward",
            "Mean reward of the step's samples, as their functions give it.",
        ),
        Metric("reward/std", "reward", "Standard deviation of the rewards over the step's samples."),
        Metric("reward/min", "reward", "Smallest reward of the step."),
        Metric("reward/max", "reward", "Largest reward of the step."),
        Metric("reward/<part>", "reward", "Mean of one part of the reward, without its weight."),
        Metric("reward/environment/<name>", "reward", "Mean of one of the rewards that an agent returns by name."),
        Metric(
            "reward/failed", "samples", "Samples without a reward (it raised, ran out of time, was not finite): left out."
        ),
        Metric("reward/timeouts", "samples", "Samples that took a built-in reward too long, which counts as 0 from it."),
        Metric("reward/mean@<k>", "fraction", "Correct samples of a group of k, averaged over the groups."),
        Metric("reward/pass@<k>", "fraction", "Groups of k with at least one correct sample."),
        Metric("reward/best", "reward", "Best reward of a group, averaged over the groups."),
        Metric("reward/solve_all", "fraction", "Groups whose samples are all correct."),
        Metric("reward/solve_none", "fraction", "Groups without a correct sample."),
        Metric("reward/frac_reward_zero_std", "fraction", "Groups whose samples all have the same reward."),
    ),
    "Responses and prompts": (
        Metric("response/length_mean", "tokens", "Mean length of a response (its tokens that carry loss)."),
        Metric("response/length_std", "tokens", "Standard deviation of the response lengths."),
        Metric("response/length_min", "tokens", "Shortest response of the step."),
        Metric("response/length_max", "tokens", "Longest response of the step."),
        Metric("response/length_mean_correct", "tokens", "Mean length of the correct responses; absent without one."),
        Metric("response/length_mean_incorrect", "tokens", "Mean length of the other responses; absent without one."),
        Metric(
            "response/truncated_fraction",
            "fraction",
            "Responses that ended at the token limit, and trajectories that ended at any limit.",
        ),
        Metric(
            "response/form_fraction",
            "fraction",
            r"Responses with the text that their reward looks for (`####`, `\boxed{}`); absent where it reads any text.",
        ),
        Metric("response/repetition", "fraction", "4-grams of a response that already occurred in it, averaged."),
        Metric("prompt/length_mean", "tokens", "Mean length of a prompt."),
    ),
    "Trajectories of several turns": (
        Metric("turns/mean", "turns", "Mean number of turns of a trajectory."),
        Metric("turns/max", "turns", "Most turns of a trajectory."),
        Metric("turns/tokens_mean", "tokens", "Mean number of tokens that a turn sampled."),
        Metric("turns/tokens_max", "tokens", "Most tokens that a turn sampled."),
        Metric("turns/cut_fraction", "fraction", "Turns that ended at their own token limit."),
        Metric("turns/reward_mean", "reward", "Mean reward that a turn earned itself, with its weight in the reward."),
        Metric("turns/seconds_mean", "seconds", "Mean time from the request of a turn to its completion."),
        Metric("turns/seconds_max", "seconds", "Longest time from the request of a turn to its completion."),
        Metric(
            "trajectory/sequences", "sequences", "Sequences of a trajectory: 1 if each turn extends the tokens before it."
        ),
        Metric("trajectory/breaks_<cause>", "sequences", "Sequences of a trajectory that begin for this cause."),
        Metric("trajectory/end_<end>", "fraction", "Trajectories with this end, including those whose reward failed."),
        Metric(
            "turns/inserted_ends",
            "turns",
            "Turns that ended otherwise and got the template's end token, without loss.",
        ),
        Metric("turns/observations_cut", "messages", "Answers that were cut (`environment.cut_observations`)."),
        Metric(
            "turns/aborted_tokens",
            "tokens",
            "Tokens of turns that were aborted and sampled again; absent if there are none.",
        ),
        Metric("tools/<tool>/calls", "calls", "Calls of a tool."),
        Metric("tools/<tool>/errors", "calls", "Calls of a tool that raised or took too long."),
        Metric("tools/<tool>/timeouts", "calls", "Calls of a tool that took longer than `environment.step_seconds`."),
        Metric("tools/<tool>/seconds", "seconds", "Mean time of a tool's call."),
        Metric("tools/malformed", "calls", "Calls that could not be read or made, and were answered with the reason."),
        Metric("environment/steps_per_second", "steps", "Steps of the environments a second, over all ranks."),
        Metric("environment/wait", "seconds", "Mean time that a trajectory waits for a step of its environment."),
        Metric(
            "engine/idle_fraction",
            "fraction",
            "Time in which a rank's engine had no request while trajectories ran; absent for engines in the ranks.",
        ),
        Metric(
            "engine/prefix_hits",
            "fraction",
            "Prompt tokens that servers had computed before, for an earlier turn or another trajectory.",
        ),
        Metric("environment/failed", "trajectories", "Trajectories whose environment or agent failed; absent if none did."),
        Metric("endpoint/retries", "requests", "Requests of agents that repeated one and got its answer; no turns."),
        Metric("endpoint/overridden", "settings", "Sampling settings of agents that the run's own replaced."),
        Metric("endpoint/unread", "answers", "Answers that no client of an agent took in full; no turns."),
    ),
    "Dynamic sampling": (
        Metric("dynamic_sampling/rounds", "rounds", "Rounds of sampling of the step; absent where engines sample ahead."),
        Metric("dynamic_sampling/prompts", "prompts", "Prompts that were sampled for the step."),
        Metric(
            "dynamic_sampling/kept_fraction",
            "fraction",
            "Sampled prompts that the step wants: whose responses differ in reward.",
        ),
        Metric(
            "dynamic_sampling/zero_variance_used", "groups", "Groups of others, of equal rewards, that filled up the step."
        ),
        Metric(
            "filtered/<sampled>",
            "",
            "The same metric of the groups that the step trains on, where dynamic sampling left some out.",
        ),
    ),
    "Engine against trainer": (
        Metric("rollout/logprob_diff_mean", "nats", "Mean absolute difference of the engine's and the trainer's log-prob."),
        Metric("rollout/logprob_diff_max", "nats", "Largest such difference of a token."),
        Metric("rollout/logprob_diff_over_0.1", "fraction", "Tokens whose difference is larger than 0.1."),
        Metric("rollout/logprob_diff_over_0.5", "fraction", "Tokens whose difference is larger than 0.5."),
        Metric("rollout/logprob_diff_over_1", "fraction", "Tokens whose difference is larger than 1."),
        Metric("rollout/kl", "nats", "KL(engine || trainer), estimated by k3, before the updates."),
        Metric(
            "rollout/lora_lost",
            "fraction",
            "Share of what adapters add that the engine's weights lack: 1 minus its projection onto what they add.",
        ),
        Metric("rollout/staleness_mean", "updates", "Optimizer steps between the sampling weights and the policy, mean."),
        Metric("rollout/staleness_max", "updates", "The same of the stalest sample."),
        Metric("rollout_correction/ratio_mean", "ratio", "Mean of trainer / engine, at the level of the correction."),
        Metric("rollout_correction/ratio_max", "ratio", "Largest such ratio."),
        Metric("rollout_correction/weight_mean", "ratio", "Mean weight of a token after bounds, masks and rejection."),
        Metric("rollout_correction/bounded_fraction", "fraction", "Tokens whose ratio lies outside of low and high."),
        Metric("rollout_correction/masked_fraction", "fraction", "Tokens of weight 0."),
        Metric("rollout_correction/rejected_fraction", "fraction", "Tokens that `reject` leaves out."),
        Metric("rollout_correction/effective_sample_size", "fraction", "(Σ w)² / (n Σ w²): samples left by the weights."),
    ),
    "Sampling ahead": (
        Metric("async/staleness_mean", "steps", "Steps between the weights of a sample's first token and its use, mean."),
        Metric("async/staleness_max", "steps", "The same of the stalest sample: at most rollout.max_staleness."),
        Metric("async/staleness_<k>", "fraction", "Samples of the step that are k steps old."),
        Metric("async/unused_groups", "groups", "Groups in flight or complete that no step has taken yet."),
        Metric("async/complete_groups", "groups", "Those of them that are complete and scored."),
        Metric("async/trainer_wait_seconds", "s", "Time that the step waited for groups to be complete."),
        Metric("async/engine_wait_seconds", "s", "Time in which a rank had no request in flight, mean over ranks."),
        Metric("async/engine_load", "fraction", "Requests in flight over what the engine may have at once, mean over time."),
        Metric("async/aborted_tokens", "tokens", "Tokens that were sampled and thrown away: aborted or cut."),
        Metric("async/reused_tokens", "tokens", "Tokens of responses that new weights continued."),
        Metric("async/cut_groups", "groups", "Groups that were not complete when they were due, and surplus ones."),
    ),
    "Policy": (
        Metric("policy/loss", "loss", "Loss, mean over the step's optimizer steps."),
        Metric("policy/grad_norm", "norm", "Global gradient norm before clipping."),
        Metric("policy/lr", "rate", "Learning rate of the step's last update."),
        Metric("policy/skipped_updates", "updates", "Updates skipped because loss or gradient norm was not finite."),
        Metric("policy/loss_scale", "factor", "What float16's loss is multiplied by in the step's last update."),
        Metric("policy/zero_gradients", "", "Gradients that are exactly 0 (megatron.optimizer.log_num_zeros_in_grad)."),
        Metric("policy/mtp_loss", "nats", "Cross-entropy of the response tokens that multi-token prediction is trained on."),
        Metric("policy/skipped_fraction", "fraction", "Tokens, prompts too, that policy.skip_zero_advantage leaves out."),
        Metric("policy/logprob_mean", "nats", "Log-prob of the response tokens, mean."),
        Metric("policy/ratio_mean", "ratio", "Importance ratio to the policy before the step, mean over tokens."),
        Metric("policy/ratio_max", "ratio", "Largest importance ratio of the step."),
        Metric("policy/clip_fraction", "fraction", "Tokens whose gradient the surrogate clips (cispo: whose weight)."),
        Metric("policy/kl_old", "nats", "KL(policy before the step || policy), k3, mean over the step's updates."),
        Metric("policy/kl_old_last", "nats", "The same at the step's last update."),
        *(Metric(*row) for term in TERMS for row in term.reports),
        *(Metric(*row) for surrogate in SURROGATES.values() for row in surrogate.reports),
    ),
    "Other models that learn": (
        Metric("<model>/loss", "loss", "Loss of the model, mean over its optimizer steps of the step."),
        Metric("<model>/grad_norm", "norm", "Its global gradient norm before clipping."),
        Metric("<model>/lr", "rate", "Learning rate of its last update."),
        Metric("<model>/skipped_updates", "updates", "Its updates skipped as not finite."),
        Metric("<model>/loss_scale", "factor", "What its loss is multiplied by in float16."),
        Metric("<model>/zero_gradients", "", "Its gradients that are exactly 0."),
        Metric("critic/value_mean", "reward", "Mean value at the response tokens."),
        Metric("critic/return_mean", "reward", "Mean return from the response tokens on."),
        Metric("critic/return_std", "reward", "Standard deviation of the returns."),
        Metric(
            "critic/explained_variance",
            "fraction",
            "1 - Var(return - value) / Var(return); 0 where returns are equal.",
            "explained variance",
        ),
        Metric("critic/clip_fraction", "fraction", "Tokens for which value_clip decides the loss."),
        *(Metric(*row) for row in ProcessReward.reports),
    ),
    "Experts": (
        Metric("moe/load_max", "ratio", "Load of the fullest expert over the mean, in the layer where it is largest."),
        Metric("moe/load_max/layer_<layer>", "ratio", "The same of one layer."),
        Metric("moe/aux_loss", "loss", "Balance losses of all layers with their coefficient, summed."),
        Metric("moe/router_agreement", "fraction", "Routes that policy.router_replay gives and routers choose as well."),
        Metric("moe/router_agreement/layer_<layer>", "fraction", "The same of one layer."),
        Metric("<model>/moe/load_max", "ratio", "moe/load_max of another model that learns and has experts."),
        Metric("<model>/moe/load_max/layer_<layer>", "ratio", "The same of one layer."),
        Metric("<model>/moe/aux_loss", "loss", "moe/aux_loss of that model."),
    ),
    "Evaluation": (
        Metric("val/<source>/accuracy", "fraction", "Correct greedy responses (pass@1) to a source's validation prompts."),
        Metric("val/<source>/accuracy_stderr", "fraction", "Standard error of that over the prompts."),
        Metric("val/<source>/reward", "reward", "Mean reward of the greedy responses."),
        Metric("val/<source>/length_mean", "tokens", "Mean length of the greedy responses."),
        Metric("val/<source>/truncated_fraction", "fraction", "Greedy responses that ended at the token limit."),
        Metric("val/<source>/form_fraction", "fraction", "response/form_fraction of the greedy responses."),
        Metric("val/<source>/mean@<k>", "fraction", "Correct responses among k sampled ones."),
        Metric("val/<source>/stderr@<k>", "fraction", "Standard error of mean@k over the prompts."),
        Metric("val/<source>/pass@<k>", "fraction", "Prompts with a correct response among k sampled ones."),
        Metric("val/loss", "loss", "Loss on the validation responses, for methods that learn from data."),
        Metric("val/kl_reference", "nats", "policy/kl_reference on them."),
        Metric("val/logprob_mean", "nats", "policy/logprob_mean on them."),
        Metric("val/accuracy", "fraction", "policy/accuracy on the validation pairs."),
        Metric("val/margin", "reward", "policy/margin on the validation pairs."),
        Metric("val/reward_chosen", "reward", "policy/reward_chosen on the validation pairs."),
        Metric("val/reward_rejected", "reward", "policy/reward_rejected on the validation pairs."),
    ),
    "Time": (
        Metric("time/step", "seconds", "The whole step, without evaluation and checkpoints."),
        Metric("time/weight_sync", "seconds", "Moving the policy's weights to the engine."),
        Metric("time/rollout", "seconds", "Sampling responses."),
        Metric("time/reward", "seconds", "Scoring responses."),
        Metric("time/greedy", "seconds", "Sampling and scoring most likely responses, for methods that compare with them."),
        Metric("time/pack", "seconds", "Gathering the stats and moving the tokens to the replicas that train on them."),
        Metric("time/logprobs", "seconds", "Log-probs of policy and reference, values of the critic."),
        Metric(
            "time/<model>",
            "seconds",
            "Updates of another model that learns, and the token rewards that it gives.",
        ),
        Metric("time/train", "seconds", "The policy's updates."),
        Metric("time/verify", "seconds", "Comparing copies of parameters between ranks (trainer.guard.every)."),
        Metric("time/eval", "seconds", "Evaluation."),
        Metric("time/save", "seconds", "Writing the checkpoint of the step before, which happens after that step's row."),
        Metric("time/load", "seconds", "Loading the checkpoint that the run resumed from."),
    ),
    "Speed and memory": (
        Metric("throughput/tokens_per_second", "tokens/s", "Tokens of the step, prompts included, over time/step."),
        Metric("throughput/samples_per_second", "samples/s", "Samples of the step over time/step."),
        Metric(
            "throughput/train_tokens_per_second", "tokens/s", "Tokens that the policy's updates compute over time/train."
        ),
        Metric("throughput/tflops_per_gpu", "TFLOP/s", "Arithmetic of the policy's updates over time/train, per rank."),
        Metric(
            "memory/peak_gb",
            "GiB",
            "Most memory of a rank's process in the step, on its GPU or the CPU; engines in other processes are left out.",
        ),
    ),
    "Where the run stands": (
        Metric("step", "", "Steps finished; 0 is the evaluation before training."),
        Metric("epoch", "", "Pass over the data that the step's first prompt belongs to, from 0."),
        Metric("expert/epoch", "", "The same of the expert's responses (`data.expert`)."),
        Metric("wall", "seconds", "When the row was written, since 1970."),
    ),
}
"""Section -> its metrics. A stage that took less than 0.2 ms is left out of a row."""


def labelled(model: str) -> dict[str, str]:
    """Return metric -> label, for the labelled metrics of a trained model other than the policy."""
    rows = METRICS["Other models that learn"]
    return {row.name: row.label for row in rows if row.label and row.name.startswith(f"{model}/")}


def find(name: str) -> Metric | None:
    """Return the table row for a metric's name, or None."""
    exact, patterns = _index()
    return exact.get(name) or next((metric for pattern, metric in patterns if pattern.fullmatch(name)), None)


@lru_cache
def _index() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    """Return (name -> metric, patterns for the names with placeholders)."""
    rows = [metric for section in METRICS.values() for metric in section]
    exact = {metric.name: metric for metric in rows if "<" not in metric.name}
    return exact, [(_pattern(metric.name), metric) for metric in rows if "<" in metric.name]


def _pattern(name: str) -> re.Pattern[str]:
    pieces = re.split(r"(<\w+>)", name)
    return re.compile(
        "".join(PLACEHOLDERS[piece].pattern if piece in PLACEHOLDERS else re.escape(piece) for piece in pieces)
    )
