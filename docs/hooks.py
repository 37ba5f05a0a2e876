"""MkDocs hooks: a link to a file of the repository leads to a page with its text, and the pages of commands and metrics are generated.

So one link serves readers on GitHub and of the site, and the site needs no other host.
"""

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[)#])")
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown", ".ipynb": "json"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that only the site has, and one for each file and folder outside docs/ that a page links to."""
    command = [ROOT / ".venv" / "bin" / "python", "-m", "docs.site_only"]
    made = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout)
    for name, text in made.items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for page in [file for file in files if file.is_documentation_page()]:
        for target in map(str, LINK.findall(page.content_string)):
            path = _resolve(target, page.src_uri)
            uri = _page_of(path)
            if uri is not None and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, content=_text_of(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to such files and folders at their pages."""

    def redirect(match: re.Match[str]) -> str:
        uri = _page_of(_resolve(match[1], page.file.src_uri))
        return match[1] if uri is None else os.path.relpath(uri, os.path.dirname(page.file.src_uri) or ".")

    return LINK.sub(redirect, markdown)


def _resolve(target: str, source: str) -> Path:
    return (ROOT / "docs" / source).parent.joinpath(target).resolve()


def _page_of(path: Path) -> str | None:
    """The page with the text of a file or folder outside docs/; None for others and for missing ones."""
    if not path.is_relative_to(ROOT) or path.is_relative_to(ROOT / "docs") or not path.exists():
        return None
    return f"source/{path.relative_to(ROOT).as_posix()}{'/index' if path.is_dir() else ''}.md"


def _text_of(path: Path) -> str:
    head = f"---\nsearch:\n  exclude: true\n---\n# `{path.relative_to(ROOT)}`\n\n"
    if path.is_dir():
        return head + "".join(f"- `{file.name}`\n" for file in sorted(path.glob("*.*")))
    return f"{head}~~~~{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n~~~~\n"
