"""The live view: follows a run's topics and shows its progress and workers. Read-only."""

import io
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from penstock.infra.errors import LogUnreachable
from penstock.infra.log import Log, Tail
from penstock.pipeline.inspect.live.completions import Completions
from penstock.pipeline.inspect.live.frame import frame, line
from penstock.pipeline.inspect.live.saved_view import newest
from penstock.pipeline.inspect.report.figures import held_out
from penstock.pipeline.inspect.report.text import Report, as_text, render
from penstock.pipeline.inspect.run_view import RunView
from penstock.pipeline.inspect.status import WATCHED, SteadyBottleneck
from penstock.pipeline.runtime.reporting.log_lines import exact_output
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.dead_letters import DeadLetter
from penstock.topics.metrics import Measurement
from penstock.topics.wire.errors import Unusable
from penstock.topics.wire.record import Record
from penstock.topics.wire.visible import visible

WIDTH, HEIGHT = 110, 40
FORMAT = '<pre style="line-height:1.3;font-family:ui-monospace,Menlo,monospace">{code}</pre>'


class NotebookScreen:
    """Screen in the output of the running notebook cell."""

    def __init__(self, display: Any) -> None:
        self._display, self._handle = display, None

    def start(self) -> None:
        self._handle = self._display({"text/plain": "starting"}, raw=True, display_id=True)

    def update(self, frame: RenderableType, *, refresh: bool) -> None:
        """Replace the output by a new frame; the signature is that of `rich.live.Live`."""
        assert refresh
        if self._handle is not None:
            self._handle.update({"text/html": as_html(frame), "text/plain": "a view of the run"}, raw=True)

    def stop(self) -> None:
        """Leave the last frame in the output."""


def as_html(frame: RenderableType) -> str:
    """Convert a frame of `WIDTH` columns to HTML with inline styles."""
    console = Console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    console.print(frame)
    return console.export_html(inline_styles=True, code_format=FORMAT)


def notebook_screen() -> NotebookScreen | None:
    """Return a screen in the notebook if this process is a notebook kernel; else None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    return NotebookScreen(display)


class Terminal(Console):
    """A rich console that escapes hidden characters in texts; rich itself removes only some of them."""

    def __init__(self, *, stderr: bool = False, **options: Any) -> None:
        # `Live` replaces sys.stdout. The console needs its own file, or its control characters would be escaped too.
        super().__init__(**{"file": exact_output(error=stderr), **options})

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(part if part.control else part._replace(text=visible(part.text)) for part in buffer)


def print_report(report: Report, *, directory: Path | None, full: bool = False) -> None:
    """Print a report, with colours if standard output is a terminal. `directory` is the run's directory on this machine."""
    if sys.stdout.isatty():
        Terminal().print(render(report, directory=directory, full=full))
    else:
        print(as_text(report, directory=directory, full=full), end="")


REFRESH_S = 0.25
LINE_EVERY_S = 5.0
QUIET_LINE_EVERY_S = 15.0
PLAIN_WIDTH = 110
DEAD_LETTERS_SHOWN = 3


