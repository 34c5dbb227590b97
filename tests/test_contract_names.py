"""No file but its own asks which rule or mixer it has: what differs is declared, not tested for."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

import fwpkm_jax
from fwpkm_jax import rules
from fwpkm_jax.layers import mixers
from fwpkm_jax.layers.mixers import AbstractMixer, AbstractMixerConfig, mixer_names
from fwpkm_jax.rules import AbstractRule
from fwpkm_jax.rules.matrix import MATRIX_RULES, AbstractMatrixRule

PACKAGE = Path(fwpkm_jax.__file__).parent

ALLOWED = {
    ("layers/mixers/titans_variants.py", "PersistentTokens"): "the variant has put it there itself",
    ("interchange/hf/described.py", "AttentionConfig"): "which kinds the library has names for",
    ("interchange/hf/described.py", "GatedDeltaNetConfig"): "which kinds the library has names for",
    ("interchange/hf/exported.py", "linear_attention"): "what the library calls a kind of layer",
    ("interchange/hf/pytorch.py", "FwPKM"): "which memories the programs for PyTorch read",
    ("paper/release/names.py", "FwPKM"): "which memories one published format has names for",
    ("paper/models.py", "lact"): "the paper's own table of models, by their published names",
}
"""Where a name may be tested for, and why."""


def concrete(interface):
    """The classes below an interface that this package defines."""
    found = set()
    for cls in interface.__subclasses__():
        if cls.__module__.startswith("fwpkm_jax."):
            found |= {cls} | concrete(cls)
    return {cls for cls in found if not cls.__name__.startswith("Abstract")}


for room in (rules, mixers):
    for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
        importlib.import_module(found.name)
CLASSES = {
    cls.__name__: cls.__module__
    for interface in (AbstractRule, AbstractMatrixRule, AbstractMixer, AbstractMixerConfig)
    for cls in concrete(interface)
}
NAMES = {*mixer_names(), "fwpkm", "fwmlp"}


def words_of(node):
    """Classes and strings in an expression, `Cls` of `module.Cls` too; a variable is neither."""
    for part in ast.walk(node):
        name = part.id if isinstance(part, ast.Name) else getattr(part, "attr", None)
        if name in CLASSES:
            yield name
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def asked_for(tree):
    """The classes and strings that a file tests something for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else None
            method = node.func.attr if isinstance(node.func, ast.Attribute) else None
            if called in ("isinstance", "issubclass") or method in ("count", "index"):
                yield from (word for argument in node.args[-1:] for word in words_of(argument))
        elif isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                yield from words_of(side)
        elif isinstance(node, ast.MatchClass):
            yield from words_of(node.cls)
        elif isinstance(node, ast.MatchValue):
            yield from words_of(node.value)


def violations(source, path):
    """Rules and mixers that a file outside their own tests for.

    Args:
      source: the file's text.
      path: its path within the package.
    """
    module = "fwpkm_jax." + path.removesuffix(".py").replace("/", ".")
    own_room = path.startswith(("layers/mixers/", "rules/"))
    found = set()
    for word in asked_for(ast.parse(source)):
        foreign_class = word in CLASSES and CLASSES[word] != module
        foreign_name = word in NAMES and not own_room
        if (foreign_class or foreign_name) and (path, word) not in ALLOWED:
            found.add(word)
    return found


FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("**/*.py"))


def test_what_differs_between_rules_and_mixers_is_declared_in_their_own_files():
    found = {path: violations((PACKAGE / path).read_text(), path) for path in FILES}
    found = {path: words for path, words in found.items() if words}
    assert not found, f"declare it in the rule or the mixer, or say why not in ALLOWED: {found}"


@pytest.mark.parametrize(
    "line",
    [
        'if "lact" in config.mixers: pass',
        'if name == "gla": pass',
        'n = mixers.count("swa")',
        "x = isinstance(rule, FwPKM)",
        "x = isinstance(mixer, attention.Attention | LaCT)",
        "x = type(rule) is fwmlp.FwMLP",
        'x = config["class"] == "FwPKM"',
        "match mixer:\n    case TitansMAC(): pass",
    ],
)
def test_such_tests_are_found(line):
    assert violations(line, "models/block.py")


def test_every_kind_is_known():
    assert {"FwPKM", "FwMLP", "LaCT", "TitansMAL", "AttentionConfig"} <= CLASSES.keys()
    assert {rule.__name__ for rule in MATRIX_RULES.values()} <= CLASSES.keys()
