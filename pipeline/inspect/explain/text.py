"""Formats the trace of a group, and dead letters, for a terminal. Times are in seconds after the group was admitted."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.pipeline.inspect.records.browse import clock, first_of
from penstock.pipeline.inspect.report.figures import one_line
from penstock.pipeline.inspect.report.formats import columns, rebased_line

SHOWN_TEXT = 100
SHOWN_COMPLETION, LEAST_COMPLETION = 60, 16
SHOWN_RECORDS, SHOWN_NUMBERS = 40, 16

Plain = Mapping[str, Any]


def as_page(life: Plain, *, width: int = 10_000) -> str:
    """Format what `as_json.explain` returns as the lines that `penstock explain` prints; completions are cut to fit into `width`."""
    zero = life["moments"]["admitted"]
    lines = [f"group {life['group']} of run {life['run']}: {life['status']}", f"  {life['why']}", ""]
    lines += _prompt(life["prompt"], life["group"])
    lines += _section("samples", _samples(life, zero))
    lines += _section("rewards", _rewards(life, width=width))
    lines += _section("outcome", _outcome(life, zero))
    lines += _section("training", _step(life["step"]))
    if version := life["version"]:
        published = f"published at {_after(version['published_s'], zero)} s"
        lines += _section(
            "weights", [f"version {version['version']} after {version['steps']} steps, {published}", f"digest {version['digest']}"]
        )
    lines += _section("time", [f"{stage['begins_s']:+9.3f} s  {stage['name']:<38} {stage['seconds']:9.3f} s" for stage in life["times"]])
    lines += _section("records", _records(life["records"], zero))
    lines += _section("deleted", life["gone"])
    lines += _section("dead letters", [dead_letter_line(dead_letter) for dead_letter in life["dead_letters"]])
    return "\n".join(lines)


def dead_letter_line(dead_letter: Plain) -> str:
    record = f"dead-letters/0/{dead_letter['offset']} of {dead_letter['of']} by {dead_letter['worker']}"
    return f"{record}, {dead_letter['kind']}: {dead_letter['reason']}"


def _section(name: str, lines: Iterable[str]) -> list[str]:
    """Return an empty line, a title and the indented lines; [] if there are no lines."""
    indented = [f"  {line}".rstrip() for line in lines]
    return ["", name, *indented] if indented else []


def _prompt(prompt: Plain | None, group: int) -> list[str]:
    if prompt is None:
        return [f"prompt    the prompt of group {group} cannot be read"]
    return [
        f"prompt    {json.dumps(prompt['prompt'], ensure_ascii=False)} ({prompt['tokens']} tokens)",
        f"          row {prompt['row']} of the data, epoch {prompt['epoch']}; columns {_short(prompt['columns'])}",
        f"admitted  {clock('%Y-%m-%d %H:%M:%S', prompt['admitted_s'])}.{int(prompt['admitted_s'] % 1 * 1000):03d} at {prompt['place']}, "
        f"slot {prompt['slot']}, "
        f"{prompt['samples_per_prompt']} samples requested under version {prompt['min_version']} or newer",
    ]


def _samples(life: Plain, zero: float | None) -> list[str]:
    """Return a table of the samples, lines about trajectories, and the texts of samples without rewards."""
    samples = life["samples"]
    if not samples:
        return ["deleted by retention" if life["gone"] else "none was generated" if life["status"] not in ("open",) else "none yet"]
    head = ["sample", "by", "versions", "started", "ended", "tokens", "finish", "record"]
    rows = [
        [
            f"{sample['sample']}{'' if sample['counts'] else ' (surplus)'}",
            sample["worker"],
            _versions(sample["versions"]),
            *(_after(sample[name], zero) for name in ("started_s", "ended_s")),
            str(sample["tokens"]),
            sample["finish"],
            sample["place"] or "-",
        ]
        for sample in samples
    ]
    trajectories = [f"{sample['sample']:>6}  {_trajectory(sample)}" for sample in samples if sample.get("turns")]
    texts = [
        (sample["sample"], sample["completion"]) for sample in samples if sample["components"] is None and sample["completion"] is not None
    ]
    return [
        *columns([head, *rows]),
        *trajectories,
        *(f"{number:>6}  {_short(json.dumps(text, ensure_ascii=False))}" for number, text in texts),
    ]


def _trajectory(sample: Plain) -> str:
    """Format a trajectory in one line: turns, environment, rewards, and the error of a broken environment."""
    turns = [turn for turn in sample["turns"] if turn["source"] == "model"]
    rewards = " ".join("-" if turn["reward"] is None else f"{turn['reward']:g}" for turn in turns)
    last = sample["turns"][-1]
    broken = f"; {last['finish']}" if last["source"] == "environment" else ""
    episode = f"{len(turns)} turns in {sample['environment']} (seed {sample['environment_seed']}), rewards {rewards or 'none'}{broken}"
    seconds_of = sample.get("time_spent") or {}
    names = {"waited_s": "waited for engines", "generating_s": "generating", "environment_s": "environment"}
    return "; ".join([episode, *(f"{names[name]} {seconds:.3f} s" for name, seconds in seconds_of.items())])


def _versions(spans: Sequence[Plain]) -> str:
    """Format the policy versions of a sample: "3", or "3[0:17] 4[17:32]" with the tokens of each of several."""
    if len(spans) == 1:
        return str(spans[0]["version"])
    return " ".join(f"{span['version']}[{span['from']}:{span['to']}]" for span in spans)


def _rewards(life: Plain, *, width: int) -> list[str]:
    """Return a table with the rewards of each sample and, for a trained group, advantage and gradient weight."""
    rewards = life["rewards"]
    if rewards is None:
        return []
    named = list(zip(rewards["names"], rewards["weights"], strict=False))
    short = {name: name.rpartition("/")[2] for name, _ in named}
    trained = life["step"] is not None
    head = ["sample", "reward", *(short[name] if weight == 1 else f"{short[name]} x {weight:g}" for name, weight in named)]
    head += ["advantage", "tokens", "micro-batch", "per token", "weight"] if trained else []
    rows, texts, untrained = [head], ["completion"], []
    for sample in life["samples"]:
        if sample["components"] is None:
            continue
        row = [str(sample["sample"]), _number(sample["reward"]), *(_number(sample["components"][name]) for name, _ in named)]
        if trained and sample["trained"] == "yes":
            weights = [_number(sample[name], digits=4) for name in ("token_weight", "weight")]
            row += [_number(sample["advantage"], digits=4), str(sample["trained_tokens"]), _number(sample["micro_batch"]), *weights]
        elif trained:
            row += ["-", "0" if life["step"]["denominator"] is not None else "-", "-", "-", "-"]
            untrained += [f"{sample['sample']:>6}  not trained: {sample['trained']}"] if life["step"]["denominator"] is not None else []
        rows.append(row)
        texts.append(json.dumps(sample["completion"], ensure_ascii=False))
    room = max(LEAST_COMPLETION, min(SHOWN_COMPLETION, width - len("    ") - max(map(len, columns(rows)))))
    table = columns([[*row, one_line(text, room)] for row, text in zip(rows, texts, strict=True)])
    mean = f"mean {_number(rewards['mean'])}, from {_number(rewards['lowest'])} to {_number(rewards['highest'])}"
    explained = ["tokens: those trained; weight: the sample's in the gradient, and per token"] if trained else []
    return [*table, *untrained, *explained, mean, *_logged(life)]


def _logged(life: Plain) -> list[str]:
    """Return lines with the errors of samples without a reward, and with the values that reward functions logged."""
    lines = [f"{sample['sample']:>6}  {sample['reward_error']}" for sample in life["samples"] if sample["reward_error"]]
    lines += [f"{sample['sample']:>6}  logged {_short(json.dumps(sample['logged']))}" for sample in life["samples"] if sample["logged"]]
    metrics = life["rewards"]["metrics"]
    return [*lines, f"logged {', '.join(f'{name} {_number(value)}' for name, value in metrics.items())}"] if metrics else lines


def _outcome(life: Plain, zero: float | None) -> list[str]:
    """Return lines about the scorer's record of the group, and when and why the group was stale."""
    outcome, stale = life["outcome"], life["stale"]
    if outcome is None:
        return []
    parts = f" in {outcome['parts']} parts" if (outcome["parts"] or 1) > 1 else ""
    lines = [f"{outcome['outcome']} by {outcome['worker']} at {_after(outcome['scored_s'], zero)} s, {outcome['place']}{parts}"]
    if outcome["reason"]:
        lines.append(f"because {outcome['reason']}")
    if outcome["policy_version_min"] is not None:
        oldest, newest = outcome["policy_version_min"], outcome["policy_version_max"]
        lines.append(f"generated under version {oldest}" if oldest == newest else f"generated under versions {oldest} to {newest}")
    if stale is not None:
        lines.append(
            "stale at {at} s, when the groups of step {before_step} were selected: learner version {learner_version}, lag {lag}, "
            "max_lag {max_lag}; ledger entry {entry}".format(**stale, at=_after(stale["at_s"], zero))
        )
    return lines


