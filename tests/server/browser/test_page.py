"""The page in a browser: answers, forks, keys, and who uses it with what."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.browser.conftest import KEY, OpenPage

pytestmark = pytest.mark.browser

REFUSED = "Failed to load resource"
ENDLESS = "Once upon a time"
"""What the packaged model goes on with as long as it may, if it takes the likeliest tokens."""


def _settings(page: Any, tokens: int, temperature: float = 0) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens of an answer").fill(str(tokens))
    page.get_by_label("Temperature").fill(str(temperature))
    page.get_by_text("Settings").click()


def _write(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def _turns(page: Any, role: str) -> list[str]:
    """The texts of the turns that are shown."""
    return page.locator(f".turn.{role} .text").all_inner_texts()


def _wait_for_end(page: Any) -> None:
    """Waits until no answer is being written, and the last one says what it cost."""
    page.locator(".turn:last-child .bar", has_text=re.compile("written|Stopped")).wait_for()
    page.locator(".text[aria-busy='true']").wait_for(state="detached")


def _cost(page: Any) -> tuple[int, int, int]:
    """Tokens of the last turn: read, taken from the session, written."""
    text = page.locator(".turn:last-child .bar").inner_text()
    found = re.search(r"([\d,]+) tokens? read, ([\d,]+) taken .* ([\d,]+) written", text)
    assert found, text
    read, known, written = (int(number.replace(",", "")) for number in found.groups())
    return read, known, written


def _active(page: Any, address: str) -> int:
    return int(page.request.get(f"{address}/health").json()["active"])


def _wait_until(condition: Callable[[], bool], page: Any) -> None:
    while not condition():
        page.wait_for_timeout(20)


def test_an_answer_is_streamed(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    page.get_by_text("it continues what you write").wait_for()
    page.get_by_text("kept in this page alone").wait_for()
    _settings(page, tokens=400)
    # how long the text was whenever it changed
    page.evaluate(
        """() => {
          window.lengths = new Set();
          const turns = document.getElementById("turns");
          const note = () => lengths.add(turns.querySelector(".assistant .text")?.textContent.length);
          new MutationObserver(note).observe(turns, {subtree: true, characterData: true});
        }"""
    )
    _write(page, ENDLESS)
    _wait_for_end(page)
    [answer] = _turns(page, "assistant")
    assert "little girl" in answer
    assert page.evaluate("lengths.size") > 2
    read, known, written = _cost(page)
    assert (read + known, written) == (4, 400)
    page.get_by_text("Cut off at the most tokens").wait_for()
    page.get_by_text(
        re.compile(r"The server keeps \d+ states? of texts in [\d.]+ (kB|MB)")
    ).wait_for()


def test_an_answer_is_stopped(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    _settings(page, tokens=30_000)
    _write(page, ENDLESS)
    page.locator(".assistant .text", has_text="girl").wait_for()
    page.get_by_role("button", name="Stop").click()
    _wait_for_end(page)
    page.get_by_text("Stopped.").wait_for()
    _wait_until(lambda: _active(page, story) == 0, page)
    before = _turns(page, "assistant")
    # a model that continues texts goes on without a word
    _settings(page, tokens=8)
    page.get_by_role("button", name="Send", exact=True).click()
    _wait_for_end(page)
    first, second = _turns(page, "assistant")
    assert [first] == before and second
    assert _cost(page)[2] == 8
    # and new words stand apart from its own, which may end with a new line
    gap = "" if second[-1].isspace() else " "
    with page.expect_request("**/v1/completions") as caught:
        _write(page, "In the evening")
    _wait_for_end(page)
    prompt = json.loads(caught.value.post_data)["prompt"]
    assert prompt == f"{ENDLESS}{first}{second}{gap}In the evening"


def test_a_turn_is_edited_and_forked(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    _settings(page, tokens=12)
    _write(page, "One day a girl")
    _wait_for_end(page)
    _write(page, "Then she")
    _wait_for_end(page)
    _, known, _ = _cost(page)
    assert known > 0, "the conversation so far is not read again"
    old = _turns(page, "user"), _turns(page, "assistant")

    page.get_by_role("button", name="Edit this turn").first.click()
    page.get_by_role("textbox", name="Text of this turn").fill("One day a dog")
    page.locator(".turn form").get_by_role("button", name="Send").click()
    _wait_for_end(page)
    assert _turns(page, "user") == ["One day a dog"]
    assert "2/2" in page.locator(".versions").first.inner_text()

    page.get_by_role("button", name="Previous version").click()
    assert (_turns(page, "user"), _turns(page, "assistant")) == old
    assert "1/2" in page.locator(".versions").first.inner_text()
    # a new end of the first version is no part of the second
    page.get_by_role("button", name="Write another answer").last.click()
    _wait_for_end(page)
    assert page.locator(".versions:visible").count() == 2
    page.get_by_role("button", name="Next version").first.click()
    assert _turns(page, "user") == ["One day a dog"]


def test_an_answer_is_edited(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    _settings(page, tokens=4)
    _write(page, "One day a girl")
    _wait_for_end(page)
    page.get_by_role("button", name="Edit this turn").last.click()
    page.get_by_role("textbox", name="Text of this turn").fill("saw a dragon.")
    page.get_by_role("button", name="Keep").click()
    with page.expect_request("**/v1/chat/completions") as caught:
        _write(page, "It was")
    _wait_for_end(page)
    sent = json.loads(caught.value.post_data)["messages"]
    assert [(each["role"], each["content"]) for each in sent] == [
        ("user", "One day a girl"),
        ("assistant", "saw a dragon."),
        ("user", "It was"),
    ]


def test_an_adapter_is_chosen(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    _settings(page, tokens=12)
    answers = []
    for name in ("chatty", "chatty:pirate"):
        page.get_by_role("combobox", name="Model").select_option(name)
        _write(page, "One day a girl")
        _wait_for_end(page)
        assert page.locator(".turn.assistant h2").inner_text() == name
        answers += _turns(page, "assistant")
        page.get_by_role("button", name="New").click()
    assert answers[0] != answers[1]
    assert _turns(page, "user") == []


def test_instructions_come_first(open_page: OpenPage, chat: str) -> None:
    page = open_page(chat, key=KEY)
    _settings(page, tokens=4)
    page.get_by_text("Settings").click()
    page.get_by_label("Instructions to the model").fill("Be brief.")
    with page.expect_request("**/v1/chat/completions") as caught:
        _write(page, "Who are you?")
    _wait_for_end(page)
    sent = json.loads(caught.value.post_data)["messages"]
    assert [each["role"] for each in sent] == ["system", "user"]


def test_the_keyboard_is_enough(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    _settings(page, tokens=30_000)
    page.get_by_role("textbox", name="Message").focus()
    page.keyboard.type("Once upon")
    page.keyboard.press("Shift+Enter")
    page.keyboard.press("Backspace")
    page.keyboard.type(" a time")
    page.keyboard.press("Enter")
    page.locator(".assistant .text", has_text="girl").wait_for()
    page.keyboard.press("Escape")
    _wait_for_end(page)
    assert _turns(page, "user") == [ENDLESS]

    # back over the answer to its question, which then gets another answer
    for name in ("Write another answer", "Edit this turn", "Edit this turn"):
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
    _wait_for_end(page)
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
    # the last of what moves the lines when it comes
    page.locator("#kept", has_text="The server keeps").wait_for()
    page.get_by_role("combobox", name="Model").focus()
    tops = []
    for _ in range(4):
        tops.append(page.evaluate("() => document.activeElement.getBoundingClientRect().top"))
        page.keyboard.press("Tab")
    assert tops == sorted(tops)


def test_a_message_waits_for_the_models(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    held: list[Any] = []
    page.route("**/v1/models", lambda route: held.append(route))
    page.reload()
    _settings(page, tokens=4)
    page.get_by_role("textbox", name="Message").fill(ENDLESS)
    page.keyboard.press("Enter")
    _wait_until(lambda: bool(held), page)
    assert page.get_by_role("button", name="Send", exact=True).is_disabled()
    assert page.get_by_role("textbox", name="Message").input_value() == ENDLESS
    assert _turns(page, "user") == []
    held[0].continue_()
    page.get_by_role("button", name="Send", exact=True).click()
    _wait_for_end(page)
    assert _turns(page, "user") == [ENDLESS]


def test_readers_of_screens_wait_for_the_whole_answer(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    _settings(page, tokens=30_000)
    _write(page, ENDLESS)
    text = page.locator(".assistant .text")
    text.wait_for()
    assert (text.get_attribute("aria-live"), text.get_attribute("aria-busy")) == ("polite", "true")
    page.keyboard.press("Escape")
    _wait_for_end(page)
    assert text.get_attribute("aria-busy") == "false"


PHONE = {"viewport": {"width": 320, "height": 568}, "has_touch": True, "is_mobile": True}


def test_a_phone(open_page: OpenPage, chat: str, tmp_path: Path) -> None:
    page = open_page(chat, key=KEY, **PHONE)
    page.get_by_text("Settings").tap()
    page.get_by_label("Most tokens of an answer").fill("12")
    _assert_fits(page)
    page.get_by_text("Settings").tap()
    page.get_by_role("textbox", name="Message").fill("A word as long as " + 60 * "long")
    page.get_by_role("button", name="Send", exact=True).tap()
    _wait_for_end(page)
    page.get_by_role("button", name="Write another answer").tap()
    _wait_for_end(page)
    _assert_fits(page)
    page.get_by_role("button", name="Edit this turn").first.tap()
    _assert_fits(page)


def _assert_fits(page: Any) -> None:
    """Nothing is wider than the window, and fingers hit what is pressed."""
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(
        "() => { const m = document.querySelector('main'); return m.scrollWidth <= m.clientWidth; }"
    )
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, select, input, textarea, summary")]
          .filter((each) => each.checkVisibility())
          .map((each) => [each.innerText || each.id, each.getBoundingClientRect()])
          .filter(([, {width, height}]) => width < 44 || height < 44)
          .map(([name, {width, height}]) => `${name}: ${width} x ${height}`)"""
    )
    assert small == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read(open_page: OpenPage, story: str, scheme: str) -> None:
    page = open_page(story, color_scheme=scheme)
    _settings(page, tokens=4)
    _write(page, ENDLESS)
    _wait_for_end(page)
    found = page.evaluate(
        """() => {
          const ground = (each) => {
            const {backgroundColor} = getComputedStyle(each);
            return backgroundColor === "rgba(0, 0, 0, 0)" ? ground(each.parentElement) : backgroundColor;
          };
          return [...document.querySelectorAll("h1, h2, button, select, textarea, span, .text, .note")]
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
    """That of WCAG 2, from 0 to 1."""
    shares = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(w * s for w, s in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_text_is_never_html(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    evil = "<img src=x onerror='document.title=1'><script>document.title=2</script><b>bold</b>"
    _stream(page, {"choices": [{"text": evil}]})
    _write(page, evil)
    page.locator(".assistant .text", has_text="bold").wait_for()
    assert _turns(page, "user") == _turns(page, "assistant") == [evil]
    assert page.locator("#turns img, #turns script, #turns b").count() == 0
    assert page.title() == "mmfree"


def _stream(page: Any, *events: Any, end: str = "data: [DONE]\n\n") -> None:
    """Lets the server stream these."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body=body),
    )


