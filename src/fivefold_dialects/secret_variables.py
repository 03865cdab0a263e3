"""Hide variables of the environment that may be secrets: a script or YAML from elsewhere sees a mark instead of the value.

A run's configuration is saved in its directory and sent to trackers, so a secret gets into it only if the user allows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fivefold.config.dialect import Translation

# Names with TOKENIZER hold models, and those with TOKENS numbers: one that ends so and holds none may be a list of secrets.
_SECRET = re.compile(r"[^=]*(?:TOKEN(?!S|IZ)|KEY|SECRET|PASSWORD|TOKENS=(?![0-9.,_E+-]*\Z))", re.IGNORECASE)
_FIRST, _MOST = 0xE000, 0x1900
"""Unicode letters for private use, one for each variable: any part of a mark still identifies its variable."""
_MARK = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + _MOST - 1)}]+")


class Hidden:
    """Environment in which the values of possible secrets are replaced by marks."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._names = [name for name, value in environment.items() if _SECRET.match(f"{name}={value}")][:_MOST]
        marks = {name: chr(_FIRST + place) * 8 for place, name in enumerate(self._names)}
        self.environment = dict(environment) | marks

    def checked(self, translation: Translation) -> Translation:
        """Return the translation with `${NAME}` for each mark; a setting of the run that needs a secret is a fault."""
        faults = [
            f"{', '.join(line.sources) or line.key} needs ${{{name}}}, which may be a secret by its name: pass it with "
            f"--env {name}=value, or allow all such variables of the environment with --allow-secrets"
            for line in translation.lines
            for name in self._in(line.value)
        ]
        lines = [replace(line, value=self._shown(line.value)) for line in translation.lines]
        outcomes = [
            replace(outcome, **{name: self._shown(getattr(outcome, name)) for name in ("key", "value", "reason")})
            for outcome in translation.outcomes
        ]
        tree, keys, others = (self._shown(value) for value in (translation.tree, translation.keys, translation.faults))
        faults = [*dict.fromkeys(faults), *others]
        return replace(translation, tree=tree, keys=keys, lines=lines, outcomes=outcomes, faults=faults)

    def _in(self, value: Any) -> list[str]:
        # The text that Python itself makes of a list would escape the marks.
        marks = dict.fromkeys("".join(_MARK.findall(json.dumps(value, ensure_ascii=False, default=str))))
        return [self._names[place] for mark in marks if (place := ord(mark) - _FIRST) < len(self._names)]

    def _shown(self, value: Any) -> Any:
        if isinstance(value, str):
            return _MARK.sub(lambda mark: "".join(f"${{{name}}}" for name in self._in(mark[0])) or mark[0], value)
        if isinstance(value, dict):
            return {self._shown(key): self._shown(item) for key, item in value.items()}
        return [self._shown(item) for item in value] if isinstance(value, list) else value
