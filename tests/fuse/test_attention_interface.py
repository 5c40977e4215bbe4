"""attn_implementation="fastvit" of transformers, and towers of packed images in one call."""

from __future__ import annotations

import copy

import pytest
import torch
from swapped import assert_same, assert_same_step
from torch import nn

from fastvit_kernels import backend, register_attention, status, swap_in
from fastvit_kernels.fuse.attention_interface import fastvit_attention, packed_attention
from fastvit_kernels.runtime.configs import recording
from tests.model_coverage.compare import randomize
from tests.model_coverage.model_zoo import hf_small

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.mark.parametrize("name", ["vit", "clip"])
def test_a_model_by_our_attention(name):
    register_attention()
    register_attention()
    torch.manual_seed(0)
    model, inputs = hf_small(name, attn_implementation="fastvit")
    randomize(model).eval()
    wanted = copy.deepcopy(model)
    wanted.set_attn_implementation("sdpa")
    with backend("triton"), recording() as choices, torch.no_grad():
        found = model(**inputs).last_hidden_state
    assert_same(found, wanted(**inputs).last_hidden_state)
    assert {choice.table for choice in choices} == {"attention_fwd"}


def test_masks_groups_and_causality_are_transformers_own():
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    class Module(nn.Module):
        num_key_value_groups, is_causal = 1, False

    module, grouped, causal = Module(), Module(), Module()
    grouped.num_key_value_groups, causal.is_causal = 2, True
    q, k, v = torch.randn(3, 2, 4, 6, 16).unbind(0)
    mask = torch.rand(2, 1, 6, 6) > 0.3
    for args, kwargs in (
        ((nn.Module(), q, k, v, None), {}),  # which says nothing: causal
        ((module, q, k, v, None), {"scaling": 0.3}),
        ((module, q, k, v, mask), {}),
        ((module, q, k, v, None), {"is_causal": True}),
        ((causal, q, k, v, None), {}),
        ((grouped, q, k[:, :2], v[:, :2], None), {}),
        ((module, q, k[:, :, :4], v[:, :, :4], None), {}),
    ):
        for function in (fastvit_attention, packed_attention):
            out, probabilities = function(*args, **kwargs)
            assert probabilities is None
            assert_same(out, sdpa_attention_forward(*args, **kwargs)[0])
    with pytest.raises(ValueError, match="attention sinks"):
        fastvit_attention(module, q, q, q, None, s_aux=torch.zeros(2))
    with pytest.raises(ValueError, match="packed images take no mask"):
        packed_attention(module, q, q, q, mask, cu_seq_lens_q=torch.tensor([0, 6]))


def qwen():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    torch.manual_seed(0)
    config = Qwen2VLVisionConfig(
        depth=2, embed_dim=64, hidden_size=64, num_heads=2, patch_size=4, mlp_ratio=2
    )
    model = Qwen2VisionTransformerPretrainedModel._from_config(config, attn_implementation="sdpa")
    return randomize(model)


def patches_of(grids):
    thw = torch.tensor(grids)
    return torch.randn(int(thw.prod(1).sum()), 3 * 2 * 16), thw


def test_packed_towers_are_a_graph_a_block_for_all_sizes():
    host = qwen()
    model = copy.deepcopy(host)
    register_attention(model)
    assert host.config._attn_implementation == "sdpa"
    sizes = [[1, 4, 4], [1, 4, 8]], [[1, 8, 4], [1, 4, 4], [1, 2, 2]], [[2, 4, 4]], [[1, 8, 8]] * 4
    assert_same_step(model, host, *patches_of(sizes[0]))
    swap_in(model, regional=True)
    made = []
    for grids in sizes:
        assert_same_step(model, host, *patches_of(grids))
        made.append(len(status(model).graphs_made))
    found = status(model)
    assert not found.graph_breaks
    assert made[-1] == made[-2] <= 3 * 2  # Dynamo learns that sizes and the longest image vary
    assert found.share > 0.8, str(found)
