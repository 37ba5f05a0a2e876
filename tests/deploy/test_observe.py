"""`deploy/observe/`: each alert fires for what it is about and for nothing in an ordinary run; rules and panels name metrics that exist."""

import json
import re
import shutil
import threading
from pathlib import Path

import pytest

from penstock.infra.memory.log import MemoryLog
from penstock.pipeline.runtime.reporting.health_and_metrics import GAUGES, Health, family_of
from penstock.pipeline.runtime.reporting.reporter import Reporter
from penstock.topics.metrics import TABLES, WORKER
from tests.support.paths import ROOT
from tests.support.promtool import promtool
from tests.support.worker_set import PIPELINE

OBSERVE = ROOT / "deploy" / "observe"
RULES = (OBSERVE / "rules.yml").read_text(encoding="utf-8")
ALERTS = re.findall(r"alert: (\w+)", RULES)
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")

TRAINER = 'run="r", role="trainer", worker="trainer"'
USE = f"penstock_time_seconds_total{{{TRAINER}, use="
ROLLOUT = 'run="r", role="rollout", worker="rollout-0"'
EXIT = "kube_pod_container_status_last_terminated_exitcode"
OUTCOMES = {"scored": 70, "filtered": 29, "failed": 1}
ORDINARY = {
    'up{job="penstock", instance="a:9100"}': "1+0x120",
    **{f'penstock_uptime_seconds{{run="r", role="{role}", worker="{role}"}}': "0+60x120" for role in PIPELINE},
    **{f'{EXIT}{{pod="p{code}", container="rollout"}}': f"{code}+0x120" for code in (0, 1, 137, 143)},
    f"penstock_step_total{{{TRAINER}}}": "0+3x120",
    'penstock_unfinished{run="r", role="feeder"}': "6+0x120",
    'penstock_admissible{run="r", role="feeder"}': "0+0x120",
    f"penstock_broker_silent_seconds{{{TRAINER}}}": "0.4+0x120",
    f"penstock_disk_free_bytes{{{TRAINER}}}": "5e11-1e8x120",
    'penstock_dead_letters_total{run="r", role="scorer", worker="scorer-0"}': "0+0x120",
    **{f'penstock_outcome_total{{run="r", name="{name}"}}': f"0+{count}x120" for name, count in OUTCOMES.items()},
    f"penstock_stale_groups_total{{{TRAINER}}}": "0+10x120",
    'penstock_oldest_open_seconds{run="r", worker="scorer-0"}': "300+0x120",
    'penstock_service_requests_total{run="r", worker="scorer-0"}': "0+100x120",
    'penstock_service_retries_total{run="r", worker="scorer-0"}': "0+5x120",
    'penstock_eval_greedy_low{run="r"}': "0.4+0x60 0.35+0x60",
    'penstock_eval_greedy_high{run="r"}': "0.5+0x60 0.45+0x60",
    **{f'{USE}"{use}"}}': f"0+{seconds}x120" for use, seconds in {"busy": 20, "no_group": 30, "no_device": 10}.items()},
    f'penstock_time_seconds_total{{{ROLLOUT}, use="busy"}}': "0+30x120",
    f'penstock_time_seconds_total{{{ROLLOUT}, use="no_prompts"}}': "0+30x120",
}
"""Series of an ordinary run, a value a minute: some waiting, filtered and stale groups, restarts, an evaluation that is a bit worse."""
PROVOKED = {
    "PenstockWorkerDown": {'up{job="monitoring/penstock-r", instance="b:1"}': "1+0x110 0+0x10"},
    "PenstockRoleMissing": {'penstock_uptime_seconds{run="r", role="scorer", worker="scorer"}': "0+60x100"},
    "PenstockNeedsOperator": {f'{EXIT}{{pod="p2", container="trainer"}}': "2+0x120"},
    "PenstockNoStep": {f"penstock_step_total{{{TRAINER}}}": "0+3x80 240+0x40"},
    "PenstockBrokerUnreachable": {f"penstock_broker_silent_seconds{{{TRAINER}}}": "0+0x117 40 100 160"},
    "PenstockDiskFull": {f"penstock_disk_free_bytes{{{TRAINER}}}": "5e11-3e9x120"},
    "PenstockDeadLetters": {'penstock_dead_letters_total{run="r", role="scorer", worker="scorer-0"}': "0+0x115 1+0x5"},
    "PenstockGroupsFailed": {'penstock_outcome_total{run="r", name="failed"}': "0+1x60 60+20x60"},
    "PenstockGroupsStale": {f"penstock_stale_groups_total{{{TRAINER}}}": "0+50x120"},
    "PenstockGroupOpen": {'penstock_oldest_open_seconds{run="r", worker="scorer-0"}': "0+60x120"},
    "PenstockRewardService": {'penstock_service_retries_total{run="r", worker="scorer-0"}': "0+50x120"},
    "PenstockEvaluationFell": {'penstock_eval_greedy_high{run="r"}': "0.5+0x60 0.3+0x60"},
    "PenstockTrainerWaits": {f'{USE}"busy"}}': "0+3x120", f'{USE}"no_group"}}': "0+57x120", f'{USE}"no_device"}}': "0+0x120"},
    "PenstockRolloutWaits": {f'penstock_time_seconds_total{{{ROLLOUT}, use="no_prompts"}}': "0+58x120"},
}
"""Alert -> the series that differ."""


