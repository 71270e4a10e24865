"""A small vision transformer over a pipeline: images in, classes out, and the accuracy on images it has not seen.

torchrun --nproc-per-node 2 examples/vision.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from penstock import Pipeline, make

CLASSES, SIDE, PATCH, WIDTH, STEPS = 4, 16, 4, 32, 40


class Patches(nn.Module):
    """Turns images of shape (rows, 1, 16, 16) into 16 patches, each a vector with its place added."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.place = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, WIDTH) / 10)

    def forward(self, images: Tensor) -> Tensor:
        """Cut the images into patches."""
        return self.cut(images).flatten(2).transpose(1, 2) + self.place


class Head(nn.Module):
    """Turns the patches of an image into one number for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Take the mean over the patches."""
        return self.linear(x.mean(1))


def layers() -> list[nn.Module]:
    """Return the layers. Every rank draws the same weights."""
    torch.manual_seed(0)
    middle = [
        nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        for _ in range(2)
    ]
    return [Patches(), *middle, Head()]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return noisy images with a bright bar, and the place of the bar as their class."""
    draw = torch.Generator().manual_seed(step)
    classes = torch.randint(0, CLASSES, (32,), generator=draw)
    images = torch.randn(32, 1, SIDE, SIDE, generator=draw) / 2
    for image, place in zip(images, classes.tolist(), strict=True):
        image[0, :, place * PATCH] += 3.0
    return images, classes


loss = nn.CrossEntropyLoss(reduction="sum")
pipeline = Pipeline(layers(), make("1f1b", ranks=2, microbatches=4), loss)
optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)

for step in range(STEPS):
    mean_loss = pipeline.step(*batch(step)).loss
    optimizer.step()
    optimizer.zero_grad()
    if pipeline.comm.rank == 0 and step % 10 == 9:
        print(f"step {step + 1}  loss {mean_loss:.3f}")

images, classes = batch(1000)
outputs = pipeline.predict(images)
if outputs is not None:  # on the rank with the last layer
    right = int((outputs.argmax(1) == classes).sum())
    print(f"{right} of {len(classes)} new images are right")
