"""Runs a part of a Hugging Face model with the model's own forward.

    the model       embed   0  1  2  3  4  5   norm  head
    part 0          embed   0  1  2  ·  ·  ·    ·             · passes x on
    part 1            ·     ·  ·  ·  3  4  5   norm  head

What the model does between its pieces (scaled embeddings, capped logits, masks and angles of several kinds) therefore
happens in the parts too. A slice brings the positions of its tokens, the keys and values of the slices before it, and
its own mask; packed documents bring positions and a mask.

An encoder, whose words see both ways, takes rows in one of two forms. With an `attention_mask`, as transformers has
it, padding is hidden. With packed documents, every document is a sequence of its own, whose positions begin anew;
padding is a document too, which nobody else sees.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError, ShapeError
from penstock.models.attention import token_positions
from penstock.models.hf import Encoding, Pieces
from penstock.models.slice import Slice

KERNELS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)
CHECKPOINTED = (
    "its layers use Hugging Face's activation checkpointing, which drops the keys and values of earlier slices "
    "(call model.activation_checkpointing_disable(), or gradient_checkpointing_disable() in older versions of "
    "transformers, and recompute whole stages instead, with Executor(recompute=...) or run.recompute)"
)
"""Why layers with activation checkpointing cannot be run slice by slice."""


# ---------------------------------------------------------------- the model with some of its pieces
class Visit(threading.local):
    """What the call of a part that is under way brings to its layers, past Hugging Face's own forward.

    Every thread has its own, because ranks that are threads may share a part.
    """

    def __init__(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Forget the call."""
        self.arrived: Tensor | None = None  # the hidden state of the part before
        self.piece: Slice | None = None
        self.masks: dict[int, Tensor | None] = {}  # of layers by number, for slices
        # Makes the masks of an encoder's layers keep documents apart.
        self.apart: Callable[[Tensor | None, Tensor], Tensor] | None = None

    def __reduce__(self) -> tuple[type[Visit], tuple[()]]:
        """Let a copy of a part begin without a call under way."""
        return Visit, ()


class Portion(NamedTuple):
    """Which pieces a part has: some layers, and perhaps what comes before or after all of them."""

    layers: range
    first: bool
    last: bool


