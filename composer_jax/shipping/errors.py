"""What goes wrong with a delta, as one type."""


class DeltaError(ValueError):
  """A delta can't be made or applied; the message says why in one sentence."""
