"""`penstock sbatch`: prints the script of a Slurm job that runs a configuration."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.pipeline.cli.options import ConfigFile, Json, Overrides, emit, loaded

if TYPE_CHECKING:
    from penstock.pipeline.config.load import Config

TEMPLATE = Path(__file__).with_name("run.sbatch")
OWN_BROKER = "$HEAD:$((10000 + SLURM_JOB_ID % 10000))"
_BROKER = """\
step 0 broker "$PENSTOCK" broker run --listen "0.0.0.0:${BOOTSTRAP##*:}" --advertise "$BOOTSTRAP" --stop-file "$PENSTOCK_HOME/stop" &
broker=$!
"""
_END = """\
sleep 2  # Slurm's SIGTERM ends the functions above at once, perhaps before this script has it
[ -e "$PENSTOCK_HOME/stopping" ] || touch "$PENSTOCK_HOME/stop"  # a broker that got SIGTERM ends once no worker is connected
await "$broker"
"""
_RANKS = (
    'env MASTER_ADDR="$HEAD" MASTER_PORT=$((30000 + SLURM_JOB_ID % 2000)) '
    "bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS exec \"$@\"' - "
)


def sbatch(
    config: ConfigFile,
    *,
    overrides: Overrides = None,
    run_id: Annotated[str | None, typer.Option("--run-id", help="Id of the run; default: run.name and the job's number.")] = None,
    bootstrap: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of an existing broker; default: the job starts one on its first node.")
    ] = None,
    rollout_per_node: Annotated[int, typer.Option(min=1, metavar="N", help="Rollout workers per node.")] = 1,
    trainer_nodes: Annotated[int, typer.Option(min=1, metavar="N", help="Nodes among which trainer.processes are divided.")] = 1,
    grace: Annotated[int, typer.Option(min=1, metavar="SECONDS", help="Stop the workers this long before the job's time limit.")] = 120,
    json: Json = False,
) -> None:
    """Print the script of a Slurm job that runs a configuration: rollout workers on separate nodes, all other workers on the first node."""
    from penstock.infra.errors import ConfigError
    from penstock.pipeline.runtime.registration.run_registry import usable

    settings = loaded(config, overrides)
    if settings.trainer.processes % trainer_nodes:
        raise ConfigError(
            f"--trainer-nodes {trainer_nodes} does not divide trainer.processes = {settings.trainer.processes}; choose a divisor"
        )
    name = re.sub(r"[^a-z0-9-]+", "-", settings.run.name.lower()).strip("-") or "run"
    options = {"--run-id": run_id and usable(run_id), "--bootstrap": bootstrap, "--grace": grace if grace != 120 else None}
    options |= {"--rollout-per-node": rollout_per_node if rollout_per_node > 1 else None}
    options |= {"--trainer-nodes": trainer_nodes if trainer_nodes > 1 else None}
    changes = "".join(f" --set {shlex.quote(text)}" for text in overrides or ())
    used = "".join(f" {option} {shlex.quote(str(value))}" for option, value in options.items() if value)
    gpus = Counter[int]()
    lines = list(_workers(settings, rollout_per_node, trainer_nodes, gpus))
    most = max(gpus.values(), default=0)
    values = {
        "NAME": name,
        "NODES": trainer_nodes + -(-settings.rollout.workers // rollout_per_node),
        "GPUS": f"#SBATCH --gpus-per-node={most}\n" if most else "",
        "GRACE": grace,
        "COMMAND": f"penstock sbatch {shlex.quote(str(config))}{changes}{used}",
        "CONFIG": shlex.quote(str(config)),
        "RUN": run_id or f"{name}-$SLURM_JOB_ID",
        "BOOTSTRAP": bootstrap or OWN_BROKER,
        "BROKER": "" if bootstrap else _BROKER,
        "END": "" if bootstrap else _END,
        "RANKS": _RANKS if trainer_nodes > 1 else "",
        "SET": changes,
        "WORKERS": "\n".join(f"  {line}" for line in lines),
    }
    text = re.sub(r"@([A-Z]+)@", lambda match: str(values[match[1]]), TEMPLATE.read_text(encoding="utf-8"))
    emit({"script": text}) if json else print(text, end="")


def _workers(config: "Config", rollout_per_node: int, trainer_nodes: int, gpus: Counter[int]) -> Iterator[str]:
    """Yield a script line per worker; rollout workers are on the nodes after the trainer's. `gpus` (node -> GPUs in use) is updated."""
    from penstock.pipeline.runtime.roles import ROLES

    gpus[0] = config.trainer.gpus // trainer_nodes
    for role in ROLES.values():
        for slot in range(role.workers(config)):
            node = trainer_nodes + slot // rollout_per_node if role.name == "rollout" else 0
            words = [f"OMP_NUM_THREADS={role.threads(config)}"]
            if role.name == "trainer" and trainer_nodes > 1:
                words += [f"SPAN={trainer_nodes}", f"TASKS={config.trainer.processes}"]
            elif (count := role.gpus(config)) and role.name != "trainer":
                words.append(f"CUDA_VISIBLE_DEVICES={','.join(str(gpus[node] + number) for number in range(count))}")
                gpus[node] += count
            number = "" if role.single else f" --slot {slot}"
            yield f"{' '.join(words)} worker {node} {role.worker(slot)} {role.name}{number}"
