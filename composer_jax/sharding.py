"""Mesh axes, and the one table from logical axes to mesh axes.

Everything that is sharded says so in logical names ("batch", "embed",
"experts"); only this file knows the mesh. Five mesh axes, any of them 1:

  data     replicas of the whole model; batch split over them.
  fsdp     batch split; parameters split too, gathered a layer at a time.
  expert   batch split; routed experts live here whole, dense parameters are
           split as over fsdp. So expert parallelism is decoupled: the same
           devices hold tokens and experts.
  context  reserved for splitting the sequence; must be 1 for now.
  tensor   heads, hidden units and vocabulary split; batch is not.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

MESH_AXES = ("data", "fsdp", "expert", "context", "tensor")

# Logical axis to mesh axes. A mesh axis is used once an array, by the first
# logical axis that asks for it: so an expert's weight gives `expert` to its
# experts, and its width is split over `fsdp` alone.
RULES: dict[str, tuple[str, ...]] = {
  # Activations.
  "batch": ("data", "fsdp", "expert"),
  "sequence": ("context",),
  # Parameters.
  "embed": ("fsdp", "expert"),
  "experts": ("expert",),
  "heads": ("tensor",),
  "kv_heads": ("tensor",),
  "kv_latent": ("fsdp", "expert"),
  "mlp": ("tensor",),
  "q_latent": ("fsdp", "expert"),
  "vocab": ("tensor",),
  # Never split.
  "gate_up": (),
  "head_dim": (),
  "layers": (),
  "router_experts": (),
}

BATCH_AXES = RULES["batch"]


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """Sizes of the mesh axes; at most one may be -1, "all the others"."""

  data: int = 1
  fsdp: int = -1
  expert: int = 1
  context: int = 1
  tensor: int = 1


# One NVL72 rack. A rack has 72 GPUs; 64 train, so that every axis is a power
# of two, and 8 are spares. Experts span the whole NVLink domain.
NVL72 = MeshConfig(fsdp=1, expert=64)


def nvl72_racks(racks: int) -> MeshConfig:
  """Several NVL72 racks: experts inside a rack, fsdp between racks.

  Only parameter gathers and gradient sums cross the slower network between
  racks; a token never does.
  """
  return dataclasses.replace(NVL72, fsdp=racks)


def make_mesh(
  config: MeshConfig, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Makes the mesh; its axes are `Auto`, so that XLA places what we don't.

  Args:
    config: sizes of the axes.
    devices: the devices to use; all by default.

  Raises:
    ValueError: if the sizes don't fit the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = dataclasses.asdict(config)
  named = " ".join(f"{name}={size}" for name, size in sizes.items())
  if sizes["context"] != 1:
    raise ValueError(
      f"Mesh axis context={config.context}, but splitting the sequence is not"
      " built yet: set context=1."
    )
  free = [name for name, size in sizes.items() if size == -1]
  if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
    raise ValueError(
      f"Mesh axes must be positive, and at most one of them -1; got {named}."
    )
  fixed = math.prod(size for size in sizes.values() if size != -1)
  if len(devices) % fixed or (not free and fixed != len(devices)):
    raise ValueError(
      f"Mesh {named} takes {fixed} devices, but there are {len(devices)}: "
      + (
        f"the product of the other axes must divide that number so that"
        f" {free[0]} can take the rest."
        if free
        else "the product of all axes must equal that number (-1 on one axis"
        " takes the rest)."
      )
    )
  if free:
    sizes[free[0]] = len(devices) // fixed
  return jax.make_mesh(
    tuple(sizes[name] for name in MESH_AXES),
    MESH_AXES,
    axis_types=(AxisType.Auto,) * len(MESH_AXES),
    devices=devices,
  )


def partition_spec(
  axes: Sequence[str | None],
  shape: Sequence[int],
  mesh_shape: dict[str, int],
  name: str = "array",
) -> PartitionSpec:
  """The partition of an array whose axes have the given logical names.

  Args:
    axes: a logical name (a key of `RULES`) or None for each axis.
    shape: the array's shape.
    mesh_shape: mesh axis name to size.
    name: what to call the array in an error.

  Raises:
    ValueError: if an axis can't be split evenly.
  """
  used: set[str] = set()
  entries = []
  for axis, size in zip(axes, shape, strict=True):
    mesh_axes = (
      tuple(m for m in RULES[axis] if m not in used and mesh_shape[m] > 1)
      if axis
      else ()
    )
    used.update(mesh_axes)
    parts = math.prod(mesh_shape[m] for m in mesh_axes)
    if size % parts:
      split = " x ".join(f"{m}={mesh_shape[m]}" for m in mesh_axes)
      raise ValueError(
        f"Axis '{axis}' of {name} has size {size}, which mesh axes {split}"
        f" can't split: their product, {parts}, must divide it."
      )
    entries.append(
      None
      if not mesh_axes
      else mesh_axes[0]
      if len(mesh_axes) == 1
      else mesh_axes
    )
  return PartitionSpec(*entries)


def named_sharding(
  mesh: Mesh,
  axes: Sequence[str | None],
  shape: Sequence[int],
  name: str = "array",
) -> NamedSharding:
  """`partition_spec` on a mesh."""
  return NamedSharding(
    mesh, partition_spec(axes, shape, dict(mesh.shape), name)
  )


def replicated(mesh: Mesh) -> NamedSharding:
  """A whole copy on every device."""
  return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: Mesh, batch_size: int) -> NamedSharding:
  """How `[batch, ...]` arrays are split.

  Raises:
    ValueError: if the batch can't be split evenly.
  """
  return named_sharding(mesh, ("batch",), (batch_size,), "the batch")


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Pins an intermediate's sharding; does nothing where no mesh is set."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  spec = partition_spec(axes, x.shape, dict(mesh.shape), "an activation")
  return jax.lax.with_sharding_constraint(x, spec)
