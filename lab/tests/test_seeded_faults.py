"""The list of seeded faults fits the source, and the program counts what tests catch."""

import argparse
import ast
import json
from pathlib import Path

import pytest

from lab.seeded_faults import __main__ as program
from lab.seeded_faults.areas import AREAS
from lab.seeded_faults.fault import Fault, find

TREE = Path(__file__).parents[2]
FAULTS = [fault for faults in AREAS.values() for fault in faults]


def test_every_snippet_occurs_once_and_its_replacement_is_python():
    wrong = []
    for fault in FAULTS:
        try:
            source = find(fault, TREE).read_text()
        except ValueError as error:
            wrong.append(str(error))
        else:
            ast.parse(source.replace(fault.before, fault.after))
            assert fault.before != fault.after, fault.name
    assert not wrong, "\n".join(wrong)


def test_faults_have_names_of_their_own_and_tests_that_exist():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60
    for fault in FAULTS:
        paths = [argument for argument in fault.tests if argument.startswith("tests/")]
        assert paths
        for path in paths:
            assert (TREE / path).exists(), f"{fault.name}: {path}"


@pytest.fixture
def tree(tmp_path):
    for folder in ("fwpkm_jax", "pallas_kernels"):
        (tmp_path / folder).mkdir()
    (tmp_path / "fwpkm_jax" / "half.py").write_text("def half(x):\n    return x / 2\n")
    (tmp_path / "test_half.py").write_text(
        "from fwpkm_jax.half import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
    )
    (tmp_path / "test_broken.py").write_text("def test_broken():\n    assert False\n")
    (tmp_path / "test_marked.py").write_text(
        "import pytest\nfrom fwpkm_jax.half import half\n\n\n"
        "@pytest.mark.slow\ndef test_half():\n    assert half(4) == 2\n"
    )
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -m 'not slow'\nmarkers =\n    slow: not by default\n"
    )
    return tmp_path


@pytest.mark.slow_cases(
    "x / 3-test_marked.py -m slow-True-False", "x * 0.5-test_half.py-False-False"
)
@pytest.mark.parametrize(
    ("after", "test", "caught", "broken"),
    [
        ("x / 3", "test_half.py", True, False),
        ("x * 0.5", "test_half.py", False, False),
        ("x / 3", "test_broken.py", False, True),
        ("x / 3", "test_marked.py -m slow", True, False),
    ],
)
def test_a_fault_is_caught_by_a_test_that_passes_without_it(tree, after, test, caught, broken):
    fault = Fault("half", "x / 2", after, tuple(test.split()))
    options = argparse.Namespace(timeout=60, whole=False)
    result = program.try_fault(fault, tree, options)
    assert (result["caught"], result["broken"]) == (caught, broken)
    assert result["file"] == "fwpkm_jax/half.py:2"
    assert (result["by"] is None) == (not caught and not broken)
    assert "x / 2" in (tree / "fwpkm_jax" / "half.py").read_text()


def test_a_snippet_that_occurs_twice_is_refused(tree):
    with pytest.raises(ValueError, match=r"'twice'.* occurs 2 times"):
        find(Fault("twice", "x", "y", ()), tree)


def test_results_of_faults_that_changed_are_not_taken(tmp_path, capsys):
    fault = FAULTS[0]
    line = {"fault": fault.name, "area": "core", "file": "a.py:1", "after": fault.after}
    line |= {"caught": True, "broken": False, "by": "tests/a.py::test"}
    out = tmp_path / "faults.jsonl"
    out.write_text(
        json.dumps(line | {"before": "another text"})
        + "\n"
        + json.dumps(line | {"before": fault.before})
        + "\n"
    )
    program.main(["--out", str(out), "--table"])
    assert f"| all | {len(FAULTS)} | 1 | 1 |" in capsys.readouterr().out
    out.write_text(json.dumps(line | {"before": "another text"}) + "\n")
    program.main(["--out", str(out), "--table"])
    assert f"| all | {len(FAULTS)} | 0 | 0 |" in capsys.readouterr().out
