"""A small transformer that reads a sentence and writes another one (Vaswani et al. 2017)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Translator"]


class Translator(nn.Module):
    """Encoder and decoder (pre-norm, learned positions, no dropout): predicts each next word of a translation.

    ``source`` and ``target`` are the sizes of the vocabularies, in which number 0 is none; ``context`` is the longest
    sentence. With 3,000 words of each language it has 2.1 million parameters.
    """

    def __init__(
        self, source: int, target: int, context: int, *, width: int = 128, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(source, width)
        self.target = nn.Embedding(target, width)
        self.position = nn.Embedding(context, width)
        self.encoder = nn.ModuleList(_Reader(width, heads) for _ in range(layers))
        self.encoded = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(_Writer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, target)
        for embedding in (self.source, self.target, self.position):
            nn.init.normal_(embedding.weight, std=0.02)  # as in GPT-2; torch's default of 1 learns slowly

    def forward(self, ids: Tensor) -> Tensor:
        """(B, 2, T), sentences and their translations so far, to logits (B, T, target)."""
        source, target = ids.unbind(1)
        positions = self.position(torch.arange(ids.shape[2], device=ids.device))
        there = (source > 0)[:, None, None]  # (B, 1, 1, T): for each head and each word that looks
        x = self.source(source) + positions
        for reader in self.encoder:
            x = reader(x, there)
        read = self.encoded(x)
        y = self.target(target) + positions
        for writer in self.decoder:
            y = writer(y, read, there)
        logits: Tensor = self.head(self.norm(y))
        return logits


class _Reader(nn.Module):
    """A layer of the encoder: every word looks at all words of its sentence."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.look = _Attention(width, heads)
        self.think = _Feedforward(width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.look(normed, normed, there)
        thought: Tensor = self.think(x)
        return x + thought


class _Writer(nn.Module):
    """A layer of the decoder: every word looks at those before it, then at the sentence to translate."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.back = _Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.across = _Attention(width, heads)
        self.think = _Feedforward(width)

    def forward(self, y: Tensor, read: Tensor, there: Tensor) -> Tensor:
        normed = self.norm1(y)
        y = y + self.back(normed, normed)
        y = y + self.across(self.norm2(y), read, there)
        thought: Tensor = self.think(y)
        return y + thought


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, at: Tensor, there: Tensor | None = None) -> Tensor:
        """Words ``x`` look ``at`` those that are ``there``; without a mask, at those that do not come later."""
        query = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, heads, T, d)
        key, value = self.key_value(at).unflatten(2, (2, self.heads, -1)).transpose(1, 3).unbind(2)  # likewise
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=there, is_causal=there is None)
        mixed: Tensor = self.mix(seen.transpose(1, 2).flatten(2))
        return mixed


class _Feedforward(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
