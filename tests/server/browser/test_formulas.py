"""Formulas are typeset and code is coloured, once each is complete, and both stay harmless."""

from typing import Any

import pytest

from tests.server.browser.actions import answer_with, shown_texts, wait_for_end, write
from tests.server.browser.conftest import OpenPage

pytestmark = pytest.mark.browser

ANSWER = r"""It costs $5 and $10, or $ 3 $, and `$x$` is code. Then $x_1^2 + \frac{a}{b}$ and \(y\).

$$
\sum_{i=1}^n i = \frac{n(n+1)}{2}
$$

\[ E = mc^2 \]

A broken one: $\frac{a$ stays.

```python
def double(x):
    return 2 * x  # $x$
```

| a | b |
|---|---|
| $z$ | 2 |
"""


def _answered(page: Any, text: str) -> Any:
    answer_with(page, text)
    write(page, "Go on")
    wait_for_end(page)
    page.wait_for_function("() => !document.querySelector('code.formula-source')")
    return page.locator(".assistant > .text")


def test_formulas_and_code_are_shown(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    text = _answered(page, ANSWER)
    assert text.locator("math").count() == 5
    assert text.locator(".wide-formula math").count() == 2
    assert text.locator("td math").count() == 1
    written = text.inner_text()
    assert "costs $5 and $10, or $ 3 $, and $x$ is code" in written
    assert r"A broken one: $\frac{a$ stays." in written
    page.wait_for_function("() => document.querySelector('.code .hljs-keyword')")
    code = text.locator("pre").inner_text()
    assert code == "def double(x):\n    return 2 * x  # $x$\n"
    assert text.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]


def test_what_is_not_needed_is_not_fetched(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url.rpartition("/")[2]))
    _answered(page, "No formula for $5, and `no block`.\n\n```\nno language\n```\n")
    assert not {"katex.min.js", "highlight.min.js"} & {*fetched}
    _answered(page, "A formula: $x$")
    assert "katex.min.js" in fetched and "highlight.min.js" not in fetched


