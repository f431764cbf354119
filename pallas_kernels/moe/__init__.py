"""The Mixture-of-Experts feed-forward layer, behind one entry."""

from pallas_kernels.moe.api import IMPLEMENTATIONS, moe_ffn

__all__ = ["IMPLEMENTATIONS", "moe_ffn"]
