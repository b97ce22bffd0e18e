"""The decoder computes what transformers' Llama computes, on the whole real model and on real text."""

from __future__ import annotations

import pytest
import torch

from exporter.checkpoints.gguf_file import GGUFCheckpoint
from exporter.models.decoder import Decoder, checkpoint_names, load_decoder
from exporter.models.dense import dense_logits, dense_pass


def transformers_logits(checkpoint: GGUFCheckpoint, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of transformers' eager fp32 model, its tensors read from the same GGUF file by transformers' own reader."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    found = load_gguf_checkpoint(str(checkpoint.path))["config"]
    named = {k: v for k, v in found.items() if k not in ("model_type", "_model_name_or_path")}
    config = LlamaConfig(**named, attn_implementation="eager")
    with torch.device("meta"):  # from_pretrained(gguf_file=...) would do this, but insists on another library
        model = LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(checkpoint.path), return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(tokens[None]).logits[0]
    return logits


def test_all_30_layers_give_transformers_logits_on_real_text(smollm: GGUFCheckpoint, story_ids: list[int]) -> None:
    tokens = torch.tensor(story_ids[:200])
    ours = dense_logits(load_decoder(smollm.config, smollm.tensor), tokens)
    expected = transformers_logits(smollm, tokens)
    assert expected.abs().max() > 30
    # Measured: 7.5e-5; each of the two is as far from float64 (6.9e-5 and 8.3e-5).
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4)


def test_loaded_weights_are_tied_frozen_and_read_once(smollm: GGUFCheckpoint) -> None:
    import dataclasses

    config = dataclasses.replace(smollm.config, n_layers=1)
    read: list[str] = []

    def tensor(name: str) -> torch.Tensor:
        read.append(name)
        return smollm.tensor(name)

    decoder = load_decoder(config, tensor)
    assert decoder.head.weight is decoder.embedding.weight
    assert not any(p.requires_grad or p.is_meta for p in decoder.parameters())
    assert sorted(read) == sorted(checkpoint_names(config).values()) and len(read) == len(set(read)) == 11


@pytest.mark.parametrize("rows", [1, 2, 50])
def test_dense_pass_is_causal_and_an_explicit_causal_mask_changes_nothing(tiny_decoder: Decoder, rows: int) -> None:
    tokens = torch.randint(0, 97, (50,), generator=torch.Generator().manual_seed(1))
    whole, part = dense_pass(tiny_decoder, tokens), dense_pass(tiny_decoder, tokens[:rows])
    torch.testing.assert_close(part.hidden, whole.hidden[:rows], rtol=0, atol=1e-4)
    allowed = torch.ones(50, 50, dtype=torch.bool).tril()
    torch.testing.assert_close(dense_pass(tiny_decoder, tokens, allowed).hidden, whole.hidden, rtol=0, atol=1e-4)
    assert [tuple(k.shape) for k in whole.keys + whole.values] == [(2, 50, 8)] * 6
