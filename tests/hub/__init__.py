"""The repository that the Hub's `kernels` library loads: docs/hub.md."""
