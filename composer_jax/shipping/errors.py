"""What goes wrong with a delta, as one type."""


class DeltaError(ValueError):
  """A delta can't be made or applied; the message says why in one sentence."""


class StoreError(RuntimeError):
  """An object store failed; trying again may help."""


class MissingObjectError(StoreError):
  """There is no such object; trying again won't help."""


class RangeError(StoreError):
  """The object is shorter than what was asked of it; it won't grow."""


class ChainError(RuntimeError):
  """The chain of versions is damaged, or can't do what was asked."""


class FencedError(ChainError):
  """Another publisher took over; this one must not write any more."""


class MisfitError(ChainError, ValueError):
  """A version's arrays are not those that a reader asked for."""
