"""Turns the rights of a run's roles into Strimzi's KafkaUser objects, a user per role: the rights are read from stdin.

penstock topics acls RUN --json | python3 deploy/strimzi/users.py | kubectl apply --namespace NAMESPACE -f -
"""

import json
import sys
from typing import Any

TYPES = {"topic": "topic", "group": "group", "transactional-id": "transactionalId"}


def user(name: str, rules: list[dict[str, str]], cluster: str) -> dict[str, Any]:
    """One KafkaUser. Strimzi writes its password to the Secret of the same name."""
    acls: dict[tuple[str, ...], list[str]] = {}
    for rule in rules:
        resource = (TYPES[rule["resource"]], rule["name"], rule["pattern"].removesuffix("ed"))
        acls.setdefault(resource, []).append("".join(word.capitalize() for word in rule["operation"].split("_")))
    return {
        "apiVersion": "kafka.strimzi.io/v1beta2",
        "kind": "KafkaUser",
        "metadata": {"name": name, "labels": {"strimzi.io/cluster": cluster}},
        "spec": {
            "authentication": {"type": "scram-sha-512"},
            "authorization": {
                "type": "simple",
                "acls": [
                    {"resource": {"type": kind, "name": resource, "patternType": pattern}, "operations": operations}
                    for (kind, resource, pattern), operations in acls.items()
                ],
            },
        },
    }


if __name__ == "__main__":
    cluster = sys.argv[1] if len(sys.argv) > 1 else "penstock"
    items = [user(role["user"], role["rules"], cluster) for role in json.load(sys.stdin).values()]
    json.dump({"apiVersion": "v1", "kind": "List", "items": items}, sys.stdout, indent=1)
