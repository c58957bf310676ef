"""The page at `/`: its files, and the policy under which a browser runs it.

Beyond OpenAI's interface it reads from each entry of `/v1/models` whether the model has a
`chat_template` and its `defaults`, the numbers that count where a request says nothing, and from
`/health` what is kept: `"sessions": {"states": count, "bytes": count}`. The files are given without an
API key, for which the page then asks.
"""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType

PAGE = "index.html"
"""The file at `/`; the others lie below `/page/`."""

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "mjs": "text/javascript; charset=utf-8",
}
_FOLDERS = ("", "vendor/")


@cache
def page_files() -> Mapping[str, tuple[bytes, str]]:
    """The content and the media type of each file of the page, by its name below `page`."""
    root = files(__package__).joinpath("page")
    return MappingProxyType(
        {
            folder + file.name: (file.read_bytes(), kind)
            for folder in _FOLDERS
            for file in root.joinpath(folder).iterdir()
            if (kind := _TYPES.get(file.name.rpartition(".")[2]))
        }
    )


_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "data:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # no text becomes markup or a script, but what DOMPurify has looked through
    "require-trusted-types-for": "'script'",
    "trusted-types": "dompurify",
}
PAGE_HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "; ".join(
            f"{kind} {source}" for kind, source in _POLICY.items()
        ),
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
)
"""Nothing runs but the page's own scripts, and these call nobody but their server."""
