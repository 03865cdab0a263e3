"""A run's curve as a picture for a page: `python -m docs.curve RUN_DIR OUT.svg METRIC ... --title TITLE`.

The README's picture of the demo: `make demo demo-curve`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivefold.observability.curve import write_curve


def main() -> None:
    parser = argparse.ArgumentParser(description="draw metrics of a run as an SVG file")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("metrics", nargs="+", metavar="METRIC")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    print(write_curve(options.run, options.metrics, options.title, options.out))


if __name__ == "__main__":
    main()
