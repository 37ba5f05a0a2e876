"""Kills every role and the broker many times in one run and compares it with the undisturbed run.

    python -m benchmarks chaos examples/exact.toml --kills 40 --set run.steps=240

The same run twice in a state directory of its own: undisturbed, then under a seeded schedule of SIGKILL for every role and the broker
and of SIGSTOP/SIGCONT. A disturbance follows when the run has made its share of steps since the previous one, or, every fourth time,
within three seconds of it, during the recovery. Prints kills and recovery by role, resampled completions, the audit, and both digests.
Status 1 if digests or group counts differ, the audit finds a violation, or a visible sample or turn was generated again.
An agentic run: benchmarks/support/agentic.toml --roles environment,rollout,scorer,trainer,broker --kills 30 --stops 0
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.support import chaos_figures
from benchmarks.support.command import PENSTOCK, launched, read_report, report_of, run_parser, with_numbers
from penstock.infra.broker import access, embedded
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.runtime.ledger_follower import LedgerFollower

ROLES = ("feeder", "rollout", "scorer", "trainer", "evaluator", "tracker", "broker")
LONGEST_STOP_S = 20.0
SOON_S = 3.0
BROKER_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One signal to one worker of a role."""

    role: str
    stop_s: float | None
    """Seconds between SIGSTOP and SIGCONT; None for SIGKILL."""
    soon_s: float | None
    """Seconds after the disturbance before it; None to wait for the run's progress."""


def schedule(*, seed: int, kills: int, stops: int, roles: Sequence[str] = ROLES) -> list[Disturbance]:
    """A seeded order of kills, spread evenly over the roles, and of stops among them."""
    rng = random.Random(seed)
    killed = [roles[index % len(roles)] for index in range(kills)]
    stopped = [roles[index % len(roles)] for index in range(stops)]
    events: list[tuple[str, float | None]] = [(role, None) for role in killed]
    events += [(role, round(rng.uniform(2.0, LONGEST_STOP_S), 1)) for role in stopped]
    rng.shuffle(events)
    soon = [round(rng.uniform(0.0, SOON_S), 2) if rng.random() < 0.25 else None for _ in events]
    return [Disturbance(role=role, stop_s=stop_s, soon_s=wait) for (role, stop_s), wait in zip(events, soon, strict=True)]


class Chaos:
    """Disturbs a running run and records each disturbance with its time."""

    def __init__(self, run: str, home: Path, *, seed: int) -> None:
        self.run, self.home = run, home
        self.done: list[dict[str, Any]] = []
        self._rng = random.Random(seed + 1)
        self._stopped: list[tuple[float, int]] = []

    def disturb(self, planned: Disturbance) -> bool:
        """Send the signal to one worker of the role; False if none is running."""
        self.release()
        name, pid = self._victim(planned.role)
        if pid is None:
            return False
        try:
            os.kill(pid, signal.SIGKILL if planned.stop_s is None else signal.SIGSTOP)
        except ProcessLookupError:
            return False
        now = time.time()
        if planned.stop_s is not None:
            self._stopped.append((now + planned.stop_s, pid))
        event = {**asdict(planned), "worker": name, "at": now}
        self.done.append(event)
        if planned.role == "broker" and planned.stop_s is None:
            threading.Thread(target=self._await_broker, args=(event,), daemon=True).start()
        what = "killed" if planned.stop_s is None else f"stopped for {planned.stop_s:g} s"
        print(f"{time.strftime('%H:%M:%S')} {len(self.done):>3}. {name} {what}", file=sys.stderr, flush=True)
        return True

    def release(self, *, everything: bool = False) -> None:
        """Send SIGCONT to the workers that have been stopped long enough."""
        due = [(until, pid) for until, pid in self._stopped if everything or until <= time.time()]
        self._stopped = [entry for entry in self._stopped if entry not in due]
        for _, pid in due:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # it was killed while it was stopped

    def _await_broker(self, event: dict[str, Any]) -> None:
        """Record when the killed broker serves again."""
        host, _, port = embedded.status(self.home).bootstrap.rpartition(":")
        password = access.read_login(self.home / "broker")
        while time.time() - event["at"] < BROKER_LIMIT_S:
            if embedded.status(self.home).running and access.cluster_id(host, int(port), timeout_s=1.0, login=password):
                event["back_at"] = time.time()
                return
            time.sleep(0.05)

    def _victim(self, role: str) -> tuple[str, int | None]:
        if role == "broker":
            return "broker", embedded.status(self.home).pid
        try:
            workers = json.loads((self.home / "runs" / self.run / "workers.json").read_text())["workers"]
        except (OSError, ValueError):
            return role, None
        names = sorted(name for name in workers if name.split("-")[0] == role)
        name = self._rng.choice(names) if names else role
        return name, workers.get(name)


