"""The hybrid language models of the FwPKM paper in PyTorch, for `modeling_fwpkm`.

A layer is Gated DeltaNet or attention, full or over a window, then an MLP or a product-key memory
(PKM), each on the residual stream. `fwpkm export hf` puts this file beside `modeling_fwpkm.py` into
a folder whose model no family of the transformers library computes. Names and shapes of weights are
those of fwpkm_jax; matrices are transposed.

References: Yang et al. 2024, arXiv:2412.06464 (Gated DeltaNet); Qiu et al. 2025, arXiv:2505.06708
(gated attention); Lample et al. 2019, arXiv:1907.05242 (PKM).
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

from .modeling_fwpkm import CACHE, FwPKMForCausalLM, best_slots, rms_norm, weighted_rows

CHUNK = 64  # Tokens of the delta rule that are solved for at once.
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class FwPKMConfig(PretrainedConfig):
    """`config.json` of a hybrid: `fwpkm_jax.model` is the model, `mixers` its layers' mixers."""

    model_type = "fwpkm"


class HybridCache(DynamicCache):
    """What layers keep of the tokens before; `seen` real tokens of each sequence."""

    is_linear = (False,)  # Tokens that the cache holds are cut from a longer prompt.

    def __init__(self):
        super().__init__()
        self.kept, self.seen, self.length = {}, 0, 0

    def get_seq_length(self, *_):
        return self.length


class Piece:
    """The tokens of a call, packed: the real ones of each sequence first, in order.

    `positions` `[batch, length]` count real tokens, -1 behind them; `count` is their number here.
    """

    def __init__(self, mask, seen):
        real = mask.bool()
        self.order = None if real.all() else (~real).int().argsort(dim=1, stable=True)
        self.count = real.sum(1)
        at = torch.arange(mask.shape[1], device=mask.device)
        self.real = at < self.count[:, None]
        self.positions = (at + (seen + torch.zeros_like(self.count))[:, None]).where(self.real, -1)

    def pack(self, x):
        if self.order is None:
            return x
        return x.gather(1, self.order[..., None].expand_as(x)).where(self.real[..., None], 0)

    def unpack(self, x):
        if self.order is None:
            return x
        x = x.where(self.real[..., None], 0)
        return torch.zeros_like(x).scatter(1, self.order[..., None].expand_as(x), x)


class RMSNorm(nn.Module):
    def __init__(self, dim, eps, offset):
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.zeros(dim)), eps, float(offset)

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps, self.offset).to(x.dtype)


class Attention(nn.Module):
    """Softmax attention with normed queries and keys and a sigmoid gate on its output."""

    def __init__(self, mixer, dim, eps):
        super().__init__()
        self.mixer = mixer
        heads, keys = (mixer[x] * mixer["head_dim"] for x in ("num_heads", "num_kv_heads"))
        bias, of_output = mixer["bias"], mixer["output_bias"]
        self.q_proj = nn.Linear(dim, heads * (1 + mixer["gated"]), bias)
        self.k_proj, self.v_proj = nn.Linear(dim, keys, bias), nn.Linear(dim, keys, bias)
        self.o_proj = nn.Linear(heads, dim, bias if of_output is None else of_output)
        if mixer["qk_norm"] != "none":
            widths = (heads, keys) if mixer["qk_norm"] == "all" else (mixer["head_dim"],) * 2
            self.q_norm, self.k_norm = (RMSNorm(x, eps, mixer["norm_offset"]) for x in widths)

    def forward(self, x, piece, cache):
        width, window = self.mixer["head_dim"], self.mixer["window"]
        query = self.q_proj(x).unflatten(-1, (self.mixer["num_heads"], -1))
        gate = query[..., width:]  # Of each head, behind its query.
        query = self.turned(self.normed("q_norm", query[..., :width]), piece.positions)
        key = self.normed("k_norm", self.k_proj(x).unflatten(-1, (-1, width)))
        new = (self.turned(key, piece.positions), self.v_proj(x).unflatten(-1, (-1, width)))
        new = (*new, piece.positions)
        if cache:
            new = tuple(torch.cat(pair, 1) for pair in zip(cache["tokens"], new, strict=True))
        key, value, place = new
        at = piece.positions[..., None]
        seen = (place[:, None] >= 0) & (place[:, None] <= at)
        if window is not None:
            seen &= place[:, None] > at - window
            recent = (place > place.amax(1, keepdim=True) - window).any(0)
            new = tuple(x[:, recent] for x in new)
        cache["tokens"] = new
        y = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            attn_mask=seen[:, None],
            scale=(self.mixer["score_dim"] or width) ** -0.5,
            enable_gqa=True,
        )
        y = y.transpose(1, 2)
        return self.o_proj((y * gate.sigmoid() if self.mixer["gated"] else y).flatten(2))

    def normed(self, name, x):
        if self.mixer["qk_norm"] == "none":
            return x
        norm = getattr(self, name)
        return norm(x) if self.mixer["qk_norm"] == "head" else norm(x.flatten(2)).view_as(x)

    def turned(self, x, positions):
        """Rotary positions: entries of two halves are pairs."""
        wide = torch.promote_types(x.dtype, torch.float32)
        turns = torch.tensor(self.mixer["frequencies"], dtype=wide, device=x.device)
        half, scale = len(turns), self.mixer["rotary_scale"]
        angles = positions.to(wide)[..., None, None] * turns
        cos, sin = angles.cos() * scale, angles.sin() * scale
        first, second = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((turned.to(x.dtype), x[..., 2 * half :]), -1)


