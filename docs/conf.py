"""Sphinx configuration of the site; CONTRIBUTING.md has the command that builds it."""

import importlib.metadata
import inspect
import json
import os
import pkgutil
import re

from docutils import nodes
from sphinx.util.inspect import stringify_signature

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
nb_execution_timeout = 600
nb_execution_raise_on_error = True
nb_merge_streams = True
# fresh_machine trains for minutes; tests/package/test_wheel.py runs it, shortened, from the wheel.
nb_execution_excludepatterns = ["_build/*", "**/fresh_machine.ipynb"]
copybutton_exclude = ".linenos, .gp, .go"

# The reference is made from docstrings.
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_default_options = {"special-members": "__call__"}
autoclass_content = "both"  # The parameters of a constructor stand in its own docstring.
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
napoleon_use_rtype = False

# A signature names types that have no page: those of other packages, and internal ones. Their names
# are shown without a link; a name that does not exist stays a warning.
nitpicky = True
suppress_warnings = ["ref.python"]  # Two classes may have fields of one name.


def show_without_link(app, env, node, contnode):
    """The text of a reference to an existing object that has no page."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py":
        return None
    root = target.partition(".")[0]
    if root not in ("fwpkm_jax", "pallas_kernels"):
        return contnode
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return None
    return contnode if found is not None else None


def signature_of_constructor(app, what, name, value, options, signature, returns):
    """A class's parameters where its metaclass hides them, as that of Flax's modules does."""
    if what != "class" or not (signature or "").startswith("(*args"):
        return None
    given = inspect.signature(value.__init__)
    given = given.replace(parameters=list(given.parameters.values())[1:])  # Without self.
    text = stringify_signature(given, unqualified_typehints=True)
    return ("" if text.startswith("(*args") else text), returns  # Protocols have none.


def shorten_types(app, document):
    """Shows the types of signatures by their short names."""
    for text in document.findall(nodes.Text):
        if "jaxlib." in text:
            text.parent.replace(text, nodes.Text(_ARRAY.sub("Array", text)))


_ARRAY = re.compile(r"(?:jax\.)?jaxlib\._jax\.Array")


def skip_plain_fields(app, what, name, value, skip, options):
    """Leaves out a named tuple's fields, which its docstring describes."""
    document = getattr(value, "__doc__", None) or ""
    return True if document.startswith("Alias for field number") else skip


def escape_formulas(app, what, name, value, options, lines):
    """Shows `|x|` and `a * b` of a docstring as they are; reStructuredText gives them a meaning."""
    if what in ("property", "attribute", "data"):
        lines.insert(0, "")  # Napoleon would take a first line up to its colon for the type.
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((">>>", "...", "* ")):
            parts = re.split(r"(`+[^`]*`+)", line)
            parts[::2] = [re.sub(r"([*|])", r"\\\1", part) for part in parts[::2]]
            lines[number] = "".join(parts)


def add_badge(app, docname, source):
    """Puts a link to Colab below a notebook's title, where the host's build says the repository."""
    repository, ref = os.environ.get("GITHUB_REPOSITORY"), os.environ.get("GITHUB_REF_NAME")
    if docname != "tutorials/fresh_machine" or not repository or not ref:
        return
    notebook = json.loads(source[0])
    colab = "https://colab.research.google.com"
    page = f"{colab}/github/{repository}/blob/{ref}/docs/{docname}.ipynb"
    title, *rest = "".join(notebook["cells"][0]["source"]).split("\n")
    badge = f"[![Open in Colab]({colab}/assets/colab-badge.svg)]({page})"
    notebook["cells"][0]["source"] = "\n".join([title, "", badge, *rest])
    source[0] = json.dumps(notebook)


def setup(app):
    app.connect("source-read", add_badge)
    app.connect("autodoc-process-docstring", escape_formulas, priority=100)  # Before napoleon.
    app.connect("missing-reference", show_without_link)
    app.connect("autodoc-process-signature", signature_of_constructor)
    app.connect("autodoc-skip-member", skip_plain_fields)
    app.connect("doctree-read", shorten_types)
