# SPDX-License-Identifier: Apache-2.0
"""What is installed, what the devices compute natively, and which upstream faults to expect."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, cast

import torch

from lightning_amp_guard import _upstream
from lightning_amp_guard.diagnosis.doctor.upstream_faults import UpstreamFault, known_faults

__all__ = ["DeviceReport", "DoctorReport", "examine"]

_PACKAGES = {
    "torch": "torch",
    "lightning": "lightning",
    "pytorch_lightning": "pytorch-lightning",
    "torchmetrics": "torchmetrics",
    "lightning_amp_guard": "lightning-amp-guard",
}


@dataclass(frozen=True)
class DeviceReport:
    """Says what one device is and which precisions it computes natively.

    Args:
        device: E.g. "cpu" or "cuda:0".
        name: The device's own name.
        bf16: Whether bfloat16 is native.
        fp16: Whether float16 is native.
    """

    device: str
    name: str
    bf16: bool
    fp16: bool

    @property
    def auto(self) -> str:
        """What `SafeAMP(precision="auto")` chooses there."""
        return "bf16-mixed" if self.bf16 or not self.fp16 else "16-mixed"

    def __str__(self) -> str:
        words = {True: "native", False: "emulated or missing"}
        slow = "" if self.bf16 or self.fp16 else " (32-true is faster here)"
        return (
            f"{self.name}: BF16 {words[self.bf16]}, FP16 {words[self.fp16]};"
            f' "auto" is {self.auto}{slow}'
        )


@dataclass(frozen=True)
class DoctorReport:
    """Holds what `examine` found; `str()` is fit for a terminal.

    Args:
        versions: Installed versions by package, and "python".
        devices: The devices that torch sees.
        tf32: Whether float32 matmuls and convolutions may use TF32, in words.
        faults: Known upstream faults of the installed versions with their status ("seen" in this
            version, or "not examined").
    """

    versions: Mapping[str, str] = field(hash=False)
    devices: Sequence[DeviceReport]
    tf32: str
    faults: Sequence[tuple[UpstreamFault, str]]

    def rows(self) -> list[tuple[str, str]]:
        """Return versions, devices and settings as `(label, text)`."""
        rows = list(self.versions.items())
        rows += [(device.device, str(device)) for device in self.devices]
        return [*rows, ("TF32", self.tf32)]

    def fault_rows(self) -> list[tuple[str, str]]:
        """Return the known faults as `(issue, text)`."""
        rows = []
        for fault, status in self.faults:
            doubt = "" if status == "seen" else f" (seen in {fault.newest}, not examined here)"
            rows.append((fault.issue, f"{fault.fault}{doubt} -> {fault.answer}"))
        return rows

    def to_dict(self) -> dict[str, object]:
        """Return all of it as one flat dictionary of plain values."""
        flat: dict[str, object] = {f"version.{k}": v for k, v in self.versions.items()}
        for d in self.devices:
            flat |= {f"{d.device}.name": d.name, f"{d.device}.auto": d.auto}
            flat |= {f"{d.device}.native_bf16": d.bf16, f"{d.device}.native_fp16": d.fp16}
        return {**flat, "tf32": self.tf32, **{f.issue: status for f, status in self.faults}}

    def __str__(self) -> str:
        tables = {"Installation": self.rows(), "Known upstream faults": self.fault_rows()}
        lines = []
        for title, rows in tables.items():
            width = max((len(label) for label, _ in rows), default=0)
            lines += [f"{title}:", *(f"  {label:<{width}}  {text}" for label, text in rows)]
        return "\n".join(lines)


def examine() -> DoctorReport:
    """Return what is installed, the devices, and the known faults of these versions.

    Host sync: none; looking at a CUDA device makes its context.
    """
    versions = {"python": platform.python_version()}
    versions |= {name: v for name, d in _PACKAGES.items() if (v := _version(d))}
    versions["torch"] = str(torch.__version__)  # which says the build, as "+cpu"; its wheel may not
    versions["lightning_amp_guard"] = own_version()
    return DoctorReport(versions, tuple(_devices()), _tf32(), tuple(known_faults(versions)))


def own_version() -> str:
    """Return the version of this package, or that it is not installed."""
    return _version(_PACKAGES["lightning_amp_guard"]) or "a source tree, not installed"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[DeviceReport]:
    cpu = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    found = [DeviceReport("cpu", cpu, *_upstream.native_low_precision("cpu"))]
    found += [_cuda(idx) for idx in range(torch.cuda.device_count())]
    if torch.xpu.is_available():
        native = _upstream.native_low_precision("xpu")
        names = [torch.xpu.get_device_name(idx) for idx in range(torch.xpu.device_count())]
        found += [DeviceReport(f"xpu:{idx}", name, *native) for idx, name in enumerate(names)]
    if torch.backends.mps.is_available():
        found.append(DeviceReport("mps", "Apple GPU", *_upstream.native_low_precision("mps")))
    return found


def _cuda(idx: int) -> DeviceReport:
    major, minor = torch.cuda.get_device_capability(idx)
    name = f"{torch.cuda.get_device_name(idx)}, compute capability {major}.{minor}"
    with torch.cuda.device(idx):  # the question below is about the current one
        return DeviceReport(f"cuda:{idx}", name, *_upstream.native_low_precision("cuda"))


def _tf32() -> str:
    """Return the settings in words; torch has two interfaces and refuses to mix them."""
    try:
        matmul = torch.get_float32_matmul_precision()
    except RuntimeError:
        matmul = torch.backends.cuda.matmul.fp32_precision
    try:
        convolution = torch.backends.cudnn.allow_tf32
    except RuntimeError:
        convolution = cast("Any", torch.backends.cudnn).conv.fp32_precision == "tf32"
    on = matmul in ("high", "medium", "tf32")
    return (
        f"{'on' if on else 'off'} in float32 matmuls ({matmul!r}),"
        f" {'on' if convolution else 'off'} in cuDNN convolutions"
    )
