import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from composer_jax.models.parameter import ParamSpec
from composer_jax.training import optimizer as optimizers
from composer_jax.training.optimizer import OptimizerConfig

SPECS = {
  "embedding": ParamSpec(("vocab", "embed")),
  "unembedding": ParamSpec(("embed", "vocab"), contract=("embed",)),
  "layers": {
    "norm": ParamSpec(("layers", "embed"), batch=("layers",)),
    "router": ParamSpec(
      ("layers", "embed", "experts"), ("embed",), ("layers",), float32=True
    ),
    "query": ParamSpec(
      ("layers", "embed", "heads", "head_dim"), ("embed",), ("layers",)
    ),
    "out": ParamSpec(
      ("layers", "heads", "head_dim", "embed"),
      ("heads", "head_dim"),
      ("layers",),
    ),
    "w_up": ParamSpec(
      ("layers", "experts", "embed", "gate_up", "mlp"),
      ("embed",),
      ("layers", "experts", "gate_up"),
    ),
  },
}
SIZES = {
  "vocab": 24,
  "embed": 16,
  "layers": 2,
  "experts": 4,
  "heads": 2,
  "head_dim": 6,
  "gate_up": 2,
  "mlp": 8,
}
# How to turn a stacked parameter into a list of matrices, said independently.
TO_MATRICES = {
  "query": lambda x: x.reshape(2, 16, 12),
  "out": lambda x: x.reshape(2, 12, 16),
  "w_up": lambda x: np.moveaxis(x, 3, 2).reshape(16, 16, 8),
}


def random_tree(seed: int, specs=SPECS):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda spec: jnp.asarray(
      rng.normal(size=[SIZES[axis] for axis in spec.axes]), jnp.float32
    ),
    specs,
  )


def constant_rate(**kwargs) -> OptimizerConfig:
  return OptimizerConfig(
    **{
      "schedule": "constant",
      "warmup_steps": 0,
      "learning_rate": 0.5,
      "clip_norm": 0.0,
      **kwargs,
    }
  )


def rates(num_steps: int, **kwargs) -> list[float]:
  schedule = optimizers.make_schedule(OptimizerConfig(**kwargs), num_steps)
  return [float(schedule(count)) for count in range(num_steps)]


def test_constant_schedule():
  actual = rates(5, schedule="constant", learning_rate=2.0, warmup_steps=2)
  np.testing.assert_allclose(actual, [1, 2, 2, 2, 2], rtol=1e-6)


def test_wsd_schedule_is_a_trapezium():
  actual = rates(
    10,
    schedule="wsd",
    learning_rate=4.0,
    warmup_steps=4,
    decay_fraction=0.3,
    final_fraction=0.25,
  )
  np.testing.assert_allclose(actual, [1, 2, 3, 4, 4, 4, 4, 3, 2, 1], rtol=1e-6)


def test_cosine_schedule():
  actual = rates(
    6,
    schedule="cosine",
    learning_rate=2.0,
    warmup_steps=2,
    final_fraction=0.5,
  )
  # Between peak 2 and floor 1, at a quarter, a half, ... of the way down.
  cosine = [1.5 + 0.5 * np.cos(np.pi * part) for part in (0.25, 0.5, 0.75, 1)]
  np.testing.assert_allclose(actual, [1, 2, *cosine], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "wsd"])
def test_no_warmup_and_steps_past_the_end(schedule):
  config = OptimizerConfig(
    schedule=schedule, learning_rate=1.0, warmup_steps=0, decay_fraction=0.5
  )
  rate_at = optimizers.make_schedule(config, 4)
  assert 0.8 < rate_at(0) <= 1.0
  assert rate_at(100) == rate_at(3)


@pytest.mark.parametrize(
  ("schedule", "warmup_steps"), [("constant", 11), ("cosine", 10), ("wsd", 9)]
)
def test_a_schedule_that_does_not_fit_is_refused(schedule, warmup_steps):
  config = OptimizerConfig(schedule=schedule, warmup_steps=warmup_steps)
  with pytest.raises(ValueError, match=r"warmup_steps=\d+ .* 10 steps"):
    optimizers.make_schedule(config, 10)


def test_adamw_matches_the_paper_and_decays_only_matrices():
  config = constant_rate(weight_decay=0.25)
  optimizer = optimizers.make_optimizer(config, SPECS, 10)
  params = random_tree(0)
  state = optimizer.init(params)
  m = v = jax.tree.map(np.zeros_like, params)
  for step in (1, 2, 3):
    grads = random_tree(step)
    updates, state = jax.jit(optimizer.update)(grads, state, params)
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * np.float64(g), m, grads)
    v = jax.tree.map(
      lambda v, g: 0.95 * v + 0.05 * np.float64(g) ** 2, v, grads
    )

  def expected(spec, p, m, v):
    direction = (m / (1 - 0.9**3)) / (np.sqrt(v / (1 - 0.95**3)) + 1e-8)
    return -0.5 * (direction + 0.25 * bool(spec.contract) * np.float64(p))

  jax.tree.map(
    lambda *args: np.testing.assert_allclose(
      args[0], expected(*args[1:]), rtol=2e-5, atol=1e-6
    ),
    updates,
    SPECS,
    params,
    m,
    v,
  )


def newton_schulz(x):
  """Five steps of Jordan's quintic in float64, straight from the post."""
  x = x / np.linalg.norm(x)
  for _ in range(5):
    gram = x @ x.T
    x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
  return x


