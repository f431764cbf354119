import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from made_up_code import module

from composer_jax.data import DataConfig, Tokenizer, build, load, load_data
from composer_jax.data.decontaminate import humaneval
from composer_jax.data.fim import Sentinels, restore


def config(code, **changes):
  options = {
    "sources": (str(code),),
    "vocab_size": 400,
    "seq_len": 128,
    "validation_fraction": 0.2,
  }
  return DataConfig(**{**options, **changes})


def contents(folder):
  return {
    str(path.relative_to(folder)): path.read_bytes()
    for path in sorted(folder.rglob("*"))
    if path.is_file()
  }


def documents_of(rows):
  """The targets of each document's pieces, by its path."""
  pieces = {}
  for index in range(len(rows)):
    row = rows[index]
    for segment, path in enumerate(rows.sources(index), 1):
      targets = row["targets"][row["segment_ids"] == segment]
      pieces.setdefault(path, []).append(targets)
  return pieces


def test_what_was_held_out_is_as_written_and_not_trained_on(code, tmp_path):
  data = load_data(config(code, seq_len=4096), tmp_path / "data")
  train = documents_of(data.train)
  validation = documents_of(data.validation)
  assert len(train) + len(validation) == 40 and len(validation) > 2
  assert not train.keys() & validation.keys()

  def written(path):
    return (code.parent / path).read_text(encoding="utf-8")

  end = data.tokenizer.end_id
  for path, (ids,) in validation.items():
    assert ids[-1] == end
    assert data.tokenizer.decode(ids[:-1]) == written(path)
  sentinels, rearranged = Sentinels.of(data.tokenizer), 0
  for path, (ids,) in train.items():
    ids = ids[:-1]
    if sentinels.middle in ids:
      rearranged += 1
      ids = restore(ids, sentinels)
    assert data.tokenizer.decode(ids) == written(path)
  assert 10 < rearranged == data.report["fim_documents"] < 30


def test_tokenizer_learns_from_training_documents_only(code, tmp_path):
  data = load_data(config(code), tmp_path / "data")
  paths = sorted(set(data.train.documents))
  texts = [(code.parent / path).read_text("utf-8") for path in paths]
  again, kept = tmp_path / "again.json", next((tmp_path / "data").iterdir())
  Tokenizer.train(texts, 400).save(again)
  assert again.read_bytes() == (kept / "tokenizer.json").read_bytes()


def test_report_accounts_for_every_file(code, tmp_path):
  (code / "zz_copy.py").write_text(module(3), encoding="utf-8")
  near = module(4, 20)
  (code / "near.py").write_text(near, encoding="utf-8")
  (code / "zz_near.py").write_text(near + "x = 1\n", encoding="utf-8")
  (code / "latin.py").write_bytes(b"# caf\xe9\n")
  (code / os.fsdecode(b"caf\xe9.py")).write_text("x = 1\n")
  (code / "empty.py").touch()
  (code / "minified.py").write_text("x=1;" * 500)
  (code / "leak.py").write_text(humaneval()["HumanEval/0"]["prompt"])
  data = load_data(config(code), tmp_path / "data")
  report = data.report
  dropped = {name: n["documents"] for name, n in report["dropped"].items()}
  assert dropped == {
    "undecodable": 2,
    "empty": 1,
    "long_lines": 1,
    "duplicate": 1,
    "near_duplicate": 1,
    "contaminated": 1,
    "over_max_bytes": 0,
  }
  for unit in ("documents", "bytes"):
    parts = [*report["dropped"].values(), report["train"], report["validation"]]
    assert report["read"][unit] == sum(part[unit] for part in parts)
  for rows, name in ((data.train, "train"), (data.validation, "validation")):
    assert report[name]["tokens"] == rows.num_tokens
    _, targets = rows.pairs()
    in_bytes = data.tokenizer.token_bytes[targets].sum()
    assert in_bytes == report[name]["bytes"]
  assert "1 contaminated" in data.summary()
  assert "\n" not in data.summary()


def test_second_call_opens_what_the_first_made(code, tmp_path, monkeypatch):
  first = load_data(config(code), tmp_path / "data")
  monkeypatch.setattr(build, "make", None)
  second = load_data(config(code), tmp_path / "data")
  assert second.report == first.report
  assert second.key == first.key
  assert isinstance(second.train.packed.tokens, np.memmap)


def test_a_changed_corpus_or_configuration_is_made_anew(code, tmp_path):
  folder = tmp_path / "data"
  first = load_data(config(code), folder)
  (code / "m0.py").write_text(module(1000), encoding="utf-8")
  second = load_data(config(code), folder)
  third = load_data(config(code, seed=1), folder)
  assert first.report["corpus"] != second.report["corpus"]
  assert {path.name for path in folder.iterdir()} == {
    f"data-{data.key}" for data in (first, second, third)
  }
  assert len(list(folder.iterdir())) == 3


