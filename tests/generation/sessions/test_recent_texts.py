"""The table of texts: a reference that looks through everything does the same."""

import random

from mlx_mmfree.generation.session_store import RecentTexts, TextKey

LIMIT = 40


def key(number: int) -> TextKey:
    return TextKey(bytes([number]), number)


class Slow:
    """Keeps entries in a list, the one that was used last at the end."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, int, tuple[int, ...]]] = []
        self.added = 0

    def serving(self, text: int) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """The entries that serve a text, the newest last."""
        return sorted(each for each in self.entries if text in each[3])

    def use(self, text: int) -> int | None:
        found = self.serving(text)
        if not found:
            return None
        self.entries.remove(found[-1])
        self.entries.append(found[-1])
        return found[-1][1]

    def add(self, text: int, nbytes: int, beginnings: list[int]) -> list[int]:
        self.entries = [each for each in self.entries if each[1] != text]
        if nbytes > LIMIT:
            return [text]
        self.entries = [each for each in self.entries if each[1] not in beginnings]
        self.added += 1
        self.entries.append((self.added, text, nbytes, (text, *beginnings)))
        gone = []
        while sum(each[2] for each in self.entries) > LIMIT:
            gone.append(self.entries.pop(0)[1])
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
            beginnings = sorted(numbers.sample(shorter, min(len(shorter), numbers.randrange(3))))
            gone = table.add(key(text), f"of {text}", nbytes, [key(n) for n in beginnings])
            assert gone == [key(n) for n in slow.add(text, nbytes, beginnings)]
        elif action < 0.8:
            found, holder = table.get(key(text)), slow.use(text)
            assert found == (None if holder is None else (key(holder), f"of {holder}"))
        else:
            table.remove(key(text))
            slow.entries = [each for each in slow.entries if each[1] != text]
        assert list(table) == [key(each[1]) for each in slow.entries]
        assert len(table) == len(slow.entries)
        assert table.nbytes == sum(each[2] for each in slow.entries)
        served = {n for each in slow.entries for n in each[3]}
        assert dict(table.lengths) == dict.fromkeys(served, 1)
        assert all((key(n) in table) == (n in served) for n in range(14))
