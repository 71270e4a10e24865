"""Several tensors on their way from one stage to the next, or their gradients on the way back.

forward    x ──────► stage ──► y        tensors that the stage does not return, but a later one asks for,
           skip ─────────────► skip     go through it untouched
backward   dx ◄───── stage ◄── dy       whole numbers have no gradients; where a stage both uses a value
           dskip ◄─── + ◄──── dskip     and passes it on, autograd adds the two gradients
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from penstock.runtime.comm.comm import Arriving
from penstock.runtime.edges import Edge
from penstock.runtime.passed_values import Passed, has_gradient


class Bundle:
    """The tensors of an edge: values for the first arguments, then those with names; or gradients of some of them."""

    __slots__ = ("count", "names", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], count: int = 0, names: tuple[str, ...] = ()
    ) -> None:
        self.tensors = tuple(tensors)
        self.count = count
        self.names = names

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The first arguments of the next stage."""
        return self.tensors[: self.count]

    @property
    def named(self) -> dict[str, Tensor]:
        """The tensors with names."""
        return dict(zip(self.names, self.tensors[self.count :], strict=True))

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.tensors[0].device

    @property
    def requires_grad(self) -> bool:
        """Whether any of its tensors depends on something that trains."""
        return any(x.requires_grad for x in self.tensors)

    def leaves(self, edge: Edge, trains: bool) -> Bundle:
        """The tensors as inputs of the next stage, without the graph that made them."""
        leaves = []
        for tensor in self.tensors:
            x = tensor.detach()
            if trains and has_gradient(x.dtype):
                x.requires_grad_()
            leaves.append(x)
        return Bundle(leaves, edge.values, edge.names)

    def take_gradients(self) -> Bundle:
        """The gradients of all that can have one, zero where nothing used them; they are forgotten here."""
        gradients = []
        for x in self.tensors:
            if has_gradient(x.dtype):
                gradients.append(torch.zeros_like(x) if x.grad is None else x.grad)
                x.grad = None
        return Bundle(gradients)

    def roots(self, gradients: Bundle) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors from which a backward begins, and their gradients."""
        differentiable = [x for x in self.tensors if has_gradient(x.dtype)]
        roots = []
        given = []
        for x, gradient in zip(differentiable, gradients.tensors, strict=True):
            if x.requires_grad:
                roots.append(x)
                given.append(gradient.to(x.dtype))
        return roots, given

    def copy(self) -> Bundle:
        """The same tensors in memory of their own."""
        return Bundle([x.clone() for x in self.tensors], self.count, self.names)

    def places(self) -> set[int]:
        """The addresses of its tensors."""
        return {x.data_ptr() for x in self.tensors}


class ArrivingBundle:
    """The tensors of a value that another rank is sending."""

    __slots__ = ("tensors",)

    def __init__(self, tensors: Sequence[Arriving]) -> None:
        self.tensors = tensors


def bundle_of(passed: Passed, edge: Edge, given: Mapping[str, Tensor]) -> Bundle | None:
    """What a stage passes on: what it returned, and what travels along; None if that is not what the edge has."""
    if len(passed.values) != edge.values:
        return None
    tensors = list(passed.values)
    for name in edge.names:
        value = passed.named.get(name, given.get(name))
        if value is None:
            return None
        tensors.append(value)
    return Bundle(tensors, edge.values, edge.names)
