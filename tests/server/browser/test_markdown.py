"""Answers in Markdown: what becomes of it, and that nothing in an answer is more than text."""

from typing import Any

import pytest

from tests.server.browser.actions import (
    CHAT,
    answer_with,
    sent_by,
    shown_texts,
    wait_for_end,
    write,
)
from tests.server.browser.conftest import OpenPage

pytestmark = pytest.mark.browser

ANSWER = """# Sizes

| kind | bits |
|:--|--:|
| ternary | 1.58 |

Some **bold** words, `code`, and [a link](https://example.invalid/page).

```python
def double(x):
    return 2 * x  # <b>
```

1. first
2. second

- [x] done
"""


def test_markdown_is_shown(open_page: OpenPage, story: str) -> None:
    page = open_page(story, permissions=["clipboard-read", "clipboard-write"])
    answer_with(page, ANSWER, reasoning="A table,\nthen code.")
    write(page, "**mine** stays as it is")
    wait_for_end(page)
    assert shown_texts(page, "user") == ["**mine** stays as it is"]
    text = page.locator(".assistant > .text")
    assert text.locator("h1").inner_text() == "Sizes"
    assert text.locator("td").all_inner_texts() == ["ternary", "1.58"]
    assert text.locator("td").last.get_attribute("align") == "right"
    assert text.locator("ol > li").all_inner_texts() == ["first", "second"]
    assert text.get_by_role("checkbox").is_checked()
    link = text.get_by_role("link")
    assert link.get_attribute("href") == "https://example.invalid/page"
    assert link.get_attribute("rel") == "noopener noreferrer"

    assert text.locator(".code-bar span").inner_text() == "python"
    text.get_by_role("button", name="Copy this code").click()
    page.get_by_role("status").get_by_text("Copied").wait_for()
    code = "def double(x):\n    return 2 * x  # <b>\n"
    assert page.evaluate("navigator.clipboard.readText()") == code
    page.get_by_role("button", name="Copy this answer").click()
    page.wait_for_function("async () => (await navigator.clipboard.readText()).startsWith('#')")
    assert page.evaluate("navigator.clipboard.readText()") == ANSWER

    # reasoning is folded, and goes back with the conversation
    reasoning = page.locator(".assistant .reasoning .text")
    assert not reasoning.is_visible()
    page.locator(".assistant .reasoning summary").click()
    assert reasoning.inner_text() == "A table,\nthen code."
    messages = sent_by(page, CHAT, lambda: write(page, "And then?"))["messages"]
    assert messages[1] == {
        "role": "assistant",
        "content": ANSWER,
        "reasoning_content": "A table,\nthen code.",
    }


EVIL = """<script>document.title = "script"</script>

<img src=x onerror="document.title='image'">

Words <b onmouseover="document.title='over'">bold</b> <svg onload="document.title='svg'"></svg>

[click](javascript:document.title='link') <a href="javascript:document.title='tag'">tag</a>
[data](data:text/html,<script>document.title='data'</script>) [own](/v1/models)
[js](&#106;avascript:document.title=1)

![picture](https://elsewhere.invalid/seen.png "&quot; onerror=&quot;document.title='quote'")

<iframe srcdoc="<script>parent.document.title='frame'</script>"></iframe>
<style>body { display: none }</style><form action="https://elsewhere.invalid"><input name=a></form>
<math><mtext><table><mglyph><style><img src=x onerror=document.title='mutation'></style>

| <img src=x onerror=document.title='cell'> |
|---|
| <script>document.title='td'</script> |

```"><img src=x onerror=document.title='lang'>
</code></pre><script>document.title = "fence"</script>
```

<https://elsewhere.invalid/"onmouseover="document.title='auto'">
"""


