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
    from penstock.infra.templates import rendered
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
    values = {
        "name": name, "nodes": trainer_nodes + -(-settings.rollout.workers // rollout_per_node), "gpus": max(gpus.values(), default=0),
        "grace": grace, "command": f"penstock sbatch {shlex.quote(str(config))}{changes}{used}", "config": shlex.quote(str(config)),
        "run": run_id or f"{name}-$SLURM_JOB_ID", "bootstrap": bootstrap, "ranks": trainer_nodes > 1, "changes": changes, "workers": lines,
    }  # fmt: skip
    text = rendered(TEMPLATE, values)
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
