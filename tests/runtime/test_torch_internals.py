"""One test per private name of torch that the package uses: a new version that changes it fails here, by name."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import penstock
from penstock import lower, make
from penstock import torch_internals as internals
from penstock.models import token_loss
from penstock.runtime import Executor, ThreadComm, cut_batch, prove
from penstock.runtime.backward import accumulate
from penstock.runtime.comm.thread import Hub

INTERNALS = "torch_internals.py"
SEEN_WORDS = {
    name.rpartition(".")[2] for names in internals.SEEN.values() for name in names
}
# What begins with an underscore and is not torch's: of named tuples and `os`, of transformers and torchtitan, our own.
OTHER_WORDS = {
    *("_asdict", "_fields", "_replace", "_exit"),
    *("_attn_implementation", "_owner"),
    "_accepts",
}
# `penstock.models` may not import `penstock.runtime`.
EXCEPTIONS = {
    ("models/hf_part.py", "_modules"),
    ("models/hf_trial.py", "_backward_hooks"),
    ("models/hf_trial.py", "_backward_pre_hooks"),
    ("models/hf_trial.py", "_forward_hooks"),
    ("models/hf_trial.py", "_forward_pre_hooks"),
    ("models/split.py", "_apply"),
}


@pytest.fixture
def lone_process():
    """A process group of one process, without a network."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


# ---------------------------------------------------------------- where private names are
def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__")


def private_words(tree: ast.AST) -> set[str]:
    """What looks like a private name of another package: imports, attributes of others, and names in strings."""
    words = set()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                if module.split(".")[0] == "torch":
                    words |= {*module.split("."), *(name.name for name in names)}
            case ast.Import(names=names):
                for name in names:
                    words |= {*name.name.split(".")}
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=word):
                words |= {word} & SEEN_WORDS
            case ast.Attribute(attr=word):
                words.add(word)
            case ast.Constant(value=str(text)):
                words |= {text} & SEEN_WORDS
    return {word for word in words if is_private(word)}


def sources() -> dict[str, ast.AST]:
    """The files of the package and the benchmarks that may contain a private word."""
    package = Path(penstock.__file__).parent
    benchmarks = package.parents[1] / "benchmarks"
    files = [(package, file) for file in package.rglob("*.py")]
    files += [(benchmarks.parent, file) for file in benchmarks.rglob("*.py")]
    return {
        file.relative_to(root).as_posix(): ast.parse(text)
        for root, file in files
        if re.search(r"[.\"' ]_[a-zA-Z]", text := file.read_text())
    }


def test_no_other_file_uses_a_private_name_of_torch():
    found = {
        (file, word)
        for file, tree in sources().items()
        if file != INTERNALS
        for word in private_words(tree) - OTHER_WORDS
    }
    assert found == EXCEPTIONS


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("from torch.nn.modules.batchnorm import _NormBase", "_NormBase"),
        ("import torch._dynamo", "_dynamo"),
        ("from torch._C import Generator", "_C"),
        ("one._version", "_version"),
        ("self._call_impl(x)", "_call_impl"),
        ("vars(module)['_modules']", "_modules"),
        ("schedules._a_name_nobody_has_seen", "_a_name_nobody_has_seen"),
    ],
)
def test_a_private_name_is_found_however_it_is_written(code, word):
    assert word in private_words(ast.parse(code))


def test_the_versions_of_every_private_name_are_written_down():
    parts = {
        part
        for names in internals.SEEN.values()
        for name in names
        for part in name.split(".")
    }
    tree = sources()[INTERNALS]
    table = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "SEEN"
    )
    table.value = ast.Constant(None)
    used = private_words(tree)
    assert used <= parts
    written = set(re.findall(r"\w+", ast.unparse(tree)))
    assert {word for word in SEEN_WORDS if is_private(word)} <= used | {
        word for _, word in EXCEPTIONS
    }
    assert written | {word for _, word in EXCEPTIONS} >= SEEN_WORDS


def exists(name: str) -> bool:
    """Whether the installed torch has a name, as an attribute or, if instances have it, in the code of a class."""
    parts = name.split(".")
    place: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:-1], start=2):
        if not hasattr(place, part):
            importlib.import_module(".".join(parts[:number]))
        place = getattr(place, part)
    if hasattr(place, parts[-1]):
        return True
    return bool(re.search(rf"\b{parts[-1]}\b", inspect.getsource(place)))


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


