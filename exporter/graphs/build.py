"""The four graphs of a bundle over one pair of models."""

from __future__ import annotations

from torch import nn

from exporter.graphs.attention import PLAIN_OPS, AttentionOps
from exporter.graphs.embed import embed_graph
from exporter.graphs.prefill import PrefillGraph
from exporter.graphs.query import QueryGraph
from exporter.models.decoder import Decoder
from exporter.models.decoder_encoder import SentenceEncoder
from runtime_py.manifest import GraphPlan


def build_graphs(
    decoder: Decoder, encoder: SentenceEncoder, plan: GraphPlan, ops: AttentionOps = PLAIN_OPS
) -> dict[str, nn.Module]:
    """Modules that share their weights, by name; ``ops`` are the operations in the form the target wants."""
    return {
        "prefill": PrefillGraph(decoder, plan, ops).eval(),
        "query": QueryGraph(decoder, plan, plan.query, ops).eval(),
        "decode": QueryGraph(decoder, plan, 1, ops).eval(),
        "embed": embed_graph(encoder, plan.embed_length, ops).eval(),
    }
