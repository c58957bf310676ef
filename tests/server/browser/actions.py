"""Actions of tests on the page, and what they read on it."""

import json
import re
from collections.abc import Callable
from typing import Any

REFUSED = "Failed to load resource"
ENDLESS = "Once upon a time"
"""A prompt that the bundled model continues without an end, if it takes the likeliest tokens."""
CHAT, TEXT = "v1/chat/completions", "v1/completions"
USAGE = {"prompt_tokens": 8, "completion_tokens": 232, "total_tokens": 240} | {
    "prompt_tokens_details": {"cached_tokens": 3}
}


def set_tokens(page: Any, tokens: int, temperature: float = 0) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill(str(temperature))
    page.keyboard.press("Escape")


def write(page: Any, text: str) -> None:
    page.get_by_role("textbox", name="Message").fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def shown_texts(page: Any, role: str) -> list[str]:
    """The texts of the turns that are shown."""
    return page.locator(f".turn.{role} > .text").all_inner_texts()


def wait_for_end(page: Any) -> None:
    """Waits until no answer is being written, and the last one says how it ended or what it cost."""
    page.locator("#send", has_text="Send").wait_for()
    page.locator(".turn:last-child", has_text=re.compile("answer|Stopped")).wait_for()
    page.locator(".text[aria-busy='true']").wait_for(state="detached")


def cost(page: Any) -> tuple[int, int, int]:
    """Tokens of the last turn: of its prompt, of these cached, and of the answer."""
    text = page.locator(".turn:last-child .cost").inner_text()
    found = re.search(
        r"Prompt ([\d,]+) tokens?(?: \(([\d,]+) cached\))?, answer ([\d,]+) tok", text
    )
    assert found, text
    prompt, known, written = (int((number or "0").replace(",", "")) for number in found.groups())
    return prompt, known, written


def wait_for_fault(page: Any, words: str) -> None:
    """Waits until the last turn says that it failed, in these words."""
    page.locator(".turn:last-child > .fault", has_text=words).wait_for()


def wait_until(condition: Callable[[], bool], page: Any) -> None:
    while not condition():
        page.wait_for_timeout(20)


def stream(page: Any, *events: Any, path: str = TEXT, end: str = "data: [DONE]\n\n") -> None:
    """Lets the server stream these."""
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + end
    page.route(
        f"**/{path}", lambda route: route.fulfill(content_type="text/event-stream", body=body)
    )


def answer_with(page: Any, content: str, reasoning: str = "", reason: str = "stop") -> None:
    """Lets every model chat, and this be its answer."""
    models = {"data": [{"id": "m", "chat_template": True, "context_length": 4096}]}
    page.route("**/v1/models", lambda route: route.fulfill(json=models))
    deltas = [{"reasoning_content": reasoning}, {"content": content}]
    chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
    end = {"choices": [{"delta": {}, "finish_reason": reason}], "usage": USAGE}
    stream(page, *chunks, end, path=CHAT)
    page.reload()
    page.locator("#model option", has_text="m").wait_for(state="attached")


def sent_by(page: Any, path: str, act: Callable[[], None]) -> Any:
    """The body of the request that something leads to."""
    with page.expect_request(f"**/{path}") as caught:
        act()
    return json.loads(caught.value.post_data)
