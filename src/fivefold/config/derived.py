"""The sections of a run's configuration with the values that follow from several of them."""

from __future__ import annotations

import hashlib
import json
from functools import cached_property
from pathlib import Path

from fivefold.config.roles import Roles, roles_of
from fivefold.config.schema import Sections
from fivefold.keys.identity import HARMLESS, leaves
from fivefold.layout import ParallelLayout


class Derived(Sections):
    """The sections of a run, and the values that follow from several of them."""

    @property
    def layout(self) -> ParallelLayout:
        """Layout of the policy, on the first ranks. Other models may have their own layouts, on these ranks or on further
        ones."""
        return self.policy.layout

    @cached_property
    def roles(self) -> Roles:
        """All models of the run, by role."""
        return roles_of(self)

    @property
    def run_dir(self) -> Path:
        """Directory for all output of the run."""
        if self.trainer.run_dir is not None:
            return Path(self.trainer.run_dir)
        values = [(leaf.key, leaf.value) for leaf in leaves(self) if leaf.counts is not HARMLESS]
        number = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
        return Path("runs") / f"{self.algorithm.name}-{Path(self.model.path).name}-{number}"

    @property
    def skips_logprobs(self) -> bool:
        """Whether most steps have no log-probs of the engine. An agent may ask for those of its turns in every step."""
        is_read = self.algorithm.reads_rollout_logprobs or self.environment.agent is not None
        return self.engine.logprobs == "tenth_step" and not is_read

    @property
    def prompts_per_call(self) -> int:
        """Number of prompts that the engine gets at once: those of a step, or of one round of dynamic sampling."""
        algorithm = self.algorithm
        return (algorithm.prompts_per_round if algorithm.resolved.dynamic_sampling else None) or self.data.prompts_per_step

    @property
    def prompts_taken(self) -> int:
        """Number of prompts that an epoch counts per step: those of one round of dynamic sampling if rounds are counted."""
        counts_rounds = self.algorithm.sampling_rounds == 1 or self.trainer.ends_with_data
        return self.prompts_per_call if counts_rounds and not self.data.mixture else self.data.prompts_per_step

    @property
    def samples_per_step(self) -> int:
        """Number of samples that a step learns from, with those of an expert."""
        return self.data.prompts_per_step * self.algorithm.samples_per_prompt + self.data.expert_per_step

    @property
    def max_sequence_tokens(self) -> int:
        """Maximum length of a prompt and its response together, or of a sequence of several turns."""
        longest = self.data.max_prompt_tokens + self.data.max_response_tokens
        if self.environment.is_active:
            return self.data.max_total_tokens or longest
        return min(longest, self.data.max_total_tokens or longest) if self.algorithm.offline else longest

    @property
    def max_sampled_tokens(self) -> int:
        """Maximum number of tokens that are sampled for a response, or in all turns of a trajectory."""
        if not self.environment.is_active:
            return self.data.max_response_tokens
        all_turns = self.environment.max_turns * self.data.max_response_tokens
        return min(all_turns, self.max_sequence_tokens) if self.environment.has_one_sequence else all_turns