@pytest.mark.parametrize("versions", internals.SEEN, ids="-".join)
def test_private_names_exist_in_the_versions_in_which_they_were_seen(versions):
    first, last = map(version_of, versions)
    due = first <= version_of(torch.__version__) <= last
    names = internals.SEEN[versions]
    assert {name: exists(name) for name in names} == dict.fromkeys(names, due)


# ---------------------------------------------------------------- autograd
def test_walk_back_computes_what_backward_does():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    unused = torch.tensor(1.0, requires_grad=True)
    for _ in range(2):
        internals.walk_back((x * x, x + 0), (torch.ones(2), torch.ones(2)))
    assert x.grad.tolist() == [2 * (2.0 + 1), 2 * (4.0 + 1)]
    assert unused.grad is None


def test_the_version_of_a_gradient_changes_when_it_is_written():
    gradient = torch.zeros(2)
    before = internals.gradient_version(gradient)
    assert internals.gradient_version(gradient) == before
    gradient += 1
    assert internals.gradient_version(gradient) != before
    assert internals.gradient_version(None) == (0, 0)


def test_both_kinds_of_gradient_hooks_are_found():
    assert not internals.has_gradient_hooks(nn.Parameter(torch.zeros(2)))
    hooked = nn.Parameter(torch.zeros(2))
    hooked.register_hook(lambda gradient: gradient)
    assert internals.has_gradient_hooks(hooked)
    accumulated = nn.Parameter(torch.zeros(2))
    accumulated.register_post_accumulate_grad_hook(lambda parameter: None)
    assert internals.has_gradient_hooks(accumulated)


# ---------------------------------------------------------------- many tensors at once
def test_zero_all_clears_every_tensor():
    tensors = [torch.ones(2), torch.ones(3)]
    internals.zero_all(tensors)
    assert all(not tensor.any() for tensor in tensors)


def test_copy_all_casts_to_the_type_of_each_target():
    targets = [torch.zeros(2, dtype=torch.bfloat16), torch.zeros(1)]
    internals.copy_all(targets, [torch.tensor([1.0, 2.0]), torch.tensor([3.0])])
    assert [target.tolist() for target in targets] == [[1.0, 2.0], [3.0]]
    assert targets[0].dtype == torch.bfloat16


def test_norms_of_all_are_euclidean():
    norms = internals.norms_of_all([torch.tensor([3.0, 4.0]), torch.tensor([2.0])])
    assert [float(norm) for norm in norms] == [5.0, 2.0]


def test_multiply_all_works_in_place():
    tensors = [torch.ones(2), torch.ones(1)]
    internals.multiply_all(tensors, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[0.5, 0.5], [0.5]]


# ---------------------------------------------------------------- modules and torch.compile
def test_the_original_of_a_compiled_module_is_found():
    plain = nn.Linear(2, 2)
    assert internals.original_module(compiled(plain)) is plain
    assert internals.original_module(plain) is plain


def test_the_original_names_of_parameters_are_found():
    wrapped = nn.Sequential(compiled(nn.Linear(2, 2)))
    names = [internals.original_name(name) for name, _ in wrapped.named_parameters()]
    assert names == ["0.weight", "0.bias"]


def test_a_module_compiled_in_either_way_is_recognized():
    assert not internals.is_compiled(nn.Linear(2, 2))
    assert internals.is_compiled(compiled(nn.Linear(2, 2)))
    in_place = nn.Linear(2, 2)
    in_place.compile(backend="eager")
    assert internals.is_compiled(in_place)


def test_the_compiled_call_of_a_module_can_be_taken_away_and_put_back():
    module = nn.Linear(2, 2)
    assert internals.compiled_call(module) is None
    module.compile(backend="eager")
    call = internals.compiled_call(module)
    assert call is not None
    internals.set_compiled_call(module, None)
    assert not internals.is_compiled(module)
    internals.set_compiled_call(module, call)
    assert internals.compiled_call(module) is call


