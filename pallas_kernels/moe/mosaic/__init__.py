"""The MoE layer by Pallas Mosaic kernels for Hopper GPUs: one file a kernel."""

from pallas_kernels.moe.mosaic.layer import apply, cannot_run

__all__ = ["apply", "cannot_run"]
