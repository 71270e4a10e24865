"""Writes docs/results/compiled.md from the JSON files of `compiled.py`.

python benchmarks/gpu/compiled_page.py
"""

from __future__ import annotations

from compiled import MODELS, SEQUENCES
from measured import RESULTS, Row, rows_of

from penstock.models.family import flops_per_token, peak_flops

STEP_TOKENS = 16 * 1024  # of a step of the pipelines
PIPELINE_PROCESSORS = 8 * 14  # multiprocessors that torch counts with 12% of the GPU
INTERLEAVED = "interleaved-zb v=2"
PAGE = RESULTS / "compiled.md"
NAMES = {
    "plain": "plain loop",
    "autocast": "ours, with plain autocast",
    "ours": "ours",
    "recorded": "ours, recorded",
}
TEXT = """# Compiled stages on one H200

One NVIDIA H200, torch 2.11. Users of torch compile their models today, so we compare with compiled ones. `python
benchmarks/gpu/compiled.py` runs all candidates in one process (or one set of processes), step by step in turn. Ratios
are taken within a round of steps; a range shows the quartiles over all rounds. With one process, weights are float32
and products bfloat16; with eight workers, everything is bfloat16.

## One process

A plain loop over micro-batches with `torch.compile` on the whole model, and our runtime with compiled layers and a
loss in chunks. 16 sequences of 1,024 tokens a step, vocabulary 32,000, AdamW. The last model has 4 wide layers.

{alone}

Recorded, we run at {least:.2f} to {most:.2f} times the speed of the plain loop. How much it is depends on the host:
with several micro-batches the plain loop launches thousands of kernels in a step, and the GPU waits for them. On
another machine of the kind, whose host is slower, the recorded runs had 1.58 and 1.07 times its speed for 194 M with
4 and 1 micro-batches, and 1.35 for 1,056 M. On a third one, whose host lies between the two, they had 1.16, 1.07 and
1.25. The kernels show what remains with any host: with 1,056 M those of the plain loop alone take {plain_kernels:.0f}
ms of a step (overlapping kernels count once), while our whole step takes {step:.0f} ms, so it is {kernel_gain:.2f}
times as fast. The aims of 1.05 for 194 M and 1.02 for 1,056 M are met on all three machines.

Two things make our own kernels faster. A step casts each weight to bfloat16 once; autocast does it for every
micro-batch, forward and backward. And the product that computes the gradient of a weight adds it to the gradient so
far in float32, where autograd rounds it to bfloat16, casts it back and adds it in passes of their own. For a weight
of 5,632 x 2,048 and 2,048 tokens that takes 87 us instead of 139, and the relative error is 2e-6 instead of 2e-3. The
copies of the weights need 2 bytes for each number.

Without recordings, this costs the host more time than autocast does, because each linear layer hands out its input
and the gradient of its output. So casting once is faster where the GPU is the limit, and slower where the host is:

| unrecorded | plain autocast | cast once | gain |
|---|--:|--:|--:|
{casts}
| 194 M, 4 micro-batches, third machine | 58.4 ms | 65.5 ms | 0.89 |
| 1,056 M, 8 micro-batches, third machine | 359 ms | 420 ms | 0.86 |

We always cast once. Layers of usual sizes gain from it, and where the host is too slow, recordings (the default on
GPUs) help more than autocast would.

As `penstock train` counts it, the best row of 1,056 M reaches {utilization:.1%} of the GPU's peak (MFU). That row has
8 micro-batches of 2 sequences, so every gradient is added to eight times. `penstock train` with `schedule.name =
auto` plans 2 micro-batches of 8 for the same step, and reached **54.3%** in the median of 27 steps (52.1 to 56.3%),
with clipping and its own data: 83,900 tokens/s or 195 ms a step, 194 ms predicted, in 34.7 GiB. The aim of 49% is
met. With 8 micro-batches it reached 48.5% in an earlier run. There the GPU waited for the host for 1.0 ms of 220, and
its kernels took 210 ms: matrix products 145, attention 19, AdamW 9, casting, the norm and clipping 5. The other 9 ms
were pauses of about a microsecond each between some 7,500 kernels.

## Eight workers

Layers of width 1,024, four on each rank, 16 micro-batches of 1,024 tokens. torch's pipelining runs with compiled
layers, over the same transport as ours. It cannot compile split backwards (see [peers](../peers.md)), and all its
micro-batches take one path, so most rows have no figure for it. `skip 25%` leaves two of eight ranks out on each
path. Memory is that of the fullest rank.

{pipeline}

Compiled and recorded, the faster zero-bubble schedule takes {split_gain:.0%} less time than 1F1B. The weight
gradients of compiled layers really move into W actions: each linear layer passes its input and the gradient of its
output on to W. In earlier versions the compiled backward did all of the work in I and left W empty.

Hanayo with four waves needs more layers. With eight on each rank and all else as above:

{deep}

For W = 4, where an action takes about a millisecond, torch's runtime takes {deep_gain:.2f} times as long as ours.
Going from two waves to four takes {wave_gain:.0%} off our step and adds {wave_loss:.0%} to torch's.

By the first of these tables, recordings need {memory_least:.2f} to {memory_most:.2f} times the memory on the fullest
rank, so the aim of 1.15 is met. All actions of a lane share one memory, and a later action uses what an earlier one has
freed. A recorded action also sends its result from where it lies, and its input arrives where it reads it. When this
table was last measured, both were copied, and the script set gradients to zero before a step where training drops them,
so that recordings kept a copy of them: Interleaved-ZB then needed 1.17 times as much. Before that, every micro-batch in
flight had buffers of its own, and it needed 2.37 times as much.

That table counts the weights of all candidates of a process, and gaps between tensors only for recordings. So
Interleaved-ZB, which had the highest ratio, was also run alone, once recorded and once not, with all gaps counted as
torch reserves them ([log](../log.md)): 1.92 instead of 1.87 GB on the fullest rank, 1.02 times as much, and 1.04 and
1.08 times as much on two others. If several schedules run in one process, one after the other, the ratios grow: 1.05
for the first, 1F1B, and 1.21 for the fourth, Interleaved-ZB, most likely because of what the earlier ones leave behind.

One process on the whole GPU, compiled and recorded, takes {single:.1f} ms for the same step (32 layers, 16
micro-batches). That is {single_speed:,.0f} tokens/s on 132 multiprocessors. ZB-V on eight workers has
{pipeline_speed:,.0f} tokens/s on {pipeline_processors} of them, {share:.2f} times as much a multiprocessor, most
likely because a micro-batch of 1,024 tokens does not fill the whole GPU. With larger micro-batches, which one process
plans for itself, [eight planned workers](h200.md#one-process-beside-eight-planned-workers) have 0.86 to 0.91 of its
speed a multiprocessor.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page, made of the results."""
    alone = rows_of("compiled-200m.json") + rows_of("compiled-1b.json")
    wide = rows_of("compiled-wide.json")
    deep = rows_of("compiled-deep.json")
    deep_times = {row["name"]: row["times"] for row in deep}
    pipeline = rows_of("compiled-pipeline.json")
    single = rows_of("compiled-single.json")[0]["times"]["recorded"][0]
    ratios = [row["candidates"]["recorded"]["over_plain"][0] for row in alone]
    times = {row["name"]: row["times"]["recorded"][0] for row in pipeline}
    memory = [
        max(row["memory"]["recorded"]) / max(row["memory"]["ours"]) for row in pipeline
    ]
    return TEXT.format(
        alone=_alone_table(alone + wide),
        pipeline=_pipeline_table(pipeline),
        least=min(ratios),
        most=max(ratios),
        split_gain=1 - min(times["zb-v"], times[INTERLEAVED]) / times["1f1b"],
        memory_least=min(memory),
        memory_most=max(memory),
        utilization=_utilization(alone[-1]),
        step=1e3 * alone[-1]["candidates"]["recorded"]["seconds"][0],
        plain_kernels=1e3 * alone[-1]["candidates"]["plain"]["kernel_seconds"],
        kernel_gain=kernel_gain(alone[-1]),
        casts=_casts_rows(alone + wide),
        deep=_pipeline_table(deep),
        deep_gain=deep[0]["over_recorded"]["torch"][0],
        wave_gain=_less(deep_times, "recorded"),
        wave_loss=-_less(deep_times, "torch"),
        single=1e3 * single,
        single_speed=STEP_TOKENS / single,
        pipeline_speed=STEP_TOKENS / times["zb-v"],
        pipeline_processors=PIPELINE_PROCESSORS,
        share=(STEP_TOKENS / times["zb-v"] / PIPELINE_PROCESSORS)
        / (STEP_TOKENS / single / 132),
    )


