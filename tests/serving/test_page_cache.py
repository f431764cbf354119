"""Pages: who holds them, who finds them, who gives way."""

import numpy as np

from composer_jax.serving.cache import PageCache, page_key


def make(num_pages=4):
  return PageCache(num_pages, 2, (1, 1), np.dtype(np.uint8))


def chain(root, *pages):
  keys = []
  for page in pages:
    keys.append(page_key(keys[-1] if keys else root, np.array(page, np.int32)))
  return keys


def test_a_key_names_the_root_and_everything_before():
  a = chain(b"1", (1, 2), (3, 4))
  assert a == chain(b"1", (1, 2), (3, 4))
  assert a[1] != chain(b"1", (1, 3), (3, 4))[1]
  assert a[0] != chain(b"2", (1, 2))[0]
  assert a[1] != page_key(b"1", np.array((3, 4), np.int32))


def test_the_longest_known_prefix_is_found():
  cache = make()
  keys = chain(b"1", (1, 2), (3, 4), (5, 6))
  pages = [cache.allocate() for _ in range(3)]
  cache.register(pages[0], keys[0], frozenset({1}))
  cache.register(pages[2], keys[2], frozenset({1}))
  assert cache.find(keys) == pages[:1]
  cache.register(pages[1], keys[1], frozenset({1}))
  assert cache.find(keys) == pages


def test_held_pages_never_give_way_and_idle_ones_do_oldest_first():
  cache = make(4)
  first, second = chain(b"1", (1, 2), (3, 4)), chain(b"1", (7, 8))
  pages = [cache.allocate() for _ in range(3)]
  for page, key in zip(pages, first + second, strict=True):
    cache.register(page, key, frozenset({1}))
  cache.release(pages[:2])
  cache.release(pages[2:])
  assert (cache.num_available, cache.num_cached) == (4, 3)
  cache.allocate()  # the one that was never used
  assert cache.evictions == 0
  # Of the prefix let go first, its end goes first.
  assert cache.allocate() == pages[1]
  assert cache.find(first) == pages[:1]
  cache.hold(pages[:1])
  assert cache.allocate() == pages[2]
  assert cache.allocate() is None
  assert cache.evictions == 2
  cache.release(pages[:1])
  assert cache.allocate() == pages[0]
  assert cache.find(first) == []


def test_a_page_with_two_holders_stays_until_both_let_go():
  cache = make(1)
  (key,) = chain(b"1", (1, 2))
  page = cache.allocate()
  cache.register(page, key, frozenset({1}))
  cache.hold([page])
  cache.release([page])
  assert cache.num_available == 0
  cache.release([page])
  assert cache.num_available == 1


def test_equal_pages_stay_apart_and_only_one_is_found():
  cache = make(2)
  (key,) = chain(b"1", (1, 2))
  pages = [cache.allocate(), cache.allocate()]
  for page in pages:
    cache.register(page, key, frozenset({1}))
  assert cache.find([key]) == pages[:1]
  cache.release(pages[1:])
  assert cache.num_cached == 0  # free at once
  assert cache.allocate() == pages[1]
