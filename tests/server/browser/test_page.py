"""The page in a browser: answers, forks, keys, and who uses it with what."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser.actions import (
    CHAT,
    ENDLESS,
    REFUSED,
    TEXT,
    cost,
    sent_by,
    set_tokens,
    shown_texts,
    stream,
    wait_for_end,
    wait_for_fault,
    wait_until,
    write,
)
from tests.server.browser.conftest import KEY, OpenPage

pytestmark = pytest.mark.browser


def _active(page: Any, address: str) -> int:
    return int(page.request.get(f"{address}/health").json()["active"])


def test_an_answer_is_streamed(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    page.get_by_role("heading", name="This model continues texts").wait_for()
    page.get_by_text("kept in this browser until you delete them").wait_for()
    set_tokens(page, tokens=400)
    # how long the text was whenever it changed
    page.evaluate(
        """() => {
          window.lengths = new Set();
          const turns = document.getElementById("turns");
          const note = () => lengths.add(turns.querySelector(".assistant > .text")?.textContent.length);
          new MutationObserver(note).observe(turns, {subtree: true, characterData: true});
        }"""
    )
    write(page, ENDLESS)
    wait_for_end(page)
    [answer] = shown_texts(page, "assistant")
    assert "little girl" in answer
    assert page.evaluate("lengths.size") > 2
    prompt, _, written = cost(page)
    assert (prompt, written) == (4, 400)
    assert re.search(r" · [\d,.]+ tokens/s$", page.locator(".cost").last.inner_text())
    page.get_by_text("Stopped at the token limit.").wait_for()
    page.get_by_role("button", name="Settings").click()
    page.get_by_text(
        re.compile(r"The server caches \d+ states? of texts \([\d.]+ (kB|MB)\)")
    ).wait_for()


def test_an_answer_is_stopped(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    set_tokens(page, tokens=30_000)
    write(page, ENDLESS)
    page.locator(".assistant > .text", has_text="girl").wait_for()
    page.get_by_role("button", name="Stop").click()
    wait_for_end(page)
    page.get_by_text("Stopped.").wait_for()
    wait_until(lambda: _active(page, story) == 0, page)
    [before] = shown_texts(page, "assistant")
    written = cost(page)[2]
    # one key goes on with the same answer
    set_tokens(page, tokens=8)
    page.get_by_role("textbox", name="Message").focus()
    body = sent_by(page, TEXT, lambda: page.keyboard.press("Enter"))
    wait_for_end(page)
    [after] = shown_texts(page, "assistant")
    assert body["prompt"] == f"{ENDLESS}{before}"
    assert after.startswith(before) and len(after) > len(before)
    assert cost(page)[2] == written + 8
    # and new words stand apart from its own, which may end with a new line
    gap = "" if after[-1].isspace() else " "
    body = sent_by(page, TEXT, lambda: write(page, "In the evening"))
    wait_for_end(page)
    assert body["prompt"] == f"{ENDLESS}{after}{gap}In the evening"


def test_a_turn_is_edited_and_forked(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    set_tokens(page, tokens=12)
    write(page, "One day a girl")
    wait_for_end(page)
    write(page, "Then she")
    wait_for_end(page)
    _, known, _ = cost(page)
    assert known > 0, "the conversation so far is cached"
    old = shown_texts(page, "user"), shown_texts(page, "assistant")

    page.get_by_role("button", name="Edit this turn").first.click()
    page.get_by_role("textbox", name="Text of this turn").fill("One day a dog")
    page.locator(".turn form").get_by_role("button", name="Send").click()
    wait_for_end(page)
    assert shown_texts(page, "user") == ["One day a dog"]
    assert "2/2" in page.locator(".versions").first.inner_text()

    page.get_by_role("button", name="Previous version").click()
    assert (shown_texts(page, "user"), shown_texts(page, "assistant")) == old
    assert "1/2" in page.locator(".versions").first.inner_text()
    # a new end of the first version is no part of the second
    page.get_by_role("button", name="Regenerate this answer").last.click()
    wait_for_end(page)
    assert page.locator(".versions:visible").count() == 2
    page.get_by_role("button", name="Next version").first.click()
    assert shown_texts(page, "user") == ["One day a dog"]


def test_an_answer_is_edited(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    set_tokens(page, tokens=4)
    write(page, "One day a girl")
    wait_for_end(page)
    page.get_by_role("button", name="Edit this turn").last.click()
    page.get_by_role("textbox", name="Text of this turn").fill("saw a dragon.")
    page.get_by_role("button", name="Keep").click()
    sent = sent_by(page, CHAT, lambda: write(page, "It was"))["messages"]
    wait_for_end(page)
    assert [(each["role"], each["content"]) for each in sent] == [
        ("user", "One day a girl"),
        ("assistant", "saw a dragon."),
        ("user", "It was"),
    ]


def test_an_adapter_is_chosen(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    set_tokens(page, tokens=12)
    answers = []
    for name in ("chatty", "chatty:pirate"):
        page.get_by_role("combobox", name="Model").select_option(name)
        write(page, "One day a girl")
        wait_for_end(page)
        assert page.locator(".turn.assistant h2").inner_text() == name
        answers += shown_texts(page, "assistant")
        page.get_by_role("button", name="New conversation").click()
    assert answers[0] != answers[1]
    assert shown_texts(page, "user") == []


def test_the_system_prompt_comes_first(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    set_tokens(page, tokens=4)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Done").click()
    sent = sent_by(page, CHAT, lambda: write(page, "Who are you?"))["messages"]
    wait_for_end(page)
    assert [each["role"] for each in sent] == ["system", "user"]


def test_the_keyboard_is_enough(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    set_tokens(page, tokens=30_000)
    page.get_by_role("textbox", name="Message").focus()
    page.keyboard.type("Once upon")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    page.keyboard.type(" a time")
    page.keyboard.press("Enter")
    page.locator(".assistant > .text", has_text="girl").wait_for()
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert shown_texts(page, "user") == [ENDLESS]

    # back over the answer to its question, which then gets another answer
    names = ("Continue this answer", "Regenerate this answer", "Copy this answer", "Edit this turn")
    for name in (*names, "Edit this turn"):
        _tab_to(page, name, backwards=True)
    page.keyboard.press("Enter")
    assert _focused(page) == "Text of this turn"
    page.keyboard.press("Escape")
    assert _focused(page) == "Edit this turn"
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    page.keyboard.type(" ago")
    page.keyboard.press("Enter")
    page.get_by_text("2/2").wait_for()
    assert _focused(page) == "Message"
    page.keyboard.press("Escape")
    wait_for_end(page)
    _tab_to(page, "Previous version", backwards=True)
    page.keyboard.press("Enter")
    page.get_by_text("1/2").wait_for()
    assert _focused(page) == "Previous version"
    assert page.get_by_role("status").inner_text() == "Version 1 of 2"


def _focused(page: Any) -> str:
    return page.evaluate(
        "() => document.activeElement.ariaLabel ?? document.activeElement.labels?.[0]?.innerText ?? ''"
    )


def _tab_to(page: Any, name: str, backwards: bool = False) -> None:
    """Presses Tab until an element of that name has the focus, each time one that can be seen."""
    for _ in range(12):
        page.keyboard.press("Shift+Tab" if backwards else "Tab")
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
        if _focused(page) == name:
            return
    raise AssertionError(f"the keyboard does not reach {name!r}")


def test_tab_follows_what_is_seen(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    page.locator("#send:enabled").wait_for()
    page.get_by_role("combobox", name="Model").focus()
    tops = []
    for _ in range(4):
        tops.append(page.evaluate("() => document.activeElement.getBoundingClientRect().top"))
        page.keyboard.press("Tab")
    assert tops == sorted(tops)


def test_a_message_waits_for_the_models(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    page.locator("#send:enabled").wait_for()
    pending: list[Any] = []
    page.route("**/v1/models", lambda route: pending.append(route))
    page.reload()
    set_tokens(page, tokens=4)
    page.get_by_role("textbox", name="Message").fill(ENDLESS)
    page.keyboard.press("Enter")
    wait_until(lambda: bool(pending), page)
    assert page.get_by_role("button", name="Send", exact=True).is_disabled()
    assert page.get_by_role("textbox", name="Message").input_value() == ENDLESS
    assert shown_texts(page, "user") == []
    pending[0].continue_()
    page.get_by_role("button", name="Send", exact=True).click()
    wait_for_end(page)
    assert shown_texts(page, "user") == [ENDLESS]


def test_readers_of_screens_wait_for_the_whole_answer(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    set_tokens(page, tokens=30_000)
    write(page, ENDLESS)
    text = page.locator(".assistant > .text")
    text.wait_for()
    assert (text.get_attribute("aria-live"), text.get_attribute("aria-busy")) == ("polite", "true")
    page.keyboard.press("Escape")
    wait_for_end(page)
    assert text.get_attribute("aria-busy") == "false"


PHONE = {"viewport": {"width": 320, "height": 568}, "has_touch": True, "is_mobile": True}


def test_a_phone(open_page: OpenPage, chat: str, tmp_path: Path) -> None:
    page = open_page(chat, key=KEY, **PHONE)
    page.get_by_role("button", name="Settings").tap()
    page.get_by_text("More", exact=True).tap()
    page.get_by_label("Max tokens").fill("12")
    _assert_fits(page)
    page.get_by_role("button", name="Done").tap()
    page.get_by_role("textbox", name="Message").fill("A word as long as " + 60 * "long")
    page.get_by_role("button", name="Send", exact=True).tap()
    wait_for_end(page)
    page.get_by_role("button", name="Regenerate this answer").tap()
    page.get_by_text("2/2").wait_for()
    wait_for_end(page)
    _assert_fits(page)
    page.get_by_role("button", name="Edit this turn").first.tap()
    _assert_fits(page)
    page.get_by_role("button", name="Conversations").tap()
    page.locator("#list li").wait_for()
    _assert_fits(page)
    page.get_by_role("button", name="More for").tap()
    _assert_fits(page)
    page.get_by_role("button", name="Rename").tap()
    _assert_fits(page)
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Close the list").tap()
    page.get_by_role("textbox", name="Message").wait_for()


def _assert_fits(page: Any) -> None:
    """Nothing is wider than the window, and fingers hit what is pressed."""
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(
        "() => { const m = document.querySelector('main'); return m.scrollWidth <= m.clientWidth; }"
    )
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, textarea, summary")]
          .filter((each) => each.checkVisibility({visibilityProperty: true}))
          .filter((each) => !each.closest("[inert]"))
          .map((each) => [each.innerText || each.id, each.getBoundingClientRect()])
          .filter(([, {width, height}]) => width < 44 || height < 44)
          .map(([name, {width, height}]) => `${name}: ${width} x ${height}`)"""
    )
    assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(open_page: OpenPage, story: str, scheme: str) -> None:
    page = open_page(story, color_scheme=scheme)
    set_tokens(page, tokens=4)
    write(page, ENDLESS)
    wait_for_end(page)
    found = page.evaluate(
        """() => {
          const ground = (each) => {
            const {backgroundColor: own} = getComputedStyle(each);
            return /rgba\\(.*, 0\\)/.test(own) ? ground(each.parentElement) : own;
          };
          const kinds = ".name, h2, button, select, textarea, span, time, .text, .note, .end";
          return [...document.querySelectorAll(kinds)]
            .filter((each) => each.checkVisibility() && !each.matches(".unseen"))
            .flatMap((each) => [null, "::placeholder"].map((part) =>
              [each.innerText || each.id, getComputedStyle(each, part).color, ground(each)]));
        }"""
    )
    assert len(found) > 8
    for name, ink, ground in found:
        assert _contrast(ink, ground) >= 4.5, f"{name}: {ink} on {ground}"
    body = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (_luminance(body) > 0.5) == (scheme == "light")


