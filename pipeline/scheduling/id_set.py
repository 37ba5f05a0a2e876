"""A compact set of group numbers, of which a run has millions.

It stores one bit per number, in pages that are allocated on demand and freed once they and all before them are full: numbers in order take
almost no memory, and an isolated number takes one page.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PAGE_BITS = 1 << 12
_FULL = bytearray(b"\xff" * (PAGE_BITS // 8))


@dataclass(slots=True)
class IdSet:
    """A growing set of integers.

    Example:
        ids = IdSet()
        ids.add(7)
        7 in ids  # -> True
    """

    _full: int = 0
    """Number of full pages from 0 on."""
    _pages: dict[int, bytearray] = field(default_factory=dict)
    _count: int = 0

    def add(self, number: int) -> None:
        """Add a number."""
        page, bit = divmod(number, PAGE_BITS)
        if 0 <= page < self._full:
            return
        bits = self._pages.get(page)
        if bits is None:
            bits = self._pages[page] = bytearray(PAGE_BITS // 8)
        before = bits[bit >> 3]
        bits[bit >> 3] = after = before | 1 << (bit & 7)
        self._count += before != after
        if after == 0xFF and before != after and page == self._full:
            self._free_full_pages()

    def __contains__(self, number: object) -> bool:
        if not isinstance(number, int):
            return False
        page, bit = divmod(number, PAGE_BITS)
        return 0 <= page < self._full or (page in self._pages and bool(self._pages[page][bit >> 3] >> (bit & 7) & 1))

    def __len__(self) -> int:
        return self._count

    def as_json(self) -> dict[str, object]:
        """The set as plain data."""
        return {"full": self._full, "count": self._count, "pages": {str(page): bits.hex() for page, bits in self._pages.items()}}

    @classmethod
    def from_json(cls, plain: Mapping[str, object]) -> "IdSet":
        """The set from the data of `as_json`. Raises `KeyError`, `TypeError`, `ValueError`."""
        full, count, pages = plain["full"], plain["count"], plain["pages"]
        if not isinstance(full, int) or not isinstance(count, int) or not isinstance(pages, Mapping):
            raise TypeError("no set of numbers")
        ids = cls(full, {int(page): bytearray.fromhex(bits) for page, bits in pages.items()}, count)
        if any(len(bits) != PAGE_BITS // 8 for bits in ids._pages.values()):
            raise ValueError("a page of another length")
        return ids

    def _free_full_pages(self) -> None:
        while self._pages.get(self._full) == _FULL:
            del self._pages[self._full]
            self._full += 1
