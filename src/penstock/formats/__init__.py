"""The files that people and programs read and edit.

text.py reads and writes all of them, and reports every error with line and column.
"""

from penstock.formats.cluster_toml import (
    dump_cluster,
    load_cluster,
    read_cluster,
    write_cluster,
)
from penstock.formats.plan_json import dump_plan, load_plan, read_plan, write_plan
from penstock.formats.profile_json import (
    dump_profile,
    dump_row_profiles,
    load_profile,
    load_row_profiles,
    read_profile,
    read_row_profiles,
    write_profile,
    write_row_profiles,
)
from penstock.formats.torch_csv import (
    dump_torch_comms,
    dump_torch_csv,
    load_torch_csv,
    read_torch_csv,
)

__all__ = [
    "dump_cluster",
    "dump_plan",
    "dump_profile",
    "dump_row_profiles",
    "dump_torch_comms",
    "dump_torch_csv",
    "load_cluster",
    "load_plan",
    "load_profile",
    "load_row_profiles",
    "load_torch_csv",
    "read_cluster",
    "read_plan",
    "read_profile",
    "read_row_profiles",
    "read_torch_csv",
    "write_cluster",
    "write_plan",
    "write_profile",
    "write_row_profiles",
]
