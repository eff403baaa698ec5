"""A Llama-shaped model with random weights, which is decoded and trained here."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass(frozen=True)
class Shape:
    words: int
    hidden: int
    feedforward: int
    layers: int
    heads: int
    key_heads: int
    positions: int  # the most words of a sequence

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads


DECODED = Shape(16384, 768, 2048, layers=12, heads=12, key_heads=4, positions=128)  # 100.7 M
TRAINED = Shape(8192, 384, 1024, layers=6, heads=6, key_heads=6, positions=128)  # 16.9 M
TINY = Shape(96, 32, 48, layers=2, heads=4, key_heads=2, positions=64)


class Attention(nn.Module):
    """The projections set the number of heads: a rank may have a share of them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.positions = shape.positions
        keys = shape.key_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden, keys, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.cache: torch.Tensor | None = None  # [2, batch, heads, positions, head_size]

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor, start: int | None
    ) -> torch.Tensor:
        """hidden: [batch, length, hidden]. rotation: that of its positions. start: as in Model."""
        query, key, value = (
            projection(hidden).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotate(query, rotation), rotate(key, rotation)
        is_causal = hidden.shape[1] > 1
        if start is not None:
            key, value = self._cached(key, value, start)
        attended = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, enable_gqa=True
        )
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _cached(
        self, key: torch.Tensor, value: torch.Tensor, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps these keys and values; returns those of all positions up to these."""
        if self.cache is None:
            batch, heads, _, size = key.shape
            self.cache = key.new_zeros(2, batch, heads, self.positions, size)
        end = start + key.shape[2]
        self.cache[0, :, :, start:end] = key
        self.cache[1, :, :, start:end] = value
        return self.cache[0, :, :, :end], self.cache[1, :, :, :end]


class Feedforward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.feedforward, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.feedforward, bias=False)
        self.down_proj = nn.Linear(shape.feedforward, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.self_attn = Attention(shape)
        self.feedforward_norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.mlp = Feedforward(shape)

    def forward(
        self, hidden: torch.Tensor, rotation: torch.Tensor, start: int | None
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.attention_norm(hidden), rotation, start)
        return hidden + self.mlp(self.feedforward_norm(hidden))


class Model(nn.Module):
    """The modules that are sharded have the names they have in Llama, which AutoTP looks for."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.words, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.lm_head = nn.Linear(shape.hidden, shape.words, bias=False)
        self.rotations = rotations(shape)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=1 / math.sqrt(shape.hidden))

    def forward(self, words: torch.Tensor, start: int | None = None) -> torch.Tensor:
        """Logits [batch, length, words] of the words [batch, length] int64.

        start: the position of the first word, after the words of earlier calls with a start. 0
            begins a new sequence; any other start allows only one word. None keeps nothing.
        """
        first = start or 0
        rotation = self.rotations[first : first + words.shape[1]]
        hidden = self.embed_tokens(words)
        for layer in self.layers:
            hidden = layer(hidden, rotation, start)
        return self.lm_head(self.norm(hidden))


def make_model(shape: Shape, dtype: torch.dtype) -> Model:
    """Makes the same model on every rank, and in every run."""
    torch.manual_seed(11)
    return Model(shape).to(dtype)


def rotations(shape: Shape) -> torch.Tensor:
    """The rotations of a rotary embedding: complex [positions, head_size / 2]."""
    exponents = torch.arange(0, shape.head_size, 2) / shape.head_size
    angles = torch.outer(torch.arange(shape.positions), 10000.0**-exponents)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """heads: [batch, heads, length, head_size], turned by its positions' angles."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(heads.dtype)
