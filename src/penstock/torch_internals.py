"""Every use of torch that is not public API, one small function each.

A new version of torch may change these without notice. `SEEN` says in which versions each name exists, and
`tests/runtime/test_torch_internals.py` compares that with the installed version, and has a test per function. Nothing
else in the package may use a private name of torch, except those in `penstock.models`, which cannot import this file:
an override of `_apply`, a module without its submodules, and the names under which a module keeps its hooks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    PrefixStore,
    ProcessGroup,
    ProcessGroupGloo,
    ReduceOp,
    Store,
    TCPStore,
    Work,
)
from torch.distributed import P2POp, get_rank
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.batchnorm import _NormBase as Norm
from torch.nn.modules.dropout import _DropoutNd

# The types with which `penstock.runtime.comm.ipc` implements a backend, and the stores of `torch.distributed`. Torch
# documents most of them, but exports some only from here.
__all__ = [
    "MODULE_OF_OPTIMIZERS",
    "AllreduceOptions",
    "BarrierOptions",
    "BroadcastOptions",
    "Norm",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "as_no_view",
    "call_uncompiled",
    "changes",
    "compile_graph",
    "compiled_call",
    "compiler_limit",
    "copy_all",
    "cut_share",
    "default_store",
    "finish_sharded_backward",
    "free_bytes",
    "gloo_group",
    "gradient_version",
    "has_gradient_hooks",
    "has_hooks",
    "ignore_fsdp_view_warning",
    "is_compiled",
    "is_connection_error_text",
    "is_distributed",
    "is_dropout",
    "is_memory_error_text",
    "known_compilers",
    "let_size_vary",
    "local_share",
    "module_attributes",
    "multiply_all",
    "norms_of_all",
    "original_module",
    "original_name",
    "own_buffers",
    "own_layers",
    "provide_set_timeout",
    "recording_bytes",
    "schedule_runtime",
    "set_compiled_call",
    "share_offset",
    "size_varies",
    "sleep_on_gpu",
    "sleep_until_done",
    "sums_in_other_type",
    "supports_amx",
    "transforms_are_active",
    "view_without_owning",
    "walk_back",
    "widen_sharded_gradients",
    "zero_all",
]

# The private names, by the first and the last version of torch in which they were seen.
SEEN: dict[tuple[str, str], tuple[str, ...]] = {
    ("2.11", "2.15"): (
        "torch._C._are_functorch_transforms_active",
        "torch._C._construct_storage_from_data_pointer",
        "torch._C._distributed_c10d",
        "torch._dynamo.config.recompile_limit",
        "torch._dynamo.decorators._dynamo_weak_dynamic_indices",
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod",
        "torch._dynamo.lookup_backend",
        "torch._dynamo.maybe_mark_dynamic",
        "torch._foreach_copy_",
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch._foreach_zero_",
        "torch.Tensor._backward_hooks",
        "torch.Tensor._post_accumulate_grad_hooks",
        "torch.Tensor._is_view",
        "torch.Tensor._version",
        "torch.autograd.Variable._execution_engine",
        "torch.ops.aten._unsafe_view",
        "torch.cpu._is_amx_tile_supported",
        "torch.cuda._sleep",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.distributed.distributed_c10d._set_pg_timeout",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_group",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._mp_policy",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._root_post_backward_final_callback",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._state_ctx",
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPStateContext.all_states",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup.fsdp_params",
        "torch.distributed.pipelining.schedules._Action",
        "torch.distributed.pipelining.schedules._PipelineScheduleRuntime",
        "torch.distributed.pipelining.schedules._PipelineScheduleRuntime._prepare_schedule_with_comms",
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "torch.nn.Module._apply",
        "torch.nn.Module._backward_hooks",
        "torch.nn.Module._backward_pre_hooks",
        "torch.nn.Module._buffers",
        "torch.nn.Module._call_impl",
        "torch.nn.Module._compiled_call_impl",
        "torch.nn.Module._forward_hooks",
        "torch.nn.Module._forward_pre_hooks",
        "torch.nn.Module._modules",
        "torch.nn.modules.batchnorm._NormBase",
        "torch.nn.modules.dropout._DropoutNd",
    ),
    ("2.11", "2.14"): (
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.accumulate_unsharded_grad_if_needed",
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam.to_accumulated_grad_if_needed",
    ),
    ("2.11", "2.13"): (
        "torch.distributed.pipelining.stage.PipelineStage._get_init_p2p_neighbors_ops",
    ),
    ("2.12", "2.15"): (
        "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState._fsdp_param_groups",
    ),
}

# The first optimizer of a process loads this, which takes half a second.
MODULE_OF_OPTIMIZERS = "torch._dynamo"

MAX_GPU_CYCLES_PER_SECOND = 2e9

# ---------------------------------------------------------------- autograd
_ENGINE = torch.autograd.Variable._execution_engine


def walk_back(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run the backward from `roots`, like `torch.autograd.backward`.

    The public function checks its arguments first, which takes as long as the backward of a small graph.
    If torch changes the arguments of the engine, every backward fails.
    """
    _ENGINE.run_backward(
        tuple(roots),
        tuple(gradients),
        False,  # keep the graph
        False,  # create a graph of the backward
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def transforms_are_active() -> bool:
    """Whether this runs inside a transform of `torch.func`, such as vmap, grad or jvp.

    If torch renamed this function, no split backward would run.
    """
    return torch._C._are_functorch_transforms_active()


def gradient_version(gradient: Tensor | None) -> tuple[int, int]:
    """A pair that differs after anybody wrote to a gradient or replaced it; (0, 0) if there is none.

    Without the counter, the warning about weight gradients that cannot wait for W would be wrong.
    """
    if gradient is None:
        return 0, 0
    return id(gradient), changes(gradient)


def as_no_view(tensor: Tensor) -> Tensor:
    """The same tensor, but not as a view of another one.

    Without these names, an in-place activation behind a linear layer would fail under a split backward.
    """
    if not tensor._is_view():
        return tensor
    plain: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return plain


def changes(tensor: Tensor) -> int:
    """How often anybody has written to a tensor.

    Without the counter, a stage that changes its input would not be noticed.
    """
    return tensor._version


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a hook sees the gradient of a parameter.

    Such a gradient must come from autograd. If torch renamed these attributes, deferred gradients would bypass hooks.
    """
    return any((parameter._backward_hooks, parameter._post_accumulate_grad_hooks))


# ---------------------------------------------------------------- many tensors at once
def zero_all(tensors: Sequence[Tensor]) -> None:
    """Set all tensors to zero, on a GPU with a few launches for all of them."""
    torch._foreach_zero_(list(tensors))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, of any type, on a GPU with a few launches for all of them."""
    torch._foreach_copy_(list(targets), list(sources))


def norms_of_all(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """The Euclidean norm of each tensor, on a GPU with a few launches for all of them."""
    return torch._foreach_norm(list(tensors))


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all tensors in place, on a GPU with a few launches for all of them."""
    torch._foreach_mul_(list(tensors), factor)


# ---------------------------------------------------------------- modules and torch.compile
def original_module(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` has wrapped; a module that is not wrapped itself.

    If the wrapper kept it under another name, attributes of a user's compiled module would not be found.
    """
    original: nn.Module = getattr(module, "_orig_mod", module)
    return original


def original_name(name: str) -> str:
    """The name that a parameter has without the wrappers of `torch.compile`."""
    return name.replace("_orig_mod.", "")


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` has put in place of the module's call; None if it was not called."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Replace what `compiled_call` returns."""
    module._compiled_call_impl = call


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module, with its hooks, as if it were not compiled."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Whether this module itself is compiled, by `torch.compile(module)` or by `module.compile()`.

    Otherwise a split backward would change the linear layers inside a compiled module.
    """
    return original_module(module) is not module or compiled_call(module) is not None


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook runs before or after the forward or backward of a module."""
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def known_compilers() -> list[str]:
    """The backends of torch.compile, by name."""
    return list(torch.compiler.list_backends(exclude_tags=()))


def compile_graph(compiler: str, graph: Any, inputs: list[Any]) -> Callable[..., Any]:
    """Compile a graph, as torch.compile does with this backend.

    Torch has no public name for its backends as functions.
    """
    from torch._dynamo import lookup_backend  # noqa: PLC0415  # loads all of torch's compiler

    compiled: Callable[..., Any] = lookup_backend(compiler)(graph, inputs)
    return compiled


def compiler_limit() -> int:
    """How many versions of one function torch.compile makes before it runs it uncompiled."""
    return int(torch._dynamo.config.recompile_limit)


def let_size_vary(tensor: Tensor, dim: int) -> None:
    """Tell torch.compile that a size of a tensor changes from call to call.

    Without it, torch would compile again for the second size that it sees.
    """
    torch._dynamo.maybe_mark_dynamic(tensor, dim)


def size_varies(value: object) -> bool:
    """Whether `let_size_vary` was called for this tensor."""
    return bool(getattr(value, "_dynamo_weak_dynamic_indices", None))


def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module itself, to be changed in place."""
    return module._buffers


def own_layers(module: nn.Module) -> dict[str, nn.Module | None]:
    """The children of a module itself, to be changed in place."""
    return module._modules


def module_attributes() -> frozenset[str]:
    """The attributes that every module has from torch: parameters, hooks and so on."""
    return frozenset({*nn.Module().__dict__, "_compiled_call_impl"})


def is_dropout(module: nn.Module) -> bool:
    """Whether this is one of torch's dropout layers, which share a private base class."""
    return isinstance(module, _DropoutNd)


# ---------------------------------------------------------------- sharded tensors
def share_offset(tensor: Tensor) -> tuple[int, ...]:
    """Where the numbers of this process begin in a sharded tensor; zeros for a plain tensor.

    A wrong offset would mix up the weights of a checkpoint.
    """
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim()
    _, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple(offset)


def finish_sharded_backward(part: FSDPModule) -> None:
    """Sum the gradients of a sharded module now, and drop the weights that it has gathered.

    FSDP does this at the end of a backward. A pipeline has many backwards and wants one sum after the last of them.
    Without this call, gradients would stay unsummed.
    """
    fully_shard.state(part)._root_post_backward_final_callback()  # type: ignore[attr-defined]


def sums_in_other_type(part: FSDPModule) -> bool:
    """Whether FSDP sums the gradients of a module in another type than it computes in."""
    policy = fully_shard.state(part)._mp_policy  # type: ignore[attr-defined]
    return policy.reduce_dtype is not None


def widen_sharded_gradients(part: FSDPModule) -> None:
    """Add the gradients of a sharded module to FSDP's own sums, which have a wider type.

    FSDP does this at the end of every backward of autograd. Gradients that are computed outside of one would otherwise
    add up in the narrow type in which the module computes. From torch 2.15 on, the gathered parameters themselves say
    in their `grad_dtype` that their gradients are wide.
    """
    for state in fully_shard.state(part)._state_ctx.all_states:  # type: ignore[attr-defined]
        # torch 2.11 has one group for each module, later versions have several.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        for parameter in (one for group in groups for one in group.fsdp_params):
            if hasattr(parameter, "to_accumulated_grad_if_needed"):
                parameter.accumulate_unsharded_grad_if_needed()
                parameter.to_accumulated_grad_if_needed()


def ignore_fsdp_view_warning() -> None:
    """Silence FSDP's warning about a module that returns a view: nobody writes into the output of a stage."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")


# ---------------------------------------------------------------- processes
def gloo_group(store: Store, rank: int, ranks: int, limit: timedelta) -> ProcessGroup:
    """Connect some processes through gloo, apart from the default process group.

    `torch.distributed` has one default group in the life of a process. Groups that are made like this can be dropped
    when a process is lost, and made again without it. GLOO_SOCKET_IFNAME names the network interface, as usual.
    """
    group: Any = ProcessGroupGloo(store, rank, ranks, limit)
    return group  # type: ignore[no-any-return]  # It has the methods of a ProcessGroup.


def default_store() -> Store:
    """The store of the default process group, through which the ranks tell each other about errors."""
    return _get_default_store()


MEMORY_ERROR_TEXTS = ("allocate memory", "not enough memory", "bad alloc")

CONNECTION_ERROR_TEXTS = (
    "gloo",
    "nccl",
    "connection",
    "socket",
    "broken pipe",
    "process group",
    "timed out",
)


def is_memory_error_text(text: str) -> bool:
    """Whether torch reports with this text that the host has too little memory.

    Torch raises a plain RuntimeError for it. If the text changed, a user would see a traceback instead of advice.
    """
    return any(part in text for part in MEMORY_ERROR_TEXTS)


def is_connection_error_text(text: str) -> bool:
    """Whether torch reports with this text that another process is gone.

    Gloo raises a plain RuntimeError for it. If the text changed, training would stop instead of restarting.
    """
    lower = text.lower()
    return any(part in lower for part in CONNECTION_ERROR_TEXTS)


# ---------------------------------------------------------------- devices
def supports_amx() -> bool:
    """Whether the CPU advertises AMX tiles."""
    return bool(torch.cpu._is_amx_tile_supported())


def sleep_on_gpu(seconds: float) -> None:
    """Keep the current stream of the GPU busy for at least this long, so that launches queue up behind it."""
    torch.cuda._sleep(int(seconds * MAX_GPU_CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


def recording_bytes() -> int:
    """Bytes of GPU memory that are reserved for CUDA graphs of this process and hold no tensor now.

    The allocator's snapshot is public, but the names of its fields are not. Without it, reports of a run's memory would
    leave out what recordings reserve.
    """
    segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return sum(
        int(one["total_size"] - one["allocated_size"])
        for one in segments
        if tuple(one["segment_pool_id"]) != (0, 0)
    )


def free_bytes(device: torch.device) -> int:
    """Bytes that new tensors can take on a GPU; -1 for other devices.

    That is what the driver has left, and what the allocator has reserved and not given to tensors. What is reserved for
    CUDA graphs can serve only them.
    """
    if device.type != "cuda":
        return -1
    left, _ = torch.cuda.mem_get_info(device)
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(left + kept - recording_bytes())


def view_without_owning(tensor: Tensor) -> Tensor:
    """A tensor with the same memory that does not keep it: the allocator may give it to others.

    Recordings read and write memory that later actions of the same recordings reuse. If torch changed this, a recorded
    run would need more memory, or fail at once.
    """
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


# ---------------------------------------------------------------- torch's own pipeline runtime
def schedule_runtime(
    stages: Sequence[Any],
    microbatches: int,
    loss_function: Callable[..., Tensor] | None,
    rows: Sequence[Sequence[str]],
    scale_grads: bool = True,
    messages: bool = True,
) -> Any:
    """torch's runtime of `torch.distributed.pipelining` with these actions, a row per rank.

    `messages` says whether the rows contain messages. Otherwise torch adds them.
    """
    from torch.distributed.pipelining import schedules  # noqa: PLC0415  # slow to import

    runtime = schedules._PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
        list(stages), microbatches, loss_fn=loss_function, scale_grads=scale_grads
    )
    actions = {
        rank: [schedules._Action.from_str(word) for word in row]
        for rank, row in enumerate(rows)
    }
    form: Literal["compute_comms", "compute_only"] = (
        "compute_comms" if messages else "compute_only"
    )
    runtime._prepare_schedule_with_comms(actions, format=form)
    for stage in stages:
        greet = getattr(stage, "_get_init_p2p_neighbors_ops", None)
        if greet is not None:
            stage._get_init_p2p_neighbors_ops = partial(_greet_others, greet)
    return runtime


def _greet_others(greet: Callable[[], list[P2POp]]) -> list[P2POp]:
    """The messages with which a stage connects to its neighbours, except those that live on its own rank.

    torch 2.11 sends them to itself, where gloo fails.
    """
    return [one for one in greet() if one.peer != get_rank()]


# ---------------------------------------------------------------- for torchtitan
def provide_set_timeout() -> None:
    """Give `torch.distributed` the function `set_timeout`, which is private before torch 2.14.

    torchtitan 0.3.0 calls it after the first step.
    """
    if not hasattr(torch.distributed, "set_timeout"):
        private = torch.distributed.distributed_c10d._set_pg_timeout
        torch.distributed.set_timeout = private  # type: ignore[attr-defined]


# ---------------------------------------------------------------- dtensor share
# The share of a tensor that one process holds when several processes shard it (a DTensor), and where it lies.
#
# whole  ┌─────────┐        local    the numbers here, in the tensor's own memory
#        │   ┌───┐ │        offset   (1, 4): where they begin
#        │   └───┘ │
#        └─────────┘        for a plain tensor: itself, and (0, 0)


def local_share(tensor: Tensor) -> Tensor:
    """The numbers that this process holds; all of them for a plain tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_distributed(tensor: Tensor) -> bool:
    """Whether several processes hold a tensor together. FSDP makes a DTensor even where there is one process."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1


def cut_share(whole: Tensor, like: Tensor) -> Tensor:
    """The share of a whole tensor that this process holds of a sharded tensor `like` it."""
    starts = share_offset(like)
    sizes = local_share(like).shape
    index = tuple(
        slice(start, start + size) for start, size in zip(starts, sizes, strict=True)
    )
    return whole[index]


# ---------------------------------------------------------------- blocking wait
# Waits for a GPU without keeping a core busy.


def sleep_until_done() -> None:
    """Let the host sleep until the GPU has done what was launched on the current stream.

    If the host reads a number that is not there yet, torch asks for it again and again. That keeps a core busy, which
    the threads of NCCL may need. Waking up takes some hundredths of a millisecond longer.
    """
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record()
    done.synchronize()
