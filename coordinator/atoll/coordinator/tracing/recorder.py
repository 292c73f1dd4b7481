"""Records how the tensors of a model come to be, while its constructor runs on the meta device.

Theory of operation. A dispatch mode sees every operator that the constructor calls. Each call is kept with *handles* in place
of its tensors; tensors are recognised by their memory (storage, offset, sizes, strides), so a parameter made from a tensor, or
a view of it that is filled, is known for what it is. From this list, :meth:`Recorder.calls_behind` picks what one tensor
depends on. Values that the constructor itself looks at (``.item()``, ``.tolist()``) are computed on the spot from that list.

Some of torch's own initialisers do nothing on meta tensors, because sampling there would be in vain; here they are made to run,
and where they loop until all samples fit, they are replaced by an equal distribution without a loop.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from atoll.coordinator.tracing.replacing import replaced
from atoll.protocol.errors import TraceError

_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        "zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
        "geometric_",
    )
)  # fmt: skip
"""Operators that set every element of their first argument whatever it was before."""

EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
"""Operators whose result has no defined content; a model that never sets it gets zeros."""


@dataclass(frozen=True, slots=True)
class Handle:
    """Stands for a tensor in a recorded call."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A recorded call; or, with ``operator`` None, a tensor that came from outside, with ``constant`` its content.

    ``overwrites`` is the memory that the call sets as a whole. ``unknown`` marks a tensor whose content nobody knows.
    """

    index: int
    operator: OpOverload | None
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any]
    outputs: tuple[Handle | None, ...]
    templates: tuple[Tensor | None, ...]
    writes: frozenset[int] = frozenset()
    overwrites: int | None = None
    constant: Tensor | None = None
    unknown: bool = False

    @property
    def inputs(self) -> tuple[Handle, ...]:
        """The handles among the arguments, in order."""
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return tuple(leaf for leaf in leaves if isinstance(leaf, Handle))

    @property
    def random(self) -> bool:
        return self.operator is not None and torch.Tag.nondeterministic_seeded in self.operator.tags


@dataclass(frozen=True, slots=True)
class _Value:
    call: int
    output: int
    storage: int


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _place(tensor: Tensor) -> tuple[object, ...]:
    """What identifies a tensor while its memory is kept alive."""
    return (_storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The list of calls so far."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self._values: list[_Value] = []
        self._handles: dict[tuple[object, ...], Handle] = {}
        self._writers: dict[int, list[int]] = defaultdict(list)
        self._known_storages: set[int] = set()
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
            return self.real(args[0]).item()
        self._meet_strangers(function, args, kwargs)
        arguments, keywords = pytree.tree_map_only(Tensor, self._handle, (tuple(args), dict(kwargs)))
        result = function(*args, **kwargs)
        self._record(function, arguments, keywords, result, args, kwargs)
        return result

    def handle(self, tensor: Tensor) -> Handle:
        """The handle of ``tensor``; a view that no recorded call made is recorded as one of the whole memory."""
        if _storage(tensor) not in self._known_storages:
            self._enter(tensor, overwritten=False)
        return self._handle(tensor)

    def calls_behind(self, handle: Handle, before: int | None = None) -> list[Call]:
        """The calls that the tensor's content depends on, in order."""
        needed: set[int] = set()
        self._need(handle, len(self.calls) if before is None else before, needed)
        return [self.calls[index] for index in sorted(needed)]

    def output_of(self, handle: Handle) -> tuple[int, int]:
        """(index of the call that made the tensor, number of its result)."""
        value = self._values[handle.number]
        return value.call, value.output

    def storage_of(self, handle: Handle) -> int:
        """The memory that the tensor lives in."""
        return self._values[handle.number].storage

    def real(self, tensor: Tensor) -> Tensor:
        """The content of a meta tensor, computed now."""
        with _disable_current_modes(), torch.no_grad():
            handle = self.handle(tensor)
            calls = self.calls_behind(handle)
            if any(call.random for call in calls):
                raise TraceError("the model's constructor looks at random numbers that it drew; decide without them")
            return self.replay(calls, handle)

    def replay(self, calls: list[Call], wanted: Handle) -> Tensor:
        """Executes ``calls`` on the CPU and returns the tensor of ``wanted``."""
        results: dict[tuple[int, int], Tensor] = {}

        def content(handle: Handle) -> Tensor:
            return results[self.output_of(handle)]

        for call in calls:
            if call.operator is None:
                results[call.index, 0] = _content(call)
                continue
            arguments, keywords = pytree.tree_map_only(Handle, content, (call.arguments, call.keywords))
            arguments, keywords = pytree.tree_map_only(torch.device, lambda device: torch.device("cpu"), (arguments, keywords))
            found = call.operator(*arguments, **{name: value for name, value in keywords.items() if name != "generator"})
            for number, result in enumerate(found if isinstance(found, list | tuple) else [found]):
                results[call.index, number] = result.zero_() if call.operator in EMPTY else result
        return content(wanted)

    def _need(self, first: Handle, before: int, needed: set[int]) -> None:
        covered: set[tuple[int, int]] = set()
        contents = [(self._values[first.number].storage, before)]
        makers = [self._values[first.number].call]
        while contents or makers:
            if makers:
                call = self.calls[makers.pop()]
                if call.index in needed:
                    continue
                needed.add(call.index)
                for handle in call.inputs:
                    value = self._values[handle.number]
                    makers.append(value.call)
                    if value.storage != call.overwrites or handle != call.arguments[0]:
                        contents.append((value.storage, call.index))
            else:
                storage, time = contents.pop()
                if (storage, time) in covered:
                    continue
                covered.add((storage, time))
                makers.extend(self._writers_before(storage, time))

    def _writers_before(self, storage: int, time: int) -> list[int]:
        writers = [index for index in self._writers[storage] if index < time]
        for position in range(len(writers) - 1, -1, -1):
            if self.calls[writers[position]].overwrites == storage:
                return writers[position:]
        return writers

    def _meet_strangers(self, function: OpOverload, args: Any, kwargs: Any) -> None:
        """Enters tensors that no recorded call made: their content is kept, unless the call sets all of it."""
        for position, tensor in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(tensor, Tensor) and _storage(tensor) not in self._known_storages:
                self._enter(tensor, overwritten=position == 0 and function._schema.name in _OVERWRITES)

    def _enter(self, tensor: Tensor, *, overwritten: bool) -> None:
        index = len(self.calls)
        self._adopt(tensor)
        real = tensor.device.type != "meta"
        call = Call(
            index=index,
            operator=None,
            keywords={},
            outputs=(self._new_handle(tensor, index, 0),),
            templates=(torch.empty_like(tensor, device="meta"),),
            constant=tensor.detach().clone() if real and not overwritten else None,
            unknown=not real and not overwritten,
        )
        self.calls.append(call)

    def _adopt(self, tensor: Tensor) -> None:
        self._known_storages.add(_storage(tensor))
        self._alive.append(tensor)

    def _new_handle(self, tensor: Tensor, call: int, output: int) -> Handle:
        handle = Handle(len(self._values))
        self._values.append(_Value(call, output, _storage(tensor)))
        self._handles[_place(tensor)] = handle
        return handle

    def _handle(self, tensor: Tensor) -> Handle:
        known = self._handles.get(_place(tensor))
        if known is not None:
            return known
        storage = _storage(tensor)
        whole = next(Handle(number) for number, value in enumerate(self._values) if value.storage == storage)
        index = len(self.calls)
        handle = self._new_handle(tensor, index, 0)
        arguments = (whole, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        operator = torch.ops.aten.as_strided.default
        template = tensor.detach()
        self.calls.append(
            Call(index=index, operator=operator, arguments=arguments, keywords={}, outputs=(handle,), templates=(template,))
        )
        return handle

    def _record(self, function: OpOverload, arguments: Any, keywords: Any, result: Any, args: Any, kwargs: Any) -> None:
        results = result if isinstance(result, list | tuple) else [result]
        writes = frozenset(_written_storages(function, args, kwargs))
        fresh = [item for item in results if isinstance(item, Tensor) and _place(item) not in self._handles]
        if not writes and not fresh:
            return
        index = len(self.calls)
        outputs: list[Handle | None] = []
        for number, item in enumerate(results):
            if not isinstance(item, Tensor):
                outputs.append(None)
                continue
            if _storage(item) not in self._known_storages:
                self._adopt(item)
            outputs.append(self._handles.get(_place(item)) or self._new_handle(item, index, number))
        whole = (
            args and isinstance(args[0], Tensor) and args[0].numel() * args[0].itemsize == args[0].untyped_storage().nbytes()
        )
        overwrites = _storage(args[0]) if whole and function._schema.name in _OVERWRITES else None
        self.calls.append(
            Call(
                index=index,
                operator=function,
                arguments=arguments,
                keywords=keywords,
                outputs=tuple(outputs),
                templates=tuple(item.detach() if isinstance(item, Tensor) else None for item in results),
                writes=writes,
                overwrites=overwrites,
            )
        )
        for storage in writes:
            self._writers[storage].append(index)


def _content(call: Call) -> Tensor:
    """The content of a tensor that came from outside, for one replay to change as it likes."""
    template = call.templates[0]
    assert template is not None
    if call.unknown:
        raise TraceError(
            f"the model's constructor uses a tensor of shape {tuple(template.shape)} whose content cannot be followed; make it "
            "from numbers, or with torch's functions, or with device='cpu'"
        )
    return torch.zeros(template.shape, dtype=template.dtype) if call.constant is None else call.constant.clone()


def _written_storages(function: OpOverload, args: Any, kwargs: Any) -> Iterator[int]:
    named = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in function._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named:
            for tensor in pytree.tree_leaves(named[argument.name]):
                if isinstance(tensor, Tensor):
                    yield _storage(tensor)


_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class _Functions(TorchFunctionMode):
    """What happens above the operators: constants from Python values, and questions that only real tensors can answer."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0] if args else None, Tensor):
            device = torch.device(kwargs.pop("device", None) or "meta")
            made = function(*args, **kwargs, device="cpu")
            return made.to(device) if device.type == "meta" else made
        if function == _IS_META and sys._getframe(1).f_globals.get("__name__") == nn.init.__name__:
            return False
        if function in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__) and args[0].device.type == "meta":
            return function(self._recorder.real(args[0]), *args[1:], **kwargs)
        return function(*args, **kwargs)


def _truncated_normal(tensor: Tensor, mean: float, std: float, a: float, b: float, generator: object = None) -> Tensor:
    """``nn.init.trunc_normal_`` by the inverse of the distribution function: no loop until all samples fit."""

    def below(bound: float) -> float:
        return math.erf((bound - mean) / std / math.sqrt(2.0))

    with torch.no_grad():
        tensor.uniform_(below(a), below(b))
        tensor.erfinv_().mul_(std * math.sqrt(2.0)).add_(mean)
        return tensor.clamp_(min=a, max=b)


@contextlib.contextmanager
def recording_calls(recorder: Recorder) -> Iterator[None]:
    """Everything made inside lives on the meta device and is recorded."""
    original: Callable[..., Tensor] = nn.init._no_grad_trunc_normal_

    def truncated(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return (_truncated_normal if tensor.device.type == "meta" else original)(tensor, *args, **kwargs)

    with (
        replaced(nn.init, {"_no_grad_trunc_normal_": truncated}),
        torch.device("meta"),
        _Functions(recorder),
        recorder,
    ):
        yield
