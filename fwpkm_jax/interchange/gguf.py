"""A run from a model in one GGUF file, read as the transformers folder that it was made from.

The configuration, the tokenizer and the chat template come from the file's own fields; quantised
tensors are expanded to float32 one after the other. The package `gguf` (extra `gguf`) reads the
file.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.interchange.hf.families import FAMILIES
from fwpkm_jax.interchange.hf.imported import import_model
from fwpkm_jax.interchange.hf.layout import parts
from fwpkm_jax.interchange.hf.model_folder import ParameterDtype
from fwpkm_jax.interchange.hf.settings import model_config
from fwpkm_jax.io.untrusted import OutsideFileError, reading, shown, size_of
from fwpkm_jax.layers.partition import MeshConfig
from fwpkm_jax.lazy_imports import import_extra

_FETCH = "fetch the file again"
_OTHER_MODEL = "import the model's folder with `fwpkm import hf`"
_LEAST_BYTES = 24  # Magic, version, and the numbers of tensors and of fields.
_MOST_TOKENS = 2**22


@dataclass(frozen=True)
class _Architecture:
    """How the files of one architecture differ from the library's folders."""

    model_type: str
    swapped_rotary: bool = False
    """Rows of queries and keys are stored with neighbours turned together, in place of halves."""


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("llama", swapped_rotary=True),  # Also Mistral and SmolLM2.
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
}
_SPLITS: Mapping[str, tuple[dict[str, Any], ...]] = {
    "gpt-2": (),
    "default": (),
    "smollm": ({"type": "Digits", "individual_digits": True},),
    "qwen2": (
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
    ),
    "llama-bpe": (
        {
            "type": "Split",
            "pattern": {
                "Regex": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            },
            "behavior": "Isolated",
            "invert": False,
        },
    ),
}
"""By `tokenizer.ggml.pre`, what cuts a text before its bytes are merged, as the models' own
tokenizer.json says."""
_CONTROL = 3  # The type of a token that no text spells.


