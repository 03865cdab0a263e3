"""Prompt sets: files -> Prompt, in an order that can be resumed."""

from fivefold.data.prompt_loader import PromptLoader
from fivefold.data.prompts import Columns, PromptSet, load_prompts

__all__ = ["Columns", "PromptLoader", "PromptSet", "load_prompts"]