def test_own_buffers_can_be_changed_in_place():
    module = nn.BatchNorm1d(2)
    internals.own_buffers(module)["running_mean"] = torch.ones(2)
    assert module.running_mean.tolist() == [1.0, 1.0]


def test_own_layers_can_be_changed_in_place():
    module = nn.Sequential(nn.Linear(2, 2))
    internals.own_layers(module)["0"] = nn.Identity()
    assert isinstance(module[0], nn.Identity)


def test_the_attributes_of_every_module_are_known():
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    own = set(module.__dict__) - internals.module_attributes()
    assert own == {"in_features", "out_features"}


def test_dropout_layers_are_recognized():
    layers = (nn.Dropout(), nn.Dropout1d(), nn.Dropout2d(), nn.Dropout3d())
    assert all(internals.is_dropout(layer) for layer in layers)
    assert internals.is_dropout(nn.AlphaDropout())
    assert not internals.is_dropout(nn.Linear(2, 2))


# ---------------------------------------------------------------- sharded tensors and processes
def test_the_offset_of_a_share_is_found(lone_process):
    mesh = init_device_mesh("cpu", (1,))
    tensor = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    assert internals.share_offset(tensor) == (0, 0)
    assert internals.share_offset(torch.zeros(4, 2, 3)) == (0, 0, 0)


