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
from pathlib import Path

from composer_jax.data import build
from composer_jax.data.config import DataConfig
from composer_jax.data.corpus import content_hash
from composer_jax.data.files import written_at_once
from composer_jax.data.rows import PackedRows
from composer_jax.data.sources import read_sources
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
    key: names the data's folder, `data-<key>`: a hash of the configuration and
      of the content of the corpus and of a given tokenizer.
  """

  train: PackedRows
  validation: PackedRows
  tokenizer: Tokenizer
  report: dict
  key: str

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
  with build.timed("read"):
    files = read_sources(config.sources, config.suffixes, folder / "wheels")
    corpus_hash = content_hash(files)
  given = Tokenizer.load(config.tokenizer) if config.tokenizer else None
  key = _key(config, corpus_hash)
  path = folder / f"data-{key}"
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    with written_at_once(path) as unfinished:
      build.make(config, files, corpus_hash, given, unfinished)
  data = Data(
    train=PackedRows.open(path / "train"),
    validation=PackedRows.open(path / "validation"),
    tokenizer=Tokenizer.load(path / "tokenizer.json"),
    report=json.loads((path / "report.json").read_text("utf-8")),
    key=key,
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
