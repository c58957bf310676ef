"""The page at `/`: one file that loads nothing else, and the policy under which a browser runs it.

Beyond OpenAI's interface it reads from each entry of `/v1/models` whether the model has a
`chat_template`, and from `/health` what is kept: `"sessions": {"states": count, "bytes": count}`. The
page itself is given without an API key, for which it then asks.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files


@cache
def page_text() -> str:
    """The page, HTML in UTF-8."""
    return files(__package__).joinpath("page.html").read_text("utf-8")


@cache
def page_headers() -> Mapping[str, str]:
    """The headers of the page: nothing runs but its own script, and it calls nobody but its server."""
    rules = {
        "default-src": "'none'",
        "script-src": _hash("script"),
        "style-src": _hash("style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    policy = "; ".join(f"{kind} {source}" for kind, source in rules.items())
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }


def _hash(tag: str) -> str:
    """By what a browser knows the one element `tag` of the page."""
    [content] = re.findall(f"<{tag}>(.*?)</{tag}>", page_text(), re.DOTALL)
    digest = hashlib.sha256(content.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
