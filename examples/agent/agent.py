"""An agent that plays the guessing game: it asks a model over OpenAI's API, with nothing but Python's own library."""

from __future__ import annotations

import json
import random
import urllib.request

GUESSES = 4


def run(task: dict, base_url: str, api_key: str) -> float:
    """Return 1 if the model finds the digit, which each trajectory of a group draws alike."""
    secret = random.Random(task["seed"]).randrange(10)  # noqa: S311 - not for secrets
    messages = [{"role": "user", "content": task["prompt"]}]
    for _ in range(GUESSES):
        guess = chat(base_url, api_key, messages)
        if guess == str(secret):
            return 1.0
        hint = "?" if not guess.isdigit() else ">" if secret > int(guess) else "<"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": hint}]
    return 0.0


def chat(base_url: str, api_key: str, messages: list[dict]) -> str:
    """Return what the model answers to a conversation."""
    request = urllib.request.Request(  # noqa: S310 - the address is the run's own
        f"{base_url}/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as answer:  # noqa: S310
        return json.load(answer)["choices"][0]["message"]["content"]
