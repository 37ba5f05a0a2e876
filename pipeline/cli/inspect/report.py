"""`penstock report`: a run's figures as text, JSON or a page. Read-only."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, RunOrFolder, Security, TrustCode, emit, notify, reading


def report(
    run: RunOrFolder,
    *,
    full: Annotated[bool, typer.Option("--full", help="Print all figures.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="PATH", help="Write a page with timeline, curves and samples.")] = None,
    tokens: Annotated[int | None, typer.Option(min=0, help="With --html: number of completion tokens that are shown one by one.")] = None,
    trust_code: TrustCode = False,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
    json: Json = False,
) -> None:
    """Report on a run: reward, evaluation, groups, staleness, time and the next step; --full prints all figures, --html writes a page."""
    from penstock.pipeline.inspect.report.progress import Progress
    from penstock.pipeline.inspect.report.summary import as_text, collect, render

    if html is not None or tokens is not None:
        _page(run, html, tokens, trust_code=trust_code, bootstrap=bootstrap, security=security, json=json)
        return
    with reading(run, bootstrap, security) as (log, run_id):
        figures = collect(log, run_id, alive=Progress(notify))
    if json:
        emit(figures)
        return
    from penstock.infra.paths import run_directory

    directory: Path | None = run_directory(str(figures["run"]))
    if directory is not None and not directory.is_dir():
        directory = None
    if sys.stdout.isatty():
        from penstock.pipeline.inspect.live.terminal import Terminal

        Terminal().print(render(figures, directory=directory, full=full))
    else:
        print(as_text(figures, directory=directory, full=full), end="")


def _page(
    run: str, html: Path | None, tokens: int | None, *, trust_code: bool, bootstrap: str, security: list[str] | None, json: bool
) -> None:
    """Write the page of a run; --tokens is not limited."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.inspect.html.build import Limits, build, write
    from penstock.pipeline.inspect.report.progress import Progress

    if html is None:
        raise ConfigError("--tokens needs --html PATH")
    if html.is_dir() or not html.absolute().parent.is_dir():
        raise ConfigError(f"--html {html}: {'is a folder' if html.is_dir() else 'the folder does not exist'}; give the path of a file")
    if html.exists() and not html.is_file():  # writing would replace a device or a pipe by a file
        raise ConfigError(f"--html {html}: that is no file; give the path of a file")
    limits = Limits() if tokens is None else Limits().with_tokens(tokens)
    with reading(run, bootstrap, security) as (log, run_id):
        page = build(log, run_id, limits=limits, trust_code=trust_code, alive=Progress(notify))
    try:
        write(page, html.resolve())
    except OSError as error:
        raise ConfigError(f"--html {html}: {error.strerror}") from error
    if json:
        emit({"path": str(html), **page.facts})
        return
    print(
        f"{html}: {page.facts['bytes'] / 1e6:.1f} MB; {page.facts['samples'][0]:,} samples, {page.facts['tokens'][0]:,} tokens one by one"
    )
    for note in page.facts["left_out"]:
        notify(note)
