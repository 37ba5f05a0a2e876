"""Kill everything, many times, and compare with the undisturbed run.

    python benchmarks/chaos.py examples/exact.toml --kills 40 --set run.steps=240

The same run twice in a state directory of its own: undisturbed, then under a seeded schedule of SIGKILL for every role and the broker
and of SIGSTOP/SIGCONT. A disturbance comes when the run has made its share of steps since the one before, or, every fourth time,
within three seconds of it, into the recovery. Afterwards: kills and recovery by role, samples drawn twice, the audit, and both digests.
Ends with 1 when digests or fates differ, the audit finds a violation, or a sample or turn was drawn although it was visible.
An agentic run: --roles environment,rollout,scorer,trainer,broker --kills 30 --stops 0, with environment.carrier = "log" in CONFIG.
"""

import argparse
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

import chaos_figures
from command import PENSTOCK, launched

from penstock.infra.broker import embedded, login, probe
from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline.runtime.ledger_follower import LedgerFollower

ROLES = ("feeder", "rollout", "scorer", "trainer", "evaluator", "tracker", "broker")
LONGEST_STOP_S = 20.0
SOON_S = 3.0
BROKER_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """One thing that happens to one role."""

    role: str
    stop_s: float | None
    """Seconds between SIGSTOP and SIGCONT; None for SIGKILL."""
    soon_s: float | None
    """Seconds after the disturbance before it; None to wait for the run's progress."""


def schedule(*, seed: int, kills: int, stops: int, roles: Sequence[str] = ROLES) -> list[Disturbance]:
    """A seeded order of kills, spread evenly over the roles, and of stops among them."""
    draw = random.Random(seed)
    killed = [roles[index % len(roles)] for index in range(kills)]
    stopped = [roles[index % len(roles)] for index in range(stops)]
    events: list[tuple[str, float | None]] = [(role, None) for role in killed]
    events += [(role, round(draw.uniform(2.0, LONGEST_STOP_S), 1)) for role in stopped]
    draw.shuffle(events)
    soon = [round(draw.uniform(0.0, SOON_S), 2) if draw.random() < 0.25 else None for _ in events]
    return [Disturbance(role=role, stop_s=stop_s, soon_s=wait) for (role, stop_s), wait in zip(events, soon, strict=True)]


class Chaos:
    """Disturbs a run under way and notes what it did when."""

    def __init__(self, run: str, home: Path, *, seed: int) -> None:
        self.run, self.home = run, home
        self.done: list[dict[str, Any]] = []
        self._draw = random.Random(seed + 1)
        self._stopped: list[tuple[float, int]] = []

    def disturb(self, planned: Disturbance) -> bool:
        """Do it to one worker of the role; False when none runs at the moment."""
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
        """SIGCONT whatever has been stopped long enough."""
        due = [(until, pid) for until, pid in self._stopped if everything or until <= time.time()]
        self._stopped = [entry for entry in self._stopped if entry not in due]
        for _, pid in due:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue  # it was killed while it was stopped

    def _await_broker(self, event: dict[str, Any]) -> None:
        """Note when the killed broker serves again."""
        host, _, port = embedded.status(self.home).bootstrap.rpartition(":")
        password = login.read(self.home / "broker")
        while time.time() - event["at"] < BROKER_LIMIT_S:
            if embedded.status(self.home).running and probe.cluster_id(host, int(port), timeout_s=1.0, login=password):
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
        chosen = self._draw.choice(names) if names else role
        return chosen, workers.get(chosen)


def disturb_run(
    process: "subprocess.Popen[bytes]", run: str, home: Path, plan: Sequence[Disturbance], *, steps: int, seed: int
) -> list[dict[str, Any]]:
    """Carry the plan out while the run lasts; returns what was done, with times."""
    chaos, control, last = Chaos(run, home, seed=seed), Progress(home, run), time.monotonic()
    for number, planned in enumerate(plan, start=1):
        due = number * steps // (len(plan) + 1)
        while process.poll() is None:
            chaos.release()
            ripe = time.monotonic() - last >= planned.soon_s if planned.soon_s is not None else control.steps() >= due
            if ripe and chaos.disturb(planned):
                break
            time.sleep(0.05)
        last = time.monotonic()
    while process.poll() is None:
        chaos.release()
        control.steps()
        time.sleep(0.2)
    chaos.release(everything=True)
    control.close()
    return chaos.done


