"""What goes wrong with a delta, as one type."""


class DeltaError(ValueError):
  """A delta can't be made or applied; the message says why in one sentence."""


class StoreError(RuntimeError):
  """An object store failed; trying again may help."""


class MissingObjectError(StoreError):
  """There is no such object; trying again won't help."""
