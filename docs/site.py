"""Hooks of the documentation site: README.md and examples/README.md are pages, links to other files outside docs/ go to
the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "examples/README.md": "examples.md"}
"""File outside docs/ -> its page."""
LINK = re.compile(r"(\]\(|src=\")(?!https?:|#)([^)\"\s]+)")


def on_config(config: Any) -> Any:
    """Set the repository's address, which pyproject.toml has."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.repo_url, config.repo_name = urls["Source"], config.site_name
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the README as index.md, and the list of examples."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=_page(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links that leave docs/ to the repository."""
    base = (Path(config.docs_dir) / page.file.src_uri).parent

    def follow(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        target = (base / path).resolve()
        if not path or target.is_relative_to(config.docs_dir):
            return link[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"{link[1]}{config.repo_url}/{kind}/main/{target.relative_to(ROOT)}{'#' + anchor if anchor else ''}"

    return LINK.sub(follow, markdown)


def _page(path: Path) -> str:
    """Return a file's text with its links as they are from docs/."""

    def follow(link: re.Match[str]) -> str:
        target, _, anchor = link[2].partition("#")
        name = (path.parent / target).resolve().relative_to(ROOT).as_posix()
        inside = PAGES.get(name) or (name.removeprefix("docs/") if name.startswith("docs/") else f"../{name}")
        return link[1] + inside + ("#" + anchor if anchor else "")

    return LINK.sub(follow, path.read_text())