def _luminance(colour: str) -> float:
    """The relative luminance of WCAG 2, from 0 to 1."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_text_is_never_html(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script><b>bold</b>"
    stream(page, {"choices": [{"text": evil}]})
    write(page, evil)
    page.locator(".assistant > .text", has_text="bold").wait_for()
    assert shown_texts(page, "user") == shown_texts(page, "assistant") == [evil]
    assert page.locator("#turns img, #turns script, #turns b").count() == 0
    assert page.title() == "mmfree"


@pytest.mark.parametrize(
    "complaint", ["This document requires 'Trusted", "Content Security Policy"]
)
def test_scripts_of_others_do_not_run(open_page: OpenPage, story: str, complaint: str) -> None:
    """Neither with Trusted Types nor in a browser that has none."""
    page = open_page(story, expected=4 * [complaint])
    if complaint == "Content Security Policy":
        page.route(f"{story}/", _without_trusted_types)
        page.reload()
    ran = page.evaluate(
        """async () => {
          const attempt = (properties, ...text) => {
            const made = Object.assign(document.createElement("script"), properties);
            made.append(...text);
            document.body.append(made);
          };
          attempt({}, "window.ran = 'text'");
          const src = "data:text/javascript,window.ran='data'";
          try { attempt({src}); } catch { /* an address needs to be trusted too */ }
          try { document.body.innerHTML += "<img src=x onerror='window.ran = 1'>"; } catch { /* too */ }
          await new Promise((done) => setTimeout(done, 200));
          return window.ran ?? null;
        }"""
    )
    assert ran is None


def _without_trusted_types(route: Any) -> None:
    response = route.fetch()
    policy = response.headers["content-security-policy"]
    assert "; require-trusted-types-for" in policy
    headers = {"content-security-policy": policy.partition("; require-trusted-types-for")[0]}
    route.fulfill(response=response, headers=response.headers | headers)


def test_a_stream_that_breaks_off_is_reported(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    stream(page, {"choices": [{"text": " there was"}]}, end="")
    write(page, ENDLESS)
    wait_for_fault(page, "The connection ended before the answer did.")
    assert shown_texts(page, "assistant") == ["there was"]


def test_a_connection_that_is_lost_is_reported(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    page.evaluate(
        """() => {
          const first = window.fetch;
          const lost = new ReadableStream({
            start(controller) {
              controller.enqueue(new TextEncoder().encode('data: {"choices": [{"text": " a"}]}\\n\\n'));
            },
            pull(controller) { controller.error(new TypeError("network error")); },
          }, {highWaterMark: 0});
          window.fetch = (path, ...rest) =>
            path === "v1/completions" ? Promise.resolve(new Response(lost)) : first(path, ...rest);
        }"""
    )
    write(page, ENDLESS)
    wait_for_fault(page, "The connection ended before the answer did.")
    assert shown_texts(page, "assistant") == ["a"]


def test_an_error_on_the_way_is_reported(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    stream(page, {"choices": [{"text": " a"}]}, {"error": {"message": "The model failed."}})
    write(page, ENDLESS)
    wait_for_fault(page, "The model failed.")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (413, "The text is too long for this server. Too many."),
        (429, "The server is busy. Try again in a moment. Too many."),
        (500, "The server could not do this. Too many."),
    ],
)
def test_a_refusal_is_reported_in_plain_words(
    open_page: OpenPage, story: str, status: int, words: str
) -> None:
    page = open_page(story, expected=[REFUSED])
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(status=status, json={"error": {"message": "Too many."}}),
    )
    write(page, ENDLESS)
    wait_for_fault(page, words)
    # the words are not lost: another answer can be asked for
    page.unroute("**/v1/completions")
    set_tokens(page, tokens=4)
    page.get_by_role("button", name="Regenerate this answer").click()
    wait_for_end(page)
    assert shown_texts(page, "user") == [ENDLESS]


def test_a_server_that_is_gone_is_reported(open_page: OpenPage, story: str) -> None:
    page = open_page(story, expected=[REFUSED, REFUSED])
    page.locator("#send:enabled").wait_for()
    page.route("**/v1/completions", lambda route: route.abort())
    page.route("**/health", lambda route: route.abort())
    write(page, ENDLESS)
    wait_for_fault(page, "The server cannot be reached. Is it still running?")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("heading", name="Page").wait_for()
    assert page.locator("#kept").inner_text() == ""


def test_a_setting_out_of_bounds_is_reported(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    set_tokens(page, tokens=0)
    write(page, ENDLESS)
    wait_for_fault(page, "Check the setting “Max tokens”: ")


def test_a_key_is_asked_for(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, expected=[REFUSED, REFUSED])
    key = page.get_by_label("API key of this server")
    key.wait_for()
    assert page.locator("#fault").inner_text().startswith("The server asks for an API key.")
    key.fill("another one")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('key').value === ''")
    key.fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("combobox", name="Model").locator("option").first.wait_for(state="attached")
    key.wait_for(state="hidden")
    assert page.locator("#fault").inner_text() == ""
    stored = page.evaluate(
        "() => JSON.stringify([Object.entries(localStorage), document.cookie, location.href])"
    )
    assert KEY not in stored and "another one" not in stored
