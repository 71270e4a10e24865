"""Layers that pass complex numbers on, trained by a rank that is a thread or a process."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drawing import drawn_from
from penstock import Pipeline, make
from penstock.runtime import Comm

WIDTH = 4


class Spectrum(nn.Module):
    """Turns real numbers into complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.imaginary = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(self.real(x), self.imaginary(x))


class Filter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, z: Tensor) -> Tensor:
        return self.linear(z) * z


class Loudness(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, z: Tensor) -> Tensor:
        return self.linear(z).abs()


@drawn_from(0)
def layers() -> list[nn.Module]:
    return [Spectrum(), Filter(), Filter(), Loudness()]


def batch() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(3)
    drawn = torch.rand(2, 4, WIDTH, generator=dice, dtype=torch.float64)
    return drawn[0], drawn[1]


def squares(y: Tensor, wanted: Tensor) -> Tensor:
    return (y - wanted).square().sum()


def in_one_piece() -> dict[str, Tensor]:
    model = nn.Sequential(*layers())
    x, y = batch()
    (squares(model(x), y) / y.numel()).backward()
    return {name: one.grad for name, one in model.named_parameters()}


def train(
    comm: Comm, name: str, microbatches: int, recompute: bool
) -> dict[str, Tensor | None]:
    """Prove the stages and run a step; return the gradients of this rank."""
    schedule = make(name, ranks=comm.ranks, microbatches=microbatches)
    pipeline = Pipeline(layers(), schedule, squares, comm=comm, recompute=recompute)
    proof = pipeline.prove(*batch())
    assert proof.stages == len(schedule.stages)
    pipeline.step(*batch())
    return {key: one.grad for key, one in pipeline.named_parameters()}
