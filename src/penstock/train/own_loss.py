"""Tries a loss of the user's own on a few random logits, before any worker starts."""

from __future__ import annotations

import torch

from penstock.config import RunConfig
from penstock.errors import ConfigError, ShapeError
from penstock.runtime.loss import reduction_of, refuse_other_loss
from penstock.train.own_code import own_function

ROWS = 2
TRIED_TOKENS = 8


def check_loss(run: RunConfig, vocab: int, sliced: bool = False) -> None:
    """Raise ConfigError if run.loss cannot be called, or is not the sum or mean that the config says."""
    loss = own_function(run.loss, "run.loss")
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, TRIED_TOKENS, vocab, generator=generator)
    labels = torch.randint(0, vocab, (ROWS, TRIED_TOKENS), generator=generator)
    try:
        refuse_other_loss(loss, logits, labels, reduction_of(run.reduction), 0, sliced)
    except ShapeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"run.loss = {run.loss}: {reason}\n"
            "  return one number: the sum over the labels that are not -100; or their mean, with "
            "run.reduction=mean"
        ) from None
    except Exception as error:
        raise ConfigError(
            f"run.loss = {run.loss} failed: {type(error).__name__}: {error}\n"
            f"  it is called with logits of shape (rows, tokens, {vocab}) and labels of shape (rows, tokens)"
        ) from error