def kernel_gain(row: Row) -> float:
    """The kernels of the plain loop over our whole step."""
    candidates = row["candidates"]
    ours: float = candidates["recorded"]["seconds"][0]
    return float(candidates["plain"]["kernel_seconds"] / ours)


def _less(times: dict[str, dict[str, list[float]]], who: str) -> float:
    """How much less time four waves take than two."""
    return 1 - times["hanayo W=4"][who][0] / times["hanayo W=2"][who][0]


def _casts_rows(rows: list[Row]) -> str:
    """Steps without recordings, with plain autocast and with weights that are cast once."""
    lines = []
    for row in rows:
        count = row["microbatches"]
        autocast, ours = (
            row["candidates"][who]["seconds"][0] for who in ("autocast", "ours")
        )
        lines.append(
            f"| {_size(row)}, {count} micro-batch{'es' if count > 1 else ''} "
            f"| {1e3 * autocast:.1f} ms | {1e3 * ours:.1f} ms | {autocast / ours:.2f} |"
        )
    return "\n".join(lines)


def _size(row: Row) -> str:
    """The parameters of a model, and its width if it has few wide layers."""
    wide = ", width 4,096" if row["model"] == "wide" else ""
    return f"{row['parameters'] / 1e6:,.0f} M{wide}"


