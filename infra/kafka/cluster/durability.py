"""Finds where a cluster of several brokers would lose acknowledged records with one of them.

The rule: it only looks, and only at our own topics.
"""

from typing import Any, NamedTuple

from kafka.admin import ConfigResource, ConfigResourceType

from penstock.infra.kafka.cluster.admin import Admin
from penstock.topics.catalogue import is_ours

UNCLEAN = "unclean.leader.election.enable"
LISTED = 5


class Weakness(NamedTuple):
    """One line about what is, and one about what to do."""

    found: str
    do: str


def weaknesses(admin: Admin) -> list[Weakness]:
    """What a person may want to change; nothing where there is one broker. Raises `LogError`."""
    brokers = admin.brokers()
    if len(brokers) == 1:
        return []
    described = admin.describe([name for name in admin.topics("") if is_ours(name)])
    resources = [ConfigResource(ConfigResourceType.BROKER, str(broker), None) for broker in brokers]
    resources += [ConfigResource(ConfigResourceType.TOPIC, name, None) for name in described]
    settings = admin.ask("cannot read the cluster's settings", lambda client: client.describe_configs(resources, config_filter="all"))
    found = []
    if unclean := _with_unclean(settings.get("broker", {})):
        why = "an election could lose acknowledged records: set it to false"
        found.append(Weakness(f"{UNCLEAN} is true on broker {_listed(unclean)}", why))
    elif unclean := _with_unclean(settings.get("topic", {})):
        why = "an election could lose their acknowledged records: set it to false with kafka-configs.sh"
        found.append(Weakness(f"{UNCLEAN} is true of {_listed(unclean)}", why))
    if single := sorted(name for name, topic in described.items() if topic.replicas < 2):
        why = "one lost broker could take it along: kafka-reassign-partitions.sh makes more"
        found.append(Weakness(f"one copy of {_listed(single)}, on {len(brokers)} brokers", why))
    return found


def _with_unclean(settings: dict[str, dict[str, Any]]) -> list[str]:
    return sorted(name for name, held in settings.items() if str(held.get(UNCLEAN, {}).get("value")).lower() == "true")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")
