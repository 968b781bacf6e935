"""What gradients are sent as.  A compressor of one's own has the same two methods."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class NoneCompressor:
    """Sends them as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent, and what `decompress` needs besides."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: Any) -> Tensor:
        return tensor


class FP16Compressor:
    """Sends floats in 16 bits; they are summed up in float32."""

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