def _utilization(row: Row) -> float:
    """The share of the GPU's peak, as `penstock train` counts it."""
    config, _ = MODELS[row["model"]]
    peak = peak_flops("NVIDIA H200")
    assert peak is not None
    speed: float = row["candidates"]["recorded"]["tokens_per_second"]
    return speed * flops_per_token(config, row["tokens"] // SEQUENCES) / peak


def _alone_table(rows: list[Row]) -> str:
    lines = [
        "| model | micro-batches | | tokens/s | over the plain loop | peak memory |",
        "|---|--:|---|--:|--:|--:|",
    ]
    for row in rows:
        size = _size(row)
        for key, name in NAMES.items():
            one = row["candidates"][key]
            middle, low, high = one["over_plain"]
            lines.append(
                f"| {size} | {row['microbatches']} | {name} "
                f"| {one['tokens_per_second']:,.0f} "
                f"| {middle:.2f} ({low:.2f}-{high:.2f}) "
                f"| {one['peak_bytes'] / 1e9:.1f} GB |"
            )
    return "\n".join(lines)


def _pipeline_table(rows: list[Row]) -> str:
    lines = [
        "| schedule | torch | ours | ours, recorded | torch over recorded | simulated "
        "| memory | recorded |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        times = {key: f"{1e3 * value[0]:.1f} ms" for key, value in row["times"].items()}
        ratio = "-"
        if "torch" in row["over_recorded"]:
            middle, low, high = row["over_recorded"]["torch"]
            ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        lines.append(
            f"| {row['name']} | {times.get('torch', '-')} | {times['ours']} "
            f"| {times['recorded']} | {ratio} | {1e3 * row['simulated']:.1f} ms "
            f"| {max(row['memory']['ours']) / 1e9:.2f} GB "
            f"| {max(row['memory']['recorded']) / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
