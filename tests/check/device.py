"""Whether a GPU's context still works."""

from __future__ import annotations

import torch

from fastvit_kernels.verify.runner import first_line


def device_lost(device: torch.device) -> str | None:
    """The error that a CUDA context keeps after an illegal access; None where the device works.

    An error of one launch is reported once: a context that reports it at the second synchronisation
    too is lost, and every later launch of its process fails.
    """
    if device.type != "cuda":
        return None
    for _ in range(2):
        try:
            torch.cuda.synchronize(device)
            return None
        except RuntimeError as error:
            found = first_line(error)
    return found
