"""Makes a worker process die by SIGKILL whenever it decodes a certain payload, as by a fault in native code or too little memory."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.topics.wire.codec import Codec
from tests.support.signals import signal_self


def settings(schema: str, mark: bytes, *, deaths: Path, times: int) -> Mapping[str, str]:
    """The environment for `install`: payloads of `schema` with `mark` in them kill `times` times; each death adds a byte to `deaths`."""
    return {"DEADLY_SCHEMA": schema, "DEADLY_MARK": mark.hex(), "DEADLY_FILE": str(deaths), "DEADLY_TIMES": str(times)}


def install() -> None:
    """To be run first in the new process."""
    schema, mark = os.environ["DEADLY_SCHEMA"], bytes.fromhex(os.environ["DEADLY_MARK"])
    plain = Codec.decode

    def decode(self: Codec, value: Any) -> Any:
        if self.name == schema and mark in bytes(value):
            _die()
        return plain(self, value)

    Codec.decode = decode  # type: ignore[method-assign]


def _die() -> None:
    with Path(os.environ["DEADLY_FILE"]).open("ab") as file:
        if file.tell() >= int(os.environ["DEADLY_TIMES"]):
            return
        file.write(b"+")
    signal_self(signal.SIGKILL)
