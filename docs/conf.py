"""Sphinx configuration of the site; CONTRIBUTING.md has the command that builds it."""

import importlib.metadata
import os

project = "fwpkm_jax"
author = "The fwpkm_jax authors"
copyright = author
release = importlib.metadata.version("fwpkm-jax")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"fwpkm_jax {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]

# Markdown: the pages are plain MyST; pages with {code-cell} are notebooks, which the build runs.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "cache"
nb_execution_cache_path = os.environ.get("FWPKM_NOTEBOOK_CACHE", "")
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
nb_execution_excludepatterns = ["_build/*"]
copybutton_exclude = ".linenos, .gp, .go"

# The reference is made from docstrings.
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# Types of other packages have no page here, and the build uses no network to find theirs.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!fwpkm_jax\.|pallas_kernels\.).*")]
