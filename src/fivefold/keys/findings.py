"""Findings in a configuration: errors, notes and keys without effect, each under its full key. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Findings:
    """Collector for a whole configuration; `at` returns it for the section whose keys are checked next."""

    errors: list[str] = field(default_factory=list)
    """Errors that keep the run from starting, one sentence each."""
    missing: list[str] = field(default_factory=list)
    """What this machine lacks for the run, one sentence each: errors for a run that starts here, otherwise notes."""
    notes: list[str] = field(default_factory=list)
    """Notes to read before the run starts."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """(key, reason) of each key that was set but has no effect."""
    summary: list[str] = field(default_factory=list)
    """Lines about the model, its layout and its memory. A run prints its own summary when it starts."""
    duration: list[str] = field(default_factory=list)
    """Sentences on how long a step takes on this machine's CPU."""
    trial: list[str] = field(default_factory=list)
    """Overrides of a short run, where a step of the whole one takes long; else empty."""
    section: str = ""
    """Section of the keys; empty for the whole file."""

    def at(self, section: str) -> Findings:
        """Return a collector with the same lists, for a section within this one."""
        return replace(self, section=self.key(section))

    def key(self, key: str) -> str:
        """Return the full name of a key in this section; the section's name if `key` is empty."""
        if not self.section or not key:
            return self.section or key
        return f"{self.section}{key}" if key.startswith("[") else f"{self.section}.{key}"

    def error(self, key: str, message: str) -> None:
        """Record an error once. `message` follows the key: "must be above 0: got -1", or ": why it cannot be"."""
        text = f"{self.key(key)}{'' if message.startswith(':') else ' '}{message}"
        if text not in self.errors:
            self.errors.append(text)

    def lacks(self, key: str, message: str) -> None:
        """Record once what this machine lacks; `message` follows the key as in `error`."""
        text = f"{self.key(key)}{message}"
        if text not in self.missing:
            self.missing.append(text)

    def starting(self) -> list[str]:
        """Return the errors that keep the run from starting on this machine."""
        return [*self.errors, *self.missing]

    def require(self, holds: bool, key: str, message: str) -> None:
        """Record an error unless `holds`."""
        if not holds:
            self.error(key, message)

    def unknown(self, key: str, hint: str) -> None:
        """Record an error for a key that the section does not have; `hint` follows its name."""
        self.errors.append(f"unknown key {self.key(key)!r}{hint}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ignore(self, key: str, reason: str) -> None:
        """Record once that the key was set but has no effect."""
        if (entry := (self.key(key), reason)) not in self.ignored:
            self.ignored.append(entry)