def test_an_answer_that_is_written_is_typeset_once(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    found = page.evaluate(
        """async () => {
          const {MarkdownView} = await import("./page/markdown.js");
          const node = document.createElement("div");
          document.body.append(node);
          const view = new MarkdownView(node);
          const shown = async (text, isWhole) => {
            view.show(text, isWhole);
            await import("./page/vendor/katex.min.js");
            await new Promise((done) => setTimeout(done, 50));
            return [...node.querySelectorAll("math")];
          };
          const open = await shown("First $x$", false);
          const [first] = await shown("First $x$\\n\\nThen $y", false);
          const more = await shown("First $x$\\n\\nThen $y$", false);
          const whole = await shown("First $x$\\n\\nThen $y$", true);
          return [open.length, more.length, more[0] === first, whole.length, whole[0] === first];
        }"""
    )
    assert found == [0, 1, True, 2, True]


_BOMB = r"\def\a{xx}\def\b{\a\a\a\a}\def\c{\b\b\b\b}\def\d{\c\c\c\c}\def\e{\d\d\d\d}\e\e\e\e"
DANGEROUS = [
    r"\href{javascript:document.title='href'}{x}",
    r"\url{javascript:document.title='url'}",
    r"\href{https://elsewhere.invalid/}{x}",
    r"\includegraphics{https://elsewhere.invalid/a.png}",
    r"\includegraphics[height=1em]{javascript:1}",
    r"\htmlClass{evil}{x}",
    r"\htmlId{evil}{x}",
    r"\htmlStyle{position:fixed;inset:0}{x}",
    r"\htmlData{a=b}{x}",
    r"\text{<script>document.title='script'</script>}",
    r"\text{<img src=x onerror=document.title='img'>}",
    r"<svg onload=document.title='svg'>",
    r"\unicode{60}script\unicode{62}",
    r"\rule{9999em}{9999em}",
    r"\rule{-9999em}{9999em}",
    r"\kern{99999em} x",
    r"\hspace{99999em} x",
    r"\mkern99999mu x",
    r"\raisebox{99999em}{x}",
    r"\def\x{\x\x}\x",
    r"\def\x{\x}\x",
    r"\newcommand{\x}{\x}\x",
    r"\let\x=\y\let\y=\x\x",
    _BOMB,
    r"\gdef\frac{evil}\frac",
    r"\global\def\x{y}\x",
    "{" * 900 + "x" + "}" * 900,
    r"\sqrt{" * 200 + "x" + "}" * 200,
    "x^{" * 300 + "y" + "}" * 300,
    r"\left(" * 200 + "x" + r"\right)" * 200,
    r"\begin{matrix}" + "a & " * 400 + r"\end{matrix}",
    r"\begin{array}{" + "c" * 900 + r"} x \end{array}",
    r"\color{red;background:url(https://elsewhere.invalid)}x",
    r"\textcolor{url(https://elsewhere.invalid)}{x}",
    r"\colorbox{expression(alert(1))}{x}",
    r"\fcolorbox{red}{url(//elsewhere.invalid)}{x}",
    r"\tag{<script>document.title='tag'</script>} x",
    r"\verb|<script>document.title='verb'</script>|",
    r"\char`\<script\char`\>",
    r"\mathchoice{a}{b}{c}{d}",
    r"\Huge\Huge\Huge x",
    r"\begin{evil}x\end{evil}",
]
CODE = [
    ("html", "<script>document.title='code'</script>"),
    ("html", "<img src=x onerror=document.title='code image'>"),
    ("javascript", "document.title = 'ran'; fetch('https://elsewhere.invalid')"),
    ("xml", "<!ENTITY a '<script>document.title=1</script>'>"),
    ("css", "body{background:url(https://elsewhere.invalid/a.png)}"),
    ("__proto__", "x = 1"),
    ("constructor", "x = 1"),
    ("python", "(" * 15_000),
    ("javascript", "/*" * 9_000),
    ("json", '{"a":' * 3_000),
]


def test_dangerous_formulas_and_code_are_harmless(open_page: OpenPage, story: str) -> None:
    assert len(DANGEROUS) + len(CODE) > 50
    page = open_page(story)
    formulas = [f"$${formula}$$" for formula in DANGEROUS]
    fences = [f"```{language}\n{text}\n```" for language, text in CODE]
    text = _answered(page, "\n\n".join([*formulas, *fences]))
    page.wait_for_function("() => document.querySelector('.code .hljs-keyword, .hljs-tag')")
    page.wait_for_timeout(300)
    assert page.title() == "mmfree"
    found: Any = text.evaluate(
        """(root) => [...root.querySelectorAll("*")].map((each) => {
          const {width, height} = each.getBoundingClientRect();
          const attributes = [...each.attributes].map(({name, value}) => [name, value]);
          return {name: each.localName, width, height, attributes, isRoot: each.closest("pre") !== null};
        })"""
    )
    assert not {each["name"] for each in found} & {"script", "img", "svg", "a", "style", "iframe"}
    for each in found:
        for name, value in each["attributes"]:
            assert not name.startswith("on") and name not in ("style", "src", "href", "id")
            assert "elsewhere" not in value or name == "title"
    formulas_shown = text.locator(".formula").evaluate_all(
        """(all) => all.map((each) => {
          const {width, height} = each.getBoundingClientRect();
          return [width, height];
        })"""
    )
    assert all(width <= 1000 and height <= 400 for width, height in formulas_shown)
    # code reads as it was written
    for (_, code), pre in zip(CODE, text.locator("pre").all(), strict=True):
        assert pre.inner_text().rstrip("\n") == code


def test_an_empty_field_is_not_sent_and_shows_the_servers_number(
    open_page: OpenPage, story: str
) -> None:
    page = open_page(story)
    page.wait_for_function("() => document.querySelector('#max-tokens').placeholder === '4096'")
    assert page.locator("#temperature").get_attribute("placeholder") == "1"
    assert page.locator("#max-tokens").input_value() == ""


def test_the_context_is_reported_and_the_end_is_near(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    assert page.locator("#room").is_hidden() and page.locator("#to-end").is_hidden()
    _answered(page, "\n\n".join(f"Line {n}" for n in range(200)))
    assert "240 tokens of 4,096" in page.locator("#room").inner_text()
    assert page.locator("#room-meter").evaluate("(meter) => [meter.value, meter.max]") == [
        240,
        4096,
    ]
    page.locator("#scroll").evaluate("(main) => { main.scrollTop = 0; }")
    page.locator("#to-end").click()
    page.locator("#to-end").wait_for(state="hidden")
    assert page.locator("#scroll").evaluate(
        "(main) => main.scrollHeight - main.scrollTop - main.clientHeight < 60"
    )


def test_a_message_is_deleted(open_page: OpenPage, story: str) -> None:
    page = open_page(story)
    answer_with(page, "First.")
    write(page, "One")
    wait_for_end(page)
    write(page, "Two")
    wait_for_end(page)
    page.locator(".turn.user").first.get_by_role("button", name="Delete this message").click()
    page.locator("#agree").click()
    page.wait_for_function("() => document.querySelectorAll('.turn.user').length === 1")
    assert shown_texts(page, "user") == ["Two"] and len(shown_texts(page, "assistant")) == 2
    page.reload()
    page.locator(".turn.user", has_text="Two").wait_for()
    assert shown_texts(page, "user") == ["Two"]
