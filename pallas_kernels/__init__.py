"""Kernels that can be used alone: jax, numpy and jaxtyping, nothing of ours."""
