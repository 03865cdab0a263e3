"""The rows of verl's table: what becomes of each key, in the order in which its users think.

A file of rows is about one thing; verl_older.py and verl_prime.py have keys of older releases and of a recipe. What a note
says of verl's code was read in verl b178a3cd (2026-01-29) where it names no other commit.
"""

from __future__ import annotations

from fivefold.config.dialects.verl_forks import SECTION as FORKS
from fivefold.config.dialects.verl_older import SECTION as OLDER
from fivefold.config.dialects.verl_rows_data import DATA, MODEL
from fivefold.config.dialects.verl_rows_method import ALGORITHM
from fivefold.config.dialects.verl_rows_releases import SECTION as RELEASES
from fivefold.config.dialects.verl_rows_reward import REWARD
from fivefold.config.dialects.verl_rows_rollout import ROLLOUT
from fivefold.config.dialects.verl_rows_run import TRAINER
from fivefold.config.dialects.verl_rows_training import ROLES, TRAINING

SECTIONS = (ALGORITHM, DATA, MODEL, TRAINING, ROLES, ROLLOUT, REWARD, TRAINER, OLDER, RELEASES, FORKS)
