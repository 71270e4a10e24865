"""What to write instead of commands and options that are gone, or that other programs have."""

from __future__ import annotations

COMMANDS = {
    "help": "use penstock --help, penstock COMMAND --help",
    "completion": "use penstock --install-completion",
    "list": "use penstock draw, without a schedule",
    "compare": "use penstock draw 1f1b zb-v -o compare.html",
    "report": "use penstock explain RUN",
    "paths": "use penstock lab paths --cluster cluster.toml",
    "testbed": "use penstock lab testbed",
    "tokenizer": "use --set data.tokenizer=bpe:16000, which trains one",
}
SHAPE = "use the shape of a schedule, as in hanayo:waves=2,slices=2,split"
UNIT_COST = "use --cost F=1,B=2,comm=0.05,sum=1,channels=1"
SYNTHETIC = "use --cost F=0.5,message=8e6,held=1e6,weights=1e8,gradients=1e8"
OPTIONS = {
    "--ranks": "use --pp",
    **dict.fromkeys(
        ("--waves", "--chunks", "--slices", "--skips", "--copies", "--split"), SHAPE
    ),
    **dict.fromkeys(("--backward", "--comm", "--sum", "--channels"), UNIT_COST),
    "--forward": "use --cost F=1",
    **dict.fromkeys(("--message", "--held", "--gradients"), SYNTHETIC),
    "--weights": "use --limit weights=2",
    "--profile": "use --cost profile.json",
    "--accept-error": "a profile with a large error only warns",
    "--gpu": "use --cost h100",
    "--tokens": "use --seq-len, --max-tokens of `generate`, or --set data.seq_len=512",
    "--stages": "use --limit stages=2",
    "--parts": "use --stages",
    "--granularity": "it follows from the device",
    "--preset": "use the name of the preset in the place of the config, as in penstock train gpt2",
    "--resume-if-any": "use --resume=auto",
    "--sample": "a run in a terminal ends with a sample",
    "--exit-after": "use --omit with the layers after it",
    "--draws": "8 subsets are drawn",
    "--rounds": "use --quick for fewer",
    "--slots": "use slots in the cluster.toml",
    "--memory": "use memory in the cluster.toml",
    "--data-nodes": "use --stages 4:data_nodes=2",
    "--sum-messages": "use --sums planned:int8",
    "--slack": "use --rotate 0.1",
    "--share": "use --skip 0.25",
    "--accumulate": "use --set run.accumulate=2",
    "--rule": "a plan is checked by the rules that it was planned with",
    "--folder": "what a worker receives is removed at the end",
    **dict.fromkeys(
        ("--hf", "--width", "--layers", "--heads", "--kv-heads", "--inner", "--vocab"),
        "name the model, as in penstock profile llama-1b, and use --set model.layers=4",
    ),
    **dict.fromkeys(
        ("--device", "--dtype", "--autocast", "--graphs", "--threads"),
        "use --set, as in --set run.device=cuda",
    ),
}