def test_finish_sharded_backward_sums_the_gradients_of_a_module(lone_process):
    module = nn.Linear(2, 2)
    sharded = fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    sharded.set_is_last_backward(False)
    sharded.set_requires_gradient_sync(False)
    sharded(torch.ones(1, 2)).sum().backward()
    assert module.weight.grad is None
    sharded.set_is_last_backward(True)
    sharded.set_requires_gradient_sync(True)
    internals.finish_sharded_backward(sharded)
    assert module.weight.grad is not None
    assert module.weight.grad.to_local().tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_widened_gradients_add_up_in_the_type_of_fsdps_sums(lone_process):
    module = nn.Linear(1, 1, bias=False)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
    assert internals.sums_in_other_type(sharded)
    assert not internals.sums_in_other_type(fully_shard(nn.Linear(1, 1), mesh=mesh))
    sharded.set_is_last_backward(False)
    sharded.set_requires_gradient_sync(False)
    sharded.set_reshard_after_backward(False)
    sharded(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()
    for _ in range(2):
        accumulate(module.weight, torch.full((1, 1), 2.0**-9, dtype=torch.bfloat16))
        internals.widen_sharded_gradients(sharded)
    sharded.set_is_last_backward(True)
    sharded.set_requires_gradient_sync(True)
    sharded.set_reshard_after_backward(True)
    internals.finish_sharded_backward(sharded)
    # In bfloat16, whose numbers after 1 are 2^-7 apart, the two would be lost.
    assert module.weight.grad.to_local().item() == 1 + 2.0**-8


def sharded_executor(split: int) -> tuple[Executor, nn.Module]:
    """A pipeline of one rank on a module that FSDP computes in bfloat16 and sums in float32."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    schedule = make("1f1b", ranks=1, microbatches=4, split=split)
    comm = ThreadComm(Hub(1), 0)
    return Executor(lower(schedule), {0: module}, comm, token_loss), module


def test_split_backwards_under_fsdp_are_proven_and_lose_no_precision(lone_process):
    internals.ignore_fsdp_view_warning()
    x = torch.arange(32).reshape(4, 8) % 8
    gradients = []
    for split in (0, 1):
        executor, module = sharded_executor(split)
        batch = cut_batch(x, x.roll(1, 1), 4)
        proof = prove(executor, batch)
        assert (proof.stages, proof.skipped) == (1, "")
        executor.step(batch)
        gradients.append([one.grad.to_local() for one in module.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_split_backward_keeps_gradients_in_the_type_that_parameters_ask_for():
    """From torch 2.15 on, FSDP asks for it; anybody may since 2.10."""
    gradients = []
    for split in (0, 1):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8)).bfloat16()
        for parameter in module.parameters():
            parameter.grad_dtype = torch.float32
        program = lower(make("1f1b", ranks=1, microbatches=4, split=split))
        executor = Executor(program, {0: module}, ThreadComm(Hub(1), 0), token_loss)
        x = torch.arange(32).reshape(4, 8) % 8
        executor.step(cut_batch(x, x.roll(1, 1), 4))
        gradients.append([parameter.grad for parameter in module.parameters()])
    assert {gradient.dtype for gradient in gradients[1]} == {torch.float32}
    assert all(map(torch.equal, *gradients))


def test_the_warning_of_fsdp_about_views_is_silenced():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        internals.ignore_fsdp_view_warning()
        warnings.warn("FSDP2-wrapped module 'x' returned a view", stacklevel=1)


def test_the_default_store_is_the_one_of_the_group(lone_process):
    internals.default_store().set("key", "value")
    assert internals.default_store().get("key") == b"value"


def test_the_types_of_a_backend_are_those_that_torch_uses():
    assert issubclass(internals.TCPStore, internals.Store)
    assert issubclass(internals.PrefixStore, internals.Store)
    assert internals.ProcessGroup is dist.ProcessGroup
    assert internals.ReduceOp is dist.ReduceOp
    for options in (
        internals.AllreduceOptions,
        internals.BroadcastOptions,
        internals.BarrierOptions,
    ):
        assert hasattr(options(), "timeout")
    assert internals.AllreduceOptions().reduceOp == dist.ReduceOp.SUM
    assert internals.BroadcastOptions().rootRank == 0
    assert hasattr(internals.Work, "wait")


def test_torch_reports_a_host_without_memory_with_a_known_text():
    with pytest.raises(RuntimeError) as refusal:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert internals.is_memory_error_text(str(refusal.value))
    assert not internals.is_memory_error_text("mat1 and mat2 have unequal shapes")


def test_texts_about_lost_connections_are_recognized():
    reset = "[gloo/transport/tcp/pair.cc:547] Connection reset by peer"
    assert internals.is_connection_error_text(reset)
    assert not internals.is_connection_error_text("mat1 and mat2 have unequal shapes")


# ---------------------------------------------------------------- devices
def test_torch_says_whether_the_cpu_supports_amx():
    assert internals.supports_amx() in (True, False)


def test_the_module_that_optimizers_load_is_named():
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert internals.MODULE_OF_OPTIMIZERS in sys.modules


def test_the_gpu_has_a_sleep():
    assert callable(torch.cuda._sleep)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_recording_bytes_count_the_memory_of_a_graph_only():
    before = internals.recording_bytes()
    x = torch.ones(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (x * 2 + 1).sum()
    assert internals.recording_bytes() > before


def test_the_snapshot_of_gpu_memory_is_read_by_its_fields(monkeypatch):
    """The fields' names are checked on a GPU; here only that pools of graphs are told from the rest."""
    plain = {"segment_pool_id": (0, 0), "total_size": 8, "allocated_size": 2}
    recorded = {"segment_pool_id": (0, 1), "total_size": 32, "allocated_size": 4}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [plain, recorded])
    assert internals.recording_bytes() == 28


def test_a_view_without_owning_has_the_same_memory_and_does_not_keep_it():
    x = torch.arange(6.0).reshape(2, 3).t()[1:]
    storage = x.untyped_storage()
    count = storage._use_count() if hasattr(storage, "_use_count") else None
    view = internals.view_without_owning(x)
    assert torch.equal(view, x)
    assert view.data_ptr() == x.data_ptr()
    assert view.stride() == x.stride()
    view[0, 0] = 7.0
    assert x[0, 0] == 7.0
    if count is not None:
        assert storage._use_count() == count


@pytest.mark.usefixtures("lone_process")
def test_the_time_limit_of_a_group_can_be_set(monkeypatch):
    had_it = hasattr(dist, "set_timeout")  # since torch 2.14
    internals.provide_set_timeout()
    dist.set_timeout(timedelta(seconds=77), None)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=77)
    if not had_it:
        monkeypatch.delattr(dist, "set_timeout")


def test_transforms_of_torch_func_are_seen():
    seen = []

    def look(x):
        seen.append(internals.transforms_are_active())
        return x

    look(torch.ones(2))
    torch.func.vmap(look)(torch.ones(2))
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    assert seen == [False, True, True]
