"""Prompt sets: files -> Prompt, in an order that can be resumed."""

from fivefold.data.prompts import PromptSet, load_prompts
from fivefold.data.sampler import Sampler

__all__ = ["PromptSet", "Sampler", "load_prompts"]
