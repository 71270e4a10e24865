"""Writes docs/results/nccl.md from the JSON files of `transports.py`.

python benchmarks/gpu/transports_page.py
"""

from __future__ import annotations

import statistics

from measured import RESULTS, Row, rows_of

PAGE = RESULTS / "nccl.md"
NEAR = 0.05  # the aim for the error of a prediction
TEXT = """# NCCL on one GPU

NCCL refuses two ranks of one host on one GPU. `penstock testbed --backend nccl` lets each worker take itself for a
host (`NCCL_HOSTID`), so that all of them meet on one H200 and talk through sockets (`NCCL_NET=Socket`, the loopback),
as machines on a fast Ethernet do: about 0.1 ms and 3 GB/s a link. Every schedule family, copies, tied weights, token
slices, recorded actions, messages in bfloat16, and meshes with shards and with tensor parallelism train there with
the gradients of the unsplit model (`tests/runtime/test_nccl.py`).

A rank that fails, hangs or is killed ends the run with one message that names it; after a SIGKILL it comes 2 s
later. After a rank had failed, the testbed turned new processes away for more than 30 s ("busy or unavailable"), so
start a new testbed then. When a rank is killed, MPS gives every process on the GPU an "illegal memory access",
whether it computes or not, so the other ranks of a testbed cannot go on.

`benchmarks/gpu/transports.py` runs recorded steps of a Llama with 4 layers of width 1,024 a rank, 2P micro-batches of
1,024 tokens, float32 weights and bfloat16 products, on a machine with 16 cores. All predictions use the median times
of the step's own actions. In *free*, messages take no time. In *simulated*, they take the time that the links need
for one message at a time, measured beforehand, and every message leaves at once. In *in order*, they take the same
time, but wait for each other as over NCCL (`penstock simulate --channels`). The error compares the makespan with *in
order*, and with *simulated* over `penstock_ipc`, where messages do not wait. A profile that is measured over NCCL makes
plans and forecasts follow *in order*; no plan that was made so has run on a GPU yet.

## Why messages are late

Over NCCL with eight workers, Hanayo, Interleaved-ZB and ZB-V take {far_least:.0%} to {far_most:.0%} longer than
*simulated*. The links are not the reason: a message takes {hop:.2f} ms if it is alone (bfloat16, eight workers),
{crowded:.2f} ms if all ranks send at the same time, and {busy:.2f} ms if all ranks compute, too. The reason is the
order. A communicator of NCCL carries the messages of a rank one after the other, in the order of its program. Torch
also makes a message wait for everything that the rank has launched before, so a receive begins only after the action
before it, even if the message could have arrived meanwhile. `simulate_in_order` follows these two rules. On eight
ranks it predicts all schedules without replicas within {worst:.1%}.

Receives that do not wait for actions did not help here. Started on a stream of their own, they left the steps of
ZB-V, Hanayo and Interleaved-ZB as they were (304, 406 and 346 ms instead of 306, 407 and 345) and made those of 1F1B
4% slower (334 instead of 321 ms): a kernel of NCCL that waits occupies some of a worker's 14 multiprocessors, which
then compute more slowly. On GPUs of their own, ranks have 132 of them, but that was not tried.

## Eight workers, two cores for each

{eight}

- Actions are slower too: those of 1F1B, without links, take {slower:.0%} longer than over `penstock_ipc`, most likely
  because kernels of NCCL wait on the multiprocessors that compute.
- Messages in bfloat16 (`run.messages`) take {halved:.0%} off a step over NCCL in the median, and nothing over
  `penstock_ipc`, which has room to spare.
- Chimera sums the gradients of its replicas over NCCL as well, which these predictions leave out; see
  [below](#sums-of-gradients).
- Over `penstock_ipc`, *simulated* is within {ipc:.1%}.
- Settings of NCCL do not help. On another machine, ZB-V with bfloat16 took 314 ms with the defaults, 320 with one
  channel (`NCCL_MAX_NCHANNELS=1`, `NCCL_MAX_P2P_NCHANNELS=1`), and 333 with one socket and chunks of 1 MB as well
  (`NCCL_SOCKET_NTHREADS=1`, `NCCL_NSOCKS_PERTHREAD=1`, `NCCL_P2P_NET_CHUNKSIZE`, `NCCL_BUFFSIZE`).
- A communicator for each direction was slower than one for all messages in an earlier run (702 instead of 387 ms for
  ZB-V in float32). Its threads and kernels wait by spinning, and there are not enough cores for them.

## Four workers, four cores for each

{four}

With four cores for each rank, a communicator for each direction (*two ways*) takes {saved_least:.0%} to
{saved_most:.0%} off the steps, most for Hanayo. So the runtime separates the directions if each rank has at least
four cores. Of the {four_count} rows with two ways, {four_near} are predicted within 5%. In the other one, the steps
whose actions were timed took {odd_makespan:.0f} ms, and the others {odd_step:.0f}. With one communicator, predictions
are up to {four_worst:.0%} too long: a message in bfloat16 took {hop_four:.2f} ms when the links were measured, but
{crowded_four:.2f} ms with all ranks talking.

## Sums of gradients

Replicas sum their gradients as soon as these are complete, all ranks at about the same time, and beside the last
messages. So profiles also measure how fast sums are while all ranks sum in pairs, and a step of Chimera is compared
with *with sums*: the end of the last sum in the same prediction. These steps come from another machine than those
above:

{summed}

- While all ranks sum, each of eight sends {sum_eight:.1f} GB/s, half of the {link_eight:.1f} GB/s of a lone link, and
  each of four {sum_four:.1f} GB/s instead of {link_four:.1f}. Without this price, Chimera's steps would be predicted
  up to {missing:.1f} times too short.
- With it, Chimera's steps take {chimera_least:.1%} to {chimera_most:.1%} longer than predicted, except those of eight
  workers with messages in float32, which take {chimera_far:.0%} longer. On the machine of the tables above the same
  step took 544 ms instead of {chimera_far_step:.0f}, so sums that compete with messages for two cores a rank have no
  steady speed: a message of that size takes {summing_eight:.1f} ms beside them, instead of {alone_eight:.1f}. With four
  cores a rank it takes no longer than alone ({summing_four:.1f} and {alone_four:.1f} ms).
- Hanayo's steps on four workers are {hanayo_least:.0%} and {hanayo_most:.0%} shorter than predicted, because its
  messages were: one in bfloat16 took {hanayo_hop:.2f} ms when the links were measured, and {hanayo_crowded:.2f} ms with
  all ranks talking. So the aim of 5% is met on this network where messages take as long as they did when the links
  were measured, for schedules without replicas on eight ranks, and not everywhere.

## What bfloat16 does to the loss

The first loss of these models changes by {loss:.0e} of its value at most. Three seeds of a small Llama (4 layers of
width 64, 150 steps on four CPU ranks, all else in float32) had held-out losses of 2.592, 2.602 and 2.619 with
messages in bfloat16 and 2.606, 2.632 and 2.685 with messages in float32. Three seeds do not tell these apart.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page, made of the results."""
    eight = rows_of("transports-8.json")
    four = rows_of("transports-4.json")
    one = [row for row in eight if row["transport"] == "one"]
    ipc = [row for row in eight if row["transport"] == "ipc"]
    plain = [row for row in one if row["name"] != "chimera"]
    far = [row for row in plain if row["name"] != "1f1b"]
    single = [row for row in four if row["transport"] == "one"]
    double = [row for row in four if row["transport"] == "direction"]
    odd = max(double, key=lambda row: abs(_error(row)))
    halves = [row for row in one if row["messages"] == "bfloat16"]
    losses: dict[str, list[float]] = {}
    for row in eight:
        losses.setdefault(row["messages"], []).append(row["loss"])
    whole = losses["float32"][0]
    gains = [
        1 - _of(one, row["name"], "bfloat16")["step"] / row["step"]
        for row in one
        if row["messages"] == "float32"
    ]
    saved = [
        1 - _of(double, row["name"], row["messages"])["step"] / row["step"]
        for row in single
    ]
    return TEXT.format(
        eight=_table(eight),
        four=_table(four),
        hop=1e3 * statistics.median(row["hop"] for row in halves),
        crowded=1e3 * statistics.median(row["crowded_hop"] for row in halves),
        busy=1e3 * statistics.median(row["busy_hop"] for row in halves),
        worst=max(abs(_error(row)) for row in plain),
        slower=_of(one, "1f1b")["free"] / _of(ipc, "1f1b")["free"] - 1,
        halved=statistics.median(gains),
        ipc=max(abs(_error(row)) for row in ipc),
        saved_least=min(saved),
        saved_most=max(saved),
        far_least=min(row["makespan"] / row["simulated"] for row in far) - 1,
        far_most=max(row["makespan"] / row["simulated"] for row in far) - 1,
        four_worst=max(abs(_error(row)) for row in single),
        four_near=sum(abs(_error(row)) < NEAR for row in double),
        four_count=len(double),
        odd_step=1e3 * odd["step"],
        odd_makespan=1e3 * odd["makespan"],
        hop_four=1e3 * _of(single, "zb-v", "bfloat16")["hop"],
        crowded_four=1e3 * _of(single, "zb-v", "bfloat16")["crowded_hop"],
        loss=max(abs(loss / whole - 1) for loss in losses["bfloat16"]),
        **_sums(rows_of("sums-8.json"), rows_of("sums-4.json")),
    )


