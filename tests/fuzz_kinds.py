"""The kinds of modules, hooks, tensors and losses that a fuzzed pipeline may consist of: a row each.

    KINDS    what is done to a model: a piece is put into one of its layers, a hook on any of its modules, ...
    DRESSES  how a layer returns a tensor: as complex numbers, as a view, as whole numbers, ...
    LOSSES   what is minimized, and under which convention

A new kind is a row. Kinds are applied one after the other to a `Draft` of a model, with random numbers of their own, so
that they compose, and so that every rank and the unsplit model get the same. A row also says what an honest user knows
about the kind: that it cannot be sliced, that its numbers depend on the order of the forwards, or that a plan may break
it without anybody noticing, unless the model is proven before it trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WORDS, WIDTH, CLASSES = 11, 4, 5
EXACT = 1e-10  # sums in another order, in float64
ROUNDED = 1e-5  # some numbers are rounded to float32 on their way


@dataclass
class Draft:
    """A model that is being changed: a list of layers, or a model of Hugging Face."""

    layers: list[Any]  # of the list, or the decoder layers of the model
    width: int
    rng: np.random.Generator
    model: Any = None  # of Hugging Face

    def one_of(self, things: Any) -> Any:
        """One of some things."""
        found = list(things)
        return found[int(self.rng.integers(len(found)))]

    @property
    def own_layers(self) -> list[Any]:
        """The layers into which a piece can be put."""
        return [one for one in self.layers if self.model or hasattr(one, "pieces")]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules, also the layers and the model themselves."""
        if self.model is not None:
            return list(self.model.modules())
        return [inner for layer in self.layers for inner in layer.modules()]

    @property
    def linears(self) -> list[nn.Linear]:
        """All linear layers whose weight is a plain parameter."""
        return [
            one
            for one in self.modules
            if type(one) is nn.Linear and "weight" in one._parameters
        ]

    def linear(self) -> nn.Linear:
        """A new linear layer from features to features."""
        made = nn.Linear(self.width, self.width, dtype=torch.float64)
        for parameter in made.parameters():
            drawn = self.rng.normal(size=tuple(parameter.shape))
            parameter.data.copy_(0.4 * torch.from_numpy(drawn))
        return made

    def insert(self, piece: nn.Module) -> None:
        """Put a piece, which takes and returns hidden states, somewhere into the model."""
        if self.model is None:
            self.one_of(self.own_layers).pieces.append(piece)
            return
        layer = self.one_of(self.layers)
        place = self.one_of(["mlp", "mlp", "norm", "embedding"])
        if place == "mlp":
            layer.mlp = nn.Sequential(layer.mlp, piece)
        elif place == "norm":
            name = "ln_1" if hasattr(layer, "ln_1") else "input_layernorm"
            setattr(layer, name, nn.Sequential(getattr(layer, name), piece))
        else:
            inner = self.model.get_input_embeddings()
            self.model.set_input_embeddings(nn.Sequential(inner, piece))


# ---------------------------------------------------------------- pieces that remember something
class Features(nn.Module):
    """A norm over features, of hidden states (rows, tokens, features)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, -2)).view(x.shape)


class PerRow(nn.Module):
    """A norm with statistics of each row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        norm = nn.InstanceNorm1d(width, affine=True, track_running_stats=True)
        self.norm = norm.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Counts(nn.Module):
    """Counts its forwards in a buffer, and nothing depends on it."""

    def __init__(self, replaces: bool, saved: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), saved)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.replaces:
                self.calls = self.calls + 1
            else:
                self.calls += 1
        return x


class Average(nn.Module):
    """Subtracts a moving average, which it keeps as a buffer or as a plain attribute."""

    def __init__(self, width: int, as_buffer: bool) -> None:
        super().__init__()
        mean = torch.zeros(width, dtype=torch.float64)
        if as_buffer:
            self.register_buffer("mean", mean)
        else:
            self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean((0, 1)), 0.3)
        return x - self.mean


class Codebook(nn.Module):
    """Moves each vector half way to the nearest code; codes follow the vectors that chose them."""

    def __init__(self, codes: Tensor) -> None:
        super().__init__()
        self.register_buffer("codes", codes)

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cdist(x.detach().flatten(0, 1), self.codes).argmin(1)
        near = self.codes[chosen].view_as(x)
        if self.training:
            with torch.no_grad():
                for code in chosen.unique():
                    mine = x.detach().flatten(0, 1)[chosen == code].mean(0)
                    self.codes[code] += 0.2 * (mine - self.codes[code])
        return x + 0.5 * (near - x).detach()


