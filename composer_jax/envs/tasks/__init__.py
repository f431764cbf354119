"""Tasks: a repository, what to do in it, and hidden tests of whether it's done.

`micro` makes drills that a tiny model learns in minutes, `repair` puts faults
into functions of real packages, `implement` takes their bodies out;
`validate.build` keeps the tasks that hold.
"""

from composer_jax.envs.tasks.providers import Images
from composer_jax.envs.tasks.types import Probe, Task, load, save

__all__ = ["Images", "Probe", "Task", "load", "save"]
