"""The live view in a notebook cell: a screen with the methods of rich's, whose output is replaced; None outside of notebooks."""

import io
import sys
from typing import Any

from rich.console import Console, RenderableType

WIDTH, HEIGHT = 110, 40
FORMAT = '<pre style="line-height:1.3;font-family:ui-monospace,Menlo,monospace">{code}</pre>'


class NotebookScreen:
    """An output of the cell that runs."""

    def __init__(self, display: Any) -> None:
        self._display, self._handle = display, None

    def start(self) -> None:
        """Reserve an output of the cell."""
        self._handle = self._display({"text/plain": "starting"}, raw=True, display_id=True)

    def update(self, frame: RenderableType, *, refresh: bool) -> None:
        """Replace the frame."""
        assert refresh
        if self._handle is not None:
            self._handle.update({"text/html": as_html(frame), "text/plain": "a view of the run"}, raw=True)

    def stop(self) -> None:
        """Keep the last frame."""


def as_html(frame: RenderableType) -> str:
    """A frame as HTML with its colours."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    console.print(frame)
    return console.export_html(inline_styles=True, code_format=FORMAT)


def notebook_screen() -> NotebookScreen | None:
    """A screen in the notebook whose kernel this process is; None where it is none."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return NotebookScreen(display)