def _step(step: Plain | None) -> list[str]:
    """Return lines about the step that was trained on the group, and the group's share in its gradient."""
    if step is None:
        return []
    measured = step["metrics"]
    batches = ", ".join(str(number) for number in step["micro_batches"])
    lines = [
        f"step {step['step']}, ledger entry {step['entry']}: position {step['place'] + 1} of {len(step['plan'])} "
        f"(groups {first_of(step['plan'], most=SHOWN_NUMBERS)}), micro-batch {batches or '?'} of {len(step['boundaries'])} "
        f"(samples end at {first_of(step['boundaries'], most=SHOWN_NUMBERS)})",
        f"learner version {step['learner_version']}, lag {step['lag']}; advantage {step['advantage']}, loss {step['loss_name']}",
    ]
    if step["tokens"] == 0:
        lines.append("the step has no trained token, so it did not change the weights")
    elif step["denominator"] is not None:
        unit = "trained tokens" if step["aggregate"] == "token_mean" else "samples"
        share = step["group_weight"] / step["step_weight"] if step["step_weight"] else 0.0
        lines.append(
            f"the step's loss sum is divided by {step['denominator']:g} {unit} ({step['aggregate']}); tokens trained: {step['tokens']}"
        )
        lines.append(f"this group has {share:.1%} of the step's gradient weight (sums of |weight|)")
    shown = [f"{name} {measured[name]:.6g}" for name in ("loss", "grad_norm", "lr", "reward_trained", "ess") if name in measured]
    lines.append("; ".join(shown))
    if step["clipped"] is not None and step["clipped"] < 1.0:
        lines.append(f"the step's gradient was clipped to trainer.max_grad_norm: multiplied by {step['clipped']:.4g}")
    lines += [_rebased(rebased, step["step"]) for rebased in step["rebased"]]
    return lines + [f"left out: {sentence}" for sentence in step["left_out"]]


