"""From source code on disk to packed batches of token ids."""
