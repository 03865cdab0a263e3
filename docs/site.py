"""Hooks of the documentation site: the README is its first page, links to files outside docs/ go to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(\]\(|src=\")(?!https?:|#)([^)\"\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the README as index.md."""
    files.append(File.generated(config, "index.md", content=_index()))
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


def _index() -> str:
    def follow(link: re.Match[str]) -> str:
        inside = link[2].startswith("docs/")
        return link[1] + (link[2].removeprefix("docs/") if inside else f"../{link[2]}")

    return LINK.sub(follow, (ROOT / "README.md").read_text())
