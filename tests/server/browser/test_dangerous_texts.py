"""Texts that would run code, ask for something or go elsewhere if a page took them for HTML."""

import random
from typing import Any

import pytest

from tests.server.browser.conftest import OpenPage

pytestmark = pytest.mark.browser

_COUNT = 200
_TAGS = {
    "script",
    "img",
    "svg",
    "iframe",
    "style",
    "form",
    "math",
    "object",
    "embed",
    "link",
    "base",
}
_TAGS |= {"meta", "video", "audio", "source", "template", "marquee", "portal", "frame", "applet"}
# what each would do: change the title, ask a server, leave the page
_CODE = (
    *("document.title='run'", "fetch('https://elsewhere.invalid/run')", "location='/health'"),
    *("alert(1)", "top.location.href='https://elsewhere.invalid'", "import('/run.js')"),
    *("window.open('/health')", "navigator.sendBeacon('/run')", "document.body.innerHTML='run'"),
)
_SCHEMES = ("javascript:", "JaVaScRiPt:", "java\tscript:", "\x01javascript:", "vbscript:", "file:")
_SCHEMES += (
    "data:text/html,<script>",
    "&#106;avascript:",
    "javascript&colon;",
    "blob:",
    "//x.invalid/",
)
_SCHEMES += (
    "https://elsewhere.invalid/",
    "jav&#x0A;ascript:",
    "&Tab;javascript:",
    "/v1/models?",
    "\\\\x\\",
)
_EVENTS = ("onerror", "onload", "onmouseover", "onfocus autofocus", "ontoggle", "onanimationstart")
_HTML = (
    *("<script>CODE</script>", "<img src=x EVENT=CODE>", "<svg EVENT=CODE>", "<svg/onload=CODE//"),
    *("<iframe srcdoc='<script>CODE</script>'></iframe>", "<iframe src='SCHEMECODE'></iframe>"),
    *("<a href='SCHEMECODE' EVENT=CODE>a</a>", "<details open ontoggle=CODE>", "<base href=SCHEME>"),
    *("<meta http-equiv=refresh content='0;url=SCHEMECODE'>", "<link rel=stylesheet href=SCHEME>"),
    *("<style>@import 'SCHEMEx.css'; * { background: url(SCHEMEx) }</style>", "<object data=SCHEME>"),
    *("<form action=SCHEME><input type=submit EVENT=CODE></form>", "<embed src=SCHEME>"),
    *("<video><source EVENT=CODE src=SCHEME></video>", "<template><script>CODE</script></template>"),
    *("<math><mtext><table><mglyph><style><img src=x onerror=CODE>", "<marquee onstart=CODE>"),
    *("<noscript><p title='</noscript><img src=x onerror=CODE>'>", "<!--><img src=x onerror=CODE>-->"),
    *("<![CDATA[><script>CODE</script>]]>", "</textarea></title><script>CODE</script>"),
    *("&lt;script&gt;CODE&lt;/script&gt;", "<scr<script>ipt>CODE</scr</script>ipt>", "<plaintext>"),
)  # fmt: skip
_BREAKPOINTS = (
    *("TEXT", "**TEXT**", "`TEXT`", "# TEXT", "> TEXT", "- [x] TEXT", "| TEXT |\n|---|\n| TEXT |"),
    *("[TEXT](SCHEMECODE)", "![TEXT](SCHEMECODE)", "[a](SCHEMECODE \"TEXT\")", "<SCHEMECODE>"),
    *("[a][b]\n\n[b]: SCHEMECODE 'TEXT'", "![a][b]\n\n[b]: <SCHEMECODE>", "```TEXT\nTEXT\n```"),
    *("[a](<SCHEMECODE> (TEXT))", "[![TEXT](SCHEMEx.png)](SCHEMECODE)", "~~~ html\nTEXT\n~~~\n"),
    *("\\[a](SCHEMECODE) TEXT", "https://x.invalid/\"TEXT", "a@b.invalid\"TEXT", "$TEXT$"),
)  # fmt: skip


def dangerous_text(rng: random.Random) -> str:
    """Markup within Markdown, some of it damaged, with characters that readers of HTML overlook."""
    parts = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        text = rng.choice(_BREAKPOINTS)
        while "TEXT" in text:
            text = text.replace("TEXT", rng.choice(_HTML), 1)
        for name, values in (("EVENT", _EVENTS), ("CODE", _CODE), ("SCHEME", _SCHEMES)):
            while name in text:
                text = text.replace(name, rng.choice(values), 1)
        for _ in range(rng.choice((0, 0, 1, 3))):
            index = rng.randrange(len(text) + 1)
            odd = rng.choice(
                ("\0", "\n", "\t", "\u2028", "<", ">", '"', "'", "`", "\\", "&#0;", "/")
            )
            text = text[:index] + odd + text[index + rng.choice((0, 0, 1)) :]
        parts.append(text)
    return rng.choice(("\n\n", "\n", " ")).join(parts)


def test_texts_stay_texts(open_page: OpenPage, story: str) -> None:
    """Whole, and as they come chunk by chunk."""
    texts = [dangerous_text(random.Random(seed)) for seed in range(_COUNT)]
    page = open_page(story)
    page.wait_for_load_state("networkidle")
    asked: list[str] = []
    left: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("framenavigated", lambda frame: left.append(frame.url))
    page.on("dialog", lambda dialog: (left.append("a dialog"), dialog.dismiss()))
    page.on("popup", lambda popup: left.append("a window"))
    found: Any = page.evaluate(
        """async (texts) => {
          const {MarkdownView} = await import("./page/markdown.js");
          const shown = [];
          for (const text of texts) {
            for (const step of [text.length, 7]) {
              const node = document.createElement("div");
              document.querySelector("#turns").append(node);
              const view = new MarkdownView(node);
              for (let end = step; end < text.length + step; end += step) view.show(text.slice(0, end));
              for (const each of node.querySelectorAll("*")) {
                for (const kind of ["mouseover", "focus", "toggle", "load", "error", "animationstart"])
                  each.dispatchEvent(new Event(kind, {bubbles: true}));
                shown.push([text, each.localName, [...each.attributes].map((a) => [a.name, a.value])]);
              }
            }
          }
          return shown;
        }""",
        texts,
    )
    page.wait_for_timeout(500)
    # the page's own libraries, which load when code or a formula is first shown
    assert {*asked} <= {f"{story}/page/vendor/{name}.min.js" for name in ("highlight", "katex")}
    assert (left, page.title(), page.url) == ([], "mmfree", f"{story}/")
    assert len({text for text, *_ in found}) == len(set(texts))
    for text, name, attributes in found:
        assert name not in _TAGS, text
        for key, value in attributes:
            assert not key.startswith("on") and key not in ("style", "srcdoc", "src", "action"), (
                text
            )
            assert key != "href" or value.startswith(("https:", "http:", "mailto:")), text
