"""What a rollout does: sandbox, harness, hidden test, reward."""

from composer_jax.envs import harness
from composer_jax.envs.observe import changed, observe
from composer_jax.envs.rewards import Grader, RewardConfig, score
from composer_jax.envs.sandbox import FileError, Provider
from composer_jax.envs.tasks.types import Task, start
from composer_jax.envs.tasks.verify import Verdict, verify
from composer_jax.envs.tools import Toolbox
from composer_jax.rl.rollout import Play


def play_task(
  provider: Provider,
  dialect: harness.Dialect,
  task: Task,
  rewards: RewardConfig,
  budget: harness.Budget | None = None,
  judge: Grader | None = None,
  tool_latency_s: float = 0.0,
) -> Play:
  """Lets a policy work on a task of `composer_jax.envs.tasks`.

  Args:
    provider: of sandboxes, for the work and for the hidden test.
    dialect: how the policy is spoken to.
    task: what it is told, and how that is tested.
    rewards: what is rewarded.
    budget: what it may use.
    judge: of the rubric's aspects.
    tool_latency_s: that each call of a tool takes longer than it would.
  """

  async def play(sampler):
    async with await start(provider, task) as sandbox:
      before = await sandbox.snapshot()
      transcript = await harness.run(
        sampler,
        dialect,
        sandbox,
        Toolbox(task.test_command, latency_s=tool_latency_s),
        task.prompt,
        budget,
      )
      try:
        after = await sandbox.snapshot()
      except FileError as error:
        # The policy left what can't be archived, so it can't be tested.
        after, problem = before, str(error)
      else:
        problem = ""
    if problem:
      verdict = Verdict(0, task.probe.total, problem)
    else:
      verdict = await verify(provider, after, task.probe)
    edits = changed(before, after)
    outcome = observe(transcript, verdict, task.prompt, edits)
    reward = await score(outcome, rewards, judge)
    return transcript, reward.weighted

  return play
