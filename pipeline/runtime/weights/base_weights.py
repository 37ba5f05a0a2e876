"""The bytes of version 0, retained by readers of a run whose versions are adapters, to merge each adapter into.

This is a second copy of the model. Without it version 0 is read again for each version.
"""

from functools import partial

from penstock.infra.tensors.weight_copy import WeightCopy
from penstock.topics.versions import weight_adapter
from penstock.topics.weights import Manifest


class BaseWeights:
    """The bytes of version 0, once they were needed."""

    def __init__(self) -> None:
        self._data: bytearray | None = None
        self._digest = ""

    def serves(self, copy: WeightCopy, origin: Manifest) -> bool:
        """True if adapters on version 0, described by `origin`, can be merged into this copy without reading version 0."""
        return self._data is not None and self._digest == origin.digest and len(self._data) == len(copy.data)

    def keep(self, copy: WeightCopy, origin: Manifest) -> None:
        """Take the bytes of version 0, which the copy has now."""
        self._data, self._digest = bytearray(copy.data), origin.digest

    def forget(self) -> None:
        """Read version 0 again for the next version."""
        self._data = None

    def merge(self, copy: WeightCopy, stream: bytearray) -> None:
        """Make the copy the version that adapters describe. Raises `ValueError` with nothing overwritten."""
        assert self._data is not None, "version 0 is read before adapters on it"
        copy.change(partial(weight_adapter.apply, stream, memoryview(self._data)))


def merge_into_origin(copy: WeightCopy, stream: bytearray) -> None:
    """The same for a copy of version 0 itself; nothing is retained. Raises `ValueError` with nothing overwritten."""
    copy.change(lambda data: weight_adapter.apply(stream, data, data))