def test_scripts_of_others_do_not_run(open_page: OpenPage, story: str) -> None:
    page = open_page(story, expected=["Content Security Policy"])
    ran = page.evaluate(
        """() => new Promise((done) => {
          document.addEventListener("securitypolicyviolation", () => done(window.ran ?? false));
          const script = document.createElement("script");
          script.textContent = "window.ran = true";
          document.body.append(script);
        })"""
    )
    assert ran is False


def test_a_stream_that_breaks_off_is_told(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    _stream(page, {"choices": [{"text": " there was"}]}, end="")
    _write(page, ENDLESS)
    page.get_by_text("The connection ended before the answer did.").wait_for()
    assert _turns(page, "assistant") == [" there was"]


def test_a_connection_that_is_lost_is_told(open_page: OpenPage, story: str) -> None:
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
    _write(page, ENDLESS)
    page.get_by_text("The connection ended before the answer did.").wait_for()
    assert _turns(page, "assistant") == [" a"]


def test_an_error_on_the_way_is_told(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    _stream(page, {"choices": [{"text": " a"}]}, {"error": {"message": "The model failed."}})
    _write(page, ENDLESS)
    page.get_by_text("The model failed.").wait_for()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (413, "The text is too long for this server. Too many."),
        (429, "The server is busy. Try again in a moment. Too many."),
        (500, "The server could not do this. Too many."),
    ],
)
def test_a_refusal_is_told_in_plain_words(
    open_page: OpenPage, story: str, status: int, words: str
) -> None:
    page = open_page(story, expected=[REFUSED])
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(status=status, json={"error": {"message": "Too many."}}),
    )
    _write(page, ENDLESS)
    page.get_by_text(words).wait_for()
    # the words are not lost: another answer can be asked for
    page.unroute("**/v1/completions")
    _settings(page, tokens=4)
    page.get_by_role("button", name="Write another answer").click()
    _wait_for_end(page)
    assert _turns(page, "user") == [ENDLESS]


def test_a_server_that_is_gone_is_told(open_page: OpenPage, story: str) -> None:
    page = open_page(story, expected=[REFUSED, REFUSED])
    page.get_by_text("it continues").wait_for()
    page.locator("#kept", has_text="The server keeps").wait_for()
    page.route("**/v1/completions", lambda route: route.abort())
    page.route("**/health", lambda route: route.abort())
    _write(page, ENDLESS)
    page.get_by_text("The server cannot be reached. Is it still running?").wait_for()
    page.locator("#kept", has_text="The server keeps").wait_for(state="detached")


def test_a_setting_out_of_bounds_is_told(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    _settings(page, tokens=0)
    _write(page, ENDLESS)
    page.get_by_text("The setting “Most tokens of an answer” cannot be used").wait_for()


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
    assert page.evaluate("() => [localStorage.length, document.cookie, location.search]") == [
        0,
        "",
        "",
    ]
