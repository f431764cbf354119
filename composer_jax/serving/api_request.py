"""Reads what OpenAI's clients send, and what they may send besides.

`completion_call` and `chat_call` check a request's JSON and turn it into a
`Call`. What this server can't do is refused, never ignored.

Beside OpenAI's parameters (pass them as `extra_body` of its client):

    prompt_token_ids   instead of a prompt's text: token ids, used as they are.
                       (So are ids in `prompt`, as OpenAI has it.)
    return_token_ids   each choice gets `prompt_token_ids`, `token_ids` (what
                       was sampled, stop token included), `sampled_logprobs` (in
                       the distribution sampled from) and `seed`
    return_versions    `versions` and `stale_cache`, of each token
    return_routes      `routes`, a packed array `[tokens, moe_layers, top_k]`
    return_prompt_routes  `prompt_routes`, the same for all but the last token
                       of the prompt
    prompt_routes_from the first position of the prompt whose route is wanted: a
                       turn's prompt begins with what was routed before
    top_k              keeps the likeliest tokens; 0 keeps all
    stop_token_ids     tokens that end a completion
    ignore_eos         whether the end token does not

What these arrays mean: `composer_jax.serving.Completion`.
"""

import dataclasses
import difflib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from composer_jax.serving.chat import Message, ToolCall
from composer_jax.serving.types import RequestError

_RETURNS = (
  "return_token_ids",
  "return_versions",
  "return_routes",
  "return_prompt_routes",
)
_MISSING: Any = object()
# What changes nothing about the tokens.
_WITHOUT_EFFECT = (
  "metadata",
  "parallel_tool_calls",
  "prompt_cache_key",
  "prompt_cache_retention",
  "safety_identifier",
  "service_tier",
  "store",
  "user",
)
# What this server can't do, beside the values that ask for nothing.
_NEUTRAL = {
  "best_of": (1,),
  "echo": (False,),
  "frequency_penalty": (0,),
  "presence_penalty": (0,),
  "logit_bias": ({},),
  "suffix": ("",),
  "response_format": ({"type": "text"},),
  "modalities": (["text"],),
}


class BadRequestError(RequestError):
  """A request that its sender must change.

  Attributes:
    param: the parameter at fault, if it is one.
    code: what programs may look for, if anything.
  """

  def __init__(
    self, message: str, param: str | None = None, code: str | None = None
  ):
    super().__init__(message)
    self.param = param
    self.code = code


@dataclasses.dataclass(frozen=True)
class Call:
  """A checked request.

  Attributes:
    model: whose completions.
    prompts: texts or token ids, one or more; empty for a chat.
    messages: of a chat.
    tools: that its model may call.
    n: completions of each prompt.
    max_tokens: of each; None: as many as there is room for.
    temperature: as in `SamplingParams`, like the next three.
    top_p: see there.
    top_k: see there.
    seed: of the first completion; the others' follow it. None: any.
    stop: strings.
    stop_token_ids: tokens.
    ignore_eos: whether the end token doesn't end a completion.
    logprobs: how many of the likeliest tokens to report; None: not even the
      sampled one's log-probability.
    stream: whether to send tokens as they come.
    include_usage: whether a stream ends with the token counts.
    returns: names of the extension fields asked for.
    prompt_routes_from: the first position that `prompt_routes` is of.
  """

  model: str
  prompts: tuple[str | tuple[int, ...], ...] = ()
  messages: tuple[Message, ...] = ()
  tools: tuple[dict[str, Any], ...] = ()
  n: int = 1
  max_tokens: int | None = None
  temperature: float = 1.0
  top_p: float = 1.0
  top_k: int = 0
  seed: int | None = None
  stop: tuple[str, ...] = ()
  stop_token_ids: tuple[int, ...] = ()
  ignore_eos: bool = False
  logprobs: int | None = None
  stream: bool = False
  include_usage: bool = False
  returns: frozenset[str] = frozenset()
  prompt_routes_from: int = 0


def completion_call(body: Any) -> Call:
  """A request to `/v1/completions`.

  Raises:
    BadRequestError: it isn't one.
  """
  fields = _Fields(body)
  max_tokens = fields.integer("max_tokens", 16, least=1)
  prompt = fields.take("prompt", None)
  ids = fields.take("prompt_token_ids", None)
  if ids is None:
    prompts = _prompts(prompt)
  elif prompt in (None, "", []):
    prompts = (_ids(ids, "prompt_token_ids"),)
  else:
    raise BadRequestError(
      "prompt and prompt_token_ids are both given: leave one out.", "prompt"
    )
  call = Call(
    prompts=prompts,
    max_tokens=max_tokens,
    logprobs=fields.integer("logprobs", None, least=0),
    **_common(fields),
  )
  fields.finish()
  return call


