"""Any optimizer of torch.optim trains through a pipeline as in one process, and any ranks go on from its checkpoint."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.config import ModelConfig, OptimizerConfig, ParallelConfig, ParameterGroup
from penstock.errors import ConfigError, PenstockError, RunError
from penstock.formats.config_toml import apply_changes, dump_config, load_config
from penstock.measure.probe import Probe, footprint
from penstock.models import token_loss, valid_tokens
from penstock.runtime import run_threads
from penstock.train.before.capacity import load_of, needs_of
from penstock.train.before.profile import ProfileRequest, subjects_of
from penstock.train.data.loader import BatchShape, Loader
from penstock.train.history import read_rows
from penstock.train.loop import Trainer
from penstock.train.optimizer import (
    Optimizer,
    check_groups,
    check_optimizer,
    find_slots,
    known_optimizers,
    parameter_numbers,
)
from penstock.train.weights import draw_parameters, hold_whole, sizes_of
from trainings import SMALL, VOCAB, apart, corpus, job_of, train

pytestmark = pytest.mark.numerics

TINY = replace(
    SMALL,
    model=ModelConfig(
        layers=4,
        hidden_size=8,
        heads=2,
        kv_heads=1,
        intermediate_size=12,
        tie_embeddings=True,
    ),
)
PLAIN = (
    *(
        "optimizer.lr_schedule=constant",
        "optimizer.warmup_steps=0",
        "optimizer.lr=0.003",
    ),
    "run.checks=forecast,memory",
)
STEPS = 4


def by_hand(build, steps: int = STEPS) -> list[float]:
    """The losses of torch's own optimizers on the whole model, with clipping as SMALL has it."""
    holding = hold_whole(sizes_of(TINY.model, VOCAB, TINY.data.seq_len))
    draw_parameters(holding, TINY.run.seed)
    optimizers = build(dict(holding.parameters))
    loader = Loader(corpus(TINY), BatchShape(TINY.data.global_batch, 1), TINY.run.seed)
    found = []
    for _ in range(steps):
        batch = loader.step()[0]
        loss = token_loss(holding.stages[0](batch.inputs[0]), batch.labels[0])
        (loss / valid_tokens(batch.labels[0])).backward()
        torch.nn.utils.clip_grad_norm_(
            holding.parameters.values(), SMALL.optimizer.clip_norm
        )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        found.append(float(loss.detach()) / valid_tokens(batch.labels[0]))
    return found


def matrices_and_vectors(named, decay: float = 0.1):
    return [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]


def of_class(kind, **options):
    return lambda named: [kind(matrices_and_vectors(named), lr=0.003, **options)]


def muon_and_adamw(named):
    hidden = [p for n, p in named.items() if n.startswith("layers.") and p.dim() == 2]
    others = {
        n: p for n, p in named.items() if not (n.startswith("layers.") and p.dim() == 2)
    }
    adamw = torch.optim.AdamW(
        matrices_and_vectors(others), lr=0.003, betas=(0.9, 0.95), eps=1e-8
    )
    return [torch.optim.Muon(hidden, lr=0.003, weight_decay=0.1), adamw]


def rprop(named):
    return [torch.optim.Rprop(named.values(), lr=0.003)]


