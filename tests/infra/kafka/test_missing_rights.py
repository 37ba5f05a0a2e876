"""A refusal by a cluster's access rules is one line that says which command prints the missing ones."""

import pytest
from kafka import errors

from penstock.infra.kafka.errors import translate


@pytest.mark.parametrize(
    "error",
    [
        errors.TopicAuthorizationFailedError({"r.control-feeder"}),
        errors.GroupAuthorizationFailedError("r.scorer"),
        errors.TransactionalIdAuthorizationFailedError("r.trainer"),
        errors.ClusterAuthorizationFailedError(),
        errors.TopicAuthorizationFailedError("x\n" * 1000),
    ],
    ids=lambda error: str(error)[:40],
)
def test_a_missing_right_is_one_line_with_the_command_that_prints_the_rules(error: errors.KafkaError) -> None:
    text = str(translate(error, "cannot take over r.feeder"))
    assert text.startswith("cannot take over r.feeder: ")
    assert text.endswith("; create the ACLs that `penstock topics acls RUN` prints")
    assert "\n" not in text
    assert len(text) < 420


def test_other_errors_name_no_rules() -> None:
    for error in (errors.SaslAuthenticationFailedError("x"), errors.MessageSizeTooLargeError("x")):
        assert "acls" not in str(translate(error, "x"))
