"""Prompt sets: files -> Prompt, in an order that can be resumed."""

from fivefold.data.prompts import Columns, PromptSet, load_prompts
from fivefold.data.sampler import Sampler

__all__ = ["Columns", "PromptSet", "Sampler", "load_prompts"]
