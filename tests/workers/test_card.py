"""`penstock card` of a real run, on the broker and from an archive: the same facts, and a proof that the record itself supports."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.infra.kafka.log import KafkaLog
from penstock.pipeline import cli
from penstock.pipeline.archive.export import export
from penstock.pipeline.inspect.report import inclusion
from penstock.pipeline.learner.ledger_history import read_ledger_history
from tests.support.recorded_run import RecordedRun


def test_a_card_is_the_same_on_the_broker_and_in_an_archive_and_proves_a_group(
    recorded: RecordedRun, log: KafkaLog, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(*words: str) -> dict[str, Any]:
        assert cli.main([*words, "--bootstrap", recorded.bootstrap]) == 0
        return dict(json.loads(capsys.readouterr().out))

    folders = [tmp_path / "broker", tmp_path / "archived"]
    export(log, recorded.run, tmp_path / "run")
    runs = [recorded.run, str(tmp_path / "run")]
    shown = [printed("card", run, "--out", str(out), "--json") for run, out in zip(runs, folders, strict=True)]
    assert shown[0]["ledger"] == read_ledger_history(log, recorded.run).ledger_state.end
    assert shown[0]["audit"]["clean"] and shown[0]["weights"] == recorded.report["weights"]["digest"]
    assert len({folder.joinpath("README.md").read_text() for folder in folders}) == 1
    assert len(shown[0]["versions"]) == recorded.report["weights"]["versions"]
    group = str(read_ledger_history(log, recorded.run).trained[0])
    proof = printed("card", recorded.run, "--out", str(folders[0]), "--prove", group, "--record")
    read = inclusion.check(proof)
    assert (read.root, read.head, read.has_record) == (shown[0]["prompts"]["root"], shown[0]["ledger"]["head"], True)
    (tmp_path / "proof.json").write_text(json.dumps(proof))
    assert printed("verify", str(tmp_path / "proof.json"), "--json")["root"] == read.root
    proof["leaf"]["prompt"] = "another"
    with pytest.raises(inclusion.InvalidProof):
        inclusion.check(proof)
    words = ["card", recorded.run, "--out", str(folders[0]), "--prove", "99999", "--bootstrap", recorded.bootstrap]
    assert cli.main(words) == cli.app.USAGE
    assert "was not trained on this group" in capsys.readouterr().err
