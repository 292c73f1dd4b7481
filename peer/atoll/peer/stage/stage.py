"""One stage's weights, and what is done with them: forward, backward, and the transaction that a step is.

Theory of operation. Between :meth:`Stage.begin` and :meth:`Stage.commit` or :meth:`Stage.void` a step only adds to gradients
and works on copies of the buffers that the model changes; weights, optimizer state and buffers change in ``commit`` alone, so
voiding a step means to forget. Each microbatch's forward takes a copy of the changed buffers as the one before left them and
leaves its own copy behind: what autograd has saved is never overwritten, and a recomputation can start from where the first
forward started.

The owner calls everything from one thread, in the order that the schedule gives; microbatches go forward and backward in
ascending order, which is the order in which gradients accumulate. Tensors come in and go out on the host. Nothing here waits,
sends, or knows of other peers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.autograd.graph import GradientEdge

from atoll.peer.stage.arrivals import Arrivals, Forwarded, MicrobatchInput, describe
from atoll.peer.stage.backward import Deferred, backward
from atoll.peer.stage.executor import Layout, Program, base_slots
from atoll.peer.stage.flight import Executed, Flight, Recording
from atoll.peer.stage.gradient_home import GradientHome
from atoll.peer.stage.initialisation import initial_value
from atoll.peer.stage.lasting import lasting_copy, lasting_zeros
from atoll.peer.stage.optimizer import Optimizer, squared_norm
from atoll.peer.stage.shared_gradients import SharedGradients
from atoll.peer.stage.staging import Staging, staging_for
from atoll.protocol.assignment import OptimizerSettings
from atoll.protocol.errors import NumericalFault, WireError
from atoll.protocol.graph import (
    BufferReference,
    BufferSpec,
    InputReference,
    ParameterReference,
    ParameterSpec,
    Reference,
    StageGraph,
    ValueReference,
)
from atoll.protocol.ids import MicrobatchIndex, StepNumber
from atoll.protocol.limits import DEFAULT_LIMITS, Limits
from atoll.protocol.randomness import node_seed
from atoll.protocol.state import COUNTER, MOMENTS, moment_name

__all__ = ["Forwarded", "MicrobatchInput", "Stage", "StageSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSettings:
    """How a stage computes. ``precision`` is "fp32" or "bf16" (autocast); ``recompute`` keeps no activations for backward;
    ``limits`` bound the sizes that batches may give to values."""

    run_seed: int
    device: torch.device
    optimizer: OptimizerSettings
    precision: str = "fp32"
    recompute: bool = False
    limits: Limits = DEFAULT_LIMITS


class Stage:
    """A stage graph with its parameters, buffers, gradients and optimizer.

    ``staging`` is how values come in and go out, by default from and to the host."""

    def __init__(self, graph: StageGraph, settings: StageSettings, staging: Staging | None = None) -> None:
        self.graph = graph
        self.settings = settings
        self._device = settings.device
        self._staging = staging_for(settings.device) if staging is None else staging
        self._arrivals = Arrivals(graph, self._staging, settings.limits, lower_precision=settings.precision == "bf16")
        self._layout = Layout(graph)
        self._training = Program(graph, self._layout, settings.device, evaluation=False)
        self._evaluation = Program(graph, self._layout, settings.device, evaluation=True)
        arrivals: list[Reference] = [InputReference(name) for name, _ in graph.inputs]
        arrivals += [boundary.value for boundary in graph.receives if not boundary.differentiable]
        self._at_risk = self._training.inputs_at_risk(arrivals) | self._evaluation.inputs_at_risk(arrivals)
        self._mutated = tuple(buffer.name for buffer in graph.buffers if buffer.mutated)
        self._parameters: dict[str, torch.Tensor] = {}
        self._uses: dict[int, torch.Tensor] = {}
        self._shared = SharedGradients(graph, self._layout, self._uses, self._staging)
        self._buffers: dict[str, torch.Tensor] = {}
        self._working: dict[str, torch.Tensor] = {}
        self._flights: dict[MicrobatchIndex, Flight] = {}
        self._deferred: dict[MicrobatchIndex, tuple[Deferred, ...]] = {}
        self._step = StepNumber(0)
        self.optimizer = Optimizer(settings.optimizer)

    # State.

    def initialise(self, given: Mapping[str, torch.Tensor] | None = None) -> None:
        """First values: those ``given``, the others from their initialisation programs.

        Raises GraphRefused for a tensor that has neither, WireError for a given one of another shape.
        """
        self.adopt({name: lasting_copy(value) for name, value in (given or {}).items()})

    def adopt(self, state: Mapping[str, torch.Tensor]) -> None:
        """State by name, as :meth:`full_state` has it; what it has too much is ignored, what it lacks gets its first value.

        Tensors that are on this stage's device become its own as they are. Raises as :meth:`initialise` does.
        """
        for spec in self.graph.parameters:
            self._parameters[spec.name] = self._room(spec, state).requires_grad_(spec.trainable)
            for moment in MOMENTS[self.settings.optimizer.name]:
                value = state.get(moment_name(spec.name, moment))
                if value is not None:
                    self.optimizer.load(spec.name, moment, value if moment == COUNTER else value.to(self._device))
        for buffer in self.graph.buffers:
            self._buffers[buffer.name] = self._room(buffer, state)
        for shared in self.graph.shared:
            for use in shared.uses:
                if use.stage == self.graph.stage:
                    # Shares the parameter's memory, but is a leaf of its own, with its own ``.grad``.
                    alias = self._parameters[shared.name].detach().requires_grad_()
                    self._uses[self._layout.use(use)] = alias
        self._settle_gradients()
        self.optimizer.prepare({name: value for name, value in self._parameters.items() if value.requires_grad})
        constants: dict[Reference, torch.Tensor] = {ParameterReference(name): value for name, value in self._parameters.items()}
        constants.update((BufferReference(name), value) for name, value in self._buffers.items())
        self._base = base_slots(self._layout, constants, self._uses)
        self._fill(state)

    def _room(self, spec: ParameterSpec | BufferSpec, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The value in ``state``, or room for a first value."""
        if spec.name not in state:
            return lasting_zeros(spec.shape, spec.dtype, self._device)
        value = state[spec.name]
        if tuple(value.shape) != spec.shape:
            raise WireError(f"the value of {spec.name} has shape {tuple(value.shape)} instead of {spec.shape}")
        return value.detach().to(device=self._device, dtype=spec.dtype)

    @torch.no_grad()
    def _fill(self, state: Mapping[str, torch.Tensor]) -> None:
        """First values for what has none. Last of all: what is made on the way comes and goes, nothing that stays may lie
        between."""
        for spec in self.graph.parameters:
            if spec.name not in state:
                self._parameters[spec.name].copy_(initial_value(spec, self.settings.run_seed))
        for buffer in self.graph.buffers:
            if buffer.name not in state:
                self._buffers[buffer.name].copy_(initial_value(buffer, self.settings.run_seed))

    def _settle_gradients(self) -> None:
        """Gives the gradients memory that is kept from step to step.

        Not that of a parameter shared with other stages: it is being sent to them, maybe still when the next step begins.
        """
        sent = self._shared.sent_slots()
        leaves = [value for value in self._parameters.values() if value.requires_grad]
        leaves += [leaf for slot, leaf in self._uses.items() if slot not in sent]
        for leaf in leaves:
            leaf.register_hook(GradientHome(leaf))  # type: ignore[no-untyped-call]

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters and persistent buffers as of the last commit, on the host, by canonical name.

        On the CPU these are the stage's own tensors: read them before the next commit.
        """
        for name, value in self._parameters.items():
            yield name, value.detach().to("cpu")
        for buffer in self.graph.buffers:
            if buffer.persistent:
                yield buffer.name, self._buffers[buffer.name].to("cpu")

    def full_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All that training has made of this stage as of the last commit, by the names of ``atoll.protocol.state``: the stage's
        own tensors, on its device. They change with the next commit."""
        for name, value in self._parameters.items():
            yield name, value.detach()
        for name, moment, value in self.optimizer.state():
            yield moment_name(name, moment), value
        yield from self._buffers.items()

    @property
    def in_flight(self) -> int:
        """Microbatches that went forward and not yet backward."""
        return len(self._flights)

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights, buffers, gradients and optimizer state, from the first moment: room is made for all of them."""
        tensors = [*self._parameters.values(), *self._buffers.values()]
        tensors += [leaf for leaf in (*self._parameters.values(), *self._uses.values()) if leaf.requires_grad]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors) + self.optimizer.num_bytes

    # A step.

    def begin(self, step: StepNumber) -> None:
        """Opens ``step``; whatever an unfinished one left is forgotten."""
        self.void()
        self._step = step

    def forward(self, microbatch: MicrobatchInput) -> Forwarded:
        """Runs one microbatch; in training it is in flight afterwards.

        Raises NumericalFault for a loss or a differentiable value that is not finite, WireError for inputs or received values
        that are not what the graph says.
        """
        self._step = microbatch.step
        microbatch = self._arrivals.forward(microbatch)
        if microbatch.evaluation:
            with torch.no_grad():
                return self._forwarded(self._execute(microbatch, self._buffers))
        buffers = self._working or self._buffers
        executed = self._execute(microbatch, buffers)
        self._working = executed.buffers
        forwarded, recording = self._forwarded(executed), executed.recording()
        if self.settings.recompute:
            # What was recorded is dropped: the same kernels as with gradients, whose choice depends on it, at no more memory
            # than the backward pass takes anyway.
            self._flights[microbatch.index] = Flight(microbatch, buffers, None)
        else:
            kept = replace(microbatch, inputs={}, received={})
            self._flights[microbatch.index] = Flight(kept, {}, recording)
        return forwarded

    def backward(
        self, index: MicrobatchIndex, gradients: Mapping[ValueReference, torch.Tensor]
    ) -> dict[ValueReference, torch.Tensor]:
        """The gradients of the differentiable received values, given those of the differentiable sent ones.

        The parameters' gradients may be left for :meth:`accumulate`. Raises NumericalFault for a gradient that is not finite.
        """
        flight = self._flights.pop(index)
        recording = flight.recording
        if recording is None:
            recording = self._execute(flight.microbatch, flight.buffers).recording()
        roots, incoming = self._roots(flight.microbatch, recording, gradients)
        found, self._deferred[index] = backward(roots, incoming, tuple(recording.leaves.values()))
        outgoing: dict[ValueReference, torch.Tensor] = {}
        for (value, leaf), result in zip(recording.leaves.items(), found, strict=True):
            gradient = torch.zeros_like(leaf) if result is None else result
            self._require_finite(gradient, f"the gradient of {describe(value)}")
            outgoing[value] = self._staging.to_host(gradient)
        return outgoing

    def accumulate(self, index: MicrobatchIndex) -> None:
        """Adds what :meth:`backward` left over to the parameters' gradients; does nothing when that is done."""
        for deferred in self._deferred.pop(index, ()):
            deferred.run()

    def own_gradients(self) -> tuple[torch.Tensor, ...]:
        """The step's gradient of each parameter and of each own use of a shared one, on the host and in an order that the graph
        alone decides; none of those that no loss depends on."""
        self._accumulate_all()
        return tuple(self._staging.to_host(leaf.grad) for leaf in self._trained_leaves() if leaf.grad is not None)

    @torch.no_grad()
    def take_gradients(self, gradients: Sequence[torch.Tensor]) -> None:
        """In place of :meth:`own_gradients`, those of all replicas of this stage, summed."""
        leaves = [leaf for leaf in self._trained_leaves() if leaf.grad is not None]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            assert leaf.grad is not None
            leaf.grad.copy_(self._staging.to_device(gradient))

    @torch.no_grad()
    def follow(self, other: Stage) -> None:
        """Takes the values of the parameters of ``other``, of the same graph, and forgets what the optimizer knew."""
        for name, value in self._parameters.items():
            value.copy_(other._parameters[name])
        self.optimizer.forget()

    @torch.no_grad()
    def take_change(self, other: Stage, share: float) -> None:
        """In place of the step's gradient: by how much the parameters went down in ``other``, which began with the same, times
        ``share``."""
        for spec in self.graph.parameters:
            if spec.trainable:
                value = self._parameters[spec.name]
                value.grad = value.detach().sub(other._parameters[spec.name]).mul_(share)

    def _trained_leaves(self) -> Iterator[torch.Tensor]:
        """What gets gradients."""
        yield from (self._parameters[spec.name] for spec in self.graph.parameters if spec.trainable)
        yield from (self._uses[slot] for slot in sorted(self._uses))

    def tied_gradients(self) -> dict[str, torch.Tensor]:
        """The step's gradient of each own use of a parameter that other stages hold too, by "NAME@NODE:POSITION"."""
        self._accumulate_all()
        return self._shared.outgoing()

    def finish(self, tied: Mapping[str, torch.Tensor] | None = None) -> dict[str, float]:
        """Completes the step's gradients with the ``tied`` ones of other stages.

        Returns the squared norm for each trainable parameter whose norm this stage reports; raises NumericalFault for one that
        is not finite.
        """
        assert not self._flights, "a microbatch is still in flight"
        self._accumulate_all()
        for name, gradient in self._shared.totals(tied or {}):
            self._parameters[name].grad = gradient
        elsewhere = {shared.name for shared in self.graph.shared if shared.uses[0].stage != self.graph.stage}
        norms: dict[str, float] = {}
        for spec in self.graph.parameters:
            if spec.trainable and spec.name not in elsewhere:
                norms[spec.name] = squared_norm(self._parameters[spec.name].grad)
                if not math.isfinite(norms[spec.name]):
                    raise self._fault(f"a gradient of {spec.name} that is not finite")
        return norms

    def commit(self, clip_factor: float, learning_rate: float) -> None:
        """The step happens: clips, updates the weights, and makes the changed buffers the stage's own."""
        trained = {name: value for name, value in self._parameters.items() if value.grad is not None}
        if clip_factor != 1.0:
            for value in trained.values():
                assert value.grad is not None
                value.grad.mul_(clip_factor)
        self.optimizer.update(trained, learning_rate)
        for name, value in self._working.items():
            self._buffers[name] = value
            self._base[self._layout.slots[BufferReference(name)]] = value
        self.void()

    def void(self) -> None:
        """The step never happened: drops gradients, flights and changed buffers. Possible at any moment."""
        self._flights.clear()
        self._deferred.clear()
        self._working = {}
        for leaf in (*self._parameters.values(), *self._uses.values()):
            leaf.grad = None

    # Details.

    def _execute(self, microbatch: MicrobatchInput, buffers: Mapping[str, torch.Tensor]) -> Executed:
        """Runs the graph's nodes on one microbatch, changing copies of the mutated buffers."""
        changed = {name: buffers[name].clone() for name in self._mutated}
        leaves = self._leaves(microbatch)
        arrived: dict[Reference, torch.Tensor] = {InputReference(name): value for name, value in microbatch.inputs.items()}
        arrived.update(microbatch.received.items())
        arrived.update(leaves.items())
        arrived.update((BufferReference(name), value) for name, value in changed.items())
        slots = list(self._base)
        for reference, value in arrived.items():
            slots[self._layout.slots[reference]] = value.clone() if reference in self._at_risk else value
        program = self._evaluation if microbatch.evaluation else self._training
        with self._autocast():
            program.run(
                slots, microbatch.bindings, partial(node_seed, self.settings.run_seed, microbatch.step, microbatch.index)
            )
        return Executed(
            leaves=leaves,
            outputs={boundary.value: slots[program.slot(boundary.value)] for boundary in self.graph.sends},
            loss=slots[program.slot(self.graph.loss)] if self.graph.loss is not None else None,
            metrics={name: slots[program.slot(value)] for name, value in self.graph.metrics},
            buffers=changed,
        )

    def _forwarded(self, executed: Executed) -> Forwarded:
        """What the forward gives to the outside; raises NumericalFault when it is not finite."""
        for boundary in self.graph.sends:
            if boundary.differentiable:
                self._require_finite(executed.outputs[boundary.value], describe(boundary.value))
        loss = None if executed.loss is None else float(executed.loss.detach())
        if loss is not None and not math.isfinite(loss):
            raise self._fault(f"a loss of {loss}")
        return Forwarded(
            sends={value: self._staging.to_host(tensor) for value, tensor in executed.outputs.items()},
            loss=loss,
            metrics={name: float(value.detach()) for name, value in executed.metrics.items()},
        )

    def _leaves(self, microbatch: MicrobatchInput) -> dict[ValueReference, torch.Tensor]:
        """The received values that send a gradient back, as autograd leaves; none in evaluation."""
        if microbatch.evaluation:
            return {}
        return {
            boundary.value: microbatch.received[boundary.value].detach().requires_grad_()
            for boundary in self.graph.receives
            if boundary.differentiable
        }

    def _roots(
        self, microbatch: MicrobatchInput, recording: Recording, gradients: Mapping[ValueReference, torch.Tensor]
    ) -> tuple[list[GradientEdge], list[torch.Tensor]]:
        """Where gradients enter, and these: of the values sent, and of the loss by the microbatch's weight."""
        roots: list[GradientEdge] = []
        incoming: list[torch.Tensor] = []
        for boundary in self.graph.sends:
            if boundary.differentiable:
                gradient = self._arrivals.gradient(boundary, gradients, microbatch.bindings)
                self._require_finite(gradient, f"the gradient of {describe(boundary.value)}")
                if boundary.value in recording.edges:
                    roots.append(recording.edges[boundary.value])
                    incoming.append(gradient)
        if recording.loss is not None:
            roots.append(recording.loss)
            incoming.append(torch.tensor(microbatch.scale, dtype=recording.loss_dtype, device=self._device))
        return roots, incoming

    def _autocast(self) -> AbstractContextManager[object]:
        if self.settings.precision == "bf16":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return nullcontext()

    def _require_finite(self, tensor: torch.Tensor, what: str) -> None:
        # A finite sum has finite terms and is far cheaper than looking at each; one that is not may be a mere overflow.
        if not math.isfinite(float(tensor.detach().sum())) and not bool(torch.isfinite(tensor).all()):
            raise self._fault(f"{what}, which is not finite,")

    def _fault(self, what: str) -> NumericalFault:
        return NumericalFault(self.graph.stage, self._step, what)

    def _accumulate_all(self) -> None:
        for index in list(self._deferred):
            self.accumulate(index)
