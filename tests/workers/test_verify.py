"""`penstock verify`: an unchanged model is verified at each level; whatever is changed, missing or added is found and named."""

import io
import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.checkpoints import write_manifest
from penstock.infra.memory.log import MemoryLog
from penstock.infra.paths import run_directory
from penstock.pipeline.archive.archived_log import ArchivedSource, open_archive
from penstock.pipeline.cli import main
from penstock.pipeline.inspect.audit.chunk_digests import TopicDigests
from penstock.pipeline.inspect.audit.report import audit
from penstock.pipeline.inspect.report.card import card
from penstock.pipeline.inspect.report.provenance import publish, read_statement
from penstock.topics.wire.record import Record
from tests.support.archived import archive_of
from tests.support.edited_run import EditedRun
from tests.support.worker_set import complete, config_of, records_of

pytest.importorskip("torch")
from safetensors.torch import load_file, save_file

RUN = "verified"
ROLES = ("trainer", "rollout", "scorer", "feeder", "evaluator", "tracker")


@dataclass(frozen=True, slots=True)
class Verified:
    """A model with its statement, and its run's records."""

    model: Path
    archive: Path
    records: list[Record]

    def __call__(self, capsys: pytest.CaptureFixture[str], *words: str, log: Path | None = None) -> tuple[int, dict[str, Any]]:
        """Exit status and result of `penstock verify`."""
        status = main(["verify", str(self.model), "--log", str(log or self.archive), "--json", *words])
        printed = capsys.readouterr()
        assert printed.out, printed.err
        return status, json.loads(printed.out)

    def named(self, capsys: pytest.CaptureFixture[str], *words: str, log: Path | None = None) -> set[tuple[int, str, str]]:
        """Level, kind and name of each difference that is found."""
        status, found = self(capsys, *words, log=log)
        assert status == (0 if found["verified"] else 1)
        return {(problem["level"], problem["kind"], problem["name"]) for problem in found["problems"]}


@pytest.fixture(scope="module")
def made(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path, list[Record]]]:
    """A run of four steps with an evaluation, checkpoints and an exported model; its archive and its records."""
    directory = tmp_path_factory.mktemp("verified")
    held_out = directory / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    config = config_of(
        tiny_model,
        directory,
        rollout={"workers": 1},
        trainer={"export": True, "checkpoint_every": 2},
        eval={"source": str(held_out), "samples": 2, "every": 2},
    )
    log = MemoryLog()
    complete(log, RUN, config, roles=ROLES)
    records = [record for topic in (*log.topics(f"{RUN}."), "penstock.runs") for record in records_of(log, topic)]
    model = directory / "model"
    shutil.copytree(run_directory(RUN) / "model", model)
    (model / "README.md").write_text("# A model\n")
    archive = archive_of(RUN, records, directory / "archive")
    state(model, archive)
    yield model, archive, records
    shutil.rmtree(run_directory(RUN))


@pytest.fixture
def verified(made: tuple[Path, Path, list[Record]], tmp_path: Path) -> Verified:
    """A copy to be changed."""
    model, archive, records = made
    shutil.copytree(model, tmp_path / "model")
    shutil.copytree(archive.parent, tmp_path / "archive")
    return Verified(tmp_path / "model", tmp_path / "archive" / RUN, records)


def state(model: Path, archive: Path) -> None:
    with redirect_stdout(io.StringIO()):
        assert main(["card", str(archive), "--out", str(model)]) == 0


def restate(model: Path, claims: dict[str, Any]) -> None:
    """Write a card and a statement of other claims, which fit each other."""
    publish(model, card(claims), claims, notify=print)


def claims_of(model: Path) -> dict[str, Any]:
    return dict(read_statement(model)["predicate"])