class Warms(nn.Module):
    """Scales by a number that grows with the calls so far, which are a plain number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x * (1 + 0.05 * self.calls)


# ---------------------------------------------------------------- pieces with an autograd of their own
class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.scale * grad, None


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Product(torch.autograd.Function):
    """x W^T with a backward of its own, and a second output without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        ranks = y.argsort(-1)
        ctx.mark_non_differentiable(ranks)
        return y, ranks

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class _Twice(torch.autograd.Function):
    """Doubles x in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Computes(nn.Module):
    """Runs a function of x and of a linear layer."""

    def __init__(
        self, function: Callable[[nn.Linear, Tensor], Tensor], linear: nn.Linear
    ) -> None:
        super().__init__()
        self.function = function
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear, x)


def with_product(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + _Product.apply(x, linear.weight)[0]


def doubled_in_place(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + _Twice.apply(linear(x)) * 0.2


def downhill(linear: nn.Linear, x: Tensor) -> Tensor:
    """A step down an energy: its gradient is part of the forward."""
    with torch.enable_grad():
        start = x if x.requires_grad else x.detach().requires_grad_()
        energy = linear(start).tanh().square().sum()
        (slope,) = torch.autograd.grad(energy, start, create_graph=True)
    return x - 0.1 * slope


def with_vmap(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + torch.func.vmap(linear)(x).tanh()


def with_inner_gradient(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda one: linear(one).tanh().sum())(x)


def with_functional_call(linear: nn.Linear, x: Tensor) -> Tensor:
    weights = {name: 0.5 * one for name, one in linear.named_parameters()}
    return x + torch.func.functional_call(linear, weights, (x,)).tanh()


def checkpointed(reentrant: bool) -> Callable[[nn.Linear, Tensor], Tensor]:
    def run(linear: nn.Linear, x: Tensor) -> Tensor:
        inner = lambda one: linear(one).tanh()  # noqa: E731
        return x + checkpoint(inner, x, use_reentrant=reentrant)

    return run


def saved_elsewhere(linear: nn.Linear, x: Tensor) -> Tensor:
    def lay_away(kept: Tensor) -> Tensor:
        return kept.detach().clone()

    with torch.autograd.graph.saved_tensors_hooks(lay_away, lambda kept: kept):
        return x + linear(x).tanh()


def hooked_inside(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x).tanh()
    if y.requires_grad:
        y.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return x + y


def keeps_gradient(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x)
    if y.requires_grad:
        y.retain_grad()
    return x + y.sin()


def called_twice(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + linear(linear(x).tanh())


def only_if_positive(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + linear(x).tanh() if float(x.detach().sum()) > 0 else x.sin()


def never_used(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + x.detach().cos()


def half_detached(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = linear(x)
    return x + y


def in_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    return x + linear(x.float().tanh().double())


def relu_in_place(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x)
    y[..., 0] *= 2
    return x + F.relu(y, inplace=True)


def changes_its_input(linear: nn.Linear, x: Tensor) -> Tensor:
    return x.mul_(1.25) + 0


def normalizes_its_weight(linear: nn.Linear, x: Tensor) -> Tensor:
    """Scales the rows of its weight to norm 1 before it uses them."""
    with torch.no_grad():
        linear.weight.div_(linear.weight.norm(dim=1, keepdim=True))
    return x + linear(x).tanh()


def spectrum(linear: nn.Linear, x: Tensor) -> Tensor:
    """Complex numbers inside: a filter of features."""
    turned = torch.fft.fft(x.to(torch.complex128))
    return x + torch.fft.ifft(turned * torch.fft.fft(linear.bias)).real


class ComplexWeight(nn.Module):
    """A linear layer of complex numbers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = torch.complex(linear.weight.data, linear.weight.data.t().contiguous())
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(x, x.sin()) @ self.weight
        return x + y.abs() * 0.3 + y.imag


