"""From source code on disk to packed batches of token ids."""

from composer_jax.data.bigram import bigram_bits_per_byte
from composer_jax.data.config import DataConfig
from composer_jax.data.load import Data, load_data
from composer_jax.data.loader import make_loader
from composer_jax.data.rows import PackedRows
from composer_jax.data.tokenizer import Tokenizer

__all__ = [
  "Data",
  "DataConfig",
  "PackedRows",
  "Tokenizer",
  "bigram_bits_per_byte",
  "load_data",
  "make_loader",
]
