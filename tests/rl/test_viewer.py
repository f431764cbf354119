"""The viewer: everything is there, in its place, and nothing in it runs."""

import html.parser
import re

import numpy as np
import pytest

from composer_jax.rl import viewer
from composer_jax.rl.trajectory import Group, Sampling, Trajectory
from tests.rl.rollout_rig import DIALECT, TOKENIZER, call, spell

SPELLINGS = TOKENIZER.spellings
HOSTILE = (
  "</pre></span><script>alert(1)</script><img src=x onerror=alert(1)>"
  "\"'><svg onload=alert(1)><style>*{}</style>&lt;b&gt;<!--"
)
CONTROLS = "\x1b[2J\x1b]0;owned\x07 \u202etxt.exe\u2066 \r\b\x00 \u2028"


def trajectory(prompt="Do it.", replies=("ok",), seen=(), **changes):
  """Prompt, replies and observations in turn; a version a reply."""
  ids, sampled, versions = [], [], []

  def add(text, version=-1):
    new = spell(text)
    ids.extend(new)
    sampled.extend([version >= 0] * len(new))
    versions.extend([version] * len(new))

  add(prompt)
  for turn, reply in enumerate(replies):
    add(reply, 10 + turn)
    if turn < len(seen):
      add(seen[turn])
  sampled = np.array(sampled)
  fields = {
    "token_ids": np.array(ids, np.int32),
    "loss_mask": sampled,
    "logprobs": np.where(sampled, -0.3, 0).astype(np.float32),
    "versions": np.array(versions, np.int32),
    "routes": None,
    "sampling": Sampling(),
    "rewards": {"tests": 1.0, "style": -0.25},
    "task_id": "a task",
    "stop_reason": "finish",
  }
  return Trajectory(**fields | changes)


