"""Declaration of the packages that an engine or backend needs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An installable package."""

    module: str
    """Name to import."""
    name: str
    """Name to install."""
    purpose: str
    extra: str = ""
    """Extra of Penstock's wheel that installs it; empty for a plain dependency."""
    on_gpus: bool | None = None
    """True or False for the build of a module for machines with or without GPUs; None if there is only one build."""
