"""Translate configurations of other systems (verl, siiRL, Trinity-RFT, ROLL, AReaL, SkyRL, TRL) into ours.

The core finds a system by its entry point (group `fivefold.dialects`) and never imports this package. Each system is a
`System` (system.py): tables of keys (table.py), which one translator reads (translator.py), and functions for values that
depend on several keys.
"""

from __future__ import annotations

SYSTEMS = ("verl", "siirl", "trinity", "roll", "areal", "skyrl", "trl")
"""Supported systems, in the order of the documentation."""