class Progress:
    """Committed steps of a run, through whatever happens to its broker."""

    def __init__(self, home: Path, run: str) -> None:
        self._home, self._run = home, run
        self._control: LedgerFollower | None = None

    def steps(self) -> int:
        """Steps committed as far as is known now."""
        if self._control is None:
            info = embedded.status(self._home)
            if not info.running:
                return 0
            log = KafkaLog(info.bootstrap, client_id="chaos")
            if log.partitions(f"{self._run}.ledger") is None:
                log.close()
                return 0
            self._control = LedgerFollower(log, self._run)
        self._control.poll(0.0)
        return self._control.state.steps

    def close(self) -> None:
        """Stop reading."""
        if self._control is not None:
            self._control.close()


def whole_run(config: str, run: str, settings: Sequence[str], home: Path) -> dict[str, Any]:
    """The undisturbed run's report. Raises `SystemExit` with the run's own words when it fails."""
    found = subprocess.run([*PENSTOCK, "run", config, "--json", "--run-id", run, *settings], capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(found.stderr[-3000:])
    report: dict[str, Any] = json.loads((home / "runs" / run / "report.json").read_text())
    return report


def main() -> int:
    """Run, disturb, compare, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--stops", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--roles", type=lambda text: text.split(","), default=list(ROLES), help="what is disturbed, as environment,broker")
    parser.add_argument("--home", type=Path, help="state directory to use and keep; a temporary one if absent")
    parser.add_argument("--set", dest="settings", action="append", default=[])
    chosen = parser.parse_args()
    home = chosen.home or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    os.environ["PENSTOCK_HOME"] = str(home)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    settings = [word for setting in chosen.settings for word in ("--set", setting)]
    tag = f"{int(time.time()):x}"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: the run and its broker are ended
    try:
        print(f"the undisturbed run, in {home}", file=sys.stderr, flush=True)
        began = time.monotonic()
        plain = whole_run(chosen.config, f"plain-{tag}", settings, home)
        middle = time.monotonic()
        plan = schedule(seed=chosen.seed, kills=chosen.kills, stops=chosen.stops, roles=chosen.roles)
        done, report = disturbed(chosen.config, f"chaos-{tag}", settings, home, plan, steps=plain["steps"], seed=chosen.seed)
        print(f"time: {middle - began:.0f} s undisturbed, {time.monotonic() - middle:.0f} s disturbed, seed {chosen.seed}")
        return compare(plain, report, done, planned=len(plan), home=home)
    finally:
        embedded.stop(home)


def disturbed(
    config: str, run: str, settings: Sequence[str], home: Path, plan: Sequence[Disturbance], *, steps: int, seed: int
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Carry the plan out on a new run: what was done, and the run's report. Raises `SystemExit` when the run fails."""
    output = home / f"{run}.txt"
    with launched(config, run, settings, output) as process:
        done = disturb_run(process, run, home, plan, steps=steps, seed=seed)
    (home / f"{run}.json").write_text(json.dumps(done, indent=1))
    if process.returncode:
        raise SystemExit(f"the disturbed run ended with {process.returncode}; the end of {output}:\n{output.read_text()[-3000:]}")
    report: dict[str, Any] = json.loads((home / "runs" / run / "report.json").read_text())
    return done, report


def compare(plain: dict[str, Any], report: dict[str, Any], done: Sequence[dict[str, Any]], *, planned: int, home: Path) -> int:
    """Print the tables; 0 when nothing was lost, doubled or different."""
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
    digests = [found["weights"]["digest"] for found in (report, plain)]
    same = digests[0] == digests[1] and report["groups"] == plain["groups"]
    print(f"final digest {digests[0][:16]}…, undisturbed {digests[1][:16]}…: {'equal' if same else 'DIFFERENT'}")
    print(f"audit: exit {audit.returncode}; {chaos_figures.audit_line(audit)}")
    needless = facts.copies.needless + facts.turns.needless
    return int(not same or audit.returncode != 0 or needless > 0 or len(done) < planned)


if __name__ == "__main__":
    sys.exit(main())
