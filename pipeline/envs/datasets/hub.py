"""Rows of Hugging Face `datasets`: a name on the hub, a folder of data files, or a folder that `save_to_disk` wrote."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.pipeline.config.plugins import nearest
from penstock.pipeline.envs.datasets.files import row_of
from penstock.pipeline.envs.datasets.rows import DataError


class Hub:
    """Rows of a `datasets.Dataset`, which maps its Arrow files into memory."""

    generated = False

    def __init__(self, name: str, *, base_dir: Path, split: str, options: Mapping[str, Any]) -> None:
        rows, self._name = _open(name, base_dir=base_dir, split=split, options=dict(options)), f"hf:{name}[{split}]"
        self.digest = hashlib.sha256(str(rows._fingerprint).encode()).hexdigest()
        self._rows = rows.with_format("arrow")  # values as they are stored: no image or sound is decoded

    def __len__(self) -> int:
        return len(self._rows)

    def raw(self, index: int) -> dict[str, Any]:
        return row_of(self._rows[index], 0)

    def origin(self, index: int) -> str:
        return f"{self._name}:{index + 1}"


def _open(name: str, *, base_dir: Path, split: str, options: dict[str, Any]) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"hf:{name} needs the package datasets: pip install '.[data]' in the checkout ({error})") from error
    folder = base_dir / Path(name).expanduser()
    config = options.pop("config", None)
    try:
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            found = datasets.load_from_disk(str(folder))
        else:
            # A plain split is looked up below, so that an error can list the existing ones; the library resolves slices.
            part = {"split": split} if any(sign in split for sign in "[+") else {}
            found = datasets.load_dataset(str(folder) if folder.is_dir() else name, config, **part, **options)
    # The boundary to a library that reads the network, caches and files: its errors have no common type.
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DataError(f"hf:{name}: cannot load it: {type(error).__name__}: {reason[:300]}") from error
    if not isinstance(found, dict):
        return found
    if split not in found:
        raise DataError(f"hf:{name}: no split {split!r}{nearest(split, found)} (it has: {', '.join(found)})")
    return found[split]
