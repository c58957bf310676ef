"""Configuration of Sphinx for the API reference; `build.py` writes the pages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import mlx_mmfree

project = "mlx_mmfree"
version = release = mlx_mmfree.__version__
author = project_copyright = "mlx_mmfree contributors"

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
    "mathml",
]
html_theme = "alabaster"
html_theme_options = {"page_width": "72rem", "sidebar_width": "16rem"}
html_static_path = ["static"]
html_css_files = ["reference.css"]
html_title = f"mlx_mmfree {release}"
html_math_renderer = "mathml"
html_copy_source = False

# single backticks hold code, which becomes a link where it is a public name
default_role = "py:obj"

napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape", "State"]
napoleon_use_ivar = True
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80
