"""`fivefold plan --calibrate`: how fast this machine is, kind by kind, kept in a file that `plan` and `check` read."""

from fivefold.calibration.machine import calibrate

__all__ = ["calibrate"]
