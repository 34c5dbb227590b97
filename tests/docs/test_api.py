"""The reference as the built site shows it: constructors, calls, short types.

`.ci/run` runs the tests of this file behind the build.
"""

import html
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
SITE = DOCS / "_build" / "html" / "reference" / "api"
SIGNATURE = re.compile(r'<dt class="sig [^>]* id="([^"]+)">(.*?)</dt>', re.DOTALL)


@pytest.fixture(scope="module")
def signatures():
    """Signatures of the API pages by full name, as text."""
    if not SITE.is_dir():
        pytest.skip("build the site first: sphinx-build docs docs/_build/html")
    found = {}
    for page in SITE.glob("*.html"):
        for name, markup in SIGNATURE.findall(page.read_text(encoding="utf-8")):
            found[name] = html.unescape(re.sub(r"<[^>]+>", "", markup)).strip()
    return found


@pytest.mark.slow
def test_a_module_shows_its_constructor_and_its_call(signatures):
    name = "fwpkm_jax.layers.memories.fast_weight.FastWeight"
    assert "(config: FastWeightConfig, model_dim: int, *, " in signatures[name]
    call = signatures[f"{name}.__call__"]
    assert "(x: Float[Array, 'batch length model'], memory: PyTree[Array], *, mask" in call
    hidden = [name for name, text in signatures.items() if "(*args" in text]
    assert not hidden


@pytest.mark.slow
def test_types_have_short_names(signatures):
    assert len(signatures) > 300
    assert not [name for name, text in signatures.items() if "jaxlib" in text]


def test_a_docstring_refers_to_nothing_that_a_reader_does_not_have():
    for package in ("fwpkm_jax", "pallas_kernels"):
        for path in (DOCS.parent / package).rglob("*.py"):
            assert not re.search(r"\bspec: *(section|§)|spec_fwpkm", path.read_text()), path
