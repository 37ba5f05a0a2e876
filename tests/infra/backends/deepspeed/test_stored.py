"""Files of a DeepSpeed checkpoint are data: what they name is not called, and files that others may write are not read."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.infra.backends.deepspeed import backend
from penstock.infra.errors import BackendError

pytestmark = pytest.mark.costly  # imports transformers


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("function", [os.system, exec, eval, subprocess.check_output, sys.exit, os.mkdir, getattr])
def test_a_function_that_a_file_names_is_not_called(tmp_path: Path, function: Any) -> None:
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {}, "random": Calls(function, f"{tmp_path}/made")}, file)
    with pytest.raises(BackendError, match=r"was not loaded: it refers to \S+, which DeepSpeed does not store and which could run code$"):
        backend.check_stored(tmp_path)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("path", "mode"), [("x.pt", 0o646), ("x.pt", 0o660), (".", 0o777), (".", 0o770), (".", 0o1777)])
def test_a_file_or_folder_that_others_may_write_is_refused(tmp_path: Path, path: str, mode: int) -> None:
    torch.save({"steps": 1}, tmp_path / "x.pt")
    (tmp_path / "x.pt").chmod(0o600)
    assert backend.read_stored(tmp_path / "x.pt") == {"steps": 1}
    (tmp_path / path).chmod(mode)
    with pytest.raises(BackendError, match=r"other users can write to .*: run chmod"):
        backend.read_stored(tmp_path / "x.pt")
