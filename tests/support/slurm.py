"""Slurm of three nodes on this machine, with Debian's packages: munged, slurmctld and three slurmd in a folder of their own."""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.support.waiting import until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
LIMIT_S = 300.0
CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
MpiDefault=none
SlurmdParameters=config_overrides
KillWait=60
SchedulerParameters=sched_interval=2,batch_sched_delay=0
MinJobAge=600
JobRequeue=1
NodeName=n[1-3] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=4 RealMemory=8000 State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=01:00:00 State=UP PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=01:00:00 State=UP PriorityTier=2
"""


def missing() -> str | None:
    """Why Slurm cannot be started here; None if it can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"Slurm is not installed: no {', '.join(absent)} (apt: slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "Slurm's daemons start jobs as their user: only root starts them here"


class Slurm:
    """A cluster that runs; its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def __call__(self, *command: str, environment: Mapping[str, str] | None = None) -> str:
        """The output of one of Slurm's commands."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env={**self.environment, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def submit(self, script: Path, *options: str, **environment: str) -> str:
        """Submit a script; returns the number of its job."""
        return self("sbatch", "--parsable", f"--output={self.folder}/job-%j.out", *options, str(script), environment=environment).strip()

    def output(self, job: str) -> str:
        """Everything that the script of a job has printed."""
        file = self.folder / f"job-{job}.out"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def state(self, job: str) -> str:
        """The job's state, as `RUNNING`."""
        match = re.search(r"JobState=(\S+)", self("scontrol", "show", "job", job))
        assert match is not None
        return match[1]

    def wait(self, condition: Callable[[], bool], what: Callable[[], str], limit_s: float = LIMIT_S) -> None:
        """Wait for a condition; fails with `what` after `limit_s`."""
        until(condition, what, limit_s=limit_s, every_s=0.5)


@contextmanager
def started(folder: Path) -> Iterator[Slurm]:
    """A cluster in a new folder; its processes end with the block, and so do those of its jobs."""
    slurm, host, (port, first) = Slurm(folder), socket.gethostname().split(".")[0], _free_ports()
    (folder / "spool").mkdir(parents=True)
    (folder / "slurm.conf").write_text(CONF.format(host=host, folder=folder, port=port, first=first, last=first + 2))
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    files = {name: f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")}
    try:
        slurm("munged", f"--key-file={key}", f"--socket={folder}/munge.sock", *files.values(), "--force")
        slurm("slurmctld", "-c")
        for node in ("n1", "n2", "n3"):
            (folder / "spool" / node).mkdir()
            slurm("slurmd", "-N", node)
        slurm.wait(lambda: slurm("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "3", lambda: slurm("sinfo"))
        yield slurm
        for job in slurm("squeue", "-h", "-o", "%A").split():
            slurm("scancel", job)
        slurm.wait(lambda: not slurm("squeue", "-h"), lambda: slurm("squeue"))
    finally:
        daemons = [_process(file) for pattern in ("slurmd-*.pid", "slurmctld.pid", "munged.pid") for file in sorted(folder.glob(pattern))]
        for daemon in filter(None, daemons):
            with suppress(psutil.NoSuchProcess):
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(60)


def _process(file: Path) -> psutil.Process | None:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(int(file.read_text()))
    return None


def _free_ports() -> tuple[int, int]:
    """A free port, and the first of three consecutive ones."""
    for first in range(26817, 27817, 10):
        sockets: list[socket.socket] = []
        with suppress(OSError):
            for port in range(first, first + 4):
                sockets.append(socket.create_server(("127.0.0.1", port)))
        for server in sockets:
            server.close()
        if len(sockets) == 4:
            return first, first + 1
    raise AssertionError("no free ports")
