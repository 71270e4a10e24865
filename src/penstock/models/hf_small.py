"""Makes a small Hugging Face model with random weights from a small config, and compares two computations of it."""

from __future__ import annotations

import copy
import json
from typing import Any

from torch import Tensor, nn

SLACK = 2e-4  # relative difference that rounding in float32 explains, with wide margins


class ConfigText:
    """A config that can be compared and cached: two are equal if they say the same."""

    def __init__(self, config: Any, kernel: str) -> None:
        self.config = config
        self.kernel = kernel if kernel in ("eager", "sdpa") else "sdpa"
        said = json.dumps(config.to_dict(), sort_keys=True, default=str)
        self.text = f"{type(config).__name__} {self.kernel} {said}"

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ConfigText) and self.text == other.text


# ---------------------------------------------------------------- a small model
def random_model(kind: type[nn.Module], text: ConfigText) -> Any:
    """A small model whose biases and norms are random too."""
    config = copy.deepcopy(text.config)
    config._attn_implementation = text.kernel
    model: Any = kind(config).float()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.2)
    return model.eval()


# ---------------------------------------------------------------- comparing
def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of a model, and leave it without any."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad
            parameter.grad = None
    return found


def near(one: Tensor, other: Tensor, least: float = 0.0) -> bool:
    """Whether two tensors differ by no more than rounding explains, in numbers of at least this size."""
    one, other = one.detach(), other.detach()
    scale = max(float(other.abs().max()), least)
    return float((one - other).abs().max()) <= SLACK * max(scale, 1e-6)


def first_line(error: Exception) -> str:
    """Say in one line what an error is."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"
