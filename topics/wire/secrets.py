"""Removes passwords from the text of records of earlier releases."""

import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit


def without_passwords(text: str) -> str:
    """Remove `kafka.security` and the password in `mlflow.tracking_uri` from JSON of a configuration, or of one under "config".

    Example:
        without_passwords('{"kafka": {"security": {"sasl_plain_password": "x"}}}')  # -> '{"kafka": {}}'
    """
    if '"security"' not in text and "@" not in text:
        return text
    try:
        table = json.loads(text)
    except ValueError:
        return text
    if not isinstance(table, dict):
        return text
    inner = table.get("config")
    config: dict[str, Any] = inner if isinstance(inner, dict) else table
    kafka, mlflow = config.get("kafka"), config.get("mlflow")
    removed = isinstance(kafka, dict) and kafka.pop("security", None) is not None
    if isinstance(mlflow, dict) and isinstance(uri := mlflow.get("tracking_uri"), str) and (shown := without_password(uri)) != uri:
        mlflow["tracking_uri"], removed = shown, True
    return json.dumps(table) if removed else text


def without_password(uri: str) -> str:
    """Return an address without the user and password before the host.

    Example:
        without_password("https://me:secret@host/x")  # -> "https://host/x"
    """
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if "@" in parts.netloc else uri
