"""Models by their name on the hub, from a cache in the hub's layout; nothing is asked of a network."""

from pathlib import Path

import pytest

from penstock.infra.errors import BackendError
from penstock.pipeline.config import fields
from tests.support.least_config import least_config

COMMIT = "9c1f0a7d2b3e4f5a6b7c8d9e0f1a2b3c4d5e6f70"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds one model, whose branch `main` is at one commit."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--org--small"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots" / COMMIT).mkdir(parents=True)
    (model / "snapshots" / COMMIT / "config.json").write_text("{}")
    fields._snapshot.cache_clear()
    return tmp_path


def test_a_name_is_resolved_to_a_commit_whose_directory_does_not_change_with_the_branch(cache: Path) -> None:
    assert fields.pinned("hf:org/small") == fields.pinned("hf:org/small@main") == f"hf:org/small@{COMMIT}"
    (cache / "models--org--small" / "refs" / "main").write_text("0" * 40)
    fields._snapshot.cache_clear()
    directory = fields.local_model(f"hf:org/small@{COMMIT}")
    assert directory == cache / "models--org--small" / "snapshots" / COMMIT
    assert (directory / "config.json").is_file()


@pytest.mark.usefixtures("cache")
def test_a_model_that_is_neither_in_the_cache_nor_to_be_had_is_one_line() -> None:
    with pytest.raises(BackendError, match=r"hf:org/other is not in the local cache .*hf download org/other"):
        fields.local_model("hf:org/other")


def test_a_path_stays_a_path_and_a_name_is_no_path(tmp_path: Path) -> None:
    assert fields.pinned(str(tmp_path)) == str(tmp_path)
    assert fields.local_model(str(tmp_path)) == tmp_path
    config = least_config(model={"path": "hf:org/small@main"})
    assert config.model.path == "hf:org/small@main"