def test_muon_orthogonalises_every_matrix_of_every_stack():
  config = constant_rate(name="muon", weight_decay=0.25)
  optimizer = optimizers.make_optimizer(config, SPECS, 10)
  params = random_tree(0)
  state = optimizer.init(params)
  history = [random_tree(step) for step in (1, 2)]
  for grads in history:
    updates, state = jax.jit(optimizer.update)(grads, state, params)

  for name, to_matrices in TO_MATRICES.items():
    first, second = (np.float64(grads["layers"][name]) for grads in history)
    # Nesterov momentum with the bias corrections of NAdam, after two steps.
    momentum = 0.95 * 0.05 * first + 0.05 * second
    nesterov = 0.95 * momentum / (1 - 0.95**3) + 0.05 * second / (1 - 0.95**2)
    param = np.float64(params["layers"][name])
    direction = np.float64(updates["layers"][name]) / -0.5 - 0.25 * param
    for actual, matrix in zip(
      to_matrices(direction), to_matrices(nesterov), strict=True
    ):
      scale = 0.2 * np.sqrt(max(matrix.shape))
      np.testing.assert_allclose(
        actual, scale * newton_schulz(matrix), rtol=1e-3, atol=1e-4
      )
      singular = np.linalg.svd(actual / scale, compute_uv=False)
      assert 0.5 < singular.min() <= singular.max() < 1.3, name


def test_muon_leaves_the_rest_to_adamw():
  config = constant_rate(name="muon", weight_decay=0.25)
  params, grads = random_tree(0), random_tree(1)
  updates = {}
  for name in ("adamw", "muon"):
    optimizer = optimizers.make_optimizer(
      dataclasses.replace(config, name=name), SPECS, 10
    )
    state = optimizer.init(params)
    updates[name], _ = jax.jit(optimizer.update)(grads, state, params)
  same = jax.tree.map(
    lambda a, b: bool(jnp.array_equal(a, b)), updates["adamw"], updates["muon"]
  )
  assert same == {
    "embedding": True,
    "unembedding": True,
    "layers": {
      "norm": True,
      "router": True,
      "query": False,
      "out": False,
      "w_up": False,
    },
  }


def test_a_stack_of_layers_is_updated_as_each_layer_alone():
  stacked_spec = SPECS["layers"]["w_up"]
  alone_spec = dataclasses.replace(
    stacked_spec, axes=stacked_spec.axes[1:], batch=stacked_spec.batch[1:]
  )
  assert alone_spec.stacked("layers") == stacked_spec
  params, grads = random_tree(0)["layers"], random_tree(1)["layers"]
  config = constant_rate(name="muon")

  def update(spec, grad, param):
    optimizer = optimizers.make_optimizer(config, {"w": spec}, 10)
    state = optimizer.init({"w": param})
    update = jax.jit(optimizer.update)
    return update({"w": grad}, state, {"w": param})[0]["w"]

  stacked = update(stacked_spec, grads["w_up"], params["w_up"])
  for layer in range(2):
    alone = update(alone_spec, grads["w_up"][layer], params["w_up"][layer])
    np.testing.assert_allclose(stacked[layer], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
def test_clipping_keeps_direction_and_reports_the_norm(clip_norm):
  optimizer = optimizers.make_optimizer(
    constant_rate(clip_norm=clip_norm), SPECS, 10
  )
  params, grads = random_tree(0), random_tree(1)
  _, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
  norm = np.sqrt(
    sum(np.sum(np.float64(g) ** 2) for g in jax.tree.leaves(grads))
  )
  np.testing.assert_allclose(optimizers.grad_norm(state), norm, rtol=1e-6)
  # The first moment is a tenth of the clipped gradient.
  factor = 0.5 / norm if clip_norm == 0.5 else 1.0
  jax.tree.map(
    lambda mu, g: np.testing.assert_allclose(mu, 0.1 * factor * g, rtol=1e-5),
    optax.tree.get(state, "mu"),
    grads,
  )


def test_zero_and_non_finite_gradients():
  optimizer = optimizers.make_optimizer(
    constant_rate(name="muon", clip_norm=1.0, weight_decay=0.0), SPECS, 10
  )
  params = random_tree(0)
  zeros = jax.tree.map(jnp.zeros_like, params)
  state, update = optimizer.init(params), jax.jit(optimizer.update)
  updates, _ = update(zeros, state, params)
  assert all(not jnp.any(u) for u in jax.tree.leaves(updates))
  poisoned = {**zeros, "embedding": zeros["embedding"].at[0, 0].set(jnp.nan)}
  _, state = update(poisoned, state, params)
  assert jnp.isnan(optimizers.grad_norm(state)), "a NaN must stay visible"


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_sharded_state_follows_the_parameters(name):
  mesh = jax.make_mesh(
    (2, 4), ("data", "expert"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  rules = {"experts": "expert", "embed": "data"}
  optimizer = optimizers.make_optimizer(constant_rate(name=name), SPECS, 10)
  params, grads = random_tree(0), random_tree(1)
  shardings = jax.tree.map(
    lambda spec: jax.NamedSharding(mesh, jax.P(*map(rules.get, spec.axes))),
    SPECS,
  )
  abstract = jax.tree.map(
    lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s),
    params,
    shardings,
  )
  abstract_state = optimizers.abstract_state(optimizer, abstract)
  state = jax.jit(
    optimizer.init,
    out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract_state),
  )(jax.device_put(params, shardings))
  moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
  assert moments
  assert not any(leaf.is_fully_replicated for leaf in moments)

  updates, _ = jax.jit(optimizer.update)(
    jax.device_put(grads, shardings), state, jax.device_put(params, shardings)
  )
  expected, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    updates,
    expected,
  )


def test_unknown_names_are_refused():
  config = OptimizerConfig()
  object.__setattr__(config, "name", "sgd")
  with pytest.raises(ValueError, match="'sgd', not one of 'adamw', 'muon'"):
    optimizers.make_optimizer(config, SPECS, 1000)
