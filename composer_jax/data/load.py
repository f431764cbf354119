"""The whole way from sources to packed rows, done once and kept on disk.

    data = load_data(DataConfig(), "runs/data")
    batches = make_loader(data.train, batch_size=32, seed=0)

The folder's name is a hash of the configuration and of the corpus's content:
change either and the data is made anew. It is written under another name and
renamed when complete, so any number of processes may ask for it at once, and a
crash leaves nothing that a later call would take for data.
"""

import dataclasses
import hashlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from composer_jax.data import corpus, decontaminate, dedup, fim, packing
from composer_jax.data.config import DataConfig
from composer_jax.data.corpus import Document
from composer_jax.data.rows import PackedRows, write_json
from composer_jax.data.sources import SourceFile, read_sources
from composer_jax.data.tokenizer import Tokenizer

# Raise it when the same configuration should give other files.
_FORMAT = 1

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Data:
  """What training reads.

  Attributes:
    train: rows to learn from, some of them rearranged to fill in the middle.
    validation: rows held out, as they were written.
    tokenizer: of both.
    report: what was kept and dropped, and why; plain numbers and strings.
  """

  train: PackedRows
  validation: PackedRows
  tokenizer: Tokenizer
  report: dict

  def summary(self) -> str:
    """The report in one line."""
    dropped = ", ".join(
      f"{count['documents']} {reason}"
      for reason, count in self.report["dropped"].items()
      if count["documents"]
    )
    train, validation = self.report["train"], self.report["validation"]
    return (
      f"Corpus {self.report['corpus'][:12]}: "
      f"{train['documents']:,} documents, {train['tokens']:,} tokens in "
      f"{train['rows']:,} rows to train on "
      f"({100 * train['padding']:.2f}% padding); "
      f"{validation['documents']:,} documents, {validation['tokens']:,} tokens "
      f"held out; vocabulary {self.report['vocab_size']:,}; "
      f"dropped: {dropped or 'nothing'}."
    )


def load_data(config: DataConfig, folder: str | Path) -> Data:
  """Opens the data set of a configuration, making it if it is not there.

  Args:
    config: what to make.
    folder: where data sets, and downloaded wheels, are kept.

  Returns:
    The data, mapped from disk.

  Raises:
    ValueError, FileNotFoundError: a source, the tokenizer or the configuration
      is wrong, or no document is left; the message says which and what to do.
    ImportError: the extra `data` is needed and not installed.
  """
  folder = Path(folder).expanduser()
  with _timed("read"):
    files = read_sources(config.sources, config.suffixes, folder / "wheels")
    corpus_hash = corpus.content_hash(files)
  given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
  path = folder / f"data-{_key(config, corpus_hash)}"
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    with _written_at_once(path) as unfinished:
      _make(config, files, corpus_hash, given, unfinished)
  data = Data(
    train=PackedRows.open(path / "train"),
    validation=PackedRows.open(path / "validation"),
    tokenizer=Tokenizer.load(path / "tokenizer.json"),
    report=json.loads((path / "report.json").read_text("utf-8")),
  )
  _log.info(data.summary())
  return data


def _key(config: DataConfig, corpus_hash: str) -> str:
  parts = {"format": _FORMAT, "corpus": corpus_hash}
  parts["config"] = dataclasses.asdict(config)
  if config.tokenizer:
    content = Path(config.tokenizer).expanduser().read_bytes()
    parts["tokenizer"] = hashlib.sha256(content).hexdigest()
  text = json.dumps(parts, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextmanager
def _written_at_once(path: Path) -> Iterator[Path]:
  """A new folder that becomes `path` if the block ends well.

  If `path` has come to be in the meantime, that one stays.
  """
  unfinished = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
  unfinished.mkdir()
  try:
    yield unfinished
    try:
      unfinished.rename(path)
    except OSError:
      if not path.exists():
        raise
  finally:
    shutil.rmtree(unfinished, ignore_errors=True)


def _make(
  config: DataConfig,
  files: Sequence[SourceFile],
  corpus_hash: str,
  tokenizer: Tokenizer | None,
  folder: Path,
) -> None:
  documents, dropped = _clean(config, files)
  train, validation = _split(config, documents, dropped)
  if tokenizer is None:
    with _timed("train tokenizer"):
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
  with _timed("exact duplicates"):
    documents, out = dedup.drop_duplicates(documents)
    dropped["duplicate"] = _tally(out)
  documents, out = corpus.take_bytes(documents, config.max_bytes)
  dropped["over_max_bytes"] = _tally(out)
  if config.near_duplicate_threshold:
    with _timed("near-duplicates"):
      documents, out = dedup.drop_near_duplicates(
        documents, config.near_duplicate_threshold
      )
      dropped["near_duplicate"] = _tally(out)
  if config.decontaminate:
    with _timed("decontaminate"):
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
  with _timed("encode"):
    encoded = tokenizer.encode_batch([document.text for document in documents])
  pieces = [[ids] for ids in encoded]
  if fim_allowed:
    with _timed("fill in the middle"):
      chosen = [i for i, d in enumerate(documents) if _rearranged(config, d)]
      rearranged = chosen and fim.rearrange(
        [encoded[i] for i in chosen],
        [(config.seed, int(documents[i].digest, 16)) for i in chosen],
        tokenizer,
        config.seq_len - 1,
      )
      for i, new in zip(chosen, rearranged, strict=True):
        pieces[i] = new
  with _timed("pack"):
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
def _timed(stage: str) -> Iterator[None]:
  start = time.perf_counter()
  yield
  _log.info("%s: %.2f s", stage, time.perf_counter() - start)
