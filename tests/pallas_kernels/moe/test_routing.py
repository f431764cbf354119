"""The tables of the tiled layout, against a plain loop over rows."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.moe import routing

route = jax.jit(routing.route, static_argnames=("num_experts", "tile", "head"))


@st.composite
def problems(draw):
  """Ids of few different shapes, so that compiled programs are shared."""
  tokens, top_k = draw(st.sampled_from([(7, 3), (24, 2)]))
  experts = draw(st.sampled_from([1, 5]))
  favourite = draw(st.integers(-1, experts))
  ids = draw(
    st.lists(
      st.one_of(st.just(favourite), st.integers(-2, experts + 1)),
      min_size=tokens * top_k,
      max_size=tokens * top_k,
    )
  )
  tile = draw(st.sampled_from([1, 8]))
  return np.int32(ids).reshape(tokens, top_k), experts, tile


def expected_slots(ids, experts, tile, head):
  """Row of each slot and expert of each tile, one expert after the other."""
  rows = [np.flatnonzero(ids.ravel() == e) for e in range(experts)]
  tiles = [np.split(r, range(tile, len(r), tile)) for r in rows]
  if head:
    order = [(e, t[0]) for e, t in enumerate(tiles)]
    order += [(e, part) for e, t in enumerate(tiles) for part in t[1:]]
  else:
    order = [(e, part) for e, t in enumerate(tiles) for part in t if len(part)]
  slots = np.full((len(order), tile), -1)
  for slot, (_, part) in zip(slots, order, strict=True):
    slot[: len(part)] = part
  return slots, np.array([e for e, _ in order], int)


@pytest.mark.parametrize("head", [False, True])
@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(problems())
def test_tables(head, problem):
  ids, experts, tile = problem
  table = jax.tree.map(np.asarray, route(ids, experts, tile, head=head))
  slots, tile_expert = expected_slots(ids, experts, tile, head)
  used = len(slots)
  slot_row = table.slot_row.reshape(-1, tile)
  # Grouped by expert, in row order within a group, and padding marked.
  assert table.num_tiles == used <= len(slot_row)
  np.testing.assert_array_equal(slot_row[:used], slots)
  assert (slot_row[used:] == -1).all()
  np.testing.assert_array_equal(table.tile_expert[:used], tile_expert)
  assert ((table.tile_expert >= 0) & (table.tile_expert < experts)).all()
  np.testing.assert_array_equal(
    table.group_sizes, [(ids == e).sum() for e in range(experts)]
  )
  # row_slot is the inverse of slot_row.
  known = (ids >= 0) & (ids < experts)
  assert (table.row_slot[~known] == -1).all()
  rows = np.arange(ids.size).reshape(ids.shape)
  np.testing.assert_array_equal(
    table.slot_row[table.row_slot[known]], rows[known]
  )
  assert (table.slot_row >= 0).sum() == known.sum()


@pytest.mark.parametrize("head", [False, True])
def test_most_uneven_routing_fills_the_last_tile(head):
  # All experts but one hold one row: nothing needs more tiles than this.
  experts, tile, rows = 4, 8, 4 + 3 * 8
  ids = np.minimum(np.arange(rows), experts - 1)[:, None]
  table = route(ids, experts, tile, head=head)
  assert table.num_tiles == routing.max_tiles(rows, experts, tile, head=head)


def test_no_scatter():
  ids = np.zeros((32, 2), np.int32)
  jaxpr = jax.make_jaxpr(lambda i: routing.route(i, 4, 8, head=True))(ids)
  assert "scatter" not in str(jaxpr)
