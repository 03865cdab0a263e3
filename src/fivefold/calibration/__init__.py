"""`fivefold plan --calibrate`: measures the speed of this machine, kind by kind, for a file that `plan` and `check` read."""

from fivefold.calibration.machine import calibrate

__all__ = ["calibrate"]
