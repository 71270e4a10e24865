"""Times embedding, layer and head on a whole GPU: the measurements behind `penstock.cost.gpus`.

    python benchmarks/gpu/whole.py docs/results/h200/whole.json

Llama and GPT of several widths, as the trainer runs them: float32 weights, computing in bfloat16,
with recorded actions and once without. The output has one profile for each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from penstock.families import GPTConfig, LlamaConfig
from penstock.formats.profile_json import dump_profile
from penstock.train.before.profile import ProfileRequest, measure_request

TOKENS = 4096
VOCAB = 32_000
POINTS = (
    (128, 0),
    (128, 3968),
    (256, 0),
    (512, 0),
    (512, 1536),
    (512, 3584),
    (1024, 0),
    (2048, 0),
    (2048, 2048),
    (4096, 0),
)


def sizes_of(family: str, width: int) -> LlamaConfig | GPTConfig:
    """The usual sizes of a model of this width, with heads of 64 or 128 features."""
    heads = width // (128 if width >= 2048 else 64)
    if family == "gpt":
        return GPTConfig(
            vocab=VOCAB,
            width=width,
            layers=16,
            heads=heads,
            inner=4 * width,
            positions=TOKENS,
        )
    inner = {1024: 2816, 2048: 5632, 4096: 11264}[width]
    return LlamaConfig(
        vocab=VOCAB, width=width, layers=16, heads=heads, kv_heads=heads, inner=inner
    )


def main(output: Path) -> None:
    """Measure all cases, and write them after each."""
    cases = [
        ("llama", 1024, True),
        ("llama", 2048, True),
        ("llama", 4096, True),
        ("gpt", 2048, True),
        ("llama", 1024, False),
        ("llama", 4096, False),
    ]
    rows = []
    for family, width, recorded in cases:
        request = ProfileRequest(
            sizes_of(family, width),
            TOKENS,
            device="cuda",
            autocast="bfloat16",
            rounds=3,
            graphs=recorded,
            where=POINTS,
        )
        profile = measure_request(None, request)
        rows.append(
            {
                "family": family,
                "width": width,
                "recorded": recorded,
                "profile": json.loads(dump_profile(profile)),
            }
        )
        output.write_text(json.dumps({"rows": rows}))
        print(family, width, recorded, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
