"""`penstock doctor`: checks this machine. Read-only."""

from pathlib import Path
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Json, emit


def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="TOML file whose GPU placement is checked as well.")] = None,
    *,
    imports: Annotated[bool, typer.Option("--imports", help="Import every package as well; takes a minute.")] = False,
    bootstrap: Bootstrap = "embedded",
    json: Json = False,
) -> int:
    """Check this machine: packages, Java, broker, disk, memory, GPUs; prints a fix for each problem."""
    from penstock.infra.backends.processor import this_cpu
    from penstock.pipeline.config.load import load
    from penstock.pipeline.launch.doctor import as_line, examine, summary
    from penstock.pipeline.launch.placement import visible_gpus

    loaded, findings = None if config is None else load(config, gpus=len(visible_gpus()), cpu=this_cpu()), []
    for finding in examine(bootstrap=bootstrap, config=loaded, imports=imports):
        findings.append(finding)
        if not json:
            print(as_line(finding), flush=True)
    if json:
        emit(findings)
    else:
        print(summary(findings))
    return 1 if any(finding.level == "fail" for finding in findings) else 0
