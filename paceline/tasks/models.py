"""Small models that treat every example alone (no batch normalisation), with weights drawn by torch's generator.

So the loss of a batch is the mean of its examples' losses, however the batch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["MLP", "CharTransformer", "LeNet", "ResNet", "Words"]


class MLP(nn.Module):
    """Linear layers with ReLU between them; ``sizes`` from the number of inputs to the number of classes."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        """(B, ...) to logits (B, classes)."""
        x = self.layers[0](x.flatten(1))
        for layer in self.layers[1:]:
            x = layer(x.relu())
        return x


class LeNet(nn.Module):
    """Two convolutions and three linear layers (LeCun et al. 1998), with ReLU and max pooling.

    Both convolutions are padded, so that ``side``, the height and width of the images, may be as small as 4. ``widths``
    are their channels, ``hidden`` the sizes between the linear layers.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        classes: int,
        widths: tuple[int, int] = (6, 16),
        hidden: Sequence[int] = (120, 84),
    ) -> None:
        super().__init__()
        first, second = widths
        self.conv1 = nn.Conv2d(channels, first, 5, padding=2)
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.head = MLP([second * (side // 4) ** 2, *hidden, classes])

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, side, side) to logits (B, classes)."""
        x = F.max_pool2d(self.conv1(x).relu(), 2)
        x = F.max_pool2d(self.conv2(x).relu(), 2)
        logits: Tensor = self.head(x)
        return logits


class ResNet(nn.Module):
    """Residual network for small images (He et al. 2016) with group normalisation (Wu and He 2018).

    Three stages of ``blocks`` residual blocks, each stage twice as wide and half as high as the one before.
    ``ResNet(3, 10)`` has 0.31 million parameters.
    """

    def __init__(self, channels: int, classes: int, *, width: int = 32, blocks: int = 1) -> None:
        super().__init__()
        self.stem = _conv3(channels, width)
        self.norm = _norm(width)
        stages: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            outputs = width * 2**stage
            for block in range(blocks):
                stages.append(_Residual(inputs, outputs, stride=2 if stage and not block else 1))
                inputs = outputs
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) to logits (B, classes)."""
        x = self.stages(self.norm(self.stem(x)).relu())
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


class _Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3(inputs, outputs, stride)
        self.norm1 = _norm(outputs)
        self.conv2 = _conv3(outputs, outputs)
        self.norm2 = _norm(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)) + self.shortcut(x)
        return y.relu()


def _conv3(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, channels)


class Words(nn.Module):
    """Classifies a text by its words, in whatever order; number 0 is none.

    Without a ``width``, logistic regression on how often each word is there. With one, a linear layer on the mean of
    vectors of so many numbers, one for each word.
    """

    def __init__(self, vocabulary: int, classes: int, *, width: int | None = None) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, classes if width is None else width)
        if width is None:
            nn.init.zeros_(self.words.weight)
        self.head = None if width is None else nn.Linear(width, classes, bias=False)
        self.bias = nn.Parameter(torch.zeros(classes))

    def forward(self, numbers: Tensor) -> Tensor:
        """(B, length) to logits (B, classes)."""
        there = (numbers > 0).unsqueeze(-1)
        total: Tensor = (self.words(numbers) * there).sum(1)
        if self.head is not None:
            total = self.head((total / there.sum(1).clamp(min=1)).relu())
        return total + self.bias


class CharTransformer(nn.Module):
    """Causal transformer (pre-norm, learned positions, no dropout) that predicts each next character.

    ``context`` is the longest sequence that it can read. With 65 characters it has 0.42 million parameters.
    """

    def __init__(self, vocabulary: int, context: int, *, width: int = 128, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        for embedding in (self.token, self.position):
            nn.init.normal_(embedding.weight, std=0.02)  # as in GPT-2; torch's default of 1 learns slowly

    def forward(self, ids: Tensor) -> Tensor:
        """(B, T) characters to logits (B, T, vocabulary)."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.blocks(self.token(ids) + self.position(positions))
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1))  # (B, T, 3, heads, d)
        q, k, v = qkv.transpose(1, 3).unbind(2)  # each (B, heads, T, d)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        y: Tensor = self.narrow(F.gelu(self.widen(self.norm2(x))))
        return x + y
