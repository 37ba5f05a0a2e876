"""Console for tables and views of a run; it writes no control characters but its own."""

from collections.abc import Iterable

from rich.console import Console
from rich.segment import Segment

from penstock.topics.wire.visible import visible


class Terminal(Console):
    """A rich console that shows hidden characters of texts escaped; rich itself removes only some."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(part if part.control else part._replace(text=visible(part.text)) for part in buffer)
