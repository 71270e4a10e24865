"""Refuses hooks, and forwards of a user's own, on modules that a split takes apart: no part would run them rightly.

LlamaForCausalLM          taken apart: a hook here would run in every part, in none, or in the wrong one
├─ model                  taken apart
│  ├─ embed_tokens          whole, in the first part: its hooks run where they always ran
│  ├─ layers.0, layers.1    whole
│  ├─ norm                  whole, in the last part
│  └─ rotary_emb          copied into every part: a hook would run once for each of them
└─ lm_head                  whole
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from penstock.errors import PenstockError

# Where torch keeps the hooks of a module, and what they are.
HOOKS: Mapping[str, str] = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}


def refuse_own_calls(
    model: nn.Module, pieces: Iterable[str], copied: Iterable[str] = ()
) -> None:
    """Refuse a model unless only its `pieces`, and what is inside of them, have hooks and forwards of their own.

    Every part gets a copy of the `copied` pieces. Such a copy may have a forward of its own, but no hook.
    """
    pieces = list(pieces)
    kept = ", ".join(pieces[:2]) or "its layers"
    way_out = f"register it on a module that stays whole, such as {kept}"
    for path in _above([*pieces, *copied]):
        module = model.get_submodule(path)
        hook = _hook_of(module)
        if hook:
            raise PenstockError(
                f"cannot split this {type(model).__name__}: {_named(path, module)} has {hook}, but parts take this "
                f"module apart, and would run the hook several times or not at all\n  {way_out}"
            )
        if "forward" in vars(module):
            raise PenstockError(
                f"cannot split this {type(model).__name__}: the forward of {_named(path, module)} has been replaced, "
                "and parts would not run it\n"
                "  move what it adds into the layers, the embedding or the loss"
            )
    for path in copied:
        hook = _hook_of(model.get_submodule(path))
        if hook:
            raise PenstockError(
                f"cannot split this {type(model).__name__}: {path} has {hook}, but every part gets a copy of this "
                f"module, so the hook would run once for each part\n  {way_out}"
            )


def has_hook(module: nn.Module) -> bool:
    """Whether a hook runs before or after the forward or backward of a module."""
    return bool(_hook_of(module))


def _hook_of(module: nn.Module) -> str:
    """What kind of hook a module has; empty if it has none."""
    for name, kind in HOOKS.items():
        if vars(module).get(name):
            return kind
    return ""


def _above(pieces: Iterable[str]) -> list[str]:
    """The modules that hold these pieces, the model itself first."""
    above: dict[str, None] = {"": None}
    for piece in pieces:
        words = piece.split(".")
        above |= dict.fromkeys(".".join(words[:end]) for end in range(1, len(words)))
    return list(above)


def _named(path: str, module: nn.Module) -> str:
    return f"{path} ({type(module).__name__})" if path else "the model itself"
