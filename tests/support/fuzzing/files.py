"""What lies on disks, in the DHT, or comes from people: snapshots, job files, tokens, certificates, addresses, quantities."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.peer.state.snapshot_part import Part, PartWriter
from atoll.protocol.addresses import parse_address
from atoll.protocol.announcement import Announcement, signed, verified
from atoll.protocol.certificates import (
    certificate_of_pem,
    certificate_pem,
    make_authority,
    make_end,
    new_key,
    public_key_of_request,
    signing_request,
)
from atoll.protocol.errors import WireError
from atoll.protocol.identity import Role, Verifier, alternative_names, authority_name
from atoll.protocol.ids import StepNumber
from atoll.protocol.invitation import new_token, parse_token
from atoll.protocol.job import parse_job
from atoll.protocol.job_text import apply_overrides, parse_job_text
from atoll.protocol.quantities import parse_bytes, parse_flops, parse_rate, parse_seconds
from atoll.protocol.snapshot_format import Manifest, _seal, decode_header, encode_header, entry_of
from support.fuzzing.target import LARGEST_INPUT, Choices, Target, framed

_NOW = datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC)


def file_targets() -> list[Target]:
    """All but what needs hivemind."""
    return [
        Target(name="snapshot-header", decode=_header, seeds=_header_seeds, thousands=900),
        Target(name="snapshot-part", decode=_PartFile(), seeds=_part_seeds, thousands=40),
        Target(name="job", decode=_job, seeds=_job_seeds, thousands=15),
        Target(name="token", decode=_token, seeds=_token_seeds, thousands=900),
        Target(name="certificate", decode=_certificate, seeds=_certificate_seeds, thousands=500),
        Target(name="announcement", decode=_announcement, seeds=_announcement_seeds, thousands=600),
        Target(name="text", decode=_text, seeds=_text_seeds, thousands=900),
    ]


def _header(data: bytes) -> None:
    """The header of a part; a fuzzer cannot guess hashes, so that over the manifest is right where a bit says so."""
    text = data[1:]
    if data[:1] == b"\x01":
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            values = json.loads(text)
            values["__metadata__"]["seal"] = _seal(values["__metadata__"])
            text = json.dumps(values).encode()
    _manifest(text)


def _manifest(text: bytes) -> None:
    try:
        manifest = decode_header(text)
    except ValueError as error:
        raise WireError(str(error)) from error
    assert sum(entry.num_bytes for entries in manifest.groups().values() for entry in entries) == manifest.num_bytes


def _header_seeds() -> list[bytes]:
    manifest = _manifest_of({"w": torch.ones(2, 3), "w@step": torch.ones(()), "b": torch.ones(3, dtype=torch.bfloat16)})
    text = encode_header(manifest, 4096)[8:].rstrip()
    return [b"\x00" + text, b"\x01" + text]


def _manifest_of(tensors: Mapping[str, torch.Tensor]) -> Manifest:
    entries, begin = [], 0
    for name, tensor in tensors.items():
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
        entries.append(entry_of(name, tensor, data, begin))
        begin += data.nbytes
    return Manifest(run_id="run", step=StepNumber(3), tensors=tuple(entries))


class _PartFile:
    """A file of a snapshot, opened and read as a whole."""

    def __init__(self) -> None:
        self._path: Path | None = None

    def __call__(self, data: bytes) -> None:
        if self._path is None:
            number, name = tempfile.mkstemp(prefix="atoll-part-")
            os.close(number)
            self._path = Path(name)
        self._path.write_bytes(data)
        part = Part(self._path)
        for name in part.manifest.names:
            part.read(name)


def _part_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "part.safetensors"
        writer = PartWriter(path, "run", StepNumber(3), ["w"])
        writer.add_group([("w", torch.ones(4, 3).t()), ("w@exp_avg", torch.ones(3, 4))])
        writer.complete()
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        text = whole[8 : 8 + length].rstrip()
        return [(len(text).to_bytes(8, "little") + text + whole[8 + length :])[:LARGEST_INPUT]]


def _job(data: bytes) -> None:
    text, _, overrides = data.decode("utf-8", "replace").partition("\x00")
    values: dict[str, Any] = parse_job_text(text, "the job file")
    apply_overrides(values, [line for line in overrides.split("\x00") if line])
    parse_job(values, Path("/"))


def _job_seeds() -> list[bytes]:
    examples = Path(__file__).parents[3] / "examples"
    found = [path.read_bytes()[:LARGEST_INPUT] for path in sorted(examples.glob("*.yaml"))]
    return [*found, found[0][:1500] + b"\x00training.steps=3\x00plan.stages=2"]


def _token(data: bytes) -> None:
    parse_token(data.decode("utf-8", "replace"))


def _token_seeds() -> list[bytes]:
    return [new_token(bytes(32)).text().encode()]


def _certificate(data: bytes) -> None:
    """Certificates that somebody shows, and requests for them."""
    kind, rest = data[:1], data[1:]
    if kind == b"\x00":
        public_key_of_request(rest)
        return
    found = certificate_of_pem(rest)
    Verifier(found).identify(rest, _NOW)


def _certificate_seeds() -> list[bytes]:
    key = new_key()
    authority = make_authority(authority_name("abc"), key, _NOW, datetime.timedelta(days=3))
    names = alternative_names("abc", Role.PEER, "ann")
    end = make_end("ann", key.public_key(), names, (authority.subject, key), _NOW, datetime.timedelta(hours=1))
    return [b"\x00" + signing_request("ann", key), *(b"\x01" + certificate_pem(one) for one in (authority, end))]


def _announcement(data: bytes) -> None:
    verified(data)


def _announcement_seeds() -> list[bytes]:
    key = new_key()
    authority = certificate_pem(make_authority("atoll run abc", key, _NOW, datetime.timedelta(days=3)))
    said = Announcement(run="gpt", addresses=(parse_address("10.0.0.1:7000"),), authority=authority, number=3)
    return [signed(said, lambda body: key.sign(body, ec.ECDSA(hashes.SHA256())))]


def _text(data: bytes) -> None:
    """Addresses and quantities."""
    for piece in Choices(data).pieces():
        text = piece.decode("utf-8", "replace")
        for parse in (parse_bytes, parse_rate, parse_flops, parse_seconds):
            parse(text)
        parse_address(text)


def _text_seeds() -> list[bytes]:
    words = ["8GiB", "20Mbps", "1.5s", "2 TFLOPS", "[::1]:7000", "host.example:7000", "10.0.0.1:0"]
    return [framed([word.encode()]) for word in words]
