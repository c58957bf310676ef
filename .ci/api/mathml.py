"""Formulas become MathML when the pages are built, which browsers draw without a script."""

import re

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

_log = logging.getLogger(__name__)


def _formula(writer: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    # docutils knows large brackets by their side alone
    text = re.sub(r"\\([bB]ig)(?=[(\[])", r"\\\1l", node.astext())
    text = re.sub(r"\\([bB]ig)(?=[)\]])", r"\\\1r", text)
    try:
        writer.body.append(tex2mathml(text, as_block=isinstance(node, nodes.math_block)))
    except MathError as error:
        _log.warning("formula cannot be read: %s: %s", error, node.astext(), location=node)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    renderers = (_formula, None)
    app.add_html_math_renderer("mathml", inline_renderers=renderers, block_renderers=renderers)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
