"""Each security case of the folder next to this checkout is safe."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.children import child
from tests.support.paths import ROOT

CASES = sorted((ROOT.parent / "shared/cases/security").glob("*/run.sh"))


@pytest.mark.slow
@pytest.mark.skipif(not CASES, reason="no folder ../shared/cases/security here")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.parent.name)
def test_a_security_case_is_safe(case: Path) -> None:
    with child(["bash", str(case)], env={**os.environ, "PENSTOCK_DIR": str(ROOT)}, stdout=subprocess.PIPE, text=True) as running:
        said, _ = running.communicate(timeout=600)
    if running.returncode == 2:
        pytest.skip(f"cannot be tried here: {said.strip().splitlines()[-1:]}")
    assert running.returncode == 0, said
