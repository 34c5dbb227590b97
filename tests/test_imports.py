"""How modules import each other; import-linter checks the floors, which pyproject.toml lists."""

import graphlib

import grimp
import pytest


@pytest.mark.parametrize("package", ["fwpkm_jax", "pallas_kernels"])
def test_no_circle_of_imports(package):
    """Imports for type checking and inside functions count too."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imports) > 20
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))
