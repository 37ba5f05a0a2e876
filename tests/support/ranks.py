"""The processes of a trainer without a log: rank 0 trains steps, the others make the groups that they are told by themselves."""

import json
import multiprocessing
import os
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.infra.backends.base import Backend
from penstock.infra.backends.registry import open_backend
from penstock.infra.tensors.torch_copy import from_bytes
from penstock.pipeline.config.run_config import Config
from penstock.pipeline.learner.train_step import Objective, Step
from penstock.topics.groups import Group
from penstock.topics.ledger import Planned
from tests.support.trainer_alone import group_of

STEPS = 20
GRADIENT = {"eps": 1e4, "lr": 1e8}
"""AdamW with so large an `eps` moves every weight by ten thousand times its gradient: so far that the rounding of the weight, which is
1 in norms, does not show."""


def group_in(step: int, place: int) -> Group:
    """Groups of unequal length: in even steps the first has three times the tokens of the others."""
    return group_of(10 * step + place, version=0, tokens=6 if place == 0 and step % 2 == 0 else 2)


def trained(backend: Backend, objective: Objective, *, groups: int, steps: int, ranks: Any = None) -> list[tuple[float, float, int]]:
    """Loss, gradient norm and number of micro-batches of each step."""
    results = []
    for number in range(steps):
        step = Step(backend, objective, number, None if ranks is None else ranks())
        for place in range(groups):
            planned = Planned(group=10 * number + place, sha256="", partition=0, offset=0)
            step.add(group_in(number, place), planned)
        outcome = step.finish(learner_version=0)
        results.append((outcome.loss, outcome.grad_norm, len(outcome.boundaries)))
    return results


def measured(settings: dict[str, Any], name: str, config: Config, *, groups: int, processes: Any = None) -> dict[str, Any]:
    """What a backend comes to: losses and norms, the weights after the last step, and ten thousand times the first gradient."""
    from penstock.infra.backends.ranks.lead_backend import LeadBackend
    from penstock.pipeline.learner.micro_batches import Ranks

    found: dict[str, Any] = {}
    objective = Objective.of(config)
    for key, changed, steps in (("trained", {}, STEPS), ("first", GRADIENT, 1)):
        if processes is not None:
            processes.broadcast(do="open")
        backend: Backend = open_backend(name, **{**settings, **changed})
        backend = backend if processes is None else LeadBackend(backend, processes)
        before = {tensor.name: from_bytes(tensor).numpy() for tensor in backend.weights()}
        ranks = None if processes is None else lambda: Ranks(processes)
        found[f"{key}_steps"] = trained(backend, objective, groups=groups, steps=steps, ranks=ranks)
        found[key] = {tensor.name: from_bytes(tensor).numpy() - (before[tensor.name] if steps == 1 else 0) for tensor in backend.weights()}
        backend.close()
    return found


def on_ranks(
    size: int, cases: Sequence[tuple[str, dict[str, Any]]], settings: dict[str, Any], config: Config, *, groups: int, directory: Path
) -> list[dict[str, Any]]:
    """The same for backends that `size` processes train together, case by case."""
    context = multiprocessing.get_context("forkserver")
    port_file = directory / "port"
    arguments = (size, list(cases), settings, config, groups, directory)
    ranks = [context.Process(target=_rank, args=(rank, port_file, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200.0)
        process.kill()
    logs = [(directory / f"rank-{rank}.txt") for rank in range(size)]
    assert [process.exitcode for process in ranks] == [0] * size, "\n".join(log.read_text() for log in logs if log.exists())
    return [dict(np.load(directory / f"case-{number}.npy", allow_pickle=True).item()) for number in range(len(cases))]


def _rank(
    rank: int, port_file: Path, size: int, cases: list[Any], settings: dict[str, Any], config: Config, groups: int, directory: Path
) -> None:
    try:
        _work(rank, port_file, size, cases, settings, config, groups, directory)
    except BaseException:
        (directory / f"rank-{rank}.txt").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


def _work(
    rank: int, port_file: Path, size: int, cases: list[Any], settings: dict[str, Any], config: Config, groups: int, directory: Path
) -> None:
    from penstock.infra.backends.ranks.process_set import ProcessSet, store_on_free_port
    from penstock.workers.trainer.other_ranks import Follower, variables

    store = None
    if rank == 0:
        store = store_on_free_port(size)
        port_file.with_suffix(".new").write_text(json.dumps(store.port))
        port_file.with_suffix(".new").rename(port_file)
    while not port_file.exists():
        os.sched_yield()
    os.environ |= variables(rank=rank, size=size, port=json.loads(port_file.read_text()))
    processes = ProcessSet.join(on_gpu=False, store=store)
    if rank == 0:
        for number, (name, own) in enumerate(cases):
            processes.broadcast(case=number)
            found = measured({**settings, **own}, name, config, groups=groups, processes=processes)
            np.save(directory / f"case-{number}.npy", found, allow_pickle=True)  # type: ignore[arg-type]
            processes.broadcast(do="end")
            processes.replies()
        processes.broadcast(case=None)
        processes.replies()
        return
    while (case := processes.receive()["case"]) is not None:
        name, own = cases[case]
        openings = iter([{}, GRADIENT])
        Follower(
            processes=processes,
            objective=Objective.of(config),
            open=lambda name=name, own=own, openings=openings: open_backend(name, **{**settings, **own, **next(openings)}),
            read=lambda plan: [group_in(planned.group // 10, planned.group % 10) for planned in plan],
        ).follow()
    processes.reply("over")
