"""A worker's metrics for Prometheus: names with units, types, and labels for the variable parts of a name."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.topics.metrics import TABLES, entry_of

GAUGES = frozenset({
    "uptime_s", "startup_s", "rss_mib", "peak_rss_mib", "lag", "broker_silent_s", "disk_free_bytes", "version", "admissible", "unfinished",
    "all_out", "slots", "calls_in_hand", "in_flight_groups", "in_flight_lag_STAT", "engine_traced", "engine_swap_stall_last_s",
    "engine_swap_stall_max_s", "engine_occupancy", "engine_kv_cache_usage", "engine_waiting_for_environments", "engine_turns_asked",
    "engine_overhead_ms_pN", "open_groups", "oldest_open_s", "checkpoint_step", "checkpoint_bytes", "checkpoint_s",
    "recovered_from_step", "repeated_steps", "recovery_s",
})  # fmt: skip
"""Metrics of a worker that may fall, or that are ages, versions or results; all others only grow."""
COUNTED_FROM_ZERO = ("dead_letters", "duplicates")
"""Counters of every worker before their first event: Prometheus sees the increase of a counter only from its second value on."""
_UNITS = {"_per_s": ("_per_second", 1.0), "_ms": ("_seconds", 1e-3), "_s": ("_seconds", 1.0), "_mib": ("_bytes", 2.0**20)}
_VARIABLE = re.compile("[_/]p?(STAT|USE|NAME|N)(?![A-Z])")
_PREFIXES = {"system": "", "reward": ""}


def family_of(table: str, key: str) -> tuple[str, str, float]:
    """Name, type, and factor to the base unit for a key of a metrics table.

    Example:
        family_of("system", "time_USE_s")  # -> ("penstock_time_seconds_total", "counter", 1.0)
    """
    name, factor = _VARIABLE.sub("", key), 1.0
    if (end := next((end for end in _UNITS if name.endswith(end)), None)) is not None:
        unit, factor = _UNITS[end]
        name = name.removesuffix(end) + unit
    kind = "counter" if table == "system" and key in TABLES[table] and key not in GAUGES else "gauge"
    return f"penstock_{_PREFIXES.get(table, f'{table}_')}{name}{'_total' if kind == 'counter' else ''}", kind, factor


def families(points: Mapping[str, float], labels: Mapping[str, str]) -> Iterable[Any]:
    """Metrics by full name as families of `prometheus_client`; `labels` are on every sample. A name without a meaning is a gauge."""
    from prometheus_client.core import Metric

    by_name: dict[str, Any] = {}
    for point, value in sorted(points.items()):
        entry, more = entry_of(point), dict[str, str]()
        if entry is not None and entry[1] == "SOURCE/NAME":
            more = {"source": entry[2]["source"]}
            entry = entry_of(f"{entry[0]}/{entry[2]['name']}")
        table, key, variable = entry or ("system", re.sub("[^a-zA-Z0-9_]", "_", point.split("/", 2)[-1].replace("/", "_per_")), {})
        name, kind, factor = family_of(table, key)
        family = by_name.setdefault(name, Metric(name.removesuffix("_total"), TABLES[table].get(key, key), kind))
        family.add_sample(name, {**labels, **more, **variable}, value * factor)
    return by_name.values()