@needs_promtool
def test_each_alert_fires_for_its_cause_alone_and_none_in_an_ordinary_run(tmp_path: Path) -> None:
    shutil.copy(OBSERVE / "rules.yml", tmp_path)
    assert sorted(PROVOKED) == sorted(ALERTS)
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": series, "values": values} for series, values in {**ORDINARY, **changes}.items()],
            "promql_expr_test": [
                {
                    "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                    "eval_time": "120m",
                    "exp_samples": [{"labels": f'{{alertname="{alert}"}}', "value": 1}] if alert else [],
                }
            ],
        }
        for alert, changes in {"": {}, **PROVOKED}.items()
    ]
    file = tmp_path / "tests.yml"
    file.write_text(json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": tests}), encoding="utf-8")
    assert promtool("check", "rules", str(OBSERVE / "rules.yml")) == ""
    assert promtool("check", "config", str(OBSERVE / "prometheus.yml")) == ""
    assert promtool("test", "rules", str(file)) == ""


def test_every_alert_is_explained_where_its_runbook_says() -> None:
    page = (ROOT / "docs" / "how-to" / "observe.md").read_text(encoding="utf-8")
    assert re.findall(r"^### (\w+)$", page, re.MULTILINE) == ALERTS
    assert re.findall(r"runbook: (\S+)", RULES) == [f"docs/how-to/observe.md#{alert.lower()}" for alert in ALERTS]


def test_rules_and_panels_name_only_metrics_that_workers_have() -> None:
    names = {family_of(table, key)[0] for table, keys in TABLES.items() for key in keys}
    used = set(re.findall(r"\bpenstock_\w+", RULES + (OBSERVE / "dashboard.json").read_text(encoding="utf-8")))
    assert len(used) > 30
    assert used - names == set()
    assert WORKER.keys() >= GAUGES


@needs_promtool
@pytest.mark.parametrize("role", ["rollout", "tracker"])
def test_promtool_has_nothing_to_say_about_any_metric(role: str) -> None:
    def example(key: str) -> str:
        return key.replace("STAT", "max").replace("USE", "no_group").replace("SOURCE", "gsm8k").replace("NAME", "x").replace("N", "3")

    log = MemoryLog()
    reporter = Reporter(run="r", role=role, worker=role, log=log, producer=log.producer())
    reporter.values.update((example(key), 1.0) for key in WORKER)
    reporter.points.update((f"{table}/{example(key)}", 1.0) for table in ("train", "eval") for key in TABLES[table])
    reporter.points.update({"reward": 1.0, "reward_samples": 8.0, "eval/gsm8k/greedy_accuracy": 0.5})
    text = Health(reporter, threading.Event()).response("/metrics")[2].decode()
    assert promtool("check", "metrics", text=text) == ""
    assert text.count("# HELP") == len(set(re.findall(r"# HELP (\S+)", text)))
    assert 'penstock_eval_greedy_accuracy{role="' in text
    assert f'penstock_time_seconds_total{{role="{role}",run="r",use="no_group",worker="{role}"}} 1.0' in text
