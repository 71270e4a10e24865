"""The values that settings of a config may have: choices, and names of files and of code."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

AUTO = "auto"  # the value of settings that Penstock decides itself

# ---------------------------------------------------------------- choices
MODEL_FAMILIES = ("llama", "gpt", "bert")  # model.family
PARTIAL_SCHEDULES = ("skip",)  # schedule.name: those that leave out parts
MEANS = ("all", "visits")  # paths.mean
AS_PLANNED = "planned"  # paths.sum_messages: the type that the plan was made for
# optimizer.schedule
RATE_SCHEDULES = ("constant", "linear", "cosine", "wsd", "inverse_sqrt")
DEVICES = (AUTO, "cpu", "cuda")  # run.device
PRECISIONS = (AUTO, "float32", "bfloat16")  # run.precision
MESSAGE_TYPES = ("float32", "bfloat16", "int8")  # run.messages
REDUCTIONS = ("sum", "mean")  # run.reduction
SWITCHES = (AUTO, "true", "false")  # of SWITCH_KEYS
# The values of these keys may be written without quotes.
SWITCH_KEYS = ("run.compile", "run.elastic", "run.graphs", "run.mirror")

# ---------------------------------------------------------------- numbers with a meaning
FULL_AS_PLANNED = -1  # paths.full: what the plan's rules say
MAX_DEFAULT_MICROBATCHES = 4096  # of a named schedule whose micro-batches are open

# ---------------------------------------------------------------- optimizer.options
OptionValue: TypeAlias = "str | int | float | bool | tuple[int | float, ...]"
Options: TypeAlias = tuple[tuple[str, OptionValue], ...]  # sorted by name

# ---------------------------------------------------------------- names of files and code
BYTE_TOKENIZER = "bytes"  # data.tokenizer: no file
PLANS = (".json", ".csv")  # schedule.name: suffixes of files that hold a schedule


def is_plan_file(name: str) -> bool:
    """Whether schedule.name is a file, which brings its own ranks and micro-batches."""
    return Path(name).suffix in PLANS


def names_a_file(tokenizer: str) -> bool:
    """Whether data.tokenizer is the path of a tokenizer.json."""
    return tokenizer not in (AUTO, BYTE_TOKENIZER)


def names_own_code(value: str) -> bool:
    """Whether a value names a function or class of the user: module:name or file.py:name."""
    return ":" in value


def own_code_file(value: str) -> str:
    """The file in which a value finds code of the user; empty if it names a module, or no code."""
    source = value.rpartition(":")[0]
    return source if source.endswith(".py") else ""