def _rebased(rebased: Plain, step: int) -> str:
    """Describe a rebase of the run and its effect on this step."""
    if rebased["steps"] <= step:
        return f"{rebased_line(rebased)}; this step was trained after the rebase"
    is_repeated = any(difference["step"] == step for difference in rebased["differences"])
    return f"{rebased_line(rebased)}; this step {'was recomputed' if is_repeated else 'did not differ'}"


def _records(records: Sequence[Plain], zero: float | None) -> list[str]:
    """Return a table of the records about the group, at most `SHOWN_RECORDS`."""
    rows = [
        [_after(record["time_s"], zero), record["place"], record["is"], "counts" if record["counts"] else "does not count"]
        for record in records[:SHOWN_RECORDS]
    ]
    more = [f"… and {len(records) - SHOWN_RECORDS} more; --json has all"] if len(records) > SHOWN_RECORDS else []
    return columns([["written", "record", "is", ""], *rows]) + more


def _after(moment: float | None, zero: float | None) -> str:
    """Format a Unix time as signed seconds after the time `zero`, or as "-" if either is unknown."""
    return "-" if moment is None or zero is None else f"{moment - zero:+.3f}"


def _number(value: float | None, *, digits: int = 6) -> str:
    return "-" if value is None else f"{value:.{digits}g}"


def _short(text: str, shown: int = SHOWN_TEXT) -> str:
    """Shorten a long text to its start and end and its length; the end is needed because a chat template has the question there."""
    if len(text) <= shown:
        return text
    return f"{text[: shown // 3]} … {text[-(shown - shown // 3) :]} ({len(text)} characters)"
