"""Reports, once in the first step, which weight gradients of a split backward could not wait for W."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from penstock.runtime.backward import hands_out_ghosts
from penstock.runtime.torch_internals import gradient_version, is_compiled

MAX_NAMED_LAYERS = 4
_log = logging.getLogger(__name__)


class WatchedWeight(NamedTuple):
    """A weight and the version of its gradient before an I."""

    name: str
    parameter: nn.Parameter
    version: tuple[int, int]


class DeferralReport:
    """The weights of each stage whose gradient was computed in I already."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self.modules = modules
        self.early: dict[int, list[str]] = {}  # names of weights, by stage
        self.watched: list[WatchedWeight] | None = None
        self.without_work: set[int] = set()  # stages with weights, none of which waited

    def begin(self, stage: int) -> None:
        """Before the first I of a stage: note the versions of its gradients."""
        if stage in self.early:
            self.watched = None
            return
        module = self.modules[stage]
        embeddings = _embedding_ids(module)
        self.watched = []
        for name, parameter in module.named_parameters():
            # Norms (one dimension) and embeddings are little work.
            is_matrix = parameter.dim() > 1 and id(parameter) not in embeddings
            if parameter.requires_grad and is_matrix:
                version = gradient_version(parameter.grad)
                self.watched.append(WatchedWeight(name, parameter, version))

    def end(self, stage: int) -> None:
        """After the first I: weights whose gradient has changed did not wait."""
        if self.watched is None:
            return
        self.early[stage] = []
        for weight in self.watched:
            if gradient_version(weight.parameter.grad) != weight.version:
                self.early[stage].append(weight.name)
        if self.watched and len(self.early[stage]) == len(self.watched):
            self.without_work.add(stage)

    def warn(self) -> None:
        """Log a warning if any large weight gradient did not wait."""
        stages = []
        for stage, names in sorted(self.early.items()):
            if names:
                stages.append(self.describe(stage, names))
        if stages:
            _log.warning(
                "this split backward computes some weight gradients in I, so W has less to do than planned:\n"
                "  %s\n"
                "  an nn.Linear of real numbers can wait, also a subclass that keeps its forward, and transformers' "
                "Conv1D; other layers cannot, nor can modules that you compiled yourself "
                "(penstock.runtime.compile_stage compiles them so that they can). Use penstock.runtime.defer in a "
                "layer of your own, or a schedule whose backwards are whole (1f1b)",
                "\n  ".join(stages),
            )

    def describe(self, stage: int, names: list[str]) -> str:
        """Which layers of a stage did not wait, and their share of the parameters."""
        module = self.modules[stage]
        sizes = {}
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                sizes[name] = parameter.numel()
        share = sum(sizes[name] for name in names) / sum(sizes.values())
        owners = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        layers = []
        for owner in owners[:MAX_NAMED_LAYERS]:
            kind = type(module.get_submodule(owner)).__name__
            layers.append(f"{owner or 'the module'} ({kind})")
        listed = ", ".join(layers)
        if len(owners) > MAX_NAMED_LAYERS:
            listed += f" and {len(owners) - MAX_NAMED_LAYERS} more"
        own = is_compiled(module) and not hands_out_ghosts(module)
        compiled = ", which is compiled" if own else ""
        return f"stage {stage}{compiled}: {share:.0%} of its trained parameters, in {listed}"


def _embedding_ids(module: nn.Module) -> set[int]:
    ids: set[int] = set()
    for layer in module.modules():
        if isinstance(layer, nn.Embedding):
            ids.update(id(parameter) for parameter in layer.parameters())
    return ids
