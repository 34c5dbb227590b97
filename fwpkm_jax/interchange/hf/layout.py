"""Which tensors of a folder make each array of a model, and the way back.

An array's `Part` names the tensors and says how they are put together. Where families store the
same thing in several ways (one convolution or three, experts one by one or stacked) the names that
are there decide.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fwpkm_jax.interchange.hf.families import Family
from fwpkm_jax.layers.mixers import AttentionConfig, GatedDeltaNetConfig
from fwpkm_jax.models.config import ModelConfig

Shape = tuple[int, ...]
Read = Callable[[int], np.ndarray]
"""The tensor of a part by its number."""

SKIPPED: Mapping[str, str] = {
    r"(model\.)?(visual|vision_tower|multi_modal_projector)\..*": "vision tower",
    r"mtp\..*": "multi-token head",
}
"""Patterns of tensors that are left out, and what they belong to."""
_BUFFERS = r".*rotary_emb\.inv_freq"  # Old files hold what the configuration says anyway.


class Part(NamedTuple):
    """The tensors behind one array.

    Attributes:
      names: of the tensors.
      shapes: of the tensors. A file may cut those that are joined along their first axis elsewhere.
      pack: makes the array, reading one tensor after the other.
      unpack: makes the tensors again, of the shapes given.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    pack: Callable[[Read], np.ndarray]
    unpack: Callable[[np.ndarray, Sequence[Shape]], list[np.ndarray]]
    joined: bool = False


Parts = dict[str, Part]
"""By an array's name in `Weights.named`."""


def plain_name(name: str) -> str:
    """A tensor's name without the wrapping of models that read more than text."""
    name = re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)
    return re.sub(r"^language_model\.lm_head\.", "lm_head.", name)


def skipped(names: Collection[str]) -> dict[str, str]:
    """The tensors that are left out, and what each belongs to; "" for what needs no word."""
    found = {}
    for name in names:
        if re.fullmatch(_BUFFERS, name):
            found[name] = ""
        for pattern, what in SKIPPED.items():
            if re.fullmatch(pattern, name):
                found[name] = what
    return found


def parts(config: ModelConfig, family: Family, *, found: Collection[str] = ()) -> Parts:
    """The tensors of every array of a model.

    Args:
      config: the model, without memories.
      family: whose names they are.
      found: tensors that are there; they decide between ways to store the same.
    """
    return _Layout(config, family, frozenset(found)).all()


def vector(name: str, shape: Shape) -> Part:
    """An array that is stored as it is."""
    return Part((name,), (shape,), lambda read: read(0), lambda array, _: [array])


def matrix(name: str, inputs: int, outputs: int) -> Part:
    """A linear map, stored as `[out, in]`."""
    return Part((name,), ((outputs, inputs),), lambda read: read(0).T, lambda array, _: [array.T])


