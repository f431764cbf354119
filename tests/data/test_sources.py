import io
import os
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from composer_jax.data.corpus import (
  Document,
  content_hash,
  is_validation,
  take_bytes,
  why_skip,
)
from composer_jax.data.sources import SourceFile, read_sources


def read(*sources, cache=Path("/no/cache")):
  return read_sources([str(source) for source in sources], [".py"], cache)


def test_folder_without_hidden_parts(tmp_path):
  root = tmp_path / "project"
  for name in ("a.py", "sub/b.py", ".git/c.py", "sub/notes.txt"):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(name)
  assert read(root) == [
    SourceFile("project/a.py", b"a.py"),
    SourceFile("project/sub/b.py", b"sub/b.py"),
  ]


def test_archives_hold_the_same_files(tmp_path):
  members = {"p/a.py": b"x = 1\n", "p/b.py": b"y = 2\n", "p/c.txt": b"no"}
  with zipfile.ZipFile(tmp_path / "p.whl", "w") as archive:
    for name, content in members.items():
      archive.writestr(name, content)
  with tarfile.open(tmp_path / "p.tar.gz", "w:gz") as archive:
    for name, content in members.items():
      info = tarfile.TarInfo(name)
      info.size = len(content)
      archive.addfile(info, io.BytesIO(content))
  for name in ("p.whl", "p.tar.gz"):
    assert read(tmp_path / name) == [
      SourceFile(f"{name}/p/a.py", b"x = 1\n"),
      SourceFile(f"{name}/p/b.py", b"y = 2\n"),
    ]


def test_cached_wheel_is_not_downloaded_again(tmp_path):
  with zipfile.ZipFile(tmp_path / "my_tool-1.2.whl", "w") as archive:
    archive.writestr("my_tool/a.py", "x = 1\n")
  (file,) = read("wheel:My-Tool==1.2", cache=tmp_path)
  assert file == SourceFile("my_tool-1.2.whl/my_tool/a.py", b"x = 1\n")


def test_a_wheel_that_pip_cannot_get_is_told(tmp_path, monkeypatch):
  pytest.importorskip("pip")
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  message = "pip could not download a pure-Python wheel of none==1.2: "
  with pytest.raises(OSError, match=re.escape(message)) as raised:
    read("wheel:none==1.2", cache=tmp_path)
  assert "\n" not in str(raised.value)
  assert not list(tmp_path.iterdir())


def test_a_wheel_needs_pip(tmp_path, monkeypatch):
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  with pytest.raises(ValueError, match=r"needs pip in this environment"):
    read("wheel:none==1.2", cache=tmp_path)


def test_standard_library_comes_without_tests_and_manual():
  paths = {file.path for file in read("stdlib")}
  assert {"stdlib/json/decoder.py", "stdlib/argparse.py"} <= paths
  unwanted = re.compile(r"/(site-packages|tests?|pydoc_data)/")
  assert not [path for path in paths if unwanted.search(path)]


@pytest.mark.parametrize(
  "source, error, message",
  [
    ("/no/such/folder", FileNotFoundError, "does not exist: give 'stdlib'"),
    ("wheel:toolz", ValueError, "must pin a version"),
    (__file__, ValueError, "neither a folder nor an archive"),
  ],
)
def test_bad_source_is_explained(source, error, message, tmp_path):
  with pytest.raises(error, match=message) as raised:
    read(source, cache=tmp_path)
  assert "\n" not in str(raised.value)


def test_content_hash_covers_paths_and_bytes_but_not_order():
  a, b = SourceFile("a.py", b"1"), SourceFile("b.py", b"2")
  assert content_hash([a, b]) == content_hash([b, a])
  others = [
    [a],
    [a, SourceFile("b.py", b"3")],
    [a, SourceFile("c.py", b"2")],
    [SourceFile("a.py", b"2"), SourceFile("b.py", b"1")],
    [a, b, b],
  ]
  hashes = {content_hash(files) for files in [[a, b], *others]}
  assert len(hashes) == 1 + len(others)


@pytest.mark.parametrize(
  "content, reason",
  [
    (b"x = 1\n", ""),
    (b"\xff\xfe", "undecodable"),
    (b" \n\n", "empty"),
    (b"x = 1\n" * 99 + b"y = '" + b"a" * 1000 + b"'\n", "long_lines"),
    ((b"z" * 120 + b"\n") * 9, "long_lines"),
  ],
)
def test_why_a_file_is_skipped(content, reason):
  assert why_skip(SourceFile("a.py", content)) == reason


def test_a_file_name_that_is_not_utf8_is_skipped(tmp_path):
  for name in (b"caf\xe9.py", b"th\xe9.py"):
    (tmp_path / os.fsdecode(name)).write_text("x = 1\n")
  files = read(tmp_path)
  assert [why_skip(file) for file in files] == ["undecodable"] * 2
  assert content_hash(files) != content_hash(files[:1] * 2)


def test_a_file_keeps_its_side_whatever_else_there_is():
  documents = [Document(f"{i}.py", f"x = {i}\n") for i in range(2000)]
  held_out = {d.path for d in documents if is_validation(d, 0.1)}
  assert 140 < len(held_out) < 260
  # Sides follow from the content alone: not from the path,
  renamed = [Document("other/" + d.path, d.text) for d in documents]
  assert {
    d.path.removeprefix("other/") for d in renamed if is_validation(d, 0.1)
  } == held_out
  # and a larger share only adds.
  assert held_out < {d.path for d in documents if is_validation(d, 0.2)}


def test_byte_budget_does_not_depend_on_order():
  documents = [Document(f"{i}.py", "x" * (i % 7 + 1)) for i in range(50)]
  taken, left = take_bytes(documents, 60)
  assert 50 < sum(document.size for document in taken) <= 60
  assert sorted(taken + left, key=documents.index) == documents
  again, _ = take_bytes(documents[::-1], 60)
  assert set(again) == set(taken)
  assert take_bytes(documents, 0) == (documents, [])
