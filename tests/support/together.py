"""Processes of one group that all run the same function, as those of torchrun do."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

from penstock.infra.backends.ranks.process_set import store_on_free_port
from tests.support.processes import PRELOADED


def together(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `work(*arguments)` returns in each of `size` processes that have joined one group; their tracebacks where one fails."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = store_on_free_port(size)
    results = context.Queue()
    ranks = [context.Process(target=_run, args=(rank, size, store.port, results, work, arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    found = [results.get(timeout=400.0) for _ in ranks]
    for process in ranks:
        process.join(100.0)
        process.kill()
    assert not (failed := [text for _, _, text in found if text]), "\n".join(failed)
    return [value for _, value, _ in sorted(found, key=lambda one: one[0])]


def _run(rank: int, size: int, port: int, results: Any, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    from penstock.workers.trainer.other_ranks import variables

    try:
        os.environ |= variables(rank=rank, size=size, port=port)
        store = torch.distributed.TCPStore("127.0.0.1", port, size, False)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
        results.put((rank, work(*arguments), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)
