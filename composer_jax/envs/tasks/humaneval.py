"""HumanEval's problems as tasks: for evaluation only, never to train on.

Chen et al. 2021 (https://arxiv.org/abs/2107.03374). Corpora are cleaned of the
same problems, see `composer_jax.data.decontaminate`.
"""

from collections.abc import Iterator, Mapping

from composer_jax.envs.tasks.types import Probe, Task

_PATH = "solution.py"


def generate(problems: Mapping[str, Mapping[str, str]]) -> Iterator[Task]:
  """One candidate a problem; the gold state is its canonical solution.

  The hidden test is the problem's own, and that it refuses a function that
  returns None: code that switches assertions off fails.

  Args:
    problems: by id, with `prompt`, `canonical_solution`, `test` and
      `entry_point`.
  """
  for name, problem in problems.items():
    entry, text = problem["entry_point"], problem["prompt"]
    yield Task(
      task_id=f"humaneval-{name.rsplit('/')[-1]}",
      kind="humaneval",
      prompt=(
        f"The function {entry} in {_PATH} has no body. Write it, so that it"
        " does what its docstring says."
      ),
      files={_PATH: f"{text}    raise NotImplementedError\n"},
      gold={_PATH: text + problem["canonical_solution"]},
      probe=Probe(
        "solution",
        (
          problem["test"],
          f"check({entry})",
          "check(lambda *_, **__: None)",
        ),
      ),
    )
