"""Checkpoints: whole and the ledger's or not used, written aside and named last, and a full disk leaves what was there."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.infra.checkpoints import MANIFEST, STATE, Best, CheckpointStore, Recorded, State, objection, to_keep
from penstock.infra.errors import CheckpointError, LogError
from tests.support.paths import ROOT
from tests.support.refusals import one_line

NUMBERS = st.integers(0, 60)
SOME = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def state_of(steps: int, *, run: str = "r1") -> State:
    return State(run=run, steps=steps, version=steps // 2, digest=f"{steps:064x}", seq=3 * steps)


def recorded_for(*steps: int, ledger_steps: int = 100) -> Recorded:
    """A ledger in which these checkpoints stand."""
    return Recorded(run="r1", steps=ledger_steps, seq=1000, versions=range(200), digests={step: [state_of(step).digest] for step in steps})


def save(directory: Path) -> None:
    """What a backend might write: two files, one in a folder."""
    (directory / "shards").mkdir()
    (directory / "weights.bin").write_bytes(os.urandom(3000))
    (directory / "shards" / "rank-0.bin").write_bytes(b"rank")


def ignore(_: int) -> None:
    """A ledger that takes the record."""


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def filled(store: CheckpointStore, *steps: int) -> CheckpointStore:
    """The store with checkpoints of these steps."""
    for number in steps:
        store.write(state_of(number), save=save, record=ignore)
    return store


def usable(store: CheckpointStore, recorded: Recorded) -> tuple[int | None, list[str]]:
    """The newest checkpoint that verification passes, and what it says of those before."""
    said = []
    for steps in store.steps():
        try:
            return store.verify(steps, recorded).steps, said
        except CheckpointError as error:
            said.append(str(error))
    return None, said


@given(st.sets(NUMBERS), st.integers(1, 5), st.none() | st.integers(1, 20))
def test_the_newest_and_the_multiples_stay_and_thinning_again_changes_nothing(steps: set[int], last: int, every: int | None) -> None:
    kept = to_keep(steps, keep_last=last, keep_every=every)
    assert kept <= steps
    assert set(sorted(steps)[-last:]) <= kept
    assert all(number in kept for number in steps if every and number % every == 0)
    assert len(kept) <= last + (0 if every is None else sum(number % every == 0 for number in steps))
    assert to_keep(kept, keep_last=last, keep_every=every) == kept


@given(st.sets(NUMBERS, min_size=1), NUMBERS, st.integers(1, 5))
def test_a_later_checkpoint_never_brings_an_older_one_back(steps: set[int], more: int, last: int) -> None:
    later = max(steps) + 1 + more
    assert to_keep({*steps, later}, keep_last=last) - {later} <= to_keep(steps, keep_last=last)


@given(NUMBERS, NUMBERS, st.integers(0, 200), st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_a_checkpoint_is_used_exactly_when_it_agrees_with_the_ledger(
    steps: int, committed: int, seq: int, same_run: bool, known: bool, same_digest: bool, published: bool
) -> None:
    state = state_of(steps)
    ledger = Recorded(
        run="r1" if same_run else "r2",
        steps=committed,
        seq=seq,
        versions=[state.version] if published else [],
        digests={steps: [state.digest if same_digest else "f" * 64]} if known else {},
    )
    agrees = same_run and steps <= committed and state.seq < seq and known and same_digest and published
    assert (objection(state, ledger) is None) == agrees


def test_the_ledger_knows_a_checkpoint_before_it_has_a_name_and_the_files_are_whole_by_then(store: CheckpointStore) -> None:
    seen: list[tuple[list[int], int]] = []

    def record(size: int) -> None:
        (aside,) = store.directory.iterdir()
        manifest = json.loads((aside / MANIFEST).read_bytes())["files"]
        assert set(manifest) == {"backend/weights.bin", "backend/shards/rank-0.bin", STATE}
        seen.append((store.steps(), size))

    size = store.write(state_of(10), save=save, record=record)
    assert seen == [([], size)]
    assert size == sum(file.stat().st_size for file in store.path(10).rglob("*") if file.is_file())
    assert store.verify(10, recorded_for(10)) == state_of(10)


def test_a_ledger_that_refuses_leaves_nothing_behind(store: CheckpointStore) -> None:
    def refuse(_: int) -> None:
        raise LogError("another process writes here now")

    with pytest.raises(LogError, match="another process"):
        store.write(state_of(10), save=save, record=refuse)
    assert list(store.directory.iterdir()) == []


def test_what_is_not_to_be_kept_goes_only_after_a_newer_one_is_there(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=40)
    present: list[list[int]] = []
    for steps in (10, 20, 40, 50, 60, 70):
        store.write(state_of(steps), save=save, record=lambda _: present.append(store.steps()))
    assert present[3] == [40, 20]
    assert store.steps() == [70, 60, 40]


def test_leftovers_of_a_death_are_cleared_away_and_other_files_are_not(tmp_path: Path) -> None:
    store = filled(CheckpointStore(tmp_path), 10)
    shutil.copytree(store.path(10), tmp_path / ".aside-20-123-abcd")
    (tmp_path / "notes.txt").write_text("mine")
    again = CheckpointStore(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000010"]
    assert again.steps() == [10]


Damage = Callable[[Path, int], None]


def flip(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place % len(data)] ^= 1 << (place % 8)
    file.write_bytes(data)


def cut(file: Path, place: int) -> None:
    os.truncate(file, place % file.stat().st_size)


def lengthen(file: Path, place: int) -> None:
    with file.open("ab") as opened:
        opened.write(b"x" * (1 + place % 7))


def remove(file: Path, _: int) -> None:
    file.unlink()


def add(file: Path, place: int) -> None:
    (file.parent / f"extra-{place}").write_bytes(b"")


@SOME
@given(st.sampled_from([flip, cut, lengthen, remove, add]), st.integers(0, 3), st.integers(0, 10**6))
def test_any_damage_to_any_file_is_found_and_the_one_before_is_used(tmp_path: Path, damage: Damage, which: int, place: int) -> None:
    store = CheckpointStore(tmp_path / "damaged")
    for steps in (10, 20):
        shutil.rmtree(store.path(steps), ignore_errors=True)
        store.write(state_of(steps), save=save, record=ignore)
    files = sorted(file for file in store.path(20).rglob("*") if file.is_file())
    before = json.loads((store.path(20) / MANIFEST).read_bytes())
    damage(files[which], place)
    found, said = usable(store, recorded_for(10, 20))
    manifest_says_the_same = files[which].name == MANIFEST and damage in (flip, lengthen) and _manifest(store.path(20)) == before
    if not manifest_says_the_same:  # a blank that became another blank is no damage
        assert found == 10
        assert len(said) == 1
        assert "\n" not in said[0]


def _manifest(directory: Path) -> object:
    try:
        return json.loads((directory / MANIFEST).read_bytes())
    except ValueError:
        return None


@pytest.mark.parametrize(("recorded", "said"), [
    (replace(recorded_for(10, 20), run="r2"), "it belongs to run r1"),
    (recorded_for(10, 20, ledger_steps=15), "it is newer than the ledger, which ends at step 15"),
    (recorded_for(10), "the ledger has no entry for its step"),
    (replace(recorded_for(10, 20), versions=range(6)), "its weight version 10 was never published"),
    (replace(recorded_for(10), digests={10: [state_of(10).digest], 20: ["f" * 64]}), "its weights digest is 0000000000000000…"),
])  # fmt: skip
def test_what_does_not_belong_to_the_ledger_is_named(store: CheckpointStore, recorded: Recorded, said: str) -> None:
    filled(store, 10, 20)
    found, why = usable(store, recorded)
    assert why[0].startswith(said)
    assert found == (None if recorded.run != "r1" else 10)


def test_one_that_was_refused_does_not_count_among_the_last_and_makes_room(tmp_path: Path) -> None:
    store = filled(CheckpointStore(tmp_path, keep_last=2), 10, 20, 30)
    cut(store.path(30) / STATE, 5)
    assert usable(store, recorded_for(20, 30))[0] == 20
    store.write(state_of(25), save=save, record=ignore)
    assert store.steps() == [25, 20]
    cut(store.path(25) / STATE, 5)
    assert usable(store, recorded_for(20, 25))[0] == 20
    store.write(state_of(25), save=save, record=ignore)  # repeating the steps writes the same one again
    assert usable(store, recorded_for(20, 25))[0] == 25


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """A disk on which no file may grow beyond 100 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_refuses_in_the_middle_leaves_the_one_before_and_says_what_to_do(store: CheckpointStore) -> None:
    store.write(state_of(10), save=save, record=ignore)
    with small_files(), pytest.raises(CheckpointError) as refused:
        store.write(state_of(20), save=lambda to: (to / "big").write_bytes(bytes(200_000)) and None, record=ignore, about_bytes=200_000)
    messages = str(refused.value)
    assert messages.startswith(f"cannot write the checkpoint of step 20 in {store.directory}: File too large (it needs about 0.2 MiB, ")
    assert messages.endswith("the checkpoint of step 10 is intact; free some space, then: penstock run --resume r1")
    assert [path.name for path in store.directory.iterdir()] == ["step-00000010"]
    assert usable(store, recorded_for(10))[0] == 10


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(CheckpointError, match=r"cannot use the checkpoint directory in .*/file/checkpoints: Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints")


