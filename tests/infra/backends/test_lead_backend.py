"""Rank 0's backend of several processes: who writes a checkpoint."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock.infra.backends.ranks.lead_backend import LeadBackend


class Messages:
    """Records what is sent to the other ranks; each of them replies that it succeeded."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def broadcast(self, **message: Any) -> None:
        self.sent.append(message["do"])

    def replies(self) -> list[None]:
        return [None, None]


@pytest.mark.parametrize(("in_background", "sent"), [(True, []), (False, ["save"])])
def test_state_that_all_processes_have_is_written_by_one_which_may_do_it_in_a_thread(
    tmp_path: Path, in_background: bool, sent: list[str]
) -> None:
    own, processes = Mock(saves_in_background=in_background), Messages()
    lead = LeadBackend(own, processes)  # type: ignore[arg-type]
    lead.save(tmp_path)
    assert lead.saves_in_background == in_background
    assert processes.sent == sent
    own.save.assert_called_once_with(tmp_path)
