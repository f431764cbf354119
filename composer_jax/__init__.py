"""Turn a sparse Mixture-of-Experts model into a specialised coding agent."""