# ---------------------------------------------------------------- pieces that mix tokens
class Mixes(nn.Module):
    """Lets every token see all others. As part of a list of layers it says so; inside a model it cannot."""

    def __init__(self, inner: nn.Module, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner.double()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return x + self.how(self.inner, x)


def by_recurrence(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x)[0]


def by_convolution(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x.transpose(1, 2)).transpose(1, 2)


def by_attention(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x, x, x, need_weights=False)[0]


def by_mean(inner: nn.Module, x: Tensor) -> Tensor:
    return inner(x.mean(1, keepdim=True)).tanh()


# ---------------------------------------------------------------- what is done to a model
Change = Callable[[Draft], None]


@dataclass(frozen=True)
class Kind:
    """One row: how a model is changed, and what an honest user knows about it."""

    change: Change
    lists: bool = True  # whether it is for lists of layers
    models: bool = True  # whether it is for models of Hugging Face
    whole: bool = False  # runs whole sequences only, and a piece of a layer can say so
    ordered: bool = False  # remembers its forwards, so that their order counts
    hidden: bool = False  # only a proof can see that a plan breaks it
    refused: bool = False  # whether it may not run at all
    limit: float = EXACT


def piece(make: Callable[[Draft], nn.Module], **more: Any) -> Kind:
    """A kind that puts a module into the model."""

    def change(draft: Draft) -> None:
        made = make(draft)
        if more.get("whole"):
            made.mixes = True
        draft.insert(made)

    return Kind(change, **more)


def computes(function: Callable[[nn.Linear, Tensor], Tensor], **more: Any) -> Kind:
    """A kind that puts a function with a linear layer of its own into the model."""
    return piece(lambda draft: Computes(function, draft.linear()), **more)


def scaled(value: Any, share: float = 0.9) -> Any:
    """A tensor, or all floating point tensors of a tuple, times a number."""
    if isinstance(value, Tensor):
        floats = value.is_floating_point() or value.is_complex()
        return value * share if floats else value
    if type(value) is tuple:
        return tuple(scaled(one, share) for one in value)
    return value


def to_one(
    find: Callable[[Draft], list[Any]], change: Callable[[Any], object], **more: Any
) -> Kind:
    """A kind that changes one of some things of a model, if it has any."""

    def apply(draft: Draft) -> None:
        found = find(draft)
        if found:
            change(draft.one_of(found))

    return Kind(apply, **more)


modules_of, layers_of, linears_of = map(attrgetter, ("modules", "layers", "linears"))


def weights_of(draft: Draft) -> list[nn.Parameter]:
    found = [p for one in draft.modules for p in one.parameters(recurse=False)]
    return [p for p in found if p.requires_grad]


def real_weights_of(draft: Draft) -> list[nn.Parameter]:
    return [p for p in weights_of(draft) if not p.is_complex()]


def count_calls(module: nn.Module) -> None:
    """Counts the calls of any module in a buffer of it."""
    module.register_buffer("hooked", torch.zeros((), dtype=torch.long))

    def count(module: Any, _: object, __: object) -> None:
        if module.training:
            module.hooked += 1

    module.register_forward_hook(count)


def look_at_gradients(weight: nn.Parameter) -> None:
    """Looks at every gradient when it has been added."""
    seen: list[Tensor] = []
    weight.register_post_accumulate_grad_hook(
        lambda one: seen.append(one.grad.detach().norm())
    )


def step_in_backward(weight: nn.Parameter) -> None:
    """Takes the step of an optimizer as soon as a gradient is there, and forgets the gradient."""

    def update(one: Any) -> None:
        with torch.no_grad():
            one.sub_(one.grad, alpha=0.1)
        one.grad = None

    weight.register_post_accumulate_grad_hook(update)


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + 0.1 * weight.flip(0)


def make_symmetric(linear: nn.Linear) -> None:
    parametrize.register_parametrization(linear, "weight", Symmetric())


def patch(linear: nn.Linear) -> None:
    """Replaces the forward of a linear layer, as adapters do."""
    plain = type(linear).forward

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return plain(self, x) + 0.1 * plain(self, x).sin()

    linear.forward = MethodType(forward, linear)


def patched_mixing(draft: Draft) -> None:
    """Replaces the forward of one MLP by one that lets tokens see later ones."""
    chosen = draft.one_of(draft.layers).mlp
    plain = chosen.forward
    chosen.forward = lambda x: plain(x + x.mean(1, keepdim=True))


def adapter(draft: Draft) -> None:
    """Replaces a linear layer by itself and a thin product beside it."""
    places = [
        (module, name)
        for module in draft.modules
        for name, inner in module.named_children()
        if type(inner) is nn.Linear
        and not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    ]
    if places:
        module, name = draft.one_of(places)
        setattr(module, name, Beside(getattr(module, name), draft))


class Beside(nn.Module):
    def __init__(self, inner: nn.Linear, draft: Draft) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)

        def thin(*shape: int) -> nn.Parameter:
            return nn.Parameter(0.4 * torch.from_numpy(draft.rng.normal(size=shape)))

        self.down, self.up = thin(2, inner.in_features), thin(inner.out_features, 2)

    @property
    def weight(self) -> Tensor:
        return self.inner.weight

    @property
    def bias(self) -> Tensor:
        return self.inner.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + x @ self.down.t() @ self.up.t()


