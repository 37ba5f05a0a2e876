"""Pictures of `penstock ui`: `make pictures ARGS="RUN OTHER"` renews those of the README from two finished runs of this machine's broker.

With `--all DIR` it writes the main pages to DIR, in light, dark and on a narrow screen.
"""

import argparse
import secrets
import threading
from pathlib import Path

from penstock.pipeline.cli.options import at
from penstock.pipeline.cli.ui.server import Server
from penstock.pipeline.runtime.registration.run_registry import resolve
from tests.support.browser import WAIT_MS, Watched, browser

IMAGES = Path(__file__).resolve().parent / "images"
README = {"ui": (1000, "{run}"), "samples": (720, "{run}/samples?status=trained&sort=worst")}
"""Picture of the README -> its height, and its page below `r/`."""
PAGES = {
    "run": "r/{run}",
    "samples": "r/{run}/samples?status=trained&sort=worst",
    "prompt": "r/{run}/samples?row=0&sort=oldest",
    "group": "r/{run}/g/34",
    "compare": "compare?run={run}&run={other}",
    "timeline": "r/{run}/timeline",
    "topics": "r/{run}/topics",
    "sql": "r/{run}/sql?q=select+status,+reason,+count(*)+as+n+from+groups+group+by+all+order+by+3+desc",
    "config": "r/{run}/config",
    "logs": "r/{run}/logs",
    "runs": "",
}
SCREENS = {"light": (1280, "light"), "dark": (1280, "dark"), "narrow": (420, "light")}


def main() -> None:
    """Parse the arguments and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("other")
    parser.add_argument("--all", type=Path, metavar="DIR", help="write the main pages there, whole, instead of the README's pictures")
    options = parser.parse_args()
    with at("embedded", None) as log, browser() as chromium:
        names = {"run": resolve(log, options.run), "other": resolve(log, options.other)}
        server = Server(log, port=0, token=secrets.token_urlsafe(16))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pictures = [(IMAGES / f"{name}.png", f"r/{path}", 1280, high, "light") for name, (high, path) in README.items()]
        if options.all is not None:
            options.all.mkdir(parents=True, exist_ok=True)
            shots = [(name, path, screen) for name, path in PAGES.items() for screen in SCREENS]
            pictures = [
                (options.all / f"{name}-{screen}.png", path, SCREENS[screen][0], 0, SCREENS[screen][1]) for name, path, screen in shots
            ]
        for picture, path, width, high, scheme in pictures:
            page = chromium.new_page(viewport={"width": width, "height": high or 900}, color_scheme=scheme, reduced_motion="reduce")
            looked = Watched(page, server.address)
            looked.open(path.format(**names))
            page.wait_for_load_state("networkidle", timeout=WAIT_MS)
            page.screenshot(path=picture, full_page=not high)
            print(picture, *looked.complaints, flush=True)
            page.close()
        server.shutdown()


if __name__ == "__main__":
    main()
