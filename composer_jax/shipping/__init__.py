"""Lossless deltas of arrays: usable alone, knows nothing of models."""

from composer_jax.shipping.delta import Header, decode, encode, read_header
from composer_jax.shipping.errors import DeltaError

__all__ = ["DeltaError", "Header", "decode", "encode", "read_header"]
