"""A run in SQL: the ready views over the records of its topics, for DuckDB.

The rule: a view counts of records that say the same thing twice the first, leaves out records nobody can use, and gives the figures of
`penstock report`.
"""

from collections.abc import Mapping

RAW = {
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


SAMPLES = """
with first as (
    select min({'at': timestamp, 'partition': partition, 'offset': "offset"}) as place
    from raw.rollouts where problem is null group by "group", sample
), drawn as (
    select r.* from raw.rollouts r join first on r.partition = first.place.partition and r."offset" = first.place."offset"
), scored as (
    select "group", unnest(samples, recursive := false) as one from groups_first
)
select d."group", d.sample, d.policy_version_min, d.policy_version_max, d.token_ids, d.behaviour_logprobs, d.loss_mask,
       d.span_versions, d.span_starts, d.finish, d.temperature, make_timestamp_ns(d.started_ns) as started,
       make_timestamp_ns(d.ended_ns) as ended, d.worker, s.one.completion as completion, s.one.reward as reward,
       s.one.components as components, len(d.token_ids) as tokens
from drawn d left join scored s on s."group" = d."group" and s.one.sample = d.sample
order by 1, 2
"""

GROUPS_FIRST = """
with parts as (
    select *, min({'at': timestamp, 'partition': partition, 'offset': "offset"}) over (partition by "group", sha256) as place,
           count(distinct part) over (partition by "group", sha256) as there,
           row_number() over (partition by "group", sha256, part order by timestamp, partition, "offset") as copy
    from raw.groups where problem is null
), whole as (
    select "group", sha256, any_value(outcome) as outcome, any_value(reason) as reason, any_value(scored_ns) as scored_ns,
           any_value(worker) as worker, any_value(policy_version_min) as policy_version_min,
           any_value(policy_version_max) as policy_version_max, any_value(reward_mean) as reward_mean,
           any_value(reward_names) as reward_names, any_value(partition) as partition, min("offset") as "offset", any_value(place) as place,
           flatten(list(samples order by part)) as samples
    from parts where there = parts and copy = 1 group by "group", sha256
)
select * exclude (place) from whole qualify row_number() over (partition by "group" order by place) = 1
"""

LEDGER_FIRST = """
select * from raw.ledger where problem is null
qualify row_number() over (partition by seq order by "offset") = 1
"""

FATES = """
with planned as (select unnest(plan) as p from ledger_first where kind = 'step'),
     stale as (select unnest(groups) as "group" from ledger_first where kind = 'stale'),
     admitted as (select distinct "group" from raw.prompts where problem is null),
     status as (select arg_max(status, updated_ns) as said from raw.runs where problem is null),
     ended as (
        select count(*) > 0 or (select said in ('finished', 'stopped', 'failed') from status) as ended
        from ledger_first where kind = 'run-closed'
     )
select a."group",
       case when a."group" in (select p."group" from planned) then 'trained'
            when a."group" in (select "group" from stale) then 'stale'
            when g.outcome in ('filtered', 'failed', 'abandoned') then g.outcome
            when (select ended from ended) then 'unused' else 'open' end as fate
from admitted a left join groups_first g on g."group" = a."group"
"""

GROUPS = """
with admitted as (
    select * from raw.prompts where problem is null
    qualify row_number() over (partition by "group" order by timestamp, partition, "offset") = 1
)
select a."group", a.epoch, a.row, a.prompt, a.token_ids as prompt_ids, a.columns, a.min_version, a.samples_per_prompt, f.fate, g.reason,
       len(g.samples) as samples, g.reward_mean, g.policy_version_min, g.policy_version_max,
       make_timestamp_ns(a.created_ns) as admitted, make_timestamp_ns(g.scored_ns) as scored, g.outcome, g.sha256, g.partition, g."offset"
from admitted a join fates f on f."group" = a."group" left join groups_first g on g."group" = a."group"
order by 1
"""

STEPS = """
select step, version, make_timestamp_ns(time_ns) as committed, list_transform(plan, lambda p: p."group") as groups, boundaries,
       digest{metrics}
from ledger_first where kind = 'step' and step is not null
qualify row_number() over (partition by step order by seq) = 1
order by step
"""

LAG = """
with trained as (
    select step, version, time_ns, unnest(plan) as p from ledger_first where kind = 'step'
)
select t.step, t.version, t.p."group" as "group", s.sample, t.version - s.policy_version_min as lag,
       t.version - s.policy_version_max as lag_of_newest, t.version - g.policy_version_min as lag_of_group, s.tokens,
       (t.time_ns - epoch_ns(s.ended)) / 1e9 as age_s
from trained t join groups_first g on g."group" = t.p."group" join samples s on s."group" = t.p."group" and s.reward is not null
order by 1, 3, 4
"""

REWARD = """
select policy_version_min as version, round(sum(reward_mean * len(samples)) / sum(len(samples)), 12) as reward,
       sum(len(samples))::bigint as samples, count(*) as groups
from groups_first where outcome in ('scored', 'filtered') and reward_mean is not null
group by 1 order by 1
"""

VIEWS: Mapping[str, str] = {"samples": SAMPLES, "groups": GROUPS, "steps": STEPS, "lag": LAG, "rewards": REWARD}
"""Ready view -> its query; `timeline` beside them is a table."""
INNER: Mapping[str, str] = {"groups_first": GROUPS_FIRST, "ledger_first": LEDGER_FIRST, "fates": FATES}
"""Views that those build on."""
NEEDS: Mapping[str, frozenset[str]] = {
    "samples": frozenset({"rollouts", "groups"}),
    "groups": frozenset({"prompts", "groups", "ledger", "runs"}),
    "fates": frozenset({"prompts", "groups", "ledger", "runs"}),
    "groups_first": frozenset({"groups"}),
    "ledger_first": frozenset({"ledger"}),
    "steps": frozenset({"ledger"}),
    "lag": frozenset({"rollouts", "groups", "ledger"}),
    "rewards": frozenset({"groups"}),
}
"""View -> the tables of `raw` behind it."""