def chat_call(body: Any) -> Call:
  """A request to `/v1/chat/completions`.

  Raises:
    BadRequestError: it isn't one.
  """
  fields = _Fields(body)
  max_tokens = fields.integer("max_tokens", None, least=1)
  max_tokens = fields.integer("max_completion_tokens", max_tokens, least=1)
  wants_logprobs = fields.boolean("logprobs", False)
  top_logprobs = fields.integer("top_logprobs", None, least=0)
  if top_logprobs is not None and not wants_logprobs:
    raise BadRequestError(
      "top_logprobs needs logprobs to be true.", "top_logprobs"
    )
  tools = _tools(fields.take("tools", []))
  match fields.take("tool_choice", "auto"):
    case "auto" | None:
      pass
    case "none":
      tools = ()
    case _:
      raise BadRequestError(
        "tool_choice must be 'auto' or 'none': this server can't force a call.",
        "tool_choice",
      )
  call = Call(
    messages=_messages(fields.take("messages")),
    tools=tools,
    max_tokens=max_tokens,
    logprobs=(top_logprobs or 0) if wants_logprobs else None,
    **_common(fields),
  )
  fields.finish()
  return call


def _common(fields: "_Fields") -> dict[str, Any]:
  stop = fields.take("stop", [])
  stop = [stop] if isinstance(stop, str) else stop
  if not isinstance(stop, list) or len(stop) > 16 or not all(stop):
    raise BadRequestError(
      "stop must be a string or a list of at most 16, none of them empty.",
      "stop",
    )
  options = fields.take("stream_options", {})
  if not isinstance(options, dict) or options.keys() - {
    "include_usage",
    "include_obfuscation",
  }:
    raise BadRequestError(
      "stream_options may have include_usage only.", "stream_options"
    )
  seed = fields.integer("seed", None)
  returns = frozenset(name for name in _RETURNS if fields.boolean(name, False))
  routes_from = fields.integer("prompt_routes_from", 0, least=0)
  if routes_from and "return_prompt_routes" not in returns:
    raise BadRequestError(
      "prompt_routes_from needs return_prompt_routes to be true.",
      "prompt_routes_from",
    )
  return {
    "model": _text(fields.take("model"), "model"),
    "n": fields.integer("n", 1, least=1),
    "temperature": fields.number("temperature", 1.0),
    "top_p": fields.number("top_p", 1.0),
    "top_k": max(0, fields.integer("top_k", 0, least=-1)),
    # OpenAI's seeds have 64 bits.
    "seed": None if seed is None else seed % 2**32,
    "stop": tuple(_text(s, "stop") for s in stop),
    "stop_token_ids": _ids(fields.take("stop_token_ids", []), "stop_token_ids"),
    "ignore_eos": fields.boolean("ignore_eos", False),
    "stream": fields.boolean("stream", False),
    "include_usage": bool(options.get("include_usage")),
    "returns": returns,
    "prompt_routes_from": routes_from,
  }