FULL_DISK = """
import sys
from pathlib import Path
from penstock.infra.checkpoints import State
from penstock.infra.checkpoints import CheckpointStore
from penstock.infra.errors import CheckpointError
store = CheckpointStore(Path(sys.argv[1]) / "r1")
def write(steps, size, about):
    state = State(run="r1", steps=steps, version=0, digest="d", seq=0)
    try:
        store.write(state, save=lambda to: (to / "w").write_bytes(bytes(size)) and None, record=lambda _: None, about_bytes=about)
        print("written")
    except CheckpointError as error:
        print(error)
    print(store.steps(), len(list(store.directory.iterdir())))
write(10, 100_000, 100_000)
write(20, 400_000, 100_000)
write(30, 400_000, 400_000)
write(40, 50_000, 50_000)
"""


def test_on_a_full_disk_the_checkpoint_before_stays_and_the_next_one_that_fits_is_written(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs -o size=300k tmpfs {tmp_path} && exec {sys.executable} -c '{FULL_DISK}' {tmp_path}"
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mount], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"this machine lets nobody mount a small disk: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "written"
    assert "No space left on device (it needs about 0.1 MiB" in lines[2]  # begun, and cleared away
    assert "No space left on device (it needs about 0.4 MiB" in lines[4]  # not begun
    assert [lines[index] for index in (1, 3, 5)] == ["[10] 1"] * 3
    assert lines[6:] == ["written", "[40, 10] 2"]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("torch", {}),
        ("deepspeed", {"zero_stage": 2}),
        *(pytest.param("deepspeed", {"zero_stage": stage}, marks=pytest.mark.slow) for stage in (0, 1, 3)),
    ],
)
def test_a_backend_goes_on_bit_for_bit_from_a_checkpoint(tmp_path: Path, tiny_backend: Callable[..., object], name: str, own: dict) -> None:
    from penstock.infra.tensors.stream import digest

    backend, train = tiny_backend(name, **own)
    store = CheckpointStore(tmp_path / "checkpoints")
    train(backend, 2)
    state = State(run="r1", steps=2, version=1, digest=digest(backend.weights()), seq=5)
    store.write(state, save=backend.save, record=ignore)
    through = train(backend, 2, first=2)
    fresh, _ = tiny_backend(name, **own)
    assert store.verify(2, replace(recorded_for(), digests={2: [state.digest]})) == state
    fresh.load(store.path(2) / "backend")
    assert digest(fresh.weights()) == state.digest
    assert train(fresh, 2, first=2) == through
    assert digest(fresh.weights()) == digest(backend.weights())


