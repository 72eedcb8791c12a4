"""How long an operation takes: by the device's own events on a GPU, else by the clock."""

import time

import torch


class Stopwatch:
    """Takes one time after another."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began_s = self._ended_s = 0.0
        if self._on_gpu:
            self._began = torch.cuda.Event(enable_timing=True)
            self._ended = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        """Note the begin."""
        if self._on_gpu:
            self._began.record()
        else:
            self._began_s = time.perf_counter()

    def stop(self) -> None:
        """Note the end."""
        if self._on_gpu:
            self._ended.record()
        else:
            self._ended_s = time.perf_counter()

    def seconds(self) -> float:
        """Wait for the device and return the time between; on a GPU that alone can take long."""
        if self._on_gpu:
            self._ended.synchronize()
            return float(self._began.elapsed_time(self._ended)) / 1e3
        return self._ended_s - self._began_s
