"""The dtype of keys and values that a config asks for."""

from __future__ import annotations

from pagecore.arrays import DType, as_dtype
from pagecore.errors import UnsupportedDtype
from pagecore.models.fields import Fields, shown
from pagecore.storage.spec import CACHE_DTYPES

__all__ = ["stored_dtype"]


def stored_dtype(whole: Fields, text: Fields, dtype: object) -> DType:
    """Return `dtype`, or for "auto" that of the weights: of the text model, else of the whole model, else bfloat16.

    Older files call it torch_dtype.

    Raises
    ------
    ConfigError
        A config with both names and different dtypes.
    UnsupportedDtype
        A cache cannot have the dtype.
    """
    if not (isinstance(dtype, str) and dtype == "auto"):
        return as_dtype(dtype)
    for part in (text, whole):
        given = {name: part.given(name) for name in ("dtype", "torch_dtype") if part.given(name) is not None}
        if len({shown(value).replace("torch.", "", 1) for value in given.values()}) > 1:
            text.refuse(f"{part.describe('dtype')}, but {part.describe('torch_dtype')}; leave one of them out")
        for name, value in given.items():
            stripped = value.removeprefix("torch.") if isinstance(value, str) else ""
            if stripped not in CACHE_DTYPES:
                raise UnsupportedDtype(
                    f"{text.source}: {part.describe(name)}, which is not a dtype of a cache; "
                    f"pass dtype= one of {', '.join(CACHE_DTYPES)}"
                )
            return as_dtype(stripped)
    return as_dtype("bfloat16")