@pytest.mark.parametrize("name", ["torch", "deepspeed"])
def test_a_backend_that_cannot_write_gives_the_reason_in_one_line(tmp_path: Path, tiny_backend: Callable[..., object], name: str) -> None:
    backend, _ = tiny_backend(name)
    store = CheckpointStore(tmp_path / "checkpoints")
    with small_files(), one_line(CheckpointError, "cannot write the checkpoint of step 2") as refused:
        store.write(state_of(2), save=backend.save, record=ignore, about_bytes=300_000)
    assert name != "torch" or "File too large" in str(refused.value)
    assert store.steps() == []
    assert list(store.directory.iterdir()) == []


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support.training import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tiny_backend(tiny_path: str) -> Iterator[Callable[..., object]]:
    """Opens a backend on a tiny model, with the function that trains it."""
    from penstock.infra.backends.registry import open_backend
    from tests.support.training import train

    opened = []

    def make(name: str, **own: int) -> object:
        opened.append(open_backend(name, model_path=tiny_path, lr=1e-2, total_steps=10, lr_schedule="linear", **own))
        return opened[-1], train

    yield make
    for backend in opened:
        backend.close()


def test_a_checkpoint_is_written_beside_the_training_and_the_one_before_stays_until_it_has_its_name(store: CheckpointStore) -> None:
    store.write(state_of(10), save=save, record=ignore)
    reading, read = threading.Event(), threading.Event()

    def slowly(directory: Path) -> None:
        reading.set()
        assert read.wait(30.0)
        save(directory)

    saving = store.start(state_of(20), save=slowly, in_background=True)
    assert reading.wait(30.0)
    assert not saving.ended and store.steps() == [10]
    assert usable(CheckpointStore(store.directory, to_read=True), recorded_for(10))[0] == 10  # whoever looks now sees the former one
    read.set()
    saving.wait_copied()
    assert store.steps() == [10]
    store.finish(saving, record=ignore)
    assert store.steps() == [20, 10]
    assert store.verify(20, recorded_for(20)) == state_of(20)


def test_what_fails_beside_the_training_is_raised_by_whoever_finishes_and_leaves_nothing(store: CheckpointStore) -> None:
    saving = store.start(state_of(20), save=lambda to: (to / "no such folder" / "big").touch(), in_background=True)
    saving.wait_copied()  # nobody waits for what will not come
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint of step 20 .*No such file or directory"):
        store.finish(saving, record=ignore)
    assert list(store.directory.iterdir()) == []


def test_the_best_evaluated_checkpoint_stays_whenever_its_evaluation_comes_and_whoever_reads_the_directory(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.rate(20, 0.7)  # the evaluation was faster than the disk
    for steps, accuracy in ((10, 0.5), (20, None), (30, 0.6), (40, 0.7)):
        store.write(state_of(steps), save=save, record=ignore)
        if accuracy is not None:
            store.rate(steps, accuracy)
    assert store.steps() == [40, 20]
    again = CheckpointStore(tmp_path, keep_last=1)
    assert again.best == Best(steps=20, accuracy=0.7)
    again.rate(40, 0.8)
    again.write(state_of(50), save=save, record=ignore)
    assert again.steps() == [50, 40]
    assert CheckpointStore(tmp_path, to_read=True).best == Best(steps=40, accuracy=0.8)
