"""Exports a trained model as a Hugging Face folder, which transformers loads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from penstock.errors import FileError, ShapeError
from penstock.train.after.generate import Trained, open_trained
from penstock.train.hub import (
    CONFIG,
    find_origin,
    give_back,
    give_back_tokenizer,
    whole_folder,
    write_model,
    write_tokenizer,
)
from penstock.train.lora import write_adapters

EXPORT_TYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def export_run(
    path: Path, folder: Path, dtype: str = "float32", merged: bool = False
) -> Trained:
    """Write a run's model as a Hugging Face folder.

    A model that started from such a folder keeps what that one said: its config, generation_config, chat template and
    everything that belongs to its tokenizer. If adapters were trained, the folder has them instead of the model, as
    peft writes it, unless the whole model is wanted with the adapters `merged`.
    """
    if dtype not in EXPORT_TYPES:
        known = ", ".join(EXPORT_TYPES)
        raise ShapeError(f"there is no type {dtype!r} to export; known: {known}")
    if folder.exists() and not folder.is_dir():
        raise FileError(f"{folder} is a file\n  name a new folder")
    if folder.exists() and any(folder.iterdir()):
        raise FileError(f"{folder} is not empty\n  name a new folder")
    trained = open_trained(path)
    origin = find_origin(path)
    if trained.adapters and not merged:
        with whole_folder(folder):
            write_adapters(
                folder,
                trained.adapters,
                trained.sizes,
                trained.lora,
                trained.base,
                EXPORT_TYPES[dtype],
            )
            write_tokenizer(folder, trained.tokenizer)
            if origin is not None:
                give_back_tokenizer(origin, folder)
        return trained
    if merged and not trained.adapters:
        raise ShapeError(
            f"{path} has no adapters that could be merged\n  leave out --merge"
        )
    weights = {}
    for name, parameter in trained.holding.parameters.items():
        weights[name] = parameter.detach().to(EXPORT_TYPES[dtype])
    with whole_folder(folder):
        write_model(folder, weights, trained.sizes, dtype)
        write_tokenizer(folder, trained.tokenizer)
        if origin is not None:
            give_back(origin, folder, dtype)
        # safetensors lets only the owner read its files; the others follow the umask.
        for file in folder.glob("*.safetensors"):
            shutil.copymode(folder / CONFIG, file)
    return trained
