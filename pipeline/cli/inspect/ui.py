"""`penstock ui`: serves pages about runs on loopback. Read-only."""

import secrets
from typing import Annotated

import typer

from penstock.pipeline.cli.options import Bootstrap, Security, at, notify

PORT = 8265


def ui(
    *,
    port: Annotated[int, typer.Option(min=0, max=65535, help="On loopback; 0 takes a free one.")] = PORT,
    bootstrap: Bootstrap = "embedded",
    security: Security = None,
) -> None:
    """Show runs in a browser: live pages, comparison, groups, SQL, logs; read-only, until Ctrl-C."""
    from penstock.infra.errors import PenstockError
    from penstock.infra.paths import make_files_private, state_directory
    from penstock.pipeline.cli.ui.server import Server
    from penstock.pipeline.launch.run_lock import UI_ADDRESS

    make_files_private()
    with at(bootstrap, security) as log:
        try:
            server = Server(log, port=port, token=secrets.token_urlsafe(16))
        except OSError as error:
            raise PenstockError(f"cannot listen on port {port}: {error.strerror}; give another --port, or 0") from error
        address_file = state_directory() / UI_ADDRESS
        address_file.write_text(server.address, encoding="utf-8")
        print(server.address, flush=True)
        notify("open it in a browser on this machine; Ctrl-C ends the server")
        try:
            server.serve_forever()
        finally:
            address_file.unlink(missing_ok=True)
            server.server_close()
