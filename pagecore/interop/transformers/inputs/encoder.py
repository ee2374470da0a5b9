"""The output of an encoder in a forward pass: its tokens, and digests that identify the output of each row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.interop.transformers.inputs.arguments import Mask

_PREFIX = "encoder_"


@dataclass(frozen=True)
class EncoderOutput:
    """The encoder's side of a forward pass.

    Attributes
    ----------
    states : Tensor
        ``[batch, columns, dim]``, the encoder's hidden states.
    is_token : Mask
        ``[batch, columns]``: True for tokens, False for padding.
    """

    states: torch.Tensor
    is_token: Mask

    @property
    def columns(self) -> int:
        """Number of encoder columns, padding included."""
        return int(self.is_token.shape[1])

    @property
    def lengths(self) -> list[int]:
        """Number of encoder tokens of each row."""
        counts: list[int] = self.is_token.sum(axis=1).tolist()
        return counts

    def digests(self) -> list[bytes]:
        """Return a digest of the hidden states and the mask of each row; rows of one prompt have equal digests."""
        host = self.states.detach().cpu().contiguous()
        rows = host.view(torch.uint8).reshape(len(host), -1).numpy()
        return [
            hashlib.sha256(row.tobytes() + mask.tobytes()).digest()
            for row, mask in zip(rows, self.is_token, strict=True)
        ]


def read_encoder(given: Mapping[str, Any]) -> EncoderOutput:
    """Read the encoder's output from the arguments of a decoder's forward.

    Raises
    ------
    UnsupportedOption
        The pass has no encoder output, or a mask of other axes than ``[batch, columns]``.
    ShapeError, UnsupportedDtype
        A mask that does not fit the hidden states, or an encoder output without tokens.
    """
    states, mask = given.get("encoder_hidden_states"), given.get("encoder_attention_mask")
    if not isinstance(states, torch.Tensor) or states.ndim != 3:
        raise UnsupportedOption(
            "the forward pass of the decoder has no encoder_hidden_states [batch, columns, dim]; run the whole model, "
            "or pass them"
        )
    shape = tuple(states.shape[:2])
    if mask is None:
        is_token = np.ones(shape, np.bool_)
    elif not isinstance(mask, torch.Tensor):
        raise UnsupportedDtype(f"the encoder's attention_mask is a {type(mask).__name__}; it must be a torch tensor")
    elif tuple(mask.shape) != shape:
        raise ShapeError(f"the encoder's attention_mask has shape {tuple(mask.shape)}; it must be {shape}")
    else:
        is_token = mask.detach().cpu().numpy() != 0
    if not is_token.any(axis=1).all():
        raise ShapeError("a row of the encoder's attention_mask has no token; give each row at least one")
    return EncoderOutput(states, is_token)


def without_encoder(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a decoder's forward except those of the encoder."""
    return {name: value for name, value in given.items() if not name.startswith(_PREFIX)}
