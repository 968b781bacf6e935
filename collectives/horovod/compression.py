"""Compressors of gradients on the wire.  A user-defined one has the same two methods."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class NoneCompressor:
    """No compression."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send, and the context that `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor


class FP16Compressor:
    """Compression of floats to 16 bits; they are summed in float32."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor.to(context)


class Compression:
    """The compressors."""

    none = NoneCompressor
    fp16 = FP16Compressor
