"""The file of weights: what safetensors reads back is what was written, whatever the order; nothing half-made is left."""

from __future__ import annotations

import errno
import random
import resource
import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from atoll.coordinator.run_files import disk_error
from atoll.coordinator.weights import WeightsFile, WeightsLayout
from atoll.protocol.errors import ResourceError, RunFailed
from atoll.protocol.graph import BufferSpec, ParameterSpec

SPECS: tuple[ParameterSpec | BufferSpec, ...] = (
    ParameterSpec(name="embedding.weight", shape=(5, 3), dtype=torch.float32, ties=("head.weight",)),
    ParameterSpec(name="half", shape=(7,), dtype=torch.bfloat16),
    ParameterSpec(name="scalar", shape=(), dtype=torch.float64),
    ParameterSpec(name="empty", shape=(0, 4), dtype=torch.float32),
    BufferSpec(name="norm.num_batches_tracked", shape=(), dtype=torch.int64),
    BufferSpec(name="mask", shape=(3,), dtype=torch.bool),
)


def make_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        spec.name: torch.randint(0, 2, spec.shape, generator=generator).to(spec.dtype)
        if not spec.dtype.is_floating_point
        else torch.randn(spec.shape, generator=generator).to(spec.dtype)
        for spec in SPECS
    }


def open_file(path: Path) -> WeightsFile:
    return WeightsFile(path, WeightsLayout(SPECS, {"step": "5"}))


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_arrival_gives_the_same_file(tmp_path: Path, seed: int) -> None:
    tensors = make_tensors()
    names = list(tensors)
    random.Random(seed).shuffle(names)
    file = open_file(tmp_path / "w.safetensors")
    for name in names:
        file.write(name, tensors[name])
    file.complete()
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == {*tensors, "head.weight"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(found["head.weight"], tensors["embedding.weight"])
    with safe_open(tmp_path / "w.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "5"}
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]


def test_a_tensor_in_another_memory_order_is_written_row_major(tmp_path: Path) -> None:
    layout = WeightsLayout([ParameterSpec(name="w", shape=(2, 3, 4, 5), dtype=torch.float32)], {})
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    file = WeightsFile(tmp_path / "w.safetensors", layout)
    file.write("w", tensor)
    file.complete()
    assert torch.equal(load_file(tmp_path / "w.safetensors")["w"], tensor)


def test_what_has_no_place_is_refused(tmp_path: Path) -> None:
    file = open_file(tmp_path / "w.safetensors")
    assert file.refusal("half", torch.bfloat16, (7,)) is None
    assert file.refusal("other", torch.float32, (1,)) == "other is not part of the model's state"
    assert "should be torch.bfloat16 of shape (7,)" in (file.refusal("half", torch.float32, (7,)) or "")
    file.abandon()


def test_a_file_with_a_gap_is_not_kept(tmp_path: Path) -> None:
    file = open_file(tmp_path / "w.safetensors")
    tensors = make_tensors()
    file.write("half", tensors["half"])
    with pytest.raises(RunFailed, match=r"no peer sent embedding\.weight, empty, mask and 2 more"):
        file.complete()
    assert list(tmp_path.iterdir()) == []


def test_a_second_copy_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = make_tensors()
    file = open_file(tmp_path / "w.safetensors")
    for name, tensor in tensors.items():
        file.write(name, tensor)
    file.write("half", tensors["half"] + 1)
    file.complete()
    assert torch.equal(load_file(tmp_path / "w.safetensors")["half"], tensors["half"])
    assert "different copies of half" in caplog.text


def test_a_full_disk_is_noticed_before_the_first_tensor(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    layout = WeightsLayout([ParameterSpec(name="w", shape=(1 << 20,), dtype=torch.float32)], {})
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(ResourceError, match="cannot write to"):
            WeightsFile(tmp_path / "w.safetensors", layout)
        assert list(tmp_path.iterdir()) == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, previous)


def test_the_system_s_words_for_a_full_disk_become_ours(tmp_path: Path) -> None:
    error = disk_error(OSError(errno.ENOSPC, "No space left on device"), tmp_path)
    assert str(error) == f"the disk that holds {tmp_path} is full: free some space or give another --state"
