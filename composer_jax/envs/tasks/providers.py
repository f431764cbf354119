"""Sandboxes of many images behind one provider.

provider = Images(lambda image: Bubblewrap(
    limits, image.distributions, image.without))
sandbox = await start(provider, task)     # in the image of this task
"""

from collections.abc import Callable

from composer_jax.envs.image import PLAIN, Image
from composer_jax.envs.sandbox import Provider, Sandbox


class Images:
  """A provider for tasks that need different images.

  A task has one image to work in and maybe another one for its hidden test.
  """

  def __init__(self, make: Callable[[Image], Provider]):
    """Takes what makes the provider of an image; called once for each."""
    self._make = make
    self._made: dict[Image, Provider] = {}

  def of(self, image: Image) -> Provider:
    """The provider of an image.

    Raises:
      SandboxError: it can't be made.
    """
    if image not in self._made:
      self._made[image] = self._make(image)
    return self._made[image]

  async def create(self, snapshot: bytes = b"") -> Sandbox:
    """See `Provider.create`; the image is the plain one."""
    return await self.of(PLAIN).create(snapshot)


def with_image(provider: Provider, image: Image) -> Provider:
  """The provider to use where `image` is needed.

  Raises:
    ValueError: the provider has but its own image.
    SandboxError: the image can't be made.
  """
  if isinstance(provider, Images):
    return provider.of(image)
  if image != PLAIN:
    raise ValueError(
      "This task needs an image of its own"
      f" ({', '.join(image.distributions) or 'without some modules'}): give"
      " an Images as the provider."
    )
  return provider
