"""Windows of DFlash drafts, whose configs describe them in `dflash_config`.

Source: the drafts that vLLM builds.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.layer_types import SLIDING

__all__ = ["with_draft_windows"]


def with_draft_windows(whole: Fields, fields: Fields) -> Fields:
    """Return the fields of a model; those of a DFlash draft with its windows in the fields that every family reads.

    `use_swa` gives each layer a window, unless `layer_types` lists layers with one, and `swa_window_size` takes the
    place of `sliding_window`.

    Raises
    ------
    ConfigError
        A window that is not an integer of at least 1, or `use_swa` without one.
    """
    if not isinstance(whole.given("dflash_config"), Mapping):
        return fields
    options = whole.inner("dflash_config")
    listed = fields.given("layer_types")
    slides = isinstance(listed, list | tuple) and SLIDING in listed
    is_forced = options.switch("use_swa", False) and not slides
    if not (is_forced or slides) or (slides and options.given("swa_window_size") is None):
        return fields
    size = options.given("swa_window_size")
    window = fields.given("sliding_window") if size is None else options.integer("swa_window_size")
    if window is None:
        fields.refuse(f"{options.describe('use_swa')}, but {options.name('swa_window_size')} is missing; add it")
    kinds = {"layer_types": [SLIDING] * fields.integer("num_hidden_layers")} if is_forced else {}
    return fields.replaced(sliding_window=window, use_sliding_window=True, **kinds)
