"""What a data set is made of: the few knobs, checked as soon as they are set.

Everything else about the data follows from these and from the corpus itself.
Nothing here touches the disk.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """The choices that turn source code into packed rows of token ids.

  Attributes:
    sources: where code comes from. Each is "stdlib" (this Python's standard
      library), a folder, a .whl, .zip or .tar.gz file, or "wheel:NAME==VERSION"
      (a pure-Python wheel, downloaded once by pip).
    suffixes: file names that count as source code end in one of these.
    max_bytes: keep about this many bytes, chosen by hash; 0 keeps everything.
    validation_fraction: share of documents held out, chosen by hash.
    near_duplicate_threshold: Jaccard similarity from which the later of two
      documents is dropped; 0 keeps near-duplicates.
    decontaminate: drop documents that overlap with HumanEval.
    fim_fraction: share of training documents rearranged to fill in the middle.
    vocab_size: size of the tokenizer to train, special tokens included.
    tokenizer: path of a `tokenizer.json` to use; empty trains one.
    seq_len: tokens a row.
    seed: of the fill-in-the-middle split points.
  """

  sources: Sequence[str] = ("stdlib",)
  suffixes: Sequence[str] = (".py",)
  max_bytes: int = 0
  validation_fraction: float = 0.05
  near_duplicate_threshold: float = 0.7
  decontaminate: bool = True
  fim_fraction: float = 0.5
  vocab_size: int = 4096
  tokenizer: str = ""
  seq_len: int = 1024
  seed: int = 0

  def __post_init__(self):
    for name in ("sources", "suffixes"):
      value = getattr(self, name)
      if isinstance(value, str) or not value:
        raise ValueError(
          f"{name} must be a tuple of at least one string, got {value!r}."
        )
      # ml_collections hands over lists; tuples make the config hashable.
      object.__setattr__(self, name, tuple(value))
    for name in ("near_duplicate_threshold", "fim_fraction"):
      if not 0 <= getattr(self, name) <= 1:
        raise ValueError(
          f"{name} must lie in [0, 1], got {getattr(self, name)}."
        )
    if not 0 <= self.validation_fraction < 1:
      raise ValueError(
        "validation_fraction must lie in [0, 1), got "
        f"{self.validation_fraction}."
      )
    if self.seq_len < 16:
      raise ValueError(f"seq_len must be at least 16, got {self.seq_len}.")
    if self.max_bytes < 0:
      raise ValueError(f"max_bytes must not be negative, got {self.max_bytes}.")
