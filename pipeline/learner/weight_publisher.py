"""Publishes versions in the background: a thread compares, cuts and sends while the next step is computed.

The rule: one version at a time. Its chunks are sent by the thread; what commits it is done by whoever owns the ledger, who asks for it.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.infra.errors import Diverged, LogError, LogUnreachable
from penstock.infra.log import Log, Producer
from penstock.infra.tensors.adapted import Adapted
from penstock.infra.tensors.finite import LARGEST, broken_tensor
from penstock.infra.tensors.machine_memory import is_supported
from penstock.infra.tensors.stream import TensorBytes, hash_of
from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.pipeline.config.schema import WeightsSection
from penstock.pipeline.learner.policy_trainer import Weights
from penstock.pipeline.runtime.weights.direct import IpcWeightSender
from penstock.pipeline.runtime.weights.publish import Base, chunk_partitions, send_version
from penstock.pipeline.runtime.weights.read import ChunkReader, bring
from penstock.topics import weights
from penstock.topics.weights import Manifest

IN_FLIGHT_BYTES = 32 << 20
"""Sent chunks that are not acknowledged yet."""


@dataclass(slots=True)
class Publication:
    """A version on its way."""

    content: Weights
    version: int
    step: int
    base: Base | None
    started: float = field(default_factory=time.monotonic)
    manifest: Manifest | None = None
    """What is to be committed, once all chunks are acknowledged."""
    adapted: Adapted | None = None
    """The same weights apart, if only their adapters are sent."""
    shown: Sequence[TensorBytes] | None = None
    """The tensors where this machine's workers see them, if they do."""
    failure: BaseException | None = None
    thread: threading.Thread | None = None

    @property
    def sent(self) -> bool:
        """True once the thread has ended."""
        return self.thread is not None and not self.thread.is_alive()


