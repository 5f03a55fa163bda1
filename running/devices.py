"""
Devices and number types by name.
"""

import torch

from configurator import UserError


def pick_device(name: str = "auto") -> str:
    """`auto`: cuda, else mps, else cpu. Raises UserError for a device that is not there."""
    if name in ("auto", ""):
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        kind = torch.zeros(1, device=name).device.type
    except (RuntimeError, AssertionError, ImportError):  # ImportError: of a vendor's package
        kind = "meta"  # which holds no values, so it is of no use either
    if kind == "meta":
        raise UserError(f"device={name}: not available here (auto, cpu, "
                        "cuda or mps where there is one)")
    if kind == "cuda" and ":" in name:
        torch.cuda.set_device(name)  # for what is made on "cuda", too
    return "cpu" if kind == "cpu" else name


def pick_dtype(name: str, device: str, setting: str = "dtype") -> torch.dtype:
    """Compute type on `device`: bfloat16 on cuda unless another is named."""
    names = {"float32": torch.float32, "fp32": torch.float32,
             "bfloat16": torch.bfloat16, "bf16": torch.bfloat16}
    if name in ("auto", ""):
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if name not in names:
        raise UserError(f"{setting}={name}: choose auto, {', '.join(names)}")
    return names[name]