class Runner:
    """Hugging Face's model with the pieces of one part; those of other parts pass x on."""

    def __init__(
        self, model: nn.Module, pieces: Pieces, part: nn.Module, portion: Portion
    ) -> None:
        layers, self.first, self.last = portion
        self.pieces = pieces
        base = submodule(model, pieces.base)
        held = submodule(part, pieces.base)
        self.visit = Visit()
        stack: list[LayerCall | LayerElsewhere] = []
        for number, layer in enumerate(submodule(base, pieces.layers)):
            if number in layers:
                mine = part.get_submodule(f"{pieces.base}.{pieces.layers}.{number}")
                stack.append(LayerCall(mine, number, self.visit))
            else:
                elsewhere = LayerElsewhere(layer, number, self.visit, pieces.tuples)
                stack.append(elsewhere)
        self.layers = stack
        instead: dict[str, Any] = {pieces.layers: stack}
        for path in pieces.before:
            instead[path] = (
                submodule(held, path)
                if self.first
                else self.stand_in(submodule(base, path))
            )
        for path in pieces.after:
            instead[path] = submodule(held, path) if self.last else _pass_on
        for path in pieces.everywhere:
            instead[path] = AnglesOfSlice(submodule(held, path), self.visit)
        self.embed: Any = instead[pieces.before[0]]
        tables = [
            one.num_embeddings
            for one in map(instead.get, pieces.before[1:])
            if isinstance(one, nn.Embedding)
        ]
        # The most tokens that it has positions for; 0 if it has no table of positions.
        self.longest = min(tables, default=0)
        self.base: Any = shell(base, _nested(base, instead))
        heads = (
            {path: getattr(part, path) for path in pieces.outside} if self.last else {}
        )
        inner, path = self.base, pieces.base
        while "." in path:
            path, _, name = path.rpartition(".")
            inner = shell(submodule(model, path), {name: inner})
        self.model: Any = shell(model, {path: inner, **heads})

    def stand_in(self, piece: nn.Module) -> Any:
        """What takes the place of a piece that only the first part runs."""
        return _add_nothing if isinstance(piece, nn.Embedding) else _pass_on

    def __call__(
        self,
        x: Tensor,
        piece: Slice | None,
        types: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Turn token ids, or the hidden state of the part before, into the next hidden state or logits.

        Only encoders take `types` and an `attention_mask`.
        """
        if self.first:
            self.refuse_length(x.shape[1] if piece is None else piece.tokens)
            x = self.embed(x)
        else:
            self.visit.arrived = x
        arguments: dict[str, Any] = {"inputs_embeds": x, "use_cache": False}
        if self.pieces.cached:
            arguments["past_key_values"] = Keys(x.shape[1], piece)
        packed = piece is not None and piece.carry.starts is not None
        if piece is not None and (piece.partial or packed):
            arguments["position_ids"] = _as_rows(token_positions(x, piece))
            self.visit.masks = masks_of(self.layers, x, piece)
        return self.run(arguments, piece)

    def run(self, arguments: dict[str, Any], piece: Slice | None) -> Tensor:
        """Call the model, or without its head the base model."""
        self.visit.piece = piece
        try:
            if self.last:
                return cast(Tensor, self.model(**arguments).logits)
            return cast(Tensor, self.base(**arguments).last_hidden_state)
        finally:
            self.visit.leave()

    def refuse_length(self, tokens: int) -> None:
        """Refuse a sequence that is longer than the table of positions."""
        if self.longest and tokens > self.longest:
            raise ShapeError(
                f"{tokens} tokens, but only {self.longest} positions\n"
                f"  use sequences of at most {self.longest} tokens (data.seq_len)"
            )


def submodule(module: Any, path: str) -> Any:
    """A module inside another one, which may be a shell; None if it is not there."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def graft(root: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module under a path, and empty modules along the path where needed."""
    *parents, leaf = path.split(".")
    for name in parents:
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(leaf, module)


def shell(module: nn.Module, instead: dict[str, Any]) -> nn.Module:
    """Copy a module without its submodules, and give it other things under their names."""
    empty = copy.copy(module)
    empty.__dict__["_modules"] = {}
    empty.__dict__.update(instead)
    return empty


def _nested(base: nn.Module, instead: dict[str, Any]) -> dict[str, Any]:
    """What a shell of the base model holds; what has a name like `encoder.layer` is in a shell of its own."""
    own: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for path, thing in instead.items():
        holder, _, name = path.rpartition(".")
        if holder:
            inner.setdefault(holder, {})[name] = thing
        else:
            own[name] = thing
    for holder, things in inner.items():
        own[holder] = shell(submodule(base, holder), things)
    return own


def _pass_on(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """A piece that another part runs."""
    return x


def _add_nothing(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """An embedding of positions, which the first part has added already."""
    return torch.zeros((), device=x.device)


# ---------------------------------------------------------------- layers
class LayerElsewhere:
    """A layer of another part."""

    def __init__(
        self,
        layer: nn.Module | LayerCall,
        number: int,
        visit: Visit,
        tuples: bool = False,
    ) -> None:
        plain = (str, int, float, bool, type(None))
        module = layer.layer if isinstance(layer, LayerCall) else layer
        for name, value in vars(module).items():
            if not name.startswith("_") and isinstance(value, plain):
                setattr(self, name, value)  # such as attention_type
        self.number = number
        self.visit = visit
        self.tuples = tuples

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state as it is."""
        args, kwargs = _entering(self.number, self.visit, args, kwargs)
        x = args[0] if args else kwargs["hidden_states"]
        return (x,) if self.tuples else x


def _entering(
    number: int, visit: Visit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let layer 0 begin with the hidden state that has arrived from another part, if one has.

    What the model does before its first layer (Granite scales the embedding) is done by the first part alone.
    """
    if number > 0 or visit.arrived is None:
        return args, kwargs
    return _replaced(args, kwargs, 0, "hidden_states", visit.arrived)


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, value: object
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another value for one of them, which is given by place or by name."""
    if 0 <= place < len(args):
        return (*args[:place], value, *args[place + 1 :]), kwargs
    return args, {**kwargs, name: value}


class LayerCall:
    """A layer of this part, which may get another mask than the one that Hugging Face has made."""

    def __init__(self, layer: nn.Module, number: int, visit: Visit) -> None:
        self.layer = layer
        self.number = number
        self.visit = visit
        parameters = list(inspect.signature(type(layer).forward).parameters)
        self.place = -1
        if "attention_mask" in parameters:
            self.place = parameters.index("attention_mask") - 1  # without self

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the layer, such as attention_type."""
        if name == "layer":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.layer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer."""
        args, kwargs = _entering(self.number, self.visit, args, kwargs)
        masks, apart = self.visit.masks, self.visit.apart
        if self.number in masks or apart is not None:
            given = kwargs.get("attention_mask")
            if 0 <= self.place < len(args):
                given = args[self.place]
            mask = masks.get(self.number)
            if apart is not None:
                mask = apart(given, args[0] if args else kwargs["hidden_states"])
            args, kwargs = _replaced(args, kwargs, self.place, "attention_mask", mask)
        return self.layer(*args, **kwargs)


class Keys:
    """The cache that Hugging Face's attention asks for the keys and values of earlier slices."""

    is_compileable = False

    def __init__(self, tokens: int, piece: Slice | None) -> None:
        self.tokens = tokens  # of this slice
        self.piece = piece if piece is not None and piece.partial else None

    def update(
        self, k: Tensor, v: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, and return all so far."""
        if self.piece is None:
            return k, v
        keys = self.piece.extend(layer_idx, "keys", k)
        values = self.piece.extend(layer_idx, "values", v)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of earlier tokens."""
        return 0 if self.piece is None else self.piece.begin

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The position of the first token."""
        return self.get_seq_length()

    def get_mask_sizes(self, *args: object, **kwargs: object) -> tuple[int, int]:
        """The number of keys, and the position of the first one."""
        return self.get_seq_length() + self.tokens, 0


# ---------------------------------------------------------------- masks
def masks_of(
    layers: Iterable[LayerCall | LayerElsewhere], x: Tensor, piece: Slice
) -> dict[int, Tensor | None]:
    """The masks of a part's layers for a slice, by the number of the layer. Layers that see alike share one."""
    calls = [one for one in layers if isinstance(one, LayerCall)]
    sights = {call.number: _sight(call.layer) for call in calls}
    masks = {sight: causal_mask(*sight, x, piece) for sight in {*sights.values()}}
    return {number: masks[sight] for number, sight in sights.items()}


def causal_mask(
    kernel: str, window: int | None, x: Tensor, piece: Slice
) -> Tensor | None:
    """Return the mask with which a layer sees only the last `window` tokens.

    None means that the kernel needs no mask.

    tokens   window 3
    0        ■ . . . .
    1        ■ ■ . . .
    2        ■ ■ ■ . .
    3        . ■ ■ ■ .
    4        . . ■ ■ ■
    """
    if kernel.startswith("flash"):
        if piece.carry.starts is not None:
            raise PenstockError(
                f"{kernel} would look across packed documents; call model.set_attn_implementation('sdpa')"
            )
        return None
    begin, end = piece.begin, piece.end
    fits_window = window is None or end <= window
    if kernel == "sdpa" and piece.causal and fits_window:
        return None
    queries = torch.arange(begin, end, device=x.device)[:, None]
    distance = queries - torch.arange(end, device=x.device)
    allowed = piece.seen(x.device)
    seen = allowed & (distance < (end if window is None else window))
    if seen.dim() != 4:
        seen = seen[None, None]
    if kernel == "eager":
        zeros = torch.zeros_like(seen, dtype=x.dtype)
        return zeros.masked_fill(~seen, torch.finfo(x.dtype).min)
    return seen


def attention_of(layer: nn.Module) -> Any:
    """The attention of a layer: the first of its modules that knows its config and its number."""
    for module in layer.children():
        if hasattr(module, "config") and hasattr(module, "layer_idx"):
            return module
        inner = getattr(module, "attention", None)
        if inner is not None and hasattr(inner, "config"):
            return inner
    raise PenstockError(
        f"cannot split a model with layers of class {type(layer).__name__}: none of its modules is an attention "
        "that Penstock knows\n"
        "  write the parts as modules of your own: Executor takes any nn.Module as a stage"
    )


def _sight(layer: nn.Module) -> tuple[str, int | None]:
    """Return the kernel of a layer's attention, and its window.

    Where layers differ, the config knows which of them have one, and each attention may know its own; otherwise the
    config has one for all.
    """
    attention = attention_of(layer)
    config = attention.config
    kernel = str(config._attn_implementation)
    kinds = getattr(config, "layer_types", None)
    if kinds and kinds[attention.layer_idx] == "full_attention":
        return kernel, None
    if hasattr(attention, "sliding_window"):
        return kernel, attention.sliding_window
    if kinds and kinds[attention.layer_idx] != "sliding_attention":
        return kernel, None
    return kernel, getattr(config, "sliding_window", None)


def refuse_kernel(kernel: str) -> None:
    """Refuse attention kernels that need more than a mask."""
    if kernel not in KERNELS:
        raise PenstockError(
            f"attention {kernel!r} cannot run in parts; call model.set_attn_implementation('sdpa')"
        )


# ---------------------------------------------------------------- angles
_one_length_at_a_time = threading.Lock()  # threads may share a module that adapts


class AnglesOfSlice:
    """A module that every part has, usually the rotary embedding. It must know to which sequence a slice belongs.

    The types `dynamic` and `longrope` choose their frequencies by the largest position
    that they are given. A slice therefore asks for the positions of its whole sequence
    and takes its own rows of the answer.
    """

    def __init__(self, module: nn.Module, visit: Visit) -> None:
        self.module = module
        self.visit = visit
        self.dynamic = remembers_lengths(module)
        self.whole = self.dynamic or "longrope" in rope_types(module)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module."""
        if name == "module":  # not there yet, while it is copied
            raise AttributeError(name)
        return getattr(self.module, name)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return what the module does, or for a slice its rows of that."""
        if not self.whole:
            return self.module(x, *args, **kwargs)
        piece = self.visit.piece
        places = (
            token_positions(x, None) if piece is None else piece.all_positions(x.device)
        )
        kwargs.pop("position_ids", None)
        with _one_length_at_a_time:
            if self.dynamic:
                length = places.shape[-1]
                if piece is not None and piece.carry.starts is not None:
                    length = int(places.max()) + 1  # of the longest document
                _forget_lengths(self.module, length, x.device)
            cos, sin = self.module(x, _as_rows(places), *args[1:], **kwargs)
        if piece is None:
            return cos, sin
        return cos[:, piece.begin : piece.end], sin[:, piece.begin : piece.end]


def _as_rows(positions: Tensor) -> Tensor:
    return positions if positions.dim() == 2 else positions[None]


def _forget_lengths(rotary: Any, length: int, device: torch.device) -> None:
    """Make a `dynamic` rotary module choose its frequencies by this sequence alone."""
    refuse_lengths(rotary, [length])
    frequencies = rotary.original_inv_freq.to(device)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    rotary.max_seq_len_cached = int(rotary.original_max_seq_len)


def rope_types(rotary: Any) -> set[str]:
    """Return the types of a rotary module; one whose layers are of several kinds may have several."""
    kinds = getattr(rotary, "rope_type", "default")
    return {*kinds.values()} if isinstance(kinds, dict) else {str(kinds)}


def remembers_lengths(rotary: Any) -> bool:
    """Return whether a rotary module depends on the longest sequence so far."""
    dynamic = any("dynamic" in kind for kind in rope_types(rotary))
    if dynamic and isinstance(rotary.rope_type, dict):
        raise PenstockError(
            f"cannot split a model with a {type(rotary).__name__} of rope_type 'dynamic': each kind of layer keeps "
            "the frequencies of the longest sequence so far\n"
            "  choose another rope_type, such as 'yarn'"
        )
    return dynamic


def refuse_lengths(rotary: Any, lengths: Iterable[int]) -> None:
    """Refuse lengths for which a `dynamic` rotary module would depend on its history.

    The module keeps the frequencies of the longest sequence so far, and uses them for
    all later sequences of `max_position_embeddings` tokens or more. The result would
    depend on the order of the micro-batches, which a schedule changes and recomputation
    repeats. So only one length of that size is accepted.
    """
    if not remembers_lengths(rotary):
        return
    plain = int(rotary.original_max_seq_len)
    cached = int(rotary.max_seq_len_cached)
    for length in lengths:
        if length < plain:
            continue
        longest = cached if cached > plain else length
        first = getattr(rotary, "long_length", longest)
        if length != first:
            raise ShapeError(
                f"sequences of {first} and of {length} tokens cannot be mixed with rope_type={rotary.rope_type!r}: "
                "Hugging Face's model keeps the frequencies of the longest one so far, so their order would matter\n"
                "give all sequences (or the longest document of each micro-batch) the same length, or fewer than "
                f"{plain} tokens (max_position_embeddings), or choose another rope_type, such as 'yarn'"
            )
        rotary.long_length = length


UNSLICEABLE = "its tokens see later tokens, so a slice cannot run before the whole sequence is known"


class EncoderRunner(Runner):
    """Hugging Face's encoder with the pieces of one part."""

    def __init__(
        self, model: nn.Module, pieces: Pieces, part: nn.Module, portion: Portion
    ) -> None:
        super().__init__(model, pieces, part, portion)
        assert pieces.encoding is not None
        self.encoding: Encoding = pieces.encoding
        self.kernel = str(self.base.config._attn_implementation)
        if self.first and self.encoding.table:
            table = submodule(part, self.encoding.table)
            self.longest = table.num_embeddings - self.encoding.first

    def stand_in(self, piece: nn.Module) -> Any:
        """What takes the place of an embedding that only the first part runs."""
        return partial(_arrived, self.visit)

    def __call__(
        self,
        x: Tensor,
        piece: Slice | None,
        types: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Turn token ids, or the hidden state of the part before, into the next hidden state or logits."""
        arguments: dict[str, Any] = {"attention_mask": attention_mask}
        if self.first:
            self.refuse_length(x.shape[1])
            arguments["input_ids"] = x
            if types is not None:
                arguments["token_type_ids"] = types
        else:
            self.visit.arrived = x
            arguments["inputs_embeds"] = x
        starts = None if piece is None else piece.carry.starts
        if starts is not None:
            starts = starts.to(x.device)
            arguments["position_ids"] = self._positions(x, starts)
            self._refuse_mask(attention_mask)
            seen = (starts[:, :, None] == starts[:, None, :])[:, None]
            self.visit.apart = partial(_kept_apart, seen, self.kernel == "eager")
        return self.run(arguments, piece)

    def _positions(self, x: Tensor, starts: Tensor) -> Tensor:
        """The position of each token in its document, counted as the model does.

        Only the first part knows which words are not counted; the others are told the plain positions.
        """
        place = torch.arange(starts.shape[1], device=x.device)
        first, padding = self.encoding.first, self.encoding.padding
        if padding is None or not self.first:
            return place - starts + first
        counted = (x != padding).long()
        so_far = counted.cumsum(1)
        before = (so_far - counted).gather(1, starts)
        return (so_far - before) * counted + first - 1

    def _refuse_mask(self, attention_mask: Tensor | None) -> None:
        """Refuse what packed documents do not go with."""
        if attention_mask is not None:
            raise PenstockError(
                "rows have packed documents and an attention_mask: padding is a document of its own, so leave out "
                "the mask"
            )
        if self.kernel not in ("eager", "sdpa"):
            raise PenstockError(
                f"{self.kernel} would look across packed documents; call model.set_attn_implementation('sdpa')"
            )


def runner_of(
    model: nn.Module, pieces: Pieces, part: nn.Module, portion: Portion
) -> Runner:
    """Return what runs a part of a model."""
    kind = Runner if pieces.encoding is None else EncoderRunner
    return kind(model, pieces, part, portion)


def _arrived(visit: Visit, *args: object, **kwargs: object) -> Tensor:
    """An embedding of another part: its result, which has arrived, whatever it is asked for."""
    assert visit.arrived is not None
    return visit.arrived


def _kept_apart(seen: Tensor, adds: bool, given: Tensor | None, x: Tensor) -> Tensor:
    """One mask for layers that get x: what Hugging Face's mask hides, and other documents of a packed row.

    `seen` says whether two tokens are in the same document, `adds` whether the kernel adds masks to its scores.
    """
    if given is None and not adds:
        return seen
    if given is not None and given.dtype == torch.bool:
        return given & seen
    if given is None:
        given = torch.zeros_like(seen, dtype=x.dtype)
    return given.masked_fill(~seen, torch.finfo(given.dtype).min)