class LiveView:
    """Shows a run as a frame that is replaced in place or, without a terminal, as plain lines. Call `poll` in a loop."""

    def __init__(self, log: Log, run: str, *, console: Console, plain: bool, screen: NotebookScreen | None = None) -> None:
        self.view = RunView(run=run)
        self._log, self._console = log, console
        self._tail: Tail | None = None
        self._heard: dict[str, float] = {}
        self._dead_letter_counts: Counter[str] = Counter()
        self._completions = Completions(run)
        self._steady = SteadyBottleneck()
        self.status: str | None = None
        """Status to show instead of the one in the log; set by the launcher."""
        in_place = console.is_terminal and not plain
        terminal = Live(console=console, auto_refresh=False, transient=True, redirect_stderr=False) if in_place else None
        self._live: Live | NotebookScreen | None = screen or terminal
        self._refreshed_s = self._printed_s = 0.0
        self._printed_step = 0
        self._opened = time.time()
        if self._live is not None:
            self._live.start()

    def poll(self, timeout_s: float) -> None:
        """Read new records, waiting up to `timeout_s`, and show what they changed; without a broker, the last state remains."""
        for record in self._read(timeout_s):
            try:
                folded = self.view.fold(record)
            except Unusable:
                continue  # a worker reports the record as a dead letter, which is shown
            if isinstance(folded, Measurement):
                self._heard[folded.worker] = time.monotonic()
            self._completions.add(folded, record)
            if record.timestamp_ms / 1000 > self._opened:
                self._tell(folded)
        self.view.forget()
        self._show()

    @property
    def outage_s(self) -> float:
        """Seconds for which the broker has been unreachable; 0.0 if it responds."""
        return self._tail.outage_s if self._tail else 0.0

    @property
    def silent(self) -> dict[str, float]:
        """Worker -> seconds since its last report was read."""
        now = time.monotonic()
        return {worker: now - heard for worker, heard in self._heard.items()}

    def tell(self, text: str, *, style: str = "") -> None:
        """Print a line above the frame or among the plain lines; on a terminal it is wrapped at words."""
        self._console.print(Text(text, style=style), soft_wrap=not self._console.is_terminal)

    def close(self, *, status: str | None = None) -> None:
        """Show the last state, leave it on the screen, and stop reading. `status` is shown if the log does not have a final one yet."""
        self.status = status
        if self._live is not None:
            self._refresh()
            self._live.stop()
            if isinstance(self._live, Live):  # stopping it removes the frame
                self._console.print(self._frame())
            self._live = None
        elif self._printed_step != self.view.steps_done:
            self.tell(line(self.view, now_s=time.time()))
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def _read(self, timeout_s: float) -> list[Record]:
        """Return new records. Waits for an unreachable broker without limit, because no worker depends on this reader."""
        try:
            if self._tail is not None or self._open():
                assert self._tail is not None
                return self._tail.poll(timeout_s)
        except LogUnreachable:
            pass
        time.sleep(timeout_s)
        return []

    def _open(self) -> bool:
        """Follow the run's topics from the newest saved view on; False if the run or a topic does not exist yet."""
        names = [RUNS_TOPIC, *(f"{self.view.run}.{topic}" for topic in WATCHED)]
        counts = {name: self._log.partitions(name) for name in names}
        if not all(counts.values()):
            return False
        made = f"{self.view.run}.run"  # missing if an earlier release created the run
        counts[made] = self._log.partitions(made)
        self.view, since = newest(self._log, self.view.run)
        self._heard = dict.fromkeys((worker.worker for worker in self.view.workers.values() if not worker.ended), time.monotonic())
        register = (RUNS_TOPIC, made)
        partitions = [(name, number) for name, count in counts.items() for number in range(count or 0)]
        self._tail = self._log.tail({at: "earliest" if at[0] in register else since.get(at, "earliest") for at in partitions})
        return True

    def _show(self) -> None:
        """Refresh the frame, or print a line if enough time has passed since the last one."""
        now = time.monotonic()
        if self._live is not None:
            if now - self._refreshed_s >= REFRESH_S:
                self._refreshed_s = now
                self._refresh()
            return
        stepped = self.view.steps_done != self._printed_step
        if now - self._printed_s >= (LINE_EVERY_S if stepped else QUIET_LINE_EVERY_S) and self.view.record is not None:
            self._printed_s, self._printed_step = now, self.view.steps_done
            self.tell(line(self.view, now_s=time.time()))
            for completion in self._completions.shown()[:1] if stepped else ():
                self.tell(f"  {completion.line(PLAIN_WIDTH)}")

    def _tell(self, folded: object) -> None:
        """Print a line about an evaluation or a dead letter (a record that a worker refused); nothing for other records.

        Of the dead letters of a kind, each of the first `DEAD_LETTERS_SHOWN` is printed, then only their count at powers of ten.
        """
        if isinstance(folded, DeadLetter):
            self._dead_letter_counts[folded.kind] += 1
            count = self._dead_letter_counts[folded.kind]
            if count <= DEAD_LETTERS_SHOWN:
                record_name = f"{folded.topic.removeprefix(f'{self.view.run}.')}/{folded.partition}/{folded.offset}"
                self.tell(f"dead letter: {record_name} {folded.kind}: {folded.reason}", style="yellow")
            elif count in (10, 100, 1_000, 10_000, 100_000):
                self.tell(f"dead letters: {count:,} of kind {folded.kind}; the newest: {folded.reason}", style="yellow")
        elif isinstance(folded, Measurement) and folded.kind == "eval":
            scores = [score for how in ("greedy", "sampled") if (score := held_out(folded.values, how)) is not None]
            self.tell(f"version {folded.version}: held out {', '.join(scores)}", style="blue")

    def _frame(self) -> RenderableType:
        """Return the frame for the present size of the terminal or notebook."""
        width, height = (WIDTH, HEIGHT) if isinstance(self._live, NotebookScreen) else self._console.size
        width -= len("^C")  # whose echo must not start a new line, or the frame's first line stays on the screen
        shown = frame(
            self.view,
            now_s=time.time(),
            silent=self.silent,
            outage_s=self.outage_s,
            width=width,
            height=height,
            completions=self._completions.shown(),
            status=self.status,
            steady=self._steady,
        )
        return Constrain(shown, width)

    def _refresh(self) -> None:
        assert self._live is not None
        self._live.update(self._frame(), refresh=True)
