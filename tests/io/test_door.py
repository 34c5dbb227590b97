"""Every parser of bytes from outside stands behind the door, `fwpkm_jax.io.untrusted`.

The source is searched for calls that parse, that read a file whole or by lines without a bound, and
that open one for reading. They stand in the body of `reading`, in the door itself, or on the list
below, with a reason.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

import fwpkm_jax
import pallas_kernels

ROOTS = [Path(x.__file__).parent for x in (fwpkm_jax, pallas_kernels)]
DOOR = "fwpkm_jax/io/untrusted.py"
ALONE = "fwpkm_jax/interchange/hf/programs/"
"""Programs for PyTorch, which run without this package and so without its door."""

PARSERS = {
    *("json.load", "json.loads", "tomllib.load", "tomllib.loads", "csv.reader", "pickle.load"),
    *("pickle.loads", "torch.load", "marshal.loads", "zipfile.ZipFile", "zipfile.is_zipfile"),
    *("tarfile.open", "gzip.open", "gzip.decompress", "gzip.GzipFile", "bz2.open", "lzma.open"),
    *("zlib.decompress", "zlib.decompressobj", "numpy.load", "numpy.fromfile", "numpy.memmap"),
    *("numpy.loadtxt", "numpy.genfromtxt", "struct.unpack", "struct.unpack_from"),
    *("struct.iter_unpack", "urllib.request.urlopen", "ast.literal_eval", "mmap.mmap"),
    "tensorstore.open",
}
"""By their modules."""
MODULES = {"requests", "httpx", "yaml", "tarfile", "pickle", "safetensors", "pyarrow", "sqlite3"}
"""All of whose functions count."""
METHODS = {
    *("GGUFReader", "dequantize", "ParquetFile", "read_metadata", "read_schema", "open_stream"),
    *("open_file", "read_record_batch", "read_table", "from_str", "from_file", "from_buffer"),
    *("from_string", "from_serialized_proto", "safe_open", "SentencePieceProcessor", "urlopen"),
    *("read_text", "read_bytes", "readlines"),
}
"""By their last name, of whatever; `untrusted.read_text` is called by its name alone."""


def names_of(tree):
    """What names of a module stand for: `np` for `numpy`, `loads` for `json.loads`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {x.asname or x.name.partition(".")[0]: x.asname and x.name for x in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
    return {name: meant or name for name, meant in names.items()}


def dotted(node, names):
    """The full name of what is called; its end alone where the rest is an expression."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return ""


def opens(call, names):
    """Whether a call opens a file to read it."""
    name = dotted(call.func, names)
    if name in ("open", "io.open"):
        mode = call.args[1:2]
    elif name.endswith(".open") and name != "os.open":
        mode = call.args[:1]
        if mode and not (isinstance(mode[0], ast.Constant) and isinstance(mode[0].value, str)):
            return False  # Of another thing than a path.
    elif name in ("os.open", "os.fdopen"):
        return "RDONLY" in ast.unparse(call) or '"r' in ast.unparse(call).replace("'", '"')
    else:
        return False
    given = [*mode, *(x.value for x in call.keywords if x.arg == "mode")]
    text = [x.value for x in given if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    return not any(letter in mode for mode in text for letter in "wxa")


def parses(call, names):
    """What a call does that only the door may do, or None."""
    name = dotted(call.func, names)
    last = name.rpartition(".")[2]
    if name.startswith("fwpkm_jax."):
        return None
    if name in PARSERS or name.partition(".")[0] in MODULES:
        return name
    if isinstance(call.func, ast.Attribute) and last in METHODS:
        return last
    if last in ("read", "readline") and not call.args and isinstance(call.func, ast.Attribute):
        return f"{last}()"
    return "open" if opens(call, names) else None


class Finder(ast.NodeVisitor):
    """Calls that stand outside the bodies of `reading`, as (function, what)."""

    def __init__(self, tree):
        self.names = names_of(tree)
        self.found, self.within, self.behind = [], [], [False]
        self.files = set()
        self.visit(tree)

    def visit_FunctionDef(self, node):
        self.within.append(node.name)
        self.behind.append(False)  # The body runs when it is called.
        self.generic_visit(node)
        self.within.pop()
        self.behind.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node):
        self.within.append(node.name)
        self.generic_visit(node)
        self.within.pop()

    def visit_With(self, node):
        before, self.behind[-1] = self.behind[-1], self.behind[-1]
        for item in node.items:
            self.visit(item.context_expr)
            called = item.context_expr
            if isinstance(called, ast.Call):
                if dotted(called.func, self.names).endswith("untrusted.reading"):
                    self.behind[-1] = True
                if opens(called, self.names) and isinstance(item.optional_vars, ast.Name):
                    self.files.add(item.optional_vars.id)
        for statement in node.body:
            self.visit(statement)
        self.behind[-1] = before

    def visit_Assign(self, node):
        opened = (x for x in ast.walk(node.value) if isinstance(x, ast.Call))
        if any(opens(x, self.names) or is_open_file(x, self.names) for x in opened):
            self.files |= {x.id for x in node.targets if isinstance(x, ast.Name)}
        self.generic_visit(node)

    def visit_For(self, node):
        if isinstance(node.iter, ast.Call) and is_bounded(node.iter, self.names):
            self.generic_visit(node)
            return
        read = {x.id for x in ast.walk(node.iter) if isinstance(x, ast.Name)}
        if read & self.files and not self.behind[-1]:
            self.found.append((".".join(self.within), "lines"))
        self.generic_visit(node)

    def visit_Call(self, node):
        what = parses(node, self.names)
        if what is not None and not self.behind[-1]:
            self.found.append((".".join(self.within), what))
        self.generic_visit(node)


def is_open_file(call, names):
    return dotted(call.func, names) == "fwpkm_jax.io.untrusted.open_file"


def is_bounded(call, names):
    return "bounded_lines" in ast.unparse(call)


def outside_the_door(source, name):
    """What stands in a file outside the door, as (place, what)."""
    return [(f"{name}:{place}", what) for place, what in Finder(ast.parse(source)).found]


OWN = "what this process or this machine's own cache wrote"
USER = "what the user types"
CALLER = "called in the body of `reading`"
LISTED = {
    "fwpkm_jax/cli/configs_command.py:main": "files of the package",
    "fwpkm_jax/cli/experiment.py:_mixer.read": USER,
    "fwpkm_jax/data/chat_template.py:_compiled": "raises TemplateFailedError, whatever it is",
    "fwpkm_jax/data/prepare/job.py:prepare": OWN,
    "fwpkm_jax/data/streams/files.py:AbstractDataFile.sha256": "opens itself",
    "fwpkm_jax/data/streams/tables.py:_parquet_batches": CALLER,
    "fwpkm_jax/data/streams/tables.py:_arrow_batches": CALLER,
    "fwpkm_jax/data/streams/tables.py:_decoded_bytes": CALLER,
    "fwpkm_jax/data/streams/tables.py:_decoded_bytes.follow": CALLER,
    "fwpkm_jax/data/streams/tables.py:_decoded_bytes.field": CALLER,
    "fwpkm_jax/data/tokenizer_json.py:_parsed": CALLER,
    "fwpkm_jax/data/tokenizers.py:SentencePieceTokenizer.__init__": "raises the door's error",
    "fwpkm_jax/data/tokenizers.py:mistral_v1_model": "a file of a package, whose hash is compared",
    "fwpkm_jax/data/prepare/output.py:_open": "opened by `open_own`, to be written",
    "fwpkm_jax/evaluation/display/html.py:image": OWN,
    "fwpkm_jax/evaluation/harness/options.py:HarnessConfig.parsed_metadata": USER,
    "fwpkm_jax/evaluation/record.py:make_result": OWN,
    "fwpkm_jax/evaluation/report/page.py:_show": OWN,
    "fwpkm_jax/interchange/hf/pytorch.py:model_programs": "files of the package",
    "fwpkm_jax/io/atomic.py:_to_disk": "reads no byte, and follows no link",
    "fwpkm_jax/lazy_imports.py:lazy_names": "files of the package",
    "fwpkm_jax/memories/places.py:_Copied.fetch_headers": OWN,
    "fwpkm_jax/memories/places.py:_Copied._fetch_starts": OWN,
    "fwpkm_jax/memories/store.py:_second_name": "was read as a memory before",
    "fwpkm_jax/paper/data/zarr_array.py:ZarrArray.read": "raises a ValueError with the file's name",
    "fwpkm_jax/paper/release/torch_file.py:read_torch_file": "raises the door's error itself",
    "fwpkm_jax/run/chat.py:Chat._next_line": USER,
    "fwpkm_jax/storage/compile_cache.py:_Programs.get": OWN,
    "fwpkm_jax/storage/compile_cache.py:_processor": "the system's",
    "fwpkm_jax/storage/lock.py:_hold_directory": "reads no byte",
    "fwpkm_jax/storage/lock.py:parse_record": "at most 4 kB; what is no record is told apart",
    "fwpkm_jax/storage/lock.py:_here": "the system's",
    "fwpkm_jax/storage/lock.py:_process_start": "the system's",
    "fwpkm_jax/storage/stores.py:Store.upload.put": OWN,
    "fwpkm_jax/storage/sync.py:_sha256": OWN,
    "fwpkm_jax/training/runs/metrics.py:truncate_metrics": "opened by `open_own`, as a plain file",
    "fwpkm_jax/training/runs/processes.py:from_first": OWN,
    "pallas_kernels/verdicts.py:verdict": OWN,
    "pallas_kernels/verdicts.py:_answer": OWN,
    "pallas_kernels/verdicts.py:_content": "files of the package",
}
"""Places that need no door. A place that is gone must be taken from here."""


@pytest.mark.thorough
def test_every_parser_of_outside_bytes_stands_behind_the_door():
    found = Counter()
    for root in ROOTS:
        for file in sorted(root.rglob("*.py")):
            name = file.relative_to(root.parent).as_posix()
            if name != DOOR and not name.startswith(ALONE):
                found.update(outside_the_door(file.read_text(), name))
    left = sorted(f"{place} {what}" for place, what in found if place not in LISTED)
    assert not left
    gone = sorted(LISTED.keys() - {place for place, _ in found})
    assert not gone


@pytest.mark.parametrize(
    "source",
    [
        "import json\njson.loads(x)",
        "from json import loads as read\nread(x)",
        "import numpy as np\nnp.load(p)",
        "import zipfile\nzipfile.ZipFile(p)",
        "import tomllib\ntomllib.load(f)",
        "import yaml\nyaml.safe_load(f)",
        "from struct import unpack\nunpack('<I', x)",
        "from pyarrow import parquet\nparquet.read_table(p)",
        "def f(parquet):\n    parquet.ParquetFile(p)",
        "from safetensors import safe_open\nsafe_open(p)",
        "tokenizers.Tokenizer.from_file(p)",
        "gguf.GGUFReader(p)",
        "import torch\ntorch.load(p)",
        "from urllib.request import urlopen\nurlopen(p)",
        "import requests\nrequests.get(p)",
        "path.read_text()",
        "open(p)",
        "p.open('rb')",
        "with p.open() as file:\n    file.read()",
        "open(p, mode='rb')",
        "import os\nos.open(p, os.O_RDONLY)",
        "from fwpkm_jax.io.untrusted import open_file\nf = open_file(p)\nfor x in f:\n    pass",
        # A function that is made behind the door runs elsewhere.
        "from fwpkm_jax.io.untrusted import reading\nimport json\n"
        "with reading(p):\n    def f():\n        json.loads(x)",
    ],
)
def test_a_parser_outside_the_door_is_found(source):
    assert outside_the_door(source, "a.py")


@pytest.mark.parametrize(
    "source",
    [
        "from fwpkm_jax.io.untrusted import reading\nimport json\n"
        "with reading(p):\n    json.loads(x)",
        "from fwpkm_jax.io.untrusted import read_text\nread_text(p, most=5)",
        "open(p, 'w')",
        "p.open('xb')",
        "file.read(5)",
        "import json\njson.dumps(x)",
    ],
)
def test_what_writes_or_stands_behind_the_door_is_not(source):
    assert not outside_the_door(source, "a.py")
