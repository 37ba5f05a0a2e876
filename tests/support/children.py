"""Child processes of a test, killed at the end of their block: a test that fails leaves none, and waits for none."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """`subprocess.Popen` with these options; the end of the block kills the process."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()