def _sums(eight: list[Row], four: list[Row]) -> dict[str, object]:
    """What the steps show in which replicas sum their gradients, and some beside them."""
    replicas = [row for row in eight + four if _has_sums(row)]
    far = max(replicas, key=_error)
    near = [_error(row) for row in replicas if row is not far]
    others = [row for row in four if not _has_sums(row)]
    large, small = (_of(rows, "chimera") for rows in (eight, four))
    half = _of(others, "hanayo W=2", "bfloat16")
    return {
        "summed": _table(eight, workers=8) + _table_rows(four, workers=4, sums=True),
        "sum_eight": large["sum_bandwidth"] / 1e9,
        "link_eight": large["bandwidth"] / 1e9,
        "sum_four": small["sum_bandwidth"] / 1e9,
        "link_four": small["bandwidth"] / 1e9,
        "missing": max(row["step"] / row["in_order"] for row in replicas),
        "chimera_least": min(near),
        "chimera_most": max(near),
        "chimera_far": _error(far),
        "chimera_far_step": 1e3 * far["step"],
        "summing_eight": 1e3 * large["summing_hop"],
        "alone_eight": 1e3 * large["hop"],
        "summing_four": 1e3 * small["summing_hop"],
        "alone_four": 1e3 * small["hop"],
        "hanayo_least": min(-_error(row) for row in others),
        "hanayo_most": max(-_error(row) for row in others),
        "hanayo_hop": 1e3 * half["hop"],
        "hanayo_crowded": 1e3 * half["crowded_hop"],
    }


