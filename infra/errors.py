"""The tree of our error types; each message is one line that says what to do.

    PenstockError
    ├── LogError             the log refused or did not answer in time
    │   ├── LogUnreachable   no broker answers at the address
    │   ├── RecordMissing    an offset holds no committed record
    │   ├── Damaged          a batch of records cannot be read at all
    │   ├── SendFailed       nothing was written; sending again is safe
    │   ├── OutcomeUnknown   it may or may not have been written; look before sending again
    │   ├── Fenced           another process has taken over this transactional id; stop
    │   └── LostPartition    another member owns the partition by now; drop the work
    ├── BrokerError          the embedded broker
    ├── EngineError          generation
    │   └── EngineRefused    settings or a model that an engine cannot work with
    ├── BackendError         training
    │   └── Diverged         a gradient or weights that are not finite
    ├── CheckpointError      a checkpoint cannot be written
    ├── Unrecoverable        starting again cannot help
    └── TrackingError        experiment tracking

Foreign errors are translated into this tree once, where they arise. `ConfigError`, a person's mistake, stands beside it.
"""


class PenstockError(Exception):
    """An error whose message is one line for a person; the command line prints it and exits 1."""


class ConfigError(ValueError):
    """A person's mistake in the configuration or on the command line, in one line; the command line prints it and exits 2."""


class RunNotFound(ConfigError):
    """No run with this id is registered on the broker; `hint` names one with a similar id."""

    def __init__(self, run: str, hint: str = "") -> None:
        super().__init__(f"no run {run!r} on this broker{hint}; see `penstock runs`")


class LogError(PenstockError):
    """The log refused a request or did not answer within its time limit."""


class LogUnreachable(LogError):
    """No broker answers at the given address."""


class RecordMissing(LogError):
    """No committed record is at an offset that was asked for: it was deleted, or nothing was ever written there."""


class Damaged(LogError):
    """A batch of records fails its checksum or inflates beyond all bounds."""


class SendFailed(LogError):
    """Records were not written, certainly; sending them again cannot duplicate them."""


class OutcomeUnknown(LogError):
    """Records may or may not have been written; only the log itself can tell."""


class Fenced(LogError):
    """Another process writes under this transactional id now; this one must stop."""


class LostPartition(LogError):
    """The consumer group has moved on to another generation; results for the old assignment are void."""


class BrokerError(PenstockError):
    """The embedded broker cannot be started, stopped or found."""


class EngineError(PenstockError):
    """Generation failed or was asked for something it cannot do."""


class Unrecoverable(PenstockError):
    """The recorded and the actual state contradict each other: a restart cannot help, a person has to look."""


class EngineRefused(EngineError, Unrecoverable):
    """An engine cannot work with these settings, this model or what is installed here."""


class BackendError(PenstockError):
    """Training failed or was asked for something it cannot do."""


class Diverged(BackendError, Unrecoverable):
    """A gradient is not finite: the same weights and samples give it again, so a restart would only take time."""


class CheckpointError(PenstockError):
    """A checkpoint cannot be written: the disk is full, or the directory not writable."""


class TrackingError(PenstockError):
    """The experiment tracker refused or cannot be reached."""
