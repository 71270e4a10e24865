"""Facts about each schedule: its paper, its idle time and its memory. The tests check the formulas.

P is the number of ranks, M of micro-batches, v of chunks, W of waves and s of slices. `idle` is the time that each
rank waits in a step, in units of F. `peak` is the activation memory of the fullest rank, counted in micro-batches of
one rank. Both assume that B = 2 F, I = W = F and that messages are free, and both hold where the condition `when` is
true. The bubble is idle / (3 M + idle).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScheduleFacts:
    """The facts about one schedule. `idle`, `peak` and `when` are Python expressions; see above for the letters."""

    paper: str
    idle: str
    peak: str
    when: str = "True"
    weights: int = 1  # copies of the weights
    stages: int = 1  # of each rank; chunks and waves multiply it
    splits: bool = False  # whether backwards are split into I and W
    exact: bool = True  # if false, `idle` and `peak` are upper bounds
    own_head: bool = False  # whether the last part is the head alone, without layers


FACTS: dict[str, ScheduleFacts] = {
    "gpipe": ScheduleFacts("Huang et al. 2019, arXiv 1811.06965", "3*(P-1)", "M"),
    "1f1b": ScheduleFacts(
        "Narayanan et al. 2019 (PipeDream); Fan et al. 2021 (DAPPLE)",
        "3*(P-1)",
        "min(P, M)",
    ),
    "interleaved": ScheduleFacts(
        "Narayanan et al. 2021, arXiv 2104.04473",
        "3*(P-1)/v",
        "min(M, P + (P-1)/v)",
        "M % P == 0",
    ),
    "chimera": ScheduleFacts(
        "Li and Hoefler 2021, arXiv 2107.06925",
        "2*(P-2)",
        "P",
        "M >= P and M % 2 == 0",
        weights=2,
    ),
    "hanayo": ScheduleFacts(
        "Liu et al. 2023, arXiv 2308.15762",
        "2*(P-1)/W",
        "P",
        "M == P or (W == 1 and M > P)",
        stages=2,
    ),
    "zb-h1": ScheduleFacts(
        "Qi et al. 2024, arXiv 2401.10241", "P-1", "P", "M >= P", splits=True
    ),
    "interleaved-zb": ScheduleFacts(
        "Qi et al. 2024, arXiv 2401.10241 (ZB1P)",
        "(P-1)/v",
        "P",
        "M % P == 0",
        splits=True,
    ),
    "zb-v": ScheduleFacts(
        "Qi et al. 2024, arXiv 2401.10241",
        "(P-1)/2",
        "P",
        "M >= 2*P - 1",
        stages=2,
        splits=True,
    ),
    "v-half": ScheduleFacts(
        "Qi et al. 2024, arXiv 2405.15362",
        "1.5*P - 2",
        "P/2 + 1.5",
        "M >= P and P > 2",
        stages=2,
        splits=True,
        exact=False,
    ),
    "v-min": ScheduleFacts(
        "Qi et al. 2024, arXiv 2405.15362",
        "2*P - 1.5",
        "P/3 + 1.5",
        "M >= P and P > 2",
        stages=2,
        splits=True,
        exact=False,
    ),
    "dualpipe-v": ScheduleFacts(
        "DeepSeek-AI 2024, arXiv 2412.19437",
        "(P-1)/2",
        "P + 0.5",
        "M >= 2*P and P > 1",
        stages=2,
        splits=True,
    ),
    "terapipe": ScheduleFacts("Li et al. 2021, arXiv 2102.07988", "3*(P-1)/s", "M"),
    "seq1f1b": ScheduleFacts(
        "Sun et al. 2024, arXiv 2406.03488", "3*(P-1)/s", "min(M, (s+P-1)/s)"
    ),
    "skip": ScheduleFacts(
        "Blagoev et al. 2025, arXiv 2502.19913", "", "P", exact=False, own_head=True
    ),
}
