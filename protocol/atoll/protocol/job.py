"""The job file: what to train, on what data, how. One frozen model, checked as a whole before anything starts.

:func:`load_job` reads a file and the ``--set`` overrides; every path in the result is absolute. Whatever is wrong raises a
:class:`JobError` of one sentence: the dotted path of the field, the value found and the fix. Wording is ``job_errors``'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from atoll.protocol.averaging import Averaging, Transport, rank_of
from atoll.protocol.codec_names import ADAPTIVE, LADDER, OTHERS
from atoll.protocol.errors import JobError
from atoll.protocol.job_data import DataSection
from atoll.protocol.job_errors import WrongValue, job_error, listed, show, suggestion
from atoll.protocol.job_fields import AutoOrBoolean, AutoOrPositive, Fraction, Positive, Section
from atoll.protocol.job_model import ModelSection
from atoll.protocol.job_text import apply_overrides, parse_job_text
from atoll.protocol.quantities import parse_rate

COLOURS = 3  # channels of the images that the built-in ResNet takes
CODECS = ("auto", *LADDER, *OTHERS, ADAPTIVE)


Pinned = str | Annotated[tuple[str, ...], Field(strict=False)]
"""One peer, or several."""


class OptimizerSection(Section):
    """The update rule. Weight decay applies to every parameter."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0.0, examples=[0.001])] = 1e-3
    """The highest learning rate, reached after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0.0, examples=[0.1])] = 0.0
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False, examples=[[0.9, 0.95]])] = (0.9, 0.999)
    """Decay of the first and second moment (adamw)."""
    epsilon: Annotated[float, Field(gt=0.0, examples=[1e-8])] = 1e-8
    """Added to the root of the second moment (adamw)."""
    momentum: Annotated[Fraction, Field(examples=[0.9])] = 0.0
    """Momentum (sgd)."""
    nesterov: bool = False
    """Nesterov's form of momentum (sgd)."""

    @model_validator(mode="after")
    def _belongs_to_the_rule(self) -> Self:
        foreign = {"adamw": ("momentum", "nesterov"), "sgd": ("betas", "epsilon")}[self.name]
        for key in foreign:
            if key in self.model_fields_set:
                raise WrongValue(key, f"{show(getattr(self, key))} has no meaning for {self.name}; remove this key")
        if self.nesterov and self.momentum == 0.0:
            raise WrongValue("nesterov", "true needs a momentum above 0; set momentum, for example 0.9")
        return self


class ScheduleSection(Section):
    """The learning rate over the steps: a linear warm-up, then a decay to ``final`` times the highest."""

    warmup: Annotated[int, Field(ge=0, examples=[10])] = 0
    """Steps until the learning rate is at its highest."""
    decay: Literal["cosine", "linear", "constant"] = "constant"
    final: Annotated[float, Field(ge=0.0, le=1.0, examples=[0.1])] = 0.0
    """The learning rate of the last step as a fraction of the highest; ``constant`` ignores it."""


class TrainingSection(Section):
    """How long, in what portions and by what rule."""

    steps: Annotated[Positive, Field(examples=[60])]
    """Optimizer steps."""
    batch: Annotated[Positive, Field(examples=[16])]
    """Samples in an optimizer step, whatever the placement."""
    microbatch: AutoOrPositive = 1
    """Samples that flow through the stages together; divides ``batch``. auto leaves the choice to the first plan."""
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    clip_norm: Annotated[float | None, Field(gt=0.0, examples=[1.0])] = None
    """Largest norm of the whole gradient; null never clips."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 computes under autocast; weights and optimizer stay in fp32."""
    evaluate_every: Annotated[int | None, Field(ge=1, examples=[20])] = None
    """Steps between evaluations on the validation samples; null never evaluates."""
    evaluation_batches: Annotated[Positive, Field(examples=[4])] = 4
    """At most this many batches of validation samples in one evaluation; always the same ones."""
    evaluate_without_codecs: bool = False
    """Evaluate a second time, with links that lose nothing: the gap is what codecs do to this model's evaluation."""
    seed: Annotated[int, Field(ge=0, lt=2**63, examples=[0])] = 0
    """Decides initial weights, dropout masks and the order of the samples."""

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """The sizes that a microbatch may have, the smallest first: the one that is given, or all that divide ``batch``."""
        if self.microbatch != "auto":
            return (self.microbatch,)
        return _divisors(self.batch)

    @property
    def microbatch_samples(self) -> int:
        """Samples in a microbatch, once that is decided."""
        assert self.microbatch != "auto", "the first plan decides the size of a microbatch"
        return self.microbatch

    @property
    def num_microbatches(self) -> int:
        """Microbatches in an optimizer step, once their size is decided."""
        return self.batch // self.microbatch_samples

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.evaluate_without_codecs and self.evaluate_every is None:
            raise WrongValue(
                "evaluate_without_codecs", "true needs evaluations; set training.evaluate_every, for example to 20"
            )
        size = self.microbatch
        if size != "auto" and self.batch % size:
            nearest = sorted(_divisors(self.batch), key=lambda one: abs(one - size))[:3]
            choices = listed([str(one) for one in sorted(nearest)])
            raise WrongValue("microbatch", f"{size} does not divide training.batch ({self.batch}); use {choices}")
        return self


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, number + 1) if number % one == 0)


