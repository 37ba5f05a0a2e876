"""Sets of group numbers: a run has millions of groups.

The rule: a bit for each number, in pages that exist where a number does, so that one far beyond all others costs a page and no more.
"""

from dataclasses import dataclass, field

PAGE_BITS = 1 << 12


@dataclass(slots=True)
class IdSet:
    """A growing set of integers.

    Example:
        ids = IdSet()
        ids.add(7)
        7 in ids  # -> True
    """

    _pages: dict[int, bytearray] = field(default_factory=dict)

    def add(self, number: int) -> None:
        """Put a number in."""
        page, bit = divmod(number, PAGE_BITS)
        if page not in self._pages:
            self._pages[page] = bytearray(PAGE_BITS // 8)
        self._pages[page][bit >> 3] |= 1 << (bit & 7)

    def __contains__(self, number: int) -> bool:
        page, bit = divmod(number, PAGE_BITS)
        return page in self._pages and bool(self._pages[page][bit >> 3] >> (bit & 7) & 1)
