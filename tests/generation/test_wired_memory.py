"""Memory is wired while something generates, and for no longer."""

from collections.abc import Iterator

import pytest

from mlx_mmfree import demo, load
from mlx_mmfree.generation import Chat, chat, memory_limits, stream_generate, text
from mlx_mmfree.generation.wired_memory import MARGIN_BYTES, while_wired
from tests.generation.test_memory import MAC, SERVER, Limit


@pytest.fixture(scope="module")
def model() -> object:
    return load(demo.path())[0]


def counted() -> Iterator[int]:
    yield from range(3)


def test_from_the_first_step_to_the_last(model: object) -> None:
    limit = Limit(5)
    steps = while_wired(counted(), model, None, device=MAC, set_wired=limit)
    assert limit.seen == []
    assert next(steps) == 0
    (size,) = limit.seen
    weights = size - MARGIN_BYTES
    assert 2e6 < weights < 2e7
    assert [*steps] == [1, 2]
    assert limit.value == 5


def test_a_generation_that_is_left_restores_the_limit(model: object) -> None:
    limit = Limit(5)
    steps = while_wired(counted(), model, device=MAC, set_wired=limit)
    next(steps)
    steps.close()
    assert limit.value == 5


def test_two_at_a_time_restore_what_the_first_found(model: object) -> None:
    limit = Limit(5)
    one, two = (while_wired(counted(), model, device=MAC, set_wired=limit) for _ in range(2))
    next(one), next(two)
    wired = limit.value
    assert [*one] == [1, 2]
    assert limit.value == wired != 5
    assert [*two] == [1, 2]
    assert limit.value == 5


def test_limits_that_were_given_are_left_alone(model: object) -> None:
    limit = Limit(5)
    others = {"set_cache": Limit(0), "set_memory": Limit(0)}
    with memory_limits(1, wired_bytes=0, device=MAC, set_wired=limit, **others):
        steps = while_wired(counted(), model, device=MAC, set_wired=limit)
        assert [*steps] == [0, 1, 2]
        assert limit.seen == [0]
    assert limit.seen == [0, 5]


def test_other_devices_have_none(model: object) -> None:
    limit = Limit(5)
    assert [*while_wired(counted(), model, device=SERVER, set_wired=limit)] == [0, 1, 2]
    assert limit.seen == []


def test_the_functions_of_the_package_do_so(model: object, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = Limit(5)

    def on_a_mac(steps: Iterator[object], *models: object) -> Iterator[object]:
        return while_wired(steps, *models, device=MAC, set_wired=limit)

    for module in (text, chat):
        monkeypatch.setattr(module, "while_wired", on_a_mac)
    _, tokenizer = load(demo.path())
    conversation = Chat(model, tokenizer, max_tokens=3)
    for _ in conversation.answer("Once upon"):
        assert limit.value != 5
    assert limit.value == 5
    answer = conversation.answer("a time")
    next(answer)
    assert limit.value != 5
    answer.close()
    assert limit.value == 5
    for _ in stream_generate(model, tokenizer, "Once upon", max_tokens=2):
        assert limit.value != 5
    assert limit.value == 5
