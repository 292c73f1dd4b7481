"""Where a run begins that goes on from a snapshot in a store: which snapshot, and whether it fits the model. Blocking."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from atoll.coordinator.first_values import held_specs
from atoll.coordinator.run.journal import JOURNAL, Journal
from atoll.coordinator.store.store import Store, StoredSnapshot, StoredState
from atoll.protocol.errors import AtollError, DamagedSnapshot, JobError
from atoll.protocol.graph import OpGraph
from atoll.protocol.ids import StepNumber
from atoll.protocol.state import split_name
from atoll.protocol.wording import listed

FLAG = "--resume"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """A snapshot that a run goes on from, with its tensors."""

    store: Store
    state: StoredState

    @property
    def snapshot(self) -> StoredSnapshot:
        return self.state.snapshot

    @property
    def url(self) -> str:
        """Of this snapshot alone."""
        return self.store.url_of(self.snapshot)

    @property
    def step(self) -> StepNumber:
        return self.state.snapshot.step


def find_origin(where: str) -> Origin:
    """The newest snapshot in a store, or in that of the run whose state folder ``where`` is; damaged ones are passed over.

    Raises JobError when there is none, ResourceError when the store cannot be read."""
    url = _store_of(Path(where)) if (Path(where) / JOURNAL).exists() else where
    store = Store(url, FLAG)
    damage = ""
    for snapshot in reversed(store.snapshots()):
        try:
            return Origin(store=store, state=StoredState(store, snapshot))
        except DamagedSnapshot as error:
            damage = f"; {error}"
    raise JobError(FLAG, f"there is no complete snapshot in {url}{damage}")


def begins_at(journal: Journal, resume: str | None) -> str | None:
    """Where the snapshot is to be found that a run goes on from: the one that its journal names, else at ``resume``; None for
    a run that begins with first values."""
    known = journal.origin()
    if known is not None:
        return known[1]
    return resume if journal.last_step() == 0 else None


def begins_with(journal: Journal, origin: Origin) -> None:
    """The journal names what was found from now on."""
    if journal.origin() is None:
        journal.write_origin(origin.step, origin.url)


def check_origin(origin: Origin, graph: OpGraph, changing: Collection[str]) -> None:
    """Raises JobError unless the snapshot has the state of all that training changes in this model."""
    where = f"the snapshot of step {origin.step} of the run {origin.snapshot.job} in {origin.store.url}"
    missing = sorted(set(changing) - origin.state.names)
    if missing:
        raise JobError(FLAG, f"{where} has no {listed(missing, 3)}: is the job's model another one?")
    found = origin.state.specs()
    for spec in held_specs(graph):
        if spec.name in found and found[spec.name] != (spec.dtype, tuple(spec.shape)):
            dtype, shape = found[spec.name]
            wanted = f"{spec.dtype} of shape {tuple(spec.shape)}"
            raise JobError(FLAG, f"in {where} {spec.name} is {dtype} of shape {shape}, and {wanted} in the job's model")
    unknown = sorted({split_name(name)[0] for name in found} - {spec.name for spec in held_specs(graph)})
    if unknown:
        raise JobError(FLAG, f"{where} has {unknown[0]}, which the job's model has not: give the job that the run had")


def _store_of(folder: Path) -> str:
    """Where the snapshots of the run lie that is kept in ``folder``."""
    try:
        journal = Journal(folder / JOURNAL)
        try:
            url = journal.store()
        finally:
            journal.close()
    except AtollError as error:
        raise JobError(FLAG, f"{folder} holds a run that cannot be read ({error})") from error
    if url is None:
        raise JobError(FLAG, f"the run in {folder} had no durability.store: its state was on its peers alone")
    return url