def embeddings(draft: Draft) -> list[nn.Embedding]:
    return [one for one in draft.modules if isinstance(one, nn.Embedding)]


def set_embedding(**settings: Any) -> Change:
    def change(draft: Draft) -> None:
        found = embeddings(draft)
        for name, value in settings.items():
            if found:
                setattr(found[0], name, value)

    return change


def same_weight(draft: Draft) -> None:
    """Gives two linear layers of equal shape one weight."""
    one, other = draft.one_of(draft.linears), draft.one_of(draft.linears)
    if one.weight.shape == other.weight.shape:
        other.weight = one.weight


def same_piece(make: Callable[[Draft], nn.Module]) -> Change:
    """Puts one module into two places."""

    def change(draft: Draft) -> None:
        shared = make(draft)
        draft.insert(shared)
        draft.insert(shared)

    return change


def same_layer(draft: Draft) -> None:
    """Lets one layer, or one MLP of a model, also take the place of another."""
    if draft.model is not None:
        draft.one_of(draft.layers).mlp = draft.one_of(draft.layers).mlp
        return
    plain = [n for n, one in enumerate(draft.layers) if getattr(one, "alike", False)]
    if len(plain) > 1:
        draft.layers[draft.one_of(plain)] = draft.layers[draft.one_of(plain)]


def lazy(draft: Draft) -> nn.Module:
    return nn.LazyBatchNorm1d()


def conv(draft: Draft) -> nn.Module:
    return Mixes(nn.Conv1d(draft.width, draft.width, 3, padding=1), by_convolution)


def gru(draft: Draft) -> nn.Module:
    return Mixes(
        nn.GRU(draft.width, draft.width, batch_first=True, dtype=torch.float64),
        by_recurrence,
    )


def attention(draft: Draft) -> nn.Module:
    inner = nn.MultiheadAttention(draft.width, 2, batch_first=True)
    return Mixes(inner, by_attention)


def codebook(draft: Draft) -> nn.Module:
    return Codebook(torch.from_numpy(draft.rng.normal(size=(6, draft.width))))


def function_piece(function: Any, *arguments: Any) -> Callable[[Draft], nn.Module]:
    def make(draft: Draft) -> nn.Module:
        apply: Callable[[nn.Linear, Tensor], Tensor] = lambda _, x: function.apply(  # noqa: E731
            x, *arguments
        )
        return Computes(apply, draft.linear())

    return make


def shallower(draft: Draft) -> None:
    """Swaps two layers of a model after it was built."""
    held, other = sorted(draft.rng.integers(0, len(draft.layers), 2).tolist())
    layers = draft.layers
    layers[held], layers[other] = layers[other], layers[held]


