"""The metadata that are made when the package is built: the README as PyPI shows it, and the addresses.

The address of the repository stands in `mlx_mmfree/version.py`. The README names files of the
repository by relative links, which lead nowhere on PyPI. Here they become links to the tag of this
version. scikit-build-core calls `dynamic_metadata`; `python .ci/package_metadata.py` prints the page.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(!?)\[((?:\[[^\]]*\]\([^)]*\)|[^\[\]])*)\]\(([^)\s]+)\)")


def stated(name: str) -> str:
    """A text that `mlx_mmfree/version.py` states."""
    source = (ROOT / "mlx_mmfree/version.py").read_text(encoding="utf-8")
    found = re.search(rf'^{name} = "(.+)"$', source, re.MULTILINE)
    assert found, f"version.py states no {name}"
    return found[1]


def absolute(page: str, repository: str, tag: str) -> str:
    """The page with links that lead to the repository's files at a tag, wherever it is shown.

    Args:
        page: Markdown, whose relative links begin at the top of the repository.
        repository: The address, such as `https://github.com/owner/name`.
        tag: The tag whose files are meant.
    """
    owner = repository.split("/")[-2]
    raw = repository.replace("https://github.com/", "https://raw.githubusercontent.com/")

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        text = _LINK.sub(link, text)
        if target.startswith(("https://", "http://", "mailto:")):
            return f"{picture}[{text}]({target})"
        if target.startswith("#"):
            return f"{picture}[{text}]({repository}/blob/{tag}/README.md{target})"
        if picture:
            return f"![{text}]({raw}/{tag}/{target})"
        return f"[{text}]({repository}/blob/{tag}/{target})"

    # code keeps what looks like a link
    parts = re.split(r"(^```.*?^```$|`[^`\n]+`)", page, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [_LINK.sub(link, part) for part in parts[::2]]
    page = "".join(parts)
    return page.replace("git clone ADDRESS", f"git clone {repository}").replace(
        "brew install OWNER/", f"brew install {owner}/"
    )


def pypi_page() -> str:
    """The README as PyPI shows it: there, the first version is released."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    page = re.sub(r" \*\*Nothing is released yet\*\*:[^.]*\.", "", page)
    return absolute(page, stated("REPOSITORY"), f"v{stated('__version__')}")


def dynamic_metadata(
    settings: Mapping[str, Any], project: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields that `pyproject.toml` leaves to the build."""
    repository = stated("REPOSITORY")
    return {
        "version": stated("__version__"),
        "readme": {"content-type": "text/markdown", "text": pypi_page()},
        "urls": {
            "Homepage": repository,
            "Documentation": f"{repository}/blob/v{stated('__version__')}/mlx_mmfree/README.md",
            "Issues": f"{repository}/issues",
            "Changelog": f"{repository}/blob/v{stated('__version__')}/.github/CHANGELOG.md",
        },
    }


if __name__ == "__main__":
    print(pypi_page(), end="")