class _Fields:
  """The parameters of a request, taken one by one."""

  def __init__(self, body: Any):
    if not isinstance(body, dict):
      raise BadRequestError("The body must be a JSON object.")
    self._left = dict(body)
    self._known: set[str] = set()

  def take(self, name: str, default: Any = _MISSING) -> Any:
    self._known.add(name)
    value = self._left.pop(name, None)
    if value is None:
      if default is _MISSING:
        raise BadRequestError(f"{name} is missing.", name)
      return default
    return value

  def integer(
    self, name: str, default: Any, *, least: int | None = None
  ) -> Any:
    def valid(value):
      # Larger ones would only make long messages.
      fits = type(value) is int and abs(value) < 2**64
      return fits and (least is None or value >= least)

    bound = "" if least is None else f" of at least {least}"
    return self._checked(name, default, valid, f"an integer{bound}")

  def number(self, name: str, default: float) -> float:
    def valid(value):
      # Integers may be larger than `math.isfinite` can bear.
      largest = sys.float_info.max
      return type(value) in (int, float) and abs(value) <= largest

    return float(self._checked(name, default, valid, "a number"))

  def boolean(self, name: str, default: bool) -> bool:
    return self._checked(
      name, default, lambda value: type(value) is bool, "true or false"
    )

  def _checked(
    self, name: str, default: Any, valid: Callable[[Any], bool], kind: str
  ) -> Any:
    value = self.take(name, default)
    if value is not default and not valid(value):
      raise BadRequestError(f"{name}={value!r:.80} must be {kind}.", name)
    return value

  def finish(self) -> None:
    """Refuses what is left."""
    for name, value in self._left.items():
      neutral = _NEUTRAL.get(name, ())
      if value is None or value in neutral or name in _WITHOUT_EFFECT:
        continue
      if neutral:
        raise BadRequestError(
          f"This server has no {name}: leave it out, or set it to"
          f" {json.dumps(neutral[0])}.",
          name,
        )
      close = difflib.get_close_matches(name, self._known, n=1)
      hint = f" Did you mean {close[0]!r}?" if close else ""
      raise BadRequestError(f"There is no parameter {name!r:.80}.{hint}", name)


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
  if isinstance(prompt, str):
    return (_text(prompt, "prompt"),)
  if not isinstance(prompt, list) or not prompt:
    raise BadRequestError(
      "prompt must be a text, a list of token ids, or a list of either.",
      "prompt",
    )
  if type(prompt[0]) is int:
    return (_ids(prompt, "prompt"),)
  return tuple(
    _text(p, "prompt") if isinstance(p, str) else _ids(p, "prompt")
    for p in prompt
  )


def _ids(ids: Any, param: str) -> tuple[int, ...]:
  # Ids that don't exist are the engine's to refuse, but for those that no
  # array of ids can hold.
  if not isinstance(ids, list) or not all(
    type(i) is int and 0 <= i < 2**31 for i in ids
  ):
    raise BadRequestError(f"{param} must be a list of token ids.", param)
  return tuple(ids)


def _text(text: Any, param: str) -> str:
  if not isinstance(text, str):
    raise BadRequestError(f"{param} must be a text.", param)
  try:
    text.encode()
  except UnicodeEncodeError:
    raise BadRequestError(
      f"{param} has half of a surrogate pair, which no UTF-8 can say.", param
    ) from None
  return text


def _messages(messages: Any) -> tuple[Message, ...]:
  if not isinstance(messages, list) or not messages:
    raise BadRequestError(
      "messages must be a list of at least one message.", "messages"
    )
  return tuple(_message(m, f"messages[{i}]") for i, m in enumerate(messages))


def _message(message: Any, param: str) -> Message:
  if not isinstance(message, Mapping):
    raise BadRequestError(f"{param} must be an object.", param)
  role = message.get("role")
  role = "system" if role == "developer" else role
  if role not in ("system", "user", "assistant", "tool"):
    raise BadRequestError(
      f"{param} has role {role!r:.80}: it must be system, developer, user,"
      " assistant or tool.",
      param,
    )
  content = message.get("content")
  if isinstance(content, list):
    if not all(
      isinstance(p, dict) and p.get("type") == "text" for p in content
    ):
      raise BadRequestError(
        f"{param} has parts that aren't text: this model reads text only.",
        param,
      )
    content = "".join(_text(p.get("text"), param) for p in content)
  calls = message.get("tool_calls")
  calls = [] if calls is None else calls
  if not isinstance(calls, list):
    raise BadRequestError(f"{param} has tool_calls that aren't a list.", param)
  if content is None and not calls:
    raise BadRequestError(f"{param} has no content.", param)
  return Message(
    role=role,
    content=_text("" if content is None else content, param),
    tool_calls=tuple(_tool_call(call, param) for call in calls),
  )


def _tool_call(call: Any, param: str) -> ToolCall:
  try:
    function = call["function"]
    name = _text(function["name"], param)
    arguments = _text(function["arguments"], param)
    if not isinstance(json.loads(arguments), dict):
      raise ValueError("not an object")
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    if isinstance(error, BadRequestError):
      raise
    raise BadRequestError(
      f"{param} has a tool call that isn't"
      ' {"type": "function", "function": {"name": ..., "arguments": a JSON'
      " object as text}}.",
      param,
    ) from None
  return ToolCall(name, arguments)


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
  for tool in tools if isinstance(tools, list) else [None]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(
      function.get("name"), str
    ):
      raise BadRequestError(
        'tools must be a list of {"type": "function", "function": {"name": ...,'
        ' "parameters": a JSON schema}}.',
        "tools",
      )
    # Rendered as JSON, and so always text.
    _text(json.dumps(tool, ensure_ascii=False), "tools")
  return tuple(tools)