class GatedDeltaNet(nn.Module):
    """The gated delta rule between a short convolution and a gated norm.

    The projections yield for each key head its query, key, values and their gates, and the
    strengths and decays of its value heads.
    """

    def __init__(self, mixer, dim, eps):
        super().__init__()
        self.mixer, heads = mixer, mixer["num_value_heads"]
        keys, values = (
            mixer["num_key_heads"] * mixer["key_head_dim"],
            heads * mixer["value_head_dim"],
        )
        self.in_proj_qkvz = nn.Linear(dim, 2 * (keys + values), False)
        self.in_proj_ba = nn.Linear(dim, 2 * heads, False)
        self.out_proj = nn.Linear(values, dim, False)
        self.conv_weight = nn.Parameter(torch.zeros(mixer["conv_width"], 2 * keys + values))
        self.A_log, self.dt_bias = (
            nn.Parameter(torch.zeros(heads)),
            nn.Parameter(torch.zeros(heads)),
        )
        self.norm = RMSNorm(mixer["value_head_dim"], mixer["norm_eps"] or eps, False)

    def forward(self, x, piece, cache):
        mixer, wide = self.mixer, torch.promote_types(x.dtype, torch.float32)
        heads, width = mixer["num_key_heads"], mixer["key_head_dim"]
        shared = mixer["num_value_heads"] // heads
        values = shared * mixer["value_head_dim"]
        parts = (
            self.in_proj_qkvz(x)
            .unflatten(-1, (heads, -1))
            .split((width, width, values, values), -1)
        )
        gate = parts[3].unflatten(-1, (shared, -1)).flatten(2, 3)
        inputs = torch.cat([x.flatten(2) for x in parts[:3]], -1).to(wide)
        beta, decay = self.in_proj_ba(x).to(wide).unflatten(-1, (heads, -1)).chunk(2, -1)
        decay = -self.A_log.to(wide).exp() * F.softplus(decay.flatten(2) + self.dt_bias)
        beta = mixer["max_strength"] * beta.flatten(2).sigmoid()
        decay, beta = (x.where(piece.real[..., None], 0) for x in (decay, beta))

        reach, length = mixer["conv_width"] - 1, x.shape[1]
        before = cache.get("inputs")
        if before is None:
            before = inputs.new_zeros(len(x), reach, inputs.shape[-1])
        inputs = torch.cat((before, inputs), 1)
        mixed = sum(inputs[:, i : i + length] * w for i, w in enumerate(self.conv_weight.to(wide)))
        latest = piece.count[:, None] + torch.arange(reach, device=x.device)
        cache["inputs"] = inputs.gather(1, latest[..., None].expand(-1, -1, inputs.shape[-1]))

        sizes = (heads * width, heads * width, heads * values)
        query, key, value = ACTIVATIONS[mixer["activation"]](mixed).split(sizes, -1)
        query, key = (x.unflatten(-1, (heads, width)) for x in (query, key))
        query, key = (
            (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(shared, 2)
            for x in (query, key)
        )
        value = value.unflatten(-1, (heads * shared, -1))
        tokens = [x.transpose(1, 2) for x in (width**-0.5 * query, key, value, decay, beta)]
        y, cache["memory"] = gated_delta_rule(*tokens, cache.get("memory"))
        y = self.norm(y.transpose(1, 2)) * F.silu(gate.to(wide))
        return self.out_proj(y.flatten(2).to(x.dtype))


def gated_delta_rule(query, key, value, log_decay, beta, state):
    """What queries `[batch, heads, length, key]` read, and the state `[batch, heads, key, value]`.

    `S = a S + k b (v - k a S)`, then `q S`, for each token, `CHUNK` of them at once.
    """
    if state is None:
        state = value.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for start in range(0, key.shape[2], CHUNK):
        piece = (x[:, :, start : start + CHUNK] for x in (query, key, value, log_decay, beta))
        q, k, v, decay, b = piece
        total, b = decay.cumsum(-1)[..., None], b[..., None]
        later = torch.ones_like(total.mT - total, dtype=torch.bool).triu(1)
        kept = (total - total.mT).masked_fill(later, -torch.inf).exp()
        right = b * (v - total.exp() * (k @ state))
        system = (b * (k @ k.mT) * kept).tril(-1)
        errors = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(total.exp() * (q @ state) + (q @ k.mT * kept) @ errors)
        last = total[:, :, -1:]
        state = last.exp() * state + (k * (last - total).exp()).mT @ errors
    return torch.cat(outputs, 2), state


class SwiGLU(nn.Module):
    def __init__(self, model):
        super().__init__()
        dim, hidden, bias = model["model_dim"], model["mlp_dim"], model["mlp_bias"]
        self.activation = ACTIVATIONS[model["mlp_activation"]]
        self.gate_proj, self.up_proj = nn.Linear(dim, hidden, bias), nn.Linear(dim, hidden, bias)
        self.down_proj = nn.Linear(hidden, dim, bias)

    def forward(self, x):
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class PKM(nn.Module):
    """Reads slots of a learned table, one softmax for each head."""

    def __init__(self, model):
        super().__init__()
        self.pkm, dim = model["pkm"], model["model_dim"]
        heads, subkeys, width = (self.pkm[x] for x in ("num_heads", "num_subkeys", "key_dim"))
        self.keys = nn.Parameter(torch.zeros(heads, 2, subkeys, width // 2))
        self.values = nn.Parameter(torch.zeros(subkeys**2, self.pkm["value_dim"]))
        self.query_proj = nn.Linear(dim, heads * width)
        if self.pkm["query_norm"]:
            self.query_scale = nn.Parameter(torch.zeros(heads * width))
        if self.pkm["gated"]:
            self.gate_proj = nn.Linear(dim, self.pkm["value_dim"])
        self.out_proj = nn.Linear(self.pkm["value_dim"], dim)

    def forward(self, x):
        wide, heads = torch.promote_types(x.dtype, torch.float32), self.pkm["num_heads"]
        query = self.query_proj(x).to(wide)
        if self.pkm["query_norm"]:
            query = rms_norm(query, self.query_scale, 1e-6, 0.0)
        query = query.flatten(0, 1).unflatten(-1, (heads, 2, -1))
        *_, slots, scores = best_slots(query, self.keys.to(wide), self.pkm["top_k"], "dot")
        read = weighted_rows(self.values.to(wide), slots.flatten(1), scores.softmax(-1).flatten(1))
        read = read.unflatten(0, x.shape[:2]).to(x.dtype)
        return self.out_proj(read * F.silu(self.gate_proj(x)) if self.pkm["gated"] else read)


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        model, mixer = config.fwpkm_jax["model"], config.mixers[index]
        dim, eps, offset = (model[x] for x in ("model_dim", "norm_eps", "norm_offset"))
        attends = "frequencies" in mixer
        self.mixer_norm, self.feed_forward_norm = (RMSNorm(dim, eps, offset) for _ in range(2))
        self.mixer = (Attention if attends else GatedDeltaNet)(mixer, dim, eps)
        self.feed_forward = (PKM if index in model["pkm_layers"] else SwiGLU)(model)

    def forward(self, x, piece, cache):
        x = x + piece.unpack(self.mixer(piece.pack(self.mixer_norm(x)), piece, cache))
        return x + self.feed_forward(self.feed_forward_norm(x))


class FwPKMHybrid(PreTrainedModel, GenerationMixin):
    """A decoder of these layers, without its memories."""

    config_class = FwPKMConfig
    _no_split_modules = ("Block",)

    def __init__(self, config):
        super().__init__(config)
        model = config.fwpkm_jax["model"]
        vocab, dim = model["vocab_size"], model["model_dim"]
        self.embedding = nn.Parameter(torch.zeros(vocab, dim))
        self.blocks = nn.ModuleList(Block(config, i) for i in range(len(config.mixers)))
        self.final_norm = RMSNorm(dim, model["norm_eps"], model["norm_offset"])
        self.head = None if model["tie_embeddings"] else nn.Parameter(torch.zeros(dim, vocab))
        self.scale = model["embedding_scale"]
        self.post_init()

    @property
    def layers(self):
        return self.blocks

    def get_decoder(self):
        return self

    @classmethod
    def _supports_default_dynamic_cache(cls):
        return False

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, cache=None,
        past_key_values=None, inputs_embeds=None, use_cache=None, logits_to_keep=0, **kwargs,
    ):  # fmt: skip
        """Logits `[batch, length, vocab]` and the cache; positions count real tokens."""
        cache = past_key_values if cache is None else cache
        cache = HybridCache() if cache is None else cache
        x = self.embedding[input_ids] * self.scale if inputs_embeds is None else inputs_embeds
        mask = (
            torch.ones(x.shape[:2], device=x.device) if attention_mask is None else attention_mask
        )
        piece = Piece(mask[:, -x.shape[1] :], cache.seen)
        for index, block in enumerate(self.blocks):
            x = block(x, piece, cache.kept.setdefault(index, {}))
        cache.seen, cache.length = cache.seen + piece.count, cache.length + x.shape[1]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        x = self.final_norm(x[:, keep])
        head = self.embedding.T if self.head is None else self.head
        logits = (x @ head).to(torch.promote_types(x.dtype, torch.float32))
        out = {"logits": logits, CACHE: None if use_cache is False else cache}
        return CausalLMOutputWithPast(**out)


class FwPKMHybridForCausalLM(FwPKMForCausalLM):
    """What `AutoModelForCausalLM` finds in `auto_map`."""

    @classmethod
    def base_of(cls, config):
        return FwPKMHybrid
