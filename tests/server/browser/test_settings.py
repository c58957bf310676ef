"""Settings for answers, and the files that go with a message."""

from pathlib import Path
from typing import Any

import pytest

from tests.server.browser.actions import (
    CHAT,
    TEXT,
    answer_with,
    sent_by,
    set_tokens,
    shown_texts,
    stream,
    wait_for_end,
    wait_for_fault,
    write,
)
from tests.server.browser.conftest import KEY, OpenPage

pytestmark = pytest.mark.browser

CHOSEN: dict[str, tuple[str, Any]] = {
    "max_tokens": ("40", 40),
    "temperature": ("0.3", 0.3),
    "top_p": ("0.9", 0.9),
    "top_k": ("30", 30),
    "min_p": ("0.05", 0.05),
    "repetition_penalty": ("1.1", 1.1),
    "repetition_context_size": ("64", 64),
    "presence_penalty": ("-0.5", -0.5),
    "frequency_penalty": ("0.5", 0.5),
    "xtc_probability": ("0.1", 0.1),
    "xtc_threshold": ("0.2", 0.2),
    "min_tokens_to_keep": ("2", 2),
    "seed": ("7", 7),
    "stop": ("END, \\n\\n", ["END", "\n\n"]),
    "logit_bias": ("13: -5, 42: 1.5", {"13": -5, "42": 1.5}),
    "reasoning_budget": ("100", 100),
}


def _open(page: Any) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("More", exact=True).click()


def test_every_setting_reaches_the_server(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    _open(page)
    for name, (text, _) in CHOSEN.items():
        page.locator(f"#{name.replace('_', '-')}").fill(text)
    page.get_by_label("Thinking", exact=True).select_option("Off")
    page.get_by_label("Thinking effort").select_option("Low")
    page.get_by_role("button", name="Done").click()
    # the server takes each of them
    body = sent_by(page, CHAT, lambda: write(page, "One day"))
    wait_for_end(page)
    assert page.locator(".turn .fault:visible").count() == 0
    expected = {name: value for name, (_, value) in CHOSEN.items()}
    expected |= {"enable_thinking": False, "reasoning_effort": "low"}
    assert {name: body[name] for name in expected} == expected

    page.reload()
    _open(page)
    assert page.get_by_label("Top p").input_value() == "0.9"
    page.get_by_role("button", name="Reset settings").click()
    page.get_by_role("button", name="Done").click()
    body = sent_by(page, CHAT, lambda: write(page, "And then"))
    assert {name for name in body if name in expected} == set()


def test_the_fields_are_those_of_the_server(open_page: OpenPage, story: str) -> None:
    """Each parameter of texts has a field, but for those that are the page's own affair."""
    from mlx_mmfree.server.schemas import ChatRequest

    page = open_page(story)
    fields = page.locator("#settings input, #settings select").evaluate_all(
        "(all) => all.map(({id}) => id.replaceAll('-', '_'))"
    )
    own = {"model", "messages", "stream", "stream_options", "continue_final_message", "user", "n"}
    unused = {"max_completion_tokens", "logprobs", "top_logprobs", "chat_template_kwargs"} | {
        "parallel_tool_calls",
        "response_format",
        "tool_choice",
        "tools",
    }
    assert ChatRequest.model_fields.keys() - own - unused == {*fields} - {"theme"}


@pytest.mark.parametrize("bias", ["13", "x: 1", "13: much"])
def test_a_logit_bias_is_checked(open_page: OpenPage, story: str, bias: str) -> None:
    page = open_page(story)
    _open(page)
    page.get_by_label("Logit bias").fill(bias)
    page.get_by_role("button", name="Done").click()
    write(page, "Once")
    wait_for_fault(page, "Check the setting “Logit bias”: Write pairs of")


def test_text_files_go_with_a_message(open_page: OpenPage, story: str, tmp_path: Path) -> None:
    page = open_page(story)
    answer_with(page, "Read.")
    (tmp_path / "notes.txt").write_text("foxes ``` and\nbears")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\x00")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "large.txt").write_text(1_200_000 * "x")
    files = page.locator("#attach-file")
    files.set_input_files([tmp_path / name for name in ("notes.txt", "picture.png", "large.txt")])
    page.locator("#files", has_text="notes.txt · 4 words").wait_for()
    fault = page.get_by_role("alert").inner_text()
    assert "“picture.png” is not a UTF-8 text file." in fault
    assert "“large.txt” has 1.2 MB. A file may have at most 1.0 MB, about" in fault
    files.set_input_files(tmp_path / "empty.txt")
    page.get_by_text("“empty.txt” is empty.").wait_for()
    assert page.locator("#files li").count() == 1

    body = sent_by(page, CHAT, lambda: write(page, "Sum this up."))
    wait_for_end(page)
    content = "notes.txt:\n\n````\nfoxes ``` and\nbears\n````\n\nSum this up."
    assert body["messages"] == [{"role": "user", "content": content}]
    assert shown_texts(page, "user") == ["Sum this up."]
    assert page.locator("#files li").count() == 0
    page.reload()
    page.locator(".user .file summary", has_text="notes.txt · 4 words").click()
    page.locator(".user .file pre", has_text="bears").wait_for()

    files.set_input_files(tmp_path / "notes.txt")
    page.get_by_role("button", name="Remove notes.txt").click()
    assert page.locator("#files li").count() == 0


def test_colours_are_chosen(open_page: OpenPage, story: str) -> None:
    page = open_page(story, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Theme").select_option("Dark")
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light


def test_models_are_switched(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    page.get_by_role("combobox", name="Model").select_option("chatty:pirate")
    set_tokens(page, tokens=4)
    write(page, "One day")
    wait_for_end(page)
    page.get_by_role("button", name="New conversation").click()
    page.get_by_role("combobox", name="Model").select_option("chatty")
    page.reload()
    # the model chosen last, and the model of a conversation
    page.locator("#send:enabled").wait_for()
    assert page.get_by_role("combobox", name="Model").input_value() == "chatty"
    page.locator("#list .open").click()
    assert page.get_by_role("combobox", name="Model").input_value() == "chatty:pirate"


def test_kinds_of_models_are_distinguished(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    models = [
        {"id": "vectors", "kind": "embedding", "chat_template": False, "context_length": 512},
        {"id": "chatty", "kind": "chat", "chat_template": True, "context_length": 4096},
        {"id": "writer", "kind": "base", "chat_template": False, "loaded": False},
    ]
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
    page.reload()
    page.get_by_text("Context: 4,096 tokens.").wait_for()
    choice = page.get_by_role("combobox", name="Model")
    assert choice.locator("option").all_inner_texts() == ["chatty", "writer"]
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("System prompt").is_visible()
    page.keyboard.press("Escape")
    stream(page, {"choices": [{"delta": {"content": "An"}, "finish_reason": "length"}]}, path=CHAT)
    write(page, "Hello")
    page.get_by_text("Stopped at the token limit.").wait_for()
    # another kind of model cannot go on with an answer, but takes the next turn
    choice.select_option("writer")
    page.get_by_role("button", name="Continue this answer").click()
    page.get_by_role("alert").get_by_text(
        "Choose a model of the same kind to continue it."
    ).wait_for()
    stream(page, {"choices": [{"text": " fox", "finish_reason": "length"}]})
    body = sent_by(page, TEXT, lambda: write(page, "red"))
    assert (body["model"], body["prompt"]) == ("writer", "HelloAn red")
    page.get_by_role("button", name="New conversation").click()
    page.get_by_text("It loads with your first message.").wait_for()
    page.get_by_role("button", name="Settings").click()
    assert not page.get_by_label("System prompt").is_visible()
