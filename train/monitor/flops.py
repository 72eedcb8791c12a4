"""Peak speed of known devices, for MFU."""

import torch

PEAK_BF16_TFLOPS = {
    # NVIDIA's data sheets, dense bf16 (V100: fp16), without sparsity.
    "A100": 312.0,
    "A800": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "GH200": 989.0,
    "B200": 2250.0,
    "V100": 125.0,
}


def peak_tflops(device: torch.device, configured: float | None) -> float | None:
    """Return the peak of one device in TFLOP/s: as configured, as looked up, or None when unknown."""
    if configured is not None:
        return configured
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_BF16_TFLOPS.items() if known in name), None)
