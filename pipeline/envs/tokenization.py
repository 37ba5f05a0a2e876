"""Former path of `penstock.pipeline.data.tokenization`."""

from penstock.pipeline.data.tokenization import Decoder, Renderer, digests

__all__ = ["Decoder", "Renderer", "digests"]
