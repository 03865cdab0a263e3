"""Continues a response with new weights that old weights began, if the engine itself cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.engines.sampling import request_seed
from fivefold.types import Completion, Request


@dataclass(frozen=True)
class Begun:
    """A response of which older weights have sampled a part."""

    request: Request
    completion: Completion

    def rest(self) -> Request:
        """Returns a request for the missing tokens. The existing ones are appended to the prompt; the new weights compute
        them again."""
        count, sampling = len(self.completion.token_ids), self.request.sampling
        return replace(
            self.request,
            prompt_ids=[*self.request.prompt_ids, *self.completion.token_ids],
            sampling=replace(
                sampling, max_tokens=sampling.max_tokens - count, min_tokens=max(0, sampling.min_tokens - count)
            ),
            # The same key would draw the same numbers again.
            seed=request_seed((self.request.seed, count)) if count else self.request.seed,
        )

    def with_more(self, more: Completion) -> Begun:
        """Returns this response extended by a completion of the rest."""
        first = self.completion
        versions = [*_versions(first), *_versions(more)]
        completion = Completion(
            first.request_id,
            first.token_ids + more.token_ids,
            first.logprobs + more.logprobs,
            more.finish_reason,
            versions[0] if versions else more.policy_version,
            versions if len(set(versions)) > 1 else None,
            _routes(first.routes_TLK, more.routes_TLK),
        )
        return replace(self, completion=completion)


def _routes(first_TLK: Tensor | None, more_TLK: Tensor | None) -> Tensor | None:
    """Joins routes: each token keeps the routes of the weights that read it first, as it keeps its version."""
    if first_TLK is None or more_TLK is None:
        return more_TLK
    return torch.cat([first_TLK, more_TLK[len(first_TLK) :]])


def _versions(completion: Completion) -> list[int]:
    """Returns the version of each token."""
    return completion.token_versions or [completion.policy_version] * len(completion.token_ids)
