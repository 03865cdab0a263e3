"""What is found in a configuration: errors, notes and keys without effect, each under its full key. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Findings:
    """One collector for a whole configuration; `at` gives it the section whose keys are checked next."""

    errors: list[str] = field(default_factory=list)
    """What keeps the run from starting, one sentence each."""
    notes: list[str] = field(default_factory=list)
    """What is worth reading before the run starts."""
    ignored: list[tuple[str, str]] = field(default_factory=list)
    """(key, reason) of each key that was set and changes nothing."""
    section: str = ""
    """Keys are those of this section; empty for the whole file."""

    def at(self, section: str) -> Findings:
        """The same lists, for the keys of a section within this one."""
        return replace(self, section=self.key(section))

    def key(self, key: str) -> str:
        """The full name of a key of this section; the section's own name for an empty one."""
        if not self.section or not key:
            return self.section or key
        return f"{self.section}{key}" if key.startswith("[") else f"{self.section}.{key}"

    def error(self, key: str, message: str) -> None:
        """`message` follows the key: "must be above 0: got -1", or ": why it cannot be". Said twice it stands there once."""
        text = f"{self.key(key)}{'' if message.startswith(':') else ' '}{message}"
        if text not in self.errors:
            self.errors.append(text)

    def require(self, holds: bool, key: str, message: str) -> None:
        """An error where something does not hold."""
        if not holds:
            self.error(key, message)

    def unknown(self, key: str, hint: str) -> None:
        """An error for a key that the section does not have; `hint` follows its name."""
        self.errors.append(f"unknown key {self.key(key)!r}{hint}")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ignore(self, key: str, reason: str) -> None:
        """The key was set and changes nothing."""
        self.ignored.append((self.key(key), reason))
