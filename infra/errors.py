"""The tree of error types; each message is one line with the fix."""


class PenstockError(Exception):
    """Base of the errors shown to the user: one line, exit status 1."""


class ConfigError(ValueError):
    """The user's mistake in the configuration or on the command line: one line, exit status 2."""


class RunNotFound(ConfigError):
    """No run with this id is registered on the broker; `hint` names one with a similar id."""

    def __init__(self, run: str, hint: str = "") -> None:
        super().__init__(f"no run {run!r} on this broker{hint}; see `penstock runs`")


class LogError(PenstockError):
    """The log refused a request or did not respond within its time limit."""


class LogUnreachable(LogError):
    """No broker responds at the address."""


class RecordMissing(LogError):
    """No committed record is at a requested offset: it was deleted or aborted, or is not written yet."""


class Damaged(LogError):
    """A batch of records fails its checksum or inflates beyond the limit."""


class SendFailed(LogError):
    """Records were certainly not written; sending them again cannot duplicate them."""


class OutcomeUnknown(LogError):
    """Records may or may not have been written; only the log has the outcome."""


class Fenced(LogError):
    """Another process now writes with this transactional id, so this process must stop."""


class LostPartition(LogError):
    """The consumer group has been rebalanced: nothing was written for partitions that this member no longer owns."""


class BrokerError(PenstockError):
    """The embedded broker cannot be started, stopped or located."""


class EngineError(PenstockError):
    """Generation failed or does not support the request."""


class Unrecoverable(PenstockError):
    """The recorded state and the actual state disagree. Not retried: the operator has to decide."""


class EngineRefused(EngineError, Unrecoverable):
    """An engine cannot run with these settings, this model or the installed packages."""


class WrongBuild(EngineRefused):
    """The installed package of an engine is built for another device; another build supports this one."""


class BackendError(PenstockError):
    """Training failed or does not support the request."""


class Diverged(BackendError, Unrecoverable):
    """A gradient or the weights are not finite: the same samples give that again, so a restart cannot help."""


class CheckpointError(PenstockError):
    """A checkpoint cannot be written (disk full, directory not writable), or an existing one is damaged or not of this run."""


class TrackingError(PenstockError):
    """The experiment tracker refused a request or cannot be reached."""


def one_line(error: BaseException, *, characters: int = 200) -> str:
    """Type and message of a library's error, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:characters]
