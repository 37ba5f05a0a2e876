"""Former path of `topics.internal`, for scripts outside this repository that import it."""

from penstock.topics.internal import owners, state

__all__ = ["owners", "state"]
