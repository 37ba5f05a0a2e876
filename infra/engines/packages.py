"""The packages that a part of Penstock needs, as that part declares them."""

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
    """Extra of the wheel that has it; empty for the wheel's own dependencies."""
    on_gpus: bool | None = None
    """True or False for one of two builds of a module: the one for machines with GPUs, or without; None where there is only one build."""
