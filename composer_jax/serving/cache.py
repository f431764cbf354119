"""Who holds which page of the cache, and which pages may be shared.

Only whole pages are shared: a page is registered once all its tokens are known
and on their way into it, and never written again, so that nothing is ever
copied. A page's key is a digest of its tokens and of its predecessor's key; the
first predecessor is the *root*, which names the weights. A request's prefix
that was computed by one version is found only by requests that start on it.

A page that nobody holds and that is registered stays as it is until its room is
needed; the one that was let go longest ago gives way first.
"""

import collections
import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int


def page_key(parent: bytes, tokens: Int[np.ndarray, " page_size"]) -> bytes:
  """The key of the page after `parent` that holds these tokens."""
  digest = hashlib.blake2b(parent, digest_size=16)
  digest.update(np.ascontiguousarray(tokens, np.int32).tobytes())
  return digest.digest()


class PageCache:
  """The pages of a cache, by number.

  Attributes:
    page_size: tokens a page.
    num_pages: of them.
    routes: experts of every token, `[pages, page_size, L, K]`; kept here, on
      the host, so that a request which starts from shared pages has the routes
      of its whole prompt.
    versions: of each page, the weights that computed anything in it, or
      anything before it that it depends on.
    evictions: registered pages that gave way.
  """

  def __init__(
    self,
    num_pages: int,
    page_size: int,
    route_shape: tuple[int, int],
    route_dtype: np.dtype,
  ):
    self.page_size = page_size
    self.num_pages = num_pages
    self.routes = np.zeros((num_pages, page_size, *route_shape), route_dtype)
    self.versions = [frozenset[int]()] * num_pages
    self.evictions = 0
    self._holders = [0] * num_pages
    self._free = list(range(num_pages - 1, -1, -1))
    # Registered pages that nobody holds, longest let go first.
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._page_of: dict[bytes, int] = {}
    self._key_of: dict[int, bytes] = {}

  @property
  def num_available(self) -> int:
    """Pages that can be had now."""
    return len(self._free) + len(self._idle)

  @property
  def num_cached(self) -> int:
    """Pages that nobody holds, kept for a prefix to come."""
    return len(self._idle)

  def find(self, keys: Iterable[bytes]) -> list[int]:
    """The registered pages of the longest known prefix of `keys`."""
    pages = []
    for key in keys:
      if key not in self._page_of:
        break
      pages.append(self._page_of[key])
    return pages

  def num_idle(self, pages: Sequence[int]) -> int:
    """How many of these pages nobody holds."""
    return sum(page in self._idle for page in pages)

  def hold(self, pages: Iterable[int]) -> None:
    """Adds a holder to pages that `find` gave."""
    for page in pages:
      self._idle.pop(page, None)
      self._holders[page] += 1

  def allocate(self) -> int | None:
    """A page to write, with one holder; None if every page is held."""
    if self._free:
      page = self._free.pop()
    elif self._idle:
      page, _ = self._idle.popitem(last=False)
      del self._page_of[self._key_of.pop(page)]
      self.evictions += 1
    else:
      return None
    self._holders[page] = 1
    self.versions[page] = frozenset()
    return page

  def register(self, page: int, key: bytes, versions: frozenset[int]) -> None:
    """Lets a whole page be found.

    Does nothing where another page holds the same already: the two stay apart.
    """
    if key not in self._page_of and page not in self._key_of:
      self._page_of[key] = page
      self._key_of[page] = key
      self.versions[page] = versions

  def release(self, pages: Sequence[int]) -> None:
    """Takes a holder away; the last page of a prefix is to give way first."""
    for page in reversed(pages):
      self._holders[page] -= 1
      if self._holders[page] == 0:
        if page in self._key_of:
          self._idle[page] = None
        else:
          self._free.append(page)
