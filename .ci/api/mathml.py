"""Formulas become MathML when the pages are built, which browsers draw without a script.

docutils reads them; what it takes otherwise than TeX does is rewritten before.
"""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

_log = logging.getLogger(__name__)
_REWRITTEN = (
    # large brackets are known by their side alone
    (r"\\([bB]ig)(?=[(\[])", r"\\\1l"),
    (r"\\([bB]ig)(?=[)\]])", r"\\\1r"),
    # indices of a letter with an accent would stand right above and below it
    (r"(\\(?:bar|hat|tilde) ?(?:\w|\\\w+|\{[^{}]*\}))(?=[_^])", r"\1{}"),
)


def _formula(writer: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    text = node.astext()
    for pattern, written in _REWRITTEN:
        text = re.sub(pattern, written, text)
    try:
        writer.body.append(tex2mathml(text, as_block=isinstance(node, nodes.math_block)))
    except MathError as error:
        _log.warning("formula cannot be read: %s: %s", error, node.astext(), location=node)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    renderers = (_formula, None)
    app.add_html_math_renderer("mathml", inline_renderers=renderers, block_renderers=renderers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