REMEMBERS = {"whole": True, "ordered": True}
KINDS: dict[str, Kind] = {
    # buffers, and what is remembered elsewhere
    "batch norm": piece(lambda d: Features(nn.BatchNorm1d(d.width)), **REMEMBERS),
    "batch norm, average of all": piece(
        lambda d: Features(nn.BatchNorm1d(d.width, momentum=None)), **REMEMBERS
    ),
    "instance norm": piece(lambda d: PerRow(d.width), **REMEMBERS),
    "counter": piece(lambda d: Counts(False, True), whole=True),
    "counter, not saved": piece(lambda d: Counts(False, False), whole=True),
    "counter, replaced": piece(lambda d: Counts(True, True), whole=True),
    "moving average": piece(lambda d: Average(d.width, True), **REMEMBERS),
    "moving average, no buffer": piece(
        lambda d: Average(d.width, False), hidden=True, **REMEMBERS
    ),
    "codebook": piece(codebook, **REMEMBERS),
    "number of calls": piece(lambda d: Warms(), hidden=True, **REMEMBERS),
    "spectral norm": to_one(
        linears_of, parametrizations.spectral_norm, ordered=True, hidden=True
    ),
    "lazy norm": piece(lambda d: Features(lazy(d)), refused=True, **REMEMBERS),
    # autograd functions and autograd inside a forward
    "reversed gradient": piece(function_piece(_Reverse, 0.3)),
    "straight through": piece(function_piece(_Round)),
    "product of one's own": computes(with_product),
    "function in place": computes(doubled_in_place),
    "gradient in the forward": computes(downhill),
    "vmap": computes(with_vmap),
    "torch.func.grad": computes(with_inner_gradient),
    "functional_call": computes(with_functional_call),
    "checkpoint": computes(checkpointed(False)),
    "checkpoint, reentrant": computes(checkpointed(True)),
    "saved tensors": computes(saved_elsewhere),
    "tensor hook": computes(hooked_inside),
    "retain_grad": computes(keeps_gradient),
    "called twice": computes(called_twice),
    "sometimes used": computes(only_if_positive, whole=True),
    "never used": computes(never_used),
    "no_grad inside": computes(half_detached),
    "float32 inside": computes(in_float32, limit=ROUNDED),
    # changes in place
    "relu in place": computes(relu_in_place),
    "changes its input": computes(changes_its_input),
    "changes its weight": computes(normalizes_its_weight, hidden=True, refused=True),
    "max_norm": Kind(set_embedding(max_norm=0.7), hidden=True, refused=True),
    # complex numbers
    "complex inside": computes(spectrum),
    "complex weight": piece(lambda d: ComplexWeight(d.linear())),
    # gradients of other forms
    "sparse gradients": Kind(set_embedding(sparse=True), refused=True),
    "gradients by frequency": Kind(
        set_embedding(scale_grad_by_freq=True), whole=True, hidden=True
    ),
    "padding": Kind(set_embedding(padding_idx=1)),
    # tokens that see each other
    "convolution": piece(conv, whole=True),
    "recurrence": piece(gru, whole=True),
    "attention": piece(attention, whole=True),
    "mean of all tokens": piece(lambda d: Mixes(d.linear(), by_mean), whole=True),
    "patched to mix": Kind(patched_mixing, lists=False, whole=True),
    # hooks
    "forward hook": to_one(
        modules_of, lambda m: m.register_forward_hook(lambda _, __, y: scaled(y))
    ),
    "forward hook with names": to_one(
        modules_of,
        lambda m: m.register_forward_hook(
            lambda _, __, ___, y: scaled(y), with_kwargs=True, prepend=True
        ),
    ),
    "forward pre-hook": to_one(
        modules_of, lambda m: m.register_forward_pre_hook(lambda _, x: scaled(x))
    ),
    "backward hook": to_one(
        modules_of, lambda m: m.register_full_backward_hook(lambda _, g, __: scaled(g))
    ),
    "backward pre-hook": to_one(
        modules_of, lambda m: m.register_full_backward_pre_hook(lambda _, g: scaled(g))
    ),
    "counting hook": to_one(modules_of, count_calls, hidden=True),
    "weight hook": to_one(weights_of, lambda w: w.register_hook(lambda g: 0.5 * g)),
    "clipping weight hook": to_one(
        real_weights_of,
        lambda w: w.register_hook(lambda g: g.clamp(-0.01, 0.01)),
        hidden=True,
    ),
    "hook after a gradient": to_one(weights_of, look_at_gradients),
    "step in the backward": to_one(
        weights_of, step_in_backward, hidden=True, refused=True
    ),
    # other weights and forwards
    "parametrized": to_one(linears_of, make_symmetric),
    "weight norm": to_one(linears_of, parametrizations.weight_norm),
    "patched forward": to_one(linears_of, patch),
    "adapter": Kind(adapter),
    "frozen": to_one(modules_of, lambda m: m.requires_grad_(False)),
    "partly in eval": to_one(
        layers_of, nn.Module.eval
    ),  # as in fine-tuning with fixed norms
    "layers swapped": Kind(shallower, lists=False),
    # shared modules
    "shared weight": Kind(same_weight),
    "shared piece": Kind(same_piece(lambda d: Computes(called_twice, d.linear()))),
    "shared layer": Kind(same_layer),
    "shared batch norm": Kind(
        same_piece(lambda d: marked(Features(nn.BatchNorm1d(d.width)))), **REMEMBERS
    ),
    "shared counter": Kind(
        same_piece(lambda d: marked(Counts(False, True))), whole=True
    ),
}


