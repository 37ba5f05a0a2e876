"""Decides which code of a run this process may execute: code that the run's key signed, and code that the operator trusts."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from penstock.infra.errors import ConfigError, RunNotFound
from penstock.pipeline.config.load import Config, from_json
from penstock.pipeline.runtime.registration.run_key import KEY_FILE
from penstock.pipeline.runtime.registration.run_registry import Registration
from penstock.pipeline.runtime.registration.user_code import Named, user_code
from penstock.topics.catalogue import RUNS_TOPIC
from penstock.topics.runs import RunRecord
from penstock.topics.wire.secrets import without_password

SHOWN_CHARACTERS = 1000
MLFLOW_SECRETS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD")
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """The operator's decision about the code of a run."""

    run_key: Path | None = None
    """File with the run's key; the one in the state directory, if there is one, without it."""
    code: bool = False
    """True to run code that no key of this machine signed."""

    def arguments(self) -> list[str]:
        """The same, for the command line of a worker."""
        return [*(["--run-key", str(self.run_key)] if self.run_key else []), *(["--trust-code"] if self.code else [])]


NO_TRUST = Trust()
"""The operator has named no key and trusts no code."""


def require_trusted(registered: Registration, *, trust: Trust, notify: Notify, code: Collection[Named] | None = None) -> RunRecord:
    """The run's record if this process may execute its configuration, else raise `ConfigError`.

    `code`: what of the configuration would be executed, all of its code if None.
    """
    run = registered.run
    if registered.ignored:
        offsets = ", ".join(map(str, registered.ignored[:5])) + (", …" if len(registered.ignored) > 5 else "")
        notify(f"{run}.run: records that do not fit the run's key are ignored: {len(registered.ignored)}, at offsets {offsets}")
    if code is not None and not code and registered.record is not None and not registered.own:
        return registered.record  # an archive of an earlier release, of which nothing is executed
    record = require_own(registered)
    if registered.keyed and not registered.signed and not trust.code:
        raise ConfigError(f"run {run}: no record of {run}.run fits the run's key. Inspect and sign it: penstock topics adopt {run}")
    named: Collection[Named] = ()
    if not registered.signed and not trust.code:
        named = user_code(from_json(record.config)) if code is None else code
    if named:
        notify(as_block(run, named))
        raise ConfigError(
            f"run {run} names code, and no key on this machine has signed it: copy runs/{run}/{KEY_FILE} of the machine that made the run "
            "(penstock worker --run-key FILE), or give --trust-code to run what is shown"
        )
    return record


def require_own_server(registered: Registration, config: Config, *, trust: Trust) -> None:
    """Raise `ConfigError` if MLflow's credentials in the environment would go to a server that only an unsigned record names."""
    uri, secrets = config.mlflow.tracking_uri or "", [name for name in MLFLOW_SECRETS if os.environ.get(name)]
    if registered.signed or trust.code or not secrets or not config.mlflow.enabled or not uri.lower().startswith(("http:", "https:")):
        return
    if uri != os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            f"run {registered.run}: mlflow.tracking_uri = {without_password(uri)!r}, which no key on this machine has signed, would get "
            f"{secrets[0]}: set MLFLOW_TRACKING_URI to it if it is yours, unset {secrets[0]}, or give --run-key or --trust-code"
        )


def require_own(registered: Registration) -> RunRecord:
    """The run's record from its own topic. Raises `ConfigError` if there is none."""
    run = registered.run
    if registered.record is None:
        raise RunNotFound(run)
    if not registered.own:
        raise ConfigError(
            f"run {run} has no record in {run}.run, and {RUNS_TOPIC} configures nothing: if you made it with an earlier release, "
            f"`penstock topics adopt {run}` shows what it is and makes its key"
        )
    return registered.record


def as_block(run: str, named: Collection[Named]) -> str:
    """The code that a run names, one line each, with control characters spelled out."""
    width = max((len(key) for key, _ in named), default=0)
    return "\n".join([f"run {run} names this code:", *(f"  {_visible(key):<{width}}  {_visible(text)}" for key, text in named)])


def _visible(text: str) -> str:
    shown = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text[:SHOWN_CHARACTERS])
    return shown if len(text) <= SHOWN_CHARACTERS else f"{shown} … and {len(text) - SHOWN_CHARACTERS} more characters"
