"""Drawn faults (`mutate.py --random`) that no test can notice, each with the reason."""

SURVIVORS = {
    "bench/timer.py:CudaTimer.sample: True -> (False)": "a GPU's events: torch raises there",
    "swap/hosts/transformers_towers.py:GemmaAttention.fused_examples: torch.zeros(batch, tokens, 2, dtype=torch.long) -> (torch.zeros(batch, tokens, 2))": "an example of a call to try, as good as another: the host reads its shape",  # noqa: E501
    "swap/hosts/transformers_bias.py:OwnBias.fused_examples: 1 -> (2) #3": "an example of a call to try, as good as another",  # noqa: E501
    "swap/hosts/windows.py:HfSwinLayer.fused_examples: 2 -> (3)": "an example of a call to try, as good as another",  # noqa: E501
    "swap/hosts/transformers_padded.py:ClipAttention.fused_examples: torch.zeros(shown.shape, dtype=x.dtype).masked_fill_(~shown, LEAST) -> (~shown)": "one example less: test_other_masks_are_taken_as_they_are has such calls",  # noqa: E501
}
