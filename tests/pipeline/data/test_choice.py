"""Which prompt comes next: aborted ones once more, no row that the epoch before has solved, the same after a restart."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.pipeline.data.run_data import Choice, Choices, PromptOrder

ROWS = 4


def choices(**settings: float | int | None) -> Choices:
    return Choices(order=PromptOrder(sizes=(ROWS,), weights=(1.0,), seed=1), **settings)  # type: ignore[arg-type]


def ask(asked: Choices, group: int) -> Choice:
    choice = asked.next()
    assert choice is not None
    asked.requested(group, choice)
    return choice


def test_an_abandoned_prompt_is_asked_once_more_and_never_a_third_time() -> None:
    state = choices()
    first = ask(state, 0)
    state.ended(0, outcome="abandoned", reward=None)
    assert state.next() == first._replace(again=0)
    assert ask(state, 1).turn == first.turn
    state.ended(1, outcome="abandoned", reward=None)
    assert ask(state, 2).position == 1
    assert state.repeated == 1


def test_what_was_asked_once_more_is_known_to_a_feeder_that_reads_prompts_before_outcomes() -> None:
    before, after = choices(), choices()
    asked = [ask(before, 0)]
    before.ended(0, outcome="abandoned", reward=None)
    asked.append(ask(before, 1))
    for group, choice in enumerate(asked):
        after.requested(group, choice)
    after.ended(0, outcome="abandoned", reward=None)
    assert (after.awaiting, after.next()) == ({}, before.next())


def test_a_solved_row_is_left_out_of_one_epoch_and_its_outcome_is_waited_for() -> None:
    state = choices(solved=1.0, unsolved=0.0)
    rows = {group: ask(state, group).turn.row for group in range(ROWS)}
    assert state.next() is None  # no row's outcome is known yet
    rewards = {0: 1.0, 1: 0.0, 2: 0.5, 3: None}
    for group, reward in rewards.items():
        state.ended(group, outcome="failed" if reward is None else "scored", reward=reward)
    second = [ask(state, ROWS + number).turn for number in range(2)]
    assert {turn.row for turn in second} == {rows[2], rows[3]} and {turn.epoch for turn in second} == {1}
    for group in (ROWS, ROWS + 1):
        state.ended(group, outcome="scored", reward=0.5)
    assert {ask(state, group).turn.row for group in range(6, 6 + ROWS)} == set(range(ROWS))  # all have their turn again
    assert state.left_out == 2


def test_epochs_count_prompts_and_what_is_asked_once_more_is_none_of_them() -> None:
    state = choices(limit=2)
    ask(state, 0), ask(state, 1)
    assert state.next() is None and state.exhausted
    state.ended(1, outcome="abandoned", reward=None)
    assert not state.exhausted and ask(state, 2).again == 1
    assert state.exhausted


@settings(max_examples=60)
@given(moves=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.sampled_from([0.0, 0.5, 1.0, None, "abandoned"])), max_size=50))
def test_a_restarted_feeder_that_reads_the_log_chooses_what_one_that_never_died_chooses(
    moves: list[tuple[bool, int, float | str | None]],
) -> None:
    live = choices(solved=1.0, unsolved=0.0)
    asked: list[Choice] = []
    outcomes: list[tuple[int, str, float | None]] = []
    for admits, number, end in moves:
        still_open = [group for group in range(len(asked)) if group not in {ended for ended, _, _ in outcomes}]
        if admits and live.next() is not None:
            asked.append(ask(live, len(asked)))
        elif still_open:
            group = still_open[number % len(still_open)]
            outcome = "abandoned" if end == "abandoned" else "failed" if end is None else "scored"
            outcomes.append((group, outcome, end if isinstance(end, float) else None))
            live.ended(group, outcome=outcome, reward=outcomes[-1][2])
        restarted = choices(solved=1.0, unsolved=0.0)
        for group, choice in enumerate(asked):
            restarted.requested(group, choice)
        for group, outcome, reward in outcomes:
            restarted.ended(group, outcome=outcome, reward=reward)
        assert restarted.next() == live.next()


def test_a_skipped_row_is_never_chosen_before_or_after_a_restart() -> None:
    spoiled = PromptOrder(sizes=(ROWS,), weights=(1.0,), seed=1).at(1).row
    state = Choices(order=PromptOrder(sizes=(ROWS,), weights=(1.0,), seed=1), skipped={(0, spoiled)})
    chosen = [ask(state, group) for group in range(2 * (ROWS - 1))]
    restarted = Choices(order=PromptOrder(sizes=(ROWS,), weights=(1.0,), seed=1), skipped={(0, spoiled)})
    for group, choice in enumerate(chosen[:3]):
        restarted.requested(group, choice)
    assert [ask(restarted, group) for group in range(3, 2 * (ROWS - 1))] == chosen[3:]
    assert {choice.turn.row for choice in chosen} == set(range(ROWS)) - {spoiled}
    assert len({choice.turn for choice in chosen}) == len(chosen)
