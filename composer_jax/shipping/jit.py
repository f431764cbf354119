"""One decorator for the loops that NumPy is too slow for."""

import inspect

import numba


def loop(function):
  """Compiles a function without annotations, once a machine.

  The import hook that checks annotations in tests wraps every function; numba
  needs the bare one.
  """
  return numba.njit(cache=True, nogil=True)(inspect.unwrap(function))
