"""What this machine's CPU can do."""

from __future__ import annotations

from pathlib import Path


def has_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True where the CPU multiplies bf16 matrices in hardware."""
    return cpuinfo.exists() and "amx_bf16" in cpuinfo.read_text()
