"""Makes a data set: clean, split, learn a tokenizer, encode, rearrange, pack.

The order matters. Duplicates go before the split, so that nothing held out has
a near-copy in training; the tokenizer learns from training documents only; only
they are rearranged to fill in the middle. Where the result is kept, and when it
is made at all, is for `load`.
"""

import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from composer_jax.data import corpus, decontaminate, dedup, fim, packing
from composer_jax.data.config import DataConfig
from composer_jax.data.corpus import Document
from composer_jax.data.files import write_json
from composer_jax.data.rows import PackedRows
from composer_jax.data.sources import SourceFile
from composer_jax.data.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


def make(
  config: DataConfig,
  files: Sequence[SourceFile],
  corpus_hash: str,
  tokenizer: Tokenizer | None,
  folder: Path,
) -> None:
  """Writes the data set of a configuration into an empty folder.

  Args:
    config: what to make.
    files: what its sources hold.
    corpus_hash: of the files.
    tokenizer: the one to use; None trains one.
    folder: gets `train` and `validation` rows, the tokenizer, the
      configuration and the report.

  Raises:
    ValueError: no document is left for one of the two sides.
    ImportError: the extra `data` is needed and not installed.
  """
  documents, dropped = _clean(config, files)
  train, validation = _split(config, documents, dropped)
  if tokenizer is None:
    with timed("train tokenizer"):
      texts = [document.text for document in train]
      tokenizer = Tokenizer.train(texts, config.vocab_size)
  report = {
    "corpus": corpus_hash,
    "read": {
      "documents": len(files),
      "bytes": sum(len(file.content) for file in files),
    },
    "dropped": dropped,
    "vocab_size": tokenizer.vocab_size,
    "fim_documents": sum(_rearranged(config, d) for d in train),
  }
  for name, part in (("train", train), ("validation", validation)):
    rows = _rows(config, part, tokenizer, fim_allowed=name == "train")
    rows.save(folder / name)
    positions = max(1, len(rows) * rows.seq_len)
    report[name] = {
      **_tally(part),
      "tokens": rows.num_tokens,
      "rows": len(rows),
      "padding": 1 - rows.num_tokens / positions if len(rows) else 0.0,
    }
  tokenizer.save(folder / "tokenizer.json")
  write_json(folder / "config.json", dataclasses.asdict(config))
  write_json(folder / "report.json", report)


def _clean(
  config: DataConfig, files: Sequence[SourceFile]
) -> tuple[list[Document], dict[str, dict[str, int]]]:
  """The documents worth keeping, and a tally of the others by reason."""
  dropped, documents = {}, []
  for file in files:
    if reason := corpus.why_skip(file):
      tally = dropped.setdefault(reason, {"documents": 0, "bytes": 0})
      tally["documents"] += 1
      tally["bytes"] += len(file.content)
    else:
      documents.append(Document(file.path, file.content.decode()))
  with timed("exact duplicates"):
    documents, out = dedup.drop_duplicates(documents)
    dropped["duplicate"] = _tally(out)
  documents, out = corpus.take_bytes(documents, config.max_bytes)
  dropped["over_max_bytes"] = _tally(out)
  if config.near_duplicate_threshold:
    with timed("near-duplicates"):
      documents, out = dedup.drop_near_duplicates(
        documents, config.near_duplicate_threshold
      )
      dropped["near_duplicate"] = _tally(out)
  if config.decontaminate:
    with timed("decontaminate"):
      documents, out = decontaminate.drop_contaminated(
        documents, decontaminate.humaneval()
      )
      dropped["contaminated"] = _tally(out)
  return documents, dropped


def _split(
  config: DataConfig, documents: Sequence[Document], dropped: dict
) -> tuple[list[Document], list[Document]]:
  sides: tuple[list[Document], list[Document]] = ([], [])
  for document in documents:
    held_out = corpus.is_validation(document, config.validation_fraction)
    sides[held_out].append(document)
  train, validation = sides
  if not train:
    reasons = {reason: n["documents"] for reason, n in dropped.items()}
    raise ValueError(
      f"No document left to train on in sources {config.sources} with suffixes "
      f"{config.suffixes}: {len(validation)} held out, dropped {reasons}."
    )
  if config.validation_fraction and not validation:
    raise ValueError(
      f"None of {len(train)} documents fell into the held-out share: raise "
      f"validation_fraction ({config.validation_fraction}), add sources, or "
      "set validation_fraction=0 to do without."
    )
  return train, validation


def _rows(
  config: DataConfig,
  documents: Sequence[Document],
  tokenizer: Tokenizer,
  *,
  fim_allowed: bool,
) -> PackedRows:
  with timed("encode"):
    encoded = tokenizer.encode_batch([document.text for document in documents])
  pieces = [[ids] for ids in encoded]
  if fim_allowed:
    with timed("fill in the middle"):
      chosen = [i for i, d in enumerate(documents) if _rearranged(config, d)]
      rearranged = chosen and fim.rearrange(
        [encoded[i] for i in chosen],
        [(config.seed, int(documents[i].digest, 16)) for i in chosen],
        tokenizer,
        config.seq_len - 1,
      )
      for i, new in zip(chosen, rearranged, strict=True):
        pieces[i] = new
  with timed("pack"):
    packed = packing.pack(
      [ids for parts in pieces for ids in parts],
      end_id=tokenizer.end_id,
      pad_id=tokenizer.pad_id,
      seq_len=config.seq_len,
      vocab_size=tokenizer.vocab_size,
    )
  # A document cut before it was rearranged counts as one all the same.
  paths = [
    document.path
    for document, parts in zip(documents, pieces, strict=True)
    for _ in parts
  ]
  return PackedRows(packed, tuple(paths))


def _rearranged(config: DataConfig, document: Document) -> bool:
  # Hash digits that the split has not used.
  return int(document.digest[13:26], 16) < config.fim_fraction * 16**13


def _tally(documents: Sequence[Document]) -> dict[str, int]:
  return {
    "documents": len(documents),
    "bytes": sum(document.size for document in documents),
  }


@contextmanager
def timed(stage: str) -> Iterator[None]:
  """Logs how long the block took."""
  start = time.perf_counter()
  yield
  _log.info("%s: %.2f s", stage, time.perf_counter() - start)
