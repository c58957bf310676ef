"""Conversations that the browser keeps: list, search, names, files, answers after a reload."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser.actions import (
    CHAT,
    ENDLESS,
    TEXT,
    answer_with,
    sent_by,
    set_tokens,
    shown_texts,
    stream,
    wait_for_end,
    write,
)
from tests.server.browser.conftest import KEY, OpenPage

pytestmark = pytest.mark.browser


def _titles(page: Any) -> list[str]:
    return page.locator("#list .title").all_inner_texts()


def _talk(page: Any, *questions: str) -> None:
    """A conversation for each question."""
    for question in questions:
        page.get_by_role("button", name="New conversation").click()
        write(page, question)
        wait_for_end(page)


def _saved(page: Any, name: str) -> str:
    """The file that an item of the menu gives for the first conversation of the list."""
    page.get_by_role("button", name="More for").first.click()
    with page.expect_download() as caught:
        page.get_by_role("button", name=name).click()
    return Path(caught.value.path()).read_text()


def test_conversations_are_kept_until_they_are_deleted(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    answer_with(page, "A *short* answer.", reasoning="Hm.")
    _talk(page, "What is a fox?", "What is a bear?")
    page.reload()
    page.get_by_text("A short answer.").wait_for()
    assert shown_texts(page, "user") == ["What is a bear?"]
    page.get_by_text("Prompt 8 tokens (3 cached), answer 232 tokens").wait_for()
    assert _titles(page) == ["What is a bear?", "What is a fox?"]
    page.locator("#list .open", has_text="fox").click()
    assert shown_texts(page, "user") == ["What is a fox?"]
    assert page.locator("#list [aria-current]").inner_text().startswith("What is a fox?")

    page.keyboard.press("Control+k")
    page.keyboard.type("SHORT bear")
    page.locator("#list-note", has_text="1 of 2 conversations").wait_for()
    assert _titles(page) == ["What is a bear?"]
    page.get_by_role("searchbox").fill("")

    page.get_by_role("button", name="More for “What is a fox?”").click()
    page.keyboard.press("Enter")
    page.keyboard.type("Foxes")
    page.keyboard.press("Enter")
    page.locator("#list .title", has_text="Foxes").wait_for()
    page.reload()
    page.locator("#list .title", has_text="Foxes").wait_for()

    page.get_by_role("button", name="More for “Foxes”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_text("Delete “Foxes”?").wait_for()
    page.get_by_role("button", name="Cancel").click()
    assert len(_titles(page)) == 2
    page.get_by_role("button", name="More for “Foxes”").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.locator("#agree").click()
    page.locator("#list .title", has_text="Foxes").wait_for(state="detached")
    assert shown_texts(page, "user") == []
    page.get_by_role("button", name="Delete all").click()
    page.locator("#agree").click()
    page.get_by_text("No conversations yet.").wait_for()
    page.reload()
    page.get_by_text("No conversations yet.").wait_for()


def test_conversations_are_exported_and_imported(
    open_page: OpenPage, story: str, tmp_path: Path
) -> None:
    page = open_page(story)
    answer_with(page, "A fox is an *animal*.", reasoning="Hm.\nYes.")
    _talk(page, "What is a fox?")
    markdown = _saved(page, "Export as Markdown")
    assert markdown == (
        "# What is a fox?\n\n## You\n\nWhat is a fox?\n\n"
        "## m\n\n> Hm.\n> Yes.\n\nA fox is an *animal*.\n"
    )
    data = json.loads(_saved(page, "Export as JSON"))
    assert [(turn["role"], turn["text"]) for turn in data["turns"]] == [
        ("user", "What is a fox?"),
        ("assistant", "A fox is an *animal*."),
    ]
    with page.expect_download() as caught:
        page.get_by_role("button", name="Export all").click()
    saved = tmp_path / "all.json"
    caught.value.save_as(saved)
    page.get_by_role("button", name="Delete all").click()
    page.locator("#agree").click()
    page.get_by_text("No conversations yet.").wait_for()
    for _ in range(2):
        # what is there is not written over
        page.locator("#import-file").set_input_files(saved)
        page.get_by_role("status").get_by_text("1 conversation imported").wait_for()
    page.locator("#list li").nth(1).click()
    assert shown_texts(page, "assistant") == ["A fox is an animal."]
    assert len(_titles(page)) == 2

    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "other.json").write_text(json.dumps({"turns": [1]}))
    for name, words in (("bad", "it is not JSON"), ("other", "it holds no conversation")):
        page.locator("#import-file").set_input_files(tmp_path / f"{name}.json")
        page.get_by_role("alert").get_by_text(
            f"“{name}.json” cannot be imported: {words}"
        ).wait_for()
    assert len(_titles(page)) == 2


def test_a_damaged_conversation_is_imported_or_refused(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    answer_with(page, "An answer.")
    _talk(page, "What is a fox?")
    data = json.loads(_saved(page, "Export as JSON"))
    first, second = data["turns"]

    def bring(**changes: Any) -> None:
        content = json.dumps(data | {"title": "Damaged"} | changes).encode()
        file = {"name": "bad.json", "mimeType": "application/json", "buffer": content}
        page.locator("#import-file").set_input_files(file)

    for parent in ("length", "map", 0.5, 7):
        bring(turns=[first, second | {"parent": parent}])
        page.get_by_role("alert").get_by_text("its turn 2 has no position").wait_for()
    bring(turns=[None])
    page.get_by_role("alert").get_by_text("its turn 1 has no position").wait_for()
    assert _titles(page) == ["What is a fox?"]
    bring(named=True, changed=1e300, chosen="length", turns=[first | {"chosen": "length"}, second])
    page.locator("#list .open", has_text="Damaged").click()
    for _ in range(2):
        page.get_by_text("An answer.").wait_for()
        page.locator("#model option", has_text="m").wait_for(state="attached")
        page.reload()
    page.locator("#list .open", has_text="Damaged").wait_for()
    assert _titles(page) == ["Damaged", "What is a fox?"]


def test_what_is_kept_and_damaged_hides_no_other(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    answer_with(page, "An answer.")
    _talk(page, "What is a fox?")
    page.evaluate(
        """() => new Promise((done) => {
          indexedDB.open("mmfree", 1).onsuccess = ({ target: { result } }) => {
            const writing = result.transaction("conversations", "readwrite");
            writing.objectStore("conversations").put({ id: "damaged" });
            writing.oncomplete = done;
          };
          sessionStorage.setItem("mmfree-shown", "damaged");
        })"""
    )
    page.reload()
    page.locator("#model option", has_text="m").wait_for(state="attached")
    assert _titles(page) == ["What is a fox?"]


def test_a_reload_before_the_answer_begins_loses_nothing(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    # a server that is loading the model, or reads a long prompt
    page.route(f"**/{TEXT}", lambda route: None)
    sent_by(page, TEXT, lambda: write(page, ENDLESS))
    # what the page keeps in haste is damaged
    page.evaluate(
        """() => addEventListener("pagehide", () => Object.keys(localStorage)
          .filter((key) => key.includes("unsaved")).forEach((key) => localStorage.setItem(key, "{")))"""
    )
    page.reload()
    page.locator(".turn.user").wait_for()
    assert shown_texts(page, "user") == [ENDLESS]
    assert page.evaluate("Object.keys(localStorage).filter(k => k.includes('unsaved'))") == []


@pytest.mark.parametrize("chats", [False, True])
def test_an_answer_goes_on_after_a_reload(
    open_page: OpenPage, story: str, chat: str, chats: bool
) -> None:
    page = open_page(chat, key=KEY) if chats else open_page(story)
    set_tokens(page, tokens=20_000)
    write(page, ENDLESS)
    page.locator(".assistant > .text", has_text="girl").wait_for()
    # what the page has when it is left
    page.evaluate(
        """() => addEventListener("pagehide", () => sessionStorage.setItem(
          "seen", document.querySelector(".assistant > .text").textContent))"""
    )
    page.reload()
    page.get_by_text("Interrupted: the page was closed or reloaded before").wait_for()
    [before] = shown_texts(page, "assistant")
    seen = page.evaluate("sessionStorage.getItem('seen')")
    assert page.locator(".assistant > .text").text_content().startswith(seen.rstrip())
    set_tokens(page, tokens=8)
    page.get_by_role("textbox", name="Message").focus()
    body = sent_by(page, CHAT if chats else TEXT, lambda: page.keyboard.press("Enter"))
    wait_for_end(page)
    if chats:
        assert body["continue_final_message"] is True
        assert [each["role"] for each in body["messages"]] == ["user", "assistant"]
    else:
        assert body["prompt"].startswith(ENDLESS)
    [after] = shown_texts(page, "assistant")
    assert after.startswith(before) and len(after) > len(before)
    page.get_by_text("Stopped at the token limit.").wait_for()


def test_another_tab_follows(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    answer_with(page, "An answer.")
    other = page.context.new_page()
    other.goto(story)
    _talk(page, "What is a fox?")
    other.locator("#list .title", has_text="What is a fox?").wait_for()
    other.close()


def test_a_text_that_ends_is_reported_and_another_begins(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    stream(page, {"choices": [{"text": " a fox. The end.", "finish_reason": "stop"}]})
    write(page, "There was")
    page.get_by_text("The text ends here. Your next message starts a new text.").wait_for()
    page.get_by_role("textbox", name="Message").press("Enter")
    page.get_by_role("status").get_by_text("The text has ended.").wait_for()
    assert len(shown_texts(page, "assistant")) == 1
    stream(page, {"choices": [{"text": "", "finish_reason": "stop"}]})
    body = sent_by(page, TEXT, lambda: write(page, "A bear"))
    assert body["prompt"] == "A bear"
    page.get_by_text("The model ended the text here without adding to it.").wait_for()