def test_tokenizer_of_another_run(code, tmp_path):
  trained = load_data(config(code), tmp_path / "data").tokenizer
  path = tmp_path / "tokenizer.json"
  trained.save(path)
  given = config(code, tokenizer=str(path), vocab_size=999)
  data = load_data(given, tmp_path / "data")
  assert data.tokenizer.vocab_size == 400
  # Its content counts, not its name.
  trained._spec["added_tokens"][0]["content"] = "</s>"
  trained._spec["model"]["vocab"]["</s>"] = 0
  del trained._spec["model"]["vocab"]["<|endoftext|>"]
  trained.save(path)
  load_data(given, tmp_path / "data")
  assert len(list((tmp_path / "data").iterdir())) == 3


def test_byte_budget(code, tmp_path):
  data = load_data(config(code, max_bytes=20_000), tmp_path / "data")
  kept = data.report["train"]["bytes"] + data.report["validation"]["bytes"]
  assert 19_000 < kept <= 20_000
  assert data.report["dropped"]["over_max_bytes"]["documents"] > 5


def test_a_crash_leaves_nothing_that_looks_like_data(
  code, tmp_path, monkeypatch
):
  folder = tmp_path / "data"

  def crash(*_):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched:
    patched.setattr(build, "write_json", crash)
    with pytest.raises(KeyboardInterrupt):
      load_data(config(code), folder)
  assert list(folder.iterdir()) == []
  load_data(config(code), folder)


def test_many_at_once_share_one_result(code, tmp_path, monkeypatch):
  folder, results = tmp_path / "data", []
  # All find nothing, and all make it, before the first may rename.
  barrier, make = threading.Barrier(3), build.make

  def make_and_wait(*args):
    make(*args)
    barrier.wait(30)

  monkeypatch.setattr(build, "make", make_and_wait)
  threads = [
    threading.Thread(
      target=lambda: results.append(load_data(config(code), folder))
    )
    for _ in range(3)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert len(results) == 3
  assert len(list(folder.iterdir())) == 1
  for data in results:
    assert data.report == results[0].report


_IN_ANOTHER_PROCESS = """
import json, sys
from composer_jax.data import DataConfig, load_data
config = json.loads(sys.argv[1])
load_data(DataConfig(**config), sys.argv[2])
"""


def test_same_bytes_in_processes_with_other_hash_seeds(code, tmp_path):
  root = Path(load.__file__).parents[2]
  options = {
    "sources": [str(code)],
    "vocab_size": 500,
    "seq_len": 64,
    "validation_fraction": 0.2,
  }
  for seed in ("1", "2"):
    subprocess.run(
      [
        sys.executable,
        "-c",
        _IN_ANOTHER_PROCESS,
        json.dumps(options),
        tmp_path / seed,
      ],
      cwd=root,
      env={**os.environ, "PYTHONHASHSEED": seed},
      check=True,
      timeout=120,
    )
  first, second = contents(tmp_path / "1"), contents(tmp_path / "2")
  assert len(first) == 15
  assert first == second


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"suffixes": (".rs",)}, "No document left to train on"),
    ({"validation_fraction": 1e-9}, "raise validation_fraction"),
    ({"vocab_size": 100}, "vocab_size must be at least 261"),
    ({"fim_fraction": 2.0}, r"fim_fraction must lie in \[0, 1\]"),
    ({"validation_fraction": 1.0}, r"must lie in \[0, 1\)"),
    ({"seq_len": 8}, "seq_len must be at least 16"),
    ({"max_bytes": -1}, "max_bytes must not be negative"),
    ({"sources": "stdlib"}, "sources must be a tuple"),
    ({"sources": ()}, "sources must be a tuple"),
  ],
)
def test_mistakes_are_explained(code, tmp_path, changes, message):
  with pytest.raises(ValueError, match=message) as raised:
    load_data(config(code, **changes), tmp_path / "data")
  assert "\n" not in str(raised.value)


def test_stages_are_timed(code, tmp_path, caplog):
  with caplog.at_level(logging.INFO, logger=build.__name__):
    load_data(config(code), tmp_path / "data")
  for stage in ("read", "near-duplicates", "train tokenizer", "pack"):
    assert f"{stage}: " in caplog.text


def test_a_budget_of_bytes_leaves_the_shares_as_they_are(tmp_path):
  source = tmp_path / "source"
  source.mkdir()
  for i in range(400):
    body = "\n".join(
      f"value_{i}_{j} = {i * j} + name_{i + j}" for j in range(9)
    )
    (source / f"file_{i}.py").write_text(body)
  config = DataConfig(
    sources=(str(source),),
    max_bytes=sum(f.stat().st_size for f in source.iterdir()) // 2,
    validation_fraction=0.25,
    near_duplicate_threshold=0.0,
    decontaminate=False,
    vocab_size=320,
    seq_len=64,
  )
  report = load_data(config, tmp_path / "data").report
  train, held_out = (
    report[side]["documents"] for side in ("train", "validation")
  )
  assert 180 < train + held_out < 220
  assert 0.15 < held_out / (train + held_out) < 0.35
