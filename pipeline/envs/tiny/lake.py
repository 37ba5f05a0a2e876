"""The frozen lake: a 4x4 map per seed, from the upper left to the lower right without falling into a hole, in at most ten turns.

The rules and the maps' odds are those of Gymnasium's FrozenLake-v1, not slippery; what is seen is where one may step, then row and column,
as text games tell it: `DR00:`. An action is one of L, D, R, U. The rule: a map is a function of its seed alone.
"""

import random
from collections import deque
from typing import Literal

SIZE, FROZEN, TURNS = 4, 0.8, 10
MOVES = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}
PROMPT = "lake "
HELD_OUT = 10**8
"""Seeds of held-out maps begin here."""
ASTRAY = 0.2
"""Share of random steps in the demonstrations."""
HABIT, HABIT_AT = 0.65, ((1, 2), (2, 1))
"""At these places, halfway, they have a wrong habit with this chance: up or, where a hole is, left. Without it the likeliest answer
is a good walk before any training, however much else is astray, and greedy success has nothing to gain."""

Place = tuple[int, int]


class Lake:
    """One episode; reward 1 at the goal, else 0."""

    def reset(self, *, seed: int) -> str:
        """A new map."""
        self.holes, self.at, self.turns = holes_of(seed), (0, 0), 0
        return self._seen()

    def step(self, action: str) -> tuple[str, float, bool]:
        """Text, reward, ended; anything but a move ends the episode."""
        self.turns += 1
        if action not in MOVES:
            return "!", 0.0, True
        self.at = _moved(self.at, action)
        if self.at in self.holes:
            return "x", 0.0, True
        if self.at == (SIZE - 1, SIZE - 1):
            return "=", 1.0, True
        return self._seen(), 0.0, self.turns >= TURNS

    def _seen(self) -> str:
        ways = [move for move in MOVES if (to := _moved(self.at, move)) != self.at and to not in self.holes]
        return f"{''.join(ways)}{self.at[0]}{self.at[1]}:"


def holes_of(seed: int) -> frozenset[Place]:
    """The holes of a seed's map, of which the goal can be reached."""
    rng = random.Random(seed)
    places = [(row, column) for row in range(SIZE) for column in range(SIZE)]
    while True:
        holes = frozenset(place for place in places[1:-1] if rng.random() >= FROZEN)
        if (0, 0) in distances(holes):
            return holes


def distances(holes: frozenset[Place]) -> dict[Place, int]:
    """Steps to the goal from every place that it can be reached from."""
    goal = (SIZE - 1, SIZE - 1)
    steps, left = {goal: 0}, deque([goal])
    while left:
        place = left.popleft()
        for move in MOVES:
            to = _moved(place, move)
            if to not in steps and to not in holes:
                steps[to] = steps[place] + 1
                left.append(to)
    return steps


def lake_rows(n: int, seed: int, *, split: Literal["train", "held_out"] = "train") -> list[dict[str, str | int]]:
    """`n` rows `{"prompt", "seed", "answer"}`, a map each; held-out maps are the same in every run."""
    first = HELD_OUT if split == "held_out" else 1 + seed % 1000 * 10**5
    return [{"prompt": PROMPT, "seed": first + number, "answer": ""} for number in range(n)]


def demonstration(rng: random.Random) -> list[tuple[str, bool]]:
    """Texts of one episode, each with whether it is an action: shortest ways, with steps astray and the habit."""
    lake = Lake()
    seed = rng.randrange(HELD_OUT)
    said, ended = [(PROMPT, False), (lake.reset(seed=seed), False)], False
    steps = distances(lake.holes)
    while not ended:
        nearer = [move for move in MOVES if steps.get(_moved(lake.at, move), SIZE**2) < steps[lake.at]]
        back = [move for move in "UL" if _moved(lake.at, move) not in lake.holes]
        if lake.at in HABIT_AT and back and rng.random() < HABIT:
            action = back[0]
        else:
            action = rng.choice("LDRU") if rng.random() < ASTRAY else rng.choice(nearer)
        text, _, ended = lake.step(action)
        said += [(action, True), (text, False)]
    return said[:-1]


def _moved(place: Place, move: str) -> Place:
    row, column = place[0] + MOVES[move][0], place[1] + MOVES[move][1]
    return (row, column) if 0 <= row < SIZE and 0 <= column < SIZE else place