def test_markup_in_answers_is_inert(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    answer_with(page, EVIL, reasoning=EVIL)
    write(page, EVIL)
    wait_for_end(page)
    page.locator(".assistant .reasoning summary").click()
    page.locator("#list li .title", has_text="<script>").wait_for()
    for each in page.locator(".assistant > .text *").all()[:40]:
        each.dispatch_event("mouseover")
    page.wait_for_timeout(100)
    assert page.title() == "mmfree"
    text = page.locator(".assistant > .text")
    # it is read as it was written
    for written in ("<script>", "<iframe", "<style>", "<mglyph>", 'onmouseover="document'):
        assert written in text.inner_text()
    found: Any = page.evaluate(
        """() => [...document.querySelectorAll("#turns *, #list *")].map((each) => ({
          name: each.localName,
          attributes: [...each.attributes].map(({name, value}) => [name, value]),
        }))"""
    )
    names = {each["name"] for each in found}
    assert not names & {"script", "img", "svg", "iframe", "style", "form", "math", "b", "object"}
    for each in found:
        for name, value in each["attributes"]:
            assert not name.startswith("on") and name not in ("style", "srcdoc", "src")
            assert name != "href" or value.startswith(("https:", "mailto:")), value


@pytest.mark.parametrize("name", ["script", "pre", "code", "kbd"])
def test_markup_after_a_tag_in_a_line_is_read_as_it_was_written(
    open_page: OpenPage, story: str, name: str
) -> None:
    page = open_page(story)
    answer_with(page, f"See <{name}>1 &amp; <svg/onload=document.title=1//")
    write(page, "Show it")
    wait_for_end(page)
    shown = page.locator(".assistant > .text").inner_text()
    assert shown == f"See <{name}>1 & <svg/onload=document.title=1//"
    assert page.title() == "mmfree"


def test_blocks_that_stay_are_not_made_anew(open_page: OpenPage, story: str) -> None:
    """So a person can select in an answer, or press a button in it, while it goes on."""
    page = open_page(story)
    unchanged = page.evaluate(
        """async () => {
          const {MarkdownView} = await import("./page/markdown.js");
          const node = document.createElement("div");
          const view = new MarkdownView(node);
          view.show("One *word*\\n\\n```js\\n1 + 1\\n```\\n\\nTw");
          const before = [...node.children];
          view.show("One *word*\\n\\n```js\\n1 + 1\\n```\\n\\nTwo [a]\\n\\nThree");
          const after = [...node.children];
          view.show("One *word*\\n\\n[a]: https://example.invalid\\n\\nTwo [a]");
          return [before.length, after.length, before.map((each, n) => each === after[n]),
                  node.querySelectorAll("a").length, node.children.length];
        }"""
    )
    assert unchanged == [3, 4, [True, True, False], 1, 2]


@pytest.mark.parametrize("mark", ["> ", "- "])
def test_what_is_nested_too_deeply_is_shown_as_written(
    open_page: OpenPage, story: str, mark: str
) -> None:
    page = open_page(story)
    answer_with(page, mark * 3000 + "deep")
    write(page, "Quote")
    wait_for_end(page)
    assert [text.strip() for text in shown_texts(page, "assistant")] == [mark * 3000 + "deep"]
    page.reload()
    page.locator(".assistant > .text", has_text="deep").wait_for()


@pytest.mark.parametrize("mark", ["**a_", "***a", "http://a.b/(", "~~a", "a" + " " * 40])
def test_a_text_with_too_many_marks_holds_up_nothing(
    open_page: OpenPage, story: str, mark: str
) -> None:
    """Its paragraph is shown as it was written, line by line, and the others as Markdown."""
    page = open_page(story)
    found = page.evaluate(
        """async ([long, short]) => {
          const {MarkdownView} = await import("./page/markdown.js");
          const node = document.createElement("div");
          const begun = performance.now();
          new MarkdownView(node).show(`${long}\\n\\n${short}`);
          const seconds = (performance.now() - begun) / 1000;
          const [first, last] = node.children;
          return [seconds, first.textContent, first.querySelectorAll("br").length, last.innerHTML];
        }""",
        [f"{mark * 5000}\nb *c*", "one **bold** word"],
    )
    seconds, first, breaks, last = found
    assert seconds < 2
    assert first == f"{mark * 5000}b *c*" and breaks == 1
    assert last == "one <strong>bold</strong> word"


def test_of_many_marks_in_a_paragraph_none_is_emphasis(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    few, many = "*a* " * 100, "*a* " * 101
    answer_with(page, f"{few}\n\n{many}[b](https://example.invalid)")
    write(page, "Marks")
    wait_for_end(page)
    first, last = page.locator(".assistant > .text p").all()
    assert first.locator("em").count() == 100
    assert last.locator("em").count() == 0 and last.get_by_role("link").count() == 1
    assert last.inner_text() == f"{many}b"