def marked(module: Any) -> nn.Module:
    """A module that runs whole sequences only."""
    module.mixes = True
    return module


# ---------------------------------------------------------------- how tensors are passed on
Dress = Callable[[nn.Module, Tensor], Tensor]
DRESSES: dict[str, Dress] = {
    "complex": lambda _, y: torch.complex(y, y.cos()),
    "float32": lambda _, y: y.float(),
    "strided": lambda _, y: y.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda _, y: y[..., :1].expand(*y.shape),
    "four dimensions": lambda _, y: torch.stack((y, y.sin()), -1),
    "view": lambda _, y: y[..., :2],
    "itself": lambda _, y: y,
    "detached": lambda _, y: y.detach(),
    "whole numbers": lambda _, y: (4 * y.detach()).round().long(),
    "bool": lambda _, y: y.detach() > 0,
    "empty": lambda _, y: y[..., :0],
    "one number": lambda _, y: y.mean(),
    "a weight": lambda layer, y: next(iter(layer.each[0].parameters())),
    "no features": lambda _, y: y.sum(-1),
}
ONLY_BESIDE = ("detached", "whole numbers", "bool", "empty", "one number", "a weight")


def undressed(x: Tensor, like: tuple[int, ...]) -> Tensor:
    """Hidden states (rows, tokens, WIDTH), from a tensor that was passed in any form."""
    if x.is_complex():
        x = x.real + 0.5 * x.imag
    x = x.double()
    if x.dim() == 4:
        x = x.mean(-1)
    if x.dim() == 2 and tuple(x.shape) == like:
        x = x[..., None]
    if x.dim() != 3 or x.shape[:2] != torch.Size(like):
        return x.sum().expand(*like, WIDTH)
    if x.shape[-1] == WIDTH:
        return x
    return x.sum(-1, keepdim=True).expand(*like, WIDTH)


# ---------------------------------------------------------------- losses
@dataclass(frozen=True)
class LossKind:
    """A loss of logits and labels that lie flat: one row, and one label, for each token."""

    loss: Callable[[Tensor, Tensor], Tensor]
    reduction: str = "sum"
    numbers: bool = False  # labels are numbers, one for each class
    always: float = 0.9  # the share of labels that count
    additive: bool = True  # over tokens; else over rows or micro-batches at most
    refused: bool = False  # whether it may not run at all
    limit: float = EXACT


def cross_entropy(reduction: str, **more: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(y: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(y, labels, reduction=reduction, **more)

    return loss


def squared(reduction: str) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, labels: F.mse_loss(y, labels, reduction=reduction)


def over_all(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y, labels, reduction="sum") / labels.numel()


WEIGHTS = torch.tensor([0.2, 2.0, 1.0, 3.0, 0.5], dtype=torch.float64)
LOSSES: dict[str, LossKind] = {
    "sum": LossKind(cross_entropy("sum")),
    "smoothed sum": LossKind(cross_entropy("sum", label_smoothing=0.1)),
    "weighted sum": LossKind(cross_entropy("sum", weight=WEIGHTS)),
    "sum as (1,)": LossKind(lambda y, t: cross_entropy("sum")(y, t).reshape(1)),
    "sum in float32": LossKind(
        lambda y, t: cross_entropy("sum")(y.float(), t), limit=ROUNDED
    ),
    "sum that changes logits": LossKind(
        lambda y, t: cross_entropy("sum")(y.mul_(0.5), t)
    ),
    "mean": LossKind(cross_entropy("mean"), "mean"),
    "smoothed mean": LossKind(cross_entropy("mean", label_smoothing=0.1), "mean"),
    "mean over all labels": LossKind(over_all, "mean", refused=True),
    "mean taken for a sum": LossKind(cross_entropy("mean"), refused=True),
    "sum taken for a mean": LossKind(cross_entropy("sum"), "mean", refused=True),
    "squares": LossKind(squared("sum"), numbers=True),
    "mean of squares": LossKind(squared("mean"), "mean", numbers=True),
}