def _has_sums(row: Row) -> bool:
    """Whether replicas sum gradients in a step, and predictions count that. Older files do not say."""
    return bool(row.get("sums"))


def _of(rows: list[Row], name: str, messages: str = "float32") -> Row:
    """The row of a schedule."""
    for row in rows:
        if (row["name"], row["messages"]) == (name, messages):
            return row
    raise KeyError(name)


def _prediction(row: Row) -> str:
    """The prediction that fits a transport: only NCCL lets messages wait for each other."""
    return "simulated" if row["transport"] == "ipc" else "in_order"


def _error(row: Row) -> float:
    """How much longer a step took than predicted: to its last action, or to its last sum."""
    if _has_sums(row):
        return float(row["step"] / row[f"{_prediction(row)}_with_sums"] - 1)
    return float(row["makespan"] / row[_prediction(row)] - 1)


def _table(rows: list[Row], workers: int = 0) -> str:
    """The rows of one run; with a column for the workers if they are given."""
    sums = any(map(_has_sums, rows))
    heads = ["schedule", *(["workers"] if workers else []), "transport", "messages"]
    rule = ["---"] * len(heads)
    heads += ["step", "makespan", "free", "simulated", "in order"]
    heads += [*(["with sums"] if sums else []), "error", "idle"]
    rule += ["--:"] * (len(heads) - len(rule))
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|"]
    return "\n".join(lines) + _table_rows(rows, workers, sums)


def _table_rows(rows: list[Row], workers: int, sums: bool) -> str:
    """The lines of a table below its head."""
    names = {"ipc": "penstock_ipc", "one": "nccl", "direction": "nccl, two ways"}
    lines = []
    for row in sorted(rows, key=lambda each: each["name"]):
        times = [
            f"{1e3 * row[key]:.0f} ms"
            for key in ("step", "makespan", "free", "simulated")
        ]
        in_order = (
            "-" if row["transport"] == "ipc" else f"{1e3 * row['in_order']:.0f} ms"
        )
        cells = [
            row["name"],
            *([str(workers)] if workers else []),
            names[row["transport"]],
            row["messages"],
            *times,
            in_order,
            *([_end_of_sums(row)] if sums else []),
            f"{_error(row):+.1%}",
            f"{row['bubble']:.1%}",
        ]
        lines.append(f"\n| {' | '.join(cells)} |")
    return "".join(lines)


def _end_of_sums(row: Row) -> str:
    """The predicted end of the last sum."""
    if not _has_sums(row):
        return "-"
    return f"{1e3 * row[f'{_prediction(row)}_with_sums']:.0f} ms"


if __name__ == "__main__":
    main()
