"""Looks once, in the first step, at how much of a split backward could wait for W, and says what could not."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TypeAlias

from torch import Tensor, nn

from penstock.runtime.backward import is_compiled

Before: TypeAlias = dict[
    str, tuple[nn.Parameter, int, int]
]  # by name: parameter, its gradient, and that one's version
SHOWN = 4  # layers that are named
_log = logging.getLogger(__name__)


class Watch:
    """Which weights of which stages had their gradient in I."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.modules = modules
        self.early: dict[int, list[str]] = {}  # by stage

    def begin(self, stage: int) -> Before | None:
        """Before the first I of a stage: gradients as they are."""
        if stage in self.early:
            return None
        embedded = {
            id(p)
            for m in self.modules[stage].modules()
            if isinstance(m, nn.Embedding)
            for p in m.parameters()
        }
        return {
            name: (p, *_version(p.grad))
            for name, p in self.modules[stage].named_parameters()
            if p.requires_grad and p.dim() > 1 and id(p) not in embedded
        }

    def end(self, stage: int, before: Before) -> None:
        """After it: weights whose gradient is there already did not wait. Norms and embeddings are little work."""
        self.early[stage] = [
            name for name, (p, *was) in before.items() if list(_version(p.grad)) != was
        ]

    def warn(self) -> None:
        """Says so, once, if anything that is much work did not wait."""
        found = [
            self.words(stage, names)
            for stage, names in sorted(self.early.items())
            if names
        ]
        if found:
            _log.warning(
                "some weight gradients of this split backward are computed in I, so W has less to do than planned:\n"
                "  %s\n  an nn.Linear can wait, also a subclass that keeps its forward, and transformers' Conv1D; "
                "other layers cannot, nor can compiled ones. Use penstock.runtime.defer in a layer of your own, or a "
                "schedule whose backwards are whole (1f1b)",
                "\n  ".join(found),
            )
        self.early = {}

    def words(self, stage: int, names: list[str]) -> str:
        """What of a stage did not wait, and how much that is."""
        module = self.modules[stage]
        weights = {
            name: p.numel() for name, p in module.named_parameters() if p.requires_grad
        }
        share = sum(weights[name] for name in names) / sum(weights.values())
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        kinds = [
            f"{owner or 'the module'} ({_kind(module, owner)})"
            for owner in owners[:SHOWN]
        ]
        more = f" and {len(owners) - SHOWN} more" if len(owners) > SHOWN else ""
        compiled = ", which is compiled" if is_compiled(module) else ""
        return f"stage {stage}{compiled}: {share:.0%} of its trained parameters, in {', '.join(kinds)}{more}"


def _version(gradient: Tensor | None) -> tuple[int, int]:
    return (0, 0) if gradient is None else (id(gradient), gradient._version)


def _kind(module: nn.Module, path: str) -> str:
    return type(module.get_submodule(path)).__name__