def test_an_unchanged_model_is_verified_at_three_levels_with_the_same_steps_each_time(
    verified: Verified, capsys: pytest.CaptureFixture[str]
) -> None:
    (verified.model / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    results = [verified(capsys, "--steps", "2") for _ in range(2)]
    for status, found in results:
        assert (status, found["verified"], found["problems"]) == (0, True, [])
        files, log, steps = found["levels"]
        assert (files["files"], log["checkpoints"]) == (sum(1 for path in verified.model.iterdir()) - 2, 2)
        assert log["audit"].startswith("audit: clean")
        assert [step["bits"] for step in steps["steps"]] == [True, True]
    assert len({tuple(step["step"] for step in found["levels"][2]["steps"]) for _, found in results}) == 1


def flip(path: Path, at: int | None = None, *, bit: int = 0) -> None:
    """Turn one bit of a file, in its middle by default."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: flip(model / "model.safetensors"), {(1, "changed", "model.safetensors"), (2, "changed", "model")}),
        (lambda model: flip(model / "README.md"), {(1, "changed", "README.md")}),
        (lambda model: (model / "tokenizer.json").unlink(), {(1, "missing", "tokenizer.json")}),
        (lambda model: (model / "more.bin").write_bytes(b"x"), {(1, "added", "more.bin")}),
        (lambda model: flip(model / "provenance.json", 0), {(1, "changed", "provenance.json")}),
    ],
    ids=["the weights", "the card", "a missing file", "an added file", "the statement"],
)
def test_a_changed_missing_or_added_file_is_named(
    verified: Verified, capsys: pytest.CaptureFixture[str], change: Callable[[Path], Any], expected: set[tuple[int, str, str]]
) -> None:
    change(verified.model)
    assert verified.named(capsys) == expected


def test_a_byte_changed_at_random_in_any_file_of_a_model_is_named(verified: Verified, capsys: pytest.CaptureFixture[str]) -> None:
    """Level 1 covers files and card; the rest of the statement is compared with the log."""
    chosen, later = random.Random(38), 0
    for file in sorted(path for path in verified.model.iterdir() if path.suffix != ".sig"):
        data = file.read_bytes()
        for _ in range(24 if file.name in ("provenance.json", "README.md") else 2):
            flip(file, at := chosen.randrange(len(data)), bit=chosen.randrange(8))
            status = main(["verify", str(verified.model)])
            assert capsys.readouterr().err == ""
            if status == 0:
                later += 1
                assert later > 3 or verified.named(capsys), data[max(0, at - 60) : at + 20]
            file.write_bytes(data)
    assert later


@pytest.mark.parametrize(("key", "more"), [("end", 10), ("first", -1), ("records", 1)])
def test_a_span_of_offsets_that_is_not_that_of_its_records_is_named(
    verified: Verified, capsys: pytest.CaptureFixture[str], key: str, more: int
) -> None:
    claims = claims_of(verified.model)
    claims["topics"]["metrics/0"][key] += more
    restate(verified.model, claims)
    assert "metrics/0" in {name for _, _, name in verified.named(capsys)}


def test_every_claim_of_a_statement_with_a_card_that_fits_is_compared_with_the_log(
    verified: Verified, capsys: pytest.CaptureFixture[str]
) -> None:
    def altered(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: altered(item) if key == list(value)[-1] else item for key, item in value.items()} or {"more": "0"}
        if isinstance(value, list):
            return [*value[:-1], altered(value[-1])] if value else [{"more": "0"}]
        return not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else f"{value or ''}0"

    sound = claims_of(verified.model)
    kept = {name: sound[name] for name in ("run", "ledger", "topics")}
    restate(verified.model, {name: altered(value) for name, value in sound.items()} | kept)
    assert main(["verify", str(verified.model)]) == 0
    capsys.readouterr()
    assert verified.named(capsys) == {(2, "changed", name) for name in sound.keys() - kept.keys() - {"licences"}}
    restate(verified.model, sound | {"ledger": {"head": "0" * 64, "entries": 3}})
    assert verified.named(capsys) == {(2, "changed", "ledger")}
    restate(verified.model, sound | {"run": "another"})
    assert verified.named(capsys, "--steps", "1") == {(2, "changed", str(verified.archive))}


def test_a_model_in_other_files_is_the_same_and_a_quantised_one_is_another_even_if_the_statement_names_its_files(
    verified: Verified, capsys: pytest.CaptureFixture[str]
) -> None:
    file = verified.model / "model.safetensors"
    tensors, sound = load_file(file), claims_of(verified.model)
    for part in range(2):
        save_file(dict(sorted(tensors.items())[part::2]), verified.model / f"model-{part}.safetensors")
    file.unlink()
    restate(verified.model, sound)
    assert verified.named(capsys) == set()
    for part in range(2):
        (verified.model / f"model-{part}.safetensors").unlink()
    save_file({f"{name}.int8": (100 * tensor).char() for name, tensor in tensors.items()}, file)
    restate(verified.model, sound)
    assert verified.named(capsys) == {(2, "changed", "model")}


def test_the_card_of_a_running_run_is_still_verified_after_its_end(verified: Verified, capsys: pytest.CaptureFixture[str]) -> None:
    edited = EditedRun(RUN, verified.records)
    last_ms = edited.records[edited.one("ledger", kind="step", step=1)[0]].timestamp_ms
    early = [record for record in verified.records if record.timestamp_ms <= last_ms]
    live = replace(verified, model=verified.model.parent / "live")
    state(live.model, archived(verified, early))
    stated = claims_of(live.model)
    assert stated["status"] == "running" and stated["steps"] == 2
    assert live.named(capsys) == set()
    restate(live.model, stated | {"samples": stated["samples"] + 1})
    assert live.named(capsys) == {(2, "changed", "samples")}


def archived(verified: Verified, records: list[Record]) -> Path:
    return archive_of(RUN, records, verified.archive.parent / "another")


TOPICS = ("run", "prompts", "rollouts", "groups", "weights", "ledger", "metrics")
SLOW = [pytest.param(table, marks=pytest.mark.slow) for table in (*TOPICS[:-1], "chunks")]


@pytest.mark.slow
@pytest.mark.parametrize("topic", TOPICS)
def test_a_changed_missing_or_added_record_of_any_topic_is_named(
    verified: Verified, capsys: pytest.CaptureFixture[str], topic: str
) -> None:
    indices = [index for index, record in enumerate(verified.records) if record.topic == f"{RUN}.{topic}"]
    middle = indices[len(indices) // 2]
    record = verified.records[middle]
    name = f"{topic}/{record.partition}"
    missing = [*verified.records[:middle], *verified.records[middle + 1 :]]
    later = [replace(other, timestamp_ms=other.timestamp_ms + (other is record)) for other in verified.records]
    last = max(other.offset for other in verified.records if (other.topic, other.partition) == (record.topic, record.partition))
    added = [*verified.records, replace(record, offset=last + 1)]
    for kind, records in (("changed", later), ("missing", missing), ("added", added)):
        folder = archived(verified, records)
        found = verified.named(capsys, log=folder)
        shutil.rmtree(folder)
        if kind == "added" and topic in ("metrics", "run"):
            assert found == set()  # workers and operators write there after the end of a run
        else:
            assert (2, kind, name) in found


@pytest.mark.parametrize("table", ["metrics", *SLOW])
def test_a_bit_that_is_turned_in_a_file_of_an_archive_is_found(verified: Verified, capsys: pytest.CaptureFixture[str], table: str) -> None:
    """Bits that no reader uses, as in statistics, change no record: then every record is what it was."""
    chosen = random.Random(table)
    files = sorted((verified.archive / table).rglob("*.parquet"))
    for _ in range(3):
        file = chosen.choice(files)
        data = file.read_bytes()
        flip(file, chosen.randrange(4, len(data) - 4))
        found = verified.named(capsys)
        assert found or same_records(verified), file
        file.write_bytes(data)


def same_records(verified: Verified) -> bool:
    opened, digests = open_archive(str(verified.archive)), TopicDigests()
    assert opened is not None
    audit(ArchivedSource(opened), (), digests)
    return digests.as_table() == json.loads((verified.model / "provenance.json").read_text())["predicate"]["topics"]


def test_a_checkpoint_that_differs_from_the_ledger_is_named(verified: Verified, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_directory(RUN) / "checkpoints" / "step-00000002"
    saved = verified.model.parent / "saved"
    shutil.copytree(folder, saved)
    try:
        flip(folder / "backend" / "trainer.pt")
        assert verified.named(capsys) == {(2, "changed", "checkpoints/step-00000002")}
        write_manifest(folder)  # a forger writes a manifest that fits
        assert verified.named(capsys) == {(2, "changed", "checkpoints/step-00000002")}
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        (folder / "more").write_text("x")
        assert verified.named(capsys) == {(2, "changed", "checkpoints/step-00000002")}
    finally:
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)


def test_a_forged_step_whose_chain_and_statement_fit_is_found_by_repeating_it(
    verified: Verified, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = EditedRun(RUN, verified.records)
    entry = edited.one("ledger", kind="step", step=2)[1]
    loss = entry.metrics["loss"] + 1e-6
    bits = struct.unpack("<q", struct.pack("<d", loss))[0]
    edited.alter("ledger", where={"kind": "step", "step": 2}, loss_bits=bits, metrics={**entry.metrics, "loss": loss})
    folder = archived(verified, edited.records)
    state(verified.model, folder)
    assert verified.named(capsys, log=folder) == set()
    assert verified.named(capsys, "--steps", "4", log=folder) == {(3, "changed", "step 2")}
