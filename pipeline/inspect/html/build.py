"""Builds a run's page of limited size in two passes through the log: an index, then the newest details that fit."""

import base64
import hashlib
import html
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from penstock.infra.errors import PenstockError, RunNotFound
from penstock.infra.log import Log
from penstock.pipeline.inspect.html import index
from penstock.pipeline.inspect.html.advantages import Advantages
from penstock.pipeline.inspect.html.chunks import Chunks, deflated, pack
from penstock.pipeline.inspect.html.groups import GroupPages, choose
from penstock.pipeline.inspect.html.timeline import RunHistory
from penstock.pipeline.inspect.html.token_texts import TokenTexts
from penstock.pipeline.inspect.report.summary import gone_from, summarise
from penstock.pipeline.inspect.run_status import config_of
from penstock.pipeline.inspect.run_view import read_view
from penstock.pipeline.runtime.topic_reader import RunReader

CODE = ("data.js", "dom.js", "timeline.js", "pointer.js", "curves.js", "samples.js", "group.js", "picked.js", "main.js")


def assemble(*, title: str, index: str, vocabulary: str, chunks: Chunks) -> bytes:
    """The complete page; index and code come first, so that a browser renders before it has read the rest."""
    style, code = _asset("page.css"), "\n".join(['"use strict";', *map(_asset, CODE)])
    parts = {
        **{f"x{number}": text for number, text in chunks.texts.items()},
        **{f"k{number}": text for number, text in chunks.tokens.items()},
    }
    blocks = [_block(name, text) for name, text in {"vocabulary": vocabulary, **parts}.items()]
    values = {
        "TITLE": html.escape(title),
        "POLICY": f"default-src 'none'; script-src '{_digest(code)}'; style-src '{_digest(style)}'; base-uri 'none'; form-action 'none'",
        "STYLE": f"<style>{style}</style>",
        "INDEX": _block("index", index),
        "CODE": f"<script>{code}</script>",
        "CHUNKS": "\n".join(blocks),
    }
    return _fill(_asset("page.html"), values).encode("utf-8", "replace")


def _fill(template: str, values: Mapping[str, str]) -> str:
    """Replace `{{NAME}}`, each once, in the order of the template; inserted values are not expanded."""
    pieces, rest = [], template
    for name, value in values.items():
        before, mark, rest = rest.partition(f"{{{{{name}}}}}")
        assert mark, f"the template has no {name}"
        pieces += [before, value]
    return "".join([*pieces, rest])


def _block(name: str, data: str) -> str:
    """A script element; base64 has no character that ends it."""
    return f'<script type="application/octet-stream" id="{name}">{data}</script>'


def _asset(name: str) -> str:
    return (files("penstock.pipeline.inspect.html") / "assets" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class PageTooSlow(PenstockError):
    """The page was not ready within its time limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a page's contents, each counted from the newest group."""

    tokens: int = 2_500_000
    """Completion tokens whose ids, logprobs and versions are included."""
    text_tokens: int = 10_000_000
    """Completion tokens of samples whose texts are included."""
    samples: int = 50_000
    """Samples in the list and on the timeline."""
    max_bytes: int = 24_000_000
    seconds: float | None = None

    def with_tokens(self, tokens: int) -> "Limits":
        """Limits for `tokens` detailed tokens; if that is more than now, also texts and lines for them, and no limit of the size."""
        if tokens <= self.tokens:
            return replace(self, tokens=tokens)
        texts, samples = max(self.text_tokens, tokens), max(self.samples, tokens // 20)
        return replace(self, tokens=tokens, text_tokens=texts, samples=samples, max_bytes=1 << 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page with a summary of its contents."""

    html: bytes
    facts: Mapping[str, Any]
    """Bytes; groups, samples and tokens in the page and in the run; `left_out`: the page's notes about missing parts."""


def build(
    log: Log,
    run: str,
    *,
    limits: Limits = Limits(),
    trust_code: bool = False,
    mlflow: Mapping[str, Any] | None = None,
    alive: Callable[[], None] = lambda: None,
) -> Page:
    """Build the page of a run, finished or not.

    `trust_code` allows loading a function that the log names. `mlflow`: keys of the report that are not in the log yet.
    `alive` is called before every batch of records. Raises `ValueError` if there is no such run, `PageTooSlow`, `LogError`.
    """
    reader, history = RunReader(log, run, alive=_timed(alive, limits.seconds)), RunHistory()
    view = read_view(reader, also=history.apply)
    history.finish()
    if view.record is None and view.opened is None:
        raise RunNotFound(run)
    selection = choose(view, samples=limits.samples, tokens=limits.tokens, text_tokens=limits.text_tokens)
    advantages = Advantages(config_of(view), trust_code=trust_code)
    groups = GroupPages(reader=reader, view=view, selection=selection, texts=TokenTexts.of(view), advantages=advantages)
    groups.read()
    report = summarise(view, gone=gone_from(log, run)) | dict(mlflow or {})
    facts, columns = index.index(groups, history, report=report)
    ids = sorted(groups.chunks.ids)
    words = json.dumps([ids, groups.texts.one_by_one(ids)], separators=(",", ":"), ensure_ascii=False)
    vocabulary = deflated(words.encode("utf-8", "replace"))
    packed = pack(facts, columns)
    available_bytes = limits.max_bytes - len(packed) - len(vocabulary) - index.MARGIN_BYTES
    groups.chunks.shrink(available_bytes)
    page_contents = index.contents(groups)
    html = assemble(
        title=f"{run} · Penstock", index=pack({**facts, "contents": page_contents}, columns), vocabulary=vocabulary, chunks=groups.chunks
    )
    return Page(html=html, facts={"bytes": len(html), **page_contents})


def write(page: Page, path: Path) -> None:
    """Write the page to a temporary file and rename it to `path`."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_bytes(page.html)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _timed(alive: Callable[[], None], seconds: float | None) -> Callable[[], None]:
    started = time.monotonic()

    def check() -> None:
        alive()
        if seconds is not None and time.monotonic() - started > seconds:
            raise PageTooSlow(f"it was not ready within {seconds:g} s")

    return check
