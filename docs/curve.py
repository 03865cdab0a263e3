"""A run's curve as a picture for a page: `python -m docs.curve RUN_DIR OUT.svg METRIC ... --title TITLE`.

The README's picture of the demo: `make demo demo-curve`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fivefold.observability.curve import figure


def main() -> None:
    parser = argparse.ArgumentParser(description="draw metrics of a run as an SVG file")
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("metrics", nargs="+", metavar="METRIC")
    parser.add_argument("--title", default="")
    options = parser.parse_args()
    options.out.write_text(figure(options.run, *options.metrics, title=options.title).svg)
    print(options.out)


if __name__ == "__main__":
    main()
