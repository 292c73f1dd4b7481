"""Whether the device that a peer would compute on is there, computes, and is the best of this machine."""

from __future__ import annotations

import shutil

import torch

from atoll.peer.doctor.diagnosis import Finding, Verdict

_MEND_TORCH = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"


def of_device(device: str) -> Finding:
    """Computes something on it."""
    try:
        ones = torch.ones(64, 64, device=device)
        right = float((ones @ ones).sum()) == 64.0**3
    except RuntimeError as error:
        first = str(error).strip().partition("\n")[0]
        return Finding(subject="device", verdict=Verdict.BAD, found=f"{device} does not compute: {first}", mend="--device cpu")
    if not right:
        return Finding(subject="device", verdict=Verdict.BAD, found=f"{device} computes wrong numbers", mend="--device cpu")
    if device == "cpu" and shutil.which("nvidia-smi") and not torch.cuda.is_available():
        found = f"cpu; there is an NVIDIA driver, but PyTorch {torch.__version__} does not use it"
        return Finding(subject="device", verdict=Verdict.POOR, found=found, mend=_MEND_TORCH)
    return Finding(subject="device", verdict=Verdict.GOOD, found=f"{_named(device)}, PyTorch {torch.__version__}")


def _named(device: str) -> str:
    if device.startswith("cuda"):
        return f"{device} ({torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda})"
    return f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device
