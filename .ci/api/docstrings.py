"""Turns names and papers in docstrings into links, and leaves out what says nothing."""

import re
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

_PAPER = re.compile(r"(?:arXiv )?(?<![\w.`])(\d\d(?:0[1-9]|1[0-2])\.\d{5})(?![\w.`])")


def link_papers(
    app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...")):
            lines[number] = _PAPER.sub(r"`\g<0> <https://arxiv.org/abs/\1>`__", line)


def link_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, content: nodes.Element
) -> nodes.Element | None:
    """A name that is written shorter than it is imported, where it means one object."""
    target = node.get("reftarget", "").removesuffix("()")
    if not re.fullmatch(r"[A-Za-z_][\w.]{3,}", target):
        return None
    objects = env.domains.python_domain.objects
    named = [name for name in objects if name == target or name.endswith(f".{target}")]
    found = [name for name in named if not objects[name].aliased]
    if len(found) != 1:
        return None
    entry = objects[found[0]]
    return make_refnode(
        app.builder, node["refdoc"], entry.docname, entry.node_id, content, found[0]
    )


def skip(app: Sphinx, what: str, name: str, value: Any, skipped: bool, options: Any) -> bool | None:
    documentation = getattr(value, "__doc__", None) or ""
    return True if documentation.startswith("Alias for field number") else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", link_papers)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", link_name)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
