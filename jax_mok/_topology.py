"""Where a call runs: the mesh it finds, which of its axes are already manual, who holds what.

`moe` may be called under plain jit (it then wraps itself in `shard_map`), inside the caller's own
`shard_map`, or with no mesh at all; this file tells the three apart, at trace time.
"""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AxisNames = tuple[str, ...]


def axis_names(name: str, value: Any) -> AxisNames:
    """`value` (a name, a tuple of names, or None) as a tuple of names."""
    if value is None:
        return ()
    names = tuple(value) if isinstance(value, tuple | list) else (value,)
    if not all(isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise ValueError(
            f"{name} must be a mesh axis name, a tuple of distinct names, or None, got {value!r}."
        )
    return names


@dataclasses.dataclass(frozen=True)
class Topology:
    """The mesh of one call.

    Attributes:
      mesh: `Mesh` or `AbstractMesh`, or None for a single device.
      expert_axes: names of the axes over which the experts are sharded.
      manual_axes: axes that are manual where `moe` was called (the caller's shard_map).
      own_axes: axes that `moe` itself has to make manual.
    """

    mesh: Any
    expert_axes: AxisNames
    manual_axes: AxisNames
    own_axes: AxisNames

    def size(self, axes: AxisNames) -> int:
        return math.prod(self.mesh.shape[a] for a in axes) if self.mesh is not None else 1

    @property
    def num_ranks(self) -> int:
        """Ranks over which the experts are sharded."""
        return self.size(self.expert_axes)

    @property
    def all_axes(self) -> AxisNames:
        return () if self.mesh is None else tuple(self.mesh.axis_names)

    @property
    def explicit(self) -> bool:
        """Whether the mesh has axes whose sharding is part of the types."""
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types

    @property
    def auto_axes(self) -> AxisNames:
        """Axes whose sharding is left to the compiler."""
        types = self.mesh.axis_types if self.mesh is not None else ()
        return tuple(a for a, t in zip(self.all_axes, types) if t == AxisType.Auto)

    @property
    def platform(self) -> str:
        """Platform of the devices: "cpu", "gpu", …"""
        concrete = concrete_mesh(self.mesh)
        if concrete is not None:
            return concrete.devices.flat[0].platform
        device = getattr(self.mesh, "abstract_device", None)
        return getattr(device, "platform", None) or jax.default_backend()

    def experts_in_one_process(self) -> bool | None:
        """Whether every group of expert ranks lies in one process; None = cannot be told."""
        if jax.process_count() == 1 or self.num_ranks == 1:
            return True
        concrete = concrete_mesh(self.mesh)
        if concrete is None:
            return None
        process = [device.process_index for device in concrete.devices.flat]
        return all(len({process[i] for i in group}) == 1 for group in self.groups())

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups of expert ranks of the mesh, each in the order of its ranks; () for one.

        Devices are named by their place in the mesh, which is XLA's number for them in the program.
        """
        if self.num_ranks == 1:
            return ()
        axes, shape = list(self.all_axes), self.mesh.shape
        places = np.arange(self.size(self.all_axes)).reshape([shape[a] for a in axes])
        expert = [axes.index(a) for a in self.expert_axes]
        others = [i for i in range(len(axes)) if i not in expert]
        rows = places.transpose(others + expert).reshape(-1, self.num_ranks)
        return tuple(tuple(int(i) for i in row) for row in rows)


def concrete_mesh(mesh: Any) -> Mesh | None:
    """The mesh with devices behind `mesh`, where it or the surrounding context has one."""
    if isinstance(mesh, Mesh):
        return mesh
    try:
        ambient = jax.sharding.get_mesh()
    except ValueError:  # inside jit: get_mesh may only be asked for outside
        return None
    return ambient if not ambient.empty and mesh in (None, ambient.abstract_mesh) else None


def _mesh_of_arrays(arrays) -> Any:
    """The mesh on which the arguments are laid out: JAX keeps it in their types, under jit too."""
    for array in arrays:
        mesh = jax.typeof(array).sharding.mesh
        if not mesh.empty:
            return mesh
    return None


def _legacy_context_mesh() -> Mesh | None:
    """The mesh of `with mesh:`, which older model code still uses in place of `jax.set_mesh`."""
    try:
        from jax._src.mesh import thread_resources
    except ImportError:
        return None
    mesh = thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def _spmd_vmap_axes() -> frozenset[str]:
    """Mesh axes that a surrounding `jax.vmap(spmd_axis_name=...)` takes for its batch dim."""
    try:
        from jax._src.core import get_axis_env

        return frozenset(get_axis_env().spmd_axis_names)
    except (ImportError, AttributeError):  # then the words will be JAX's own
        return frozenset()


def find(mesh: Any, expert_axis: Any, arrays) -> Topology:
    """The topology of a call with arguments `arrays`; raises `ValueError` if it makes no sense."""
    expert_axes = axis_names("expert_axis", expert_axis)
    ambient = jax.sharding.get_abstract_mesh()
    manual = tuple(getattr(ambient, "manual_axes", ())) if not ambient.empty else ()
    if manual:
        # Inside a shard_map: its mesh is the one that counts; an argument can only repeat it.
        if mesh is not None and dict(mesh.shape) != dict(ambient.shape):
            raise ValueError(
                f"mesh has axes {dict(mesh.shape)}, but the surrounding shard_map runs over "
                f"{dict(ambient.shape)}: leave mesh out there."
            )
        mesh = ambient
    elif mesh is None:
        mesh = ambient if not ambient.empty else _mesh_of_arrays(arrays) or _legacy_context_mesh()
    if mesh is None:
        return Topology(None, (), (), ())
    missing = [a for a in expert_axes if a not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"expert_axis {expert_axis!r} is not an axis of the mesh {dict(mesh.shape)}. Name the "
            "axis over which the experts are sharded, or pass expert_axis=None if every device "
            "holds all of them."
        )
    partly = [a for a in expert_axes if a in manual]
    if partly and len(partly) != len(expert_axes):
        raise ValueError(
            f"expert_axis {expert_axis!r}: the surrounding shard_map makes only {partly} manual; "
            "all of its axes must be, or none."
        )
    own = tuple(a for a in mesh.axis_names if a not in manual)
    taken = [a for a in own if a in _spmd_vmap_axes()]
    if taken:
        raise ValueError(
            f"jax_mok.moe cannot be in a jax.vmap(spmd_axis_name={taken[0]!r}): it shards its "
            "tokens over the mesh itself. Put the batch dims into the leading dims of x, or leave "
            "spmd_axis_name out."
        )
    return Topology(mesh, expert_axes, manual, own)