def import_gguf(
    file: str | Path,
    run_dir: str | Path,
    *,
    dtype: ParameterDtype | None = None,
    mesh: MeshConfig | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Starts a run whose step 0 is the model of a file, as `import_model` does of a folder.

    Args:
      file: of an architecture llama (Llama 2 and 3, Mistral, SmolLM2), qwen2 or qwen3.
      run_dir: a new directory, also in a bucket.
      dtype: of the matrices; None: float32.
      mesh: devices that the weights are read onto; the run's own.

    Raises:
      ImportError: the package gguf is not installed.
      FileNotFoundError: there is no such file.
      ValueError: the file is damaged or of another kind; or the directory is not empty.
    """
    opened = GGUFFile(file)
    with tempfile.TemporaryDirectory() as folder:
        opened.write_small_files(Path(folder))
        return import_model(folder, run_dir, dtype=dtype, mesh=mesh, files=opened, say=say)


class Tensor(NamedTuple):
    """What `TensorFiles` says of a tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


class GGUFFile(Mapping[str, Tensor]):
    """The tensors of a file under the library's names, with its configuration and tokenizer.

    Args:
      path: of the file.

    Raises:
      ImportError: the package gguf is not installed.
      FileNotFoundError: there is no such file.
      OutsideFileError: the file is damaged, or its architecture or tokenizer is not known here.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._gguf = import_extra("gguf", "GGUF files are read", extra="gguf")
        if size_of(self.path) < _LEAST_BYTES:
            raise OutsideFileError(self.path, "is too short for a GGUF file", otherwise=_FETCH)
        with reading(self.path, problem="is no GGUF file", otherwise=_FETCH):
            reader = self._gguf.GGUFReader(self.path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
            self._stored = {tensor.name: tensor for tensor in reader.tensors}
        name = self._field("general.architecture", str)
        if name not in _ARCHITECTURES:
            raise OutsideFileError(
                self.path,
                f"is {shown(name, 40)!r}; GGUF files of {', '.join(_ARCHITECTURES)} can be read",
                "general.architecture",
                _OTHER_MODEL,
            )
        self._name, self._architecture = name, _ARCHITECTURES[name]
        self.config = self._config()
        with reading(self.path, problem="cannot be imported", otherwise=_OTHER_MODEL):
            model = model_config(self.config)
            family = FAMILIES[self._architecture.model_type]
            wanted = [name for part in parts(model, family).values() for name in part.names]
        self._names = {}
        for name in wanted:
            stored = self._stored_name(name)
            if stored in self._stored:
                self._names[name] = stored
        left = {*self._stored} - {*self._names.values(), "rope_freqs.weight"}
        if left:
            raise OutsideFileError(
                self.path,
                f"is none of a {name}'s tensors",
                f"tensor {shown(sorted(left)[0], 60)!r}",
                _OTHER_MODEL,
            )

    def __getitem__(self, name: str) -> Tensor:
        shape = tuple(int(x) for x in reversed(self._stored[self._names[name]].shape))
        return Tensor(self.path, "F32", shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, name: str) -> np.ndarray:
        """The tensor in float32.

        Raises:
          OutsideFileError: it cannot be expanded.
        """
        stored, shape = self._stored[self._names[name]], self[name].shape
        with reading(self.path, place=f"tensor {stored.name!r}", otherwise=_FETCH):
            array = self._gguf.quants.dequantize(stored.data, stored.tensor_type)
            array = np.asarray(array, np.float32).reshape(shape)
        heads = {
            "q_proj.weight": self.config["num_attention_heads"],
            "k_proj.weight": self.config["num_key_value_heads"],
        }
        for ending, number in heads.items():
            if self._architecture.swapped_rotary and name.endswith(ending):
                # A head's rows are stored as (0, h, 1, h + 1, ...) of its 2 h rows.
                pairs = array.reshape(number, -1, 2, shape[-1])
                array = np.swapaxes(pairs, 1, 2).reshape(shape)
        return array

    def _stored_name(self, name: str) -> str:
        """A tensor's name in the file, of the library's name."""
        architecture = getattr(self._gguf.MODEL_ARCH, self._name.upper())
        names = self._gguf.get_tensor_name_map(architecture, self.config["num_hidden_layers"])
        path, ending = name.rsplit(".", 1)
        return f"{names.get_name(path)}.{ending}"

    def _field(self, name: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        value = self._fields.get(name, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            problem = f"is {shown(repr(value), 60)}, which is not expected there"
            raise OutsideFileError(self.path, problem, name, _FETCH)
        return value

    def _config(self) -> dict[str, Any]:
        """What the library's `config.json` says."""

        def of(key: str, kind: Any = int, default: Any = None) -> Any:
            return self._field(f"{self._name}.{key}", kind, default)

        heads, width = of("attention.head_count"), of("embedding_length")
        scaling = self._fields.get(f"{self._name}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self._stored:
            problem = "has scaled rotary frequencies, which are not read from GGUF files"
            raise OutsideFileError(self.path, problem, "rope", _OTHER_MODEL)
        tokens = self._field("tokenizer.ggml.tokens", list)
        model_type = self._architecture.model_type
        return {
            "model_type": model_type,
            "architectures": [FAMILIES[model_type].class_name],
            "vocab_size": of("vocab_size", int, len(tokens)),
            "hidden_size": width,
            "intermediate_size": of("feed_forward_length"),
            "num_hidden_layers": of("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": of("attention.head_count_kv", int, heads),
            "head_dim": of("attention.key_length", int, width // max(heads, 1)),
            "max_position_embeddings": of("context_length"),
            "rms_norm_eps": of("attention.layer_norm_rms_epsilon", float),
            "rope_theta": of("rope.freq_base", float, 10_000.0),
            "tie_word_embeddings": "output.weight" not in self._stored,
            "attention_bias": False,
            "hidden_act": "silu",
            "bos_token_id": self._fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", int),
        }

    def write_small_files(self, folder: Path) -> None:
        """Writes the tokenizer and the chat template as the library's folders have them.

        Raises:
          OutsideFileError: the tokenizer is of a kind that is not known here.
        """
        tokens = self._field("tokenizer.ggml.tokens", list)
        end = self.config["eos_token_id"]
        if not 0 <= end < len(tokens) <= _MOST_TOKENS:
            problem = f"gives a document's end the id {end} of {len(tokens)}"
            raise OutsideFileError(self.path, problem, "tokenizer.ggml.eos_token_id", _FETCH)
        settings: dict[str, Any] = {"eos_token": tokens[end]}
        first = self.config["bos_token_id"]
        if isinstance(first, int) and 0 <= first < len(tokens):
            settings["bos_token"] = tokens[first]
        template = self._fields.get("tokenizer.chat_template")
        if isinstance(template, str):
            (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
        generation = {"bos_token_id": first, "eos_token_id": end}
        for name, value in (
            ("config.json", self.config),
            ("tokenizer.json", self._tokenizer(tokens)),
            ("tokenizer_config.json", settings),
            ("generation_config.json", generation),
        ):
            (folder / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")

    def _tokenizer(self, tokens: list[str]) -> dict[str, Any]:
        """The `tokenizer.json` of byte pairs."""
        kind = self._field("tokenizer.ggml.model", str)
        cut = self._field("tokenizer.ggml.pre", str, "default")
        if kind != "gpt2" or cut not in _SPLITS:
            problem = f"is {shown(kind, 20)!r} with {shown(cut, 20)!r}, which is not known here"
            raise OutsideFileError(self.path, problem, "tokenizer.ggml.model", _OTHER_MODEL)
        merges = self._field("tokenizer.ggml.merges", list)
        types = self._field("tokenizer.ggml.token_type", list, [1] * len(tokens))
        splits = _SPLITS[cut]
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        cuts_words = not any(x["type"] == "Split" for x in splits)
        first = {**byte_level, "use_regex": cuts_words}
        controls = [
            {"id": number, "content": token, "special": True, "normalized": False}
            | {"single_word": False, "lstrip": False, "rstrip": False}
            for number, (token, type_) in enumerate(zip(tokens, types, strict=False))
            if type_ == _CONTROL
        ]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": controls,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, first]},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": cut == "llama-bpe",
                "vocab": {token: number for number, token in enumerate(tokens)},
                "merges": merges,
            },
        }
