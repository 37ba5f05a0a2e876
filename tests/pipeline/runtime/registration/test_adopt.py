"""`penstock topics adopt` gives a run of an earlier release what it lacks, whether its key has signed it or not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.infra.errors import ConfigError
from penstock.infra.log import Log
from penstock.pipeline.cli import options, topics
from penstock.pipeline.runtime.leases import WriterLease, new_token
from penstock.pipeline.runtime.registration.run_registry import make_key, registration, write
from penstock.topics.catalogue import control_topics_of
from penstock.topics.runs import RunRecord
from tests.support.a_run import CONFIG, RUN
from tests.support.page_records import log_with
from tests.support.refusals import one_line


@pytest.mark.parametrize("signed", [True, False])
def test_a_run_without_control_topics_gets_them_signed_or_not_and_its_writers_take_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, signed: bool
) -> None:
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    log = log_with([])

    @contextmanager
    def at(*_: object) -> Iterator[Log]:
        yield log

    monkeypatch.setattr(options, "at", at)
    if signed:
        make_key(RUN)
    write(log, RunRecord(run=RUN, status="created", config=json.dumps(CONFIG), info="{}", created_ns=1, updated_ns=1))
    log.delete_topics(control_topics_of(RUN))
    for role in ("feeder", "scorer-0", "trainer"):
        message = rf"lacks the topic {RUN}\.control-.*penstock topics adopt {RUN}.*run --resume {RUN}"
        with one_line(ConfigError, match=message):
            WriterLease(log=log, run=RUN, writer=role, token=new_token()).acquire()
    topics.adopt(RUN, yes=True)
    assert ("is already signed" in capsys.readouterr().out) == signed
    topics.adopt(RUN)
    assert registration(log, RUN).signed
    for role in ("launcher", "feeder", "scorer-0", "trainer"):
        WriterLease(log=log, run=RUN, writer=role, token=new_token()).acquire().close()
