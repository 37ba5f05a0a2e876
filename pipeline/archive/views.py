"""A run in SQL: one table a topic, the tables of `penstock.open`, and the views that build on them.

The rule: a view gives the figures of `penstock report`.
"""

from collections.abc import Callable, Mapping

import pyarrow as pa

from penstock.pipeline.observe.tables.samples_groups_steps import GROUPS as GROUP_COLUMNS
from penstock.pipeline.observe.tables.samples_groups_steps import SAMPLES as SAMPLE_COLUMNS
from penstock.pipeline.observe.tables.samples_groups_steps import STEPS, RunTables
from penstock.pipeline.observe.tables.timeline import TIMELINE, timeline
from penstock.pipeline.observe.tables.turns import TURNS, turns

RAW = {
    "run": "run",
    "prompts": "prompts",
    "rollouts": "rollouts",
    "groups": "groups",
    "weights": "weights",
    "chunks": "chunks",
    "ledger": "ledger",
    "metrics": "metrics",
    "dead_letters": "dead-letters",
    "runs": "runs",
}
"""Table `raw.NAME` -> the archive's table: one row a record."""

TABLES: Mapping[str, tuple[pa.Schema, Callable[[RunTables], pa.Table]]] = {
    "samples": (SAMPLE_COLUMNS, RunTables.samples),
    "groups": (GROUP_COLUMNS, RunTables.groups),
    "steps": (STEPS, RunTables.steps),
    "turns": (TURNS, lambda of: turns(of.log, of.run)),
    "timeline": (TIMELINE, lambda of: timeline(of.log, of.run)),
}
"""Table -> the columns it always has, and what makes it; samples come before groups, which then need not be decoded again."""

LAG = """
with trained as (select step, version, committed, unnest(groups) as "group" from steps)
select t.step, t.version, t."group" as "group", s.sample, t.version - s.policy_version_min as lag,
       t.version - s.policy_version_max as lag_of_newest, t.version - g.policy_version_min as lag_of_group, s.tokens,
       (epoch_ns(t.committed) - epoch_ns(s.ended)) / 1e9 as age_s
from trained t join groups g on g."group" = t."group" join samples s on s."group" = t."group" and s.reward is not null
order by 1, 3, 4
"""

REWARDS = """
select policy_version_min as version, round(sum(reward_mean * rewarded) / sum(rewarded), 12) as reward,
       sum(rewarded)::bigint as samples, count(*) as groups
from (select *, samples - coalesce(no_reward, 0) as rewarded from groups)
where outcome in ('scored', 'filtered') and reward_mean is not null
group by 1 order by 1
"""

SAMPLES = """
with trained as (select step, unnest(groups) as number from _steps_table)
select s."group" as group_id, s.sample, t.step, g.fate, g.prompt, json_extract_string(g.columns, '$.answer') as answer,
       s.completion, s.reward, s.advantage, s.tokens, s.* exclude (sample, completion, reward, advantage, tokens)
from _samples_table s left join _groups_table g on g."group" = s."group" left join trained t on t.number = s."group"
"""

GROUPS = """
with trained as (select step, unnest(groups) as number from _steps_table)
select g."group" as group_id, t.step, json_extract_string(g.columns, '$.answer') as answer, g.*
from _groups_table g left join trained t on t.number = g."group"
"""

TURNS_IN_STEPS = """
with trained as (select step, unnest(groups) as number from _steps_table)
select p."group" as group_id, p.sample, p.turn, t.step, p.source, p.tokens, p.reward, p.finish,
       p.* exclude (sample, turn, source, tokens, reward, finish)
from _turns_table p left join trained t on t.number = p."group"
order by p."group", p.sample, p.turn
"""

VIEWS: Mapping[str, tuple[str, frozenset[str]]] = {
    "samples": (SAMPLES, frozenset({"samples", "groups", "steps"})),
    "groups": (GROUPS, frozenset({"groups", "steps"})),
    "steps": ("from _steps_table", frozenset({"steps"})),
    "turns": (TURNS_IN_STEPS, frozenset({"turns", "steps"})),
    "lag": (LAG, frozenset({"samples", "groups", "steps"})),
    "rewards": (REWARDS, frozenset({"groups"})),
}
"""View -> its query, and the tables behind it; a view comes after those that it names."""
