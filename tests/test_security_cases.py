"""Each security case of the folder next to this checkout is safe, and a default test checks the same rule without it."""

import ast
import os
import subprocess
from pathlib import Path

import pytest

from tests.support.children import child
from tests.support.paths import ROOT

CASES = sorted((ROOT.parent / "shared/cases/security").glob("*/run.sh"))
REGISTRATION = "tests/pipeline/runtime/registration"
DEFAULT = {
    "01-register-runs-code": f"{REGISTRATION}/test_trust.py"
    "::test_the_register_configures_nothing_and_only_a_run_that_exists_is_refused_for_it",
    "02-resume-latest": f"{REGISTRATION}/test_trust.py::test_latest_is_this_users_newest_run_whatever_date_others_register",
    "03-terminal-escapes": "tests/topics/wire/test_visible.py::test_what_is_printed_is_visible_and_what_rich_draws_keeps_its_colours",
    "04-fuzz": "tests/topics/wire/test_mutated.py::test_ten_thousand_damaged_records_are_refused_in_time_and_in_little_memory",
    "05-sql-opens-files": "tests/pipeline/archive/test_sql_limits.py::test_no_statement_opens_a_file_or_changes_a_setting",
    "06-run-id-is-a-path": "tests/pipeline/archive/test_run_folder.py::test_nothing_but_the_folder_of_a_run_is_removed",
    "07-one-record-blinds-all": "tests/pipeline/inspect/test_hostile_register.py::test_a_record_of_a_tenant_takes_no_other_run_away",
    "08-ui-question-without-end": "tests/pipeline/cli/test_ui.py"
    "::test_while_a_question_is_computed_other_pages_answer_and_it_ends_with_its_browser",
    "09-replay-score-runs-code": f"{REGISTRATION}/test_trust.py::test_scoring_again_loads_what_the_record_names_only_when_it_is_trusted",
    "10-reward-reads-password": "tests/infra/sandbox/test_rules.py"
    "::test_after_hiding_no_secret_is_in_proc_while_the_process_and_its_programs_have_it",
    "11-reward-leaves-a-process": "tests/infra/sandbox/test_keeper.py::test_nothing_that_a_function_starts_outlives_its_child",
    "12-anybody-ends-a-run": "tests/workers/trainer/test_arrivals.py::test_nobody_else_ends_a_run_or_chooses_its_best_checkpoint",
    "13-ui-markup": "tests/pipeline/inspect/test_html.py::test_no_text_of_a_run_becomes_markup",
    "14-embedded-broker-any-user": "tests/infra/broker/test_broker_password.py::test_a_process_that_knows_the_ports_can_do_nothing",
}
"""Case -> the default test of its rule."""


@pytest.mark.parametrize("case", sorted({*DEFAULT, *(file.parent.name for file in CASES)}))
def test_the_rule_of_a_case_has_a_default_test(case: str) -> None:
    file, _, name = DEFAULT[case].partition("::")
    (test,) = (node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef) and node.name == name)
    assert "pytest.mark.slow" not in map(ast.unparse, test.decorator_list)


@pytest.mark.slow
@pytest.mark.skipif(not CASES, reason="no folder ../shared/cases/security here")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.parent.name)
def test_a_security_case_is_safe(case: Path) -> None:
    with child(["bash", str(case)], env={**os.environ, "PENSTOCK_DIR": str(ROOT)}, stdout=subprocess.PIPE, text=True) as running:
        said, _ = running.communicate(timeout=600)
    if running.returncode == 2:
        pytest.skip(f"cannot be tried here: {said.strip().splitlines()[-1:]}")
    assert running.returncode == 0, said