def disturb_run(
    process: "subprocess.Popen[bytes]", run: str, home: Path, plan: Sequence[Disturbance], *, steps: int, seed: int
) -> list[dict[str, Any]]:
    """Carry out the plan until the run ends; returns the disturbances with their times."""
    chaos, progress, last = Chaos(run, home, seed=seed), Progress(home, run), time.monotonic()
    for number, planned in enumerate(plan, start=1):
        due = number * steps // (len(plan) + 1)
        while process.poll() is None:
            chaos.release()
            ripe = time.monotonic() - last >= planned.soon_s if planned.soon_s is not None else progress.steps() >= due
            if ripe and chaos.disturb(planned):
                break
            time.sleep(0.05)
        last = time.monotonic()
    while process.poll() is None:
        chaos.release()
        progress.steps()
        time.sleep(0.2)
    chaos.release(everything=True)
    progress.close()
    return chaos.done


class Progress:
    """Committed steps of a run whose broker may be unreachable."""

    def __init__(self, home: Path, run: str) -> None:
        self._home, self._run = home, run
        self._follower: LedgerFollower | None = None

    def steps(self) -> int:
        """Committed steps read so far."""
        if self._follower is None:
            info = embedded.status(self._home)
            if not info.running:
                return 0
            log = KafkaLog(info.bootstrap, client_id="chaos")
            if log.partitions(f"{self._run}.ledger") is None:
                log.close()
                return 0
            self._follower = LedgerFollower(log, self._run)
        self._follower.poll(0.0)
        return self._follower.state.steps

    def close(self) -> None:
        """Stop reading."""
        if self._follower is not None:
            self._follower.close()


def main(arguments: Sequence[str]) -> int:
    """Run, disturb, compare, print."""
    parser = run_parser(__name__, __doc__)
    with_numbers(parser, kills=40, stops=7, seed=1)
    parser.add_argument(
        "--roles", type=lambda text: text.split(","), default=list(ROLES), help="roles to disturb, for example environment,broker"
    )
    parser.add_argument("--home", type=Path, help="state directory to use and keep; a temporary one if absent")
    chosen = parser.parse_args(arguments)
    home = chosen.home or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    tag = f"{int(time.time()):x}"
    try:
        print(f"the undisturbed run, in {home}", file=sys.stderr, flush=True)
        started = time.monotonic()
        plain = report_of(chosen.config, f"plain-{tag}", chosen.settings)
        middle = time.monotonic()
        plan = schedule(seed=chosen.seed, kills=chosen.kills, stops=chosen.stops, roles=chosen.roles)
        done, report = disturbed(chosen.config, f"chaos-{tag}", chosen.settings, home, plan, steps=plain["steps"], seed=chosen.seed)
        print(f"time: {middle - started:.0f} s undisturbed, {time.monotonic() - middle:.0f} s disturbed, seed {chosen.seed}")
        return compare(plain, report, done, planned=len(plan), home=home)
    finally:
        embedded.stop(home)


def disturbed(
    config: str, run: str, settings: Sequence[str], home: Path, plan: Sequence[Disturbance], *, steps: int, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Carry out the plan on a new run: the disturbances and the run's report. Raises `SystemExit` if the run fails."""
    output = home / f"{run}.txt"
    with launched(config, run, settings, output) as process:
        done = disturb_run(process, run, home, plan, steps=steps, seed=seed)
    (home / f"{run}.json").write_text(json.dumps(done, indent=1))
    return done, read_report(run, output, process.returncode)


def compare(plain: dict[str, Any], report: dict[str, Any], done: Sequence[dict[str, Any]], *, planned: int, home: Path) -> int:
    """Print the tables; returns 0 if nothing was lost, duplicated or different."""
    log = KafkaLog(embedded.start(home=home).bootstrap, client_id="chaos")
    facts = chaos_figures.collect(log, report["run"], done)
    log.close()
    audit = subprocess.run([*PENSTOCK, "audit", report["run"], "--json"], capture_output=True, text=True, check=False)
    kills = Counter(event["role"] for event in done if event["stop_s"] is None)
    stops = Counter(event["role"] for event in done if event["stop_s"] is not None)
    print(chaos_figures.table(facts, kills=kills, stops=stops))
    print(f"{kills.total()} kills and {stops.total()} stops of {planned} planned")
    print(f"groups: {json.dumps(report['groups'])}")
    print(f"undisturbed: {json.dumps(plain['groups'])}")
    digests = [each["weights"]["digest"] for each in (report, plain)]
    same = digests[0] == digests[1] and report["groups"] == plain["groups"]
    print(f"final digest {digests[0][:16]}…, undisturbed {digests[1][:16]}…: {'equal' if same else 'DIFFERENT'}")
    print(f"audit: exit {audit.returncode}; {chaos_figures.audit_line(audit)}")
    needless = facts.copies.needless + facts.turns.needless
    return int(not same or audit.returncode != 0 or needless > 0 or len(done) < planned)