class _Layout:
    def __init__(self, config: ModelConfig, family: Family, found: frozenset[str]):
        self.config, self.family, self.found = config, family, found

    def all(self) -> Parts:
        config, dim = self.config, self.config.model_dim
        made: Parts = {
            "params/embedding": vector("model.embed_tokens.weight", (config.vocab_size, dim)),
            "params/final_norm/weight": vector("model.norm.weight", (dim,)),
        }
        if not config.tie_embeddings:
            made["params/head"] = matrix("lm_head.weight", dim, config.vocab_size)
        mixers: dict[type, Callable[[str, Any], Parts]] = {
            GatedDeltaNetConfig: self._delta,
            AttentionConfig: self._attention,
        }
        for index, mixer in enumerate(config.mixer_configs):
            ours, theirs = f"params/blocks/{index}/", f"model.layers.{index}."
            block = self._norms(theirs, index) | mixers[type(mixer)](theirs, mixer)
            experts = index in config.expert_layers
            block |= self._experts(theirs) if experts else self._mlp(f"{theirs}mlp.")
            made |= {ours + name: part for name, part in block.items()}
        return made

    def _norms(self, theirs: str, index: int) -> Parts:
        names = {
            "inputs": {
                "mixer_norm": "input_layernorm",
                "feed_forward_norm": "post_attention_layernorm",
            },
            "outputs": {
                "mixer_norm": "post_attention_layernorm",
                "feed_forward_norm": "post_feedforward_layernorm",
            },
            "both": {
                "mixer_norm": "input_layernorm",
                "mixer_output_norm": "post_attention_layernorm",
                "feed_forward_norm": "pre_feedforward_layernorm",
                "feed_forward_output_norm": "post_feedforward_layernorm",
            },
        }[self.config.norms_of(index)]
        renamed = {
            "input_layernorm": "attention_layer_norm",
            "post_attention_layernorm": "feedforward_layer_norm",
        }
        made = {}
        for ours, name in names.items():
            other = f"{theirs}{renamed.get(name, name)}.weight"
            # OLMo-Hybrid's files have other names than its code.
            chosen = other if other in self.found else f"{theirs}{name}.weight"
            made[f"{ours}/weight"] = vector(chosen, (self.config.model_dim,))
        return made

    def _linear(self, ours: str, theirs: str, inputs: int, outputs: int, bias: bool) -> Parts:
        made = {f"{ours}/kernel": matrix(f"{theirs}.weight", inputs, outputs)}
        if bias:
            made[f"{ours}/bias"] = vector(f"{theirs}.bias", (outputs,))
        return made

    def _mlp(self, theirs: str, *, ours: str = "feed_forward/", hidden: int | None = None) -> Parts:
        dim, bias = self.config.model_dim, self.config.mlp_bias and hidden is None
        hidden = self.config.mlp_dim if hidden is None else hidden
        made = {}
        for name, sizes in (
            ("gate_proj", (dim, hidden)), ("up_proj", (dim, hidden)), ("down_proj", (hidden, dim))
        ):  # fmt: skip
            made |= self._linear(ours + name, theirs + name, *sizes, bias)
        return made

    def _attention(self, theirs: str, shape_of: AttentionConfig) -> Parts:
        dim = self.config.model_dim
        heads, kv_heads = shape_of.num_heads, shape_of.num_kv_heads
        width = shape_of.head_dim
        theirs += "self_attn."
        made = {}
        for name, sizes in (
            ("q_proj", (dim, heads * width * (1 + shape_of.gated))),
            ("k_proj", (dim, kv_heads * width)),
            ("v_proj", (dim, kv_heads * width)),
            ("o_proj", (heads * width, dim)),
        ):
            bias = shape_of.has_output_bias if name == "o_proj" else shape_of.bias
            made |= self._linear(f"mixer/{name}", theirs + name, *sizes, bias)
        if shape_of.qk_norm != "none":
            together = shape_of.qk_norm == "all"
            for name, number in (("q_norm", heads), ("k_norm", kv_heads)):
                shape = (width * (number if together else 1),)
                made[f"mixer/{name}/weight"] = vector(f"{theirs}{name}.weight", shape)
        return made

    def _delta(self, theirs: str, gdn: GatedDeltaNetConfig) -> Parts:
        dim = self.config.model_dim
        theirs += "linear_attn."
        keys = gdn.num_key_heads * gdn.key_head_dim
        heads, values = gdn.num_value_heads, gdn.num_value_heads * gdn.value_head_dim
        features = 2 * keys + 2 * values
        single = self.family.projections == "single"
        norm, out = ("o_norm", "o_proj") if single else ("norm", "out_proj")
        made: Parts = {
            "mixer/A_log": vector(f"{theirs}A_log", (heads,)),
            "mixer/dt_bias": vector(f"{theirs}dt_bias", (heads,)),
            "mixer/norm/weight": vector(f"{theirs}{norm}.weight", (gdn.value_head_dim,)),
            "mixer/out_proj/kernel": matrix(f"{theirs}{out}.weight", values, dim),
            "mixer/conv_weight": self._convolution(theirs, (keys, keys, values), gdn.conv_width),
        }
        qkvz, ba = "mixer/in_proj_qkvz/kernel", "mixer/in_proj_ba/kernel"
        if self.family.projections == "by_head":
            made[qkvz] = matrix(f"{theirs}in_proj_qkvz.weight", dim, features)
            made[ba] = matrix(f"{theirs}in_proj_ba.weight", dim, 2 * heads)
            return made
        if single:
            names, sizes = ("q_proj", "k_proj", "v_proj", "g_proj"), (keys, keys, values, values)
            rates = ("b_proj", "a_proj")
        else:
            names, sizes = ("in_proj_qkv", "in_proj_z"), (2 * keys + values, values)
            rates = ("in_proj_b", "in_proj_a")
        made[qkvz] = _by_head(
            [f"{theirs}{name}.weight" for name in names],
            [(size, dim) for size in sizes],
            heads=gdn.num_key_heads,
            sections=(keys, keys, values, values),
        )
        made[ba] = _by_head(
            [f"{theirs}{name}.weight" for name in rates],
            [(heads, dim)] * 2,
            heads=gdn.num_key_heads,
            sections=(heads, heads),
        )
        return made

    def _convolution(self, theirs: str, channels: Shape, width: int) -> Part:
        whole = f"{theirs}conv1d.weight"
        names, sizes = (whole,), (sum(channels),)
        if self.family.projections == "single" and whole not in self.found:
            names = tuple(f"{theirs}{x}_conv1d.weight" for x in "qkv")
            sizes = channels

        def pack(read: Read) -> np.ndarray:
            return np.concatenate([read(i) for i in range(len(names))])[:, 0].T

        def unpack(array: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
            ends = np.cumsum([shape[0] for shape in shapes])[:-1]
            return np.split(array.T[:, None], ends)

        shapes = tuple((size, 1, width) for size in sizes)
        return Part(names, shapes, pack, unpack, joined=len(names) > 1)

    def _experts(self, theirs: str) -> Parts:
        experts, dim = self.config.experts, self.config.model_dim
        number, hidden = experts.num_experts, experts.hidden_dim
        theirs += "mlp."
        ours = "feed_forward/"
        made = self._linear(f"{ours}router", f"{theirs}gate", dim, number, False)
        if f"{theirs}experts.gate_up_proj" in self.found:
            for name, shape in (
                ("gate_up", (number, 2 * hidden, dim)), ("down", (number, dim, hidden))
            ):  # fmt: skip
                made[f"{ours}{name}_kernel"] = Part(
                    (f"{theirs}experts.{name}_proj",),
                    (shape,),
                    lambda read: np.swapaxes(read(0), 1, 2),
                    lambda array, _: [np.swapaxes(array, 1, 2)],
                )
        else:
            made[f"{ours}gate_up_kernel"] = _stacked(
                theirs, ("gate_proj", "up_proj"), number, (hidden, dim)
            )
            made[f"{ours}down_kernel"] = _stacked(theirs, ("down_proj",), number, (dim, hidden))
        if experts.shared_dim is not None:
            made |= self._mlp(
                f"{theirs}shared_expert.", ours=f"{ours}shared/", hidden=experts.shared_dim
            )
            gate = f"{theirs}shared_expert_gate"
            made |= self._linear(f"{ours}shared_gate", gate, dim, 1, False)
        return made


def _by_head(
    names: Sequence[str], shapes: Sequence[Shape], *, heads: int, sections: Sequence[int]
) -> Part:
    """A linear map whose outputs stand by key head here and by `sections` of all heads there."""

    def pack(read: Read) -> np.ndarray:
        rows = np.concatenate([read(i) for i in range(len(names))])
        pieces = np.split(rows, np.cumsum(sections)[:-1])
        pieces = [piece.reshape(heads, -1, rows.shape[1]) for piece in pieces]
        return np.concatenate(pieces, axis=1).reshape(rows.shape).T

    def unpack(array: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        rows = array.T.reshape(heads, -1, array.shape[0])
        ends = np.cumsum([size // heads for size in sections])[:-1]
        pieces = [x.reshape(-1, array.shape[0]) for x in np.split(rows, ends, axis=1)]
        return np.split(np.concatenate(pieces), np.cumsum([shape[0] for shape in shapes])[:-1])

    return Part(tuple(names), tuple(shapes), pack, unpack)


def _stacked(theirs: str, kinds: Sequence[str], number: int, shape: Shape) -> Part:
    """Maps of all experts, stacked along a first axis; of two kinds the outputs are joined."""
    names = tuple(f"{theirs}experts.{e}.{kind}.weight" for e in range(number) for kind in kinds)
    outputs, inputs = shape

    def pack(read: Read) -> np.ndarray:
        first = read(0)
        made = np.empty((number, inputs, len(kinds) * outputs), first.dtype)
        for place in range(len(names)):
            expert, kind = divmod(place, len(kinds))
            made[expert, :, kind * outputs : (kind + 1) * outputs] = read(place).T
        return made

    def unpack(array: np.ndarray, shapes: Sequence[Shape]) -> list[np.ndarray]:
        return [x.T for of_expert in array for x in np.split(of_expert, len(kinds), axis=1)]

    return Part(names, (shape,) * len(names), pack, unpack)


def check_shapes(part: Part, shapes: Sequence[Shape]) -> None:
    """Raises ValueError, with the tensor's name, unless tensors of these shapes make the array."""
    fits = [tuple(a) == tuple(b) for a, b in zip(part.shapes, shapes, strict=True)]
    if part.joined and not all(fits):
        rests = {tuple(shape[1:]) for shape in (*part.shapes, *shapes)}
        rows = [sum(shape[0] for shape in given if shape) for given in (part.shapes, shapes)]
        fits = [len(rests) == 1 and rows[0] == rows[1]]
    if not all(fits):
        at = fits.index(False)
        raise ValueError(
            f"{part.names[at]} has the shape {list(shapes[at])}; config.json asks for "
            f"{list(part.shapes[at])}."
        )
