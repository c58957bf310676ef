"""The table of texts: a reference that looks through everything does the same."""

import random

from mlx_mmfree.generation.storage.keys import TextKey
from mlx_mmfree.generation.storage.recent_texts import RecentTexts

LIMIT = 40


def key(number: int) -> TextKey:
    return TextKey(bytes([number]), number)


class Slow:
    """Keeps entries in a list, the one that was used last at the end.

    An entry is a text, its size, and since when it serves which texts.
    """

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, dict[int, int]]] = []
        self.reported = 0

    def use(self, text: int) -> int | None:
        found = [each for each in self.entries if text in each[2]]
        if not found:
            return None
        last = max(found, key=lambda each: each[2][text])
        self.entries.remove(last)
        self.entries.append(last)
        return last[0]

    def serve(self, text: int, prefixes: list[int]) -> None:
        for own, _, serves in self.entries:
            for each in prefixes if own == text else []:
                self.reported += 1
                serves.setdefault(each, self.reported)

    def add(self, text: int, nbytes: int, prefixes: list[int]) -> list[int]:
        self.entries = [each for each in self.entries if each[0] != text]
        if nbytes > LIMIT:
            return [text]
        self.entries = [each for each in self.entries if each[0] not in prefixes]
        self.entries.append((text, nbytes, {}))
        self.serve(text, [text, *prefixes])
        gone = []
        while sum(each[1] for each in self.entries) > LIMIT:
            gone.append(self.entries.pop(0)[0])
        return gone


def test_it_does_what_a_slow_table_does() -> None:
    numbers = random.Random(1)
    table: RecentTexts[str] = RecentTexts(LIMIT)
    slow = Slow()
    for _ in range(3000):
        text = numbers.randrange(1, 13)
        action = numbers.random()
        if action < 0.4:
            nbytes = numbers.choice([1, 5, 12, 41])
            shorter = [n for n in range(1, text) if key(n) in table]
            prefixes = sorted(numbers.sample(shorter, min(len(shorter), numbers.randrange(3))))
            gone = table.add(key(text), f"of {text}", nbytes, [key(n) for n in prefixes])
            assert gone == [key(n) for n in slow.add(text, nbytes, prefixes)]
        elif action < 0.5:
            prefixes = numbers.sample(range(1, text), min(text - 1, 2))
            table.serve(key(text), [key(n) for n in prefixes])
            slow.serve(text, prefixes)
        elif action < 0.8:
            found, holder = table.get(key(text)), slow.use(text)
            assert found == (None if holder is None else (key(holder), f"of {holder}"))
        else:
            table.remove(key(text))
            slow.entries = [each for each in slow.entries if each[0] != text]
        assert list(table) == [key(each[0]) for each in slow.entries]
        assert len(table) == len(slow.entries)
        assert table.nbytes == sum(each[1] for each in slow.entries)
        served = {n for each in slow.entries for n in each[2]}
        assert dict(table.lengths) == dict.fromkeys(served, 1)
        assert all((key(n) in table) == (n in served) for n in range(14))
