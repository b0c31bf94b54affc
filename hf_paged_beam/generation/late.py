"""What a step reports to the host, read one step late.

A GPU runs behind the host that feeds it. A host that reads a value waits until the GPU has come that far, and then the
GPU waits for the host. So the report of a step is copied while the next one is already being prepared.
"""

from __future__ import annotations

import torch

READ_LATE_ON = {"cuda"}
"""Types of devices where it pays. This was not yet run on a GPU; the order of steps is tested on a CPU."""


class LateReport:
    """The report of the last step, on its way to the host."""

    def __init__(self) -> None:
        self._on_host: torch.Tensor | None = None
        self._arrived: torch.cuda.Event | None = None

    def swap(self, report: torch.Tensor) -> int | None:
        """Send a report, and return the one that was sent before; None at the first.

        Args:
            report: 0-dim int64.
        """
        told = self._read()
        if report.device.type == "cuda":
            self._on_host = torch.empty((), dtype=report.dtype, pin_memory=True)
            self._on_host.copy_(report, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._on_host = report.clone()
        return told

    def _read(self) -> int | None:
        if self._arrived is not None:
            self._arrived.synchronize()
        return None if self._on_host is None else int(self._on_host)  # host read: of the step before
