"""Any ViT through torch.compile's own graph: where the kernels fit, the graph proves it."""
