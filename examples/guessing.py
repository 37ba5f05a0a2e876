"""The first prompt of each game, one row each: the data of `textarena.toml`."""


def games(*, seed: int = 0, size: int = 1024) -> list[dict[str, str | int]]:
    """`size` games; `seed` is the number that each game's own random numbers follow from."""
    return [{"prompt": "Play this game. Give your move in square brackets.", "seed": seed * size + number} for number in range(size)]
