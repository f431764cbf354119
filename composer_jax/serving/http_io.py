"""What all routes share: JSON in, errors out."""

import asyncio
import json
import logging
from typing import Any

from aiohttp import web

from composer_jax.serving.api_request import BadRequestError
from composer_jax.serving.api_response import error_object
from composer_jax.serving.types import (
  EngineError,
  OverloadedError,
  RequestError,
  StoppedError,
)

_log = logging.getLogger(__name__)
_KINDS = {
  400: "invalid_request_error",
  401: "authentication_error",
  404: "not_found_error",
  429: "rate_limit_error",
}


class HttpError(Exception):
  """An answer that isn't the one asked for.

  Attributes:
    status: of HTTP.
    body: an error object.
    headers: beside.
  """

  def __init__(self, status: int, message: str, *, param=None, code=None):
    super().__init__(message)
    kind = _KINDS.get(
      status, "invalid_request_error" if status < 500 else "server_error"
    )
    self.status = status
    self.body = error_object(message, kind, param, code)
    self.headers = {"Retry-After": "1"} if status in (429, 503) else {}


async def read_json(request: web.Request, timeout_s: float) -> Any:
  """A request's body.

  Args:
    request: whose.
    timeout_s: for it to arrive.

  Raises:
    HttpError: it took too long.
    BadRequestError: it isn't JSON.
  """
  try:
    async with asyncio.timeout(timeout_s):
      raw = await request.read()
  except TimeoutError:
    raise HttpError(408, "The body took too long to arrive.") from None
  except web.RequestPayloadError:
    raise BadRequestError(
      "The body isn't encoded as its headers say."
    ) from None
  try:
    return json.loads(raw)
  except (ValueError, RecursionError) as error:
    raise BadRequestError(f"The body isn't JSON: {error}.") from None


def as_http_error(error: Exception) -> HttpError:
  """The answer to a request that failed; logs what nobody expected."""
  match error:
    case HttpError():
      return error
    case web.HTTPRequestEntityTooLarge():
      return HttpError(
        413, "The body is larger than this server takes: shorten the prompt."
      )
    case web.HTTPException():
      failure = HttpError(error.status, f"{error.reason}.")
      if "Allow" in error.headers:
        failure.headers["Allow"] = error.headers["Allow"]
      return failure
    case BadRequestError():
      return HttpError(400, str(error), param=error.param, code=error.code)
    case RequestError():
      return HttpError(400, str(error))
    case OverloadedError():
      return HttpError(429, str(error), code="queue_full")
    case StoppedError():
      return HttpError(503, str(error))
    case EngineError():
      return HttpError(500, str(error))
    case _:
      _log.error("A request failed", exc_info=error)
      return HttpError(500, "The server failed; its log says why.")
