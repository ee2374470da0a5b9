"""The operations of a layer, by its spec: the only place that decides by the kind of a spec."""

from __future__ import annotations

from pagecore.cache.layers.operations import AttentionOps, CrossOps, LatentOps, LayerOps, StoredOps
from pagecore.cache.layers.rotated import RotatedOps
from pagecore.cache.layers.sealed import SealedOps
from pagecore.errors import UnsupportedOption
from pagecore.storage import AttentionSpec, CrossSpec, LatentSpec, Spec
from pagecore.storage.specs.attention_spec import sealing_of
from pagecore.storage.specs.rotation import is_rotated
from pagecore.storage.specs.spec import stores_key_and_value


def layer_ops(spec: Spec, device: str) -> LayerOps:
    """Return the operations of a spec on a device of `PagedKVCache`; with "none", their arrays are on the host.

    Raises
    ------
    UnsupportedOption
        A spec with a rotation that its planes do not have.
    """
    device = "cpu" if device == "none" else device
    ops = None if isinstance(spec, LatentSpec) else _attending(spec, device)
    if ops is not None:
        return RotatedOps(spec, ops) if is_rotated(spec) else ops
    if is_rotated(spec):
        raise UnsupportedOption(
            f"a {type(spec).__name__} has a key_rotation or value_rotation, which apply to the planes key and value, "
            f"and stores {', '.join(plane.name for plane in spec.planes)}; leave them out and rotate the rows by "
            "`hadamard`"
        )
    return LatentOps(spec, device) if isinstance(spec, LatentSpec) else StoredOps(spec)


def _attending(spec: Spec, device: str) -> AttentionOps | None:
    """Return the operations of a spec with keys and values, apart from rotations; None for other planes."""
    if isinstance(spec, CrossSpec):
        return CrossOps(spec, device)
    if isinstance(spec, AttentionSpec) and sealing_of(spec) is not None:
        return SealedOps(spec, device)
    return AttentionOps(spec, device) if stores_key_and_value(spec) else None