def _codec_name(value: object) -> str:
    if value not in CODECS:
        raise WrongValue("", f"{show(value)} is not a codec of this version; {suggestion(str(value), CODECS)}")
    return str(value)


def _rung(value: object) -> str | None:
    if value is None:
        return None
    if value not in LADDER:
        raise WrongValue("", f"{show(value)} is no codec to choose from; {suggestion(str(value), LADDER)}")
    return str(value)


class Compression(Section):
    """The codec of each direction; ``auto`` leaves the choice to the coordinator, for each link and as the run goes."""

    forward: str = "auto"
    backward: str = "auto"
    floor: str | None = None
    """auto: no codec is chosen that is lossier than this one. null stops where the loss of many models begins to suffer."""
    ceiling: str | None = None
    """auto: no codec is chosen that is less lossy than this one, even where a link has room; null: raw."""

    _known = field_validator("forward", "backward", mode="before")(_codec_name)
    _rungs = field_validator("floor", "ceiling", mode="before")(_rung)

    @model_validator(mode="after")
    def _bounds_bound_something(self) -> Self:
        for key in ("floor", "ceiling"):
            if getattr(self, key) is not None and "auto" not in (self.forward, self.backward):
                raise WrongValue(key, f"{getattr(self, key)!r} bounds nothing, for both directions are fixed; remove it")
        if self.floor is not None and self.ceiling is not None and LADDER.index(self.floor) < LADDER.index(self.ceiling):
            raise WrongValue("floor", f"{self.floor!r} is less lossy than the ceiling {self.ceiling!r}; exchange them")
        return self


class NetworkSection(Section):
    """What crosses the links between peers."""

    compression: Compression = Compression()
    """A codec's name for both directions, or ``{forward: NAME, backward: NAME, floor: NAME, ceiling: NAME}``."""
    link_seconds: Annotated[float, Field(gt=0.0, examples=[30.0])] = 30.0
    """A neighbour that is silent for this long while something of it is due is reported as lost."""

    @field_validator("compression", mode="before")
    @classmethod
    def _one_name_for_both(cls, value: object) -> object:
        if isinstance(value, dict | Compression):
            return value
        name = _codec_name(value)
        return {"forward": name, "backward": name}


class AveragingSection(Section):
    """How the replicas of a stage sum their gradients, or with local steps what these came to."""

    transport: Literal["links", "hivemind"] = "links"
    """What carries them: the peers' own links, or hivemind's connections."""
    compression: Annotated[str, Field(examples=["none"])] = "none"
    """none; fp16 or int8 (with hivemind); or powersgd-RANK, products of thin matrices, for example powersgd-4."""
    local_steps: Positive = 1
    """Inner steps, of ``training.batch`` divided by this many samples, that replicas take by themselves in each step; then what
    came of them is averaged (DiLoCo). 1: replicas never differ."""
    outer_learning_rate: Annotated[float, Field(gt=0.0, le=1.0, examples=[0.7])] = 0.7
    """Local steps: how far a step follows the average of what they came to."""
    outer_momentum: Annotated[Fraction, Field(examples=[0.9])] = 0.9
    """Local steps: Nesterov momentum from one step to the next."""

    @field_validator("compression")
    @classmethod
    def _known(cls, value: str) -> str:
        try:
            rank_of(value)
        except ValueError as error:
            raise WrongValue("", str(error)) from error
        return value

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        try:
            self.settings(())
        except ValueError as error:
            raise WrongValue(
                "compression", f"{error}; set averaging.transport to hivemind, or use none or powersgd-4"
            ) from error
        return self

    def settings(self, bandwidths: tuple[float | None, ...]) -> Averaging:
        """As peers are told it."""
        return Averaging(transport=Transport(self.transport), compression=self.compression, bandwidths=bandwidths)


