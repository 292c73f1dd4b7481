"""The built-in ResNet (18, 34, 50 and 101 layers), its loss included."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

BLOCKS_PER_STAGE = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
FIRST_CHANNELS = 64


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=kernel // 2, bias=False)


class _Residual(nn.Module):
    """What both kinds of block share: the shortcut, the sum and the last activation."""

    expansion: int

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * self.expansion
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(_convolution(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))

    def residual(self, images: Tensor) -> Tensor:
        """The branch that is added to the shortcut."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.residual(images)
        hidden += self.shortcut(images)
        return functional.relu(hidden, inplace=True)


class BasicBlock(_Residual):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__(channels_in, channels, stride)
        self.convolution1 = _convolution(channels_in, channels, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.convolution2 = _convolution(channels, channels, 3)
        self.norm2 = nn.BatchNorm2d(channels)

    def residual(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.convolution1(images)), inplace=True)
        return self.norm2(self.convolution2(hidden))  # type: ignore[no-any-return]


class Bottleneck(_Residual):
    """A 3x3 convolution between two 1x1 ones that narrow and widen."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__(channels_in, channels, stride)
        self.convolution1 = _convolution(channels_in, channels, 1)
        self.norm1 = nn.BatchNorm2d(channels)
        self.convolution2 = _convolution(channels, channels, 3, stride)
        self.norm2 = nn.BatchNorm2d(channels)
        self.convolution3 = _convolution(channels, channels * self.expansion, 1)
        self.norm3 = nn.BatchNorm2d(channels * self.expansion)

    def residual(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.norm1(self.convolution1(images)), inplace=True)
        hidden = functional.relu(self.norm2(self.convolution2(hidden)), inplace=True)
        return self.norm3(self.convolution3(hidden))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """An image classifier; ``forward`` returns the mean cross entropy, :meth:`logits` the scores of the classes."""

    def __init__(self, depth: int = 18, classes: int = 10, stem: Literal["small", "imagenet"] = "small") -> None:
        super().__init__()
        block = BasicBlock if depth < 50 else Bottleneck
        first = (
            nn.Conv2d(3, FIRST_CHANNELS, 3, padding=1, bias=False) if stem == "small" else _convolution(3, FIRST_CHANNELS, 7, 2)
        )
        pooling = nn.Identity() if stem == "small" else nn.MaxPool2d(3, stride=2, padding=1)
        self.stem = nn.Sequential(first, nn.BatchNorm2d(FIRST_CHANNELS), nn.ReLU(inplace=True), pooling)
        channels_in = FIRST_CHANNELS
        stages = []
        for number, num_blocks in enumerate(BLOCKS_PER_STAGE[depth]):
            channels = FIRST_CHANNELS * 2**number
            blocks = []
            for position in range(num_blocks):
                blocks.append(block(channels_in, channels, 2 if number > 0 and position == 0 else 1))
                channels_in = channels * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.classifier = nn.Linear(channels_in, classes)
        self._initialise()

    def _initialise(self) -> None:
        """He et al.: normal convolutions scaled by their fan-out, each block starting as the identity."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, Bottleneck):
                nn.init.zeros_(module.norm3.weight)
            elif isinstance(module, BasicBlock):
                nn.init.zeros_(module.norm2.weight)

    def logits(self, images: Tensor) -> Tensor:
        """Scores of the classes: [batch, 3, height, width] to [batch, classes]."""
        hidden = self.stages(self.stem(images))
        return self.classifier(hidden.mean((2, 3)))  # type: ignore[no-any-return]

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.logits(images), labels)
