"""The folder of a run: a record cannot name another one, and a deletion never leaves it."""

import os
from pathlib import Path

import pytest

from penstock.infra.paths import run_directory, state_path
from penstock.pipeline.archive import delete

RUN = "mine"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path / "state"))
    for name in ("runs/mine/model/weights", "runs/mine/logs/scorer.log", "runs/other/report.txt", "mlflow.db"):
        (tmp_path / "state" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "state" / name).write_text(name)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "data").write_text("data")
    return tmp_path


def everything(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


@pytest.mark.parametrize("run", ["", ".", "..", "../runs", "mine/../other", "/", "/etc", "mine/model", "MINE", "mine\n", "-/.."])
def test_what_is_no_run_id_has_no_folder(run: str) -> None:
    with pytest.raises(ValueError, match="use 1 to 64"):
        run_directory(run)


@pytest.mark.parametrize("name", ["runs", "runs/mine/model", "runs/..", "runs/.", "runs/mine/..", "runs/../runs/mine", "", "runs/UPPER"])
def test_nothing_but_the_folder_of_a_run_is_removed(state: Path, name: str) -> None:
    before = everything(state)
    with pytest.raises(ValueError, match="is not removed, because it is a link or not a run"):
        delete._remove(state_path() / name, keep=None)
    with pytest.raises(ValueError, match="is not removed"):
        delete._remove(state / "elsewhere", keep=None)
    assert everything(state) == before


@pytest.mark.parametrize("keep", [None, "model"])
def test_a_run_whose_folder_is_a_link_is_not_removed(state: Path, keep: str | None) -> None:
    (state_path() / "runs" / "linked").symlink_to(state / "elsewhere")
    with pytest.raises(ValueError, match="is a link"):
        delete._remove(run_directory("linked"), keep=keep)
    (state_path() / "runs").rename(state / "moved")
    (state_path() / "runs").symlink_to(state / "moved")
    with pytest.raises(ValueError, match="is a link"):
        delete._remove(run_directory(RUN), keep=keep)
    assert (state / "elsewhere" / "data").exists()
    assert (state / "moved" / RUN / "logs" / "scorer.log").exists()


@pytest.mark.parametrize(("keep", "left"), [(None, []), ("model", ["mine", "mine/model", "mine/model/weights"])])
def test_a_link_in_a_run_is_removed_and_not_followed(state: Path, keep: str | None, left: list[str]) -> None:
    folder = run_directory(RUN)
    (folder / "to-folder").symlink_to(state / "elsewhere")
    (folder / "logs" / "to-file").symlink_to(state / "elsewhere" / "data")
    (folder / "to-state").symlink_to(state_path())
    (folder / "broken").symlink_to("nowhere")
    delete._remove(folder, keep=keep)
    assert sorted(everything(state_path() / "runs") - {"other", "other/report.txt"}) == left
    assert (state / "elsewhere" / "data").exists()
    assert (state_path() / "mlflow.db").exists()


@pytest.mark.parametrize("mounted", ["mine", "mine/model", "mine/logs", "mine/a b", "mine/é", "mine/model/weights"])
def test_a_folder_in_which_something_is_mounted_is_not_removed(state: Path, mounted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place = os.fsencode(state_path() / "runs" / mounted).replace(b" ", rb"\040")
    (state / "mountinfo").write_bytes(b"36 35 98:0 / / rw - ext4 /dev/x rw\n40 36 98:0 /y %b rw shared:1 - ext4 /dev/x rw\n" % place)
    assert delete._mount_points() != []
    monkeypatch.setattr(delete, "MOUNTS", state / "mountinfo")
    with pytest.raises(ValueError, match="unmount it first"):
        delete._remove(run_directory(RUN), keep=None)
    assert (state_path() / "runs" / "mine" / "model" / "weights").exists()
