"""Routes that say and change which weights are served.

    GET  /admin/weights           what is served; with ?digest=1 its bits' hash
    POST /admin/weights/VERB      follow, pin, roll_back, skip: see `follow`

For whoever has the key; without one there are none.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from composer_jax.serving.api_request import BadRequestError
from composer_jax.serving.follow import VERBS, Follower
from composer_jax.serving.http_io import HttpError, read_json
from composer_jax.serving.types import EngineError, StoppedError
from composer_jax.shipping import ChainError, StoreError

_log = logging.getLogger(__name__)


class Admin:
  """Passes orders to a follower, from those who may give them."""

  def __init__(
    self, follower: Callable[[], Follower | None], key: str, timeout_s: float
  ):
    """Takes whom it serves.

    Args:
      follower: gives it; None if nothing moves new weights to the engine.
      key: wanted as `Authorization: Bearer KEY`; empty: nobody has it.
      timeout_s: for a request's body to arrive.
    """
    self._follower = follower
    self._key = key.encode()
    self._timeout_s = timeout_s

  def routes(self) -> list[web.RouteDef]:
    """To be added to an application."""
    return [
      web.get("/admin/weights", self._weights),
      web.post("/admin/weights/{verb}", self._order),
    ]

  async def _weights(self, request: web.Request) -> web.Response:
    follower = self._admitted(request)
    verb = "digest" if request.query.get("digest") else "status"
    return web.json_response(await _ordered(follower, verb, None))

  async def _order(self, request: web.Request) -> web.Response:
    follower = self._admitted(request)
    verb, version = request.match_info["verb"], None
    if verb not in VERBS:
      raise HttpError(404, f"There is no {verb!r:.40}: use {', '.join(VERBS)}.")
    if verb in ("pin", "skip"):
      body = await read_json(request, self._timeout_s)
      version = body.get("version") if isinstance(body, dict) else None
      if type(version) is not int:
        raise BadRequestError(
          f'{verb} needs a body of {{"version": an integer}}.', "version"
        )
    status = await _ordered(follower, verb, version)
    _log.info("Weights: %s %s, now %s", verb, version, status["version"])
    return web.json_response(status)

  def _admitted(self, request: web.Request) -> Follower:
    """The follower, for those who have the key."""
    if not self._key:
      raise HttpError(
        404, "There is no /admin here: the server was started without a key."
      )
    # What isn't UTF-8 comes as surrogates.
    given = request.headers.get("Authorization", "").encode(
      errors="surrogateescape"
    )
    # In a time that doesn't depend on where they differ.
    if not hmac.compare_digest(given, b"Bearer " + self._key):
      raise HttpError(
        401,
        "The admin key is missing or wrong: send Authorization: Bearer KEY.",
      )
    follower = self._follower()
    if follower is None:
      raise HttpError(409, "This server's weights are fixed: it has no store.")
    return follower


async def _ordered(
  follower: Follower, verb: str, version: int | None
) -> dict[str, Any]:
  try:
    return await asyncio.wrap_future(follower.order(verb, version))
  except StoppedError:
    raise
  except (ChainError, StoreError, EngineError, ValueError) as error:
    raise HttpError(409, f"{verb} failed: {error}") from error
