"""Builds a run's one-file page of limited size in two passes through the log: an index, then the newest details that fit."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from markupsafe import Markup

from penstock.infra.errors import PenstockError, RunNotFound
from penstock.infra.log import Log
from penstock.pipeline.inspect.report.summary import gone_from, summarise
from penstock.pipeline.inspect.run_status import config_of, has_ended
from penstock.pipeline.inspect.run_view import read_view
from penstock.pipeline.inspect.tables.run_tables import Advantages
from penstock.pipeline.inspect.tables.token_texts import TokenTexts
from penstock.pipeline.inspect.web import index
from penstock.pipeline.inspect.web.chunks import deflated, pack
from penstock.pipeline.inspect.web.groups import GroupPages, choose
from penstock.pipeline.inspect.web.render import SCRIPTS, STYLES, asset, digest, render
from penstock.pipeline.inspect.web.run_facts import cards, config_rows, curves, run_facts
from penstock.pipeline.inspect.web.timeline import RunHistory
from penstock.pipeline.runtime.topic_reader import RunReader

NOTES_BYTES = 16_000
"""Space for the notes about missing parts, and for the names of the chunks."""


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
        """Return limits with this number of `tokens`; a larger one also raises the limits of texts and samples, and lifts that of bytes."""
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
    groups, history = read(log, run, limits=limits, trust_code=trust_code, alive=_timed(alive, limits.seconds))
    view, chunks = groups.view, groups.chunks
    report = summarise(view, gone=gone_from(log, run)) | dict(mlflow or {})
    facts, columns = index.index(groups, history)
    ids = sorted(chunks.ids)
    words = json.dumps([ids, groups.texts.one_by_one(ids)], separators=(",", ":"), ensure_ascii=False)
    vocabulary = deflated(words.encode("utf-8", "replace"))
    style, code = "\n".join(map(asset, STYLES)), "\n".join(map(asset, SCRIPTS))
    page = partial(
        render,
        "file.html",
        policy=f"default-src 'none'; script-src {digest(code)}; style-src {digest(style)}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        code=Markup(code),
        cards=cards(groups.newest),
        curves=curves(view, components=index.component_means(groups)),
        dead_letters=[index.dead_letter(view.run, dead_letter) for dead_letter in history.dead_letters],
        config=config_rows(view),
        **run_facts(view, report, now_s=time.time()),
    )
    rest = len(page(index=Markup(pack(facts, columns)), chunks={}, left_out=[])) + len(vocabulary)
    chunks.shrink(limits.max_bytes - rest - NOTES_BYTES)
    contents = index.contents(groups)
    parts = {"x": chunks.texts, "k": chunks.tokens}
    blocks = {"vocabulary": vocabulary, **{f"{kind}{number}": text for kind, texts in parts.items() for number, text in texts.items()}}
    html = page(
        index=Markup(pack({**facts, "contents": contents}, columns)),
        chunks={name: Markup(text) for name, text in blocks.items()},
        left_out=contents["left_out"],
    )
    return Page(html=html, facts={"bytes": len(html), **contents})


def read(
    log: Log, run: str, *, limits: Limits, trust_code: bool = False, alive: Callable[[], None] = lambda: None
) -> tuple[GroupPages, RunHistory]:
    """Read the newest groups of a run within the limits, and what else its page shows. Raises `RunNotFound`, `LogError`."""
    reader, history = RunReader(log, run, alive=alive), RunHistory()
    view = read_view(reader, also=history.apply)
    history.finish(live=not has_ended(view))
    if view.record is None and view.opened is None:
        raise RunNotFound(run)
    selection = choose(view, samples=limits.samples, tokens=limits.tokens, text_tokens=limits.text_tokens)
    advantages = Advantages(config_of(view), trust_code=trust_code)
    groups = GroupPages(reader=reader, view=view, selection=selection, texts=TokenTexts.of(view), advantages=advantages)
    groups.read()
    return groups, history


def index_of(log: Log, run: str, *, limits: Limits) -> str:
    """Return the numbers of a run's groups, samples and intervals for the timeline, encoded as in a page."""
    facts, columns = index.index(*read(log, run, limits=limits))
    return pack(facts, columns)


def _timed(alive: Callable[[], None], seconds: float | None) -> Callable[[], None]:
    """Return `alive` with a time limit, after which it raises `PageTooSlow`."""
    started = time.monotonic()

    def check() -> None:
        alive()
        if seconds is not None and time.monotonic() - started > seconds:
            raise PageTooSlow(f"it was not ready within {seconds:g} s")

    return check
