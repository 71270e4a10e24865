"""The config of a run: eight sections of plain values, frozen, and checked before anything starts.

sections ──► Config ──► checks ──┬──► the same config, with its open values settled
                                 └──► every fault, by name
"""

from penstock.config.checks import (
    allows_meshes,
    check_config,
    is_recording,
    precision_of,
    reasons_against_compiling,
    reasons_against_recording,
    segments_fault,
)
from penstock.config.sections import (
    AS_PLANNED,
    AUTO,
    BYTE_TOKENIZER,
    FULL_AS_PLANNED,
    SWITCH_KEYS,
    Config,
    DataConfig,
    LoraConfig,
    MeshConfig,
    MixtureSource,
    ModelConfig,
    OptimizerConfig,
    Options,
    OptionValue,
    ParameterGroup,
    PathsConfig,
    RunConfig,
    ScheduleConfig,
    is_plan_file,
    names_a_file,
    names_own_code,
    own_code_file,
)
from penstock.config.words import PRESETS, find_settings

__all__ = [
    "AS_PLANNED",
    "AUTO",
    "BYTE_TOKENIZER",
    "FULL_AS_PLANNED",
    "PRESETS",
    "SWITCH_KEYS",
    "Config",
    "DataConfig",
    "LoraConfig",
    "MeshConfig",
    "MixtureSource",
    "ModelConfig",
    "OptimizerConfig",
    "OptionValue",
    "Options",
    "ParameterGroup",
    "PathsConfig",
    "RunConfig",
    "ScheduleConfig",
    "allows_meshes",
    "check_config",
    "find_settings",
    "is_plan_file",
    "is_recording",
    "names_a_file",
    "names_own_code",
    "own_code_file",
    "precision_of",
    "reasons_against_compiling",
    "reasons_against_recording",
    "segments_fault",
]