@dataclass(slots=True)
class WeightPublisher:
    """Sends versions: whole, as changes to the last one, whose tensors it keeps for that, or as adapters on version 0."""

    log: Log
    run: str
    chosen: WeightsSection
    count: int
    """Partitions of `weights`."""
    base: Base | None = None
    """The newest version; without it the next one is sent whole, or as adapters."""
    notify: Callable[[str], None] = lambda _: None
    """Gets a line where weights cannot be handed to this machine's workers."""
    _producer: Producer | None = None
    _adapted: tuple[int, Adapted] | None = None
    """The newest version, if its adapters were sent."""
    _ipc_sender: IpcWeightSender | None = None
    """Where this machine's workers see the newest version, under `transport = "ipc"`."""

    def begin(self, content: Weights, *, version: int, step: int, manifests: Mapping[int, Manifest], whole: bool = False) -> Publication:
        """Start to send a version, whose tensors are copied already."""
        adapted = None if whole else self._may_be_adapters(content, manifests)
        base = None if whole or adapted is not None or not self._may_be_delta(manifests) else self.base
        publication = Publication(content, version, step, base, adapted=adapted)
        origin = manifests.get(0)
        publication.thread = threading.Thread(target=self._send, args=(publication, origin), daemon=True, name="publish")
        publication.thread.start()
        return publication

    def finish(self, publication: Publication) -> Manifest:
        """Wait for the chunks of a version; returns the manifest to commit, or raises what has gone wrong."""
        assert publication.thread is not None
        publication.thread.join()
        if publication.failure is not None:
            raise publication.failure
        assert publication.manifest is not None
        return publication.manifest

    def committed(self, publication: Publication) -> None:
        """Compare the next version with this one; where that will be adapters, only those of this one are kept."""
        adapted = publication.adapted if publication.version else publication.content.adapted
        if adapted is not None and self.chosen.encoding != "merged":
            self.base, self._adapted = None, (publication.version, adapted)
            return
        tensors = publication.content.tensors if publication.shown is None else publication.shown
        self.base, self._adapted = Base(version=publication.version, tensors=sorted(tensors, key=lambda tensor: tensor.name)), None

    def newest(self, published: Manifest) -> Weights | None:
        """The weights of the newest version, if that is the one that this manifest describes and they are still in memory."""
        version, hash_name = published.version, hash_of(published.digest)
        if self._adapted is not None and self._adapted[0] == version:
            return Weights(self._adapted[1].merged, hash_name)
        base = self.base
        return Weights(lambda: base.tensors, hash_name) if base is not None and base.version == version else None

    def read_back(self, manifests: Mapping[int, Manifest], version: int) -> LogError | None:
        """Read a published version, to compare the next one with it; returns why that is not possible. Raises `LogUnreachable`."""
        copy = WeightCopy()
        try:
            bring(copy, self.log, manifests, version, run=self.run)
        except LogUnreachable:
            raise
        except LogError as error:
            return error
        shown = self._show(copy.tensors, manifests[version], manifests.get(0))
        self.base = Base(version=version, tensors=copy.tensors() if shown is None else shown)
        return None

    def look_through(self, manifests: Mapping[int, Manifest], version: int) -> LogError | None:
        """Read all chunks that a published version is put together from, without keeping them; returns what is wrong with them."""
        reader = ChunkReader(self.log, self.run)
        try:
            for manifest in weights.chain(manifests, version):
                for _ in reader.read(manifest):
                    pass
        except LogUnreachable:
            raise
        except LogError as error:
            return error
        finally:
            reader.close()
        return None

    def close(self) -> None:
        """Close the producer, and what this machine's workers see."""
        if self._producer is not None:
            self._producer.close()
        if self._ipc_sender is not None:
            self._ipc_sender.close()

    def _may_be_adapters(self, content: Weights, manifests: Mapping[int, Manifest]) -> Adapted | None:
        """The adapters to send, if readers have what is below them as version 0 and no version had to be sent in another way."""
        adapted, origin = content.adapted, manifests.get(0)
        if self.chosen.encoding == "merged" or adapted is None or origin is None:
            return None
        newest = manifests[max(manifests)]
        if newest.version and newest.encoding != "adapter":
            return None
        return adapted if adapted.below_digest(hash_of(origin.digest)) == origin.digest else None

    def _may_be_delta(self, manifests: Mapping[int, Manifest]) -> bool:
        """Whether whoever joins after the next version has not too much to read, if that is a delta."""
        if self.base is None or self.base.version != max(manifests, default=-1):
            return False
        anchor, *deltas = weights.chain(manifests, self.base.version)
        return len(deltas) + 1 < self.chosen.anchor_every and sum(delta.nbytes for delta in deltas) < anchor.nbytes

    def _show(
        self, tensors: Callable[[], Sequence[TensorBytes]], manifest: Manifest, origin: Manifest | None
    ) -> Sequence[TensorBytes] | None:
        """Let this machine's workers see a version whose chunks are sent; returns its tensors where they lie then."""
        if self.chosen.transport != "ipc" or origin is None:
            return None
        if self._ipc_sender is None:
            if not is_supported():
                self.notify('weights.transport = "ipc" needs Linux with /proc and memfd: all workers read the log')
                return None
            self._ipc_sender = IpcWeightSender(self.run, origin, notify=self.notify)
        try:
            return self._ipc_sender.put(tensors(), version=manifest.version, digest=manifest.digest)
        except LogError as error:
            self.notify(f"version {manifest.version} is not handed to this machine's workers, who read the log: {error}")
            return None

    def _send(self, publication: Publication, origin: Manifest | None) -> None:
        try:
            if self._producer is None:
                self._producer = self.log.producer(max_in_flight_bytes=IN_FLIGHT_BYTES, linger_ms=0.0)
            content, adapted = publication.content, publication.adapted
            if (name := broken_tensor(content.tensors)) is not None:
                broken = f"after optimizer step {publication.step - 1} {name} holds values that are not finite or above {LARGEST:g}"
                raise Diverged(f"version {publication.version} is not published: {broken}")
            manifest = send_version(
                self._producer,
                content.tensors if adapted is None else (),
                run=self.run,
                version=publication.version,
                step=publication.step,
                partitions=chunk_partitions(publication.version, count=self.count),
                max_bytes=self.chosen.chunk_mib * 2**20,
                digest=lambda: content.digest,
                base=publication.base,
                adapters=adapted.blocks(weights.layout(origin)) if adapted is not None and origin is not None else None,
            )
            publication.shown = self._show(lambda: content.tensors, manifest, origin or (manifest if not manifest.version else None))
            if adapted is not None:
                content.forget()
            publication.manifest = manifest
        except BaseException as error:  # this thread's edge: its owner raises it again
            publication.failure = error