@pytest.mark.parametrize(
    ("name", "options", "build"),
    [
        (
            "SGD",
            "{momentum = 0.9, dampening = 0.5}",
            of_class(torch.optim.SGD, momentum=0.9, dampening=0.5),
        ),
        ("Muon", "{}", muon_and_adamw),
        ("Adafactor", "{}", of_class(torch.optim.Adafactor)),
        ("Rprop", "{}", rprop),
        (
            "AdamW",
            "{amsgrad = true}",
            of_class(torch.optim.AdamW, amsgrad=True, betas=(0.9, 0.95)),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isalpha() else "",
)
def test_other_ranks_go_on_as_one_process_would(name, options, build, tmp_path):
    changes = (*PLAIN, f"optimizer.name={name}", f"optimizer.options={options}")
    job = job_of(tmp_path, "1f1b", *changes, "run.steps=2", config=TINY)
    train(replace(job, config=replace(job.config, model=TINY.model)))
    rows = train(
        job_of(
            tmp_path,
            "hanayo",
            *changes,
            f"run.steps={STEPS}",
            config=TINY,
            resume=True,
            ranks=1,
            waves=1,
        )
    )
    assert apart(rows, by_hand(build)) < 1e-5
    assert rows[-1].loss != rows[0].loss


def test_the_state_of_every_optimizer_is_known_before_its_first_step():
    for name, kind in known_optimizers().items():
        slots = find_slots(kind, OptimizerConfig(name=name, lr=0.1))
        parameter = torch.nn.Parameter(torch.ones(4, 6))
        parameter.grad = torch.ones_like(parameter)
        optimizer = kind([parameter], lr=0.1)
        optimizer.step()
        state = {k: v for k, v in optimizer.state[parameter].items() if v is not None}
        assert {slot.name: slot.blank(parameter).shape for slot in slots} == {
            key: value.shape for key, value in state.items()
        }, name


# ---------------------------------------------------------------- groups
GROUPS = (
    "optimizer.groups=[{match='embed*', frozen=true},"
    "{match='layers.0.*', lr=0.0}, {match='*norm*', lr=0.01, weight_decay=0.5}]"
)


def grouped(named):
    embed, first, norms, rest = [], [], [], []
    for name, parameter in named.items():
        if name.startswith("embed"):
            embed.append(parameter.requires_grad_(False))
        elif name.startswith("layers.0."):
            first.append(parameter)
        elif "norm" in name:
            norms.append(parameter)
        else:
            rest.append(parameter)
    groups = [
        {"params": first, "lr": 0.0},
        {"params": norms, "lr": 0.01, "weight_decay": 0.5},
        {"params": rest, "weight_decay": 0.1},
    ]
    return [torch.optim.AdamW(groups, lr=0.003, betas=(0.9, 0.95))]


def test_groups_have_their_own_rate_and_decay_and_frozen_ones_stay(tmp_path):
    """The frozen matrix is embedding and output at once, on two ranks with two copies each."""
    job = job_of(
        tmp_path,
        "1f1b",
        *PLAIN,
        GROUPS,
        "run.steps=2",
        config=TINY,
        copies=2,
        microbatches=2,
    )

    drawn = hold_whole(job.sizes)
    draw_parameters(drawn, TINY.run.seed)

    def run(comm):
        trainer = Trainer(job, comm)
        trainer.run()
        held = trainer.holding.parameters.items()
        return {n for n, p in held if torch.equal(p, drawn.parameters[n])}

    ranks = job.plan.schedule.ranks
    kept = set().union(*run_threads(ranks, run, patience=300))
    expected = {n for n in drawn.parameters if n.startswith(("embed", "layers.0."))}
    assert kept == expected
    assert apart(read_rows(tmp_path), by_hand(grouped, 2)) < 1e-5
    # Thawed parameters begin with new state.
    thawed = apply_changes(job.config, ["optimizer.groups=[]", "run.steps=3"])
    assert len(train(replace(job, config=thawed, resume=True))) == 3


def test_matrices_decay_and_vectors_do_not():
    matrix, vector = (nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (2,)))
    named = {"up.weight": matrix, "up.bias": vector}
    (kind,) = Optimizer(named, OptimizerConfig(weight_decay=0.2)).kinds
    decays = [(group["weight_decay"], group["params"]) for group in kind.param_groups]
    assert decays == [(0.2, [matrix]), (0.0, [vector])]


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path):
    train(job_of(tmp_path, "1f1b", *PLAIN, "run.steps=1", config=TINY, ranks=1))
    other = job_of(
        tmp_path, "1f1b", "optimizer.name=SGD", config=TINY, resume=True, ranks=1
    )
    with pytest.raises(RunError, match=r"state of AdamW .* but this run has SGD"):
        train(other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimizer.name=adam", "did you mean 'Adam'"),
        ("optimizer.name=LBFGS", "computes the loss several times"),
        ("optimizer.options={momentom=1}", "AdamW has no argument 'momentom'"),
        ("optimizer.options={lr=1}", "set optimizer.lr instead"),
        ("optimizer.options={fused=true}", "which the trainer decides"),
        (
            "optimizer.name=SGD;optimizer.options={momentum=-1}",
            "SGD refuses optimizer.options: Invalid momentum",
        ),
        ("optimizer.groups=[{match='*.bias'}]", "no parameter of the model matches"),
        ("optimizer.groups=[{match='*', frozen=true}]", "nothing would be trained"),
        ("optimizer.groups=[{match='*'}, {match='a*'}]", "the first match counts"),
        ("optimizer.groups=[{match='*', lrs=1}]", "did you mean 'lr'"),
        ("optimizer.groups=[{match='*', lr=-1}]", "at least 0"),
        ("optimizer.groups=[{lr=1}]", "needs a match"),
        ("optimizer.lr_schedule=cosin", "did you mean 'cosine'"),
        ("lora.rank=2", "name its folder in model.path"),
        ("lora.rank=2;parallel.dp_shard=2", "use parallel.dp_replicate instead"),
    ],
)
def test_what_cannot_train_is_refused_by_name(change, message):
    with pytest.raises(PenstockError, match=message):
        check(change.split(";"))


