"""The processes of tests/runtime/test_process.py; a launcher runs the script `process_workers.py NAME [RANK]`."""

from __future__ import annotations

import copy
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import Schedule, make
from penstock.errors import RunError
from penstock.ir import lower
from penstock.runtime import Batch, Executor, ProcessComm, batch_of
from penstock.runtime.process import launch
from penstock.runtime.process.launch import after_first, finish, init, spawn
from penstock.runtime.process.watchdog import ALARM_SIGNAL, watching
from penstock.runtime.replicas import groups_of
from pipelines import own_stages

WORDS, WIDTH = 17, 8
Trick = Callable[[Tensor], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tricky(nn.Module):
    """A part that fails in a chosen way in one of its forwards."""

    def __init__(self, part: nn.Module, trick: Trick, call: int = 3) -> None:
        super().__init__()
        self.part, self.trick, self.call, self.calls = part, trick, call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.call:
            self.trick(x)
        return self.part(x)


def model_of(parts: int) -> nn.Sequential:
    """Return a model that is the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        *(Block() for _ in range(parts)),
        nn.Linear(WIDTH, WORDS),
    ).double()


def part_of(model: nn.Sequential, part: int) -> nn.Module:
    parts = len(model) - 2
    return model[
        0 if part == 0 else part + 1 : part + 2 if part < parts - 1 else part + 3
    ]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


def batch_for(schedule: Schedule, step: int = 0) -> Batch:
    """Return micro-batches of different sizes, whose tokens change with each step."""
    draw = torch.Generator().manual_seed(step)
    sizes = [
        (1 + (m + step) % 3, 4 + 3 * step) for m in range(len(schedule.microbatches))
    ]
    inputs, labels = (
        [torch.randint(0, WORDS, size, generator=draw) for size in sizes]
        for _ in range(2)
    )
    return batch_of(inputs, labels)


def unsplit(schedule: Schedule, model: nn.Sequential, batch: Batch) -> float:
    """Return the loss of the unsplit model, and add its gradients up in the model."""
    total = 0.0
    for number, x in enumerate(batch.inputs):
        for stage in schedule.microbatches[number].path:
            x = part_of(model, schedule.stages[stage].part)(x)  # noqa: PLW2901
        loss = loss_of(x, batch.labels[number]) / batch.valid
        loss.backward()
        total += float(loss.detach())
    return total


def executor_of(
    schedule: Schedule,
    comm: ProcessComm,
    model: nn.Sequential,
    trick: Trick | None = None,
) -> Executor:
    parts = [part_of(model, part) for part in range(schedule.parts)]
    stages = own_stages(schedule, parts, comm.rank)
    if trick is not None:
        stages = {n: Tricky(module, trick) for n, module in stages.items()}
    comm.prepare(groups_of(schedule))
    return Executor(lower(schedule), stages, comm, loss_of)


def state_width(executor: Executor) -> None:
    """Let the stages say what they return, so that nobody has to try them before the first step."""
    for module in executor.modules.values():
        module.hidden_width = WIDTH


# ---------------------------------------------------------------- what spawned workers do
def compare(
    comm: ProcessComm, cases: list[tuple[str, dict[str, int]]]
) -> list[tuple[str, float, float]]:
    """Return the largest difference of a gradient and of a loss, for each schedule."""
    return [
        (f"{name} {shape}", *compare_one(comm, make(name, **shape)))
        for name, shape in cases
    ]


def compare_one(comm: ProcessComm, schedule: Schedule) -> tuple[float, float]:
    whole = model_of(schedule.parts)
    mine = copy.deepcopy(whole)
    executor = executor_of(schedule, comm, mine)
    parts = {stage.part for stage in schedule.stages if stage.rank == comm.rank}
    pairs = [
        pair
        for n in parts
        for pair in zip(
            *(part_of(m, n).parameters() for m in (mine, whole)), strict=True
        )
    ]
    wrong, wrong_loss = 0.0, 0.0
    with watching(executor):
        for step in range(3):
            mine.zero_grad()
            whole.zero_grad()
            batch = batch_for(schedule, step)
            wrong_loss = max(
                wrong_loss,
                abs(executor.step(batch).loss - unsplit(schedule, whole, batch)),
            )
            wrong = max(
                wrong,
                *(
                    float((p.grad - q.grad).abs().max())
                    for p, q in pairs
                    if q.grad is not None
                ),
            )
    return wrong, wrong_loss


def talk(comm: ProcessComm) -> dict[str, list[list[float]]]:
    """Send and sum tensors of unusual shapes and types."""
    other = 1 - comm.rank
    turned = torch.arange(6.0).reshape(2, 3).t()
    sends = [
        comm.send(turned, other),
        comm.send(torch.empty(0, 4), other),
        comm.send(torch.ones(1, 1), other),
    ]
    shapes = [(3, 2), (0, 4), (1, 1)]
    got = [
        comm.receive(shape, torch.float32, other).wait().tolist() for shape in shapes
    ]
    for sent in sends:
        sent.wait()
    table = torch.zeros(2, 3)
    comm.add(table.t()[1:], comm.everyone).wait()
    part = table.t()[:, 1]
    part += comm.rank + 1
    comm.add(part, comm.everyone).wait()
    empty = torch.empty(0)
    comm.add(empty, comm.everyone).wait()
    comm.barrier()
    return {"got": got, "summed": table.tolist()}


def group(comm: ProcessComm) -> tuple[list[float], list[str]]:
    """Create groups of some ranks twice, then sum over a missing group and over unequal groups."""
    groups = [(0, 2), (1, 2), (0, 1, 2)]
    for _ in range(2):
        comm.prepare(groups)
    sums = []
    for group in groups:
        value = torch.tensor([1.0 + comm.rank])
        if comm.rank in group:
            comm.add(value, group).wait()
        sums.append(float(value))
    errors = []
    for wrong in (
        lambda: comm.add(value, (7, 8)),
        lambda: comm.prepare([(0, 1, 2)[: 2 + comm.rank % 2], (1,)]),
    ):
        try:
            wrong()
        except RunError as error:
            errors.append(str(error))
    return sums, errors


def leave(comm: ProcessComm) -> tuple[list[str], list[str]]:
    """Sum something in two groups, and leave; return the names of gloo's threads before and after."""
    comm.prepare([(0, 1)])
    for one in (comm, comm.second_connection()):
        one.add(torch.ones(3), (0, 1)).wait()

    def threads() -> list[str]:
        names = [file.read_text() for file in Path("/proc/self/task").glob("*/comm")]
        return [name for name in names if "gloo_runloop" in name]

    before = threads()
    launch._leave(comm)
    return before, threads()


def prepare(comm: ProcessComm, folder: str) -> bool:
    """Let rank 0 take longer than the patience of the others; return whether all saw its result."""
    made = Path(folder) / "made"

    def slowly() -> None:
        time.sleep(3.0)
        made.touch()

    after_first(comm, slowly)
    return made.exists()


def mismatch(comm: ProcessComm, rows: tuple[int, int]) -> None:
    """Give rank 0 another number of rows than rank 1, in a step that does not compare batches."""
    schedule = make("1f1b", ranks=2, microbatches=4)
    executor = executor_of(schedule, comm, model_of(2))
    state_width(executor)
    with watching(executor):
        for count in (min(rows), rows[comm.rank]):
            x = torch.zeros(count, 5, dtype=torch.long)
            executor.step(batch_of([x] * 4, [x] * 4))


def fail(comm: ProcessComm, how: str) -> int:
    """End rank 1 while the others wait for it."""
    comm.barrier()
    if comm.rank == 1:
        if how == "raise":
            raise ValueError("the cat is on the keyboard")
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    return comm.rank


def die_while_reporting(comm: ProcessComm) -> None:
    """Let rank 1 be killed after it has sent the head of its result, and four bytes of a hundred."""

    def send_half(pipe: Connection, success: bytes, raw: bytes) -> None:
        pipe.send_bytes(success)
        os.write(pipe.fileno(), (100).to_bytes(4, "big") + raw[:4])
        os.kill(os.getpid(), signal.SIGKILL)

    if comm.rank == 1:
        launch._send_outcome = send_half


def sleepers(comm: ProcessComm, folder: str) -> None:
    """Write the process id to a file, then sleep."""
    with open(os.path.join(folder, str(comm.rank)), "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)


def call_sleepers(folder: str) -> None:
    spawn(2, sleepers, folder)


def sleep_or_raise(comm: ProcessComm, folder: str) -> None:
    """Let rank 0 sleep, and rank 1 fail after rank 0 has fallen asleep."""
    comm.barrier()
    if comm.rank == 0:
        sleepers(comm, folder)
    with open(os.path.join(folder, str(comm.rank)), "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(os.path.join(folder, "0")):
        time.sleep(0.02)
    raise ValueError("awake")


# ---------------------------------------------------------------- what a script under a launcher does
def sleep(_: Tensor) -> None:
    time.sleep(600)


def sleep_deaf(_: Tensor) -> None:
    signal.signal(ALARM_SIGNAL, signal.SIG_IGN)
    time.sleep(600)


def signal_myself(number: signal.Signals) -> Trick:
    def trick(_: Tensor) -> None:
        time.sleep(1.5)  # until the watchdog has reported where this rank is
        os.kill(os.getpid(), number)

    return trick


def blunder(_: Tensor) -> None:
    raise IndexError("out of cheese")


TRICKS: dict[str, Trick | None] = {
    "well": None,
    "sleep": sleep,
    "deaf": sleep_deaf,
    "kill": signal_myself(signal.SIGKILL),
    "stop": signal_myself(signal.SIGSTOP),
    "raise": blunder,
}


def train(name: str, culprit: int) -> None:
    """Run three steps of 1F1B; rank `culprit` fails in its third forward, as `name` says."""
    comm = init(patience=2.0 if name in ("sleep", "deaf") else 300.0)
    schedule = make("1f1b", ranks=comm.ranks, microbatches=8)
    trick = TRICKS[name] if comm.rank == culprit else None
    executor = executor_of(schedule, comm, model_of(schedule.parts), trick)
    state_width(executor)
    with watching(executor, silence=3.0 if name == "stop" else 30.0):
        losses = [executor.step(batch_for(schedule, step)).loss for step in range(3)]
    sys.stdout.write(
        f"rank {comm.rank} of {comm.ranks} on {dist.get_backend()}: {losses}\n"
    )
    finish()


def train_as(environment: dict[str, str], errors: str, name: str, culprit: int) -> None:
    """Do the same in a process that was not started as a script."""
    os.environ.update(environment)
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    train(name, culprit)


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1)