class Page(html.parser.HTMLParser):
  """What a page holds: tags, attributes, and text by the tags around it."""

  def __init__(self, text):
    super().__init__(convert_charrefs=True)
    self.tags, self.attributes, self.texts, self.open = set(), [], [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    self.attributes += [(tag, name, value) for name, value in attrs]
    if tag != "meta":
      self.open.append((tag, dict(attrs).get("class")))

  def handle_endtag(self, tag):
    assert self.open.pop()[0] == tag, tag

  def handle_data(self, data):
    self.texts.append((tuple(self.open), data))

  def handle_comment(self, data):
    raise AssertionError(data)

  def text(self, tag, kind=None):
    return [t for o, t in self.texts if o and o[-1] == (tag, kind)]

  def tokens(self):
    """Texts of the replies' tokens."""
    return [
      text
      for around, text in self.texts
      if around and around[-1][0] == "span" and ("pre", None) in around
    ]


TAGS = {
  *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p"),
  *("section", "table", "tr", "th", "td", "details", "summary", "div", "pre"),
  *("span", "b"),
}


def test_nothing_in_a_page_runs():
  shown = trajectory(
    prompt=HOSTILE,
    replies=(HOSTILE + call("run_command", command=HOSTILE), HOSTILE),
    seen=(HOSTILE,),
    task_id=HOSTILE,
    stop_reason=HOSTILE,
    rewards={HOSTILE: 1.0},
  )
  text = viewer.to_html([shown, shown], SPELLINGS, DIALECT, title=HOSTILE)
  page = Page(text)
  assert page.open == []
  assert page.tags == TAGS
  for tag, name, value in page.attributes:
    assert name in ("charset", "class", "content", "http-equiv", "lang") or (
      (tag, name) in (("span", "title"), ("details", "open"))
    ), (tag, name)
    assert "alert" not in (value or "")
  policy = [v for _, name, v in page.attributes if name == "content"]
  assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
  assert len(page.text("style")) == 1
  # And all of it can be read.
  for tag in ("title", "h1", "td"):
    assert HOSTILE in page.text(tag)
  prompt, observation = page.text("pre")[0], page.text("pre")[2]
  assert HOSTILE in prompt and HOSTILE in observation


def test_what_a_terminal_would_obey_is_escaped():
  shown = trajectory(
    prompt=CONTROLS,
    replies=(CONTROLS,),
    task_id=CONTROLS + "\nreward: 9",
    rewards={CONTROLS: 0.0},
    stop_reason="\ud800",
  )
  text = viewer.to_text(shown, SPELLINGS, DIALECT)
  page = viewer.to_html([shown], SPELLINGS, DIALECT, CONTROLS)
  for made in (text, page):
    made.encode()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", made)
    assert not re.search("[\u2028\u2029\u2066-\u2069]", made)
  assert r"\x1b[2J\x1b]0;owned\x07 \u202etxt.exe\u2066 \r\x08\x00" in text
  assert "reward: 9" not in text.splitlines()
  assert viewer.visible("a\tb\nc \u00e9\u4e2d\U0001f600") == (
    "a\tb\nc \u00e9\u4e2d\U0001f600"
  )


def test_no_content_passes_for_a_heading():
  forged = "x\nreply, tokens 1 to 2, mean log-probability 0\nreward: 5"
  shown = trajectory(prompt=forged, replies=(forged,))
  lines = viewer.to_text(shown, SPELLINGS).splitlines()
  assert [li for li in lines if li.startswith("reward")] == ["reward: 0.75"]
  assert len([li for li in lines if li.startswith("reply")]) == 1


def test_every_part_is_shown_in_order():
  said = "Let me see. " + call("read_file", path="a<b.py")
  shown = trajectory("The <task>.", (said, "Done."), ("x = 1 & 2",))
  page = Page(viewer.to_html([shown], SPELLINGS, DIALECT, "T"))
  end = "<|im_end|>"
  plain = [t.removeprefix("\n") for t in page.text("pre")]
  assert [t for t in plain if t] == ["The <task>." + end, "x = 1 & 2" + end]
  assert page.text("pre", "call") == ['\nread_file {"path": "a<b.py"}']
  headings = [
    text.split(",")[0]
    for around, text in page.texts
    if around and around[-1][0] in ("summary", "h3")
  ]
  assert headings == ["prompt", "reply", "observation", "reply"]
  spans = page.tokens()
  assert "".join(spans) == said + end + "Done." + end
  assert page.text("b", "v") == ["v10", "v11"]
  facts = dict(zip(page.text("th"), page.text("td"), strict=True))
  assert facts["reward"] == "0.75"
  assert (facts["  tests"], facts["  style"]) == ("1", "-0.25")
  assert facts["stop reason"] == "finish"
  assert facts["versions"] == "10 to 11, changes: 1"
  text = viewer.to_text(shown, SPELLINGS, DIALECT)
  for piece in (
    "[v10]Let me see.",
    "[v11]Done.",
    "  | x = 1 & 2",
    "  tests: 1",
    'calls read_file {"path": "a<b.py"}',
  ):
    assert piece in text


def test_tokens_are_shaded_and_named():
  shown = trajectory(replies=("abcdef",))
  start = int(np.flatnonzero(shown.loss_mask)[0])
  logprobs = np.zeros(len(shown), np.float32)
  logprobs[start : start + 7] = [0, -0.2, -0.7, -1.5, -3, -50, 0]
  versions = shown.versions.copy()
  versions[start + 3 :] = np.where(shown.loss_mask[start + 3 :], 12, -1)
  shown = trajectory(replies=("abcdef",), logprobs=logprobs, versions=versions)
  text = viewer.to_html([shown], SPELLINGS)
  found = re.findall(r'<span class="s(\d)" title="([^"]*)">(.*?)</span>', text)
  assert [shade for shade, _, _ in found] == list("0123450")
  assert [letter for _, _, letter in found][:6] == list("abcdef")
  token = shown.token_ids[start + 3]
  assert found[3][1] == f"{start + 3}: token {token}, -1.5, v12"
  # The version changes before d.
  assert re.search(r'>c</span><b class="v">v12</b><span [^>]*>d</span>', text)
  assert len(re.findall('class="v"', text)) == 2


def test_characters_of_several_tokens_are_whole():
  shown = trajectory(prompt="\u00e9\u4e2d", replies=("a\U0001f600b\u00e9",))
  page = Page(viewer.to_html([shown], SPELLINGS))
  end = "<|im_end|>"
  spans = page.tokens()
  assert "".join(spans) == "a\U0001f600b\u00e9" + end
  assert page.text("pre")[0] == "\n\u00e9\u4e2d" + end
  # Cut within a character.
  cut = shown.token_ids[:-2].copy()
  fields = {
    name: getattr(shown, name)[:-2] for name in ("logprobs", "versions")
  }
  cut = trajectory(token_ids=cut, loss_mask=shown.loss_mask[:-2], **fields)
  assert viewer.to_text(cut, SPELLINGS).endswith("a\U0001f600b\ufffd\n")


def test_each_window_begins_with_a_prompt():
  shown = trajectory("one", ("two",), ("three",))
  middle = int(np.flatnonzero(shown.loss_mask)[-1]) + 1
  chain = trajectory("one", ("two",), ("three",), segments=(0, middle))
  kinds = [part.kind for part in viewer.parts(shown, SPELLINGS)]
  assert kinds == ["prompt", "reply", "observation"]
  kinds = [part.kind for part in viewer.parts(chain, SPELLINGS)]
  assert kinds == ["prompt", "reply", "prompt"]


def test_from_the_command_line(tmp_path, capsys):
  Group("a task", (trajectory(),), {"sandbox": 2}).save(tmp_path / "group.npz")
  TOKENIZER.save(tmp_path / "tokenizer.json")
  arguments = [
    str(tmp_path / "group.npz"),
    f"--tokenizer={tmp_path / 'tokenizer.json'}",
  ]
  viewer.main([*arguments, f"--html={tmp_path / 'page.html'}"])
  page = (tmp_path / "page.html").read_text()
  assert "<title>Task a task (failed: 2 by sandbox)</title>" in page
  viewer.main(arguments)
  out = capsys.readouterr().out
  assert out.startswith("Task a task (failed: 2 by sandbox)\n")
  assert "task: a task\nreward: 0.75" in out
  with pytest.raises(SystemExit, match="holds no group of trajectories"):
    viewer.main([str(tmp_path / "page.html"), arguments[1]])