def check(changes: list[str]) -> None:
    config = load_config("", changes=changes)
    check_optimizer(config.optimizer, config.parallel)
    check_groups(["a.weight", "b.weight"], config.optimizer)


def test_optimizers_of_whole_matrices_refuse_a_mesh():
    with pytest.raises(ConfigError, match="needs whole matrices"):
        check_optimizer(OptimizerConfig(name="Muon"), ParallelConfig(dp_shard=2))


def test_options_and_groups_survive_a_config_file():
    changes = [GROUPS, "optimizer.options={momentum=0.5}"]
    config = load_config("", changes=[*changes, "optimizer.options.nesterov=true"])
    assert config.optimizer.options == (("momentum", 0.5), ("nesterov", True))
    assert config.optimizer.groups[1] == ParameterGroup("layers.0.*", 0.0)
    assert load_config(dump_config(config)) == config
    text = '[optimizer.options]\nmomentum = 0.5\n[[optimizer.groups]]\nmatch = "*.bias"'
    assert load_config(text).optimizer.groups == (ParameterGroup("*.bias"),)


# ---------------------------------------------------------------- memory
def test_memory_counts_the_state_of_the_optimizer():
    sizes = sizes_of(SMALL.model, VOCAB, SMALL.data.seq_len)

    def numbers(*changes):
        return parameter_numbers(apply_changes(SMALL, changes).optimizer, sizes)

    assert numbers().layers == 4
    sgd = numbers("optimizer.name=SGD")
    assert (sgd.layers, sgd.ends) == (2, 2)
    muon = numbers("optimizer.name=Muon")
    assert (muon.layers, muon.ends) == (3, 4)
    assert numbers("optimizer.name=Adafactor").layers == 2 + 2 / sizes.width
    frozen = numbers("optimizer.groups=[{match='layers.*', frozen=true}]")
    assert (frozen.layers, frozen.ends, frozen.layers_trained) == (1, 4, 0)
    job = job_of(None, "1f1b")
    plan = replace(job.plan, partition=job.partition)
    load = load_of(job.config, plan, sizes)
    adamw = [need.weights for need in needs_of(load)]
    light = [need.weights for need in needs_of(replace(load, numbers=sgd))]
    assert light == pytest.approx([one / 2 for one in adamw])


def test_a_measured_profile_has_the_state_of_the_optimizer():
    sizes = sizes_of(SMALL.model, VOCAB, SMALL.data.seq_len)

    def held(**settings):
        request = ProfileRequest(sizes, 8, optimizer=OptimizerConfig(**settings))
        return footprint(Probe(subjects_of(request).layer)).weights

    adamw = held()
    assert held(name="SGD") == pytest.approx(adamw / 2, rel=0.01)
    frozen = (ParameterGroup("layers.*", frozen=True),)
    assert held(groups=frozen) == pytest.approx(adamw / 4, rel=0.01)