class DurabilitySection(Section):
    """Snapshots of the run's state, to which it goes back when a peer takes with it what nobody else has."""

    snapshot_every: AutoOrPositive = "auto"
    """Steps between two; auto finds how often pays, from what one costs and how often peers are lost."""
    copies: Annotated[int, Field(ge=0)] = 1
    """How many other peers keep a copy of what each has on its own disk."""
    store: Annotated[str | None, Field(min_length=1, examples=["backups", "s3://bucket/runs"])] = None
    """A folder or a URL where the coordinator puts snapshots, for when peers and their disks are gone; null for none."""
    store_rate: Annotated[str | None, Field(examples=["200Mbps"])] = None
    """The most that peers send for the store; null: as their owners and their steps allow for a folder, 134Mbps for a URL."""

    @field_validator("store_rate")
    @classmethod
    def _is_a_rate(cls, text: str | None) -> str | None:
        if text is not None and not parse_rate(text):
            raise WrongValue("", f"{text!r} is no rate; write for example 200Mbps")
        return text

    @property
    def store_bytes_per_second(self) -> float | None:
        """The same as a number; None: nothing is said."""
        return None if self.store_rate is None else parse_rate(self.store_rate)


class PlanSection(Section):
    """Wishes about the placement."""

    stages: AutoOrPositive = "auto"
    """Number of stages; auto takes one a peer where that is useful."""
    replicas: AutoOrPositive = 1
    """Peers that hold each stage, as far as there are peers; auto gives a stage several where that makes steps shorter."""
    in_flight: AutoOrPositive = "auto"
    """Microbatches that a stage may hold between their forward and their backward."""
    recompute: AutoOrBoolean = "auto"
    """Compute activations again for the backward pass rather than keep them; auto only where memory is short."""
    pin: Annotated[dict[str, Pinned], Field(examples=[{"head": "attic"}])] = Field(default_factory=dict)
    """Modules of the model by path, and the name of the peer that must hold each. Or every stage by its number, and the names
    of the peers that are its replicas."""
    trusted: Annotated[tuple[str, ...], Field(strict=False, examples=[["attic", "lab"]])] = ()
    """Names of peers; with trusted_ends no others, but those invited with --role trusted, see the data or the loss."""
    trusted_ends: bool = False
    """Keep the first and the last stage on peers that are trusted."""

    @field_validator("pin", mode="before")
    @classmethod
    def _stages_are_numbers(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        named = {str(key) if type(key) is int else key: peers for key, peers in value.items()}
        return {key: [peers] if str(key).isdecimal() and isinstance(peers, str) else peers for key, peers in named.items()}

    @model_validator(mode="after")
    def _pins_suit(self) -> Self:
        stages = [key for key in self.pin if key.isdecimal()]
        if not stages:
            shared = next((module for module, peer in self.pin.items() if not isinstance(peer, str)), None)
            if shared is not None:
                raise WrongValue(
                    f"pin.{shared}", "a module is pinned to one peer; to name replicas, pin stages: {0: [a, b], 1: [c]}"
                )
            return self
        if sorted(map(int, stages)) != list(range(len(self.pin))):
            raise WrongValue("pin", "pins of stages name all of them, 0, 1, 2 and so on, and no modules: {0: [a, b], 1: [c]}")
        names = [name for replicas in self.pinned_stages for name in replicas]
        if len(set(names)) != len(names) or not all(self.pinned_stages):
            raise WrongValue("pin", "each stage needs at least one peer, and each peer holds one stage")
        return self

    @property
    def pinned_modules(self) -> dict[str, str]:
        """The peer of each pinned module."""
        return {module: peer for module, peer in self.pin.items() if isinstance(peer, str)}

    @property
    def pinned_stages(self) -> tuple[tuple[str, ...], ...]:
        """The replicas of each stage, where the job names them."""
        return tuple(tuple(self.pin[key]) for key in sorted(self.pin, key=int)) if "0" in self.pin else ()


class Job(Section):
    """A whole job; see the sections."""

    name: Annotated[str, Field(examples=["gpt-bytes"])] = "run"
    """Name of the run; the job file's name when absent."""
    model: ModelSection
    data: DataSection
    training: TrainingSection
    network: NetworkSection = NetworkSection()
    averaging: AveragingSection = AveragingSection()
    durability: DurabilitySection = DurabilitySection()
    plan: PlanSection = PlanSection()

    def with_microbatch(self, num_samples: int) -> Job:
        """The same job with the size of its microbatches decided."""
        training = self.training.model_copy(update={"microbatch": num_samples})
        return self.model_copy(update={"training": training})

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
            raise WrongValue("", f"{show(value)} is not a name; use up to 64 letters, digits, dots, hyphens and underscores")
        return value

    @model_validator(mode="after")
    def _relations(self) -> Self:
        if self.training.evaluate_every is not None and self.data.validation == 0.0:
            raise WrongValue(
                "training.evaluate_every",
                f"{self.training.evaluate_every} needs validation samples; set data.validation, for example to 0.02",
            )
        for wrong in (*_in_the_way_of_local_steps(self), *_mismatches(self.model, self.data)):
            raise wrong
        return self


def _in_the_way_of_local_steps(job: Job) -> Iterator[WrongValue]:
    """What cannot be had together with local steps."""
    count, training = job.averaging.local_steps, job.training
    if count == 1:
        for key in ("outer_learning_rate", "outer_momentum"):
            if key in job.averaging.model_fields_set:
                yield WrongValue(
                    f"averaging.{key}", "this key has no meaning for local_steps 1; set local_steps, for example to 10"
                )
        return
    if training.microbatch == "auto":
        yield WrongValue("training.microbatch", "auto cannot be had with averaging.local_steps; give a number of samples")
    elif training.num_microbatches % count:
        whole = training.microbatch * count
        fix = f"make it a multiple of {whole}, training.microbatch times averaging.local_steps"
        yield WrongValue("training.batch", f"{training.batch} samples make no {count} equal inner steps; {fix}")
    if training.clip_norm is not None:
        why = "needs the norm of all stages at every inner step, which averaging.local_steps does without"
        yield WrongValue("training.clip_norm", f"{training.clip_norm:g} {why}; set it to null")


def _mismatches(model: ModelSection, data: DataSection) -> Iterator[WrongValue]:
    """What of the data a model cannot take, as far as it shows before either is opened."""
    wants = model.input_kind
    if wants is not None and data.input_kind is not None and wants != data.input_kind:
        yield WrongValue(f"data.{data.source}", f"this gives {data.input_kind}, but {model.description} trains on {wants}")
    if model.builtin == "resnet" and data.random is not None and data.random.channels != COLOURS:
        yield WrongValue("data.random.channels", f"{data.random.channels} does not suit {model.description}; write {COLOURS}")
    limits, context = data.limits, model.limit("context")
    for field, length in limits.lengths:
        if context is not None and length > context.value:
            fix = "lower it or raise the context"
            yield WrongValue(field, f"{length} is more than {context.setting} {context.value} of {context.field}; {fix}")
    vocabulary, classes = model.limit("vocabulary"), model.limit("classes")
    for field, count in limits.vocabularies:
        if vocabulary is not None and count > vocabulary.value:
            yield vocabulary.exceeded(count, f"the {count} token ids of {field}")
    for field, count in limits.classes:
        if classes is not None and count > classes.value:
            yield classes.exceeded(count, f"{field} ({count})")


def parse_job(values: dict[str, Any], base: Path) -> Job:
    """The job that ``values`` describe, with paths relative to ``base``. Raises JobError."""
    try:
        return Job.model_validate(values, context={"base": base})
    except ValidationError as error:
        raise job_error(error, Job) from error


def load_job(path: Path, overrides: Iterable[str] = ()) -> Job:
    """Read the job file ``path`` with ``overrides`` (``section.key=value``) on top. Raises JobError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise JobError("", f"cannot read the job file {str(path)!r}: {error.strerror}; give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise JobError("", f"the job file {str(path)!r} is not UTF-8 text; give the path of a YAML file") from error
    values = parse_job_text(text, f"the job file {str(path)!r}")
    apply_overrides(values, overrides)
    values.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", Path(path).stem))
    return parse_job(values, Path(path).resolve().parent)


def dump_job(job: Job) -> str:
    """``job`` as YAML that :func:`load_job` reads back as an equal job, from any folder."""
    return yaml.safe_dump(job.model_dump(mode="json", exclude_unset=True), sort_keys=False)
