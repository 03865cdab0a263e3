"""Configurations of other systems (verl, siiRL, Trinity-RFT, ROLL, AReaL, SkyRL, TRL) as ours.

The core finds a system by its entry point (group `fivefold.dialects`) and never imports this package. Each system is a
`System` (system.py): tables of keys (table.py) that one translator reads (translator.py), and functions for what several
keys say together.
"""

from __future__ import annotations

SYSTEMS = ("verl", "siirl", "trinity", "roll", "areal", "skyrl", "trl")
"""Systems with a table, in the order of the documentation."""
